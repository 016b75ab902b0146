"""What is known about single jobs beyond their own row: failed attempts, and who waits for whom.

Functions over an open engine that only read: `history` tells all about one job, `blocked_among`
which of some jobs wait for one that is dead, `why_waiting` for which ones and through which others,
and `tree` what a job depends on, or what depends on it, as far as one cares to look.  All of them stop
after a stated number of jobs or edges, as a file may hold millions; none moves a job.
"""

from __future__ import annotations

from typing import NamedTuple

from .lifecycle import COMPLETED
from .schema import IS_DEAD, IS_WAITING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .db import Store
    from .jobs import Job

MAX_ATTEMPTS_TOLD = 1_000
MAX_DEPENDENTS_TOLD = 1_000
MAX_EDGES = 50_000
"""How far up a question about one job goes."""
MAX_EDGES_OF_A_LIST = 20_000
"""How far up a question about a screenful of jobs goes."""
MAX_TREE_EDGES = 1_000

_FAILURES = """SELECT attempt, owner, started_at, ended_at, reason, error FROM failures
               WHERE job = ? ORDER BY rowid DESC LIMIT ?"""
_FAILURE_COUNT = "SELECT count(*) FROM failures WHERE job = ?"
_DEPENDENCIES = """SELECT seq, id, type, status FROM dependencies CROSS JOIN jobs ON seq = depends_on
                   WHERE job = ? ORDER BY depends_on"""
_DEPENDENTS = """SELECT seq, id, type, status FROM dependencies CROSS JOIN jobs ON seq = job
                 WHERE depends_on = ? ORDER BY job LIMIT ?"""
_DEPENDENT_COUNT = "SELECT count(*) FROM dependencies WHERE depends_on = ?"
# Level by level, as the queue of a recursive SELECT is first in, first out: what the limit cuts is far away.
_ABOVE = f"""
WITH RECURSIVE above(child, parent) AS (
    SELECT job, depends_on FROM dependencies WHERE job IN (SELECT value FROM json_each(:jobs))
    UNION
    SELECT dependencies.job, depends_on FROM above CROSS JOIN jobs ON seq = parent
    CROSS JOIN dependencies ON dependencies.job = seq WHERE {IS_WAITING}
    LIMIT :limit)
SELECT child, parent, {IS_DEAD} FROM above CROSS JOIN jobs ON seq = parent WHERE status <> '{COMPLETED}'"""
_RELATIVES = "SELECT seq, jobs.id, jobs.type, status FROM json_each(?) CROSS JOIN jobs ON seq = json_each.value"
_EDGES = {
    False: """
WITH RECURSIVE above(child, parent) AS (
    SELECT job, depends_on FROM dependencies WHERE job = :seq
    UNION
    SELECT job, depends_on FROM above CROSS JOIN dependencies ON job = parent
    LIMIT :limit)
SELECT child, parent, seq, id, type, status FROM above CROSS JOIN jobs ON seq = parent""",
    True: """
WITH RECURSIVE below(child, parent) AS (
    SELECT depends_on, job FROM dependencies WHERE depends_on = :seq
    UNION
    SELECT depends_on, job FROM below CROSS JOIN dependencies ON depends_on = parent
    LIMIT :limit)
SELECT child, parent, seq, id, type, status FROM below CROSS JOIN jobs ON seq = parent""",
}
"""False: towards what a job depends on; True: towards what depends on it."""


class Attempt(NamedTuple):
    """An attempt that failed; times in ms since the epoch, `owner` the worker."""

    attempt: int
    owner: str | None
    started_at: int | None
    ended_at: int
    reason: str
    error: str


class Relative(NamedTuple):
    """A job as others that are tied to it by a dependency see it."""

    seq: int
    id: str
    type: str
    status: str


class History(NamedTuple):
    """All about one job.

    Attributes:
        attempts: those that failed, oldest first, the newest 1,000; `attempts_in_all` counts the others too.
        dependencies: what it depends on.
        dependents: what depends on it, the oldest 1,000; `dependents_in_all` counts the others too.
        blocked: it waits for one that failed or was canceled.
    """

    job: Job
    attempts: list[Attempt]
    attempts_in_all: int
    dependencies: list[Relative]
    dependents: list[Relative]
    dependents_in_all: int
    blocked: bool


class Way(NamedTuple):
    """How a job is blocked.

    Attributes:
        dead: the one that failed or was canceled.
        through: the first jobs between, the nearest first; `between` counts all of them.
    """

    dead: Relative
    through: list[Relative]
    between: int


class Tree(NamedTuple):
    """Jobs tied to one, as far as they were looked at.

    Attributes:
        root: the job asked about.
        jobs: seq -> job, the root's own included.
        branches: seq -> the seqs one step further, in order.
        cut: there is more.
    """

    root: Relative
    jobs: dict[int, Relative]
    branches: dict[int, list[int]]
    cut: bool


