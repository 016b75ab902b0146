"""Real processes at the same file at the same moment, and processes that are killed.

The racers are one small program each; they wait for a gate, a file, so that all start at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import unittest
from typing import Any
from unittest import mock

from jobqueue.jobs import Job
from jobqueue.queue import Queue
from tests.engine import token
from tests.support import FakeClock, Process, TempDirTestCase, file_bytes, sql, until

START = 1_700_000_000_000

PROGRAM = """
import json, os, sys, time
from jobqueue.db import Store
from jobqueue.errors import JobQueueError
from jobqueue.jobs import new_job
from jobqueue.queue import Queue

path, me, gate = sys.argv[1:]

def ready():
    "Say so, then wait until the gate is open."
    print("ready", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.002)
"""


class RaceTestCase(TempDirTestCase):
    """A test with racing processes."""

    def racers(self, count: int, text: str) -> list[Process]:
        """Start so many processes that run `text` after the common part; `me` is their number from 0."""
        argv = [sys.executable, "-c", PROGRAM + text, str(self.db)]
        return [self.spawn([*argv, str(n), str(self.dir / "gate")]) for n in range(count)]

    def race(self, count: int, text: str) -> list[Any]:
        """Let them start at once, wait for all, and return the last line of each, which is JSON."""
        racers = self.racers(count, text)
        for racer in racers:
            self.until_printed(racer, "ready")
        (self.dir / "gate").touch()
        answers = []
        for racer in racers:
            done = racer.finish(30)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            answers.append(json.loads(done.stdout.splitlines()[-1]))
        (self.dir / "gate").unlink()
        return answers

    def until_printed(self, racer: Process, text: str) -> None:
        """Wait until a process has printed something."""
        until(lambda: text in racer.stdout_text() or racer.poll() is not None, 20, f"a process to print {text!r}")
        self.assertIn(text, racer.stdout_text(), racer.stderr_text())

    def healthy(self) -> None:
        """Fail unless SQLite finds the file in order."""
        self.assertEqual(sql(self.db, "PRAGMA integrity_check"), [("ok",)])


class TogetherTest(RaceTestCase):
    """Many at once."""

    def test_16_processes_make_one_file(self) -> None:
        created = self.race(16, """
ready()
with Queue(path, create=True) as queue:
    queue.enqueue("t", id=me)
    print(json.dumps(queue.created))
""")
        self.assertEqual(created.count(True), 1)
        self.assertEqual(list(file_bytes(self.db)), ["jobs.db"], "the last to close leaves one file")
        self.assertEqual({id for (id,) in sql(self.db, "SELECT id FROM jobs")}, {str(n) for n in range(16)})
        self.healthy()

    def test_16_processes_with_one_key_make_one_job(self) -> None:
        Queue(self.db, create=True).close()
        answers = self.race(16, """
queue = Queue(path)
ready()
ids = [queue.enqueue("t", me, idempotency_key=f"k{n}") for n in range(5)]
ids += queue.enqueue_many([{"type": "t", "payload": me, "idempotency_key": f"b{n}"} for n in range(5)])
queue.close()
print(json.dumps(ids))
""")
        for answer in answers:
            self.assertEqual(answer, answers[0])
        self.assertEqual(len(set(answers[0])), 10)
        self.assertEqual(sql(self.db, "SELECT count(*), count(DISTINCT idempotency_key) FROM jobs"), [(10, 10)])

    def test_8_processes_claim_each_job_once_in_order(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many({"type": "t", "priority": n % 3} for n in range(240))
        answers = self.race(8, """
queue, got = Queue(path), []
ready()
while jobs := queue.claim(me, limit=1 + int(me) % 3):
    for job in jobs:
        assert queue.complete(job.id, job.lease_token, me)
        got.append([job.priority, job.seq, job.lease_token])
queue.close()
print(json.dumps(got))
""")
        self.assertEqual(sorted(seq for got in answers for _, seq, _ in got), list(range(1, 241)))
        self.assertEqual(len({token for got in answers for *_, token in got}), 240)
        for got in answers:
            order = [(-priority, seq) for priority, seq, _ in got]
            self.assertEqual(order, sorted(order), "nobody gets a better job after a worse one")
        self.assertEqual(sql(self.db, "SELECT status, attempts, count(*) FROM jobs GROUP BY 1, 2"),
                         [("completed", 1, 240)])
        self.healthy()

    def test_a_completion_and_a_recovery_at_the_very_end_of_a_lease(self) -> None:
        with Queue(self.db, create=True, clock=FakeClock(START)) as queue:
            queue.enqueue_many([{"type": "t"}] * 120)
            tokens = {job.id: token(job) for job in queue.claim("w", lease_seconds=30, limit=120)}
        (self.dir / "tokens").write_text(repr(tokens))
        expiry = START + 30_000
        answers = self.race(4, f"""
import ast
tokens = ast.literal_eval(open(os.path.join(os.path.dirname(path), "tokens")).read())
store, won = Store(path), []
ready()
for id, held in tokens.items():
    if int(me) < 2:
        won += [id] if store.complete(id, held, me, now_ms={expiry - 1}) else []
    else:
        won += [job.id for job, _ in store.recover_expired(now_ms={expiry}, limit=1)]
