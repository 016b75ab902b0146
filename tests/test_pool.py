"""The pool, with real child processes: every job given ends once, whatever becomes of its child."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue.child import CONTROL, DONE, ERROR, LATE, MAX_LATE_STOPS, REJECT, RETRY, STOPPED, _Runner
from jobqueue.errors import HandlerLoadError, JobQueueError
from jobqueue.events import LoadFailed, Outcome, Progress, Returned, Started
from jobqueue.jobs import Job
from jobqueue.pool import Pool
from jobqueue.process import Child
from tests.support import TempDirTestCase, alive, environment, until, zombies_of

SAMPLES = "tests.sample_handlers"
FOREVER = time.monotonic() + 1e6


def job(number: int, type: str = "echo", payload: str = "null", **changes: Any) -> Job:
    """Make a job as a claim would return it."""
    fields = dict.fromkeys(Job.COLUMNS)
    fields |= {"seq": number, "id": f"job-{number}", "queue": "default", "type": type, "payload": payload}
    fields |= {"priority": 0, "created_at": 0, "run_at": 0, "status": "running", "ready": 0, "unmet": 0}
    fields |= {"attempts": 1, "max_attempts": 3} | changes
    return Job(**fields)  # type: ignore[arg-type]


class PoolTestCase(TempDirTestCase):
    """Makes pools that end with the test, and collects their events."""

    def make(self, size: int = 1, handlers: tuple[str, ...] = (SAMPLES,), **options: Any) -> Pool:
        options = {"term_seconds": 5.0, "kill_seconds": 5.0} | options
        self.pool = Pool(size, handlers, **options)
        self.events: list[Any] = []
        self.addCleanup(self.pool.kill_all)
        self.pool.start()
        return self.pool

    def ready(self, size: int = 1, handlers: tuple[str, ...] = (SAMPLES,), **options: Any) -> Pool:
        pool = self.make(size, handlers, **options)
        self.assertTrue(pool.wait_ready(lambda: False))
        return pool

    def poll_until(self, done: Callable[[], Any], what: str = "it", timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                self.fail(f"waited {timeout} s in vain for {what}; events: {self.events}")
            self.events += self.pool.poll(0.2)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Poll until there are `count` events of a class, and return those."""
        self.poll_until(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__}")
        return self.of(kind)

    def give(self, *jobs: Job, child: Child | None = None, timeout_ms: int | None = None) -> Child:
        child = child or self.pool.idle()[0]
        for each in jobs:
            self.assertTrue(self.pool.give(child, each, FOREVER, timeout_ms))
        return child

    def run_one(self, type: str, payload: str = "null", timeout_ms: int | None = None) -> Outcome:
        """Run one job on an idle child, and return how it ended."""
        before = len(self.of(Outcome))
        self.poll_until(self.pool.idle, "an idle child")
        self.give(job(1, type, payload), timeout_ms=timeout_ms)
        found: Outcome = self.wait_for(Outcome, before + 1)[before]
        return found

    def assert_full_again(self) -> None:
        """The pool has its size again, and works."""
        self.poll_until(lambda: len(self.pool.idle()) == self.pool.size, "all children to be idle")
        self.assertEqual(self.run_one("echo", "5").value, "5")

    def terminal(self) -> list[Job]:
        """Return the jobs in terminal events, sorted; one that ended twice is there twice."""
        jobs = [event.job for event in self.of(Outcome)]
        jobs += [each for event in self.of(Returned) for each in event.jobs]
        return sorted(jobs, key=lambda each: each.seq)


