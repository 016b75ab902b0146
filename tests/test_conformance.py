"""One suite for both engines: `Store` in a file, `MemoryStore` in memory.

First, what every engine must answer: each move from each status as a row of a table.  Then both go through
the same random histories, clock steps backwards included, and after every single step must have given the
same answer and hold the same jobs.  A failing history prints its seed and its last steps.
"""

from __future__ import annotations

import random
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from jobqueue.db import Store
from jobqueue.errors import DependencyCycle, InvalidJob, JobQueueError, UnknownJobError
from jobqueue.jobs import Job, NewJob, new_job
from jobqueue.memory.store import MemoryStore

QUEUES = ("default", "other")


class Engine(Protocol):
    """What both engines can do; all times in milliseconds."""

    def add(self, job: NewJob, now: int) -> tuple[str, bool]: ...
    def add_many(self, jobs: Sequence[NewJob], now: int) -> list[str]: ...
    def claim(self, now: int, lease: int, limit: int, queues: Sequence[str]) -> list[Job]: ...
    def extend(self, job_id: str, token: str, now: int, lease: int) -> bool: ...
    def complete(self, job_id: str, token: str, result: object, now: int) -> bool: ...
    def fail(self, job_id: str, token: str, error: str, now: int, delay: int | None, final: bool) -> str | None: ...
    def release(self, job_id: str, token: str, now: int) -> bool: ...
    def recover(self, now: int, queues: Sequence[str], limit: int) -> list[tuple[Job, str]]: ...
    def cancel(self, job_id: str, now: int) -> bool: ...
    def retry(self, job_id: str, now: int) -> bool: ...
    def get(self, job_id: str) -> Job | None: ...
    def counts(self, queue: str | None) -> dict[str, int]: ...
    def blocked(self, queue: str | None) -> list[str]: ...
    def everything(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class FileEngine:
    """`Store` on a temporary file."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="jobqueue-test-")
        self._store = Store(Path(self._directory.name) / "jobs.db", create=True)
        # No power fails here, and thousands of commits are waited for.
        self._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()

    def add(self, job: NewJob, now: int) -> tuple[str, bool]:
        return self._store.add(job, now_ms=now)

    def add_many(self, jobs: Sequence[NewJob], now: int) -> list[str]:
        with self._store.batch() as batch:
            batch.extend(enumerate(jobs))
            batch.check()
            batch.store(now_ms=now)
            return list(batch.ids())

    def claim(self, now: int, lease: int, limit: int, queues: Sequence[str]) -> list[Job]:
        while self._store.promote(now_ms=now, queues=queues):
            pass
        # After the clock has stepped back a claim may find fewer than it could; the next finds the rest.
        claimed: list[Job] = []
        while len(claimed) < limit:
            more = self._store.claim("w", now_ms=now, lease_ms=lease, limit=limit - len(claimed), queues=queues)
            if not more:
                break
            claimed += more
        return claimed

    def extend(self, job_id: str, token: str, now: int, lease: int) -> bool:
        return self._store.extend(job_id, token, now_ms=now, lease_ms=lease)

    def complete(self, job_id: str, token: str, result: object, now: int) -> bool:
        return self._store.complete(job_id, token, result, now_ms=now)

    def fail(self, job_id: str, token: str, error: str, now: int, delay: int | None, final: bool) -> str | None:
        return self._store.fail(job_id, token, error, now_ms=now, delay_ms=delay, final=final)

    def release(self, job_id: str, token: str, now: int) -> bool:
        return self._store.release(job_id, token, now_ms=now)

    def recover(self, now: int, queues: Sequence[str], limit: int) -> list[tuple[Job, str]]:
        return self._store.recover_expired(now_ms=now, queues=queues, limit=limit)

    def cancel(self, job_id: str, now: int) -> bool:
        return self._store.cancel(job_id, now_ms=now)

    def retry(self, job_id: str, now: int) -> bool:
        return self._store.retry(job_id, now_ms=now)

    def get(self, job_id: str) -> Job | None:
        return self._store.get(job_id)

    def counts(self, queue: str | None) -> dict[str, int]:
        return self._store.counts(queue)

    def blocked(self, queue: str | None) -> list[str]:
        return self._store.blocked(queue)

    def everything(self) -> dict[str, Any]:
        failures: dict[int, list[tuple[Any, ...]]] = {}
        for seq, *failure in self._store.sqlite.execute(
            "SELECT job, attempt, owner, started_at, ended_at, reason, error FROM failures ORDER BY rowid"
        ).fetchall():
            failures.setdefault(seq, []).append(tuple(failure))
        return {job.id: (shown(job), failures.get(job.seq, [])) for job in self._store.list()}

    def close(self) -> None:
        self._store.close()
        self._directory.cleanup()


class MemoryEngine:
    """`MemoryStore`, its plain numbers being milliseconds."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._ids: set[str] = set()

    def add(self, job: NewJob, now: int) -> tuple[str, bool]:
        answer = self._store.add(job, now=now)
        self._ids.add(answer[0])
        return answer

    def add_many(self, jobs: Sequence[NewJob], now: int) -> list[str]:
        ids = self._store.add_many(jobs, now=now)
        self._ids.update(ids)
        return ids

    def claim(self, now: int, lease: int, limit: int, queues: Sequence[str]) -> list[Job]:
        return self._store.claim("w", now=now, lease=lease, limit=limit, queues=queues)

    def extend(self, job_id: str, token: str, now: int, lease: int) -> bool:
        return self._store.extend(job_id, token, now=now, lease=lease)

    def complete(self, job_id: str, token: str, result: object, now: int) -> bool:
        return self._store.complete(job_id, token, result, now=now)

    def fail(self, job_id: str, token: str, error: str, now: int, delay: int | None, final: bool) -> str | None:
        return self._store.fail(job_id, token, error, now=now, delay=delay, final=final)

    def release(self, job_id: str, token: str, now: int) -> bool:
        return self._store.release(job_id, token, now=now)

    def recover(self, now: int, queues: Sequence[str], limit: int) -> list[tuple[Job, str]]:
        return self._store.recover_expired(now=now, queues=queues, limit=limit)

    def cancel(self, job_id: str, now: int) -> bool:
        return self._store.cancel(job_id, now=now)

    def retry(self, job_id: str, now: int) -> bool:
        return self._store.retry(job_id, now=now)

    def get(self, job_id: str) -> Job | None:
        return self._store.get(job_id)

    def counts(self, queue: str | None) -> dict[str, int]:
        return self._store.counts(queue)

    def blocked(self, queue: str | None) -> list[str]:
        return self._store.blocked(queue)

    def everything(self) -> dict[str, Any]:
        return {job_id: (shown(self.get(job_id)), self._store.failures(job_id)) for job_id in self._ids}

    def close(self) -> None:
        """Nothing is open."""


ENGINES: dict[str, Callable[[], Engine]] = {"file": FileEngine, "memory": MemoryEngine}


def shown(job: Job | None) -> dict[str, Any] | None:
    """Return all that two engines must agree on: not `ready`, a cache, and of the token only that there is one."""
    if job is None:
        return None
    fields = {name: getattr(job, name) for name in Job.__slots__ if name != "ready"}
    fields["lease_token"] = job.lease_token is not None
    fields["depends_on"] = None if job.depends_on is None else sorted(job.depends_on)
    return fields


class MovesTest(unittest.TestCase):
    """Each move from each status, in each engine."""

    COLUMNS = ("pending", "running", "retrying", "completed", "failed", "canceled", "waiting")
    MOVES: dict[str, tuple[str | None, ...]] = {
        "claim":    ("running", None, "running", None, None, None, None),
        "complete": (None, "completed", None, None, None, None, None),
        "fail":     (None, "retrying", None, None, None, None, None),
        "reject":   (None, "failed", None, None, None, None, None),
        "release":  (None, "pending", None, None, None, None, None),
        "extend":   (None, "running", None, None, None, None, None),
        "expire":   (None, "retrying", None, None, None, None, None),
        "cancel":   ("canceled", "canceled", "canceled", None, None, None, "canceled"),
        "retry":    (None, None, None, None, "pending", "pending", None),
    }  # fmt: skip

    def setUp(self) -> None:
        self.now = 1_000_000
        self.token = "none"

    def bring(self, engine: Engine, status: str) -> None:
        """Bring job x into `status`, with one attempt used where that is possible; remember its last token."""
        if status == "waiting":
            engine.add(new_job("t", id="parent", queue="elsewhere"), self.now)
        engine.add(new_job("t", id="x", depends_on=["parent"] if status == "waiting" else ()), self.now)
        if status in ("running", "retrying", "completed", "failed"):
            (job,) = engine.claim(self.now, 10_000, 1, ("default",))
            assert job.lease_token is not None
            self.token = job.lease_token
            if status == "completed":
                self.assertTrue(engine.complete("x", self.token, None, self.now))
            elif status != "running":
                self.assertEqual(engine.fail("x", self.token, "e", self.now, 0, status == "failed"), status)
        elif status == "canceled":
            self.assertTrue(engine.cancel("x", self.now))

    def move(self, engine: Engine, move: str) -> bool:
        """Make the move with the last token there was; return whether the engine says it did."""
        actions: dict[str, Callable[[], object]] = {
            "claim": lambda: engine.claim(self.now, 10_000, 1, ("default",)),
            "complete": lambda: engine.complete("x", self.token, 1, self.now),
            "fail": lambda: engine.fail("x", self.token, "e", self.now, None, False),
            "reject": lambda: engine.fail("x", self.token, "e", self.now, None, True),
            "release": lambda: engine.release("x", self.token, self.now),
            "extend": lambda: engine.extend("x", self.token, self.now, 5_000),
            "expire": lambda: engine.recover(self.now + 10_000, ("default",), 10),
            "cancel": lambda: engine.cancel("x", self.now),
            "retry": lambda: engine.retry("x", self.now),
        }
        return bool(actions[move]())

    def test_every_move_from_every_status(self) -> None:
        for name, make in ENGINES.items():
            for move, row in self.MOVES.items():
                for status, expected in zip(self.COLUMNS, row, strict=True):
                    with self.subTest(engine=name, move=move, status=status):
                        self.setUp()
                        engine = make()
                        self.addCleanup(engine.close)
                        self.bring(engine, status)
                        before = shown(engine.get("x"))
                        assert before is not None
                        self.assertEqual(before["status"], "pending" if status == "waiting" else status)
                        self.assertIs(self.move(engine, move), expected is not None)
                        after = shown(engine.get("x"))
                        assert after is not None
                        if expected is None:
                            self.assertEqual(after, before)
                        else:
                            self.assertEqual(after["status"], expected)

    def test_what_a_move_leaves_in_the_job(self) -> None:
        """Rows: status before, move, what the job then holds (what is not named is as it was)."""
        ended = {"lease_owner": None, "lease_token": False, "lease_expires_at": None}
        lost = "the lease of w ran out"
        rows: list[tuple[str, str, dict[str, Any]]] = [
            ("pending", "claim", {"status": "running", "attempts": 1, "lease_owner": "w", "lease_token": True,
                                  "lease_expires_at": 1_010_000, "started_at": 1_000_000}),
            ("retrying", "claim", {"status": "running", "attempts": 2, "lease_owner": "w", "lease_token": True,
                                   "lease_expires_at": 1_010_000, "started_at": 1_000_000}),
            ("running", "complete", {"status": "completed", "result_json": "1", "finished_at": 1_000_000, **ended}),
            ("running", "fail", {"status": "retrying", "run_at": 1_001_000, "last_error": "e", **ended}),
            ("running", "reject", {"status": "failed", "last_error": "e", "finished_at": 1_000_000, **ended}),
            ("running", "release", {"status": "pending", "attempts": 0, "started_at": None, **ended}),
            ("running", "extend", {"lease_expires_at": 1_005_000}),
            ("running", "expire", {"status": "retrying", "last_error": lost, **ended}),
            ("pending", "cancel", {"status": "canceled", "finished_at": 1_000_000}),
            ("running", "cancel", {"status": "canceled", "finished_at": 1_000_000, **ended}),
            ("retrying", "cancel", {"status": "canceled", "finished_at": 1_000_000}),
            ("failed", "retry", {"status": "pending", "attempts": 0, "started_at": None, "finished_at": None}),
            ("canceled", "retry", {"status": "pending", "finished_at": None}),
        ]  # fmt: skip
        for name, make in ENGINES.items():
            for status, move, changes in rows:
                with self.subTest(engine=name, move=move, status=status):
                    self.setUp()
                    engine = make()
                    self.addCleanup(engine.close)
                    self.bring(engine, status)
                    before = shown(engine.get("x"))
                    assert before is not None
                    self.assertTrue(self.move(engine, move))
                    self.assertEqual(shown(engine.get("x")), {**before, **changes})

    def test_a_lease_holds_until_its_last_millisecond(self) -> None:
        moves: dict[str, Callable[[Engine, str, int], object]] = {
            "complete": lambda engine, token, now: engine.complete("x", token, None, now),
            "fail": lambda engine, token, now: engine.fail("x", token, "e", now, None, False),
            "extend": lambda engine, token, now: engine.extend("x", token, now, 5),
            "release": lambda engine, token, now: engine.release("x", token, now),
        }
        for name, make in ENGINES.items():
            for move, action in moves.items():
                for now, held in ((1_009_999, True), (1_010_000, False), (1_010_001, False)):
                    with self.subTest(engine=name, move=move, now=now):
                        self.setUp()
                        engine = make()
                        self.addCleanup(engine.close)
                        self.bring(engine, "running")
                        self.assertEqual(len(engine.recover(1_009_999, ("default",), 10)), 0)
                        self.assertIs(bool(action(engine, self.token, now)), held)
                        self.assertEqual(len(engine.recover(now, ("default",), 10)), 0 if held else 1)

    def test_unknown_jobs(self) -> None:
        calls: dict[str, Callable[[Engine], object]] = {
            "complete": lambda engine: engine.complete("y", "t", None, 0),
            "fail": lambda engine: engine.fail("y", "t", "e", 0, None, False),
            "extend": lambda engine: engine.extend("y", "t", 0, 1),
            "release": lambda engine: engine.release("y", "t", 0),
            "cancel": lambda engine: engine.cancel("y", 0),
            "retry": lambda engine: engine.retry("y", 0),
        }
        for name, make in ENGINES.items():
            engine = make()
            self.addCleanup(engine.close)
            self.assertIsNone(engine.get("y"))
            for move, call in calls.items():
                with self.subTest(engine=name, move=move), self.assertRaises(UnknownJobError):
                    call(engine)

    def test_a_result_that_is_not_json_leaves_the_lease_alone(self) -> None:
        for name, make in ENGINES.items():
            with self.subTest(engine=name):
                self.setUp()
                engine = make()
                self.addCleanup(engine.close)
                self.bring(engine, "running")
                for bad in (object(), float("nan"), "\ud800"):
                    with self.assertRaises(InvalidJob):
                        engine.complete("x", self.token, bad, self.now)
                self.assertTrue(engine.complete("x", self.token, [1], self.now))

    def test_a_diamond_settled_parent_by_parent(self) -> None:
        for name, make in ENGINES.items():
            with self.subTest(engine=name):
                engine = make()
                self.addCleanup(engine.close)
                for job_id, parents in (("a", ""), ("b", "a"), ("c", "a"), ("d", "bc")):
                    engine.add(new_job("t", id=job_id, depends_on=list(parents)), 0)
                order = []
                while claimed := engine.claim(0, 10, 1, ("default",)):
                    order.append(claimed[0].id)
                    self.assertTrue(engine.complete(claimed[0].id, claimed[0].lease_token or "", None, 0))
                self.assertEqual(order, ["a", "b", "c", "d"])


class History:
    """One random history, driven through all engines at once."""

    def __init__(self, test: unittest.TestCase, seed: int) -> None:
        self.test = test
        self.seed = seed
        self.random = random.Random(seed)
        self.engines = {name: make() for name, make in ENGINES.items()}
        self.now = 1_000_000
        self.ids: list[str] = []
        self.leases: list[tuple[str, dict[str, str]]] = []  # the job, and each engine's token
        self.log: list[str] = []
        self.used: dict[str, int] = {}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def run(self, steps: int) -> None:
        """Take random steps; compare answers and all jobs after each."""
        moves = [self.add] * 4 + [self.add_many] + [self.claim] * 6 + [self.complete] * 4 + [self.fail] * 4
        moves += [self.release, self.extend, self.cancel, self.retry, self.retry, self.recover, self.recover]
        for _ in range(steps):
            self.step_clock()
            self.random.choice(moves)()
            self.compare()

    def step_clock(self) -> None:
        self.now += self.random.choice((0, 0, 0, 1, 10, 500, 1_000, 3_000, 20_000, 70_000, -1, -2_500, -30_000))

    def compare(self) -> None:
        jobs = self.same("jobs and failures", lambda name, engine: engine.everything())
        self.test.assertEqual(set(jobs), set(self.ids), self.story())
        for queue in (None, *QUEUES):
            counts = self.same("counts", lambda name, engine, queue=queue: engine.counts(queue))
            self.same("blocked", lambda name, engine, queue=queue: engine.blocked(queue))
            if queue is None:
                self.test.assertEqual(sum(counts.values()), len(self.ids), self.story())

    def same(self, what: str, ask: Callable[..., Any]) -> Any:
        """Ask all engines, require one answer (of errors: type and place in the batch), and return it."""
        answers: dict[str, Any] = {}
        for name, engine in self.engines.items():
            try:
                answers[name] = ask(name, engine)
            except JobQueueError as error:
                ring = isinstance(error, DependencyCycle)  # where a ring begins is left open
                answers[name] = (type(error).__name__, None if ring else getattr(error, "index", None))
        if answers["file"] != answers["memory"]:
            self.test.assertEqual(answers["file"], answers["memory"], f"{what}\n{self.story()}")
        return answers["file"]

    def story(self) -> str:
        return "\n".join([f"seed {self.seed}, the last steps:", *self.log[-12:]])

    def told(self, text: str) -> None:
        self.log.append(f"  now={self.now} {text}")
        self.used[text.split()[0]] = self.used.get(text.split()[0], 0) + 1

    # -- steps -------------------------------------------------------------------------------

    def some_job(self, own: Sequence[str | None] = ()) -> dict[str, Any]:
        pick = self.random.choice
        count = self.random.choice((0, 0, 0, 1, 1, 2, 3))
        known = [*self.ids[-12:], *[name for name in own if name is not None]]
        # Names of letters, of numbers that the engine may come to, and now and then one taken already.
        job_id = pick((None, None, f"j{len(self.ids)}", f"j{len(self.ids)}", str(self.random.randrange(80))))
        names = [pick(known) for _ in range(count) if known] + (["nobody"] if self.random.random() < 0.02 else [])
        return {
            "type": "t", "id": job_id, "queue": pick(QUEUES), "priority": pick((0, 0, 1, -1, 2**63 - 1)),
            "max_attempts": pick((1, 2, 3, 3, 9)), "payload": pick((None, {"n": 1})),
            "run_at": pick((None, None, None, max(0, self.now + self.random.randrange(-5_000, 5_000)))),
            "idempotency_key": pick((None, None, None, None, f"k{self.random.randrange(12)}")),
            "depends_on": [name for name in names if name != job_id],
            "timeout": pick((None, 5)), "trace": pick((None, "trace")),
        }  # fmt: skip

    def add(self) -> None:
        fields = self.some_job()
        if fields["run_at"] is None and self.random.random() < 0.3:
            fields["delay"] = self.random.choice((0, 1, 4))
        self.told(f"add {fields}")
        answer = self.same("add", lambda name, engine: engine.add(new_job(**fields), self.now))
        if answer[1] is True:
            self.ids.append(answer[0])

    def add_many(self) -> None:
        size = self.random.randrange(1, 7)
        named = [f"b{len(self.log)}.{n}" if self.random.random() < 0.8 else None for n in range(size)]
        batch: list[dict[str, Any]] = []
        for n, name in enumerate(named):
            # Mostly jobs of the batch in front of it; sometimes any, which may make a ring.
            own = named if self.random.random() < 0.15 else named[:n]
            fields = self.some_job([other for other in own if other != name])
            if name is not None:
                fields["id"] = name
                fields["depends_on"] = [other for other in fields["depends_on"] if other != name]
            if [other["id"] for other in batch].count(fields["id"]) > 1:
                fields["id"] = None  # an id given three times: which of the later ones is named is left open
            batch.append(fields)
        self.told(f"add_many {batch}")
        jobs = [new_job(**fields) for fields in batch]
        answer = self.same("add_many", lambda name, engine: engine.add_many(jobs, self.now))
        if isinstance(answer, list):
            self.ids += [job_id for job_id in dict.fromkeys(answer) if job_id not in self.ids]

    def claim(self) -> None:
        lease = self.random.choice((1, 500, 5_000, 30_000))
        limit = self.random.choice((1, 1, 2, 5))
        queues = self.random.choice((("default",), ("other",), QUEUES, QUEUES[::-1], ("none", "other")))
        self.told(f"claim lease={lease} limit={limit} queues={queues}")
        tokens: dict[str, list[str]] = {}

        def ask(name: str, engine: Engine) -> list[Any]:
            claimed = engine.claim(self.now, lease, limit, queues)
            tokens[name] = [job.lease_token or "" for job in claimed]
            return [shown(job) for job in claimed]

        for n, job in enumerate(self.same("claim", ask)):
            self.leases.append((job["id"], {name: found[n] for name, found in tokens.items()}))

    def some_lease(self) -> tuple[str, dict[str, str]] | None:
        """Return mostly a recent lease, sometimes a stale one, sometimes the token of another job."""
        if not self.leases:
            return None
        job_id, tokens = self.random.choice(self.leases[-4:] if self.random.random() < 0.8 else self.leases)
        if self.random.random() < 0.05:
            job_id = self.random.choice([*self.ids, "nobody"])
        return job_id, tokens

    def complete(self) -> None:
        if lease := self.some_lease():
            job_id, tokens = lease
            result = self.random.choice((None, 1, {"a": [1, "\u00e9"]}, float("nan")))
            self.told(f"complete {job_id} {result}")
            self.same("complete", lambda name, engine: engine.complete(job_id, tokens[name], result, self.now))

    def fail(self) -> None:
        if lease := self.some_lease():
            job_id, tokens = lease
            delay, final = self.random.choice((None, None, 0, 700)), self.random.random() < 0.15
            error = self.random.choice(("boom", "", "x" * 5_000, "\ud800"))
            self.told(f"fail {job_id} delay={delay} final={final}")
            self.same("fail", lambda name, engine: engine.fail(job_id, tokens[name], error, self.now, delay, final))

    def release(self) -> None:
        if lease := self.some_lease():
            job_id, tokens = lease
            self.told(f"release {job_id}")
            self.same("release", lambda name, engine: engine.release(job_id, tokens[name], self.now))

    def extend(self) -> None:
        if lease := self.some_lease():
            job_id, tokens = lease
            length = self.random.choice((1, 1_000, 60_000))
            self.told(f"extend {job_id} {length}")
            self.same("extend", lambda name, engine: engine.extend(job_id, tokens[name], self.now, length))

    def recover(self) -> None:
        limit = self.random.choice((1, 2, 100, 100))
        queues = self.random.choice((("default",), QUEUES))
        self.told(f"recover limit={limit} queues={queues}")
        self.same("recover", lambda name, engine: [
            (shown(job), status) for job, status in engine.recover(self.now, queues, limit)])  # fmt: skip

    def cancel(self) -> None:
        job_id = self.random.choice([*self.ids, "nobody"])
        self.told(f"cancel {job_id}")
        self.same("cancel", lambda name, engine: engine.cancel(job_id, self.now))

    def retry(self) -> None:
        dead = [job_id for job_id in self.ids if self._is_dead(job_id)]
        job_id = self.random.choice(dead or [*self.ids, "nobody"])
        self.told(f"retry {job_id}")
        self.same("retry", lambda name, engine: engine.retry(job_id, self.now))

    def _is_dead(self, job_id: str) -> bool:
        job = self.engines["memory"].get(job_id)
        return job is not None and job.status in ("failed", "canceled")


class HistoryTest(unittest.TestCase):
    """Both engines through the same random histories."""

    def test_random_histories(self) -> None:
        used: dict[str, int] = {}
        reached: dict[str, int] = {}
        for seed in range(30):
            history = History(self, seed)
            try:
                with self.subTest(seed=seed):
                    history.run(120)
                for status, count in history.engines["memory"].counts(None).items():
                    reached[status] = reached.get(status, 0) + count
                reached["blocked"] = reached.get("blocked", 0) + len(history.engines["memory"].blocked(None))
            finally:
                history.close()
            for move, count in history.used.items():
                used[move] = used.get(move, 0) + count
        # That the histories lead everywhere, so that the agreement means something.
        moves = ("add", "add_many", "claim", "complete", "fail", "release", "extend", "recover", "cancel", "retry")
        for move in moves:
            self.assertGreater(used.get(move, 0), 50, move)
        for status in ("pending", "running", "retrying", "completed", "failed", "canceled", "blocked"):
            self.assertGreater(reached.get(status, 0), 20, status)


if __name__ == "__main__":
    unittest.main()
