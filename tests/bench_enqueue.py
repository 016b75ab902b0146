"""Measures of putting jobs in: one at a time, many at once, from the command line.

Run as a program (`python -m tests.bench_enqueue PATH SECONDS`) it is one of the processes that enqueue at the
same time: it says `ready`, waits for a line, enqueues, and prints its waits.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Thread

from jobqueue import Queue
from tests.bench_base import NO_OP, Bench, Failed, Figure, alternate, figure, kill, percentile, timed
from tests.bench_files import BULK, RAW_INSERT, ask, now_ms, raw, watch
from tests.support import command

LINE = '{"type":"sleep","payload":{"seconds":0}}\n'


def _rows(first: int, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield the values of `RAW_INSERT` for jobs with numbers from `first` on."""
    now = now_ms()
    return ((str(number), now, now) for number in range(first, first + count))


def single(bench: Bench) -> list[Figure]:
    """2: `Queue.enqueue` one at a time, and by many threads and processes at once."""
    sizes = bench.sizes
    size = sizes.slice
    with bench.file() as bare, bench.file() as ours, Queue(ours) as queue:
        connection = raw(bare)
        stored = 0

        def insert() -> None:
            nonlocal stored
            for row in _rows(stored + 1, size):
                connection.execute(RAW_INSERT, row)
            stored += size

        def enqueue() -> None:
            for _ in range(size):
                queue.enqueue("sleep", NO_OP)

        alternate(1, insert, enqueue)  # the first of anything is slower
        pairs = alternate(sizes.runs * sizes.turns, insert, enqueue)
        connection.close()
        raw_figure = figure("bare one-row INSERT", [size / bare for bare, _ in pairs], "jobs/s")
        alone = figure("Queue.enqueue", [size / ours for _, ours in pairs], "jobs/s",
                       [ours / bare for bare, ours in pairs], "the time of the INSERT", high=1.3)  # fmt: skip
        waits = [_by_threads(queue, sizes.enqueuers, sizes.enqueue_seconds) for _ in range(sizes.runs)]
    figures = [raw_figure, alone]
    one = alone.value or 0.0
    rates = [len(run) / sizes.enqueue_seconds for run in waits]
    figures.append(figure(f"{sizes.enqueuers} threads, one Queue", rates, "jobs/s", [rate / one for rate in rates],
                          "one thread", low=1))  # fmt: skip
    figures.append(figure("- worst wait", [max(run) for run in waits], "s", high=1))
    for hot in (False, True):
        runs = [_by_processes(bench, hot) for _ in range(sizes.runs)]
        rates = [len(run) / sizes.enqueue_seconds for run in runs]
        name = f"{sizes.enqueuers} processes" + (", and a hot worker" if hot else "")
        figures.append(figure(name, rates, "jobs/s", [rate / one for rate in rates], "one process"))
        figures.append(figure("- p99 wait", [percentile(run, 0.99) for run in runs], "s"))
        figures.append(figure("- worst wait", [max(run) for run in runs], "s", high=1))
    return figures


def _enqueue_for(queue: Queue, seconds: float) -> list[float]:
    """Enqueue one by one for so long; return how long each took."""
    waits = []
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        queue.enqueue("sleep", NO_OP)
        begun, now = now, time.perf_counter()
        waits.append(now - begun)
    return waits


