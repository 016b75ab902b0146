"""What `show`, `explain` and `stats` print for people: one job in full, its causes, a tree, figures.

Pure functions that yield lines; all that a job brings along is escaped here, line by line.
Tables, widths and single values are `render`'s.
"""

from __future__ import annotations

import json

from .errors import InvalidJob
from .jobs import DEFAULT_QUEUE, stored_value
from .lifecycle import CANCELED, COMPLETED, FAILED, STATUSES
from .render import GAP, Column, coloured, cut, table
from .text import escape, escape_json
from .times import format_time, relative, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .explain import Cause
    from .figures import Figures, Times, Window
    from .history import Attempt, History, Relative, Tree
    from .jobs import Job

MAX_ATTEMPTS_SHOWN = 20
MAX_RELATIVES_SHOWN = 20
MAX_KINDS_SHOWN = 50
_INDENT = "  "
_UNICODE = ("├── ", "└── ", "│   ")
_ASCII = ("|-- ", "`-- ", "|   ")


# -- one job ----------------------------------------------------------------------------

def job_view(found: History, now_ms: int, colour: bool = False) -> Iterator[str]:
    """Yield all about a job: what is set, payload and result, the attempts that failed."""
    job = found.job
    status = coloured(job.status, colour) + (", blocked" if found.blocked else "")
    yield f"job {escape(job.id)}  {escape(job.type)}  {status}"
    facts = [(name, value) for name, value in _facts(found, now_ms) if value]
    width = max(len(name) for name, _ in facts)
    yield from (f"{_INDENT}{name:<{width}}  {escape(value)}" for name, value in facts)
    yield from _value("payload", job.payload_json)
    if job.result_json is not None:
        yield from _value("result", job.result_json)
    if found.attempts:
        yield "failed attempts:"
        hidden = found.attempts_in_all - MAX_ATTEMPTS_SHOWN
        if hidden > 0:
            yield f"{_INDENT}{hidden:,} earlier ones; --json shows more"
        for attempt in found.attempts[-MAX_ATTEMPTS_SHOWN:]:
            yield from _attempt(attempt, now_ms)


def _facts(found: History, now_ms: int) -> Iterator[tuple[str, str]]:
    job = found.job

    def moment(ms: int | None) -> str:
        return "" if ms is None else f"{format_time(ms)}, {relative(ms, now_ms)}"

    yield "queue", job.queue
    yield "priority", str(job.priority)
    yield "attempts", f"{job.attempts} of {job.max_attempts}"
    yield "created", moment(job.created_at)
    yield "not before", moment(job.run_at) if job.finished_at is None and job.run_at != job.created_at else ""
    yield "started", moment(job.started_at)
    took = "" if job.started_at is None or job.finished_at is None else (
        f", took {span(max(0, job.finished_at - job.started_at))}")
    yield "finished", moment(job.finished_at) + took
    yield "worker", job.lease_owner or ""
    yield "lease until", moment(job.lease_expires_at)
    if job.progress is not None:
        yield "progress", f"{job.progress:.0%}" + (f" {job.progress_note}" if job.progress_note else "")
    yield "timeout", "" if job.timeout_ms is None else span(job.timeout_ms)
    yield "key", job.idempotency_key or ""
    yield "trace", job.trace or ""
    yield "depends on", _relatives(found.dependencies, len(found.dependencies))
    yield "needed by", _relatives(found.dependents, found.dependents_in_all)


def _relatives(jobs: Sequence[Relative], in_all: int) -> str:
    named = [f"{job.id} {job.status}" for job in jobs[:MAX_RELATIVES_SHOWN]]
    hidden = in_all - len(named)
    return ", ".join(named) + (f" and {hidden:,} more" if hidden else "")


def _value(name: str, text: str) -> Iterator[str]:
    """Yield a JSON value over several lines; what SQL has stored and Python cannot read comes as it is."""
    try:
        lines = json.dumps(stored_value(text), indent=2, ensure_ascii=False, allow_nan=False).split("\n")
        lines = list(map(escape_json, lines))
    except InvalidJob:
        lines = [escape(text)]
    yield f"{name}:"
    yield from (_INDENT + line for line in lines)


def _attempt(attempt: Attempt, now_ms: int) -> Iterator[str]:
    took = "" if attempt.started_at is None else f", took {span(max(0, attempt.ended_at - attempt.started_at))}"
    owner = f", on {escape(attempt.owner)}" if attempt.owner else ""
    yield (f"{_INDENT}{attempt.attempt}  {format_time(attempt.ended_at)}, {relative(attempt.ended_at, now_ms)}"
           f"{took}{owner}: {escape(attempt.reason)}")
    yield from (_INDENT * 3 + escape(line) for line in attempt.error.split("\n"))


