"""How a queue is doing, in numbers: counts, ages, rates and percentiles, as of one snapshot.

What it reads: the index `jobs_kinds` once, an entry for each job, for the counts; the partial
indexes of what is ready, scheduled and waiting; the dead jobs and the blocked ones behind them
(linear in their own number); and the rows of the newest 10,000 finished jobs of the last hour
and of the newest 10,000 failed attempts.  Only these last are rows; nothing is written.

Where more than 10,000 jobs ended in a window, its figures are those of the newest 10,000, and
`seconds` tells how much of the window these cover.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil
from typing import NamedTuple

from .catalogue import BLOCKED
from .explain import is_alive, workers
from .lifecycle import CANCELED, COMPLETED, FAILED
from .schema import IS_ANY, IS_FINISHED, IS_READY, IS_SCHEDULED, IS_WAITING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .db import Store
    from .explain import Worker

    Row = tuple[Any, ...]

WINDOWS_MS = (300_000, 3_600_000)
MAX_FINISHED = 10_000
MAX_FAILURES = 10_000
MAX_PARENTS = 100
"""So many dependencies of a finished job are asked when they ended."""

MAX_KINDS_APART = 1_000
"""So many kinds of jobs are counted one by one, in half the time that grouping a million entries takes."""

# Not `(queue, type, status) > (?, ?, ?)`: SQLite would read through all that are equal.
_NEXT_KIND = " UNION ALL ".join(
    f"SELECT * FROM (SELECT queue, type, status FROM jobs WHERE {IS_ANY} AND {above} ORDER BY {order} LIMIT 1)"
    for above, order in (("queue = :queue AND type = :type AND status > :status", "status"),
                         ("queue = :queue AND type > :type", "type, status"),
                         ("queue > :queue", "queue, type, status"))) + " LIMIT 1"
_COUNT_KIND = f"SELECT count(*) FROM jobs WHERE {IS_ANY} AND queue = :queue AND type = :type AND status = :status"
_KINDS = f"""SELECT queue, type, status, count(*) FROM jobs WHERE {IS_ANY} AND {{queue}}
             GROUP BY queue, type, status"""
# Ready jobs that are not due (the clock has stepped back) are scheduled; scheduled ones that are due are ready.
_READY = f"""SELECT queue, count(*), sum(run_at <= :now), min(run_at) FROM jobs
             WHERE {IS_READY} AND {{queue}} GROUP BY queue"""
_SCHEDULED = f"SELECT queue, count(*) FROM jobs WHERE {IS_SCHEDULED} AND {{queue}} GROUP BY queue"
_COME_DUE = f"SELECT count(*), min(run_at) FROM jobs WHERE {IS_SCHEDULED} AND queue = ? AND run_at <= ?"
_WAITING = f"SELECT queue, count(*) FROM jobs WHERE {IS_WAITING} AND {{queue}} GROUP BY queue"
_BLOCKED = BLOCKED + "SELECT queue, count(*) FROM blocked CROSS JOIN jobs USING (seq) WHERE {queue} GROUP BY queue"
# A clock that stepped back makes no job take less than nothing.
_ENDED = f"""
SELECT finished_at, queue, type, status,
       max(0, started_at - max(created_at, run_at, coalesce((
           SELECT max(finished_at) FROM (
               SELECT parent.finished_at FROM dependencies CROSS JOIN jobs AS parent ON parent.seq = depends_on
               WHERE job = jobs.seq LIMIT {MAX_PARENTS})), 0))),
       max(0, finished_at - started_at)
