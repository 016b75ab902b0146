"""A wall clock that jumps, by an hour either way or by ten years, under each face and under a real worker.

Nothing starts before its time by the clock of the one who looks; once the clock is right again nothing is stuck
for longer than one lease; no loop floods meanwhile.  What is measured by a monotonic clock (heartbeats, timeouts,
waits) does not notice.
"""

from __future__ import annotations

import os
import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

from jobqueue import Queue
from jobqueue.jobs import new_job
from jobqueue.scheduler import JobScheduler
from tests.engine import LEASE_MS, NOW, StoreTestCase, counted, ids
from tests.support import FakeClock, Process, TempDirTestCase, WorkerTestCase, until

HOUR_MS = 3_600_000
TEN_YEARS_MS = 10 * 365 * 24 * HOUR_MS
JUMPS = {"an hour ahead": HOUR_MS, "an hour behind": -HOUR_MS, "ten years ahead": TEN_YEARS_MS}


class Face:
    """A way to the queue, with a clock that the test sets."""

    def __init__(self, test: TempDirTestCase, path: Any) -> None:
        self.clock = FakeClock(NOW)
        self.queue = Queue(path, create=True, clock=self.clock)
        test.addCleanup(self.queue.close)
        self.queue._store.sqlite.execute("PRAGMA synchronous = OFF")

    def add(self, id: str, after: tuple[str, ...] = ()) -> None:
        """Store a job that is due at once."""
        self.queue.enqueue("t", id=id, depends_on=after)

    def claim(self) -> tuple[str, str] | None:
        """Recover what has expired and claim one job: its id and token."""
        jobs = self.queue.claim("w", LEASE_MS / 1_000)
        return (jobs[0].id, jobs[0].lease_token or "") if jobs else None

    def complete(self, id: str, token: str) -> bool:
        """Settle a job."""
        return self.queue.complete(id, token)


class SchedulerFace(Face):
    """`JobScheduler`, which is told the time."""

    def __init__(self, test: TempDirTestCase, path: Any) -> None:
        super().__init__(test, path)
        self.scheduler = JobScheduler(path)
        test.addCleanup(self.scheduler.close)

    def add(self, id: str, after: tuple[str, ...] = ()) -> None:
        self.scheduler.add_jobs([{"job_id": id, "payload": 1, "dependencies": list(after)}], self.clock())

    def claim(self) -> tuple[str, str] | None:
        self.scheduler.recover_expired(self.clock())
        job = self.scheduler.claim_job("w", self.clock(), LEASE_MS)
        return (job["job_id"], job["lease_token"]) if job else None

    def complete(self, id: str, token: str) -> bool:
        return self.scheduler.complete_job(id, token, None, self.clock())


class StoreFace(Face):
    """The engine, each step in a transaction of its own."""

    def add(self, id: str, after: tuple[str, ...] = ()) -> None:
        self.queue._store.add(new_job("t", id=id, depends_on=after), now_ms=self.clock())

    def claim(self) -> tuple[str, str] | None:
        store, now = self.queue._store, self.clock()
        store.pull_back(now_ms=now)
        store.recover_expired(now_ms=now)
        store.promote(now_ms=now)
        jobs = store.claim("w", now_ms=now, lease_ms=LEASE_MS)
        return (jobs[0].id, jobs[0].lease_token or "") if jobs else None

    def complete(self, id: str, token: str) -> bool:
        return self.queue._store.complete(id, token, now_ms=self.clock())


