"""A short round of `tests.torture`, and that each of its checks can fail."""

from __future__ import annotations

import unittest
from itertools import pairwise
from typing import Any

from tests.support import TempDirTestCase
from tests.torture import UNBORN, Round
from tests.torture_check import Call, Event, History, JobRow, Move, read_calls

SEED = 4
SECONDS = 2.5


class RoundTest(TempDirTestCase):
    """Real processes, killed, stopped and continued."""

    def test_nothing_is_lost_and_nobody_left(self) -> None:
        torture = Round(self.dir, SEED)
        faults = torture.run(SECONDS)
        self.assertEqual(faults[:5], [], f"the first of {len(faults)}; seed {SEED}")
        self.assertGreater(torture.blows, 3)
        self.assertGreater(torture.jobs, 10)


def moves(job: str, *statuses: str) -> list[Move]:
    """Return the moves of a job through some statuses, each claim with a token of its own."""
    return [Move(job, old, new, f"{job}-{place}" if new == "running" else None)
            for place, (old, new) in enumerate(pairwise(statuses))]


def history(**changes: Any) -> History:
    """Return a history without fault, but for the changes.

    `a` succeeds, `b` after it at its second attempt, `c` fails, and `d` is blocked by it; `e` has a key;
    the call for `f` was not answered, as `q` was killed.
    """
    jobs = [JobRow("a", "a", None, "completed", 1, 3, 0), JobRow("b", "b", None, "completed", 2, 3, 0),
            JobRow("c", "c", None, "failed", 1, 1, 0), JobRow("d", "d", None, "pending", 0, 3, 1),
            JobRow("e", "e", "key", "completed", 1, 3, 0), JobRow("f", "f", None, "completed", 1, 3, 0)]
    once = ("pending", "running", "completed")
    whole = History(
        calls=[Call("p", ("a", "b"), None, ("a", "b"), False), Call("p", ("c", "d"), None, ("c", "d"), False),
               Call("p", ("e",), "key", ("e",), False), Call("p", ("e2",), "key", ("e",), False),
               Call("p", ("g",), None, None, True), Call("q", ("f",), None, None, False)],
        killed={"q"},
        events=[Event(*event) for event in (
            ("start", "a", 1), ("end", "a", 1), ("start", "b", 1), ("start", "c", 1), ("start", "b", 2),
            ("end", "b", 2), ("start", "e", 1), ("end", "e", 1), ("start", "f", 1), ("end", "f", 1))],
        jobs={job.id: job for job in jobs},
        edges=[("b", "a"), ("d", "c")],
        moves=[*moves("a", *once), *moves("b", "pending", "running", "retrying", "running", "completed"),
               *moves("c", "pending", "running", "failed"), *moves("e", *once), *moves("f", *once)],
    )  # fmt: skip
    return whole._replace(**changes)