class RunningTest(PoolTestCase):
    def test_a_thousand_jobs_through_two_children(self) -> None:
        pool = self.ready(2)
        waiting = [job(number, "echo", str(number)) for number in range(1_000)]
        todo = list(waiting)

        def feed() -> bool:
            for child in pool.children:
                while todo and len(child.handed) < 16 and pool.give(child, todo[0], FOREVER, None):
                    todo.pop(0)
            return len(self.of(Outcome)) == 1_000

        self.poll_until(feed, "1,000 outcomes")
        self.assertEqual(self.terminal(), waiting)
        for outcome in self.of(Outcome):
            self.assertEqual((outcome.kind, outcome.value), (DONE, outcome.job.payload_json))
            self.assertGreaterEqual(outcome.run_us, 0)

    def test_the_context_tells_of_the_job(self) -> None:
        pool = self.ready()
        self.assertIn("about", pool.types)
        self.assertIn("print", pool.types)
        child = self.give(job(5, "about", attempts=2, max_attempts=4, trace="t-1"))
        outcome = self.wait_for(Outcome)[0]
        outcome.job.result_json = outcome.value
        about = {"job_id": "job-5", "type": "about", "attempt": 2, "max_attempts": 4, "trace": "t-1"}
        self.assertEqual(outcome.job.result, {"pid": child.pid, "stopping": False, **about})

    def test_how_handlers_end(self) -> None:
        self.ready()
        rows: list[tuple[str, str, str, Any]] = [
            ("echo", "null", DONE, None),
            ("echo", '{"a":["ü\\u0000"]}', DONE, '{"a":["ü\\u0000"]}'),
            ("async", "[1]", DONE, "[1]"),
            ("sleep", '{"seconds":0}', DONE, None),
            ("nope", "null", ERROR, "LookupError: no handler for the type 'nope'; this worker knows about, "),
            ("sleep", "{}", ERROR, 'ValueError: payload["seconds"] is missing'),
            ("fail", '{"message":"boom"}', ERROR, "RuntimeError: boom"),
            ("not-json", "null", ERROR, "result is not JSON: Object of type object is not JSON serializable"),
            ("raise", '"exit"', ERROR, "SystemExit: exit"),
            ("raise", '"interrupt"', ERROR, "KeyboardInterrupt"),
            ("raise", '"memory"', ERROR, "MemoryError"),
            ("raise", '"surrogate"', ERROR, "ValueError: bad \\ud800 text"),
            ("recurse", "null", ERROR, "RecursionError: maximum recursion depth exceeded"),
            ("raise", '"retry"', RETRY, (1_500, "not yet")),
            ("raise", '"retry-usual"', RETRY, (None, "the handler asked for a retry")),
            ("raise", '"reject"', REJECT, "never"),
            ("fork-and-return", "null", DONE, "1"),
            ("fork-and-terminate", "null", DONE, "-15"),
        ]
        pid = self.pool.children[0].pid
        for type, payload, kind, value in rows:
            with self.subTest(type=type, payload=payload):
                outcome = self.run_one(type, payload)
                self.assertEqual(outcome.kind, kind)
                if isinstance(value, str) and kind == ERROR:
                    self.assertTrue(outcome.value.startswith(value), outcome.value)
                else:
                    self.assertEqual(outcome.value, value)
        self.assertEqual([child.pid for child in self.pool.children], [pid])
        self.assertIn(f'"pid":{pid},', self.run_one("about").value)  # and not a copy of it

    def test_print_comes_as_text_with_the_outcome(self) -> None:
        self.ready()
        self.assertEqual(self.run_one("print", '{"message":"hällo"}').text, "hällo\n")
        self.assertEqual(self.run_one("print", '{"message":[1]}').text, "[1]\n")
        self.assertIsNone(self.run_one("echo").text)

    def test_progress(self) -> None:
        self.ready()
        self.run_one("progress", "[0.1,0.2,0.3]")
        shown = [(event.fraction, event.note) for event in self.of(Progress)]
        self.assertEqual((shown[0], shown[-1]), ((0.1, "at 0.1"), (0.3, "at 0.3")))
        self.events.clear()
        self.run_one("progress", str([number / 10_000 for number in range(10_001)]))
        shown = [event.fraction for event in self.of(Progress)]
        self.assertLess(len(shown), 1_000)
        self.assertEqual((shown[0], shown[-1]), (0.0, 1.0))

    def test_a_payload_and_a_result_of_a_mebibyte(self) -> None:
        pool = self.ready()
        payload = '"' + "ä" * (512 * 1024 - 1) + '"'
        self.assertEqual(self.run_one("length", payload).value, str(512 * 1024 - 1))
        self.assertEqual(self.run_one("echo", payload).value, payload)
        child = self.give(job(1, "wait-for-file", f'"{self.dir / "go"}"'))
        self.wait_for(Progress)
        self.assertFalse(pool.give(child, job(2, "length", payload), FOREVER, None))
        self.assertTrue(pool.give(child, job(3, "echo", '"small"'), FOREVER, None))
        (self.dir / "go").touch()
        self.assertEqual([each.job.seq for each in self.wait_for(Outcome, 4)[2:]], [1, 3])

    def test_payloads_around_the_size_that_goes_by_the_stream(self) -> None:
        self.ready()
        for size in (59_000, 59_900, 60_000, 60_100, 65_536, 70_000, 300_000):
            with self.subTest(size=size):
                self.assertEqual(self.run_one("length", '"' + "x" * size + '"').value, str(size))

    def test_nothing_starts_past_its_deadline(self) -> None:
        pool = self.ready()
        self.assertTrue(pool.give(pool.idle()[0], job(1, "kill-me", '"SIGKILL"'), time.monotonic() - 0.001, None))
        outcome = self.wait_for(Outcome)[0]
        self.assertEqual((outcome.kind, outcome.value, outcome.run_us), (LATE, None, 0))

    def test_a_full_socket_is_no_error(self) -> None:
        pool = self.ready()
        child = self.give(job(0, "wait-for-file", f'"{self.dir / "go"}"'))
        self.wait_for(Progress)
        count = 0
        while pool.give(child, job(count + 1, "length", '"' + "x" * 1_000 + '"'), FOREVER, None):
            count += 1
            self.assertLess(count, 10_000)
        self.assertGreater(count, 10)
        (self.dir / "go").touch()
        self.wait_for(Outcome, count + 1)
        self.assertEqual([each.seq for each in self.terminal()], list(range(count + 1)))

    def test_a_child_is_replaced_after_its_share(self) -> None:
        self.ready(max_jobs_per_child=3)
        first = self.pool.children[0].pid
        pids = []
        for _ in range(7):
            pids.append(self.pool.children[0].pid)
            self.assertEqual(self.run_one("echo").kind, DONE)
            self.poll_until(self.pool.idle, "an idle child")
        self.assertEqual([pids.count(pid) for pid in dict.fromkeys(pids)], [3, 3, 1])
        self.assertEqual(pids[0], first)
        self.assertEqual(self.of(LoadFailed), [])


