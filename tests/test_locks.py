"""Locks of other processes: one that never lets go, one that is killed, a reader that stays, many that contend.

The others are real programs that know nothing of this package: they hold what SQLite gives to any of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

from jobqueue import Queue
from jobqueue.connection import Connection
from jobqueue.jobs import new_job
from tests.engine import NOW, StoreTestCase, add_batch, token
from tests.support import Process, TempDirTestCase, WorkerTestCase, members_of, sql, until
from tests.test_cli import CliTestCase
from tests.test_races import RaceTestCase

OTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    connection.execute(statement).fetchall()
print("ready", flush=True)
sys.stdin.readline()
print(connection.execute("SELECT count(*) FROM jobs").fetchall()[0][0])
connection.execute("COMMIT")
"""
REWRITE = ("PRAGMA cache_size = 1", "BEGIN IMMEDIATE", "UPDATE jobs SET payload = json_array(hex(zeroblob(9000)))")
"""A change of all jobs, most of which lies in the write-ahead log before it is committed."""
PATIENCE_SECONDS = 0.2


def other(test: TempDirTestCase, db: Path, *statements: str) -> Process:
    """Start a program that runs the statements on a file and then waits for a line on its stdin, or for its end."""
    process = test.spawn([sys.executable, "-c", OTHER, str(db), *statements], stdin=subprocess.PIPE)
    until(lambda: "ready" in process.stdout_text() or process.poll() is not None, 20, "another program to be ready")
    test.assertIsNone(process.poll(), process.stderr_text())
    return process


