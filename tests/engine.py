"""What the tests of the engine share: an open `Store`, jobs in any state of their life, statements traced.

Times are given as numbers, as the engine never reads a clock; `NOW` is when things begin.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobqueue.db import Store
from jobqueue.jobs import Job, NewJob, new_job, new_job_from
from jobqueue.queue import Queue
from tests.support import FakeClock, TempDirTestCase

NOW = 1_700_000_000_000
LEASE_MS = 30_000
WORKER = "worker-1"
TABLES = ("jobs", "dependencies", "failures", "outputs", "workers")


class StoreTestCase(TempDirTestCase):
    """A test with an open engine (`self.store`, in `self.db`)."""

    store: Store

    def setUp(self) -> None:
        super().setUp()
        self.store = self.open(create=True)

    def open(self, path: Path | None = None, **options: Any) -> Store:
        """Open an engine, which is closed at the end of the test; it does not wait for the disk."""
        store = Store(path or self.db, **options)
        self.addCleanup(store.close)
        store.sqlite.execute("PRAGMA synchronous = OFF")
        return store

    def clear(self) -> None:
        """Make the file as it was when it was new, in a hundredth of the time of making another."""
        with self.store.transaction():
            for table in TABLES:
                self.store.sqlite.execute(f"DELETE FROM {table}")
            self.store.sqlite.execute("UPDATE sqlite_sequence SET seq = 0")

    # -- short forms ---------------------------------------------------------------------

    def add(self, id: str | None = None, now: int = NOW, **fields: Any) -> str:
        """Store a job of type `t` and return its id."""
        return self.store.add(new_job(fields.pop("type", "t"), id=id, **fields), now_ms=now)[0]

    def add_many(self, jobs: Iterable[Mapping[str, object]], now: int = NOW) -> list[str]:
        """Store a batch of jobs of type `t`, numbered from 0, and return their ids."""
        return add_batch(self.store, (new_job_from({"type": "t", **fields}) for fields in jobs), now)

    def claim(self, now: int = NOW, limit: int = 1, lease_ms: int = LEASE_MS,
              queues: tuple[str, ...] = ("default",)) -> list[Job]:
        """Promote what has come due, then claim."""
        while self.store.promote(now_ms=now, queues=queues):
            pass
        return self.store.claim(WORKER, now_ms=now, lease_ms=lease_ms, limit=limit, queues=queues)

    def take(self, id: str | None = None, now: int = NOW, lease_ms: int = LEASE_MS) -> Job:
        """Claim one job, which must be the one named, and return it."""
        (job,) = self.claim(now, lease_ms=lease_ms)
        if id is not None:
            self.assertEqual(job.id, id)
        return job

    def finish(self, id: str | None = None, now: int = NOW) -> Job:
        """Claim and complete one job, which must be the one named."""
        job = self.take(id, now)
        self.assertTrue(self.store.complete(job.id, token(job), now_ms=now))
        return job

    def kill(self, id: str | None = None, now: int = NOW) -> Job:
        """Claim one job, which must be the one named, and fail it for good."""
        job = self.take(id, now)
        self.assertEqual(self.store.fail(job.id, token(job), "dead", now_ms=now, final=True), "failed")
        return job

    def job(self, id: str) -> Job:
        """Return a job that must be there."""
        job = self.store.get(id)
        assert job is not None, f"no job {id}"
        return job

    # -- looking into the file -----------------------------------------------------------

    def query(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self.store.snapshot():
            return self.store.sqlite.execute(sql, args).fetchall()

    def contents(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return all rows of all tables, to show that nothing has changed."""
        return {table: self.query(f"SELECT * FROM {table} ORDER BY 1, 2") for table in (*TABLES, "sqlite_sequence")}

    def statuses(self) -> dict[str, str]:
        """Return the status of each job."""
        return dict(self.query("SELECT id, status FROM jobs ORDER BY seq"))


class QueueTestCase(TempDirTestCase):
    """A test with a queue (`self.queue`) and its clock."""

    clock: FakeClock
    queue: Queue

    def setUp(self) -> None:
        super().setUp()
        self.clock = FakeClock(NOW)
        self.queue = self.open(create=True)

    def open(self, **options: Any) -> Queue:
        """Open the file once more, until the end of the test; it does not wait for the disk."""
        queue = Queue(self.db, clock=self.clock, **options)
        self.addCleanup(queue.close)
        queue._store.sqlite.execute("PRAGMA synchronous = OFF")
        return queue

    def take(self, id: str | None = None) -> Job:
        """Claim one job, which must be the one named, and return it."""
        (job,) = self.queue.claim("w")
        self.assertIn(id, (None, job.id))
        return job

    def job(self, id: str) -> Job:
        """Return a job that must be there."""
        job = self.queue.get(id)
        assert job is not None
        return job

    def together(self, *calls: Callable[[], object]) -> list[object]:
        """Run calls in a thread each and return their results, or errors, in order."""
        results: list[object] = [None] * len(calls)

        def work(n: int) -> None:
            try:
                results[n] = calls[n]()
            except BaseException as error:
                results[n] = error

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            self.assertFalse(thread.is_alive())
        return results


def token(job: Job) -> str:
    """Return the token of a claimed job."""
    assert job.lease_token is not None, f"{job} has no lease"
    return job.lease_token


def ids(jobs: Iterable[Job]) -> list[str]:
    """Return the ids of jobs, in their order."""
    return [job.id for job in jobs]


def add_batch(store: Store, jobs: Iterable[NewJob], now: int = NOW) -> list[str]:
    """Store a batch and return the ids."""
    with store.batch() as batch:
        batch.extend(enumerate(jobs))
        batch.check()
        batch.store(now_ms=now)
        return list(batch.ids())


@contextmanager
def traced(*connections: sqlite3.Connection) -> Iterator[list[str]]:
    """Collect the statements that the connections run, each in one line and without its values' names."""
    statements: list[str] = []
    for connection in connections:
        connection.set_trace_callback(lambda sql: statements.append(" ".join(sql.split())))
    try:
        yield statements
    finally:
        for connection in connections:
            connection.set_trace_callback(None)


@contextmanager
def counted(connection: sqlite3.Connection) -> Iterator[list[int]]:
    """Count the steps of SQLite's virtual machine, which grow with the rows that statements visit."""
    steps = [0]

    def step() -> int:
        steps[0] += 1
        return 0

    connection.set_progress_handler(step, 1)
    try:
        yield steps
    finally:
        connection.set_progress_handler(None, 0)
