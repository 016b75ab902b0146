"""`MemoryQueue` and the store under it: states, reservations, dead letters, dependencies, and what they cost.

Costs are counted, never timed: executed lines of the package, and the work of its heaps.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import unittest
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from heapq import heapify, heappop, heappush
from math import log2
from types import FrameType
from typing import Any
from unittest import mock

import jobqueue
from jobqueue.errors import DependencyCycle, InvalidJob, UnknownJobError
from jobqueue.jobs import new_job
from jobqueue.memory import DeadJob, Failure, MemoryQueue, Reservation, parts
from jobqueue.memory.store import MAX_FAILURES, MemoryStore

MEMORY = parts.__file__.removesuffix("parts.py")


class Clock:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Count what the package does: a line of its memory modules is 1, a heap of n costs log n or n."""

    def __init__(self) -> None:
        self.count = 0.0

    def of(self, action: Callable[[], object]) -> float:
        """Return what one call costs."""
        self.count = 0.0
        before = sys.gettrace()
        with (
            mock.patch.object(parts, "heappush", self._counted(heappush, lambda heap: log2(len(heap) + 2))),
            mock.patch.object(parts, "heappop", self._counted(heappop, lambda heap: log2(len(heap) + 2))),
            mock.patch.object(parts, "heapify", self._counted(heapify, len)),
        ):
            sys.settrace(self._trace)
            try:
                action()
            finally:
                sys.settrace(before)
        return self.count

    def _counted(self, function: Callable[..., Any], cost: Callable[[list[Any]], float]) -> Callable[..., Any]:
        def counting(heap: list[Any], *args: Any) -> Any:
            self.count += cost(heap)
            return function(heap, *args)

        return counting

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(MEMORY):
            return None
        return self._count

    def _count(self, frame: FrameType, event: str, arg: object) -> Any:
        self.count += 1
        return self._count


