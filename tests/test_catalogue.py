"""What an operator does and sees: cancel, retry, get, list, counts, what is ready or blocked, workers."""

from __future__ import annotations

import unittest

from jobqueue import catalogue
from tests.engine import LEASE_MS, NOW, StoreTestCase, ids, token

STATUSES = ("pending", "running", "retrying", "completed", "failed", "canceled")


class SteeringTest(StoreTestCase):
    """Cancel, retry, retry all that failed."""

    def test_a_canceled_job_takes_the_lease_from_its_holder(self) -> None:
        self.add("j")
        job = self.take("j")
        self.assertTrue(self.store.cancel("j", now_ms=NOW + 1))
        self.assertFalse(self.store.complete("j", token(job), "late", now_ms=NOW + 2))
        canceled = self.job("j")
        self.assertEqual((canceled.status, canceled.finished_at, canceled.lease_owner, canceled.result),
                         ("canceled", NOW + 1, None, None))
        self.assertEqual(self.claim(NOW + 10**9), [])

    def test_a_retried_job_has_a_new_budget_and_its_old_place(self) -> None:
        self.add("old", max_attempts=2)
        self.kill("old")
        self.add("new", NOW + 1)
        self.assertTrue(self.store.retry("old", now_ms=NOW + 5))
        retried = self.job("old")
        self.assertEqual((retried.attempts, retried.started_at, retried.finished_at, retried.created_at),
                         (0, None, None, NOW))
        self.assertEqual([(job.id, job.attempts) for job in self.claim(NOW + 5, limit=2)], [("old", 1), ("new", 1)])

    def test_a_retried_job_can_fail_again_as_often_as_at_first(self) -> None:
        self.add("j", max_attempts=2)
        self.kill("j")
        self.store.retry("j", now_ms=NOW)
        self.assertEqual(self.store.fail("j", token(self.take("j")), "x", now_ms=NOW), "retrying")
        job = self.take("j", NOW + 1_000)
        self.assertEqual(self.store.fail("j", token(job), "x", now_ms=NOW + 1_000), "failed")
        self.assertEqual(self.query("SELECT attempt FROM failures ORDER BY rowid"), [(1,), (1,), (2,)])

    def test_a_job_canceled_before_its_time_is_due_once_it_is_retried(self) -> None:
        self.add("j", run_at=NOW + 1_000_000)
        self.store.cancel("j", now_ms=NOW)
        self.store.retry("j", now_ms=NOW + 1)
        self.assertTrue(self.store.has_ready(["default"]))
        self.take("j", NOW + 1)

    def test_retry_failed_takes_all_of_a_type_in_order_and_leaves_the_rest(self) -> None:
        for id, type in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "x"), ("e", "x")):
            self.add(id, type=type)
        for id in "abc":
            self.kill(id)
        self.store.cancel("d", now_ms=NOW)
        self.assertEqual(self.store.retry_failed(now_ms=NOW, type="x"), (2, 3))
        self.assertEqual(self.store.retry_failed(now_ms=NOW, type="x", after_seq=3), (0, 3))
        self.assertEqual(self.statuses(), {
            "a": "pending", "b": "failed", "c": "pending", "d": "canceled", "e": "pending"})
        self.assertEqual(self.store.retry_failed(now_ms=NOW), (1, 2))
        self.assertEqual(self.store.retry_failed(now_ms=NOW), (0, 0))

    def test_retry_failed_goes_on_in_chunks_of_10000(self) -> None:
        self.add_many([{}] * 10_001)
        with self.store.transaction():
            self.store.sqlite.execute("UPDATE jobs SET status = 'failed', ready = 0, finished_at = 1")
        self.assertEqual(self.store.retry_failed(now_ms=NOW), (10_000, 10_000))
        self.assertEqual(self.store.retry_failed(now_ms=NOW, after_seq=10_000), (1, 10_001))
        self.assertEqual(self.store.counts()["pending"], 10_001)


