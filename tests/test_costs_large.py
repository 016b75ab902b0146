"""What calls cost in large files: SQLite's own steps, which grow with the rows visited, and what each index saves.

Nothing is timed, so a lost index fails here on any machine; see `test_costs`.
"""

from __future__ import annotations

import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

from jobqueue import Queue, hints
from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.bench_files import fill, now_ms
from tests.engine import add_batch, token
from tests.test_costs import KINDS, CostTestCase, steps

FEW, MANY = 100, 20_000


class LargeFileTest(CostTestCase):
    """A call costs the same beside 20,000 jobs of any kind as beside 100."""

    directory: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.directory = Path(tempfile.mkdtemp(prefix="jobqueue-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.directory)
        for count in (FEW, MANY):
            path = cls.directory / f"{count}.db"
            Queue(path, create=True).close()
            for kind in ("failed", "canceled", *KINDS, "running"):
                fill(path, kind, FEW if kind in ("failed", "canceled") else count)
            fill(path, "waiting", FEW)

    def assert_flat(self, action: Callable[[Queue], object],
                    before: Callable[[Queue], object] | None = None) -> None:  # fmt: skip
        """Expect nearly the same steps in the small file and in the large one; `before` is not counted."""
        counts = []
        for count in (FEW, MANY):
            path = self.dir / f"{count}.db"
            shutil.copyfile(self.directory / path.name, path)  # neither is open
            queue = self.open(path)
            if before is not None:
                before(queue)
            counts.append(steps(queue._store, lambda: action(queue)))  # noqa: B023
            queue.close()
        few, many = counts
        self.assertLessEqual(many, 1.3 * few)

    def test_enqueue(self) -> None:
        def enqueue(queue: Queue) -> None:
            queue.enqueue("t")
            queue.enqueue("t", id="mine", idempotency_key="k")
            queue.enqueue("t", idempotency_key="k")
            queue.enqueue("t", depends_on=["mine", "7"])

        self.assert_flat(enqueue)

    def test_enqueue_many(self) -> None:
        jobs: list[dict[str, object]] = [{"type": "t", "id": "a"}, {"type": "t", "depends_on": ["a", "7"]},
                                         {"type": "t", "idempotency_key": "k"}]  # fmt: skip
        self.assert_flat(lambda queue: queue.enqueue_many(jobs))

    def test_claim_complete_fail_and_release(self) -> None:
        def work(queue: Queue) -> None:
            for call in (queue.complete, lambda id, token: queue.fail(id, token, "no luck"), queue.release):
                (job,) = queue.claim("me")
                self.assertTrue(call(job.id, token(job)))

        self.assert_flat(work)

    def test_work(self) -> None:
        self.assert_flat(lambda queue: [next(tasks) for tasks in [queue.work("me")] for _ in range(10)])

    def test_claims_of_several_queues(self) -> None:
        def claim(queue: Queue) -> None:
            self.assertEqual(len(queue.claim("me", limit=10, queues=["default", "other", "empty"])), 10)

        self.assert_flat(claim)

    def test_recovery_of_expired_leases(self) -> None:
        def expire(queue: Queue) -> None:
            with queue._store.transaction():
                queue._store.sqlite.execute("UPDATE jobs SET lease_expires_at = 1 WHERE seq IN "
                                            "(SELECT seq FROM jobs WHERE status = 'running' LIMIT 5)")  # fmt: skip

        self.assert_flat(lambda queue: self.assertEqual(queue.recover_expired(), 5), expire)

    def test_get_and_the_newest_of_a_list(self) -> None:
        def look(queue: Queue) -> None:
            self.assertIsNotNone(queue.get("7"))
            self.assertIsNone(queue.get("absent"))
            self.assertEqual(len(queue.list(limit=10)), 10)
            self.assertEqual(len(queue.list("canceled", limit=10)), 10)
            self.assertEqual(len(queue.list("pending", limit=10)), 10)
            self.assertEqual(len(queue.list(type="sleep", queue="default", limit=10)), 10)

        self.assert_flat(look)

    def test_the_dead_are_found_among_others(self) -> None:
        """They are the oldest: those after them are not looked at."""
        def look(queue: Queue) -> None:
            self.assertEqual(len(queue.list("canceled")), FEW)
            self.assertEqual(queue.retry_failed(type="absent"), 0)

        self.assert_flat(look)

    def test_cancel_and_retry(self) -> None:
        def steer(queue: Queue) -> None:
            self.assertTrue(queue.retry("7"))
            self.assertTrue(queue.cancel("7"))

        self.assert_flat(steer)


class GrowthTest(CostTestCase):
    """What has to grow does so in proportion."""

    def assert_linear(self, cost: Callable[[int], int], few: int = 100, times: int = 20) -> None:
        """Expect that so many times as much costs at most a tenth more than so many times the steps."""
        self.assertLessEqual(cost(few * times), 1.1 * times * cost(few))

    def test_dependents_freed_at_once(self) -> None:
        def cost(count: int) -> int:
            queue = self.open(self.dir / f"{count}.db", create=True)
            parent = queue.enqueue("t", id="parent")
            queue.enqueue_many([{"type": "t", "depends_on": [parent]}] * count)
            (job,) = queue.claim("me")
            taken = steps(queue._store, lambda: queue.complete(job.id, token(job)))
            self.assertEqual(queue.stats()["ready"], count)
            return taken

        self.assert_linear(cost)

    def test_parents_settled_at_once(self) -> None:
        def cost(count: int) -> int:
            queue = self.open(self.dir / f"{count}.db", create=True)
            store = queue._store
            ids = queue.enqueue_many([{"type": "t", "id": f"p{n}"} for n in range(count)])
            queue.enqueue("t", depends_on=ids)
            done = [(job.seq, token(job), None) for job in queue.claim("me", limit=count)]
            with store.transaction():
                taken = steps(store, lambda: store.complete_many(done, now_ms=now_ms()))
            self.assertEqual(queue.stats()["ready"], 1)
            return taken

        self.assert_linear(cost)

    def test_leases_extended_and_recovered(self) -> None:
        def cost(count: int) -> int:
            queue = self.open(self.dir / f"{count}.db", create=True)
            store = queue._store
            queue.enqueue_many([{"type": "t"}] * count)
            leases = [(job.seq, token(job)) for job in queue.claim("me", limit=count)]
            taken = steps(store, lambda: self.assertEqual(
                store.extend_many(leases, now_ms=now_ms(), lease_ms=1), []))  # fmt: skip
            later = now_ms() + 60_000
            return taken + steps(store, lambda: self.assertEqual(
                len(store.recover_expired(now_ms=later, limit=count)), count))  # fmt: skip

        self.assert_linear(cost, few=50)

    def test_failed_ones_retried(self) -> None:
        def cost(count: int) -> int:
            path = self.dir / f"{count}.db"
            Queue(path, create=True).close()
            fill(path, "failed", count)
            queue = self.open(path)
            return steps(queue._store, lambda: self.assertEqual(queue.retry_failed(), count))

        self.assert_linear(cost)

    def test_a_batch(self) -> None:
        def cost(count: int) -> int:
            queue = self.open(self.dir / f"{count}.db", create=True)
            jobs = [{"type": "t", "id": f"j{n}", "idempotency_key": f"k{n}"} for n in range(count)]
            return steps(queue._store, lambda: queue.enqueue_many(jobs))

        self.assert_linear(cost)


class IndexTest(CostTestCase):
    """Each index earns its keep: without it, some call visits very many more rows.

    So these counts are such that the loss of an index is seen in them.
    """

    template: Path

    @classmethod
    def setUpClass(cls) -> None:
        directory = tempfile.mkdtemp(prefix="jobqueue-test-")
        cls.addClassCleanup(shutil.rmtree, directory)
        cls.template = Path(directory, "template.db")
        Queue(cls.template, create=True).close()
        for kind in KINDS:
            fill(cls.template, kind, 1_000)

    def assert_needed(self, index: str, *actions: Callable[[Store], object], factor: int = 5) -> None:
        """Expect that each action costs more than `factor` times the steps without the index."""
        for number, action in enumerate(actions):
            costs = []
            for drop in (False, True):
                path = self.dir / f"{number}-{drop}.db"
                shutil.copyfile(self.template, path)  # neither is open
                store = self.open(path)._store
                if drop:
                    store.sqlite.execute(f"DROP INDEX {index}").fetchall()
                costs.append(steps(store, lambda: action(store)))  # noqa: B023
                store.close()
            self.assertGreater(costs[1], factor * costs[0], f"{index}, action {number}")

    def test_none_is_left_out_here(self) -> None:
        tested = {name.removeprefix("test_index_") for name in dir(self) if name.startswith("test_index_")}
        with self.store.snapshot():
            rows = self.store.sqlite.execute(
                "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL "
                "AND tbl_name IN ('jobs', 'dependencies')").fetchall()  # fmt: skip
        self.assertEqual(tested, {name for (name,) in rows})

    def test_index_jobs_kinds(self) -> None:
        self.assert_needed("jobs_kinds", hints.types)

    def test_index_jobs_ready(self) -> None:
        self.assert_needed("jobs_ready", lambda store: store.claim("me", now_ms=now_ms(), lease_ms=9))

    def test_index_jobs_scheduled(self) -> None:
        self.assert_needed("jobs_scheduled", lambda store: store.next_event(["default"]),
                           lambda store: store.promote(now_ms=now_ms()))  # fmt: skip

    def test_index_jobs_waiting(self) -> None:
        def count(store: Store) -> None:
            store.retry_failed(now_ms=now_ms())  # so that nothing is blocked, which would be looked for
            self.assertEqual(sum(store.shares("absent", now_ms=now_ms()).values()), 0)

        self.assert_needed("jobs_waiting", count)

    def test_index_jobs_retrying(self) -> None:
        self.assert_needed("jobs_retrying", lambda store: store.list(status="retrying", limit=5))

    def test_index_jobs_finished(self) -> None:
        self.assert_needed("jobs_finished", lambda store: store.counts("absent"), factor=2)

    def test_index_jobs_leases(self) -> None:
        self.assert_needed("jobs_leases", lambda store: store.recover_expired(now_ms=now_ms()),
                           lambda store: store.next_event(["other"]))  # fmt: skip

    def test_index_jobs_dead(self) -> None:
        self.assert_needed("jobs_dead", lambda store: store.list(status="failed", limit=5),
                           lambda store: store.retry_failed(now_ms=now_ms()))  # fmt: skip

    def test_index_jobs_number_ahead(self) -> None:
        self.assert_needed("jobs_number_ahead", lambda store: add_batch(store, [new_job("t")], now_ms()))

    def test_index_jobs_idempotency_key(self) -> None:
        job = new_job("t", idempotency_key="k")
        self.assert_needed("jobs_idempotency_key", lambda store: store.add(job, now_ms=now_ms()))

    def test_index_dependencies_reverse(self) -> None:
        def complete(store: Store) -> None:
            (job,) = store.claim("me", now_ms=now_ms(), lease_ms=9_999)
            self.assertTrue(store.complete(job.id, token(job), now_ms=now_ms()))

        self.assert_needed("dependencies_reverse", complete)


if __name__ == "__main__":
    unittest.main()
