"""The state machine as tables: every move from every status, what follows a failure, every wait."""

from __future__ import annotations

import unittest

from jobqueue import lifecycle

FORBIDDEN = None

# One row a move, one column a status: where it leads when one attempt of three was used.
COLUMNS = ("pending", "running", "retrying", "completed", "failed", "canceled")
MOVES: dict[str, tuple[str | None, ...]] = {
    "claim":    ("running", FORBIDDEN, "running", FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "complete": (FORBIDDEN, "completed", FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "fail":     (FORBIDDEN, "retrying", FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "expire":   (FORBIDDEN, "retrying", FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "release":  (FORBIDDEN, "pending", FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "cancel":   ("canceled", "canceled", "canceled", FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "retry":    (FORBIDDEN, FORBIDDEN, FORBIDDEN, FORBIDDEN, "pending", "pending"),
}  # fmt: skip


def outcome(move: str, status: str, attempts: int = 1, max_attempts: int = 3) -> str | None:
    """Ask the module the way an engine does: may the move start here, and where does it lead?"""
    if status not in lifecycle.sources(move):
        return FORBIDDEN
    if move == "fail":
        return lifecycle.after_failure(attempts, max_attempts)[0]
    if move == "expire":
        return lifecycle.after_expiry(attempts, max_attempts)[0]
    return lifecycle.MOVES[move, status]


class MovesTest(unittest.TestCase):
    """Which move may start where, and where it leads."""

    def test_every_move_from_every_status(self) -> None:
        for move, row in MOVES.items():
            for status, expected in zip(COLUMNS, row, strict=True):
                with self.subTest(move=move, status=status):
                    self.assertEqual(outcome(move, status), expected)

    def test_the_table_allows_nothing_beyond_these_rows(self) -> None:
        allowed = {
            (move, status): to
            for move, row in MOVES.items() if move not in ("fail", "expire")
            for status, to in zip(COLUMNS, row, strict=True) if to is not FORBIDDEN
        }
        self.assertEqual(lifecycle.MOVES, allowed)

    def test_sources_come_in_the_order_of_the_statuses(self) -> None:
        rows = {
            "claim": ("pending", "retrying"),
            "complete": ("running",),
            "fail": ("running",),
            "expire": ("running",),
            "release": ("running",),
            "cancel": ("pending", "running", "retrying"),
            "retry": ("failed", "canceled"),
        }
        for move, expected in rows.items():
            with self.subTest(move=move):
                self.assertEqual(lifecycle.sources(move), expected)

    def test_an_unknown_move_is_an_error(self) -> None:
        for move in ("finish", "", "CLAIM", "pending"):
            with self.subTest(move=move), self.assertRaisesRegex(ValueError, "no move"):
                lifecycle.sources(move)

    def test_no_move_leads_out_of_completed(self) -> None:
        self.assertEqual([move for move in MOVES if "completed" in lifecycle.sources(move)], [])


class GroupsTest(unittest.TestCase):
    """The lists that SQL is rendered from; their order is part of the partial indexes."""

    def test_groups(self) -> None:
        rows = [
            ("STATUSES", ("pending", "running", "retrying", "completed", "failed", "canceled")),
            ("CLAIMABLE", ("pending", "retrying")),
            ("FINISHED", ("completed", "failed", "canceled")),
            ("DEAD", ("failed", "canceled")),
        ]
        for name, expected in rows:
            with self.subTest(name):
                self.assertEqual(getattr(lifecycle, name), expected)

    def test_reasons_and_defaults(self) -> None:
        self.assertEqual(lifecycle.LEASE_EXPIRED, "lease expired")
        self.assertEqual(lifecycle.ERROR, "error")
        self.assertEqual(lifecycle.DEFAULT_MAX_ATTEMPTS, 3)


class BackoffTest(unittest.TestCase):
    """1, 2, 4 ... 60 s."""

    def test_every_boundary(self) -> None:
        rows = [
            (1, 1_000), (2, 2_000), (3, 4_000), (4, 8_000), (5, 16_000), (6, 32_000),
            (7, 60_000), (8, 60_000), (12, 60_000), (40, 60_000), (1_000_000, 60_000),
        ]  # fmt: skip
        for attempt, expected in rows:
            with self.subTest(attempt=attempt):
                wait = lifecycle.backoff_ms(attempt)
                self.assertEqual(wait, expected)
                self.assertIs(type(wait), int)


class AfterFailureTest(unittest.TestCase):
    """What follows an attempt that failed, or whose lease ran out."""

    def test_after_failure(self) -> None:
        rows = [
            # attempts, max_attempts, delay_ms, final -> status, wait
            (1, 3, None, False, "retrying", 1_000),
            (2, 3, None, False, "retrying", 2_000),
            (3, 3, None, False, "failed", 0),
            (4, 3, None, False, "failed", 0),  # an operator lowered max_attempts meanwhile
            (1, 1, None, False, "failed", 0),
            (6, 9, None, False, "retrying", 32_000),
            (7, 9, None, False, "retrying", 60_000),
            (8, 9, None, False, "retrying", 60_000),
            (9, 9, None, False, "failed", 0),
            (12, 2**63 - 1, None, False, "retrying", 60_000),
            (1, 3, 0, False, "retrying", 0),
            (1, 3, 250, False, "retrying", 250),
            (2, 3, 3_600_000, False, "retrying", 3_600_000),
            (3, 3, 250, False, "failed", 0),
            (1, 3, None, True, "failed", 0),
            (1, 3, 250, True, "failed", 0),
        ]
        for attempts, max_attempts, delay_ms, final, status, wait in rows:
            with self.subTest(attempts=attempts, max_attempts=max_attempts, delay_ms=delay_ms, final=final):
                self.assertEqual(
                    lifecycle.after_failure(attempts, max_attempts, delay_ms=delay_ms, final=final),
                    (status, wait),
                )

    def test_after_expiry_there_is_no_wait(self) -> None:
        rows = [
            (1, 3, "retrying"), (2, 3, "retrying"), (3, 3, "failed"), (4, 3, "failed"), (1, 1, "failed"),
            (40, 41, "retrying"),
        ]  # fmt: skip
        for attempts, max_attempts, status in rows:
            with self.subTest(attempts=attempts, max_attempts=max_attempts):
                self.assertEqual(lifecycle.after_expiry(attempts, max_attempts), (status, 0))


if __name__ == "__main__":
    unittest.main()
