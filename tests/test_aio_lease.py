"""`async with lease`, renewal and loss; waiting for a job to come."""

from __future__ import annotations

import asyncio
import math
import time
import unittest
from typing import Any
from unittest import mock

from jobqueue import DatabaseError, InvalidJob, Lease, LeaseLost, Queue, Reject, Retry, WorkQueue
from jobqueue.aio import clerk
from jobqueue.aio.moves import Moves
from tests.aio_case import LEASE_MS, AioTestCase
from tests.support import run, sql, until


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
            self.assertEqual(done.returncode, 0, done.stderr)
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


if __name__ == "__main__":
    unittest.main()
