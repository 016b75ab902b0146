"""What calls cost, counted: transactions, statements, and SQLite's own steps, which grow with the rows visited.

Nothing is timed, so an extra commit, an extra statement for each job or a lost index fails here on any machine.
The engine's own statements and plans are in `test_plans`, its claims and batches are counted in `test_claims`,
`test_batch` and `test_dependencies`, large files and the worth of each index in `test_costs_large`; here are the
faces and a worker's turn.
"""

from __future__ import annotations

import selectors
import sqlite3
import time
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jobqueue import Queue, oversight
from jobqueue.child import DONE, ERROR
from jobqueue.db import Store
from jobqueue.events import Outcome
from jobqueue.jobs import Job
from jobqueue.signals import Signals
from jobqueue.worker import Worker
from tests.bench_files import fill
from tests.engine import counted, token, traced
from tests.support import TempDirTestCase

BEGIN, COMMIT = "BEGIN IMMEDIATE", "COMMIT"
KINDS = ("waiting", "completed", "future", "blocked", "other-queue")


class CostTestCase(TempDirTestCase):
    """A test with an empty queue open (`self.queue`, its engine `self.store`)."""

    queue: Queue
    store: Store

    def setUp(self) -> None:
        super().setUp()
        # On a busy machine a batch may take so long that it prolongs leases, which is a statement more.
        self.enterContext(mock.patch.object(oversight, "LONG_HOLD_MS", 10**9))
        self.queue = self.open(self.db, create=True)
        self.store = self.queue._store

    def open(self, path: Path, create: bool = False) -> Queue:
        """Open a queue, which is closed at the end of the test; it does not wait for the disk."""
        queue = Queue(path, create=create)
        self.addCleanup(queue.close)
        queue._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
        return queue

    def assert_costs(self, action: Callable[[], object], *, commits: int, statements: int) -> None:
        """Expect so many write transactions, and at most so many statements inside them."""
        with traced(self.store.sqlite) as trace:
            action()
        shown = "\n".join(sql[:100] for sql in trace[-20:])
        self.assertEqual((trace.count(BEGIN), trace.count(COMMIT)), (commits, commits), shown)
        self.assertLessEqual(len(trace) - 2 * commits, statements, shown)


def steps(store: Store, action: Callable[[], object]) -> int:
    """Return how many steps SQLite takes for an action."""
    with counted(store.sqlite) as count:
        action()
    return count[0]


# -- calls ----------------------------------------------------------------------------


