"""The `Queue` face: units, defaults, errors, and what it adds to the engine."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import jobqueue
from jobqueue import DatabaseError, DependencyCycle, InvalidJob, JobQueueError, Queue, UnknownJobError
from jobqueue.jobs import new_job
from jobqueue.queue import Task
from tests.engine import NOW, QueueTestCase, token


class LifeTest(QueueTestCase):
    """Opening, closing, and a job's way through."""

    def test_the_way_of_a_job(self) -> None:
        with Queue(self.dir / "other.db", create=True) as queue:
            self.assertTrue(queue.created)
            id = queue.enqueue("mail", {"to": "ü"})
            self.assertEqual(id, "1")
            (job,) = queue.claim("me")
            self.assertEqual((job.id, job.type, job.payload, job.attempts), ("1", "mail", {"to": "ü"}, 1))
            self.assertTrue(queue.complete(id, token(job), {"sent": True}))
            done = queue.wait(id, timeout=0)
            self.assertEqual((done.status, done.result), ("completed", {"sent": True}))
        with self.assertRaisesRegex(DatabaseError, "is closed"):
            queue.get(id)
        queue.close()
        with Queue(self.dir / "other.db") as queue:
            self.assertFalse(queue.created)
            self.assertEqual([job.id for job in queue.list()], ["1"])

    def test_a_missing_file_is_an_error_unless_it_is_to_be_made(self) -> None:
        with self.assertRaisesRegex(DatabaseError, "init --database"):
            Queue(self.dir / "missing.db")
        self.assertFalse((self.dir / "missing.db").exists())

    def test_the_wall_clock_is_the_default(self) -> None:
        with Queue(self.dir / "other.db", create=True) as queue:
            job = queue.get(queue.enqueue("t"))
            assert job is not None
            self.assertLess(abs(job.created_at - datetime.now(UTC).timestamp() * 1_000), 60_000)

    def test_now_is_read_after_the_write_lock_is_held(self) -> None:
        inside: list[bool] = []

        def clock() -> int:
            inside.append(self.queue._store.sqlite.in_transaction)
            return NOW

        self.queue._clock = self.queue._shared._clock = clock
        self.queue.enqueue("t")
        self.queue.enqueue_many([{"type": "t"}])
        job = self.take()
        self.queue.extend("1", token(job))
        self.queue.release("1", token(job))
        self.queue.fail("1", token(self.take()), "x")
        self.queue.complete("2", token(self.take()))
        self.queue.cancel("1")
        self.queue.retry("1")
        self.queue.recover_expired()
        self.queue.retry_failed()
        self.assertGreaterEqual(len(inside), 13)
        self.assertEqual(set(inside), {True})

    def test_the_public_names_are_there(self) -> None:
        for name in ("Queue", "Job", "DatabaseBusy", "DatabaseError", "DependencyCycle", "InvalidJob"):
            self.assertIn(name, jobqueue.__all__)
            self.assertTrue(getattr(jobqueue, name))
        with self.assertRaises(AttributeError):
            jobqueue.nothing  # noqa: B018


