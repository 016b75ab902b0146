"""Transactions, waiting for the write lock, threads, the full disk."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from jobqueue.errors import DatabaseBusy, DatabaseError, InvalidJob, JobQueueError
from jobqueue.jobs import new_job
from tests.engine import LEASE_MS, NOW, WORKER, StoreTestCase, ids, token, traced
from tests.support import Process, until


class TransactionTest(StoreTestCase):
    """All or nothing, also when nested."""

    def test_a_nested_transaction_commits_once_with_the_outermost(self) -> None:
        other, commits = self.open(), self.store.commits
        with traced(self.store.sqlite) as statements, self.store.transaction():
            self.add("a")
            with self.store.transaction(), self.store.transaction():
                self.add_many([{"id": "b"}, {"id": "c"}])
            self.assertTrue(self.store.sqlite.in_transaction)
            self.assertEqual(other.list(), [])
        self.assertEqual([sql for sql in statements if sql.startswith(("BEGIN", "COMMIT", "ROLLBACK"))],
                         ["BEGIN IMMEDIATE", "COMMIT"])
        self.assertEqual(self.store.commits, commits + 1)
        self.assertEqual(ids(other.list()), ["c", "b", "a"])

    def test_a_turn_of_a_worker_is_one_commit(self) -> None:
        self.add_many([{}] * 9)
        first = self.claim(limit=3, lease_ms=10)
        second = self.claim(limit=3)
        commits = self.store.commits
        with traced(self.store.sqlite) as statements, self.store.transaction():
            self.store.complete_many([(job.seq, token(job), None) for job in second[:2]], now_ms=NOW + 10)
            self.store.fail(second[2].id, token(second[2]), "x", now_ms=NOW + 10)
            self.assertEqual(len(self.store.recover_expired(now_ms=NOW + 10)), len(first))
            self.assertEqual(len(self.claim(NOW + 10, limit=4)), 4)
        self.assertEqual((statements.count("BEGIN IMMEDIATE"), statements.count("COMMIT")), (1, 1))
        self.assertEqual(self.store.commits, commits + 1)

    def test_an_exception_rolls_back_everything(self) -> None:
        self.add("before")
        before = self.contents()
        for error in (ValueError("mine"), KeyboardInterrupt()):
            with self.assertRaises(type(error)) as caught, self.store.transaction():
                self.add("a")
                with self.store.transaction():
                    self.add("b")
                    self.take("before")
                    raise error
            self.assertIs(caught.exception, error)
            self.assertEqual(self.contents(), before)
            self.assertFalse(self.store.sqlite.in_transaction)
        self.assertEqual(self.add("a"), "a")

    def test_errors_of_sqlite_come_out_as_ours(self) -> None:
        before = self.contents()
        with self.assertRaisesRegex(DatabaseError, r"db does not answer as expected \(SQLite says: no") as caught:
            with self.store.transaction():
                self.add("a")
                self.store.sqlite.execute("INSERT INTO nowhere VALUES (1)")
        self.assertIsInstance(caught.exception.__cause__, sqlite3.OperationalError)
        self.assertEqual(self.contents(), before)

    def test_a_read_of_many_statements_sees_one_state(self) -> None:
        other = self.open()
        self.add("a")
        with self.store.snapshot():
            self.assertEqual(ids(self.store.list()), ["a"])
            other.add(new_job("t", id="b"), now_ms=NOW)
            self.assertEqual(ids(self.store.list()), ["a"])
            self.assertEqual(self.store.counts()["pending"], 1)
        self.assertEqual(ids(self.store.list()), ["b", "a"])

    def test_a_snapshot_does_not_become_a_write(self) -> None:
        with self.assertRaisesRegex(JobQueueError, "a snapshot cannot become a write transaction"):
            with self.store.snapshot():
                self.store.list()
                self.add("a")
        self.assertEqual(self.store.list(), [])
        with self.store.transaction():
            self.add("b")
            with self.store.snapshot():
                self.assertEqual(ids(self.store.list()), ["b"])
            self.add("c")
        self.assertEqual(ids(self.store.list()), ["c", "b"])

    def test_no_statement_stays_open(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"])
        job = self.take("a")
        for call in self.every_call(token(job)):
            call()
            self.assertFalse(self.store.sqlite.in_transaction)
            # Any open statement would hold a snapshot, and this would answer (1, ...) for "busy".
            self.assertEqual(self.store.sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall(), [(0, 0, 0)])

    def every_call(self, held: str) -> list[Callable[[], Any]]:
        store = self.store
        return [
            lambda: store.list(), lambda: store.get("a"), lambda: store.counts(), lambda: store.shares(now_ms=NOW),
            lambda: store.blocked(), lambda: store.is_blocked("b"), lambda: store.next_event(["default"]),
            lambda: store.has_ready(["default"]), lambda: store.data_version(), lambda: next(store.iterate()),
            lambda: store.promote(now_ms=NOW), lambda: store.recover_expired(now_ms=NOW),
            lambda: store.extend("a", held, now_ms=NOW, lease_ms=LEASE_MS),
            lambda: store.report("a", held, 0.5, None, now_ms=NOW),
            lambda: store.complete("a", held, now_ms=NOW),
            lambda: store.claim(WORKER, now_ms=NOW, lease_ms=1, limit=9),
            lambda: store.cancel("b", now_ms=NOW), lambda: store.retry("b", now_ms=NOW),
            lambda: store.retry_failed(now_ms=NOW), lambda: self.add_many([{"depends_on": ["a"]}, {}]),
        ]

    def test_a_closed_engine_says_so(self) -> None:
        self.store.close()
        self.store.close()
        for call in self.every_call(""):
            with self.assertRaisesRegex(DatabaseError, "jobs.db is closed"):
                call()


class VersionTest(StoreTestCase):
    """`data_version` changes with every commit, whoever made it."""

    def test_it_changes_with_commits_of_oneself_and_of_others(self) -> None:
        other = self.open()
        seen = [self.store.data_version()]
        for store in (self.store, other, self.store, other, other):
            store.add(new_job("t"), now_ms=NOW)
            seen.append(self.store.data_version())
        self.assertEqual(len(set(seen)), 6)

    def test_it_stays_when_nothing_was_written(self) -> None:
        other = self.open()
        self.add("a")
        version = self.store.data_version()
        for store in (self.store, other):
            store.list()
            store.claim(WORKER, now_ms=NOW, lease_ms=1, queues=("empty",))
            store.recover_expired(now_ms=NOW)
            with self.assertRaises(InvalidJob):
                store.add(new_job("t", id="a"), now_ms=NOW)
            with store.transaction():
                pass
        self.assertEqual(self.store.data_version(), version)


class WaitingTest(StoreTestCase):
    """The write lock of others."""

    @contextmanager
    def lock_held(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.db, isolation_level=None, check_same_thread=False)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield other

    def test_a_lock_held_for_good_is_busy_after_the_patience(self) -> None:
        store = self.open(patience_seconds=0.2)
        with self.lock_held():
            began = time.monotonic()
            with self.assertRaisesRegex(DatabaseBusy, "locked by another process for 0.2 seconds; try again"):
                store.add(new_job("t"), now_ms=NOW)
            self.assertGreaterEqual(time.monotonic() - began, 0.2)
            self.assertLess(time.monotonic() - began, 5)
            self.assertEqual(store.list(), [], "reading needs no lock")
        self.assertEqual(store.add(new_job("t"), now_ms=NOW), ("1", True))

    def test_a_lock_given_up_in_time_is_waited_for(self) -> None:
        waiting = threading.Event()

        def stop() -> bool:
            waiting.set()
            return False

        self.store.stop = stop
        with self.lock_held() as other:
            thread = threading.Thread(target=lambda: waiting.wait(10) and other.execute("COMMIT"))
            thread.start()
            self.assertEqual(self.add(), "1")
            thread.join(10)
        self.assertTrue(waiting.is_set())

    def test_the_wait_ends_when_told_to_stop(self) -> None:
        asked: list[int] = []

        def stop() -> bool:
            asked.append(1)
            return len(asked) >= 3

        store = self.open(patience_seconds=600, stop=stop)
        with self.lock_held(), self.assertRaises(DatabaseBusy):
            store.add(new_job("t"), now_ms=NOW)
        self.assertEqual(len(asked), 3)

    def test_stop_is_not_asked_when_nobody_is_in_the_way(self) -> None:
        store = self.open(stop=lambda: self.fail("asked"))
        store.add(new_job("t"), now_ms=NOW)
        self.assertEqual(len(store.list()), 1)

    @unittest.skipUnless(sys.platform.startswith("linux"), "plays the part of a recovery by Linux's record locks")
    def test_a_read_waits_too_while_another_process_recovers_the_log(self) -> None:
        def play() -> Process:
            """Hold the locks of a recovery, and leave the index as a crash would, until there is a gate."""
            process = self.spawn([sys.executable, "-c", """