def _by_threads(queue: Queue, count: int, seconds: float) -> list[float]:
    waits: list[float] = []
    barrier = Barrier(count)

    def enqueue() -> None:
        barrier.wait(60)
        waits.extend(_enqueue_for(queue, seconds))

    threads = [Thread(target=enqueue) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


def _by_processes(bench: Bench, hot: bool) -> list[float]:
    """Return the waits of processes that enqueue at the same time, with or without a worker that never rests."""
    sizes = bench.sizes
    with ExitStack() as stack:
        path = stack.enter_context(bench.file(("waiting", sizes.backlog if hot else 0)))
        processes = []
        for _ in range(sizes.enqueuers):
            process = bench.module("tests.bench_enqueue", path, sizes.enqueue_seconds)
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise Failed("a process that should enqueue did not start")
        if hot:
            worker = stack.enter_context(bench.worker(path, 2))
            connection = watch(path)
            stack.callback(connection.close)
            finished = "SELECT EXISTS (SELECT 1 FROM jobs WHERE seq < 100 AND status = 'completed')"
            worker.wait_until(lambda: ask(connection, finished), "the first job to be completed", 60)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        waits: list[float] = []
        for process in processes:
            out, _ = process.communicate(timeout=sizes.enqueue_seconds + 60)
            if process.returncode:
                raise Failed(f"a process that should enqueue exited {process.returncode}")
            waits += json.loads(out)
        return waits


def _end(process: subprocess.Popen[str]) -> None:
    kill(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def many(bench: Bench) -> list[Figure]:
    """3: `enqueue_many`, and `enqueue --file` with its memory."""
    sizes = bench.sizes
    call = min(BULK, sizes.bulk)
    with bench.file() as bare, bench.file() as ours, Queue(ours) as queue:
        connection = raw(bare)
        stored = 0

        def insert() -> None:
            nonlocal stored
            for _ in range(sizes.bulk // call):
                _insert(connection, stored + 1, call)
                stored += call

        def enqueue() -> None:
            for _ in range(sizes.bulk // call):
                queue.enqueue_many([{"type": "sleep", "payload": NO_OP} for _ in range(call)])

        pairs = alternate(sizes.runs, insert, enqueue)
        connection.close()
    figures = [
        figure(f"bare bulk INSERT, {call:,} a commit", [sizes.bulk / bare for bare, _ in pairs], "jobs/s"),
        figure(f"enqueue_many, {call:,} a call", [sizes.bulk / ours for _, ours in pairs], "jobs/s",
               [bare / ours for bare, ours in pairs], "the bare bulk INSERT", low=0.385),  # 150,000 of 390,000
    ]  # fmt: skip
    return figures + _from_files(bench)


def _insert(connection: sqlite3.Connection, first: int, count: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(RAW_INSERT, _rows(first, count))
    connection.execute("COMMIT")


def _from_files(bench: Bench) -> list[Figure]:
    figures, peaks = [], []
    for count in bench.sizes.lines:
        lines = bench.dir / f"{count}.jsonl"
        lines.write_text(LINE * count)
        bare_rates, rates, ratios, memory = [], [], [], []
        small = count == min(bench.sizes.lines)
        for _ in range(bench.sizes.runs if small else 1):
            with bench.file() as path:
                connection = raw(path)
                bare = timed(lambda: _insert(connection, 1, count))  # noqa: B023
                connection.close()
            with bench.file() as path:
                start = time.perf_counter()
                memory.append(bench.peak_rss(command("enqueue", "--database", path, "--file", lines)))
                ours = time.perf_counter() - start
            bare_rates.append(count / bare)
            rates.append(count / ours)
            ratios.append(bare / ours)
        lines.unlink()
        peaks.append(statistics.median(memory) / 1e6)
        figures.append(figure(f"bare INSERT of {count:,}, one commit", bare_rates, "jobs/s"))
        figures.append(figure(f"enqueue --file, {count:,} lines", rates, "jobs/s", ratios, "the bare INSERT",
                              low=0.256))  # fmt: skip  # 100,000 of 390,000
        figures.append(figure("- most memory", [peak / 1e6 for peak in memory], "MB"))
    small_lines, large_lines = bench.sizes.lines
    figures.append(Figure(f"- memory, {large_lines:,} lines", peaks[1], "MB", peaks[1] / peaks[0],
                          f"{small_lines:,} lines", high=1.1))  # fmt: skip
    return figures


def command_line(bench: Bench) -> list[Figure]:
    """6: one `enqueue` command, whole process, with the file closed and with it open in another process."""
    with bench.file() as path:
        start = [sys.executable, "-c", "import argparse, json, sqlite3"]
        enqueue = command("enqueue", "--database", path, "--type", "sleep", "--payload", json.dumps(NO_OP))

        def measured() -> list[tuple[float, float]]:
            alternate(1, lambda: bench.run(start), lambda: bench.run(enqueue))  # compiles byte code
            return alternate(bench.sizes.pairs, lambda: bench.run(start), lambda: bench.run(enqueue))

        pairs = measured()
        figures = [figure("python -c 'import argparse, json, sqlite3'", [bare * 1e3 for bare, _ in pairs], "ms"),
                   _command_figure("one enqueue command", pairs)]  # fmt: skip
        with Queue(path):
            figures.append(_command_figure("- while another process has the file open", measured()))
    return figures


def _command_figure(name: str, pairs: list[tuple[float, float]]) -> Figure:
    return figure(name, [ours * 1e3 for _, ours in pairs], "ms", [ours / bare for bare, ours in pairs],
                  "those imports", high=1.7)  # fmt: skip


def _main(path: Path, seconds: float) -> None:
    with Queue(path, patience_seconds=60) as queue:
        queue.enqueue("sleep", NO_OP)
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(_enqueue_for(queue, seconds)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
