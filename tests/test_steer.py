"""`cancel`, `retry`, `retry-failed`: what they change, say and answer; a running job canceled is stopped."""

from __future__ import annotations

import json
import os
import time
import unittest

from jobqueue import steering
from jobqueue.queue import Queue
from tests.support import WorkerTestCase, alive, run, sql, until
from tests.test_cli import CliTestCase


class SteerCase(CliTestCase):
    """A test with jobs in all states, called by their states; `child` and `grandchild` depend on `failed`."""

    def setUp(self) -> None:
        super().setUp()
        with Queue(self.db, create=True) as queue:
            for id in ("completed", "failed", "canceled", "retrying", "running"):
                queue.enqueue("t", id=id, max_attempts=2 if id == "retrying" else 1)
                for job in queue.claim("w", limit=1):
                    token = job.lease_token or ""
                    if id == "completed":
                        queue.complete(id, token)
                    elif id == "canceled":
                        queue.cancel(id)
                    elif id in ("failed", "retrying"):
                        queue.fail(id, token, f"no {id} luck\n  File x", retry_after="1h")
            queue.enqueue("t", id="pending")
            queue.enqueue("u", id="child", depends_on=["failed"])
            queue.enqueue("u", id="grandchild", depends_on=["child"], queue="other")
        self.before = self.statuses()

    def statuses(self) -> dict[str, str]:
        return {job["id"]: job["status"] for job in self.stored()}

    def changed(self) -> dict[str, str]:
        """Return the statuses that are not what they were."""
        return {id: status for id, status in self.statuses().items() if status != self.before[id]}

    def ended(self, code: int, out: str, err: str, *args: object) -> None:
        """Run a command on the file and expect exit code, stdout and stderr."""
        self.assertEqual(self.main(*args, "--database", self.db), (code, out, err))


class CancelTest(SteerCase):
    def test_whatever_is_not_finished_can_be_canceled(self) -> None:
        ids = ("pending", "retrying", "running", "child")
        self.ended(0, "pending\nretrying\nrunning\nchild\n", "", "cancel", *ids)
        self.assertEqual(self.changed(), dict.fromkeys(ids, "canceled"))
        self.assertEqual(sql(self.db, "SELECT count(*) FROM jobs WHERE lease_token IS NOT NULL"), [(0,)])

    def test_unknown_and_finished_ones_are_named_and_the_others_served(self) -> None:
        self.ended(1, "pending\n", "jobqueue: there is no job 'nobody'\n"
                   "jobqueue: job 'completed' is completed, so it cannot be canceled; nothing changed\n",
                   "cancel", "nobody", "completed", "pending")
        self.assertEqual(self.changed(), {"pending": "canceled"})

    def test_a_canceled_one_is_fine_already(self) -> None:
        self.ended(0, "", "jobqueue: job 'canceled' is canceled already; nothing changed\n", "cancel", "canceled")

    def test_all_pending_spares_what_runs(self) -> None:
        for args, count in (((), 4), (("--type", "u"), 2), (("--queue", "other"), 1), (("--type", "absent"), 0)):
            self.assertEqual(self.main("cancel", "--all-pending", "--dry-run", *args, "--database", self.db).out,
                             f"{count}\n")
        self.assertEqual(self.changed(), {})
        self.ended(0, "4\n", "jobqueue: 4 unfinished jobs are canceled\n", "cancel", "--all-pending")
        self.assertEqual(self.changed(), dict.fromkeys(("pending", "retrying", "child", "grandchild"), "canceled"))
        self.ended(0, "0\n", "jobqueue: no unfinished job matches; nothing changed\n", "cancel", "--all-pending")

    def test_a_type_means_what_runs_too(self) -> None:
        self.ended(0, "3\n", "jobqueue: 3 unfinished jobs would be canceled\n",
                   "cancel", "--type", "t", "--dry-run")
        self.ended(0, "3\n", "jobqueue: 3 unfinished jobs are canceled\n", "cancel", "--type", "t")
        self.assertEqual(self.changed(), dict.fromkeys(("pending", "retrying", "running"), "canceled"))

    def test_dry_run_and_json(self) -> None:
        done = self.main("cancel", "--dry-run", "--json", "running", "failed", "--database", self.db)
        self.assertEqual((done.code, [json.loads(line) for line in done.out.splitlines()]), (1, [
            {"id": "running", "status": "running", "canceled": True, "dry_run": True},
            {"id": "failed", "status": "failed", "canceled": False, "dry_run": True}]))
        self.assertEqual(self.changed(), {})
        done = self.main("cancel", "--json", "--all-pending", "--database", self.db)
        self.assertEqual(json.loads(done.out), {"canceled": 4, "dry_run": False})

    def test_usage(self) -> None:
        for phrase, args in (("name the jobs: by their ids, or with --all-pending, --type or --queue", ()),
                             ("not both", ("a", "--all-pending")), ("not both", ("a", "--type", "t"))):
            self.refused(2, phrase, "cancel", *args, "--database", self.db)
        self.assertEqual(self.changed(), {})


