"""`WorkQueue`: the queue for asyncio.

    async with WorkQueue("jobs.db") as queue:
        await queue.enqueue("greet-42", {"name": "Ada"})
        lease = await queue.lease("me")
        if lease is not None:
            async with lease:                    # renewed while held
                await greet(lease.payload)       # completed at the end; an exception fails it

or `await queue.run({"work": handler})`, which does that for many jobs at once.

Adds `await`, a clock and this face's words to the engine, which runs in a thread of its own
(`clerk`).  No rule, no transition and no SQL lives here.  Nothing blocks the event loop, and
no call outlasts a file that is locked or out of reach.

Cancellation: a write that has begun ends, one that has not is dropped; a job that was
claimed for a canceled `lease` goes back at once; what settles a lease that was held is never
dropped.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from typing import Any

from ..errors import DatabaseError, InvalidJob
from ..jobs import check_integer, check_name, clean_error, duration_ms, new_job
from ..lifecycle import CANCELED, COMPLETED, DEFAULT_MAX_ATTEMPTS, FAILED, PENDING, RETRYING, RUNNING
from ..times import now_ms
from .clerk import Clerk
from .lease import Lease as Lease
from .lease import encoded
from .moves import Moves
from .operations import Claim, Operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import datetime

    from ..db import Store
    from ..jobs import Job
    from .operations import Action

    Handler = Callable[[Any, Lease], Awaitable[object]]

DEFAULT_QUEUE = "work"
DEFAULT_TYPE = "work"
DONE, DEAD = "done", "dead"
STATUSES = {PENDING: PENDING, RETRYING: PENDING, RUNNING: RUNNING, COMPLETED: DONE, FAILED: DEAD, CANCELED: DEAD}
"""What this face calls each status of the file."""
TROUBLE_PAUSE_SECONDS = 0.1
"""Between two tries of `run` to lease from a file that is locked or out of reach."""


class WorkQueue:
    """A queue of jobs in one SQLite file, for asyncio.

    An asynchronous context manager; to be used from the event loop that entered it.  A file may
    be used by any number of objects and processes; after a fork, the child must open its own.
    Jobs are `pending`, `running`, `done`, or `dead` (out of attempts, or canceled by an operator).

    Every transition is a record of the logger `jobqueue` with the extra fields `event` (enqueue,
    lease, complete, fail, expire, release, requeue), `job_id`, `type`, `attempt`, `worker`,
    `trace_id`, `status` (the one that follows) and `error`.  `lost`, `trouble` and `recovery` are
    warnings of a lost lease and of a file that cannot be used, and that it can again.

    Costs: to enqueue takes O(log n) and O(log n) for each dependency; a lease O(log n), whatever else
    is in the file; to recover c leases, on the way, O(c log n).  Calls that run together share a commit.

    All methods raise `DatabaseError` if the queue is closed, or its file stays out of reach, and
    `DatabaseBusy` if another process keeps it locked, for `timeout` seconds.  A file that comes back is
    opened again.

    Args:
        path: the file; made if it is missing.
        queue: the lane of the file that this object serves; nothing crosses into others.
        retry_limit: how often a job is tried in all before it is dead.
        lease_seconds: how long a lease lasts unless it is renewed.
        timeout: seconds, see above.
        clock: returns milliseconds since the Unix epoch; None: the wall clock.
        allow_shared: use the file even if every user of the machine could change or replace it.
    """

    def __init__(self, path: str | os.PathLike[str], queue: str = DEFAULT_QUEUE,
                 retry_limit: int = DEFAULT_MAX_ATTEMPTS, lease_seconds: float = 30, *, timeout: float = 5,
                 clock: Callable[[], int] | None = None, allow_shared: bool = False) -> None:
        self._path = path
        self._moves = Moves(check_name(queue, "queue"), STATUSES)
        self._retry_limit = check_integer(retry_limit, "retry_limit", 1)
        self._lease_ms = duration_ms(lease_seconds, "lease_seconds", 1)
        self._timeout = duration_ms(timeout, "timeout") / 1_000
        self._clock = clock or now_ms
        self._allow_shared = allow_shared
        self._clerk: Clerk | None = None
        self._entered: dict[str, Lease] = {}  # by token, from entering until it is left, settled or lost

    async def __aenter__(self) -> WorkQueue:
        if self._clerk is not None and not self._clerk.ended.done():
            raise DatabaseError(f"{os.fspath(self._path)} is open already: use one WorkQueue in one 'async with'")
        clerk = self._clerk = Clerk(self._path, self._moves, lease_ms=self._lease_ms, timeout=self._timeout,
                                    clock=self._clock, allow_shared=self._allow_shared)
        clerk.start()
        try:
            await asyncio.wrap_future(clerk.opened)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish the writes that were called for, give back the leases that are held, close the file.

        May be called twice.  Ends after `timeout` seconds at the latest, and not before: a
        cancellation takes effect when the thread has ended.
        """
        clerk = self._clerk
        if clerk is None or not clerk.shut():
            return
        ended = asyncio.wrap_future(clerk.ended)
        canceled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError as error:
                canceled = error
        clerk.join()
        if canceled is not None:
            raise canceled

    # -- putting jobs in -----------------------------------------------------------------

    async def enqueue(self, job_id: str, payload: object, *, type: str = DEFAULT_TYPE, trace_id: str | None = None,
                      priority: int = 0, run_at: str | int | datetime | None = None,
                      delay: float | str | None = None, retry_limit: int | None = None,
                      timeout: float | str | None = None, depends_on: Sequence[str] = ()) -> bool:
        """Store a job durably, once: return True if it is new, False if this queue has one of that id.

        Args:
            payload: any JSON value.
            type: names the handler that `run` calls.
            trace_id: a W3C traceparent, or any id that should travel along.
            priority: higher first.
            run_at, delay: not to be started before; as with `Queue.enqueue`.
            retry_limit: None: that of the queue.
            timeout: how long one attempt may take under `run`, in seconds or as text; None: no limit.
            depends_on: ids of jobs that must be done first.

        Raises:
            InvalidJob: an argument breaks a rule, a dependency is unknown, or the id belongs to a job
                of another queue.
        """
        attempts = self._retry_limit if retry_limit is None else check_integer(retry_limit, "retry_limit", 1)
        job = new_job(type, payload, queue=self._moves.queue, id=check_name(job_id, "job_id"), priority=priority,
                      max_attempts=attempts, run_at=run_at, delay=delay, timeout=timeout, depends_on=depends_on,
                      trace=trace_id)
        return bool(await self._call(lambda store, now: self._moves.add(store, now, job)))

    # -- working -------------------------------------------------------------------------

    async def lease(self, worker_id: str, *, wait: float | None = None) -> Lease | None:
        """Take the next job that is due, under a lease; leases that have run out are recovered first.

        Highest priority first, then the oldest.  The attempt counts from now.

        Args:
            wait: seconds to wait for a job to come due (`math.inf`: for ever); None: do not wait.

        Returns:
            The lease, to be used in `async with`, or to be settled by `complete` or `fail`; None: no job.

        Raises:
            InvalidJob: the worker's id is no name, or `wait` no number of seconds.
        """
        seconds = wait if wait == math.inf else duration_ms(wait or 0, "wait") / 1_000
        return await self._lease(check_name(worker_id, "worker_id"), seconds)

    async def _lease(self, worker_id: str, wait: float, waiting: set[Claim] | None = None) -> Lease | None:
        """Do what `lease` does; meanwhile the claim is in `waiting`, for others to end the wait."""
        clerk = self._open()
        claim = Claim(worker_id, time.monotonic() + wait, clerk.deadline())
        clerk.submit(claim)
        try:
            if waiting is not None:
                waiting.add(claim)
            job: Job | None = await asyncio.wrap_future(claim)
        except asyncio.CancelledError:
            # Withdrawn in time, it is the clerk's affair, even if a job is being claimed right now.
            if not claim.cancel() and claim.exception() is None and claim.result() is not None:
                await self._give_back(clerk, claim.result())
            raise
        finally:
            if waiting is not None:
                waiting.discard(claim)
        return None if job is None else Lease(job, clerk, self._moves, self._entered)

    async def _give_back(self, clerk: Clerk, job: Job) -> None:
        """Release a job whose lease its caller will never see."""
        try:
            clerk.submit(operation := clerk.give_back(job))
            await asyncio.wrap_future(operation)
        except DatabaseError:
            pass  # the clerk has logged it and goes on trying; or the queue is closed, and the lease runs out

    async def complete(self, job_id: str, lease_token: str, result: object = None) -> bool:
        """Store a job's result and free its dependents; False, and no change, if the lease is lost.

        Raises:
            InvalidJob: the result is not JSON; the lease is left as it was.
        """
        text = encoded(result)
        return await self._settle(lease_token, lambda store, now: self._moves.complete(
            store, now, job_id, lease_token, text))

    async def fail(self, job_id: str, lease_token: str, error: object, *, retry_after: float | str | None = None,
                   final: bool = False) -> bool:
        """Record a failed attempt; False, and no change, if the lease is lost.

        Args:
            error: what went wrong; its text is kept, up to 4,000 characters.
            retry_after: wait before the next attempt, in seconds or as `5m`; None: 1, 2, 4 ... 60 s.
            final: no further attempt: the job is dead.
        """
        text = clean_error(error)
        delay_ms = None if retry_after is None else duration_ms(retry_after, "retry_after")
        return await self._settle(lease_token, lambda store, now: self._moves.fail(
            store, now, job_id, lease_token, text, delay_ms, final))

    async def release(self, job_id: str, lease_token: str) -> bool:
        """Give a leased job back with its attempt; False, and no change, if the lease is lost."""
        return await self._settle(lease_token, lambda store, now: self._moves.release(
            store, now, job_id, lease_token))

    async def _settle(self, lease_token: str, action: Action) -> bool:
        clerk = self._open()

        def settle(store: Store, now: int) -> bool:
            held = bool(action(store, now))
            if held:
                clerk.let_go(lease_token)
            return held

        held = bool(await self._call(settle))
        if held:
            self._entered.pop(lease_token, None)
        return held

    async def requeue(self, job_id: str) -> bool:
        """Give a dead job a new budget of attempts; False if it is not dead.

        Raises:
            UnknownJobError: this queue has no such job.
        """
        return bool(await self._call(lambda store, now: self._moves.requeue(store, now, job_id)))

    async def run(self, handlers: Mapping[str, Handler], *, concurrency: int = 10,
                  stop: asyncio.Event | None = None) -> None:
        """Lease jobs and run their handlers until `stop` is set, or for ever.

        A handler is `async def handler(payload, lease)`; what it returns is the job's result.  An
        exception fails the attempt (`Retry` and `Reject` say how), as does a type without a handler or
        a handler that outlasts the job's timeout.  When `stop` is set, the jobs that run are finished;
        on cancellation their handlers are canceled, and the jobs given back.

        Args:
            handlers: by type of job.
            concurrency: how many handlers run at a time.

        Raises:
            DatabaseError: the queue was closed.  A file that is locked or out of reach ends nothing.
            InvalidJob: a handler cannot be called, or `concurrency` is not positive.
        """
        check_integer(concurrency, "concurrency", 1)
        known = dict(handlers)
        for type, handler in known.items():
            if not callable(handler):
                raise InvalidJob(f"the handler for {type!r} must be an 'async def' function, not {handler!r:.60}")
        clerk = self._open()
        worker_id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        waiting: set[Claim] = set()

        async def slot() -> None:
            while not clerk.closing and not (stop is not None and stop.is_set()):
                try:
                    lease = await self._lease(worker_id, math.inf, waiting)
                except DatabaseError:  # the clerk has logged it
                    await asyncio.sleep(TROUBLE_PAUSE_SECONDS)
                    continue
                if lease is not None:
                    await _work(lease, known)

        async with asyncio.TaskGroup() as group:
            slots = [group.create_task(slot()) for _ in range(concurrency)]
            if stop is not None:
                stopping = group.create_task(stop.wait())
                await asyncio.wait([stopping, *slots], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                for claim in waiting:
                    claim.until = 0.0
        if clerk.closing and not (stop is not None and stop.is_set()):
            raise DatabaseError(f"{os.fspath(self._path)} was closed while its jobs were run")

    # -- looking -------------------------------------------------------------------------

    async def get(self, job_id: str) -> dict[str, Any] | None:
        """Return a job as it is now, None if this queue has none of that id.

        Returns:
            `job_id`, `type`, `payload`, `status`, `priority`, `attempts`, `retry_limit`, `created_at` and
            `run_at` (ms since the epoch), `worker` and `expires_at` (None unless it runs), `result`,
            `error` (of the last attempt that failed; None: none has), `trace_id`.
        """
        job: Job | None = await self._call(lambda store, now: self._moves.find(store, job_id), reads=True)
        return None if job is None else {
            "job_id": job.id, "type": job.type, "payload": job.shown_payload, "status": STATUSES[job.status],
            "priority": job.priority, "attempts": job.attempts, "retry_limit": job.max_attempts,
            "created_at": job.created_at, "run_at": job.run_at, "worker": job.lease_owner,
            "expires_at": job.lease_expires_at, "result": job.result, "error": job.last_error,
            "trace_id": job.trace,
        }

    async def stats(self) -> dict[str, int]:
        """Return how many jobs of this queue are `pending`, `running`, `done` and `dead`; linear in them."""
        counts: dict[str, int] = await self._call(lambda store, now: store.counts(self._moves.queue), reads=True)
        stats = dict.fromkeys(STATUSES.values(), 0)
        for status, count in counts.items():
            stats[STATUSES[status]] += count
        return stats

    # -- pieces --------------------------------------------------------------------------

    def _open(self) -> Clerk:
        if self._clerk is None:
            raise DatabaseError(f"{os.fspath(self._path)} is not open yet: use the WorkQueue in 'async with'")
        return self._clerk

    async def _call(self, action: Action, *, reads: bool = False) -> Any:
        """Have something done in the thread; it is withdrawn if this is canceled before it has begun."""
        clerk = self._open()
        clerk.submit(operation := Operation(action, clerk.deadline(), reads=reads))
        try:
            return await asyncio.wrap_future(operation)
        except asyncio.CancelledError:
            operation.cancel()
            raise


# -- pieces of `run` ------------------------------------------------------------------------

async def _work(lease: Lease, handlers: Mapping[str, Handler]) -> None:
    """Run the handler for a job under its lease; whatever the handler raises ends here."""
    try:
        async with lease:
            lease.result = await _handle(lease, handlers)
    except Exception:
        pass  # stored with the job, and logged: by the clerk, or as a lost lease


async def _handle(lease: Lease, handlers: Mapping[str, Handler]) -> object:
    handler = handlers.get(lease.type)
    if handler is None:
        known = ", ".join(sorted(handlers))
        raise LookupError(f"no handler for the type {lease.type!r}; this worker knows {known}")
    task = asyncio.current_task()
    try:
        async with asyncio.timeout(lease.timeout_seconds) as limit:
            return await handler(lease.payload, lease)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"took longer than its timeout of {lease.timeout_seconds:g} seconds") from error
        raise
    except asyncio.CancelledError:
        if task is None or task.cancelling():
            raise
        # Nobody stopped this worker: to give the job back would have it run again and again.
        raise RuntimeError("the handler was canceled, but not by its worker") from None
