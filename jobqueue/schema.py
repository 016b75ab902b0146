"""What a queue's file holds: tables, indexes, and the way from an older file to this one.

Text and a few functions over an open connection.  Everything that lists statuses is
rendered from `lifecycle`, and a partial index is found by the planner only where a query
repeats its condition to the letter, so queries take the conditions from here.  This
module never opens a file and never decides when to write one.
"""

from __future__ import annotations

from .errors import DatabaseError
from .lifecycle import CLAIMABLE, DEAD, FINISHED, RETRYING, RUNNING, STATUSES
from .producers import VIEW

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

APPLICATION_ID = 0x4A6F6251
"""`JobQ`, in the header of every file of ours (https://sqlite.org/pragma.html#pragma_application_id)."""


def quoted(statuses: Iterable[str]) -> str:
    """Return statuses as an SQL list: `('a', 'b')`."""
    return "(" + ", ".join(f"'{status}'" for status in statuses) + ")"


IS_READY = "ready = 1"
IS_SCHEDULED = f"ready = 0 AND unmet = 0 AND status IN {quoted(CLAIMABLE)}"
IS_WAITING = f"unmet > 0 AND status IN {quoted(CLAIMABLE)}"
"""Every job that waits for a worker is ready, scheduled or waiting, and only one of these."""
IS_RETRYING = f"status = '{RETRYING}'"
IS_RUNNING = f"status = '{RUNNING}'"
IS_DEAD = f"status IN {quoted(DEAD)}"
IS_FINISHED = "finished_at IS NOT NULL"
IS_ANY = "status <> ''"
"""True for every job.  A query has to say so to use the index `jobs_kinds`, which otherwise the planner would
take wherever it sees a queue: to list 100 jobs it would sort a million."""
NUMBER_AHEAD = "id GLOB '[1-9]*' AND CAST(id AS INTEGER) > seq"
"""True for an id chosen by a caller that a later job's number could run into."""

