"""`purge`: what goes, what stays, that the file plateaus, and that others get at the lock meanwhile."""

from __future__ import annotations

import json
import threading
import unittest
from functools import partial
from typing import Any, cast
from unittest import mock

from jobqueue import Queue, upkeep
from jobqueue.upkeep import PURGE_EVERY_SECONDS, Purge, Purger
from tests.engine import NOW, StoreTestCase, token
from tests.support import FakeClock, sql
from tests.test_cli import CliTestCase
from tests.test_plans import CHILDREN, EDGES, ROWID, Explainer

DAY_MS = 86_400_000


class PurgeTestCase(StoreTestCase):
    def purge(self, cutoff: int = NOW, **options: Any) -> Purge:
        purge = Purge(self.store, cutoff_ms=cutoff, **options)
        while purge.step():
            pass
        return purge

    def ids(self) -> list[str]:
        return sorted(job.id for job in self.store.iterate())


class WhatGoesTest(PurgeTestCase):
    def test_only_finished_jobs_of_the_statuses_asked_for_that_are_old_enough(self) -> None:
        for id in ("old", "young"):
            self.add(id)
        self.finish("old", NOW)
        self.finish("young", NOW + 1)
        self.add("canceled")
        self.store.cancel("canceled", now_ms=NOW)
        self.add("failed")
        self.kill("failed")
        self.add("later", run_at=NOW + DAY_MS)
        self.add("running")
        self.take("running")
        self.assertEqual(self.purge(NOW - 1).jobs, 0)
        self.assertEqual(self.purge().jobs, 2)
        self.assertEqual(self.ids(), ["failed", "later", "running", "young"])
        self.assertEqual(self.purge(statuses=["failed"]).jobs, 1)
        self.assertEqual(self.ids(), ["later", "running", "young"])
        with self.assertRaises(ValueError):
            Purge(self.store, cutoff_ms=NOW, statuses=["pending"])

    def test_what_a_caller_timed_by_a_clock_of_its_own_stays(self) -> None:
        self.add("a", now=10)
        self.finish("a", 10)
        self.assertEqual((self.purge().jobs, self.ids()), (0, ["a"]))

    def test_only_one_type(self) -> None:
        for id, type in (("a", "t"), ("b", "u")):
            self.add(id, type=type)
            self.finish(id)
        self.assertEqual(self.purge(type="u").jobs, 1)
        self.assertEqual(self.ids(), ["a"])

    def test_what_belongs_to_a_job_goes_with_it_and_its_key_is_free(self) -> None:
        self.add("parent")
        self.finish("parent")
        self.add("a", depends_on=["parent"], idempotency_key="k", max_attempts=2)
        job = self.take("a")
        self.store.fail("a", token(job), "no luck", now_ms=NOW, delay_ms=0)
        self.finish("a")
        self.store.sqlite.execute("INSERT INTO outputs VALUES (?, 1, 'stdout', x'00')", (job.seq,))
        self.assertEqual(self.purge().jobs, 2)
        for table in ("jobs", "failures", "outputs", "dependencies"):
            self.assertEqual(sql(self.db, f"SELECT count(*) FROM {table}"), [(0,)], table)
        self.assertEqual(self.add("b", idempotency_key="k"), "b")
        self.assertEqual(self.add(), "4")  # numbers are never given twice

    def test_what_an_unfinished_job_depends_on_stays_at_any_depth(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"])
        self.add("c", depends_on=["b"])
        self.add("d", depends_on=["c"], priority=-2)
        self.add("aside", depends_on=["a"], priority=-1)
        for id in ("a", "b", "c", "aside"):
            self.finish(id)
        for pages in (1, 5_000):
            with self.subTest(pages=pages), mock.patch.object(upkeep, "SURVEY_EDGES", pages), \
                    mock.patch.object(upkeep, "SCAN_JOBS", max(pages, 1)):
                purge = self.purge(dry_run=True)
                self.assertEqual((purge.jobs, purge.needed), (1, 3))
        purge = self.purge()
        self.assertEqual((purge.jobs, purge.needed), (1, 3))
        self.assertEqual(self.ids(), ["a", "b", "c", "d"])
        self.finish("d")
        self.assertEqual(self.purge().jobs, 4)

    def test_a_dead_parent_goes_only_with_the_children_that_a_retry_would_have_wait_for_it(self) -> None:
        names = [f"j{n}" for n in range(6)]
        for before, id in zip(["", *names], names, strict=False):
            self.add(id, depends_on=[before] if before else [])
        for n, id in enumerate(names):  # parents first, so that each is met before its child
            self.store.cancel(id, now_ms=NOW + n)
        self.assertEqual(self.purge(NOW + 4, dry_run=True).jobs, 0)
        purge = self.purge(NOW + 4)
        self.assertEqual((purge.jobs, purge.needed), (0, 5))
        self.assertEqual(self.purge(NOW + 5, dry_run=True).jobs, 6)
        self.assertEqual(self.purge(NOW + 5).jobs, 6)

    def test_a_job_that_came_to_be_needed_after_the_survey_stays(self) -> None:
        self.add("a")
        self.finish("a")
        purge = Purge(self.store, cutoff_ms=NOW)
        while purge._next != purge._delete:
            purge.step()
        self.add("child", depends_on=["a"])
        while purge.step():
            pass
        self.assertEqual((purge.jobs, purge.needed), (0, 1))

    def test_a_dry_run_changes_nothing(self) -> None:
        self.add("a")
        self.finish("a")
        changes = self.store.sqlite.total_changes
        self.assertEqual(self.purge(dry_run=True).jobs, 1)
        self.assertEqual((self.store.sqlite.total_changes, self.ids()), (changes, ["a"]))


class RoomTest(PurgeTestCase):
    def test_a_step_that_has_held_the_lock_for_long_enough_commits(self) -> None:
        self.add_many([{}] * 60)
        self.finish_all()
        commits = []
        purge = Purge(self.store, cutoff_ms=NOW)
        with mock.patch.object(upkeep, "HOLD_SECONDS", 0.0):
            while purge.step():
                commits.append(self.store.commits)
        self.assertEqual(purge.jobs, 60)
        self.assertGreaterEqual(len(set(commits)), 6)

    def test_no_statement_reads_more_than_it_has_to(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"])
        self.finish("a")
        self.finish("b")
        explainer = Explainer(self.store.sqlite)
        self.store._sqlite = cast(Any, explainer)
        try:
            self.purge()
        finally:
            self.store._sqlite = explainer._sqlite
        ways = {way for found in explainer.found.values() for way in found}
        self.assertEqual(ways, {"jobs_finished", ROWID, EDGES, CHILDREN, "failures_job", "outputs_job"},
                         explainer.found)  # fmt: skip

    def test_the_file_plateaus(self) -> None:
        sizes = []
        for number in range(6):
            now = NOW + number * DAY_MS
            self.add_many([{"payload": "x" * 3_000}] * 150, now)
            self.finish_all(now)
            purge = self.purge(now)
            self.assertEqual(purge.jobs, 150)
            self.assertGreater(purge.freed_bytes, 150 * 3_000)
            sizes.append(sql(self.db, "PRAGMA page_count")[0][0])
        self.assertEqual(sql(self.db, "PRAGMA freelist_count"), [(0,)])
        self.assertLessEqual(max(sizes), sizes[0] + 2)
        self.assertEqual(self.db.stat().st_size, sizes[-1] * sql(self.db, "PRAGMA page_size")[0][0])
        self.assertEqual(sql(self.db, "PRAGMA integrity_check"), [("ok",)])

    def finish_all(self, now: int = NOW) -> None:
        jobs = self.claim(now, limit=1_000)
        self.store.complete_many([(job.seq, token(job), None) for job in jobs], now_ms=now)

    def test_others_write_meanwhile(self) -> None:
        self.add_many([{}] * 400)
        self.finish_all()
        waits: list[str] = []
        with Queue(self.db, clock=FakeClock(NOW + 1)) as mine, Queue(self.db, patience_seconds=5) as other:
            def enqueue(count: int, _: float) -> None:
                if count and len(waits) < 10:
                    thread = threading.Thread(target=lambda: waits.append(other.enqueue("t")))
                    thread.start()
                    thread.join(10)

            with mock.patch.object(upkeep, "HOLD_SECONDS", 0.0):
                self.assertEqual(mine.purge(0, progress=enqueue).jobs, 400)
            self.assertEqual(len(waits), 10)
            self.assertEqual(other.stats()["pending"], 10)


class PurgerTest(PurgeTestCase):
    """What a worker does with `--purge-after`."""

    def arrive(self, *names: str, now: int = NOW) -> None:
        for name in names:
            self.store.worker_arrives(name, host="h", pid=1, queues=["default"], types=[], now_ms=now)

    def run_purger(self, purger: Purger, now: int, seconds: list[float]) -> int:
        """Take all steps of a purge, time passing; return how many jobs were deleted."""
        total = 0
        while purger.is_busy:
            total += purger.step(now_ms=now)
            seconds[0] += upkeep.STEP_PAUSE_SECONDS
        return total

    def test_at_once_then_every_hour_and_only_the_first_of_the_live_workers(self) -> None:
        self.arrive("a", "b")
        self.add("x")
        self.finish("x")
        now, seconds = NOW + 30 * DAY_MS, [100.0]
        self.arrive("b", now=now)  # a was not seen for a month
        self.arrive("a", now=now)
        first, second = (Purger(self.store, name, 30 * DAY_MS, lambda: seconds[0]) for name in "ab")
        self.assertTrue(second.is_busy)
        self.assertEqual(self.run_purger(second, now, seconds), 0)
        self.assertEqual(self.run_purger(first, now, seconds), 1)
        self.add("y")
        self.finish("y")
        self.assertFalse(first.is_busy)
        self.assertEqual(first.step(now_ms=now), 0)
        seconds[0] += PURGE_EVERY_SECONDS
        self.assertEqual(self.run_purger(first, now, seconds), 1)

    def test_the_next_in_line_steps_in_when_the_first_does_nothing(self) -> None:
        self.add("x")
        self.finish("x")
        for late_ms, deleted in ((2 * 3_600_000 - 1, 0), (2 * 3_600_000, 1)):
            now = NOW + 30 * DAY_MS + late_ms
            self.arrive("a", "b", now=now)
            seconds = [0.0]
            purger = Purger(self.store, "b", 30 * DAY_MS, partial(seconds.__getitem__, 0))
            self.assertEqual(self.run_purger(purger, now, seconds), deleted)


class CommandTest(CliTestCase):
    def finished(self, **fields: Any) -> None:
        with Queue(self.db, create=True, clock=FakeClock()) as queue:
            queue.enqueue("t", **fields)
            (job,) = queue.claim("w")
            queue.complete(job.id, job.lease_token or "")

    def test_it_says_how_many_and_what_was_given_back(self) -> None:
        self.finished(payload="x" * 100_000)
        done = self.main("purge", "--database", self.db, "--older-than", "1d", "--dry-run")
        self.assertEqual((done.code, done.out, done.err), (0, "1\n", "jobqueue: 1 job would be deleted\n"))
        done = self.main("purge", "--database", self.db, "--older-than", "1d")
        self.assertEqual((done.code, done.out), (0, "1\n"))
        self.assertRegex(done.err, r"\Ajobqueue: 1 job is deleted; [0-9]{3},[0-9]{3} bytes given back\n\Z")
        done = self.main("purge", "--database", self.db, "--older-than", "1d", "--json")
        self.assertEqual(json.loads(done.out), {"purged": 0, "kept": 0, "freed_bytes": 0, "dry_run": False})

    def test_what_is_wrong(self) -> None:
        self.create()
        db = ("--database", self.db)
        self.refused(2, "--older-than SPAN", "purge", *db)
        self.refused(2, "'soon' is no duration", "purge", *db, "--older-than", "soon")
        old = ("purge", *db, "--older-than", "1")
        self.refused(2, "there is no finished status 'pending'", *old, "--status", "pending")
        self.refused(2, "did you mean 'failed'?", *old, "--status", "faild")

    def test_a_worker_does_it_too(self) -> None:
        self.finished()
        worker = self.start("worker", "--database", self.db, "--drain", "--workers", 1, "--purge-after", "30d")
        done = worker.finish()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("deleted 1 jobs that finished long ago", done.stderr)
        self.assertEqual(sql(self.db, "SELECT count(*) FROM jobs"), [(0,)])


if __name__ == "__main__":
    unittest.main()
