"""`MemoryStore`: the engine without a file, and the executable model it is tested against.

The same operations under the same names as `db.Store`, `now` a plain number given by the
caller; every move, and what follows a failure, is asked of `lifecycle`.  One suite drives
both engines through the same random histories and requires the same answers.

Dependencies must exist when a job is added and never change, so cycles cannot arise; only
`add_many`, whose jobs may name each other in any order, has to look for one.

Nothing here reads a clock or a file, starts a thread, or forgets a job.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from ..errors import InvalidJob, UnknownJobError
from ..jobs import DEFAULT_QUEUE, clean_error, encode_json
from ..lifecycle import (
    CLAIMABLE,
    COMPLETED,
    ERROR,
    LEASE_EXPIRED,
    MOVES,
    STATUSES,
    after_expiry,
    after_failure,
    sources,
)
from .parts import Entry, Lane, look_through, refuse_ring, tell_dependents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from ..jobs import Job, NewJob

MAX_FAILURES = 1_000
"""So many failures of one job are kept, the latest: a job retried forever must not eat the memory."""


class MemoryStore:
    """The engine's operations without a file; arguments, answers and errors are those of `db.Store`.

    `now`, `lease` and `delay` are numbers in a unit of the caller's choice.  It must be
    milliseconds where `NewJob.run_at`, `NewJob.delay_ms` or the backoff of `lifecycle` are
    used.  Not safe across threads: the caller brings the lock.

    Costs, with n jobs: an operation is O(log n) amortised, plus the dependencies it names or
    the dependents it touches; `counts` and `blocked` are O(n).
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Entry] = {}
        self._by_seq: dict[int, Entry] = {}
        self._by_key: dict[str, Entry] = {}
        self._lanes: dict[str, Lane] = {}
        self._last_seq = 0
        self._tokens = count(1)

    def __len__(self) -> int:
        return len(self._jobs)

    # -- intake ----------------------------------------------------------------------------

    def add(self, job: NewJob, *, now: float) -> tuple[str, bool]:
        """Store one job: (id, True), or (id, False) if its idempotency key was there; O(dependencies).

        Raises:
            InvalidJob: the id is taken, or a dependency unknown; nothing is stored.
        """
        twin = self._twin(job)
        if twin is not None:
            return twin.id, False
        seq = self._last_seq + 1
        if job.id is None:
            while str(seq) in self._jobs:
                seq += 1
        elif job.id in self._jobs:
            raise InvalidJob(f"there is a job {job.id!r} already; choose another id")
        for name in job.depends_on:
            if name not in self._jobs:
                raise InvalidJob(f"depends_on names {name!r}, but there is no such job")
        entry = self._enter(seq, job, now)
        self._link(entry, [self._jobs[name] for name in job.depends_on], now)
        return entry.id, True

    def add_many(self, jobs: Iterable[NewJob], *, now: float) -> list[str]:
        """Store jobs that may depend on each other, in any order, all or none; return their ids in order.

        Raises:
            InvalidJob: an id is taken or given twice, or a dependency unknown; `.index` is the job's place.
            DependencyCycle: jobs depend on each other in a ring.
        """
        batch = list(jobs)
        firsts, named = look_through(batch)
        refuse_ring(batch, named)
        fresh = {n: job for n, job in enumerate(batch) if firsts[n] == n and self._twin(job) is None}
        for n, job in fresh.items():
            if job.id in self._jobs:
                raise InvalidJob(f"there is a job {job.id!r} already; choose another id", n)
        for n, job in fresh.items():
            for name in job.depends_on:
                if name not in named and name not in self._jobs:
                    raise InvalidJob(f"depends_on names {name!r}, but there is no such job", n)
        entries: list[Entry] = []
        seq = self._last_seq
        for n, job in enumerate(batch):
            seq += 1  # also for a job that is there already, as in the file
            while str(seq) in self._jobs or str(seq) in named:
                seq += 1
            entries.append(self._enter(seq, job, now) if n in fresh else self._by_key[str(job.idempotency_key)])
        for n, job in fresh.items():
            parents = [entries[named[name]] if name in named else self._jobs[name] for name in job.depends_on]
            self._link(entries[n], list(dict.fromkeys(parents)), now)
        return [entry.id for entry in entries]

    def _twin(self, job: NewJob) -> Entry | None:
        return None if job.idempotency_key is None else self._by_key.get(job.idempotency_key)

    def _enter(self, seq: int, job: NewJob, now: float) -> Entry:
        entry = Entry(seq, str(seq) if job.id is None else job.id, job, now)
        self._last_seq = seq
        self._jobs[entry.id] = self._by_seq[seq] = entry
        if job.idempotency_key is not None:
            self._by_key[job.idempotency_key] = entry
        if job.queue not in self._lanes:
            self._lanes[job.queue] = Lane()
        return entry

    def _link(self, entry: Entry, parents: list[Entry], now: float) -> None:
        entry.depends_on = tuple(parent.id for parent in parents)
        for parent in parents:
            if parent.status != COMPLETED:
                entry.unmet += 1
                entry.stuck_parents += parent.stuck
                parent.dependents.append(entry)
        self._moved(entry, now)

    # -- claiming --------------------------------------------------------------------------

    def claim(self, owner: str, *, now: float, lease: float, limit: int = 1,
              queues: Sequence[str] = (DEFAULT_QUEUE,)) -> list[Job]:
        """Take up to `limit` ready jobs: highest priority first, then the oldest.

        Scheduled jobs that have come due count; expired leases are left to `recover_expired`.

        Raises:
            InvalidJob: `lease` or `limit` is not positive.
        """
        if lease <= 0 or limit <= 0:
            raise InvalidJob("a claim needs a positive lease and a positive limit")
        claimed: list[Job] = []
        while len(claimed) < limit:
            entry = self._next(now, queues)
            if entry is None:
                break
            claimed.append(self._claim(entry, owner, now, lease))
        return claimed

    def claim_job(self, job_id: str, owner: str, *, now: float, lease: float) -> Job | None:
        """Take this very job if `claim` could take it; None otherwise.

        Raises:
            InvalidJob: `lease` is not positive.
            UnknownJobError: there is no such job.
        """
        if lease <= 0:
            raise InvalidJob("a claim needs a positive lease")
        entry = self._entry(job_id)
        if entry.status not in sources("claim") or entry.unmet or entry.run_at > now:
            return None
        return self._claim(entry, owner, now, lease)

    def next_job(self, *, now: float, queues: Sequence[str] = (DEFAULT_QUEUE,)) -> str | None:
        """Return the id of the job that `claim` would take; None: there is none."""
        entry = self._next(now, queues)
        return None if entry is None else entry.id

    def _next(self, now: float, queues: Sequence[str]) -> Entry | None:
        heads = [head for queue in queues if (head := self._head(queue, now)) is not None]
        return self._by_seq[min(heads)[1]] if heads else None

    def _head(self, queue: str, now: float) -> tuple[float, int] | None:
        lane = self._lanes.get(queue)
        if lane is None:
            return None
        while (seq := lane.scheduled.take_until(now)) is not None:
            lane.ready.put(-self._by_seq[seq].priority, seq)
        while (head := lane.ready.first()) is not None:
            entry = self._by_seq[head[1]]
            if entry.run_at <= now:
                break
            lane.ready.drop(entry.seq)  # the clock stepped back
            lane.scheduled.put(entry.run_at, entry.seq)
        return head

    def _claim(self, entry: Entry, owner: str, now: float, lease: float) -> Job:
        entry.status = MOVES["claim", entry.status]
        entry.attempts += 1
        entry.lease_owner = owner
        entry.lease_token = str(next(self._tokens))
        entry.lease_expires_at = now + lease
        entry.started_at = now
        self._moved(entry, now)
        return entry.snapshot()

    # -- what the holder of a lease may do -------------------------------------------------

    def extend(self, job_id: str, token: str, *, now: float, lease: float) -> bool:
        """Let the lease run for `lease` from now; return whether it was still held."""
        entry = self._held(job_id, token, now)
        if entry is None:
            return False
        entry.lease_expires_at = now + lease
        self._lanes[entry.queue].leased.put(now + lease, entry.seq)
        return True

    def complete(self, job_id: str, token: str, result: object = None, *, now: float) -> bool:
        """Store a job's result and unlock its dependents; return whether the lease was still held.

        Raises:
            InvalidJob: the result is not JSON; the lease is left as it was.
        """
        text = None if result is None else encode_json(result, "result")
        entry = self._held(job_id, token, now)
        if entry is None:
            return False
        entry.result = text
        self._leave(entry, MOVES["complete", entry.status], now, finished=True)
        for dependent in entry.dependents:
            dependent.unmet -= 1
            self._moved(dependent, now)
        entry.dependents = []
        return True

    def fail(self, job_id: str, token: str, error: object, *, now: float, delay: float | None = None,
             final: bool = False, reason: str = ERROR) -> str | None:
        """Record a failed attempt; return the status that follows, None if the lease was no longer held.

        Args:
            delay: wait before the next attempt; None: the backoff of `lifecycle`, in milliseconds.
            final: no further attempt, even if some are left.
        """
        entry = self._held(job_id, token, now)
        if entry is None:
            return None
        status, wait = after_failure(entry.attempts, entry.max_attempts, final=final)
        return self._failed(entry, status, wait if delay is None else delay, now, reason, clean_error(error))

    def release(self, job_id: str, token: str, *, now: float) -> bool:
        """Give a claimed job back, as if it had never been claimed; return whether the lease was still held."""
        entry = self._held(job_id, token, now)
        if entry is None:
            return False
        entry.attempts -= 1
        entry.started_at = None
        self._leave(entry, MOVES["release", entry.status], now)
        return True

    def recover_expired(self, *, now: float, queues: Sequence[str] = (DEFAULT_QUEUE,),
                        limit: int | None = None) -> list[tuple[Job, str]]:
        """End leases that have run out, the earliest first: claimable at once, or dead if no attempt is left.

        Returns:
            (job as it was, status that followed) for each, at most `limit`; None: all.
        """
        recovered: list[tuple[Job, str]] = []
        for lane in [self._lanes[queue] for queue in queues if queue in self._lanes]:
            while limit is None or len(recovered) < limit:
                seq = lane.leased.take_until(now)
                if seq is None:
                    break
                entry = self._by_seq[seq]
                before = entry.snapshot()
                status, wait = after_expiry(entry.attempts, entry.max_attempts)
                error = f"the lease of {entry.lease_owner} ran out"
                self._failed(entry, status, wait, now, LEASE_EXPIRED, error)
                recovered.append((before, status))
        return recovered

    # -- the operator ----------------------------------------------------------------------

    def cancel(self, job_id: str, *, now: float) -> bool:
        """Cancel a job, also a running one, whose lease ends; return False if it was finished already.

        Raises:
            UnknownJobError: there is no such job.
        """
        entry = self._entry(job_id)
        if entry.status not in sources("cancel"):
            return False
        self._leave(entry, MOVES["cancel", entry.status], now, finished=True)
        return True

    def retry(self, job_id: str, *, now: float) -> bool:
        """Give a failed or canceled job a new budget of attempts; return False if it is neither.

        Raises:
            UnknownJobError: there is no such job.
        """
        entry = self._entry(job_id)
        if entry.status not in sources("retry"):
            return False
        entry.status = MOVES["retry", entry.status]
        entry.attempts = 0
        entry.run_at = min(entry.run_at, now)
        entry.started_at = entry.finished_at = entry.result = None
        self._moved(entry, now)
        return True

    # -- looking ---------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        """Return a job with its dependencies, None if there is none; O(1)."""
        entry = self._jobs.get(job_id)
        return None if entry is None else entry.snapshot(entry.depends_on)

    def counts(self, queue: str | None = None) -> dict[str, int]:
        """Return how many jobs have each status, in one queue or (None) in all."""
        found = dict.fromkeys(STATUSES, 0)
        for entry in self._jobs.values():
            if queue is None or entry.queue == queue:
                found[entry.status] += 1
        return found

    def blocked(self, queue: str | None = None) -> list[str]:
        """Return the ids of jobs that wait, at any depth, for one that failed or was canceled; oldest first."""
        return [entry.id for entry in self._by_seq.values()
                if entry.status in CLAIMABLE and entry.stuck and (queue is None or entry.queue == queue)]

    def is_blocked(self, job_id: str) -> bool:
        """Return whether a job is among the `blocked`; O(1).

        Raises:
            UnknownJobError: there is no such job.
        """
        entry = self._entry(job_id)
        return entry.stuck and entry.status in CLAIMABLE

    def failures(self, job_id: str) -> list[tuple[Any, ...]]:
        """Return (attempt, owner, started, ended, reason, error) of the latest 1,000 failed attempts, in order.

        Raises:
            UnknownJobError: there is no such job.
        """
        return list(self._entry(job_id).failures or ())

    # -- pieces ----------------------------------------------------------------------------

    def _entry(self, job_id: str) -> Entry:
        entry = self._jobs.get(job_id)
        if entry is None:
            raise UnknownJobError(job_id)
        return entry

    def _held(self, job_id: str, token: str, now: float) -> Entry | None:
        """Return the job if this lease on it is the current one and has not run out."""
        entry = self._entry(job_id)
        if entry.lease_expires_at is None or entry.lease_token != token or entry.lease_expires_at <= now:
            return None
        return entry

    def _failed(self, entry: Entry, status: str, wait: float, now: float, reason: str, error: str) -> str:
        if entry.failures is None:
            entry.failures = deque(maxlen=MAX_FAILURES)
        entry.failures.append((entry.attempts, entry.lease_owner, entry.started_at, now, reason, error))
        entry.last_error = error
        if status in CLAIMABLE and wait:
            entry.run_at = now + wait
        self._leave(entry, status, now, finished=status not in CLAIMABLE)
        return status

    def _leave(self, entry: Entry, status: str, now: float, *, finished: bool = False) -> None:
        """Move to `status`, and end the lease if there is one."""
        entry.status = status
        entry.lease_owner = entry.lease_token = entry.lease_expires_at = None
        if finished:
            entry.finished_at = now
        self._moved(entry, now)

    def _moved(self, entry: Entry, now: float) -> None:
        """Put a job whose status, `run_at` or `unmet` has changed where it now belongs; the gate of every move."""
        lane = self._lanes[entry.queue]
        for agenda in (lane.ready, lane.scheduled, lane.leased):
            agenda.drop(entry.seq)
        if entry.lease_expires_at is not None:
            lane.leased.put(entry.lease_expires_at, entry.seq)
        elif entry.status in CLAIMABLE and entry.unmet == 0:
            if entry.run_at <= now:
                lane.ready.put(-entry.priority, entry.seq)
            else:
                lane.scheduled.put(entry.run_at, entry.seq)
        tell_dependents(entry)
