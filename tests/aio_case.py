"""What the tests of `WorkQueue` share: a clock that they move, and a look for what a test left behind.

Deadlines of leases follow that clock. Real time passes only where a real lock, a real file or a real process
is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
import unittest
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import Lease, WorkQueue, connection
from tests.support import FakeClock, TempDirTestCase, sql

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
        self.watchdog = loop.call_later(90, self.give_up)

    def give_up(self) -> None:
        """End a test that hangs."""
        for task in asyncio.all_tasks():
            task.cancel("the test hangs")

    async def asyncTearDown(self) -> None:
        self.watchdog.cancel()
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
