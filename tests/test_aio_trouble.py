"""`WorkQueue` on files that are locked, out of reach, or not ours: no call hangs, no outcome is lost."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sqlite3
import time
import unittest
import warnings
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from jobqueue import DatabaseBusy, DatabaseError, Lease, Queue, WorkQueue
from jobqueue.aio import clerk
from jobqueue.aio.operations import Operation
from tests.aio_case import LEASE_MS, AioTestCase


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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the test
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


if __name__ == "__main__":
    unittest.main()
