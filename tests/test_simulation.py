"""The simulation: a fixed set of histories and a new one go well, and a queue with a broken rule is found out.

The seeds below are the same in every run.  `python -m tests.simulation --seconds 600` tries many more.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sqlite3
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from jobqueue.db import Store
from tests import simulation
from tests.simulation import Simulation, simulate
from tests.simulation_steps import Complaint
from tests.support import TempDirTestCase

SEEDS = range(14)
USED_AT_LEAST = {
    "add": 100, "turn": 200, "settle": 50, "complete": 40, "fail": 30, "release": 15, "extend": 20, "report": 20,
    "cancel": 15, "retry": 15, "retry_failed": 15, "recover": 50, "late": 15, "probe": 8, "together": 4,
    "stale complete": 8, "stale fail": 8, "stale release": 4, "DatabaseBusy": 8, "dies": 8, "InvalidJob": 15,
    "DependencyCycle": 5,
}  # fmt: skip

# One rule of the queue taken out of its SQL: what to look for, what to put there, and what is complained of.
TRUE_FOR_ALL = r"(\g<0> OR TRUE)"
BREAKAGES = {
    "any token will do": (r"\blease_token = (:\w+|\?)(?= AND)", TRUE_FOR_ALL, "late|extend|report|settle|complete"),
    "a lease never ends for its holder": (r"\blease_expires_at > (:\w+|\?)", TRUE_FOR_ALL, "instead of"),
    "a lease ends at any time for others": (r"\blease_expires_at <= (:\w+|\?)", TRUE_FOR_ALL, "recovered|has_due"),
    "all claims get the same token": (r"lower\(hex\(randomblob\(16\)\)\)", "'same'", "was given out before"),
    "run_at is not looked at": (r"\brun_at <= (:\w+|\?)", TRUE_FOR_ALL, "claim|shares|has_due"),
    "priority is not looked at": (r"priority DESC, seq", "seq", "claim"),
    "one parent of many is enough": (r"unmet = unmet - [\w.]+", "unmet = 0", "unmet is 0"),
    "a release costs an attempt": (r"attempts = attempts - 1", "attempts = attempts", "attempts is"),
    "a retry gives no new budget": (r"attempts = 0,", "", "attempts is"),
}  # fmt: skip


class SimulationTest(unittest.TestCase):
    """Histories go well, and lead everywhere."""

    def test_fixed_histories(self) -> None:
        used: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        for seed in SEEDS:
            with self.subTest(seed=seed):
                history = simulate(seed)
                used += history.used
                used["calm" if history.calm else "skewed"] += 1
                ends.update(job.status for job in history.model.jobs.values())
                open_jobs = {job.id for job in history.model.jobs.values() if job.status in ("pending", "retrying")}
                self.assertEqual(open_jobs, history.model.blocked())
        # That they lead everywhere, so that their going well means something.
        for name, least in {**USED_AT_LEAST, "calm": 3, "skewed": 5}.items():
            self.assertGreaterEqual(used[name], least, f"{name} in {used}")
        for status in ("completed", "failed", "canceled"):
            self.assertGreaterEqual(ends[status], 5, ends)
        self.assertEqual(ends["running"], 0)

    def test_a_new_history(self) -> None:
        simulate(random.SystemRandom().randrange(10**9))  # a failure prints the seed

    def test_one_seed_is_one_history(self) -> None:
        self.assertEqual(simulate(3, 40).log, simulate(3, 40).log)
        self.assertNotEqual(simulate(3, 40).log, simulate(4, 40).log)


class BrokenQueueTest(TempDirTestCase):
    """The simulation complains soon when a rule of the queue is broken."""

    def test_a_rule_taken_out_of_the_sql_is_missed_soon(self) -> None:
        for name, (pattern, replacement, complaint) in BREAKAGES.items():
            with self.subTest(name):
                touched: Counter[str] = Counter()
                text = self.first_complaint(broken(pattern, replacement, touched))
                self.assertTrue(touched, "no statement has this rule any more: say here how it reads now")
                self.assertRegex(text, "replay: python -m tests.simulation --seed [0-9]+; the last steps were:\n")
                self.assertRegex(text.partition("\nreplay")[0], complaint)

    def test_a_broken_idempotency_key_is_missed_soon(self) -> None:
        class Forgetful(Store):
            def add(self, job: Any, *, now_ms: int) -> tuple[str, bool]:
                job.idempotency_key = None
                return super().add(job, now_ms=now_ms)

        self.assertRegex(self.first_complaint(Forgetful), "for a known key|idempotency_key is|refused|add: ")

    def test_a_finished_job_that_changes_by_itself_is_missed_soon(self) -> None:
        class Eager(Store):
            def recover_expired(self, **arguments: Any) -> Any:
                self.sqlite.execute("UPDATE jobs SET status = 'canceled', result = NULL WHERE status = 'completed'")
                return super().recover_expired(**arguments)

        self.assertRegex(self.first_complaint(Eager), "status is 'canceled', not 'completed'")

    def test_a_batch_of_which_half_is_kept_is_missed_soon(self) -> None:
        class Hasty(Store):
            def transaction(self) -> Any:
                return contextlib.nullcontext()  # each statement is a commit

        self.assertRegex(self.first_complaint(Hasty), "instead of|retrying|running|completed")

    def test_a_step_that_ignores_a_held_lock_is_missed_at_once(self) -> None:
        history = Simulation(1, self.dir)
        self.addCleanup(history.close)
        history.trouble = 1.0
        with self.assertRaisesRegex(Complaint, "went through while another process held the write lock"):
            history.act(history.processes[0], "does nothing", lambda now: None)

    def test_the_command_tells_how_to_replay(self) -> None:
        opener = broken(*BREAKAGES["all claims get the same token"][:2], Counter())
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(simulation.main(["--seconds", "30"], opener), 1)
        found = re.findall(r"^replay: python -m tests.simulation --seed (\d+);", out.getvalue(), re.MULTILINE)
        self.assertEqual(len(found), 1, out.getvalue())
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(simulation.main(["--seed", *found]), 0)
        self.assertRegex(out.getvalue(), r"^1 histories, \d+ steps, nothing wrong$")

    def test_a_sound_queue_gives_no_cause_for_complaint(self) -> None:
        with self.assertRaisesRegex(AssertionError, "nobody noticed"):
            self.first_complaint(broken("no statement reads like this", "", Counter()), 2)

    def first_complaint(self, opener: Any, histories: int = 12) -> str:
        """Return what is wrong with a broken queue; fail if so many short histories find nothing."""
        for seed in range(histories):
            try:
                simulate(seed, 60, opener)
            except Complaint as complaint:
                return str(complaint)
        self.fail("nobody noticed")


def broken(pattern: str, replacement: str, touched: Counter[str]) -> type[Store]:
    """Return an engine whose statements are changed; `touched` counts those that were."""

    class Altered:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

        def execute(self, sql: str, *parameters: Any) -> Any:
            return self.connection.execute(self.changed(sql), *parameters)

        def executemany(self, sql: str, *parameters: Any) -> Any:
            return self.connection.executemany(self.changed(sql), *parameters)

        def changed(self, sql: str) -> str:
            result = re.sub(pattern, replacement, sql)
            if result != sql:
                touched[sql] += 1
            return result

    class Broken(Store):
        def __init__(self, path: Path, **options: Any) -> None:
            super().__init__(path, **options)

        @property
        def sqlite(self) -> Any:
            return Altered(super().sqlite)

    return Broken


if __name__ == "__main__":
    unittest.main()
