"""The power fails at any moment: what was acknowledged is there again, and nothing is there by halves.

A history of operations is written, each state noted once its commit is acknowledged; then the write-ahead log is
cut, and spoilt, as a power cut would leave it, and the copy must hold the state after exactly as many commits as
lie before the damage. Offsets inside of frames are drawn by chance, from a seed:

    python -m tests.test_power_loss --seed 7 --cuts 2000
"""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import struct
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import Job, JobScheduler, Queue, WorkQueue, connection
from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.aio_case import AioTestCase
from tests.engine import LEASE_MS, NOW, StoreTestCase, token
from tests.faults import Observer, Watched, contents, quick_commits, unsound, watched
from tests.support import TempDirTestCase, command, file_bytes, run

SEED, CUTS = 20_260_801, 40
PAGE, FRAME, HEADER = 4_096, 4_096 + 24, 32


def commit_ends(wal: bytes) -> list[int]:
    """Return the offset behind each commit in a log, by https://sqlite.org/fileformat2.html#walformat."""
    salt, ends = wal[16:24], []
    for offset in range(HEADER, len(wal) - FRAME + 1, FRAME):
        if wal[offset + 8 : offset + 16] != salt:
            break  # what is left of the log before it was begun anew
        if struct.unpack(">I", wal[offset + 4 : offset + 8])[0]:
            ends.append(offset + FRAME)
    return ends


