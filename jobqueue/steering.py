"""Moves of many jobs at once, as an operator wants them: cancel what waits, retry what failed.

Jobs are found page by page in a snapshot and moved in short transactions, which look at each
job's status again.  So neither a million of them nor a long search among others holds the write
lock for long, and what workers do meanwhile is never undone.
"""

from __future__ import annotations

import time

from .leases import CANCEL, RETRY_FAILED
from .lifecycle import CLAIMABLE, DEAD, FAILED, sources
from .schema import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .db import Store

    Progress = Callable[[int], object]

CHUNK = 200
"""Jobs a transaction, which then takes some tens of milliseconds."""
PAUSE_SECONDS = 0.001
"""Between transactions, so that others get the write lock."""

_PAGE = f"""SELECT seq FROM jobs WHERE seq > :after AND {{which}} AND (:type IS NULL OR type = :type)
            AND (:queue IS NULL OR queue = :queue) ORDER BY seq LIMIT {CHUNK}"""
_WAITING = _PAGE.format(which=f"status IN {quoted(CLAIMABLE)}")
_UNFINISHED = _PAGE.format(which=f"status IN {quoted(sources('cancel'))}")
_FAILED = _PAGE.format(which=f"status = '{FAILED}' AND status IN {quoted(DEAD)} "
                             "AND (:error IS NULL OR instr(last_error, :error))")


def cancel_many(store: Store, clock: Callable[[], int], *, type: str | None = None, queue: str | None = None,
                running: bool = False, dry_run: bool = False, progress: Progress | None = None) -> int:
    """Cancel the jobs that wait for a worker, and with `running` those that run; return how many.

    Args:
        clock: milliseconds since the epoch.
        type, queue: only jobs of these; None: of any.
        dry_run: only count them.
        progress: told after each transaction how many it has been.
    """
    find = _UNFINISHED if running else _WAITING
    return _move(store, clock, find, CANCEL.format(key="seq"), {"type": type, "queue": queue}, dry_run, progress)


def retry_failed(store: Store, clock: Callable[[], int], *, type: str | None = None, error: str | None = None,
                 dry_run: bool = False, progress: Progress | None = None) -> int:
    """Give failed jobs a new budget of attempts; return how many.

    Args:
        error: only those whose last error holds this text; the other arguments as for `cancel_many`.
    """
    values = {"type": type, "queue": None, "error": error}
    return _move(store, clock, _FAILED, RETRY_FAILED, values, dry_run, progress)


def _move(store: Store, clock: Callable[[], int], find: str, update: str, values: dict[str, str | None],
          dry_run: bool, progress: Progress | None) -> int:
    total = after = 0
    while True:
        with store.snapshot():
            seqs = [seq for (seq,) in store.sqlite.execute(find, {**values, "after": after}).fetchall()]
        if not seqs:
            return total
        after = seqs[-1]
        if dry_run:
            total += len(seqs)
            continue
        with store.transaction():
            now = clock()
            total += store.sqlite.executemany(update, [(now, seq) for seq in seqs]).rowcount
        if progress is not None:
            progress(total)
        time.sleep(PAUSE_SECONDS)
