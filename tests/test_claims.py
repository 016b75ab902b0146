"""Who is claimed, and when: order, times, clocks that step back, queues, and what a claim may cost."""

from __future__ import annotations

import unittest

from jobqueue.errors import InvalidJob
from jobqueue.jobs import new_job
from tests.engine import LEASE_MS, NOW, WORKER, StoreTestCase, counted, ids, token, traced


class OrderTest(StoreTestCase):
    """Highest priority first, then the oldest."""

    def test_priority_goes_before_age(self) -> None:
        priorities = [0, 5, -5, 5, 0, 9, -(2**63), 2**63 - 1]
        self.add_many([{"id": f"{n}", "priority": priority} for n, priority in enumerate(priorities)])
        order = ["7", "5", "1", "3", "0", "4", "2", "6"]
        self.assertEqual([self.take().id for _ in range(4)], order[:4])
        self.assertEqual(ids(self.claim(limit=10)), order[4:])

    def test_a_claim_looks_into_250_queues_at_most(self) -> None:
        self.add("a", queue="q249")
        queues = [f"q{n}" for n in range(251)]
        with self.assertRaisesRegex(InvalidJob, "250 queues at most, not 251"):
            self.claim(queues=queues)
        self.assertEqual(ids(self.claim(queues=queues[:250])), ["a"])

    def test_when_some_heads_are_not_due_the_limit_is_still_filled(self) -> None:
        self.add("x", priority=9, run_at=NOW + 100)
        for name, priority in (("y", 5), ("z", 1)):
            self.add(name, priority=priority, run_at=NOW)
        self.assertFalse(self.store.promote(now_ms=NOW + 100))
        self.assertEqual(ids(self.claim(NOW + 50, limit=2)), ["y", "z"])

    def test_a_retry_by_a_clock_that_is_ahead_leaves_the_job_claimable(self) -> None:
        job_id = self.add("a")
        job = self.take()
        self.store.fail(job_id, token(job), "no", now_ms=NOW + 1, final=True)
        self.assertTrue(self.store.retry(job_id, now_ms=NOW + 10**9))
        self.assertEqual(ids(self.claim(NOW + 2)), ["a"])

    def test_a_claim_of_many_keeps_the_order(self) -> None:
        self.add_many([{"id": f"{n}", "priority": n * 7 % 10} for n in range(100)])
        expected = sorted(range(100), key=lambda n: (-(n * 7 % 10), n))
        self.assertEqual(ids(self.claim(limit=60)), [str(n) for n in expected[:60]])
        self.assertEqual(ids(self.claim(limit=60)), [str(n) for n in expected[60:]])
        self.assertEqual(self.claim(limit=60), [])

    def test_the_oldest_is_who_was_stored_first_not_who_was_due_first(self) -> None:
        self.add("a", run_at=NOW + 200)
        self.add("b", run_at=NOW + 100)
        self.add("c")
        self.assertEqual(ids(self.claim(NOW + 200, limit=3)), ["a", "b", "c"])

    def test_jobs_keep_their_place_whatever_happens_to_them(self) -> None:
        self.add_many([{"id": id} for id in ("failed", "released", "expired", "retried", "fresh")])
        jobs = {job.id: token(job) for job in self.claim(limit=4)}
        self.store.fail("failed", jobs["failed"], "x", now_ms=NOW)
        self.store.release("released", jobs["released"], now_ms=NOW)
        self.store.fail("retried", jobs["retried"], "x", now_ms=NOW, final=True)
        self.store.retry("retried", now_ms=NOW)
        self.store.recover_expired(now_ms=NOW + LEASE_MS)
        self.assertEqual(ids(self.claim(NOW + LEASE_MS, limit=9)),
                         ["failed", "released", "expired", "retried", "fresh"])

    def test_a_claim_takes_what_there_is(self) -> None:
        self.assertEqual(self.claim(limit=5), [])
        self.add_many([{}] * 3)
        self.assertEqual(ids(self.claim(limit=2)), ["1", "2"])
        self.assertEqual(ids(self.claim(limit=2)), ["3"])
        self.assertEqual(ids(self.claim(limit=2)), [])


