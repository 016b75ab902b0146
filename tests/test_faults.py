"""Every statement of every operation fails once, in every way: the file holds all or nothing, the caller knows.

An operation is done again and again, each time with a later statement failing, until it comes to its end without
meeting the fault; so statements that are added to it are met by themselves. To look at one by hand:

    python -m tests.test_faults OperationsTest.test_store -v
"""

from __future__ import annotations

import sqlite3
import unittest
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import pairwise
from typing import Any
from unittest import mock

from jobqueue import DatabaseError, JobQueueError, JobScheduler, Queue, connection, oversight, schema, turn
from jobqueue.child import DONE, ERROR, STOPPED
from jobqueue.db import Store
from jobqueue.events import Outcome
from jobqueue.jobs import new_job
from tests.aio_case import AioTestCase
from tests.engine import LEASE_MS, WORKER, add_batch, token
from tests.faults import (
    AFTER,
    BEFORE,
    FOR_GOOD,
    LATER,
    UNDONE,
    WAYS,
    Copy,
    Faults,
    fill,
    quick_commits,
    unsound,
    watched,
)
from tests.support import TempDirTestCase

Operation = Callable[[Any, Mapping[str, str]], object]
"""Takes the face that it works with, and the tokens of the leases that are held, by job."""

BATCH: list[dict[str, Any]] = [
    {"type": "t", "id": "b2", "depends_on": ["b1", "parent"]}, {"type": "t", "id": "b1", "idempotency_key": "b"},
    {"type": "t", "idempotency_key": "k"}, {"type": "t", "idempotency_key": "b"}, {"type": "t", "id": "16"},
    {"type": "t", "depends_on": ["b2", "done"]}]

RECORDS: list[dict[str, Any]] = [
    {"id": "new2", "type": "t", "status": "pending", "created_at": "2026-01-01T00:00:00Z",
     "depends_on": ["new", "done"]},
    {"id": "new", "type": "t", "status": "failed", "created_at": "2026-01-01T00:00:00Z", "attempts": 3,
     "finished_at": "2026-01-01T00:00:09Z", "failures": [{
         "attempt": 3, "owner": "w", "started_at": None, "ended_at": "2026-01-01T00:00:09Z", "reason": "error",
         "error": "no luck"}]}]


def _turn(store: Store, tokens: Mapping[str, str]) -> object:
    """Do what a worker does in one transaction."""
    jobs = {name: store.get(name) for name in ("held", "held2", "parent", "parent2")}
    with store.transaction():
        now = turn.Turn(LATER)
        outcomes = [Outcome(jobs["parent"], DONE, "1", None, 5), Outcome(jobs["held2"], ERROR, "x", None, 5),
                    Outcome(jobs["parent2"], STOPPED, None, None, 5)]
        turn.settle(store, now, outcomes, [])
        turn.heartbeat(store, now, list(jobs.values()), {jobs["held"]: (0.5, "half")}, LEASE_MS)
        store.worker_seen(WORKER, now_ms=LATER)
        turn.claim(store, now, WORKER, ["default"], LEASE_MS, 3)
    return len(now.claimed)


def _snapshot(store: Store, tokens: Mapping[str, str]) -> object:
    with store.snapshot():
        return store.last_seq()


