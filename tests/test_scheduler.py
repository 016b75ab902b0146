"""`JobScheduler`: what it refuses, whom it lets claim, what a token may do, and what its counters say."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import unittest
from collections.abc import Callable
from typing import Any

from jobqueue import DependencyCycle, InvalidJob, Queue
from tests.scheduler_case import LEASE, SchedulerTestCase, T, job
from tests.support import jobs, run, sql


class AddTest(SchedulerTestCase):
    """What goes in, and what is refused."""

    def test_a_job_is_stored_with_what_was_left_out(self) -> None:
        self.assertEqual(self.scheduler.add_jobs([{"job_id": "a", "payload": {"n": [1, None]}}], T), ["a"])
        self.assertEqual(self.look("a"), {
            "job_id": "a", "payload": {"n": [1, None]}, "status": "pending", "dependencies": [], "priority": 0,
            "attempts": 0, "max_attempts": 3, "created_at": T, "available_at": T, "lease_owner": None,
            "lease_token": None, "lease_expires_at": None, "result": None, "error": None,
            "effective_status": "pending",
        })  # fmt: skip

    def test_ids_come_back_in_order_and_dependencies_may_point_both_ways(self) -> None:
        self.scheduler.add_jobs([job("old")], T)
        batch = [job("c", "b", "old"), job("a"), job("b", "a", "a")]
        self.assertEqual(self.scheduler.add_jobs(batch, T), ["c", "a", "b"])
        self.assertEqual(self.look("c")["dependencies"], ["old", "b"])
        self.assertEqual(self.look("b")["dependencies"], ["a"])
        self.assertEqual([self.succeed() for _ in range(4)], ["old", "a", "b", "c"])

    def test_an_empty_batch_is_no_error(self) -> None:
        self.assertEqual(self.scheduler.add_jobs([], T), [])
        self.assertEqual(self.stats(), {})

    def test_the_input_is_not_changed(self) -> None:
        batch = [job("b", "a", payload={"deep": [{"er": 1}]}), job("a", priority=5)]
        before = copy.deepcopy(batch)
        self.scheduler.add_jobs(batch, T)
        self.assertEqual(batch, before)
        with self.assertRaises(ValueError):
            self.scheduler.add_jobs(batch, T)
        self.assertEqual(batch, before)

    def test_what_is_wrong_with_a_job_is_said_with_its_name(self) -> None:
        self.scheduler.add_jobs([job("old")], T)
        circular: list[object] = []
        circular.append(circular)
        rows: list[tuple[object, str]] = [
            (job("bad", priority=True), "job 'bad': priority must be a whole number, not True"),
            (job("bad", priority=1.0), "job 'bad': priority must be a whole number, not 1.0"),
            (job("bad", priority=None), "job 'bad': priority must be a whole number, not None"),
            (job("bad", priority=2**63), "job 'bad': priority must lie between"),
            (job("bad", max_attempts=0), "job 'bad': max_attempts must lie between 1 and"),
            (job("bad", max_attempts=True), "job 'bad': max_attempts must be a whole number, not True"),
            (job("bad", max_attempts="3"), "job 'bad': max_attempts must be a whole number, not '3'"),
            (job("bad", payload={1, 2}), "job 'bad': payload is not JSON"),
            (job("bad", payload=b"x"), "job 'bad': payload is not JSON"),
            (job("bad", payload=float("nan")), "job 'bad': payload is not JSON"),
            (job("bad", payload=circular), "job 'bad': payload is not JSON"),
            (job("bad", payload="\ud800"), "job 'bad': payload holds a lone surrogate"),
            (job("bad", dependencies="old"), "job 'bad': dependencies must be a list of ids, not str"),
            (job("bad", dependencies=None), "job 'bad': dependencies must be a list of ids, not NoneType"),
            (job("bad", dependencies={"old": 1}), "job 'bad': dependencies must be a list of ids, not dict"),
            (job("bad", dependencies=[1]), "job 'bad': an id in dependencies must be a string, not 1"),
            (job("bad", dependencies=[["old"]]), "job 'bad': an id in dependencies must be a string, not list"),
            (job("bad", "nobody"), "job 'bad': dependencies names 'nobody', but there is no such job"),
            (job("bad", "bad"), "job 'bad' depends on itself"),
            (job("old"), "job 'old': there is a job 'old' already"),
            (job("fine"), "job 'fine': the id 'fine' is given to two jobs of the batch"),
            (job("bad", queue="x"), "job 'bad': unknown key 'queue'"),
            ({"job_id": "bad"}, "job 'bad': the key 'payload' is missing"),
            ({"payload": 1}, "jobs[1]: the key 'job_id' is missing"),
            ({"job_id": 7, "payload": 1}, "jobs[1]: job_id must be a string, not 7"),
            ({"job_id": "", "payload": 1}, "jobs[1]: job_id must have 1 to 255 characters"),
            ({"job_id": "x\n", "payload": 1}, "jobs[1]: job_id must not hold control characters"),
            (["bad"], "jobs[1]: a job must be a dict, not list"),
            (None, "jobs[1]: a job must be a dict, not NoneType"),
        ]
        for wrong, message in rows:
            with self.subTest(message=message):
                batch: list[Any] = [job("fine"), wrong, job("later", "fine")]
                with self.assertRaises(ValueError) as caught:
                    self.scheduler.add_jobs(batch, T)
                self.assertEqual(str(caught.exception)[: len(message)], message)
                assert isinstance(caught.exception, InvalidJob)
                self.assertEqual(caught.exception.index, 1)
                self.assertEqual(self.stats(), {"pending": 1, "ready": 1}, "the batch was stored in part")

    def test_jobs_must_be_a_list_and_the_time_a_whole_number(self) -> None:
        for wrong in ("ab", {"job_id": "a", "payload": 1}, None, 3):
            with self.subTest(jobs=wrong), self.assertRaisesRegex(ValueError, "jobs must be a list of dicts"):
                self.scheduler.add_jobs(wrong, T)
        for time in (True, 1.5, "1", None, 2**62):
            for call in (lambda: self.scheduler.add_jobs([job("a")], time),  # noqa: B023
                         lambda: self.scheduler.claim_job("w", time, 1),  # noqa: B023
                         lambda: self.scheduler.complete_job("a", "t", 1, time),  # noqa: B023
                         lambda: self.scheduler.fail_job("a", "t", "e", time),  # noqa: B023
                         lambda: self.scheduler.recover_expired(time),  # noqa: B023
                         lambda: self.scheduler.get_stats(time)):  # noqa: B023
                with self.subTest(time=time), self.assertRaisesRegex(ValueError, "now_ms must"):
                    call()
        self.assertEqual(self.stats(), {})

    def test_a_ring_of_any_length_is_refused_and_shown(self) -> None:
        self.scheduler.add_jobs([job("old")], T)
        for length in (1, 2, 3, 10):
            ring = [f"r{n}" for n in range(length)]
            batch = [job("x", "old"), *(job(name, "old", ring[(n + 1) % length]) for n, name in enumerate(ring))]
            random.Random(length).shuffle(batch)
            with self.subTest(length=length), self.assertRaises(DependencyCycle) as caught:
                self.scheduler.add_jobs([*batch, job("y", "r0")], T)
            cycle = caught.exception.cycle
            self.assertEqual((len(cycle), cycle[0], set(cycle)), (length + 1, cycle[-1], set(ring)))
            for name, following in itertools.pairwise(cycle):
                self.assertEqual(following, ring[(ring.index(name) + 1) % length])
            self.assertIn(repr(cycle[0]), str(caught.exception))
        self.assertEqual(self.stats(), {"pending": 1, "ready": 1})

    def test_a_chain_and_a_ring_of_100000_jobs_neither_recurse_nor_go_quadratic(self) -> None:
        self.scheduler._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
        limit = sys.getrecursionlimit()
        cost = {}
        try:
            sys.setrecursionlimit(200)
            for size in (10_000, 100_000):
                # Each waits for the next: the order in which nothing can be checked on the way.
                chain = [job(f"{size}-{n}", f"{size}-{n + 1}", priority=size) for n in range(size - 1)]
                chain.append(job(f"{size}-last", priority=size))
                chain[-2]["dependencies"] = [f"{size}-last"]
                cost[size] = self.steps(lambda batch=chain: self.scheduler.add_jobs(batch, T), 1_000)
                self.assertEqual([self.succeed(), self.succeed()], [f"{size}-last", f"{size}-{size - 2}"])
            ring = [job(f"r{n}", f"r{(n + 1) % 100_000}") for n in range(100_000)]
            with self.assertRaises(DependencyCycle) as caught:
                self.scheduler.add_jobs(ring, T)
        finally:
            sys.setrecursionlimit(limit)
        self.assertLess(cost[100_000], 13 * cost[10_000])
        self.assertEqual(len(caught.exception.cycle), 100_001)
        self.assertLess(len(str(caught.exception)), 500)
        self.assertEqual(self.stats(), {"pending": 109_996, "succeeded": 4, "ready": 2})


class ClaimTest(SchedulerTestCase):
    """Who gets which job, and when."""

    def test_a_claim_says_what_the_worker_needs(self) -> None:
        self.scheduler.add_jobs([job("a", payload=[1])], T)
        claimed = self.claim(T + 5, 30)
        token = claimed.pop("lease_token")
        self.assertRegex(token, "^.{8,}$")
        self.assertEqual(claimed, {"job_id": "a", "payload": [1], "attempts": 1, "lease_expires_at": T + 35})
        found = self.look("a")
        self.assertEqual((found["status"], found["lease_owner"], found["lease_token"], found["lease_expires_at"]),
                         ("running", "w", token, T + 35))
        self.assertIsNone(self.scheduler.claim_job("w", T + 5, 30))

    def test_every_claim_has_a_new_token(self) -> None:
        self.scheduler.add_jobs([job("a", max_attempts=5)], T)
        tokens = []
        for attempt in range(1, 6):
            claimed = self.claim(T + attempt, 1)
            self.assertEqual(claimed["attempts"], attempt)
            tokens.append(claimed["lease_token"])
            self.assertEqual(self.scheduler.recover_expired(T + attempt + 1), 1)
        self.assertEqual(len(set(tokens)), 5)

    def test_highest_priority_first_then_oldest(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b", priority=-1), job("c", priority=7), job("d")], T)
        self.scheduler.add_jobs([job("e", priority=7), job("f", priority=2**63 - 1)], T - 500)
        self.assertEqual([self.succeed() for _ in range(6)], ["f", "c", "e", "a", "d", "b"])

    def test_a_retried_job_keeps_its_place(self) -> None:
        self.scheduler.add_jobs([job("first"), job("second"), job("third")], T)
        claimed = self.claim()
        self.assertTrue(self.scheduler.fail_job("first", claimed["lease_token"], "no", T))
        self.assertEqual(self.claim()["job_id"], "second")
        self.assertEqual(self.claim(T + 1_000)["job_id"], "first")

    def test_nothing_is_claimed_before_it_is_available(self) -> None:
        self.scheduler.add_jobs([job("a")], T)
        self.assertIsNone(self.scheduler.claim_job("w", T - 1, LEASE))
        self.assertEqual(self.stats(T - 1), {"pending": 1})
        self.assertEqual(self.stats(T), {"pending": 1, "ready": 1})
        self.assertEqual(self.claim(T)["job_id"], "a")

    def test_time_may_lie_anywhere(self) -> None:
        for now in (-(2**61), -1, 0, 2**61):
            with self.subTest(now=now):
                self.scheduler.add_jobs([job(f"at {now}", priority=now)], now)
                claimed = self.claim(now, 2**61)
                self.assertEqual((claimed["job_id"], claimed["lease_expires_at"]), (f"at {now}", now + 2**61))

    def test_every_dependency_must_have_succeeded(self) -> None:
        self.scheduler.add_jobs([job("left"), job("right"), job("end", "left", "right")], T)
        left, right = self.claim(), self.claim()
        self.assertIsNone(self.scheduler.claim_job("w", T, LEASE))
        self.assertTrue(self.scheduler.complete_job("left", left["lease_token"], 1, T))
        self.assertIsNone(self.scheduler.claim_job("w", T, LEASE))
        self.assertTrue(self.scheduler.complete_job("right", right["lease_token"], 1, T))
        self.assertEqual(self.claim()["job_id"], "end")

    def test_wrong_arguments_are_refused_and_nothing_is_claimed(self) -> None:
        self.scheduler.add_jobs([job("a")], T)
        for lease in (0, -1, True, 1.5, None, 2**63):
            with self.subTest(lease=lease), self.assertRaisesRegex(ValueError, "lease_ms must"):
                self.scheduler.claim_job("w", T, lease)
        for worker in ("", None, 7, "a\x00"):
            with self.subTest(worker=worker), self.assertRaisesRegex(ValueError, "worker_id must"):
                self.scheduler.claim_job(worker, T, LEASE)
        self.assertEqual(self.look("a")["attempts"], 0)

    def test_a_claim_does_not_recover_expired_leases(self) -> None:
        self.scheduler.add_jobs([job("a")], T)
        self.claim(T, 10)
        self.assertIsNone(self.scheduler.claim_job("w", T + 1_000_000, LEASE))
        self.assertEqual(self.look("a")["status"], "running")

    def test_more_jobs_than_one_transaction_promotes_come_due_at_once(self) -> None:
        self.scheduler.add_jobs([job(f"j{n}", priority=n) for n in range(10_500)], T)
        self.assertIsNone(self.scheduler.claim_job("w", T - 1, LEASE))  # now they all count as scheduled
        self.assertEqual(self.claim(T)["job_id"], "j10499")
        self.assertEqual(self.stats(T), {"pending": 10_499, "running": 1, "ready": 10_499})


class SettleTest(SchedulerTestCase):
    """Completing, failing, expiring; and what a stale token may do: nothing."""

    def whole_file(self) -> list[list[tuple[Any, ...]]]:
        tables = ("jobs", "dependencies", "failures")
        return [sql(self.db, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]

    def assert_changes_nothing(self, *calls: Callable[[], object]) -> None:
        before = self.whole_file()
        for call in calls:
            self.assertIs(call(), False)
        self.assertEqual(self.whole_file(), before)

    def test_a_result_is_kept_and_repeating_changes_nothing(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b", "a")], T)
        token = self.claim()["lease_token"]
        self.assertIs(self.scheduler.complete_job("a", token, {"sum": [1, 2]}, T + 1), True)
        found = self.look("a")
        self.assertEqual((found["status"], found["effective_status"], found["result"], found["attempts"]),
                         ("succeeded", "succeeded", {"sum": [1, 2]}, 1))
        self.assertEqual((found["lease_owner"], found["lease_token"], found["lease_expires_at"]), (None,) * 3)
        self.assert_changes_nothing(
            lambda: self.scheduler.complete_job("a", token, {"sum": [1, 2]}, T + 1),
            lambda: self.scheduler.complete_job("a", token, "other", T + 2),
            lambda: self.scheduler.fail_job("a", token, "late", T + 2),
        )

    def test_only_the_current_token_of_a_running_job_counts(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b")], T)
        stale = self.claim(T, 10)["lease_token"]
        other = self.claim(T, 1_000)["lease_token"]
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1)
        current = self.claim(T + 10, 1_000)["lease_token"]
        wrong: list[Any] = [stale, other, "", "x", None, 7, True, 10**40, b"x", ["x"], {}, "\ud800", current + "0"]
        for token in wrong:
            with self.subTest(token=token):
                self.assert_changes_nothing(
                    lambda token=token: self.scheduler.complete_job("a", token, 1, T + 20),
                    lambda token=token: self.scheduler.fail_job("a", token, "e", T + 20),
                )
        ids: list[Any] = ["nobody", "", None, 7, "\ud800", ["a"]]
        for job_id in ids:
            with self.subTest(job_id=job_id):
                self.assert_changes_nothing(
                    lambda job_id=job_id: self.scheduler.complete_job(job_id, current, 1, T + 20),
                    lambda job_id=job_id: self.scheduler.fail_job(job_id, current, "e", T + 20),
                )
                self.assertIsNone(self.scheduler.get_job(job_id))
        self.assertTrue(self.scheduler.complete_job("a", current, 1, T + 20))

    def test_a_lease_ends_exactly_at_its_expiry(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b"), job("c")], T)
        tokens = {claimed["job_id"]: claimed["lease_token"] for claimed in (self.claim(T, 10) for _ in range(3))}
        self.assert_changes_nothing(
            lambda: self.scheduler.complete_job("a", tokens["a"], 1, T + 10),
            lambda: self.scheduler.fail_job("a", tokens["a"], "e", T + 10),
        )
        self.assertEqual(self.scheduler.recover_expired(T + 9), 0)
        self.assertTrue(self.scheduler.complete_job("a", tokens["a"], 1, T + 9))
        self.assertTrue(self.scheduler.fail_job("b", tokens["b"], "e", T + 9))
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1)
        self.assertEqual([self.look(name)["status"] for name in "abc"], ["succeeded", "pending", "pending"])

    def test_a_result_that_is_not_json_leaves_the_lease_intact(self) -> None:
        self.scheduler.add_jobs([job("a")], T)
        token = self.claim()["lease_token"]
        before = self.whole_file()
        for result in ({1, 2}, float("inf"), object(), "\udfff", b"x"):
            with self.subTest(result=result), self.assertRaisesRegex(ValueError, "^result "):
                self.scheduler.complete_job("a", token, result, T)
        self.assertEqual(self.whole_file(), before)
        self.assertTrue(self.scheduler.complete_job("a", token, {"ok": True}, T))

    def test_the_backoff_doubles_up_to_a_minute_and_is_kept_to_the_millisecond(self) -> None:
        self.scheduler.add_jobs([job("a", max_attempts=13)], T)
        now = T
        waits = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000, 60_000, 60_000, 60_000]
        for attempt, wait in enumerate(waits, 1):
            claimed = self.claim(now)
            self.assertEqual(claimed["attempts"], attempt)
            now += 3
            self.assertTrue(self.scheduler.fail_job("a", claimed["lease_token"], f"error {attempt}", now))
            found = self.look("a")
            self.assertEqual((found["status"], found["available_at"], found["error"], found["lease_token"]),
                             ("pending", now + wait, f"error {attempt}", None))
            self.assertIsNone(self.scheduler.claim_job("w", now + wait - 1, LEASE))
            self.assertEqual(self.stats(now + wait - 1), {"pending": 1})
            now += wait
            self.assertEqual(self.stats(now), {"pending": 1, "ready": 1})
        last = self.claim(now)
        self.assertTrue(self.scheduler.fail_job("a", last["lease_token"], ValueError("the end"), now))
        found = self.look("a")
        self.assertEqual((found["status"], found["attempts"], found["error"]), ("failed", 13, "the end"))
        self.assertIsNone(self.scheduler.claim_job("w", now + 10**9, LEASE))
        self.assertEqual(self.stats(now), {"failed": 1})

    def test_an_expired_job_is_claimable_at_once_and_fails_when_its_attempts_are_used_up(self) -> None:
        self.scheduler.add_jobs([job("a", max_attempts=2)], T)
        self.claim(T, 10)
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1)
        found = self.look("a")
        self.assertEqual((found["status"], found["attempts"], found["lease_owner"], found["lease_token"],
                          found["lease_expires_at"]), ("pending", 1, None, None, None))
        self.assertEqual(self.stats(T + 10), {"pending": 1, "ready": 1})
        self.assertEqual(self.claim(T + 10, 10)["attempts"], 2)
        self.assertEqual(self.scheduler.recover_expired(T + 20), 1)
        found = self.look("a")
        self.assertEqual((found["status"], found["attempts"], found["lease_token"]), ("failed", 2, None))
        self.assertEqual(self.scheduler.recover_expired(T + 20), 0)

    def test_recovery_counts_more_than_one_transaction_ends(self) -> None:
        self.scheduler._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
        self.scheduler.add_jobs([job(f"j{n}") for n in range(1_050)], T)
        for _ in range(1_050):
            self.claim(T, 10)
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1_050)
        self.assertEqual(self.stats(T + 10), {"pending": 1_050, "ready": 1_050})


class LookTest(SchedulerTestCase):
    """Statuses, blocking, counters."""

    def test_a_failure_blocks_what_depends_on_it_at_any_depth(self) -> None:
        self.scheduler.add_jobs([
            job("bad", max_attempts=1, priority=9), job("child", "bad"), job("grandchild", "child", "good"),
            job("good"), job("free", "good"),
        ], T)  # fmt: skip
        self.assertEqual(self.stats(), {"pending": 5, "ready": 2})
        self.fail_for_good("bad")
        seen = {name: (self.look(name)["status"], self.look(name)["effective_status"])
                for name in ("bad", "child", "grandchild", "good", "free")}
        self.assertEqual(seen, {
            "bad": ("failed", "failed"), "child": ("pending", "blocked"), "grandchild": ("pending", "blocked"),
            "good": ("pending", "pending"), "free": ("pending", "pending"),
        })  # fmt: skip
        self.assertEqual(self.stats(), {"pending": 2, "failed": 1, "blocked": 2, "ready": 1})
        self.assertEqual([self.succeed(), self.succeed()], ["good", "free"])
        self.assertIsNone(self.scheduler.claim_job("w", T + 10**9, LEASE))
        self.assertEqual(self.stats(), {"succeeded": 2, "failed": 1, "blocked": 2})

    def test_a_job_that_will_be_tried_again_blocks_nobody(self) -> None:
        self.scheduler.add_jobs([job("a", max_attempts=2), job("b", "a")], T)
        self.assertTrue(self.scheduler.fail_job("a", self.claim()["lease_token"], "no", T))
        self.assertEqual(self.look("b")["effective_status"], "pending")
        self.assertEqual(self.stats(), {"pending": 2})

    def test_a_canceled_job_counts_as_failed_and_a_retried_one_frees_those_behind_it(self) -> None:
        self.scheduler.add_jobs([job("a"), job("b", "a"), job("c", "b")], T)
        with Queue(self.db, clock=lambda: T) as operator:
            operator.cancel("a")
            self.assertEqual((self.look("a")["status"], self.look("c")["effective_status"]), ("failed", "blocked"))
            self.assertEqual(self.stats(), {"failed": 1, "blocked": 2})
            operator.retry("a")
        self.assertEqual([self.look(name)["effective_status"] for name in "abc"], ["pending"] * 3)
        self.assertEqual([self.succeed() for _ in range(3)], ["a", "b", "c"])

    def test_blocking_over_20000_jobs_is_linear(self) -> None:
        self.scheduler._store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
        stats_cost, last_cost, first_cost = {}, {}, {}
        for size, blocked in ((2_000, 1_999), (20_000, 21_998)):
            names = [f"{size}-{n}" for n in range(size)]
            self.scheduler.add_jobs([
                job(names[0], max_attempts=1, priority=1),
                *(job(name, before) for before, name in itertools.pairwise(names)),
            ], T)  # fmt: skip
            self.fail_for_good(names[0])
            stats_cost[size] = self.steps(lambda: self.scheduler.get_stats(T))
            last_cost[size] = self.steps(lambda names=names: self.look(names[-1]))
            first_cost[size] = self.steps(lambda names=names: self.look(names[1]))
            self.assertEqual(self.scheduler.get_stats(T)["blocked"], blocked)
            self.assertEqual(self.look(names[-1])["effective_status"], "blocked")
        self.assertLess(stats_cost[20_000], 13 * stats_cost[2_000])
        self.assertLess(last_cost[20_000], 13 * last_cost[2_000])
        self.assertLess(first_cost[20_000], 1_000, "the walk does not end at the failed job")

    def test_a_diamond_of_wide_layers_is_walked_once(self) -> None:
        layers = [[f"{depth}-{n}" for n in range(30)] for depth in range(8)]
        batch = [job("root", max_attempts=1)] + [job(name, "root") for name in layers[0]]
        for above, below in itertools.pairwise(layers):
            batch += [job(name, *above) for name in below]
        self.scheduler.add_jobs(batch, T)
        self.fail_for_good("root")
        cost = self.steps(lambda: self.assertEqual(self.look("7-0")["effective_status"], "blocked"))
        self.assertLess(cost, 300_000)  # 30 ** 7 paths lead there, but only 6,330 edges
        self.assertEqual(self.stats(), {"failed": 1, "blocked": 240})

    def test_a_claim_costs_the_same_behind_20000_blocked_or_future_jobs_of_higher_priority(self) -> None:
        cost = {}

        def measure(what: str) -> None:
            self.scheduler.add_jobs([job(f"{what} {n}") for n in range(3)], T)
            self.claim(T)  # what has to be put aside once, is
            cost[what] = self.steps(lambda: self.claim(T), 1)
            self.assertEqual(self.claim(T)["job_id"], f"{what} 2")

        measure("alone")
        self.scheduler.add_jobs([job(f"future {n}", priority=5) for n in range(20_000)], T + 1)
        measure("behind the future")
        self.scheduler.add_jobs([job("bad", priority=9, max_attempts=1)], T)
        self.scheduler.add_jobs([job(f"blocked {n}", "bad", priority=5) for n in range(20_000)], T)
        self.fail_for_good("bad")
        measure("behind the blocked")
        self.assertEqual(self.scheduler.get_stats(T)["blocked"], 20_000)
        self.assertLess(max(cost.values()), 1.3 * cost["alone"], cost)

    def test_jobs_of_other_queues_are_none_of_its_business(self) -> None:
        other = self.open(queue="other")
        self.scheduler.add_jobs([job("mine")], T)
        other.add_jobs([job("theirs", priority=9), job("waits", "mine")], T)
        with Queue(self.db) as queue:
            queue.enqueue("print", {"message": 1}, id="worker's", priority=9)
        mine = self.claim(T, 10)
        theirs = other.claim_job("w", T, 10)
        assert theirs is not None
        self.assertEqual((mine["job_id"], theirs["job_id"]), ("mine", "theirs"))
        self.assertIsNone(self.scheduler.claim_job("w", T, 10))
        for stranger in ("theirs", "worker's"):
            self.assertIsNone(self.scheduler.get_job(stranger))
        self.assertFalse(self.scheduler.complete_job("theirs", theirs["lease_token"], 1, T))
        self.assertFalse(self.scheduler.fail_job("theirs", theirs["lease_token"], 1, T))
        self.assertEqual(self.stats(), {"running": 1})
        self.assertEqual(self.scheduler.recover_expired(T + 10), 1)
        self.assertEqual(other.get_stats(T + 10), {"pending": 1, "running": 1, "succeeded": 0, "failed": 0,
                                                   "blocked": 0, "ready": 0})
        with self.assertRaisesRegex(ValueError, "job \"worker's\": there is a job"):
            self.scheduler.add_jobs([job("worker's")], T)
        self.assertTrue(other.complete_job("theirs", theirs["lease_token"], 1, T))
        self.succeed(T + 10)
        waiting = other.claim_job("w", T + 10, 10)
        assert waiting is not None
        self.assertEqual(waiting["job_id"], "waits")

    def test_the_command_line_shows_the_jobs_and_a_worker_leaves_them_alone(self) -> None:
        self.scheduler.add_jobs([job("a", payload={"n": 1}), job("b", "a")], 0)
        self.claim(0, 1)  # long expired by any wall clock
        done = run("worker", "--database", self.db, "--workers", 1, "--drain")
        self.assertEqual(done.returncode, 0, done.stderr)
        shown = jobs(self.db)
        self.assertEqual([(each["id"], each["queue"], each["type"], each["status"], each["attempts"])
                          for each in shown],
                         [("b", "scheduler", "job", "pending", 0), ("a", "scheduler", "job", "running", 1)])
        self.assertEqual(run("list", "--database", self.db).returncode, 0)


if __name__ == "__main__":
    unittest.main()