class History(StoreTestCase):
    """A test with a history: `states` after each commit, and the file (`main`, `wal`) as the disk has it."""

    def setUp(self) -> None:
        patch = quick_commits()
        patch.start()
        self.addCleanup(patch.stop)
        super().setUp()
        patch = mock.patch.multiple(connection, CHECKPOINT_BYTES=10**9, CHECKPOINT_PAUSE_SECONDS=0.0)
        patch.start()
        self.addCleanup(patch.stop)
        self.random = random.Random(SEED)
        self.checkpoint()
        self.states = [self.state()]

    def state(self) -> dict[str, list[Any]]:
        return contents(self.store.sqlite)

    def checkpoint(self) -> None:
        """Have all of the log in the file, by the program's own checkpoint."""
        self.add(payload="before", queue="other")
        self.store._checkpoint(0)

    def step(self, call: Callable[[], Any]) -> Any:
        """Do what is one commit."""
        answer = call()
        self.states.append(self.state())
        self.assertTrue(self.states[-1] != self.states[-2], "nothing to lose")
        return answer

    def settle_and_claim(self, done: list[Job], failed: list[Job], now: int) -> list[Job]:
        """Do what a worker does in one transaction."""
        with self.store.transaction():
            self.store.complete_many([(job.seq, token(job), "1") for job in done], now_ms=now)
            for job in failed:
                self.store.fail(job.id, token(job), "x", now_ms=now)
            self.store.recover_expired(now_ms=now)
            self.store.promote(now_ms=now)
            return self.store.claim("w", now_ms=now, lease_ms=LEASE_MS, limit=3)

    def write_history(self) -> None:
        """Write 20 commits."""
        step = self.step
        step(lambda: self.add("a", payload="x" * 5_000, max_attempts=1))
        step(lambda: self.add_many([{"id": f"b{n}", "depends_on": ["a"] if n % 3 == 0 else [f"b{n - 1}"]}
                                    for n in range(12)]))
        held = step(lambda: self.settle_and_claim([], [], NOW))
        step(lambda: self.store.report("a", token(held[0]), 0.5, "half", now_ms=NOW))
        for now in range(NOW + 1, NOW + 5):
            held = step(lambda now=now, held=held: self.settle_and_claim(held, [], now))
        step(lambda held=held: self.settle_and_claim(held[1:], held[:1], NOW + 10))
        step(lambda: self.store.cancel("b11", now_ms=NOW + 11))
        step(lambda: self.store.retry("b11", now_ms=NOW + 12))
        step(lambda: self.add("k", idempotency_key="k", payload="y" * 20_000, run_at=NOW + 10**6))
        step(lambda: self.add_many([{"payload": "z" * 300, "idempotency_key": f"k{n}"} for n in range(40)]))
        held = step(lambda: self.settle_and_claim([], [], NOW + 20))
        step(lambda held=held: self.store.release(held[0].id, token(held[0]), now_ms=NOW + 21))
        step(lambda held=held: self.store.extend(held[1].id, token(held[1]), now_ms=NOW + 22, lease_ms=99))
        step(lambda: self.store.recover_expired(now_ms=NOW + 200))
        step(lambda: self.store.worker_arrives("w", host="h", pid=1, queues=[], types=[], now_ms=NOW))
        with closing(JobScheduler(self.db)) as scheduler:
            step(lambda: scheduler.add_jobs([{"job_id": "s", "payload": 1}], NOW))
            step(lambda: scheduler.claim_job("w", NOW, 5))

    def on_disk(self) -> tuple[bytes, bytes]:
        """Return what the disk holds: the file, the log."""
        found = file_bytes(self.db)
        return found[self.db.name], found[self.db.name + "-wal"]

    @contextmanager
    def after_power_loss(self, main: bytes, wal: bytes) -> Iterator[Path]:
        """Make what a power cut has left."""
        path = self.dir / "copy.db"
        path.write_bytes(main)
        path.with_name("copy.db-wal").write_bytes(wal)
        try:
            yield path
        finally:
            for left in self.dir.glob("copy.db*"):
                left.unlink()

    def check(self, main: bytes, wal: bytes, commits: int, work: bool = False) -> None:
        """Check that the copy holds the state after so many commits.

        Args:
            work: look with the program itself, and have it go on from there.
        """
        with self.after_power_loss(main, wal) as path:
            if work:
                with closing(Store(path)) as store:
                    self.check_state(store.sqlite, commits)
                    self.work_on(store)
            else:  # a fifth of the time: this one does not move the log into the file as it closes
                with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as sqlite:
                    self.check_state(sqlite, commits)

    def check_state(self, sqlite: sqlite3.Connection, commits: int) -> None:
        found = contents(sqlite)
        numbers = [n for n, state in enumerate(self.states) if state == found]
        self.assertTrue(found == self.states[commits], f"it has {numbers or 'no number of'} commits, not {commits}")
        self.assertEqual(unsound(sqlite), [])

    def work_on(self, store: Store) -> None:
        """Work off all that can be, and store more."""
        now = NOW + 10**9
        store.add(new_job("t", id="more"), now_ms=now)
        done = 0
        while True:
            store.recover_expired(now_ms=now)
            store.promote(now_ms=now)
            jobs = store.claim("w", now_ms=now, lease_ms=LEASE_MS, limit=20)
            if not jobs:
                break
            self.assertTrue(all(store.complete_many([(job.seq, token(job), None) for job in jobs], now_ms=now)))
            done += len(jobs)
        self.assertGreaterEqual(done, 1)
        counts = store.counts("default")
        self.assertEqual((counts["running"], counts["retrying"]), (0, 0))
        self.assertEqual(counts["pending"], len(store.blocked("default")))
        self.assertEqual(unsound(store.sqlite), [])


