"""The supervisor's side of the child processes: start, feed, watch, stop, replace.

    pool = Pool(4, ["my.handlers"])
    pool.start()
    pool.wait_ready(lambda: False)
    pool.give(pool.idle()[0], job, deadline, None)
    events = pool.poll(1.0)

A job that was given ends in exactly one of: an `Outcome`, a place in a `Returned`, a place in
what `take_back` returns; whatever happens to its child.  Children hold messages of work in a
socket whose receiving end the pool keeps too, so unstarted jobs can be taken back while a
handler holds the GIL or the child is stopped: the kernel gives each message to one reader.

The pool belongs to the main thread of the supervisor.  It sets a handler for SIGCHLD and the
wake-up descriptor of `signal`, and restores both in `close`; SIGINT and SIGTERM are its owner's,
whose handlers end a `poll` early.  It never touches the database, never decides which job runs,
never waits for a child that does not answer.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import socket
import time
from contextlib import ExitStack
from functools import partial
from marshal import dumps, loads
from multiprocessing import get_context, resource_tracker
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from . import child as wire
from .child import DONE, ERROR, EXIT, LATE, LOADING, REJECT, RETRY, STOPPED, InheritedFd
from .errors import HandlerLoadError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnProcess
    from types import FrameType
    from typing import Any

    from .jobs import Job

__all__ = ["DONE", "ERROR", "LATE", "REJECT", "RETRY", "STOPPED", "Child", "LoadFailed", "Outcome", "Pool",
           "Progress", "Returned", "Started"]

READ_BYTES = 65_536
RESPAWN_FIRST_SECONDS = 0.1
RESPAWN_CAP_SECONDS = 5.0
_NEVER = math.inf
_NOTHING, _TIMEOUT, _TERM, _KILL = range(4)
"""What is due next for a child: nothing, its job's timeout, SIGTERM, SIGKILL."""


# -- events ---------------------------------------------------------------------------

class Outcome:
    """A job has ended.

    Attributes:
        kind, value: DONE: the result as JSON text, or None.  ERROR, REJECT: the error's text.
            RETRY: (delay in ms or None, text).  LATE: None, it was not started, its deadline had passed.
            STOPPED: the reason given to `stop_job` or `close`.
        text: what to print on stdout, whole lines with their line ends; None: nothing.
        run_us: run time of the handler in microseconds.
    """

    __slots__ = ("job", "kind", "run_us", "text", "value")

    def __init__(self, job: Job, kind: str, value: Any, text: str | None, run_us: int) -> None:
        self.job = job
        self.kind = kind
        self.value = value
        self.text = text
        self.run_us = run_us

    def __repr__(self) -> str:
        return f"<Outcome {self.job.id} {self.kind} {self.value!r:.80}>"


class Started:
    """The handler of a job with a timeout starts now."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job = job


class Progress:
    """A handler reported its progress: 0 to 1, and a note or None."""

    __slots__ = ("fraction", "job", "note")

    def __init__(self, job: Job, fraction: float, note: str | None) -> None:
        self.job = job
        self.fraction = fraction
        self.note = note


class Returned:
    """Jobs that were given and never started, back from a child that died or is being stopped."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs


class LoadFailed:
    """A replacement ended before it was ready; the next one is tried after a pause."""

    __slots__ = ("error",)

    def __init__(self, error: str) -> None:
        self.error = error


if TYPE_CHECKING:
    Event = Outcome | Started | Progress | Returned | LoadFailed


class _Stop:
    """A stop asked of a child: the serial of the job concerned, and how its end is to be told."""

    __slots__ = ("kind", "reason", "serial")

    def __init__(self, serial: int, kind: str, reason: str) -> None:
        self.serial = serial
        self.kind = kind
        self.reason = reason


