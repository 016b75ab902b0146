"""The thread that works in a queue's file on behalf of an event loop.

Calls come in as futures of `concurrent.futures`.  One turn, one transaction, as with a
worker: all that was asked for since the last turn is done, leases that are held are
extended, leases that have run out are ended, and due jobs go to those who wait for one;
only after the commit do the futures get their results.  So calls that arrive together
share a commit, and the event loop never waits for a disk or a lock.

A call can be withdrawn (its future canceled) until its transaction has begun; then it ends.
What settles a job or gives it back is tried again until the lease is gone, whether or not
anybody still waits for it.  While jobs are waited for, the thread looks for commits of
others every ten milliseconds (a few us a look); with nothing to wait for it sleeps.

No rule and no SQL lives here, and nothing here knows of `asyncio`.
"""

from __future__ import annotations

import os
import threading
import time
from queue import Empty, SimpleQueue

from ..db import Store
from ..errors import DatabaseBusy, DatabaseError
from .moves import Moves, remark
from .operations import Claim, Operation, promise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ..jobs import Job

LOOK_SECONDS = 0.01
"""How often commits of other processes are looked for while somebody waits for a job."""
FILE_LOOK_SECONDS = 1.0
"""How often the path is looked at meanwhile: another file there would never show a commit."""
BACKGROUND_SECONDS = 0.25
"""How long a turn that nobody waits for may try to get the write lock."""
FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
"""The pauses between tries to open a file that is out of reach, doubled each time."""
MOST_AT_ONCE = 500
"""So many calls share a transaction, so that it does not keep others out for long."""

_END, _WAKE = "end", "wake"


class _Held:
    """A lease that is extended until it is let go."""

    __slots__ = ("job", "lost", "renew_at", "renewed")

    def __init__(self, job: Job, renew_at: float, renewed: Callable[[int], None], lost: Callable[[], None]) -> None:
        self.job = job
        self.renew_at = renew_at  # on the monotonic clock
        self.renewed = renewed
        self.lost = lost