class EnqueueTest(QueueTestCase):
    """Units and defaults, one job or many."""

    def test_the_defaults(self) -> None:
        job = self.job(self.queue.enqueue("t"))
        self.assertEqual(
            (job.queue, job.type, job.payload, job.priority, job.run_at, job.created_at, job.max_attempts,
             job.timeout_ms, job.idempotency_key, job.depends_on, job.trace, job.status, job.attempts),
            ("default", "t", None, 0, NOW, NOW, 3, None, None, (), None, "pending", 0))

    def test_times_and_durations(self) -> None:
        for fields, run_at, timeout_ms in (
            ({"delay": 1.5, "timeout": 0.25}, NOW + 1_500, 250),
            ({"delay": "2m", "timeout": "1h"}, NOW + 120_000, 3_600_000),
            ({"delay": 0, "timeout": 1}, NOW, 1_000),
            ({"run_at": "2030-01-31T08:00:00Z"}, 1_896_076_800_000, None),
            ({"run_at": "2030-01-31T08:00:00.250+02:00"}, 1_896_069_600_250, None),
            ({"run_at": datetime(2030, 1, 31, 8, tzinfo=UTC)}, 1_896_076_800_000, None),
            ({"run_at": 5}, 5, None),
        ):
            for id in (self.queue.enqueue("t", **fields), self.queue.enqueue_many([{"type": "t", **fields}])[0]):
                self.assertEqual((self.job(id).run_at, self.job(id).timeout_ms), (run_at, timeout_ms), fields)

    def test_bad_arguments_store_nothing(self) -> None:
        for fields in ({"delay": -1}, {"delay": 1, "run_at": 5}, {"timeout": 0}, {"run_at": "tomorrow"},
                       {"priority": 1.5}, {"max_attempts": 0}, {"queue": ""}, {"id": "a\n"}, {"payload": {1, 2}},
                       {"run_at": datetime(2030, 1, 31)}, {"depends_on": "abc"}, {"depends_on": ["nobody"]}):
            with self.subTest(fields=fields):
                with self.assertRaises(ValueError) as caught:
                    self.queue.enqueue("t", **fields)
                self.assertIsInstance(caught.exception, InvalidJob)
                with self.assertRaises(InvalidJob):
                    self.queue.enqueue_many([{"type": "t", **fields}])
        self.assertEqual(self.queue.list(), [])

    def test_the_same_key_is_the_same_job(self) -> None:
        self.assertEqual([self.queue.enqueue("t", n, idempotency_key="k") for n in range(3)], ["1", "1", "1"])
        self.assertEqual(self.queue.add(new_job("t", idempotency_key="k")), ("1", False))
        self.assertEqual(self.job("1").payload, 0)

    def test_many_are_stored_in_order_and_may_name_each_other(self) -> None:
        jobs: list[dict[str, Any]] = [
            {"type": "t", "id": "b", "depends_on": ["a"]}, {"type": "u", "payload": [1]}, {"type": "t", "id": "a"}]
        before = repr(jobs)
        self.assertEqual(self.queue.enqueue_many(jobs), ["b", "2", "a"])
        self.assertEqual(repr(jobs), before, "what was given is not changed")
        self.assertEqual([job.id for job in self.queue.claim("w", limit=9)], ["2", "a"])
        self.assertEqual(self.queue.enqueue_many({"type": "t"} for _ in range(3)), ["4", "5", "6"])
        self.assertEqual(self.queue.enqueue_many([]), [])

    def test_an_error_among_many_names_the_job_and_stores_none(self) -> None:
        good = {"type": "t"}
        for bad, message in (
            ({"type": ""}, "type must have 1 to 255 characters"),
            ({}, "the key 'type' is missing"),
            ({"type": "t", "prio": 1}, "unknown key 'prio'"),
            (None, "a job must be an object with the key 'type'"),
            ("text", "a job must be an object with the key 'type'"),
            ({"type": "t", "depends_on": ["nobody"]}, "depends_on names 'nobody'"),
            ({"type": "t", "id": "known"}, "there is a job 'known' already"),
            ({"type": "t", "id": "first"}, "the id 'first' is given to two jobs of the batch"),
        ):
            with self.subTest(bad=bad):
                self.queue.enqueue("t", id="known") if not self.queue.get("known") else None
                jobs: list[Any] = [{"type": "t", "id": "first"}, good, bad, good]
                with self.assertRaisesRegex(InvalidJob, rf"^jobs\[2\]: {message}") as caught:
                    self.queue.enqueue_many(jobs)
                self.assertEqual(caught.exception.index, 2)
                self.assertEqual([job.id for job in self.queue.list()], ["known"])

    def test_a_ring_is_told_with_its_ids(self) -> None:
        with self.assertRaisesRegex(DependencyCycle, r"^jobs\[[01]\]: jobs depend on each other in a") as caught:
            self.queue.enqueue_many([{"type": "t", "id": "a", "depends_on": ["b"]},
                                     {"type": "t", "id": "b", "depends_on": ["a"]}])
        self.assertEqual(set(caught.exception.cycle), {"a", "b"})

    def test_only_a_batch_that_takes_long_prolongs_the_leases_of_workers(self) -> None:
        self.queue._store.worker_arrives("w", host="h", pid=1, queues=[], types=[], now_ms=NOW)
        self.queue.enqueue("t", id="j")
        self.take("j")
        expiry = NOW + 30_000
        for held_ms, expected in ((0, expiry), (100, expiry), (101, expiry + 202), (20_000, expiry + 40_202),
                                  (600_000, expiry + 40_202), (-5, expiry + 40_202)):
            readings = iter([NOW, NOW + held_ms])
            self.queue._clock = lambda readings=readings: next(readings)  # type: ignore[misc]
            self.queue.enqueue_many([{"type": "t"}])
            self.assertEqual(self.job("j").lease_expires_at, expected, held_ms)

    def test_a_generator_may_use_the_queue_but_not_start_another_batch(self) -> None:
        def jobs(inner: Callable[[], object]) -> Iterator[dict[str, object]]:
            yield {"type": "t"}
            inner()
            yield {"type": "t"}

        self.assertEqual(self.queue.enqueue_many(jobs(lambda: self.queue.enqueue("inner"))), ["2", "3"])
        with self.assertRaisesRegex(JobQueueError, "another batch"):
            self.queue.enqueue_many(jobs(lambda: self.queue.enqueue_many([{"type": "inner"}])))
        self.assertEqual(self.queue.enqueue_many([{"type": "t"}]), ["4"])