class Child:
    """One child process as the pool sees it; for others to read, not to change.

    Attributes:
        pid: of the process; for people.
        ready: it has loaded its handlers.
        retiring: it is given nothing more, and will be replaced.
        handed: the jobs given and not ended, by serial, oldest first.
        since: monotonic time since when, at the earliest, the oldest of them has been running.
    """

    __slots__ = ("back", "dismissed", "due", "given", "handed", "load_error", "need", "outbox", "partial",
                 "pid", "process", "ready", "reports", "retiring", "send", "silent", "since", "step", "stop",
                 "stream", "timeouts", "watched", "work", "writing")

    def __init__(self, handlers: tuple[str, ...]) -> None:
        """Start a process that loads `handlers`; OSError: the system has no room for it."""
        with ExitStack() as undo:
            self.work, self.back = (undo.enter_context(end) for end in _message_pair())
            self.stream, far_stream = (undo.enter_context(end) for end in socket.socketpair())
            self.reports, far_reports = _pipe(undo)
            far_silent, self.silent = _pipe(undo)
            self.process = get_context("spawn").Process(
                target=wire.main, name="jobqueue-child",
                args=(self.back, far_stream, InheritedFd(far_reports), InheritedFd(far_silent), handlers),
            )
            _start(self.process)
            undo.pop_all()
        far_stream.close()
        os.close(far_reports)
        os.close(far_silent)
        # Not `back`: its flags are those of the child's end, which has to block.
        self.work.setblocking(False)
        self.stream.setblocking(False)
        os.set_blocking(self.reports, False)
        self.pid = self.process.pid or 0
        self.send = self.work.send
        self.ready = False
        self.load_error: str | None = None
        self.retiring = False
        self.dismissed = False  # the exit message is on its way
        self.given = 0
        self.handed: dict[int, Job] = {}
        self.timeouts: dict[int, int] = {}
        self.since = 0.0
        self.step = _NOTHING
        self.due = _NEVER
        self.stop: _Stop | None = None
        self.partial = bytearray()  # the beginning of a report
        self.need = 0  # how long it must become
        self.outbox = bytearray()  # what the stream did not take yet
        self.writing = False
        self.watched = True

    @property
    def open(self) -> bool:
        """Whether jobs may be given to it."""
        return self.ready and not self.retiring and self.stop is None

    def arm(self, step: int, due: float) -> None:
        self.step = step
        self.due = due

    def close(self) -> None:
        """Let go of a process that has ended."""
        self.work.close()
        self.back.close()
        self.stream.close()
        os.close(self.reports)
        os.close(self.silent)
        self.process.join()
        self.process.close()


def _message_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # macOS
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * READ_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * READ_BYTES)
        return ends