class Clerk(threading.Thread):
    """A thread with a connection; see the module.  Public methods may be called from any thread.

    Args:
        path: the file; made if it is missing when the thread starts, and never later.
        moves: those of the queue that it serves.
        lease_ms: how long leases last.
        timeout: seconds after which calls give up a file that is locked or out of reach.
        clock: milliseconds since the epoch.
        allow_shared: as for `connection.Connection`.
    """

    def __init__(self, path: str | os.PathLike[str], moves: Moves, *, lease_ms: int, timeout: float,
                 clock: Callable[[], int], allow_shared: bool = False) -> None:
        super().__init__(name=f"jobqueue {moves.queue}", daemon=True)
        self.opened: Future[None] = promise()
        """Done when the file is open, or cannot be opened."""
        self.ended: Future[None] = promise()
        """Done when the file is closed and the thread about to end."""
        self._path = os.path.abspath(path)  # to find it again, wherever the program goes meanwhile
        self._moves = moves
        self._lease_ms = lease_ms
        self._timeout = timeout
        self._clock = clock
        self._allow_shared = allow_shared
        self._pid = os.getpid()
        self._gate = threading.Lock()
        self._closing = False
        self._inbox: SimpleQueue[Operation | str] = SimpleQueue()
        self._held: dict[str | None, _Held] = {}

        # What only the thread itself touches.
        self._store: Store | None = None
        self._until = self.deadline()  # how long to try to get the write lock
        self._todo: list[Operation] = []
        self._waiting: list[Claim] = []
        self._look = False  # somebody has not had a look yet, or there was more to do than fits into a turn
        self._seen: tuple[int, int] | None = None  # the file's version when there was nothing to claim ...
        self._next_event: int | None = None  # ... and when that changes by itself
        self._file_look_at = 0.0
        self._trouble: DatabaseError | None = None
        self._pause = 0.0
        self._retry_at = 0.0
        self._ending = False

    # -- for callers ---------------------------------------------------------------------

    def deadline(self) -> float:
        """Return when a call made now is to give up."""
        return time.monotonic() + self._timeout

    @property
    def closing(self) -> bool:
        """Whether nothing can be submitted any more."""
        return self._closing

    def submit(self, operation: Operation) -> None:
        """Have an operation done in the next turn.

        Raises:
            DatabaseError: closed, or opened by the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise DatabaseError(f"{self._path} was opened by process {self._pid} before a fork; "
                                "open it again in this one")
        with self._gate:
            if self._closing:
                raise self._closed()
            self._inbox.put(operation)

    def give_back(self, job: Job) -> Operation:
        """Return an operation that releases a claimed job; its result: whether the lease was still held."""
        return Operation(lambda store, now_ms: self._moves.release(store, now_ms, job.id, job.lease_token),
                         self.deadline(), kept_until=job.lease_expires_at)

    def hold(self, job: Job, renewed: Callable[[int], None], lost: Callable[[], None]) -> None:
        """Extend a lease from now on, three times in its length.

        Args:
            renewed: called with its new end (ms since the epoch), in this thread.
            lost: called in this thread when the lease turns out to be lost; then it is let go.
        """
        self._held[job.lease_token] = _Held(job, self._next_renewal(), renewed, lost)
        self._inbox.put(_WAKE)  # it may have gone to sleep for longer

    def let_go(self, lease_token: str | None) -> None:
        """Extend a lease no more, if it was."""
        self._held.pop(lease_token, None)

    def shut(self) -> bool:
        """Finish what was submitted, give back the leases that are held, close the file; then `ended`.

        Returns:
            False in a forked child, which has no such thread to wait for.
        """
        if os.getpid() != self._pid:
            return False
        with self._gate:
            if not self._closing:
                self._closing = True
                self._inbox.put(_END)
        return True

    # -- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Open the file, take turns until `shut`, close the file."""
        try:
            try:
                self._store = self._connect(create=True)
            except Exception as error:
                self.opened.set_exception(error)
                return
            self.opened.set_result(None)
            while not self._ending or self._todo:
                self._collect()
                if time.monotonic() < self._retry_at:
                    self._give_up_late()
                elif self._todo or self._has_news():
                    self._turn()
                self._end_waits()
        finally:
            with self._gate:
                self._closing = True
            while not self._inbox.empty():
                item = self._inbox.get()
                if isinstance(item, Operation):
                    self._todo.append(item)
            self._reject_all(self._closed())
            self._drop()
            self.ended.set_result(None)

    def _collect(self) -> None:
        """Take in what was submitted; sleep first if there is nothing to do."""
        timeout = self._rest_seconds()
        try:
            while True:
                item = self._inbox.get(timeout=timeout)
                timeout = 0.0
                if isinstance(item, Claim):
                    self._waiting.append(item)
                    self._look = True
                elif isinstance(item, Operation):
                    self._todo.append(item)
                elif item == _END:
                    self._wind_up()
        except Empty:
            pass

    def _rest_seconds(self) -> float | None:
        """Return how long to sleep; None: until something is submitted."""
        now = time.monotonic()
        if now < self._retry_at:
            return min(self._retry_at - now, LOOK_SECONDS)
        if self._todo or self._look:
            return 0.0
        if self._waiting:
            return LOOK_SECONDS
        renew_at = min((lease.renew_at for lease in list(self._held.values())), default=None)
        return None if renew_at is None else max(renew_at - now, 0.0)

    def _has_news(self) -> bool:
        """Return whether a turn would find something to do, though nothing was submitted."""
        if self._look or self._trouble is not None or self._due_leases():
            return True
        if not self._waiting or self._store is None:
            return bool(self._waiting)
        now = time.monotonic()
        if now >= self._file_look_at:
            self._file_look_at = now + FILE_LOOK_SECONDS
            if self._store.is_replaced():
                return True
        if self._next_event is not None and self._clock() >= self._next_event:
            return True
        try:
            return self._store.data_version() != self._seen
        except DatabaseError:
            return True  # the turn will find out

    def _forget_withdrawn(self) -> None:
        self._waiting = [claim for claim in self._waiting if not claim.cancelled()]

    def _end_waits(self) -> None:
        """Answer those who have waited long enough, after at least one look."""
        self._forget_withdrawn()
        if self._waiting and not self._look and self._trouble is None:
            now = time.monotonic()
            for claim in [claim for claim in self._waiting if now >= claim.until]:
                self._waiting.remove(claim)
                claim.grant(None)

    def _wind_up(self) -> None:
        """Nothing comes any more: end the waits, give back what is held."""
        self._ending, self._look = True, False
        for claim in self._waiting:
            claim.reject(self._closed())
        self._waiting.clear()
        for lease in list(self._held.values()):
            self.let_go(lease.job.lease_token)
            self._todo.append(self.give_back(lease.job))
            lease.lost()

    def _reject_all(self, error: Exception) -> None:
        for operation in (*self._todo, *self._waiting):
            operation.reject(error)
        self._todo.clear()
        self._waiting.clear()

    # -- one turn ------------------------------------------------------------------------

    def _turn(self) -> None:
        self._forget_withdrawn()
        self._until = min((each.deadline for each in (*self._todo, *self._waiting) if not each.done()),
                          default=time.monotonic() + BACKGROUND_SECONDS)
        try:
            store = self._reach()
            self._write(store)
            self._read(store)
        except DatabaseError as error:
            self._get_into_trouble(error)
        except Exception as error:  # a fault, of the clock perhaps: nobody may wait for ever because of it
            self._look = False
            self._reject_all(error)
        else:
            self._get_out_of_trouble()

    def _write(self, store: Store) -> None:
        """Do in one transaction what changes the file, then let everybody know."""
        writes = [operation for operation in self._todo if not operation.reads][:MOST_AT_ONCE]
        renewals = self._due_leases()
        if not writes and not renewals and not self._waiting:
            return
        self._moves.forget()
        with store.transaction():
            now = self._clock()
            # First, as what is settled below would look lost.
            lost = store.extend_many([(lease.job.seq, lease.job.lease_token or "") for lease in renewals],
                                     now_ms=now, lease_ms=self._lease_ms)
            for operation in writes:
                operation.carry_out(store, now)
            granted = self._grant(store, now)
        self._moves.tell()  # before anybody can act on what it tells of
        self._publish(writes)
        self._after_renewal(renewals, lost, now)
        self._hand_out(granted)

    def _read(self, store: Store) -> None:
        reads = [operation for operation in self._todo if operation.reads]
        if reads:
            with store.snapshot():
                for operation in reads:
                    operation.carry_out(store, self._clock())
            self._publish(reads)

    def _publish(self, operations: list[Operation]) -> None:
        done = set(operations)
        self._todo = [operation for operation in self._todo if operation not in done]
        for operation in operations:
            operation.publish()

    def _grant(self, store: Store, now: int) -> list[tuple[Claim, Job]]:
        """Claim jobs for those who wait, in the order of their coming."""
        granted: list[tuple[Claim, Job]] = []
        if not self._waiting:
            return granted
        self._look = self._moves.recover(store, now)
        if self._look:  # another turn: with jobs that are due but not marked so, a lesser one would be taken
            return granted
        for claim in self._waiting:
            job = self._moves.claim(store, now, claim.worker, self._lease_ms)
            if job is None:
                break
            granted.append((claim, job))
        self._seen, self._next_event = store.data_version(), self._moves.next_event(store)
        return granted

    def _hand_out(self, granted: list[tuple[Claim, Job]]) -> None:
        for claim, job in granted:
            self._waiting.remove(claim)
            if not claim.grant(job):  # withdrawn while the transaction ran
                self._todo.append(self.give_back(job))
        deadline = self.deadline()
        for claim in self._waiting:
            claim.deadline = deadline  # the file works: whatever happens to it counts from now on

    def _due_leases(self) -> list[_Held]:
        """Return all leases that are held if one of them is to be extended now: they share the commit."""
        now = time.monotonic()
        leases = list(self._held.values())
        return leases if any(now >= lease.renew_at for lease in leases) else []

    def _next_renewal(self) -> float:
        return time.monotonic() + self._lease_ms / 3_000

    def _after_renewal(self, leases: list[_Held], lost: list[tuple[int, str]], now: int) -> None:
        gone = {token for _, token in lost}
        for lease in leases:
            if lease.job.lease_token in gone:
                if self._held.pop(lease.job.lease_token, None) is not None:
                    lease.lost()
            else:
                lease.renew_at = self._next_renewal()
                lease.renewed(now + self._lease_ms)

    # -- the file ------------------------------------------------------------------------

    def _connect(self, *, create: bool) -> Store:
        return Store(self._path, create=create, patience_seconds=self._timeout, stop=self._should_stop_waiting,
                     allow_shared=self._allow_shared)

    def _should_stop_waiting(self) -> bool:
        return time.monotonic() >= self._until or (self._closing and not self._ending)

    def _reach(self) -> Store:
        """Return the open file; open it again if it was out of reach or another file has taken its place."""
        if self._store is not None and self._store.is_replaced():
            self._drop()
        if self._store is None:
            self._store = self._connect(create=False)
        return self._store

    def _drop(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    def _closed(self) -> DatabaseError:
        return DatabaseError(f"{self._path} is closed")

    def _get_into_trouble(self, error: DatabaseError) -> None:
        if isinstance(error, DatabaseBusy):
            self._pause = FIRST_PAUSE_SECONDS  # the next turn waits for the lock anyway
        else:
            self._drop()
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        if self._trouble is None:
            remark("trouble", f"{error}; trying again")
        self._trouble = error
        self._retry_at = time.monotonic() + self._pause
        self._give_up_late()

    def _get_out_of_trouble(self) -> None:
        if self._trouble is not None:
            remark("recovery", f"{self._path} works again")
        self._trouble, self._pause, self._retry_at = None, 0.0, 0.0

    def _give_up_late(self) -> None:
        """Reject the calls whose deadline has passed; drop those that nothing keeps."""
        trouble = self._trouble
        assert trouble is not None
        monotonic, now = time.monotonic(), self._clock()
        for operation in (*self._todo, *self._waiting):
            if monotonic >= operation.deadline:
                error = type(trouble)(*trouble.args)
                error.__cause__ = trouble.__cause__
                operation.reject(error)
        self._waiting = [claim for claim in self._waiting if not claim.done()]
        self._todo = [operation for operation in self._todo if not operation.done() or (
            operation.kept_until is not None and now < operation.kept_until and not self._ending)]
