"""Faults on purpose: every connection that the package opens is watched, and any statement can be made to fail.

`watched` puts a connection class of its own in the place of SQLite's, so nothing in the package knows of it.
An `Observer` sees each statement before it is carried out; `Faults` is one that fails the nth of them. What the
tests themselves look with (`Copy`) is opened past the watch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import Job, JobScheduler, connection
from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.engine import LEASE_MS, NOW, TABLES, WORKER, add_batch, token

LATER = NOW + 1_000
"""When the operations on a scenario take place: some of its jobs have come due, some leases have run out."""
_real_connect = sqlite3.connect


class Observer:
    """Sees what the connections of the package do; this one lets everything pass."""

    def open(self, name: str, carry_out: Callable[[], Watched]) -> Watched:
        """Open a connection."""
        return carry_out()

    def run(self, connection: Watched, sql: str, carry_out: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        """Run a statement."""
        return carry_out()


class Watched(sqlite3.Connection):
    """A connection that asks its observer to carry out what it is told."""

    observer: Observer
    name: str

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self.observer.run(self, sql, partial(super().execute, sql, parameters))

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        return self.observer.run(self, sql, partial(super().executemany, sql, parameters))

    def executescript(self, sql: str, /) -> sqlite3.Cursor:
        return self.observer.run(self, sql, partial(super().executescript, sql))

    def is_in_transaction(self) -> bool:
        """Return whether it is; False too when it is closed."""
        try:
            return self.in_transaction
        except sqlite3.ProgrammingError:
            return False

    def ask(self, sql: str) -> list[Any]:
        """Return the rows of a statement that the observer does not see."""
        return super().execute(sql).fetchall()


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Have everything observed that is opened and done within."""

    def connect(name: str, **options: Any) -> Watched:
        def carry_out() -> Watched:
            opened = _real_connect(name, factory=Watched, **options)
            opened.observer, opened.name = observer, name
            return opened

        return observer.open(name, carry_out)

    with mock.patch.object(sqlite3, "connect", connect):
        yield


BEFORE, AFTER, UNDONE, FOR_GOOD = "before", "after", "undone", "for good"
"""How a statement fails: not carried out; carried out, and an error came back all the same; not carried out, and
SQLite has rolled back by itself; not carried out, nor anything that follows, a ROLLBACK included."""
WAYS = (BEFORE, AFTER, UNDONE, FOR_GOOD)
_CODES = {BEFORE: sqlite3.SQLITE_IOERR_WRITE, AFTER: sqlite3.SQLITE_IOERR_FSYNC, UNDONE: sqlite3.SQLITE_FULL,
          FOR_GOOD: sqlite3.SQLITE_IOERR_READ}


