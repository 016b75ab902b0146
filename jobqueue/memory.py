"""The queue without a file: the same life of a job over plain data structures.

`MemoryStore` is the executable model of `db.Store`: the same operations under the same
names, `now` a plain number given by the caller, every move and what follows a failure
asked of `lifecycle`.  One test suite drives both through the same random histories.
`MemoryQueue` on top of it adds a clock, a lock and dead letters.

How: jobs lie in a dict.  What is ready, what is scheduled and what is leased each stand in
a heap that is allowed to hold withdrawn entries, and is rebuilt when those are the
majority.  A job knows how many of its dependencies have not completed (`unmet`) and how
many can not complete until an operator acts (`stuck_parents`); both are counted down and
up along a reverse index, with a loop, never by recursion.

Dependencies must exist when a job is added and never change, so cycles cannot arise; only
`add_many`, whose jobs may name each other in any order, has to look for one.

Nothing here reads a file, starts a thread, or forgets a job.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from itertools import count
from math import isfinite
from threading import RLock

from .errors import DependencyCycle, InvalidJob, UnknownJobError
from .jobs import (
    DEFAULT_QUEUE,
    MAX_INTEGER,
    Job,
    check_integer,
    check_name,
    clean_error,
    encode_json,
    new_job,
)
from .lifecycle import (
    CLAIMABLE,
    COMPLETED,
    DEAD,
    ERROR,
    LEASE_EXPIRED,
    MOVES,
    PENDING,
    RUNNING,
    STATUSES,
    after_expiry,
    after_failure,
    sources,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from .jobs import NewJob

MAX_FAILURES = 1_000
"""So many failures of one job are kept, the latest: a job that is retried forever must not eat the memory."""

TIMED_OUT = "timed out"
"""The `reason` of a `Failure` that a reservation running out has caused."""


class _Agenda:
    """A heap of (key, seq) from which any entry can be withdrawn.

    Withdrawn entries stay in the heap until they come to its top or outnumber the rest.  So
    `put` and `first` cost O(log n) amortised, `drop` O(1), and memory follows what is in it.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._keys: dict[int, float] = {}

    def put(self, key: float, seq: int) -> None:
        self._keys[seq] = key
        heappush(self._heap, (key, seq))
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, seq) for seq, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, seq: int) -> None:
        self._keys.pop(seq, None)

    def first(self) -> tuple[float, int] | None:
        while self._heap:
            key, seq = self._heap[0]
            if self._keys.get(seq) == key:
                return key, seq
            heappop(self._heap)
        return None

    def take_until(self, key: float) -> int | None:
        """Remove the first entry if it is not beyond `key`, and return its seq."""
        first = self.first()
        if first is None or first[0] > key:
            return None
        self.drop(first[1])
        return first[1]


class _Lane:
    """The waiting and running jobs of one queue, by seq."""

    __slots__ = ("leased", "ready", "scheduled")

    def __init__(self) -> None:
        self.ready = _Agenda()  # by priority, highest first
        self.scheduled = _Agenda()  # by run_at
        self.leased = _Agenda()  # by lease_expires_at


class _Entry:
    """A job in the store; its attributes are the columns of `Job`, and a few of its own."""

    __slots__ = (*Job.COLUMNS, "depends_on", "dependents", "failures", "stuck", "stuck_parents")

    def __init__(self, seq: int, job_id: str, job: NewJob, now: float) -> None:
        self.seq = seq
        self.id = job_id
        self.queue = job.queue
        self.type = job.type
        self.payload = job.payload
        self.priority = job.priority
        self.created_at = now
        self.run_at = now + job.delay_ms if job.run_at is None else job.run_at
        self.status = PENDING
        self.ready = 0
        self.unmet = 0
        self.attempts = 0
        self.max_attempts = job.max_attempts
        self.timeout_ms = job.timeout_ms
        self.idempotency_key = job.idempotency_key
        self.lease_owner: str | None = None
        self.lease_token: str | None = None
        self.lease_expires_at: float | None = None
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.result: str | None = None
        self.last_error: str | None = None
        self.progress = self.progress_note = None
        self.trace = job.trace
        self.depends_on = job.depends_on
        self.dependents: list[_Entry] = []  # emptied on completion, which is final
        self.failures: deque[tuple[Any, ...]] | None = None
        self.stuck = False  # dead or blocked, as its dependents were last told
        self.stuck_parents = 0

    def snapshot(self, depends_on: tuple[str, ...] | None = None) -> Job:
        values: list[Any] = [getattr(self, name) for name in Job.COLUMNS]
        return Job(*values, depends_on)


class MemoryStore:
    """The engine's operations without a file; arguments, answers and errors are those of `db.Store`.

    `now`, `lease` and `delay` are numbers in a unit of the caller's choice.  It must be
    milliseconds where `NewJob.run_at`, `NewJob.delay_ms` or the backoff of `lifecycle` are
    used.  Not safe across threads: the caller brings the lock.

    Costs, with n jobs: an operation is O(log n) amortised, plus the dependencies it names or
    the dependents it touches; `counts` and `blocked` are O(n).
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Entry] = {}
        self._by_seq: dict[int, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}
        self._lanes: dict[str, _Lane] = {}
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
        twin = self._by_key.get(job.idempotency_key) if job.idempotency_key is not None else None
        if twin is not None:
            return twin.id, False
        seq = self._last_seq + 1
        if job.id is None:
            while str(seq) in self._jobs:
                seq += 1
        elif job.id in self._jobs:
            raise InvalidJob(f"there is a job {job.id!r} already; choose another id")
        parents = [self._jobs.get(name) or _no_parent(name) for name in job.depends_on]
        entry = self._enter(seq, job, now)
        self._link(entry, parents, now)
        return entry.id, True

    def add_many(self, jobs: Iterable[NewJob], *, now: float) -> list[str]:
        """Store jobs that may depend on each other, in any order, all or none; return their ids in order.

        Raises:
            InvalidJob: an id is taken or given twice, or a dependency unknown; `.index` is the job's place.
            DependencyCycle: jobs depend on each other in a ring.
        """
        batch = list(jobs)
        firsts, named = _look_through(batch)
        twins: dict[int, _Entry] = {
            n: self._by_key[job.idempotency_key] for n, job in enumerate(batch)
            if job.idempotency_key is not None and job.idempotency_key in self._by_key
        }
        for n, job in enumerate(batch):
            if job.id in self._jobs and n not in twins and n not in firsts:
                raise InvalidJob(f"there is a job {job.id!r} already; choose another id", n)
            for name in job.depends_on:
                if name not in named and name not in self._jobs:
                    _no_parent(name, n)
        number = self._last_seq
        for n, job in enumerate(batch):
            number += 1  # also where the job was there already, as in the file
            while str(number) in self._jobs or str(number) in named:
                number += 1
            if n not in twins:
                twins[n] = twins[firsts[n]] if n in firsts else self._enter(number, job, now)
        new = {twins[n].seq: n for n in reversed(range(len(batch))) if twins[n].seq > self._last_seq - len(batch)}
        return [twins[n].id for n in range(len(batch))]