class MemoryTestCase(unittest.TestCase):
    """A queue whose clock is `self.clock`."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.queue = MemoryQueue(self.clock)

    def reserve(self, job_id: str) -> Reservation:
        reservation = self.queue.reserve(job_id)
        assert reservation is not None
        return reservation

    def die(self, *job_ids: str) -> None:
        """Let each fail until no attempt is left."""
        for job_id in job_ids:
            while self.queue.state(job_id) != "dead":
                self.reserve(job_id)
                self.assertTrue(self.queue.fail(job_id))

    def states(self, *job_ids: str) -> list[str]:
        return [self.queue.state(job_id) for job_id in job_ids]


class LifeTest(MemoryTestCase):
    """One job from enqueue to its end."""

    def test_a_job_passes(self) -> None:
        self.queue.enqueue("a", 10, 2)
        self.assertEqual(self.queue.state("a"), "ready")
        reservation = self.queue.reserve("a")
        assert reservation is not None
        self.assertEqual((reservation.job_id, reservation.attempt, reservation.expires_at), ("a", 1, 110.0))
        self.assertEqual(self.queue.state("a"), "reserved")
        self.assertIs(self.queue.pass_("a"), True)
        self.assertEqual(self.queue.state("a"), "passed")
        self.assertEqual(self.queue.get_dlq(), [])

    def test_max_retry_counts_the_attempts_after_the_first(self) -> None:
        for max_retry, attempts in ((0, 1), (1, 2), (5, 6)):
            job_id = f"job {max_retry}"
            self.queue.enqueue(job_id, 10, max_retry)
            for attempt in range(1, attempts + 1):
                with self.subTest(max_retry=max_retry, attempt=attempt):
                    self.assertEqual(self.reserve(job_id).attempt, attempt)
                    self.assertIs(self.queue.fail(job_id), True)
                    self.assertEqual(self.queue.state(job_id), "dead" if attempt == attempts else "ready")

    def test_every_call_in_every_state(self) -> None:
        """Rows: state, then what reserve, pass_, fail and requeue answer there and which state follows."""
        rows: list[tuple[str, tuple[bool, str], tuple[bool, str], tuple[bool, str], tuple[bool, str]]] = [
            ("ready", (True, "reserved"), (False, "ready"), (False, "ready"), (False, "ready")),
            ("waiting", (False, "waiting"), (False, "waiting"), (False, "waiting"), (False, "waiting")),
            ("blocked", (False, "blocked"), (False, "blocked"), (False, "blocked"), (False, "blocked")),
            ("delayed", (False, "delayed"), (False, "delayed"), (False, "delayed"), (False, "delayed")),
            ("reserved", (False, "reserved"), (True, "passed"), (True, "delayed"), (False, "reserved")),
            ("passed", (False, "passed"), (False, "passed"), (False, "passed"), (False, "passed")),
            ("dead", (False, "dead"), (False, "dead"), (False, "dead"), (True, "ready")),
        ]  # fmt: skip
        calls: list[Callable[[MemoryQueue], object]] = [
            lambda queue: queue.reserve("x"), lambda queue: queue.pass_("x"),
            lambda queue: queue.fail("x"), lambda queue: queue.requeue("x"),
        ]  # fmt: skip
        for state, *expected in rows:
            for call, (answer, after) in zip(calls, expected, strict=True):
                self.setUp()
                self.queue = MemoryQueue(self.clock, backoff=lambda attempt: 5)
                self.bring("x", state)
                with self.subTest(state=state, call=calls.index(call)):
                    self.assertEqual(self.queue.state("x"), state)
                    result = call(self.queue)
                    self.assertIs(result if isinstance(result, bool) else result is not None, answer)
                    self.assertEqual(self.queue.state("x"), after)

    def bring(self, job_id: str, state: str) -> None:
        """Enqueue a job and bring it into a state."""
        self.queue.enqueue("parent", 10, 0)
        self.queue.enqueue(job_id, 10, 0 if state == "dead" else 3, ["parent"])
        if state == "blocked":
            self.die("parent")
        elif state != "waiting":
            self.reserve("parent")
            self.queue.pass_("parent")
        if state == "dead":
            self.die(job_id)
        elif state in ("reserved", "passed", "delayed"):
            self.reserve(job_id)
            if state == "passed":
                self.queue.pass_(job_id)
            elif state == "delayed":
                self.queue.fail(job_id)

    def test_unknown_ids(self) -> None:
        self.queue.enqueue("a", 10, 0)
        calls: dict[str, Callable[[str], object]] = {
            "reserve": self.queue.reserve, "pass_": self.queue.pass_, "fail": self.queue.fail,
            "requeue": self.queue.requeue, "state": self.queue.state,
            "pass_ with a token": lambda job_id: self.queue.pass_(job_id, token="1"),
            "fail with a token": lambda job_id: self.queue.fail(job_id, token="1"),
        }  # fmt: skip
        for name, call in calls.items():
            with self.subTest(name), self.assertRaises(UnknownJobError) as caught:
                call("b")
            self.assertIsInstance(caught.exception, KeyError)
            self.assertEqual(caught.exception.job_id, "b")

    def test_len_counts_every_job_whatever_became_of_it(self) -> None:
        self.assertEqual(len(self.queue), 0)
        for job_id in "abc":
            self.queue.enqueue(job_id, 10, 0)
        self.die("a")
        self.reserve("b")
        self.queue.pass_("b")
        self.assertEqual(len(self.queue), 3)


class OrderTest(MemoryTestCase):
    """`reserve_next`."""

    def next(self) -> str | None:
        reservation = self.queue.reserve_next()
        return None if reservation is None else reservation.job_id

    def test_oldest_ready_job_first(self) -> None:
        for job_id in "cab":
            self.queue.enqueue(job_id, 10, 1)
        self.assertEqual([self.next(), self.next(), self.next(), self.next()], ["c", "a", "b", None])

    def test_an_empty_queue_has_nothing(self) -> None:
        self.assertIsNone(self.next())

    def test_a_retried_job_keeps_its_place(self) -> None:
        for job_id in "ab":
            self.queue.enqueue(job_id, 10, 1)
        self.reserve("a")
        self.queue.fail("a")
        self.assertEqual([self.next(), self.next()], ["a", "b"])

    def test_what_is_not_ready_is_passed_over(self) -> None:
        self.queue.enqueue("a", 10, 1)
        self.queue.enqueue("waits", 10, 1, ["a"])
        self.queue.enqueue("b", 10, 1)
        self.assertEqual([self.next(), self.next(), self.next()], ["a", "b", None])
        self.queue.pass_("a")
        self.assertEqual([self.next(), self.next()], ["waits", None])

    def test_taken_by_name_is_not_offered_again(self) -> None:
        for job_id in "abc":
            self.queue.enqueue(job_id, 10, 1)
        self.reserve("b")
        self.assertEqual([self.next(), self.next(), self.next()], ["a", "c", None])

    def test_each_reservation_lasts_as_long_as_its_job_says(self) -> None:
        self.queue.enqueue("short", 0.5, 0)
        self.queue.enqueue("long", 1e9, 0)
        ends = [reservation.expires_at for _ in "12" if (reservation := self.queue.reserve_next())]
        self.assertEqual(ends, [100.5, 100.0 + 1e9])


class ExpiryTest(MemoryTestCase):
    """A reservation that has run out."""

    def test_at_its_very_end_it_has_ended(self) -> None:
        self.queue.enqueue("a", 10, 1)
        self.reserve("a")
        self.clock.now = 109.999
        self.assertEqual(self.queue.state("a"), "reserved")
        self.clock.now = 110.0
        self.assertEqual(self.queue.state("a"), "ready")

    def test_the_holder_is_too_late_at_the_end_and_in_time_just_before(self) -> None:
        for now, in_time in ((109.999, True), (110.0, False), (500.0, False)):
            for call in (MemoryQueue.pass_, MemoryQueue.fail):
                self.setUp()
                self.queue.enqueue("a", 10, 5)
                token = self.reserve("a").token
                self.clock.now = now
                with self.subTest(now=now, call=call.__name__):
                    self.assertIs(call(self.queue, "a", token=token), in_time)
                    self.assertEqual(self.queue.state("a") == "ready", not (in_time and call is MemoryQueue.pass_))

    def test_it_counts_as_a_failure(self) -> None:
        self.queue.enqueue("a", 10, 1)
        self.reserve("a")
        self.clock.now = 110.0
        self.assertEqual(self.reserve("a").attempt, 2)
        self.clock.now = 120.0
        self.assertEqual(self.queue.get_dlq(), [
            DeadJob("a", 2, (Failure(110.0, 1, "timed out"), Failure(120.0, 2, "timed out")), 120.0)
        ])  # fmt: skip

    def test_every_method_notices_it(self) -> None:
        calls: list[Callable[[MemoryQueue], object]] = [
            len,
            lambda queue: queue.enqueue("new", 1, 0),
            lambda queue: queue.reserve("other"),
            lambda queue: queue.reserve_next(),
            lambda queue: queue.pass_("other"),
            lambda queue: queue.fail("other"),
            lambda queue: queue.get_dlq(),
            lambda queue: queue.requeue("other"),
            lambda queue: queue.state("other"),
        ]
        for number, call in enumerate(calls):
            self.setUp()
            self.queue.enqueue("a", 10, 0)
            self.queue.enqueue("other", 1e6, 0)
            self.reserve("a")
            self.clock.now = 150.0
            call(self.queue)
            self.clock.now = 900.0
            with self.subTest(number):
                (dead,) = self.queue.get_dlq()
                self.assertEqual((dead.job_id, dead.died_at), ("a", 150.0))

    def test_the_backoff_does_not_apply(self) -> None:
        self.queue = MemoryQueue(self.clock, backoff=lambda attempt: 1_000)
        self.queue.enqueue("a", 10, 1)
        self.reserve("a")
        self.clock.now = 110.0
        self.assertEqual(self.queue.state("a"), "ready")

    def test_many_end_in_the_order_of_their_ends(self) -> None:
        for job_id, timeout in (("a", 30), ("b", 10), ("c", 20), ("d", 10)):
            self.queue.enqueue(job_id, timeout, 0)
            self.reserve(job_id)
        self.clock.now = 120.0
        self.assertEqual([dead.job_id for dead in self.queue.get_dlq()], ["b", "d", "c"])
        self.clock.now = 130.0
        self.assertEqual([dead.job_id for dead in self.queue.get_dlq()], ["b", "d", "c", "a"])


class TokenTest(MemoryTestCase):
    """Fencing: a late worker cannot touch its successor's reservation."""

    def test_every_reservation_has_a_new_token(self) -> None:
        self.queue.enqueue("a", 10, 99)
        self.queue.enqueue("b", 10, 99)
        tokens = set()
        for _ in range(50):
            for job_id in "ab":
                tokens.add(self.reserve(job_id).token)
                self.queue.fail(job_id)
        self.assertEqual(len(tokens), 100)

    def test_a_stale_token_changes_nothing(self) -> None:
        for end in ("expiry", "fail"):
            for call in (MemoryQueue.pass_, MemoryQueue.fail):
                self.setUp()
                self.queue.enqueue("a", 10, 5)
                stale = self.reserve("a")
                if end == "expiry":
                    self.clock.now = 110.0
                else:
                    self.queue.fail("a")
                current = self.reserve("a")
                with self.subTest(end=end, call=call.__name__):
                    self.assertIs(call(self.queue, "a", token=stale.token), False)
                    self.assertEqual(self.queue.state("a"), "reserved")
                    self.assertIs(call(self.queue, "a", token=current.token), True)

    def test_without_a_token_the_live_reservation_is_meant(self) -> None:
        self.queue.enqueue("a", 10, 5)
        self.reserve("a")
        self.clock.now = 110.0
        self.reserve("a")
        self.assertIs(self.queue.pass_("a"), True)

    def test_a_token_of_another_job_or_none_at_all_fits_nothing(self) -> None:
        for job_id in "ab":
            self.queue.enqueue(job_id, 10, 5)
        other = self.reserve("b").token
        for token in (other, "", "None", "0"):
            with self.subTest(token):
                self.assertIs(self.queue.pass_("a", token), False)
                self.assertIs(self.queue.fail("a", token=token), False)
                self.reserve("a")
                self.assertIs(self.queue.pass_("a", token), False)
                self.assertIs(self.queue.fail("a", token=token), False)
                self.queue.fail("a")

    def test_passing_twice_is_false_the_second_time(self) -> None:
        self.queue.enqueue("a", 10, 0)
        token = self.reserve("a").token
        self.assertEqual([self.queue.pass_("a", token), self.queue.pass_("a", token)], [True, False])


