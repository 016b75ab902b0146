"""A file of the first version, as it was made then, is brought up to date and goes on working.

The tables of version 1 stand here as text, so that no later change of the program changes what is tested.
"""

from __future__ import annotations

import sqlite3
import unittest
from contextlib import closing
from pathlib import Path
from unittest import mock

from jobqueue import schema
from jobqueue.db import Store
from jobqueue.errors import DatabaseError
from tests.engine import NOW, StoreTestCase, token
from tests.support import TempDirTestCase, file_bytes

VERSION_1 = """
CREATE TABLE jobs(
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    queue TEXT NOT NULL,
    type TEXT NOT NULL,
    payload TEXT NOT NULL,
    priority INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    run_at INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('pending', 'running', 'retrying', 'completed', 'failed', 'canceled')),
    ready INTEGER NOT NULL CHECK (ready IN (0, 1)),
    unmet INTEGER NOT NULL DEFAULT 0 CHECK (unmet >= 0),
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL CHECK (max_attempts >= 1),
    timeout_ms INTEGER CHECK (timeout_ms > 0),
    idempotency_key TEXT,
    lease_owner TEXT,
    lease_token TEXT,
    lease_expires_at INTEGER,
    started_at INTEGER,
    finished_at INTEGER,
    result TEXT,
    last_error TEXT,
    progress REAL,
    progress_note TEXT,
    trace TEXT,
    CHECK (attempts BETWEEN 0 AND max_attempts),
    CHECK (ready = 0 OR (unmet = 0 AND status IN ('pending', 'retrying'))),
    CHECK ((status = 'running') = (lease_token IS NOT NULL)),
    CHECK ((lease_token IS NULL) = (lease_owner IS NULL)),
    CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL)),
    CHECK ((status IN ('completed', 'failed', 'canceled')) = (finished_at IS NOT NULL))
) STRICT;

CREATE TABLE dependencies(
    job INTEGER NOT NULL,
    depends_on INTEGER NOT NULL,
    PRIMARY KEY (job, depends_on)
) STRICT, WITHOUT ROWID;

CREATE TABLE failures(
    job INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    owner TEXT,
    started_at INTEGER,
    ended_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    error TEXT NOT NULL
) STRICT;

CREATE TABLE outputs(
    job INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    stream TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;

CREATE TABLE workers(
    id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    queues TEXT NOT NULL,
    types TEXT NOT NULL,
    allow_exec INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX jobs_ready ON jobs(queue, priority DESC, seq, run_at) WHERE ready = 1;
CREATE INDEX jobs_scheduled ON jobs(queue, run_at)
    WHERE ready = 0 AND unmet = 0 AND status IN ('pending', 'retrying');
CREATE INDEX jobs_waiting ON jobs(queue, seq) WHERE unmet > 0 AND status IN ('pending', 'retrying');
CREATE INDEX jobs_retrying ON jobs(seq, queue) WHERE status = 'retrying';
CREATE INDEX jobs_leases ON jobs(queue, lease_expires_at) WHERE status = 'running';
CREATE INDEX jobs_dead ON jobs(status, seq, queue) WHERE status IN ('failed', 'canceled');
CREATE INDEX jobs_finished ON jobs(finished_at, queue) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_number_ahead ON jobs(CAST(id AS INTEGER)) WHERE id GLOB '[1-9]*' AND CAST(id AS INTEGER) > seq;
CREATE UNIQUE INDEX jobs_idempotency_key ON jobs(idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX dependencies_reverse ON dependencies(depends_on, job);
CREATE INDEX failures_job ON failures(job, attempt);
CREATE INDEX outputs_job ON outputs(job, attempt);
INSERT INTO sqlite_sequence(name, seq) VALUES ('jobs', 0);
"""

LATER = NOW + 3_600_000
_OF_NEW = "id, queue, type, payload, priority, created_at, run_at, status, ready, unmet, attempts, max_attempts"
_LEASE = "lease_owner, lease_token, lease_expires_at, started_at"
JOBS = f"""
INSERT INTO jobs({_OF_NEW}, idempotency_key)
VALUES ('ready', 'default', 't', '1', 0, {NOW}, {NOW}, 'pending', 1, 0, 0, 3, 'key'),
       ('later', 'default', 't', '2', 0, {NOW}, {LATER}, 'pending', 0, 0, 0, 3, NULL),
       ('child', 'default', 'u', '3', 0, {NOW}, {NOW}, 'pending', 0, 2, 0, 3, NULL);
INSERT INTO jobs({_OF_NEW}, {_LEASE})
VALUES ('running', 'default', 't', '4', 0, {NOW}, {NOW}, 'running', 0, 0, 1, 3, 'w', 'held', {LATER}, {NOW});
INSERT INTO jobs({_OF_NEW}, started_at, finished_at, result, last_error)
VALUES ('again', 'default', 't', '5', 0, {NOW}, {LATER}, 'retrying', 0, 0, 1, 3, {NOW}, NULL, NULL, 'no luck'),
       ('done', 'other', 't', '6', 0, {NOW}, {NOW}, 'completed', 0, 0, 1, 3, {NOW}, {NOW}, '[7]', NULL),
       ('dead', 'default', 't', '7', 0, {NOW}, {NOW}, 'failed', 0, 0, 3, 3, {NOW}, {NOW}, NULL, 'no hope'),
       ('off', 'default', 't', '8', 0, {NOW}, {NOW}, 'canceled', 0, 0, 0, 3, NULL, {NOW}, NULL, NULL);
INSERT INTO dependencies VALUES (3, 4), (3, 6), (3, 7);
INSERT INTO failures
VALUES (5, 1, 'w', {NOW}, {NOW}, 'error', 'no luck'), (7, 3, 'w', {NOW}, {NOW}, 'error', 'no hope');
"""


