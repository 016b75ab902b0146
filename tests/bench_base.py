"""What the measures of the benchmark share: sizes, figures, a directory with files, processes and their costs.

Every process that is started is ended, and the directory is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench_files import fill
from tests.support import children_of, command, environment

NO_OP = {"seconds": 0}
"""The payload of a `sleep` that returns at once."""


class Failed(Exception):
    """A measure could not be taken; the text says why."""


# -- sizes and figures ----------------------------------------------------------------


class Sizes(NamedTuple):
    """How much of everything; seconds where it says so, else numbers of jobs or turns."""

    runs: int = 3
    drain: int = 100_000
    turns: int = 5
    """Short alternating turns of the two sides of a ratio, in each run."""
    slice: int = 100
    """Jobs a turn."""
    enqueuers: int = 8
    enqueue_seconds: float = 3.0
    backlog: int = 300_000
    """What keeps a worker hot meanwhile."""
    bulk: int = 100_000
    lines: tuple[int, int] = (100_000, 300_000)
    fixture: int = 1_000_000
    fan_out: int = 100_000
    samples: int = 200
    idle_seconds: float = 10.0
    quiet_seconds: float = 0.0
    """Wait so long for the worker to become drowsy, and look at its CPU again; 0: do not."""
    pairs: int = 20
    """Commands whose whole process is timed."""
    sync_seconds: float = 0.5
    """For a look at the disk."""
    soak: int = 200_000
    far: int = 10_000_000


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        value: the median, in `unit`; None: not to be had on this machine.
        ratio: to what `versus` names, measured in the same run; None: there is nothing to compare with.
        low, high: what to reach, for the ratio where there is one, else for the value; None: no such bound.
        all: what the median was taken of.
    """

    name: str
    value: float | None
    unit: str
    ratio: float | None = None
    versus: str = ""
    low: float | None = None
    high: float | None = None
    all: Sequence[float] = ()

    @property
    def target(self) -> str:
        """Return what to reach, as text; empty if there is none."""
        bounds = [f"{sign} {bound:g}" for sign, bound in (("at least", self.low), ("at most", self.high))
                  if bound is not None]  # fmt: skip
        return " and ".join(bounds)

    @property
    def met(self) -> bool | None:
        """Return whether the target is reached; None if there is none, or nothing was measured."""
        measured = self.value if self.ratio is None else self.ratio
        if measured is None or not self.target:
            return None
        return (self.low is None or measured >= self.low) and (self.high is None or measured <= self.high)


def figure(name: str, values: Sequence[float], unit: str, ratios: Sequence[float] = (), versus: str = "", *,
           low: float | None = None, high: float | None = None) -> Figure:  # fmt: skip
    """Return the figure of repeated measurements: the medians of the values, and of the ratios taken in pairs."""
    ratio = statistics.median(ratios) if ratios else None
    return Figure(name, statistics.median(values), unit, ratio, versus, low, high, list(values))


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds `action` took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def alternate(turns: int, one: Callable[[], object], other: Callable[[], object]) -> list[tuple[float, float]]:
    """Run two actions by turns, either first as often; return the seconds each took, in pairs."""
    pairs = []
    for turn in range(turns):
        if turn % 2:
            seconds = timed(other)
            pairs.append((timed(one), seconds))
        else:
            seconds = timed(one)
            pairs.append((seconds, timed(other)))
    return pairs


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all (0 to 1) do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


# -- the machine's side ---------------------------------------------------------------


