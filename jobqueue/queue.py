"""`Queue`: the engine with a clock and in the units people use.

Adds to `Store` the wall clock, seconds and JSON values; no rule and no transition lives
here.  What people look at and steer is in `oversight`, its other half.
"""

from __future__ import annotations

from .db import Store
from .errors import InvalidJob
from .jobs import (
    DEFAULT_QUEUE,
    check_integer,
    check_name,
    duration_ms,
    encode_json,
    new_job,
    new_job_from,
)
from .leases import RECOVER_CHUNK
from .lifecycle import DEFAULT_MAX_ATTEMPTS
from .oversight import Oversight
from .shared_commit import SharedCommit
from .times import now_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from typing import Any

    from .jobs import Job, NewJob

    Jobs = list[Job]  # inside the class, `list` is a method
    Ids = list[str]


class Queue(Oversight):
    """A job queue in one SQLite file.

    A context manager.  One object may be used by many threads, and a file by any number of
    objects and processes; after a fork, the child must open its own.  All methods raise
    `DatabaseError` when the file cannot be used, and `DatabaseBusy` when another process
    has kept it locked for `patience_seconds`.

    Args:
        path: the file.
        create: make it if it is missing; False: a missing file is a `DatabaseError`.
        clock: returns milliseconds since the Unix epoch; None: the wall clock.
        patience_seconds: how long a call waits for the write lock.
        allow_shared: use the file even if every user of the machine could change or replace it.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False, clock: Callable[[], int] | None = None,
                 patience_seconds: float = 10.0, allow_shared: bool = False) -> None:
        self._clock = clock or now_ms
        self._store = Store(path, create=create, patience_seconds=patience_seconds, allow_shared=allow_shared)
        self._shared = SharedCommit(self._store, self._clock)

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._store.close()

    @property
    def created(self) -> bool:
        """Whether opening has made the file a queue, so that it was none before."""
        return self._store.created

    # -- putting jobs in -----------------------------------------------------------------

    def enqueue(self, type: str, payload: object = None, *, queue: str = DEFAULT_QUEUE, id: str | None = None,
                priority: int = 0, run_at: str | int | datetime | None = None, delay: float | str | None = None,
                max_attempts: int = DEFAULT_MAX_ATTEMPTS, timeout: float | str | None = None,
                idempotency_key: str | None = None, depends_on: Sequence[str] = (),
                trace: str | None = None) -> str:
        """Store one job durably and return its id; the arguments are those of `jobs.new_job`.

        With an `idempotency_key` that a job in the file has already, nothing is stored and
        that job's id is returned.

        Raises:
            InvalidJob: an argument breaks a rule, the id is taken, or a dependency unknown.
        """
        return self.add(new_job(
            type, payload, queue=queue, id=id, priority=priority, run_at=run_at, delay=delay,
            max_attempts=max_attempts, timeout=timeout, idempotency_key=idempotency_key,
            depends_on=depends_on, trace=trace))[0]

    def enqueue_many(self, jobs: Iterable[Mapping[str, Any]]) -> Ids:
        """Store many jobs, all or none, and return their ids in order.

        Each job is a mapping with the arguments of `enqueue`; `type` is required.  Jobs may
        depend on others of the batch by their `id`, in any order.

        Raises:
            InvalidJob: some job breaks a rule; the message and `.index` (from 0) tell which.
            DependencyCycle: jobs of the batch depend on each other in a ring.
        """
        position = -1

        def checked() -> Iterator[tuple[int, NewJob]]:
            nonlocal position
            for position, fields in enumerate(jobs):
                yield position, new_job_from(fields)

        try:
            return list(self.add_many(checked()))
        except InvalidJob as error:
            error.index = position if error.index is None else error.index
            error.args = (f"jobs[{error.index}]: {error}",)
            raise

    def add(self, job: NewJob) -> tuple[str, bool]:
        """Store one checked job; return its id, and False if its idempotency key was known already."""
        return self._shared.add(job)

    def add_many(self, jobs: Iterable[tuple[int, NewJob]]) -> Iterator[str]:
        """Store checked jobs, all or none, then yield their ids in order; memory stays flat.

        Each comes with a rising number, which `InvalidJob.index` gives back.  A generator: all is
        stored when the first id is asked for.
        """
        with self._store.batch() as batch:
            batch.extend(jobs)
            batch.check()
            self._in_one_go(lambda now_ms: batch.store(now_ms=now_ms))
            yield from batch.ids()

    # -- working -------------------------------------------------------------------------

    def claim(self, worker_id: str, lease_seconds: float = 30, limit: int = 1,
              queues: Sequence[str] = (DEFAULT_QUEUE,)) -> Jobs:
        """Take up to `limit` due jobs under a lease; expired leases of these queues are recovered first.

        Highest priority first, then the oldest.  O(limit log n), whatever else is in the file.

        Raises:
            InvalidJob: no worker id, no queue, or a lease or limit that is not positive.
        """
        return self._claim_after(None, worker_id, lease_seconds, limit, queues)

    def _claim_after(self, task: Task | None, worker_id: str, lease_seconds: float, limit: int,
                     queues: Sequence[str]) -> Jobs:
        """Settle a task, if there is one, and claim, in one commit unless there is much to recover first."""
        lease_ms = duration_ms(lease_seconds, "lease_seconds", 1)
        check_name(worker_id, "worker_id")
        check_integer(limit, "limit", 1)
        if isinstance(queues, str) or not queues:
            raise InvalidJob("queues must be a list of at least one name")
        while True:
            with self._store.transaction():
                now = self._clock()
                if task is not None:
                    task._settle(self._store, now)
                if not self._store.has_due(now_ms=now, queues=queues) or not self._recover(now, queues):
                    return self._store.claim(worker_id, now_ms=now, lease_ms=lease_ms, limit=limit, queues=queues)
            task = None

    def _recover(self, now_ms: int, queues: Sequence[str]) -> bool:
        """Make claimable what has expired or come due, so much as one transaction should; return whether
        more may be left."""
        self._store.pull_back(now_ms=now_ms, queues=queues)
        recovered = self._store.recover_expired(now_ms=now_ms, queues=queues)
        return self._store.promote(now_ms=now_ms, queues=queues) or len(recovered) >= RECOVER_CHUNK

    def work(self, worker_id: str, lease_seconds: float = 30,
             queues: Sequence[str] = (DEFAULT_QUEUE,)) -> Iterator[Task]:
        """Yield due jobs one by one, each as a `Task`, until none is due.

        A job is settled in the same commit that claims the next one, which is nearly twice as
        fast as `claim` and `complete`:

            for task in queue.work("me"):
                task.complete(do(task.job.payload))

        Going on to the next job completes one that was neither completed nor failed; leaving
        the loop early gives it back, with its attempt.  Leases are not extended meanwhile.
        """
        task: Task | None = None
        try:
            while True:
                jobs = self._claim_after(task, worker_id, lease_seconds, 1, queues)
                task = None
                if not jobs:
                    return
                task = Task(jobs[0])
                yield task
                if not task.decided:
                    task.complete()
        finally:
            if task is not None:
                with self._store.transaction():
                    task._settle(self._store, self._clock())

    def complete(self, id: str, lease_token: str, result: object = None) -> bool:
        """Store a job's result and free its dependents; False, and no change, if the lease is lost.

        Raises:
            InvalidJob: the result is not JSON; the lease is left as it was.
            UnknownJobError: there is no such job; so with all methods that take an id.
        """
        with self._store.transaction():
            return self._store.complete(id, lease_token, result, now_ms=self._clock())

    def fail(self, id: str, lease_token: str, error: object, *, retry_after: float | str | None = None,
             final: bool = False) -> bool:
        """Record a failed attempt; False, and no change, if the lease is lost.

        Args:
            error: what went wrong; its text is kept, up to 4,000 characters.
            retry_after: wait before the next attempt, in seconds or as `5m`; None: the backoff.
            final: no further attempt.
        """
        delay_ms = None if retry_after is None else duration_ms(retry_after, "retry_after")
        with self._store.transaction():
            return self._store.fail(id, lease_token, error, now_ms=self._clock(), delay_ms=delay_ms,
                                    final=final) is not None

    def extend(self, id: str, lease_token: str, lease_seconds: float = 30) -> bool:
        """Let the lease run for `lease_seconds` from now; False if it is lost."""
        lease_ms = duration_ms(lease_seconds, "lease_seconds", 1)
        with self._store.transaction():
            return self._store.extend(id, lease_token, now_ms=self._clock(), lease_ms=lease_ms)

    def release(self, id: str, lease_token: str) -> bool:
        """Give a claimed job back with its attempt; False, and no change, if the lease is lost."""
        with self._store.transaction():
            return self._store.release(id, lease_token, now_ms=self._clock())

    def recover_expired(self, queues: Sequence[str] = (DEFAULT_QUEUE,)) -> int:
        """End the leases that have run out in these queues; return how many."""
        total = 0
        while True:
            with self._store.transaction():
                now = self._clock()
                self._store.pull_back(now_ms=now, queues=queues)
                found = len(self._store.recover_expired(now_ms=now, queues=queues))
            total += found
            if found < RECOVER_CHUNK:
                return total


class Task:
    """A job in the hands of a `Queue.work` loop, and what is to become of it.

    Nothing is written before the loop goes on or ends; a lease lost by then is no error, the
    job is somebody else's.

    Attributes:
        job: the job, with its payload, attempts and lease.
        decided: whether `complete` or `fail` was called.
    """

    __slots__ = ("_failure", "_result", "decided", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.decided = False
        self._result: str | None = None
        self._failure: dict[str, Any] | None = None

    def complete(self, result: object = None) -> None:
        """Have the job completed with a JSON value as its result; raises `InvalidJob` if it is none."""
        self._result = None if result is None else encode_json(result, "result")
        self._failure = None
        self.decided = True

    def fail(self, error: object, *, retry_after: float | str | None = None, final: bool = False) -> None:
        """Have the attempt counted as failed; the arguments are those of `Queue.fail`."""
        delay_ms = None if retry_after is None else duration_ms(retry_after, "retry_after")
        self._failure = {"error": error, "delay_ms": delay_ms, "final": final}
        self.decided = True

    def _settle(self, store: Store, now_ms: int) -> None:
        id, token = self.job.id, self.job.lease_token or ""
        if not self.decided:
            store.release(id, token, now_ms=now_ms)
        elif self._failure is None:
            store.complete_many([(self.job.seq, token, self._result)], now_ms=now_ms)
        else:
            store.fail(id, token, now_ms=now_ms, **self._failure)