import fcntl, os, sys, time
index = os.open(sys.argv[1] + "-shm", os.O_RDWR)
fcntl.lockf(index, fcntl.LOCK_EX, 3, 120)
os.pwrite(index, bytes(96), 0)
print("held", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.001)
""", str(self.db), str(self.dir / "gate")])
            until(lambda: "held" in process.stdout_text() or process.poll() is not None, 20, "the locks")
            return process

        def open_gate() -> bool:
            (self.dir / "gate").touch()
            return False

        self.add("a")
        self.store.patience_seconds = 0.1
        process = play()
        with self.assertRaises(DatabaseBusy):
            self.store.list()
        self.assertFalse(self.store.sqlite.in_transaction)
        self.store.patience_seconds, self.store.stop = 10, open_gate
        self.assertEqual(ids(self.store.list()), ["a"])
        self.assertEqual(process.finish().returncode, 0)
        (self.dir / "gate").unlink()
        process = play()
        self.assertEqual(len(self.store.data_version()), 2)
        self.assertEqual(process.finish().returncode, 0)

    def test_two_engines_in_one_process_take_turns(self) -> None:
        other = self.open(patience_seconds=0)
        with self.store.transaction():
            self.add("a")
            with self.assertRaises(DatabaseBusy):
                other.add(new_job("t"), now_ms=NOW)
        other.add(new_job("t", id="b"), now_ms=NOW)
        self.assertEqual(ids(self.store.list()), ["b", "a"])
        other.close()
        self.assertEqual(self.add("c"), "c")


class ThreadsTest(StoreTestCase):
    """One connection, many threads: they take turns."""

    def test_20_threads_on_one_engine(self) -> None:
        self.add_many([{"max_attempts": 1}] * 200)
        done: list[str] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while jobs := self.claim(limit=3):
                    for job in jobs:
                        self.add(f"from {job.id}", queue="q")
                        if self.store.complete(job.id, token(job), now_ms=NOW):
                            done.append(job.id)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        self.assertEqual(errors, [])
        self.assertEqual(sorted(map(int, done)), list(range(1, 201)))
        self.assertEqual(self.store.counts("q")["pending"], 200)

    def test_no_thread_sees_or_joins_the_transaction_of_another(self) -> None:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(ids(self.store.list())))
        with self.assertRaises(ZeroDivisionError), self.store.transaction():
            self.add("a")
            thread.start()
            thread.join(0.05)
            self.assertTrue(thread.is_alive(), "it waits for its turn")
            raise ZeroDivisionError
        thread.join(10)
        self.assertEqual(answers, [[]])

    def test_a_thread_that_never_ends_its_turn_makes_others_busy(self) -> None:
        store = self.open(patience_seconds=-0.9)  # 0.1 s for the lock among threads
        errors: list[str] = []

        def work() -> None:
            try:
                store.list()
            except DatabaseBusy as error:
                errors.append(str(error))

        with store.transaction():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)
        self.assertEqual(errors, [f"{self.db} is in use by another thread; try again"])


class FullDiskTest(StoreTestCase):
    """A file that cannot grow."""

    def test_a_full_disk_is_an_error_that_loses_nothing(self) -> None:
        self.add("first")
        ((pages,),) = self.query("PRAGMA page_count")
        self.store.sqlite.execute(f"PRAGMA max_page_count = {pages + 10}").fetchall()
        stored = ["first"]
        with self.assertRaisesRegex(DatabaseError, "db cannot grow: the disk is full; make room and try again"):
            stored.extend(self.add(f"{n}", payload="x" * 1_000) for n in range(1_000))
        self.assertGreater(len(stored), 10)
        before = self.contents()
        with self.assertRaisesRegex(DatabaseError, "the disk is full"):
            self.add_many([{"payload": "x" * 10_000}] * 100)
        with self.assertRaisesRegex(DatabaseError, "the disk is full"), self.store.transaction():
            self.take("first")
            self.add(payload="x" * 100_000)
        self.assertEqual(self.contents(), before)
        self.assertEqual(self.query("PRAGMA integrity_check"), [("ok",)])
        self.store.sqlite.execute("PRAGMA max_page_count = 1000000").fetchall()
        self.assertEqual(len(self.add_many([{"payload": "x" * 10_000}] * 100)), 100)
        self.assertEqual(ids(self.store.list())[100:], stored[::-1])


if __name__ == "__main__":
    unittest.main()
