"""Why a job is not running: every cause as a kind, a sentence and a way out, the most important first.

Reads the job, what it waits for, how many are ahead of it and which workers there are, in one
snapshot; changes nothing.  Causes that only a person can remove come first (a dead dependency,
no worker), then those that time or other jobs remove.

Workers are known by the row that each `worker` command keeps in the file: it is written once a
minute and struck off at the end, so a worker counts as alive within 150 s of that.  Programs that
claim by themselves (`Queue.claim`) have no row.
"""

from __future__ import annotations

import json
from shlex import quote
from typing import NamedTuple

from .history import why_waiting
from .lifecycle import CANCELED, COMPLETED, FAILED, RETRYING, RUNNING
from .schema import IS_READY, IS_SCHEDULED
from .text import escape
from .times import format_time, relative, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .db import Store
    from .history import Relative
    from .jobs import Job

ALIVE_MS = 150_000
"""A worker seen longer ago is not alive: it would have been seen twice since."""
MAX_AHEAD = 100_000
"""More jobs ahead are not counted."""
MAX_BLOCKERS = 5
MAX_NAMED = 10
"""More jobs are not named in one sentence."""
EXEC = "exec"

_WORKERS = """SELECT id, host, pid, queues, types, allow_exec, started_at, seen_at FROM workers
              ORDER BY seen_at DESC, id"""
_AHEAD = f"""
SELECT (SELECT count(*) FROM (SELECT 1 FROM jobs WHERE queue = :queue AND {IS_READY} AND priority > :priority
                              AND run_at <= :now LIMIT :limit))
     + (SELECT count(*) FROM (SELECT 1 FROM jobs WHERE queue = :queue AND {IS_READY} AND priority = :priority
                              AND seq < :seq AND run_at <= :now LIMIT :limit))
     + (SELECT count(*) FROM (SELECT priority, seq FROM jobs WHERE queue = :queue AND {IS_SCHEDULED}
                              AND run_at <= :now LIMIT :due_limit)
        WHERE priority > :priority OR priority = :priority AND seq < :seq)"""
MAX_DUE_AHEAD = 10_000
"""So many of those that have come due and that no worker has marked as ready yet are looked at."""


class Cause(NamedTuple):
    """One reason why a job is not running, or is.

    Attributes:
        kind: a word that stays the same, for programs.
        sentence: for people, without a full stop.
        remedy: what to do, a command of this program where there is one; None: wait, or nothing to be done.
    """

    kind: str
    sentence: str
    remedy: str | None = None


class Worker(NamedTuple):
    """A row of the workers' table; times in ms since the epoch."""

    id: str
    host: str
    pid: int
    queues: list[str]
    types: list[str]
    allow_exec: bool
    started_at: int
    seen_at: int


def workers(store: Store) -> list[Worker]:
    """Return the workers that have not said farewell, the one last seen first."""
    with store.snapshot():
        rows = store.sqlite.execute(_WORKERS).fetchall()
    return [Worker(id, host, pid, json.loads(queues), json.loads(types), bool(allow_exec), started_at, seen_at)
            for id, host, pid, queues, types, allow_exec, started_at, seen_at in rows]


def is_alive(worker: Worker, now_ms: int) -> bool:
    """Return whether a worker was seen of late."""
    return worker.seen_at >= now_ms - ALIVE_MS


def explain(store: Store, job_id: str, *, now_ms: int) -> tuple[Job, list[Cause]] | None:
    """Return a job and why it is not running, the most important first; None: there is no such job.

    O(log n), plus what it waits for, up to 50,000 dependencies, and the jobs ahead of it, up to 100,000.
    """
    with store.snapshot():
        job = store.get(job_id, parents=False)
        if job is None:
            return None
        if job.status == RUNNING:
            return job, list(_running(store, job, now_ms))
        if job.finished_at is not None:
            return job, [_finished(job, now_ms)]
        blocked, waiting = _held_up(store, job)
        return job, [*blocked, *_nobody(store, job, now_ms), *waiting, *_due(store, job, now_ms)]


# -- one function for each group of causes ---------------------------------------------

def _running(store: Store, job: Job, now_ms: int) -> Iterator[Cause]:
    owner = job.lease_owner or ""
    found = next((worker for worker in workers(store) if worker.id == owner), None)
    where = f"{_name(found.host)}, pid {found.pid}" if found else _name(owner)
    expires_at = job.lease_expires_at or 0
    since = "" if job.started_at is None else f" since {_moment(job.started_at, now_ms)}"
    if expires_at > now_ms:
        yield Cause(RUNNING, f"it is running on {where}{since}, lease until {_moment(expires_at, now_ms)}",
                    _command("cancel", job.id))
        return
    yield Cause("lease-expired", f"it was started on {where}{since}; its lease ran out {span(now_ms - expires_at)} "
                "ago and nobody has reclaimed it")
    yield from _nobody(store, job, now_ms)


