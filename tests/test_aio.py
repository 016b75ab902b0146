"""`WorkQueue`: leases under asyncio, above all what is left when a call is canceled, anywhere.

Deadlines of leases follow a clock that the tests move. Real time passes only where a real lock, a real file or
a real process is waited for. Every test ends with a look for threads and tasks that it left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import math
import os
import sqlite3
import sys
import threading
import time
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import jobqueue
from jobqueue import (
    DatabaseBusy,
    DatabaseError,
    InvalidJob,
    Lease,
    LeaseLost,
    Queue,
    Reject,
    Retry,
    UnknownJobError,
    WorkQueue,
    aio,
    clerk,
    connection,
)
from jobqueue.moves import Moves
from jobqueue.operations import Operation
from tests.support import FakeClock, TempDirTestCase, jobs, run, sql, until

LEASE_MS = 30_000


class AioTestCase(TempDirTestCase, unittest.IsolatedAsyncioTestCase):
    """A test with a clock of its own; `self.queue()` opens a queue for it in `self.db`."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = FakeClock()
        # No power fails here, and thousands of commits would be waited for.
        pragmas = ["synchronous = OFF" if "synchronous" in pragma else pragma for pragma in connection._PRAGMAS]
        patch = mock.patch.object(connection, "_PRAGMAS", pragmas)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.assert_no_thread)
        logger = logging.getLogger("jobqueue")
        logger.addHandler(handler := logging.NullHandler())  # the warnings that are provoked here are not shown
        self.addCleanup(logger.removeHandler, handler)

    async def asyncSetUp(self) -> None:
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60  # in the debug mode that these tests run in, it would be told of
        self.complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: self.complaints.append(context))

    async def asyncTearDown(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        self.assertEqual(left, set(), "tasks were left behind")
        self.assertEqual(self.complaints, [], "errors that nobody asked for")

    def assert_no_thread(self) -> None:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("jobqueue")]
        self.assertEqual(left, [], "threads were left behind")

    def queue(self, **options: Any) -> WorkQueue:
        return WorkQueue(options.pop("path", self.db), clock=options.pop("clock", self.clock), **options)

    @contextlib.asynccontextmanager
    async def leased(self, job_id: str = "a", **options: Any) -> AsyncIterator[tuple[WorkQueue, Lease]]:
        """Open a queue with one job, which is leased."""
        async with self.queue(**options) as queue:
            self.assertTrue(await queue.enqueue(job_id, {"for": job_id}))
            yield queue, await self.lease(queue)

    async def lease(self, queue: WorkQueue, **options: Any) -> Lease:
        """Lease what there must be."""
        lease = await queue.lease("w", **options)
        assert lease is not None, "there is nothing to lease"
        return lease

    async def state(self, queue: WorkQueue, job_id: str = "a") -> tuple[str, int]:
        """Return status and attempts."""
        found = await queue.get(job_id)
        assert found is not None, f"there is no job {job_id}"
        return found["status"], found["attempts"]

    def stored(self, job_id: str = "a") -> list[tuple[Any, ...]]:
        """Return status and attempts as the file has them, in the engine's words."""
        return sql(self.db, "SELECT status, attempts FROM jobs WHERE id = ?", job_id)

    async def eventually(self, predicate: Callable[[], object], what: str, seconds: float = 20) -> None:
        """Wait for another thread or task, with a deadline."""
        deadline = time.monotonic() + seconds
        while not predicate():
            self.assertLess(time.monotonic(), deadline, f"waited in vain for {what}")
            await asyncio.sleep(0.002)

    @contextlib.contextmanager
    def locked(self, path: Path | None = None) -> Generator[sqlite3.Connection]:
        """Hold the write lock, as another process would."""
        locker = sqlite3.connect(path or self.db, isolation_level=None)
        try:
            locker.execute("BEGIN IMMEDIATE")
            yield locker
        finally:
            locker.close()


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
            before = queue._clerk._store.commits
            answers = await asyncio.gather(*(queue.enqueue(f"j{n}", n) for n in range(900)))
            self.assertEqual(answers, [True] * 900)
            self.assertLess(queue._clerk._store.commits - before, 300)

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


