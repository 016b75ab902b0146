"""Opening a file: making it, refusing what is not ours without touching it, odd paths, upgrades.

`file_bytes` compares a file and all beside it, so "unchanged" also means that nothing was left there.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import stat
import struct
import sys
import unittest
from collections.abc import Callable
from contextlib import chdir, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import connection, place, schema
from jobqueue.db import Store
from jobqueue.errors import DatabaseError
from jobqueue.jobs import new_job
from tests.engine import NOW, StoreTestCase
from tests.support import TempDirTestCase, file_bytes

TABLES = ["dependencies", "failures", "jobs", "outputs", "workers"]


def write(path: Path, *statements: str) -> None:
    """Change a file as another program would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for statement in statements:
            other.execute(statement).fetchall()


class CreateTest(TempDirTestCase):
    """Making a file, and finding it made."""

    def test_a_new_file_is_private_and_marked_as_ours(self) -> None:
        with closing(Store(self.db, create=True)) as store:
            self.assertTrue(store.created)
            for name, value in {
                "application_id": 0x4A6F6251, "user_version": 2, "auto_vacuum": 2, "journal_mode": "wal",
                "synchronous": 2, "wal_autocheckpoint": 0, "journal_size_limit": 32_000_000, "mmap_size": 0,
                "trusted_schema": 0, "cell_size_check": 1, "fullfsync": 1,
            }.items():
                self.assertEqual(store.sqlite.execute(f"PRAGMA {name}").fetchall(), [(value,)], name)
            tables = store.sqlite.execute(
                "SELECT name, strict FROM pragma_table_list WHERE schema = 'main' AND type = 'table' "
                "AND name NOT LIKE 'sqlite%' ORDER BY name").fetchall()
            self.assertEqual(tables, [(name, 1) for name in TABLES])
            self.assertEqual(stat.S_IMODE(self.db.stat().st_mode), 0o600)
            self.assertEqual(stat.S_IMODE(Path(f"{self.db}-wal").stat().st_mode), 0o600)
        self.assertEqual(list(file_bytes(self.db)), ["jobs.db"], "the last to close leaves one file")

    def test_making_it_again_changes_nothing(self) -> None:
        Store(self.db, create=True).close()
        before = file_bytes(self.db)
        for create in (True, False):
            with closing(Store(self.db, create=create)) as store:
                self.assertFalse(store.created)
                self.assertEqual(store.commits, 0)
        self.assertEqual(file_bytes(self.db), before)

    def test_an_empty_or_blank_file_becomes_a_queue_and_keeps_its_mode(self) -> None:
        self.db.touch(0o640)
        blank = self.dir / "blank.db"
        write(blank, "VACUUM")
        self.assertGreater(blank.stat().st_size, 0)
        for path in (self.db, blank):
            mode = path.stat().st_mode
            before = file_bytes(path)
            with self.assertRaisesRegex(DatabaseError, f"{path} is empty; make it a queue with: .* init --data"):
                Store(path)
            self.assertEqual(file_bytes(path), before)
            with closing(Store(path, create=True)) as store:
                self.assertTrue(store.created)
                store.add(new_job("t"), now_ms=NOW)
            self.assertEqual(path.stat().st_mode, mode)

    def test_a_missing_file_is_an_error_that_names_init_and_makes_nothing(self) -> None:
        with self.assertRaises(DatabaseError) as caught:
            Store(self.db)
        self.assertEqual(str(caught.exception), f"there is no database {self.db}; create it with: "
                                                f"python -m jobqueue init --database {self.db}")
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_a_file_can_be_opened_while_another_process_writes(self) -> None:
        Store(self.db, create=True).close()
        with closing(sqlite3.connect(self.db, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with closing(Store(self.db, patience_seconds=0)) as store:
                self.assertEqual(store.list(), [])


class RefuseTest(TempDirTestCase):
    """What is not ours is refused, and not a byte of it changes."""

    def refuse(self, path: Path, message: str, *, ignore: str = "") -> None:
        """Expect that a file cannot be opened; what beside it ends in `ignore` may change."""
        def visible() -> dict[str, bytes]:
            found = file_bytes(path)
            return {name: data for name, data in found.items() if not ignore or not name.endswith(ignore)}

        before = visible()
        for create in (False, True):
            with self.assertRaisesRegex(DatabaseError, message) as caught:
                Store(path, create=create)
            self.assertIn(str(path), str(caught.exception))
            self.assertTrue(visible() == before, "the file has changed")  # assertEqual would compare for minutes

    def test_what_is_no_database(self) -> None:
        for name, data in {
            "text": b"to do:\n- write tests\n" * 300,
            "short": b"hello\n",
            "binary": bytes(range(256)) * 40,
            "half a header": b"SQLite format 3\0" + b"\x10\x00\x01\x01",
        }.items():
            path = self.dir / name
            path.write_bytes(data)
            self.refuse(path, "is not a SQLite database, so it was left alone; choose another path")

    def test_a_directory_or_a_path_that_leads_nowhere(self) -> None:
        for create in (False, True):
            with self.assertRaisesRegex(DatabaseError, "is a directory; name a file in it"):
                Store(self.dir, create=create)
        with self.assertRaisesRegex(DatabaseError, "cannot create .*: there is no directory /"):
            Store(self.dir / "none" / "jobs.db", create=True)
        os.mkfifo(self.dir / "pipe")
        for path in (self.dir / "pipe", "/dev/null"):
            with self.assertRaisesRegex(DatabaseError, "is no regular file"):
                Store(path, create=True)
        self.db.touch()
        with self.assertRaisesRegex(DatabaseError, "cannot create .*: there is no directory"):
            Store(self.db / "jobs.db", create=True)
        with self.assertRaisesRegex(DatabaseError, "holds a NUL character"):
            Store(f"{self.db}\0", create=True)
        self.assertEqual(self.db.stat().st_size, 0)

    def test_the_database_of_another_program(self) -> None:
        message = "is the database of another program, so it was left alone; choose another path"
        for name, statements in {
            "tables.db": ["CREATE TABLE t(a)", "INSERT INTO t VALUES (1)"],
            "wal.db": ["PRAGMA journal_mode = WAL", "CREATE TABLE jobs(a)"],
            "id.db": ["PRAGMA application_id = 7"],
            "version.db": ["PRAGMA user_version = 1"],
            "both.db": ["PRAGMA application_id = 7", "PRAGMA user_version = 1", "CREATE TABLE jobs(a)"],
            "utf16.db": ["PRAGMA encoding = 'UTF-16'", "CREATE TABLE t(a)"],
            "view.db": ["CREATE VIEW v AS SELECT 1"],
        }.items():
            with self.subTest(name):
                write(self.dir / name, *statements)
                self.refuse(self.dir / name, message)

    def test_the_database_of_another_program_that_is_using_it(self) -> None:
        path = self.dir / "foreign.db"
        write(path, "PRAGMA journal_mode = WAL", "CREATE TABLE t(a)")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("INSERT INTO t VALUES (1)")
            other.execute("BEGIN IMMEDIATE")
            other.execute("INSERT INTO t VALUES (2)")
            self.refuse(path, "another program", ignore="-shm")
            other.execute("COMMIT")
            self.assertEqual(other.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(other.execute("SELECT a FROM t").fetchall(), [(1,), (2,)])

    def crash(self, path: Path, *statements: str) -> None:
        """Run statements in a process that ends without closing."""
        code = f"import sqlite3, os; c = sqlite3.connect({str(path)!r}, isolation_level=None)\n"
        code += "".join(f"c.execute({statement!r}).fetchall()\n" for statement in statements) + "os._exit(0)"
        self.assertEqual(self.spawn([sys.executable, "-c", code]).finish().returncode, 0)

    def test_the_wal_and_the_hot_journal_of_a_program_that_crashed(self) -> None:
        wal, journal = self.dir / "wal.db", self.dir / "journal.db"
        self.crash(wal, "PRAGMA journal_mode = WAL", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
        self.assertGreater(Path(f"{wal}-wal").stat().st_size, 0)
        self.refuse(wal, "another program", ignore="-shm")
        self.crash(journal, "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)", "PRAGMA cache_size = 1", "BEGIN",
                   "INSERT INTO t WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 200) "
                   "SELECT zeroblob(4000) FROM n")
        self.assertGreater(Path(f"{journal}-journal").stat().st_size, 0)
        self.refuse(journal, "has an unfinished change of another program beside it, .*open it with that program")
        with closing(sqlite3.connect(journal)) as other:
            self.assertEqual(other.execute("SELECT * FROM t").fetchall(), [(1,)], "its owner can still recover it")

    def test_a_file_of_a_newer_version(self) -> None:
        Store(self.db, create=True).close()
        write(self.db, "PRAGMA user_version = 3")
        self.refuse(self.db, r"was made by a newer version of jobqueue \(its format is 3, this program knows "
                             r"formats up to 2\), so it was left alone; upgrade jobqueue")

    def test_a_damaged_file_of_ours(self) -> None:
        for name, statements, lacks in (
            ("table.db", ["DROP TABLE failures", "DROP TABLE outputs"], "failures, outputs"),
            ("version.db", ["PRAGMA user_version = 0"], "its version"),
        ):
            path = self.dir / name
            Store(path, create=True).close()
            write(path, *statements)
            self.refuse(path, f"is damaged: it lacks {lacks}; restore a backup")

    def test_a_truncated_file_of_ours(self) -> None:
        Store(self.db, create=True).close()
        data = file_bytes(self.db)["jobs.db"]
        for size in (1, 50, 512, 4_096, 5_000, 20_000):
            path = self.dir / f"{size}.db"
            path.write_bytes(data[:size])
            for create in (False, True):
                with self.assertRaises(DatabaseError):
                    Store(path, create=create)
            self.assertEqual(file_bytes(path)[path.name], data[:size])

    def test_damage_that_shows_later_is_a_database_error_too(self) -> None:
        with closing(Store(self.db, create=True)) as store:
            for n in range(200):
                store.add(new_job("t", "x" * 500, id=f"{n}"), now_ms=NOW)
        data = bytearray(file_bytes(self.db)["jobs.db"])
        middle = data.index(b"x" * 500) // 4_096 * 4_096
        data[middle : middle + 4_096] = b"\xff" * 4_096
        damaged = self.dir / "damaged.db"
        damaged.write_bytes(data)
        with closing(Store(damaged)) as store:
            with self.assertRaisesRegex(DatabaseError, "damaged.db is damaged; restore a backup") as caught:
                store.list()
            self.assertIsInstance(caught.exception.__cause__, sqlite3.DatabaseError)
            with self.assertRaisesRegex(DatabaseError, "is closed"):
                store.close()
                store.list()

    @unittest.skipIf(not hasattr(os, "geteuid") or os.geteuid() == 0, "permissions do not hold root back")
    def test_a_file_that_may_not_be_written(self) -> None:
        Store(self.db, create=True).close()
        self.db.chmod(0o400)
        with self.assertRaisesRegex(DatabaseError, "check the permissions"):
            Store(self.db)

    def test_a_network_mount_unless_told_otherwise(self) -> None:
        for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs"):
            with mock.patch.object(place, "file_system", return_value=kind):
                with self.assertRaisesRegex(DatabaseError, f"shared mount .{kind}., .*; use a local disk"):
                    Store(self.db, create=True)
                self.assertEqual(list(self.dir.iterdir()), [])
        with mock.patch.object(place, "file_system", return_value="nfs"), \
                mock.patch.dict(os.environ, JOBQUEUE_ALLOW_NETWORK_MOUNT="1"):
            Store(self.db, create=True).close()

    def test_the_mount_of_a_path_is_the_longest_and_the_last_of_equals(self) -> None:
        lines = [
            "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw",
            "30 22 0:26 / /mnt rw,relatime shared:2 - nfs4 server:/x rw",
            "31 30 0:27 / /mnt/a\\040b rw shared:3 master:9 - fuse.sshfs host: rw",
            "32 30 0:28 / /mnt/local rw - tmpfs tmpfs rw",
            "33 30 0:29 / /mnt/local rw - xfs /dev/x rw",
        ]
        for path, kind in {
            "/srv/x.db": "ext4", "/mnt/x.db": "nfs4", "/mntx/x.db": "ext4", "/mnt/a b/x.db": "fuse.sshfs",
            "/mnt/local/x.db": "xfs", "/mnt/locality/x.db": "nfs4",
        }.items():
            self.assertEqual(place.kind_of_mount(path, lines), kind)

    def test_a_sqlite_that_is_too_old(self) -> None:
        with mock.patch.object(connection, "OLDEST_SQLITE", (99, 0, 0)):
            with self.assertRaisesRegex(DatabaseError, "needs SQLite 3.38 or newer; this Python has 3"):
                Store(self.db, create=True)
        self.assertEqual(list(self.dir.iterdir()), [])


class KilledMakerTest(TempDirTestCase):
    """A process is killed while it makes a file: the next one makes it, or says that it is empty."""

    @staticmethod
    def die_at_statement(number: int) -> None:
        """Have this process killed when SQLite begins its `number`-th statement."""
        seen = 0

        def count(statement: str) -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        class Traced(sqlite3.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_trace_callback(count)

        connection.sqlite3.connect = partial(sqlite3.connect, factory=Traced)  # type: ignore[attr-defined]

    @staticmethod
    def die_at_size(size: int) -> None:
        """Have this process killed when one of its files is about to grow beyond so many bytes."""
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    @staticmethod
    def die_in_the_log_switch(size: int) -> None:
        """Have this process killed while the one page of its file changes, which waits for no more room."""
        other = sqlite3.connect("jobs.db", isolation_level=None)
        for statement in ("PRAGMA auto_vacuum = INCREMENTAL", "VACUUM", "PRAGMA cache_size = 1", "BEGIN",
                          "CREATE TABLE t(a)",
                          f"INSERT INTO t WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n "
                          f"WHERE n < {size}) SELECT zeroblob(4000) FROM n"):
            other.execute(statement).fetchall()
        os.kill(os.getpid(), signal.SIGKILL)

    def make_and_die(self, how: Callable[[int], None], where: int) -> bool:
        """Let a process make the file and be killed on the way; return whether it was."""
        for name in os.listdir(self.dir):
            os.unlink(self.dir / name)
        pid = os.fork()
        if pid == 0:  # nothing of the test may run on here
            try:
                os.chdir(self.dir)
                how(where)
                Store("jobs.db", create=True).close()
            finally:
                os._exit(7)
        _, status = os.waitpid(pid, 0)
        self.assertIn(status if os.WIFSIGNALED(status) else os.WEXITSTATUS(status),
                      (signal.SIGKILL, signal.SIGXFSZ, 7))
        return os.WIFSIGNALED(status)

    def state(self) -> dict[str, bytes]:
        """Return the files, without an index or an empty log, which say nothing; nobody has them open."""
        found = {path.name: path.read_bytes() for path in self.dir.iterdir()}
        return {name: data for name, data in found.items() if data and not name.endswith("-shm")}

    def assert_usable(self) -> None:
        """Expect that looking changes nothing, whatever it finds, and that `create` makes a queue of it."""
        before = self.state()
        try:
            Store(self.db).close()
        except DatabaseError as error:
            self.assertRegex(str(error), r"(is empty; make it a queue with|there is no database)")
            self.assertEqual(self.state(), before)
        with closing(Store(self.db, create=True)) as store:
            store.add(new_job("t"), now_ms=NOW)
            self.assertEqual(store.sqlite.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(store.sqlite.execute("PRAGMA auto_vacuum").fetchall(), [(2,)])
        with closing(Store(self.db)) as store:
            self.assertEqual([job.id for job in store.list()], ["1"])
        self.assertEqual(os.listdir(self.dir), ["jobs.db"])

    def test_at_any_statement(self) -> None:
        number, seen = 1, []
        while self.make_and_die(self.die_at_statement, number):
            state = self.state()
            if state not in seen:
                seen.append(state)
                with self.subTest(statement=number):
                    self.assert_usable()
            number += 1
        self.assertGreater(number, 30)
        self.assertGreaterEqual(len(seen), 2)

    def test_within_a_statement(self) -> None:
        sizes = (0, 100, 512, 2_048, 4_096, 4_608, 8_192, 32_768, 40_000, 80_000)
        for size in sizes:
            with self.subTest(size=size):
                self.assertTrue(self.make_and_die(self.die_at_size, size))
                self.assert_usable()
        self.assertFalse(self.make_and_die(self.die_at_size, 1_000_000))

    def test_while_its_only_page_is_changed(self) -> None:
        self.assertTrue(self.make_and_die(self.die_in_the_log_switch, 200))
        self.assertGreater(Path(f"{self.db}-journal").stat().st_size, 4_096)
        self.assert_usable()

    def test_a_journal_of_anything_else_is_left_alone(self) -> None:
        page = bytearray(b"SQLite format 3\0".ljust(512, b"\0"))
        for offset, byte in ((100, 13), (63, 0), (71, 0), (104, 0)):
            page[offset] = byte
        header = bytes.fromhex("d9d505f920a163d7") + bytes(8) + struct.pack(">III", 1, 512, 512)
        blank = header.ljust(512, b"\0") + struct.pack(">I", 1) + page + bytes(4)
        journal = Path(f"{self.db}-journal")

        def answer(data: bytes) -> bool:
            journal.write_bytes(data)
            return place.leads_back_to_blank(str(self.db))

        def changed(offset: int, byte: int) -> bytes:
            return blank[:offset] + bytes([byte]) + blank[offset + 1:]

        self.assertTrue(answer(blank))
        for what, data in {
            "nothing": b"", "a cut header": blank[:27], "another magic": changed(0, 0), "two pages": changed(19, 2),
            "another page": changed(515, 2), "a cut page": blank[:1_000], "a version": changed(516 + 63, 1),
            "a program": changed(516 + 71, 1), "a table": changed(516 + 104, 1), "no database": changed(516, 0),
            "a size of nothing": changed(26, 0),
        }.items():
            with self.subTest(what):
                self.assertFalse(answer(data))
        journal.unlink()
        self.assertFalse(place.leads_back_to_blank(str(self.db)))


class PathTest(TempDirTestCase):
    """Paths of all kinds name exactly one file."""

    def test_odd_characters_mean_nothing(self) -> None:
        names = ["a?mode=memory", "b#fragment", "c%41", "d e", "é", "quote'\"", "new\nline", ":memory:",
                 "file:x.db", "-dash", "semi;colon&amp=1", "back\\slash", "*", "~", "\U0001f680"]
        if sys.platform.startswith("linux"):
            names.append(os.fsdecode(b"not utf-8 \xff\xfe"))
        for name in names:
            with self.subTest(name=ascii(name)), chdir(self.dir):
                for path in (name, self.dir / name):
                    with closing(Store(path, create=True)) as store:
                        id, _ = store.add(new_job("t"), now_ms=NOW)
                self.assertEqual(id, "2")
                self.assertEqual(os.listdir(self.dir), [name])
                os.unlink(name)

    def test_the_wal_of_a_symbolic_link_lies_beside_its_target(self) -> None:
        target, link = self.dir / "a" / "target.db", self.dir / "b" / "link.db"
        target.parent.mkdir()
        link.parent.mkdir()
        link.symlink_to(target)
        with closing(Store(link, create=True)) as by_link, closing(Store(target)) as by_name:
            by_link.add(new_job("t"), now_ms=NOW)
            self.assertEqual(by_name.counts()["pending"], 1)
            self.assertGreater(by_link.wal_bytes(), 0)
            self.assertIn("target.db-wal", os.listdir(target.parent))
            self.assertEqual(os.listdir(link.parent), ["link.db"])

    def test_a_symbolic_link_that_leads_in_circles_is_an_error(self) -> None:
        self.db.symlink_to(self.db)
        for create in (False, True):
            with self.assertRaises(DatabaseError):
                Store(self.db, create=create)
        self.assertEqual(os.listdir(self.dir), ["jobs.db"])

    def test_a_relative_path_means_where_it_was_opened(self) -> None:
        elsewhere = self.dir / "elsewhere"
        elsewhere.mkdir()
        with chdir(self.dir):
            store = Store("jobs.db", create=True)
        with closing(store), chdir(elsewhere):
            store.add(new_job("t"), now_ms=NOW)
            self.assertFalse(store.is_replaced())
            self.assertGreater(store.wal_bytes(), 0)
        self.assertEqual(os.listdir(elsewhere), [])

    def test_a_replaced_moved_or_deleted_file_is_noticed(self) -> None:
        other = self.dir / "other.db"
        Store(other, create=True).close()
        with closing(Store(self.db, create=True)) as store:
            self.assertFalse(store.is_replaced())
            self.db.rename(self.dir / "moved.db")
            self.assertTrue(store.is_replaced())
            (self.dir / "moved.db").rename(self.db)
            self.assertFalse(store.is_replaced())
            other.replace(self.db)
            self.assertTrue(store.is_replaced())

    def test_a_second_opening_in_the_process_keeps_the_locks_of_the_first(self) -> None:
        with closing(Store(self.db, create=True)) as store, store.transaction():
            for path in (self.db, self.dir / ".." / self.dir.name / "jobs.db"):
                Store(path, patience_seconds=0).close()
            code = ("import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
                    "try: c.execute('BEGIN IMMEDIATE')\nexcept sqlite3.OperationalError as error: print(error)")
            done = self.spawn([sys.executable, "-c", code, str(self.db)]).finish()
            self.assertEqual(done.stdout, "database is locked\n", done.stderr)


class UpgradeTest(StoreTestCase):
    """An older file is brought up to date, whole or not at all."""

    def later(self, *migrations: str) -> Any:
        """Return a context in which the program is a later one, with these migrations."""
        migrations = (*schema.MIGRATIONS, *migrations)
        return mock.patch.multiple(schema, MIGRATIONS=migrations, VERSION=1 + len(migrations))

    def version(self) -> int:
        with closing(sqlite3.connect(self.db)) as other:
            return int(other.execute("PRAGMA user_version").fetchall()[0][0])

    def setUp(self) -> None:
        super().setUp()
        self.add("old")
        self.store.close()

    def test_an_older_file_is_upgraded_and_keeps_its_jobs(self) -> None:
        steps = ("CREATE TABLE tags(job INTEGER, tag TEXT) STRICT;\nCREATE INDEX tags_job ON tags(job);\n",
                 "INSERT INTO tags SELECT seq, 'old' FROM jobs;\n")
        with self.later(*steps):
            with closing(Store(self.db)) as store:
                self.assertFalse(store.created)
                self.assertEqual(store.sqlite.execute("SELECT * FROM tags").fetchall(), [(1, "old")])
                self.assertEqual([job.id for job in store.list()], ["old"])
            self.assertEqual(self.version(), 4)
            Store(self.db).close()
        with self.assertRaisesRegex(DatabaseError, "its format is 4, this program knows formats up to 2"):
            Store(self.db)

    def test_an_upgrade_that_fails_leaves_the_old_version(self) -> None:
        with self.later("CREATE TABLE tags(a) STRICT;\n"), self.assertRaises(DatabaseError):
            Store(self.db)
        with self.later("CREATE TABLE tags(a TEXT) STRICT;\n", "INSERT INTO nowhere VALUES (1);\n"):
            with self.assertRaises(DatabaseError):
                Store(self.db)
        self.assertEqual(self.version(), 2)
        with closing(Store(self.db)) as store:
            self.assertEqual([job.id for job in store.list()], ["old"])
            self.assertEqual(store.sqlite.execute("SELECT 1 FROM sqlite_master WHERE name = 'tags'").fetchall(), [])


if __name__ == "__main__":
    unittest.main()
