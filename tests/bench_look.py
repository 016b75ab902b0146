"""Measures of looking into a large file, and of what each index costs those who store jobs."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

from jobqueue import Queue
from jobqueue.db import Store
from tests.bench_base import Bench, Failed, Figure, figure, timed
from tests.bench_files import BULK, RAW_INSERT, ask, fill, now_ms, raw
from tests.support import command

LIMIT_MS = 300
LISTS: tuple[tuple[str, ...], ...] = (
    (),
    *(("--status", status) for status in ("pending", "running", "retrying", "completed", "failed", "canceled")),
    ("--type", "sleep"),
    ("--type", "rare"),
    ("--type", "absent"),
    ("--queue", "default"),
    ("--queue", "rare"),
    ("--queue", "absent"),
    ("--status", "failed", "--type", "rare"),
    ("--status", "pending", "--queue", "absent"),
    ("--limit", "1000"),
)  # fmt: skip


def look(bench: Bench) -> list[Figure]:
    """8: every filter of `list`, and the looks of `Queue`, beyond what the start of a command takes."""
    count = bench.sizes.fixture
    with bench.file(("completed", 1)) as small, bench.file() as large:
        mix(large, count)
        figures = [*_lists(bench, small, large), *_calls(bench, large)]
    return [*figures, *_blocked(bench), *_index_costs(bench)]


def mix(path: Path, count: int) -> None:
    """Fill a file as a bad day would: what is rare is the oldest, half are waiting, the newest half completed."""
    share = count // 100
    for kind, part in (("running", min(100, share)), ("retrying", share), ("failed", share), ("canceled", share),
                       ("blocked", share), ("future", share)):  # fmt: skip
        fill(path, kind, part)
    for kind in ("waiting", "failed"):
        fill(path, kind, min(100, share), queue="rare", type="rare")
    connection = raw(path)
    rest = count - ask(connection, "SELECT count(*) FROM jobs")
    connection.close()
    fill(path, "waiting", rest // 2)
    fill(path, "completed", rest - rest // 2)


def _lists(bench: Bench, small: Path, large: Path) -> list[Figure]:
    """Time the commands on a large file less those on a small one."""
    figures = []
    starts = []
    for options in LISTS:
        on_small, on_large = (command("list", "--database", path, *options) for path in (small, large))
        beyond = []
        for _ in range(bench.sizes.runs):
            start = timed(lambda: bench.run(on_small))  # noqa: B023
            starts.append(start * 1e3)
            beyond.append((timed(lambda: bench.run(on_large)) - start) * 1e3)  # noqa: B023
        figures.append(figure(" ".join(("list", *options)), beyond, "ms", high=LIMIT_MS))
    return [figure("list on a file with one job, taken off below", starts, "ms"), *figures]


def _calls(bench: Bench, path: Path) -> list[Figure]:
    with Queue(path) as queue:
        newest = queue.list(limit=1)[0].id
        calls: tuple[tuple[str, Callable[[], object]], ...] = (
            ("Queue.get, oldest and newest", lambda: (queue.get("1"), queue.get(newest))),
            ("Queue.list(limit=100)", lambda: queue.list(limit=100)),
            ("Queue.list('failed', limit=100)", lambda: queue.list("failed", limit=100)),
            ("Queue.list('pending', limit=100)", lambda: queue.list("pending", limit=100)),
            ("Queue.list(type='absent')", lambda: queue.list(type="absent")),
            ("Queue.stats()", queue.stats),
            ("Queue.stats('default')", lambda: queue.stats("default")),
            ("Queue.stats('rare')", lambda: queue.stats("rare")),
        )
        return [figure(name, [timed(call) * 1e3 for _ in range(bench.sizes.runs)], "ms", high=LIMIT_MS)
                for name, call in calls]  # fmt: skip


def _blocked(bench: Bench) -> list[Figure]:
    """Find the blocked jobs of a file that holds many others, and ten times as many blocked ones."""
    more = max(10, bench.sizes.fixture // 10)
    less = more // 10
    ms: dict[int, list[float]] = {less: [], more: []}
    with bench.file(("completed", bench.sizes.fixture // 2), ("blocked", less)) as path:
        for count, of_these in ms.items():
            if count == more:
                fill(path, "blocked", more - less)
            with closing(Store(path)) as store:
                for _ in range(bench.sizes.runs):
                    begun = time.perf_counter()
                    found = len(store.blocked())
                    of_these.append((time.perf_counter() - begun) * 1e3)
                    if found != count:
                        raise Failed(f"{found:,} jobs are blocked, not {count:,}")
    each = median(ms[less]) / less
    return [figure(f"to find {more:,} blocked", ms[more], "ms", [took / more / each for took in ms[more]],
                   f"the time each of {less:,}", high=1.5)]  # fmt: skip


def _index_costs(bench: Bench) -> list[Figure]:
    """Leave one index out at a time: what CPU time of a bare bulk INSERT goes into it, for jobs ready at once."""
    count = bench.sizes.bulk
    costs: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for _ in range(bench.sizes.runs):
        whole = 0.0
        names = [""]  # none; then each
        while names:
            name = names.pop()
            with bench.file() as path:
                connection = raw(path)
                if name:
                    connection.execute(f"DROP INDEX {name}")
                begun = time.process_time()
                _insert_all(connection, count)
                seconds = time.process_time() - begun
                if name:
                    costs.setdefault(name, []).append((whole - seconds) * 1e6 / count)
                    shares.setdefault(name, []).append(1 - seconds / whole)
                else:
                    names, whole = _index_names(connection), seconds
                connection.close()
    return [figure(f"index {name}", cost, "us a job", shares[name], "a bulk INSERT's CPU")
            for name, cost in sorted(costs.items())]  # fmt: skip


def _index_names(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'jobs' "
                              "AND sql IS NOT NULL").fetchall()  # fmt: skip
    return [name for (name,) in rows]


def _insert_all(connection: sqlite3.Connection, count: int) -> None:
    now = now_ms()
    for first in range(1, count + 1, BULK):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(RAW_INSERT, [(str(number), now, now) for number in
                                            range(first, min(first + BULK, count + 1))])  # fmt: skip
        connection.execute("COMMIT")
