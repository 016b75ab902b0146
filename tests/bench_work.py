"""Measures of working jobs off: whole workers, claims through `Queue`, an idle worker, a long run."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from pathlib import Path
from statistics import median

from jobqueue import Queue
from tests.bench_base import (
    NO_OP,
    Bench,
    Failed,
    Figure,
    Worker,
    alternate,
    cpu_seconds,
    figure,
    percentile,
    rss_bytes,
    timed,
    written_bytes,
)
from tests.bench_files import (
    HOUR_MS,
    RAW_BATCH,
    RAW_CLAIM,
    RAW_COMPLETE,
    ask,
    drained,
    fill,
    head,
    now_ms,
    raw,
    watch,
)

BACKLOGS = ("waiting", "completed", "future", "blocked", "other-queue")
SMALL_BACKLOG = 1_000


# -- 1: whole workers -----------------------------------------------------------------


def drain(bench: Bench) -> list[Figure]:
    """1: drain of no-op jobs by whole workers, beside a bare loop over batches."""
    bare: list[float] = []
    rates: dict[int, list[float]] = {2: [], 4: []}
    starts: list[float] = []
    for _ in range(bench.sizes.runs):
        bare.append(_raw_batches(bench))
        for children, of_these in rates.items():
            rate, start = _drain(bench, children)
            of_these.append(rate)
            starts.append(start)
    return [
        figure(f"raw-batch: claim {RAW_BATCH}, complete {RAW_BATCH}, commit", bare, "jobs/s"),
        *(figure(f"worker --workers {children}", of_these, "jobs/s",
                 [ours / raw_rate for ours, raw_rate in zip(of_these, bare, strict=True)], "raw-batch", low=0.4)
          for children, of_these in rates.items()),
        figure("- from its launch to the first completion", starts, "s"),
    ]  # fmt: skip


def _raw_batches(bench: Bench) -> float:
    """Return the jobs per second that one process reaches with nothing but the statements, a commit per batch."""
    count = bench.sizes.drain
    with bench.file(("waiting", count)) as path:
        connection = raw(path)
        execute, many = connection.execute, connection.executemany
        start = time.perf_counter()
        while True:
            execute("BEGIN IMMEDIATE")
            now = now_ms()
            rows = execute(RAW_CLAIM, (now + HOUR_MS, now, RAW_BATCH)).fetchall()
            many(RAW_COMPLETE, [(now, seq, token) for seq, _, token in rows])
            execute("COMMIT")
            if not rows:
                break
        seconds = time.perf_counter() - start
        _check_completed(connection, count)
        connection.close()
    return count / seconds


def _drain(bench: Bench, children: int) -> tuple[float, float]:
    """Return the jobs per second from the first completion to the last, and the seconds before the first."""
    count = bench.sizes.drain
    with bench.file(("waiting", count)) as path:
        connection = watch(path)
        try:
            launched = time.perf_counter()
            with bench.worker(path, children, "--drain") as worker:
                first = _wait_for_first(worker, connection)
                seen = ask(connection, "SELECT count(*) FROM jobs WHERE seq < ? AND status = 'completed'",
                           head(connection) or count + 1)  # fmt: skip
                start = time.perf_counter()
                worker.wait_until(lambda: drained(connection), "the queue to be empty", pause=0.002)
                end = time.perf_counter()
            _check_completed(connection, count)
        finally:
            connection.close()
    return (count - seen) / (end - start) if seen < count else count / (end - first), first - launched


def _wait_for_first(worker: Worker, connection: sqlite3.Connection) -> float:
    """Return when the first completion was seen."""
    finished = "SELECT status = 'completed' FROM jobs WHERE seq = 1"
    worker.wait_until(lambda: ask(connection, finished), "the first job to be completed", 60, pause=0.002)
    return time.perf_counter()


def _check_completed(connection: sqlite3.Connection, count: int) -> None:
    completed = ask(connection, "SELECT count(*) FROM jobs WHERE status = 'completed'")
    if completed != count:
        raise Failed(f"{completed:,} of {count:,} jobs were completed")


# -- 4: claims through Queue ----------------------------------------------------------


def claims(bench: Bench) -> list[Figure]:
    """4: `claim` and `complete` one at a time, and whether the rest of the file matters."""
    return [*_one_by_one(bench), *_beside_others(bench), *_fan_out(bench)]


def _raw_step(connection: sqlite3.Connection) -> None:
    now = now_ms()
    ((seq, _, token),) = connection.execute(RAW_CLAIM, (now + HOUR_MS, now, 1)).fetchall()
    connection.execute(RAW_COMPLETE, (now, seq, token))


def _step(queue: Queue) -> None:
    (job,) = queue.claim("bench")
    if not queue.complete(job.id, job.lease_token or ""):
        raise Failed("a lease was lost")


def _steps(queue: Queue, count: int) -> None:
    for _ in range(count):
        _step(queue)


def _one_by_one(bench: Bench) -> list[Figure]:
    size, turns = bench.sizes.slice, bench.sizes.runs * bench.sizes.turns
    enough = ("waiting", 3 * size * (turns + 1))
    with bench.file(enough) as bare, bench.file(enough) as ours, Queue(ours) as queue:
        connection = raw(bare)

        def by_hand() -> None:
            for _ in range(size):
                _raw_step(connection)

        def by_work() -> None:
            for n, task in enumerate(queue.work("bench"), 1):
                task.complete()
                if n == size:
                    break

        def in_one_commit() -> None:
            """Complete one and claim the next in a commit, by hand."""
            settle: tuple[int, str] | None = None
            for _ in range(size):
                connection.execute("BEGIN IMMEDIATE")
                now = now_ms()
                if settle is not None:
                    connection.execute(RAW_COMPLETE, (now, *settle))
                ((seq, _, token),) = connection.execute(RAW_CLAIM, (now + HOUR_MS, now, 1)).fetchall()
                connection.execute("COMMIT")
                settle = seq, token

        alternate(1, by_hand, lambda: _steps(queue, size))
        pairs = alternate(turns, by_hand, lambda: _steps(queue, size))
        works = alternate(turns, in_one_commit, by_work)
        connection.close()
    calls = figure("claim, complete", [size / ours for _, ours in pairs], "jobs/s",
                   [bare / ours for bare, ours in pairs], "the bare statements", low=0.75)  # fmt: skip
    rates = [size / ours for _, ours in works]
    return [
        figure("bare claim, commit, complete, commit", [size / bare for bare, _ in pairs], "jobs/s"),
        calls,
        figure("bare complete and claim, commit", [size / bare for bare, _ in works], "jobs/s"),
        figure("Queue.work", rates, "jobs/s", [bare / ours for bare, ours in works], "the bare statements"),
        figure("- the same beside claim, complete", rates, "jobs/s", [rate / (calls.value or 1) for rate in rates],
               "as many", low=1.6),  # "nearly twice"
    ]  # fmt: skip


def _beside_others(bench: Bench) -> list[Figure]:
    """Compare a file with few jobs waiting to one that holds very many more of some kind."""
    sizes = bench.sizes
    figures = []
    with bench.file(("waiting", SMALL_BACKLOG)) as small, Queue(small) as few:
        for kind in BACKLOGS:
            with bench.file((kind, sizes.fixture), ("waiting", SMALL_BACKLOG)) as large, Queue(large) as many:
                cpu: dict[Queue, float] = {few: 0.0, many: 0.0}

                def steps(queue: Queue, cpu: dict[Queue, float]) -> float:
                    begun = time.process_time()
                    seconds = timed(lambda: _steps(queue, sizes.slice))
                    cpu[queue] += time.process_time() - begun
                    queue.enqueue_many([{"type": "sleep", "payload": NO_OP}] * sizes.slice)  # as many as before
                    return seconds

                steps(few, {few: 0.0}), steps(many, {many: 0.0})
                pairs = []
                for turn in range(sizes.runs * sizes.turns):
                    seconds = {queue: steps(queue, cpu) for queue in ((few, many), (many, few))[turn % 2]}
                    pairs.append((seconds[few], seconds[many]))
            name = f"claim, complete beside {sizes.fixture:,} {kind}"
            figures.append(figure(name, [sizes.slice / more for _, more in pairs], "jobs/s",
                                  [more / less for less, more in pairs],
                                  f"the time beside {SMALL_BACKLOG:,} waiting", high=1.3))  # fmt: skip
            per_job = cpu[many] * 1e6 / sizes.slice / len(pairs)
            figures.append(Figure("- its CPU", per_job, "us", cpu[many] / cpu[few], f"{SMALL_BACKLOG:,} waiting",
                                  high=1.3))  # fmt: skip
    return figures


def _fan_out(bench: Bench) -> list[Figure]:
    """Complete a job that very many wait for, and one that a tenth as many do."""
    counts = (max(1, bench.sizes.fan_out // 10), bench.sizes.fan_out)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(bench.sizes.runs):
        for count in counts:
            with bench.file() as path:
                _one_parent(path, count)
                with Queue(path) as queue:
                    (parent,) = queue.claim("bench")
                    seconds = timed(lambda: queue.complete(parent.id, parent.lease_token or ""))  # noqa: B023
                    if queue.stats()["ready"] != count:
                        raise Failed("the dependents are not ready")
            rates[count].append(count / seconds)
    less, more = (rates[count] for count in counts)
    ratios = [slow / fast for slow, fast in zip(less, more, strict=True)]
    return [figure(f"{counts[1]:,} dependents freed at once", more, "jobs/s", ratios,
                   f"the time each of {counts[0]:,}", high=1.3)]  # fmt: skip


def _one_parent(path: Path, count: int) -> None:
    """Make a waiting job with so many dependents."""
    fill(path, "blocked", count)
    connection = raw(path)
    connection.execute("UPDATE jobs SET status = 'pending', ready = 1, attempts = 0, started_at = NULL, "
                       "finished_at = NULL, last_error = NULL WHERE seq = 1")  # fmt: skip
    connection.close()


# -- 5: an idle worker ----------------------------------------------------------------


def idle(bench: Bench) -> list[Figure]:
    """5: what an idle worker costs, and how soon it starts a new job."""
    sizes = bench.sizes
    with bench.file() as path, Queue(path) as queue, bench.worker(path, 2) as worker:
        worker.wait_ready()
        connection = watch(path)
        try:
            _latencies(queue, connection, 3)  # warm
            figures = [*_at_rest(worker, path, sizes.idle_seconds, "")]
            ms, enqueue_ms = _latencies(queue, connection, sizes.samples)
            if sizes.quiet_seconds:
                time.sleep(sizes.quiet_seconds)
                # Only its CPU: once a minute it notes in the file that it is alive.
                when = f" after {sizes.quiet_seconds:g} s of rest"
                figures += _at_rest(worker, path, sizes.idle_seconds, when)[:1]
                drowsy, _ = _latencies(queue, connection, 1)
                figures.append(figure("- start of the next job", drowsy, "ms"))
        finally:
            connection.close()
    return [
        Figure("start of a new job, p50", median(ms), "ms", high=6, all=ms),
        Figure("- p99", percentile(ms, 0.99), "ms", high=20),
        figure("- of which the enqueue itself, p50", enqueue_ms, "ms"),
        *figures,
    ]


def _latencies(queue: Queue, connection: sqlite3.Connection, samples: int) -> tuple[list[float], list[float]]:
    """Enqueue one job at a time, at odd moments; return when each was seen to start, and was stored, in ms.

    The start is seen by polling the row, so it is the claim's commit, up to 0.2 ms late.
    """
    moments = random.Random(1)
    starts, stores = [], []
    for _ in range(samples):
        time.sleep(moments.uniform(0.03, 0.13))
        begun = time.perf_counter()
        job_id = queue.enqueue("sleep", NO_OP)
        stores.append((time.perf_counter() - begun) * 1e3)
        while not ask(connection, "SELECT status <> 'pending' FROM jobs WHERE id = ?", job_id):
            if time.perf_counter() - begun > 20:
                raise Failed(f"job {job_id} did not start within 20 s")
            time.sleep(0.0002)
        starts.append((time.perf_counter() - begun) * 1e3)
    return starts, stores


def _at_rest(worker: Worker, path: Path, seconds: float, when: str) -> list[Figure]:
    """Look at a worker that has nothing to do for so long."""
    time.sleep(0.2)
    pids = worker.family()
    files, written, cpu = _state(path), written_bytes(pids), cpu_seconds(pids)
    start = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    changed = float(_state(path) != files)
    cpu_after, written_after = cpu_seconds(pids), written_bytes(pids)
    used = None if cpu is None or cpu_after is None else 100 * (cpu_after - cpu) / passed
    bytes_written = None if written is None or written_after is None else float(written_after - written)
    return [
        Figure("CPU of an idle worker" + when, used, "% of a core", high=1),
        Figure("- written to disk meanwhile", bytes_written, "bytes", high=0),
        Figure("- files changed meanwhile", changed, "", high=0),
    ]


def _state(path: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last change of the file and its log; -shm is memory, not a record."""
    return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in path.parent.iterdir()
                  if entry.name in (path.name, path.name + "-wal"))  # fmt: skip


