"""The state machine: statuses, moves between them, what follows a failure, backoff.

    enqueue --> pending --claim--> running --complete--> completed
                   ^                  |----- fail, attempts left ---> retrying --claim--> running
                   |                  '----- fail, none left -------> failed
                   '--- retry (operator) --- failed, canceled

This is the only place that knows a status by its name.  The SQL engine renders its
CHECK and `status IN (...)` lists from here, the in-memory engine calls it.  Pure
functions and tables: no clock, no file, no state.
"""

from __future__ import annotations

PENDING = "pending"
RUNNING = "running"
RETRYING = "retrying"
COMPLETED = "completed"
FAILED = "failed"
CANCELED = "canceled"

STATUSES = (PENDING, RUNNING, RETRYING, COMPLETED, FAILED, CANCELED)
CLAIMABLE = (PENDING, RETRYING)
"""Waiting for a worker: due now, scheduled for later, or held by dependencies."""
FINISHED = (COMPLETED, FAILED, CANCELED)
"""Terminal: left only by an operator's command."""
DEAD = (FAILED, CANCELED)
"""Finished without success: what depends on these is blocked; an operator may retry them."""

MOVES = {
    ("claim", PENDING): RUNNING,
    ("claim", RETRYING): RUNNING,
    ("complete", RUNNING): COMPLETED,
    ("release", RUNNING): PENDING,
    ("cancel", PENDING): CANCELED,
    ("cancel", RETRYING): CANCELED,
    ("cancel", RUNNING): CANCELED,
    ("retry", FAILED): PENDING,
    ("retry", CANCELED): PENDING,
}
"""(move, from) -> to, for the moves whose outcome does not depend on the attempts.

The other two, fail and expire, leave `running` for what `after_failure` says.
"""

DEFAULT_MAX_ATTEMPTS = 3
BACKOFF_BASE_MS = 1_000
BACKOFF_CAP_MS = 60_000

LEASE_EXPIRED = "lease expired"
"""The `reason` of a failure that a lease running out has caused."""
ERROR = "error"
"""The `reason` of a failure reported by the one who held the lease."""


def sources(move: str) -> tuple[str, ...]:
    """Return the statuses that `move` may start from, in the order of `STATUSES`.

    Raises:
        ValueError: there is no such move.
    """
    if move in ("fail", "expire"):
        return (RUNNING,)
    found = tuple(status for status in STATUSES if (move, status) in MOVES)
    if not found:
        raise ValueError(f"there is no move {move!r}")
    return found


def backoff_ms(attempt: int) -> int:
    """Return the wait after attempt number `attempt` (1, 2, ...) failed: 1, 2, 4 ... 60 s, in ms."""
    return int(min(BACKOFF_CAP_MS, BACKOFF_BASE_MS * 2 ** min(attempt - 1, 30)))


def after_failure(
    attempts: int, max_attempts: int, *, delay_ms: int | None = None, final: bool = False
) -> tuple[str, int]:
    """Return (status, wait in ms) after attempt number `attempts` failed.

    Args:
        delay_ms: the handler's own wish for the wait; None: the backoff.
        final: the handler rejected the job, so no attempt is left.
    """
    if final or attempts >= max_attempts:
        return FAILED, 0
    return RETRYING, backoff_ms(attempts) if delay_ms is None else delay_ms


def after_expiry(attempts: int, max_attempts: int) -> tuple[str, int]:
    """Return (status, wait in ms) after the lease of attempt `attempts` ran out: due at once, or failed."""
    return after_failure(attempts, max_attempts, delay_ms=0)
