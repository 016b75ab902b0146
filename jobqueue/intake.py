"""Putting one job into the file.

A job without an id of its own is called by its number, `seq` in decimal.  Numbers whose
text is some caller's id are skipped.  Batches are in `batch`.
"""

from __future__ import annotations

import threading

from .connection import PATIENCE_SECONDS, Connection
from .errors import InvalidJob
from .lifecycle import COMPLETED, PENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from .jobs import NewJob

_INSERT = f"""
INSERT INTO jobs(seq, id, queue, type, payload, priority, created_at, run_at, status, ready, unmet,
                 max_attempts, timeout_ms, idempotency_key, trace)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, '{PENDING}', ?, ?, ?, ?, ?, ?)
"""
_INSERT_EDGE = "INSERT INTO dependencies(job, depends_on) VALUES (?, ?)"
_LAST_SEQ = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"
_BY_KEY = "SELECT id FROM jobs WHERE idempotency_key = ?"
_BY_ID = "SELECT seq, status FROM jobs WHERE id = ?"


class Intake(Connection):
    """The part of the engine that stores new jobs; see `Store`."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False,
                 patience_seconds: float = PATIENCE_SECONDS, stop: Callable[[], bool] | None = None,
                 allow_shared: bool = False) -> None:
        super().__init__(path, create=create, patience_seconds=patience_seconds, stop=stop,
                         allow_shared=allow_shared)
        self.batch_lock = threading.Lock()
        """Held by the one `Batch` that is being filled."""
        self.batch_thread: int | None = None
        """The thread that fills it."""

    def add(self, job: NewJob, *, now_ms: int) -> tuple[str, bool]:
        """Store one job.

        Returns:
            (id, True), or (id, False) when a job with the same idempotency key was there already.

        Raises:
            InvalidJob: the id is taken, or a dependency unknown; nothing is stored.
        """
        with self.transaction():
            execute = self.sqlite.execute
            if job.idempotency_key is not None:
                for (known,) in execute(_BY_KEY, (job.idempotency_key,)).fetchall():
                    return known, False
            seq = self.last_seq() + 1
            if job.id is None:
                while execute(_BY_ID, (str(seq),)).fetchall():
                    seq += 1
            elif execute(_BY_ID, (job.id,)).fetchall():
                raise InvalidJob(taken(job.id))
            job_id = job.id or str(seq)
            parents = [self._parent(name) for name in job.depends_on]
            unmet = sum(status != COMPLETED for _, status in parents)
            run_at = now_ms + job.delay_ms if job.run_at is None else job.run_at
            execute(_INSERT, (seq, job_id, job.queue, job.type, job.payload, job.priority, now_ms, run_at,
                              unmet == 0 and run_at <= now_ms, unmet, job.max_attempts, job.timeout_ms,
                              job.idempotency_key, job.trace))
            if parents:
                self.sqlite.executemany(_INSERT_EDGE, [(seq, parent) for parent, _ in parents])
            return job_id, True

    def last_seq(self) -> int:
        """Return the highest number given to a job so far."""
        ((seq,),) = self.sqlite.execute(_LAST_SEQ).fetchall()
        return int(seq)

    def _parent(self, name: str) -> tuple[int, str]:
        """Return (seq, status) of the job that `depends_on` names."""
        for seq, status in self.sqlite.execute(_BY_ID, (name,)).fetchall():
            return seq, status
        raise InvalidJob(unknown(name))


def taken(job_id: str) -> str:
    """Return the message for an id that another job has."""
    return f"there is a job {job_id!r} already; choose another id, or use an idempotency key to queue it once"


def unknown(name: str) -> str:
    """Return the message for a dependency that nobody knows."""
    return f"depends_on names {name!r}, but there is no such job"
