"""What a worker survives, and what survives a worker: kills, stops, locks, lost files, full disks, slow readers.

Every failure here is a real one: signals to real processes, locks of another connection, limits of the kernel.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import unittest
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial

from tests.support import Process, WorkerTestCase, alive, locked, sql, until

Scenario = Generator[None, None, None]


class KilledTest(WorkerTestCase):
    """SIGKILL to the supervisor."""

    def test_its_children_are_gone_within_2_seconds_and_its_job_runs_again_after_the_lease(self) -> None:
        self.queue.enqueue("step", {"gate": "go-{attempt}"}, id="job")
        self.queue.enqueue("hold-gil", id="last", max_attempts=1)
        first = self.worker("--workers", 2, "--lease-seconds", 1)
        self.until_started("job", "last")
        children = [event.pid for event in self.trace("start")]
        first.kill()
        until(lambda: not any(map(alive, children)), 2, "the children to be gone")
        expiry = self.job("job").lease_expires_at or 0
        second = self.worker("--lease-seconds", 1)
        until(lambda: len(self.trace("start")) == 3, 10, "the second start")
        job = self.job("job")
        self.assertEqual((job.status, job.attempts), ("running", 2))
        self.assertGreaterEqual(job.started_at or 0, expiry)
        self.open_gate("go-2")
        self.assertEqual(self.queue.wait("job", 10).status, "completed")
        self.assertEqual([row[:2] for row in self.failures("job")], [(1, "lease expired")])
        last = self.queue.wait("last", 10)
        self.assertEqual((last.status, last.attempts), ("failed", 1))
        self.assertRegex(last.last_error or "", "the lease of .* ran out")
        for id in ("job", "last"):
            self.assertRegex(second.stderr_text(), rf"job {id} .*the lease of .* ran out")

    def test_killed_over_and_over_everything_is_done_in_the_end(self) -> None:
        total = 1_500
        self.queue.enqueue_many([{"type": "step", "id": str(n), "max_attempts": 10} for n in range(1, total + 1)])
        for limit in (200, 500, 800):
            worker = self.worker("--workers", 2, "--lease-seconds", 0.5, "--log-level", "error")
            self.until_counts(partial(has_completed, limit), "some jobs")
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(5)
        self.worker("--workers", 2, "--lease-seconds", 0.5)
        self.until_counts({"completed": total}, "all jobs")
        starts = Counter(event.job for event in self.trace("start"))
        self.assertEqual(len(starts), total)
        self.assertLessEqual(max(starts.values()), 4)
        self.assertEqual(sql(self.db, "PRAGMA integrity_check"), [("ok",)])


class StoppedTest(WorkerTestCase):
    """SIGSTOP to the supervisor, and SIGCONT once its leases have run out."""

    def stop_past_its_lease(self) -> tuple[Process, Process]:
        """Return a worker that is stopped with `job` running, and one that has taken the job over."""
        self.queue.enqueue("step", {"gate": "go-{attempt}", "result": "a result"}, id="job")
        first = self.worker("--lease-seconds", 0.5)
        self.until_started("job")
        first.send_signal(signal.SIGSTOP)
        second = self.worker("--lease-seconds", 2)
        until(lambda: len(self.trace("start")) == 2, 10, "the second worker to take over")
        return first, second

    def test_its_late_result_is_refused_and_logged(self) -> None:
        first, _ = self.stop_past_its_lease()
        self.open_gate("go-1")
        until(lambda: self.trace("end"), 10, "the first attempt to end")
        first.send_signal(signal.SIGCONT)
        until(lambda: "refused: its result" in first.stderr_text(), 10, "the refusal to be logged")
        job = self.job("job")
        self.assertEqual((job.status, job.attempts, job.result_json), ("running", 2, None))
        self.open_gate("go-2")
        job = self.queue.wait("job", 10)
        self.assertEqual((job.status, job.attempts, job.result_json), ("completed", 2, '"a result"'))
        self.assertEqual([row[:2] for row in self.failures("job")], [(1, "lease expired")])

    def test_a_handler_that_still_runs_is_stopped(self) -> None:
        first, _ = self.stop_past_its_lease()
        child = self.trace("start")[0].pid
        first.send_signal(signal.SIGCONT)
        until(lambda: not alive(child), 10, "the first handler to be stopped")
        self.assertRegex(first.stderr_text(), "job job .*lease is lost")
        self.open_gate("go-2")
        self.assertEqual(self.queue.wait("job", 10).status, "completed")
        self.assertEqual([event[:3] for event in self.trace("end")], [("end", "job", 2)])
        # The first worker goes on: with the second one gone, it does the next job.
        self.queue.enqueue("step", id="next")
        self.assertEqual(self.queue.wait("next", 10).attempts, 1)

    def test_its_child_starts_nothing_once_the_lease_is_over(self) -> None:
        # After many short jobs the child holds several.  One of them stops the supervisor; the next try is
        # for the case that it was the last of those, or that the supervisor was stopped in a transaction.
        query = "SELECT id FROM jobs WHERE status = 'running' AND type = 'stop-supervisor'"
        for number in range(40):
            self.queue.enqueue_many([{"type": "echo"}] * 500)
            payload = {"once": f"once-{number}", "gate": f"gate-{number}"}
            self.queue.enqueue_many([{"type": "stop-supervisor", "payload": payload}] * 100)
            first = self.worker("--lease-seconds", 0.5)
            stopper = self.until_stopped(number + 1)
            behind = {id for (id,) in sql(self.db, query)} - {stopper}
            with locked(self.db, 0.1) as free:
                if free and behind:
                    break
            first.kill()
            self.open_gate(f"gate-{number}")
            self.drain()
        self.assertTrue(free and behind)
        self.worker("--lease-seconds", 5)
        self.until_counts(lambda counts: "pending" not in counts and counts.get("running", 0) <= 1,
                          "another worker to do the rest")  # fmt: skip
        self.open_gate(f"gate-{number}")
        self.until_counts(lambda counts: counts.keys() == {"completed"}, "the last one")
        first.send_signal(signal.SIGCONT)
        until(lambda: all(f"job {id} " in first.stderr_text() for id in behind), 10, "it to notice what it lost")
        starts = Counter(event.job for event in self.trace("start"))
        self.assertEqual({id: starts[id] for id in behind}, dict.fromkeys(behind, 1))
        self.assertEqual(self.counts().keys(), {"completed"})

    def until_stopped(self, times: int) -> str:
        """Return the id of the job that has stopped a supervisor, when so many have."""
        until(lambda: len(self.trace("stopped-it")) >= times, 20, "the supervisor to be stopped")
        return self.trace("stopped-it")[-1].job


class LongTest(WorkerTestCase):
    """What takes 5 seconds or more, all in one test.

    Each scenario begins something, yields, and goes on 5 seconds later.
    """

    def test_what_takes_long(self) -> None:
        with ExitStack() as locks:
            scenarios = {
                "a job of 5 s under a lease of 1 s": self.long_job_under_a_short_lease(),
                "a lock of 5 s when a job ends": self.lock_at_the_moment_a_job_ends(locks),
                "a lock longer than the lease": self.lock_longer_than_the_lease(locks),
                "a lock for good": self.lock_for_good(),
                "a lease of 2 s while 300,000 lines are enqueued": self.many_lines(),
            }
            for scenario in scenarios.values():
                next(scenario)
            end = time.monotonic() + 5
            until(lambda: time.monotonic() > end, 6, "5 seconds to be over", 0.05)
            locks.close()
            for name, scenario in scenarios.items():
                with self.subTest(name):
                    self.assertEqual(list(scenario), [])

    def long_job_under_a_short_lease(self) -> Scenario:
        queue = self.make_queue(self.dir / "long.db")
        queue.enqueue("step", {"seconds": 5}, id="long", max_attempts=1)
        workers = [self.worker("--lease-seconds", 1, db=self.dir / "long.db") for _ in range(2)]
        self.until_started("long")
        yield
        job = queue.wait("long", 10)
        self.assertEqual((job.status, job.attempts), ("completed", 1))
        self.assertEqual(len([event for event in self.trace("start") if event.job == "long"]), 1)
        for worker in workers:
            self.assertNotIn("lease", worker.stderr_text())

    def lock_at_the_moment_a_job_ends(self, locks: ExitStack) -> Scenario:
        db = self.dir / "lock.db"
        queue = self.make_queue(db)
        queue.enqueue_many([{"type": "step", "id": f"lock-{n}", "payload": {"gate": "unlock"}} for n in range(3)])
        queue.enqueue("step", id="after", depends_on=["lock-0"])
        workers = [self.ready(self.worker("--workers", n, "--lease-seconds", 10, db=db)) for n in (2, 3)]
        self.until_started("lock-0", "lock-1", "lock-2")
        locks.enter_context(locked(db))
        self.open_gate("unlock")
        yield
        for worker in workers:
            self.assertIsNone(worker.poll(), worker.stderr_text())
        self.assertEqual(queue.wait("after", 10).status, "completed")
        self.until_counts({"completed": 4}, "all to be completed", queue=queue)
        starts = Counter(event.job for event in self.trace("start"))
        for id in ("lock-0", "lock-1", "lock-2", "after"):
            self.assertEqual((starts[id], self.job(id, queue).attempts), (1, 1))
        text = "".join(worker.stderr_text() for worker in workers)
        self.assertRegex(text, "WARNING .*stayed locked by another process")
        self.assertLess(text.count("stayed locked"), 5)
        self.assertRegex(text, r"INFO .*the database works again after \d+\.\d s")

    def lock_longer_than_the_lease(self, locks: ExitStack) -> Scenario:
        db = self.dir / "longer.db"
        queue = self.make_queue(db)
        queue.enqueue("step", {"gate": "longer-{attempt}"}, id="longer")
        worker = self.worker("--lease-seconds", 1, db=db)
        self.until_started("longer")
        locks.enter_context(locked(db))
        self.open_gate("longer-1")
        yield
        # Its lease was over when the lock was, so the result counts for nothing; the job is not lost.
        self.open_gate("longer-2")
        job = queue.wait("longer", 10)
        self.assertEqual((job.status, job.attempts), ("completed", 2))
        self.assertRegex(worker.stderr_text(), "job longer .*refused: its result")

    def many_lines(self) -> Scenario:
        db = self.dir / "many.db"
        queue = self.make_queue(db)
        queue.enqueue("step", {"gate": "stored"}, id="beside", max_attempts=1)
        workers = [self.worker("--lease-seconds", 2, db=db) for _ in range(2)]
        self.until_started("beside")
        path = self.dir / "jobs.jsonl"
        path.write_text('{"type":"step","queue":"other","payload":{"message":"a line of the file"}}\n' * 300_000)
        enqueue = self.start("enqueue", "--database", db, "--file", path)
        yield
        done = enqueue.finish(60)
        self.assertEqual((done.returncode, done.stdout.count("\n")), (0, 300_000), done.stderr)
        self.open_gate("stored")
        job = queue.wait("beside", 10)
        self.assertEqual((job.status, job.attempts), ("completed", 1), job.last_error)
        self.assertEqual([event.job for event in self.trace("start")].count("beside"), 1)
        for worker in workers:
            self.assertNotIn("lease", worker.stderr_text())

    def lock_for_good(self) -> Scenario:
        db = self.dir / "good.db"
        self.make_queue(db)
        with locked(db):
            begun = time.monotonic()
            enqueue = self.start("enqueue", "--database", db, "--type", "echo")
            yield
            self.assertIsNone(enqueue.poll())
            done = enqueue.finish(20)
            self.assertLess(time.monotonic() - begun, 15)
            self.assertEqual((done.returncode, done.stdout), (75, ""))
            self.assertRegex(done.stderr, r"\Ajobqueue: .*good\.db.* locked .*try again\n\Z")


class FileTest(WorkerTestCase):
    """The file itself is lost, or cannot grow."""

    def test_a_replaced_or_deleted_file_ends_the_worker_with_1(self) -> None:
        cases = ("idle-deleted.db", "busy-deleted.db", "idle-replaced.db", "busy-replaced.db", "idle-logless.db")
        workers = {}
        for name in cases:
            queue = self.make_queue(self.dir / name)
            if name.startswith("busy"):
                queue.enqueue("step", {"gate": "never"}, id=name)
            workers[name] = self.worker(db=self.dir / name)
        for worker in workers.values():
            self.ready(worker)
        self.until_started("busy-deleted.db", "busy-replaced.db")
        for name in cases:
            if name.endswith("logless.db"):
                (self.dir / f"{name}-wal").unlink()
            elif name.endswith("deleted.db"):
                (self.dir / name).unlink()
            else:
                self.make_queue(self.dir / "other.db").close()
                os.replace(self.dir / "other.db", self.dir / name)
        for name, worker in workers.items():
            with self.subTest(name):
                done = worker.finish(5)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, rf"ERROR .*{name} was replaced or removed")
                self.assertNotIn("Traceback", done.stderr)
        self.assertFalse((self.dir / "idle-deleted.db").exists())
        self.assertFalse(any(alive(event.pid) for event in self.trace("start")))

    @unittest.skipUnless(hasattr(resource, "prlimit"), "only Linux lets us limit another process")
    def test_a_full_disk_loses_nothing(self) -> None:
        self.queue.enqueue("step", {"gate": "go", "result": "kept"}, id="job")
        self.queue.enqueue_many([{"type": "step"}] * 5)
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        worker = self.worker("--lease-seconds", 20, stderr=writer)  # no file: it could not grow either
        os.close(writer)
        self.until_started("job")
        limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1, limits[1]))
        self.open_gate("go")
        complaint = read_until(reader, b"trying again", 10)
        self.assertRegex(complaint.decode(), r"jobs\.db (cannot grow|cannot be read or written).*1 outcomes kept")
        self.assertIsNone(worker.poll())
        self.assertEqual(self.job("job").status, "running")
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
        job = self.queue.wait("job", 10)
        self.assertEqual((job.status, job.attempts, job.result_json), ("completed", 1, '"kept"'))
        self.until_counts({"completed": 6}, "the others")
        self.assertEqual(len(self.trace("start")), 6)
        self.assertIn(b"works again", read_until(reader, b"works again", 5))


class DescriptorsTest(WorkerTestCase):
    """A handler closes what is not its own, as a program that makes itself a daemon does."""

    def test_its_attempt_fails_and_the_worker_goes_on(self) -> None:
        (self.dir / "closing.py").write_text(
            "import os\nfrom jobqueue import handler\n\n@handler('close')\ndef close(payload, context):\n"
            "    os.closerange(payload, 256)\n")
        for first in (3, 0):
            self.queue.enqueue("close", first, id=f"from-{first}", max_attempts=1)
        self.queue.enqueue("echo", "a result", id="after")
        done = self.drain("--handlers", "./closing.py")
        for id in ("from-3", "from-0"):
            job = self.job(id)
            self.assertEqual((job.status, job.attempts), ("failed", 1))
            self.assertRegex(job.last_error or "", r"\Achild \d+ (exited with status 0|was killed by SIG\w+)\Z")
            self.assertRegex(done.stderr, rf"ERROR +job {id} .*failed for good: child \d+ ")
        self.assertEqual((self.job("after").status, self.job("after").result_json), ("completed", '"a result"'))
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn("Error", done.stderr)


class ReaderTest(WorkerTestCase):
    """Readers of stdout and stderr that stall."""

    def test_400_long_lines_through_4_children_to_a_slow_reader(self) -> None:
        lines = [f"{n:03}" + chr(ord("a") + n % 26) * 4_997 for n in range(400)]
        self.queue.enqueue_many([{"type": "print", "payload": {"message": line}} for line in lines])
        reader, writer = os.pipe()
        worker = self.worker("--workers", 4, "--lease-seconds", 0.5, "--drain", stdout=writer)
        os.close(writer)
        with open(reader, "rb") as stdout:
            # Nothing is read until leases of jobs that wait for their line have been extended twice.
            query = "SELECT max(lease_expires_at - started_at) FROM jobs WHERE status = 'running'"
            until(lambda: (sql(self.db, query)[0][0] or 0) > 1_500, 20, "leases to be extended")
            self.assertLess(self.counts().get("completed", 0), 20)
            text = stdout.read().decode()
        done = worker.finish()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(text.endswith("\n"))
        self.assertEqual(sorted(text.splitlines()), lines)
        self.assertNotIn("lease", done.stderr)
        self.assertEqual({(job.status, job.attempts) for job in self.queue.list()}, {("completed", 1)})

    def test_nobody_reads_the_log(self) -> None:
        self.queue.enqueue_many([{"type": "echo"}] * 20_000)
        reader, writer = os.pipe()
        worker = self.worker("--lease-seconds", 0.5, "--log-format", "json", stderr=writer)
        os.close(writer)
        with open(reader, "rb") as stderr:
            self.until_counts({"completed": 20_000}, "all jobs", 30)
            self.queue.enqueue("step", {"gate": "go"}, id="long")
            query = "SELECT lease_expires_at - started_at FROM jobs WHERE id = 'long' AND status = 'running'"
            until(lambda: sql(self.db, query) > [(1_000,)], 10, "its lease to be extended")
            self.open_gate("go")
            self.assertEqual(self.queue.wait("long", 10).attempts, 1)
            worker.terminate()
            text = stderr.read().decode()
        self.assertEqual(worker.finish(5).returncode, 0)
        dropped = [line for line in text.splitlines() if not line.startswith("{")]
        self.assertEqual(len(dropped), 1)
        self.assertRegex(dropped[0], r"^jobqueue: \d+ log lines were dropped$")
        entries = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        self.assertEqual(entries[0]["event"], "started")
        self.assertGreater(len(entries), 5_000)


class RaceTest(WorkerTestCase):
    """Two that want the same."""

    def test_two_workers_and_one_job_again_and_again(self) -> None:
        workers = [self.ready(self.worker()) for _ in range(2)]
        ids = [self.queue.wait(self.queue.enqueue("step"), 10).id for _ in range(60)]
        self.assertEqual([event.job for event in self.trace("start")], ids)
        self.assertEqual({job.attempts for job in self.queue.list()}, {1})
        for worker in workers:
            self.assertNotIn("WARNING", worker.stderr_text())


def has_completed(number: int, counts: dict[str, int]) -> bool:
    return counts.get("completed", 0) >= number


def read_until(descriptor: int, what: bytes, timeout: float) -> bytes:
    """Read a pipe until something has come by it; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    data = b""
    while what not in data:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise AssertionError(f"waited {timeout} s in vain for {what!r} after {data!r}")
        part = os.read(descriptor, 65_536)
        if not part:
            raise AssertionError(f"the pipe ended without {what!r} after {data!r}")
        data += part
    return data


if __name__ == "__main__":
    unittest.main()
