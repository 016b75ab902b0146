"""The benchmark runs: every measure with sizes that say nothing, and what it makes of its figures.

Nothing here is timed. That the files it fills are such as the queue itself would have left is checked too, as
the cost tests rely on them.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unittest
from contextlib import nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

from jobqueue import Queue
from tests import bench, bench_look
from tests.bench_base import Bench, Failed, Figure, Sizes, Worker, alternate, figure, percentile
from tests.bench_files import fill
from tests.support import TempDirTestCase

TINY = Sizes(runs=1, drain=100, turns=1, slice=2, enqueuers=2, enqueue_seconds=0.01, backlog=200, bulk=20,
             lines=(10, 20), fixture=200, fan_out=20, samples=1, idle_seconds=0.05, pairs=1, sync_seconds=0.01,
             soak=200, far=200)  # fmt: skip
FEW_LISTS = ((), ("--status", "failed", "--type", "rare"))


class MeasureTest(unittest.TestCase):
    """Each measure is taken, and its figures are numbers."""

    results: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        with patch.object(bench_look, "LISTS", FEW_LISTS):
            cls.results = bench.measure(sorted(bench.MEASURES), TINY, None)

    def take(self, number: int, *expected: str) -> dict[str, dict[str, Any]]:
        """Expect figures in a measure whose names begin so; return all by name."""
        result = self.results["measures"][str(number)]
        self.assertNotIn("failed", result)
        figures = {each["name"]: each for each in json.loads(json.dumps(result["figures"]))}
        for name in expected:
            self.assertTrue(any(each.startswith(name) for each in figures), (name, list(figures)))
        for each in figures.values():
            self.assertEqual(set(each), {"name", "value", "unit", "ratio", "versus", "low", "high", "all", "target",
                                         "met"})  # fmt: skip
            if each["ratio"] is not None and "CPU" not in each["name"] and "index" not in each["name"]:
                self.assertGreater(each["ratio"], 0, each["name"])
        return figures

    def test_the_whole(self) -> None:
        self.assertEqual(list(self.results), ["machine", "sizes", "measures"])
        self.assertEqual(list(self.results["machine"]), ["machine", "python", "disk"])
        self.assertEqual(self.results["sizes"], TINY._asdict())
        self.assertEqual(list(self.results["measures"]), list("123456789"))

    def test_drain(self) -> None:
        figures = self.take(1, "raw-batch", "- from its launch")
        for children in (2, 4):
            self.assertEqual(figures[f"worker --workers {children}"]["target"], "at least 0.4")

    def test_single(self) -> None:
        self.take(2, "bare one-row INSERT", "Queue.enqueue", "2 threads", "2 processes, and a hot worker")

    def test_many(self) -> None:
        self.take(3, "bare bulk INSERT", "enqueue_many", "enqueue --file, 20 lines", "- memory, 20 lines")

    def test_claims(self) -> None:
        self.take(4, "bare claim", "claim, complete", "Queue.work", "20 dependents",
                  *(f"claim, complete beside 200 {kind}" for kind in
                    ("waiting", "completed", "future", "blocked", "other-queue")))  # fmt: skip

    def test_idle(self) -> None:
        self.take(5, "start of a new job, p50", "- p99", "CPU of an idle worker", "- written", "- files changed")

    def test_command_line(self) -> None:
        self.take(6, "python -c", "one enqueue command", "- while another process")

    def test_soak(self) -> None:
        figures = self.take(7, "-wal at its largest", "- jobs completed")
        self.assertGreater(figures["the file, jobs waiting"]["value"], 0)

    def test_look(self) -> None:
        self.take(8, "list", "list --status failed --type rare", "Queue.get", "Queue.stats()", "to find 20 blocked",
                  "index jobs_ready")  # fmt: skip

    def test_far(self) -> None:
        self.take(9, "the file", "Queue.enqueue", "claim, complete", "enqueue_many", "Queue.list(type='rare'",
                  "Queue.stats()")  # fmt: skip


class ProgramTest(TempDirTestCase):
    """What the program does with its options."""

    def main(self, *argv: str) -> str:
        """Run it with tiny sizes and the measures of this test, expect exit 0, return its output."""
        fakes: Any = {"QUICK": TINY, "MEASURES": self.measures, "Bench": nullcontext,
                      "machine": lambda _: {"machine": "fast"}}  # fmt: skip
        with patch.multiple(bench, **fakes), redirect_stdout(io.StringIO()) as out:
            self.assertEqual(bench.main(["--quick", *argv]), self.code)
        return out.getvalue()

    def setUp(self) -> None:
        super().setUp()
        self.code = 0
        self.measures = {1: ("first", lambda _: [Figure("a", 1234.5, "jobs/s", 0.5, "b", low=0.4)]),
                         2: ("second", lambda _: [Figure("c", None, "ms", high=6)])}  # fmt: skip

    def test_a_line_has_value_ratio_and_target(self) -> None:
        lines = [" ".join(line.split()) for line in self.main().splitlines()]
        self.assertIn("1 first", lines)
        self.assertIn("a 1,234 jobs/s 0.50 x b [at least 0.4: reached]", lines)
        self.assertIn("c - ms [at most 6: not measured]", lines)

    def test_only(self) -> None:
        self.assertNotIn("first", self.main("--only", "2"))

    def test_json_to_stdout_is_all_there_is(self) -> None:
        results = json.loads(self.main("--json", "-", "--runs", "2", "--jobs", "7"))
        self.assertEqual((results["sizes"]["runs"], results["sizes"]["fixture"]), (2, 7))
        self.assertEqual(results["measures"]["1"]["figures"][0]["met"], True)

    def test_json_to_a_file(self) -> None:
        path = self.dir / "results.json"
        self.assertIn("first", self.main("--json", str(path)))
        self.assertEqual(list(json.loads(path.read_text())["measures"]), ["1", "2"])

    def test_one_that_fails_does_not_stop_the_rest(self) -> None:
        def fails(_: Bench) -> list[Figure]:
            raise Failed("no luck")

        self.measures[1] = ("first", fails)
        self.code = 1
        out = self.main()
        self.assertIn("failed: no luck", out)
        self.assertIn("second", out)

    def test_a_worker_that_has_ended_is_not_waited_for(self) -> None:
        with self.assertRaisesRegex(Failed, "a worker exited 3: no luck"):
            Worker(self.ended(3), self.dir / "log").wait_until(lambda: False, "nothing")

    def test_a_worker_that_ends_badly_is_told(self) -> None:
        Worker(self.ended(0), self.dir / "log").end()
        with self.assertRaisesRegex(Failed, "a worker exited 1: no luck"):
            Worker(self.ended(1), self.dir / "log").end()

    def ended(self, code: int) -> subprocess.Popen[bytes]:
        """Return a process that has ended, its log in place."""
        (self.dir / "log").write_text("first\nno luck\n")
        process = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
        process.wait(30)
        return process


class FigureTest(unittest.TestCase):
    """What is reached, and what is not."""

    def test_the_ratio_counts_where_there_is_one(self) -> None:
        for value, ratio, low, high, met in (
            (10.0, 0.5, 0.4, None, True),
            (10.0, 0.3, 0.4, None, False),
            (10.0, None, None, 6.0, False),
            (6.0, None, None, 6.0, True),
            (None, None, None, 6.0, None),
            (10.0, 0.3, None, None, None),
        ):
            with self.subTest(value=value, ratio=ratio):
                self.assertIs(Figure("", value, "", ratio, "", low, high).met, met)

    def test_medians(self) -> None:
        made = figure("a", [1, 9, 2], "ms", [3, 1, 2], "b")
        self.assertEqual((made.value, made.ratio, made.all), (2, 2, [1, 9, 2]))
        self.assertEqual(percentile(range(1, 101), 0.99), 100)
        self.assertEqual(percentile([5], 0.5), 5)

    def test_turns_are_taken_alternately(self) -> None:
        calls: list[str] = []
        self.assertEqual(len(alternate(3, lambda: calls.append("a"), lambda: calls.append("b"))), 3)
        self.assertEqual("".join(calls), "abbaab")


class FillTest(TempDirTestCase):
    """Jobs made by SQL are to the queue what they are meant to be."""

    def test_every_kind_counts_as_what_it_is(self) -> None:
        Queue(self.db, create=True).close()
        kinds = ("waiting", "other-queue", "future", "blocked", "running", "retrying", "completed", "failed",
                 "canceled")  # fmt: skip
        for kind in kinds:
            fill(self.db, kind, 3)
        fill(self.db, "waiting", 2, queue="rare", type="rare")
        with Queue(self.db) as queue:
            self.assertEqual(queue.stats(), {
                "pending": 14, "running": 3, "retrying": 3, "completed": 3, "failed": 4, "canceled": 3,
                "ready": 8, "scheduled": 6, "waiting": 0, "blocked": 3})  # fmt: skip
            self.assertEqual([job.id for job in queue.claim("me", limit=99)], ["1", "2", "3"])
            self.assertEqual(len(queue.claim("me", limit=99, queues=["other", "rare"])), 5)
            self.assertEqual(queue.recover_expired(), 0)
            self.assertEqual(queue.enqueue("sleep"), str(3 * len(kinds) + 1 + 2 + 1))

    def test_blocked_ones_are_freed_like_others(self) -> None:
        Queue(self.db, create=True).close()
        fill(self.db, "blocked", 3)
        with Queue(self.db) as queue:
            self.assertEqual(queue.retry_failed(), 1)
            (parent,) = queue.claim("me")
            self.assertTrue(queue.complete(parent.id, parent.lease_token or ""))
            self.assertEqual(queue.stats()["ready"], 3)


if __name__ == "__main__":
    unittest.main()