class DeadLetterTest(MemoryTestCase):
    """`get_dlq` and `requeue`."""

    def test_in_the_order_they_died_with_what_happened(self) -> None:
        for job_id in "abc":
            self.queue.enqueue(job_id, 10, 1)
        self.reserve("c")
        self.queue.fail("c", "boom")
        self.clock.now = 101.0
        self.reserve("c")
        self.queue.fail("c", ValueError("bang"))
        self.clock.now = 102.0
        self.die("a")
        self.assertEqual(self.queue.get_dlq(), [
            DeadJob("c", 2, (Failure(100.0, 1, "boom"), Failure(101.0, 2, "bang")), 101.0),
            DeadJob("a", 2, (Failure(102.0, 1, "error"), Failure(102.0, 2, "error")), 102.0),
        ])  # fmt: skip

    def test_requeued_with_full_budget_and_its_history(self) -> None:
        self.queue.enqueue("a", 10, 1)
        self.die("a")
        self.clock.now = 200.0
        self.assertIs(self.queue.requeue("a"), True)
        self.assertEqual((self.queue.get_dlq(), self.queue.state("a")), ([], "ready"))
        self.assertEqual(self.reserve("a").attempt, 1)
        self.queue.fail("a", "again")
        self.assertEqual(self.queue.state("a"), "ready")
        self.assertEqual(self.reserve("a").attempt, 2)
        self.queue.fail("a", "and again")
        (dead,) = self.queue.get_dlq()
        self.assertEqual([failure.reason for failure in dead.failures], ["error", "error", "again", "and again"])
        self.assertEqual([failure.attempt for failure in dead.failures], [1, 2, 1, 2])
        self.assertEqual((dead.attempts, dead.died_at), (2, 200.0))

    def test_who_dies_again_goes_to_the_end(self) -> None:
        for job_id in "ab":
            self.queue.enqueue(job_id, 10, 0)
        self.die("a", "b")
        self.queue.requeue("a")
        self.assertEqual([dead.job_id for dead in self.queue.get_dlq()], ["b"])
        self.die("a")
        self.assertEqual([dead.job_id for dead in self.queue.get_dlq()], ["b", "a"])

    def test_a_requeued_job_may_pass(self) -> None:
        self.queue.enqueue("a", 10, 0)
        self.die("a")
        self.queue.requeue("a")
        self.reserve("a")
        self.queue.pass_("a")
        self.assertEqual((self.queue.get_dlq(), self.queue.state("a")), ([], "passed"))

    def test_what_is_returned_is_immutable_and_no_part_of_the_queue(self) -> None:
        self.queue.enqueue("a", 10, 0)
        reservation = self.reserve("a")
        self.queue.fail("a", "boom")
        (dead,) = self.queue.get_dlq()
        for record, name in ((reservation, "token"), (dead, "attempts"), (dead.failures[0], "reason")):
            with self.subTest(name), self.assertRaises(FrozenInstanceError):
                setattr(record, name, "x")
        self.assertIsInstance(dead.failures, tuple)
        self.queue.get_dlq().clear()
        self.assertEqual(len(self.queue.get_dlq()), 1)

    def test_reasons_are_valid_text_of_bounded_length(self) -> None:
        self.queue.enqueue("a", 10, 1)
        for error in ("x" * 10_000, "\ud800"):
            self.reserve("a")
            self.queue.fail("a", error)
        first, second = self.queue.get_dlq()[0].failures
        self.assertEqual((len(first.reason), second.reason), (4_000, "\\ud800"))


