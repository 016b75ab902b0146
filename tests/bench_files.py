"""Files for the benchmark and the cost tests: full of jobs of any kind, and the bare statements on them.

The bare statements (`RAW_...`) are the ceiling that figures are compared with: Python and `sqlite3` alone, on
the real tables and indexes, at the durability of the product.

Nothing here opens a database file other than through SQLite.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from urllib.parse import quote

BULK = 1_000
"""Jobs a call or a commit, where many are stored."""
RAW_BATCH = 64
HOUR_MS = 3_600_000

RAW_INSERT = """
INSERT INTO jobs(id, queue, type, payload, priority, created_at, run_at, status, ready, max_attempts)
VALUES (?, 'default', 'sleep', '{"seconds":0}', 0, ?, ?, 'pending', 1, 3)"""
RAW_CLAIM = """
UPDATE jobs SET status = 'running', ready = 0, attempts = attempts + 1, lease_owner = 'raw',
       lease_token = lower(hex(randomblob(16))), lease_expires_at = ?, started_at = ?
WHERE seq IN (SELECT seq FROM jobs WHERE queue = 'default' AND ready = 1 ORDER BY priority DESC, seq LIMIT ?)
RETURNING seq, payload, lease_token"""
RAW_COMPLETE = """
UPDATE jobs SET status = 'completed', finished_at = ?, lease_owner = NULL, lease_token = NULL,
       lease_expires_at = NULL WHERE seq = ? AND lease_token = ?"""


def now_ms() -> int:
    """Return the time as the file has it."""
    return time.time_ns() // 1_000_000


def raw(path: Path) -> sqlite3.Connection:
    """Open a queue's file bare, with the durability of the product and SQLite's other defaults."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    for pragma in ("synchronous = FULL", "fullfsync = 1"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def watch(path: Path) -> sqlite3.Connection:
    """Open a queue's file for looking only."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=30)


def ask(connection: sqlite3.Connection, query: str, *args: object) -> int:
    """Return the only value that a query answers."""
    ((value,),) = connection.execute(query, args).fetchall()
    return int(value)


_FILL_CHUNK = 100_000
_FILL = """
INSERT INTO jobs(seq, id, queue, type, payload, priority, created_at, run_at, status, ready, unmet, attempts,
                 max_attempts, lease_owner, lease_token, lease_expires_at, started_at, finished_at, last_error)
WITH RECURSIVE numbers(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM numbers WHERE n < :last)
SELECT n, CAST(n AS TEXT), :queue, :type, '{"seconds":0}', 0, :now, :run_at, :status, :ready, :unmet, :attempts,
       3, :owner, CASE WHEN :owner IS NOT NULL THEN 'token-' || n END, :expires_at, :started_at, :finished_at,
       :error
FROM numbers"""


def _columns(kind: str, now: int) -> dict[str, object]:
    """Return what is special about the rows of a kind of job."""
    started: dict[str, object] = {"ready": 0, "attempts": 1, "started_at": now}
    ended = {**started, "status": kind, "finished_at": now}
    kinds: dict[str, dict[str, object]] = {
        "waiting": {},
        "other-queue": {"queue": "other"},
        "future": {"ready": 0, "run_at": now + 1_000 * HOUR_MS},
        "blocked": {"ready": 0, "unmet": 1},
        "running": {**started, "status": kind, "owner": "somebody", "expires_at": now + HOUR_MS},
        "retrying": {**started, "status": kind, "run_at": now + HOUR_MS, "error": "no luck"},
        "completed": ended,
        "canceled": ended,
        "failed": {**ended, "attempts": 3, "error": "no luck"},
    }
    return kinds[kind]


def fill(path: Path, kind: str, count: int, **changes: object) -> None:
    """Put jobs of a kind behind those in the file, as their life would have left them, by SQL.

    Args:
        kind: `waiting` (to be claimed at once), `future`, `blocked` (by one more, a failed job),
            `other-queue`, or the status `running`, `retrying`, `completed`, `failed`, `canceled`.
        changes: columns that differ: `queue`, `type`.
    """
    if kind == "blocked":
        fill(path, "failed", 1)
    now = now_ms() - 1_000
    row: dict[str, object] = dict.fromkeys(("owner", "expires_at", "started_at", "finished_at", "error"))
    row |= {"queue": "default", "type": "sleep", "now": now, "run_at": now, "status": "pending", "ready": 1,
            "unmet": 0, "attempts": 0, **_columns(kind, now), **changes}  # fmt: skip
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        connection.execute("PRAGMA synchronous = OFF").fetchall()
        start = ask(connection, "SELECT coalesce(max(seq), 0) FROM jobs")
        for done in range(0, count, _FILL_CHUNK):
            bounds = {"first": start + done + 1, "last": start + min(done + _FILL_CHUNK, count)}
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_FILL, {**row, **bounds})
            if kind == "blocked":
                connection.execute("INSERT INTO dependencies(job, depends_on) SELECT seq, ? FROM jobs WHERE seq "
                                   "BETWEEN ? AND ?", (start, *bounds.values()))  # fmt: skip
            connection.execute("COMMIT")
        # So that the system does not write it back while something is being measured.
        connection.execute("PRAGMA synchronous = FULL").fetchall()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def head(connection: sqlite3.Connection) -> int:
    """Return the number of the next job to be claimed where all are alike, 0 if none waits; takes microseconds."""
    rows = connection.execute("SELECT seq FROM jobs WHERE queue = 'default' AND ready = 1 "
                              "ORDER BY priority DESC, seq LIMIT 1").fetchall()  # fmt: skip
    return int(rows[0][0]) if rows else 0


def drained(connection: sqlite3.Connection) -> bool:
    """Return whether no job of the default queue waits or runs; takes microseconds."""
    running = "SELECT EXISTS (SELECT 1 FROM jobs WHERE queue = 'default' AND status = 'running')"
    return not head(connection) and not ask(connection, running)
