"""The exceptions of this package.

Every error a caller can see derives from `JobQueueError`; its text is one sentence
that says what was wrong, where, and what to do.  Errors of `sqlite3` never escape:
they come as the `__cause__` of a `DatabaseError`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class JobQueueError(Exception):
    """Root of all errors raised by jobqueue."""


class InvalidJob(JobQueueError, ValueError):
    """A job, or another argument, breaks an input rule; nothing was stored.

    Attributes:
        index: position of the offending job in its batch, counted from 0; None for a single job.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class DependencyCycle(InvalidJob):
    """Jobs of one batch depend on each other in a ring.

    Attributes:
        cycle: the ids along the ring, the first one repeated at the end.
    """

    def __init__(self, message: str, cycle: Sequence[str], index: int | None = None) -> None:
        super().__init__(message, index)
        self.cycle = tuple(cycle)


class UnknownJobError(JobQueueError, KeyError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"there is no job {self.job_id!r}"


class LeaseLost(JobQueueError):
    """A lease ended before its holder had settled the job: nothing was stored, and others may have the job."""


class HandlerLoadError(JobQueueError):
    """A module of handlers could not be imported, or registers a type twice."""


class DatabaseError(JobQueueError):
    """The file is missing, not ours, too new, damaged, full or unreadable.

    The `sqlite3` error, where there is one, is the `__cause__`.
    """


class DatabaseDamaged(DatabaseError):
    """What is in the file makes no sense; trying again will not help."""


class DatabaseReadOnly(DatabaseError):
    """This process may not write the file, its log or their directory."""


class DatabaseBusy(DatabaseError):
    """Another process kept the write lock for longer than the caller was ready to wait."""
