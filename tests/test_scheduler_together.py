"""`JobScheduler` under threads, processes, locks and random histories."""

from __future__ import annotations

import itertools
import random
import sqlite3
import subprocess
import sys
import threading
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import jobqueue
from jobqueue import DatabaseBusy, DatabaseError
from jobqueue.scheduler import JobScheduler
from tests.scheduler_case import LEASE, SchedulerTestCase, T, job, together
from tests.support import sql, until


class FileTest(SchedulerTestCase):
    """The file, its users, and their locks."""

    def test_it_makes_a_file_in_wal_mode_and_works_as_a_context_manager(self) -> None:
        path = self.dir / "new.db"
        with JobScheduler(str(path)) as scheduler:
            scheduler.add_jobs([job("a")], T)
        self.assertEqual(sql(path, "PRAGMA journal_mode"), [("wal",)])
        scheduler.close()
        with self.assertRaisesRegex(DatabaseError, "is closed"):
            scheduler.get_job("a")
        self.assertIs(jobqueue.JobScheduler, JobScheduler)

    def test_a_bad_queue_is_refused_and_no_file_is_made(self) -> None:
        path = self.dir / "new.db"
        for queue in ("", None, 7):
            with self.subTest(queue=queue), self.assertRaisesRegex(ValueError, "queue must"):
                JobScheduler(path, queue=queue)
        self.assertFalse(path.exists())

    def test_it_never_reads_a_clock(self) -> None:
        def refuse(*_: object) -> int:
            raise AssertionError("a clock was read")

        with mock.patch("time.time", refuse), mock.patch("time.time_ns", refuse):
            self.scheduler.add_jobs([job("a"), job("b", "a")], T)
            self.assertTrue(self.scheduler.fail_job("a", self.claim()["lease_token"], "e", T))
            self.claim(T + 1_000, 1)
            self.assertEqual(self.scheduler.recover_expired(T + 1_001), 1)
            self.succeed(T + 1_001)
            self.assertEqual(self.stats(T + 1_001), {"pending": 1, "succeeded": 1, "ready": 1})

    def test_running_jobs_survive_a_restart_with_their_leases(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b"), job("c")], T)
        kept, lost = self.claim(T, 1_000), self.claim(T, 10)
        before = self.look("a")
        self.scheduler.close()
        self.scheduler = self.open()
        self.assertEqual(self.look("a"), before)
        self.assertEqual(self.stats(), {"pending": 1, "running": 2, "ready": 1})
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1)
        self.assertFalse(self.scheduler.complete_job("b", lost["lease_token"], 1, T + 10))
        self.assertTrue(self.scheduler.complete_job("a", kept["lease_token"], 1, T + 10))

    def test_ten_claimers_of_one_job_and_one_gets_it(self) -> None:
        others = [self.open() for _ in range(4)] + [self.scheduler] * 6
        for round in range(3):
            self.scheduler.add_jobs([job(f"j{round}")], T)
            answers = together(*(lambda s=s, n=n: s.claim_job(f"w{n}", T, LEASE)
                                 for n, s in enumerate(others)))
            self.assertEqual(len([answer for answer in answers if answer]), 1)
            self.assertEqual(self.look(f"j{round}")["attempts"], 1)

    def work_off(self, scheduler: JobScheduler, worker: str) -> list[str]:
        done = []
        while True:
            claimed = scheduler.claim_job(worker, T, LEASE)
            if claimed is None:
                return done
            self.assertTrue(scheduler.complete_job(claimed["job_id"], claimed["lease_token"], worker, T))
            done.append(claimed["job_id"])

    def test_twenty_threads_share_one_object_and_do_each_of_100_jobs_once(self) -> None:
        self.scheduler.add_jobs([job(f"j{n}") for n in range(100)], T)
        done = together(*(lambda n=n: self.work_off(self.scheduler, f"w{n}") for n in range(20)))
        self.assertEqual(sorted(itertools.chain(*done)), sorted(f"j{n}" for n in range(100)))
        self.assertEqual(self.stats(), {"succeeded": 100})
        self.assertEqual(sql(self.db, "SELECT max(attempts) FROM jobs"), [(1,)])

    def test_two_objects_add_claim_and_count_at_once(self) -> None:
        other = self.open()

        def add(scheduler: JobScheduler, name: str) -> list[str]:
            for n in range(10):
                scheduler.add_jobs([job(f"{name}{n}"), job(f"{name}{n} after", f"{name}{n}")], T)
                self.assertGreaterEqual(scheduler.get_stats(T)["pending"], 0)
            return self.work_off(scheduler, name)

        together(lambda: add(self.scheduler, "x"), lambda: add(other, "y"))
        # One may have found nothing more while the other still held a job with a dependent.
        self.work_off(self.scheduler, "z")
        self.assertEqual(self.stats(), {"succeeded": 40})

    def test_separate_processes_do_each_job_once(self) -> None:
        self.scheduler.add_jobs([job(f"j{n}", *([f"j{n - 1}"] if n % 4 else [])) for n in range(60)], T)
        program = (
            "import sys\n"
            "from jobqueue.scheduler import JobScheduler\n"
            "path, name = sys.argv[1:]\n"
            "with JobScheduler(path) as scheduler:\n"
            "    print('open', file=sys.stderr, flush=True)\n"
            "    sys.stdin.readline()\n"
            "    while scheduler.get_stats(0)['succeeded'] < 60:\n"
            "        job = scheduler.claim_job(name, 1000, 100)\n"
            "        if job and scheduler.complete_job(job['job_id'], job['lease_token'], name, 1000):\n"
            "            print(job['job_id'], flush=True)\n"
        )
        workers = [self.spawn([sys.executable, "-c", program, str(self.db), f"w{n}"], stdin=subprocess.PIPE)
                   for n in range(3)]
        until(lambda: all(worker.stderr_text() for worker in workers), 30, "all processes to have the file open")
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
            worker.stdin.flush()
        output = ""
        for worker in workers:
            done = worker.finish(60)
            self.assertEqual((done.returncode, done.stderr), (0, "open\n"))
            output += done.stdout
        self.assertEqual(sorted(output.split()), sorted(f"j{n}" for n in range(60)))
        self.assertEqual(self.stats(), {"succeeded": 60})

    def test_a_completion_races_a_recovery_at_the_end_of_the_lease_and_exactly_one_wins(self) -> None:
        other = self.open()
        for round in range(25):
            name = f"j{round}"
            self.scheduler.add_jobs([job(name)], T)
            token = self.claim(T, 10)["lease_token"]
            calls: list[Callable[[], int]] = [
                lambda name=name, token=token: self.scheduler.complete_job(name, token, 1, T + 9),
                lambda: other.recover_expired(T + 10),
            ]
            completed, recovered = together(*calls) if round % 2 else together(*calls[::-1])[::-1]
            self.assertEqual(completed + recovered, 1)
            self.assertEqual(self.look(name)["status"], "succeeded" if completed else "pending")
            if recovered:
                self.assertEqual(self.succeed(T + 10), name)

    def test_many_recoveries_at_once_count_each_lease_once(self) -> None:
        self.scheduler.add_jobs([job(f"j{n}") for n in range(30)], T)
        for _ in range(30):
            self.claim(T, 10)
        users = [self.open(), self.open(), self.scheduler, self.scheduler]
        counts = together(*(lambda user=user: user.recover_expired(T + 10) for user in users))
        self.assertEqual(sum(counts), 30)

    def test_a_call_waits_for_a_lock_and_gives_up_after_the_busy_timeout(self) -> None:
        self.scheduler.add_jobs([job("a")], T)
        token = self.claim()["lease_token"]
        hasty = self.open(patience_seconds=0.05)
        locker = sqlite3.connect(self.db, isolation_level=None, check_same_thread=False)
        self.addCleanup(locker.close)
        locker.execute("BEGIN IMMEDIATE")
        for call in (lambda: hasty.add_jobs([job("b")], T), lambda: hasty.claim_job("w", T, 1),
                     lambda: hasty.complete_job("a", token, 1, T), lambda: hasty.fail_job("a", token, "e", T),
                     lambda: hasty.recover_expired(T + LEASE)):
            with self.assertRaisesRegex(DatabaseBusy, "stayed locked"):
                call()
        self.assertEqual(hasty.get_stats(T)["running"], 1)  # readers need no lock
        answers: list[bool] = []
        waiter = threading.Thread(
            target=lambda: answers.append(self.scheduler.complete_job("a", token, 1, T)), daemon=True)
        waiting = threading.Event()
        patiently = self.scheduler._store._patiently

        def watched(action: Callable[[], object]) -> object:
            def attempt() -> object:
                try:
                    return action()
                except sqlite3.OperationalError:
                    waiting.set()
                    raise

            return patiently(attempt)

        with mock.patch.object(self.scheduler._store, "_patiently", watched):
            waiter.start()
            self.assertTrue(waiting.wait(30), "the call did not run into the lock")
            self.assertEqual(answers, [])
            locker.execute("COMMIT")
            waiter.join(30)
        self.assertEqual(answers, [True])
        self.assertEqual(self.look("a")["status"], "succeeded")

    def test_a_killed_process_leaves_whole_batches_and_leases_that_can_be_recovered(self) -> None:
        program = (
            "import sys\n"
            "from jobqueue.scheduler import JobScheduler\n"
            "scheduler = JobScheduler(sys.argv[1])\n"
            "batch = 0\n"
            "while True:\n"
            "    names = [f'{batch}-{n}' for n in range(50)]\n"
            "    jobs = [{'job_id': a, 'payload': 1, 'dependencies': [b]} for a, b in zip(names, names[1:])]\n"
            "    scheduler.add_jobs(jobs + [{'job_id': names[-1], 'payload': 1}], 0)\n"
            "    scheduler.claim_job('w', 0, 10)\n"
            "    print(batch, flush=True)\n"
            "    batch += 1\n"
        )
        process = self.spawn([sys.executable, "-c", program, str(self.db)])
        until(lambda: len(process.stdout_text().split()) >= 3, 30, "three batches")
        process.kill()
        process.wait(10)
        reported = len(process.stdout_text().split())
        per_batch = [count for (count,) in sql(
            self.db, "SELECT count(*) FROM jobs GROUP BY substr(id, 1, instr(id, '-'))")]
        self.assertEqual(set(per_batch), {50})
        self.assertGreaterEqual(len(per_batch), reported)
        ((edges,),) = sql(self.db, "SELECT count(*) FROM dependencies")
        self.assertEqual(edges, 49 * len(per_batch))
        self.assertGreaterEqual(self.scheduler.recover_expired(10), reported)
        self.assertEqual(self.scheduler.get_stats(10)["ready"], len(per_batch))


