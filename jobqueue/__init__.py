"""A durable job queue in one SQLite file, made of the standard library alone.

    python -m jobqueue init --database jobs.db

or, in Python, `Queue("jobs.db", create=True)`.  The names below are the public API; each
is imported when it is first used, so that a command started from cron loads only what it
needs.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .aio import Lease as Lease
    from .aio import WorkQueue as WorkQueue
    from .errors import DatabaseBusy as DatabaseBusy
    from .errors import DatabaseError as DatabaseError
    from .errors import DependencyCycle as DependencyCycle
    from .errors import HandlerLoadError as HandlerLoadError
    from .errors import InvalidJob as InvalidJob
    from .errors import JobQueueError as JobQueueError
    from .errors import LeaseLost as LeaseLost
    from .errors import UnknownJobError as UnknownJobError
    from .handlers import JobContext as JobContext
    from .handlers import Reject as Reject
    from .handlers import Retry as Retry
    from .handlers import handler as handler
    from .jobs import Job as Job
    from .memory import DeadJob as DeadJob
    from .memory import Failure as Failure
    from .memory import MemoryQueue as MemoryQueue
    from .memory import Reservation as Reservation
    from .queue import Queue as Queue
    from .scheduler import JobScheduler as JobScheduler

_HOMES = {
    "DatabaseBusy": "errors", "DatabaseError": "errors", "DependencyCycle": "errors",
    "HandlerLoadError": "errors", "InvalidJob": "errors", "JobQueueError": "errors", "LeaseLost": "errors",
    "UnknownJobError": "errors",
    "Job": "jobs",
    "JobContext": "handlers", "Reject": "handlers", "Retry": "handlers", "handler": "handlers",
    "DeadJob": "memory", "Failure": "memory", "MemoryQueue": "memory", "Reservation": "memory",
    "JobScheduler": "scheduler", "Lease": "aio", "WorkQueue": "aio",
    "Queue": "queue",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module("." + _HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
