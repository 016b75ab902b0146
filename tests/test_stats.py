"""`stats`: counts, ages, rates and percentiles, and what they read."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

from jobqueue import figures
from tests.look_case import LookTestCase
from tests.test_plans import Explainer


class StatsTest(LookTestCase):
    def told(self, *args: object) -> Any:
        (told,) = self.objects("stats", *args)
        return told

    def finish(self, count: int, wait_ms: int, run_ms: int, fails: bool = False, **fields: Any) -> None:
        """Have so many jobs wait and run for so long, one after the other."""
        for _ in range(count):
            id = self.queue.enqueue("t", max_attempts=1, **fields)
            self.clock.advance(wait_ms)
            self.end(id, "no" if fails else None, run_ms)

    def test_an_empty_queue(self) -> None:
        told = self.told()
        self.assertEqual(told["statuses"], dict.fromkeys(
            ("pending", "running", "retrying", "completed", "failed", "canceled"), 0))
        self.assertEqual((told["jobs"], told["queues"], told["workers"], told["failed_attempts"]), ([], [], [], 0))
        self.assertIsNone(told["oldest_ready_age_seconds"])
        self.assertEqual(told["windows"][0], {
            "window_seconds": 300.0, "seconds": 300.0, "completed": 0, "failed": 0, "canceled": 0,
            "failed_attempts": 0, "per_second": 0.0, "failure_rate": None,
            "wait_seconds": {"count": 0, "sum": 0.0, "p50": None, "p95": None},
            "run_seconds": {"count": 0, "sum": 0.0, "p50": None, "p95": None}})
        self.assertEqual(self.lines("stats"), [
            "TYPE  PENDING  RUNNING  RETRYING  COMPLETED  FAILED  CANCELED",
            "all         0        0         0          0       0         0",
            "",
            "ENDED                LAST 5 MIN  LAST 1 H",
            "completed                     0         0",
            "failed                        0         0",
            "canceled                      0         0",
            "per second                    0         0",
            "failed attempts               0         0",
            "waited, p50 and p95",
            "ran, p50 and p95",
            "",
            "waiting for a worker  0 ready, 0 scheduled",
            "waiting for others    0 waiting, 0 blocked",
            "failed attempts       0 in all",
            "workers alive         0",
        ])

    def make_some_of_each(self) -> None:
        self.queue.enqueue("a", id="dead")
        self.end("dead", "no")
        self.queue.enqueue("a", id="waits-1", delay="1m")       # scheduled, due after a minute
        self.queue.enqueue("a", id="later", delay="1h")         # scheduled
        self.queue.enqueue("b", depends_on=["waits-1"])         # waiting
        self.queue.enqueue("b", id="blocked", depends_on=["dead"])
        self.queue.enqueue("b", queue="q", depends_on=["blocked"])
        self.queue.enqueue("b", queue="q")                      # ready
        self.clock.advance(60_000)

    def test_counts_and_shares(self) -> None:
        self.make_some_of_each()
        told = self.told()
        self.assertEqual({(kind["queue"], kind["type"], kind["status"]): kind["count"] for kind in told["jobs"]}, {
            ("default", "a", "failed"): 1, ("default", "a", "pending"): 2, ("default", "b", "pending"): 2,
            ("q", "b", "pending"): 2})
        self.assertEqual({name: told[name] for name in ("ready", "scheduled", "waiting", "blocked")},
                         {"ready": 2, "scheduled": 1, "waiting": 1, "blocked": 2})
        self.assertEqual(told["queues"], [
            {"queue": "default", "ready": 1, "scheduled": 1, "waiting": 1, "blocked": 1,
             "oldest_ready_age_seconds": 0.0},
            {"queue": "q", "ready": 1, "scheduled": 0, "waiting": 0, "blocked": 1,
             "oldest_ready_age_seconds": 60.0}])
        self.assertEqual(told["oldest_ready_age_seconds"], 60.0)
        self.assertEqual(self.told("--queue", "q")["statuses"]["pending"], 2)
        self.assertEqual(self.told("--queue", "q")["blocked"], 1)
        self.assertEqual(self.told("--queue", "nix")["jobs"], [])
        lines = self.lines("stats")
        self.assertIn("waiting for a worker  2 ready (the first was due 1 min ago), 1 scheduled", lines)
        self.assertEqual(lines[0].split()[:2], ["QUEUE", "TYPE"])
        self.assertEqual(self.queue.stats()["blocked"], 2)

    def test_many_kinds_are_counted_the_other_way_with_the_same_outcome(self) -> None:
        self.make_some_of_each()
        told = self.told(), self.told("--queue", "q")
        with mock.patch.object(figures, "MAX_KINDS_APART", 0):
            self.assertEqual((self.told(), self.told("--queue", "q")), told)
        self.queue.enqueue_many([{"type": f"type {n}"} for n in range(60)])
        lines = self.lines("stats")
        self.assertTrue(any(line.strip().startswith("13 more ") for line in lines), lines)

    def test_a_clock_that_stepped_back_makes_ready_jobs_scheduled(self) -> None:
        self.queue.enqueue("t")
        self.clock.advance(-1_000)
        told = self.told()
        self.assertEqual((told["ready"], told["scheduled"], told["oldest_ready_age_seconds"]), (0, 1, None))

    def test_rates_and_percentiles_of_both_windows(self) -> None:
        self.finish(1, 9_000, 9_000)
        self.clock.advance(600_000)                             # more than 5 minutes ago, less than an hour
        self.finish(18, 100, 1_000)
        self.finish(1, 20_000, 30_000)
        self.finish(1, 200, 2_000, fails=True)
        running = self.queue.enqueue("t")
        self.take(running)
        self.queue.cancel(running)                              # has started, but was not let end
        five, hour = self.told()["windows"]
        self.assertEqual([five[name] for name in ("completed", "failed", "canceled", "failed_attempts")],
                         [19, 1, 1, 1])
        self.assertEqual((five["per_second"], five["failure_rate"]), (20 / 300, 1 / 20))
        self.assertEqual(five["wait_seconds"], {"count": 20, "sum": 22.0, "p50": 0.1, "p95": 0.2})
        self.assertEqual(five["run_seconds"], {"count": 20, "sum": 50.0, "p50": 1.0, "p95": 2.0})
        self.assertEqual((hour["completed"], hour["failed"], hour["run_seconds"]["count"]), (20, 1, 21))
        self.assertIn("failed                      1, 5.0%      1, 4.8%", self.lines("stats"))
        self.assertIn("waited, p50 and p95  100 ms, 200 ms  100 ms, 9 s", self.lines("stats"))
        self.clock.advance(300_000)
        self.assertEqual((self.told()["windows"][0]["completed"], self.told()["windows"][0]["canceled"]), (0, 0))
        self.assertEqual(self.told("--queue", "other")["windows"][1]["completed"], 0)

    def test_waiting_begins_when_the_last_dependency_has_ended(self) -> None:
        self.queue.enqueue("t", id="parent")
        self.queue.enqueue("t", id="child", depends_on=["parent"])
        self.queue.enqueue("t", id="later", delay=100)
        self.end("parent", after_ms=50_000)
        self.clock.advance(2_000)
        self.end("child")
        self.clock.advance(51_000)
        self.end("later")
        self.assertEqual(self.told()["windows"][1]["wait_seconds"],
                         {"count": 3, "sum": 5.0, "p50": 2.0, "p95": 3.0})

    def test_of_very_many_only_the_newest_count_and_it_is_said(self) -> None:
        self.finish(3, 0, 1_000)
        self.finish(7, 0, 2_000)
        with mock.patch.object(figures, "MAX_FINISHED", 5):
            five = self.told()["windows"][0]
            self.assertEqual((five["completed"], five["seconds"], five["per_second"]), (5, 8.0, 5 / 8))
            self.assertEqual(five["run_seconds"]["p50"], 2.0)
            self.assertIn("only of the newest 10,000, in         8 s         8 s", self.lines("stats"))

    def test_failed_attempts(self) -> None:
        self.finish(3, 0, 0, fails=True)
        self.clock.advance(301_000)
        self.finish(1, 0, 0, fails=True)
        told = self.told()
        self.assertEqual(told["failed_attempts"], 4)
        self.assertEqual([window["failed_attempts"] for window in told["windows"]], [1, 4])
        self.assertIsNone(self.told("--queue", "default")["failed_attempts"])
        self.assertEqual(self.told("--queue", "q")["windows"][1]["failed_attempts"], 0)

    def test_workers_alive(self) -> None:
        self.worker("one\u202e", queues=("a", "b"), age_ms=60_000)
        self.worker("two", age_ms=150_001)
        (worker,) = self.told()["workers"]
        self.assertEqual((worker["id"], worker["host"], worker["pid"], worker["queues"], worker["seen_at"]),
                         ("one\u202e", "host", 7, ["a", "b"], "2023-11-14T22:12:20.000Z"))
        self.assertEqual(self.lines("stats")[-2:],
                         ["workers alive         1", r"  one\u202e, seen 1 min ago, serves a, b"])

    def test_options(self) -> None:
        self.assertEqual(self.objects("stats", "--format", "text"), self.objects("stats"))
        self.assertEqual(self.lines("stats", "--format", "json"), self.lines("stats", "--json"))
        self.refused(2, "there is no format 'xml'", "stats", "--database", self.db, "--format", "xml")

    def test_it_fits_eighty_columns_with_hostile_names(self) -> None:
        self.queue.enqueue("日" * 200, queue="q\u202e" * 40)
        self.finish(1, 1, 1)
        with mock.patch("jobqueue.render.terminal_width", return_value=80):
            from jobqueue.render import width_of
            self.assertLessEqual(max(map(width_of, self.lines("stats"))), 80)


class ReadsTest(LookTestCase):
    def plans(self, queue: str | None) -> dict[str, set[str]]:
        """Return the ways by which each statement finds its rows."""
        store: Any = self.queue._store
        explainer = Explainer(store.sqlite)
        store._sqlite = explainer
        try:
            figures.figures(store, queue, now_ms=self.clock())
        finally:
            store._sqlite = explainer._sqlite
        return explainer.found

    def test_counts_come_from_indexes_and_few_rows_are_read(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.enqueue("t", depends_on=["a"])
        ways = set().union(*self.plans(None).values())
        self.assertEqual(ways, {
            "jobs_kinds", "a scan of jobs USING INDEX jobs_ready", "a scan of jobs USING INDEX jobs_scheduled",
            "a scan of jobs USING INDEX jobs_waiting", "jobs_dead", "dependencies_reverse", "rowid",
            "jobs_finished", "primary key", "SEARCH (subquery-1)", "SEARCH failures", "a scan of failures",
            "a scan of workers", "a sort"})
        for sql in self.plans(None):
            if "status = :status" in sql:
                plan = self.queue._store.sqlite.execute(
                    f"EXPLAIN QUERY PLAN {sql}", {"queue": "a", "type": "b", "status": "c"}).fetchall()
                self.assertIn("COVERING INDEX jobs_kinds (queue=? AND type=? AND status=?)", plan[0][3])
                break
        else:
            self.fail("nothing counts the jobs of a kind")

    def test_failures_are_read_from_the_newest_on(self) -> None:
        store = self.queue._store
        plan = store.sqlite.execute("EXPLAIN QUERY PLAN " + figures._FAILED_ATTEMPTS).fetchall()
        self.assertIn("SEARCH failures", plan[0][3])
        self.assertIn("ORDER BY rowid DESC LIMIT", figures._NEWEST_FAILURES)


if __name__ == "__main__":
    unittest.main()