STORE: dict[str, Operation] = {
    "add": lambda s, _: s.add(new_job("t", id="n", depends_on=["held", "done"], idempotency_key="n"), now_ms=LATER),
    "add by number": lambda s, _: s.add(new_job("t"), now_ms=LATER),
    "add known": lambda s, _: s.add(new_job("t", idempotency_key="k"), now_ms=LATER),
    "batch": lambda s, _: add_batch(s, [new_job(**fields) for fields in BATCH], LATER),
    "last_seq": _snapshot,
    "promote": lambda s, _: s.promote(now_ms=LATER),
    "claim": lambda s, _: len(s.claim("w", now_ms=LATER, lease_ms=9, limit=9, queues=["default", "scheduler"])),
    "extend": lambda s, tokens: s.extend("held", tokens["held"], now_ms=LATER, lease_ms=99_000),
    "extend_many": lambda s, tokens: s.extend_many(
        [(s.get(name).seq, tokens[name]) for name in ("held", "short", "held2")], now_ms=LATER, lease_ms=99_000),
    "prolong_for_workers": lambda s, _: s.prolong_for_workers(now_ms=LATER, by_ms=7),
    "report": lambda s, tokens: s.report("held", tokens["held"], 0.5, "half", now_ms=LATER),
    "complete": lambda s, tokens: s.complete("parent", tokens["parent"], {"a": 1}, now_ms=LATER),
    "complete_many": lambda s, tokens: s.complete_many(
        [(s.get(name).seq, tokens[name], None) for name in ("parent", "parent2", "short")], now_ms=LATER),
    "fail": lambda s, tokens: s.fail("held", tokens["held"], "x", now_ms=LATER),
    "fail for good": lambda s, tokens: s.fail("parent", tokens["parent"], "x", now_ms=LATER, final=True),
    "release": lambda s, tokens: s.release("held", tokens["held"], now_ms=LATER),
    "recover_expired": lambda s, _: len(s.recover_expired(now_ms=LATER)),
    "cancel": lambda s, _: s.cancel("parent", now_ms=LATER),
    "retry": lambda s, _: s.retry("dead", now_ms=LATER),
    "retry_failed": lambda s, _: s.retry_failed(now_ms=LATER),
    "worker_arrives": lambda s, _: s.worker_arrives("n", host="h", pid=3, queues=[], types=[], now_ms=LATER),
    "worker_seen": lambda s, _: s.worker_seen(WORKER, now_ms=LATER),
    "worker_leaves": lambda s, _: s.worker_leaves(WORKER),
    "get": lambda s, _: s.get("diamond").depends_on,
    "list": lambda s, _: len(s.list(status="running")),
    "iterate": lambda s, _: len(list(s.iterate())),
    "page": lambda s, _: len(s.page([1, 2, 999])),
    "counts": lambda s, _: s.counts(),
    "blocked": lambda s, _: s.blocked(),
    "is_blocked": lambda s, _: s.is_blocked("blocked"),
    "shares": lambda s, _: s.shares(now_ms=LATER),
    "next_event": lambda s, _: s.next_event(["default", "scheduler"]),
    "has_ready": lambda s, _: s.has_ready(["default"]),
    "has_due": lambda s, _: s.has_due(now_ms=LATER),
    "pull_back": lambda s, _: s.pull_back(now_ms=0),
    "data_version": lambda s, _: len(s.data_version()),
    "transaction of a worker": _turn,
}
QUEUE: dict[str, Operation] = {
    "enqueue": lambda q, _: q.enqueue("t", 1, id="n", depends_on=["held", "done"], idempotency_key="n"),
    "enqueue_many": lambda q, _: q.enqueue_many(BATCH),
    "add": lambda q, _: q.add(new_job("t")),
    "add_many": lambda q, _: list(q.add_many(enumerate(new_job("t") for _ in range(3)))),
    "claim": lambda q, _: len(q.claim("w", limit=3)),
    "complete": lambda q, tokens: q.complete("parent", tokens["parent"], 1),
    "fail": lambda q, tokens: q.fail("held", tokens["held"], "x"),
    "extend": lambda q, tokens: q.extend("held", tokens["held"], 99),
    "release": lambda q, tokens: q.release("held", tokens["held"]),
    "recover_expired": lambda q, _: q.recover_expired(),
    "get": lambda q, _: q.get("child").status,
    "list": lambda q, _: len(q.list(limit=5)),
    "iterate": lambda q, _: len(list(q.iterate())),
    "stats": lambda q, _: q.stats(),
    "wait": lambda q, _: q.wait("done", timeout=30).status,
    "cancel": lambda q, _: q.cancel("parent"),
    "retry": lambda q, _: q.retry("dead"),
    "retry_failed": lambda q, _: q.retry_failed(),
    "retry_failed one": lambda q, _: q.retry_failed(id="dead2"),
    "retry_failed dry": lambda q, _: q.retry_failed(dry_run=True),
    "cancel_many": lambda q, _: q.cancel_many(running=True),
    "import_jobs": lambda q, _: q.import_jobs(list(enumerate(RECORDS))),
    "known": lambda q, _: q.known("child").status,
    "blocked_among": lambda q, _: len(q.blocked_among(q.list())),
    "history": lambda q, _: q.history("child") is not None,
    "tree": lambda q, _: q.tree("child") is not None,
    "explain": lambda q, _: len(q.explain("child")[1]),
    "figures": lambda q, _: q.figures() is not None,
    "types": lambda q, _: q.types(),
    "newest_ids": lambda q, _: q.newest_ids(),
}
SCHEDULER: dict[str, Operation] = {
    "add_jobs": lambda s, _: s.add_jobs([{"job_id": "n1", "payload": 1, "dependencies": ["n2", "s-held"]},
                                         {"job_id": "n2", "payload": 2}], LATER),
    "claim_job": lambda s, _: s.claim_job("w", LATER, 9)["job_id"],
    "complete_job": lambda s, tokens: s.complete_job("s-held", tokens["s-held"], 1, LATER),
    "fail_job": lambda s, tokens: s.fail_job("s-held", tokens["s-held"], "x", LATER),
    "recover_expired": lambda s, _: s.recover_expired(LATER),
    "get_job": lambda s, _: s.get_job("s-blocked")["effective_status"],
    "get_stats": lambda s, _: s.get_stats(LATER),
}
READS = {"add known", "last_seq", "get", "list", "iterate", "page", "counts", "blocked", "is_blocked", "shares",
         "next_event", "has_ready", "has_due", "data_version", "stats", "wait", "retry_failed dry",
         "get_job", "get_stats", "known", "blocked_among", "history", "tree", "explain", "figures", "types",
         "newest_ids"}