class LookingTest(StoreTestCase):
    """get, list, iterate."""

    def one_of_each(self) -> None:
        """Make a job of each status, called by it, and one that is scheduled."""
        for status in ("completed", "failed", "canceled", "retrying", "running"):
            self.add(status, type=f"to-{status}")
            job = self.take(status)
            if status == "completed":
                self.store.complete(status, token(job), now_ms=NOW)
            elif status in ("failed", "retrying"):
                self.store.fail(status, token(job), "x", now_ms=NOW, final=status == "failed")
            elif status == "canceled":
                self.store.cancel(status, now_ms=NOW)
        self.add("scheduled", run_at=NOW + 1)
        self.add("pending")

    def test_a_job_comes_back_as_it_was_stored(self) -> None:
        self.add("p1")
        self.add("p2")
        self.add("j", type="mail", payload={"a": [1, "é"]}, queue="q", priority=-(2**63), max_attempts=7,
                 delay="1.5s", timeout=2.5, idempotency_key="k", depends_on=["p2", "p1", "p2"], trace="00-ab")
        job = self.job("j")
        self.assertEqual(
            {name: getattr(job, name) for name in job.COLUMNS if name not in ("ready", "result", "payload")},
            {"seq": 3, "id": "j", "queue": "q", "type": "mail", "priority": -9223372036854775808,
             "created_at": NOW, "run_at": NOW + 1_500, "status": "pending", "unmet": 2, "attempts": 0,
             "max_attempts": 7, "timeout_ms": 2_500, "idempotency_key": "k", "lease_owner": None,
             "lease_token": None, "lease_expires_at": None, "started_at": None, "finished_at": None,
             "last_error": None, "progress": None, "progress_note": None, "trace": "00-ab"},
        )
        self.assertEqual((job.payload, job.result), ({"a": [1, "é"]}, None))
        assert job.depends_on is not None
        self.assertEqual(sorted(job.depends_on), ["p1", "p2"])
        self.assertEqual(self.job("p1").depends_on, ())

    def test_odd_text_survives(self) -> None:
        texts = ["", "\0", "a\0b", "\x1b[31m", "\x7f\x80\x9f", "\u2028\u2029", "\ufeff", "\ufffe\uffff", "e\u0301",
                 "\U0001f469\u200d\U0001f680", "\U0010ffff", "'\"\\/", "مرحبا", "%s {} ?1 :x"]
        for n, text in enumerate(texts):
            with self.subTest(text=ascii(text)):
                payload = {text: [text, {"deep": text}]}
                self.add(f"j{n}", payload=payload)
                self.assertEqual(self.job(f"j{n}").payload, payload)
                job = self.take(f"j{n}")
                self.assertEqual(job.payload, payload)
                self.assertTrue(self.store.complete(job.id, token(job), payload, now_ms=NOW))
                self.assertEqual(self.job(f"j{n}").result, payload)

    def test_odd_names_survive(self) -> None:
        for name in ("é", "e\u0301", "'; DROP TABLE jobs; --", "\U0001f680" * 255, "a b", "%", "0", "01", "-1",
                     "1.0", "\u202e", "9" * 255):
            with self.subTest(name=ascii(name)[:30]):
                self.assertEqual(self.add(name, type=name, queue=name, idempotency_key=name), name)
                job = self.job(name)
                self.assertEqual((job.id, job.type, job.queue, job.idempotency_key), (name,) * 4)
                self.assertEqual(ids(self.store.list(queue=name, type=name)), [name])
                self.assertEqual(ids(self.claim(queues=(name,))), [name])

    def test_extreme_integers_survive(self) -> None:
        self.add("low", priority=-(2**63), max_attempts=1)
        self.add("high", priority=2**63 - 1, max_attempts=2**63 - 1)
        self.assertEqual([(job.id, job.priority, job.max_attempts) for job in self.claim(limit=2)],
                         [("high", 9223372036854775807, 9223372036854775807), ("low", -9223372036854775808, 1)])

    def test_list_shows_the_newest_first(self) -> None:
        self.one_of_each()
        self.assertEqual(ids(self.store.list()), [
            "pending", "scheduled", "running", "retrying", "canceled", "failed", "completed"])
        self.assertEqual(ids(self.store.list(limit=2)), ["pending", "scheduled"])
        self.assertEqual(ids(self.store.list(limit=0)), [])
        self.assertEqual(ids(self.store.list(before_seq=3)), ["failed", "completed"])

    def test_list_filters_by_status_type_and_queue(self) -> None:
        self.one_of_each()
        self.add("elsewhere", queue="q")
        for status in STATUSES:
            expected = {"pending": ["elsewhere", "pending", "scheduled"]}.get(status, [status])
            self.assertEqual(ids(self.store.list(status=status)), expected)
        self.assertEqual(ids(self.store.list(type="to-failed")), ["failed"])
        self.assertEqual(ids(self.store.list(queue="q")), ["elsewhere"])
        self.assertEqual(ids(self.store.list(queue="q", status="failed")), [])
        self.assertEqual(ids(self.store.list(queue="default", status="failed", type="to-failed")), ["failed"])

    def test_an_unknown_status_is_an_error_that_names_those_known(self) -> None:
        with self.assertRaisesRegex(ValueError, "'done'.*pending, running, retrying, completed, failed, canceled"):
            self.store.list(status="done")

    def test_iterate_goes_page_by_page_and_holds_no_snapshot_in_between(self) -> None:
        self.assertEqual(catalogue.PAGE, 500)
        self.add_many([{"depends_on": []}] * 1_200)
        everything = ids(self.store.list())
        self.assertEqual(everything, [str(n) for n in range(1_200, 0, -1)])
        for limit in (0, 1, 499, 500, 501, 1_000, 1_200, 5_000):
            self.assertEqual(ids(self.store.iterate(limit=limit)), everything[:limit], limit)
        jobs = self.store.iterate()
        next(jobs)
        self.assertFalse(self.store.sqlite.in_transaction)
        self.add("newer")
        self.assertEqual(len(list(jobs)), 1_199)

    def test_list_knows_the_dependencies_of_each(self) -> None:
        self.add_many([{"id": "a"}, {"id": "b", "depends_on": ["a"]}, {"id": "c", "depends_on": ["a", "b"]}])
        self.assertEqual({job.id: sorted(job.depends_on or ()) for job in self.store.list()},
                         {"a": [], "b": ["a"], "c": ["a", "b"]})


