"""What the tests share: a temporary directory, the real command line, processes that never outlive a test.

`run` and `TempDirTestCase.start` drive `python -m jobqueue` as a person would; `until` waits for another
real process with a deadline; `FakeClock` stands in wherever time has to pass. Nothing here sleeps to let
time pass, and nothing opens a database file in this process other than through SQLite: closing such a
descriptor would drop the locks that SQLite holds here.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from jobqueue import Job, Queue

TOP = Path(__file__).resolve().parent.parent
_T = TypeVar("_T")


class FakeClock:
    """A clock that stands still until it is moved: call it for the time in ms since the epoch."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        """Move by `ms` milliseconds; a negative number steps the clock back."""
        self.now_ms += ms


class Process(subprocess.Popen[bytes]):
    """A started command whose output goes to files, so that it never waits for a reader."""

    stdout_path: Path
    stderr_path: Path

    def stdout_text(self) -> str:
        """Return what it has written to stdout so far (empty if stdout was redirected)."""
        return _decode(self.stdout_path.read_bytes())

    def stderr_text(self) -> str:
        """Return what it has written to stderr so far (empty if stderr was redirected)."""
        return _decode(self.stderr_path.read_bytes())

    def finish(self, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Wait for its end and return exit code and whole output; fail after `timeout` seconds."""
        try:
            code = self.wait(timeout)
        except subprocess.TimeoutExpired:
            message = f"still running after {timeout} s: {self.args!r}\n{self.stderr_text()}"
            raise AssertionError(message) from None
        return subprocess.CompletedProcess(self.args, code, self.stdout_text(), self.stderr_text())