class LostEndTest(History):
    """The end of the log is missing, or something in it is spoilt."""

    cuts = CUTS

    def test_a_log_that_is_cut_anywhere(self) -> None:
        self.write_history()
        main, wal = self.on_disk()
        self.check_cuts(main, wal)

    def check_cuts(self, main: bytes, wal: bytes) -> None:
        ends = commit_ends(wal)
        self.assertEqual(len(ends), len(self.states) - 1, "each acknowledged operation is one commit of the log")
        for commits, end in enumerate([0, *ends]):
            with self.subTest(end=end):
                self.check(main, wal[:end], commits, work=True)
        boundaries = range(HEADER, len(wal) + 1, FRAME)
        near = {offset + by for offset in boundaries for by in (-1, 0, 1) if by == 0 or self.random.random() < 0.1}
        drawn = {self.random.randrange(len(wal)) for _ in range(self.cuts)}
        for offset in sorted((near | drawn) - {0, *ends}):
            with self.subTest(offset=offset):
                self.check(main, wal[:offset], sum(end <= offset for end in ends))

    def test_a_frame_that_is_spoilt(self) -> None:
        self.write_history()
        main, wal = self.on_disk()
        ends = commit_ends(wal)
        for start in range(HEADER, ends[-1], FRAME):
            commits = sum(end <= start for end in ends)
            spoilt = self.random.choice((
                bytes(FRAME), self.random.randbytes(FRAME), wal[start : start + 2_060] + bytes(FRAME - 2_060),
                bytes(24) + wal[start + 24 : start + FRAME]))
            if spoilt == wal[start : start + FRAME]:  # its second half was empty
                spoilt = bytes(FRAME)
            with self.subTest(start=start):
                self.check(main, wal[:start] + spoilt + wal[start + FRAME :], commits)

    def test_one_bit_in_the_log(self) -> None:
        self.write_history()
        main, wal = self.on_disk()
        ends = commit_ends(wal)
        for _ in range(self.cuts):
            at = self.random.randrange(HEADER, ends[-1])
            spoilt = bytearray(wal)
            spoilt[at] ^= 1 << self.random.randrange(8)
            with self.subTest(at=at):
                self.check(main, bytes(spoilt), sum(end <= at for end in ends))

    def test_a_log_that_was_begun_anew_over_an_older_one(self) -> None:
        """After a checkpoint the log starts over, and behind its end lies what was there before."""
        for n in range(30):
            self.add(f"old-{n}", payload="x" * 4_000, queue="other")
        before = len(self.on_disk()[1])
        self.store._checkpoint(0)
        self.states = [self.state()]
        self.write_history()
        main, wal = self.on_disk()
        self.assertEqual(len(wal), before, "it was not begun anew")
        self.assertLess(commit_ends(wal)[-1], len(wal) - 20 * FRAME)
        ends = commit_ends(wal)
        self.assertEqual(len(ends), len(self.states) - 1)
        for commits, end in enumerate([HEADER, *ends]):
            torn = wal[:end] + bytes(FRAME) + wal[end + FRAME :]
            with self.subTest(end=end):
                self.check(main, wal[:end], commits)
                self.check(main, torn, commits)


