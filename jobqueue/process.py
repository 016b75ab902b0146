"""One child process as the supervisor sees it: its start, its channels, what is due next for it.

    work, back    the two ends of the socket that carries jobs; the child reads from `back` too, and
                  whoever receives a message first has it: so unstarted jobs can be taken back
    stream        large payloads and stop requests, on their way to the child
    reports       the pipe it reports through
    silent        never written; the child ends when it hangs up

Knows how to start and to let go of a process; what to do with it is `pool`'s.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from contextlib import ExitStack
from multiprocessing import get_context, resource_tracker

from . import child as wire
from .child import InheritedFd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from .jobs import Job

READ_BYTES = 65_536
NEVER = math.inf
NOTHING, TIMEOUT, TERM, KILL = range(4)
"""What is due next for a child: nothing, its job's timeout, SIGTERM, SIGKILL."""


class Stop:
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

    __slots__ = ("back", "dismissed", "due", "given", "handed", "kill_at", "late_stops", "load_error", "need",
                 "outbox", "partial", "pid", "process", "ready", "reports", "retiring", "send", "silent", "since",
                 "step", "stop", "stream", "timeouts", "watched", "work", "writing")

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
            _start_masked(self.process)
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
        self.late_stops = 0
        self.handed: dict[int, Job] = {}
        self.timeouts: dict[int, int] = {}
        self.since = 0.0
        self.arm(NOTHING, NEVER)
        self.stop: Stop | None = None
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
        """Set what is due next, and when."""
        self.step = step
        self.due = due
        if step == NOTHING:
            self.kill_at = NEVER

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


def _start_masked(process: SpawnProcess) -> None:
    """Start a process with SIGINT and SIGTERM blocked, for it to unblock when it can take them."""
    # The tracker first: when start() finds none it makes one, and unblocks both signals after that.
    resource_tracker.ensure_running()
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def describe_exit(exitcode: int) -> str:
    """Return how a process ended, as in `was killed by SIGSEGV`."""
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"
