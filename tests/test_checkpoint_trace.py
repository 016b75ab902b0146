"""No checkpoint runs unguarded, whoever works with the file; and after a full disk the log begins anew.

Every connection that the program opens is watched: at each checkpoint another one of them must hold the write
lock, which a third, past the watch, then cannot get; and no connection may checkpoint by itself. One is left that
nobody has to guard: the last connection to close checkpoints, which SQLite does under an exclusive lock.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import unittest
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from jobqueue import DatabaseError, JobScheduler, Queue, connection, worker
from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.aio_case import AioTestCase
from tests.engine import LEASE_MS, NOW, StoreTestCase, token, traced
from tests.faults import BEFORE, Faults, Observer, Watched, quick_commits, watched
from tests.support import TOP, TempDirTestCase, environment, file_bytes

PAYLOAD = "x" * 8_000
_real_connect = sqlite3.connect


class Guards(Observer):
    """Looks at the locks at each checkpoint, and at each commit for what follows it by itself.

    Attributes:
        checkpoints: how many there were.
        faults: what was wrong.
    """

    def __init__(self, path: Any) -> None:
        self.path = path
        self.checkpoints = 0
        self.faults: list[str] = []
        self._opened: list[Watched] = []

    def open(self, name: str, carry_out: Callable[[], Watched]) -> Watched:
        self._opened.append(carry_out())
        return self._opened[-1]

    def run(self, connection: Watched, sql: str, carry_out: Callable[[], Any]) -> Any:
        if sql == "COMMIT" and connection.ask("PRAGMA wal_autocheckpoint") != [(0,)]:
            self.faults.append(f"{connection.name} checkpoints by itself")
        if "wal_checkpoint(" in sql:
            self.checkpoints += 1
            self._look(connection, sql)
        return carry_out()

    def _look(self, connection: Watched, sql: str) -> None:
        if sql != "PRAGMA wal_checkpoint(PASSIVE)":
            self.faults.append(f"{sql} can wait for, or get into the way of, others")
        if connection.in_transaction:
            self.faults.append("the one that checkpoints is inside a transaction")
        if not any(each.is_in_transaction() for each in self._opened if each is not connection):
            self.faults.append("no other connection of this process is inside a transaction")
        with closing(_real_connect(self.path, timeout=0, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return
            other.execute("ROLLBACK")
        self.faults.append("nobody holds the write lock")


class GuardCase(TempDirTestCase):
    """A test in which everything that is opened is watched, and the log is soon long enough for a checkpoint."""

    def setUp(self) -> None:
        super().setUp()
        self.guards = Guards(self.db)
        watch = watched(self.guards)
        watch.__enter__()
        self.addCleanup(watch.__exit__, None, None, None)
        for patch in (quick_commits(), mock.patch.multiple(
                connection, CHECKPOINT_BYTES=100_000, CHECKPOINT_PAUSE_SECONDS=0.0)):
            patch.start()
            self.addCleanup(patch.stop)

    def check(self, least: int) -> None:
        """Check that there were checkpoints, and that nothing was wrong with any."""
        self.assertGreaterEqual(self.guards.checkpoints, least)
        self.assertEqual(self.guards.faults, [])


class GuardedTest(GuardCase):
    """All faces of the queue, over enough jobs for several checkpoints."""

    def test_a_store_and_another_one_beside_it(self) -> None:
        with closing(Store(self.db, create=True)) as store, closing(Store(self.db)) as other:
            for n in range(60):
                (store, other)[n % 2].add(new_job("t", PAYLOAD), now_ms=NOW)
            while jobs := store.claim("w", now_ms=NOW, lease_ms=LEASE_MS, limit=7):
                other.complete_many([(job.seq, token(job), None) for job in jobs], now_ms=NOW)
        self.check(5)

    def test_a_queue_in_threads(self) -> None:
        with Queue(self.db, create=True) as queue:
            threads = [threading.Thread(target=lambda: [queue.enqueue("t", PAYLOAD) for _ in range(25)])
                       for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            queue.enqueue_many([{"type": "t", "payload": PAYLOAD}] * 50)
            for task in queue.work("w"):
                task.complete()
            self.assertEqual(queue.stats()["completed"], 150)
        self.check(5)

    def test_a_scheduler(self) -> None:
        with JobScheduler(self.db) as scheduler:
            for n in range(40):
                scheduler.add_jobs([{"job_id": f"{n}", "payload": PAYLOAD}], n)
                job = scheduler.claim_job("w", n, 10)
                assert job is not None
                self.assertTrue(scheduler.complete_job(job["job_id"], job["lease_token"], None, n))
        self.check(3)

    def test_a_worker(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": "sleep", "payload": {"seconds": 0, "note": PAYLOAD}}] * 300)
        before = self.guards.checkpoints
        with (self.dir / "out").open("w") as out, redirect_stdout(out), redirect_stderr(out):
            code = worker.run(str(self.db), workers=1, lease_seconds=30, drain=True, grace_seconds=5, handlers=(),
                              queues=["default"], log_level="error")
        self.assertEqual(code, 0, (self.dir / "out").read_text())
        with Queue(self.db) as queue:
            self.assertEqual(queue.stats()["completed"], 300)
        self.assertGreaterEqual(self.guards.checkpoints - before, 2)
        self.check(3)


class GuardedWorkQueueTest(AioTestCase):
    """`WorkQueue`, whose thread has the connection."""

    async def test_a_work_queue(self) -> None:
        guards = Guards(self.db)
        often = mock.patch.multiple(connection, CHECKPOINT_BYTES=100_000, CHECKPOINT_PAUSE_SECONDS=0.0)
        with watched(guards), often:
            async with self.queue() as queue:
                for n in range(40):
                    await queue.enqueue(f"{n}", PAYLOAD)
                    lease = await queue.lease("w")
                    assert lease is not None
                    self.assertTrue(await queue.complete(lease.job_id, lease.lease_token))
        self.assertGreaterEqual(guards.checkpoints, 3)
        self.assertEqual(guards.faults, [])


class ClosingTest(StoreTestCase):
    """What happens to the log as connections close."""

    def test_only_the_last_connection_to_close_checkpoints(self) -> None:
        other = self.open()
        self.add("needle")
        before = file_bytes(self.db)
        other.close()
        after = file_bytes(self.db)
        for name in (self.db.name, self.db.name + "-wal"):
            self.assertEqual(after[name], before[name])
        self.store.close()
        self.assertEqual(list(file_bytes(self.db)), [self.db.name], "the log is gone, as all of it is in the file")
        self.assertIn(b"needle", file_bytes(self.db)[self.db.name])


class NoRoomTest(StoreTestCase):
    """The log cannot grow any more, but has room inside: a checkpoint lets it begin anew, long before it is due."""

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(connection, "CHECKPOINT_PAUSE_SECONDS", 0.0)
        patch.start()
        self.addCleanup(patch.stop)

    def fill(self) -> None:
        """Limit the file, and fill it to the brim; the log is as large as that."""
        ((pages,),) = self.query("PRAGMA page_count")
        self.store.sqlite.execute(f"PRAGMA max_page_count = {pages + 40}").fetchall()
        with traced(self.store.sqlite) as statements, self.assertRaisesRegex(DatabaseError, "the disk is full"):
            for _ in range(100):
                self.add(payload="x" * 2_000)
        self.check_checkpoint(statements)

    def check_checkpoint(self, statements: list[str]) -> None:
        self.assertIn("PRAGMA wal_checkpoint(PASSIVE)", statements)
        self.assertIsNotNone(self.store._guard)
        self.assertFalse(self.store._guard.in_transaction)

    def test_after_a_full_disk(self) -> None:
        self.fill()
        size = self.store.wal_bytes()
        self.assertGreater(size, 100_000)
        job = self.take()
        for n in range(100):  # each takes 4 KB or more of the log
            self.assertTrue(self.store.extend(job.id, token(job), now_ms=NOW + n, lease_ms=LEASE_MS))
            if self.store.wal_bytes() > size:
                self.fail(f"the log grows on: it has not begun anew ({n} commits)")
            if n == 10:
                self.assertEqual(self.query("PRAGMA integrity_check"), [("ok",)])
                break

    def test_after_a_full_disk_that_an_inner_operation_met(self) -> None:
        """Most operations are part of another one's transaction, whose error is no longer SQLite's own."""
        self.fill()
        with traced(self.store.sqlite) as statements, self.assertRaisesRegex(DatabaseError, "the disk is full"):
            with self.store.transaction():
                for _ in range(100):
                    self.add(payload="x" * 2_000)
        self.check_checkpoint(statements)

    def test_after_an_error_of_the_disk(self) -> None:
        faults = Faults()
        with watched(faults), closing(Store(self.db)) as store:
            faults.main = store.sqlite
            for at in range(2, 9):
                faults.arm(at, BEFORE)
                with traced(store.sqlite) as statements, self.subTest(at=at), self.assertRaises(DatabaseError):
                    store.add(new_job("t", id=f"{at}"), now_ms=NOW)
                    self.assertIsNone(faults.fired)
                    raise DatabaseError("there are no more statements")
                if faults.fired is None:
                    break
                self.assertIn("PRAGMA wal_checkpoint(PASSIVE)", statements)
            self.assertGreater(at, 4)

    @unittest.skipIf(os.name == "nt", "the system has no limits on the size of files")
    def test_a_program_whose_files_may_not_grow_goes_on(self) -> None:
        self.add("a")
        process = self.spawn([sys.executable, "-c", _LIMITED, str(self.db)], env=environment(), cwd=TOP)
        done = process.finish()
        self.assertEqual(done.returncode, 0, done.stderr)
        errors, longest, works = map(int, done.stdout.split())
        self.assertGreater(errors, 0, "the limit was never met")
        self.assertEqual(longest, 1, "so many calls in a row have failed")
        self.assertGreater(works, 150)


_LIMITED = """
import resource, sys
from jobqueue import DatabaseError, connection
from jobqueue.db import Store

connection.CHECKPOINT_PAUSE_SECONDS = 0.0
store = Store(sys.argv[1])
(job,) = store.claim("w", now_ms=1_700_000_000_000, lease_ms=10**9)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
errors = row = longest = works = 0
for n in range(200):
    try:
        works += store.extend("a", job.lease_token, now_ms=1_700_000_000_000 + n, lease_ms=10**9)
        row = 0
    except DatabaseError:
        errors, row = errors + 1, row + 1
        longest = max(longest, row)
store.close()
print(errors, longest, works)
"""


if __name__ == "__main__":
    unittest.main()
