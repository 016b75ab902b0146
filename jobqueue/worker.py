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
import socket
import sys
import time

from .child import DONE, RETRY
from .db import Store
from .dispatch import SHORT_SECONDS, Dispatcher
from .errors import DatabaseBusy, DatabaseDamaged, DatabaseError, DatabaseReadOnly
from .events import LoadFailed, Outcome, Progress, Returned
from .log import Log
from .output import Writer
from .pool import Pool
from .signals import SIGNALS, Signals
from .text import UNSAFE, escape
from .times import now_ms
from .turn import Turn, claim, heartbeat, outlast_step, settle
from .watch import CommitWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .events import Event
    from .jobs import Job
    from .upkeep import Purger



PATIENCE_SECONDS = 0.1
"""How long one try of a turn waits for the write lock: children and timers must be served meanwhile."""
TROUBLE_PAUSE_SECONDS = 0.05
LONG_TROUBLE_PAUSE_SECONDS = 0.5
"""The same once the trouble has lasted for longer than a lock is usually held."""
COMPLAIN_AFTER_SECONDS = 1.0
COMPLAIN_EVERY_SECONDS = 10.0
LAST_WORDS_SECONDS = 5.0
"""How long a worker that ends goes on trying to give its jobs back."""
HURRIED_SECONDS = 1.0
"""The same after a second signal."""
CACHE_KILOBYTES = 8_000
"""For what a worker touches: the head of the queue and the ends of a few indexes, however long it runs."""
SEEN_SECONDS = 60.0
CLOCK_STEP_MS = 500
"""What the wall clock may gain on the monotonic one between two turns and still count as one that runs."""
FILE_LOOK_SECONDS = 1.0
MAX_UNPRINTED = 1_000
"""With so many jobs waiting for their line to be printed, no more are claimed."""
LARGE_WAL_BYTES = 64_000_000
EXIT_DONE, EXIT_FAILED = 0, 1


def run(path: str, *, workers: int, lease_seconds: float, drain: bool, grace_seconds: float,
        handlers: Sequence[str], queues: Sequence[str], default_timeout_ms: int | None = None,
        max_jobs_per_child: int | None = None, log_format: str = "text", log_level: str = "info",
        allow_shared: bool = False, purge_after_ms: int | None = None) -> int:
    """Run jobs until told to stop, or with `drain` until nothing is due; return the exit code.

    To be called in the main thread: it takes over SIGINT and SIGTERM while it runs.

    Args:
        workers: child processes.
        lease_seconds: how long a lease lasts; it is extended every third of that.
        grace_seconds: how long running jobs may go on after the first signal.
        handlers: modules to load in the children, as for `handlers.load`.
        default_timeout_ms: for jobs without a timeout of their own; None: no limit.
        max_jobs_per_child: a child is replaced after so many; None: never.
        allow_shared: use the file even if every user of the machine could change or replace it.
        purge_after_ms: delete jobs that finished longer ago, now and then; None: never.

    Raises:
        DatabaseError: the file cannot be opened.
        HandlerLoadError: a module of handlers does not import; nothing was claimed.
    """
    with SIGNALS as signals:
        store = Store(path, stop=lambda: signals.count > 0, allow_shared=allow_shared)
        try:
            store.limit_memory(CACHE_KILOBYTES)
            pool = Pool(workers, handlers, max_jobs_per_child=max_jobs_per_child)
            worker = Worker(store, pool, signals, queues=queues, lease_seconds=lease_seconds, drain=drain,
                            grace_seconds=grace_seconds, default_timeout_ms=default_timeout_ms,
                            log_format=log_format, log_level=log_level, purge_after_ms=purge_after_ms)
            return worker.run()
        finally:
            store.close()