class DependencyTest(MemoryTestCase):
    """`depends_on`."""

    def test_a_diamond(self) -> None:
        self.queue.enqueue("top", 10, 0)
        self.queue.enqueue("left", 10, 0, ["top"])
        self.queue.enqueue("right", 10, 0, ("top",))
        self.queue.enqueue("bottom", 10, 0, iter(["left", "right", "left"]))
        steps = [
            ("top", ["passed", "ready", "ready", "waiting"]),
            ("left", ["passed", "passed", "ready", "waiting"]),
            ("right", ["passed", "passed", "passed", "ready"]),
            ("bottom", ["passed", "passed", "passed", "passed"]),
        ]
        self.assertEqual(self.states("top", "left", "right", "bottom"), ["ready", *["waiting"] * 3])
        for job_id, states in steps:
            self.reserve(job_id)
            self.assertTrue(self.queue.pass_(job_id))
            self.assertEqual(self.states("top", "left", "right", "bottom"), states)

    def test_what_has_passed_already_counts_as_met(self) -> None:
        self.queue.enqueue("a", 10, 0)
        self.reserve("a")
        self.queue.pass_("a")
        self.queue.enqueue("b", 10, 0, ["a"])
        self.assertEqual(self.queue.state("b"), "ready")

    def test_blocked_at_any_depth_and_back(self) -> None:
        self.queue.enqueue("root", 10, 0)
        self.queue.enqueue("child", 10, 0, ["root"])
        self.queue.enqueue("grandchild", 10, 0, ["child"])
        self.die("root")
        self.queue.enqueue("latecomer", 10, 0, ["grandchild"])
        self.assertEqual(self.states("child", "grandchild", "latecomer"), ["blocked"] * 3)
        self.queue.requeue("root")
        self.assertEqual(self.states("child", "grandchild", "latecomer"), ["waiting"] * 3)
        self.die("root")
        self.assertEqual(self.states("child", "grandchild", "latecomer"), ["blocked"] * 3)
        self.queue.requeue("root")
        for job_id in ("root", "child", "grandchild", "latecomer"):
            self.reserve(job_id)
            self.assertTrue(self.queue.pass_(job_id))

    def test_blocked_until_the_last_dead_one_is_back(self) -> None:
        for job_id in "abc":
            self.queue.enqueue(job_id, 10, 0)
        self.queue.enqueue("x", 10, 0, ["a", "b", "c"])
        self.queue.enqueue("y", 10, 0, ["x", "a"])
        self.die("a", "b")
        for job_id, state in (("a", "blocked"), ("b", "waiting")):
            self.queue.requeue(job_id)
            self.assertEqual(self.states("x", "y"), [state, state])
        for job_id in "abcx":
            self.reserve(job_id)
            self.queue.pass_(job_id)
        self.assertEqual(self.queue.state("y"), "ready")

    def test_death_by_timeout_blocks_too(self) -> None:
        self.queue.enqueue("a", 10, 0)
        self.queue.enqueue("b", 10, 0, ["a"])
        self.reserve("a")
        self.clock.now = 110.0
        self.assertEqual(self.queue.state("b"), "blocked")

    def test_a_chain_and_a_fan_of_50_000_without_recursion(self) -> None:
        for shape in ("chain", "fan"):
            self.setUp()
            self.queue.enqueue("0", 10, 0)
            for number in range(1, 50_001):
                self.queue.enqueue(str(number), 10, 0, [str(number - 1) if shape == "chain" else "0"])
            with self.subTest(shape):
                self.assertEqual(self.queue.state("50000"), "waiting")
                self.die("0")
                self.assertEqual(self.states("1", "25000", "50000"), ["blocked"] * 3)
                self.queue.requeue("0")
                self.assertEqual(self.states("1", "25000", "50000"), ["waiting"] * 3)


