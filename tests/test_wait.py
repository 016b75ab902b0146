"""`wait`: until jobs have ended; exit codes, results, deadlines, and next to no CPU."""

from __future__ import annotations

import json
import os
import signal
import time
import unittest

from jobqueue.queue import Queue
from tests.support import run, until
from tests.test_cli import CliTestCase


class WaitTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.queue = Queue(self.db, create=True)
        self.addCleanup(self.queue.close)

    def end(self, id: str, result: object = None, error: str | None = None) -> None:
        """Queue a job and have it completed, or failed for good."""
        self.queue.enqueue("t", id=id)
        (job,) = self.queue.claim("w")
        if error is None:
            self.queue.complete(id, job.lease_token or "", result)
        else:
            self.queue.fail(id, job.lease_token or "", error, final=True)

    def test_jobs_that_have_ended(self) -> None:
        self.end("done", {"ü": [1, None]})
        self.end("nothing")
        self.end("dead", error="ValueError: no \x1b[31m luck\n  File \"x\", line 1, in f")
        self.assertEqual(self.ok("wait", "done", "nothing"), "")
        self.assertEqual(self.ok("wait", "--result", "nothing", "done"), 'null\n{"ü": [1, null]}\n')
        done = self.main("wait", "--result", "done", "dead", "--database", self.db)
        self.assertEqual(done, (1, '{"ü": [1, null]}\n',
                                "jobqueue: job 'dead' is failed: ValueError: no \\x1b[31m luck\n"))
        done = self.main("wait", "--json", "dead", "nothing", "--database", self.db)
        self.assertEqual((done.code, [json.loads(line)["status"] for line in done.out.splitlines()]),
                         (1, ["failed", "completed"]))

    def test_a_canceled_one_did_not_complete(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.cancel("a")
        self.refused(1, "job 'a' is canceled", "wait", "a", "--result", "--database", self.db)

    def test_unknown_ones_are_named_and_the_others_served(self) -> None:
        self.end("done", 1)
        done = self.main("wait", "--result", "nobody", "done", "--timeout", "0", "--database", self.db)
        self.assertEqual(done, (1, "1\n", "jobqueue: there is no job 'nobody'\n"))

    def test_too_late_is_75_and_what_has_ended_is_told(self) -> None:
        self.end("done", 1)
        self.queue.enqueue("t", id="never", delay="1h")
        done = self.main("wait", "--result", "--timeout", "30ms", "never", "done", "gone", "--database", self.db)
        self.assertEqual(done, (75, "1\n", "jobqueue: there is no job 'gone'\n"
                                           "jobqueue: job 'never' has not ended within 30ms\n"))

    def test_usage(self) -> None:
        for phrase, args in (("the following arguments are required: ID", ()), ("leave out --result",
                             ("1", "--json", "--result")), ("--timeout: 'soon' is no duration",
                             ("1", "--timeout", "soon")), ("--timeout", ("1", "--timeout", "-1"))):
            self.refused(2, phrase, "wait", *args, "--database", self.db)

    def test_it_ends_when_another_process_has_ended_the_job_and_costs_next_to_nothing(self) -> None:
        self.queue.enqueue("t", id="a")
        (job,) = self.queue.claim("w")
        waiting = self.start("wait", "--result", "--database", self.db, "a")
        until(lambda: self.opened(waiting.pid), 20, "its start")
        began, before = time.monotonic(), self.cpu(waiting.pid)
        until(lambda: time.monotonic() - began > 0.5, 10, "half a second of waiting")
        if before is not None:
            used = (self.cpu(waiting.pid) or before) - before
            self.assertLess(used, 0.1 * (time.monotonic() - began), "it waits busily")
        self.assertIsNone(waiting.poll())
        self.queue.complete("a", job.lease_token or "", "at last")
        done = waiting.finish()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, '"at last"\n', ""))

    def opened(self, pid: int) -> bool:
        """Return whether a process has opened the file; True where the system does not tell."""
        files = f"/proc/{pid}/fd"
        try:
            return any(os.readlink(f"{files}/{name}") == str(self.db) for name in os.listdir(files))
        except OSError:
            return not os.path.exists("/proc/self/fd")

    def cpu(self, pid: int) -> float | None:
        """Return the seconds of CPU that a process has used; None where the system does not tell."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def test_ctrl_c_is_130(self) -> None:
        self.queue.enqueue("t", id="a", delay="1h")
        waiting = self.start("wait", "--database", self.db, "a")
        until(lambda: self.opened(waiting.pid), 20, "its start")
        os.killpg(waiting.pid, signal.SIGINT)
        done = waiting.finish()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (130, "", ""))

    def test_in_a_script(self) -> None:
        self.end("1", ["x"])
        done = run("wait", "--result", "1", env={"JOBQUEUE_DATABASE": str(self.db), "PYTHONIOENCODING": "ascii"})
        self.assertEqual((done.returncode, done.stdout), (0, '["x"]\n'))


if __name__ == "__main__":
    unittest.main()