TABLES = f"""
CREATE TABLE jobs(
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- creation order, the tie-break among equals
    id TEXT NOT NULL UNIQUE,                -- the caller's, or else seq in decimal
    queue TEXT NOT NULL,
    type TEXT NOT NULL,
    payload TEXT NOT NULL,                  -- compact JSON
    priority INTEGER NOT NULL,              -- higher first
    created_at INTEGER NOT NULL,            -- all times: ms since the Unix epoch, UTC
    run_at INTEGER NOT NULL,                -- not before
    status TEXT NOT NULL CHECK (status IN {quoted(STATUSES)}),
    ready INTEGER NOT NULL CHECK (ready IN (0, 1)),         -- due and nothing unmet, as last looked at
    unmet INTEGER NOT NULL DEFAULT 0 CHECK (unmet >= 0),    -- dependencies not completed yet
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL CHECK (max_attempts >= 1),
    timeout_ms INTEGER CHECK (timeout_ms > 0),
    idempotency_key TEXT,
    lease_owner TEXT,
    lease_token TEXT,
    lease_expires_at INTEGER,
    started_at INTEGER,                     -- of the current or last claim
    finished_at INTEGER,
    result TEXT,                            -- compact JSON
    last_error TEXT,
    progress REAL,
    progress_note TEXT,
    trace TEXT,
    CHECK (attempts BETWEEN 0 AND max_attempts),
    CHECK (ready = 0 OR (unmet = 0 AND status IN {quoted(CLAIMABLE)})),
    CHECK ((status = '{RUNNING}') = (lease_token IS NOT NULL)),
    CHECK ((lease_token IS NULL) = (lease_owner IS NULL)),
    CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL)),
    CHECK ((status IN {quoted(FINISHED)}) = (finished_at IS NOT NULL))
) STRICT;

CREATE TABLE dependencies(                  -- both are seqs
    job INTEGER NOT NULL,
    depends_on INTEGER NOT NULL,
    PRIMARY KEY (job, depends_on)
) STRICT, WITHOUT ROWID;

CREATE TABLE failures(                      -- a row for each attempt that failed
    job INTEGER NOT NULL,
    attempt INTEGER NOT NULL,               -- starts again after an operator's retry
    owner TEXT,
    started_at INTEGER,
    ended_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    error TEXT NOT NULL
) STRICT;

CREATE TABLE outputs(                       -- what commands wrote
    job INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    stream TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;

CREATE TABLE workers(                       -- for people, never for safety
    id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    queues TEXT NOT NULL,                   -- JSON
    types TEXT NOT NULL,                    -- JSON
    allow_exec INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""

INDEXES = f"""
CREATE INDEX jobs_ready ON jobs(queue, priority DESC, seq, run_at) WHERE {IS_READY};
CREATE INDEX jobs_scheduled ON jobs(queue, run_at) WHERE {IS_SCHEDULED};
CREATE INDEX jobs_waiting ON jobs(queue, seq) WHERE {IS_WAITING};
CREATE INDEX jobs_retrying ON jobs(seq, queue) WHERE {IS_RETRYING};
CREATE INDEX jobs_leases ON jobs(queue, lease_expires_at) WHERE {IS_RUNNING};
CREATE INDEX jobs_dead ON jobs(status, seq, queue) WHERE {IS_DEAD};
CREATE INDEX jobs_finished ON jobs(finished_at, queue) WHERE {IS_FINISHED};
CREATE INDEX jobs_number_ahead ON jobs(CAST(id AS INTEGER)) WHERE {NUMBER_AHEAD};
CREATE UNIQUE INDEX jobs_idempotency_key ON jobs(idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX dependencies_reverse ON dependencies(depends_on, job);
CREATE INDEX failures_job ON failures(job, attempt);
CREATE INDEX outputs_job ON outputs(job, attempt);
INSERT INTO sqlite_sequence(name, seq) VALUES ('jobs', 0);
"""

KINDS = f"""
CREATE INDEX jobs_kinds ON jobs(queue, type, status) WHERE {IS_ANY};
"""

MIGRATIONS: tuple[str, ...] = (KINDS + VIEW,)
"""`MIGRATIONS[n]` turns a file of version n + 1 into one of version n + 2.

A process that has an older file open goes on working when another one brings it up to date:
SQLite reads the schema again, and nothing that is in use may change.
"""

VERSION = 1 + len(MIGRATIONS)
"""The `user_version` of a file that this program writes."""

_TABLE_NAMES = ("dependencies", "failures", "jobs", "outputs", "workers")


def is_blank(connection: sqlite3.Connection) -> bool:
    """Return whether nobody has put anything into this file yet."""
    header = connection.execute("SELECT * FROM pragma_application_id, pragma_user_version").fetchall()
    return header == [(0, 0)] and connection.execute("SELECT count(*) FROM sqlite_master").fetchall() == [(0,)]


def check_ours(connection: sqlite3.Connection, path: str) -> int:
    """Return the version of a file of ours, after a look at its header and its tables' names.

    Raises:
        DatabaseError: another program's file, a newer one, or one that lacks tables.
    """
    ((application_id, version),) = connection.execute(
        "SELECT * FROM pragma_application_id, pragma_user_version").fetchall()
    if application_id != APPLICATION_ID:
        raise DatabaseError(f"{path} is the database of another program, so it was left alone; choose another path")
    if version > VERSION:
        raise DatabaseError(f"{path} was made by a newer version of jobqueue (its format is {version}, "
                            f"this program knows formats up to {VERSION}), so it was left alone; upgrade jobqueue")
    names = connection.execute(f"SELECT name FROM sqlite_master WHERE type = 'table' AND name IN "
                               f"{quoted(_TABLE_NAMES)} ORDER BY name").fetchall()
    missing = sorted(set(_TABLE_NAMES) - {name for (name,) in names})
    if missing or version < 1:
        raise DatabaseError(f"{path} is damaged: it lacks {', '.join(missing) or 'its version'}; restore a backup")
    return int(version)


def create(connection: sqlite3.Connection) -> None:
    """Write all tables into a blank file; the caller has begun a transaction."""
    _run(connection, TABLES + INDEXES + KINDS + VIEW)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def differences(connection: sqlite3.Connection) -> list[str]:
    """Return the names of tables, indexes, views and triggers that are missing, changed or not ours.

    For a file of this program's own version.
    """
    from sqlite3 import connect

    look = "SELECT type || ' ' || name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite|_%' ESCAPE '|'"
    blank = connect(":memory:", isolation_level=None)
    try:
        create(blank)
        wanted = {name: " ".join(sql.split()) for name, sql in blank.execute(look).fetchall()}
    finally:
        blank.close()
    found = {name: " ".join((sql or "").split()) for name, sql in connection.execute(look).fetchall()}
    return [
        *(f"{name} is missing" for name in sorted(wanted.keys() - found.keys())),
        *(f"{name} is not ours" for name in sorted(found.keys() - wanted.keys())),
        *(f"{name} was changed" for name in sorted(wanted.keys() & found.keys()) if wanted[name] != found[name]),
    ]


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a file of ours from `version` to `VERSION`; the caller has begun a transaction."""
    for script in MIGRATIONS[version - 1:]:
        _run(connection, script)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Execute statements one by one: `executescript` would commit first."""
    from sqlite3 import complete_statement

    statement = ""
    for part in script.split(";\n"):
        statement += part + ";\n"
        if part.strip() and complete_statement(statement):  # a trigger holds statements
            connection.execute(statement)
            statement = ""
