"""`Lease`: a job in the hands of one task of an event loop.

An asynchronous context manager whose end decides what becomes of the job.  The engine's
thread (`clerk`) renews the lease and makes the move; this turns the way in which the block
is left into the right one, and the loss of a lease into an error where it matters.

What settles a lease is handed to the thread before anything is awaited, so no cancellation
can come between a job's work and its record.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import DatabaseError, InvalidJob, LeaseLost
from ..handlers import Reject, Retry
from ..jobs import clean_error, encode_json
from .clerk import Clerk
from .moves import Moves, remark
from .operations import Operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..jobs import Job
    from .operations import Action


class Lease:
    """A job in the hands of one worker, until `expires_at`.

    An asynchronous context manager, to be entered once: it renews itself, completes the job (with
    `result`) when left normally, fails the attempt when left by an exception, and gives the job back
    when canceled.  If the lease is lost meanwhile (an operator canceled the job, or the file was out
    of reach for too long), what runs inside is canceled, and `LeaseLost` raised in the end.  A
    `DatabaseError` in the end says that the outcome is not stored yet: that is tried until `expires_at`.

    Attributes:
        job_id, type, payload, trace_id: of the job; `trace_id` None: none came with it.
        attempts: number of this attempt, from 1.
        worker_id: who leased it.
        lease_token: for `complete`, `fail` and `release`.
        expires_at: when the lease ends, in ms since the epoch.
        timeout_seconds: how long the attempt may take; None: no limit.
        result: what a normal exit stores, any JSON value; None unless it is set.
        lost: whether the lease is known to be lost.
    """

    def __init__(self, job: Job, clerk: Clerk, moves: Moves, entered: dict[str, Lease]) -> None:
        self.job_id = job.id
        self.type = job.type
        self.payload = job.payload
        self.attempts = job.attempts
        self.trace_id = job.trace
        self.worker_id = job.lease_owner
        self.lease_token = job.lease_token or ""
        self.expires_at = job.lease_expires_at or 0
        self.timeout_seconds = None if job.timeout_ms is None else job.timeout_ms / 1_000
        self.result: object = None
        self.lost = False
        self._job = job
        self._clerk = clerk
        self._moves = moves
        self._entered = entered
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    def __repr__(self) -> str:
        return f"<Lease of {self.job_id} ({self.type}), attempt {self.attempts}>"

    async def __aenter__(self) -> Lease:
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self._entered[self.lease_token] = self
        self._clerk.hold(self._job, self._renewed, self._told_lost)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._clerk.let_go(self.lease_token)
        if self.lost:
            self._end_lost(error)
        if self._entered.pop(self.lease_token, None) is None:
            return  # lost, or settled by a call inside
        try:
            action = self._outcome(error)
        except InvalidJob as unfit:  # the result is not JSON
            await self._settle(self._outcome(unfit), unfit)
            raise
        if not await self._settle(action, error):
            loss = self._note_loss()
            if error is None:
                raise loss

    def _outcome(self, error: BaseException | None) -> Action:
        """Return the move that follows when the lease is left so."""
        moves, job_id, token = self._moves, self.job_id, self.lease_token
        if error is None:
            result = encoded(self.result)
            return lambda store, now: moves.complete(store, now, job_id, token, result)
        if isinstance(error, Exception):
            reason = clean_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            delay_ms = error.after_ms if isinstance(error, Retry) else None
            final = isinstance(error, Reject)
            return lambda store, now: moves.fail(store, now, job_id, token, reason, delay_ms, final)
        return lambda store, now: moves.release(store, now, job_id, token)

    async def _settle(self, action: Action, error: BaseException | None) -> bool:
        """Have the move made; return False if the lease was lost.  From now on nothing can call it off."""
        try:
            self._clerk.submit(operation := Operation(action, self._clerk.deadline(), kept_until=self.expires_at))
            if isinstance(error, GeneratorExit):
                return True  # nobody may wait where a coroutine is being closed
            return bool(await asyncio.wrap_future(operation))
        except DatabaseError:
            if error is None:
                raise
            return True  # as far as is known; the error on its way says more, and the clerk goes on trying

    # -- losing it -----------------------------------------------------------------------

    def _renewed(self, expires_at: int) -> None:
        self.expires_at = expires_at

    def _told_lost(self) -> None:
        """Take the news to the event loop; called in the clerk's thread."""
        try:
            self._loop.call_soon_threadsafe(self._lose)
        except RuntimeError:
            pass  # the loop is closed: nothing runs under this lease any more

    def _lose(self) -> None:
        if self._entered.pop(self.lease_token, None) is not None:
            self._note_loss()
            if self._task is not None:
                self._task.cancel("the lease is lost")

    def _note_loss(self) -> LeaseLost:
        self.lost = True
        error = LeaseLost(f"the lease of job {self.job_id!r} was lost in attempt {self.attempts}, so nothing of it "
                          "was stored")
        remark("lost", str(error), job_id=self.job_id, type=self.type, attempt=self.attempts,
               worker=self.worker_id, trace_id=self.trace_id)
        return error

    def _end_lost(self, error: BaseException | None) -> None:
        """Raise `LeaseLost` unless another error, or somebody else's cancellation, is on its way."""
        canceled = isinstance(error, asyncio.CancelledError)
        if self._task is not None and self._task.uncancel() > self._cancelling and canceled:
            return
        if error is None or canceled:
            raise LeaseLost(f"the lease of job {self.job_id!r} was lost in attempt {self.attempts}, so its work "
                            "was stopped") from error


def encoded(result: object) -> str | None:
    """Return a result as JSON text, None for None.

    Raises:
        InvalidJob: it is not JSON.
    """
    return None if result is None else encode_json(result, "result")
