"""Threads on one `Queue`: waiting for each other's commits, and sharing commits.

Where a thread has to be at a certain point, the test waits for that; nothing sleeps to let time pass.
"""

from __future__ import annotations

import sqlite3
import threading
import unittest
from collections.abc import Callable
from contextlib import closing
from functools import partial
from unittest import mock

from jobqueue.errors import DatabaseBusy, DatabaseError, InvalidJob, UnknownJobError
from jobqueue.jobs import Job
from jobqueue.queue import Queue
from tests.engine import QueueTestCase, token
from tests.support import until


class WaitTest(QueueTestCase):
    """Waiting for the end of a job."""

    def setUp(self) -> None:
        super().setUp()
        self.queue.enqueue("t")

    def test_any_end_ends_the_wait(self) -> None:
        self.assertTrue(self.queue.complete("1", token(self.take())))
        self.assertEqual(self.queue.wait("1").status, "completed")
        self.queue.enqueue("t")
        self.queue.fail("2", token(self.take()), "x", final=True)
        self.assertEqual(self.queue.wait("2", timeout=5).status, "failed")
        self.queue.retry("2")
        self.queue.cancel("2")
        self.assertEqual(self.queue.wait("2", timeout=5).status, "canceled")

    def test_the_time_runs_out(self) -> None:
        with self.assertRaisesRegex(TimeoutError, "job '1' was still pending after 0.02 seconds"):
            self.queue.wait("1", timeout=0.02)
        with self.assertRaises(TimeoutError):
            self.queue.wait("1", timeout=0)
        with self.assertRaises(UnknownJobError):
            self.queue.wait("nobody", timeout=5)

    def test_it_ends_by_a_commit_of_this_queue_or_another(self) -> None:
        for id, queue in (("1", self.queue), ("2", self.open())):
            held = token(self.take(id))
            looks: list[str] = []
            looked = threading.Event()
            known = self.queue.known

            def look(id: str, looks: list[str] = looks, looked: threading.Event = looked,
                     known: Callable[[str], Job] = known) -> Job:
                looks.append(id)
                looked.set()
                return known(id)

            def complete(id: str = id, queue: Queue = queue, held: str = held,
                         looked: threading.Event = looked) -> bool:
                return looked.wait(10) and queue.complete(id, held, "done")

            with mock.patch.object(self.queue, "known", look):
                done, completed = self.together(partial(self.queue.wait, id, timeout=20), complete)
            self.assertEqual((getattr(done, "result", done), completed), ("done", True))
            self.assertLessEqual(len(looks), 2, "it looks at the job only after a commit")
            self.queue.enqueue("t")


class SharedCommitTest(QueueTestCase):
    """Threads that enqueue at the same time share commits and get each their own answer."""

    def waiting(self, count: int) -> None:
        """Wait until so many threads stand in line for the one that stores."""
        until(lambda: len(self.queue._shared._waiting) >= count, what="threads to stand in line")

    def test_those_who_wait_are_stored_in_one_commit(self) -> None:
        commits = self.queue._store.commits
        threads: list[threading.Thread] = []
        ids: list[str] = []

        def enqueue(n: int) -> None:
            ids.append(self.queue.enqueue("t", n))

        with self.queue._store.transaction():  # whoever comes first waits for this, the others behind it
            threads.extend(threading.Thread(target=enqueue, args=(n,)) for n in range(10))
            for thread in threads:
                thread.start()
            self.waiting(9)
        for thread in threads:
            thread.join(10)
        self.assertEqual(sorted(ids, key=int), [str(n) for n in range(1, 11)])
        self.assertEqual(sorted(self.job(id).payload for id in ids), list(range(10)))
        self.assertEqual(self.queue._store.commits, commits + 2)

    def test_a_refused_job_harms_none_of_the_others(self) -> None:
        self.queue.enqueue("t", id="taken")
        calls: list[Callable[[], object]] = [
            lambda: self.queue.enqueue("t", id="taken"),
            lambda: self.queue.enqueue("t", depends_on=["taken", "nobody"]),
            *[lambda: self.queue.enqueue("t")] * 6,
        ]
        results = self.together(*calls * 3)
        for n, result in enumerate(results):
            if n % 8 < 2:
                self.assertIsInstance(result, InvalidJob)
            else:
                self.assertEqual(self.job(str(result)).depends_on, ())
        self.assertEqual(self.queue.stats()["pending"], 19)

    def test_a_file_that_stays_locked_is_told_to_all(self) -> None:
        queue = self.open(patience_seconds=0.05)
        with closing(sqlite3.connect(self.db, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            results = self.together(*[lambda: queue.enqueue("t")] * 6)
            self.assertEqual([type(result) for result in results], [DatabaseBusy] * 6)
        self.assertEqual(self.queue.list(), [])
        self.assertEqual(queue.enqueue("t"), "1")

    def test_a_commit_that_fails_is_told_to_all(self) -> None:
        store = self.queue._store
        results: list[str] = []

        def refuse(error: BaseException | None) -> None:
            store.sqlite.execute("ROLLBACK")
            raise DatabaseError("the disk is full")

        def enqueue() -> None:
            try:
                results.append(self.queue.enqueue("t"))
            except DatabaseError as error:
                results.append(str(error))

        threads = [threading.Thread(target=enqueue) for _ in range(3)]
        with mock.patch.object(store, "_finish", refuse):
            with self.queue._shared._lock:
                for thread in threads:
                    thread.start()
                self.waiting(3)
            for thread in threads:
                thread.join(10)
        self.assertEqual(results, ["the disk is full"] * 3)
        self.assertEqual(self.queue.list(), [])

    def test_20_threads_on_one_queue(self) -> None:
        def work(n: int) -> list[str]:
            done = []
            for m in range(10):
                self.queue.enqueue("t", id=f"{n}-{m}")
                self.queue.enqueue("t", idempotency_key=f"k{m}", queue="keyed")
                jobs = self.queue.claim(f"w{n}", limit=2)
                done += [job.id for job in jobs if self.queue.complete(job.id, token(job))]
            return done

        results = self.together(*[partial(work, n) for n in range(20)])
        done = [id for result in results if isinstance(result, list) for id in result]
        self.assertEqual(sorted(done), sorted(f"{n}-{m}" for n in range(20) for m in range(10)), results)
        self.assertEqual(self.queue.stats("keyed")["pending"], 10)


if __name__ == "__main__":
    unittest.main()