# -- 7: a worker over a long time -----------------------------------------------------


def soak(bench: Bench) -> list[Figure]:
    """7: memory, log and file of a worker with 4 children over very many jobs."""
    count = bench.sizes.soak
    with bench.file(("waiting", count)) as path:
        before = path.stat().st_size
        connection = watch(path)
        try:
            with bench.worker(path, 4, "--drain") as worker:
                _wait_for_first(worker, connection)
                samples, wal = _sample(worker, connection, path, count)
            _check_completed(connection, count)
        finally:
            connection.close()
        connection = raw(path)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
        after = path.stat().st_size
    alive = [sample for sample in samples if None not in sample] or samples[:1]
    warm = next((sample for sample in alive if sample[0] >= count / 10), alive[0])
    last = alive[-1]
    figures = []
    for place, name in ((1, "supervisor"), (2, "supervisor and 4 children")):
        then, now = warm[place], last[place]
        if then is not None and now is not None:
            figures.append(Figure(f"memory of {name} after {last[0]:,} jobs", now / 1e6, "MB", now / then,
                                  f"that after {warm[0]:,}", high=1.1))  # fmt: skip
    return [
        *figures,
        Figure("-wal at its largest", wal / 1e6, "MB", high=64),
        Figure("the file, jobs waiting", before / count, "bytes a job"),
        Figure("- jobs completed", after / count, "bytes a job"),
    ]


def _sample(worker: Worker, connection: sqlite3.Connection, path: Path,
            count: int) -> tuple[list[tuple[int, int | None, int | None]], int]:  # fmt: skip
    """Watch a drain; return (jobs claimed, memory of the supervisor, of all) now and then, and the largest log."""
    samples: list[tuple[int, int | None, int | None]] = []
    largest = 0
    pids = worker.family()
    pause = min(0.25, count / 1e6)
    due = 0.0

    def look() -> bool:
        nonlocal largest, due
        largest = max(largest, os.stat(f"{path}-wal").st_size)
        next_one = head(connection)
        if time.monotonic() >= due:
            samples.append((next_one - 1 if next_one else count, rss_bytes(pids[:1]), rss_bytes(pids)))
            due = time.monotonic() + pause
        return not next_one and drained(connection)

    worker.wait_until(look, "the queue to be empty", 3_600)
    return samples, largest
