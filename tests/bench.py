"""How fast this machine queues, claims, drains and lists, beside what bare SQLite manages in the same run.

    python -m tests.bench [--quick | --full] [--only N ...] [--runs N] [--jobs N] [--json FILE]

Every figure is a median. Ratios are taken of pairs measured one right after the other, so that a machine that
slows down meanwhile hurts both sides; quote ratios, not absolute figures. Every commit is synchronous=FULL. The
measures are in `bench_enqueue`, `bench_work`, `bench_look` and `bench_far`; what they share is in `bench_base`. A
few minutes and, for the largest files, half a gigabyte under TMPDIR (measure 9: two). Exit status 1: a measure
could not be taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from tests import bench_enqueue, bench_far, bench_look, bench_work
from tests.bench_base import Bench, Failed, Figure, Sizes

MEASURES: dict[int, tuple[str, Callable[[Bench], list[Figure]]]] = {
    1: ("drain of no-op jobs, default settings", bench_work.drain),
    2: ("Queue.enqueue, one at a time", bench_enqueue.single),
    3: ("many at once", bench_enqueue.many),
    4: ("claim and complete through Queue, one at a time", bench_work.claims),
    5: ("an idle worker", bench_work.idle),
    6: ("one command, whole process", bench_enqueue.command_line),
    7: ("a worker with 4 children over a long time", bench_work.soak),
    8: ("looking into a large file; costs of indexes", bench_look.look),
    9: ("how far one file goes; only if asked for", bench_far.far),
}
UNUSUAL = {9}
NORMAL = Sizes()
FULL = NORMAL._replace(lines=(100_000, 1_000_000), quiet_seconds=65.0, soak=1_000_000, pairs=40, samples=400)
QUICK = Sizes(runs=1, drain=5_000, turns=2, slice=50, enqueuers=8, enqueue_seconds=0.5, backlog=20_000, bulk=10_000,
              lines=(5_000, 20_000), fixture=20_000, fan_out=5_000, samples=15, idle_seconds=2.0, pairs=4,
              soak=10_000, far=100_000)  # fmt: skip
COLUMNS = "{:<58} {:>12} {:<13} {}"


def measure(numbers: Sequence[int], sizes: Sizes, out: TextIO | None) -> dict[str, Any]:
    """Take measures and return all there is to tell; each is printed to `out`, if given, as soon as it is there."""
    results: dict[str, Any] = {}
    with Bench(sizes) as bench:
        facts = machine(bench)
        _print(out, *(f"{name}: {value}" for name, value in facts.items()))
        for number in numbers:
            title, take = MEASURES[number]
            begun = time.monotonic()
            _print(out, "", f"{number}  {title}")
            result: dict[str, Any] = {"title": title, "figures": []}
            try:
                for figure in take(bench):
                    _print(out, "   " + line(figure))
                    result["figures"].append(
                        {**figure._asdict(), "target": figure.target, "met": figure.met})
            except (Failed, OSError, subprocess.SubprocessError) as error:
                result["failed"] = f"{type(error).__name__}: {error}"
                _print(out, f"   failed: {error}")
            result["seconds"] = round(time.monotonic() - begun, 1)
            results[str(number)] = result
    return {"machine": facts, "sizes": sizes._asdict(), "measures": results}


def line(figure: Figure) -> str:
    """Return a figure as a line of the table."""
    remark = ""
    if figure.ratio is not None:
        remark = f"{figure.ratio:.2f} x {figure.versus}"
    if figure.target:
        verdict = {True: "reached", False: "MISSED", None: "not measured"}[figure.met]
        remark = f"{remark}  [{figure.target}: {verdict}]".strip()
    return COLUMNS.format(figure.name, number(figure.value), figure.unit, remark).rstrip()


def number(value: float | None) -> str:
    """Return a number with the digits that mean something."""
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.6f}"


def machine(bench: Bench) -> dict[str, str]:
    """Return what the figures depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"{os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "unknown"
    return {
        "machine": f"{_processor()}, {cores} cores, {platform.system()} {platform.release()}, load {load}",
        "python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "disk": f"{_file_system(str(bench.dir))}, {_syncs_per_second(bench):,.0f} fsync/s of 4 KiB each",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _file_system(path: str) -> str:
    """Return the kind of file system that holds `path`, as far as the machine tells."""
    found = ("", "an unknown file system")
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for mount in mounts:
                left, _, right = mount.partition(" - ")
                point = left.split(" ")[4].rstrip("/") + "/"
                if path.startswith(point) and len(point) >= len(found[0]):
                    found = (point, right.split(" ")[0])
    except OSError:
        pass
    return found[1]


def _syncs_per_second(bench: Bench) -> float:
    """Append blocks of 4 KiB and sync each, for a short while."""
    sync = getattr(os, "fdatasync", os.fsync)
    with open(bench.dir / "sync", "wb", buffering=0) as file:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < bench.sizes.sync_seconds:
            file.write(bytes(4_096))
            sync(file.fileno())
            count += 1
        return count / (time.perf_counter() - start)


def _print(out: TextIO | None, *lines: str) -> None:
    if out is not None:
        print(*lines, sep="\n", file=out, flush=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    measures = "\n".join(f"  {number}  {title}" for number, (title, _) in MEASURES.items())
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=description,
                                     epilog=f"measures:\n{measures}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a minute, tiny sizes: to see that all works")
    size.add_argument("--full", action="store_true", help="a million lines and jobs where it is fewer by default")
    parser.add_argument("--only", metavar="N", type=int, nargs="+", choices=sorted(MEASURES), help="these measures")
    parser.add_argument("--runs", metavar="N", type=int, help="of everything, interleaved (3; --quick: 1)")
    parser.add_argument("--jobs", metavar="N", type=int,
                        help="in the large files of measures 4 and 8 (1,000,000), 9 (10,000,000)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write all figures there; -: to stdout, and no table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = _options(argv)
    sizes = QUICK if options.quick else FULL if options.full else NORMAL
    if options.runs:
        sizes = sizes._replace(runs=options.runs)
    if options.jobs:
        sizes = sizes._replace(fixture=options.jobs, far=options.jobs)
    numbers = options.only or sorted(MEASURES.keys() - UNUSUAL)
    results = measure(numbers, sizes, None if options.json == "-" else sys.stdout)
    if options.json:
        text = json.dumps(results, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            with open(options.json, "w", encoding="utf-8") as file:
                file.write(text)
    return int(any("failed" in result for result in results["measures"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and files are cleaned up
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