# What touches no jobs, is begun by the operations above, or has a test of its own.
ELSEWHERE = {"close", "hold", "resume", "disown", "is_replaced", "wal_bytes", "snapshot", "work",
             "checkpoint", "purge", "backup", "export", "limit_memory"}


def public(face: type) -> set[str]:
    """Return the names of the methods that anybody may call."""
    return {name for name in dir(face) if name[0] != "_" and callable(getattr(face, name))} - ELSEWHERE


class FaultCase(TempDirTestCase):
    """A test with a file of jobs in every state (`self.db`), that can be set back to it, and with faults."""

    def setUp(self) -> None:
        super().setUp()
        for patch in (quick_commits(), mock.patch.object(connection, "CHECKPOINT_PAUSE_SECONDS", 0.0),
                      mock.patch.object(oversight, "LONG_HOLD_MS", 10**9)):  # the same statements at any speed
            patch.start()
            self.addCleanup(patch.stop)
        self.faults = Faults()
        template = self.dir / "template.db"
        fill(template)
        fill(self.db)
        self.copy = Copy(self.db, template)
        self.addCleanup(self.copy.close)
        self.copy.restore()
        with closing(Store(template)) as store:
            self.tokens = {job.id: token(job) for job in store.list(status="running")}
        watch = watched(self.faults)
        watch.__enter__()
        self.addCleanup(watch.__exit__, None, None, None)

    def attempt(self, call: Callable[[], object]) -> tuple[object, JobQueueError | None]:
        """Return what a call answers, or the error that it raises; one of `sqlite3` itself fails the test."""
        try:
            return call(), None
        except JobQueueError as error:
            return None, error
        finally:
            self.stop_faults()

    def stop_faults(self) -> None:
        """Let everything pass, without forgetting what has failed."""
        fired, commits, harmless = self.faults.fired, self.faults.commits, self.faults.harmless
        self.faults.heal()
        self.faults.fired, self.faults.commits, self.faults.harmless = fired, commits, harmless


