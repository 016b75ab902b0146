"""A durable job queue in one SQLite file, made of the standard library alone.

    python -m jobqueue init --database jobs.db

or, in Python, `Queue("jobs.db", create=True)`.  The names below are the public API; each
is imported when it is first used, so that a command started from cron loads only what it
needs.
"""

__version__ = "0.1.0"

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


def __getattr__(name):  # type: ignore[no-untyped-def]
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("." + _HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
