"""Names that are in the file, for whoever completes a command line; a few rows of an index each."""

from __future__ import annotations

from .schema import IS_ANY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .db import Store

MOST = 1_000

# From each queue to the next, and in it from each type to the next: one step into the index each.
_TYPES = f"""
WITH RECURSIVE queues(q) AS (
    SELECT '' UNION ALL
    SELECT (SELECT min(queue) FROM jobs WHERE {IS_ANY} AND queue > q) FROM queues WHERE q IS NOT NULL LIMIT {MOST}),
kinds(q, t) AS (
    SELECT q, '' FROM queues WHERE q <> '' UNION ALL
    SELECT q, (SELECT min(type) FROM jobs WHERE {IS_ANY} AND queue = q AND type > t) FROM kinds
    WHERE t IS NOT NULL LIMIT {2 * MOST})
SELECT DISTINCT t FROM kinds WHERE t <> '' ORDER BY t LIMIT {MOST}"""
_IDS = f"SELECT id FROM jobs ORDER BY seq DESC LIMIT {MOST}"


def types(store: Store) -> list[str]:
    """Return the types of the jobs in the file, at most a thousand."""
    return _names(store, _TYPES)


def ids(store: Store) -> list[str]:
    """Return the ids of the newest thousand jobs."""
    return _names(store, _IDS)


def _names(store: Store, sql: str) -> list[str]:
    with store.snapshot():
        return [name for (name,) in store.sqlite.execute(sql).fetchall()]
