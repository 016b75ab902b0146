"""`JobScheduler`: the engine for programs that bring their own time.

    with JobScheduler("jobs.db") as scheduler:
        scheduler.add_jobs([{"job_id": "bake", "payload": {}, "dependencies": ["mix"]},
                            {"job_id": "mix", "payload": {"eggs": 3}}], now_ms=0)
        job = scheduler.claim_job("cook", now_ms=0, lease_ms=1_000)         # mix
        scheduler.complete_job(job["job_id"], job["lease_token"], "batter", now_ms=500)
        scheduler.get_stats(now_ms=500)                                     # bake is ready

Jobs are dicts that name each other as dependencies, every call is told what time it is,
and no clock is read here.  The jobs live in a queue of their own, so that workers, which
do read a clock, never claim or expire them, and this face never touches theirs.

Adds words and dicts to `Store`: the fields' names and the statuses of this face.  No rule,
no transition and no SQL lives here; what keeps callers apart is the file's write lock and
the lease token, never a lock of this process.
"""

from __future__ import annotations

from .db import Store
from .errors import InvalidJob
from .jobs import check_integer, check_name, encode_json, new_job, possible_name
from .leases import RECOVER_CHUNK
from .lifecycle import (
    CANCELED,
    CLAIMABLE,
    COMPLETED,
    DEFAULT_MAX_ATTEMPTS,
    FAILED,
    PENDING,
    RETRYING,
    RUNNING,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from typing import Any

    from .jobs import Job, NewJob

DEFAULT_QUEUE = "scheduler"
JOB_TYPE = "job"

SUCCEEDED = "succeeded"
BLOCKED = "blocked"
STATUSES = {PENDING: PENDING, RETRYING: PENDING, RUNNING: RUNNING, COMPLETED: SUCCEEDED, FAILED: FAILED,
            CANCELED: FAILED}
"""What this face calls each status of the file."""

MAX_TIME_MS = 2**62 - 1
"""The largest time and lease: a sum of two still fits into the file."""

_REQUIRED = ("job_id", "payload")
_KEYS = (*_REQUIRED, "dependencies", "priority", "max_attempts")


class JobScheduler:
    """A scheduler of jobs that depend on each other, in one SQLite file (in WAL mode).

    A context manager.  One object may be used by many threads at once, and a file by any number
    of objects and processes; after a fork, the child must open its own.  All times are integer
    milliseconds that the caller passes in, on any scale that all users of the queue share.

    Statuses are `pending`, `running`, `succeeded` and `failed`; a failed job that will be tried
    again is `pending`, one that an operator canceled is `failed`.

    Costs: a claim takes O(log n), however many blocked, future or finished jobs there are;
    validating a batch O(jobs + dependencies); recovering c leases O(c log n); a completion adds
    the dependents it frees.

    All methods raise `DatabaseError` when the file cannot be used, and `DatabaseBusy` when another
    process has kept it locked for `patience_seconds`.

    Args:
        path: the file; made if it is missing.
        queue: the lane of the file that holds the jobs; claims, recovery and counts stay inside it.
        patience_seconds: the busy timeout: how long a call waits for the write lock.
        allow_shared: use the file even if every user of the machine could change or replace it.
    """

    def __init__(self, path: str | os.PathLike[str], queue: str = DEFAULT_QUEUE,
                 patience_seconds: float = 10.0, allow_shared: bool = False) -> None:
        self.queue = check_name(queue, "queue")
        self._queues = (self.queue,)
        self._store = Store(path, create=True, patience_seconds=patience_seconds, allow_shared=allow_shared)

    def __enter__(self) -> JobScheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice.  Running jobs keep their leases."""
        self._store.close()

    # -- putting jobs in -----------------------------------------------------------------

    def add_jobs(self, jobs: list[dict[str, Any]], now_ms: int) -> list[str]:
        """Store a batch, whole or not at all; return the ids in order.  The dicts are not changed.

        Each has `job_id`, `payload` (any JSON value) and, if wanted, `dependencies` (a list of ids of
        the file or of this batch, in any order; default none), `priority` (0; higher first) and
        `max_attempts` (3; at least 1).  Dependencies never change afterwards.  Every job is due at
        `now_ms`.

        Raises:
            InvalidJob: a `ValueError` that names the job and what is wrong: a duplicate id, an unknown
                dependency, a value of the wrong type, a missing or unknown key, a payload that is not JSON.
            DependencyCycle: an `InvalidJob` for jobs that depend on each other in a ring, or on
                themselves; `.cycle` has the ids along it.
        """
        _check_time(now_ms)
        if not isinstance(jobs, (list, tuple)):
            raise InvalidJob(f"jobs must be a list of dicts, not {type(jobs).__name__}")
        checked = [self._checked(index, fields) for index, fields in enumerate(jobs)]
        try:
            with self._store.batch() as batch:
                batch.extend(enumerate(checked))
                batch.check()
                batch.store(now_ms=now_ms)
        except InvalidJob as error:
            index = error.index or 0
            _name_job(error, index, checked[index].id)
            raise
        return [str(job.id) for job in checked]

    def _checked(self, index: int, fields: dict[str, Any]) -> NewJob:
        try:
            _check_keys(fields)
            return new_job(
                JOB_TYPE, fields["payload"], queue=self.queue, id=check_name(fields["job_id"], "job_id"),
                priority=fields.get("priority", 0), max_attempts=fields.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
                depends_on=fields.get("dependencies", ()))
        except InvalidJob as error:
            _name_job(error, index, possible_name(fields.get("job_id")) if isinstance(fields, dict) else None)
            raise

    # -- working -------------------------------------------------------------------------

    def claim_job(self, worker_id: str, now_ms: int, lease_ms: int) -> dict[str, Any] | None:
        """Take the next job under a lease that ends at `now_ms + lease_ms`; None: none is eligible.

        Eligible is what is due and has only dependencies that succeeded: highest priority first, then
        the oldest; a job that is tried again keeps its place.  Leases that have run out are left
        alone: call `recover_expired`.  Safe when called by many at once: a job goes to one of them.

        Returns:
            `job_id`, `payload`, `attempts` (this one counted), `lease_token`, `lease_expires_at`.

        Raises:
            InvalidJob: `lease_ms` is not positive, or an argument has the wrong type.
        """
        check_name(worker_id, "worker_id")
        _check_time(now_ms)
        check_integer(lease_ms, "lease_ms", 1, MAX_TIME_MS)
        while True:
            with self._store.transaction():
                if self._store.promote(now_ms=now_ms, queues=self._queues):
                    continue  # more have come due than one transaction should move
                while jobs := self._store.claim(worker_id, now_ms=now_ms, lease_ms=lease_ms, queues=self._queues):
                    (job,) = jobs
                    if (fault := job.payload_fault()) is not None:
                        self._store.fail(job.id, job.lease_token or "", fault, now_ms=now_ms, final=True)
                        continue
                    return {"job_id": job.id, "payload": job.payload, "attempts": job.attempts,
                            "lease_token": job.lease_token, "lease_expires_at": job.lease_expires_at}
                return None

    def complete_job(self, job_id: str, lease_token: str, result: object, now_ms: int) -> bool:
        """Store a job's result and free its dependents.

        Returns:
            False, and nothing has changed, unless the token is that of the job's present lease and
            `now_ms` lies before its end; so too for an unknown job, and when called again.

        Raises:
            InvalidJob: the result is not JSON; the lease is left as it was.
        """
        _check_time(now_ms)
        text = None if result is None else encode_json(result, "result")
        with self._store.transaction():
            job = self._find(job_id)
            return job is not None and \
                self._store.complete_many([(job.seq, possible_name(lease_token), text)], now_ms=now_ms)[0]

    def fail_job(self, job_id: str, lease_token: str, error: object, now_ms: int) -> bool:
        """Record a failed attempt: the job is due again after 1, 2, 4 ... 60 s, or failed for good.

        Args:
            error: what went wrong; its text is kept, up to 4,000 characters.

        Returns:
            False, and nothing has changed, in the cases in which `complete_job` returns it.
        """
        _check_time(now_ms)
        with self._store.transaction():
            return self._find(job_id) is not None and \
                self._store.fail(job_id, possible_name(lease_token), error, now_ms=now_ms) is not None

    def recover_expired(self, now_ms: int) -> int:
        """End the leases with `lease_expires_at <= now_ms`; return how many this call has ended.

        Their jobs can be claimed at once, or have failed if no attempt is left.  Safe when called by
        many at once: each lease is ended, and counted, by one of them.
        """
        _check_time(now_ms)
        total = 0
        while True:
            with self._store.transaction():
                found = len(self._store.recover_expired(now_ms=now_ms, queues=self._queues))
            total += found
            if found < RECOVER_CHUNK:
                return total

    # -- looking -------------------------------------------------------------------------

    def get_job(self, job_id: str) -> dict[str, Any] | None:
        """Return a job as it is now, None if this queue has none of that id; linear in what it waits for.

        Returns:
            `job_id`, `payload`, `status`, `dependencies` (oldest first, each once), `priority`,
            `attempts`, `max_attempts`, `created_at`, `available_at`, `lease_owner`, `lease_token`,
            `lease_expires_at` (these three None unless it runs), `result` (None until it succeeded),
            `error` (of the last attempt that failed; None: none has) and `effective_status`: `blocked`
            for a pending job that waits, at any depth, for one that failed for good, else the status.
        """
        with self._store.snapshot():
            job = self._find(job_id, parents=True)
            if job is None:
                return None
            blocked = job.status in CLAIMABLE and job.unmet > 0 and self._store.is_blocked(job.id)
        status = STATUSES[job.status]
        return {
            "job_id": job.id, "payload": job.shown_payload, "status": status,
            "dependencies": list(job.depends_on or ()),
            "priority": job.priority, "attempts": job.attempts, "max_attempts": job.max_attempts,
            "created_at": job.created_at, "available_at": job.run_at, "lease_owner": job.lease_owner,
            "lease_token": job.lease_token, "lease_expires_at": job.lease_expires_at, "result": job.result,
            "error": job.last_error, "effective_status": BLOCKED if blocked else status,
        }

    def get_stats(self, now_ms: int) -> dict[str, int]:
        """Count the jobs of this queue; linear in them.

        Returns:
            `pending`, `running`, `succeeded`, `failed` and `blocked`, which exclude each other and add
            up to all jobs; and `ready`, those of `pending` that could be claimed at `now_ms`.
        """
        _check_time(now_ms)
        with self._store.snapshot():
            counts = self._store.counts(self.queue)
            shares = self._store.shares(self.queue, now_ms=now_ms)
        stats = dict.fromkeys((PENDING, RUNNING, SUCCEEDED, FAILED), 0)
        for status, count in counts.items():
            stats[STATUSES[status]] += count
        stats[PENDING] -= shares["blocked"]
        return {**stats, BLOCKED: shares["blocked"], "ready": shares["ready"]}

    def _find(self, job_id: object, parents: bool = False) -> Job | None:
        """Return a job of this queue, None if there is none."""
        job = self._store.get(possible_name(job_id), parents=parents)
        return job if job is not None and job.queue == self.queue else None


def _check_time(now_ms: object) -> None:
    check_integer(now_ms, "now_ms", -MAX_TIME_MS, MAX_TIME_MS)


def _check_keys(fields: object) -> None:
    """Raise unless `fields` is a dict with the keys of a job."""
    if not isinstance(fields, dict):
        raise InvalidJob(f"a job must be a dict, not {type(fields).__name__}")
    missing = [key for key in _REQUIRED if key not in fields]
    if missing:
        raise InvalidJob(f"the key {missing[0]!r} is missing")
    unknown = [key for key in fields if key not in _KEYS]
    if unknown:
        raise InvalidJob(f"unknown key {unknown[0]!r:.60}; a job has {', '.join(_KEYS)}")
    if not isinstance(fields.get("dependencies", []), (list, tuple)):
        raise InvalidJob(f"dependencies must be a list of ids, not {type(fields['dependencies']).__name__}")


def _name_job(error: InvalidJob, index: int, job_id: str | None) -> None:
    """Put the job that an error is about in front of it, and this face's name for its dependencies."""
    text = str(error)
    if text.startswith(("depends_on", "an id in depends_on")):
        text = text.replace("depends_on", "dependencies", 1)
    if not text.startswith("job "):
        text = f"job {job_id!r}: {text}" if job_id else f"jobs[{index}]: {text}"
    error.index, error.args = index, (text,)