def history_as_dict(found: History) -> dict[str, object]:
    """Return all about a job for `--json`: the names of `list --json`, and more."""
    return {
        **found.job.as_dict(), "progress_note": found.job.progress_note, "blocked": found.blocked,
        "failures": [{
            "attempt": attempt.attempt, "worker": attempt.owner,
            "started_at": None if attempt.started_at is None else format_time(attempt.started_at),
            "ended_at": format_time(attempt.ended_at),
            "seconds": None if attempt.started_at is None else (
                max(0, attempt.ended_at - attempt.started_at) / 1_000),
            "reason": attempt.reason, "error": attempt.error} for attempt in found.attempts],
        "failures_in_all": found.attempts_in_all,
        "dependencies": [_relative_as_dict(job) for job in found.dependencies],
        "dependents": [_relative_as_dict(job) for job in found.dependents],
        "dependents_in_all": found.dependents_in_all,
    }


def _relative_as_dict(job: Relative) -> dict[str, object]:
    return {"id": job.id, "type": job.type, "status": job.status}


# -- a tree of dependencies ----------------------------------------------------------------

def tree_view(found: Tree, colour: bool = False, ascii_only: bool = False,
              width: int | None = None) -> Iterator[str]:
    """Yield a tree, one job a line; the branches of a job that comes again are shown once, where it comes first."""
    fork, last, pipe = _ASCII if ascii_only else _UNICODE
    shown: set[int] = set()
    # (seq, what stands before its own line, before the lines of its branches); a list, as a chain may be long.
    waiting = [(found.root.seq, "", "")]
    while waiting:
        seq, before, below = waiting.pop()
        job = found.jobs[seq]
        branches = found.branches.get(seq, [])
        again = seq in shown and bool(branches)
        text = before + escape(f"{job.id}  {job.type}") + GAP
        room = None if width is None else width - len(job.status) - len("  (see above)") * again
        text = text if room is None else cut(text, room)
        yield text + coloured(job.status, colour) + ("  (see above)" if again else "")
        shown.add(seq)
        if not again:
            waiting += [(branch, below + (last if n == 0 else fork), below + ("    " if n == 0 else pipe))
                        for n, branch in enumerate(reversed(branches))]
    if found.cut:
        yield "... and more"


def tree_as_dicts(found: Tree) -> Iterator[dict[str, object]]:
    """Yield the jobs of a tree for `--json`, the root first, each once."""
    for seq, job in found.jobs.items():
        branches = [found.jobs[branch].id for branch in found.branches.get(seq, [])]
        yield {**_relative_as_dict(job), "branches": branches}


# -- why it does not run --------------------------------------------------------------------

def causes_view(job: Job, causes: Sequence[Cause], colour: bool = False) -> Iterator[str]:
    """Yield why a job is not running, each cause with its way out in brackets."""
    yield f"job {escape(job.id)}  {escape(job.type)}  {coloured(job.status, colour)}"
    for cause in causes:
        yield f"{_INDENT}{cause.sentence}" + (f" [{cause.remedy}]" if cause.remedy else "")


def causes_as_dict(job: Job, causes: Iterable[Cause]) -> dict[str, object]:
    """Return why a job is not running for `--json`."""
    return {"id": job.id, "type": job.type, "status": job.status, "causes": [
        {"kind": cause.kind, "sentence": cause.sentence, "remedy": cause.remedy} for cause in causes]}


# -- figures ---------------------------------------------------------------------------------

def figures_view(found: Figures, now_ms: int, width: int | None = None) -> Iterator[str]:
    """Yield the figures of a queue: a table of counts, what waits, what ended of late, who works."""
    yield from _counts(found, width)
    yield ""
    lengths = [span(round(window.window_seconds * 1_000)).upper() for window in found.windows]
    yield from table([Column("ENDED"), *(Column(f"LAST {length}", right=True) for length in lengths)],
                     _windows(found.windows), width)
    yield ""
    ready, scheduled = sum(lane.ready for lane in found.lanes), sum(lane.scheduled for lane in found.lanes)
    waiting, blocked = sum(lane.waiting for lane in found.lanes), sum(lane.blocked for lane in found.lanes)
    oldest = max((lane.oldest_ready_ms for lane in found.lanes if lane.oldest_ready_ms is not None), default=None)
    since = "" if oldest is None else f" (the first was due {relative(now_ms - oldest, now_ms)})"
    yield f"waiting for a worker  {ready:,} ready{since}, {scheduled:,} scheduled"
    yield f"waiting for others    {waiting:,} waiting, {blocked:,} blocked"
    if found.failed_attempts is not None:
        yield f"failed attempts       {found.failed_attempts:,} in all"
    yield f"workers alive         {len(found.alive):,}"
    for worker in found.alive[:MAX_RELATIVES_SHOWN]:
        yield (f"{_INDENT}{escape(worker.id)}, seen {relative(worker.seen_at, now_ms)}, serves "
               f"{escape(', '.join(worker.queues))}")