class TempDirTestCase(unittest.TestCase):
    """A test with a directory of its own (`self.dir`) and a path for a database in it (`self.db`, not made).

    What the garbage collector or a thread complains of during the test fails it, so that under
    `-W error::ResourceWarning` a leaked connection, file or process is a failure and not a line on stderr.
    """

    dir: Path
    db: Path

    def setUp(self) -> None:
        super().setUp()
        self._watch_for_hidden_errors()
        directory = tempfile.TemporaryDirectory(prefix="jobqueue-test-")
        self.addCleanup(directory.cleanup)
        # Resolved: on macOS the temporary directory lies behind a symbolic link.
        self.dir = Path(directory.name).resolve()
        self.db = self.dir / "jobs.db"

    def start(
        self,
        *args: object,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> Process:
        """Start `python -m jobqueue ARGS` in a session of its own; it and its children end with the test.

        Signal the whole group, as Ctrl+C does, with `os.killpg(process.pid, signal.SIGINT)`.
        """
        return self.spawn(command(*args), env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)

    def spawn(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> Process:
        """Start any program as `start` does; `stdout`/`stderr` of None go to files, see `Process`."""
        paths = []
        for suffix in (".out", ".err"):
            handle, name = tempfile.mkstemp(suffix, "process-", self.dir)
            os.close(handle)
            paths.append(Path(name))
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = Process(
                argv,
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                env=environment(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.addCleanup(_end, process)
        process.stdout_path, process.stderr_path = paths
        return process

    def _watch_for_hidden_errors(self) -> None:
        seen: list[str] = []
        unraisable, in_thread = sys.unraisablehook, threading.excepthook

        def restore() -> None:
            if sys.warnoptions:
                gc.collect()  # a forgotten SQLite connection is part of a cycle
            sys.unraisablehook, threading.excepthook = unraisable, in_thread
            if seen:
                self.fail("errors that no test saw: " + "; ".join(seen))

        # Only text is kept: holding the exception would keep alive what is being destroyed.
        sys.unraisablehook = lambda args: seen.append(f"{args.exc_value!r} in {args.object!r}")
        threading.excepthook = lambda args: seen.append(f"{args.exc_value!r} in {args.thread!r}")
        self.addCleanup(restore)


class Event(NamedTuple):
    """A line of the trace that `tests/handlers_for_tests.py` writes."""

    what: str
    job: str
    attempt: int
    pid: int


class WorkerTestCase(TempDirTestCase):
    """A test with a queue (`self.queue`, in `self.db`) and real workers that have the handlers for tests.

    They run in `self.dir`, so that the names of gates and of the trace need no path.
    """

    HANDLERS = TOP / "tests" / "handlers_for_tests.py"
    queue: Queue

    def setUp(self) -> None:
        super().setUp()
        self.queue = self.make_queue(self.db)

    def make_queue(self, path: Path) -> Queue:
        """Create another queue and return it, open until the end of the test."""
        queue = Queue(path, create=True)
        self.addCleanup(queue.close)
        return queue

    def worker(self, *args: object, db: Path | None = None, **options: Any) -> Process:
        """Start a worker with one child and the handlers for tests; later arguments win."""
        own = ("--database", db or self.db, "--workers", 1, "--handlers", self.HANDLERS)
        return self.start("worker", *own, *args, cwd=self.dir, **options)

    def ready(self, worker: Process) -> Process:
        """Wait until a worker that logs at level info or below has all its children; return it."""
        until(lambda: " serves " in worker.stderr_text() or worker.poll() is not None, 30, "a worker to start")
        self.assertIsNone(worker.poll(), worker.stderr_text())
        return worker

    def drain(self, *args: object, db: Path | None = None, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a worker until nothing is due, expect exit 0, and return its output."""
        done = self.worker("--drain", *args, db=db).finish(timeout)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def job(self, id: str, queue: Queue | None = None) -> Job:
        """Return a job as it is in the file now."""
        job = (queue or self.queue).get(id)
        assert job is not None, f"no job {id}"
        return job

    def until_status(self, id: str, *statuses: str, timeout: float = 20, queue: Queue | None = None) -> Job:
        """Wait until a job has one of the statuses and return it."""
        until(lambda: self.job(id, queue).status in statuses, timeout, f"job {id} to be {' or '.join(statuses)}")
        return self.job(id, queue)

    def counts(self, queue: Queue | None = None) -> dict[str, int]:
        """Return how many jobs have each status, those with none left out."""
        statuses = ("pending", "running", "retrying", "completed", "failed", "canceled")
        counts = (queue or self.queue).stats()
        return {status: counts[status] for status in statuses if counts[status]}

    def until_counts(
        self, wanted: Mapping[str, int] | Callable[[dict[str, int]], bool], what: str, timeout: float = 20,
        queue: Queue | None = None,
    ) -> dict[str, int]:
        """Wait until the counts are those wanted, or satisfy a predicate; return them."""
        counts: dict[str, int] = {}

        def reached() -> bool:
            nonlocal counts
            counts = self.counts(queue)
            return wanted(counts) if callable(wanted) else counts == wanted

        until(reached, timeout, what, 0.005)
        return counts

    def trace(self, what: str | None = None) -> list[Event]:
        """Return what the handlers noted so far, all or only one kind of event."""
        path = self.dir / "trace"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        events = [Event(line[0], line[1], int(line[2]), int(line[3])) for line in lines if len(line) == 4]
        return [event for event in events if what in (None, event.what)]

    def until_started(self, *ids: str, timeout: float = 20) -> None:
        """Wait until handlers of the jobs have noted their start."""
        until(lambda: set(ids) <= {event.job for event in self.trace("start")}, timeout, f"the start of {ids}")

    def open_gate(self, name: str) -> None:
        """Let the jobs go on that wait for this file."""
        (self.dir / name).touch()

    def failures(self, id: str) -> list[tuple[Any, ...]]:
        """Return (attempt, reason, error) of the failed attempts of a job, oldest first."""
        return sql(self.db, "SELECT attempt, reason, error FROM failures WHERE job = "
                            "(SELECT seq FROM jobs WHERE id = ?) ORDER BY rowid", id)  # fmt: skip


def command(*args: object) -> list[str]:
    """Return the argument vector of `python -m jobqueue ARGS`."""
    return [sys.executable, "-m", "jobqueue", *(str(arg) for arg in args)]


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment fit for a command, with `changes` on top (None removes a name).

    The package is importable from any directory; settings of the person who runs the tests are left out.
    """
    env = dict(os.environ)
    for name in ("JOBQUEUE_DATABASE", "NO_COLOR", "PYTHONIOENCODING"):
        env.pop(name, None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TOP), env.get("PYTHONPATH"))))
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run(
    *args: object,
    input: str | bytes | None = None,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 30,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m jobqueue ARGS` to its end and return exit code, stdout and stderr.

    Without `input` there is nothing on stdin. Output is taken as it is: no newline is translated, and bytes
    that are not UTF-8 become lone surrogates. After `timeout` seconds the whole group is killed and the
    test fails.
    """
    argv = command(*args)
    given = input.encode("utf-8", "surrogateescape") if isinstance(input, str) else input
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(env),
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(given, timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            raise AssertionError(
                f"still running after {timeout} s: {shlex.join(argv)}\n{_decode(err)}"
            ) from None
        except BaseException:
            _kill(process)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, _decode(out), _decode(err))


def until(
    predicate: Callable[[], _T], timeout: float = 10, what: str = "the condition", interval: float = 0.01
) -> _T:
    """Ask `predicate` again until its answer is true and return that; fail after `timeout` seconds.

    This waits for other processes. Where only time has to pass, move a `FakeClock`.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout} s in vain for {what} (last answer: {answer!r})")
        time.sleep(interval)


def jobs(db: str | Path) -> list[dict[str, Any]]:
    """Return all jobs as `list --json` tells them, newest first."""
    done = run("list", "--database", db, "--json")
    if done.returncode != 0:
        raise AssertionError(f"list exited {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def sql(db: str | Path, query: str, *args: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query; the connection cannot write."""
    connection = sqlite3.connect(f"file:{quote(str(db))}?mode=ro", uri=True, timeout=10, isolation_level=None)
    try:
        return connection.execute(query, args).fetchall()
    finally:
        connection.close()


def file_bytes(path: str | Path) -> dict[str, bytes]:
    """Return name and content of a file and of all beside it whose names begin like it (`-wal`, `-shm`, ...).

    Equal before and after means: nothing changed, nothing was left there. Another program reads them, see
    the top of this module.
    """
    path = Path(path)
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(path.name))
    return {
        name: subprocess.run(["cat", "--", path.parent / name], capture_output=True, check=True).stdout
        for name in names
    }


@contextmanager
def locked(db: str | Path, timeout: float = 10) -> Iterator[bool]:
    """Hold the write lock of a file, as another program would; False: it was not to be had in `timeout` seconds."""
    connection = sqlite3.connect(db, timeout=timeout, isolation_level=None)
    try:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            yield False
            return
        yield True
        connection.execute("ROLLBACK")
    finally:
        connection.close()


class _Row(NamedTuple):
    """What the system tells of a process; the state is one letter."""

    parent: int
    group: int
    state: str


_GONE = _Row(0, 0, "Z")


def alive(pid: int) -> bool:
    """Say whether the process exists and runs; a zombie does not."""
    return _processes().get(pid, _GONE).state != "Z"


def members_of(group: int) -> list[int]:
    """Return the pids in a process group, zombies left out."""
    return sorted(pid for pid, row in _processes().items() if row.group == group and row.state != "Z")


def children_of(pid: int) -> list[int]:
    """Return the pids of its direct children, zombies left out, oldest number first."""
    return sorted(child for child, row in _processes().items() if row.parent == pid and row.state != "Z")


def zombies_of(pid: int) -> list[int]:
    """Return the pids of its direct children that ended and were not reaped."""
    return sorted(child for child, row in _processes().items() if row.parent == pid and row.state == "Z")


def _processes() -> dict[int, _Row]:
    """Return all processes by pid; X, about to vanish, counts as Z."""
    found = {}
    if Path("/proc/self/stat").exists():
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    line = Path("/proc", entry, "stat").read_text("utf-8", "replace")
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it ended since the directory was read
                # The name, in parentheses, may hold anything: look behind the last one.
                state, parent, group = line.rpartition(")")[2].split()[:3]
                found[int(entry)] = _Row(int(parent), int(group), state)
    else:
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,pgid=,state="], capture_output=True, text=True, check=True
        )
        for line in listing.stdout.splitlines():
            number, parent, group, state = line.split()[:4]
            found[int(number)] = _Row(int(parent), int(group), state[0])
    return {pid: row._replace(state="Z") if row.state == "X" else row for pid, row in found.items()}


def _descendants(pid: int) -> list[int]:
    processes = _processes()
    family, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        born = [child for child, row in processes.items() if row.parent == current]
        family += born
        waiting += born
    return family


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL it, all its descendants, and what else is in its group, also when it has ended already."""
    family = _descendants(process.pid) if process.poll() is None else []
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group is empty; macOS answers so when only zombies are left in it
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _end(process: Process) -> None:
    _kill(process)
    process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass  # unsent input of a process that is gone


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
