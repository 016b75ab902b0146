"""Lists of jobs beyond the plain one: chosen by time, by dependencies, in other orders.

First the numbers of all that match are read in one statement, eight bytes each, then the jobs
page by page, so that no snapshot stays open and memory stays flat whatever the jobs hold.  What
changes in between shows as it is when its page is read.  Only reads.
"""

from __future__ import annotations

from array import array

from .catalogue import BLOCKED, PAGE, conditions
from .errors import UnknownJobError
from .schema import IS_FINISHED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .db import Store
    from .jobs import Job

ORDERS = {
    "newest": "seq DESC",
    "oldest": "seq",
    "priority": "priority DESC, seq",
    "due": "run_at, seq",
    "finished": "finished_at DESC, queue DESC, seq DESC",  # as `jobs_finished` has them, read backwards
}
"""name -> how the jobs are sorted; `finished` leaves out those that are not."""

_CHILDREN = "seq IN (SELECT job FROM dependencies WHERE depends_on = (SELECT seq FROM jobs WHERE id = ?))"
_SINCE = "max(created_at, coalesce(started_at, 0), coalesce(finished_at, 0)) >= ?"


def select(store: Store, *, status: str | None = None, type: str | None = None, queue: str | None = None,
           since_ms: int | None = None, blocked: bool = False, depends_on: str | None = None, sort: str = "newest",
           limit: int | None = None) -> Iterator[Job]:
    """Yield the jobs that match, in the order of `ORDERS[sort]`; nothing is read before the first is asked for.

    Args:
        since_ms: only jobs queued, started or finished since then; reads every job that matches the rest.
        blocked: only those that wait, at any depth, for one that failed or was canceled.
        depends_on: only those that directly depend on the job with this id.
        limit: at most so many; None: all.

    Raises:
        ValueError: there is no such status or order.
        UnknownJobError: `depends_on` names no job.
    """
    if sort not in ORDERS:
        raise ValueError(f"there is no order {sort!r}; the orders are {', '.join(ORDERS)}")
    used = conditions(status, {"type = ?": type, "queue = ?": queue, _SINCE: since_ms, _CHILDREN: depends_on})
    if blocked:
        used["seq IN (SELECT seq FROM blocked) AND ?"] = 1
    if sort == "finished":
        used[f"{IS_FINISHED} AND ?"] = 1
    if depends_on is not None and store.get(depends_on, parents=False) is None:
        raise UnknownJobError(depends_on)
    where = " AND ".join(used) or "1"
    sql = f"{BLOCKED if blocked else ''} SELECT seq FROM jobs WHERE {where} ORDER BY {ORDERS[sort]} LIMIT ?"
    seqs = _numbers(store, sql, (*used.values(), -1 if limit is None else limit))
    for start in range(0, len(seqs), PAGE):
        yield from store.page(seqs[start:start + PAGE])


def _numbers(store: Store, sql: str, values: tuple[Any, ...]) -> array[int]:
    with store.snapshot():  # read to its end bit by bit: a list of a million rows would take 100 MB
        return array("q", (seq for (seq,) in store.sqlite.execute(sql, values)))