store.close()
print(json.dumps(won))
""")
        winners = sorted(int(id) for won in answers for id in won)
        self.assertEqual(winners, list(range(1, 121)), "each has one winner")
        statuses = dict(sql(self.db, "SELECT id, status FROM jobs"))
        for n, won in enumerate(answers):
            self.assertEqual({statuses[id] for id in won} - {"completed" if n < 2 else "retrying"}, set())

    def test_writers_and_checkpoints_of_several_processes_lose_nothing(self) -> None:
        Queue(self.db, create=True).close()
        answers = self.race(4, """
from jobqueue import connection
connection.CHECKPOINT_BYTES, connection.CHECKPOINT_PAUSE_SECONDS = 100_000, 0.0
queue = Queue(path)
ready()
for n in range(60):
    queue.enqueue("t", "x" * 3_000, id=f"{me}-{n}")
largest = queue._store.wal_bytes()
queue.close()
print(json.dumps(largest))
""")
        self.assertEqual({id for (id,) in sql(self.db, "SELECT id FROM jobs")},
                         {f"{me}-{n}" for me in range(4) for n in range(60)})
        self.healthy()
        self.assertLess(max(answers), 1_100_000)

    def test_a_wait_ends_by_the_commit_of_another_process(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t")
            (racer,) = self.racers(1, """
queue = Queue(path)
(job,) = queue.claim(me)
ready()
queue.complete(job.id, job.lease_token, "from there")
queue.close()
""")
            self.until_printed(racer, "ready")
            known = queue.known

            def look(id: str) -> Job:
                job = known(id)
                (self.dir / "gate").touch()  # only now the other may go on
                return job

            with mock.patch.object(queue, "known", look):
                self.assertEqual(queue.wait("1", timeout=20).result, "from there")
            self.assertEqual(racer.finish(20).returncode, 0)


class KilledTest(RaceTestCase):
    """A process that is killed leaves nothing half done and nothing lost."""

    def killed(self, text: str) -> str:
        """Run a program until it has printed a line that begins with `now`, kill it, and return what it printed."""
        (racer,) = self.racers(1, text + "\nprint('now', flush=True)\ntime.sleep(60)\n")
        self.until_printed(racer, "now")
        os.kill(racer.pid, signal.SIGKILL)
        self.assertEqual(racer.finish().returncode, -signal.SIGKILL, racer.stderr_text())
        return racer.stdout_text()

    def test_between_claim_and_settling(self) -> None:
        clock = FakeClock(START)
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t")
        printed = self.killed(f"""
queue = Queue(path, clock=lambda: {START + 10**12})
(job,) = queue.claim("victim", lease_seconds=30)
print(job.lease_token, flush=True)""")
        with Queue(self.db, clock=clock) as queue:
            clock.now_ms = START + 10**12 + 29_999
            self.assertEqual(queue.claim("w"), [])
            job = queue.get("1")
            assert job is not None
            self.assertEqual((job.status, job.attempts, job.lease_owner), ("running", 1, "victim"))
            clock.advance(1)
            (job,) = queue.claim("w")
            self.assertEqual((job.id, job.attempts, job.lease_owner), ("1", 2, "w"))
            self.assertFalse(queue.complete("1", printed.split()[0]))
            self.assertTrue(queue.complete("1", token(job)))
        self.healthy()

    def test_right_after_a_call_has_returned(self) -> None:
        self.killed("""
queue = Queue(path, create=True)
queue.enqueue("t", id="one")
queue.enqueue_many([{"type": "t", "id": "two"}, {"type": "t", "id": "three", "depends_on": ["two"]}])
(job,) = queue.claim("w")
assert queue.complete(job.id, job.lease_token, "kept")
queue.cancel("two")""")
        self.assertTrue(os.path.exists(f"{self.db}-wal"))
        with Queue(self.db) as queue:
            self.assertEqual([(job.id, job.status, job.result) for job in queue.list()],
                             [("three", "pending", None), ("two", "canceled", None), ("one", "completed", "kept")])
        self.healthy()

    def test_in_the_middle_of_a_transaction(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t", id="before")
        self.killed("""
store = Store(path)
transaction = store.transaction()
transaction.__enter__()
store.claim("w", now_ms=9**15, lease_ms=1)
job = new_job("t", "x" * 1_000_000)
for _ in range(40):     # more than the cache holds, so that a part lies in the log already
    store.add(job, now_ms=0)
assert store.wal_bytes() > 5_000_000, store.wal_bytes()""")
        with Queue(self.db) as queue:
            (job,) = queue.list()
            self.assertEqual((job.id, job.status, job.attempts), ("before", "pending", 0))
            self.assertEqual(queue.enqueue("t"), "2")
        self.healthy()

    def test_in_the_middle_of_a_batch(self) -> None:
        self.killed("""
store = Store(path, create=True)
batch = store.batch()
batch.__enter__()
batch.extend((n, new_job("t")) for n in range(5_000))
batch.check()
transaction = store.transaction()
transaction.__enter__()
batch.store(now_ms=0)""")
        with Queue(self.db) as queue:
            self.assertEqual(queue.list(), [])
            self.assertEqual(queue.enqueue_many([{"type": "t"}] * 2), ["1", "2"])
        self.healthy()


if __name__ == "__main__":
    unittest.main()
