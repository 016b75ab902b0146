"""The main of a child process: receive a job, run its handler, report, again.

    supervisor --work (one message a job)----------> child
               --stream (bodies, stop requests)----> child
    supervisor <-------------- reports (a pipe) ---- child
               --silent pipe, never written -------- child: hangs up when the supervisor dies

The next job is received only after the outcome of the one before was written, so at most
one job at a time is neither in the work socket nor reported.  Stop requests are only ever
looked at (MSG_PEEK) while a handler runs, which makes looking safe from its threads and from
the SIGTERM handler.  Never touches the database, never starts a job past its deadline.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import signal
import socket
import struct
import sys
import threading
import time

from . import handlers
from .errors import HandlerLoadError, InvalidJob
from .handlers import JobContext, Reject, Retry, Stopped
from .jobs import clean_error, encode_json, stored_value
from .tracebacks import describe, describe_in_full

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

MESSAGE_BYTES = 65_536
"""Size of the buffer a message of work is received in."""
LARGE_BYTES = 60_000
"""A message that would be longer says only how long its payload is; the body comes by the stream."""
EXIT = b"exit"
"""The message after which a child ends; shorter than any job's."""

DONE, ERROR, RETRY, REJECT, LATE, STOPPED = "done", "error", "retry", "reject", "late", "stopped"
"""Kinds of outcome: see `jobqueue.pool.Outcome`."""
READY, LOAD_ERROR, STARTED, PROGRESS, BODY = "ready", "load error", "started", "progress", "body"
"""Kinds of notice.  A notice is (serial, kind, value), an outcome (serial, kind, value, text, run_us)."""

LENGTH = struct.Struct("<I")
"""Stands before each report: the length of the marshalled tuple."""
CONTROL = struct.Struct("<qI")
"""Stands before what comes by the stream: serial and length of the body; length 0 is a stop request."""
LOADING = 0
"""The serial that stands for the loading of the handlers, in stop requests and reports."""
PROGRESS_SECONDS = 0.05
MAX_LATE_STOPS = 100
"""Stop requests for jobs that ended first stay in the stream; after so many the pool replaces the child."""


class InheritedFd:
    """A file descriptor on its way to a spawned process, where `fd` is valid too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # only the spawning side gets here

        return _inherit, (DupFd(self.fd),)


def _inherit(handle: Any) -> InheritedFd:
    return InheritedFd(handle.detach())


def main(
    work: socket.socket, stream: socket.socket, report: InheritedFd, silent: InheritedFd, specs: Sequence[str]
) -> None:
    """Load the handlers, then run jobs until told to exit; the target of a spawned process.

    SIGINT and SIGTERM must come in blocked.  Returns quietly also when the supervisor is gone.
    """
    for fd in (work.fileno(), stream.fileno(), report.fd, silent.fd):
        os.set_inheritable(fd, False)  # programs that handlers start get none of these
    os.register_at_fork(after_in_child=_be_ordinary)
    runner = _Runner(work, stream, report.fd)
    try:
        with work, stream:
            _watch_supervisor(silent.fd)
            if runner.load(specs):
                runner.serve()
    except (Stopped, OSError, EOFError):
        pass  # told to end, nobody is left to report to, or a handler has closed what is not its own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing left to protect, should ending take long
    _flush_quietly()


def _be_ordinary() -> None:
    """In a process that a handler forked: end by SIGTERM, as `multiprocessing` and everybody expects."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch_supervisor(silent_fd: int) -> None:
    """Arrange for this process to end when the supervisor does, by closing of the silent pipe."""
    if sys.platform != "linux":
        threading.Thread(target=_wait_for_hangup, args=(silent_fd,), daemon=True).start()
        return
    # SIGIO with its default action ends the process even while a handler holds the GIL.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(silent_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(silent_fd, fcntl.F_SETFL, os.O_NONBLOCK | fcntl.FASYNC)
    try:
        os.read(silent_fd, 1)
    except BlockingIOError:
        return
    raise EOFError  # it died before we were armed