class TakeBackTest(PoolTestCase):
    def test_what_waits_behind_a_handler_that_holds_the_gil(self) -> None:
        pool = self.ready()
        child = self.give(job(1, "hold-gil"), timeout_ms=600_000)
        self.wait_for(Started)
        waiting = [job(2), job(3), job(4)]
        self.give(*waiting, child=child)
        self.assertEqual(pool.take_back(child), waiting)
        self.assertEqual(pool.take_back(child), [])
        self.assertEqual([each.seq for each in child.handed.values()], [1])
        self.assertEqual(self.of(Outcome), [])

    def test_from_a_child_that_is_stopped(self) -> None:
        pool = self.ready()
        child = pool.children[0]
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: "T" in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2], what="the stop")
        waiting = [job(1), job(2)]
        self.give(*waiting, child=child)
        self.assertEqual(pool.take_back(child), waiting)
        self.assertEqual(pool.idle(), [child])
        os.kill(child.pid, signal.SIGCONT)
        self.assertEqual(self.run_one("echo", "5").value, "5")
        self.assertEqual(self.terminal(), [self.of(Outcome)[0].job])

    def test_while_the_child_receives_each_job_ends_once(self) -> None:
        pool = self.ready()
        jobs = [job(number) for number in range(300)]
        todo, back = list(jobs), []
        while todo:
            child = pool.children[0]
            while todo and len(child.handed) < 20 and pool.give(child, todo[-1], FOREVER, None):
                todo.pop()
            self.events += pool.poll(0.0)
            back += pool.take_back(child)
        self.poll_until(lambda: not pool.children[0].handed, "the rest")
        ended = [each.job for each in self.of(Outcome)] + back
        self.assertEqual(sorted(each.seq for each in ended), list(range(300)))

    def test_since_when_the_head_runs(self) -> None:
        pool = self.ready()
        child = pool.children[0]
        self.assertIsNone(pool.running_since(child))
        before = time.monotonic()
        self.give(job(1, "wait-for-file", f'"{self.dir / "go"}"'), job(2, "wait-for-file", f'"{self.dir / "no"}"'))
        first = pool.running_since(child)
        assert first is not None
        self.assertLessEqual(before, first)
        (self.dir / "go").touch()
        self.wait_for(Outcome)
        second = pool.running_since(child)
        assert second is not None
        self.assertGreater(second, first)


