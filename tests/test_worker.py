"""The worker command as a whole: what becomes of jobs, what it prints and logs, how its options work.

`DayTest` and `RoughDayTest` look at one drain of a file with a job for each way to end; the rest start workers
of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from jobqueue import Job, Queue
from tests.support import FakeClock, WorkerTestCase, children_of, run, sql, until, zombies_of

HOUR_MS = 3_600_000
BACKOFF_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60)


class OneDrainTest(unittest.TestCase):
    """One `worker --drain` with two children over the jobs of `batch`; the tests look at what came of them."""

    batch: tuple[dict[str, Any], ...] = ()
    jobs: dict[str, Job]
    stats: dict[str, int]
    failures: dict[str, list[tuple[Any, ...]]]
    done: subprocess.CompletedProcess[str]
    log: list[dict[str, Any]]

    @classmethod
    def setUpClass(cls) -> None:
        directory = Path(tempfile.mkdtemp(prefix="jobqueue-test-"))
        cls.addClassCleanup(shutil.rmtree, directory)
        db = directory / "jobs.db"
        with Queue(db, create=True) as queue:
            cls.enqueue_the_past(db)
            queue.enqueue_many(cls.batch)
        own = ("--database", db, "--workers", 2, "--handlers", WorkerTestCase.HANDLERS)
        log = ("--log-format", "json", "--log-level", "debug")
        cls.done = run("worker", "--drain", *own, *log, cwd=directory, timeout=60)
        cls.log = [json.loads(line) for line in cls.done.stderr.splitlines()]
        with Queue(db) as queue:
            cls.jobs = {job.id: job for job in queue.list()}
            cls.stats = queue.stats("default")
        cls.failures = {}
        query = "SELECT id, attempt, reason, error, ended_at FROM failures JOIN jobs ON seq = job ORDER BY attempt"
        for id, *failure in sql(db, query):
            cls.failures.setdefault(id, []).append(tuple(failure))

    @staticmethod
    def enqueue_the_past(db: Path) -> None:
        """Put into the file what happened before."""

    def assert_ended(self, id: str, status: str, attempts: int, error: str | None = None) -> None:
        """Expect status and attempts of a job, and a pattern in its error."""
        job = self.jobs[id]
        self.assertEqual((job.status, job.attempts), (status, attempts), job.last_error)
        if error is None:
            self.assertIsNone(job.last_error)
        else:
            self.assertRegex(job.last_error or "", error)

    def result(self, id: str) -> Any:
        self.assert_ended(id, "completed", 1)
        text = self.jobs[id].result_json
        return None if text is None else json.loads(text)


class DayTest(OneDrainTest):
    """Jobs that are over at once.

    On a slow machine a retry may fall due before the drain ends: where one is, it succeeds, and changes
    nothing that the tests look at.
    """

    batch = (
        {"id": "text", "type": "print", "payload": {"message": "hello, ☃ and \u00e9"}},
        {"id": "value", "type": "print", "payload": {"message": {"a": [1, None, "é"]}}},
        {"id": "lines", "type": "print", "payload": {"message": "first\nsecond"}},
        {"id": "nameless", "type": "print", "payload": {"text": "x"}, "max_attempts": 1},
        {"id": "not-a-number", "type": "sleep", "payload": {"seconds": "soon"}, "max_attempts": 1},
        {"id": "backoff-1", "type": "fail-until", "payload": 1, "max_attempts": 100},
        {"id": "fail", "type": "fail", "payload": {"message": "no such host"}, "max_attempts": 1},
        {"id": "after-fail", "type": "echo", "depends_on": ["fail"]},
        {"id": "after-after-fail", "type": "echo", "depends_on": ["after-fail"]},
        {"id": "unknown", "type": "nobody-knows", "max_attempts": 1},
        {"id": "result", "type": "echo", "payload": {"deep": [1, 2.5, None, "é", {}]}},
        {"id": "large-result", "type": "echo", "payload": "y" * 1_000_000},
        {"id": "nothing", "type": "echo"},
        {"id": "not-json", "type": "not-json", "max_attempts": 1},
        {"id": "about", "type": "about", "max_attempts": 7, "trace": "00-abc-01"},
        {"id": "raise", "type": "raise", "payload": "line\u2028 one\n\x1b[31mtwo", "max_attempts": 1},
        {"id": "exit", "type": "exit", "payload": 4, "max_attempts": 1},
        {"id": "async", "type": "async", "payload": 5},
        {"id": "async-raise", "type": "async", "payload": "raise", "max_attempts": 1},
        {"id": "retry", "type": "retry", "payload": 90},
        {"id": "retry-usual", "type": "retry"},
        {"id": "retry-last", "type": "retry", "payload": 90, "max_attempts": 1},
        {"id": "reject", "type": "reject"},
        {"id": "later", "type": "echo", "delay": "1h"},
        {"id": "elsewhere", "type": "echo", "queue": "other"},
        {"id": "top", "type": "step"},
        {"id": "left", "type": "step", "depends_on": ["top"], "payload": {"seconds": 0.05}},
        {"id": "right", "type": "step", "depends_on": ["top"]},
        {"id": "bottom", "type": "step", "depends_on": ["left", "right"]},
    )  # fmt: skip

    @staticmethod
    def enqueue_the_past(db: Path) -> None:
        """Have jobs that failed n times already, and jobs of a worker that died hours ago."""
        clock = FakeClock(int(time.time() * 1_000) - 10 * HOUR_MS)
        with Queue(db, clock=clock) as queue:
            for failures in range(1, len(BACKOFF_SECONDS)):
                queue.enqueue("fail-until", failures + 1, id=f"backoff-{failures + 1}", max_attempts=100)
                for left in reversed(range(failures)):
                    (job,) = queue.claim("earlier")
                    queue.fail(job.id, job.lease_token or "", "earlier", retry_after=0 if left else 3_600)
            queue.enqueue("echo", "again", id="orphan")
            queue.enqueue("step", id="last-orphan", max_attempts=1)
            assert [job.id for job in queue.claim("the dead", limit=9)] == ["orphan", "last-orphan"]

    def test_it_exits_0_and_leaves_nothing_running(self) -> None:
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        self.assertEqual((self.stats["running"], self.stats["ready"]), (0, 0))

    def test_print_writes_strings_as_they_are_and_other_values_as_json(self) -> None:
        lines = ["hello, ☃ and é", '{"a":[1,null,"é"]}', "first", "second"]
        self.assertEqual(sorted(self.done.stdout.splitlines()), sorted(lines))
        self.assertIn("first\nsecond\n", self.done.stdout)

    def test_a_bad_payload_names_the_field(self) -> None:
        self.assert_ended("nameless", "failed", 1, r'payload\["message"\]')
        self.assert_ended("not-a-number", "failed", 1, r'payload\["seconds"\]')

    def test_backoff_is_exact(self) -> None:
        waits = []
        for attempt in range(1, len(BACKOFF_SECONDS) + 1):
            job = self.jobs[f"backoff-{attempt}"]
            self.assertIn(job.status, ("retrying", "completed"))
            number, reason, error, ended_at = self.failures[job.id][-1]
            self.assertEqual((number, reason, error.split("\n")[0]),
                             (attempt, "error", f"RuntimeError: attempt {attempt}"))
            waits.append((job.run_at - ended_at) / 1_000)
        self.assertEqual(tuple(waits), BACKOFF_SECONDS)

    def test_failed_for_good_with_the_reason(self) -> None:
        self.assert_ended("fail", "failed", 1, r"^RuntimeError: no such host$")
        self.assertEqual([row[:2] for row in self.failures["fail"]], [(1, "error")])

    def test_a_failure_blocks_what_depends_on_it_at_any_depth(self) -> None:
        self.assert_ended("after-fail", "pending", 0)
        self.assert_ended("after-after-fail", "pending", 0)
        self.assertEqual(self.stats["blocked"], 2)

    def test_an_unknown_type_fails_with_its_name_and_the_known_ones(self) -> None:
        self.assert_ended("unknown", "failed", 1, r"'nobody-knows'.*\babout, async,.* echo, .*print")

    def test_results_are_stored(self) -> None:
        self.assertEqual(self.result("result"), {"deep": [1, 2.5, None, "é", {}]})
        self.assertEqual(self.result("large-result"), "y" * 1_000_000)
        self.assertIsNone(self.result("nothing"))
        self.assertEqual(self.result("async"), {"awaited": 5})

    def test_a_handler_knows_its_job(self) -> None:
        expected = {"job_id": "about", "type": "about", "attempt": 1, "max_attempts": 7, "trace": "00-abc-01",
                    "stopping": False}  # fmt: skip
        self.assertEqual(self.result("about"), expected)

    def test_a_result_that_is_not_json_is_a_failure(self) -> None:
        self.assert_ended("not-json", "failed", 1, "result is not JSON")

    def test_what_a_handler_raises_is_its_error(self) -> None:
        self.assert_ended("raise", "failed", 1, r"^ValueError: line")
        self.assert_ended("exit", "failed", 1, r"^SystemExit: 4\n")
        self.assert_ended("async-raise", "failed", 1, "LookupError.*raised in the loop")

    def test_a_handler_chooses_its_delay_or_gives_up(self) -> None:
        for id, wait_ms in (("retry", 90_000), ("retry-usual", 1_000)):
            ((number, _, error, ended_at),) = self.failures[id]
            self.assertEqual((number, error, self.jobs[id].run_at - ended_at), (1, "not yet", wait_ms))
        self.assert_ended("retry", "retrying", 1, "^not yet$")
        self.assert_ended("retry-last", "failed", 1, "^not yet$")
        self.assert_ended("reject", "failed", 1, "^never$")

    def test_what_is_not_due_or_not_served_is_left_alone(self) -> None:
        for id in ("later", "elsewhere"):
            self.assert_ended(id, "pending", 0)
            self.assertIsNone(self.jobs[id].started_at)

    def test_dependencies_are_kept(self) -> None:
        for child, parents in (("left", ["top"]), ("right", ["top"]), ("bottom", ["left", "right"])):
            for parent in parents:
                self.assertGreaterEqual(self.jobs[child].started_at or 0, self.jobs[parent].finished_at or 0)
        self.assert_ended("bottom", "completed", 1)

    def test_the_jobs_of_a_dead_worker_run_again_unless_no_attempt_is_left(self) -> None:
        self.assert_ended("orphan", "completed", 2, "lease of the dead ran out")
        self.assertEqual([row[:2] for row in self.failures["orphan"]], [(1, "lease expired")])
        self.assert_ended("last-orphan", "failed", 1, "lease of the dead ran out")
        self.assertIsNone(self.jobs["last-orphan"].result_json)

    def test_each_transition_is_logged_once(self) -> None:
        seen = Counter((entry["event"], entry["job_id"]) for entry in self.log if "job_id" in entry)
        expected: Counter[tuple[str, str]] = Counter()
        for job in self.jobs.values():
            expected["completed", job.id] += job.status == "completed"
            for number, reason, error, _ in self.failures.get(job.id, []):
                if reason == "lease expired":
                    expected["lease expired", job.id] += 1
                elif error != "earlier":
                    final = job.status == "failed" and number == job.attempts
                    expected["failed" if final else "attempt failed", job.id] += 1
        ended = Counter({key: times for key, times in seen.items() if key[0] not in ("claimed", "released")})
        self.assertEqual(ended, +expected)
        # What was taken back from behind a slow job is claimed again.
        claims = Counter(id for event, id in seen.elements() if event in ("claimed", "released"))
        ends = Counter(id for event, id in ended.elements() if event != "lease expired")
        released = Counter(id for event, id in seen.elements() if event == "released")
        self.assertEqual(claims, ends + released + released)

    def test_json_lines_have_what_a_machine_needs(self) -> None:
        workers = {entry["worker"] for entry in self.log}
        self.assertEqual(len(workers), 1)
        self.assertEqual((self.log[0]["event"], self.log[-1]["event"]), ("started", "stopped"))
        self.assertEqual(self.log[0]["queues"], ["default"])
        self.assertIn("echo", self.log[0]["types"])
        for entry in self.log:
            self.assertRegex(entry["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertIn(entry["level"], ("debug", "info", "warning", "error"))
            self.assertTrue(entry["message"])
        levels = {"claimed": "debug", "completed": "info", "attempt failed": "warning", "failed": "error"}
        self.assertEqual({entry["event"]: entry["level"] for entry in self.log if entry["event"] in levels}, levels)
        (about,) = (entry for entry in self.log if entry["event"] == "completed" and entry["job_id"] == "about")
        self.assertEqual((about["type"], about["attempt"], about["trace"]), ("about", 1, "00-abc-01"))
        (failed,) = (entry for entry in self.log if entry["event"] == "failed" and entry["job_id"] == "fail")
        self.assertEqual(failed["error"], "RuntimeError: no such host")
        completed = sum(job.status == "completed" for job in self.jobs.values())
        self.assertEqual(self.log[-1]["completed"], completed)

    def test_nothing_raw_comes_out_of_the_log(self) -> None:
        self.assertNotIn("\x1b", self.done.stderr)


class RoughDayTest(OneDrainTest):
    """Jobs that end their child, or have to be ended."""

    batch = (
        {"id": "killed", "type": "kill-itself", "payload": "SIGKILL", "max_attempts": 1},
        {"id": "crashed", "type": "kill-itself", "payload": "SIGSEGV", "max_attempts": 1},
        {"id": "left-early", "type": "exit-at-once", "payload": 3, "max_attempts": 1},
        {"id": "left-well", "type": "exit-at-once", "payload": 0, "max_attempts": 1},
        {"id": "slow", "type": "sleep", "payload": {"seconds": 60}, "timeout": 0.2, "max_attempts": 1},
        {"id": "slow-loop", "type": "async-sleep", "payload": 60, "timeout": 0.2, "max_attempts": 1},
        {"id": "looks", "type": "until-stopped", "timeout": 0.2, "max_attempts": 1},
        {"id": "stubborn", "type": "stubborn", "timeout": 0.2, "max_attempts": 1},
        *({"id": f"fine-{n}", "type": "echo"} for n in range(20)),
    )  # fmt: skip

    def test_the_others_are_unaffected(self) -> None:
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        for n in range(20):
            self.assert_ended(f"fine-{n}", "completed", 1)

    def test_the_death_of_a_child_fails_the_attempt_and_names_the_signal(self) -> None:
        self.assert_ended("killed", "failed", 1, "child .* killed by SIGKILL")
        self.assert_ended("crashed", "failed", 1, "child .* killed by SIGSEGV")
        self.assert_ended("left-early", "failed", 1, "child .* exited with status 3")
        self.assert_ended("left-well", "failed", 1, "child .* exited with status 0")

    def test_a_timeout_ends_the_attempt_whatever_the_handler_does(self) -> None:
        for id in ("slow", "slow-loop", "looks", "stubborn"):
            self.assert_ended(id, "failed", 1, r"^timed out after 0\.2 s$")


class OrderTest(WorkerTestCase):
    """What runs when."""

    def test_highest_priority_first_then_the_oldest(self) -> None:
        ids = ["low", "a", "b", "high", "c"]
        for id, priority in zip(ids, (-5, 0, 0, 7, 0), strict=True):
            self.queue.enqueue("step", id=id, priority=priority)
        self.drain()
        self.assertEqual([event.job for event in self.trace("start")], ["high", "a", "b", "c", "low"])

    def test_an_empty_file_is_drained_at_once(self) -> None:
        done = self.drain("--log-level", "warning")
        self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_drain_takes_what_becomes_due_meanwhile_and_waits_for_what_runs(self) -> None:
        self.queue.enqueue("step", {"gate": "go"}, id="first")
        worker = self.worker("--drain", "--workers", 2)
        self.until_started("first")
        self.queue.enqueue("step", id="second")
        self.queue.enqueue("step", id="third", depends_on=["first"])
        self.until_status("second", "completed")
        self.assertIsNone(worker.poll())
        self.open_gate("go")
        self.assertEqual(worker.finish().returncode, 0)
        self.assertEqual(self.counts(), {"completed": 3})

    def test_an_idle_worker_finds_new_jobs_at_once_and_scheduled_ones_in_time_and_rests_meanwhile(self) -> None:
        worker = self.ready(self.worker())
        before = cpu_seconds(worker.pid)
        self.queue.enqueue("step", id="later", delay=1.5)
        self.queue.enqueue("step", id="now")
        now = self.queue.wait("now", 10)
        self.assertLess((now.started_at or 0) - now.created_at, 500)
        later = self.queue.wait("later", 10)
        self.assertGreaterEqual(later.started_at or 0, later.run_at)
        self.assertLess((later.started_at or 0) - later.run_at, 500)
        # Waiting by asking again and again would have cost most of 1.5 s.
        self.assertLess(cpu_seconds(worker.pid) - before, 0.3)

    def test_a_retry_comes_by_itself_until_no_attempt_is_left_and_an_operator_starts_anew(self) -> None:
        self.queue.enqueue("flaky", "there", id="flaky", max_attempts=2)
        self.queue.enqueue("kill-itself", "SIGABRT", id="deadly", max_attempts=2)
        self.queue.enqueue_many([{"type": "echo"}] * 20)
        self.ready(self.worker("--workers", 2))
        self.assertEqual(self.queue.wait("flaky", 20).status, "failed")
        self.assertEqual(self.queue.wait("deadly", 20).status, "failed")
        self.assertEqual([row[0] for row in self.failures("flaky")], [1, 2])
        self.assertRegex(self.job("deadly").last_error or "", "killed by SIGABRT")
        self.assertEqual([event.attempt for event in self.trace("start")], [1, 2])
        self.assertEqual(self.counts(), {"completed": 20, "failed": 2})
        self.open_gate("there")
        self.assertEqual(run("retry-failed", "--database", self.db, "--type", "flaky").returncode, 0)
        again = self.queue.wait("flaky", 20)
        self.assertEqual((again.status, again.attempts, again.result_json), ("completed", 1, '"at last"'))

    def test_a_retried_parent_unblocks(self) -> None:
        self.queue.enqueue("flaky", "there", id="parent", max_attempts=1)
        self.queue.enqueue("step", id="child", depends_on=["parent"])
        self.drain()
        self.assertEqual(self.counts(), {"failed": 1, "pending": 1})
        self.open_gate("there")
        self.queue.retry_failed()
        self.drain()
        self.assertEqual(self.counts(), {"completed": 2})


class ChildTest(WorkerTestCase):
    """Children: timeouts, replacement, stopping."""

    def test_the_default_timeout_is_for_jobs_without_their_own(self) -> None:
        self.queue.enqueue("sleep", {"seconds": 60}, id="without", max_attempts=1)
        self.queue.enqueue("sleep", {"seconds": 0.5}, id="with", timeout=60, max_attempts=1)
        self.drain("--default-timeout", "0.3")
        self.assertEqual(self.job("without").last_error, "timed out after 0.3 s")
        self.assertEqual(self.job("with").status, "completed")

    def test_the_time_of_a_job_begins_with_its_handler(self) -> None:
        # Handed out together behind short ones, each waits longer than its own timeout.
        short = [{"type": "echo"} for _ in range(300)]
        self.queue.enqueue_many(short + [{"type": "sleep", "payload": {"seconds": 0.2}, "timeout": 0.7}] * 6)
        self.drain()
        self.assertEqual(self.counts(), {"completed": 306})

    def test_200_timeouts_leave_no_zombie(self) -> None:
        self.queue.enqueue_many([{"type": "sleep", "payload": {"seconds": 60}, "timeout": 0.01, "max_attempts": 1}
                                 for _ in range(200)])  # fmt: skip
        # Without handlers of its own a child starts faster.
        worker = self.start("worker", "--database", self.db, "--workers", 6, "--log-level", "error")
        self.until_counts({"failed": 200}, "200 timeouts", 100)
        # One that has just ended may still have to be reaped.
        until(lambda: not zombies_of(worker.pid), 2, "the last one to be reaped")
        self.assertLessEqual(len(children_of(worker.pid)), 6 + 1)  # and multiprocessing's resource tracker
        self.assertEqual({job.last_error for job in self.queue.list()}, {"timed out after 0.01 s"})

    def test_max_jobs_per_child(self) -> None:
        self.queue.enqueue_many([{"type": "step"}] * 10)
        self.drain("--max-jobs-per-child", 3)
        jobs = Counter(event.pid for event in self.trace("start"))
        self.assertEqual(sorted(jobs.values()), [1, 3, 3, 3])
        self.assertEqual(self.counts(), {"completed": 10})

    def test_a_canceled_job_is_told_to_stop_and_the_worker_goes_on(self) -> None:
        self.queue.enqueue("until-stopped", id="looks")
        self.queue.enqueue("cleaning-up", id="cleans")
        worker = self.worker("--workers", 2, "--lease-seconds", 1)
        self.until_started("looks", "cleans")
        self.assertTrue(self.queue.cancel("looks"))
        self.assertTrue(self.queue.cancel("cleans"))
        until(lambda: {"stopped", "cleaned"} <= {event.what for event in self.trace()}, 10, "both to stop")
        self.queue.enqueue("step", id="next")
        self.queue.wait("next", 10)
        self.assertEqual(self.counts(), {"canceled": 2, "completed": 1})
        for id in ("looks", "cleans"):
            self.assertRegex(worker.stderr_text(), rf"WARNING job {id} .*lease is lost")

    def test_progress_is_in_the_file_while_the_job_runs(self) -> None:
        self.queue.enqueue("progress", {"fraction": 0.25, "note": "a\x1bquarter", "gate": "go"}, id="job")
        worker = self.worker("--lease-seconds", 0.5, "--drain")
        seen = until(lambda: self.job("job").progress is not None and self.job("job"), 10, "the progress")
        assert seen
        self.assertEqual((seen.status, seen.progress, seen.progress_note), ("running", 0.25, "a quarter"))
        self.open_gate("go")
        self.assertEqual(worker.finish().returncode, 0)
        self.assertEqual(self.job("job").status, "completed")

    def test_the_worker_is_listed_while_it_lives(self) -> None:
        worker = self.ready(self.worker("--queue", "a", "--queue", "b"))
        query = "SELECT pid, queues FROM workers"
        until(lambda: sql(self.db, query), 5, "the worker to be listed")
        self.assertEqual(sql(self.db, query), [(worker.pid, '["a", "b"]')])
        worker.terminate()
        self.assertEqual(worker.finish().returncode, 0)
        self.assertEqual(sql(self.db, query), [])


class HandlersTest(WorkerTestCase):
    """`--handlers`: modules that load, and modules that do not."""

    def write(self, name: str, text: str) -> None:
        (self.dir / name).write_text(text)

    def test_a_file_and_a_module_together(self) -> None:
        head = "from jobqueue import handler\n"
        self.write("mine.py", head + "@handler('mine')\ndef mine(p, c):\n    return 'module'\n")
        self.write("own.py", head + "@handler('own')\nasync def own(p, c):\n    return 'file'\n")
        for type in ("mine", "own", "echo"):
            self.queue.enqueue(type, id=type)
        self.drain("--handlers", "mine", "--handlers", "./own.py")
        self.assertEqual([self.job(id).result_json for id in ("mine", "own", "echo")], ['"module"', '"file"', None])
        self.assertEqual(self.counts(), {"completed": 3})

    def test_what_does_not_load_is_exit_2_with_one_sentence_and_nothing_claimed(self) -> None:
        head = "from jobqueue import handler\n"
        cases = {
            "absent.py": (None, r"absent\.py.*no such file"),
            "absent": (None, r"no module 'absent'"),
            "syntax.py": ("def f(:\n", r"syntax\.py, line 1"),
            "raises.py": ("\n1 / 0\n", r"ZeroDivisionError: division by zero in .*raises\.py, line 2"),
            "exits.py": ("raise SystemExit(3)\n", r"SystemExit: 3 in .*exits\.py"),
            "needs.py": ("import not_installed_here\n", r"not_installed_here.*needs\.py, line 1"),
            "twice.py": (head + "@handler('echo')\ndef echo(p, c): pass\n", r"'echo' has two handlers"),
            "builtin.py": (head + "@handler('print')\ndef p(p, c): pass\n", r"'print' is built in"),
            "dies.py": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL while it loaded"),
        }
        self.queue.enqueue("echo", id="job")
        workers = {}
        for name, (text, _) in cases.items():
            if text is not None:
                self.write(name, text)
            workers[name] = self.worker("--workers", 2, "--drain", "--handlers", name)
        for name, worker in workers.items():
            with self.subTest(name):
                done = worker.finish(60)
                # Killed, by whomever, is no proof that the module is at fault, so it is not a matter of usage.
                self.assertEqual((done.returncode, done.stdout), (1 if name == "dies.py" else 2, ""), done.stderr)
                self.assertRegex(done.stderr, r"\Ajobqueue: [^\n]+\n\Z")
                self.assertRegex(done.stderr, cases[name][1])
        job = self.job("job")
        self.assertEqual((job.status, job.attempts, job.started_at), ("pending", 0, None))

    def test_a_replacement_that_does_not_load_is_said_and_tried_again(self) -> None:
        self.write("fragile.py", "import os\nif os.path.exists('broken'):\n    raise OSError('disk on fire')\n")
        self.queue.enqueue("kill-itself", "SIGKILL", id="deadly", max_attempts=1)
        worker = self.ready(self.worker("--handlers", "fragile.py"))
        self.open_gate("broken")
        self.queue.wait("deadly", 10)
        self.queue.enqueue("step", id="next")
        until(lambda: "disk on fire" in worker.stderr_text(), 20, "the failure to be said")
        self.assertEqual(self.job("next").attempts, 0)
        (self.dir / "broken").unlink()
        self.assertEqual(self.queue.wait("next", 20).status, "completed")


class OutputTest(WorkerTestCase):
    """stdout and stderr."""

    def test_text_lines_have_time_level_job_and_message(self) -> None:
        self.queue.enqueue("echo", id="fine")
        self.queue.enqueue("raise", "a\nb\x1b", id="bad", max_attempts=1)
        self.queue.enqueue("fail", {"message": "no"}, id="again")
        lines = self.drain().stderr.splitlines()
        patterns = [
            r"INFO +\S+ serves default; children: 1; types: .*\becho\b.*",
            r"INFO +job fine \(echo\), attempt 1/3: completed in [0-9.]+ ms",
            r"ERROR +job bad \(raise\), attempt 1/1: failed for good: ValueError: a\\nb\\x1b",
            r"WARNING +job again \(fail\), attempt 1/3: failed, will be retried: RuntimeError: no",
            r"INFO +stopped; attempts completed: 1, failed: 2",
        ]
        self.assertEqual(len(lines), len(patterns), lines)
        for pattern in patterns:
            matching = [line for line in lines
                        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z " + pattern, line)]
            self.assertEqual(len(matching), 1, (pattern, lines))

    def test_the_level_leaves_out_what_is_below_it(self) -> None:
        self.queue.enqueue("raise", "x", id="bad", max_attempts=1)
        self.queue.enqueue("raise", "x", id="again", max_attempts=2)
        self.queue.enqueue("echo", id="fine")
        lines = self.drain("--log-level", "error").stderr.splitlines()
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("job bad", lines[0])

    def test_a_terminal_gets_control_characters_escaped(self) -> None:
        self.queue.enqueue("print", {"message": "a\x1b[31m\tb\nc"})
        mine, its = os.openpty()
        try:
            done = self.worker("--drain", stdout=its).finish()
            self.assertEqual(done.returncode, 0, done.stderr)
            shown = os.read(mine, 4_096)
        finally:
            os.close(mine)
            os.close(its)
        self.assertNotIn(b"\x1b", shown)
        self.assertIn(b"a\\x1b[31m", shown)
        self.assertEqual(shown.count(b"\n"), 2)
        self.assertEqual(self.counts(), {"completed": 1})

    def test_a_file_gets_them_as_they_are(self) -> None:
        self.queue.enqueue("print", {"message": "a\x1b[31mb"})
        self.assertEqual(self.drain().stdout, "a\x1b[31mb\n")

    def test_a_stdout_that_knows_only_ascii(self) -> None:
        self.queue.enqueue("print", {"message": "☃"})
        done = self.worker("--drain", env={"PYTHONIOENCODING": "ascii"}).finish()
        self.assertEqual((done.returncode, done.stdout), (0, "\\u2603\n"))
        self.assertEqual(self.counts(), {"completed": 1})

    @unittest.skipUnless(os.path.exists("/dev/full"), "this system has no device that is always full")
    def test_a_worker_that_cannot_print_gives_the_job_back_and_ends_with_1(self) -> None:
        self.queue.enqueue("print", {"message": "x"}, id="print", max_attempts=1)
        with open("/dev/full", "wb") as full:
            on_a_full_device = self.worker("--drain", stdout=full).finish()
        self.assertEqual((self.job("print").status, self.job("print").attempts), ("pending", 0))
        reader, writer = os.pipe()
        os.close(reader)
        to_nobody = self.worker("--drain", stdout=writer)
        os.close(writer)
        done = to_nobody.finish()
        self.assertEqual((self.job("print").status, self.job("print").attempts), ("pending", 0))
        for worker, why in ((on_a_full_device, "No space left"), (done, "Broken pipe")):
            self.assertEqual(worker.returncode, 1, worker.stderr)
            self.assertRegex(worker.stderr, f"ERROR +stdout cannot be written: {why}")
            self.assertNotIn("Traceback", worker.stderr)
            self.assertNotIn("Exception ignored", worker.stderr)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far."""
    done = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True)
    path = Path("/proc", str(pid), "stat")
    if path.exists():
        user, system = path.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    minutes, _, seconds = done.stdout.strip().rpartition(":")
    return float(minutes.rpartition(":")[2]) * 60 + float(seconds)


if __name__ == "__main__":
    unittest.main()