def make(path: Path) -> None:
    """Make a queue as the first version did, with a job in each state."""
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL"):
            old.execute(f"PRAGMA {pragma}").fetchall()
        old.executescript(f"BEGIN; {VERSION_1} {JOBS} PRAGMA application_id = 0x4A6F6251; "
                          "PRAGMA user_version = 1; COMMIT;")
    path.chmod(0o600)


class FromVersion1Test(TempDirTestCase):
    """What the first version has left."""

    def setUp(self) -> None:
        super().setUp()
        make(self.db)

    def ask(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.db)) as other:
            return other.execute(query).fetchall()

    def test_it_becomes_what_a_new_file_is(self) -> None:
        with closing(Store(self.dir / "new.db", create=True)) as store:
            new = store.sqlite.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY 1, 2").fetchall()
        Store(self.db).close()
        self.assertEqual(self.ask("PRAGMA user_version"), [(schema.VERSION,)])
        self.assertEqual(self.ask("SELECT type, name, tbl_name FROM sqlite_master ORDER BY 1, 2"), new)
        self.assertEqual(self.ask("PRAGMA integrity_check"), [("ok",)])

    def test_its_jobs_go_on(self) -> None:
        before = self.ask("SELECT * FROM jobs ORDER BY seq"), self.ask("SELECT * FROM failures ORDER BY job")
        with closing(Store(self.db)) as store:
            self.assertFalse(store.created)
            after = self.ask("SELECT * FROM jobs ORDER BY seq"), self.ask("SELECT * FROM failures ORDER BY job")
            self.assertEqual(after, before)
            (job,) = store.claim("w2", now_ms=NOW, lease_ms=9, limit=9)
            self.assertEqual((job.id, job.payload), ("ready", 1))
            self.assertTrue(store.complete("ready", token(job), now_ms=NOW))
            self.assertTrue(store.complete("running", "held", now_ms=NOW))
            self.assertTrue(store.retry("dead", now_ms=NOW))
            self.assertTrue(store.retry("off", now_ms=NOW))
            for wanted in (["later", "again", "dead", "off"], ["child"]):
                while store.promote(now_ms=LATER):
                    pass
                jobs = store.claim("w2", now_ms=LATER, lease_ms=9, limit=9)
                self.assertEqual([job.id for job in jobs], wanted)
                for job in jobs:
                    self.assertTrue(store.complete(job.id, token(job), now_ms=LATER))
            self.assertEqual(store.counts()["completed"], 8)
            store.sqlite.execute("INSERT INTO enqueue(type, idempotency_key) VALUES ('t', 'key'), ('new', NULL)")
            self.assertEqual([job.id for job in store.list(limit=1)], ["9"])

    def test_a_program_that_had_it_open_goes_on(self) -> None:
        with closing(sqlite3.connect(self.db, isolation_level=None)) as old:
            claim = ("UPDATE jobs SET status = 'running', ready = 0, attempts = attempts + 1, lease_owner = 'o', "
                     "lease_token = 'x', lease_expires_at = ?, started_at = ? WHERE seq IN (SELECT seq FROM jobs "
                     "WHERE queue = 'default' AND ready = 1 ORDER BY priority DESC, seq LIMIT 1) RETURNING id")
            self.assertEqual(old.execute("SELECT count(*) FROM jobs WHERE ready = 1").fetchall(), [(1,)])
            Store(self.db).close()
            self.assertEqual(old.execute(claim, (LATER, NOW)).fetchall(), [("ready",)])

    def test_the_first_version_refuses_it_afterwards(self) -> None:
        Store(self.db).close()
        before = file_bytes(self.db)
        with mock.patch.multiple(schema, MIGRATIONS=(), VERSION=1), \
                self.assertRaisesRegex(DatabaseError, "newer version .*format is 2, .* up to 1"):
            Store(self.db)
        self.assertEqual(file_bytes(self.db), before)

    def test_two_that_open_it_at_once_bring_it_up_to_date_once(self) -> None:
        first = Store(self.db)
        self.addCleanup(first.close)
        with closing(Store(self.db)) as second:
            self.assertEqual((first.commits, second.commits), (0, 0))
            self.assertEqual([job.id for job in second.list(limit=1)], ["off"])


class IndexTest(StoreTestCase):
    """The index over all kinds of jobs serves who asks for it, and nobody else."""

    def plan(self, where: str) -> str:
        rows = self.query(f"EXPLAIN QUERY PLAN SELECT queue, type, status, count(*) FROM jobs {where}")
        return " ".join(row[3] for row in rows)

    def test_only_a_query_that_names_its_condition_uses_it(self) -> None:
        for where in (f"WHERE {schema.IS_ANY} GROUP BY queue, type, status",
                      f"WHERE {schema.IS_ANY} AND queue = 'q' GROUP BY type, status"):
            self.assertIn("COVERING INDEX jobs_kinds", self.plan(where))
        for where in ("GROUP BY queue, type, status", "WHERE queue = 'q' AND type = 't' AND status = 'pending'",
                      "WHERE status = 'retrying'"):
            self.assertNotIn("jobs_kinds", self.plan(where))


if __name__ == "__main__":
    unittest.main()