class Faults(Observer):
    """Fails the nth statement from `arm` on; opening a connection counts as one.

    Attributes:
        fired: the statement that has failed, None: none has.
        commits: how many were carried out before that.
        main: the connection that operations run on; all others serve checkpoints. None: not known.
        harmless: the statement that failed belongs to a checkpoint, which no caller need know of.
    """

    def __init__(self) -> None:
        self.main: sqlite3.Connection | None = None
        self.heal()

    def heal(self) -> None:
        """Let everything pass from now on."""
        self._at = 0
        self._seen = 0
        self._way = BEFORE
        self.fired: str | None = None
        self.commits = 0
        self.harmless = False

    def committed(self) -> None:
        """Be told of a commit that was carried out; for tests to replace."""

    def arm(self, at: int, way: str) -> None:
        """Fail the statement number `at` (from 1) of those to come."""
        self.heal()
        self._at, self._way = at, way

    def open(self, name: str, carry_out: Callable[[], Watched]) -> Watched:
        first = self.fired is None
        if not self._is_due(f"open {name[name.index('?'):]}"):
            return carry_out()
        self.harmless = self.harmless or (first and self.main is not None)
        if self._way == AFTER:
            carry_out().close()
        raise failure(self._way)

    def run(self, connection: Watched, sql: str, carry_out: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        first = self.fired is None
        due = self._is_due(sql)
        if due and first:
            self.harmless = self.main is not None and (connection is not self.main or "wal_checkpoint" in sql)
        if not due or self._way == AFTER:
            cursor = carry_out()
            if sql == "COMMIT":
                self.commits += first
                self.committed()
            if not due:
                return cursor
            cursor.close()
        elif self._way == UNDONE and connection.in_transaction:
            connection.ask("ROLLBACK")
        raise failure(self._way)

    def _is_due(self, what: str) -> bool:
        self._seen += 1
        if self._at and (self._seen == self._at or (self._seen > self._at and self._way == FOR_GOOD)):
            self.fired = self.fired or " ".join(what.split())[:60]
            return True
        return False


def failure(way: str) -> sqlite3.OperationalError:
    """Return an error as SQLite would raise it."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = _CODES[way]
    return error


# -- a file with jobs in every state ------------------------------------------------------


def fill(path: Path) -> None:
    """Make a file with jobs in every state of their life, in the queue `default` and in that of `JobScheduler`."""
    with JobScheduler(path) as scheduler:
        _fill_scheduler(scheduler)
    store = Store(path)
    try:
        _fill_default(store)
        store.worker_arrives("old", host="h", pid=1, queues=[], types=[], now_ms=NOW - 30 * 86_400_000)
        store.worker_arrives(WORKER, host="h", pid=2, queues=["default"], types=["t"], now_ms=NOW)
    finally:
        store.close()


def _fill_scheduler(scheduler: JobScheduler) -> None:
    scheduler.add_jobs([{"job_id": "s-dead", "payload": 0, "max_attempts": 1},
                        {"job_id": "s-blocked", "payload": 0, "dependencies": ["s-dead"]}], NOW)
    dead = scheduler.claim_job("w", NOW, LEASE_MS)
    assert dead is not None and scheduler.fail_job("s-dead", dead["lease_token"], "x", NOW)
    scheduler.add_jobs([{"job_id": "s-short", "payload": 0, "priority": 2},
                        {"job_id": "s-held", "payload": 0}], NOW)
    for lease_ms in (10, LEASE_MS):
        scheduler.claim_job("w", NOW, lease_ms)
    scheduler.add_jobs([{"job_id": "s-child", "payload": 0, "dependencies": ["s-held"]},
                        {"job_id": "s-ready", "payload": 0}], NOW)


def _fill_default(store: Store) -> None:
    def claim(number: int, lease_ms: int = LEASE_MS) -> list[Job]:
        jobs = store.claim(WORKER, now_ms=NOW, lease_ms=lease_ms, limit=number)
        assert len(jobs) == number
        return jobs

    add_batch(store, [new_job("t", id=name, max_attempts=1) for name in ("dead", "dead2")])
    for job in claim(2):
        store.fail(job.id, token(job), "x", now_ms=NOW)
    add_batch(store, [new_job("t", id="short"), new_job("t", id="last", max_attempts=1)])
    claim(2, 10)
    add_batch(store, [new_job("t", id=name) for name in ("done", "held", "held2", "parent", "parent2")])
    done = claim(5)[0]
    store.complete(done.id, token(done), 1, now_ms=NOW)
    add_batch(store, [
        new_job("t", id="gone"), new_job("t", id="ready", priority=1, idempotency_key="k"),
        new_job("t", id="ready2"),
        new_job("t", id="soon", run_at=NOW + 500, priority=3), new_job("t", id="late", run_at=NOW + 10**8),
        new_job("t", id="child", depends_on=["parent", "done"]),
        new_job("t", id="diamond", depends_on=["parent", "parent2"]),
        new_job("t", id="grandchild", depends_on=["child", "ready"]),
        new_job("t", id="blocked", depends_on=["dead"])])
    store.cancel("gone", now_ms=NOW)


class Copy:
    """Looks into a file, and sets it back to what another file holds; a connection of its own, not watched."""

    def __init__(self, path: Path, template: Path) -> None:
        self._sqlite = _real_connect(path, isolation_level=None, timeout=10)
        self._sqlite.execute("PRAGMA synchronous = OFF")
        self._sqlite.execute("PRAGMA wal_autocheckpoint = 0")
        self._sqlite.execute("ATTACH ? AS template", (str(template),))

    def close(self) -> None:
        self._sqlite.close()

    def restore(self) -> None:
        """Set the file back."""
        execute = self._sqlite.execute
        execute("BEGIN IMMEDIATE")
        for table in (*TABLES, "sqlite_sequence"):
            execute(f"DELETE FROM main.{table}")
            execute(f"INSERT INTO main.{table} SELECT * FROM template.{table}")
        execute("COMMIT")

    def state(self) -> dict[str, list[Any]]:
        """Return what the file holds; see `contents`."""
        return contents(self._sqlite)


def contents(sqlite: sqlite3.Connection) -> dict[str, list[Any]]:
    """Return all rows of all tables; of a lease token, which is new each time, only whether there is one."""
    columns = ", ".join([*(name for name in Job.COLUMNS if name != "lease_token"), "lease_token IS NULL"])
    sqlite.execute("BEGIN")
    try:
        rows = {table: sqlite.execute(f"SELECT {columns if table == 'jobs' else '*'} FROM main.{table} "
                                      "ORDER BY 1, 2").fetchall() for table in (*TABLES, "sqlite_sequence")}
    finally:
        sqlite.execute("COMMIT")
    return rows


_WRONG_UNMET = """
SELECT id, unmet FROM jobs WHERE status IN ('pending', 'retrying') AND unmet <> (
    SELECT count(*) FROM dependencies JOIN jobs AS parent ON parent.seq = depends_on
    WHERE job = jobs.seq AND parent.status <> 'completed')"""


def unsound(sqlite: sqlite3.Connection) -> list[Any]:
    """Return what is wrong with a file: pages, indexes, dependencies that do not add up; nothing: `[]`."""
    found = [row for row in sqlite.execute("PRAGMA main.integrity_check").fetchall() if row != ("ok",)]
    return found + sqlite.execute(_WRONG_UNMET).fetchall()


def quick_commits() -> Any:
    """Return a patch under which commits do not wait for the disk: no power fails while it is in force."""
    pragmas = ["synchronous = OFF" if "synchronous" in pragma else pragma for pragma in connection._PRAGMAS]
    return mock.patch.object(connection, "_PRAGMAS", pragmas)