class DeathTest(PoolTestCase):
    def test_the_job_of_a_child_that_dies_fails_with_the_reason(self) -> None:
        self.ready()
        rows = [
            ("kill-me", '"SIGKILL"', "child {} was killed by SIGKILL"),
            ("kill-me", '"SIGSEGV"', "child {} was killed by SIGSEGV"),
            ("exit-me", "3", "child {} exited with status 3"),
            ("exit-me", "0", "child {} exited with status 0"),
        ]
        for type, payload, message in rows:
            with self.subTest(type=type, payload=payload):
                self.poll_until(self.pool.idle, "an idle child")
                pid = self.pool.children[0].pid
                outcome = self.run_one(type, payload)
                self.assertEqual((outcome.kind, outcome.value), (ERROR, message.format(pid)))
        self.assert_full_again()
        self.assertEqual(zombies_of(os.getpid()), [])

    def test_what_waited_behind_it_comes_back(self) -> None:
        self.ready(2)
        child = self.give(job(1), job(2, "kill-me", '"SIGKILL"'), job(3), job(4))
        self.poll_until(lambda: len(self.terminal()) == 4, "four ends")
        self.assertEqual([each.seq for each in self.terminal()], [1, 2, 3, 4])
        self.assertEqual([(each.job.seq, each.kind) for each in self.of(Outcome)], [(1, DONE), (2, ERROR)])
        self.assertEqual([each.seq for each in self.of(Returned)[0].jobs], [3, 4])
        self.assertNotIn(child, self.pool.children)
        self.assert_full_again()

    def test_a_grandchild_that_keeps_the_descriptors_hides_nothing(self) -> None:
        self.ready()
        outcome = self.run_one("fork", f'"{self.dir / "pid"}"')
        pid = int((self.dir / "pid").read_text())
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        self.assertTrue(alive(pid))
        self.assertRegex(outcome.value, "exited with status 3")
        self.assert_full_again()

    def test_a_handler_that_closes_all_descriptors_is_ended(self) -> None:
        self.ready(kill_seconds=0.01)
        outcome = self.run_one("close-all")
        self.assertRegex(outcome.value, "was killed by SIGKILL")
        self.assert_full_again()

    def test_a_child_whose_reports_make_no_sense_is_ended(self) -> None:
        for data in ("ff" * 8, "0100000028", "050000007acccccccc", "04000000" + "29000000", "020000004e4e"):
            with self.subTest(data=data):
                pool = self.ready()
                self.assertRegex(self.run_one("garbage", f'"{data}"').value, "was killed by SIGKILL")
                self.assert_full_again()
                pool.close()

    def test_an_idle_child_that_dies_is_replaced(self) -> None:
        pool = self.ready()
        pid = pool.children[0].pid
        os.kill(pid, signal.SIGKILL)
        self.poll_until(lambda: pool.idle() and pool.idle()[0].pid != pid, "another child")
        self.assert_full_again()
        self.assertEqual([each for each in self.of(Outcome) if each.kind != DONE], [])

    def test_replacements_that_do_not_load_are_tried_with_pauses(self) -> None:
        path = self.dir / "own.py"
        path.write_text("")
        pool = self.ready(1, (str(path),))
        path.write_text("raise OSError('gone')")
        os.kill(pool.children[0].pid, signal.SIGKILL)
        self.wait_for(LoadFailed, 3)
        self.assertRegex(self.of(LoadFailed)[0].error, "OSError: gone in .*own.py, line 1")
        self.assertGreaterEqual(pool._respawn_at - time.monotonic(), 0.05)
        self.assertEqual(pool._failures, 3)
        path.write_text("")
        self.poll_until(pool.idle, "a child that loads")
        self.assertEqual(pool._failures, 0)

    def test_descriptors_and_zombies_are_not_left(self) -> None:
        pool = self.ready()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            self.run_one("exit-me", "1")
            self.poll_until(pool.idle, "an idle child")
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        self.assertEqual(zombies_of(os.getpid()), [])


