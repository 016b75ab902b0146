"""Checkpoints of the write-ahead log: only under a guard, often enough, never in the way.

SQLite before 3.51.3 can corrupt a file when a checkpoint overlaps a writer that starts the log anew, so
one may run only while a second connection holds the write lock.
"""

from __future__ import annotations

import sqlite3
import unittest
from contextlib import closing
from unittest import mock

from jobqueue import connection
from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.engine import NOW, StoreTestCase, ids, traced


class CheckpointTest(StoreTestCase):
    """Only while a second connection holds the write lock, and often enough."""

    def setUp(self) -> None:
        super().setUp()
        for name, value in (("CHECKPOINT_BYTES", 200_000), ("CHECKPOINT_PAUSE_SECONDS", 0.0)):
            patch = mock.patch.object(connection, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def fill(self, store: Store, jobs: int = 60) -> None:
        """Write about 10 KB a commit."""
        for _ in range(jobs):
            store.add(new_job("t", "x" * 8_000), now_ms=NOW)

    def test_a_checkpoint_runs_only_under_the_guard(self) -> None:
        trace: list[tuple[str, str]] = []
        connect = Store._connect

        def connect_traced(store: Store, mode: str) -> sqlite3.Connection:
            opened = connect(store, mode)
            opened.set_trace_callback(lambda sql: trace.append(("guard", sql)))
            return opened

        self.store.sqlite.set_trace_callback(lambda sql: trace.append(("main", sql)))
        with mock.patch.object(Store, "_connect", connect_traced):
            self.fill(self.store)
        checkpoints = [n for n, (_, sql) in enumerate(trace) if "wal_checkpoint(" in sql]
        self.assertGreaterEqual(len(checkpoints), 2)
        for n in checkpoints:
            self.assertEqual(trace[n - 1 : n + 2], [
                ("guard", "BEGIN IMMEDIATE"), ("main", "PRAGMA wal_checkpoint(PASSIVE)"), ("guard", "ROLLBACK")])
        guard = {sql for who, sql in trace if who == "guard"}
        self.assertEqual(guard, {"PRAGMA wal_autocheckpoint = 0", "BEGIN IMMEDIATE", "ROLLBACK"}, "no writes")

    def test_no_checkpoint_while_another_connection_writes(self) -> None:
        with closing(sqlite3.connect(self.db, isolation_level=None, timeout=0)) as other:
            with mock.patch.object(connection, "CHECKPOINT_BYTES", 10**9):
                self.fill(self.store)
            self.assertGreater(self.store.wal_bytes(), 400_000)
            real = Store.wal_bytes

            def lock_first(store: Store) -> int:  # asked after the commit, before the guard locks
                if not other.in_transaction:
                    other.execute("BEGIN IMMEDIATE")
                return real(store)

            with mock.patch.object(Store, "wal_bytes", lock_first), traced(self.store.sqlite) as statements:
                self.add("a")
            self.assertEqual([sql for sql in statements if "wal_checkpoint(" in sql], [])
            other.execute("ROLLBACK")
            self.assertEqual(ids(self.store.list(limit=1)), ["a"], "the commit itself is not disturbed")

    def test_the_wal_stays_bounded_over_many_commits(self) -> None:
        other = self.open()
        largest = 0
        for _ in range(6):
            self.fill(self.store, 20)
            self.fill(other, 20)
            largest = max(largest, self.store.wal_bytes())
        self.assertGreater(self.db.stat().st_size, 1_500_000)
        self.assertLess(largest, 400_000)

    def test_after_a_great_batch_the_wal_shrinks_again(self) -> None:
        self.store.sqlite.execute("PRAGMA journal_size_limit = 1000000").fetchall()  # instead of WAL_KEPT_BYTES
        self.add_many([{"payload": "x" * 8_000}] * 400)
        self.assertGreater(self.store.wal_bytes(), 3_000_000)
        self.fill(self.store, 5)
        self.assertLessEqual(self.store.wal_bytes(), 1_100_000)

    def test_a_reader_that_stays_holds_it_up_only_as_long_as_it_stays(self) -> None:
        reader = self.open()
        with reader.snapshot():
            reader.list()
            self.fill(self.store)
            self.assertGreater(self.store.wal_bytes(), 400_000)
        self.fill(self.store, 3)
        left = self.store.wal_bytes()
        self.fill(self.store, 6)
        self.assertEqual(self.store.wal_bytes(), left, "it begins anew in the same file")
        self.assertEqual(self.store.counts()["pending"], 69)

    def test_it_is_not_tried_again_at_once(self) -> None:
        with mock.patch.object(connection, "CHECKPOINT_PAUSE_SECONDS", 3_600.0), \
                mock.patch("time.monotonic", return_value=10_000.0), traced(self.store.sqlite) as statements:
            self.fill(self.store)
        self.assertEqual(len([sql for sql in statements if "wal_checkpoint(" in sql]), 1)

    def test_nothing_is_written_so_nothing_is_looked_at(self) -> None:
        with mock.patch.object(Store, "wal_bytes", side_effect=AssertionError("looked")):
            self.claim(queues=("empty",))
            self.store.list()

    def test_by_itself_no_connection_checkpoints(self) -> None:
        with mock.patch.object(connection, "CHECKPOINT_BYTES", 10**9):
            size = self.db.stat().st_size
            self.fill(self.store, 700)
            self.assertGreater(self.store.wal_bytes(), 5_500_000)
            self.assertEqual(self.db.stat().st_size, size)


if __name__ == "__main__":
    unittest.main()
