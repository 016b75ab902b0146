"""Ctrl+C and SIGTERM, once and twice, as a terminal and a service manager send them, at any moment."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jobqueue import Queue
from tests.support import TOP, Process, WorkerTestCase, children_of, locked, members_of, until

NOISE = ("Traceback", "KeyboardInterrupt", "Exception ignored", "Fatal Python error")


class Scene(NamedTuple):
    """A worker, and the queue that it serves alone."""

    worker: Process
    queue: Queue


class SignalTestCase(WorkerTestCase):
    """Signals go to the whole process group, as a terminal sends Ctrl+C."""

    def scene(self, id: str, type: str = "step", payload: object = None, *args: object) -> Scene:
        """Start a worker with one child, for which a job with that id is the first of 21."""
        path = self.dir / f"{id}.db"
        queue = self.make_queue(path)
        queue.enqueue(type, payload, id=id, priority=1)
        queue.enqueue_many([{"type": "step"}] * 20)
        return Scene(self.worker(*args, db=path), queue)

    def interrupt(self, worker: Process, number: int = signal.SIGINT) -> None:
        os.killpg(worker.pid, number)

    def until_noticed(self, worker: Process) -> None:
        until(lambda: " stopping: " in worker.stderr_text(), 10, "the first signal to be noticed")

    def assert_quiet_end(self, worker: Process, code: int, timeout: float = 20) -> None:
        """Expect an exit code, no traceback of any process, and none of them left."""
        done = worker.finish(timeout)
        self.assertEqual(done.returncode, code, done.stderr)
        for sign in NOISE:
            self.assertNotIn(sign, done.stderr)
        until(lambda: not members_of(worker.pid), 2, "the children to be gone")

    def assert_never_started(self, queue: Queue, number: int) -> None:
        """Expect so many pending jobs, none with a trace of having been claimed, and none running."""
        jobs = [(job.attempts, job.started_at) for job in queue.list("pending")]
        self.assertEqual(jobs, [(0, None)] * number)
        self.assertEqual(queue.list("running"), [])


class OnceTest(SignalTestCase):
    """The first signal: what runs may finish, nothing new starts."""

    def test_the_running_job_finishes_and_nothing_new_starts(self) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM)
        scenes = {number: self.scene(number.name, "step", {"gate": "go"}) for number in numbers}
        self.until_started("SIGINT", "SIGTERM")
        for number, (worker, queue) in scenes.items():
            self.interrupt(worker, number)
            self.until_noticed(worker)
            queue.enqueue("step", priority=9)
            self.assertIsNone(worker.poll())
        self.open_gate("go")
        for number, (worker, queue) in scenes.items():
            with self.subTest(signal=number.name):
                self.assert_quiet_end(worker, 0)
                self.assertEqual(self.job(number.name, queue).status, "completed")
                self.assert_never_started(queue, 21)
        self.assertEqual({event.job for event in self.trace("start")}, {"SIGINT", "SIGTERM"})

    def test_what_was_handed_out_and_not_started_is_given_back_with_its_attempt(self) -> None:
        # After many short jobs a child is handed several at a time.
        self.queue.enqueue_many([{"type": "echo"}] * 1_000)
        self.queue.enqueue("step", {"gate": "go"}, id="job")
        self.queue.enqueue_many([{"type": "step"}] * 200)
        worker = self.worker()
        self.until_started("job")
        self.interrupt(worker)
        self.until_noticed(worker)
        self.open_gate("go")
        self.assert_quiet_end(worker, 0)
        self.assertEqual(self.counts(), {"completed": 1_001, "pending": 200})
        self.assert_never_started(self.queue, 200)

    def test_what_waits_behind_a_short_job_does_not_start_either(self) -> None:
        # The supervisor has 8 ms to take it back, which it may miss on a busy machine, so it has several tries.
        for number in range(8):
            path = self.dir / f"{number}.db"
            queue = self.make_queue(path)
            queue.enqueue_many([{"type": "echo"}] * 500)
            queue.enqueue_many([{"type": "interrupt-supervisor", "payload": f"once-{number}"}] * 100)
            worker = self.worker(db=path)
            self.assert_quiet_end(worker, 0)
            self.assert_never_started(queue, self.counts(queue)["pending"])
            if self.trace()[-1].what == "interrupts" and "given back" in worker.stderr_text():
                return
        self.fail("each time something started after the signal")

    def test_after_the_grace_the_job_is_stopped_and_given_back(self) -> None:
        types = ("cleaning-up", "stubborn", "hold-gil")
        scenes = {type: self.scene(type, type, None, "--grace-seconds", 0.3) for type in types}
        self.until_started(*types)
        for worker, _ in scenes.values():
            self.interrupt(worker)
        for type, (worker, queue) in scenes.items():
            with self.subTest(type):
                self.assert_quiet_end(worker, 0)
                self.assert_never_started(queue, 21)
        self.assertEqual([event.job for event in self.trace("cleaned")], ["cleaning-up"])

    def test_an_idle_worker_ends_at_once(self) -> None:
        worker = self.ready(self.worker("--workers", 2))
        self.interrupt(worker, signal.SIGTERM)
        self.assert_quiet_end(worker, 0, timeout=5)

    def test_the_supervisor_alone_may_be_signaled(self) -> None:
        worker, queue = self.scene("job", "step", {"gate": "go"})
        self.until_started("job")
        worker.terminate()
        self.until_noticed(worker)
        self.open_gate("go")
        self.assert_quiet_end(worker, 0)
        self.assertEqual(self.counts(queue), {"completed": 1, "pending": 20})

    def test_while_somebody_else_has_the_file_locked_nothing_is_lost(self) -> None:
        worker, queue = self.scene("job", "step", {"gate": "go"})
        self.until_started("job")
        with locked(self.dir / "job.db"):
            self.open_gate("go")
            until(lambda: self.trace("end"), 10, "the job to end")
            self.interrupt(worker)
            self.until_noticed(worker)
            self.assertIsNone(worker.poll())
        self.assert_quiet_end(worker, 0)
        self.assertEqual(self.counts(queue), {"completed": 1, "pending": 20})
        self.assert_never_started(queue, 20)

    def test_a_file_that_stays_locked_does_not_keep_it_from_ending(self) -> None:
        worker, queue = self.scene("kept", "step", {"gate": "never"}, "--grace-seconds", 0.2)
        self.until_started("kept")
        with locked(self.dir / "kept.db"):
            self.interrupt(worker)
            done = worker.finish(12)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, "ERROR +jobs that could not be given back: 1; others can have them")
        self.assertEqual(self.counts(queue), {"running": 1, "pending": 20})


class TwiceTest(SignalTestCase):
    """The second signal: the end, at once."""

    def interrupt_twice(self, scenes: dict[str, Scene], number: int) -> float:
        """Send both signals to all; return when the second went out."""
        for worker, _ in scenes.values():
            self.interrupt(worker, number)
        for worker, _ in scenes.values():
            self.until_noticed(worker)
            self.assertIsNone(worker.poll())
        second = time.monotonic()
        for worker, _ in scenes.values():
            self.interrupt(worker, number)
        return second

    def test_it_ends_within_2_seconds_and_the_job_is_pending_again_with_its_attempt(self) -> None:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            ids = {f"{number.name}-{type}": type for type in ("step", "stubborn", "hold-gil")}
            scenes = {id: self.scene(id, type, {"gate": "never"}) for id, type in ids.items()}
            self.until_started(*ids)
            second = self.interrupt_twice(scenes, number)
            for id, (worker, queue) in scenes.items():
                with self.subTest(id):
                    self.assert_quiet_end(worker, code, timeout=max(0.0, second + 2 - time.monotonic()))
                    self.assertEqual(self.job(id, queue).status, "pending")
                    self.assert_never_started(queue, 21)

    def test_the_last_signal_gives_the_exit_code(self) -> None:
        worker, _ = self.scene("job", "step", {"gate": "never"})
        self.until_started("job")
        self.interrupt(worker, signal.SIGTERM)
        self.until_noticed(worker)
        self.interrupt(worker, signal.SIGINT)
        self.assert_quiet_end(worker, 130, timeout=2)

    def test_a_lock_held_by_somebody_else_does_not_delay_it(self) -> None:
        worker, queue = self.scene("job", "step", {"gate": "never"})
        self.until_started("job")
        with locked(self.dir / "job.db"):
            self.interrupt(worker)
            self.until_noticed(worker)
            self.interrupt(worker)
            self.assert_quiet_end(worker, 130, timeout=2)
        # It could not be given back; it runs again once its lease is over.
        self.assertEqual((self.job("job", queue).status, self.job("job", queue).attempts), ("running", 1))


class StalledReaderTest(SignalTestCase):
    """Nobody reads the worker's output; it ends all the same, and gives back what it could not print."""

    def stalled(self, stream: str, jobs: list[dict[str, object]], *args: object) -> Scene:
        """Return a worker whose stdout or stderr is a pipe that is full."""
        path = self.dir / f"{stream}{len(args)}.db"
        queue = self.make_queue(path)
        queue.enqueue_many(jobs)
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        self.addCleanup(os.close, writer)
        # Only without PYTHONUNBUFFERED are there buffers in Python whose lock a stuck thread would keep.
        options = {stream: writer, "env": {"PYTHONUNBUFFERED": None}}
        worker = self.worker(*args, db=path, **options)
        until(lambda: not select.select([], [writer], [], 0)[1], 20, "the pipe to be full")
        return Scene(worker, queue)

    def test_a_stalled_stdout(self) -> None:
        jobs: list[dict[str, object]] = [{"type": "print", "payload": {"message": "x" * 5_000}}] * 300
        once, twice = self.stalled("stdout", jobs, "--grace-seconds", 0.5), self.stalled("stdout", jobs)
        for worker, queue in (once, twice):
            self.until_counts(lambda counts: "running" in counts, "jobs that wait for their line", queue=queue)
            self.interrupt(worker)
            self.until_noticed(worker)
        self.interrupt(twice.worker)
        self.assert_quiet_end(twice.worker, 130, timeout=2)
        self.assert_quiet_end(once.worker, 0, timeout=5)
        for _, queue in (once, twice):
            self.assert_never_started(queue, 300 - self.counts(queue)["completed"])

    def test_a_stalled_stderr(self) -> None:
        worker, queue = self.stalled("stderr", [{"type": "echo"}] * 3_000)
        self.until_counts({"completed": 3_000}, "all to be completed", queue=queue)
        self.interrupt(worker)
        # Its complaints could not be read: the exit code of an abort would tell.
        self.assertEqual(worker.finish(5).returncode, 0)