class StopTest(PoolTestCase):
    def test_a_timeout_ends_the_handler(self) -> None:
        self.ready()
        outcome = self.run_one("sleep", '{"seconds":600}', timeout_ms=20)
        self.assertEqual((outcome.kind, outcome.value), (ERROR, "timed out after 0.02 s"))
        self.assertEqual([each.job for each in self.of(Started)], [outcome.job])
        self.assert_full_again()

    def test_a_timeout_that_is_ignored_ends_the_child(self) -> None:
        for type in ("stubborn", "hold-gil", "return-none-on-term", "wait-for-stop"):
            with self.subTest(type=type):
                self.ready(kill_seconds=0.2 if type in ("stubborn", "hold-gil") else 5.0)
                outcome = self.run_one(type, timeout_ms=300)
                self.assertEqual((outcome.kind, outcome.value), (ERROR, "timed out after 0.3 s"))
                self.assert_full_again()
                self.pool.close()

    def test_a_timeout_counts_from_the_start_of_the_handler(self) -> None:
        self.ready()
        child = self.give(job(1, "wait-for-file", f'"{self.dir / "go"}"'))
        self.give(job(2), child=child, timeout_ms=1)
        self.wait_for(Progress)
        self.assertEqual((self.of(Started), self.pool.next_deadline()), ([], None))
        (self.dir / "go").touch()
        self.wait_for(Outcome, 2)
        self.assertEqual([each.job.seq for each in self.of(Started)], [2])

    def test_a_job_in_time_leaves_no_timer(self) -> None:
        self.ready()
        self.assertEqual(self.run_one("echo", timeout_ms=600_000).kind, DONE)
        self.assertIsNone(self.pool.next_deadline())

    def test_a_timeout_returns_what_waited(self) -> None:
        self.ready()
        child = self.give(job(1, "sleep", '{"seconds":600}'), timeout_ms=50)
        self.give(job(2), job(3), child=child)
        self.poll_until(lambda: len(self.terminal()) == 3, "three ends")
        self.assertEqual([each.seq for each in self.of(Returned)[0].jobs], [2, 3])
        self.assert_full_again()
        self.assertEqual(len(self.terminal()), 4)

    def test_many_timeouts_leave_no_zombie(self) -> None:
        pool = self.ready(2)
        todo = [job(number, "sleep", '{"seconds":600}') for number in range(12)]

        def feed() -> bool:
            for child in pool.idle():
                if todo and pool.give(child, todo[-1], FOREVER, 1):
                    todo.pop()
            return len(self.of(Outcome)) == 12

        self.poll_until(feed, "12 timeouts", 60)
        self.assertEqual({each.value for each in self.of(Outcome)}, {"timed out after 0.001 s"})
        self.assert_full_again()
        self.assertEqual(zombies_of(os.getpid()), [])

    def test_stop_job_asks_first(self) -> None:
        pool = self.ready()
        running, waiting = job(1, "wait-for-stop"), job(2)
        child = self.give(running, waiting)
        self.wait_for(Progress)
        self.assertTrue(pool.stop_job(running, "canceled by an operator", grace=600.0))
        outcome = self.wait_for(Outcome)[0]
        self.assertEqual((outcome.kind, outcome.value), (STOPPED, "canceled by an operator"))
        self.assertEqual(self.of(Returned)[0].jobs, [waiting])
        self.assertFalse(pool.stop_job(running, "again", grace=0.0))
        self.assert_full_again()
        self.assertNotIn(child, pool.children)

    def test_stop_job_then_terminates_then_kills(self) -> None:
        for type, grace, kill_seconds in (("sleep", 0.0, 600.0), ("sleep", 0.02, 600.0), ("stubborn", 0.0, 0.05)):
            with self.subTest(type=type, grace=grace):
                pool = self.ready(kill_seconds=kill_seconds)
                running = job(1, type, '{"seconds":600}')
                self.give(running, timeout_ms=600_000)
                self.wait_for(Started)
                pool.stop_job(running, "lease lost", grace=grace)
                outcome = self.wait_for(Outcome)[0]
                self.assertEqual((outcome.kind, outcome.value), (STOPPED, "lease lost"))
                self.assert_full_again()
                pool.close()

    def test_sigterm_is_repeated_and_raises_once(self) -> None:
        self.enterContext(mock.patch("jobqueue.pool.TERM_AGAIN_SECONDS", 0.01))
        pool = self.ready(kill_seconds=600.0)
        running = job(1, "clean-up", f'"{self.dir / "clean"}"')
        self.give(running)
        self.wait_for(Progress)
        pool.stop_job(running, "now", grace=0.0)
        self.assertEqual(self.wait_for(Outcome)[0].kind, STOPPED)
        self.assertTrue((self.dir / "clean").exists())

    def test_repeating_sigterm_does_not_put_off_sigkill(self) -> None:
        self.enterContext(mock.patch("jobqueue.pool.TERM_AGAIN_SECONDS", 0.01))
        pool = self.ready(kill_seconds=0.1)
        running = job(1, "stubborn")
        self.give(running, timeout_ms=600_000)
        self.wait_for(Started)
        pool.stop_job(running, "now", grace=0.0)
        self.assertEqual(self.wait_for(Outcome)[0].kind, STOPPED)
        self.assert_full_again()

    def test_a_longer_grace_never_delays_an_earlier_stop(self) -> None:
        pool = self.ready()
        running = job(1, "sleep", '{"seconds":600}')
        self.give(running, timeout_ms=600_000)
        self.wait_for(Started)
        pool.stop_job(running, "first", grace=600.0)
        pool.stop_job(running, "second", grace=0.0)
        self.assertEqual(self.wait_for(Outcome)[0].value, "first")

    def test_stopping_a_job_that_did_not_start_returns_it(self) -> None:
        pool = self.ready()
        child = self.give(job(1, "wait-for-file", f'"{self.dir / "go"}"'))
        self.wait_for(Progress)
        waiting = job(2)
        self.give(waiting, child=child)
        self.assertTrue(pool.stop_job(waiting, "canceled", grace=0.0))
        self.assertEqual(self.wait_for(Returned)[0].jobs, [waiting])
        (self.dir / "go").touch()
        self.assertEqual(self.wait_for(Outcome)[0].kind, DONE)
        self.assertEqual(pool.idle(), [child])

    def test_stops_that_come_too_late_leave_the_child_at_work_for_a_while(self) -> None:
        pool = self.ready()
        first = pool.children[0]
        for number in range(MAX_LATE_STOPS):
            self.assertIs(pool.children[0], first)
            go = self.dir / str(number)
            each = job(number, "wait-for-file", f'"{go}"')
            self.give(each)
            self.wait_for(Progress, number + 1)
            self.assertTrue(pool.stop_job(each, "too late", grace=600.0))
            self.assertEqual(pool.idle(), [])
            go.touch()
            self.assertEqual(self.wait_for(Outcome, number + 1)[number].kind, DONE)
            if number == MAX_LATE_STOPS - 2:
                # All those requests are still there, and do not hide one that counts.
                self.assertEqual(pool.idle(), [first])
                self.assertEqual(self.run_one("length", '"' + "x" * 100_000 + '"').value, "100000")
                self.events.pop()
        self.poll_until(lambda: pool.idle() and pool.idle() != [first], "another child")

    def test_a_stop_behind_late_ones_is_seen(self) -> None:
        pool = self.ready()
        for number in range(MAX_LATE_STOPS - 1):
            pool._send_stream(pool.children[0], CONTROL.pack(-5 - number, 0))
        running = job(1, "wait-for-stop")
        self.give(running)
        self.wait_for(Progress)
        pool.stop_job(running, "now", grace=600.0)
        self.assertEqual(self.wait_for(Outcome)[0].kind, STOPPED)

    def test_sigterm_from_elsewhere_changes_nothing(self) -> None:
        pool = self.ready()
        child = self.give(job(1, "wait-for-file", f'"{self.dir / "go"}"'), job(2))
        self.wait_for(Progress)
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
        (self.dir / "go").touch()
        self.assertEqual([each.kind for each in self.wait_for(Outcome, 2)], [DONE, DONE])
        self.assertEqual(pool.idle(), [child])


