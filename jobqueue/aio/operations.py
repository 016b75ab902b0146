"""What an event loop asks of its thread: futures that know what is to be done.

An `Operation` can be withdrawn until the transaction that it is part of has begun.  Its
outcome is kept inside until the commit and published then; a transaction that came to
nothing is begun anew, and the operation done again.

Nothing here waits, and nothing here opens a file.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ..db import Store
from ..errors import DatabaseError, JobQueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..jobs import Job

    Action = Callable[[Store, int], object]
    """Takes the time in ms since the epoch; called inside a transaction that others share."""


class Operation(Future[Any]):
    """A call that waits for its turn.

    Args:
        action: what to do; may raise a `JobQueueError` as long as it has written nothing.
        deadline: when to give up a file that is locked or out of reach, on the monotonic clock.
        reads: it only reads, and needs no write lock.
        kept_until: it cannot be withdrawn, and is tried until this time (ms since the epoch) even
            after its deadline; None: neither.
    """

    def __init__(self, action: Action, deadline: float, *, reads: bool = False,
                 kept_until: int | None = None) -> None:
        super().__init__()
        self.deadline = deadline
        self.reads = reads
        self.kept_until = kept_until
        self._action = action
        self._answer: object = None
        self._error: JobQueueError | None = None

    def cancel(self) -> bool:
        """Withdraw the call; return whether it was early enough."""
        return self.kept_until is None and super().cancel()

    def begin(self) -> bool:
        """Make it impossible to withdraw the call; return False if that has happened."""
        if self.cancelled():
            return False
        return self.running() or self.done() or self.set_running_or_notify_cancel()

    def carry_out(self, store: Store, now_ms: int) -> None:
        """Do it, or do it again after a transaction that came to nothing; the outcome stays inside."""
        if not self.begin():
            return
        self._error = None
        try:
            self._answer = self._action(store, now_ms)
        except DatabaseError:
            raise
        except JobQueueError as error:
            self._error = error

    def publish(self) -> None:
        """Let the caller have the outcome, if it still waits."""
        if self.done():
            return
        if self._error is None:
            self.set_result(self._answer)
        else:
            self.set_exception(self._error)

    def reject(self, error: Exception) -> None:
        """Let the caller have an error instead, if it still waits."""
        if not self.done() and self.begin():
            self.set_exception(error)


class Claim(Operation):
    """A wish for a job.  Its result is a `Job`, or None when none had come due by `until`.

    `until`, on the monotonic clock, may be set to 0 from any thread to end the wait.
    """

    def __init__(self, worker: str, until: float, deadline: float) -> None:
        super().__init__(lambda store, now_ms: None, deadline)
        self.worker = worker
        self.until = until

    def grant(self, job: Job | None) -> bool:
        """Answer with a job, or that there is none; return False if the wish was withdrawn."""
        if not self.begin():
            return False
        self.set_result(job)
        return True


def promise() -> Future[None]:
    """Return a future that nobody can cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