def let_go(process: Process) -> int:
    """Have it end its transaction and itself; return how many jobs it saw at the end."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return int(process.finish(10).stdout.split()[-1])


class HolderTest(CliTestCase):
    """A program takes the write lock and never lets go; `test_survival` has the same at full length."""

    def patiently(self, *args: str) -> tuple[int, str, str]:
        """Run a command whose patience is short."""
        short = property(lambda _: PATIENCE_SECONDS, lambda *_: None)  # whoever opens the file, and however
        with mock.patch.object(Connection, "patience_seconds", short, create=True):
            return self.main(*args, "--database", self.db)

    def test_what_writes_ends_with_75_and_what_looks_is_not_disturbed(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t", id="dead", max_attempts=1)
            (job,) = queue.claim("w")
            queue.fail("dead", token(job), "boom")
        lines = self.dir / "jobs.jsonl"
        lines.write_text('{"type":"t"}\n' * 3)
        holder = other(self, self.db, "BEGIN IMMEDIATE")
        for args in (("enqueue", "--type", "t"), ("enqueue", "--file", str(lines)), ("retry-failed",),
                     ("retry-failed", "--id", "dead")):
            with self.subTest(args=args):
                begun = time.monotonic()
                code, out, err = self.patiently(*args)
                self.assertGreaterEqual(time.monotonic() - begun, PATIENCE_SECONDS)
                self.assertEqual((code, out), (75, ""), err)
                self.assertEqual(err, f"jobqueue: {self.db} stayed locked by another process for "
                                      f"{PATIENCE_SECONDS} seconds; try again\n")
        for args in (("init",), ("list",), ("list", "--json"), ("retry-failed", "--dry-run")):
            with self.subTest(args=args):
                self.assertEqual(self.patiently(*args)[0], 0)
        self.assertEqual(let_go(holder), 1)
        self.assertEqual(self.patiently("enqueue", "--type", "t")[0], 0)


class WorkerUnderLockTest(WorkerTestCase):
    """A worker, and a program that has the write lock."""

    def test_a_holder_killed_in_the_middle_of_its_change_leaves_no_trace(self) -> None:
        self.queue.enqueue("step", {"gate": "go", "result": "kept"}, id="job")
        self.queue.enqueue_many([{"type": "step"}] * 200)
        worker = self.worker("--lease-seconds", 20)
        self.until_started("job")
        size = os.stat(f"{self.db}-wal").st_size
        holder = other(self, self.db, *REWRITE)
        self.assertGreater(os.stat(f"{self.db}-wal").st_size, size + 1_000_000)
        self.open_gate("go")
        until(lambda: "1 outcomes kept" in worker.stderr_text(), 10, "the worker to find the file locked")
        self.assertEqual(self.job("job").status, "running")
        holder.kill()
        job = self.queue.wait("job", 10)
        self.assertEqual((job.status, job.attempts, job.result), ("completed", 1, "kept"))
        self.until_counts({"completed": 201}, "the others")
        self.assertLess(sql(self.db, "SELECT max(length(payload)) FROM jobs"), [(100,)])
        self.assertEqual(sql(self.db, "PRAGMA integrity_check"), [("ok",)])
        self.assertEqual(len(self.trace("start")), 201)

    def test_a_second_signal_ends_it_at_once_and_its_job_waits_for_the_lease(self) -> None:
        self.queue.enqueue("step", {"gate": "never"}, id="job")
        worker = self.worker("--lease-seconds", 1)
        self.until_started("job")
        other(self, self.db, "BEGIN IMMEDIATE")
        worker.send_signal(signal.SIGTERM)
        until(lambda: "stopping" in worker.stderr_text(), 10, "the first signal to be seen")
        worker.send_signal(signal.SIGTERM)
        done = worker.finish(10)
        self.assertEqual(done.returncode, 143, done.stderr)
        self.assertIn("jobs that could not be given back: 1", done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        until(lambda: not members_of(worker.pid), 5, "its children to be gone")
        self.assertEqual((self.job("job").status, self.job("job").attempts), ("running", 1))


class ReaderTest(StoreTestCase):
    """A program that begins to read and does not end it."""

    BATCH = 10_000
    BOUND = 34_000_000
    """More than `journal_size_limit`, to which the log is cut when it begins anew."""

    def work(self) -> int:
        """Enqueue jobs, claim and complete some of them; return the size of the log."""
        add_batch(self.store, [new_job("t", "x" * 600)] * self.BATCH)
        jobs = self.claim(limit=self.BATCH // 5)
        done = self.store.complete_many([(job.seq, token(job), None) for job in jobs], now_ms=NOW)
        self.assertEqual(done, [True] * (self.BATCH // 5))
        return self.store.wal_bytes()

    def test_while_it_stays_the_log_grows_and_afterwards_it_is_bounded_again(self) -> None:
        reader = other(self, self.db, "BEGIN", "SELECT * FROM jobs")
        sizes = [self.work() for _ in range(5)]
        self.assertEqual(sizes, sorted(set(sizes)), "it grows with each batch")
        self.assertGreater(sizes[-1], 1.5 * self.BOUND)
        self.assertEqual(let_go(reader), 0, "what it reads is as it was when it began")
        argv = [sys.executable, "-m", "jobqueue", "worker", "--database", str(self.db), "--drain", "--workers", "1",
                "--queue", "other"]
        self.add_many([{"type": "sleep", "payload": {"seconds": 0}, "queue": "other"}] * 20)
        done = self.spawn([*argv, "--log-level", "warning"]).finish(20)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        later = [self.store.wal_bytes(), *(self.work() for _ in range(2))]
        self.assertLess(max(later), self.BOUND, f"before: {sizes}")
        self.assertEqual(self.query("PRAGMA integrity_check"), [("ok",)])


class ContentionTest(RaceTestCase):
    """Many that all want the write lock, all the time."""

    EACH = 25
    LONGEST_SECONDS = 5.0
    """On an idle machine of two cores the longest wait is well below one second."""

    def test_20_hot_processes_and_none_of_them_starves(self) -> None:
        Queue(self.db, create=True).close()
        waits = self.race(20, f"""
queue, waits = Queue(path), []
ready()
for n in range({self.EACH}):
    begun = time.monotonic()
    queue.enqueue("t", id=me + "-" + str(n))
    waits.append(time.monotonic() - begun)
queue.close()
print(json.dumps(max(waits)))
""")
        report = "the longest wait of each, in seconds: " + ", ".join(f"{wait:.3f}" for wait in sorted(waits))
        self.assertLess(max(waits), self.LONGEST_SECONDS, report)
        wanted = sorted(f"{me}-{n}" for me in range(20) for n in range(self.EACH))
        self.assertEqual(sorted(id for (id,) in sql(self.db, "SELECT id FROM jobs")), wanted)
        self.healthy()


if __name__ == "__main__":
    unittest.main()
