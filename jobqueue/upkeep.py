"""Taking finished jobs out of the file, and giving the room they took back to the disk.

`Purge` works in small steps, each with a write transaction of a few hundredths of a second at most,
so that whoever calls it can let others at the lock in between, or stop at any point:

    survey   which jobs does an unfinished one depend on, at any depth (reads only)
    delete   finished jobs, the longest finished first, with their failures, outputs and edges
    vacuum   move pages from the end of the file into the room that is free, and cut it

What may go is decided again in the transaction that deletes it: a job stays if by then an
unfinished one depends on it, or a canceled one that would wait for it if it were retried.
So does one that ended before 2020: that is the time of a caller's own clock, by which nobody
here can tell its age.
`Purger` does all this now and then for a worker.  Nothing here reads the wall clock.
"""

from __future__ import annotations

import time

from .explain import ALIVE_MS
from .lifecycle import CANCELED, COMPLETED, DEAD, FINISHED
from .schema import IS_DEAD, IS_FINISHED, quoted
from .times import WALL_CLOCK_MS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from .db import Store

PURGED_STATUSES = (COMPLETED, CANCELED)
"""What goes unless the caller says otherwise: failed jobs wait for somebody to look at them."""
SURVEY_EDGES = 5_000
SCAN_JOBS = 1_000
VACUUM_PAGES = 100
"""How much one step looks at, or moves."""
HOLD_SECONDS = 0.02
"""Once a step has held the write lock for so long, it commits."""
JOBS_PER_LOOK = 10
SHORTEST_PAUSE_SECONDS = 0.005
"""Those who wait for the lock look for it every 2 ms at least."""
PURGE_EVERY_SECONDS = 3_600.0
STEP_PAUSE_SECONDS = 0.05
"""How often a worker's purge begins, and how long a worker works between two of its steps."""

_OLDEST = f"SELECT min(finished_at) FROM jobs WHERE {IS_FINISHED} AND finished_at >= {WALL_CLOCK_MS}"
_EDGES = """
SELECT job, depends_on, child.finished_at IS NULL FROM dependencies CROSS JOIN jobs AS child ON child.seq = job
WHERE (job, depends_on) > (?, ?) ORDER BY job, depends_on LIMIT ?"""
_PARENTS = "SELECT DISTINCT depends_on FROM dependencies WHERE job IN (SELECT value FROM json_each(?))"
_SCAN = f"""
SELECT finished_at, queue, seq, status, type FROM jobs
WHERE {IS_FINISHED} AND finished_at <= :cutoff AND {{beyond}} ORDER BY finished_at, queue, seq LIMIT :limit"""
_SCAN_SAME = _SCAN.format(beyond="finished_at = :finished_at AND queue = :queue AND seq > :seq")
_SCAN_NEXT = _SCAN.format(beyond="(finished_at, queue) > (:finished_at, :queue)")
"""Two statements, as SQLite finds no place in an index by all three values at once."""
_COUNT = f"SELECT count(*) FROM jobs WHERE {IS_FINISHED} AND finished_at BETWEEN {WALL_CLOCK_MS} AND ?"
# A dead parent is one of the unmet dependencies of a canceled child, which would wait for ever after a retry.
_DELETE = f"""
DELETE FROM jobs WHERE seq = :seq AND {IS_FINISHED} AND finished_at <= :cutoff AND status IN {{statuses}}
AND NOT EXISTS (SELECT 1 FROM dependencies JOIN jobs AS child ON child.seq = job WHERE depends_on = :seq
                AND (child.finished_at IS NULL OR (jobs.{IS_DEAD} AND child.{IS_DEAD})))"""
_FORGET = ("DELETE FROM failures WHERE job = ?", "DELETE FROM outputs WHERE job = ?",
           "DELETE FROM dependencies WHERE job = ?", "DELETE FROM dependencies WHERE depends_on = ?")
_DEAD_CHILDREN = f"""SELECT seq FROM dependencies JOIN jobs ON seq = job WHERE depends_on = ? AND {IS_DEAD}"""
_RANK = "SELECT count(*) FROM workers WHERE id < ? AND seen_at >= ?"


def purge(store: Store, progress: Callable[[int, float], object] | None = None, *, cutoff_ms: int,
          statuses: Collection[str] | None = None, type: str | None = None, dry_run: bool = False) -> Purge:
    """Purge from beginning to end, with pauses in which others get at the write lock.

    Args:
        progress: told after each step how many jobs are deleted, and how far it has come, 0 to 1.
        statuses: None: completed and canceled; the rest is as for `Purge`.
    """
    whole = Purge(store, cutoff_ms=cutoff_ms, statuses=PURGED_STATUSES if statuses is None else statuses,
                  type=type, dry_run=dry_run)
    while whole.step():
        if progress is not None:
            progress(whole.jobs, whole.scanned / whole.total if whole.total else 1.0)
        if whole.wrote_seconds:
            time.sleep(max(whole.wrote_seconds, SHORTEST_PAUSE_SECONDS))
    return whole