class EndTest(PoolTestCase):
    def assert_gone(self, pids: list[int]) -> None:
        self.assertEqual([pid for pid in pids if alive(pid)], [])
        self.assertEqual(zombies_of(os.getpid()), [])
        self.assertEqual(self.pool.children, [])

    def test_close_ends_idle_children_by_message(self) -> None:
        pool = self.ready(2, term_seconds=600.0)
        pids = [child.pid for child in pool.children]
        self.assertEqual(pool.close(), [])
        self.assert_gone(pids)
        self.assertEqual((pool.close(), pool.kill_all()), ([], []))

    def test_close_accounts_for_every_job(self) -> None:
        pool = self.ready(2, term_seconds=0.05, kill_seconds=0.3)
        pids = [child.pid for child in pool.children]
        for number, type in ((0, "sleep"), (10, "stubborn")):
            child = self.give(job(number, type, '{"seconds":600}'), timeout_ms=600_000)
            self.give(job(number + 1), job(number + 2), child=child)
        self.wait_for(Started, 2)
        self.events += pool.close()
        self.assertEqual([each.seq for each in self.terminal()], [0, 1, 2, 10, 11, 12])
        shown = [(each.job.seq, each.kind, each.value) for each in self.of(Outcome)]
        self.assertEqual(sorted(shown), [(n, STOPPED, "the worker is ending") for n in (0, 10)])
        self.assert_gone(pids)

    def test_close_lets_a_job_end_that_ends_in_time(self) -> None:
        pool = self.ready(term_seconds=600.0)
        self.give(job(1, "sleep", '{"seconds":0.05}'), timeout_ms=600_000)
        self.wait_for(Started)
        self.events += pool.close()
        self.assertEqual([each.kind for each in self.of(Outcome)], [DONE])

    def test_a_child_that_lingers_at_its_end_is_terminated(self) -> None:
        path = self.dir / "own.py"
        path.write_text("import atexit, time\natexit.register(time.sleep, 600)")
        pool = self.ready(2, (str(path),), term_seconds=0.05, kill_seconds=600.0)
        pids = [child.pid for child in pool.children]
        self.assertEqual(pool.close(), [])
        self.assert_gone(pids)

    def test_close_in_a_hurry(self) -> None:
        pool = self.ready(term_seconds=600.0, kill_seconds=600.0)
        pids = [child.pid for child in pool.children]
        self.give(job(1, "hold-gil"), timeout_ms=600_000)
        self.wait_for(Started)
        self.events += pool.close(lambda: True)
        shown = [(each.kind, each.value) for each in self.of(Outcome)]
        self.assertEqual(shown, [(STOPPED, "the worker is ending")])
        self.assert_gone(pids)

    def test_a_job_that_starts_on_a_child_told_to_exit_does_not_delay_it(self) -> None:
        pool = self.ready(term_seconds=0.2)
        child = self.give(job(1, "sleep", '{"seconds":600}'), timeout_ms=600_000_000)
        pool._dismiss(child)
        self.wait_for(Started)
        self.poll_until(lambda: child not in pool.children, "its end")
        self.assertEqual([each.kind for each in self.of(Outcome)], [STOPPED])

    def test_kill_all_is_at_once(self) -> None:
        pool = self.ready(2, term_seconds=600.0, kill_seconds=600.0)
        pids = [child.pid for child in pool.children]
        child = self.give(job(1, "hold-gil"), timeout_ms=600_000)
        self.give(job(2), child=child)
        self.wait_for(Started)
        self.events += pool.kill_all()
        self.assertEqual([each.kind for each in self.of(Outcome)], [STOPPED])
        self.assertEqual([each.seq for each in self.of(Returned)[0].jobs], [2])
        self.assert_gone(pids)

    def test_children_that_still_load(self) -> None:
        path = self.dir / "slow.py"
        pause = "import signal\nwhile True: signal.pause()"
        for source in ("import time; time.sleep(600)", pause, "sum(range(10**15))"):
            for end in (Pool.close, Pool.kill_all):
                with self.subTest(source=source, end=end.__name__):
                    path.write_text(source)
                    pool = self.make(2, (str(path),), kill_seconds=0.3)
                    pids = [child.pid for child in pool.children]
                    self.assertEqual(end(pool), [])
                    self.assert_gone(pids)

    def test_waiting_for_ready_ends_when_told(self) -> None:
        path = self.dir / "slow.py"
        path.write_text("import time; time.sleep(600)")
        pool = self.make(1, (str(path),))
        answers = iter([False, False, True])

        def stop() -> bool:
            pool.wake()
            return next(answers)

        self.assertFalse(pool.wait_ready(stop))

    def test_signals_are_given_back(self) -> None:
        def mine(signum: int, frame: object) -> None: ...

        self.addCleanup(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, mine))
        self.ready().close()
        self.assertIs(signal.getsignal(signal.SIGCHLD), mine)
        self.assertEqual(signal.set_wakeup_fd(-1), -1)
        self.assertEqual(signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM}, set())

    def test_handlers_that_do_not_load(self) -> None:
        rows = [
            ("raise ValueError('x')", r"ValueError: x in .*own.py, line 1"),
            ("import os; os._exit(4)", r"child \d+ exited with status 4 while it loaded the handlers"),
            ("import os, signal; os.kill(os.getpid(), 9)", r"killed by SIGKILL while it loaded the handlers"),
        ]
        for source, message in rows:
            with self.subTest(source=source):
                path = self.dir / "own.py"
                path.write_text(source)
                pool = self.make(2, (str(path),))
                with self.assertRaisesRegex(JobQueueError, message) as caught:
                    pool.wait_ready(lambda: False)
                # To be killed, by whomever, is no fault of the handlers.
                self.assertEqual(isinstance(caught.exception, HandlerLoadError), "SIGKILL" not in message)
                pool.close()
                self.assert_gone([])