class FacesTest(TempDirTestCase):
    """The same for `Store`, `Queue` and `JobScheduler`."""

    def each(self, test: Callable[[Face, int], None],
             faces: tuple[type[Face], ...] = (StoreFace, Face, SchedulerFace)) -> None:
        """Run `test` for each face and jump, on a new file."""
        for face in faces:
            for name, jump in JUMPS.items():
                with self.subTest(face=face.__name__, clock=name):
                    test(face(self, self.dir / f"{face.__name__} {name}.db"), jump)

    def test_what_is_there_starts_when_the_clock_is_right_again(self) -> None:
        def test(face: Face, jump: int) -> None:
            face.add("a")
            face.clock.advance(jump)
            if jump < 0:
                self.assertIsNone(face.claim(), "it is not due by this clock")
            face.clock.advance(-jump)
            claimed = face.claim()
            assert claimed is not None
            self.assertTrue(face.complete(*claimed))

        self.each(test)

    def test_a_lease_whose_clock_goes_wrong_is_given_to_nobody_twice(self) -> None:
        def test(face: Face, jump: int) -> None:
            face.add("a")
            first = face.claim()
            assert first is not None
            face.clock.advance(jump)
            second = face.claim()
            self.assertEqual(second is None, jump < 0, "only a clock that is past the end of a lease ends it")
            if second is not None:
                self.assertFalse(face.complete(*first), "the lease is somebody else's")
            self.assertTrue(face.complete(*(second or first)))
            self.assertFalse(face.complete(*(second or first)))
            face.clock.advance(-jump)
            self.assertIsNone(face.claim())

        self.each(test)

    def test_a_lease_ended_by_a_clock_ahead_leaves_the_job_due_at_once(self) -> None:
        def test(face: Face, jump: int) -> None:
            face.add("a")
            face.add("b")
            first = face.claim()
            assert first is not None
            face.clock.advance(jump)
            if jump > 0:
                other = face.claim()  # recovers a, and takes it
                assert other is not None
                face.queue.release(*other)
            face.clock.advance(-jump + LEASE_MS)  # one lease after the clock is right again
            found = [face.claim(), face.claim()]
            self.assertEqual([claimed and claimed[0] for claimed in found], ["a", "b"])

        self.each(test)

    def test_a_lease_taken_by_a_wrong_clock_is_over_one_lease_after_it_is_right(self) -> None:
        def test(face: Face, jump: int) -> None:
            face.clock.advance(-2 * HOUR_MS)
            face.add("a")
            face.clock.now_ms = NOW + jump
            self.assertIsNotNone(face.claim())
            face.clock.now_ms = NOW  # the clock is right again, and the holder has died
            found = face.claim()  # others look, as workers do all the time
            face.clock.advance(LEASE_MS)
            self.assertIsNotNone(found or face.claim(), "one lease after the clock is right again")

        self.each(test, (StoreFace, Face))  # the scheduler takes every time that it is told for right

    def test_a_dependent_freed_by_a_wrong_clock_is_due_when_it_is_right(self) -> None:
        def test(face: Face, jump: int) -> None:
            face.add("a")
            face.add("b", after=("a",))
            first = face.claim()
            assert first is not None
            face.clock.advance(jump if jump < 0 else LEASE_MS - 1)
            self.assertTrue(face.complete(*first))
            if jump < 0:
                self.assertIsNone(face.claim(), "b is not due by this clock")
            face.clock.now_ms = NOW
            claimed = face.claim()
            self.assertEqual(claimed and claimed[0], "b")

        self.each(test)


class EngineTest(StoreTestCase):
    """What the engine tells those who wait, and what holders may do, while the clock is wrong."""

    def test_a_scheduled_job_waits_for_its_time_whoever_has_promoted_it(self) -> None:
        self.add("a", run_at=NOW + 60_000)
        self.assertFalse(self.store.promote(now_ms=NOW + TEN_YEARS_MS))
        for now in (NOW - HOUR_MS, NOW, NOW + 59_999):
            self.assertEqual(self.claim(now), [])
            self.assertEqual(self.store.next_event(["default"]), NOW + 60_000)
        self.assertEqual(ids(self.claim(NOW + 60_000)), ["a"])

    def test_a_heartbeat_brings_a_lease_back_to_the_clock_of_now(self) -> None:
        for jump in JUMPS.values():
            with self.subTest(jump=jump):
                self.clear()
                self.add("a", NOW - 2 * HOUR_MS)
                job = self.take("a", NOW + jump)
                now = NOW + min(jump, 0)
                self.assertTrue(self.store.extend("a", job.lease_token or "", now_ms=now, lease_ms=LEASE_MS))
                self.assertEqual(self.store.recover_expired(now_ms=now + LEASE_MS - 1), [])
                self.assertEqual(len(self.store.recover_expired(now_ms=now + LEASE_MS)), 1)

    def test_operators_moves_by_a_wrong_clock_leave_a_job_that_is_due_when_it_is_right(self) -> None:
        for jump in (HOUR_MS, TEN_YEARS_MS):
            for move in ("release", "cancel and retry", "fail and retry"):
                with self.subTest(jump=jump, move=move):
                    self.clear()
                    self.add("a")
                    job = self.take("a", NOW + jump)
                    if move == "release":
                        self.assertTrue(self.store.release("a", job.lease_token or "", now_ms=NOW + jump))
                    elif move == "cancel and retry":
                        self.assertTrue(self.store.cancel("a", now_ms=NOW + jump))
                    else:
                        self.store.fail("a", job.lease_token or "", "no", now_ms=NOW + jump, final=True)
                    if move != "release":
                        self.assertTrue(self.store.retry("a", now_ms=NOW + jump))
                    self.assertEqual(ids(self.claim(NOW)), ["a"])

    def test_who_has_just_looked_is_never_told_to_look_again_at_once(self) -> None:
        """Such an answer would make a worker's loop turn without end."""
        self.add_many([{"run_at": NOW + n * 1_000, "max_attempts": 9} for n in range(-50, 50)])
        clock = NOW
        # First to the very millisecond of a start, then of the end of leases.
        jumps = (0, 7_000, LEASE_MS - 7_000, HOUR_MS, -HOUR_MS, -HOUR_MS, TEN_YEARS_MS, 1, -TEN_YEARS_MS, -1)
        for jump in jumps:
            clock += jump
            self.store.recover_expired(now_ms=clock)
            while self.claim(clock, limit=7):
                pass
            self.assertFalse(self.store.has_ready(["default"]))
            self.assertGreater(self.store.next_event(["default"]) or clock + 1, clock)
            before = self.contents()
            with counted(self.store.sqlite) as steps:
                self.store.recover_expired(now_ms=clock)
                self.assertEqual(self.claim(clock), [])
            self.assertEqual(self.contents(), before, "nothing is left to be done")
            self.assertLess(steps[0], 2_000)