class CallTest(CostTestCase):
    """Each call of `Queue` is one commit and a handful of statements."""

    def test_enqueue(self) -> None:
        self.assert_costs(lambda: self.queue.enqueue("t", {"n": 1}), commits=1, statements=3)
        self.assert_costs(lambda: self.queue.enqueue("t", id="mine", run_at="2099-01-01T00:00:00Z"), commits=1,
                          statements=3)  # fmt: skip
        self.assert_costs(lambda: self.queue.enqueue("t", idempotency_key="k"), commits=1, statements=4)
        self.assert_costs(lambda: self.queue.enqueue("t", depends_on=["1", "mine"]), commits=1,
                          statements=3 + 2 * 2)  # fmt: skip

    def test_enqueue_of_a_known_key_looks_once(self) -> None:
        self.queue.enqueue("t", idempotency_key="k")
        written = self.store.commits
        self.assert_costs(lambda: self.queue.enqueue("t", idempotency_key="k"), commits=1, statements=1)
        self.assertEqual(self.store.commits, written, "nothing was written, so nothing is synced")

    def test_enqueue_many_is_one_commit_however_many(self) -> None:
        def enqueue(count: int) -> list[str]:
            with traced(self.store.sqlite) as trace:
                self.queue.enqueue_many([{"type": "t"}] * count)
            self.assertEqual(trace.count(BEGIN), 1)
            return trace[trace.index(BEGIN) + 1 : trace.index(COMMIT, trace.index(BEGIN))]

        few, many = enqueue(2), enqueue(3_000)
        self.assertEqual(len(few), len(many))
        self.assertLessEqual(len(many), 3)

    def test_claim_and_complete_are_a_commit_each(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 5)
        jobs: list[Job] = []
        self.assert_costs(lambda: jobs.extend(self.queue.claim("me", limit=4)), commits=1, statements=2)
        self.assertEqual(len(jobs), 4)
        settle: tuple[tuple[Callable[[str, str], object], int], ...] = (
            (self.queue.complete, 2),
            (lambda id, token: self.queue.fail(id, token, "no luck"), 4),
            (self.queue.extend, 2),
            (self.queue.release, 2),
        )
        for job, (call, statements) in zip(jobs, settle, strict=True):
            self.assert_costs(partial(call, job.id, token(job)), commits=1, statements=statements)
        self.assertEqual({job.status: job.attempts for job in self.queue.list()},
                         {"completed": 1, "retrying": 1, "running": 1, "pending": 0})  # fmt: skip

    def test_a_claim_that_finds_nothing_writes_nothing(self) -> None:
        written = self.store.commits
        self.assertEqual(self.queue.claim("me"), [])
        self.assertEqual(self.store.commits, written)

    def test_work_is_one_commit_a_job(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 10)
        done: list[str] = []
        # Two to claim, two to settle; the last claim finds nothing, and looks why.
        self.assert_costs(lambda: done.extend(task.job.id for task in self.queue.work("me")), commits=11,
                          statements=11 * 2 + 10 * 2 + 1)  # fmt: skip
        self.assertEqual((len(done), self.queue.stats()["completed"]), (10, 10))

    def test_looking_takes_no_write_lock(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 3)
        looks: tuple[Callable[[], object], ...] = (lambda: self.queue.get("1"), self.queue.list, self.queue.stats,
                                                   lambda: self.queue.list("failed"))  # fmt: skip
        for look in looks:
            with traced(self.store.sqlite) as trace:
                look()
            self.assertNotIn(BEGIN, trace)
            self.assertLessEqual(len(trace), 8, trace)

    def test_below_the_threshold_no_commit_is_followed_by_a_checkpoint(self) -> None:
        with traced(self.store.sqlite) as trace:
            for _ in range(50):
                self.queue.enqueue("t")
        self.assertEqual([sql for sql in trace if "checkpoint" in sql], [])

    def test_opening_takes_few_statements(self) -> None:
        traces: list[list[str]] = []
        connect = sqlite3.connect

        def connect_traced(*args: Any, **options: Any) -> sqlite3.Connection:
            opened: sqlite3.Connection = connect(*args, **options)
            traces.append([])
            opened.set_trace_callback(traces[-1].append)
            return opened

        with mock.patch("jobqueue.connection.sqlite3.connect", connect_traced):
            Queue(self.db).close()
        self.assertLessEqual(len(traces), 3, "a look aside if nobody uses the file, a look, the connection itself")
        self.assertLessEqual(sum(map(len, traces)), 20, traces)


# -- a worker -------------------------------------------------------------------------


class PoolStandIn:
    """A pool of two children that hold what they are given until `outcomes` is asked for."""

    size = 2
    types = ("t",)

    def __init__(self) -> None:
        self.children = [SimpleNamespace(open=True, handed={}, since=0.0) for _ in range(self.size)]
        self.selector = selectors.DefaultSelector()
        self._serial = 0

    def wake(self) -> None:
        """Be told that the writer has written."""

    def idle(self) -> list[Any]:
        """Return the children that have nothing to do."""
        return [child for child in self.children if not child.handed]

    def give(self, child: Any, job: Job, deadline: float, timeout_ms: int | None) -> bool:
        """Take a job."""
        self._serial += 1
        child.handed[self._serial] = job
        return True

    def outcomes(self, kind: str = DONE) -> list[Outcome]:
        """End all jobs in the same way; return what they say."""
        jobs = [job for child in self.children for job in child.handed.values()]
        for child in self.children:
            child.handed.clear()
        return [Outcome(job, kind, None if kind == DONE else "no luck", None, 10) for job in jobs]