class CheckTest(TempDirTestCase):
    """Each check sees what it is for."""

    whole = history()

    def job(self, id: str, **fields: Any) -> dict[str, JobRow]:
        """Return the jobs, one of them changed."""
        return {**self.whole.jobs, id: self.whole.jobs[id]._replace(**fields)}

    def without(self, id: str) -> dict[str, JobRow]:
        """Return the jobs but for one."""
        return {other: job for other, job in self.whole.jobs.items() if other != id}

    def test_a_history_without_fault(self) -> None:
        self.assertEqual(self.whole.faults(), [])
        self.assertEqual(history(jobs=self.without("f"), moves=self.whole.moves[:-2],
                                 events=self.whole.events[:-2]).faults(), [])
        given_back = moves("a", "pending", "running", "pending", "running", "completed")
        self.assertEqual(history(moves=[*given_back, *self.whole.moves[2:]]).faults(), [])

    def test_each_fault_is_found(self) -> None:
        calls, events, moved = self.whole.calls, self.whole.events, self.whole.moves
        stranger = JobRow("z", "z", None, "completed", 1, 3, 0)
        cases: dict[str, dict[str, Any]] = {
            "acknowledged to p and is missing": {"jobs": self.without("a"), "edges": []},
            "acknowledged to p as a, key None, but is": {"jobs": self.job("a", tag="other")},
            "as e, key key, but is": {"jobs": self.job("e", key=None)},
            "answered with 1 ids": {"calls": [calls[0]._replace(ids=("a",)), *calls[1:]]},
            "nobody stored it": {"jobs": {**self.whole.jobs, "z": stranger}},
            "was told that the file is busy": {"calls": [*calls[:5], calls[5]._replace(busy=True)]},
            "was not answered, though q was not killed": {"killed": set()},
            "was not answered, though p was not killed": {"calls": [calls[0]._replace(ids=None), *calls[1:]]},
            r"of its batch: \[1, 0\]": {"calls": [*calls[:5], calls[5]._replace(tags=("f", "f2"))]},
            "is in the file 2 times": {"jobs": {**self.whole.jobs, "z": stranger._replace(tag="f")}},
            "status='running', .* has not ended": {"jobs": self.job("c", status="running")},
            "status='pending', .* has not ended": {"edges": [("b", "a")]},
            "with 1 dependencies unmet": {"jobs": self.job("b", unmet=1)},
            "attempt 1 of job b was started 2 times": {"events": [*events, Event("start", "b", 1)]},
            "job c was started 2 times, and 1 are allowed": {"events": [*events, Event("start", "c", 2)]},
            "id='c'.* was started 2 times": {"events": [*events, Event("start", "c", 2)]},
            "job z was started and is not in the file": {"events": [*events, Event("start", "z", 1)]},
            "id='f'.* no handler has noted it": {"events": events[:-1]},
            "id='b'.* no handler has noted it": {"events": [*events[:4], *events[5:]]},
            "though the job was completed": {"moves": [*moved, Move("a", "completed", "pending", None)]},
            "though the job was pending": {"moves": moved[1:]},
            "job a was completed 2 times": {"moves": [*moved, Move("a", "running", "completed", None)]},
            "the token t was given 6 times": {
                "moves": [move._replace(token=move.token and "t") for move in moved]},
            "last seen to become running": {"moves": moved[:-1]},
            "was claimed 1 times, those given back left out": {"jobs": self.job("a", attempts=2)},
            "was started before job a, .* had ended": {"events": [events[2], *events]},
            "was claimed before job a, .* was completed": {"moves": [*moved[2:], *moved[:2]]},
            "job d was started before job c": {"events": [*events, Event("start", "d", 1)]},
        }
        for phrase, changes in cases.items():
            with self.subTest(phrase):
                self.assertRegex("\n".join(history(**changes).faults()), phrase)

    def test_a_line_that_breaks_off_does_not_count(self) -> None:
        log = self.dir / "p.log"
        log.write_text('{"tags": ["a"], "key": null}\n{"ids": ["1"]}\n{"tags": ["b"], "key": null}\n{"ids": ["')
        calls = [Call("p", ("a",), None, ("1",), False), Call("p", ("b",), None, None, False)]
        self.assertEqual(list(read_calls(log)), calls)
        log.write_text(log.read_text() + '2"]}\n{"tags": ["c"')
        self.assertEqual(list(read_calls(log)), [calls[0], calls[1]._replace(ids=("2",))])

    def test_a_traceback_of_ours_is_not_taken_for_one_of_python(self) -> None:
        python = 'Traceback (most recent call last):\n  File "/x/spawn.py", line 1\nEOFError: Ran out of input\n'
        ours = 'Traceback (most recent call last):\n  File "/x/worker.py", line 1\nEOFError: Ran out of input\n'
        self.assertEqual(UNBORN.sub("", python).strip(), "")
        for text in (ours, ours + python, python + ours, python.replace("EOFError", "OSError")):
            self.assertIn("Traceback", UNBORN.sub("", text))


if __name__ == "__main__":
    unittest.main()
