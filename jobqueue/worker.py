"""The supervisor of `jobqueue worker`: claim, dispatch, heartbeat, settle, drain.

Only this process touches the file; children run the handlers (see `pool`).  The loop is

    wait for reports, signals, the next timer or another process's commit
    one turn, one transaction: settle, hand back, extend leases, recover, promote, claim
    after the commit: write the log, hand the claimed jobs to the children

A turn that cannot be committed (the file is locked, the disk is full) is tried again with
everything it had to say; children and timers go on meanwhile.  An outcome is forgotten
only when it is in the file, or its lease is gone.

While jobs are short a child is handed several at a time, so that commits and messages are
shared; as soon as one is not, what waits behind it is taken back and goes to a free child
or back to the file.  Nothing here decides what a failure means (see `lifecycle`) or how
rows change (see `leases`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from heapq import heapify, heapreplace

from .db import Store
from .errors import DatabaseError
from .leases import RECOVER_CHUNK
from .log import Log
from .output import Writer
from .pool import DONE, ERROR, REJECT, RETRY, LoadFailed, Outcome, Pool, Progress, Returned
from .text import UNSAFE, escape
from .times import now_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from .jobs import Job
    from .pool import Child, Event

DEEPEST = 64
"""Most jobs that a child holds at a time."""
SHORT_SECONDS = 0.01
"""A child is handed so many jobs that they take about this long; one that runs longer is not waited for."""
LOOK_SECONDS = 0.004
"""How often an idle worker looks for commits of others; a look costs about 5 us."""
RELAXED_LOOK_SECONDS = 0.006
"""The same after a quiet minute."""
QUIET_SECONDS = 60.0
PATIENCE_SECONDS = 0.1
"""How long one try of a turn waits for the write lock: children and timers must be served meanwhile."""
TROUBLE_PAUSE_SECONDS = 0.05
LAST_WORDS_SECONDS = 5.0
"""How long a worker that ends goes on trying to give its jobs back."""
SEEN_SECONDS = 60.0
FILE_LOOK_SECONDS = 1.0
MAX_UNPRINTED = 1_000
"""With so many jobs waiting for their line to be printed, no more are claimed."""
LARGE_WAL_BYTES = 64_000_000
EXIT_REPLACED = 1


def run(path: str, *, workers: int, lease_seconds: float, drain: bool, grace_seconds: float,
        handlers: Sequence[str], queues: Sequence[str], default_timeout_ms: int | None = None,
        max_jobs_per_child: int | None = None, log_format: str = "text", log_level: str = "info") -> int:
    """Run jobs until told to stop, or with `drain` until nothing is due; return the exit code.

    To be called in the main thread: it takes over SIGINT and SIGTERM while it runs.

    Args:
        workers: child processes.
        lease_seconds: how long a lease lasts; it is extended every third of that.
        grace_seconds: how long running jobs may go on after the first signal.
        handlers: modules to load in the children, as for `handlers.load`.
        default_timeout_ms: for jobs without a timeout of their own; None: no limit.
        max_jobs_per_child: a child is replaced after so many; None: never.

    Raises:
        DatabaseError: the file cannot be opened.
        HandlerLoadError: a module of handlers does not import; nothing was claimed.
    """
    with_signals = _Signals()
    store = Store(path, patience_seconds=10.0, stop=lambda: with_signals.count > 0)
    try:
        pool = Pool(workers, handlers, max_jobs_per_child=max_jobs_per_child)
        worker = Worker(store, pool, with_signals, queues=queues, lease_seconds=lease_seconds, drain=drain,
                        grace_seconds=grace_seconds, default_timeout_ms=default_timeout_ms,
                        log_format=log_format, log_level=log_level)
        with with_signals:
            return worker.run()
    finally:
        store.close()


class _Signals:
    """Counts SIGINT and SIGTERM; the handler does nothing else, so no transaction is ever cut short."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number

    def __enter__(self) -> None:
        self._old = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class _Turn:
    """What one transaction did; it counts only once the transaction is committed."""

    def __init__(self, now: int, monotonic: float) -> None:
        self.now = now
        self.monotonic = monotonic
        self.settled: list[tuple[Outcome, str | bool | None]] = []
        self.released: list[tuple[Job, bool]] = []
        self.lost: list[Job] = []
        self.extended = False
        self.expired: list[tuple[Job, str]] = []
        self.claimed: list[Job] = []
        self.asked = 0
        self.more = False
        self.next_event: int | None = None
        self.version = 0