class ContextTest(AioTestCase):
    """`async with lease`."""

    async def test_a_normal_end_completes_the_job_with_its_result(self) -> None:
        async with self.leased() as (queue, lease):
            async with lease as same:
                self.assertIs(same, lease)
                lease.result = {"answer": 42}
            found = await queue.get("a")
            assert found is not None
            self.assertEqual((found["status"], found["result"]), ("done", {"answer": 42}))

    async def test_an_exception_fails_the_attempt_and_goes_on(self) -> None:
        for error, text, wait, status in (
            (ValueError("no"), "ValueError: no", 1_000, "pending"),
            (KeyError(), "KeyError", 1_000, "pending"),
            (Retry(after=7, reason="later"), "Retry: later", 7_000, "pending"),
            (Reject("never"), "Reject: never", 0, "dead"),
        ):
            with self.subTest(error=error):
                async with self.queue() as queue:
                    await queue.enqueue(repr(error), 1)
                    lease = await self.lease(queue)
                    with self.assertRaises(type(error)) as caught:
                        async with lease:
                            raise error
                    self.assertIs(caught.exception, error)
                    found = await queue.get(repr(error))
                    assert found is not None
                    self.assertEqual((found["status"], found["error"], found["run_at"] - self.clock()),
                                     (status, text, wait))
                    self.assertEqual(found["attempts"], 1)

    async def test_a_cancellation_gives_the_job_back(self) -> None:
        async with self.leased() as (queue, lease):
            entered = asyncio.Event()

            async def hold() -> None:
                async with lease:
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await entered.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual(self.stored(), [("pending", 0)])
            self.assertEqual((await self.lease(queue)).attempts, 1)

    async def test_a_result_that_is_not_json_fails_the_attempt(self) -> None:
        async with self.leased() as (queue, lease):
            with self.assertRaisesRegex(InvalidJob, "result is not JSON"):
                async with lease:
                    lease.result = {1, 2}
            found = await queue.get("a")
            assert found is not None
            self.assertEqual((found["status"], found["attempts"]), ("pending", 1))
            self.assertIn("result is not JSON", found["error"])

    async def test_what_was_settled_inside_is_left_alone(self) -> None:
        for settle, status in (
            (lambda queue, lease: queue.complete(lease.job_id, lease.lease_token, "early"), "done"),
            (lambda queue, lease: queue.fail(lease.job_id, lease.lease_token, "e", final=True), "dead"),
            (lambda queue, lease: queue.release(lease.job_id, lease.lease_token), "pending"),
        ):
            async with self.leased(status) as (queue, lease):
                async with lease:
                    lease.result = "late"
                    self.assertTrue(await settle(queue, lease))
                found = await queue.get(status)
                assert found is not None
                self.assertEqual(found["status"], status)
                self.assertEqual(found["result"], "early" if status == "done" else None)
                if status == "pending":
                    await queue.complete(status, (await self.lease(queue)).lease_token)

    async def test_a_lease_renews_itself_while_held_and_no_longer(self) -> None:
        async with self.leased(lease_seconds=0.06) as (queue, lease):
            first = lease.expires_at
            async with lease:
                for _ in range(3):  # three times what the lease lasts
                    self.clock.advance(50)
                    moment = self.clock() + 60
                    await self.eventually(lambda moment=moment: lease.expires_at == moment, "a renewal")
                self.assertEqual(sql(self.db, "SELECT lease_expires_at FROM jobs"), [(first + 150,)])
                self.assertIsNone(await queue.lease("other"))
            self.assertEqual(await self.state(queue), ("done", 1))
            self.assertEqual(queue._clerk._held, {})
            self.assertIsNone(queue._clerk._rest_seconds(), "the thread has nothing to do and does not sleep")

    async def test_a_lease_that_is_not_entered_is_not_renewed(self) -> None:
        async with self.leased(lease_seconds=0.03) as (queue, lease):
            self.assertIsNone(queue._clerk._rest_seconds())
            self.clock.advance(30)
            self.assertEqual((await self.lease(queue)).attempts, 2)
            self.assertFalse(await queue.complete("a", lease.lease_token))

    async def test_leases_share_the_commit_that_renews_them(self) -> None:
        async with self.queue(lease_seconds=0.15) as queue:
            for n in range(20):
                await queue.enqueue(f"j{n}", n)
            leases = [await self.lease(queue) for _ in range(20)]
            for lease in leases:
                await lease.__aenter__()
            self.clock.advance(100)
            before = queue._clerk._store.commits
            await self.eventually(lambda: all(each.expires_at == self.clock() + 150 for each in leases), "renewals")
            self.assertLessEqual(queue._clerk._store.commits - before, 3)
            for lease in leases:
                await lease.__aexit__(None, None, None)
            self.assertEqual((await queue.stats())["done"], 20)

    async def test_a_renewal_of_others_right_after_a_completion_does_no_harm(self) -> None:
        async with self.queue(lease_seconds=0.06) as queue:
            await queue.enqueue("a", 1)
            await queue.enqueue("b", 1)
            first, second = await self.lease(queue), await self.lease(queue)
            async with second, first:
                completion = asyncio.create_task(queue.complete("a", first.lease_token))
                await asyncio.sleep(0)  # it is on its way; from here on the event loop stands still
                until(lambda: self.stored("a") == [("completed", 1)], 20, "the completion")
                self.clock.advance(10)
                until(lambda: second.expires_at == self.clock() + 60, 20, "a renewal")
                self.assertTrue(await completion)
                await asyncio.sleep(0)
            self.assertFalse(first.lost)
            self.assertEqual(await queue.stats(), {"pending": 0, "running": 0, "done": 2, "dead": 0})

    async def test_a_lost_lease_stops_the_work_and_says_so(self) -> None:
        async with self.leased(lease_seconds=0.06) as (queue, lease):
            finished = []
            with Queue(self.db, clock=self.clock) as operator, self.assertRaises(LeaseLost) as caught:
                async with lease:
                    operator.cancel("a")
                    try:
                        await asyncio.Event().wait()
                    finally:
                        finished.append("cleaned up")
            self.assertEqual(finished, ["cleaned up"])
            self.assertTrue(lease.lost)
            self.assertIn("'a'", str(caught.exception))
            task = asyncio.current_task()
            assert task is not None
            self.assertEqual(task.cancelling(), 0)
            await asyncio.sleep(0)  # no cancellation comes after
            self.assertEqual(await self.state(queue), ("dead", 1))

    async def test_a_lease_found_lost_at_the_end_is_an_error_too(self) -> None:
        async with self.leased() as (queue, lease):
            with self.assertRaises(LeaseLost):
                async with lease:
                    self.clock.advance(LEASE_MS)
                    other = await self.lease(queue)
                    lease.result = "mine"
            self.assertTrue(lease.lost)
            self.assertEqual(await self.state(queue), ("running", 2))
            with self.assertRaises(ZeroDivisionError):  # an error of its own is worth more
                async with other:
                    self.clock.advance(LEASE_MS)
                    raise ZeroDivisionError
            self.assertEqual(await self.state(queue), ("running", 2))

    async def test_a_cancellation_by_somebody_else_stays_one_when_the_lease_is_lost_too(self) -> None:
        async with self.leased() as (_, lease):
            entered = asyncio.Event()

            async def hold() -> None:
                async with lease:
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await entered.wait()
            task.cancel()
            lease._lose()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertTrue(task.cancelled())

    async def test_work_that_resists_its_stop_still_ends_in_the_loss(self) -> None:
        async with self.leased() as (_, lease):
            with self.assertRaises(LeaseLost):
                async with lease:
                    lease._lose()
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        pass
            await asyncio.sleep(0)

    async def test_closing_gives_back_what_is_held_and_stops_the_work(self) -> None:
        async with self.leased() as (queue, lease):
            entered = asyncio.Event()

            async def hold() -> None:
                async with lease:
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await entered.wait()
            await queue.close()
            self.assertEqual(self.stored(), [("pending", 0)])
            with self.assertRaises(LeaseLost):
                await task

    async def test_a_coroutine_that_is_thrown_away_gives_its_job_back(self) -> None:
        async with self.leased() as (queue, lease):
            async def hold() -> None:
                async with lease:
                    await asyncio.sleep(0)

            coroutine = hold()
            coroutine.send(None)
            coroutine.close()
            self.assertEqual(await self.state(queue), ("pending", 0))