FROM jobs WHERE {IS_FINISHED} AND finished_at > :since AND finished_at <= :now AND {{queue}}
ORDER BY finished_at DESC LIMIT :limit"""
_FAILED_ATTEMPTS = "SELECT coalesce(max(rowid), 0) FROM failures"
_NEWEST_FAILURES = """
SELECT queue, ended_at FROM (SELECT job, ended_at FROM failures ORDER BY rowid DESC LIMIT :limit)
CROSS JOIN jobs ON seq = job WHERE {queue}"""


class Kind(NamedTuple):
    """How many jobs of a queue, type and status there are."""

    queue: str
    type: str
    status: str
    jobs: int


class Lane(NamedTuple):
    """What waits for a worker in one queue.

    Attributes:
        ready: could be claimed now.
        scheduled: not due yet.
        waiting: have dependencies that have not completed, but may.
        blocked: have some that never will.
        oldest_ready_ms: how long ago the ready job that was due first was due; None: none is ready.
    """

    queue: str
    ready: int
    scheduled: int
    waiting: int
    blocked: int
    oldest_ready_ms: int | None


class Times(NamedTuple):
    """How long jobs took: how many, the sum, the median and the 95th percentile, in ms; None: no job."""

    jobs: int
    sum_ms: int
    p50_ms: int | None
    p95_ms: int | None


class Window(NamedTuple):
    """What ended in the last so many seconds.

    Attributes:
        window_seconds: its length.
        seconds: what part of it the figures cover: all, unless more than 10,000 jobs ended in it.
        wait: of completed and failed jobs, from when the last attempt could have started (it was queued, due,
            and its dependencies had ended) to when it did; an operator's retry does not make it begin again.
        run: of the same, from the start of the last attempt to its end.
        failed_attempts: those among the newest 10,000.
    """

    window_seconds: float
    seconds: float
    completed: int
    failed: int
    canceled: int
    failed_attempts: int
    wait: Times
    run: Times

    @property
    def per_second(self) -> float:
        """Completed and failed jobs a second."""
        return (self.completed + self.failed) / self.seconds

    @property
    def failure_rate(self) -> float | None:
        """Which part of the completed and failed jobs failed, 0 to 1; None: there are none."""
        ended = self.completed + self.failed
        return self.failed / ended if ended else None


class Figures(NamedTuple):
    """All that `figures` finds.

    Attributes:
        failed_attempts: since the file was made, as far as the newest rows are kept; None: asked for one queue.
        windows: the last 5 minutes, the last hour.
        recent: (queue, type) -> (wait, run) of the last 5 minutes.
        alive: the workers seen within 150 s.
    """

    kinds: list[Kind]
    lanes: list[Lane]
    windows: list[Window]
    recent: dict[tuple[str, str], tuple[Times, Times]]
    failed_attempts: int | None
    alive: list[Worker]


def figures(store: Store, queue: str | None = None, *, now_ms: int) -> Figures:
    """Return the figures of one queue or (None) of the whole file; see the module for what is read."""
    condition = "TRUE" if queue is None else "queue = :queue"
    values = {"queue": queue, "now": now_ms}

    with store.snapshot():
        def ask(sql: str, **more: int) -> list[Row]:
            return store.sqlite.execute(sql.format(queue=condition), {**values, **more}).fetchall()

        kinds = _few_kinds(store, queue)
        if kinds is None:
            kinds = [Kind(*row) for row in ask(_KINDS)]
        scheduled = [(lane, count, *store.sqlite.execute(_COME_DUE, (lane, now_ms)).fetchall()[0])
                     for lane, count in ask(_SCHEDULED)]
        lanes = _lanes(ask(_READY), scheduled, ask(_WAITING), ask(_BLOCKED), now_ms)
        ended = ask(_ENDED, since=now_ms - max(WINDOWS_MS), limit=MAX_FINISHED)
        failures = [int(moment) for _, moment in ask(_NEWEST_FAILURES, limit=MAX_FAILURES)]
        total = store.sqlite.execute(_FAILED_ATTEMPTS).fetchall()[0][0] if queue is None else None
        alive = [worker for worker in workers(store) if is_alive(worker, now_ms)]
    windows = [_window(_within(ended, now_ms - length), failures, length, now_ms) for length in WINDOWS_MS]
    recent: dict[tuple[str, str], list[Row]] = {}
    for row in _within(ended, now_ms - WINDOWS_MS[0]):
        recent.setdefault((row[1], row[2]), []).append(row)
    times = {kind: _times_of(rows) for kind, rows in sorted(recent.items())}
    return Figures(kinds, lanes, windows, times, total, alive)


def _few_kinds(store: Store, queue: str | None) -> list[Kind] | None:
    """Count the jobs of each kind, jumping from one to the next; None: there are too many kinds for that."""
    ask = store.sqlite.execute
    kinds: list[Kind] = []
    last = {"queue": queue or "", "type": "", "status": ""}
    for _ in range(MAX_KINDS_APART + 1):
        found = ask(_NEXT_KIND, last).fetchall()
        if not found or queue not in (None, found[0][0]):
            return kinds
        last = dict(zip(last, found[0], strict=True))
        kinds.append(Kind(**last, jobs=ask(_COUNT_KIND, last).fetchall()[0][0]))
    return None


def _lanes(ready: list[Row], scheduled: list[Row], waiting: list[Row],
           blocked: list[Row], now_ms: int) -> list[Lane]:
    found: dict[str, dict[str, int]] = {}

    def lane(queue: object) -> dict[str, int]:
        return found.setdefault(str(queue), {"ready": 0, "scheduled": 0, "waiting": 0, "blocked": 0})

    for queue, count, due, first in [*ready, *scheduled]:
        entry = lane(queue)
        entry["ready"] += due
        entry["scheduled"] += count - due
        if due:
            entry["first"] = min(first, entry.get("first", first))
    for queue, count in waiting:
        lane(queue)["waiting"] += count
    for queue, count in blocked:
        lane(queue)["blocked"] = count
        lane(queue)["waiting"] -= count
    return [Lane(queue, entry["ready"], entry["scheduled"], entry["waiting"], entry["blocked"],
                 now_ms - entry["first"] if "first" in entry else None) for queue, entry in sorted(found.items())]


def _within(ended: list[Row], since_ms: int) -> list[Row]:
    """Return the first of the rows, which come newest first: those that ended after a moment."""
    return ended[:bisect_left(ended, -since_ms, key=lambda row: -row[0])]


def _window(ended: list[Row], failures: list[int], length_ms: int, now_ms: int) -> Window:
    covered_ms = length_ms
    if len(ended) == MAX_FINISHED:
        covered_ms = max(1, now_ms - ended[-1][0])
    statuses = [row[3] for row in ended]
    failed = sum(now_ms - length_ms < moment <= now_ms for moment in failures)
    wait, run = _times_of(ended)
    return Window(length_ms / 1_000, covered_ms / 1_000, statuses.count(COMPLETED), statuses.count(FAILED),
                  statuses.count(CANCELED), failed, wait, run)


def _times_of(ended: list[Row]) -> tuple[Times, Times]:
    """Return how long jobs waited and ran; canceled ones count in neither."""
    times = [(wait, run) for _, _, _, status, wait, run in ended if status != CANCELED and wait is not None]
    return _times([wait for wait, _ in times]), _times([run for _, run in times])


def _times(values: list[int]) -> Times:
    values.sort()

    def at(fraction: float) -> int | None:  # nearest rank: always one that was measured
        return values[ceil(fraction * len(values)) - 1] if values else None

    return Times(len(values), sum(values), at(0.5), at(0.95))