SUPERVISOR = """
import os, signal, sys, time
from jobqueue.jobs import Job
from jobqueue.events import Started
from jobqueue.pool import Pool

ended = []
signal.signal(signal.SIGINT, lambda *_: ended.append(1))
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
print("up", flush=True)
pool = Pool(2, sys.argv[2:])
pool.start()
def say():
    print(*[child.pid for child in pool.children], flush=True)
if sys.argv[1] == "load":
    say()
if pool.wait_ready(lambda: bool(ended)):
    if sys.argv[1] == "idle":
        say()
    elif sys.argv[1] != "load":
        for number, child in enumerate(pool.idle()):
            fields = dict.fromkeys(Job.COLUMNS)
            fields |= {"id": "x", "type": sys.argv[1], "payload": "null", "attempts": 1, "max_attempts": 1}
            pool.give(child, Job(**fields), time.monotonic() + 1e6, 10**9)
        started = 0
        while started < 2:
            started += sum(isinstance(event, Started) for event in pool.poll(1))
        say()
    while not ended:
        pool.poll(60)
pool.close()
"""


class ChildTest(TempDirTestCase):
    """Orders of messages that no real pool can be made to produce at will."""

    def run_large(self, *stops: int) -> list[Any]:
        """Run job 7, whose body comes after stop requests for the given serials; return its reports."""
        with ExitStack() as stack:
            near, far = (stack.enter_context(end) for end in socket.socketpair())
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            body = b'{"message":"hello"}'
            near.sendall(b"".join(CONTROL.pack(stop, 0) for stop in stops) + CONTROL.pack(7, len(body)) + body)
            _Runner(far, far, writing)._run(7, "a", "print", "", 1, 1, None, FOREVER, False, 1)
            data = os.read(reading, 65_536)
        reports = []
        while data:
            end = 4 + int.from_bytes(data[:4], "little")
            reports.append(marshal.loads(data[4:end])[1:4])
            data = data[end:]
        return reports

    def test_a_stop_request_before_the_body_of_its_job(self) -> None:
        ran = [("body", None), (DONE, None, "hello\n")]
        stopped = [("body", None), (STOPPED, None, None)]
        for stops, expected in (((), ran), ((5, 6), ran), ((5, 7), stopped), ((7,), stopped)):
            with self.subTest(stops=stops):
                self.assertEqual(self.run_large(*stops), expected)


