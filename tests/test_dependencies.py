"""Jobs that wait for others: when they start, what blocks and unblocks them, rings, wide and deep graphs."""

from __future__ import annotations

import random
import unittest
from typing import Any

from jobqueue.errors import DependencyCycle, InvalidJob
from jobqueue.jobs import NewJob, new_job
from tests.engine import LEASE_MS, NOW, StoreTestCase, add_batch, counted, ids, token, traced


class OrderTest(StoreTestCase):
    """A job starts only after all that it depends on have completed."""

    def test_a_chain_runs_in_order_whatever_the_priorities(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"], priority=5)
        self.add("c", depends_on=["b"], priority=9)
        for id in "abc":
            self.assertEqual(ids(self.claim(limit=9)), [id])
            self.assertEqual(self.claim(limit=9), [])
            job = self.job(id)
            self.assertTrue(self.store.complete(id, token(job), now_ms=NOW))

    def test_only_completion_counts(self) -> None:
        self.add("parent", max_attempts=9)
        self.add("child", depends_on=["parent"])
        self.store.fail("parent", token(self.take("parent")), "x", now_ms=NOW, delay_ms=0)
        self.store.release("parent", token(self.take("parent")), now_ms=NOW)
        self.take("parent")
        self.store.recover_expired(now_ms=NOW + LEASE_MS)
        self.store.cancel("parent", now_ms=NOW + LEASE_MS)
        self.assertEqual(self.claim(NOW + 10**9), [])
        self.store.retry("parent", now_ms=NOW)
        self.finish("parent")
        self.take("child")

    def test_a_dependency_that_has_completed_already_is_met(self) -> None:
        self.add("a")
        self.finish("a")
        self.add("b")
        self.add("one by one", depends_on=["a"])
        self.add_many([{"id": "batch", "depends_on": ["a"]}, {"id": "half", "depends_on": ["a", "b"]}])
        self.assertEqual([(job.id, job.unmet) for job in self.claim(limit=9)],
                         [("b", 0), ("one by one", 0), ("batch", 0)])
        self.assertEqual(self.job("half").unmet, 1)

    def test_a_dependency_named_twice_counts_once(self) -> None:
        self.add("a")
        self.add("one", depends_on=["a", "a"])
        self.add_many([{"id": "many", "depends_on": ["a", "a", "a"]}])
        self.assertEqual((self.job("one").unmet, self.job("many").unmet), (1, 1))
        self.assertEqual(self.job("many").depends_on, ("a",))
        self.finish("a")
        self.assertEqual(ids(self.claim(limit=9)), ["one", "many"])

    def test_two_names_of_one_job_count_once(self) -> None:
        self.add_many([{"id": "a", "idempotency_key": "k"}, {"id": "b", "idempotency_key": "k"},
                       {"id": "child", "depends_on": ["a", "b"]}])
        self.assertEqual(self.job("child").unmet, 1)
        self.finish("a")
        self.take("child")

    def test_a_diamond_settled_in_one_transaction_frees_its_child(self) -> None:
        self.add_many([{"id": "bottom", "depends_on": ["left", "right", "middle"]},
                       *({"id": id, "depends_on": ["top"]} for id in ("left", "right", "middle")), {"id": "top"}])
        self.finish("top")
        left, right, middle = self.claim(limit=9)
        self.assertEqual(self.store.complete_many(
            [(left.seq, token(left), None), (right.seq, token(right), None)], now_ms=NOW), [True, True])
        self.assertEqual((self.job("bottom").unmet, self.claim()), (1, []))
        with self.store.transaction():
            self.assertTrue(self.store.complete("middle", token(middle), now_ms=NOW))
            self.assertEqual(ids(self.claim()), ["bottom"])

    def test_only_the_parents_whose_lease_was_held_free_the_child(self) -> None:
        self.add_many([{"id": "a"}, {"id": "b"}, {"id": "child", "depends_on": ["a", "b"]}])
        a, b = self.claim(limit=2)
        answers = self.store.complete_many([(a.seq, token(a), None), (b.seq, token(a), None)], now_ms=NOW)
        self.assertEqual((answers, self.job("child").unmet), ([True, False], 1))
        answers = self.store.complete_many([(b.seq, token(a), None)], now_ms=NOW)
        self.assertEqual((answers, self.job("child").unmet), ([False], 1))

    def test_a_child_that_is_not_due_yet_waits_for_its_time(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"], run_at=NOW + 50)
        self.finish("a")
        self.assertFalse(self.store.has_ready(["default"]))
        self.assertEqual(self.store.next_event(["default"]), NOW + 50)
        self.assertEqual(self.claim(NOW + 49), [])
        self.take("b", NOW + 50)

    def test_dependencies_reach_across_queues(self) -> None:
        self.add("a", queue="x")
        self.add("b", queue="y", depends_on=["a"])
        self.assertEqual(self.claim(queues=("y",)), [])
        (a,) = self.claim(queues=("x",))
        self.store.complete("a", token(a), now_ms=NOW)
        self.assertEqual(ids(self.claim(queues=("y",))), ["b"])

    def test_canceled_children_are_left_alone_and_ready_when_retried(self) -> None:
        self.add("a")
        self.add("b", depends_on=["a"])
        self.store.cancel("b", now_ms=NOW)
        self.store.retry("b", now_ms=NOW)
        self.assertEqual(self.job("b").unmet, 1)
        self.store.cancel("b", now_ms=NOW)
        self.finish("a")
        self.assertEqual(self.claim(), [])
        self.store.retry("b", now_ms=NOW)
        self.take("b")


class BlockedTest(StoreTestCase):
    """What depends on a failed or canceled job is blocked, at any depth, until that is retried."""

    def test_blocked_at_any_depth(self) -> None:
        chain = ({"id": f"{n}", "depends_on": [f"{n - 1}"]} for n in range(1, 2_000))
        self.add_many([{"id": "0", "priority": 9}, *chain, {"id": "free"}])
        self.assertEqual(self.store.blocked(), [])
        self.kill("0")
        self.assertEqual(self.store.blocked(), [f"{n}" for n in range(1, 2_000)])
        self.assertTrue(self.store.is_blocked("1999"))
        self.assertFalse(self.store.is_blocked("0"))
        self.assertFalse(self.store.is_blocked("free"))
        self.assertEqual(ids(self.claim(limit=9)), ["free"])

    def test_a_retry_of_the_parent_unblocks(self) -> None:
        for how in ("kill", "cancel"):
            with self.subTest(how):
                self.clear()
                self.add_many([{"id": "a"}, {"id": "b", "depends_on": ["a"]}, {"id": "c", "depends_on": ["b"]}])
                self.kill("a") if how == "kill" else self.store.cancel("a", now_ms=NOW)
                self.assertEqual(self.store.blocked(), ["b", "c"])
                self.store.retry("a", now_ms=NOW)
                self.assertEqual(self.store.blocked(), [])
                for id in "abc":
                    self.finish(id)

    def test_blocked_until_the_last_of_the_dead_is_retried(self) -> None:
        self.add_many([{"id": "a"}, {"id": "b"}, {"id": "c", "depends_on": ["a", "b"]}])
        self.kill("a")
        self.kill("b")
        self.store.retry("a", now_ms=NOW)
        self.finish("a")
        self.assertEqual(self.store.blocked(), ["c"])
        self.store.retry("b", now_ms=NOW)
        self.finish("b")
        self.take("c")

    def test_a_finished_or_canceled_job_is_not_blocked_and_passes_nothing_on_but_death(self) -> None:
        self.add_many([{"id": "a"}, {"id": "b", "depends_on": ["a"]}, {"id": "c", "depends_on": ["b"]}])
        self.store.cancel("b", now_ms=NOW)
        self.assertEqual(self.store.blocked(), ["c"])
        self.kill("a")
        self.assertEqual(self.store.blocked(), ["c"])
        self.assertFalse(self.store.is_blocked("b"))

    def test_blocked_in_one_queue_also_by_a_job_of_another(self) -> None:
        self.add_many([{"id": "a"}, {"id": "b", "depends_on": ["a"], "queue": "q"},
                       {"id": "c", "depends_on": ["b"]}])
        self.kill("a")
        self.assertEqual(self.store.blocked("q"), ["b"])
        self.assertEqual(self.store.blocked("default"), ["c"])

    def test_looking_for_the_blocked_visits_only_them(self) -> None:
        self.add_many([{"id": "dead", "priority": 9}, *[{"depends_on": ["dead"]}] * 10])
        self.kill("dead")
        with counted(self.store.sqlite) as alone:
            self.store.blocked()
        self.add_many([{"id": "alive"}, *[{"depends_on": ["alive"]}] * 5_000])
        with counted(self.store.sqlite) as crowd:
            self.assertEqual(len(self.store.blocked()), 10)
        self.assertLessEqual(crowd[0], 1.1 * alone[0])


class BatchTest(StoreTestCase):
    """Dependencies within a batch, in any order, and on what is in the file."""

    def test_parents_may_come_later_in_the_batch(self) -> None:
        self.add("in file")
        jobs: list[dict[str, Any]] = [
            {"id": "d", "depends_on": ["c", "b"]}, {"id": "c", "depends_on": ["a", "in file"]},
            {"id": "b", "depends_on": ["a"]}, {"id": "a"},
        ]
        chance = random.Random(1)
        for round in range(10):
            chance.shuffle(jobs)
            names = {"in file": "in file", **{id: f"{id}{round}" for id in "abcd"}}
            self.add_many([{"id": names[job["id"]], "depends_on": [names[id] for id in job.get("depends_on", [])]}
                           for job in jobs])
            self.assertEqual({id: self.job(names[id]).unmet for id in "abcd"}, {"a": 0, "b": 1, "c": 2, "d": 2})
            self.assertEqual(sorted(self.job(names["d"]).depends_on or ()), [names["b"], names["c"]])

    def test_an_unknown_dependency_is_named_with_its_job(self) -> None:
        batches: list[list[dict[str, Any]]] = [
            [{"depends_on": ["nobody"]}], [{}, {"id": "a"}, {"depends_on": ["a", "nobody"]}]]
        for jobs in batches:
            with self.assertRaisesRegex(InvalidJob, "^depends_on names 'nobody', but there is no such") as caught:
                self.add_many(jobs)
            self.assertEqual(caught.exception.index, len(jobs) - 1)
        with self.assertRaisesRegex(InvalidJob, "depends_on names 'nobody', but there is no such job"):
            self.add(depends_on=["nobody"])
        self.assertEqual(self.contents()["jobs"], [])

    def test_a_number_that_a_job_is_about_to_get_is_no_name_for_it(self) -> None:
        for jobs in ([{"depends_on": ["1"]}], [{}, {"depends_on": ["1"]}], [{"depends_on": ["2"]}, {}]):
            with self.assertRaisesRegex(InvalidJob, "there is no such job"):
                self.add_many(jobs)
        with self.assertRaisesRegex(InvalidJob, "there is no such job"):
            self.add(depends_on=["1"])
        self.assertEqual(self.contents()["jobs"], [])

    def test_a_job_cannot_depend_on_itself(self) -> None:
        for depends_on in (["a"], ["b", "a"]):
            fields: dict[str, Any] = {"id": "a", "depends_on": depends_on}
            with self.assertRaisesRegex(InvalidJob, "job 'a' depends on itself"):
                self.add(**fields)
            with self.assertRaisesRegex(InvalidJob, "job 'a' depends on itself"):
                self.add_many([{"id": "b"}, fields])
        self.assertEqual(self.contents()["jobs"], [])

    def test_rings_are_refused_with_the_ring(self) -> None:
        def needs(*edges: str) -> list[dict[str, Any]]:
            return [{"id": edge[0], "depends_on": list(edge[1:])} for edge in edges]

        for jobs, ring in (
            (needs("ab", "ba"), "aba"),
            (needs("ab", "bc", "ca"), "abca"),
            (needs("x", "bxc", "cdx", "db", "eb"), "bcdb"),
            (needs("ab", "b", "cd", "de", "ec"), "cdec"),
        ):
            with self.subTest(ring=ring), self.assertRaises(DependencyCycle) as caught:
                self.add_many(jobs)
            cycle = caught.exception.cycle
            self.assertEqual(cycle[0], cycle[-1])
            start = cycle.index(ring[0])
            self.assertEqual("".join(cycle[start:-1] + cycle[:start] + (ring[0],)), ring)
            shown = " -> ".join(map(repr, cycle))
            self.assertEqual(str(caught.exception), f"jobs depend on each other in a ring: {shown}")
            self.assertEqual(jobs[caught.exception.index or 0]["id"], cycle[0])
        self.assertEqual(self.contents()["jobs"], [])

    def test_a_ring_by_way_of_an_idempotency_key_is_one_too(self) -> None:
        batches: list[list[dict[str, Any]]] = [
            [{"id": "a", "idempotency_key": "k", "depends_on": ["c"]}, {"id": "b", "idempotency_key": "k"},
             {"id": "c", "depends_on": ["b"]}],
            [{"id": "a", "idempotency_key": "k", "depends_on": ["b"]}, {"id": "b", "idempotency_key": "k"}],
        ]
        for jobs in batches:
            with self.assertRaises(DependencyCycle):
                self.add_many(jobs)
        self.assertEqual(self.contents()["jobs"], [])

    def test_the_edges_of_a_repeated_job_are_not_its_own_and_close_no_ring(self) -> None:
        self.add_many([{"id": "a", "idempotency_key": "k"},
                       {"id": "b", "idempotency_key": "k", "depends_on": ["c"]},
                       {"id": "c", "depends_on": ["a"]}])
        self.assertEqual((self.job("a").depends_on, self.job("c").depends_on), ((), ("a",)))
        self.finish("a")
        self.finish("c")

    def test_a_ring_of_100000_is_found_without_recursion(self) -> None:
        size = 100_000
        ring = (NewJob("t", "null", "default", f"{n}", 0, 3, None, 0, None, None, None, (f"{(n + 1) % size}",))
                for n in range(size))
        with self.assertRaises(DependencyCycle) as caught:
            add_batch(self.store, ring)
        self.assertEqual(len(caught.exception.cycle), size + 1)
        self.assertLess(len(str(caught.exception)), 200)
        self.assertEqual(self.contents()["jobs"], [])

    def test_a_wide_and_a_deep_batch_are_linear(self) -> None:
        def steps(size: int, **fields: Any) -> int:
            with self.store.batch() as batch:
                batch.extend((n, new_job("t", depends_on=["root"], **fields)) for n in range(size))
                with counted(self.store.sqlite) as steps:
                    batch.check()
                    batch.store(now_ms=NOW)
            return steps[0]

        self.add("root")
        for fields in ({}, {"queue": "q"}):
            few, many = steps(100, **fields), steps(1_000, **fields)
            self.assertLess(many, 12 * few)

    def test_10000_dependencies_of_one_job(self) -> None:
        self.add_many([{"id": f"{n}"} for n in range(10_000)])
        names = [f"{n}" for n in range(10_000)]
        self.add("one", depends_on=names)
        self.add_many([{"id": "many", "depends_on": names}])
        jobs = self.claim(limit=20_000)
        self.store.complete_many([(job.seq, token(job), None) for job in jobs[1:]], now_ms=NOW)
        self.assertEqual((self.job("one").unmet, self.job("many").unmet, self.claim()), (1, 1, []))
        self.store.complete(jobs[0].id, token(jobs[0]), now_ms=NOW)
        self.assertEqual(ids(self.claim(limit=9)), ["one", "many"])


class FanOutTest(StoreTestCase):
    """One parent of 100,000."""

    def test_a_fan_out_of_100000_is_freed_by_one_statement(self) -> None:
        self.add("parent", priority=1)
        self.add("2", depends_on=["parent"])
        with self.store.transaction():  # copies of the child, for a tenth of the time of storing them
            self.store.sqlite.execute("""
                INSERT INTO jobs(id, queue, type, payload, priority, created_at, run_at, status, ready, unmet,
                                 max_attempts)
                WITH RECURSIVE numbers(n) AS (VALUES (3) UNION ALL SELECT n + 1 FROM numbers WHERE n < 100001)
                SELECT n, queue, type, payload, priority, created_at, run_at, status, ready, unmet, max_attempts
                FROM numbers JOIN jobs ON seq = 2""")
            self.store.sqlite.execute("INSERT INTO dependencies SELECT seq, 1 FROM jobs WHERE seq > 2")
        parent = self.take("parent")
        with traced(self.store.sqlite) as statements:
            self.assertTrue(self.store.complete("parent", token(parent), now_ms=NOW))
        updates = [statement for statement in statements if statement.startswith("UPDATE")]
        self.assertEqual(len(updates), 2, updates)
        self.assertEqual(self.query("SELECT ready, unmet, count(*) FROM jobs WHERE id <> 'parent' GROUP BY 1, 2"),
                         [(1, 0, 100_000)])
        self.assertEqual(ids(self.claim(limit=3)), ["2", "3", "4"])


if __name__ == "__main__":
    unittest.main()