class BackoffTest(MemoryTestCase):
    """`backoff`."""

    def test_delayed_until_then(self) -> None:
        asked: list[int] = []

        def backoff(attempt: int) -> float:
            asked.append(attempt)
            return attempt * 2.5

        self.queue = MemoryQueue(self.clock, backoff)
        self.queue.enqueue("a", 10, 2)
        for attempt, due in ((1, 102.5), (2, 107.5)):
            self.reserve("a")
            self.queue.fail("a")
            with self.subTest(attempt):
                self.assertEqual(self.queue.state("a"), "delayed")
                self.clock.now = due - 0.001
                self.assertEqual((self.queue.state("a"), self.queue.reserve_next()), ("delayed", None))
                self.clock.now = due
                self.assertEqual(self.queue.state("a"), "ready")
        self.assertEqual(asked, [1, 2])
        self.reserve("a")
        self.queue.fail("a")
        self.assertEqual(self.queue.state("a"), "dead")

    def test_whoever_comes_due_first_is_not_kept_behind_the_others(self) -> None:
        waits = iter([30, 10, 20])
        self.queue = MemoryQueue(self.clock, lambda attempt: next(waits))
        for job_id in "abc":
            self.queue.enqueue(job_id, 10, 1)
            self.reserve(job_id)
            self.queue.fail(job_id)
        for now, ready in ((110.0, "b"), (120.0, "c"), (130.0, "a")):
            self.clock.now = now
            reservation = self.queue.reserve_next()
            assert reservation is not None
            self.assertEqual(reservation.job_id, ready)
            self.queue.pass_(ready)

    def test_an_answer_that_is_no_wait_leaves_the_job_reserved(self) -> None:
        answers: list[Any] = [-1, float("nan"), float("inf"), None, "1", True, 10**400]
        for answer in answers:
            self.queue = MemoryQueue(self.clock, lambda attempt, answer=answer: answer)  # type: ignore[misc]
            self.queue.enqueue("a", 10, 1)
            self.reserve("a")
            with self.subTest(repr(answer)[:20]):
                with self.assertRaisesRegex(ValueError, "the backoff must be a"):
                    self.queue.fail("a")
                self.assertEqual(self.queue.state("a"), "reserved")
                self.assertTrue(self.queue.pass_("a"))

    def test_an_error_of_the_backoff_passes_through_and_changes_nothing(self) -> None:
        def backoff(attempt: int) -> float:
            raise OSError("no")

        self.queue = MemoryQueue(self.clock, backoff)
        self.queue.enqueue("a", 10, 1)
        self.reserve("a")
        with self.assertRaises(OSError):
            self.queue.fail("a")
        self.assertEqual(self.queue.state("a"), "reserved")

    def test_it_may_ask_the_queue(self) -> None:
        self.queue = MemoryQueue(self.clock, lambda attempt: len(self.queue))
        self.queue.enqueue("a", 10, 1)
        self.reserve("a")
        self.assertTrue(self.queue.fail("a"))
        self.clock.now = 101.0
        self.assertEqual(self.queue.state("a"), "ready")


class InputTest(MemoryTestCase):
    """What `enqueue` refuses, and that nothing is left of it."""

    def test_refused(self) -> None:
        self.queue.enqueue("a", 10, 0)
        rows: list[tuple[tuple[Any, ...], str]] = [
            (("a", 10, 0), "there is a job 'a' already"),
            (("", 10, 0), "job_id must have 1 to 255 characters"),
            (("x" * 256, 10, 0), "job_id must have 1 to 255 characters"),
            (("x\n", 10, 0), "job_id must not hold control characters"),
            ((None, 10, 0), "job_id must be a string, not None"),
            ((5, 10, 0), "job_id must be a string, not 5"),
            (("b", 0, 0), "timeout must be more than 0 seconds"),
            (("b", -0.0, 0), "timeout must be more than 0 seconds"),
            (("b", -1, 0), "timeout must be a finite number of seconds, and not negative"),
            (("b", float("inf"), 0), "timeout must be a finite"),
            (("b", float("nan"), 0), "timeout must be a finite"),
            (("b", 10**400, 0), "timeout must be a finite"),
            (("b", True, 0), "timeout must be a number of seconds, not bool"),
            (("b", "10", 0), "timeout must be a number of seconds, not str"),
            (("b", None, 0), "timeout must be a number of seconds, not NoneType"),
            (("b", 10, -1), "max_retry must lie between 0 and"),
            (("b", 10, 2**63 - 1), "max_retry must lie between 0 and"),
            (("b", 10, True), "max_retry must be a whole number, not True"),
            (("b", 10, 1.0), "max_retry must be a whole number, not 1.0"),
            (("b", 10, None), "max_retry must be a whole number, not None"),
            (("b", 10, 0, ["b"]), "job 'b' depends on itself"),
            (("b", 10, 0, ["a", "c"]), "depends_on names 'c', but there is no such job"),
            (("b", 10, 0, "a"), "depends_on must be a list of ids, not 'a'"),
            (("b", 10, 0, [1]), "an id in depends_on must be a string, not 1"),
            (("b", 10, 0, None), "depends_on must be a list of ids, not None"),
        ]
        for arguments, message in rows:
            with self.subTest(message), self.assertRaisesRegex(InvalidJob, message) as caught:
                self.queue.enqueue(*arguments)
            self.assertIsInstance(caught.exception, ValueError)
        self.assertEqual(len(self.queue), 1)
        with self.assertRaises(UnknownJobError):
            self.queue.state("b")

    def test_accepted_at_the_edge(self) -> None:
        rows = ((5e-324, 0), (1, 2**63 - 2), (1.7e308, 10**6), (10**300, 1))
        for number, (timeout, max_retry) in enumerate(rows):
            with self.subTest(timeout=timeout):
                self.queue.enqueue(str(number), timeout, max_retry)
        self.queue.enqueue("x" * 255, 1, 0)
        self.assertEqual(self.reserve("3").expires_at, 1e300)
        self.assertEqual(self.queue.state("3"), "reserved")

    def test_a_refused_job_leaves_no_edge_behind(self) -> None:
        self.queue.enqueue("a", 10, 0)
        with self.assertRaises(InvalidJob):
            self.queue.enqueue("b", 10, 0, ["a", "unknown"])
        self.queue.enqueue("b", 10, 0)
        self.die("a")
        self.assertEqual(self.queue.state("b"), "ready")