def history(store: Store, job_id: str) -> History | None:
    """Return all about a job, None if there is none; a few index look-ups, and one for each thing told."""
    with store.snapshot():
        job = store.get(job_id)
        if job is None:
            return None
        ask = store.sqlite.execute
        attempts = [Attempt(*row) for row in ask(_FAILURES, (job.seq, MAX_ATTEMPTS_TOLD)).fetchall()]
        attempts.reverse()
        many = len(attempts) == MAX_ATTEMPTS_TOLD
        return History(
            job, attempts, ask(_FAILURE_COUNT, (job.seq,)).fetchall()[0][0] if many else len(attempts),
            [Relative(*row) for row in ask(_DEPENDENCIES, (job.seq,)).fetchall()],
            [Relative(*row) for row in ask(_DEPENDENTS, (job.seq, MAX_DEPENDENTS_TOLD)).fetchall()],
            ask(_DEPENDENT_COUNT, (job.seq,)).fetchall()[0][0],
            bool(job.unmet) and store.is_blocked(job_id),
        )


def blocked_among(store: Store, jobs: Iterable[Job]) -> set[int]:
    """Return the seqs of those jobs of a list that are blocked, as `Store.is_blocked` says it of one.

    Looks at 20,000 edges at most; a job whose dead ancestor lies behind those is left out.
    """
    waiting = [job.seq for job in jobs if job.unmet]
    return _blocked(_above(store, waiting, MAX_EDGES_OF_A_LIST)).intersection(waiting) if waiting else set()


def why_waiting(store: Store, job: Job, limit: int, named: int) -> tuple[list[Way], list[Relative], int]:
    """Return what holds up a job with unmet dependencies.

    Looks at 50,000 edges at most, level by level; what lies behind those is not found.

    Args:
        limit: at most so many ways to dead jobs, the shortest.
        named: tell at most so many jobs of a way, and of those that it waits for.

    Returns:
        (the shortest way to each dead job above it; those of its dependencies that have not completed
        and may yet, oldest first; how many these are in all).
    """
    with store.snapshot():
        edges = _above(store, [job.seq], MAX_EDGES)
        parents: dict[int, list[int]] = {}
        for child, parent, _ in edges:
            parents.setdefault(child, []).append(parent)
        dead = {parent for _, parent, is_dead in edges if is_dead}
        ends, below = _nearest(parents, dead, job.seq, limit)
        ways = [_way(below, job.seq, end) for end in ends]
        hopeless = dead | _blocked(edges)
        alive = [parent for parent in sorted(parents.get(job.seq, ())) if parent not in hopeless]
        wanted = {*alive[:named], *(seq for way in ways for seq in (*way[:named], way[-1]))}
        rows = store.sqlite.execute(_RELATIVES, (_as_json(wanted),)).fetchall()
    known = {row[0]: Relative(*row) for row in rows}
    return ([Way(known[way[-1]], [known[seq] for seq in way[:-1][:named]], len(way) - 1) for way in ways],
            [known[seq] for seq in alive[:named]], len(alive))


def _nearest(parents: dict[int, list[int]], dead: set[int], start: int,
             limit: int) -> tuple[list[int], dict[int, int]]:
    """Return the dead jobs nearest above one, and from which job the search came to each that it saw."""
    below: dict[int, int] = {}
    found: list[int] = []
    level = [start]
    while level and len(found) < limit:
        upper = []
        for child in level:
            for parent in parents.get(child, ()):
                if parent not in below:
                    below[parent] = child
                    upper.append(parent)
                    if parent in dead:
                        found.append(parent)
        level = upper
    return found[:limit], below


def _way(below: dict[int, int], start: int, end: int) -> list[int]:
    way = []
    while end != start:
        way.append(end)
        end = below[end]
    way.reverse()
    return way


def _blocked(edges: Sequence[tuple[int, int, int]]) -> set[int]:
    """Return the blocked jobs among the children of edges that `_above` has found."""
    children: dict[int, list[int]] = {}
    spreading = []
    for child, parent, is_dead in edges:
        children.setdefault(parent, []).append(child)
        if is_dead:
            spreading.append(parent)
    blocked: set[int] = set()
    while spreading:
        for child in children.pop(spreading.pop(), ()):
            if child not in blocked:
                blocked.add(child)
                spreading.append(child)
    return blocked


def tree(store: Store, job_id: str, *, reverse: bool = False, limit: int = MAX_TREE_EDGES) -> Tree | None:
    """Return what a job depends on, or with `reverse` what depends on it, at any depth; None: no such job.

    Args:
        limit: at most so many edges, the nearest.
    """
    with store.snapshot():
        job = store.get(job_id, parents=False)
        if job is None:
            return None
        rows = store.sqlite.execute(_EDGES[reverse], {"seq": job.seq, "limit": limit + 1}).fetchall()
    root = Relative(job.seq, job.id, job.type, job.status)
    found = Tree(root, {job.seq: root}, {}, len(rows) > limit)
    for child, parent, *relative in rows[:limit]:
        found.jobs[parent] = Relative(*relative)
        found.branches.setdefault(child, []).append(parent)
    for branch in found.branches.values():
        branch.sort()
    return found


def _above(store: Store, seqs: Iterable[int], limit: int) -> list[tuple[int, int, int]]:
    """Return (child, parent, whether that is dead) for what these jobs still wait for, at any depth."""
    with store.snapshot():
        return store.sqlite.execute(_ABOVE, {"jobs": _as_json(seqs), "limit": limit}).fetchall()


def _as_json(seqs: Iterable[int]) -> str:
    return "[" + ",".join(map(str, seqs)) + "]"
