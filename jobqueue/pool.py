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
import os
import signal
import socket
import time
from functools import partial
from marshal import dumps, loads
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from . import child as wire
from .child import ERROR, EXIT, LOADING, STOPPED
from .errors import HandlerLoadError, JobQueueError
from .events import LoadFailed, Outcome, Progress, Returned, Started
from .process import KILL, NEVER, NOTHING, READ_BYTES, TERM, TIMEOUT, Child, Stop, describe_exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

    from .events import Event
    from .jobs import Job

MAX_REPORT_BYTES = 64 * 1024 * 1024
"""Longer than any report; what claims to be longer is not one."""
ENDING = "the worker is ending"
"""The reason of what `close` and `kill_all` stop."""
TERM_AGAIN_SECONDS = 0.2
RESPAWN_FIRST_SECONDS = 0.1
RESPAWN_CAP_SECONDS = 5.0


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
        self._start_error: JobQueueError | None = None
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
            HandlerLoadError: a child could not load them, or exited while it did.
            JobQueueError: a child was killed meanwhile.
        """
        while not stop():
            if self._start_error is not None:
                raise self._start_error
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
        except OSError:
            pass  # full: it will wake anyway; or closed: nobody polls any more

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
            child.stop = Stop(serial, kind, reason)
            self._send_stream(child, wire.CONTROL.pack(serial, 0))
        elif child.step != TERM or child.due <= now + grace:
            return  # an earlier stop is ahead of this one
        child.arm(TERM, now + grace)
        if grace <= 0:
            self._take_step(child)

    # -- polling ----------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `poll` has something to do by itself; None: never."""
        due = min((child.due for child in self.children), default=NEVER)
        if len(self.children) < self.size and not self._closing:
            due = min(due, self._respawn_at)
        return None if due == NEVER else due

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
                self._failed_start(JobQueueError(f"a child could not be started: {error}"))

    def _take_step(self, child: Child) -> None:
        """Do what is due for a child, and set what is due next."""
        now = self._clock()
        if child.step == TIMEOUT:
            serial = next(iter(child.handed))
            self._read_all(child)  # which may end it, and start the next one's time
            job = child.handed.get(serial)
            if job is not None:
                seconds = child.timeouts[serial] / 1_000
                self._stop(child, ERROR, f"timed out after {seconds:g} s", 0.0, job)
        elif child.step == TERM:
            if child.stop is None and child.handed:  # on its way out, and still at work
                self._stop(child, STOPPED, ENDING, 0.0)
                return
            # Again and again, as a signal that comes just before a handler goes to sleep wakes nobody.
            child.process.terminate()
            child.kill_at = min(child.kill_at, now + self._kill_seconds)
            again = now + TERM_AGAIN_SECONDS
            child.arm(*(TERM, again) if again < child.kill_at else (KILL, child.kill_at))
        else:
            child.process.kill()
            child.arm(NOTHING, NEVER)

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
            if child.step == NOTHING or child.step == TIMEOUT:
                # It has ended, or a handler closed its descriptors: nothing can be heard from it.
                child.arm(KILL, self._clock() + self._kill_seconds)
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
                if stop - position > MAX_REPORT_BYTES:
                    raise ValueError("no report is that long")
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
            if child.step == TIMEOUT:
                child.arm(NOTHING, NEVER)
        elif stop.serial == serial:
            if kind == STOPPED:
                kind, value = stop.kind, stop.reason
                child.retiring = child.dismissed = True  # such a child ends by itself
                child.arm(KILL, self._clock() + self._kill_seconds)
            else:
                child.stop = None
                child.arm(NOTHING, NEVER)
                child.late_stops += 1
                if child.late_stops >= wire.MAX_LATE_STOPS:
                    child.retiring = True
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
            if child.stop is None and not child.dismissed:
                child.arm(TIMEOUT, now + child.timeouts[serial] / 1_000)
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
        if child.step != KILL:
            due = self._clock() + self._term_seconds
            child.arm(TERM, min(due, child.due) if child.step == TERM else due)

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
        end = f"child {child.pid} " + describe_exit(exitcode)
        for job in child.handed.values():  # at most one: the one it was running
            kind, reason = (child.stop.kind, child.stop.reason) if child.stop else (ERROR, end)
            self._events.append(Outcome(job, kind, reason, None, int((self._clock() - child.since) * 1e6)))
        self._unwatch(child)
        if child.writing:
            self.selector.unregister(child.stream)
        self.children.remove(child)
        child.close()
        if not child.ready and not self._closing:
            what = child.load_error or f"{end} while it loaded the handlers"
            self._failed_start(HandlerLoadError(what) if exitcode >= 0 else JobQueueError(what))

    def _failed_start(self, error: JobQueueError) -> None:
        pause = min(RESPAWN_CAP_SECONDS, RESPAWN_FIRST_SECONDS * 2 ** min(self._failures, 20))
        self._failures += 1
        self._respawn_at = self._clock() + pause
        if self._up:
            self._events.append(LoadFailed(str(error)))
        else:
            self._start_error = error

    def close(self, hurry: Callable[[], bool] = lambda: False) -> list[Event]:
        """End all children: by message, by SIGTERM, by SIGKILL; return the events on the way.

        What was not started comes back as `Returned`; what runs on is STOPPED.  Also while children
        still start, and again without effect.

        Args:
            hurry: asked at each wake-up; once true, SIGKILL comes at once.
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
        return self._wait_for_ends(self._term_seconds + self._kill_seconds + 5.0, hurry)

    def kill_all(self) -> list[Event]:
        """End all children with SIGKILL at once; what they were running is STOPPED."""
        if self._closed:
            return []
        self._closing = True
        self._kill_children()
        return self._wait_for_ends(5.0, lambda: False)

    def _kill_children(self) -> None:
        for child in self.children:
            self._stop(child, STOPPED, ENDING, NEVER)
            child.process.kill()
            child.arm(NOTHING, NEVER)

    def _wait_for_ends(self, seconds: float, hurry: Callable[[], bool]) -> list[Event]:
        events: list[Event] = []
        until = self._clock() + seconds
        while self.children and self._clock() < until:
            if hurry():
                self._kill_children()
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