class Purge:
    """One purge under way: call `step` until it returns False.

    Not safe across threads; others may use the file meanwhile in any way.

    Args:
        cutoff_ms: only jobs that had finished by then, ms since the epoch.
        statuses: only these; of finished jobs.
        type: only this type; None: any.
        dry_run: delete nothing, only count.

    Attributes:
        jobs: deleted so far, or (`dry_run`) that would be.
        needed: old enough, but kept because others depend on them.
        scanned, total: jobs looked at, and to be looked at, for a progress bar.
        freed_bytes: by which the file became smaller.
        wrote_seconds: for how long the last step held the write lock.

    Raises:
        ValueError: one of the statuses is none of a finished job.
    """

    def __init__(self, store: Store, *, cutoff_ms: int, statuses: Collection[str] = PURGED_STATUSES,
                 type: str | None = None, dry_run: bool = False) -> None:
        self._store = store
        self._cutoff_ms = cutoff_ms
        self._statuses = frozenset(statuses)
        if not self._statuses <= set(FINISHED):
            raise ValueError(f"only finished jobs can be purged: {', '.join(FINISHED)}")
        self._delete_sql = _DELETE.format(statuses=quoted(sorted(self._statuses)))
        self._type = type
        self._dry_run = dry_run
        self.jobs = self.needed = self.scanned = self.total = self.freed_bytes = 0
        self.wrote_seconds = 0.0
        self._next: Callable[[], bool] = self._begin
        self._edge = (-1, -1)  # the last one that the survey has seen
        self._needed: set[int] = set()  # what unfinished jobs depend on
        self._frontier: list[int] = []  # of these, those whose own parents are not in the set yet
        self._place: dict[str, Any] = {"finished_at": WALL_CLOCK_MS, "queue": "", "seq": 0}  # the last job scanned
        self._scanning = True
        self._chosen: list[tuple[int, bool]] = []  # (seq, whether it is dead), to be deleted
        self._deferred: list[int] = []  # dead ones whose dead children are still there
        self._progressed = False
        self._gone: set[int] = set()  # in a dry run, the dead ones that would be deleted

    def step(self) -> bool:
        """Do a little more; return whether there is anything left to do.

        Raises:
            DatabaseBusy: somebody else kept the lock; nothing is lost, call again.
        """
        self.wrote_seconds = 0.0
        return self._next()

    def _begin(self) -> bool:
        with self._store.snapshot():
            ((oldest,),) = self._query(_OLDEST)
            if oldest is not None and oldest <= self._cutoff_ms:
                ((self.total,),) = self._query(_COUNT, (self._cutoff_ms,))
        self._next = self._survey if self.total else self._vacuum
        return True

    # -- survey --------------------------------------------------------------------------

    def _survey(self) -> bool:
        """Find what unfinished jobs depend on; what changes meanwhile is seen by the deletion itself."""
        with self._store.snapshot():
            edges = self._query(_EDGES, (*self._edge, SURVEY_EDGES))
        self._note(parent for _, parent, is_open in edges if is_open)
        if len(edges) < SURVEY_EDGES:
            self._next = self._climb
        else:
            self._edge = edges[-1][:2]
        return True

    def _climb(self) -> bool:
        """Go on from what is needed to what that depends on."""
        some, self._frontier = self._frontier[-SCAN_JOBS:], self._frontier[:-SCAN_JOBS]
        if some:
            with self._store.snapshot():
                parents = self._query(_PARENTS, (f"[{','.join(map(str, some))}]",))
            self._note(parent for (parent,) in parents)
        else:
            self._next = self._delete
        return True

    def _note(self, parents: Any) -> None:
        new = set(parents) - self._needed
        self._needed |= new
        self._frontier += new

    # -- delete --------------------------------------------------------------------------

    def _delete(self) -> bool:
        if not self._chosen and self._scanning:
            self._scan()
        elif not self._chosen:  # the last one canceled is likely to be the last of a chain
            if not self._deferred or not self._progressed:
                self.needed += len(self._deferred)
                self._next = self._vacuum
                return not self._dry_run
            self._chosen = [(seq, True) for seq in self._deferred]
            self._deferred, self._progressed = [], False
        if self._dry_run:
            self._pretend()
        else:
            self._delete_chosen()
        return True

    def _scan(self) -> None:
        """Choose from the next page of what is old enough."""
        values = {"cutoff": self._cutoff_ms, "limit": SCAN_JOBS, **self._place}
        with self._store.snapshot():
            rows = self._query(_SCAN_SAME, values)
            rows += self._query(_SCAN_NEXT, {**values, "limit": SCAN_JOBS - len(rows)})
        chosen = [(seq, status in DEAD) for _, _, seq, status, type in rows
                  if status in self._statuses and self._type in (None, type)]
        self._chosen = [(seq, dead) for seq, dead in reversed(chosen) if seq not in self._needed]
        self.needed += len(chosen) - len(self._chosen)
        self.scanned += len(rows)
        self._scanning = len(rows) == SCAN_JOBS
        if rows:
            self._place = dict(zip(("finished_at", "queue", "seq"), rows[-1], strict=False))

    def _delete_chosen(self) -> None:
        if not self._chosen:
            return
        left = self._chosen.copy()
        deleted = 0
        deferred: list[int] = []
        needed: list[int] = []
        with self._store.transaction():
            begun = time.monotonic()
            while left:
                some, left = left[-JOBS_PER_LOOK:], left[:-JOBS_PER_LOOK]
                for seq, dead in reversed(some):
                    if self._delete_job(seq):
                        deleted += 1
                    else:
                        (deferred if dead else needed).append(seq)
                if time.monotonic() - begun >= HOLD_SECONDS:
                    break
        self.wrote_seconds = time.monotonic() - begun
        self._chosen = left
        self._deferred += deferred
        self.needed += len(needed)
        self.jobs += deleted
        self._progressed = self._progressed or deleted > 0

    def _delete_job(self, seq: int) -> bool:
        execute = self._store.sqlite.execute
        if execute(self._delete_sql, {"seq": seq, "cutoff": self._cutoff_ms}).rowcount != 1:
            return False
        for statement in _FORGET:
            execute(statement, (seq,))
        return True

    def _pretend(self) -> None:
        chosen, self._chosen = self._chosen[::-1], []
        with self._store.snapshot():
            for seq, dead in chosen:
                if dead and not self._gone.issuperset(child for (child,) in self._query(_DEAD_CHILDREN, (seq,))):
                    self._deferred.append(seq)
                    continue
                if dead:
                    self._gone.add(seq)
                self.jobs += 1
                self._progressed = True

    # -- vacuum --------------------------------------------------------------------------

    def _vacuum(self) -> bool:
        """Give some free pages back; the file itself is cut by the next checkpoint."""
        if self._dry_run:
            return False
        with self._store.snapshot():
            is_left = self._pragma("freelist_count") > 0 and self._pragma("auto_vacuum") > 0
        if is_left:
            with self._store.transaction():
                begun = time.monotonic()
                before = self._pragma("page_count")
                self._query(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
                freed = before - self._pragma("page_count")
                self.freed_bytes += freed * self._pragma("page_size")
            self.wrote_seconds = time.monotonic() - begun
            is_left = freed > 0
        if not is_left and self.freed_bytes:
            self._store.checkpoint()
        return is_left

    def _pragma(self, name: str) -> int:
        ((value,),) = self._query(f"PRAGMA {name}")
        return int(value)

    def _query(self, sql: str, parameters: Any = ()) -> list[Any]:
        return self._store.sqlite.execute(sql, parameters).fetchall()


class Purger:
    """Purges now and then on behalf of a worker, a step at a time; at once after its start, then hourly.

    Of all live workers the one with the smallest id does it.  The others look too, but only for what
    has been lying for two hours longer for each worker before them: so they find something only where
    that one has no `--purge-after`, or is stuck.  Two that purge at once do no harm.

    Args:
        purge_after_ms: how long finished jobs are kept.
        monotonic: a clock in seconds, for when to begin and to go on.
    """

    def __init__(self, store: Store, worker_id: str, purge_after_ms: int,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._worker_id = worker_id
        self._purge_after_ms = purge_after_ms
        self._monotonic = monotonic
        self._purge: Purge | None = None
        self.next_at = monotonic()
        """When the next step is due, by that clock."""

    @property
    def is_busy(self) -> bool:
        """Whether a purge is under way, or should begin now."""
        return self._purge is not None or self._monotonic() >= self.next_at

    def step(self, *, now_ms: int) -> int:
        """Begin a purge or go on with one, if that is due; return how many jobs it has deleted once it ends.

        Raises:
            DatabaseError: the file is locked or in trouble; the same step is tried again later.
        """
        now = self._monotonic()
        if now < self.next_at:
            return 0
        self.next_at = now + STEP_PAUSE_SECONDS
        if self._purge is None:
            with self._store.snapshot():
                ((rank,),) = self._store.sqlite.execute(_RANK, (self._worker_id, now_ms - ALIVE_MS)).fetchall()
            grace_ms = round(2_000 * PURGE_EVERY_SECONDS) * rank
            self._purge = Purge(self._store, cutoff_ms=now_ms - self._purge_after_ms - grace_ms)
        if self._purge.step():
            return 0
        deleted, self._purge = self._purge.jobs, None
        self.next_at = now + PURGE_EVERY_SECONDS
        return deleted

    def give_up(self) -> None:
        """Let this purge be; the next one begins in an hour."""
        self._purge = None
        self.next_at = self._monotonic() + PURGE_EVERY_SECONDS