class ThreadTest(unittest.TestCase):
    """Many threads, one queue."""

    def test_twenty_threads_pass_six_hundred_jobs_once_each(self) -> None:
        queue = MemoryQueue(lambda: 0.0)
        for number in range(600):
            queue.enqueue(str(number), 10, 0, [str(number - 300)] if number >= 300 else ())
        taken: list[str] = []
        passed: list[bool] = []
        start = threading.Barrier(20)

        def work() -> None:
            start.wait(30)
            while len(passed) < 600:
                reservation = queue.reserve_next()
                if reservation is not None:
                    taken.append(reservation.job_id)
                    passed.append(queue.pass_(reservation.job_id, reservation.token))

        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            self.assertFalse(thread.is_alive())
        self.assertEqual(sorted(taken, key=int), [str(number) for number in range(600)])
        self.assertEqual(passed, [True] * 600)


class CostTest(unittest.TestCase):
    """What the docstrings promise, counted."""

    def cycle(self, size: int) -> dict[str, float]:
        """Return what each call costs in a queue of `size` ready jobs, over 50 rounds."""
        queue = MemoryQueue(Clock())
        for number in range(size):
            queue.enqueue(str(number), 10, 3)
        costs: dict[str, float] = {}
        for job_id in map(str, range(50)):
            calls: dict[str, Callable[[], object]] = {
                "reserve": lambda: queue.reserve(job_id),  # noqa: B023
                "fail": lambda: queue.fail(job_id),  # noqa: B023
                "reserve_next": queue.reserve_next,
                "pass_": lambda: queue.pass_(job_id),  # noqa: B023
                "state": lambda: queue.state(job_id),  # noqa: B023
                "enqueue": lambda: queue.enqueue("new" + job_id, 10, 3),  # noqa: B023
            }
            for name, call in calls.items():
                costs[name] = costs.get(name, 0) + Work().of(call)
            self.assertEqual(queue.state(job_id), "passed")
        return costs

    def test_from_500_to_50_000_jobs_only_the_logarithm_grows(self) -> None:
        small, large = self.cycle(500), self.cycle(50_000)
        for name, cost in small.items():
            with self.subTest(name):
                self.assertGreater(cost, 50 * 10)  # the counter counts
                self.assertLess(large[name], cost * 1.3)

    def test_enqueue_is_linear_in_its_own_dependencies(self) -> None:
        def cost(dependencies: int) -> float:
            queue = MemoryQueue(Clock())
            names = [str(number) for number in range(4_000)]
            for name in names:
                queue.enqueue(name, 10, 0)
            return Work().of(lambda: queue.enqueue("x", 10, 0, names[:dependencies]))

        none, thousand, two_thousand = cost(0), cost(1_000), cost(2_000)
        self.assertGreater(thousand, none + 1_000)
        self.assertAlmostEqual((two_thousand - none) / (thousand - none), 2, delta=0.1)

    def test_blocking_and_unblocking_is_linear_in_the_edges_it_touches(self) -> None:
        def cost(size: int, ladder: bool) -> tuple[float, float]:
            queue = MemoryQueue(Clock())
            queue.enqueue("0", 10, 0)
            for number in range(1, size):
                names = [str(number - 1)] if number == 1 or not ladder else [str(number - 1), str(number - 2)]
                queue.enqueue(str(number), 10, 0, names)
            queue.reserve("0")
            block = Work().of(lambda: queue.fail("0"))
            return block, Work().of(lambda: queue.requeue("0"))

        for ladder in (False, True):
            small, large = cost(1_000, ladder), cost(4_000, ladder)
            for name, before, after in zip(("block", "unblock"), small, large, strict=True):
                with self.subTest(name, ladder=ladder):
                    self.assertGreater(before, 1_000)
                    self.assertLess(after, before * 4.1)

    def test_expiry_costs_what_has_run_out_and_not_what_has_not(self) -> None:
        def cost(live: int, expired: int) -> float:
            clock = Clock()
            queue = MemoryQueue(clock)
            for number in range(live + expired):
                queue.enqueue(str(number), 10 if number < expired else 1_000, 3)
                queue.reserve(str(number))
            clock.now = 110.0
            return Work().of(lambda: len(queue))

        self.assertLess(cost(4_000, 0), cost(100, 0) * 1.1)
        self.assertLess(cost(4_000, 100), cost(100, 100) * 1.5)
        self.assertLess(cost(0, 2_000), cost(0, 500) * 5)

    def test_a_claim_does_not_see_what_is_delayed_waiting_blocked_or_done(self) -> None:
        def cost(others: int) -> float:
            clock = Clock()
            queue = MemoryQueue(clock, backoff=lambda attempt: 500)
            for job_id in ("root", "open"):
                queue.enqueue(job_id, 10, 0)
            for number in range(others):
                for prefix, parents in (("blocked", ["root"]), ("waits", ["open"]), ("late", []), ("done", [])):
                    queue.enqueue(f"{prefix} {number}", 1e6, 9, parents)
                queue.reserve(f"late {number}")
                queue.fail(f"late {number}")
                queue.reserve(f"done {number}")
                queue.pass_(f"done {number}")
            queue.reserve("root")
            queue.fail("root")
            queue.reserve("open")
            queue.enqueue("ready", 10, 0)
            queue.reserve_next()  # leaves no withdrawn entries at the top
            queue.enqueue("ready too", 10, 0)
            return Work().of(queue.reserve_next)

        self.assertLess(cost(3_000), cost(30) * 1.3)

    def test_thirty_thousand_rounds_on_one_job_do_not_grow_memory(self) -> None:
        queue = MemoryQueue(Clock())
        queue.enqueue("fails", 1e9, 10**6)
        queue.enqueue("dies", 1e9, 0)

        def rounds(count: int) -> int:
            """Let both jobs fail, and return how many blocks of memory this process then has."""
            for _ in range(count):
                for job_id in ("fails", "dies"):
                    queue.reserve(job_id)
                    queue.fail(job_id)
                queue.requeue("dies")
            gc.collect()
            return sys.getallocatedblocks()

        before = rounds(MAX_FAILURES + 100)  # from here on an old failure is forgotten for each new one
        self.assertLess(rounds(30_000) - before, 1_000)
        self.assertEqual(queue.state("fails"), "ready")

    def test_the_latest_thousand_failures_are_kept(self) -> None:
        queue = MemoryQueue(Clock())
        queue.enqueue("a", 10, 1_500)
        for number in range(1_501):
            queue.reserve("a")
            queue.fail("a", str(number))
        (dead,) = queue.get_dlq()
        self.assertEqual(MAX_FAILURES, 1_000)
        self.assertEqual(len(dead.failures), 1_000)
        self.assertEqual((dead.failures[0].attempt, dead.failures[-1].reason), (502, "1500"))
        self.assertEqual(dead.attempts, 1_501)


