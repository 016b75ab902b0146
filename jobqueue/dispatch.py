"""Which child gets which job, and how many at a time.

While jobs are short, a child is handed several, so that messages and commits are shared: as
many as take about 10 ms together.  As soon as one runs longer than that, what waits behind
it is taken back; it goes to a child that is free, or else back to the file, where a free
worker can find it.  Never starts, settles or claims anything itself.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .jobs import Job
    from .pool import Pool

DEEPEST = 64
"""Most jobs that a child holds at a time."""
SHORT_SECONDS = 0.01
_SHORT_US = SHORT_SECONDS * 1e6


class Dispatcher:
    """Hands jobs to the children of a pool.

    Args:
        lease_seconds: no job is started later than this after it was known to be held.
        default_timeout_ms: for jobs without a timeout of their own; None: no limit.

    Attributes:
        unplaced: jobs that no child has taken yet.
    """

    def __init__(self, pool: Pool, lease_seconds: float, default_timeout_ms: int | None) -> None:
        self._pool = pool
        self._lease_seconds = lease_seconds
        self._default_timeout_ms = default_timeout_ms
        self._run_us = _SHORT_US  # the length of recent jobs: a moving average
        self.unplaced: list[Job] = []

    def learn(self, run_us: int) -> None:
        """Take note of how long a job ran, in microseconds."""
        self._run_us += (run_us - self._run_us) * 0.2

    def depth(self) -> int:
        """Return how many jobs a child may hold now."""
        return max(1, min(DEEPEST, int(_SHORT_US / (self._run_us + 1))))

    def room(self) -> int:
        """Return how many jobs to claim: none while few places are free, so that claims are shared too."""
        if self.unplaced:
            return 0
        depth = self.depth()
        room = idle = 0
        for child in self._pool.children:
            if child.open:
                room += max(0, depth - len(child.handed))
                idle += not child.handed
        return room if idle or room * 2 >= depth * self._pool.size else 0

    def place(self, jobs: list[Job], held_since: float) -> None:
        """Hand jobs out, each to the child with least to do; what nobody takes is left in `unplaced`.

        Args:
            held_since: monotonic time at which their leases were granted or last extended.
        """
        loads = [(len(child.handed), n, child) for n, child in enumerate(self._pool.children) if child.open]
        heapify(loads)
        deadline = held_since + self._lease_seconds
        for position, job in enumerate(jobs):
            timeout_ms = self._default_timeout_ms if job.timeout_ms is None else job.timeout_ms
            if not loads or not self._pool.give(loads[0][2], job, deadline, timeout_ms):
                self.unplaced += jobs[position:]
                self._run_us = max(self._run_us, _SHORT_US)  # large ones need a child each: claim fewer
                return
            load, n, child = loads[0]
            heapreplace(loads, (load + 1, n, child))

    def is_anything_waiting(self) -> bool:
        """Return whether some job waits behind another."""
        return any(len(child.handed) > 1 for child in self._pool.children)

    def take_back_all(self) -> None:
        """Take back everything that has not been started."""
        for child in self._pool.children:
            self.unplaced += self._pool.take_back(child)

    def rearrange(self, now: float, held_since: float, none_left: bool) -> list[Job]:
        """See that no job waits behind a slow one, or in a queue while another child is free.

        Args:
            now: monotonic time.
            held_since: as for `place`.
            none_left: the file has nothing for an idle child.

        Returns:
            Jobs to give back to the file, as no child can start them now.
        """
        idle = self._pool.idle()
        for child in self._pool.children:
            if len(child.handed) > 1 and now - child.since > SHORT_SECONDS:
                self._run_us = max(self._run_us, (now - child.since) * 1e6)
                self.unplaced += self._pool.take_back(child)
        if none_left and len(idle) > len(self.unplaced):
            fullest = max(self._pool.children, key=lambda child: len(child.handed))
            if len(fullest.handed) > 1:
                self.unplaced += self._pool.take_back(fullest)
        if not self.unplaced:
            return []
        jobs, self.unplaced = self.unplaced, []
        room = len(idle) * self.depth()
        self.place(jobs[:room], held_since)
        surplus = jobs[room:]
        if not idle:
            surplus += self.unplaced
            self.unplaced = []
        return surplus