class SupervisorTest(TempDirTestCase):
    """The pool in a process of its own, which is killed or interrupted."""

    def supervise(self, *args: str) -> subprocess.Popen[bytes]:
        process = self.spawn([sys.executable, "-c", SUPERVISOR, *args], stdout=subprocess.PIPE, env=environment())
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), b"up\n")
        return process

    def test_children_end_when_the_supervisor_is_killed(self) -> None:
        slow = self.dir / "slow.py"
        slow.write_text("import signal\nwhile True: signal.pause()")
        rows = [("hold-gil", SAMPLES), ("stubborn", SAMPLES), ("idle", SAMPLES), ("load", str(slow))]
        for args in rows:
            with self.subTest(args=args):
                process = self.supervise(*args)
                assert process.stdout is not None
                pids = [int(word) for word in process.stdout.readline().split()]
                self.assertEqual(len(pids), 2)
                self.assertTrue(all(alive(pid) for pid in pids))
                process.kill()
                process.wait(10)
                until(lambda pids=pids: not any(map(alive, pids)), 2, "the children to end")  # type: ignore[misc]

    def test_interrupts_of_the_whole_group_while_children_start_are_quiet(self) -> None:
        for number in range(16):
            with self.subTest(delay_ms=number * 10):
                process = self.supervise("idle", SAMPLES)
                try:
                    process.wait(number / 100)
                except subprocess.TimeoutExpired:
                    pass
                os.killpg(process.pid, signal.SIGINT if number % 4 else signal.SIGTERM)
                done = process.finish(10)  # type: ignore[attr-defined]
                self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