class WaitTest(AioTestCase):
    """Waiting for a job."""

    async def waiting(self, queue: WorkQueue, wait: float = math.inf) -> asyncio.Task[Lease | None]:
        """Start to wait for a job; return when the first look found none."""
        claims = len(queue._clerk._waiting)
        task = asyncio.create_task(queue.lease("w", wait=wait))
        await self.eventually(lambda: len(queue._clerk._waiting) > claims and not queue._clerk._look, "the wait")
        return task

    async def test_it_ends_empty_handed_when_the_time_is_up(self) -> None:
        async with self.queue() as queue:
            for wait in (None, 0, 0.03):
                started = time.monotonic()
                self.assertIsNone(await queue.lease("w", wait=wait))
                self.assertGreaterEqual(time.monotonic() - started, wait or 0)
            self.assertEqual(queue._clerk._waiting, [])

    async def test_a_job_that_is_there_is_not_waited_for(self) -> None:
        async with self.queue() as queue:
            await queue.enqueue("a", 1)
            self.assertEqual((await self.lease(queue, wait=math.inf)).job_id, "a")

    async def test_an_enqueue_in_the_same_process_wakes_it(self) -> None:
        async with self.queue() as queue:
            task = await self.waiting(queue)
            commits = queue._clerk._store.commits
            await queue.enqueue("a", 1)
            lease = await task
            assert lease is not None
            self.assertEqual(lease.job_id, "a")
            self.assertEqual(queue._clerk._store.commits - commits, 1, "stored and leased in one commit")

    async def test_another_connection_wakes_it(self) -> None:
        async with self.queue() as queue, self.queue() as other:
            task = await self.waiting(queue)
            await other.enqueue("a", 1)
            self.assertIsNotNone(await task)

    async def test_another_process_wakes_it(self) -> None:
        async with self.queue(clock=None) as queue:
            task = await self.waiting(queue)
            done = await asyncio.to_thread(run, "enqueue", "--database", self.db, "--queue", "work", "--type", "t",
                                           "--payload", "1")
            lease = await task
            assert lease is not None
            self.assertEqual(lease.job_id, done.stdout.strip())

    async def test_what_comes_due_wakes_it(self) -> None:
        async with self.queue(retry_limit=2) as queue:
            await queue.enqueue("delayed", 1, delay=60)
            task = await self.waiting(queue)
            self.clock.advance(59_999)
            await queue.get("delayed")
            self.assertFalse(task.done())
            self.clock.advance(1)
            lease = await task
            assert lease is not None
            self.assertEqual(lease.job_id, "delayed")

            task = await self.waiting(queue)  # until the lease runs out
            self.clock.advance(LEASE_MS)
            again = await task
            assert again is not None
            self.assertEqual((again.job_id, again.attempts), ("delayed", 2))

    async def test_a_completed_dependency_wakes_it(self) -> None:
        async with self.leased() as (queue, lease):
            await queue.enqueue("b", 1, depends_on=["a"])
            task = await self.waiting(queue)
            await queue.complete("a", lease.lease_token)
            following = await task
            assert following is not None
            self.assertEqual(following.job_id, "b")

    async def test_those_who_wait_are_served_in_the_order_of_their_coming(self) -> None:
        async with self.queue() as queue:
            tasks = [await self.waiting(queue) for _ in range(5)]
            for n in range(5):
                await queue.enqueue(f"j{n}", n)
            self.assertEqual([(await task).job_id for task in tasks], [f"j{n}" for n in range(5)])

    async def test_one_canceled_wait_leaves_the_others_in_place(self) -> None:
        async with self.queue() as queue:
            first, second, third = [await self.waiting(queue) for _ in range(3)]
            first.cancel()
            third.cancel()
            await queue.enqueue("a", 1)
            lease = await second
            assert lease is not None
            self.assertEqual((lease.job_id, lease.attempts), ("a", 1))
            for task in (first, third):
                with self.assertRaises(asyncio.CancelledError):
                    await task

    async def test_it_looks_without_claiming_again_and_again(self) -> None:
        looks, claims = [], []
        claim = Moves.claim

        def counted(*args: Any) -> Any:
            claims.append(args)
            return claim(*args)

        with mock.patch.object(clerk, "LOOK_SECONDS", 0.001), mock.patch.object(Moves, "claim", counted):
            async with self.queue() as queue:
                await queue.enqueue("later", 1, delay=60)
                task = await self.waiting(queue)
                has_news = queue._clerk._has_news

                def look() -> bool:
                    looks.append(1)
                    return has_news()

                with mock.patch.object(queue._clerk, "_has_news", look):
                    await self.eventually(lambda: len(looks) >= 30, "thirty looks")
                self.assertLessEqual(len(claims), 2)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                await self.eventually(lambda: queue._clerk._rest_seconds() is None, "the thread to go to sleep")

    async def test_closing_ends_the_wait(self) -> None:
        async with self.queue() as queue:
            task = await self.waiting(queue)
            await queue.close()
            with self.assertRaisesRegex(DatabaseError, "is closed"):
                await task