class WorkTest(QueueTestCase):
    """Claiming and settling."""

    def test_a_claim_recovers_what_has_expired_first(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.enqueue("t", id="b", queue="other")
        first = self.queue.claim("w1", lease_seconds=30, limit=9, queues=("default", "other"))
        self.clock.advance(29_999)
        self.assertEqual(self.queue.claim("w2", limit=9), [])
        self.clock.advance(1)
        (again,) = self.queue.claim("w2", limit=9)
        self.assertEqual((again.id, again.attempts, again.lease_owner), ("a", 2, "w2"))
        self.assertNotEqual(again.lease_token, first[0].lease_token)
        self.assertFalse(self.queue.complete("a", token(first[0])))
        self.assertTrue(self.queue.complete("a", token(again)))
        self.assertEqual(self.job("b").status, "running", "nobody served its queue")

    def test_lease_seconds_are_seconds(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 4)
        for lease_seconds, ms in ((0.001, 1), (1.5, 1_500), (2.0004, 2_000), (30, 30_000)):
            (job,) = self.queue.claim("w", lease_seconds=lease_seconds)
            self.assertEqual(job.lease_expires_at, NOW + ms)

    def test_a_claim_checks_its_arguments(self) -> None:
        self.queue.enqueue("t")
        claim: Callable[..., object] = self.queue.claim
        for arguments, message in (
            ({"worker_id": ""}, "worker_id must have"), ({"worker_id": None}, "worker_id must be a string"),
            ({"lease_seconds": 0}, "lease_seconds must be at least 0.001"),
            ({"lease_seconds": -1}, "lease_seconds must be"),
            ({"lease_seconds": float("nan")}, "lease_seconds"), ({"limit": 0}, "limit must lie"),
            ({"limit": True}, "limit must be a whole number"), ({"queues": ()}, "queues must be a list"),
            ({"queues": "default"}, "queues must be a list"),
        ):
            with self.subTest(arguments=arguments), self.assertRaisesRegex(InvalidJob, message):
                claim(**{"worker_id": "w", **arguments})
        self.assertEqual(self.job("1").status, "pending")

    def test_a_claim_gets_the_best_of_all_that_is_due_however_many(self) -> None:
        self.queue.enqueue_many({"type": "t", "run_at": NOW + 5, "priority": n // 12_000} for n in range(12_001))
        self.clock.advance(5)
        self.assertEqual(self.take().priority, 1)

    def test_more_than_a_thousand_expired_leases_are_recovered_before_a_claim(self) -> None:
        self.queue.enqueue_many([{"type": "t", "max_attempts": 1}] * 2_500)
        self.queue.claim("w", limit=2_500)
        self.queue.enqueue("t", id="next")
        self.clock.advance(30_000)
        self.take("next")
        self.assertEqual((self.queue.stats()["failed"], self.queue.stats()["running"]), (2_500, 1))

    def test_recover_expired_counts_all(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 2_001)
        self.queue.claim("w", limit=2_001)
        self.assertEqual(self.queue.recover_expired(), 0)
        self.clock.advance(30_000)
        self.assertEqual(self.queue.recover_expired(queues=("other",)), 0)
        self.assertEqual(self.queue.recover_expired(), 2_001)
        self.assertEqual(self.queue.recover_expired(), 0)

    def test_failing(self) -> None:
        for fields, status, run_at in (
            ({}, "retrying", NOW + 1_000),
            ({"retry_after": 2.5}, "retrying", NOW + 2_500),
            ({"retry_after": "5m"}, "retrying", NOW + 300_000),
            ({"retry_after": 0}, "retrying", NOW),
            ({"final": True}, "failed", NOW),
        ):
            id = self.queue.enqueue("t", priority=9)
            self.assertTrue(self.queue.fail(id, token(self.take(id)), ValueError("why"), **fields))
            job = self.job(id)
            self.assertEqual((job.status, job.run_at, job.last_error), (status, run_at, "why"), fields)
            self.queue.cancel(id)

    def test_a_lost_lease_is_told_by_false(self) -> None:
        self.queue.enqueue("t")
        held = token(self.take())
        self.assertTrue(self.queue.extend("1", held, 60))
        self.clock.advance(59_999)
        self.assertTrue(self.queue.extend("1", held, 1))
        self.clock.advance(1_000)
        self.assertFalse(self.queue.extend("1", held))
        self.assertFalse(self.queue.complete("1", held))
        self.assertFalse(self.queue.fail("1", held, "x"))
        self.assertFalse(self.queue.release("1", held))
        for call in (self.queue.extend, self.queue.complete, self.queue.release):
            with self.assertRaises(UnknownJobError):
                call("nobody", held)

    def test_a_work_loop_settles_as_told(self) -> None:
        self.queue.enqueue_many([{"type": "t", "id": id} for id in ("done", "result", "failed", "left", "last")])
        seen = []
        for task in self.queue.work("w"):
            self.assertIsInstance(task, Task)
            seen.append(task.job.id)
            if task.job.id == "result":
                task.complete([1])
            elif task.job.id == "failed":
                task.fail("no", final=True)
            elif task.job.id == "left":
                break
        self.assertEqual(seen, ["done", "result", "failed", "left"])
        self.assertEqual([(self.job(id).status, self.job(id).attempts) for id in (*seen, "last")], [
            ("completed", 1), ("completed", 1), ("failed", 1), ("pending", 0), ("pending", 0)])
        self.assertEqual(self.job("result").result, [1])

    def test_a_work_loop_shares_the_commit_of_settling_with_the_next_claim(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 10)
        commits = self.queue._store.commits
        self.assertEqual(len(list(self.queue.work("w"))), 10)
        self.assertEqual(self.queue._store.commits, commits + 11)
        self.assertEqual(self.queue.stats()["completed"], 10)

    def test_an_error_in_a_work_loop_gives_the_job_back(self) -> None:
        self.queue.enqueue("t")
        with self.assertRaises(ZeroDivisionError):
            for _ in self.queue.work("w"):
                raise ZeroDivisionError
        self.assertEqual((self.job("1").status, self.job("1").attempts), ("pending", 0))


class SteeringTest(QueueTestCase):
    """Looking and steering."""

    def dead(self, *ids: str, type: str = "t") -> None:
        for id in ids:
            self.queue.enqueue(type, id=id)
            self.queue.fail(id, token(self.take(id)), "x", final=True)

    def test_looking(self) -> None:
        self.dead("a", "b", type="x")
        self.queue.enqueue("t", id="c", queue="q", delay=5)
        self.queue.enqueue("t", id="d", depends_on=["a"])
        self.assertEqual([job.id for job in self.queue.list()], ["d", "c", "b", "a"])
        self.assertEqual([job.id for job in self.queue.list("failed", limit=1)], ["b"])
        self.assertEqual([job.id for job in self.queue.list(type="x")], ["b", "a"])
        self.assertEqual([job.id for job in self.queue.iterate(queue="q")], ["c"])
        self.assertEqual(self.queue.list(limit=0), [])
        with self.assertRaisesRegex(ValueError, "no status 'nonsense'"):
            self.queue.list("nonsense")
        self.assertEqual(self.queue.stats(), {
            "pending": 2, "running": 0, "retrying": 0, "completed": 0, "failed": 2, "canceled": 0,
            "ready": 0, "scheduled": 1, "waiting": 0, "blocked": 1})
        self.assertEqual((self.queue.stats("q")["scheduled"], self.queue.stats("q")["failed"]), (1, 0))
        self.assertIsNone(self.queue.get("nobody"))

    def test_the_numbers_of_stats_are_of_one_state(self) -> None:
        self.queue.enqueue("t")
        other = self.open()

        def clock() -> int:  # read between the counts and the shares
            other.enqueue("t")
            return NOW

        self.queue._clock = clock
        stats = self.queue.stats()
        self.assertEqual((stats["pending"], stats["ready"]), (1, 1))
        self.assertEqual(self.queue.stats()["pending"], 2)

    def test_cancel_and_retry(self) -> None:
        self.queue.enqueue("t", id="a")
        self.assertEqual([self.queue.retry("a"), self.queue.cancel("a"), self.queue.cancel("a"),
                          self.queue.retry("a"), self.queue.retry("a")], [False, True, False, True, False])
        for call in (self.queue.cancel, self.queue.retry):
            with self.assertRaises(UnknownJobError):
                call("nobody")

    def test_retry_failed(self) -> None:
        self.dead("a", "b", "c")
        self.dead("d", type="x")
        self.assertEqual(self.queue.retry_failed(dry_run=True), 4)
        self.assertEqual(self.queue.retry_failed(type="x", dry_run=True), 1)
        self.assertEqual(self.queue.retry_failed(id="a", dry_run=True), 1)
        self.assertEqual(self.queue.stats()["failed"], 4)
        self.assertEqual([self.queue.retry_failed(id="a"), self.queue.retry_failed(id="a")], [1, 0])
        self.assertEqual(self.queue.retry_failed(id="b", type="x"), 0)
        self.assertEqual(self.queue.retry_failed(type="x"), 1)
        self.assertEqual([self.queue.retry_failed(), self.queue.retry_failed()], [2, 0])
        with self.assertRaises(UnknownJobError):
            self.queue.retry_failed(id="nobody")


if __name__ == "__main__":
    unittest.main()