class EarlyTest(SignalTestCase):
    """Ctrl+C while the worker is still starting."""

    def test_30_tries_10_to_150_ms_after_the_start(self) -> None:
        self.try_often(30, lambda worker: None)

    def test_15_tries_0_to_150_ms_after_its_first_child_was_started(self) -> None:
        self.try_often(15, lambda worker: until(lambda: children_of(worker.pid), 10, "a child", 0.002))

    def try_often(self, tries: int, wait: Callable[[Process], object]) -> None:
        """Send Ctrl+C at moments spread over 10 to 150 ms after what is waited for."""
        self.queue.enqueue_many([{"type": "sleep", "payload": {"seconds": 0.02}}] * 2_000)

        def one(number: int) -> tuple[Process, bool]:
            worker = self.start("worker", "--database", self.db, "--workers", 2)
            wait(worker)
            time.sleep(0.01 + 0.14 * number / tries)  # not waiting for anything: this is the moment
            self.interrupt(worker)
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                # Python can lose it while it is still starting itself, but never without a word.
                self.assertIn("KeyboardInterrupt", worker.stderr_text())
                self.assertNotIn(str(TOP / "jobqueue"), worker.stderr_text())
                self.interrupt(worker)
                self.assertEqual(worker.wait(20), 0)
                return worker, True
            return worker, False

        with ThreadPoolExecutor(3) as pool:
            for number, (worker, lost) in enumerate(pool.map(one, range(tries))):
                with self.subTest(number):
                    self.judge(worker, lost)
        self.assert_never_started(self.queue, 2_000 - self.counts().get("completed", 0))

    def judge(self, worker: Process, lost: bool) -> None:
        text, code = worker.stderr_text(), worker.returncode
        if lost or code in (1, -signal.SIGINT):
            # It hit the interpreter itself, before the first line of the package ran.
            self.assertNotIn(str(TOP / "jobqueue"), text)
            self.assertNotIn("multiprocessing", text)
        else:
            self.assertIn(code, (0, 130), text)
            for sign in NOISE:
                self.assertNotIn(sign, text)
        until(lambda: not members_of(worker.pid), 2, "its children to be gone")


if __name__ == "__main__":
    unittest.main()