class QueuesTest(StoreTestCase):
    """Lanes are merged by those who serve several, and closed to those who do not."""

    def test_several_queues_are_merged_by_priority_and_age(self) -> None:
        for n, (queue, priority) in enumerate(zip("abcabad", (1, 2, 3, 2, 1, 3, 9), strict=True)):
            self.add(f"{n}{queue}", queue=queue, priority=priority)
        self.assertEqual(ids(self.claim(limit=4, queues=("b", "a", "c"))), ["2c", "5a", "1b", "3a"])
        self.assertEqual(ids(self.claim(limit=4, queues=("c", "b", "a"))), ["0a", "4b"])
        self.assertEqual(self.statuses()["6d"], "pending")

    def test_a_queue_named_twice_counts_once(self) -> None:
        self.add_many([{}] * 6)
        self.assertEqual(ids(self.claim(limit=4, queues=("default", "default"))), ["1", "2", "3", "4"])

    def test_nothing_reaches_into_another_queue(self) -> None:
        self.add("due", queue="q", priority=9)
        self.add("later", queue="q", run_at=NOW + 1)
        self.add("running", queue="q", priority=99)
        self.claim(queues=("q",))
        before = self.contents()
        now = NOW + LEASE_MS
        self.assertEqual(self.claim(now, limit=9), [])
        self.assertEqual(self.claim(now, limit=9, queues=("Q", "q ", "")), [])
        self.assertEqual(self.store.recover_expired(now_ms=now), [])
        self.assertFalse(self.store.promote(now_ms=now))
        self.assertEqual(self.contents(), before)


class TimeTest(StoreTestCase):
    """Never before `run_at`, whichever way the clock moves."""

    def test_a_scheduled_job_is_due_at_its_very_millisecond(self) -> None:
        self.add("j", run_at=NOW + 100)
        self.assertEqual(self.claim(NOW + 99), [])
        self.assertEqual(ids(self.claim(NOW + 100)), ["j"])

    def test_something_is_due_from_the_millisecond_on_at_which_recovery_or_promotion_finds_it(self) -> None:
        self.add("later", run_at=NOW + 5)
        self.add("elsewhere", queue="other", run_at=NOW + 1)
        self.add("runs")
        self.take("runs", lease_ms=8)
        due = {moment: self.store.has_due(now_ms=NOW + moment) for moment in (4, 5)}
        self.assertEqual(due, {4: False, 5: True})
        self.assertFalse(self.store.promote(now_ms=NOW + 5))
        due = {moment: self.store.has_due(now_ms=NOW + moment) for moment in (5, 7, 8)}
        self.assertEqual(due, {5: False, 7: False, 8: True})
        self.assertEqual(len(self.store.recover_expired(now_ms=NOW + 8)), 1)
        self.assertFalse(self.store.has_due(now_ms=NOW + 8))
        self.assertTrue(self.store.has_due(now_ms=NOW + 8, queues=["default", "other"]))

    def test_a_delay_counts_from_when_the_job_is_stored(self) -> None:
        job = new_job("t", delay=0.25)
        self.assertEqual(self.store.add(job, now_ms=NOW + 1_000), ("1", True))
        self.assertEqual(self.claim(NOW + 1_249), [])
        self.take("1", NOW + 1_250)

    def test_an_unpromoted_job_is_not_claimed_and_a_promoted_one_is(self) -> None:
        self.add("j", run_at=NOW + 100)
        self.assertEqual(self.store.claim(WORKER, now_ms=NOW + 100, lease_ms=1), [])
        self.assertFalse(self.store.promote(now_ms=NOW + 100))
        self.assertEqual(ids(self.store.claim(WORKER, now_ms=NOW + 100, lease_ms=1)), ["j"])

    def test_a_clock_that_steps_back_hides_jobs_until_it_is_there_again(self) -> None:
        self.add("early", NOW)
        self.add("late", NOW + 50, priority=9)
        self.assertEqual(self.claim(NOW - 1, limit=9), [])
        self.assertEqual(ids(self.claim(NOW + 49, limit=9)), ["early"])
        self.assertEqual(ids(self.claim(NOW + 50, limit=9)), ["late"])

    def test_heads_that_are_not_due_do_not_hide_what_is(self) -> None:
        self.add_many([{"priority": 5} for _ in range(20_000)], NOW + 1_000)
        self.add("due", NOW)
        with traced(self.store.sqlite) as statements:
            self.assertEqual(ids(self.claim(NOW)), ["due"])
        self.assertLess(len(statements), 60, "the more there are, the more are put back at once")
        self.assertEqual(self.claim(NOW), [])
        self.assertEqual(self.claim(NOW + 999), [])
        self.assertEqual(ids(self.claim(NOW + 1_000, limit=3)), ["1", "2", "3"])
        self.assertEqual(len(self.claim(NOW + 1_000, limit=30_000)), 19_997)

    def test_a_claim_of_many_among_heads_that_are_not_due_gets_there(self) -> None:
        for n in range(30):
            self.add(f"{n}", NOW + (1_000 if n % 3 else 0), priority=-n)
        got: list[str] = []
        while jobs := self.claim(NOW, limit=7):
            got += ids(jobs)
        self.assertEqual(got, ["0", "3", "6", "9", "12", "15", "18", "21", "24", "27"])

    def test_a_clock_that_steps_back_lets_a_lease_run_longer_but_not_twice(self) -> None:
        self.add("j")
        held = token(self.take("j", NOW))
        self.assertEqual(self.store.recover_expired(now_ms=NOW - 10**6), [])
        self.assertEqual(self.claim(NOW - 10**6), [])
        self.assertTrue(self.store.complete("j", held, now_ms=NOW - 10**6))
        self.assertEqual(self.job("j").finished_at, NOW - 10**6)

    def test_what_waits_for_its_backoff_waits_again_after_a_step_back(self) -> None:
        self.add("j")
        self.store.fail("j", token(self.take("j")), "x", now_ms=NOW)
        self.store.promote(now_ms=NOW + 1_000)
        self.assertEqual(self.claim(NOW + 999), [])
        self.take("j", NOW + 1_000)

    def test_a_released_job_waits_for_its_time_after_a_step_back(self) -> None:
        self.add("j", run_at=NOW)
        job = self.take("j", NOW)
        self.assertTrue(self.store.release("j", token(job), now_ms=NOW - 5))
        self.assertFalse(self.store.has_ready(["default"]))
        self.assertEqual(self.store.next_event(["default"]), NOW)
        self.assertEqual(self.claim(NOW - 1), [])
        self.take("j", NOW)