def _finished(job: Job, now_ms: int) -> Cause:
    when = _moment(job.finished_at or 0, now_ms)
    if job.status == COMPLETED:
        return Cause(COMPLETED, f"it has completed, {when}", _command("show", job.id))
    if job.status == CANCELED:
        return Cause(CANCELED, f"it was canceled, {when}", _command("retry", job.id))
    error = f": {_first_line(job.last_error)}" if job.last_error else ""
    return Cause(FAILED, f"it failed for good, after {_count(job.attempts, 'attempt')}, {when}{error}",
                 _command("retry", job.id))


def _nobody(store: Store, job: Job, now_ms: int) -> Iterator[Cause]:
    """Tell what is missing for a worker to take the job."""
    known = workers(store)
    alive = [worker for worker in known if is_alive(worker, now_ms)]
    queue, type = job.queue, job.type
    if not known:
        yield Cause("no-worker", "no worker has ever been seen, or all have ended", _worker_command(job))
    elif not alive:
        last = known[0]
        yield Cause("no-worker", f"no worker has been seen for {span(now_ms - last.seen_at)}; the last was on "
                    f"{_name(last.host)}, pid {last.pid}", _worker_command(job))
    serving = [worker for worker in alive if queue in worker.queues]
    if alive and not serving:
        served = sorted({name for worker in alive for name in worker.queues})
        yield Cause("queue-not-served", f"no live worker serves queue {_name(queue)}; served: {_list(served)}",
                    _worker_command(job))
    if not serving:
        return
    able = [worker for worker in serving if type in worker.types]
    if type == EXEC and not any(worker.allow_exec for worker in serving):
        yield Cause("exec-not-allowed", f"no live worker that serves queue {_name(queue)} runs jobs of type "
                    f"{EXEC}", f"{_worker_command(job)} --allow-exec")
    elif not able and type != EXEC:
        yield Cause("no-handler", f"no live worker that serves queue {_name(queue)} has a handler for type "
                    f"{_name(type)}; an attempt would fail", f"{_worker_command(job)} --handlers MODULE")


def _held_up(store: Store, job: Job) -> tuple[list[Cause], list[Cause]]:
    """Return the dead jobs above a job as causes, and the jobs that it waits for and that may yet complete."""
    if not job.unmet:
        return [], []
    ways, alive, alive_in_all = why_waiting(store, job, MAX_BLOCKERS, MAX_NAMED)
    blocked = []
    for way in ways:
        through = f", through {_named(way.through, way.between)}" if way.through else ""
        blocked.append(Cause("blocked", f"it is blocked by {way.dead.status} job {_name(way.dead.id)}{through}",
                             _command("retry", way.dead.id)))
    if not alive:
        return blocked, []
    jobs = f"job{'s' if alive_in_all > 1 else ''} {_named(alive, alive_in_all)}"
    statuses = ", ".join(other.status for other in alive)
    return blocked, [Cause("waiting", f"it waits for {jobs} ({statuses})", _command("explain", alive[0].id))]


def _due(store: Store, job: Job, now_ms: int) -> Iterator[Cause]:
    if job.run_at > now_ms:
        when = f"due in {span(job.run_at - now_ms)}, {format_time(job.run_at)}"
        if job.status == RETRYING:
            error = f"; the last error: {_first_line(job.last_error)}" if job.last_error else ""
            yield Cause("backing-off", f"it is backing off after attempt {job.attempts} of {job.max_attempts}, "
                        f"{when}{error}")
        else:
            yield Cause("scheduled", f"it is {when}")
    elif not job.unmet:
        ((ahead,),) = store.sqlite.execute(_AHEAD, {
            "queue": job.queue, "priority": job.priority, "seq": job.seq, "now": now_ms, "limit": MAX_AHEAD,
            "due_limit": MAX_DUE_AHEAD}).fetchall()
        if ahead == 0:
            yield Cause("ready", "it is ready, and next in its queue")
        else:
            more = "at least " if ahead >= MAX_AHEAD else ""
            verb = "is" if ahead == 1 else "are"
            yield Cause("ready", f"it is ready; {more}{_count(min(ahead, MAX_AHEAD), 'job')} {verb} ahead of it")


# -- words ------------------------------------------------------------------------------

def _named(jobs: list[Relative], in_all: int) -> str:
    names = ", ".join(_name(job.id) for job in jobs)
    return names + (f" and {in_all - len(jobs):,} more" if in_all > len(jobs) else "")


def _list(names: list[str]) -> str:
    shown = ", ".join(map(_name, names[:MAX_NAMED]))
    return shown + (f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else "")


def _name(text: str) -> str:
    """Return a name as it stands in a sentence: bare if it is one plain word, else quoted."""
    plain = text.isascii() and text.isprintable() and " " not in text and "," not in text
    return text if plain else f"'{escape(text)}'"


def _first_line(text: str | None) -> str:
    line = (text or "").partition("\n")[0]
    return escape(line if len(line) <= 200 else line[:197] + "...")


def _moment(then_ms: int, now_ms: int) -> str:
    return f"{format_time(then_ms)} ({relative(then_ms, now_ms)})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _command(name: str, job_id: str) -> str:
    return f"{name} {'-- ' if job_id.startswith('-') else ''}{quote(escape(job_id))}"


def _worker_command(job: Job) -> str:
    return f"worker --queue{'=' if job.queue.startswith('-') else ' '}{quote(escape(job.queue))}"
