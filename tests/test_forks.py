"""Forked children: they cannot use what they inherit, cannot harm it, and can open their own.

Each test is a small program, so that a child's end is that of a real interpreter: it destroys all objects.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unittest

from tests.support import TempDirTestCase, sql

PROGRAM = """
import multiprocessing, os, sys, threading, warnings
from jobqueue.db import Store
from jobqueue.errors import DatabaseError
from jobqueue.jobs import new_job
from jobqueue.queue import Queue

warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what some of this is about
path = sys.argv[1]

def fork(child):
    "Run child() in a forked process, which then ends as a program does, and return its exit code."
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(*calls):
    for call in calls:
        try:
            call()
        except DatabaseError as error:
            assert "before a fork; open it again in this one" in str(error), error
        else:
            raise AssertionError("not refused")

def check(store, pending):
    assert store.sqlite.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert store.counts()["pending"] == pending, store.counts()
    with Queue(path) as other:
        assert other.stats()["pending"] == pending, other.stats()
"""


@unittest.skipUnless(hasattr(os, "fork"), "there is no fork here")
class ForkTest(TempDirTestCase):
    """What holds on both sides of a fork."""

    def program(self, text: str) -> str:
        """Run a program after the common part, expect that it ends well, and return what it printed."""
        code = PROGRAM + textwrap.dedent(text)
        done = self.spawn([sys.executable, "-W", "error::ResourceWarning", "-c", code, str(self.db)]).finish(20)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stderr)
        return done.stdout

    def test_a_child_is_refused_and_its_end_harms_nothing(self) -> None:
        self.program("""
            queue = Queue(path, create=True)
            store = queue._store
            queue.enqueue("t")
            def child():
                refused(lambda: queue.enqueue("t"), lambda: queue.get("1"), lambda: queue.list(), queue.stats,
                        lambda: queue.enqueue_many([{"type": "t"}]), lambda: queue.claim("w"), store.data_version,
                        lambda: queue.wait("1"), queue.recover_expired, lambda: queue.cancel("1"))
                queue.close()
            assert fork(child) == 0
            queue.enqueue("t")
            check(store, 2)
            queue.close()
        """)

    def test_a_child_is_refused_at_once_whatever_other_threads_were_doing(self) -> None:
        self.program("""
            queue = Queue(path, create=True)
            filling, go_on = threading.Event(), threading.Event()
            def jobs():
                yield {"type": "t"}
                filling.set()
                go_on.wait(10)
            thread = threading.Thread(target=queue.enqueue_many, args=(jobs(),))
            thread.start()
            filling.wait(10)
            with queue._shared._lock:
                assert fork(lambda: refused(lambda: queue.enqueue_many([{"type": "t"}]),
                                            lambda: queue.enqueue("t"))) == 0
            go_on.set()
            thread.join()
            check(queue._store, 1)
            queue.close()
        """)

    def test_a_child_in_the_middle_of_a_transaction_leaves_it_to_its_parent(self) -> None:
        for jobs in (3, 50):  # 50 MB are more than the cache holds, so that a part is in the log already
            with self.subTest(jobs=jobs):
                self.db = self.dir / f"{jobs}.db"
                self.program(f"""
                    store = Store(path, create=True)
                    def child():
                        refused(lambda: store.add(new_job("t"), now_ms=0), store.list)
                        try:
                            Store(path)
                        except DatabaseError as error:
                            assert "was inside a transaction of process" in str(error), error
                        else:
                            raise AssertionError("not refused")
                    transaction = store.transaction()
                    transaction.__enter__()     # not by `with`, which would not let the child end quietly
                    job = new_job("t", "x" * 1_000_000)
                    for _ in range({jobs}):
                        store.add(job, now_ms=0)
                    assert fork(child) == 0
                    assert fork(lambda: sys.exit(7)) == 7
                    transaction.__exit__(None, None, None)
                    check(store, {jobs})
                    store.add(new_job("t"), now_ms=0)
                    check(store, {jobs} + 1)
                    store.close()
                """)

    def test_a_child_can_open_its_own_and_outlive_its_parent_s(self) -> None:
        self.program("""
            store = Store(path, create=True)
            store.add(new_job("t"), now_ms=0)
            ready, closed = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                with Queue(path) as queue:
                    queue.enqueue("t")
                    os.write(ready[1], b"x")
                    os.read(closed[0], 1)
                    queue.enqueue("t")
                    os._exit(0)     # without closing, as in a crash: what it committed must be in the files
            os.read(ready[0], 1)
            store.close()
            os.write(closed[1], b"x")
            os.waitpid(pid, 0)
        """)
        self.assertEqual(sql(self.db, "SELECT count(*) FROM jobs"), [(3,)])

    def test_the_locks_of_a_child_are_real(self) -> None:
        self.program("""
            parent = Store(path, create=True, patience_seconds=0)
            ready, done = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                store = Store(path, patience_seconds=0)
                with store.transaction():
                    store.add(new_job("t"), now_ms=0)
                    os.write(ready[1], b"x")
                    os.read(done[0], 1)
                store.close()
                sys.exit(0)
            os.read(ready[0], 1)
            try:
                parent.add(new_job("t"), now_ms=0)
            except DatabaseError as error:
                print(error)
            os.write(done[1], b"x")
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            check(parent, 1)
            parent.close()
        """)

    def test_a_fork_waits_for_the_transactions_of_other_threads(self) -> None:
        self.program("""
            store = Store(path, create=True)
            inside, events = threading.Event(), []
            def work():
                with store.transaction():
                    store.add(new_job("t"), now_ms=0)
                    inside.set()
                    event.wait(0.2)
                    events.append("end of the transaction")
            event = threading.Event()
            thread = threading.Thread(target=work)
            thread.start()
            inside.wait(10)
            def child():
                assert events == ["end of the transaction"], events
                with Queue(path) as queue:
                    queue.enqueue("t")
            assert fork(child) == 0
            thread.join()
            check(store, 2)
            store.close()
        """)

    def test_a_fork_waits_for_another_thread_that_is_opening_a_file(self) -> None:
        self.program("""
            Store(path, create=True).close()
            inside, look = threading.Event(), Store._look_for_blank
            def slow_look(store):
                inside.set()
                event.wait(0.2)
                return look(store)
            event, opened = threading.Event(), []
            Store._look_for_blank = slow_look
            thread = threading.Thread(target=lambda: opened.append(Store(path)))
            thread.start()
            inside.wait(10)
            def child():
                refused(opened[0].list)
                with Queue(path) as queue:
                    queue.enqueue("t")
            assert fork(child) == 0
            thread.join()
            check(opened[0], 1)
            opened[0].close()
        """)

    def test_multiprocessing_by_fork_with_an_open_queue(self) -> None:
        self.program("""
            def work(n):
                with Queue(path) as own:
                    own.enqueue_many([{"type": "t", "id": f"{n}-{m}"} for m in range(20)])
            with Queue(path, create=True) as queue:
                queue.enqueue("t")
                with multiprocessing.get_context("fork").Pool(4) as pool:
                    pool.map(work, range(8))
                queue.enqueue("t")
                check(queue._store, 162)
        """)

    def test_a_closed_or_forgotten_queue_does_not_matter(self) -> None:
        self.program("""
            Queue(path, create=True).close()
            queue = Queue(path)
            queue.close()
            def child():
                with Queue(path) as own:
                    own.enqueue("t")
            assert fork(child) == 0
            assert fork(child) == 0
            with Queue(path) as queue:
                check(queue._store, 2)
        """)


if __name__ == "__main__":
    unittest.main()