class QueueTest(TempDirTestCase):
    """`Queue` reads the wall clock more than once in some calls, and waits by a monotonic one."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = FakeClock(NOW)
        self.queue = Queue(self.db, create=True, clock=self.clock)
        self.addCleanup(self.queue.close)

    def test_a_jump_while_a_batch_is_stored_prolongs_no_lease(self) -> None:
        store = self.queue._store
        store.worker_arrives("w", host="h", pid=1, queues=["default"], types=["t"], now_ms=NOW)
        for jump in JUMPS.values():
            with self.subTest(jump=jump):
                self.queue.enqueue("t")
                (job,) = self.queue.claim("w", LEASE_MS / 1_000)
                readings = iter((NOW, NOW + jump))
                self.queue._clock = lambda readings=readings: next(readings)  # type: ignore[misc]
                self.queue.enqueue_many([{"type": "t"}])
                self.queue._clock = self.clock
                self.assertIsNone(next(readings, None), "the clock has jumped in the middle")
                after = self.queue.get(job.id)
                assert after is not None
                self.assertEqual(after.lease_expires_at, NOW + LEASE_MS)

    def test_a_wait_ends_in_time_whatever_the_wall_clock_does(self) -> None:
        id = self.queue.enqueue("t")
        for jump in JUMPS.values():
            self.clock.advance(jump)
            with self.assertRaises(TimeoutError):
                self.queue.wait(id, timeout=0.01)
        self.clock.advance(TEN_YEARS_MS)
        (job,) = self.queue.claim("w")
        self.queue.complete(id, job.lease_token or "")
        self.assertEqual(self.queue.wait(id, timeout=30).status, "completed")

    def test_a_work_loop_ends_when_the_clock_steps_back_under_it(self) -> None:
        self.queue.enqueue_many([{"type": "t"}] * 20)
        done = 0
        for task in self.queue.work("w"):
            task.complete(None)
            done += 1
            if done == 5:
                self.clock.advance(-HOUR_MS)
            self.assertLess(done, 21)
        self.assertEqual(done, 5)
        self.clock.advance(HOUR_MS)
        self.assertEqual(sum(1 for _ in self.queue.work("w")), 15)

    def test_times_that_no_calendar_has_are_still_shown(self) -> None:
        self.clock.now_ms = 2**53
        id = self.queue.enqueue("t")
        job = self.queue.get(id)
        assert job is not None
        self.assertEqual(job.as_dict()["created_at"], str(2**53))
        self.assertEqual(self.queue.stats()["ready"], 1)


# A worker whose wall clock is off by what the file `clock` says; it counts its write transactions.
WORKER = """
import sqlite3, sys, time
real, connect, begun, last = time.time_ns, sqlite3.connect, [0], [0]

def shifted():
    try:
        with open("clock") as file:
            last[0] = int(file.read())
    except (OSError, ValueError):
        pass
    return real() + last[0] * 1_000_000

def note(statement):
    if statement == "BEGIN IMMEDIATE":
        begun[0] += 1
        with open("transactions", "w") as file:
            file.write(str(begun[0]))

def watched(*arguments, **options):
    connection = connect(*arguments, **options)
    connection.set_trace_callback(note)
    return connection