class OperationsTest(FaultCase):
    """All public operations of the engine and its faces."""

    def check_all(self, face: Any, store: Store, operations: Mapping[str, Operation],
                  ways: tuple[str, ...] = WAYS) -> None:
        """Check that each operation withstands a fault at each statement."""
        self.faults.main = store.sqlite
        for name, operation in operations.items():
            for way in (AFTER, FOR_GOOD) if name in READS else ways:
                with self.subTest(name, way=way):
                    self.check(store, lambda operation=operation: operation(face, self.tokens), way, name in READS)

    def check(self, store: Store, call: Callable[[], object], way: str, reads: bool) -> None:
        states, answer = self.rehearse(call)
        self.assertEqual(states[0] == states[-1], reads)
        at = 1
        while True:
            self.faults.arm(at, way)
            got, error = self.attempt(call)
            stuck = [each for each in (store._sqlite, store._guard) if each is not None and each.in_transaction]
            if self.faults.fired is None:
                self.assertIsNone(error)
                break
            changed = True
            with self.subTest(at=at, statement=self.faults.fired):
                if self.faults.harmless:
                    self.assertEqual((got, error), (answer, None), "what is committed is no failure")
                else:
                    self.assertIsInstance(error, DatabaseError)
                    self.assertIsInstance(error.__cause__, sqlite3.Error)
                if way != FOR_GOOD:  # a ROLLBACK that was not carried out is for the next call to do
                    self.assertEqual(stuck, [], "left inside a transaction")
                state = self.copy.state()
                self.assertEqual(state, states[self.faults.commits])
                changed = state != states[0]
                if way == FOR_GOOD and not changed and not reads:
                    changed = True
                    self.assertEqual(self.attempt(call), (answer, None), "done again, it works")
                    self.assertEqual(self.copy.state(), states[-1])
                else:
                    completed = [row for row in state["jobs"] if row[8] == "completed"]
                    self.assertEqual(store.counts()["completed"], len(completed))
                if changed:
                    self.assertEqual(unsound(self.copy._sqlite), [])
            self.end_transactions(store)
            if changed:
                self.copy.restore()
            at += 1
        self.assertGreater(at, 1, "there was no statement to fail")
        self.copy.restore()

    def end_transactions(self, store: Store) -> bool:
        """End what was left open, so that one failure does not lead to all others; return whether anything was."""
        left = [each for each in (store._sqlite, store._guard) if each is not None and each.in_transaction]
        for each in left:
            each.ask("ROLLBACK")  # type: ignore[attr-defined]
        return bool(left)

    def rehearse(self, call: Callable[[], object]) -> tuple[list[Any], object]:
        """Return what the file holds after each commit of an operation without faults, and its answer."""
        states = [self.copy.state()]
        with mock.patch.object(self.faults, "committed", lambda: states.append(self.copy.state())):
            answer = call()
        self.assertEqual(self.copy.state(), states[-1])
        self.assertLessEqual(sum(old != new for old, new in pairwise(states)), 1,
                             "an operation changes the file in one commit")
        self.copy.restore()
        return states, answer

    def test_store(self) -> None:
        store = Store(self.db, patience_seconds=0.2)
        self.addCleanup(store.close)
        self.assertEqual(public(Store), {name.split()[0] for name in STORE})
        self.check_all(store, store, STORE)

    def test_queue(self) -> None:
        queue = Queue(self.db, clock=lambda: LATER, patience_seconds=0.2)
        self.addCleanup(queue.close)
        self.assertEqual(public(Queue), {name.split()[0] for name in QUEUE})
        self.check_all(queue, queue._store, QUEUE, (AFTER, FOR_GOOD))

    def test_scheduler(self) -> None:
        scheduler = JobScheduler(self.db, patience_seconds=0.2)
        self.addCleanup(scheduler.close)
        self.assertEqual(public(JobScheduler), set(SCHEDULER))
        self.check_all(scheduler, scheduler._store, SCHEDULER, (AFTER, FOR_GOOD))

    def test_with_a_checkpoint_after_each_commit(self) -> None:
        store = Store(self.db, patience_seconds=0.2)
        self.addCleanup(store.close)
        with mock.patch.object(connection, "CHECKPOINT_BYTES", 0):
            self.check_all(store, store, {name: STORE[name] for name in ("add", "batch", "complete", "get")})

    def test_the_second_connection_cannot_be_opened(self) -> None:
        """Its first checkpoint opens the guard, which may fail alone: no descriptors are left, say."""
        with mock.patch.object(connection, "CHECKPOINT_BYTES", 0):
            for way in WAYS:
                for at in range(1, 5):  # opening, its PRAGMA, BEGIN, the checkpoint
                    with self.subTest(way=way, at=at), closing(Store(self.db, patience_seconds=0.2)) as store:
                        self.faults.main = store.sqlite
                        at_commit = 3  # BEGIN, UPDATE, COMMIT
                        self.faults.arm(at_commit + at, way)
                        _, error = self.attempt(lambda store=store: store.worker_seen(WORKER, now_ms=LATER))
                        self.assertIsNone(error)
                        self.assertIsNotNone(self.faults.fired)
                        self.assertFalse(self.end_transactions(store))
                        self.faults.main = None
                        self.assertTrue(store.add(new_job("t"), now_ms=LATER))