class PromotionTest(StoreTestCase):
    """Scheduled jobs come due in chunks, so that no transaction is long."""

    def test_at_most_10000_come_due_in_one_transaction(self) -> None:
        self.add_many([{"run_at": NOW + 1}] * 20_000)
        self.assertFalse(self.store.promote(now_ms=NOW))
        for promoted, more in ((10_000, True), (20_000, True), (20_000, False)):  # a full chunk may not be the last
            self.assertEqual(self.store.promote(now_ms=NOW + 1), more)
            self.assertEqual(self.query("SELECT count(*) FROM jobs WHERE ready"), [(promoted,)])

    def test_each_queue_has_its_chunk(self) -> None:
        self.add_many([{"run_at": NOW + 1, "queue": "ab"[n % 2]} for n in range(100)])
        self.assertFalse(self.store.promote(now_ms=NOW + 1, queues=("a", "b")))
        ready = self.query("SELECT queue, count(*) FROM jobs WHERE ready GROUP BY 1")
        self.assertEqual(ready, [("a", 50), ("b", 50)])

    def test_when_there_is_nothing_to_promote_nothing_is_written(self) -> None:
        self.add("j")
        commits = self.store.commits
        self.assertFalse(self.store.promote(now_ms=NOW))
        self.assertEqual(self.store.claim(WORKER, now_ms=NOW, lease_ms=1, queues=("other",)), [])
        self.assertEqual(self.store.commits, commits)