time.time_ns = shifted
sqlite3.connect = watched
from jobqueue.cli import main
sys.exit(main(sys.argv[1:]))
"""


class WorkerTest(WorkerTestCase):
    """A real worker whose wall clock is moved while its monotonic one goes on."""

    def begin(self, *options: object) -> Process:
        """Start a worker with two children and a clock to be moved."""
        own = ("--database", self.db, "--workers", 2, "--handlers", self.HANDLERS, "--log-level", "debug")
        words = [str(word) for word in ("worker", *own, *options)]
        return self.spawn([sys.executable, "-c", WORKER, *words], cwd=self.dir)

    def jump(self, offset_ms: int) -> None:
        """Set the worker's clock so far ahead of the right one."""
        scratch = self.dir / "clock.new"
        scratch.write_text(str(offset_ms))
        os.replace(scratch, self.dir / "clock")

    def transactions(self) -> int:
        """Return how many the worker has begun; 0 while it writes that down."""
        return int((self.dir / "transactions").read_text() or 0)

    def lease_end(self, id: str) -> int:
        """Return when a lease ends, in ms from now; an hour from now if there is none."""
        until_ms = self.job(id).lease_expires_at
        return HOUR_MS if until_ms is None else until_ms - time.time_ns() // 1_000_000

    def assert_calm(self, worker: Process, lines: int) -> None:
        """Watch the worker for a moment: it may send heartbeats, and should have little else to do."""
        before, begun = until(self.transactions), time.monotonic()
        until(lambda: time.monotonic() > begun + 0.3, 2, "a moment", 0.05)
        turns = until(self.transactions) - before
        self.assertLess(turns, 60 * (time.monotonic() - begun), "the loop turns without need")
        self.assertLess(worker.stderr_text().count("\n"), lines, worker.stderr_text()[-2_000:])

    def test_a_step_back_keeps_leases_and_holds_nothing_but_starts(self) -> None:
        self.queue.enqueue("step", {"gate": "go"}, id="long")
        self.queue.enqueue("until-stopped", id="limited", timeout=0.4, max_attempts=1)
        worker = self.begin("--lease-seconds", 0.6)
        self.until_started("long", "limited")
        self.jump(-HOUR_MS)
        until(lambda: self.lease_end("long") < -HOUR_MS + 60_000, 10, "a heartbeat by the new clock")
        self.queue.enqueue("echo", id="not yet")  # by the worker's clock it is due in an hour
        self.queue.enqueue("echo", id="due", run_at=int(time.time() * 1_000) - 2 * HOUR_MS)
        self.assertEqual(self.until_status("limited", "failed").last_error, "timed out after 0.4 s")
        self.until_status("due", "completed")
        self.assert_calm(worker, 20)
        self.assertEqual((self.job("not yet").status, self.job("long").status), ("pending", "running"))
        self.open_gate("go")
        self.assertEqual(self.until_status("long", "completed").attempts, 1)
        self.jump(0)
        self.until_status("not yet", "completed")
        self.assertNotIn("lost", worker.stderr_text())

    def test_a_step_ahead_starts_what_is_due_and_ends_no_time_limit(self) -> None:
        self.queue.enqueue("step", {"gate": "go"}, id="long", timeout=600)
        self.queue.enqueue("echo", id="later", delay="50m")
        self.queue.enqueue("echo", id="latest", delay="70m")
        worker = self.begin("--lease-seconds", 7_200)
        self.until_started("long")
        self.assertEqual(self.job("later").status, "pending")
        self.jump(HOUR_MS)
        self.until_status("later", "completed")
        self.assert_calm(worker, 20)
        self.assertEqual((self.job("latest").status, self.job("long").status), ("pending", "running"))
        self.open_gate("go")
        self.assertEqual(self.until_status("long", "completed").attempts, 1)

    def test_a_step_beyond_the_end_of_leases_takes_none_from_a_living_worker(self) -> None:
        self.queue.enqueue("step", {"gate": "go"}, id="long")
        worker = self.begin("--lease-seconds", 0.6)
        self.until_started("long")
        for offset in (HOUR_MS, TEN_YEARS_MS, 0):
            self.jump(offset)
            until(lambda offset=offset: abs(self.lease_end("long") - offset) < 60_000
                  or self.job("long").attempts > 1, 10, "a heartbeat by the new clock")  # fmt: skip
            self.assertEqual(self.job("long").attempts, 1, worker.stderr_text())
        self.assert_calm(worker, 20)
        self.open_gate("go")
        self.assertEqual(self.until_status("long", "completed").attempts, 1)
        self.assertEqual([event.job for event in self.trace("start")], ["long"])


if __name__ == "__main__":
    unittest.main()
