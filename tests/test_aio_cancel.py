"""What is left when a call of `WorkQueue` is canceled, at every point where that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import unittest
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import Lease, WorkQueue
from jobqueue.aio.moves import Moves
from tests.aio_case import AioTestCase
from tests.support import sql


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


if __name__ == "__main__":
    unittest.main()
