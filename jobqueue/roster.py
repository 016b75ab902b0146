"""The workers that people see in lists: a row each, for information only.

Nothing that has to be safe depends on it; a worker that died without a farewell stays in
the table, with the time when it was last seen.
"""

from __future__ import annotations

import json

from .connection import Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FORGET_AFTER_MS = 7 * 86_400_000
"""Rows of workers not seen for so long are dropped when a new worker arrives."""

_ARRIVE = "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class Roster(Connection):
    """The part of the engine that knows the workers; see `Store`."""

    def worker_arrives(self, worker_id: str, *, host: str, pid: int, queues: Sequence[str], types: Sequence[str],
                       allow_exec: bool = False, now_ms: int) -> None:
        """Enter a worker, and drop those not seen for a week."""
        with self.transaction():
            self.sqlite.execute("DELETE FROM workers WHERE seen_at < ?", (now_ms - FORGET_AFTER_MS,))
            self.sqlite.execute(_ARRIVE, (worker_id, host, pid, json.dumps(list(queues)), json.dumps(list(types)),
                                          allow_exec, now_ms, now_ms))

    def worker_seen(self, worker_id: str, *, now_ms: int) -> None:
        """Note that a worker is alive."""
        with self.transaction():
            self.sqlite.execute("UPDATE workers SET seen_at = ? WHERE id = ?", (now_ms, worker_id))

    def worker_leaves(self, worker_id: str) -> None:
        """Strike a worker off."""
        with self.transaction():
            self.sqlite.execute("DELETE FROM workers WHERE id = ?", (worker_id,))
