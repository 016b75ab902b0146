"""`MemoryQueue`: a queue for the threads of one process, with retries, dependencies and dead letters.

A clock, a lock, seconds and names for states over `MemoryStore`, which makes every move.
No file, no thread of its own, and no rule of the life cycle.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import isfinite
from threading import RLock

from ..errors import InvalidJob, UnknownJobError
from ..jobs import MAX_INTEGER, check_integer, check_name, new_job
from ..lifecycle import CLAIMABLE, COMPLETED, DEAD, ERROR, LEASE_EXPIRED, RUNNING
from .store import MemoryStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TIMED_OUT = "timed out"
"""The `reason` of a `Failure` that a reservation running out has caused."""

_OWNER = "memory"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A job in somebody's hands; `expires_at` in seconds of the queue's clock, `attempt` counted from 1."""

    job_id: str
    attempt: int
    token: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed: when (seconds of the queue's clock), which (from 1), and why."""

    at: float
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A job out of attempts.

    Attributes:
        attempts: how many it had since it was enqueued or last requeued.
        failures: the oldest first, those before a requeue too; of more than 1,000 the latest.
        died_at: seconds of the queue's clock; for a reservation that ran out, when that was noticed.
    """

    job_id: str
    attempts: int
    failures: tuple[Failure, ...]
    died_at: float


class MemoryQueue:
    """Jobs for the threads of one process: at least once, with retries, dependencies and dead letters.

    States: `waiting` for dependencies, `ready`, `delayed` by the backoff, `reserved`, `passed`,
    `dead`, and `blocked`, which is waiting for a dead job at any depth.  A reservation that has
    run out counts as a failure, and its job is ready at once; this is noticed by the next call
    of any method.  Dependencies must exist already and never change, so cycles cannot arise.

    Safe across threads, by one lock.  Unknown ids raise `UnknownJobError`, a `KeyError`.  With n
    jobs a call costs O(log n) amortised, plus the dependents it touches (O(d) for the d
    dependencies of `enqueue`) and the expired reservations it notices.

    Args:
        clock: returns seconds, from any start.
        backoff: takes the number of the attempt that failed, returns the seconds until the
            next; None: no wait.  It does not apply to reservations that have run out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic,
                 backoff: Callable[[int], float] | None = None) -> None:
        self._clock = clock
        self._backoff = backoff
        self._lock = RLock()  # re-entrant, for a clock or a backoff that asks the queue
        self._store = MemoryStore()
        self._timeouts: dict[str, float] = {}
        self._dead: dict[str, None] = {}  # in the order of death

    def __len__(self) -> int:
        """Return how many jobs were ever enqueued."""
        with self._lock:
            self._now()
            return len(self._store)

    def enqueue(self, job_id: str, timeout: float, max_retry: int, depends_on: Iterable[str] = ()) -> None:
        """Add a job; O(d) with d dependencies.

        Args:
            timeout: seconds that a reservation lasts.
            max_retry: attempts after the first one.
            depends_on: jobs that must pass first; those that have passed count as met.

        Raises:
            InvalidJob: a `ValueError`: the id is taken or no name, a dependency is unknown or the
                job itself, `timeout` is not positive and finite, `max_retry` is negative or no int.
        """
        job = new_job("job", id=check_name(job_id, "job_id"), depends_on=depends_on,
                      max_attempts=check_integer(max_retry, "max_retry", 0, MAX_INTEGER - 1) + 1)
        seconds = _seconds(timeout, "timeout")
        if seconds == 0:
            raise InvalidJob("timeout must be more than 0 seconds")
        with self._lock:
            self._store.add(job, now=self._now())
            self._timeouts[job_id] = seconds

    def reserve(self, job_id: str) -> Reservation | None:
        """Take this job if it is ready; None otherwise; O(log n)."""
        with self._lock:
            return self._reserve(job_id, self._now())

    def reserve_next(self) -> Reservation | None:
        """Take the ready job that was enqueued first; None: none is ready; O(log n)."""
        with self._lock:
            now = self._now()
            job_id = self._store.next_job(now=now)
            return None if job_id is None else self._reserve(job_id, now)

    def pass_(self, job_id: str, token: str | None = None) -> bool:
        """Mark a reserved job as done; return False if it is not reserved; O(log n) and its dependents.

        Args:
            token: act on this very reservation only; None: on the live one, whose ever it is.
        """
        with self._lock:
            now = self._now()
            return self._store.complete(job_id, self._token(job_id, token), now=now)

    def fail(self, job_id: str, error: object = None, token: str | None = None) -> bool:
        """Give a reserved job up: it is tried again or dies; return False if it is not reserved.

        O(log n), and the dependents it blocks.

        Args:
            error: its text is the reason of the `Failure`.
            token: as for `pass_`.

        Raises:
            InvalidJob: the backoff returned no number of seconds; the job stays reserved.
        """
        with self._lock:
            now = self._now()
            current = self._token(job_id, token)
            job = self._store.get(job_id)
            if job is None or job.lease_token != current:
                return False
            delay = 0.0 if self._backoff is None else _seconds(self._backoff(job.attempts), "the backoff")
            status = self._store.fail(job_id, current, ERROR if error is None else error, now=now, delay=delay)
            self._bury(job_id, status)
            return status is not None

    def get_dlq(self) -> list[DeadJob]:
        """Return the dead jobs in the order they died; O(dead jobs and their failures)."""
        with self._lock:
            self._now()
            return [self._dead_job(job_id) for job_id in self._dead]

    def requeue(self, job_id: str) -> bool:
        """Give a dead job all its attempts again, its failures kept; return False if it is not dead.

        O(log n), and the dependents that are no longer blocked.
        """
        with self._lock:
            now = self._now()
            self._dead.pop(job_id, None)
            return self._store.retry(job_id, now=now)

    def state(self, job_id: str) -> str:
        """Return `waiting`, `ready`, `delayed`, `reserved`, `passed`, `dead` or `blocked`; O(1)."""
        with self._lock:
            now = self._now()
            job = self._store.get(job_id)
            if job is None:
                raise UnknownJobError(job_id)
            if job.status not in CLAIMABLE:
                return {RUNNING: "reserved", COMPLETED: "passed"}.get(job.status, "dead")
            if self._store.is_blocked(job_id):
                return "blocked"
            if job.unmet:
                return "waiting"
            return "delayed" if job.run_at > now else "ready"

    # -- pieces, called with the lock held ---------------------------------------------------

    def _now(self) -> float:
        """Return the time, and notice the reservations that have run out by then."""
        now = self._clock()
        for job, status in self._store.recover_expired(now=now):
            self._bury(job.id, status)
        return now

    def _bury(self, job_id: str, status: str | None) -> None:
        if status in DEAD:
            self._dead[job_id] = None

    def _reserve(self, job_id: str, now: float) -> Reservation | None:
        job = self._store.claim_job(job_id, _OWNER, now=now, lease=self._timeouts.get(job_id, 1))
        if job is None or job.lease_token is None or job.lease_expires_at is None:
            return None
        return Reservation(job.id, job.attempts, job.lease_token, job.lease_expires_at)

    def _token(self, job_id: str, token: str | None) -> str:
        """Return `token`, or of None that of the live reservation; of neither, one that fits none."""
        job = self._store.get(job_id)
        if job is None:
            raise UnknownJobError(job_id)
        return (job.lease_token if token is None else token) or ""

    def _dead_job(self, job_id: str) -> DeadJob:
        job = self._store.get(job_id)
        if job is None or job.finished_at is None:
            raise UnknownJobError(job_id)
        failures = tuple(
            Failure(ended, attempt, TIMED_OUT if reason == LEASE_EXPIRED else error)
            for attempt, _, _, ended, reason, error in self._store.failures(job_id))
        return DeadJob(job_id, job.attempts, failures, job.finished_at)


def _seconds(value: object, what: str) -> float:
    """Return a number of seconds, finite and not negative, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidJob(f"{what} must be a number of seconds, not {type(value).__name__}")
    try:
        fits = isfinite(value) and value >= 0
    except OverflowError:  # an int beyond all floats
        fits = False
    if not fits:
        raise InvalidJob(f"{what} must be a finite number of seconds, and not negative")
    return value