class Worker:
    """One supervisor; made by `run`."""

    def __init__(self, store: Store, pool: Pool, signals: Signals, *, queues: Sequence[str], lease_seconds: float,
                 drain: bool, grace_seconds: float, default_timeout_ms: int | None, log_format: str,
                 log_level: str, purge_after_ms: int | None = None) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self._store = store
        self._pool = pool
        self._signals = signals
        self._queues = list(queues)
        self._lease_seconds = lease_seconds
        self._lease_ms = round(lease_seconds * 1_000)
        self._drain = drain
        self._grace_seconds = grace_seconds
        self._stdout = Writer(sys.stdout, pool.wake)
        self._stderr = Writer(sys.stderr, pool.wake)
        self._log = Log(self._stderr.write, now_ms, self.id, log_format, log_level)
        self._escape_lines = sys.stdout.isatty()

        self._dispatcher = Dispatcher(pool, lease_seconds, default_timeout_ms)

        self._held: dict[Job, None] = {}  # leases to keep alive
        self._outcomes: list[Outcome] = []  # to be settled
        self._unprinted: dict[Outcome, None] = {}  # to be settled once their lines are out
        self._returned: list[Job] = []  # to be given back
        self._progress: dict[Job, tuple[float, str | None]] = {}  # to be stored with the next heartbeat
        self._completed = self._failed = 0
        self._stdout_error: OSError | None = None

        self._more = True  # a claim might find something; if not, these tell when to look again:
        self._next_event: int | None = None
        self._offset_ms: int | None = None  # of the wall clock from the monotonic one, in the last turn
        self._watch = CommitWatch(store, pool.selector)
        self._purger: Purger | None = None
        if purge_after_ms is not None:
            from .upkeep import Purger

            self._purger = Purger(store, self.id, purge_after_ms)

        # Monotonic times, in seconds.
        now = time.monotonic()
        self._extended_at = now  # the last heartbeat
        self._seen_at = now
        self._looked_at = now  # at the path of the file
        self._stop_at: float | None = None  # the end of the grace, once stopping
        self._give_up_at: float | None = None  # when to end even if jobs cannot be given back
        self._trouble_since: float | None = None  # turns have failed since then
        self._retry_at = 0.0
        self._complain_at = 0.0

    # -- the life of a worker --------------------------------------------------------------

    def run(self) -> int:
        """Work until the end; return the exit code."""
        try:
            self._pool.start()
            if not self._pool.wait_ready(lambda: self._signals.count > 0):
                self._log.stopped_early()
                return self._exit_code()
            self._store.patience_seconds = PATIENCE_SECONDS
            self._store.stop = None
            self._arrive()
            return self._work()
        finally:
            self._pool.kill_all()
            self._watch.close()
            self._log.flush()
            self._stdout.close(HURRIED_SECONDS)
            self._stderr.close(HURRIED_SECONDS)

    def _arrive(self) -> None:
        self._log.started(self._pool.size, self._queues, self._pool.types)
        try:
            self._store.worker_arrives(self.id, host=socket.gethostname(), pid=os.getpid(), queues=self._queues,
                                       types=self._pool.types, now_ms=now_ms())
        except (DatabaseDamaged, DatabaseReadOnly):
            raise  # nothing will ever come of this worker
        except DatabaseError as error:  # the list of workers is for people only
            self._log.database_trouble(error, 0)

    def _work(self) -> int:
        while True:
            self._take_in(self._wait())
            now = time.monotonic()
            if now - self._looked_at >= FILE_LOOK_SECONDS:
                self._looked_at = now
                if self._store.is_replaced():
                    self._log.file_replaced(self._store.shown_path)
                    return EXIT_FAILED
            if self._signals.count > 1:
                return self._leave(hurried=True)
            if self._is_stopping():
                self._wind_down(now)
            self._returned += self._dispatcher.rearrange(now, self._extended_at, none_left=not self._more)
            if self._turn_is_due(now):
                self._turn()
            self._purge()
            self._log.flush()
            if self._is_done():
                return self._leave(hurried=False)
            if self._give_up_at is not None and now >= self._give_up_at:
                return self._leave(hurried=True)

    def _is_stopping(self) -> bool:
        return self._signals.count > 0 or self._stdout_error is not None

    def _is_done(self) -> bool:
        if self._held or self._outcomes or self._returned or self._unprinted:
            return False
        return self._is_stopping() or (self._drain and not self._more and self._trouble_since is None
                                       and not (self._purger and self._purger.is_busy))

    def _wind_down(self, now: float) -> None:
        """After the first signal: nothing new starts, running jobs may finish until the grace ends."""
        self._dispatcher.take_back_all()
        self._returned += self._dispatcher.unplaced
        self._dispatcher.unplaced = []
        running = [job for child in self._pool.children for job in child.handed.values()]
        if self._stop_at is None:
            self._stop_at = now + self._grace_seconds
            self._log.stopping(len(running), self._grace_seconds)
        if now >= self._stop_at:
            self._stop_at = now + HURRIED_SECONDS  # and again, should one slip through
            self._give_up_at = self._give_up_at or now + LAST_WORDS_SECONDS
            for job in running:
                self._pool.stop_job(job, "the worker is stopping", grace=0.0)
            self._returned += [outcome.job for outcome in self._unprinted]  # nobody reads stdout
            self._unprinted.clear()

    def _leave(self, *, hurried: bool) -> int:
        """End the children and give back what they had; return the exit code."""
        self._take_in(self._pool.kill_all() if hurried else self._pool.close(lambda: self._signals.count > 1))
        self._stdout.close(HURRIED_SECONDS)
        self._take_in([])
        self._returned += [*self._dispatcher.unplaced, *(outcome.job for outcome in self._unprinted)]
        deadline = time.monotonic() + (HURRIED_SECONDS if hurried else LAST_WORDS_SECONDS)
        while (self._outcomes or self._returned) and time.monotonic() < deadline:
            self._turn()
        try:
            self._store.worker_leaves(self.id)
        except DatabaseError as error:
            self._log.database_trouble(error, len(self._outcomes))
        self._log.stopped(self._completed, self._failed, len(self._held))
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._signals.count > 1:
            return 128 + self._signals.last
        return EXIT_FAILED if self._held or self._stdout_error is not None else EXIT_DONE

    # -- what children say -----------------------------------------------------------------

    def _take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Outcome):
                self._dispatcher.learn(event.run_us)
                if event.text is None:
                    self._outcomes.append(event)
                else:
                    self._unprinted[event] = None
                    self._stdout.write(self._fit_for_stdout(event.text), event)
            elif isinstance(event, Returned):
                # One whose lease was found lost meanwhile must not start.
                self._dispatcher.unplaced += [job for job in event.jobs if job in self._held]
            elif isinstance(event, Progress):
                self._progress[event.job] = (event.fraction, event.note)
            elif isinstance(event, LoadFailed):
                self._log.child_failed(event.error)
        for outcome, error in self._stdout.finished():
            if outcome not in self._unprinted:
                continue  # it was given back meanwhile
            del self._unprinted[outcome]
            if error is None:
                self._outcomes.append(outcome)
                continue
            self._returned.append(outcome.job)  # it is not the job that has failed
            if self._stdout_error is None:
                self._stdout_error = error
                self._log.stdout_broken(error)

    def _fit_for_stdout(self, text: str) -> str:
        if self._escape_lines and UNSAFE.search(text):
            return "".join(escape(line) + "\n" for line in text.removesuffix("\n").split("\n"))
        return text

    # -- when to do what -------------------------------------------------------------------

    def _room(self) -> int:
        """Return how many jobs to claim."""
        if self._is_stopping() or len(self._unprinted) >= MAX_UNPRINTED:
            return 0
        return self._dispatcher.room()

    def _wait(self) -> list[Event]:
        """Wait for the children, for a signal, for a moment or for another process's commit."""
        now = time.monotonic()
        until = self._next_moment(now)
        if self._is_stopping() or self._unprinted or not self._pool.idle():
            return self._pool.poll(max(0.0, until - now))
        while True:  # an idle worker spends its life here
            events = self._pool.poll(max(0.0, min(until - now, self._watch.look_seconds(now))))
            now = time.monotonic()
            if events or self._signals.count or now >= until or self._something_happened():
                return events

    def _next_moment(self, now: float) -> float:
        """Return the monotonic time at which the loop has something to do, if nothing happens before."""
        if self._trouble_since is not None:
            return self._retry_at
        if self._outcomes or self._returned or (self._more and self._room()):
            return now
        until = self._looked_at + FILE_LOOK_SECONDS
        if self._held:
            until = min(until, self._extended_at + self._lease_seconds / 3)
        if self._stop_at is not None:
            until = min(until, self._stop_at)
        elif self._next_event is not None and self._room():
            until = min(until, now + (self._next_event - now_ms()) / 1_000)
        if self._dispatcher.is_anything_waiting():
            until = min(until, now + SHORT_SECONDS / 2)
        if self._purger is not None and not self._is_stopping():
            until = min(until, self._purger.next_at)
        return until

    def _turn_is_due(self, now: float) -> bool:
        if self._trouble_since is not None:
            return now >= self._retry_at
        if self._outcomes or self._returned or self._heartbeat_is_due(now) or now - self._seen_at >= SEEN_SECONDS:
            return True
        if not self._room():
            return False
        self._more = self._more or self._something_happened()
        return self._more

    def _heartbeat_is_due(self, now: float) -> bool:
        return bool(self._held) and now - self._extended_at >= self._lease_seconds / 3

    def _something_happened(self) -> bool:
        """Return whether another process has committed, or a moment that was waited for has come."""
        return (self._next_event is not None and now_ms() >= self._next_event) or self._watch.has_changed()

    # -- the turn --------------------------------------------------------------------------

    def _turn(self) -> None:
        """Take one turn; on trouble with the file all is kept for the next."""
        begun = time.monotonic()
        beat = self._heartbeat_is_due(begun)
        seen = begun - self._seen_at >= SEEN_SECONDS
        room = self._room()
        try:
            with self._store.transaction():
                turn = Turn(now_ms())
                offset_ms = turn.now - round(turn.monotonic * 1_000)
                step_ms = 0 if self._offset_ms is None else offset_ms - self._offset_ms
                if step_ms > CLOCK_STEP_MS and self._held:
                    outlast_step(self._store, turn, self._held, step_ms, self._lease_ms)
                settle(self._store, turn, self._outcomes, self._returned)
                if beat:
                    heartbeat(self._store, turn, self._held, self._progress, self._lease_ms)
                if seen:
                    self._store.worker_seen(self.id, now_ms=turn.now)
                claim(self._store, turn, self.id, self._queues, self._lease_ms, room)
        except DatabaseDamaged:
            raise
        except DatabaseError as error:
            self._note_trouble(error, begun)
            return
        if self._trouble_since is not None:
            if self._complain_at:
                self._log.database_back(begun - self._trouble_since)
            self._trouble_since = None
            self._complain_at = 0.0
        self._offset_ms = offset_ms
        self._outcomes.clear()
        self._returned.clear()
        self._apply(turn)
        if beat:
            self._extended_at = turn.monotonic
            self._progress.clear()
            self._warn_of_wal()
        if seen:
            self._seen_at = turn.monotonic

    def _note_trouble(self, error: DatabaseError, begun: float) -> None:
        now = time.monotonic()
        if self._trouble_since is None:
            self._trouble_since = begun
        long = now - self._trouble_since >= COMPLAIN_EVERY_SECONDS
        self._retry_at = now + (LONG_TROUBLE_PAUSE_SECONDS if long else TROUBLE_PAUSE_SECONDS)
        if now - self._trouble_since >= COMPLAIN_AFTER_SECONDS and now >= self._complain_at:
            self._complain_at = now + COMPLAIN_EVERY_SECONDS
            self._log.database_trouble(error, len(self._outcomes))

    def _apply(self, turn: Turn) -> None:
        """Take note of what is in the file now, and hand out what was claimed."""
        log = self._log
        for outcome, status in turn.settled:
            self._forget(outcome.job)
            if status is None:
                log.stale(outcome.job, "its result" if outcome.kind == DONE else "its failure")
            elif outcome.kind == DONE:
                self._completed += 1
                log.completed(outcome.job, outcome.run_us)
            else:
                self._failed += 1
                error = outcome.value[1] if outcome.kind == RETRY else outcome.value
                log.attempt_failed(outcome.job, status, error)
        for job, held in turn.released:
            self._forget(job)
            if held:
                log.released(job)
            else:
                log.stale(job, "giving it back")
        for job, status in turn.expired:
            log.expired(job, status)
        for job in turn.lost:
            self._forget(job)
            log.lease_lost(job)
            self._pool.stop_job(job, "the lease is lost", grace=1.0)
        if turn.lost:
            self._dispatcher.unplaced = [job for job in self._dispatcher.unplaced if job in self._held]
        if not self._held:
            self._extended_at = turn.monotonic  # no lease is older than this turn
        for job in turn.claimed:
            self._held[job] = None
            log.claimed(job)
        if turn.claimed:
            self._dispatcher.place(turn.claimed, turn.monotonic)
        self._more, self._next_event = turn.more, turn.next_event
        self._watch.remember(turn.version)

    def _purge(self) -> None:
        """Take a small step of a purge, if one is due."""
        if self._purger is None or self._is_stopping() or self._trouble_since is not None:
            return
        try:
            deleted = self._purger.step(now_ms=now_ms())
        except DatabaseBusy:
            return  # the next step is the same
        except DatabaseError as error:
            self._purger.give_up()
            self._log.database_trouble(error, 0)
        else:
            if deleted:
                self._log.purged(deleted)

    def _forget(self, job: Job) -> None:
        self._held.pop(job, None)
        self._progress.pop(job, None)

    def _warn_of_wal(self) -> None:
        size = self._store.wal_bytes()
        if size > LARGE_WAL_BYTES:
            self._log.wal_large(size)
