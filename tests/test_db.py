"""The engine's life cycle: every move from every state with every kind of token, failure, expiry, looking.

Which moves exist and where they lead is stated here once more as tables of literals.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable
from typing import Any

from jobqueue.db import Store
from jobqueue.errors import DatabaseError, InvalidJob, UnknownJobError
from jobqueue.jobs import Job
from tests.engine import LEASE_MS, NOW, WORKER, StoreTestCase, ids, token

# What each move answers, and the status and attempts after it, for a job with 3 attempts.
# None: the answer of a move that did nothing (False, None, no job), and not a thing has changed.
Outcome = tuple[Any, str, int] | None

MOVES: dict[str, Callable[[Store, str, int], Any]] = {
    "claim": lambda store, token, now: [
        job.id for job in store.claim(WORKER, now_ms=now, lease_ms=LEASE_MS, limit=9)],
    "extend": lambda store, token, now: store.extend("j", token, now_ms=now, lease_ms=LEASE_MS),
    "report": lambda store, token, now: store.report("j", token, 0.5, "half way", now_ms=now),
    "complete": lambda store, token, now: store.complete("j", token, {"a": 1}, now_ms=now),
    "fail": lambda store, token, now: store.fail("j", token, "oops", now_ms=now),
    "reject": lambda store, token, now: store.fail("j", token, "oops", now_ms=now, final=True),
    "release": lambda store, token, now: store.release("j", token, now_ms=now),
    "recover": lambda store, token, now: [
        (job.id, status) for job, status in store.recover_expired(now_ms=now)],
    "cancel": lambda store, token, now: store.cancel("j", now_ms=now),
    "retry": lambda store, token, now: store.retry("j", now_ms=now),
}
CLAIMED = (["j"], "running", 1)
CLAIMED_AGAIN = (["j"], "running", 2)
HELD: dict[str, Outcome] = {
    "claim": None,
    "extend": (True, "running", 1),
    "report": (True, "running", 1),
    "complete": (True, "completed", 1),
    "fail": ("retrying", "retrying", 1),
    "reject": ("failed", "failed", 1),
    "release": (True, "pending", 0),
    "recover": None,
    "cancel": (True, "canceled", 1),
    "retry": None,
}
NOTHING: dict[str, Outcome] = dict.fromkeys(MOVES)
CANCEL: dict[str, Outcome] = {"cancel": (True, "canceled", 1)}

# state: what each move does to a job in it, with the token named; the rest does nothing.
TABLE: dict[str, dict[str, Outcome]] = {
    "pending, no token": {**NOTHING, "claim": CLAIMED, "cancel": (True, "canceled", 0)},
    "pending after release, old token": {**NOTHING, "claim": CLAIMED, "cancel": (True, "canceled", 0)},
    "scheduled, no token": {**NOTHING, "cancel": (True, "canceled", 0)},
    "retrying and due, old token": {**NOTHING, **CANCEL, "claim": CLAIMED_AGAIN},
    "retrying and not due, old token": {**NOTHING, **CANCEL},
    "recovered, old token": {**NOTHING, **CANCEL, "claim": CLAIMED_AGAIN},
    "running, right token": HELD,
    "running in its last millisecond, right token": HELD,
    "running, empty token": {**NOTHING, **CANCEL},
    "running, stale token": {**NOTHING, "cancel": (True, "canceled", 2)},
    "running, expired just now": {**NOTHING, **CANCEL, "recover": ([("j", "retrying")], "retrying", 1)},
    "running, expired long ago": {**NOTHING, **CANCEL, "recover": ([("j", "retrying")], "retrying", 1)},
    "running, stale token, expired": {
        **NOTHING, "cancel": (True, "canceled", 2), "recover": ([("j", "retrying")], "retrying", 2)},
    "running its last attempt, right token": {
        **HELD, "extend": (True, "running", 3), "report": (True, "running", 3),
        "complete": (True, "completed", 3), "fail": ("failed", "failed", 3), "reject": ("failed", "failed", 3),
        "release": (True, "pending", 2), "cancel": (True, "canceled", 3)},
    "running its last attempt, expired": {
        **NOTHING, "cancel": (True, "canceled", 3), "recover": ([("j", "failed")], "failed", 3)},
    "completed, its token": NOTHING,
    "failed, its token": {**NOTHING, "retry": (True, "pending", 0)},
    "canceled while running, its token": {**NOTHING, "retry": (True, "pending", 0)},
    "canceled while pending, no token": {**NOTHING, "retry": (True, "pending", 0)},
}


class MovesTest(StoreTestCase):
    """Every move in every state with every kind of token: the answer, and status and attempts after it."""

    def bring_into(self, state: str) -> tuple[str, int]:
        """Make the job `j` in a state of the table; return the token and the time to act with."""
        store = self.store
        if state == "scheduled, no token":
            self.add("j", run_at=NOW + 1)
            return "", NOW
        self.add("j")
        if state == "pending, no token":
            return "", NOW
        if state == "canceled while pending, no token":
            store.cancel("j", now_ms=NOW)
            return "", NOW
        held = token(self.take("j"))
        expiry = NOW + LEASE_MS
        if state == "pending after release, old token":
            store.release("j", held, now_ms=NOW)
        elif state.startswith("retrying"):
            store.fail("j", held, "first", now_ms=NOW)
            now = NOW + (1_000 if "and due" in state else 999)
            store.promote(now_ms=now)
            return held, now
        elif state.startswith("recovered"):
            store.recover_expired(now_ms=expiry)
            return held, expiry
        elif state == "running in its last millisecond, right token":
            return held, expiry - 1
        elif state == "running, empty token":
            return "", NOW
        elif state == "running, expired just now":
            return held, expiry
        elif state == "running, expired long ago":
            return held, expiry + 10**9
        elif state.startswith("running, stale token"):
            store.recover_expired(now_ms=expiry)
            self.take("j", expiry)
            return held, expiry + (LEASE_MS if "expired" in state else 0)
        elif state.startswith("running its last attempt"):
            for _ in range(2):
                store.recover_expired(now_ms=expiry)
                held = token(self.take("j", expiry))
                expiry += LEASE_MS
            return held, expiry - ("expired" not in state)
        elif state == "completed, its token":
            store.complete("j", held, [1], now_ms=NOW)
        elif state == "failed, its token":
            store.fail("j", held, "first", now_ms=NOW, final=True)
        elif state == "canceled while running, its token":
            store.cancel("j", now_ms=NOW)
        else:
            self.assertEqual(state, "running, right token")
        return held, NOW

    def test_every_move_in_every_state(self) -> None:
        for state, row in TABLE.items():
            self.assertEqual(row.keys(), MOVES.keys())
            for move, expected in row.items():
                with self.subTest(state=state, move=move):
                    self.clear()
                    held, now = self.bring_into(state)
                    before, commits = self.contents(), self.store.commits
                    answer = MOVES[move](self.store, held, now)
                    if expected is None:
                        self.assertIn(answer, (False, None, []))
                        self.assertEqual(self.contents(), before)
                        self.assertEqual(self.store.commits, commits, "nothing to write, so nothing to sync")
                    else:
                        after = self.job("j")
                        self.assertEqual((answer, after.status, after.attempts), expected)
                        self.assertEqual(after.lease_token is not None, after.status == "running")


class FailureTest(StoreTestCase):
    """What a failed attempt leads to, to the millisecond."""

    def test_the_backoff_is_exact_at_every_attempt(self) -> None:
        self.add("j", max_attempts=12)
        now = NOW
        waits = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000, 60_000, 60_000]
        for attempt, wait in enumerate(waits, 1):
            job = self.take("j", now)
            self.assertEqual(job.attempts, attempt)
            self.assertEqual(self.store.fail("j", token(job), f"no {attempt}", now_ms=now), "retrying")
            self.assertEqual(self.job("j").run_at, now + wait)
            self.assertEqual(self.claim(now + wait - 1), [])
            now += wait
        job = self.take("j", now)
        self.assertEqual(job.attempts, 12)
        self.assertEqual(self.store.fail("j", token(job), "no 12", now_ms=now), "failed")
        self.assertEqual(self.claim(now + 10**9), [])
        failed = self.job("j")
        self.assertEqual((failed.status, failed.attempts, failed.finished_at, failed.last_error),
                         ("failed", 12, now, "no 12"))

    def test_each_failed_attempt_leaves_a_row(self) -> None:
        self.add("j", max_attempts=2)
        job = self.take("j", NOW + 5)
        self.store.fail("j", token(job), "first", now_ms=NOW + 7, delay_ms=0, reason="timeout")
        job = self.take("j", NOW + 8)
        self.store.recover_expired(now_ms=NOW + 8 + LEASE_MS)
        rows = self.query("SELECT attempt, owner, started_at, ended_at, reason, error FROM failures ORDER BY rowid")
        self.assertEqual(rows, [
            (1, "worker-1", NOW + 5, NOW + 7, "timeout", "first"),
            (2, "worker-1", NOW + 8, NOW + 30_008, "lease expired", "the lease of worker-1 ran out"),
        ])

    def test_an_own_delay_takes_the_place_of_the_backoff_and_still_counts(self) -> None:
        self.add("j", max_attempts=2)
        job = self.take("j")
        self.assertEqual(self.store.fail("j", token(job), "later", now_ms=NOW, delay_ms=7), "retrying")
        self.assertEqual(self.claim(NOW + 6), [])
        job = self.take("j", NOW + 7)
        self.assertEqual(self.store.fail("j", token(job), "later", now_ms=NOW + 7, delay_ms=7), "failed")

    def test_a_delay_of_nothing_makes_it_due_at_once(self) -> None:
        self.add("j")
        self.store.fail("j", token(self.take("j")), "again", now_ms=NOW, delay_ms=0)
        self.assertEqual(ids(self.store.claim(WORKER, now_ms=NOW, lease_ms=1)), ["j"])

    def test_an_error_of_any_kind_and_length_can_be_stored(self) -> None:
        for n, (error, stored) in enumerate([
            ("x" * 4_000, "x" * 4_000),
            ("x" * 4_001, "x" * 3_997 + "..."),
            ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
            ("nul \0 and \x1b[31m", "nul \0 and \x1b[31m"),
            (ValueError("an exception"), "an exception"),
            ("", ""),
        ]):
            with self.subTest(stored=stored[:30]):
                self.add(f"j{n}", max_attempts=1)
                self.assertEqual(self.store.fail(f"j{n}", token(self.take(f"j{n}")), error, now_ms=NOW), "failed")
                self.assertEqual(self.job(f"j{n}").last_error, stored)

    def test_a_result_that_is_no_json_leaves_the_lease_as_it_was(self) -> None:
        self.add("j")
        job = self.take("j")
        before = self.contents()
        for result in (float("nan"), {1, 2}, "\ud800", object()):
            with self.assertRaisesRegex(InvalidJob, "^result "):
                self.store.complete("j", token(job), result, now_ms=NOW)
        self.assertEqual(self.contents(), before)
        self.assertTrue(self.store.complete("j", token(job), {"ok": [None, "é\0"]}, now_ms=NOW + 1))
        done = self.job("j")
        self.assertEqual((done.result, done.finished_at), ({"ok": [None, "é\0"]}, NOW + 1))

    def test_completing_again_changes_nothing(self) -> None:
        self.add("j")
        job = self.take("j")
        self.assertTrue(self.store.complete("j", token(job), "first", now_ms=NOW))
        before = self.contents()
        self.assertFalse(self.store.complete("j", token(job), "second", now_ms=NOW + 1))
        self.assertEqual(self.store.fail("j", token(job), "late", now_ms=NOW + 1), None)
        self.assertEqual(self.contents(), before)

    def test_of_many_outcomes_each_stands_or_falls_with_its_own_lease(self) -> None:
        self.add_many([{"id": id} for id in ("good", "stolen", "over", "canceled", "odd")])
        seqs = {job.id: job.seq for job in self.store.list()}
        tokens = {job.id: token(job) for job in self.claim(limit=5)}
        self.store.extend("over", tokens["over"], now_ms=NOW, lease_ms=1)
        self.store.cancel("canceled", now_ms=NOW)
        odd = json.dumps({"a\"]\\": ["\u20ac\u0000'", 2**70, 1.5]}, ensure_ascii=False)
        tokens["stolen"] = tokens["good"]
        results = {"good": None, "stolen": '"no"', "over": '"late"', "canceled": None, "odd": odd}
        outcomes = [(999, tokens["good"], None), *((seqs[id], tokens[id], results[id]) for id in results)]
        before = {id: self.job(id).as_dict() for id in ("stolen", "over", "canceled")}
        answers = self.store.complete_many(outcomes, now_ms=NOW + 1)
        self.assertEqual(answers, [False, True, False, False, False, True])
        self.assertEqual({id: self.job(id).as_dict() for id in before}, before)
        self.assertEqual((self.job("good").status, self.job("good").result_json), ("completed", None))
        self.assertEqual((self.job("odd").status, self.job("odd").result_json), ("completed", odd))
        self.assertEqual(self.job("odd").finished_at, NOW + 1)

    def test_of_two_outcomes_in_one_call_the_first_counts(self) -> None:
        self.add("a")
        self.add("b")
        a, b = self.claim(limit=2)
        outcomes = [(a.seq, token(a), '"one"'), (b.seq, token(a), '"stolen"'), (a.seq, token(a), '"two"'),
                    (999, token(a), None), (b.seq, token(b), None)]
        self.assertEqual(self.store.complete_many(outcomes, now_ms=NOW), [True, False, False, False, True])
        self.assertEqual((self.job("a").result, self.job("b").result), ("one", None))


class LeaseTest(StoreTestCase):
    """Tokens, expiry, extension, release."""

    def test_every_claim_has_a_new_token(self) -> None:
        self.add_many([{"max_attempts": 50}] * 20)
        seen = []
        for turn in range(50):
            jobs = self.claim(NOW + turn * LEASE_MS, limit=20)
            self.assertEqual(len(jobs), 20)
            seen += [token(job) for job in jobs]
            self.store.recover_expired(now_ms=NOW + (turn + 1) * LEASE_MS)
        self.assertEqual(len(set(seen)), 1_000)
        self.assertEqual({len(one) for one in seen}, {32})

    def test_a_claim_sets_the_lease(self) -> None:
        self.add("j")
        job = self.take("j", NOW + 3, lease_ms=50)
        self.assertEqual((job.status, job.lease_owner, job.lease_expires_at, job.started_at, job.finished_at),
                         ("running", "worker-1", NOW + 53, NOW + 3, None))
        stored = self.job("j")
        self.assertEqual([getattr(job, name) for name in Job.COLUMNS if name not in ("payload", "result")],
                         [getattr(stored, name) for name in Job.COLUMNS if name not in ("payload", "result")])

    def test_a_claim_needs_a_lease_and_a_limit(self) -> None:
        self.add("j")
        before = self.contents()
        for lease_ms, limit in ((0, 1), (-1, 1), (1, 0), (1, -1)):
            with self.assertRaises(InvalidJob):
                self.store.claim(WORKER, now_ms=NOW, lease_ms=lease_ms, limit=limit)
        self.assertEqual(self.contents(), before)

    def test_the_lease_ends_at_its_very_millisecond(self) -> None:
        self.add("j")
        held = token(self.take("j", NOW, lease_ms=100))
        self.assertEqual(self.store.recover_expired(now_ms=NOW + 99), [])
        self.assertTrue(self.store.extend("j", held, now_ms=NOW + 99, lease_ms=100))
        self.assertEqual(self.job("j").lease_expires_at, NOW + 199)
        self.assertEqual(self.store.recover_expired(now_ms=NOW + 198), [])
        self.assertFalse(self.store.extend("j", held, now_ms=NOW + 199, lease_ms=100))
        self.assertEqual(len(self.store.recover_expired(now_ms=NOW + 199)), 1)

    def test_extending_many_names_those_that_are_lost(self) -> None:
        self.add_many([{"id": id} for id in "abc"])
        a, b, c = self.claim(limit=3, lease_ms=100)
        self.store.cancel("b", now_ms=NOW)
        leases = [(job.seq, token(job)) for job in (a, b, c)]
        lost = self.store.extend_many(leases, now_ms=NOW + 1, lease_ms=200)
        self.assertEqual(lost, [(b.seq, token(b))])
        self.assertEqual([self.job(id).lease_expires_at for id in "abc"], [NOW + 201, None, NOW + 201])

    def test_a_recovered_job_is_due_at_once_and_keeps_its_attempts_and_its_place(self) -> None:
        self.add("old")
        self.take("old")
        self.add("new", NOW + 1)
        ((before, status),) = self.store.recover_expired(now_ms=NOW + LEASE_MS)
        self.assertEqual((before.id, before.lease_owner, before.attempts, status),
                         ("old", "worker-1", 1, "retrying"))
        self.assertEqual([(job.id, job.attempts) for job in self.claim(NOW + LEASE_MS, limit=2)],
                         [("old", 2), ("new", 1)])

    def test_recovery_fails_those_that_have_no_attempt_left(self) -> None:
        self.add("last", max_attempts=1)
        self.add("more", max_attempts=2)
        self.claim(limit=2)
        found = self.store.recover_expired(now_ms=NOW + LEASE_MS)
        self.assertEqual({job.id: status for job, status in found}, {"last": "failed", "more": "retrying"})
        last = self.job("last")
        self.assertEqual((last.status, last.attempts, last.finished_at, last.last_error),
                         ("failed", 1, NOW + LEASE_MS, "the lease of worker-1 ran out"))

    def test_recovery_takes_the_longest_expired_first_and_not_more_than_asked(self) -> None:
        for n, lease_ms in enumerate((300, 100, 200)):
            self.add(f"j{n}")
            self.take(f"j{n}", NOW, lease_ms=lease_ms)
        self.add("x", queue="x")
        self.claim(queues=("x",), lease_ms=50)
        found = self.store.recover_expired(now_ms=NOW + 1_000, limit=2)
        self.assertEqual([job.id for job, _ in found], ["j1", "j2"])
        found = self.store.recover_expired(now_ms=NOW + 1_000, queues=("x", "default"), limit=2)
        self.assertEqual([job.id for job, _ in found], ["x", "j0"])
        self.assertEqual(self.store.recover_expired(now_ms=NOW + 1_000, queues=("x", "default")), [])

    def test_a_released_job_is_as_if_never_claimed(self) -> None:
        self.add("j", priority=5, run_at=NOW - 1)
        before = self.contents()
        job = self.take("j")
        self.assertTrue(self.store.release("j", token(job), now_ms=NOW + 1))
        self.assertEqual(self.contents(), before)
        self.assertEqual(self.take("j", NOW + 1).attempts, 1)

    def test_a_release_returns_the_attempt_after_failures_too(self) -> None:
        self.add("j", max_attempts=2)
        self.store.fail("j", token(self.take("j")), "first", now_ms=NOW)
        for turn in range(20):
            job = self.take("j", NOW + 1_000 + turn)
            self.assertEqual(job.attempts, 2)
            self.assertTrue(self.store.release("j", token(job), now_ms=NOW + 1_000 + turn))
            self.assertEqual(self.job("j").attempts, 1)
        job = self.take("j", NOW + 2_000)
        self.assertEqual(self.store.fail("j", token(job), "x", now_ms=NOW + 2_000), "failed")

    def test_never_more_starts_than_attempts(self) -> None:
        self.add("j", max_attempts=3)
        starts, now = 0, NOW
        for turn in range(20):
            jobs = self.claim(now)
            starts += len(jobs)
            if jobs and turn % 2:
                self.store.fail("j", token(jobs[0]), "x", now_ms=now)
            now += 60_000
            self.store.recover_expired(now_ms=now)
        self.assertEqual((starts, self.job("j").status), (3, "failed"))

    def test_progress_is_kept_until_the_next_claim(self) -> None:
        self.add("j")
        job = self.take("j")
        self.assertTrue(self.store.report("j", token(job), 0.25, "a quarter", now_ms=NOW))
        self.assertEqual((self.job("j").progress, self.job("j").progress_note), (0.25, "a quarter"))
        self.store.recover_expired(now_ms=NOW + LEASE_MS)
        self.assertEqual((self.job("j").progress, self.job("j").progress_note), (0.25, "a quarter"))
        self.take("j", NOW + LEASE_MS)
        self.assertEqual((self.job("j").progress, self.job("j").progress_note), (None, None))


class UnknownJobTest(StoreTestCase):
    """An id that no job has."""

    def test_it_is_an_error_of_its_own(self) -> None:
        for move in ("extend", "report", "complete", "fail", "reject", "release", "cancel", "retry"):
            with self.subTest(move=move), self.assertRaises(KeyError) as caught:
                MOVES[move](self.store, "", NOW)
            self.assertIsInstance(caught.exception, UnknownJobError)
            self.assertEqual(str(caught.exception), "there is no job 'j'")
        self.assertIsNone(self.store.get("j"))

    def test_text_that_no_file_can_hold_is_an_invalid_argument(self) -> None:
        for move in (
            lambda: self.store.get("\ud800"),
            lambda: self.store.complete("\ud800", "", now_ms=NOW),
            lambda: self.store.list(type="\udcff"),
            lambda: self.store.claim("\ud800", now_ms=NOW, lease_ms=1),
        ):
            with self.assertRaisesRegex(InvalidJob, "holds a lone surrogate"):
                move()


class RulesOfTheFileTest(StoreTestCase):
    """The file itself refuses what no move makes, whoever writes it."""

    def test_a_row_that_breaks_a_rule(self) -> None:
        self.add("a", idempotency_key="k")
        self.add("b", max_attempts=3)
        before = self.contents()
        for change in (
            "idempotency_key = 'k'", "id = 'a'", "attempts = 4", "attempts = -1", "max_attempts = 0", "unmet = -1",
            "ready = 1, unmet = 1", "ready = 2", "timeout_ms = 0", "status = 'unheard of'", "status = 'running'",
            "status = 'completed', ready = 0", "finished_at = 1", "lease_token = 'x'", "lease_owner = 'x'",
            "lease_expires_at = 1", "payload = NULL", "run_at = 'now'",
        ):  # fmt: skip
            with self.subTest(change=change):
                with self.assertRaises(DatabaseError), self.store.transaction():
                    self.store.sqlite.execute(f"UPDATE jobs SET {change} WHERE id = 'b'")
                self.assertEqual(self.contents(), before)


if __name__ == "__main__":
    unittest.main()