class AgendaTest(unittest.TestCase):
    """The heap with withdrawal."""

    def test_order_ties_and_withdrawal(self) -> None:
        agenda = parts.Agenda()
        for key, seq in ((5, 1), (3, 2), (5, 0), (4, 3)):
            agenda.put(key, seq)
        agenda.drop(2)
        agenda.drop(2)
        agenda.drop(77)
        agenda.put(1, 1)
        found = [agenda.take_until(10) for _ in range(4)]
        self.assertEqual(found, [1, 3, 0, None])
        self.assertIsNone(agenda.first())

    def test_taken_only_up_to_the_key(self) -> None:
        agenda = parts.Agenda()
        agenda.put(5, 1)
        self.assertEqual([agenda.take_until(4.9), agenda.take_until(5)], [None, 1])

    def test_withdrawn_entries_are_thrown_out(self) -> None:
        agenda = parts.Agenda()
        for number in range(100):
            agenda.put(0, number)
        for number in range(10_000):
            agenda.drop(number % 100)
            agenda.put(number, number % 100)
            self.assertLessEqual(len(agenda._heap), 217)
        self.assertEqual(agenda.first(), (9_900, 0))


class StoreTest(unittest.TestCase):
    """What the conformance suite cannot show because only `MemoryStore` has it, or in one place only."""

    def setUp(self) -> None:
        self.store = MemoryStore()

    def test_claim_job_obeys_what_claim_obeys(self) -> None:
        self.store.add(new_job("t", id="later", delay=1), now=0)
        self.store.add(new_job("t", id="waits", depends_on=["later"]), now=0)
        self.assertIsNone(self.store.claim_job("later", "w", now=999, lease=10))
        self.assertIsNone(self.store.claim_job("waits", "w", now=1_000, lease=10))
        job = self.store.claim_job("later", "w", now=1_000, lease=10)
        assert job is not None
        self.assertEqual((job.id, job.status, job.lease_owner), ("later", "running", "w"))
        self.assertEqual(job.lease_expires_at, 1_010)
        self.assertIsNone(self.store.claim_job("later", "w", now=1_000, lease=10))
        with self.assertRaises(UnknownJobError):
            self.store.claim_job("nobody", "w", now=0, lease=10)

    def test_claims_need_a_positive_lease_and_limit(self) -> None:
        self.store.add(new_job("t", id="a"), now=0)
        for lease, limit in ((0, 1), (-1, 1), (1, 0), (1, -1)):
            with self.subTest(lease=lease, limit=limit), self.assertRaises(InvalidJob):
                self.store.claim("w", now=0, lease=lease, limit=limit)
        with self.assertRaises(InvalidJob):
            self.store.claim_job("a", "w", now=0, lease=0)

    def test_queues_do_not_mix(self) -> None:
        for number, queue in enumerate(("a", "b", "a", "b")):
            self.store.add(new_job("t", id=str(number), queue=queue, priority=number), now=0)
        claimed = self.store.claim("w", now=0, lease=5, limit=9, queues=("b",))
        self.assertEqual([job.id for job in claimed], ["3", "1"])
        self.assertEqual(self.store.claim("w", now=0, lease=5, queues=("none",)), [])
        self.assertEqual(self.store.recover_expired(now=9, queues=("a", "none")), [])
        self.assertEqual(len(self.store.recover_expired(now=9, queues=("a", "b"), limit=1)), 1)
        self.assertEqual(self.store.counts("a")["pending"], 2)
        again = self.store.claim("w", now=9, lease=5, limit=9, queues=("a", "b"))
        self.assertEqual([job.id for job in again], ["2", "1", "0"])

    def test_a_clock_that_steps_back_hides_what_was_due(self) -> None:
        self.store.add(new_job("t", id="a", run_at=100, priority=9), now=0)
        self.store.add(new_job("t", id="b"), now=0)
        self.assertEqual(self.store.next_job(now=100), "a")
        self.assertEqual([job.id for job in self.store.claim("w", now=99, lease=5, limit=2)], ["b"])
        self.assertIsNone(self.store.next_job(now=99))
        self.assertEqual(self.store.next_job(now=100), "a")

    def test_batches_are_stored_whole_or_not_at_all(self) -> None:
        self.store.add(new_job("t", id="old"), now=0)
        rows: list[tuple[list[dict[str, Any]], type, int | None, str]] = [
            ([{"id": "a"}, {"id": "b"}, {"id": "a"}], InvalidJob, 2, "'a' is given to two jobs of the batch"),
            ([{"id": "a"}, {"id": "old"}], InvalidJob, 1, "there is a job 'old' already"),
            ([{"id": "a"}, {"depends_on": ["a", "nobody"]}], InvalidJob, 1, "depends_on names 'nobody'"),
            ([{"id": "a", "depends_on": ["b"]}, {"id": "b", "depends_on": ["a"]}], DependencyCycle, None, "a ring"),
            # One key, so b is a: a ring of one.
            ([{"id": "a", "idempotency_key": "k", "depends_on": ["b"]}, {"id": "b", "idempotency_key": "k"}],
             DependencyCycle, 0, "a ring"),
        ]  # fmt: skip
        for batch, kind, index, message in rows:
            caught: Any
            with self.subTest(message), self.assertRaisesRegex(kind, message) as caught:
                self.store.add_many([new_job("t", **fields) for fields in batch], now=0)
            if index is not None:
                self.assertEqual(getattr(caught.exception, "index", None), index)
            self.assertEqual(len(self.store), 1)
        self.assertEqual(self.store.add_many([], now=0), [])

    def test_a_ring_names_the_jobs_along_it(self) -> None:
        batch = [new_job("t", id=a, depends_on=[b]) for a, b in ("ab", "bc", "ca", "da")]
        with self.assertRaises(DependencyCycle) as caught:
            self.store.add_many(batch, now=0)
        ring = caught.exception.cycle
        self.assertEqual((ring[0], sorted(ring[:-1])), (ring[-1], ["a", "b", "c"]))
        for job_id, needs in itertools.pairwise(ring):
            self.assertIn((job_id, needs), [("a", "b"), ("b", "c"), ("c", "a")])

    def test_a_ring_and_a_chain_of_30_000_do_not_recurse(self) -> None:
        size = 30_000
        chain = [new_job("t", id=str(n), depends_on=[str(n + 1)] if n < size - 1 else ()) for n in range(size)]
        ring = [*chain[:-1], new_job("t", id=str(size - 1), depends_on=["0"])]
        with self.assertRaises(DependencyCycle) as caught:
            self.store.add_many(ring, now=0)
        self.assertEqual(len(caught.exception.cycle), size + 1)
        self.assertEqual(len(self.store.add_many(chain, now=0)), size)
        self.assertEqual(self.store.next_job(now=0), str(size - 1))

    def test_repeated_keys_in_and_before_a_batch(self) -> None:
        self.store.add(new_job("t", id="old", idempotency_key="k0"), now=0)
        batch = [
            new_job("t", id="x", idempotency_key="k0"), new_job("t", idempotency_key="k1"),
            new_job("t", id="y", idempotency_key="k1"), new_job("t", id="child", depends_on=["x", "y", "old"]),
        ]  # fmt: skip
        self.assertEqual(self.store.add_many(batch, now=0), ["old", "3", "3", "child"])
        child = self.store.get("child")
        assert child is not None
        self.assertEqual((set(child.depends_on or ()), child.unmet), ({"old", "3"}, 2))
        self.assertEqual(self.store.add(new_job("t", idempotency_key="k1"), now=0), ("3", False))

    def test_numbers_whose_text_is_taken_are_skipped(self) -> None:
        self.store.add(new_job("t", id="2"), now=0)
        self.assertEqual(self.store.add(new_job("t"), now=0), ("3", True))
        batch = [new_job("t"), new_job("t", id="4"), new_job("t")]
        self.assertEqual(self.store.add_many(batch, now=0), ["5", "4", "7"])


class ExportTest(unittest.TestCase):
    """The names are part of the package."""

    def test_lazily_exported(self) -> None:
        for name, expected in (
            ("MemoryQueue", MemoryQueue), ("Reservation", Reservation), ("DeadJob", DeadJob), ("Failure", Failure),
        ):  # fmt: skip
            with self.subTest(name):
                self.assertIs(getattr(jobqueue, name), expected)
                self.assertIn(name, jobqueue.__all__)


if __name__ == "__main__":
    unittest.main()