class Canceled:
    """Awaits a coroutine and has the task around it canceled at one of its suspensions.

    `early`: as it is suspended, before anything else happens. `late`: when what it waits for is done, and before
    it is resumed. `twice`: early, and again at the suspension after that. Once awaited, `reached` tells whether
    there was such a suspension.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, when: str) -> None:
        self.coroutine = coroutine
        self.at = at
        self.when = when
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self.coroutine.__await__()
        count = 0
        send: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                future = send()
            except StopIteration as stop:
                return stop.value
            if count == self.at or (self.when == "twice" and count == self.at + 1):
                self.reached = True
                if self.when == "late" and future is not None:
                    future.add_done_callback(lambda _: task.cancel())  # ahead of the task's own callback
                else:
                    task.cancel()
            count += 1
            try:
                value = yield future
                send = lambda value=value: steps.send(value)  # noqa: E731
            except BaseException as error:
                send = lambda error=error: steps.throw(error)  # noqa: E731


class CancellationTest(AioTestCase):
    """Every call, canceled at every point where it can be."""

    async def cancel_everywhere(
        self, prepare: Callable[[], Awaitable[Coroutine[Any, Any, Any]]],
        check: Callable[[str, bool, Any], Awaitable[None]],
    ) -> None:
        """Cancel what `prepare` returns at its first suspension, its second ..., in each way, until there is none.

        After each, `check` gets where that was, whether the call came to its end all the same, and its answer.
        """
        before = asyncio.all_tasks()
        for when in ("early", "late", "twice"):
            for at in itertools.count():
                with self.subTest(when=when, at=at):
                    canceled = Canceled(await prepare(), at, when)

                    async def await_it(canceled: Canceled = canceled) -> Any:
                        return await canceled

                    task = asyncio.create_task(await_it())
                    await asyncio.wait([task], timeout=30)
                    self.assertTrue(task.done(), "it hangs")
                    self.assertLessEqual(asyncio.all_tasks(), before, "a task is left")
                    finished = not task.cancelled()
                    await check(f"{when} at {at}", finished, task.result() if finished else None)
                    self.assertEqual(finished, not canceled.reached)
                if not canceled.reached:
                    self.assertGreater(at, 0, "it was never suspended")
                    break
                self.assertLess(at, 100, "there is no end of suspensions")

    async def test_what_was_stored_is_stored_and_what_was_not_can_be_stored(self) -> None:
        numbers = itertools.count()
        job_id = ""
        async with self.queue() as queue:
            async def prepare() -> Coroutine[Any, Any, Any]:
                nonlocal job_id
                job_id = f"j{next(numbers)}"
                return queue.enqueue(job_id, 1)

            async def check(where: str, finished: bool, answer: Any) -> None:
                if finished or where.startswith("late"):
                    self.assertIsNotNone(await queue.get(job_id), where)
                stored = await queue.get(job_id) is not None
                self.assertIs(await queue.enqueue(job_id, 1), not stored)

            await self.cancel_everywhere(prepare, check)

    async def test_a_job_claimed_for_a_canceled_lease_goes_back_at_once(self) -> None:
        numbers = itertools.count()
        job_id = ""
        async with self.queue() as queue:
            for wait in (None, math.inf):
                async def prepare(wait: float | None = wait) -> Coroutine[Any, Any, Any]:
                    nonlocal job_id
                    job_id = f"j{next(numbers)}"
                    await queue.enqueue(job_id, 1)
                    return queue.lease("w", wait=wait)

                async def check(where: str, finished: bool, lease: Any) -> None:
                    if not finished:
                        self.assertEqual(await self.state(queue, job_id), ("pending", 0), where)
                        lease = await self.lease(queue)
                    self.assertEqual((lease.job_id, lease.attempts), (job_id, 1), where)
                    self.assertTrue(await queue.complete(job_id, lease.lease_token))

                await self.cancel_everywhere(prepare, check)

    async def test_so_does_one_that_came_due_while_it_was_waited_for(self) -> None:
        numbers = itertools.count()
        job_id = ""
        async with self.queue() as queue:
            def come_due() -> None:
                if queue._clerk._waiting and not queue._clerk._look:
                    self.clock.advance(1_000)
                else:
                    asyncio.get_running_loop().call_later(0.001, come_due)

            async def prepare() -> Coroutine[Any, Any, Any]:
                nonlocal job_id
                job_id = f"j{next(numbers)}"
                await queue.enqueue(job_id, 1, delay=1)
                come_due()
                return queue.lease("w", wait=math.inf)

            async def check(where: str, finished: bool, lease: Any) -> None:
                if not finished:
                    self.assertEqual(await self.state(queue, job_id), ("pending", 0), where)
                    self.clock.advance(1_000)
                    lease = await self.lease(queue)
                self.assertEqual((lease.job_id, lease.attempts), (job_id, 1), where)
                self.assertTrue(await queue.complete(job_id, lease.lease_token))

            await self.cancel_everywhere(prepare, check)

    async def test_a_wait_canceled_at_about_the_moment_in_which_a_job_comes(self) -> None:
        async with self.queue() as queue, self.queue() as other:
            for n in range(30):
                task = asyncio.create_task(queue.lease("w", wait=math.inf))
                await self.eventually(lambda: queue._clerk._waiting, "the wait")
                await other.enqueue(f"j{n}", n)
                await asyncio.sleep(n / 2_000)
                task.cancel()
                await asyncio.wait([task])
                lease = await self.lease(queue) if task.cancelled() else task.result()
                assert lease is not None
                self.assertEqual((lease.job_id, lease.attempts), (f"j{n}", 1))
                self.assertTrue(await queue.complete(lease.job_id, lease.lease_token))

    async def test_settling_happens_or_not_and_never_in_part(self) -> None:
        for name, outcome in (("complete", ("done", 1)), ("fail", ("pending", 1)), ("release", ("pending", 0))):
            await self.settle_canceled(name, outcome)

    async def settle_canceled(self, name: str, outcome: tuple[str, int]) -> None:
        numbers = itertools.count()
        job_id = token = ""
        async with self.queue(path=self.dir / f"{name}.db") as queue:
            async def prepare() -> Coroutine[Any, Any, Any]:
                nonlocal job_id, token
                job_id = f"j{next(numbers)}"
                await queue.enqueue(job_id, 1)
                token = (await self.lease(queue)).lease_token
                extra = ["e"] if name == "fail" else []
                return getattr(queue, name)(job_id, token, *extra)

            async def check(where: str, finished: bool, held: Any) -> None:
                self.assertIs(held, True if finished else None)
                possible = [outcome] if finished or where.startswith("late") else [outcome, ("running", 1)]
                self.assertIn(await self.state(queue, job_id), possible, where)
                await queue.complete(job_id, token)
                if (await self.state(queue, job_id))[0] == "pending":
                    self.clock.advance(1_000)
                    await queue.complete(job_id, (await self.lease(queue)).lease_token)

            await self.cancel_everywhere(prepare, check)

    async def test_requeue_get_and_stats(self) -> None:
        async with self.leased() as (queue, lease):
            await queue.fail("a", lease.lease_token, "e", final=True)
            for call in (lambda: queue.requeue("a"), lambda: queue.get("a"), queue.stats):
                async def prepare(call: Any = call) -> Coroutine[Any, Any, Any]:
                    return call()

                async def check(where: str, finished: bool, answer: Any) -> None:
                    self.assertIn(await self.state(queue), [("dead", 1), ("pending", 0)])

                await self.cancel_everywhere(prepare, check)

    async def test_a_whole_life_from_opening_to_closing(self) -> None:
        async def life() -> None:
            async with self.queue() as queue:
                await queue.enqueue("a", 1)
                async with await self.lease(queue) as lease:
                    await asyncio.sleep(0)
                    lease.result = "done"
                    await queue.enqueue("b", 1, depends_on=["a"])
                async with await self.lease(queue):
                    await queue.get("b")
                    await asyncio.sleep(0)

        async def prepare() -> Coroutine[Any, Any, Any]:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.db}{suffix}").unlink(missing_ok=True)
            return life()

        async def check(where: str, finished: bool, answer: Any) -> None:
            self.assert_no_thread()
            rows = dict(sql(self.db, "SELECT id, status || attempts FROM jobs")) if self.has_jobs() else {}
            states = [rows.get("a"), rows.get("b")]
            whole = [[None, None], ["pending0", None], ["pending0", "pending0"], ["completed1", "pending0"],
                     ["completed1", "completed1"]]
            self.assertIn(states, whole, where)
            if finished:
                self.assertEqual(states, whole[-1])

        await self.cancel_everywhere(prepare, check)

    def has_jobs(self) -> bool:
        return self.db.exists() and sql(self.db, "SELECT count(*) FROM sqlite_master WHERE name = 'jobs'") == [(1,)]

    async def test_run(self) -> None:
        started: list[str] = []

        async def handler(payload: Any, lease: Lease) -> Any:
            started.append(lease.job_id)
            await asyncio.sleep(0)
            return payload

        async with self.queue() as queue:
            async def prepare() -> Coroutine[Any, Any, Any]:
                for n in range(3):
                    await queue.enqueue(f"j{n}", n)
                    await queue.get(f"j{n}")
                stop = asyncio.Event()

                async def watch() -> None:
                    await self.eventually(lambda: len(set(started)) == 3, "three jobs")
                    stop.set()

                async def run() -> None:
                    watcher = asyncio.create_task(watch())
                    try:
                        await queue.run({"work": handler}, concurrency=2, stop=stop)
                    finally:
                        watcher.cancel()
                        await asyncio.wait([watcher])

                return run()

            async def check(where: str, finished: bool, answer: Any) -> None:
                await queue.get("j0")  # behind what canceled tasks have left to do
                self.assertEqual((await queue.stats())["running"], 0, where)
                self.assertEqual(queue._clerk._held, {}, where)
                for status, attempts in [await self.state(queue, f"j{n}") for n in range(3)]:
                    self.assertIn((status, attempts), [("done", 1), ("pending", 0)], where)
                await self.start_anew(queue)
                started.clear()

            await self.cancel_everywhere(prepare, check)

    async def start_anew(self, queue: WorkQueue) -> None:
        """Empty the file."""
        def delete(store: Any, now: int) -> None:
            store.sqlite.execute("DELETE FROM jobs").fetchall()

        await queue._call(delete)

    @contextlib.contextmanager
    def inside(self, target: Any, name: str) -> Generator[tuple[threading.Event, threading.Event]]:
        """Hold the thread up inside a transaction, after a function was called; yield (is there, may go on)."""
        there, go_on = threading.Event(), threading.Event()
        real = getattr(target, name)

        def held_up(*args: Any, **keywords: Any) -> Any:
            answer = real(*args, **keywords)
            there.set()
            self.assertTrue(go_on.wait(30))
            return answer

        with mock.patch.object(target, name, held_up):
            try:
                yield there, go_on
            finally:
                go_on.set()

    async def test_a_write_that_has_begun_ends(self) -> None:
        async with self.leased() as (queue, lease):
            for name, call, outcome in (
                ("add", lambda: queue.enqueue("b", 1), ("b", ("pending", 0))),
                ("complete", lambda: queue.complete("a", lease.lease_token), ("a", ("done", 1))),
            ):
                with self.inside(Moves, name) as (there, go_on):
                    task = asyncio.create_task(call())
                    await self.eventually(there.is_set, "the transaction")
                    task.cancel()
                    with self.assertRaises(asyncio.CancelledError):  # at once, while the thread is still at it
                        await task
                    go_on.set()
                job_id, state = outcome
                self.assertEqual(await self.state(queue, job_id), state)

    async def test_a_claim_that_has_begun_is_taken_back_when_it_ends(self) -> None:
        async with self.queue() as queue:
            await queue.enqueue("a", 1)
            with self.inside(Moves, "claim") as (there, go_on):
                task = asyncio.create_task(queue.lease("w"))
                await self.eventually(there.is_set, "the claim")
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                go_on.set()
                await self.eventually(lambda: self.stored() == [("pending", 0)], "the job to be given back")
            self.assertEqual((await self.lease(queue)).attempts, 1)

    async def test_a_write_that_has_not_begun_is_dropped(self) -> None:
        async with self.leased() as (queue, lease):
            with self.locked():
                calls = [queue.enqueue("b", 1), queue.complete("a", lease.lease_token), queue.requeue("a")]
                tasks = [asyncio.create_task(call) for call in calls]
                await self.eventually(lambda: len(queue._clerk._todo) >= 1, "the thread to wait for the lock")
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                self.assertTrue(all(task.cancelled() for task in tasks))
            self.assertIsNone(await queue.get("b"))
            self.assertEqual(await self.state(queue), ("running", 1))

    async def test_the_end_of_a_lease_is_never_dropped(self) -> None:
        async with self.leased() as (queue, lease):
            entered, leave = asyncio.Event(), asyncio.Event()

            async def work() -> None:
                async with lease:
                    entered.set()
                    await leave.wait()
                    lease.result = "the work is done"

            task = asyncio.create_task(work())
            await entered.wait()
            with self.locked():
                leave.set()
                await self.eventually(lambda: queue._clerk._todo, "the completion")
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
            self.assertEqual(await self.state(queue), ("done", 1))

    async def test_wait_for_takes_back_what_came_too_late(self) -> None:
        async with self.queue() as queue:
            await queue.enqueue("a", 1)
            with self.inside(Moves, "claim") as (there, go_on):
                with self.assertRaises(TimeoutError):
                    await asyncio.wait_for(queue.lease("w"), 0.05)
                self.assertTrue(there.is_set())
                go_on.set()
                await self.eventually(lambda: self.stored() == [("pending", 0)], "the job to be given back")


class BoundedTest(AioTestCase):
    """Files that are locked, out of reach, or not ours."""

    def calls(self, queue: WorkQueue, lease: Lease) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        return [
            lambda: queue.enqueue("b", 1), lambda: queue.lease("w"), lambda: queue.lease("w", wait=60),
            lambda: queue.requeue("a"), lambda: queue.complete("a", lease.lease_token),
            lambda: queue.fail("a", lease.lease_token, "e"), lambda: queue.release("a", lease.lease_token),
        ]  # fmt: skip

    async def test_no_call_outlasts_a_lock_and_the_event_loop_goes_on_meanwhile(self) -> None:
        async with self.leased(timeout=0.3) as (queue, lease):
            with self.locked():
                started = time.monotonic()
                calls = self.calls(queue, lease) + [lambda n=n: queue.enqueue(f"j{n}", n) for n in range(50)]
                tasks = [asyncio.create_task(call()) for call in calls]
                turns = 0
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0.001)
                    turns += 1
                took = time.monotonic() - started
            self.assertTrue(all(isinstance(task.exception(), DatabaseBusy) for task in tasks))
            self.assertGreaterEqual(took, 0.3)
            self.assertLess(took, 5)  # 0.3 s each, one after the other, would take 17 s
            self.assertGreater(turns, 5)
            self.assertEqual(await queue.stats(), {"pending": 0, "running": 1, "done": 0, "dead": 0})
            self.assertTrue(await queue.complete("a", lease.lease_token))

    async def test_a_lock_that_is_let_go_in_time_is_only_waited_for(self) -> None:
        async with self.leased() as (queue, _):
            with self.locked():
                tasks = [asyncio.create_task(queue.enqueue(f"j{n}", n)) for n in range(5)]
                await self.eventually(lambda: queue._clerk._todo, "the thread to wait for the lock")
                await asyncio.sleep(0.02)
                self.assertFalse(any(task.done() for task in tasks))
            self.assertEqual(await asyncio.gather(*tasks), [True] * 5)

    async def test_a_wait_for_a_job_outlasts_short_locks(self) -> None:
        async with self.queue(timeout=5) as queue:
            task = asyncio.create_task(queue.lease("w", wait=math.inf))
            await self.eventually(lambda: queue._clerk._waiting, "the wait")
            await queue.enqueue("later", 1, delay=60)
            with self.locked():
                self.clock.advance(60_000)
                await self.eventually(lambda: self.wants_lock(queue), "the thread to want the lock")
                self.assertFalse(task.done())
            lease = await task
            assert lease is not None
            self.assertEqual(lease.job_id, "later")

    def wants_lock(self, queue: WorkQueue) -> bool:
        """Return whether the thread has been in a transaction, or trying to begin one, for a while."""
        lock = queue._clerk._store._lock
        if lock.acquire(timeout=0.05):
            lock.release()
            return False
        return True

    async def test_closing_does_not_wait_for_a_lock_that_only_waiting_claims_need(self) -> None:
        async with self.queue(timeout=600) as queue:
            await queue.enqueue("later", 1, delay=60)
            task = asyncio.create_task(queue.lease("w", wait=math.inf))
            await self.eventually(lambda: queue._clerk._waiting, "the wait")
            with self.locked():
                self.clock.advance(60_000)
                await self.eventually(lambda: self.wants_lock(queue), "the thread to want the lock")
                await asyncio.wait_for(queue.close(), 20)
                with self.assertRaisesRegex(DatabaseError, "is closed"):
                    await task

    async def test_a_call_gives_up_in_time_behind_one_that_has_longer(self) -> None:
        async with self.queue(timeout=600) as queue:
            await queue.enqueue("a", 1)
            with self.locked():
                clerk_ = queue._clerk
                hasty = Operation(lambda store, now: None, time.monotonic() + 0.1)
                patient = Operation(lambda store, now: "done", time.monotonic() + 600)
                clerk_.submit(patient)
                clerk_.submit(hasty)
                with self.assertRaises(DatabaseBusy):
                    await asyncio.wait_for(asyncio.wrap_future(hasty), 20)
                self.assertFalse(patient.done())
            self.assertEqual(await asyncio.wrap_future(patient), "done")

    async def test_an_outcome_is_kept_until_the_lock_is_gone(self) -> None:
        async with self.leased(timeout=0.05) as (queue, lease):
            with self.locked():
                with self.assertRaises(DatabaseBusy):
                    async with lease:
                        lease.result = "kept"
                await self.eventually(lambda: queue._clerk._todo, "the outcome to be kept")
            await self.eventually(lambda: self.stored() == [("completed", 1)], "the outcome to be stored")

    async def test_a_kept_outcome_is_dropped_when_its_lease_is_gone(self) -> None:
        async with self.leased(timeout=0.05) as (queue, lease):
            with self.locked():
                with self.assertRaises(ZeroDivisionError):  # not hidden by the lock
                    async with lease:
                        raise ZeroDivisionError
                self.assertEqual(len(queue._clerk._todo), 1)
                self.clock.advance(LEASE_MS)
                await self.eventually(lambda: not queue._clerk._todo, "the outcome to be dropped")
            self.assertEqual((await self.lease(queue)).attempts, 2)

    async def test_a_file_that_was_out_of_reach_is_opened_again_with_growing_pauses(self) -> None:
        directory = self.dir / "volume"
        directory.mkdir()
        async with self.leased(path=directory / "jobs.db", timeout=0.4) as (queue, lease):
            tries = []
            connect = queue._clerk._connect

            def counted(**options: Any) -> Any:
                tries.append(time.monotonic())
                return connect(**options)

            waiting = asyncio.create_task(queue.lease("w", wait=60))
            await self.eventually(lambda: queue._clerk._waiting, "the wait")
            with mock.patch.object(queue._clerk, "_connect", counted):
                directory.rename(self.dir / "elsewhere")
                calls = [call() for call in self.calls(queue, lease)]
                errors = await asyncio.gather(*calls, return_exceptions=True)
                self.assertTrue(all("there is no database" in str(error) for error in errors), errors)
                self.assertFalse((directory / "jobs.db").exists(), "a new file was made in its place")
                with self.assertRaisesRegex(DatabaseError, "there is no database"):
                    await waiting
                self.assertLessEqual(len(tries), 12)
                (self.dir / "elsewhere").rename(directory)
                self.assertEqual((await queue.get("a") or {})["status"], "running")
            pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
            self.assertGreater(max(pauses), 4 * clerk.FIRST_PAUSE_SECONDS)
            self.assertTrue(await queue.complete("a", lease.lease_token))

    async def test_a_file_that_took_the_place_of_ours_is_used_from_then_on(self) -> None:
        async with self.leased() as (queue, lease):
            task = asyncio.create_task(queue.lease("w", wait=60))
            await self.eventually(lambda: queue._clerk._waiting, "the wait")
            with mock.patch.object(clerk, "FILE_LOOK_SECONDS", 0.0):
                queue._clerk._file_look_at = 0.0
                other = self.dir / "other.db"
                with Queue(other, create=True, clock=self.clock) as there:
                    there.enqueue("work", 1, id="theirs", queue="work")
                for suffix in ("-wal", "-shm", ""):
                    self.db.with_name(self.db.name + suffix).rename(self.dir / f"old{suffix}")
                other.rename(self.db)
                found = await task
            assert found is not None
            self.assertEqual(found.job_id, "theirs")
            self.assertFalse(await queue.complete("a", lease.lease_token))
            self.assertIsNone(await queue.get("a"))

    async def test_what_cannot_be_opened_is_an_error_at_once_and_no_thread_is_left(self) -> None:
        foreign = self.dir / "foreign.db"
        with sqlite3.connect(foreign) as connection:
            connection.execute("CREATE TABLE mine(x)")
        connection.close()
        for path, message in ((foreign, "another program"), (self.dir, "is a directory"),
                              (self.dir / "no" / "file.db", "cannot create")):
            with self.subTest(path=path), self.assertRaisesRegex(DatabaseError, message):
                async with self.queue(path=path):
                    self.fail("it was opened")
            self.assert_no_thread()

    async def test_use_outside_of_the_context_is_an_error(self) -> None:
        queue = self.queue()
        with self.assertRaisesRegex(DatabaseError, "is not open yet"):
            await queue.enqueue("a", 1)
        await queue.close()
        async with queue:
            with self.assertRaisesRegex(DatabaseError, "is open already"):
                async with queue:
                    pass
            await queue.enqueue("a", 1)
        await queue.close()
        with self.assertRaisesRegex(DatabaseError, "is closed"):
            await queue.lease("w")
        async with queue:
            self.assertEqual((await self.lease(queue)).job_id, "a")

    async def test_a_clock_that_fails_is_the_callers_error_and_ends_nothing(self) -> None:
        async with self.leased() as (queue, lease):
            with mock.patch.object(queue._clerk, "_clock", side_effect=OSError("no clock")):
                with self.assertRaisesRegex(OSError, "no clock"):
                    await queue.enqueue("b", 1)
                with self.assertRaisesRegex(OSError, "no clock"):
                    await queue.lease("w", wait=1)
            self.assertTrue(await queue.complete("a", lease.lease_token))

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    async def test_a_forked_child_is_refused(self) -> None:
        async with self.queue() as queue:
            with mock.patch("warnings.warn"):
                pid = os.fork()
            if pid == 0:
                code = 3
                try:
                    queue._clerk.submit(Operation(lambda store, now: None, 0.0))
                except DatabaseError as error:
                    code = 0 if "before a fork" in str(error) and not queue._clerk.shut() else 4
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            self.assertEqual(os.waitstatus_to_exitcode(status), 0)
            self.assertTrue(await queue.enqueue("a", 1))


class RunTest(AioTestCase):
    """`run`: many jobs at once."""

    async def work(self, queue: WorkQueue, handlers: Any, expected: int, **options: Any) -> dict[str, int]:
        """Run until so many attempts have ended; return the counters."""
        stop = asyncio.Event()
        ended = 0

        def counted(handler: Any) -> Any:
            async def handle(payload: Any, lease: Lease) -> Any:
                try:
                    return await handler(payload, lease)
                finally:
                    nonlocal ended
                    ended += 1
                    if ended == expected:
                        stop.set()

            return handle

        await asyncio.wait_for(
            queue.run({type: counted(handler) for type, handler in handlers.items()}, stop=stop, **options), 30)
        return await queue.stats()

    async def test_handlers_get_payload_and_lease_and_their_answer_is_kept(self) -> None:
        async def double(payload: Any, lease: Lease) -> Any:
            self.assertEqual(lease.trace_id, f"trace {payload}")
            return payload * 2

        async def shout(payload: Any, lease: Lease) -> Any:
            return f"{lease.job_id}!"

        async with self.queue() as queue:
            for n in range(10):
                await queue.enqueue(f"d{n}", n, type="double", trace_id=f"trace {n}")
                await queue.enqueue(f"s{n}", n, type="shout")
            self.assertEqual(await self.work(queue, {"double": double, "shout": shout}, 20),
                             {"pending": 0, "running": 0, "done": 20, "dead": 0})
            self.assertEqual([(await queue.get(f"{kind}7") or {})["result"] for kind in "ds"], [14, "s7!"])

    async def test_no_more_run_at_a_time_than_allowed(self) -> None:
        running = most = 0
        full = asyncio.Event()

        async def handler(payload: Any, lease: Lease) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 4:
                full.set()
            await full.wait()
            await asyncio.sleep(0)
            running -= 1

        async with self.queue() as queue:
            await asyncio.gather(*(queue.enqueue(f"j{n}", n) for n in range(30)))
            await self.work(queue, {"work": handler}, 30, concurrency=4)
            self.assertEqual(most, 4)

    async def test_failures_are_recorded_and_the_worker_goes_on(self) -> None:
        async def wrong(payload: Any, lease: Lease) -> Any:
            if payload == "set":
                return {1, 2}
            if payload == "loop":
                raise asyncio.CancelledError  # a task inside was canceled, not this worker
            if payload == "slow":
                await asyncio.Event().wait()
            if payload == "reject":
                raise Reject("no such thing")
            if payload == "own timeout":
                raise TimeoutError("of something inside")
            raise ValueError("as told")

        async with self.queue(retry_limit=1) as queue:
            for kind in ("set", "loop", "slow", "reject", "own timeout", "value"):
                await queue.enqueue(kind, kind, timeout=0.05)
            await queue.enqueue("unknown", 1, type="mystery", priority=1)
            stats = await self.work(queue, {"work": wrong, "other": wrong}, 6, concurrency=2)
            self.assertEqual(stats, {"pending": 0, "running": 0, "done": 0, "dead": 7})
            errors = {job_id: (await queue.get(job_id) or {})["error"] for job_id in
                      ("set", "loop", "slow", "reject", "own timeout", "value", "unknown")}
            self.assertIn("result is not JSON", errors.pop("set"))
            self.assertEqual(errors, {
                "loop": "RuntimeError: the handler was canceled, but not by its worker",
                "slow": "TimeoutError: took longer than its timeout of 0.05 seconds",
                "reject": "Reject: no such thing",
                "own timeout": "TimeoutError: of something inside",
                "value": "ValueError: as told",
                "unknown": "LookupError: no handler for the type 'mystery'; this worker knows other, work",
            })  # fmt: skip

    async def test_stop_lets_running_jobs_finish_and_takes_no_more(self) -> None:
        stop, running, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(payload: Any, lease: Lease) -> str:
            running.set()
            await finish.wait()
            return "finished"

        async with self.queue() as queue:
            await queue.enqueue("a", 1)
            task = asyncio.create_task(queue.run({"work": handler}, concurrency=3, stop=stop))
            await running.wait()
            await self.eventually(lambda: len(queue._clerk._waiting) == 2, "the idle ones to wait")
            stop.set()
            await self.eventually(lambda: not queue._clerk._waiting, "the waits to end")
            self.assertFalse(task.done())
            await queue.enqueue("b", 1)
            finish.set()
            await task
            self.assertEqual([await self.state(queue, name) for name in "ab"], [("done", 1), ("pending", 0)])
            await queue.run({"work": handler}, stop=stop)  # set already: nothing happens
            self.assertEqual(await self.state(queue, "b"), ("pending", 0))

    async def test_cancellation_gives_the_jobs_back_and_ends_the_handlers(self) -> None:
        cleaned: list[str] = []

        async def handler(payload: Any, lease: Lease) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append(lease.job_id)

        async with self.queue() as queue:
            for n in range(3):
                await queue.enqueue(f"j{n}", n)
            task = asyncio.create_task(queue.run({"work": handler}))
            await self.eventually(lambda: len(queue._clerk._held) == 3, "three handlers to run")
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual(sorted(cleaned), ["j0", "j1", "j2"])
            self.assertEqual([self.stored(f"j{n}") for n in range(3)], [[("pending", 0)]] * 3)

    async def test_a_lost_lease_ends_the_handler_and_not_the_worker(self) -> None:
        ended: list[str] = []

        async def handler(payload: Any, lease: Lease) -> None:
            try:
                if lease.job_id == "a":
                    with Queue(self.db, clock=self.clock) as operator:
                        operator.cancel("a")
                    await asyncio.Event().wait()
            finally:
                ended.append(lease.job_id)

        async with self.queue(lease_seconds=0.06) as queue:
            await queue.enqueue("a", 1)
            await queue.enqueue("b", 1)
            await self.work(queue, {"work": handler}, 2, concurrency=1)
            self.assertEqual(ended, ["a", "b"])
            self.assertEqual([await self.state(queue, name) for name in "ab"], [("dead", 1), ("done", 1)])

    async def test_a_locked_file_ends_nothing_and_loses_no_outcome(self) -> None:
        started, finish = asyncio.Event(), asyncio.Event()

        async def handler(payload: Any, lease: Lease) -> str:
            started.set()
            if payload == 1:
                await finish.wait()
            return "kept"

        async with self.queue(timeout=0.05) as queue:
            await queue.enqueue("a", 1)
            await queue.enqueue("b", 2, delay=60)
            stop = asyncio.Event()
            task = asyncio.create_task(queue.run({"work": handler}, stop=stop))
            await started.wait()
            with self.locked():
                finish.set()
                await self.eventually(lambda: any(each.done() for each in queue._clerk._todo), "a call to give up")
            await self.eventually(lambda: self.stored() == [("completed", 1)], "the outcome to be stored")
            self.clock.advance(60_000)
            await self.eventually(lambda: self.stored("b") == [("completed", 1)], "the next job")
            stop.set()
            await task

    async def test_closing_ends_it_with_an_error(self) -> None:
        async def handler(payload: Any, lease: Lease) -> None:
            await asyncio.Event().wait()

        for stop in (None, asyncio.Event()):
            async with self.queue() as queue:
                await queue.enqueue("a", 1)
                task = asyncio.create_task(queue.run({"work": handler}, stop=stop))
                await self.eventually(lambda queue=queue: queue._clerk._held, "the job to run")
                await queue.close()
                with self.assertRaisesRegex(DatabaseError, "was closed"):
                    await asyncio.wait_for(task, 30)
            self.assertEqual(self.stored(), [("pending", 0)])


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
