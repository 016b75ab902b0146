"""Looking into the file: single jobs, lists, counts, what happens next, who works.

Nothing here moves a job.  Long reads go page by page, so that no snapshot stays open
long enough to hold up checkpoints.
"""

from __future__ import annotations

from .connection import Connection
from .jobs import Job
from .lifecycle import (
    CANCELED,
    CLAIMABLE,
    COMPLETED,
    DEAD,
    FAILED,
    PENDING,
    RETRYING,
    RUNNING,
    STATUSES,
)
from .schema import (
    IS_DEAD,
    IS_FINISHED,
    IS_READY,
    IS_RETRYING,
    IS_RUNNING,
    IS_SCHEDULED,
    IS_WAITING,
    quoted,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    Jobs = list[Job]  # inside the class, `list` is a method
    Ids = list[str]

PAGE = 500

_COLUMNS = ", ".join(f"jobs.{name}" for name in Job.COLUMNS)
_GET = f"SELECT {_COLUMNS} FROM jobs WHERE id = ?"
_PAGE = f"""SELECT {_COLUMNS} FROM json_each(?) CROSS JOIN jobs ON seq = json_each.value"""
_PARENTS = """SELECT job, parent.id FROM dependencies JOIN jobs AS parent ON parent.seq = depends_on
              WHERE job IN (SELECT value FROM json_each(?)) ORDER BY job, depends_on"""
# Counts come from the partial indexes alone, whatever the rows hold.
_COUNTS = "SELECT " + ", ".join(f"(SELECT count(*) FROM jobs WHERE {condition} AND {{queue}})" for condition in (
    IS_READY, IS_SCHEDULED, IS_WAITING, IS_RETRYING, IS_RUNNING, IS_FINISHED,
    f"{IS_DEAD} AND status = '{FAILED}'", f"{IS_DEAD} AND status = '{CANCELED}'"))
_SHARES = f"""SELECT (SELECT count(*) FROM jobs WHERE {IS_READY} AND run_at <= :now AND {{queue}}),
       (SELECT count(*) FROM jobs WHERE {IS_READY} AND run_at > :now AND {{queue}}),
       (SELECT count(*) FROM jobs WHERE {IS_SCHEDULED} AND run_at <= :now AND {{queue}}),
       (SELECT count(*) FROM jobs WHERE {IS_SCHEDULED} AND run_at > :now AND {{queue}}),
       (SELECT count(*) FROM jobs WHERE {IS_WAITING} AND {{queue}})"""
_NEXT_RUN = f"SELECT min(run_at) FROM jobs WHERE queue = ? AND {IS_SCHEDULED}"
_NEXT_EXPIRY = f"SELECT min(lease_expires_at) FROM jobs WHERE queue = ? AND {IS_RUNNING}"
_ANY_READY = f"SELECT EXISTS (SELECT 1 FROM jobs WHERE queue = ? AND {IS_READY})"
BLOCKED = f"""
WITH RECURSIVE blocked(seq) AS (
    SELECT job FROM jobs AS dead JOIN dependencies ON depends_on = dead.seq
    JOIN jobs AS child ON child.seq = job WHERE dead.{IS_DEAD} AND child.status IN {quoted(CLAIMABLE)}
    UNION
    SELECT job FROM blocked JOIN dependencies ON depends_on = blocked.seq
    JOIN jobs AS child ON child.seq = job WHERE child.status IN {quoted(CLAIMABLE)})
"""
"""The beginning of a statement that may read `blocked(seq)`; linear in the dead jobs and the blocked ones."""
_BLOCKED_IDS = BLOCKED + "SELECT jobs.id FROM blocked JOIN jobs USING (seq) {where} ORDER BY jobs.seq"
_BLOCKED_COUNT = BLOCKED + "SELECT count(*) FROM blocked JOIN jobs USING (seq) {where}"
_IS_BLOCKED = f"""
WITH RECURSIVE above(seq) AS (
    SELECT depends_on FROM jobs JOIN dependencies ON job = seq WHERE id = ? AND status IN {quoted(CLAIMABLE)}
    UNION
    SELECT depends_on FROM above JOIN jobs USING (seq) JOIN dependencies ON job = seq
    WHERE {IS_WAITING})
SELECT EXISTS (SELECT 1 FROM above CROSS JOIN jobs USING (seq) WHERE {IS_DEAD})"""


def conditions(status: str | None, others: Mapping[str, object]) -> dict[str, object]:
    """Return the conditions of a listing with their values: those for a status, and the others that are not None.

    Raises:
        ValueError: there is no such status.
    """
    if status is not None and status not in STATUSES:
        raise ValueError(f"there is no status {status!r}; the statuses are {', '.join(STATUSES)}")
    used = {condition: value for condition, value in others.items() if value is not None}
    if status is not None:  # literally, so that the planner can use the partial indexes
        used[f"status = '{status}' AND ?"] = 1
    if status in DEAD:
        used[f"{IS_DEAD} AND ?"] = 1
    elif status == RUNNING:  # few, and their index is not in this order
        used[f"seq IN (SELECT seq FROM jobs WHERE {IS_RUNNING}) AND ?"] = 1
    return used


class Catalogue(Connection):
    """The part of the engine that reads; see `Store`."""

    def get(self, job_id: str, *, parents: bool = True) -> Job | None:
        """Return a job, None if there is none; its dependencies are left out unless `parents`."""
        with self.snapshot():
            rows = self.sqlite.execute(_GET, (job_id,)).fetchall()
            jobs = self._with_parents(rows) if parents else [Job(*row) for row in rows]
        return jobs[0] if jobs else None

    def list(self, *, status: str | None = None, type: str | None = None, queue: str | None = None,
             limit: int | None = None, before_seq: int | None = None) -> Jobs:
        """Return jobs with their dependencies, newest first.

        Args:
            limit: at most so many; None: all.
            before_seq: only jobs older than the one with this `seq`, for paging.

        Raises:
            ValueError: there is no such status.
        """
        used = conditions(status, {"type = ?": type, "queue = ?": queue, "seq < ?": before_seq})
        where = " AND ".join(used) or "1"
        with self.snapshot():
            rows = self.sqlite.execute(f"SELECT {_COLUMNS} FROM jobs WHERE {where} ORDER BY seq DESC LIMIT ?",
                                       (*used.values(), -1 if limit is None else limit)).fetchall()
            return self._with_parents(rows)

    def page(self, seqs: Sequence[int]) -> Jobs:
        """Return the jobs with these seqs, with their dependencies, in that order; those not there are left out."""
        with self.snapshot():
            text = "[" + ",".join(map(str, seqs)) + "]"
            return self._with_parents(self.sqlite.execute(_PAGE, (text,)).fetchall())

    def iterate(self, *, status: str | None = None, type: str | None = None, queue: str | None = None,
                limit: int | None = None) -> Iterator[Job]:
        """Yield what `list` returns, page by page: memory stays flat and no snapshot stays open."""
        before_seq = None
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            page = self.list(status=status, type=type, queue=queue, limit=size, before_seq=before_seq)
            yield from page
            if len(page) < size:
                return
            before_seq = page[-1].seq
            limit = None if limit is None else limit - size

    def _with_parents(self, rows: Sequence[tuple[Any, ...]]) -> Jobs:
        seqs = "[" + ",".join(str(row[0]) for row in rows) + "]"
        parents: dict[int, Ids] = {}
        for seq, parent in self.sqlite.execute(_PARENTS, (seqs,)).fetchall():
            parents.setdefault(seq, []).append(parent)
        jobs = [Job(*row) for row in rows]
        for job in jobs:
            job.depends_on = tuple(parents.get(job.seq, ()))
        return jobs

    def counts(self, queue: str | None = None) -> dict[str, int]:
        """Return how many jobs have each status, in one queue or (None) in the whole file.

        Linear in the jobs, but reads indexes only: 1,000,000 take about 0.1 s.
        """
        condition, values = ("TRUE", {}) if queue is None else ("queue = :queue", {"queue": queue})
        with self.snapshot():
            ((ready, scheduled, waiting, retrying, running, finished, failed, canceled),) = self.sqlite.execute(
                _COUNTS.format(queue=condition), values).fetchall()
        return {PENDING: ready + scheduled + waiting - retrying, RUNNING: running, RETRYING: retrying,
                COMPLETED: finished - failed - canceled, FAILED: failed, CANCELED: canceled}

    def blocked(self, queue: str | None = None) -> Ids:
        """Return the ids of jobs that wait, at any depth, for one that failed or was canceled; oldest first.

        Linear in the dead jobs, the blocked ones and the edges between them.
        """
        where, values = ("", ()) if queue is None else ("WHERE jobs.queue = ?", (queue,))
        with self.snapshot():
            rows = self.sqlite.execute(_BLOCKED_IDS.format(where=where), values).fetchall()
        return [job_id for (job_id,) in rows]

    def is_blocked(self, job_id: str) -> bool:
        """Return whether `blocked` would name this job; linear in what it waits for, at any depth."""
        with self.snapshot():
            return self.sqlite.execute(_IS_BLOCKED, (job_id,)).fetchall() == [(1,)]

    def shares(self, queue: str | None = None, *, now_ms: int) -> dict[str, int]:
        """Return how the jobs that wait for a worker divide, in one queue or (None) in the whole file.

        `ready` could be claimed now, `scheduled` is not due yet, `waiting` has dependencies that have
        not completed, and `blocked` has some that never will.
        """
        condition = "TRUE" if queue is None else "queue = :queue"
        with self.snapshot():
            ((ready, early, due, scheduled, waiting),) = self.sqlite.execute(
                _SHARES.format(queue=condition), {"now": now_ms, "queue": queue}).fetchall()
            where = "" if queue is None else "WHERE queue = :queue"
            ((blocked,),) = self.sqlite.execute(_BLOCKED_COUNT.format(where=where), {"queue": queue}).fetchall()
        return {"ready": ready + due, "scheduled": scheduled + early,  # early: the clock has stepped back
                "waiting": waiting - blocked, "blocked": blocked}

    def next_event(self, queues: Sequence[str]) -> int | None:
        """Return when the next scheduled job comes due or lease runs out (ms); None: nothing to wait for."""
        with self.snapshot():
            moments = [self.sqlite.execute(sql, (queue,)).fetchall()[0][0]
                       for queue in queues for sql in (_NEXT_RUN, _NEXT_EXPIRY)]
        return min((moment for moment in moments if moment is not None), default=None)

    def has_ready(self, queues: Sequence[str]) -> bool:
        """Return whether a claim would find anything that is marked as ready."""
        with self.snapshot():
            return any(self.sqlite.execute(_ANY_READY, (queue,)).fetchall() == [(1,)] for queue in queues)