class CostTest(StoreTestCase):
    """A claim costs what it claims, not what lies around; counted in SQLite's own steps, not in time."""

    def steps(self, claims: int = 20) -> int:
        """Return the steps of so many rounds of recover, promote, claim, complete."""
        with counted(self.store.sqlite) as steps:
            for _ in range(claims):
                with self.store.transaction():
                    self.store.recover_expired(now_ms=NOW)
                    self.store.promote(now_ms=NOW)
                    (job,) = self.store.claim(WORKER, now_ms=NOW, lease_ms=LEASE_MS)
                    self.assertTrue(self.store.complete(job.id, token(job), now_ms=NOW))
        return steps[0]

    def test_claims_are_flat_whatever_is_in_the_file(self) -> None:
        self.add_many([{}] * 40)
        alone = self.steps()
        crowds: dict[str, list[dict[str, object]]] = {
            "waiting": [{"priority": -1}] * 2_500,
            "scheduled": [{"priority": 9, "run_at": NOW + 1}] * 2_500,
            "blocked": [{"id": "dead", "queue": "dead"}, *[{"priority": 9, "depends_on": ["dead"]}] * 2_500],
            "other queues": [{"priority": 9, "queue": f"q{n % 50}"} for n in range(2_500)],
            "finished": [{"id": f"f{n}", "priority": 9} for n in range(2_500)],
        }
        for name, jobs in crowds.items():
            with self.subTest(name):
                self.clear()
                self.add_many(jobs)
                if name == "blocked":
                    self.store.cancel("dead", now_ms=NOW)
                if name == "finished":
                    done = [(job.seq, token(job), None) for job in self.claim(limit=2_500)]
                    self.assertEqual(self.store.complete_many(done, now_ms=NOW).count(True), 2_500)
                self.add_many([{}] * 40)
                self.assertLessEqual(self.steps(), 1.1 * alone)

    def test_a_claim_of_many_is_linear_in_them(self) -> None:
        self.add_many([{}] * 3_000)
        with counted(self.store.sqlite) as few:
            self.assertEqual(len(self.claim(limit=100)), 100)
        with counted(self.store.sqlite) as many:
            self.assertEqual(len(self.claim(limit=1_000)), 1_000)
        self.assertLess(many[0], 11 * few[0])

    def test_settling_is_flat_among_many_running(self) -> None:
        self.add_many([{}] * 5_000)
        job = self.take()
        with counted(self.store.sqlite) as alone:
            self.store.complete(job.id, token(job), now_ms=NOW)
        jobs = self.claim(limit=4_000)
        with counted(self.store.sqlite) as crowd:
            self.store.complete(jobs[2_000].id, token(jobs[2_000]), now_ms=NOW)
        self.assertLessEqual(crowd[0], 1.1 * alone[0])

    def test_what_expires_and_comes_due_in_other_queues_costs_nothing(self) -> None:
        def look() -> None:
            self.assertEqual(self.store.recover_expired(now_ms=NOW + 1), [])
            self.assertFalse(self.store.promote(now_ms=NOW + 1))
            self.assertIsNone(self.store.next_event(["default"]))
            self.assertFalse(self.store.has_ready(["default"]))

        with counted(self.store.sqlite) as alone:
            look()
        self.add_many([{"queue": "other"}] * 3_000)
        self.claim(limit=2_000, lease_ms=1, queues=("other",))
        self.add_many([{"queue": "other", "run_at": NOW + 1}] * 1_000)
        with counted(self.store.sqlite) as crowd:
            look()
        self.assertLess(crowd[0], alone[0] + 50)

    def test_looking_for_expired_leases_is_flat_among_many_that_run(self) -> None:
        self.add_many([{}] * 5_000)
        self.claim(limit=1, lease_ms=1)
        with counted(self.store.sqlite) as alone:
            self.assertEqual(len(self.store.recover_expired(now_ms=NOW + 1)), 1)
        self.claim(NOW + 1, limit=4_000, lease_ms=1_000)
        self.claim(NOW + 1, limit=1, lease_ms=1)
        with counted(self.store.sqlite) as crowd:
            self.assertEqual(len(self.store.recover_expired(now_ms=NOW + 2)), 1)
        self.assertLessEqual(crowd[0], 1.1 * alone[0])


if __name__ == "__main__":
    unittest.main()