class Bench:
    """A temporary directory with a file that `init` made, and the processes that are started in it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def __enter__(self) -> Bench:
        self._directory = tempfile.TemporaryDirectory(prefix="jobqueue-bench-")
        self.dir = Path(self._directory.name).resolve()
        # Byte code is cached, as in real use, but not beside the sources.
        self.env = environment({"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(self.dir / "bytecode")})
        self._files = 0
        self._template = self.dir / "template.db"
        try:
            self.run(command("init", "--database", self._template))
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._directory.cleanup()

    @contextmanager
    def file(self, *kinds: tuple[str, int]) -> Iterator[Path]:
        """Yield a new file with so many jobs of each kind, one behind the other; it is deleted at the end."""
        self._files += 1
        directory = self.dir / f"file-{self._files}"
        directory.mkdir()
        path = directory / "jobs.db"
        try:
            shutil.copyfile(self._template, path)
            for kind, count in kinds:
                fill(path, kind, count)
            yield path
        finally:
            shutil.rmtree(directory)

    def run(self, argv: list[str], timeout: float = 600) -> None:
        """Run a program to its end without its output; `Failed` if it does not exit 0."""
        done = subprocess.run(argv, env=self.env, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=timeout, check=False)  # fmt: skip
        if done.returncode:
            raise Failed(f"{' '.join(argv[1:5])} ... exited {done.returncode}: {_last_line(done.stderr)}")

    def peak_rss(self, argv: list[str]) -> int:
        """Run a program to its end as `run` does; return the most memory it had resident, in bytes."""
        with (self.dir / "stderr").open("wb") as errors:
            process = subprocess.Popen(argv, env=self.env, cwd=self.dir, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=errors)  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            last = _last_line((self.dir / "stderr").read_bytes())
            raise Failed(f"{' '.join(argv[1:5])} ... exited {process.returncode}: {last}")
        return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def module(self, *args: object) -> subprocess.Popen[str]:
        """Start `python -m ARGS`, with pipes to its stdin and from its stdout; see `kill`."""
        return subprocess.Popen([sys.executable, "-m", *map(str, args)], env=self.env, cwd=self.dir, text=True,
                                start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    @contextmanager
    def worker(self, path: Path, children: int, *args: str) -> Iterator[Worker]:
        """Yield a worker with default settings; it is ended, if it still runs, and must then exit 0."""
        errors_path = path.with_suffix(".err")
        argv = command("worker", "--database", path, "--workers", children, *args)
        with errors_path.open("wb") as errors:
            process = subprocess.Popen(argv, env=self.env, cwd=self.dir, stdin=subprocess.DEVNULL, stderr=errors,
                                       stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        worker = Worker(process, errors_path)
        try:
            yield worker
            worker.end()
        finally:
            kill(process)


class Worker:
    """A worker that was started; its log goes to a file."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process = process
        self._errors = errors

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = 600,
                   pause: float = 0.005) -> None:  # fmt: skip
        """Look every `pause` seconds whether `condition` is true; `Failed` if the worker ends, or time does."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None  # before the look, as it may end right after reaching it
            if condition():
                return
            if ended:
                raise Failed(f"a worker exited {self.process.returncode}: {_last_line(self._errors.read_bytes())}")
            if time.monotonic() > deadline:
                raise Failed(f"waited {seconds:g} s in vain for {what}; {_last_line(self._errors.read_bytes())}")
            time.sleep(pause)

    def wait_ready(self) -> None:
        """Wait until all children have been started and have loaded their handlers."""
        self.wait_until(lambda: b" serves " in self._errors.read_bytes(), "a worker to be ready", 60)

    def end(self) -> None:
        """Ask it to stop, unless it has, and expect exit 0."""
        if self.process.poll() is None:
            self.process.terminate()
        if self.process.wait(60):
            raise Failed(f"a worker exited {self.process.returncode}: {_last_line(self._errors.read_bytes())}")

    def family(self) -> list[int]:
        """Return the pids of the supervisor and its children."""
        return [self.process.pid, *children_of(self.process.pid)]


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and all that is in it; nothing if it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def rss_bytes(pids: Sequence[int]) -> int | None:
    """Return the resident memory of processes, shared pages counted in each; None where /proc does not tell."""
    total = 0
    for pid in pids:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return None
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Return the CPU time that processes have used; None where /proc does not tell."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def written_bytes(pids: Sequence[int]) -> int | None:
    """Return how much processes have had written to disks; None where /proc does not tell."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        total += sum(int(line.partition(":")[2]) for line in lines if line.startswith("write_bytes"))
    return total


def _last_line(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