class WorkerTest(CostTestCase):
    """A turn is one transaction, with a statement for each job that is settled and a few for all."""

    def setUp(self) -> None:
        super().setUp()
        self.pool: Any = PoolStandIn()
        with mock.patch("jobqueue.worker.sys.stderr", None):  # what it logs is thrown away
            self.worker = self.make_worker()
        self.addCleanup(self.pool.selector.close)
        self.addCleanup(self.worker._watch.close)

    def make_worker(self) -> Worker:
        """Return a worker that the test drives turn by turn."""
        with mock.patch("jobqueue.worker.Writer", mock.MagicMock()):
            worker = Worker(self.store, self.pool, Signals(), queues=["default"], lease_seconds=30.0, drain=False,
                            grace_seconds=30.0, default_timeout_ms=None, log_format="text",
                            log_level="error")  # fmt: skip
        worker._stdout.finished.return_value = []  # type: ignore[attr-defined]
        return worker

    def settle(self, kind: str = DONE) -> int:
        """Let the children end what they have; return how many jobs that were."""
        outcomes = self.pool.outcomes(kind)
        self.worker._take_in(outcomes)
        return len(outcomes)

    def warm_up(self) -> None:
        """Work until the worker has seen that jobs are short and each child holds many."""
        for _ in range(40):
            self.worker._turn()
            self.settle()
        self.worker._turn()

    def test_a_turn_that_settles_and_claims_is_one_commit(self) -> None:
        fill(self.db, "waiting", 10_000)
        self.warm_up()
        held = self.settle()
        self.assertGreaterEqual(held, 32, "jobs are short, so many share a commit")
        self.assert_costs(self.worker._turn, commits=1, statements=held + 4)
        self.assertGreaterEqual(self.settle(), 32)

    def test_failures_take_four_statements_each(self) -> None:
        fill(self.db, "waiting", 10_000)
        self.warm_up()
        held = self.settle(ERROR)
        self.assert_costs(self.worker._turn, commits=1, statements=4 * held + 4)

    def test_a_heartbeat_rides_along_with_a_statement_for_each_lease(self) -> None:
        fill(self.db, "waiting", 10_000)
        self.warm_up()
        held = len(self.worker._held)
        self.worker._extended_at -= 11
        self.assert_costs(self.worker._turn, commits=1, statements=held + 4)
        self.assertGreater(self.worker._extended_at, time.monotonic() - 5)

    def test_a_turn_that_finds_nothing_writes_nothing(self) -> None:
        written = self.store.commits
        self.assert_costs(self.worker._turn, commits=1, statements=7)
        self.assertEqual(self.store.commits, written)

    def test_an_idle_look_is_one_statement_and_no_transaction(self) -> None:
        self.worker._turn()
        for _ in range(3):
            self.assert_costs(lambda: self.assertFalse(self.worker._turn_is_due(time.monotonic())), commits=0,
                              statements=1)  # fmt: skip
        other = self.open(self.db)
        other.enqueue("t")
        self.assertTrue(self.worker._turn_is_due(time.monotonic()))

    def test_what_else_is_in_the_file_does_not_matter(self) -> None:
        fill(self.db, "waiting", 200)
        alone = steps(self.store, self.a_few_turns)
        for kind in (*KINDS[1:], "failed"):
            fill(self.db, kind, 5_000)
            fill(self.db, "waiting", 200)
            with self.subTest(f"and {kind}"):
                self.worker = self.make_worker()
                self.assertLessEqual(steps(self.store, self.a_few_turns), 1.3 * alone)

    def a_few_turns(self) -> None:
        """Work off 200 jobs, and be idle once."""
        done = 0
        while done < 200:
            self.worker._turn()
            done += self.settle()
        self.worker._turn()
        self.assertEqual((done, self.settle()), (200, 0))


if __name__ == "__main__":
    unittest.main()