class Model:
    """The contract once more, as plainly as it can be said."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}  # in order of creation

    def add(self, batch: list[dict[str, Any]], now: int) -> None:
        for each in batch:
            self.jobs[each["job_id"]] = {
                "dependencies": each["dependencies"], "priority": each["priority"],
                "max_attempts": each["max_attempts"], "status": "pending", "attempts": 0, "available_at": now,
                "created_at": now, "lease_token": None, "lease_expires_at": None, "result": None, "error": None,
            }  # fmt: skip

    def met(self, name: str) -> bool:
        return all(self.jobs[other]["status"] == "succeeded" for other in self.jobs[name]["dependencies"])

    def blocked(self, name: str) -> bool:
        each = self.jobs[name]
        return each["status"] == "pending" and any(
            self.jobs[other]["status"] == "failed" or self.blocked(other) for other in each["dependencies"])

    def ready(self, now: int) -> list[str]:
        return [name for name, each in self.jobs.items()
                if each["status"] == "pending" and each["available_at"] <= now and self.met(name)]

    def next(self, now: int) -> str | None:
        ready = self.ready(now)  # max() keeps the first of equals, which is the oldest
        return max(ready, key=lambda name: self.jobs[name]["priority"]) if ready else None

    def claimed(self, name: str, token: str, now: int, lease: int) -> None:
        each = self.jobs[name]
        each.update(status="running", attempts=each["attempts"] + 1, lease_token=token,
                    lease_expires_at=now + lease)

    def settle(self, name: str, token: str, now: int, **changes: Any) -> bool:
        each = self.jobs[name]
        if each["status"] != "running" or each["lease_token"] != token or now >= each["lease_expires_at"]:
            return False
        each.update(lease_token=None, lease_expires_at=None, **changes)
        return True

    def fail(self, name: str, token: str, error: str, now: int) -> bool:
        each = self.jobs[name]
        if each["attempts"] >= each["max_attempts"]:
            return self.settle(name, token, now, status="failed", error=error)
        wait = [1_000, 2_000, 4_000, 8_000][each["attempts"] - 1]
        return self.settle(name, token, now, status="pending", error=error, available_at=now + wait)

    def recover(self, now: int) -> int:
        expired = [each for each in self.jobs.values() if each["status"] == "running"
                   and each["lease_expires_at"] <= now]
        for each in expired:
            each.update(lease_token=None, lease_expires_at=None, error="the lease of w ran out")
            if each["attempts"] >= each["max_attempts"]:
                each["status"] = "failed"
            else:
                each["status"] = "pending"
        return len(expired)

    def stats(self, now: int) -> dict[str, int]:
        statuses = ["blocked" if self.blocked(name) else each["status"] for name, each in self.jobs.items()]
        return {**{status: statuses.count(status) for status in ("pending", "running", "succeeded", "failed",
                                                                 "blocked")}, "ready": len(self.ready(now))}


class HistoryTest(SchedulerTestCase):
    """Random histories, compared with the model after each step."""

    def test_random_histories_agree_with_a_plain_model(self) -> None:
        for seed in range(6):
            self.history(seed, 120)

    def history(self, seed: int, length: int) -> None:
        dice = random.Random(seed)
        model, now, tokens = Model(), T, [("a", "none")]
        path = self.dir / f"{seed}.db"
        seen: set[str] = set()
        with JobScheduler(path) as scheduler:
            scheduler._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
            for step in range(length):
                now += dice.choice((0, 0, 1, 7, 400, 3_000, -5, -600))
                what = dice.choice(("add", "claim", "claim", "complete", "complete", "fail", "recover"))
                where = f"seed {seed}, step {step}: {what} at {now}"
                if what == "add" and len(model.jobs) < 40:
                    batch = self.batch(dice, list(model.jobs), step)
                    self.assertEqual(scheduler.add_jobs(batch, now), [each["job_id"] for each in batch], where)
                    model.add(batch, now)
                elif what == "claim":
                    lease = dice.choice((1, 50, 5_000))
                    claimed = scheduler.claim_job("w", now, lease)
                    self.assertEqual(claimed and claimed["job_id"], model.next(now), where)
                    if claimed:
                        tokens.append((claimed["job_id"], claimed["lease_token"]))
                        model.claimed(*tokens[-1], now, lease)
                elif what == "recover":
                    self.assertEqual(scheduler.recover_expired(now), model.recover(now), where)
                elif tokens[-1][0] in model.jobs:
                    name, token = dice.choice(tokens[-4:])
                    if name in model.jobs and what == "complete":
                        self.assertEqual(scheduler.complete_job(name, token, step, now),
                                         model.settle(name, token, now, status="succeeded", result=step), where)
                    elif name in model.jobs:
                        self.assertEqual(scheduler.fail_job(name, token, f"e{step}", now),
                                         model.fail(name, token, f"e{step}", now), where)
                seen |= self.compare(scheduler, model, now, where)
        self.assertLessEqual({"pending", "running", "succeeded", "failed"}, seen)

    def batch(self, dice: random.Random, known: list[str], step: int) -> list[dict[str, Any]]:
        names = [f"{step}-{n}" for n in range(dice.randint(1, 4))]
        order = dice.sample(names, len(names))  # a job waits only for those before it here: no ring
        batch = []
        for name in names:
            pool = known + order[: order.index(name)]
            chosen = dice.sample(pool, min(len(pool), dice.choice((0, 0, 1, 2))))
            batch.append(job(name, dependencies=chosen, priority=dice.randint(-1, 1),
                             max_attempts=dice.randint(1, 3)))
        return batch

    def compare(self, scheduler: JobScheduler, model: Model, now: int, where: str) -> set[str]:
        """Check every job and every counter; return the effective statuses seen."""
        stats = scheduler.get_stats(now)
        self.assertEqual(stats, model.stats(now), where)
        self.assertEqual(sum(stats.values()) - stats["ready"], len(model.jobs), where)
        self.assertLessEqual(stats["ready"], stats["pending"], where)
        seen = set()
        for name, expected in model.jobs.items():
            found = scheduler.get_job(name)
            assert found is not None, where
            for field, value in expected.items():
                same = sorted if field == "dependencies" else lambda value: value
                self.assertEqual(same(found[field]), same(value), f"{where}: {field} of {name}")
            effective = "blocked" if model.blocked(name) else expected["status"]
            self.assertEqual(found["effective_status"], effective, f"{where}: {name}")
            seen.add(effective)
        return seen


if __name__ == "__main__":
    unittest.main()