def _counts(found: Figures, width: int | None) -> Iterator[str]:
    kinds: dict[tuple[str, str], dict[str, int]] = {}
    for kind in found.kinds:
        kinds.setdefault((kind.queue, kind.type), dict.fromkeys(STATUSES, 0))[kind.status] = kind.jobs

    def together(keys: Iterable[tuple[str, str]]) -> list[int]:
        return [sum(kinds[key][status] for key in keys) for status in STATUSES]

    largest = sorted(kinds, key=lambda key: (-sum(kinds[key].values()), key))
    rows = [(queue, type, together([(queue, type)])) for queue, type in sorted(largest[:MAX_KINDS_SHOWN])]
    if rest := largest[MAX_KINDS_SHOWN:]:
        rows.append(("", f"{len(rest):,} more", together(rest)))
    rows.append(("", "all", together(largest)))
    columns = [Column("QUEUE", shrinks=True), Column("TYPE", shrinks=True),
               *(Column(status.upper(), right=True) for status in STATUSES)]
    cells = [[queue, type, *(f"{count:,}" for count in counts)] for queue, type, counts in rows]
    first = 0 if any(queue != DEFAULT_QUEUE for queue, _ in kinds) else 1
    yield from table(columns[first:], [row[first:] for row in cells], width)


def _windows(windows: Sequence[Window]) -> Iterator[list[str]]:
    """Yield the rows of a table with a column for each window."""
    if any(window.seconds < window.window_seconds for window in windows):
        yield ["only of the newest 10,000, in", *(span(round(window.seconds * 1_000)) for window in windows)]
    yield [COMPLETED, *(f"{window.completed:,}" for window in windows)]
    yield [FAILED, *(f"{window.failed:,}" + ("" if window.failure_rate is None else f", {window.failure_rate:.1%}")
                     for window in windows)]
    yield [CANCELED, *(f"{window.canceled:,}" for window in windows)]
    yield ["per second", *(f"{window.per_second:,.3g}" if window.per_second < 100 else f"{window.per_second:,.0f}"
                           for window in windows)]
    yield ["failed attempts", *(f"{window.failed_attempts:,}" for window in windows)]
    yield ["waited, p50 and p95", *(_percentiles(window.wait) for window in windows)]
    yield ["ran, p50 and p95", *(_percentiles(window.run) for window in windows)]


def _percentiles(times: Times) -> str:
    return "" if times.p50_ms is None or times.p95_ms is None else f"{span(times.p50_ms)}, {span(times.p95_ms)}"


def figures_as_dict(found: Figures) -> dict[str, object]:
    """Return figures for `--json`; durations in seconds."""
    total = dict.fromkeys(STATUSES, 0)
    for kind in found.kinds:
        total[kind.status] += kind.jobs
    oldest = [lane.oldest_ready_ms for lane in found.lanes if lane.oldest_ready_ms is not None]
    return {
        "statuses": total,
        **{name: sum(getattr(lane, name) for lane in found.lanes)
           for name in ("ready", "scheduled", "waiting", "blocked")},
        "oldest_ready_age_seconds": max(oldest) / 1_000 if oldest else None,
        "jobs": [{"queue": kind.queue, "type": kind.type, "status": kind.status, "count": kind.jobs}
                 for kind in found.kinds],
        "queues": [{"queue": lane.queue, "ready": lane.ready, "scheduled": lane.scheduled, "waiting": lane.waiting,
                    "blocked": lane.blocked, "oldest_ready_age_seconds": _seconds(lane.oldest_ready_ms)}
                   for lane in found.lanes],
        "windows": [{
            "window_seconds": window.window_seconds, "seconds": window.seconds, COMPLETED: window.completed,
            FAILED: window.failed, CANCELED: window.canceled, "failed_attempts": window.failed_attempts,
            "per_second": window.per_second, "failure_rate": window.failure_rate,
            "wait_seconds": _times_as_dict(window.wait), "run_seconds": _times_as_dict(window.run),
        } for window in found.windows],
        "failed_attempts": found.failed_attempts,
        "workers": [{
            "id": worker.id, "host": worker.host, "pid": worker.pid, "queues": worker.queues, "types": worker.types,
            "started_at": format_time(worker.started_at), "seen_at": format_time(worker.seen_at),
        } for worker in found.alive],
    }


def _times_as_dict(times: Times) -> dict[str, object]:
    return {"count": times.jobs, "sum": times.sum_ms / 1_000, "p50": _seconds(times.p50_ms),
            "p95": _seconds(times.p95_ms)}


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000
