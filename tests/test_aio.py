"""`WorkQueue`: jobs are stored once, leased once, settled by who holds them, and all of it is logged."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import sys
import unittest
from typing import Any
from unittest import mock

import jobqueue
from jobqueue import DatabaseError, InvalidJob, Queue, UnknownJobError, aio
from tests.aio_case import LEASE_MS, AioTestCase
from tests.support import jobs, run, until


class EnqueueTest(AioTestCase):
    """Putting jobs in, once each."""

    async def test_a_job_is_stored_once_by_its_id(self) -> None:
        async with self.queue() as queue:
            self.assertIs(await queue.enqueue("a", {"n": 1}, type="t", trace_id="trace", priority=2), True)
            self.assertIs(await queue.enqueue("a", {"n": 2}), False)
            self.assertEqual(await queue.get("a"), {
                "job_id": "a", "type": "t", "payload": {"n": 1}, "status": "pending", "priority": 2, "attempts": 0,
                "retry_limit": 3, "created_at": self.clock(), "run_at": self.clock(), "worker": None,
                "expires_at": None, "result": None, "error": None, "trace_id": "trace",
            })  # fmt: skip
        async with self.queue() as queue:
            self.assertIs(await queue.enqueue("a", {"n": 3}), False)
            self.assertEqual(await queue.stats(), {"pending": 1, "running": 0, "done": 0, "dead": 0})
        self.assertIs(jobqueue.WorkQueue, aio.WorkQueue)

    async def test_of_many_who_store_the_same_ids_at_once_one_is_told_that_it_is_new(self) -> None:
        async with self.queue() as queue, self.queue() as other:
            answers = await asyncio.gather(*(
                each.enqueue(f"j{n}", n) for n in range(20) for each in (queue, other, queue)))
            self.assertEqual(sum(answers), 20)
            self.assertEqual((await queue.stats())["pending"], 20)

    async def test_calls_that_come_together_share_their_commits(self) -> None:
        async with self.queue() as queue:
            with self.locked():
                tasks = [asyncio.create_task(queue.enqueue(f"j{n}", n)) for n in range(900)]
                await asyncio.sleep(0)  # now all of them have been called
                before = queue._clerk._store.commits
            self.assertEqual(await asyncio.gather(*tasks), [True] * 900)
            self.assertLess(queue._clerk._store.commits - before, 5)

    async def test_one_wrong_call_does_not_harm_those_that_share_its_transaction(self) -> None:
        async with self.queue() as queue:
            answers = await asyncio.gather(
                queue.enqueue("a", 1), queue.enqueue("b", 1, depends_on=["nobody"]), queue.requeue("nobody"),
                queue.enqueue("c", 1), return_exceptions=True)
            self.assertEqual([type(answer) for answer in answers], [bool, InvalidJob, UnknownJobError, bool])
            self.assertEqual((await queue.stats())["pending"], 2)

    async def test_what_breaks_a_rule_is_refused(self) -> None:
        async with self.queue() as queue:
            with Queue(self.db) as elsewhere:
                elsewhere.enqueue("print", id="taken")
            for message, call in (
                ("job_id must be a string", lambda: queue.enqueue(7, 1)),
                ("payload is not JSON", lambda: queue.enqueue("a", {1, 2})),
                ("type must", lambda: queue.enqueue("a", 1, type="")),
                ("trace must", lambda: queue.enqueue("a", 1, trace_id="\n")),
                ("retry_limit must", lambda: queue.enqueue("a", 1, retry_limit=0)),
                ("depends on itself", lambda: queue.enqueue("a", 1, depends_on=["a"])),
                ("there is a job 'taken' already", lambda: queue.enqueue("taken", 1)),
                ("worker_id must", lambda: queue.lease("")),
                ("wait must", lambda: queue.lease("w", wait=-1)),
                ("wait must", lambda: queue.lease("w", wait=math.nan)),
                ("concurrency must", lambda: queue.run({}, concurrency=0)),
                ("handler for 'x' must", lambda: queue.run({"x": 3})),
            ):
                with self.subTest(message=message), self.assertRaisesRegex(InvalidJob, message):
                    await call()
            self.assertEqual((await queue.stats())["pending"], 0)
            self.assertIsNone(await queue.get("taken"))
            self.assertIsNone(await queue.lease("w"), "it took a job of another queue")
        for option in ({"retry_limit": 0}, {"lease_seconds": 0}, {"queue": ""}, {"timeout": -1}):
            with self.subTest(option=option), self.assertRaisesRegex(InvalidJob, f"{next(iter(option))} must"):
                self.queue(**option)

    async def test_dependencies_and_delays_hold_a_job_back(self) -> None:
        async with self.queue() as queue:
            await queue.enqueue("parent", 1, delay=5)
            await queue.enqueue("child", 1, depends_on=["parent"], priority=9)
            self.assertIsNone(await queue.lease("w"))
            self.clock.advance(5_000)
            async with await self.lease(queue) as lease:
                self.assertEqual(lease.job_id, "parent")
                self.assertIsNone(await queue.lease("w"))
            self.assertEqual((await self.lease(queue)).job_id, "child")


class LeaseTest(AioTestCase):
    """Leasing, settling, and what becomes of a lease."""

    async def test_fifty_tasks_lease_each_of_ten_jobs_once(self) -> None:
        async with self.queue() as queue, self.queue() as other:
            for n in range(10):
                await queue.enqueue(f"j{n}", n)
            leases = await asyncio.gather(*(each.lease(f"w{n}") for n in range(25) for each in (queue, other)))
            got = [lease for lease in leases if lease is not None]
            self.assertEqual(sorted(lease.job_id for lease in got), sorted(f"j{n}" for n in range(10)))
            self.assertEqual(len({lease.lease_token for lease in got}), 10)
            self.assertEqual({lease.attempts for lease in got}, {1})

    async def test_a_lease_says_what_the_worker_needs(self) -> None:
        async with self.queue(lease_seconds=2.5) as queue:
            await queue.enqueue("a", [1], type="t", trace_id="00-abc-01", timeout=4)
            lease = await self.lease(queue)
            self.assertEqual(
                (lease.job_id, lease.type, lease.payload, lease.attempts, lease.trace_id, lease.worker_id,
                 lease.expires_at, lease.timeout_seconds, lease.lost),
                ("a", "t", [1], 1, "00-abc-01", "w", self.clock() + 2_500, 4, False))
            self.assertEqual(await self.state(queue), ("running", 1))
            self.assertIsNone(await queue.lease("w"))
            self.assertTrue(await queue.complete("a", lease.lease_token, {"ok": [1]}))
            found = await queue.get("a")
            assert found is not None
            self.assertEqual((found["status"], found["result"], found["worker"]), ("done", {"ok": [1]}, None))

    async def test_only_the_current_token_settles_a_job(self) -> None:
        async with self.leased() as (queue, lease):
            self.clock.advance(LEASE_MS)
            self.assertFalse(await queue.complete("a", lease.lease_token, 1), "the lease had ended")
            again = await self.lease(queue)
            wrong: list[Any] = [lease.lease_token, "", None, 7, 10**30, b"x", "\ud800", again.lease_token + "x"]
            for token in wrong:
                with self.subTest(token=token):
                    self.assertIs(await queue.complete("a", token, 1), False)
                    self.assertIs(await queue.fail("a", token, "e"), False)
                    self.assertIs(await queue.release("a", token), False)
            self.assertIs(await queue.complete("nobody", again.lease_token), False)
            self.assertIs(await queue.complete(None, again.lease_token), False)
            with self.assertRaisesRegex(InvalidJob, "result is not JSON"):
                await queue.complete("a", again.lease_token, {1})
            self.assertEqual(await self.state(queue), ("running", 2))
            self.assertIs(await queue.complete("a", again.lease_token), True)
            self.assertIs(await queue.complete("a", again.lease_token), False)
            self.assertEqual(await self.state(queue), ("done", 2))

    async def test_the_backoff_grows_and_the_dead_are_never_leased(self) -> None:
        async with self.queue(retry_limit=9) as queue:
            await queue.enqueue("a", 1)
            for attempt, wait in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 1):
                lease = await self.lease(queue)
                self.assertEqual(lease.attempts, attempt)
                self.assertTrue(await queue.fail("a", lease.lease_token, f"error {attempt}"))
                self.assertEqual(await self.state(queue), ("pending", attempt))
                self.clock.advance(wait * 1_000 - 1)
                self.assertIsNone(await queue.lease("w"), f"{wait} s had not passed")
                self.clock.advance(1)
            lease = await self.lease(queue)
            self.assertTrue(await queue.fail("a", lease.lease_token, ValueError("the last")))
            found = await queue.get("a")
            assert found is not None
            self.assertEqual((found["status"], found["attempts"], found["error"]), ("dead", 9, "the last"))
            self.clock.advance(10**9)
            self.assertIsNone(await queue.lease("w"))
            self.assertEqual(await queue.stats(), {"pending": 0, "running": 0, "done": 0, "dead": 1})

    async def test_requeue_brings_the_dead_back_and_nobody_else(self) -> None:
        async with self.leased(retry_limit=1) as (queue, lease):
            self.assertIs(await queue.requeue("a"), False)
            await queue.fail("a", lease.lease_token, "e")
            self.assertEqual(await self.state(queue), ("dead", 1))
            self.assertIs(await queue.requeue("a"), True)
            self.assertEqual(await self.state(queue), ("pending", 0))
            self.assertEqual((await self.lease(queue)).attempts, 1)
            for unknown in ("nobody", None):
                with self.assertRaises(UnknownJobError):
                    await queue.requeue(unknown)

    async def test_an_expired_lease_is_recovered_by_the_next_one(self) -> None:
        async with self.leased(retry_limit=2) as (queue, lease):
            self.clock.advance(LEASE_MS - 1)
            self.assertIsNone(await queue.lease("w"))
            self.clock.advance(1)
            again = await self.lease(queue)
            self.assertEqual((again.job_id, again.attempts), ("a", 2))
            self.assertNotEqual(again.lease_token, lease.lease_token)
            self.clock.advance(LEASE_MS)
            self.assertIsNone(await queue.lease("w"))
            self.assertEqual(await self.state(queue), ("dead", 2))

    async def test_retries_can_be_delayed_or_ruled_out(self) -> None:
        async with self.leased() as (queue, lease):
            self.assertTrue(await queue.fail("a", lease.lease_token, "e", retry_after="2m"))
            found = await queue.get("a")
            assert found is not None
            self.assertEqual(found["run_at"], self.clock() + 120_000)
            self.clock.advance(120_000)
            lease = await self.lease(queue)
            self.assertTrue(await queue.fail("a", lease.lease_token, "e", final=True))
            self.assertEqual(await self.state(queue), ("dead", 2))

    async def test_released_jobs_get_their_attempt_back(self) -> None:
        async with self.leased() as (queue, lease):
            self.assertIs(await queue.release("a", lease.lease_token), True)
            self.assertEqual(await self.state(queue), ("pending", 0))

    async def test_jobs_and_leases_outlive_a_killed_process(self) -> None:
        program = (
            "import asyncio, sys\n"
            "from jobqueue import WorkQueue\n"
            "async def main():\n"
            "    async with WorkQueue(sys.argv[1], lease_seconds=30) as queue:\n"
            "        for n in range(3):\n"
            "            await queue.enqueue(f'j{n}', n)\n"
            "        async with await queue.lease('first') as lease:\n"
            "            print(lease.job_id, lease.expires_at, flush=True)\n"
            "            await asyncio.sleep(1000)\n"
            "asyncio.run(main())\n"
        )
        process = self.spawn([sys.executable, "-c", program, str(self.db)])
        until(process.stdout_text, 30, "the other process to hold a lease")
        process.kill()
        process.wait(10)
        job_id, expires_at = process.stdout_text().split()
        self.assertEqual(job_id, "j0")
        self.clock.now_ms = int(expires_at) - 1
        async with self.queue() as queue:
            self.assertEqual(await queue.stats(), {"pending": 2, "running": 1, "done": 0, "dead": 0})
            self.assertEqual((await self.lease(queue)).job_id, "j1")
            self.clock.advance(1)
            again = await self.lease(queue)
            self.assertEqual((again.job_id, again.attempts), ("j0", 2))

    async def test_it_shares_the_file_with_the_command_line(self) -> None:
        async with self.queue(clock=None) as queue:
            done = run("enqueue", "--database", self.db, "--queue", "work", "--type", "t", "--payload", "[5]")
            self.assertEqual(done.returncode, 0, done.stderr)
            async with await self.lease(queue) as lease:
                self.assertEqual((lease.job_id, lease.payload), (done.stdout.strip(), [5]))
            await queue.enqueue("b", 1, trace_id="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
            self.assertEqual(
                [(job["id"], job["queue"], job["status"], job["trace"]) for job in jobs(self.db)],
                [("b", "work", "pending", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
                 (lease.job_id, "work", "completed", None)])


class LogTest(AioTestCase):
    """Every transition is one record."""

    FIELDS = ("event", "job_id", "type", "attempt", "worker", "trace_id", "status")

    def told(self, records: list[logging.LogRecord]) -> list[tuple[Any, ...]]:
        return [tuple(getattr(record, field) for field in self.FIELDS) for record in records]

    async def test_each_transition_is_told_once_with_its_fields(self) -> None:
        async with self.queue(retry_limit=2) as queue:
            with self.assertLogs("jobqueue", "INFO") as logs:
                await queue.enqueue("a", 1, type="t", trace_id="x")
                await queue.enqueue("a", 1, type="t", trace_id="x")
                await queue.release("a", (await self.lease(queue)).lease_token)
                await queue.fail("a", (await self.lease(queue)).lease_token, "e")
                self.clock.advance(1_000)
                await self.lease(queue)
                self.clock.advance(LEASE_MS)
                await queue.lease("w")
                await queue.requeue("a")
                lease = await self.lease(queue)
                await queue.complete("a", "stale")
                await queue.complete("a", lease.lease_token)
                await queue.complete("a", lease.lease_token)
            self.assertEqual(self.told(logs.records), [
                ("enqueue", "a", "t", 0, None, "x", "pending"),
                ("lease", "a", "t", 1, "w", "x", "running"),
                ("release", "a", "t", 1, "w", "x", "pending"),
                ("lease", "a", "t", 1, "w", "x", "running"),
                ("fail", "a", "t", 1, "w", "x", "pending"),
                ("lease", "a", "t", 2, "w", "x", "running"),
                ("expire", "a", "t", 2, "w", "x", "dead"),
                ("requeue", "a", "t", 0, None, "x", "pending"),
                ("lease", "a", "t", 1, "w", "x", "running"),
                ("complete", "a", "t", 1, "w", "x", "done"),
            ])  # fmt: skip
            self.assertEqual([record.levelname for record in logs.records if record.levelname != "INFO"],
                             ["WARNING", "ERROR"])
            self.assertEqual(logs.records[4].getMessage(), "fail: job a (t), attempt 1, now pending: e")

    async def test_what_was_rolled_back_is_not_told(self) -> None:
        async with self.leased() as (queue, lease):
            store = queue._clerk._store
            with self.assertLogs("jobqueue", "INFO") as logs:
                real = store._finish
                failed_once = iter([True])

                def finish(failed: bool) -> None:
                    if next(failed_once, False):
                        real(True)
                        raise DatabaseError("the disk is full")
                    real(failed)

                with mock.patch.object(store, "_finish", finish):
                    self.assertTrue(await queue.complete("a", lease.lease_token))
                    await self.eventually(lambda: len(logs.records) == 3, "three records")
            self.assertEqual([record.event for record in logs.records], ["trouble", "complete", "recovery"])
            self.assertEqual(await self.state(queue), ("done", 1))

    async def test_a_broken_log_handler_loses_no_lease(self) -> None:
        class Broken(logging.Filter):
            def filter(self, record: logging.LogRecord) -> bool:
                raise RuntimeError("broken filter")

        async with self.queue() as queue:
            await queue.enqueue("a", 1)
            logger = logging.getLogger("jobqueue")
            level = logger.level
            logger.setLevel(logging.INFO)
            logger.addFilter(broken := Broken())
            try:
                with contextlib.redirect_stderr(io.StringIO()) as shown:
                    lease = await self.lease(queue)
                    self.assertTrue(await queue.complete("a", lease.lease_token))
            finally:
                logger.removeFilter(broken)
                logger.setLevel(level)
            self.assertEqual(shown.getvalue().count("broken filter\n"), 2)
            self.assertEqual(await self.state(queue), ("done", 1))


if __name__ == "__main__":
    unittest.main()