class CountingTest(StoreTestCase):
    """counts, shares, what happens next."""

    def test_an_empty_file_counts_nothing(self) -> None:
        self.assertEqual(self.store.counts(), dict.fromkeys(STATUSES, 0))
        self.assertEqual(self.store.shares(now_ms=NOW), {"ready": 0, "scheduled": 0, "waiting": 0, "blocked": 0})
        self.assertEqual((self.store.list(), self.store.blocked()), ([], []))
        self.assertIsNone(self.store.next_event(["default"]))
        self.assertFalse(self.store.has_ready(["default", "q"]))

    def test_counts_cover_a_queue_or_all(self) -> None:
        self.add("a")
        self.add("b", queue="q")
        self.add("c", queue="q")
        self.claim(queues=("q",))
        self.assertEqual(self.store.counts(), {**dict.fromkeys(STATUSES, 0), "pending": 2, "running": 1})
        self.assertEqual(self.store.counts("q"), {**dict.fromkeys(STATUSES, 0), "pending": 1, "running": 1})
        self.assertEqual(self.store.counts("nowhere"), dict.fromkeys(STATUSES, 0))

    def test_the_shares_of_the_waiting_exclude_each_other(self) -> None:
        self.add("dead", priority=9)
        self.kill("dead")
        self.add("running", priority=8)
        self.take("running")
        self.add("due")
        self.add("due later", run_at=NOW + 1)
        self.add("future", run_at=NOW + 100)
        self.add("waits for running", depends_on=["running"])
        self.add("blocked", depends_on=["dead", "running"])
        self.add("blocked too", depends_on=["blocked"], run_at=NOW + 100)
        self.add("other", queue="q", depends_on=["dead"])
        self.assertEqual(self.store.shares("default", now_ms=NOW),
                         {"ready": 1, "scheduled": 2, "waiting": 1, "blocked": 2})
        self.assertEqual(self.store.shares("default", now_ms=NOW + 1),
                         {"ready": 2, "scheduled": 1, "waiting": 1, "blocked": 2})
        self.assertEqual(self.store.shares(now_ms=NOW), {"ready": 1, "scheduled": 2, "waiting": 1, "blocked": 3})
        self.assertEqual(self.store.shares("q", now_ms=NOW),
                         {"ready": 0, "scheduled": 0, "waiting": 0, "blocked": 1})

    def test_a_job_that_was_due_before_the_clock_stepped_back_is_scheduled(self) -> None:
        self.add("j")
        self.assertEqual(self.store.shares(now_ms=NOW - 1),
                         {"ready": 0, "scheduled": 1, "waiting": 0, "blocked": 0})

    def test_the_next_event_is_a_start_or_an_expiry_in_one_of_the_queues(self) -> None:
        self.add("later", run_at=NOW + 700)
        self.assertEqual(self.store.next_event(["default"]), NOW + 700)
        self.add("now")
        self.take("now", lease_ms=500)
        self.assertEqual(self.store.next_event(["default"]), NOW + 500)
        self.add("q", queue="q", run_at=NOW + 10)
        self.assertEqual(self.store.next_event(["default"]), NOW + 500)
        self.assertEqual(self.store.next_event(["default", "q"]), NOW + 10)
        self.assertEqual(self.store.next_event(["nowhere"]), None)
        self.add("child", depends_on=["now"], run_at=NOW + 1)
        self.assertEqual(self.store.next_event(["default"]), NOW + 500, "what waits for others has no time")

    def test_has_ready_looks_at_the_queues_named(self) -> None:
        self.add("future", run_at=NOW + 1)
        self.assertFalse(self.store.has_ready(["default"]))
        self.add("j")
        self.assertTrue(self.store.has_ready(["nowhere", "default"]))
        self.assertFalse(self.store.has_ready(["nowhere"]))
        self.take("j")
        self.assertFalse(self.store.has_ready(["default"]))