class WorkTest(FaultCase):
    """`Queue.work` commits more than once, and settles once more when it is left."""

    def test_what_was_handed_out_is_settled_or_still_leased(self) -> None:
        queue = Queue(self.db, clock=lambda: LATER, patience_seconds=0.2)
        self.addCleanup(queue.close)
        for way in WAYS:
            at, done = 0, False
            while not done:
                at += 1
                self.assertLess(at, 200)
                with self.subTest(way=way, at=at):
                    done = self.work(queue, at, way)
                self.copy.restore()
            self.assertGreater(at, 20)

    def work(self, queue: Queue, at: int, way: str) -> bool:
        """Work with a fault; return whether it was not met any more."""
        handed: list[str] = []

        def work() -> None:
            for task in queue.work("w"):
                handed.append(task.job.id)
                task.complete(len(handed))

        self.faults.arm(at, way)
        _, error = self.attempt(work)
        store = queue._store
        statuses = {row[1]: row[8] for row in self.copy.state()["jobs"]}
        self.assertEqual(handed, list(dict.fromkeys(handed)), "handed out twice")
        self.assertEqual([statuses[name] for name in handed[:-1]], ["completed"] * len(handed[:-1]))
        if self.faults.fired is None:
            self.assertEqual((error, len(handed), statuses[handed[-1]]), (None, 4, "completed"))
            return True
        self.assertIsInstance(error, DatabaseError)
        self.assertTrue(way == FOR_GOOD or not store.sqlite.in_transaction)
        if handed:
            self.assertIn(statuses[handed[-1]], ("completed", "running"))
        self.assertEqual(unsound(self.copy._sqlite), [])
        self.assertEqual(queue.add(new_job("t", id="next")), ("next", True))
        return False