def _wait_for_hangup(silent_fd: int) -> None:
    os.read(silent_fd, 1)
    os._exit(1)


def _flush_quietly() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            try:  # a reader that went away: nothing more to say, and no traceback about it
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if stream is sys.stdout else 2)
            except OSError:
                pass


class _Runner:
    """The state of one child.  Attributes are shared with its signal handler and handlers' threads.

    Attributes:
        serial: of the job being run; LOADING while handlers are loaded, -1 between jobs.
        armed: a stop request may raise `Stopped` now.
        term: SIGTERM came while not armed.
        raised: the serial of the job in which `Stopped` was raised by SIGTERM.
        asked: the serial that is known to have been asked to stop.
    """

    def __init__(self, work: socket.socket, stream: socket.socket, report_fd: int) -> None:
        self.work = work
        self.stream = stream
        self.report_fd = report_fd
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.serial = LOADING
        self.armed = False
        self.term = False
        self.raised = -1
        self.asked = -1
        self.context: JobContext | None = None
        self.lines: list[str] = []
        self.progress_due = 0.0
        self.progress_sent: tuple[float, str | None] | None = None
        self.progress_kept: tuple[float, str | None] | None = None

    # -- start ------------------------------------------------------------------------

    def load(self, specs: Sequence[str]) -> bool:
        """Take over the signals, load the handlers and say so; False: they could not be loaded."""
        signal.signal(signal.SIGINT, _ignore)  # not SIG_IGN, which programs it starts would inherit
        signal.signal(signal.SIGTERM, self._on_term)
        try:
            self.armed = True
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
            handlers.load(specs)
        except HandlerLoadError as error:
            self.armed = False
            self._report((LOADING, LOAD_ERROR, clean_error(error)))
            return False
        finally:
            self.armed = False
        # A module may have set its own handlers; these two are the pool's.
        signal.signal(signal.SIGINT, _ignore)
        signal.signal(signal.SIGTERM, self._on_term)
        self.serial = -1
        self._report((LOADING, READY, handlers.known_types()))
        return True

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        if not self.armed:
            self.term = True  # looked at when the next handler starts
        elif self.raised != self.serial and self._asked_to_stop():
            self.raised = self.serial  # once: the next SIGTERM must not disturb the handler's cleaning up
            raise Stopped

    # -- the loop ---------------------------------------------------------------------

    def serve(self) -> None:
        """Run jobs until the exit message, the end of the work socket, or a stopped handler."""
        receive = self.work.recv
        while True:
            message = receive(MESSAGE_BYTES)
            if len(message) <= len(EXIT):
                return
            if self._run(*marshal.loads(message)) is STOPPED:
                return

    def _run(
        self, serial: int, job_id: str, type: str, payload: str, attempt: int, max_attempts: int,
        trace: str | None, deadline: float, announce: bool, large_bytes: int,
    ) -> str:
        """Run one job and report its outcome; return the outcome's kind."""
        self.serial = serial
        if large_bytes:
            self._report((serial, BODY, None))
            payload = self._receive_body(serial)
        started = time.monotonic()
        if started >= deadline:
            self._finish(serial, LATE, None, 0)
            return LATE
        if announce:
            self._report((serial, STARTED, None))
        context = self.context = JobContext(
            job_id, type, attempt, max_attempts, trace, self._progress, self._stopping, self._emit
        )
        kind: str
        value: object
        try:
            kind, value = DONE, self._call(type, payload, context)
        except Stopped:
            kind, value = STOPPED, None
        except Retry as error:
            kind, value = RETRY, (error.after_ms, clean_error(error))
        except Reject as error:
            kind, value = REJECT, clean_error(error)
        except BaseException as error:  # SystemExit and the like end the attempt, not the child
            kind, value = ERROR, describe_in_full(error)
        if os.getpid() != self.pid:
            os._exit(0)  # a copy that the handler forked and that returned: not the one to report
        run_us = int((time.monotonic() - started) * 1e6)
        if value is not None and kind is DONE:
            kind, value = _encode(value)
        if self.asked == serial and kind in (DONE, ERROR):
            kind, value = STOPPED, value if kind is ERROR else None  # it was cut short, however it ended
        self._finish(serial, kind, value, run_us)
        return kind

    def _call(self, type: str, payload: str, context: JobContext) -> object:
        try:
            value = stored_value(payload)
        except InvalidJob as error:
            raise Reject(str(error)) from None
        try:
            self.armed = True
            if self.term or self.asked == self.serial:
                self.term = False  # it may have been meant for a job that had ended
                if self._asked_to_stop():
                    raise Stopped
            return handlers.call(type, value, context)
        finally:
            self.armed = False

    def _finish(self, serial: int, kind: str, value: object, run_us: int) -> None:
        self.context = None  # from here on, threads that the handler left behind report nothing
        text = None
        if self.lines:
            text = "".join(self.lines)
            self.lines = []
        if self.progress_kept is not None:
            self._report((serial, PROGRESS, self.progress_kept))
        self.progress_kept = self.progress_sent = None
        self.progress_due = 0.0
        self._report((serial, kind, value, text, run_us))
        self.serial = -1

    # -- channels ---------------------------------------------------------------------

    def _report(self, report: tuple[Any, ...]) -> None:
        body = marshal.dumps(report)
        data = LENGTH.pack(len(body)) + body
        with self.lock:
            written = os.write(self.report_fd, data)
            while written < len(data):
                written += os.write(self.report_fd, data[written:])

    def _receive_body(self, serial: int) -> str:
        while True:
            found, size = CONTROL.unpack(self._receive_exactly(CONTROL.size))
            if size:
                return self._receive_exactly(size).decode()
            self.asked = found  # matters if it is this job's; an earlier one's is forgotten

    def _receive_exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.stream.recv(size - len(parts), socket.MSG_WAITALL)
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _asked_to_stop(self) -> bool:
        """Look, without taking anything, whether the stream holds a stop request for this job."""
        if self.asked == self.serial:
            return True
        try:
            waiting = self.stream.recv(CONTROL.size * 2 * MAX_LATE_STOPS, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not waiting:
            return True  # the supervisor is gone
        whole = len(waiting) - len(waiting) % CONTROL.size
        for serial, _ in CONTROL.iter_unpack(waiting[:whole]):
            if serial == self.serial:
                self.asked = serial
                return True
        return False

    # -- what contexts call -----------------------------------------------------------

    def _stopping(self, context: JobContext) -> bool:
        return context is not self.context or self._asked_to_stop()

    def _emit(self, context: JobContext, line: str) -> None:
        if context is self.context:
            shown = line if line.isascii() else line.encode("utf-8", "backslashreplace").decode()
            self.lines.append(f"{shown}\n")

    def _progress(self, context: JobContext, fraction: float, note: str | None) -> None:
        now = time.monotonic()
        if context is not self.context or (fraction, note) == self.progress_sent:
            return
        if now < self.progress_due and fraction < 1.0:
            self.progress_kept = (fraction, note)  # goes out with the outcome, unless a later one does
            return
        self.progress_due = now + PROGRESS_SECONDS
        self.progress_kept = None
        self.progress_sent = (fraction, note)
        self._report((self.serial, PROGRESS, (fraction, note)))


def _encode(value: object) -> tuple[str, str]:
    try:
        return DONE, encode_json(value, "result")
    except InvalidJob as error:
        return ERROR, clean_error(error)
    except BaseException as error:  # a dict of the handler's own making can raise anything
        return ERROR, clean_error(f"result is not JSON: {describe(error)}")


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the supervisor decides when a child ends."""
