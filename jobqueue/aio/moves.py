"""The moves of one queue's jobs, each with the log record that tells of it.

The engine decides about every move; this adds that ids of other queues are unknown ones, that
a job is stored once, and that the record is written when, and only when, the transaction has
been committed.  All methods that take a `Store` are to be called inside a transaction.
"""

from __future__ import annotations

import logging
import traceback

from ..errors import UnknownJobError
from ..jobs import possible_name
from ..leases import RECOVER_CHUNK
from ..lifecycle import COMPLETED, FAILED, PENDING, RUNNING
from ..text import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..db import Store
    from ..jobs import Job, NewJob

FIELDS = ("event", "job_id", "type", "attempt", "worker", "trace_id", "status", "error")
"""The extra fields of every record; None where they say nothing."""

_logger = logging.getLogger("jobqueue")
_MESSAGE = "%(event)s: job %(job_id)s (%(type)s), attempt %(attempt)d, now %(status)s"


class Moves:
    """What can be done to the jobs of a queue.

    Args:
        queue: the lane; no move reaches into others.
        statuses: what the log calls each status of the file.
    """

    def __init__(self, queue: str, statuses: Mapping[str, str]) -> None:
        self.queue = queue
        self._queues = (queue,)
        self._statuses = statuses
        self._records: list[tuple[int, str, dict[str, object]]] = []

    # -- the log -------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the records of a transaction that came to nothing."""
        self._records.clear()

    def tell(self) -> None:
        """Write the records of a transaction that was committed; what a filter raises ends on stderr."""
        for level, message, fields in self._records:
            if not _logger.isEnabledFor(level):
                continue
            try:  # the message is for people, the fields are exact
                shown = {name: escape(value) if isinstance(value, str) else value for name, value in fields.items()}
                _logger.log(level, message, shown, extra=fields)
            except Exception:  # must not keep anybody from what was committed: so does logging with handlers
                if logging.raiseExceptions:
                    traceback.print_exc()
        self._records.clear()

    def _note(self, event: str, job: Job | NewJob, status: str, attempt: int, worker: str | None = None,
              error: str | None = None) -> None:
        level = logging.INFO if error is None else logging.ERROR if status == FAILED else logging.WARNING
        self._records.append((level, _MESSAGE if error is None else _MESSAGE + ": %(error)s", {
            "event": event, "job_id": job.id, "type": job.type, "attempt": attempt, "worker": worker,
            "trace_id": job.trace, "status": self._statuses[status], "error": error}))

    # -- moves ---------------------------------------------------------------------------

    def find(self, store: Store, job_id: object) -> Job | None:
        """Return a job of this queue without its dependencies, None if there is none."""
        job = store.get(possible_name(job_id), parents=False)
        return job if job is not None and job.queue == self.queue else None

    def add(self, store: Store, now_ms: int, job: NewJob) -> bool:
        """Store a job; return False if this queue has one of that id.

        Raises:
            InvalidJob: a dependency is unknown, or the id belongs to a job of another queue.
        """
        if self.find(store, job.id) is not None:
            return False
        store.add(job, now_ms=now_ms)
        self._note("enqueue", job, PENDING, 0)
        return True

    def recover(self, store: Store, now_ms: int) -> bool:
        """End leases that have run out, mark jobs that have come due; return whether more may be left."""
        store.pull_back(now_ms=now_ms, queues=self._queues)
        expired = store.recover_expired(now_ms=now_ms, queues=self._queues)
        for job, status in expired:
            self._note("expire", job, status, job.attempts, job.lease_owner,
                       f"the lease of {job.lease_owner} ran out")
        return store.promote(now_ms=now_ms, queues=self._queues) or len(expired) >= RECOVER_CHUNK

    def claim(self, store: Store, now_ms: int, worker: str, lease_ms: int) -> Job | None:
        """Take the next job, None if none is due; call `recover` first, until it returns False."""
        while jobs := store.claim(worker, now_ms=now_ms, lease_ms=lease_ms, queues=self._queues):
            (job,) = jobs
            self._note("lease", job, RUNNING, job.attempts, worker)
            if (fault := job.payload_fault()) is None:
                return job
            self.fail(store, now_ms, job.id, job.lease_token, fault, final=True)
        return None

    def next_event(self, store: Store) -> int | None:
        """Return when a job comes due or a lease runs out (ms); None: nothing to wait for."""
        return store.next_event(self._queues)

    def complete(self, store: Store, now_ms: int, job_id: object, token: object, result: str | None) -> bool:
        """Complete a job with JSON text as its result; return whether the lease was still held."""
        job = self.find(store, job_id)
        if job is None or not store.complete_many([(job.seq, possible_name(token), result)], now_ms=now_ms)[0]:
            return False
        self._note("complete", job, COMPLETED, job.attempts, job.lease_owner)
        return True

    def fail(self, store: Store, now_ms: int, job_id: object, token: object, error: str,
             delay_ms: int | None = None, final: bool = False) -> bool:
        """Fail an attempt, as `Store.fail` does; return whether the lease was still held."""
        job = self.find(store, job_id)
        if job is None:
            return False
        status = store.fail(job.id, possible_name(token), error, now_ms=now_ms, delay_ms=delay_ms, final=final)
        if status is None:
            return False
        self._note("fail", job, status, job.attempts, job.lease_owner, error)
        return True

    def release(self, store: Store, now_ms: int, job_id: object, token: object) -> bool:
        """Give a job back with its attempt; return whether the lease was still held."""
        job = self.find(store, job_id)
        if job is None or not store.release(job.id, possible_name(token), now_ms=now_ms):
            return False
        self._note("release", job, PENDING, job.attempts, job.lease_owner)
        return True

    def requeue(self, store: Store, now_ms: int, job_id: object) -> bool:
        """Give a dead job a new budget of attempts; return False if it is not dead.

        Raises:
            UnknownJobError: this queue has no such job.
        """
        job = self.find(store, job_id)
        if job is None:
            raise UnknownJobError(str(job_id))
        if not store.retry(job.id, now_ms=now_ms):
            return False
        self._note("requeue", job, PENDING, 0)
        return True


def remark(event: str, message: str, **fields: object) -> None:
    """Warn of something that is no transition, in a record with the fields that those have."""
    _logger.warning("%s", escape(message), extra={**dict.fromkeys(FIELDS), "event": event, **fields})