class OpeningTest(FaultCase):
    """A file is left blank, or as it was, or is complete; and can be opened the next time."""

    def open_with_faults(self, prepare: Callable[[], None], whole: Callable[[], bool], create: bool) -> int:
        """Open with a fault at each statement in turn; return how many there are."""
        counts: list[int] = []
        for way in (FOR_GOOD, AFTER):  # the second way only around the COMMIT: files are slow to make
            at = max(1, counts[0] - 8) if counts else 1
            while True:
                for path in self.dir.glob("new.db*"):
                    path.unlink()
                prepare()
                self.faults.arm(at, way)
                _, error = self.attempt(lambda: Store(self.dir / "new.db", create=create).close())
                if self.faults.fired is None:
                    self.assertIsNone(error)
                    break
                with self.subTest(way=way, at=at, statement=self.faults.fired):
                    if error is not None:  # what the first, careless look meets is left to the next
                        self.assertIsInstance(error, DatabaseError)
                    whole()
                    with closing(Store(self.dir / "new.db", create=create)) as store:
                        self.assertEqual(unsound(store.sqlite), [])
                        self.assertTrue(store.add(new_job("t", id="n"), now_ms=LATER)[1])
                at += 1
            counts.append(at)
        return max(counts)

    def tables(self) -> int:
        path = self.dir / "new.db"
        with closing(self.look(path)) as sqlite:
            ((tables,),) = sqlite.execute("SELECT count(*) FROM sqlite_master").fetchall()
            header = sqlite.execute("SELECT * FROM pragma_application_id, pragma_user_version").fetchall()
        self.assertEqual(header == [(0, 0)], tables == 0, "half a queue")
        return int(tables)

    def look(self, path: Any) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{path}?mode=rw", uri=True)

    def test_a_file_that_is_not_there(self) -> None:
        with closing(Store(self.db)) as store:
            all_tables = store.sqlite.execute("SELECT count(*) FROM sqlite_master").fetchall()[0][0]

        def whole() -> None:
            self.assertIn(self.tables(), (0, all_tables))

        self.assertGreater(self.open_with_faults(lambda: None, whole, True), 30)

    def test_a_file_with_jobs(self) -> None:
        content, jobs = self.template(), [(len(self.copy.state()["jobs"]),)]

        def whole() -> None:
            with closing(self.look(self.dir / "new.db")) as sqlite:
                self.assertEqual(sqlite.execute("SELECT count(*) FROM jobs").fetchall(), jobs)

        self.assertGreater(self.open_with_faults(lambda: self.write(content), whole, False), 10)

    def test_an_older_file(self) -> None:
        content = self.template()
        steps = ("CREATE TABLE tags(job INTEGER, tag TEXT) STRICT;\nINSERT INTO tags SELECT seq, '' FROM jobs;\n",
                 "CREATE INDEX tags_job ON tags(job);\n")

        def whole() -> None:
            with closing(self.look(self.dir / "new.db")) as sqlite:
                ((version,),) = sqlite.execute("PRAGMA user_version").fetchall()
                parts = sqlite.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE 'tags%'").fetchall()
                self.assertIn((version, parts), [(2, [(0,)]), (4, [(2,)])])

        with mock.patch.multiple(schema, MIGRATIONS=(*schema.MIGRATIONS, *steps), VERSION=4):
            self.assertGreater(self.open_with_faults(lambda: self.write(content), whole, False), 15)

    def template(self) -> bytes:
        return (self.dir / "template.db").read_bytes()

    def write(self, content: bytes) -> None:
        (self.dir / "new.db").write_bytes(content)


class WorkQueueTest(AioTestCase):
    """`WorkQueue` tries again by itself: nobody hears of a fault that passes, and nothing is done by halves."""

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        patch = mock.patch("jobqueue.aio.clerk.FIRST_PAUSE_SECONDS", 0.0)
        patch.start()
        self.addCleanup(patch.stop)

    async def test_a_fault_at_any_statement_is_waited_out(self) -> None:
        for way in (BEFORE, UNDONE):
            faults = Faults()
            with watched(faults):
                async with self.queue(path=self.dir / f"{way}.db") as queue:
                    at, done = 0, False
                    while not done:
                        at += 1
                        self.assertLess(at, 200)
                        with self.subTest(way=way, at=at):
                            done = await self.check(queue, faults, at, way)
            self.assertGreater(at, 12)

    async def check(self, queue: Any, faults: Faults, at: int, way: str) -> bool:
        """Store, lease and complete a job with a fault; return whether it was not met any more."""
        name = f"{way}-{at}"
        faults.arm(at, way)
        self.assertTrue(await queue.enqueue(name, at))
        lease = await queue.lease("w")
        assert lease is not None
        self.assertEqual((lease.job_id, lease.attempts), (name, 1))
        self.assertTrue(await queue.complete(name, lease.lease_token))
        self.assertEqual((await queue.get(name))["status"], "done")
        fired, _ = faults.fired, faults.heal()
        return fired is None

    async def test_a_commit_that_came_through_with_an_error_is_not_made_twice(self) -> None:
        faults = Faults()
        with watched(faults):
            async with self.queue() as queue:
                faults.arm(1, AFTER)
                while faults.fired != "COMMIT":
                    at = faults._at + 1
                    faults.arm(at, AFTER)
                    await queue.enqueue(f"job-{at}", at)
                faults.heal()
                self.assertEqual((await queue.stats())["pending"], at - 1)
                self.assertEqual((await queue.get(f"job-{at}"))["attempts"], 0)


if __name__ == "__main__":
    unittest.main()