class Worker:
    """One supervisor; made by `run`."""

    def __init__(self, store: Store, pool: Pool, signals: _Signals, *, queues: Sequence[str], lease_seconds: float,
                 drain: bool, grace_seconds: float, default_timeout_ms: int | None, log_format: str,
                 log_level: str) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self._store = store
        self._pool = pool
        self._signals = signals
        self._queues = list(queues)
        self._lease_seconds = lease_seconds
        self._lease_ms = round(lease_seconds * 1_000)
        self._drain = drain
        self._grace_seconds = grace_seconds
        self._default_timeout_ms = default_timeout_ms
        self._stdout = Writer(sys.stdout, pool.wake)
        self._stderr = Writer(sys.stderr, pool.wake)
        self._log = Log(self._stderr.write, now_ms, self.id, log_format, log_level)
        self._escape_lines = sys.stdout.isatty()

        self._held: dict[Job, None] = {}  # leases to keep alive
        self._outcomes: list[Outcome] = []  # to be settled
        self._unprinted: dict[Outcome, None] = {}  # to be settled once their lines are out
        self._returned: list[Job] = []  # to be given back
        self._unplaced: list[Job] = []  # claimed, and no child has taken them yet
        self._progress: dict[Job, tuple[float, str | None]] = {}
        self._run_us = SHORT_SECONDS * 1e6  # recent length of jobs
        self._more = True  # a claim might find something
        self._version = -1
        self._next_event: int | None = None
        self._completed = self._failed = 0

        now = time.monotonic()
        self._heartbeat_at = now + lease_seconds / 3
        self._seen_at = now + SEEN_SECONDS
        self._file_at = now + FILE_LOOK_SECONDS
        self._active_at = now
        self._trouble_since: float | None = None
        self._retry_at = 0.0
        self._stop_at: float | None = None  # when the grace ends, once stopping

    # -- the life of a worker --------------------------------------------------------------

    def run(self) -> int:
        """Work until the end; return the exit code."""
        try:
            self._pool.start()
            if not self._pool.wait_ready(lambda: self._signals.count > 0):
                return self._exit_code()
            self._store.patience_seconds = PATIENCE_SECONDS
            self._store.stop = None
            self._arrive()
            return self._work()
        finally:
            self._pool.kill_all()
            self._log.flush()
            self._stdout.close(1.0)
            self._stderr.close(1.0)

    def _arrive(self) -> None:
        self._log.started(self._pool.size, self._queues, self._pool.types)
        self._log.flush()
        try:
            self._store.worker_arrives(self.id, host=socket.gethostname(), pid=os.getpid(), queues=self._queues,
                                       types=self._pool.types, now_ms=now_ms())
        except DatabaseError as error:  # it is for people only
            self._log.database_trouble(error, 0)

    def _work(self) -> int:
        while True:
            self._take_in(self._pool.poll(self._pause()))
            now = time.monotonic()
            if now >= self._file_at:
                self._file_at = now + FILE_LOOK_SECONDS
                if self._store.is_replaced():
                    self._log.file_replaced(self._store.shown_path)
                    return EXIT_REPLACED
            if self._signals.count:
                if self._signals.count > 1:
                    return self._leave(stop=True)
                self._wind_down(now)
            self._rearrange(now)
            if self._turn_is_due(now):
                self._turn()
            self._log.flush()
            if self._is_done():
                return self._leave(stop=False)

    def _is_done(self) -> bool:
        if self._held or self._outcomes or self._returned or self._unprinted:
            return False
        return self._signals.count > 0 or (self._drain and not self._more and self._trouble_since is None)

    def _wind_down(self, now: float) -> None:
        """After the first signal: nothing new starts, running jobs may finish until the grace ends."""
        if self._stop_at is None:
            self._stop_at = now + self._grace_seconds
            for child in self._pool.children:
                self._returned += self._pool.take_back(child)
            self._returned += self._unplaced
            self._unplaced = []
            self._log.stopping(sum(len(child.handed) for child in self._pool.children), self._grace_seconds)
        elif now >= self._stop_at:
            self._stop_at = now + 1.0  # again, should one slip through
            for child in self._pool.children:
                for job in list(child.handed.values()):
                    self._pool.stop_job(job, "the worker is stopping", grace=0.0)

    def _leave(self, *, stop: bool) -> int:
        """End the children and give back what they had; return the exit code."""
        self._take_in(self._pool.kill_all() if stop else self._pool.close())
        self._returned += self._unplaced
        self._unplaced = []
        deadline = time.monotonic() + (1.0 if stop else LAST_WORDS_SECONDS)
        while (self._outcomes or self._returned or self._trouble_since) and time.monotonic() < deadline:
            self._turn()
        try:
            self._store.worker_leaves(self.id)
        except DatabaseError as error:
            self._log.database_trouble(error, len(self._outcomes))
        self._log.stopped(self._completed, self._failed)
        return self._exit_code()

    def _exit_code(self) -> int:
        return 128 + self._signals.last if self._signals.count > 1 else 0

    # -- what children say -----------------------------------------------------------------

    def _take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Outcome):
                self._run_us += (event.run_us - self._run_us) * 0.2
                if event.text is not None:
                    self._unprinted[event] = None
                    self._stdout.write(self._fit_for_stdout(event.text), event)
                else:
                    self._outcomes.append(event)
            elif isinstance(event, Returned):
                self._unplaced += event.jobs
            elif isinstance(event, Progress):
                self._progress[event.job] = (event.fraction, event.note)
            elif isinstance(event, LoadFailed):
                self._log.child_failed(event.error)
        for outcome, error in self._stdout.finished():
            del self._unprinted[outcome]
            if error is not None and outcome.kind == DONE:
                outcome.kind, outcome.value = ERROR, f"cannot write to the worker's stdout: {error.strerror or error}"
            self._outcomes.append(outcome)

    def _fit_for_stdout(self, text: str) -> str:
        if self._escape_lines and UNSAFE.search(text):
            return "".join(escape(line) + "\n" for line in text.removesuffix("\n").split("\n"))
        return text

    # -- handing out -----------------------------------------------------------------------

    def _depth(self) -> int:
        """Return how many jobs a child may hold, by the length of recent ones."""
        return max(1, min(DEEPEST, int(SHORT_SECONDS * 1e6 / (self._run_us + 1))))

    def _room(self) -> int:
        """Return how many jobs to claim: none while few places are free, so that claims are shared too."""
        if self._signals.count or self._unplaced or len(self._unprinted) >= MAX_UNPRINTED:
            return 0
        depth = self._depth()
        room = idle = 0
        for child in self._pool.children:
            if child.open:
                room += max(0, depth - len(child.handed))
                idle += not child.handed
        return room if idle or room * 2 >= depth * self._pool.size else 0

    def _place(self, jobs: list[Job], monotonic: float) -> None:
        """Hand jobs out, each to the child that has least to do; what nobody takes stays unplaced."""
        loads = [(len(child.handed), n, child) for n, child in enumerate(self._pool.children) if child.open]
        heapify(loads)
        deadline = monotonic + self._lease_seconds
        for position, job in enumerate(jobs):
            timeout_ms = self._default_timeout_ms if job.timeout_ms is None else job.timeout_ms
            if not loads or not self._pool.give(loads[0][2], job, deadline, timeout_ms):
                self._unplaced += jobs[position:]
                return
            load, n, child = loads[0]
            heapreplace(loads, (load + 1, n, child))

    def _rearrange(self, now: float) -> None:
        """See that no job waits behind a slow one, or in a queue while another child is free."""
        waiting = [child for child in self._pool.children if len(child.handed) > 1]
        for child in waiting:
            if now - child.since > SHORT_SECONDS:
                self._run_us = max(self._run_us, (now - child.since) * 1e6)
                self._unplaced += self._pool.take_back(child)
        idle = self._pool.idle()
        if waiting and not self._more and len(idle) > len(self._unplaced):
            fullest = max(waiting, key=lambda child: len(child.handed))
            self._unplaced += self._pool.take_back(fullest)
        if not self._unplaced:
            return
        jobs, self._unplaced = self._unplaced, []
        if self._signals.count:
            self._returned += jobs
            return
        self._place_on_idle(jobs, idle, now)

    def _place_on_idle(self, jobs: list[Job], idle: list[Child], now: float) -> None:
        """Give taken-back jobs to idle children, the rest to the file: other workers may be free."""
        depth = self._depth()
        room = len(idle) * depth
        # The deadline counts from the last heartbeat, which is when the leases were known to be held.
        self._place(jobs[:room], self._heartbeat_at - self._lease_seconds / 3)
        self._returned += jobs[room:]
        if not idle:
            self._returned += self._unplaced
            self._unplaced = []

    # -- the turn --------------------------------------------------------------------------

    def _pause(self) -> float:
        """Return how long to wait for the children at most."""
        now = time.monotonic()
        if self._trouble_since is not None:
            return max(0.0, self._retry_at - now)
        if self._outcomes or self._returned or (self._more and self._room()):
            return 0.0
        until = min(self._heartbeat_at if self._held else now + 1.0, self._file_at)
        if self._stop_at is not None:
            until = min(until, self._stop_at)
        elif self._pool.idle():
            until = min(until, now + self._look_seconds(now))
        if any(len(child.handed) > 1 for child in self._pool.children):
            until = min(until, now + SHORT_SECONDS / 2)
        return max(0.0, until - now)

    def _look_seconds(self, now: float) -> float:
        return LOOK_SECONDS if now - self._active_at < QUIET_SECONDS else RELAXED_LOOK_SECONDS

    def _turn_is_due(self, now: float) -> bool:
        if self._trouble_since is not None:
            return now >= self._retry_at
        if self._outcomes or self._returned or (self._held and now >= self._heartbeat_at) or now >= self._seen_at:
            return True
        if not self._room():
            return False
        if not self._more:
            self._more = self._something_happened()
        return self._more

    def _something_happened(self) -> bool:
        """Return whether another process has committed, or a moment that was waited for has come."""
        if self._next_event is not None and now_ms() >= self._next_event:
            return True
        try:
            return self._store.data_version()[0] != self._version
        except DatabaseError:
            return True  # the turn will find out

    def _turn(self) -> None:
        monotonic = time.monotonic()
        try:
            with self._store.transaction():
                turn = _Turn(now_ms(), time.monotonic())
                self._settle(turn)
                self._release(turn)
                self._extend(turn)
                self._claim(turn)
        except DatabaseError as error:
            if self._trouble_since is None:
                self._trouble_since = monotonic
            if monotonic - self._trouble_since >= PATIENCE_SECONDS or self._retry_at == 0.0:
                self._log.database_trouble(error, len(self._outcomes))
            self._retry_at = time.monotonic() + TROUBLE_PAUSE_SECONDS
            return
        if self._trouble_since is not None:
            self._log.database_back(monotonic - self._trouble_since)
            self._trouble_since = None
        self._apply(turn)

    def _settle(self, turn: _Turn) -> None:
        done = [outcome for outcome in self._outcomes if outcome.kind == DONE]
        answers = self._store.complete_many(
            [(outcome.job.seq, outcome.job.lease_token or "", outcome.value) for outcome in done], now_ms=turn.now)
        turn.settled += zip(done, answers, strict=True)
        for outcome in self._outcomes:
            if outcome.kind == DONE:
                continue
            job, delay_ms, error = outcome.job, None, outcome.value
            if outcome.kind == RETRY:
                delay_ms, error = outcome.value
            if outcome.kind in (ERROR, RETRY, REJECT):
                turn.settled.append((outcome, self._store.fail(
                    job.id, job.lease_token or "", error, now_ms=turn.now, delay_ms=delay_ms,
                    final=outcome.kind == REJECT)))
            else:  # LATE or STOPPED: it did not fail, it was not allowed to run
                turn.released.append((job, self._store.release(job.id, job.lease_token or "", now_ms=turn.now)))

    def _release(self, turn: _Turn) -> None:
        for job in self._returned:
            turn.released.append((job, self._store.release(job.id, job.lease_token or "", now_ms=turn.now)))

    def _extend(self, turn: _Turn) -> None:
        if turn.monotonic < self._heartbeat_at:
            return
        settled = {outcome.job for outcome, _ in turn.settled} | {job for job, _ in turn.released}
        held = {(job.seq, job.lease_token or ""): job for job in self._held if job not in settled}
        lost = self._store.extend_many(held, now_ms=turn.now, lease_ms=self._lease_ms)
        turn.lost = [held[lease] for lease in lost]
        for job, (fraction, note) in self._progress.items():
            self._store.report(job.id, job.lease_token or "", fraction, note, now_ms=turn.now)
        turn.extended = True

    def _claim(self, turn: _Turn) -> None:
        turn.expired = self._store.recover_expired(now_ms=turn.now, queues=self._queues)
        turn.more = self._store.promote(now_ms=turn.now, queues=self._queues) or len(turn.expired) >= RECOVER_CHUNK
        finished = sum(1 for _ in turn.settled) + len(turn.released)
        turn.asked = self._room()
        if turn.asked and not turn.more:
            turn.claimed = self._store.claim(self.id, now_ms=turn.now, lease_ms=self._lease_ms, limit=turn.asked,
                                             queues=self._queues)
            turn.more = len(turn.claimed) == turn.asked
        elif finished or turn.expired:
            turn.more = True
        if turn.monotonic >= self._seen_at:
            self._store.worker_seen(self.id, now_ms=turn.now)
        if not turn.more:
            turn.next_event = self._store.next_event(self._queues)
            turn.version = self._store.data_version()[0]

    # -- after the commit ------------------------------------------------------------------

    def _apply(self, turn: _Turn) -> None:
        """Take note of what is in the file now, and hand out what was claimed."""
        log = self._log
        self._outcomes.clear()
        self._returned.clear()
        for outcome, answer in turn.settled:
            self._forget(outcome.job)
            if not answer:
                log.stale(outcome.job, "its result" if outcome.kind == DONE else "its failure")
            elif outcome.kind == DONE:
                self._completed += 1
                log.completed(outcome.job, outcome.run_us)
            else:
                self._failed += 1
                error = outcome.value[1] if outcome.kind == RETRY else outcome.value
                log.attempt_failed(outcome.job, str(answer), str(error))
        for job, held in turn.released:
            self._forget(job)
            if held:
                log.released(job)
            else:
                log.stale(job, "giving it back")
        for job, status in turn.expired:
            log.expired(job, status)
        if turn.extended:
            self._after_heartbeat(turn)
        if turn.monotonic >= self._seen_at:
            self._seen_at = turn.monotonic + SEEN_SECONDS
        for job in turn.claimed:
            self._held[job] = None
            log.claimed(job)
        if turn.claimed:
            self._active_at = turn.monotonic
            self._place(turn.claimed, turn.monotonic)
        if turn.asked:
            self._more = turn.more
        else:
            self._more = self._more or turn.more
        if not turn.more:
            self._next_event, self._version = turn.next_event, turn.version

    def _after_heartbeat(self, turn: _Turn) -> None:
        self._heartbeat_at = turn.monotonic + self._lease_seconds / 3
        self._progress.clear()
        for job in turn.lost:
            self._forget(job)
            self._log.lease_lost(job)
            self._pool.stop_job(job, "the lease is lost", grace=1.0)
        size = self._store.wal_bytes()
        if size > LARGE_WAL_BYTES:
            self._log.wal_large(size)

    def _forget(self, job: Job) -> None:
        self._held.pop(job, None)
        self._progress.pop(job, None)
