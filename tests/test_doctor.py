"""`doctor`: every fault it knows is found and nothing else, with a remedy, and the file stays as it is."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import unittest
from pathlib import Path
from typing import Any

from jobqueue import Queue, checkup
from jobqueue.checkup import Finding, examine, has_wal_reset_bug
from jobqueue.db import Store
from jobqueue.times import now_ms
from tests.support import file_bytes, sql, until
from tests.test_cli import CliTestCase


class DoctorTestCase(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": "t", "id": "a"}, {"type": "t", "id": "b", "depends_on": ["a"]},
                                {"type": "t", "id": "c", "depends_on": ["a", "b"]}])

    def change(self, *statements: str) -> None:
        """Do to the file what no command does."""
        connection = sqlite3.connect(self.db, isolation_level=None)
        try:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            for statement in statements:
                connection.execute(statement)
        finally:
            connection.close()

    def faults(self, path: Path | None = None, **options: Any) -> list[Finding]:
        return [finding for finding in examine(str(path or self.db), now_ms=now_ms(), **options)
                if finding.severity in checkup.FAULTS]

    def found(self, check: str, phrase: str, **options: Any) -> Finding:
        """Expect exactly one fault."""
        (fault,) = self.faults(**options)
        self.assertEqual(fault.check, check)
        self.assertIn(phrase, fault.what)
        self.assertTrue(fault.remedy)
        return fault


class HealthyTest(DoctorTestCase):
    def test_a_file_at_rest_is_left_as_it_is(self) -> None:
        before = file_bytes(self.db)
        done = self.main("doctor", "--database", self.db)
        self.assertEqual((done.code, done.err), (0, f"jobqueue: {self.db} is healthy\n"), done.out)
        self.assertEqual(file_bytes(self.db), before)
        self.assertEqual(list(before), ["jobs.db"])

    def test_a_file_in_use_too(self) -> None:
        store = Store(self.db)
        self.addCleanup(store.close)
        store.worker_arrives("w", host="h", pid=1, queues=["default"], types=["t"], now_ms=now_ms())
        version = store.data_version()
        before = file_bytes(self.db)
        done = self.start("doctor", "--database", self.db, "--quick").finish()
        self.assertEqual(done.stderr, f"jobqueue: {self.db} is healthy as far as --quick looks\n")
        self.assertEqual(done.returncode, 0)
        self.assertIn("workers: 1 alive", done.stdout)
        after = file_bytes(self.db)
        for name in ("jobs.db", "jobs.db-wal"):
            self.assertEqual(after[name], before[name])
        self.assertEqual(store.data_version(), version)

    def test_json_has_every_check(self) -> None:
        lines = [json.loads(line) for line in self.main("doctor", "--database", self.db, "--json").out.splitlines()]
        self.assertEqual([line["check"] for line in lines], [
            "mount", "rights", "sqlite", "schema", "size", "log", "leases", "workers", "clocks", "pages",
            "dependencies"])  # fmt: skip
        self.assertEqual({tuple(line) for line in lines}, {("check", "severity", "what", "remedy")})

    def test_which_versions_of_sqlite_are_exposed(self) -> None:
        for version in ((3, 7, 0), (3, 40, 1), (3, 44, 5), (3, 45, 0), (3, 50, 6), (3, 51, 2)):
            self.assertTrue(has_wal_reset_bug(version), version)
        for version in ((3, 6, 23), (3, 44, 6), (3, 50, 7), (3, 51, 3), (3, 54, 1), (4, 0, 0)):
            self.assertFalse(has_wal_reset_bug(version), version)


class FaultsTest(DoctorTestCase):
    def test_dependencies(self) -> None:
        for phrase, statement in (
            ("1 dependencies name a job that is not there", "INSERT INTO dependencies VALUES (77, 1)"),
            ("1 dependencies name a job that is not there", "INSERT INTO dependencies VALUES (1, 77)"),
            ("(1 would wait for ever, 0 would start too early), as job 'c'",
             "UPDATE jobs SET unmet = 3 WHERE id = 'c'"),
            ("(0 would wait for ever, 1 would start too early), as job 'b'",
             "UPDATE jobs SET unmet = 0, ready = 1 WHERE id = 'b'"),
            ("(1 would wait for ever, 0 would start too early), as job 'a'",
             "UPDATE jobs SET unmet = 1, ready = 0 WHERE id = 'a'"),
        ):  # fmt: skip
            with self.subTest(statement=statement):
                before = sql(self.db, "SELECT unmet, ready FROM jobs ORDER BY seq")
                self.change(statement)
                fault = self.found("dependencies", phrase)
                self.assertEqual(self.faults(quick=True), [])
                self.change("DELETE FROM dependencies WHERE job = 77 OR depends_on = 77",
                            *(f"UPDATE jobs SET unmet = {unmet}, ready = {ready} WHERE seq = {seq}"
                              for seq, (unmet, ready) in enumerate(before, 1)))  # fmt: skip
                self.assertEqual(self.faults(), [])
        self.assertIn("export", fault.remedy or "")

    def test_the_remedy_for_miscounting_works(self) -> None:
        self.change("INSERT INTO dependencies VALUES (1, 77)", "UPDATE jobs SET unmet = 3 WHERE id = 'c'")
        records = self.main("export", "--database", self.db).out
        self.db = self.dir / "new.db"
        self.create()
        self.assertEqual(self.main("import", "--database", self.db, "-", stdin=records.encode()).code, 0)
        self.assertEqual(self.faults(), [])

    def test_schema(self) -> None:
        self.change("CREATE TRIGGER odd AFTER INSERT ON jobs BEGIN SELECT 1; END")
        self.found("schema", "trigger odd is not ours")
        self.change("DROP TRIGGER odd", "DROP INDEX jobs_ready")
        self.assertEqual(self.found("schema", "index jobs_ready is missing", quick=True).severity, "problem")
        self.change("CREATE INDEX jobs_ready ON jobs(queue)")
        self.found("schema", "index jobs_ready was changed", quick=True)

    def test_leases(self) -> None:
        with Queue(self.db, clock=lambda: now_ms() - 3_600_000) as queue:
            queue.enqueue("t", queue="it's")
            queue.claim("w", queues=["it's"])
        fault = self.found("leases", "the leases of 1 jobs, as '4', ran out 59 min ago")
        self.assertIn("--queue 'it'\"'\"'s'", fault.remedy or "")

    def test_what_is_only_noted(self) -> None:
        with Queue(self.db) as queue:
            queue.claim("library")
            queue._store.worker_arrives("w", host="far", pid=4, queues=[], types=[], now_ms=now_ms() - 600_000)
        notes = [finding.what for finding in examine(str(self.db), now_ms=now_ms())
                 if finding.severity == "note" and finding.check != "sqlite"]
        self.assertEqual(notes, [
            "1 running jobs belong to somebody who is not in the list of workers, as 'library'",
            "the worker on far, process 4, was last seen 10 min ago and has not said farewell"])  # fmt: skip

    def test_clocks(self) -> None:
        with Queue(self.db, clock=lambda: now_ms() + 3_600_500) as queue:
            queue.enqueue("t")
        self.found("clocks", "a job was queued 60 min in the future")

    def test_a_log_that_cannot_be_emptied(self) -> None:
        limit, pause = checkup.LARGE_WAL_BYTES, checkup.READER_LOOK_SECONDS
        self.addCleanup(setattr, checkup, "READER_LOOK_SECONDS", pause)
        self.addCleanup(setattr, checkup, "LARGE_WAL_BYTES", limit)
        checkup.LARGE_WAL_BYTES, checkup.READER_LOOK_SECONDS = 100, 0.0
        reader = self.spawn([sys.executable, "-c", "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1], "
                             "isolation_level=None); c.execute('BEGIN'); c.execute('SELECT count(*) FROM jobs')"
                             ".fetchall(); print('reading', flush=True); time.sleep(60)", str(self.db)])
        until(lambda: "reading" in reader.stdout_text(), 20, "the reader")
        with Queue(self.db) as queue:
            queue.enqueue("t")
        fault = self.found("log", "bytes; ", quick=True)
        if os.path.exists("/proc/locks"):
            self.assertIn(f"process {reader.pid} has", fault.what)

    def test_rights(self) -> None:
        for mode, phrase in ((0o604, "every user of this machine may read"), (0o602, "may write")):
            self.db.chmod(mode)
            fault = self.found("rights", phrase)
            self.assertIn("chmod", fault.remedy or "")
            self.assertIn(str(self.db), fault.remedy or "")


class DamagedTest(DoctorTestCase):
    def test_a_page_of_nonsense(self) -> None:
        page = sql(self.db, "SELECT rootpage FROM sqlite_master WHERE name = 'failures'")[0][0]
        with self.db.open("r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 100)
        done = self.main("doctor", "--database", self.db)
        self.assertEqual(done.code, 1)
        self.assertIn("problem  pages: ", done.out)
        self.assertIn("-> stop all workers and restore the newest backup", done.out)

    def test_whatever_is_there_instead_of_a_queue_is_one_clear_finding(self) -> None:
        whole = file_bytes(self.db)["jobs.db"]
        for number, (phrase, data) in enumerate((
            ("damaged", whole[:5_000]), ("not a SQLite database", b"hello, world\n" * 100),
            ("damaged", whole[:4_096] + b"\0" * (len(whole) - 4_096)), ("another program", b""),
            ("not a SQLite database", b"\xff" * 100_000),
        )):  # fmt: skip
            path = self.dir / f"odd{number}"
            path.write_bytes(data)
            path.chmod(0o600)
            with self.subTest(number=number):
                done = self.main("doctor", "--database", path)
                self.assertEqual(done.code, 1, done.out)
                self.assertIn(phrase, done.out)
                self.assertEqual(done.out.count("problem  "), 1, done.out)
                self.assertEqual(file_bytes(path), {path.name: data})

    def test_no_file(self) -> None:
        self.refused(1, "there is no database", "doctor", "--database", self.dir / "nix")
        done = self.main("doctor", "--database", self.dir)
        self.assertEqual((done.code, "is a directory" in done.out), (1, True))


if __name__ == "__main__":
    unittest.main()
