"""`WorkQueue.run`: many jobs at once, and how that ends."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

from jobqueue import DatabaseError, Lease, Queue, Reject, WorkQueue
from tests.aio_case import AioTestCase


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


if __name__ == "__main__":
    unittest.main()