def _pipe(undo: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


def _start(process: SpawnProcess) -> None:
    """Start a process with SIGINT and SIGTERM blocked, for it to unblock when it can take them."""
    # The tracker first: when start() finds none it makes one, and unblocks both signals after that.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


# -- the pool -------------------------------------------------------------------------

class Pool:
    """A fixed number of child processes that run jobs; see the module for what it promises.

    Args:
        size: number of children.
        handlers: modules they load, as for `jobqueue.handlers.load`.
        max_jobs_per_child: a child is replaced after so many; None: never.
        term_seconds: how long a child that was told to exit may linger before SIGTERM.
        kill_seconds: how long it may linger after SIGTERM before SIGKILL.
        clock: monotonic seconds, the same clock as `time.monotonic` where deadlines are concerned.

    Attributes:
        children: those alive, in no order that means anything.
        types: the types the children know; empty before the first is ready.
        selector: the one `poll` waits on.  Others may register descriptors, with a callable
            without arguments as `data`, which `poll` calls when the descriptor is ready.
    """

    def __init__(
        self, size: int, handlers: Sequence[str] = (), *, max_jobs_per_child: int | None = None,
        term_seconds: float = 1.0, kill_seconds: float = 2.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self.children: list[Child] = []
        self.types: tuple[str, ...] = ()
        self.selector = DefaultSelector()
        self._handlers = tuple(handlers)
        self._max_jobs = max_jobs_per_child
        self._term_seconds = term_seconds
        self._kill_seconds = kill_seconds
        self._clock = clock
        self._serial = LOADING
        self._events: list[Event] = []
        self._child_died = False
        self._load_error: str | None = None
        self._failures = 0  # replacements in a row that ended before they were ready
        self._respawn_at = 0.0
        self._up = False  # all have been ready once
        self._closing = False
        self._closed = False
        self._wake_end, self._wake_send = socket.socketpair()
        self._wake_end.setblocking(False)
        self._wake_send.setblocking(False)
        self.selector.register(self._wake_end, EVENT_READ, self._drain_wake)
        self._old_sigchld: Any = None
        self._old_wakeup_fd = -1

    # -- start ------------------------------------------------------------------------

    def start(self) -> None:
        """Start all children; they load their handlers meanwhile.

        Raises:
            OSError: the system has no room for that many; none is left behind.
            ValueError: not called in the main thread.
        """
        self._old_sigchld = signal.signal(signal.SIGCHLD, self._on_sigchld)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._wake_send.fileno(), warn_on_full_buffer=False)
        atexit.register(self.kill_all)  # runs before multiprocessing's own, which waits for children
        try:
            for _ in range(self.size):
                self._spawn()
        except BaseException:
            self.kill_all()
            raise

    def wait_ready(self, stop: Callable[[], bool]) -> bool:
        """Wait until every child has loaded its handlers; False: `stop` returned true before.

        Raises:
            HandlerLoadError: a child could not load them, or ended while it did.
        """
        while not stop():
            if self._load_error is not None:
                raise HandlerLoadError(self._load_error)
            if len(self.children) == self.size and all(child.ready for child in self.children):
                self._up = True
                return True
            self._events = self.poll(1.0)
        return False

    def _spawn(self) -> None:
        child = Child(self._handlers)
        self.children.append(child)
        self.selector.register(child.reports, EVENT_READ, partial(self._read, child))

    def _on_sigchld(self, signum: int, frame: FrameType | None) -> None:
        self._child_died = True

    def _drain_wake(self) -> None:
        try:
            self._wake_end.recv(4_096)
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """End a `poll` early; safe from any thread."""
        try:
            self._wake_send.send(b"\0")
        except BlockingIOError:
            pass  # full: it will wake anyway

    # -- giving and taking back -------------------------------------------------------

    def idle(self) -> list[Child]:
        """Return the children that are ready and have nothing to do."""
        return [child for child in self.children if not child.handed and child.open]

    def give(self, child: Child, job: Job, deadline: float, timeout_ms: int | None) -> bool:
        """Hand a job to a child; it starts when those given before have ended.

        Args:
            deadline: monotonic time from which on it must not be started.
            timeout_ms: how long its handler may run; None: as long as it wants.

        Returns:
            False: not given, as the child takes no more now, or is busy and the job too large to wait.
        """
        if not child.open:
            return False
        serial = self._serial = self._serial + 1
        fields = (job.attempts, job.max_attempts, job.trace, deadline, timeout_ms is not None)
        message = dumps((serial, job.id, job.type, job.payload_json, *fields, 0))
        if len(message) > wire.LARGE_BYTES:
            if child.handed:
                return False
            message = dumps((serial, job.id, job.type, "", *fields, 1))
        try:
            child.send(message)
        except BlockingIOError:
            return False
        if not child.handed:
            child.since = self._clock()
        child.handed[serial] = job
        if timeout_ms is not None:
            child.timeouts[serial] = timeout_ms
        if self._max_jobs is not None:
            child.given += 1
            child.retiring = child.given >= self._max_jobs
        return True

    def take_back(self, child: Child) -> list[Job]:
        """Return the jobs that were given to a child and that it has not received; it will not start them."""
        jobs = []
        while True:
            try:
                message = child.back.recv(wire.MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if message == EXIT:
                child.send(EXIT)
                break  # nothing is ever sent after it
            serial = loads(message)[0]
            child.timeouts.pop(serial, None)
            jobs.append(child.handed.pop(serial))
        self._dismiss_if_done(child)
        return jobs

    def running_since(self, child: Child) -> float | None:
        """Return the monotonic time since when the oldest job given has been running; None: there is none."""
        return child.since if child.handed else None

    def stop_job(self, job: Job, reason: str, *, grace: float) -> bool:
        """Have a running job end: `context.stopping` at once, SIGTERM after `grace` seconds, then SIGKILL.

        Unless it ends otherwise first, its outcome is STOPPED with `reason`.  What waits behind it, or
        the job itself if it was not started, comes back as `Returned`.

        Returns:
            False: no child has the job; it has ended.
        """
        for child in self.children:
            if job in child.handed.values():
                self._read_all(child)
                self._stop(child, STOPPED, reason, grace, job)
                return True
        return False

    def _stop(self, child: Child, kind: str, reason: str, grace: float, job: Job | None = None) -> None:
        """Take back what is not started and stop what runs, if that is `job` or `job` is None."""
        jobs = self.take_back(child)
        if jobs:
            self._events.append(Returned(jobs))
        if not child.handed:
            return
        serial = next(reversed(child.handed))  # any before it have ended, their reports are under way
        if job is not None and child.handed[serial] is not job:
            return
        now = self._clock()
        if child.stop is None:
            child.stop = _Stop(serial, kind, reason)
            self._send_stream(child, wire.CONTROL.pack(serial, 0))
        elif child.step != _TERM or child.due <= now + grace:
            return  # an earlier stop is ahead of this one
        child.arm(_TERM, now + grace)
        if grace <= 0:
            self._take_step(child)

    # -- polling ----------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `poll` has something to do by itself; None: never."""
        due = min((child.due for child in self.children), default=_NEVER)
        if len(self.children) < self.size and not self._closing:
            due = min(due, self._respawn_at)
        return None if due == _NEVER else due

    def poll(self, timeout: float) -> list[Event]:
        """Wait for reports, signals or timers, at most `timeout` seconds; return what happened, oldest first.

        Enforces timeouts, ends and replaces children on the way.
        """
        due = self.next_deadline()
        if self._events or self._child_died:
            timeout = 0.0
        elif due is not None:
            timeout = max(0.0, min(timeout, due - self._clock()))
        for key, _ in self.selector.select(timeout):
            key.data()
        if self._child_died:
            self._child_died = False
            self._reap()
        due = self.next_deadline()
        if due is not None:
            now = self._clock()
            if due <= now:
                self._run_timers(now)
        events, self._events = self._events, []
        return events

    def _run_timers(self, now: float) -> None:
        for child in self.children:
            if child.due <= now:
                self._take_step(child)
        while len(self.children) < self.size and not self._closing and self._respawn_at <= now:
            try:
                self._spawn()
            except OSError as error:
                self._failed_start(f"a child could not be started: {error}")

    def _take_step(self, child: Child) -> None:
        """Do what is due for a child, and set what is due next."""
        now = self._clock()
        if child.step == _TIMEOUT:
            serial = next(iter(child.handed))
            self._read_all(child)  # which may end it, and start the next one's time
            job = child.handed.get(serial)
            if job is not None:
                seconds = child.timeouts[serial] / 1_000
                self._stop(child, ERROR, f"timed out after {seconds:g} s", 0.0, job)
        elif child.step == _TERM:
            if child.stop is None and child.handed:  # on its way out, and still at work
                self._stop(child, STOPPED, "the worker is ending", 0.0)
                return
            child.process.terminate()
            child.arm(_KILL, now + self._kill_seconds)
        else:
            child.process.kill()
            child.arm(_NOTHING, _NEVER)

    # -- reports ----------------------------------------------------------------------

    def _read_all(self, child: Child) -> None:
        while child.watched and self._read(child):
            pass

    def _read(self, child: Child) -> bool:
        """Read once from a child's reports; False: there was nothing."""
        try:
            data = os.read(child.reports, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._unwatch(child)
            if child.step == _NOTHING or child.step == _TIMEOUT:
                # It has ended, or a handler closed its descriptors: nothing can be heard from it.
                child.arm(_KILL, self._clock() + self._kill_seconds)
            return False
        if child.partial:
            child.partial += data
            if len(child.partial) < child.need:
                return True
            data = bytes(child.partial)
            child.partial = bytearray()
        try:
            self._parse(child, data)
        except (ValueError, EOFError, TypeError):
            self._unwatch(child)  # somebody else wrote into the pipe
            child.process.kill()
        return True

    def _unwatch(self, child: Child) -> None:
        if child.watched:
            child.watched = False
            self.selector.unregister(child.reports)

    def _parse(self, child: Child, data: bytes) -> None:
        now = self._clock()
        handed, timeouts, append = child.handed, child.timeouts, self._events.append
        unpack = wire.LENGTH.unpack_from
        position, end = 0, len(data)
        while position + 4 <= end:
            stop = position + 4 + unpack(data, position)[0]
            if stop > end:
                child.need = stop - position
                break
            report = loads(data[position + 4:stop])
            position = stop
            if len(report) == 3:
                self._notice(child, now, *report)
                continue
            serial, kind, value, text, run_us = report
            job = handed.pop(serial, None)
            if job is None:
                continue
            child.since = now
            if timeouts:
                timeouts.pop(serial, None)
            if child.step or child.retiring:
                kind, value = self._ended(child, serial, kind, value)
            append(Outcome(job, kind, value, text, run_us))
        else:
            child.need = 4
        if position < end:
            child.partial += data[position:]

    def _ended(self, child: Child, serial: int, kind: str, value: Any) -> tuple[str, Any]:
        """Return kind and value of the outcome of a job whose child has a timer or is retiring."""
        stop = child.stop
        if stop is None:
            if child.step == _TIMEOUT:
                child.arm(_NOTHING, _NEVER)
        elif stop.serial == serial:
            if kind == STOPPED:
                kind, value = stop.kind, stop.reason
                child.retiring = child.dismissed = True  # such a child ends by itself
                child.arm(_KILL, self._clock() + self._kill_seconds)
            else:
                child.stop = None
                child.arm(_NOTHING, _NEVER)
        self._dismiss_if_done(child)
        return kind, value

    def _notice(self, child: Child, now: float, serial: int, kind: str, value: Any) -> None:
        if kind == wire.READY:
            child.ready = True
            self.types = value
            self._failures = 0
            return
        if kind == wire.LOAD_ERROR:
            child.load_error = value
            return
        job = child.handed.get(serial)
        if job is None:
            return
        if kind == wire.STARTED:
            if child.stop is None:
                child.arm(_TIMEOUT, now + child.timeouts[serial] / 1_000)
            self._events.append(Started(job))
        elif kind == wire.PROGRESS:
            self._events.append(Progress(job, *value))
        elif kind == wire.BODY:
            body = job.payload_json.encode()
            self._send_stream(child, wire.CONTROL.pack(serial, len(body)) + body)

    def _send_stream(self, child: Child, data: bytes) -> None:
        child.outbox += data
        if not child.writing:
            self._flush(child)

    def _flush(self, child: Child) -> None:
        try:
            sent = child.stream.send(child.outbox)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has ended, which is noticed elsewhere
            sent = len(child.outbox)
        del child.outbox[:sent]
        if child.outbox and not child.writing:
            self.selector.register(child.stream, EVENT_WRITE, partial(self._flush, child))
        elif child.writing and not child.outbox:
            self.selector.unregister(child.stream)
        child.writing = bool(child.outbox)

    # -- ends -------------------------------------------------------------------------

    def _dismiss_if_done(self, child: Child) -> None:
        if child.retiring and not child.handed and not child.dismissed:
            self._dismiss(child)

    def _dismiss(self, child: Child) -> None:
        child.retiring = child.dismissed = True
        try:
            child.send(EXIT)
        except BlockingIOError:
            pass  # TERM will do
        child.arm(_TERM, self._clock() + self._term_seconds)

    def _reap(self) -> None:
        for child in list(self.children):
            if child.process.exitcode is not None:
                self._bury(child, child.process.exitcode)

    def _bury(self, child: Child, exitcode: int) -> None:
        """Account for all jobs of a child that has ended, let go of it, and have it replaced."""
        self._read_all(child)
        jobs = self.take_back(child)
        if jobs:
            self._events.append(Returned(jobs))
        end = f"child {child.pid} " + _describe_exit(exitcode)
        for job in child.handed.values():  # at most one: the one it was running
            kind, reason = (child.stop.kind, child.stop.reason) if child.stop else (ERROR, end)
            self._events.append(Outcome(job, kind, reason, None, int((self._clock() - child.since) * 1e6)))
        self._unwatch(child)
        if child.writing:
            self.selector.unregister(child.stream)
        self.children.remove(child)
        child.close()
        if not child.ready and not self._closing:
            self._failed_start(child.load_error or f"{end} while it loaded the handlers")

    def _failed_start(self, error: str) -> None:
        pause = min(RESPAWN_CAP_SECONDS, RESPAWN_FIRST_SECONDS * 2 ** min(self._failures, 20))
        self._failures += 1
        self._respawn_at = self._clock() + pause
        if self._up:
            self._events.append(LoadFailed(error))
        else:
            self._load_error = error

    def close(self) -> list[Event]:
        """End all children: by message, by SIGTERM, by SIGKILL; return the events on the way.

        What was not started comes back as `Returned`; what runs on is STOPPED.  Also while children
        still start, and again without effect.
        """
        if self._closed:
            return []
        self._closing = True
        for child in self.children:
            self._read_all(child)
            jobs = self.take_back(child)
            if jobs:
                self._events.append(Returned(jobs))
            if not child.dismissed:
                self._dismiss(child)
            if not child.ready:  # it is loading: ask it to leave that
                self._send_stream(child, wire.CONTROL.pack(LOADING, 0))
                self._take_step(child)
        return self._wait_for_ends(self._term_seconds + self._kill_seconds + 5.0)

    def kill_all(self) -> list[Event]:
        """End all children with SIGKILL at once; what they were running is STOPPED."""
        if self._closed:
            return []
        self._closing = True
        for child in self.children:
            self._stop(child, STOPPED, "the worker is ending", _NEVER)
            child.process.kill()
            child.arm(_NOTHING, _NEVER)
        return self._wait_for_ends(5.0)

    def _wait_for_ends(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        until = self._clock() + seconds
        while self.children and self._clock() < until:
            events += self.poll(0.5)
            self._child_died = True  # look again, should the signal have gone to somebody else's handler
        events += self._events
        self._events = []
        if self._old_sigchld is not None:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            signal.signal(signal.SIGCHLD, self._old_sigchld)
        atexit.unregister(self.kill_all)
        self.selector.close()
        self._wake_end.close()
        self._wake_send.close()
        self._closed = True
        return events


def _describe_exit(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"