class RetryTest(SteerCase):
    def test_dead_ones_start_anew_with_their_history_and_unblock_their_dependents(self) -> None:
        with Queue(self.db) as queue:
            self.assertEqual(queue.stats()["blocked"], 2)
            self.ended(0, "failed\ncanceled\n", "", "retry", "failed", "canceled")
            self.assertEqual(self.changed(), {"failed": "pending", "canceled": "pending"})
            self.assertEqual(queue.stats()["blocked"], 0)
            job = queue.get("failed")
            assert job is not None
            self.assertEqual((job.attempts, job.max_attempts, job.finished_at), (0, 1, None))
        query = "SELECT attempt, error FROM failures JOIN jobs ON seq = job WHERE id = 'failed'"
        self.assertEqual(sql(self.db, query), [(1, "no failed luck\n  File x")])

    def test_what_is_not_dead_is_named_and_the_others_served(self) -> None:
        self.ended(1, "failed\n", "jobqueue: there is no job 'nobody'\n"
                   "jobqueue: job 'completed' is completed, so it cannot be retried; nothing changed\n"
                   "jobqueue: job 'running' is running, so it cannot be retried; nothing changed\n",
                   "retry", "completed", "nobody", "running", "failed")
        self.assertEqual(self.changed(), {"failed": "pending"})

    def test_dry_run_and_json(self) -> None:
        self.ended(0, "failed\ncanceled\n", "", "retry", "--dry-run", "failed", "canceled")
        self.assertEqual(self.changed(), {})
        done = self.main("retry", "--json", "failed", "--database", self.db)
        self.assertEqual(json.loads(done.out),
                         {"id": "failed", "status": "pending", "retried": True, "dry_run": False})
        self.refused(2, "the following arguments are required: ID", "retry", "--database", self.db)


class RetryFailedTest(SteerCase):
    def setUp(self) -> None:
        super().setUp()
        with Queue(self.db) as queue:
            for n, error in enumerate(("Connection refused", "Connection reset", "100%_sure", "\x1b[31m")):
                queue.enqueue("v", id=f"v{n}", max_attempts=1, priority=1)
                (job,) = queue.claim("w")
                queue.fail(job.id, job.lease_token or "", error)

    def count(self, *args: object) -> str:
        done = self.main("retry-failed", *args, "--database", self.db)
        self.assertEqual(done.code, 0, done.err)
        return done.out

    def test_by_what_the_last_error_says(self) -> None:
        for text, count in (("Connection", 2), ("refused", 1), ("connection", 0), ("%", 1), ("_", 1), ("\x1b", 1),
                            ("luck", 1), ("", 5)):
            self.assertEqual(self.count("--dry-run", "--error", text), f"{count}\n", text)
        self.assertEqual(self.count("--dry-run", "--error", "Connection", "--type", "t"), "0\n")
        self.assertEqual(self.count("--dry-run", "--error", "reset", "--id", "v0"), "0\n")
        self.assertEqual(self.count("--error", "reset", "--id", "v1"), "1\n")
        self.assertEqual(self.count("--error", "Connection", "--type", "v"), "1\n")
        statuses = self.statuses()
        self.assertEqual([statuses[f"v{n}"] for n in range(4)], ["pending", "pending", "failed", "failed"])


class ManyTest(CliTestCase):
    """More than one transaction's worth."""

    def test_they_are_moved_in_short_transactions_and_those_that_ended_meanwhile_left_alone(self) -> None:
        count = 2 * steering.CHUNK + 1
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many({"type": "t", "max_attempts": 1} for _ in range(count))
            commits = queue._store.commits
            told: list[int] = []

            def progress(moved: int) -> None:
                told.append(moved)
                if len(told) == 1:
                    self.assertTrue(queue.cancel(str(count)))  # as another process would, between two of them

            self.assertEqual(queue.cancel_many(dry_run=True), count)
            self.assertEqual(queue.cancel_many(progress=progress), count - 1)
            self.assertEqual(told, [steering.CHUNK, 2 * steering.CHUNK])
            self.assertLessEqual(queue._store.commits - commits, 4)
            self.assertEqual(queue.stats()["canceled"], count)

    def test_the_search_reads_the_dead_alone(self) -> None:
        with Queue(self.db, create=True) as queue:
            plan = queue._store.sqlite.execute(
                f"EXPLAIN QUERY PLAN {steering._FAILED}",
                {"after": 0, "type": "t", "queue": None, "error": "x"}).fetchall()
        self.assertEqual([row[3] for row in plan], ["SEARCH jobs USING INDEX jobs_dead (status=? AND seq>?)"])


class RunningTest(WorkerTestCase):
    """A real worker's job is canceled by another process."""

    def test_its_handler_is_stopped_within_a_heartbeat_and_the_worker_goes_on(self) -> None:
        for type in ("until-stopped", "cleaning-up", "hold-gil"):
            self.queue.enqueue(type, id=type, max_attempts=5)
        worker = self.worker("--workers", 3, "--lease-seconds", 1.5)
        self.until_started("until-stopped", "cleaning-up", "hold-gil")
        children = {event.job: event.pid for event in self.trace("start")}
        began = time.monotonic()
        done = run("cancel", "--database", self.db, *children)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.counts(), {"canceled": 3}, "at once in the file")
        self.queue.enqueue("echo", 1, id="next")
        self.until_status("next", "completed")
        until(lambda: self.trace("stopped") and self.trace("cleaned"), 10, "both to have noticed")
        until(lambda: not alive(children["hold-gil"]), 10, "the end of the one that cannot listen")
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(self.counts(), {"canceled": 3, "completed": 1})
        self.assertIsNone(worker.poll(), worker.stderr_text())
        self.assertIn("the lease is lost (canceled, or it ran out); stopping the handler", worker.stderr_text())
        os.kill(worker.pid, 15)
        self.assertEqual(worker.finish().returncode, 0)
        self.assertEqual(self.failures("cleaning-up"), [])


if __name__ == "__main__":
    unittest.main()
