"""`backup`: the copy is whole and of one moment whatever others do, and nothing is ever overwritten by accident."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import unittest
from unittest import mock

from jobqueue import Queue, backup
from jobqueue.errors import DatabaseError
from tests.support import file_bytes, sql, until
from tests.test_cli import CliTestCase


class BackupTestCase(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.copy = self.dir / "copy.db"
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": "t", "payload": "x" * 1_000}] * 300)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.dir.iterdir() if entry.name.startswith(("copy", "jobs")))


class CopyTest(BackupTestCase):
    def test_it_is_a_private_and_sound_queue_of_its_own(self) -> None:
        old_mask = os.umask(0)
        self.addCleanup(os.umask, old_mask)
        done = self.main("backup", "--database", self.db, self.copy)
        self.assertEqual((done.code, done.out), (0, ""))
        self.assertRegex(done.err, r"\Ajobqueue: wrote .*copy\.db, [0-9,]+ bytes\n\Z")
        self.assertEqual(stat.S_IMODE(self.copy.stat().st_mode), 0o600)
        self.assertEqual(self.names(), ["copy.db", "jobs.db"])
        with Queue(self.copy) as copy, Queue(self.db) as queue:
            self.assertEqual([job.as_dict() for job in copy.iterate()], [job.as_dict() for job in queue.iterate()])
            self.assertEqual(len(copy.claim("w")), 1)
        self.assertEqual(sql(self.copy, "PRAGMA integrity_check"), [("ok",)])
        self.assertEqual(sql(self.copy, "PRAGMA journal_mode"), [("wal",)])

    def test_what_others_commit_meanwhile_is_not_in_it_and_does_not_restart_it(self) -> None:
        with Queue(self.db) as queue, Queue(self.db) as other:
            told: list[int] = []

            def write(pages: int, _: float) -> None:
                if len(told) < 5:
                    other.enqueue("late")
                told.append(pages)

            with mock.patch.object(backup, "PAGES_PER_STEP", 10):
                queue.backup(self.copy, progress=write)
            self.assertEqual(other.stats()["pending"], 305)
            self.assertEqual(told, sorted(set(told)))
            self.assertGreater(len(told), 10)
        self.assertEqual(sql(self.copy, "SELECT count(*) FROM jobs"), [(300,)])

    def test_json(self) -> None:
        done = self.main("backup", "--database", self.db, self.copy, "--json")
        self.assertEqual(json.loads(done.out), {"file": str(self.copy), "bytes": self.copy.stat().st_size})


class RefusedTest(BackupTestCase):
    def refuse(self, phrase: str, target: object, *options: object, code: int = 1) -> None:
        self.refused(code, phrase, "backup", "--database", self.db, *options, target)

    def test_its_own_file_by_whatever_name(self) -> None:
        link, hard = self.dir / "copy-link", self.dir / "copy-hard"
        link.symlink_to(self.db)
        os.link(self.db, hard)
        before = file_bytes(self.db)
        beside = [f"{self.db}-wal", f"{self.db}-journal"]
        for target in (self.db, link, hard, *beside, self.dir / "x" / ".." / "jobs.db"):
            with self.subTest(target=target):
                self.refuse("is the queue's own file", target, "--force")
        self.assertEqual(file_bytes(self.db), before)

    def test_what_is_there_unless_forced(self) -> None:
        self.copy.write_text("precious")
        self.refuse("is there already; choose another name, or replace it with --force", self.copy)
        self.assertEqual(self.copy.read_text(), "precious")
        self.assertEqual(self.main("backup", "--database", self.db, "--force", self.copy).code, 0)
        self.assertEqual(sql(self.copy, "SELECT count(*) FROM jobs"), [(300,)])
        with Queue(self.copy):  # its log would be taken for one of the new copy
            before = file_bytes(self.copy)
            self.refuse("is in use", self.copy, "--force")
            self.assertEqual(file_bytes(self.copy), before)

    def test_what_is_no_place_for_a_file(self) -> None:
        self.refuse("is a directory", self.dir, "--force")
        self.refuse("there is no directory", self.dir / "x" / "y.db")
        self.refuse("cannot be written to standard output", "-", code=2)
        self.refuse("no regular file", "/dev/null", "--force")
        self.refused(2, "name the file to write", "backup", "--database", self.db)

    def test_one_that_came_meanwhile_is_not_overwritten(self) -> None:
        with Queue(self.db) as queue, self.assertRaises(FileExistsError):
            queue.backup(self.copy, progress=lambda *_: self.copy.write_text("precious") and None)
        self.assertEqual((self.copy.read_text(), self.names()), ("precious", ["copy.db", "jobs.db"]))

    def test_a_damaged_file_gives_no_backup(self) -> None:
        page = sql(self.db, "SELECT rootpage FROM sqlite_master WHERE name = 'jobs_ready'")[0][0]
        with self.db.open("r+b") as file:  # nobody has it open
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 100)
        self.copy.write_text("the last good one")
        with Queue(self.db) as queue, self.assertRaisesRegex(DatabaseError, "damaged"):
            queue.backup(self.copy, force=True)
        self.assertEqual((self.copy.read_text(), [name for name in self.names() if "part" in name]),
                         ("the last good one", []))

    def test_an_interrupted_copy_leaves_nothing(self) -> None:
        with Queue(self.db) as queue, self.assertRaises(KeyboardInterrupt):
            queue.backup(self.copy, progress=mock.Mock(side_effect=KeyboardInterrupt))
        self.assertEqual(self.names(), ["jobs.db"])

    def test_killed_in_the_midst_there_is_no_half_file_under_the_name(self) -> None:
        program = ("import os, sys, time; from jobqueue import Queue, backup; backup.PAGES_PER_STEP = 5\n"
                   "def wait(*_): open(sys.argv[3], 'w').close(); time.sleep(60)\n"
                   "Queue(sys.argv[1]).backup(sys.argv[2], progress=wait)")
        started = self.dir / "started"
        process = self.spawn([sys.executable, "-c", program, str(self.db), str(self.copy), str(started)])
        until(started.exists, 20, "the copy to begin")
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        self.assertFalse(self.copy.exists())
        with Queue(self.db) as queue:
            self.assertGreater(queue.backup(self.copy), 0)
        self.assertTrue([name for name in self.names() if name.endswith(".part")])


if __name__ == "__main__":
    unittest.main()