class CheckpointTest(History):
    """Power fails while a checkpoint writes the log's pages into the file; the log is whole until it is done."""

    def test_any_of_the_pages_have_been_written(self) -> None:
        old, _ = self.on_disk()
        self.write_history()
        _, wal = self.on_disk()
        self.store._checkpoint(0)
        new, kept = self.on_disk()
        self.assertEqual(kept, wal, "a checkpoint leaves the log alone")
        self.assertNotEqual(new, old)
        last = len(self.states) - 1
        pages = range(len(new) // PAGE)
        for n in range(20):
            share = self.random.random()
            mixed = bytearray(old.ljust(len(new) if n % 2 else len(old), b"\0"))
            for page in pages:
                if self.random.random() < share:
                    length = self.random.choice((PAGE, PAGE, PAGE // 2, 512))  # or only its beginning
                    start = page * PAGE
                    mixed.extend(bytes(max(0, start + PAGE - len(mixed))))
                    mixed[start : start + length] = new[start : start + length]
            with self.subTest(n=n):
                self.check(bytes(mixed), wal, last, work=n % 10 == 0)

    def test_all_of_the_pages_have_been_written(self) -> None:
        self.write_history()
        self.store._checkpoint(0)
        main, wal = self.on_disk()
        last = len(self.states) - 1
        self.check(main, wal, last)
        self.check(main, b"", last, work=True)


class Syncs(Observer):
    """Notes, for each commit, how that connection waits for the disk; and for each connection, its name."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, int]] = []
        self.opened: list[Watched] = []

    def open(self, name: str, carry_out: Callable[[], Watched]) -> Watched:
        self.opened.append(carry_out())
        return self.opened[-1]

    def run(self, connection: Watched, sql: str, carry_out: Callable[[], Any]) -> Any:
        if sql == "COMMIT":
            self.commits.append((connection.name, connection.ask("PRAGMA synchronous")[0][0]))
        return carry_out()


class SyncTest(TempDirTestCase):
    """A commit is acknowledged only after the disk has it."""

    FULL = 2

    def setUp(self) -> None:
        super().setUp()
        self.syncs = Syncs()
        watch = watched(self.syncs)
        watch.__enter__()
        self.addCleanup(watch.__exit__, None, None, None)

    def check(self, least: int) -> None:
        self.assertGreaterEqual(len(self.syncs.commits), least)
        self.assertEqual({how for _, how in self.syncs.commits}, {self.FULL})

    def test_a_queue(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t")
            queue.enqueue_many([{"type": "t"}, {"type": "t"}])
            for task in queue.work("w"):
                task.complete()
            queue.enqueue("t")
            queue.cancel("4")
            queue.retry("4")
        with Queue(self.db) as queue:  # a file that is there is opened in another way
            queue.enqueue("t")
        self.check(10)

    def test_a_scheduler(self) -> None:
        with JobScheduler(self.db) as scheduler:
            scheduler.add_jobs([{"job_id": "a", "payload": 1}], 0)
            job = scheduler.claim_job("w", 0, 10)
            assert job is not None
            scheduler.complete_job("a", job["lease_token"], None, 1)
        self.check(4)

    def test_a_guard_while_it_checkpoints(self) -> None:
        with mock.patch.multiple(connection, CHECKPOINT_BYTES=0, CHECKPOINT_PAUSE_SECONDS=0.0):
            with Queue(self.db, create=True) as queue:
                queue.enqueue("t")
                self.assertIsNotNone(queue._store._guard)
                writers = [each for each in self.syncs.opened if "mode=rw" in each.name]
                self.assertEqual([each.ask("PRAGMA synchronous") for each in writers], [[(self.FULL,)]] * 2)

    @unittest.skipUnless(sys.platform.startswith("linux") and shutil.which("strace"), "needs strace, on Linux")
    def test_the_id_is_printed_after_the_sync(self) -> None:
        self.assertEqual(run("init", "--database", self.db).returncode, 0)
        calls = "trace=write,pwrite64,writev,pwritev,fsync,fdatasync"
        tracing = ["strace", "-f", "-y", "-s", "8", "-e", calls, "-o", str(self.dir / "trace")]
        probe = self.spawn([*tracing, "true"]).finish()
        if probe.returncode:
            self.skipTest(f"strace may not trace here: {probe.stderr.strip()[:200]}")
        done = self.spawn([*tracing, *command("enqueue", "--database", self.db, "--type", "t")]).finish()
        self.assertEqual((done.returncode, done.stdout), (0, "1\n"), done.stderr)
        log = [(call, path) for call, path in re.findall(
            r"^\d+ +(\w+)\(\d+<([^>]*)>", (self.dir / "trace").read_text(), re.MULTILINE)]
        answered = max(n for n, (call, path) in enumerate(log) if call == "write" and path.endswith(".out"))
        wal = f"{self.db}-wal"
        written = [n for n, (call, path) in enumerate(log) if path == wal and "write" in call]
        synced = [n for n, (call, path) in enumerate(log) if path == wal and call in ("fsync", "fdatasync")]
        self.assertTrue(written, log)
        self.assertTrue([n for n in synced if written[-1] < n < answered], log)


class WorkQueueSyncTest(AioTestCase):
    """`WorkQueue`, whose commits are made by a thread."""

    async def test_its_commits(self) -> None:
        syncs = Syncs()
        with mock.patch.object(connection, "_PRAGMAS", REAL_PRAGMAS), watched(syncs):
            async with WorkQueue(self.db) as queue:
                await queue.enqueue("a", 1)
                lease = await queue.lease("w")
                assert lease is not None
                self.assertTrue(await queue.complete("a", lease.lease_token))
        self.assertGreaterEqual(len(syncs.commits), 4)
        self.assertEqual({how for _, how in syncs.commits}, {SyncTest.FULL})


REAL_PRAGMAS = connection._PRAGMAS


def main() -> None:
    """Run the tests with another seed, or more cuts."""
    global SEED
    arguments = sys.argv[1:]
    for option in ("--seed", "--cuts"):
        if option in arguments:
            at = arguments.index(option)
            value = int(arguments[at + 1])
            del arguments[at : at + 2]
            if option == "--seed":
                SEED = value
            else:
                LostEndTest.cuts = value
    unittest.main(argv=[sys.argv[0], *arguments])


if __name__ == "__main__":
    main()
