"""What `MemoryStore` is made of: its record of a job, its heaps, and the look through a batch.

What is ready, what is scheduled and what is leased each stand in a heap that may hold
withdrawn entries, and is rebuilt when those are the majority.  A job counts how many of its
dependencies have not completed (`unmet`) and how many cannot until an operator acts
(`stuck_parents`); both are kept along a reverse index, with a loop, never by recursion.

No move is made here, and no time is known.
"""

from __future__ import annotations

from collections import deque
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

from ..errors import DependencyCycle, InvalidJob
from ..jobs import Job
from ..lifecycle import CLAIMABLE, DEAD, PENDING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..jobs import NewJob


class Agenda:
    """A heap of (key, seq) from which any entry can be withdrawn.

    Withdrawn entries stay in the heap until they come to its top or outnumber the rest.  So
    `put` and `first` cost O(log n) amortised, `drop` O(1), and memory follows what is in it.
    """

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._keys: dict[int, float] = {}

    def put(self, key: float, seq: int) -> None:
        """Add an entry, or move it to another key."""
        self._keys[seq] = key
        heappush(self._heap, (key, seq))
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, seq) for seq, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, seq: int) -> None:
        """Withdraw an entry, if it is there."""
        self._keys.pop(seq, None)

    def first(self) -> tuple[float, int] | None:
        """Return the entry with the lowest key, then the lowest seq; it stays."""
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


class Lane:
    """The waiting and running jobs of one queue, by seq."""

    __slots__ = ("leased", "ready", "scheduled")

    def __init__(self) -> None:
        self.ready = Agenda()  # by priority, highest first
        self.scheduled = Agenda()  # by run_at
        self.leased = Agenda()  # by lease_expires_at


class Entry:
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
        self.dependents: list[Entry] = []  # emptied on completion, which is final
        self.failures: deque[tuple[Any, ...]] | None = None
        self.stuck = False  # dead or blocked, as its dependents were last told
        self.stuck_parents = 0

    def snapshot(self, depends_on: tuple[str, ...] | None = None) -> Job:
        """Return the job as it is now."""
        values: list[Any] = [getattr(self, name) for name in Job.COLUMNS]
        return Job(*values, *[depends_on])


def tell_dependents(entry: Entry) -> None:
    """Count a job that can not complete, or can again, in all that depend on it, at any depth."""
    changed = [entry]
    while changed:
        entry = changed.pop()
        stuck = entry.status in DEAD or (entry.status in CLAIMABLE and entry.stuck_parents > 0)
        if stuck != entry.stuck:
            entry.stuck = stuck
            for dependent in entry.dependents:
                dependent.stuck_parents += 1 if stuck else -1
            changed += entry.dependents


def look_through(batch: list[NewJob]) -> tuple[list[int], dict[str, int]]:
    """Return for each job of a batch the place of the first with its key, and for each id the place it means.

    Raises:
        InvalidJob: one id means two jobs; `.index` is the place of the later one.
    """
    keys: dict[str, int] = {}
    firsts: list[int] = []
    named: dict[str, int] = {}
    for n, job in enumerate(batch):
        first = n if job.idempotency_key is None else keys.setdefault(job.idempotency_key, n)
        firsts.append(first)
        if job.id is not None and named.setdefault(job.id, first) != first:
            raise InvalidJob(f"the id {job.id!r} is given to two jobs of the batch", n)
    return firsts, named


def refuse_ring(batch: list[NewJob], named: dict[str, int]) -> None:
    """Raise `DependencyCycle` if jobs of a batch, found by the places of their ids, depend on each other."""
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for n, job in enumerate(batch):
        sorter.add(n, *[named[name] for name in job.depends_on if name in named])
    try:
        sorter.prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # so that each job depends on the next
        ids = [str(batch[n].id) for n in ring]
        raise DependencyCycle(f"jobs depend on each other in a ring: {' -> '.join(ids)}", ids, ring[0]) from None