class RosterTest(StoreTestCase):
    """The table of workers, which is for people only."""

    def arrive(self, id: str, now: int) -> None:
        self.store.worker_arrives(id, host="h", pid=7, queues=["a", "b"], types=["t"], allow_exec=True, now_ms=now)

    def test_a_worker_comes_is_seen_and_leaves(self) -> None:
        self.arrive("w", NOW)
        self.store.worker_seen("w", now_ms=NOW + 60_000)
        self.assertEqual(self.query("SELECT * FROM workers"),
                         [("w", "h", 7, '["a", "b"]', '["t"]', 1, NOW, NOW + 60_000)])
        self.store.worker_leaves("w")
        self.assertEqual(self.query("SELECT * FROM workers"), [])

    def test_one_not_seen_for_a_week_is_dropped_when_another_arrives(self) -> None:
        week_ms = 604_800_000
        self.arrive("gone", NOW)
        self.arrive("quiet", NOW + 1)
        self.assertEqual(self.query("SELECT id FROM workers ORDER BY id"), [("gone",), ("quiet",)])
        self.arrive("new", NOW + week_ms + 1)
        self.assertEqual(self.query("SELECT id FROM workers ORDER BY id"), [("new",), ("quiet",)])

    def test_it_has_no_say_in_what_is_safe(self) -> None:
        self.add("j")
        job = self.take("j")
        self.arrive("other", NOW)
        self.store.worker_leaves("worker-1")
        self.assertTrue(self.store.complete("j", token(job), now_ms=NOW + LEASE_MS - 1))


if __name__ == "__main__":
    unittest.main()
