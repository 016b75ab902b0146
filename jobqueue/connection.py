"""One connection to a queue's file: opening, waiting, transactions, checkpoints.

Opening looks first (`mode=ro`) and opens for writing only what is ours, because merely
closing a foreign file that was opened `mode=rw` can checkpoint its WAL or roll back its
journal.  Every write runs in an explicit `BEGIN IMMEDIATE`; waiting for the write lock is
a loop of short tries with jitter, as SQLite's own busy handler starves under contention
and cannot be interrupted.

Checkpoints: SQLite 3.7.0 to 3.51.2 can corrupt a file when a checkpoint overlaps a writer
that resets the WAL (https://sqlite.org/wal.html#walresetbug).  So no connection checkpoints
by itself, and `_checkpoint` runs one only while a second connection holds the write lock.

This module knows nothing of jobs.  It never leaves a statement unfetched, and never opens
the file other than through SQLite: closing any descriptor of it would drop the locks of
all connections in this process.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time

from . import forks, place, refusals, schema
from .errors import DatabaseBusy, DatabaseDamaged, DatabaseError, InvalidJob, JobQueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Result = TypeVar("Result")

OLDEST_SQLITE = (3, 38, 0)
PATIENCE_SECONDS = 10.0
"""How long a caller waits for the write lock unless it says otherwise."""
SMALLEST_PAGE_BYTES = 512
CHECKPOINT_BYTES = 4_000_000
CHECKPOINT_PAUSE_SECONDS = 0.25
WAL_KEPT_BYTES = 32_000_000
"""A longer log is cut to this when it begins anew.  Not to less: a commit that overwrites old log syncs in
half the time of one that makes the file grow."""
_WRITE, _READ = "BEGIN IMMEDIATE", "BEGIN"
_SQLITE_TIMEOUT_SECONDS = 0.01
_PRAGMAS = ("synchronous = FULL", "fullfsync = 1", "wal_autocheckpoint = 0", "mmap_size = 0",
            f"journal_size_limit = {WAL_KEPT_BYTES}", "cache_size = -32000", "trusted_schema = OFF",
            "cell_size_check = ON")
_inherited: set[tuple[int, int] | None] = set()
"""The files that were inside a transaction when this process was forked."""


class Connection:
    """A connection to one file, guarded by a lock.

    Safe across threads (they take turns) and across processes; refuses to work in a
    process forked from the one that opened it.

    Args:
        path: the file; a symbolic link is followed, so that the WAL lies beside its target.
        create: make the file (mode 0600) if it is missing, initialise it if it is empty.
        patience_seconds: how long to wait for another process's write lock.
        stop: asked while waiting; when it answers true, the wait ends with `DatabaseBusy`.
        allow_shared: open it even where every user of the machine could change or swap it.

    Raises:
        DatabaseError: no file, not ours, too new, damaged, on a network mount, open to every user,
            SQLite too old.
        DatabaseBusy: another process kept the file locked.
    """

    _any_disk = False
    """Whether a network mount will do."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False,
                 patience_seconds: float = PATIENCE_SECONDS, stop: Callable[[], bool] | None = None,
                 allow_shared: bool = False) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise DatabaseError(f"jobqueue needs SQLite 3.38 or newer; this Python has {sqlite3.sqlite_version}")
        self.shown_path = os.fspath(path)
        self.path = place.resolve(self.shown_path, any_disk=self._any_disk)
        if not allow_shared:
            place.refuse_shared(self.shown_path, self.path)
        self.patience_seconds = patience_seconds
        self.stop = stop
        self.commits = 0
        """Transactions that this connection has committed: what `data_version` does not show."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._owner = 0
        """The thread that is inside a transaction or snapshot, 0 if none is."""
        self._guard: sqlite3.Connection | None = None
        self._last_checkpoint = 0.0
        self._changes: int | None = None
        """`total_changes` when the write transaction began; None in a snapshot."""
        self._sqlite: sqlite3.Connection | None = None
        self._joined = Joined(self)
        self.created = False
        """Whether this object has written the tables."""
        with forks.opening:
            self._open(create)
            self._identity = place.identity(self.path)
            self._wal_identity = place.identity(self.path + "-wal")
            forks.watch(self)

    # -- opening and closing -----------------------------------------------------------

    def _open(self, create: bool) -> None:
        if not os.path.exists(self.path):
            if not create:
                raise DatabaseError(f"there is no database {self.shown_path}; create it with: "
                                    f"python -m jobqueue init --database {self.shown_path}")
            place.create_empty(self.path, self.shown_path)
        if place.identity(self.path) in _inherited:
            raise DatabaseError(f"{self.shown_path} was inside a transaction of process {os.getppid()} when that "
                                "forked this one; fork outside of transactions, or start processes by spawn")
        if self._patiently(self._look_for_blank) and not create:
            raise DatabaseError(f"{self.shown_path} is empty; make it a queue with: "
                                f"python -m jobqueue init --database {self.shown_path}")
        try:
            self._sqlite = self._connect("rw")
            self._patiently(self._prepare)
        except BaseException:
            self.close()
            raise

    def _look_for_blank(self) -> bool:
        """Return whether the file is blank; raise unless it is that or ours."""
        if not os.path.exists(self.path + "-wal") and not os.path.exists(self.path + "-journal"):
            self._refuse_at_first_sight()
        connection = self._connect("ro")
        try:
            if not schema.is_blank(connection):
                schema.check_ours(connection, self.shown_path)
                return False
            if 0 < os.stat(self.path).st_size < SMALLEST_PAGE_BYTES:  # SQLite takes it for empty
                raise DatabaseError(f"{self.shown_path} is not a SQLite database, so it was left alone; "
                                    "choose another path")
            return True
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK and place.leads_back_to_blank(self.path):
                return True  # its maker was killed; opened for writing, SQLite undoes what was begun
            raise
        finally:
            connection.close()

    def _refuse_at_first_sight(self) -> None:
        """Refuse a file that is not ours and not in use; any other look would leave a -wal and a -shm there.

        This one is blind to what other processes do meanwhile, so all else is left to the next.  It takes
        no locks, and its end would drop those of another connection of this process to the file: there
        is none, as that would have made a -wal, and other threads wait for `forks.opening`.
        """
        written_at = place.written_at(self.path)
        connection = self._connect("ro&immutable=1")
        try:
            if not schema.is_blank(connection):
                schema.check_ours(connection, self.shown_path)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            found = self._explained(error)
            if isinstance(found, DatabaseDamaged) and written_at == place.written_at(self.path):
                raise found from error
            # One that is just being written: the next look tells.
        finally:
            connection.close()

    def _connect(self, mode: str) -> sqlite3.Connection:
        try:
            uri = place.uri(self.path, f"mode={mode}")
            return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_SQLITE_TIMEOUT_SECONDS,
                                   check_same_thread=False, cached_statements=200)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _prepare(self) -> None:
        """Set what each connection needs; write the tables of a blank file, bring an older one up to date.

        May be run again after a BUSY at any point.
        """
        connection = self.sqlite
        current = connection.execute("PRAGMA user_version").fetchall() == [(schema.VERSION,)]
        if not current:  # counts in a blank file only, and takes the write lock
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        if connection.execute("PRAGMA journal_mode").fetchall() != [("wal",)] and \
                connection.execute("PRAGMA journal_mode = WAL").fetchall() != [("wal",)]:
            raise DatabaseError(f"{self.shown_path} cannot be switched to write-ahead logging; "
                                "put it on a local file system")
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        if current:
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            blank = schema.is_blank(connection)  # looked at again, now that nobody else can write
            if blank:
                schema.create(connection)
            else:
                schema.migrate(connection, schema.check_ours(connection, self.shown_path))
            connection.execute("COMMIT")
            self.created = self.created or blank
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection; a second call, or one in a forked child, does nothing.

        The last connection of all processes checkpoints the file as it closes, which is
        safe: SQLite does that under an exclusive lock.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            for connection in (self._guard, self._sqlite):
                if connection is not None:
                    connection.close()
            self._guard = self._sqlite = None

    def hold(self) -> bool:
        """Wait, before a fork, until no other thread is inside a transaction; return whether that worked."""
        return self._lock.acquire(timeout=self.patience_seconds + 1)

    def resume(self) -> None:
        """Let other threads go on after `hold`."""
        self._lock.release()

    def disown(self, held: bool) -> None:
        """Close, in a forked child, what belongs to the parent; keep it for good if it is inside a transaction.

        To close that would end the parent's transaction, and beside it the child cannot open the file.
        """
        connections = [connection for connection in (self._guard, self._sqlite) if connection is not None]
        self._guard = self._sqlite = None
        if held and self._owner == 0:
            for connection in connections:
                connection.close()
        else:
            import ctypes

            _inherited.add(self._identity)
            for connection in connections:  # not even the end of the process may destroy it
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def is_replaced(self) -> bool:
        """Return whether the path no longer names the file that was opened, or its log is gone (about 4 us)."""
        wal = place.identity(self.path + "-wal")
        self._wal_identity = self._wal_identity or wal
        return place.identity(self.path) != self._identity or wal != self._wal_identity

    # -- statements --------------------------------------------------------------------

    @property
    def sqlite(self) -> sqlite3.Connection:
        """The open `sqlite3` connection, for statements inside a transaction or snapshot.

        Raises:
            DatabaseError: closed, or opened by the process that this one was forked from.
        """
        connection = self._sqlite
        if connection is None:  # a fork takes it from the child, see `disown`
            raise DatabaseError(f"{self.shown_path} is closed" if os.getpid() == self._pid else
                                f"{self.shown_path} was opened by process {self._pid} before a fork; "
                                "open it again in this one")
        return connection

    def transaction(self) -> Transaction | Joined:
        """Return a context manager: a write transaction, committed at its end, rolled back on an exception.

        Inside another one of the same thread it joins that one.

        Raises:
            JobQueueError: inside a snapshot.
        """
        if self._owner != threading.get_ident():
            return Transaction(self, _WRITE)
        if self._changes is None:
            raise JobQueueError("a snapshot cannot become a write transaction: begin that first")
        return self._joined

    def snapshot(self) -> Transaction | Joined:
        """Return a context manager in which all reads see one state of the file."""
        return self._joined if self._owner == threading.get_ident() else Transaction(self, _READ)

    def data_version(self) -> tuple[int, int]:
        """Return a value that changes with every commit, whoever made it; a hint to look, never a proof."""
        connection = self.sqlite  # refuses a forked child, which must not touch the lock
        with self._lock:
            ((version,),) = self._patiently(lambda: connection.execute("PRAGMA data_version").fetchall())
        return version, self.commits

    def limit_memory(self, kilobytes: int) -> None:
        """Keep at most so much of the file in memory, instead of 32 MB: enough where only few pages are in use."""
        with self.snapshot():
            self.sqlite.execute(f"PRAGMA cache_size = -{kilobytes}").fetchall()

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log, 0 if there is none."""
        try:
            return os.stat(self.path + "-wal").st_size
        except OSError:
            return 0

    def _begin(self, statement: str) -> None:
        connection = self.sqlite
        if not self._lock.acquire(timeout=self.patience_seconds + 1):
            raise DatabaseBusy(f"{self.shown_path} is in use by another thread; try again")
        try:
            if connection.in_transaction:  # the last one could not even be rolled back
                self._patiently(lambda: connection.execute("ROLLBACK"))
            self._patiently(lambda: connection.execute(statement))
            if statement == _READ:  # only a look takes the snapshot, and it may find the file locked, too
                self._patiently(lambda: connection.execute("PRAGMA schema_version").fetchall())
            self._changes = connection.total_changes if statement == _WRITE else None
            self._owner = threading.get_ident()
        except BaseException:
            _roll_back(connection)
            self._lock.release()
            raise

    def _end(self, error: BaseException | None) -> None:
        try:
            self._owner = 0
            self._finish(error)
        finally:
            self._lock.release()

    def _finish(self, error: BaseException | None) -> None:
        connection = self.sqlite
        failure = error
        try:
            if error is None:
                connection.execute("COMMIT")
        except sqlite3.Error as refused:
            failure = refused
            raise self._explained(refused) from refused
        finally:
            _roll_back(connection)
            if failure is not None and refusals.code(failure) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                self._checkpoint(0)  # what cannot grow may do with room that it has: the log begins anew
        if error is None and self._changes not in (None, connection.total_changes):
            self.commits += 1
            self._checkpoint()

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """Run `action` again while the file is locked, at most for `patience_seconds`."""
        deadline: float | None = None
        while True:
            try:
                return action()
            except UnicodeDecodeError as error:
                raise self._explained(error) from error
            except sqlite3.Error as error:
                deadline = deadline or time.monotonic() + self.patience_seconds
                stopped = self.stop is not None and self.stop()
                if not refusals.is_busy(error) or stopped or time.monotonic() >= deadline:
                    raise self._explained(error) from error
            time.sleep(0.0003 + time.perf_counter_ns() % 1_700 / 1_000_000)  # jitter, so that nobody starves

    def _translate(self, error: BaseException) -> None:
        """Raise our error for one of SQLite's, or for a value that SQLite cannot take."""
        if isinstance(error, (sqlite3.Error, UnicodeDecodeError)):
            raise self._explained(error) from error
        if isinstance(error, OverflowError):
            raise InvalidJob(f"a number is too large to be stored: {error}") from None
        if isinstance(error, UnicodeEncodeError):
            raise InvalidJob(f"{error.object!a} holds a lone surrogate, which is no Unicode text") from None

    def _explained(self, error: sqlite3.Error | UnicodeDecodeError) -> DatabaseError:
        return refusals.explained(error, self.shown_path, self.patience_seconds)

    # -- checkpoints -------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Move the whole WAL into the file now, so that it is cut to its size, unless somebody is in the way."""
        self._last_checkpoint = 0.0
        self._checkpoint(0)

    def _checkpoint(self, least_bytes: int | None = None) -> None:
        """Move the WAL's pages into the file once there are many, with the write lock held elsewhere."""
        now = time.monotonic()
        least = CHECKPOINT_BYTES if least_bytes is None else least_bytes
        if now - self._last_checkpoint < CHECKPOINT_PAUSE_SECONDS or self.wal_bytes() < least:
            return
        self._last_checkpoint = now
        try:
            if self._guard is None:
                self._guard = self._connect("rw")
                self._guard.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
            self._guard.execute("BEGIN IMMEDIATE")
            self.sqlite.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except (sqlite3.Error, DatabaseError) as error:  # what is committed is safe: later commits try again
            if refusals.code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                self._last_checkpoint = now + 1  # a full disk, say, or no file descriptor left
        if self._guard is not None and not _roll_back(self._guard):
            self._guard.close()  # it must not keep the write lock
            self._guard = None


class Joined:
    """A transaction inside another one, which begins and ends for both: it only explains errors."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._connection._translate(error)


class Transaction:
    """See `Connection.transaction`; errors of SQLite inside it come out as `DatabaseError`."""

    __slots__ = ("_connection", "_statement")

    def __init__(self, connection: Connection, statement: str) -> None:
        self._connection = connection
        self._statement = statement

    def __enter__(self) -> None:
        self._connection._begin(self._statement)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._connection._end(error)
        if error is not None:
            self._connection._translate(error)


def _roll_back(connection: sqlite3.Connection) -> bool:
    """End a transaction that SQLite has not ended itself, as after a full disk; return whether none is left."""
    if connection.in_transaction:
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the error that led here is the one to tell
    return not connection.in_transaction
