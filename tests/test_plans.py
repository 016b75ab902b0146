"""How SQLite finds what each operation touches, and how many statements and commits an operation takes.

Every statement that an operation runs is explained with its own text and values. What is written here as
expected are the indexes; a scan of a whole table or a sort that is not named is a failure.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable, Iterable
from typing import Any, cast
from unittest import mock

from jobqueue.jobs import new_job
from tests.engine import LEASE_MS, NOW, WORKER, StoreTestCase, add_batch, token, traced

ID, ROWID, EDGES, CHILDREN = "sqlite_autoindex_jobs_1", "rowid", "primary key", "dependencies_reverse"
SORT, SCAN = "a sort", "a scan of "

# Only what these hold is read through, and that is never more than the operation itself is about.
SMALL = re.compile(r"sqlite_sequence|json_each|CONSTANT ROW|\(?subquery-?\d+\)?|SUBQUERY \d+|"
                   r"blocked|above|done|open|earlier|batch|edges")


class Explainer:
    """Stands in for the SQLite connection of an engine and notes how each statement finds its rows."""

    def __init__(self, sqlite: Any) -> None:
        self._sqlite = sqlite
        self.found: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sqlite, name)

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        self.explain(sql, parameters)
        return self._sqlite.execute(sql, parameters)

    def executemany(self, sql: str, rows: Iterable[Any]) -> Any:
        rows = list(rows)
        if rows:
            self.explain(sql, rows[0])
        return self._sqlite.executemany(sql, rows)

    def explain(self, sql: str, parameters: Any) -> None:
        """Note the indexes, scans and sorts of a statement that has a plan."""
        if sql.split(None, 1)[0] in ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH"):
            plan = self._sqlite.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()
            self.found.setdefault(" ".join(sql.split()), set()).update(
                way for *_, line in plan for way in way_of(line))


def way_of(line: str) -> list[str]:
    """Return what a line of a plan says about finding rows, if anything."""
    if match := re.match(r"SEARCH .*USING (?:COVERING )?INDEX (\w+)", line):
        return [match[1]]
    if re.match(r"SEARCH .* USING INTEGER PRIMARY KEY", line):
        return [ROWID]
    if re.match(r"SEARCH .* USING PRIMARY KEY", line):
        return [EDGES]
    if match := re.match(r"SCAN (?:TABLE |temp\.)?(.*?)(?: VIRTUAL TABLE.*)?$", line):
        return [] if SMALL.match(match[1]) else [SCAN + match[1]]
    if "TEMP B-TREE FOR ORDER BY" in line:
        return [SORT]
    if line.startswith("SEARCH"):
        return [line]  # an automatic index, say: nothing that is expected anywhere
    return []


class PlansTest(StoreTestCase):
    """Each operation, and the ways by which all of its statements find their rows."""

    def explain(self, operation: Callable[[], object]) -> set[str]:
        explainer = Explainer(self.store.sqlite)
        self.store._sqlite = cast(Any, explainer)
        try:
            operation()
        finally:
            self.store._sqlite = explainer._sqlite
        self.statements = explainer.found
        return set().union(*explainer.found.values())

    def check(self, operation: Callable[[], object], *ways: str) -> None:
        self.assertEqual(self.explain(operation), set(ways), self.statements)

    def test_adding(self) -> None:
        self.check(lambda: self.add("a", idempotency_key="k"), "jobs_idempotency_key", ID)
        self.check(lambda: self.add(depends_on=["a"]), ID)

    def test_adding_a_batch_touches_the_file_by_indexes_only(self) -> None:
        self.add("old")
        plain = [new_job("t")] * 3
        full = [new_job("t", id="b", depends_on=["c", "old"], idempotency_key="k"), new_job("t", id="c")]
        self.check(lambda: add_batch(self.store, plain), ROWID, "jobs_number_ahead")
        self.explain(lambda: add_batch(self.store, full))
        ways = set().union(*(found for sql, found in self.statements.items() if "main." in sql))
        self.assertEqual(ways, {ROWID, ID, EDGES, "jobs_idempotency_key", "jobs_number_ahead", "batch_ids",
                                "batch_keys"})

    def test_adding_a_batch_without_ids_looks_parents_up_by_index(self) -> None:
        self.add("old")
        self.explain(lambda: add_batch(self.store, [new_job("t", depends_on=["old"])] * 3))
        (ways,) = (ways for sql, ways in self.statements.items() if sql.startswith("UPDATE temp.edges SET parent"))
        self.assertEqual(ways, {"batch_ids", ID})

    def test_promoting_and_claiming(self) -> None:
        self.add_many([{"run_at": NOW + 1}] * 5)
        self.check(lambda: self.store.promote(now_ms=NOW + 1), ROWID, "jobs_scheduled")
        self.check(lambda: self.store.claim(WORKER, now_ms=NOW + 1, lease_ms=1), ROWID, "jobs_ready")
        # Fewer than asked for, so those that are not due are looked for as well.
        self.check(lambda: self.store.claim(WORKER, now_ms=NOW, lease_ms=1, limit=9), ROWID, "jobs_ready")
        # The heads of several queues are sorted: so many as queues times the limit.
        self.check(lambda: self.store.claim(WORKER, now_ms=NOW + 1, lease_ms=1, queues=("a", "b")),
                   ROWID, "jobs_ready", SORT)

    def test_settling(self) -> None:
        self.add()
        job = self.take()
        held = token(job)
        self.check(lambda: self.store.extend("1", held, now_ms=NOW, lease_ms=LEASE_MS), ID, ROWID)
        self.check(lambda: self.store.report("1", held, 0.5, None, now_ms=NOW), ID, ROWID)
        self.check(lambda: self.store.release("1", held, now_ms=NOW), ID, ROWID)
        held = token(self.take())
        self.check(lambda: self.store.fail("1", held, "x", now_ms=NOW, delay_ms=0), ID, ROWID)
        self.take()
        self.check(lambda: self.store.recover_expired(now_ms=NOW + LEASE_MS), "jobs_leases", ROWID)
        held = token(self.take(now=NOW + LEASE_MS))
        self.check(lambda: self.store.complete("1", held, now_ms=NOW), ID, ROWID, CHILDREN)

    def test_steering(self) -> None:
        self.add("a")
        self.check(lambda: self.store.cancel("a", now_ms=NOW), ID)
        self.check(lambda: self.store.retry("a", now_ms=NOW), ID)
        self.kill("a")
        self.check(lambda: self.store.retry_failed(now_ms=NOW), "jobs_dead", ROWID)
        self.kill("a")
        self.check(lambda: self.store.retry_failed(now_ms=NOW, type="t"), "jobs_dead", ROWID)

    def test_looking(self) -> None:
        self.add("a")
        self.check(lambda: self.store.get("a"), ID, EDGES, ROWID)
        self.check(lambda: self.store.list(status="failed", limit=5), "jobs_dead", EDGES, ROWID)
        self.check(lambda: self.store.list(status="canceled", queue="q", limit=5), "jobs_dead", EDGES, ROWID)
        self.check(lambda: self.store.list(limit=5, before_seq=9), EDGES, ROWID)
        self.check(lambda: self.store.next_event(["default"]), "jobs_scheduled", "jobs_leases")
        self.check(lambda: self.store.has_ready(["default"]), "jobs_ready")
        self.check(lambda: self.store.blocked(), "jobs_dead", CHILDREN, ROWID, SORT)
        self.check(lambda: self.store.is_blocked("a"), ID, EDGES, ROWID)
        self.check(lambda: self.store.shares("default", now_ms=NOW), "jobs_ready", "jobs_scheduled", "jobs_waiting",
                   "jobs_dead", CHILDREN, ROWID)
        self.check(lambda: self.store.list(status="retrying", limit=5), f"{SCAN}jobs USING INDEX jobs_retrying",
                   EDGES, ROWID)

    def test_counts_of_the_whole_file_read_only_the_partial_indexes(self) -> None:
        ways = self.explain(lambda: self.store.counts())
        self.assertEqual({way.split(" ")[-1] for way in ways}, {
            f"jobs_{name}" for name in ("ready", "scheduled", "waiting", "retrying", "leases", "finished", "dead")})

    def test_shares_of_the_whole_file_read_only_the_partial_indexes(self) -> None:
        ways = self.explain(lambda: self.store.shares(now_ms=NOW))
        self.assertEqual({way for way in ways if way.startswith(SCAN)}, {
            f"{SCAN}jobs USING INDEX {index}" for index in ("jobs_ready", "jobs_scheduled", "jobs_waiting")})

    def test_the_explainer_finds_scans_sorts_and_makeshift_indexes(self) -> None:
        for sql, way in {
            "SELECT 1 FROM jobs WHERE type = 't'": f"{SCAN}jobs",
            "SELECT seq FROM jobs WHERE queue = 'q' AND ready = 1 ORDER BY type": SORT,
            "SELECT 1 FROM jobs AS a JOIN jobs AS b ON a.type = b.type": "AUTOMATIC",
            "SELECT 1 FROM jobs WHERE status IN ('retrying', 'pending') AND ready = 0 AND unmet = 0": f"{SCAN}jobs",
        }.items():
            explainer = Explainer(self.store.sqlite)
            explainer.explain(sql, ())
            (ways,) = explainer.found.values()
            self.assertTrue(any(way in found for found in ways), (sql, ways))


class StatementsTest(StoreTestCase):
    """How many statements and commits an operation takes; one more would be a regression in every turn."""

    def statements(self, operation: Callable[[], object]) -> list[str]:
        """Return the first words of the statements of an operation."""
        with traced(self.store.sqlite) as statements:
            operation()
        return [sql.split()[0] for sql in statements]

    def test_one_transaction_each(self) -> None:
        self.add("a", priority=9)
        self.add("b")
        self.add("child", depends_on=["a"], queue="elsewhere")
        job, other = self.take("a"), self.take("b")
        for name, operation, expected in (
            ("add", lambda: self.add(), "BEGIN SELECT SELECT INSERT COMMIT"),
            ("add keyed", lambda: self.add("x", idempotency_key="k"), "BEGIN SELECT SELECT SELECT INSERT COMMIT"),
            ("add again", lambda: self.add("x", idempotency_key="k"), "BEGIN SELECT COMMIT"),
            ("claim", lambda: self.store.claim(WORKER, now_ms=NOW, lease_ms=1), "BEGIN UPDATE COMMIT"),
            ("promote", lambda: self.store.promote(now_ms=NOW), "BEGIN UPDATE COMMIT"),
            ("recover", lambda: self.store.recover_expired(now_ms=NOW), "BEGIN SELECT COMMIT"),
            ("extend", lambda: self.store.extend("a", token(job), now_ms=NOW, lease_ms=9),
             "BEGIN SELECT UPDATE COMMIT"),
            ("complete a parent", lambda: self.store.complete("a", token(job), now_ms=NOW),
             "BEGIN SELECT UPDATE UPDATE COMMIT"),
            ("complete", lambda: self.store.complete("b", token(other), now_ms=NOW), "BEGIN SELECT UPDATE COMMIT"),
            ("has_due", lambda: self.store.has_due(now_ms=NOW), "BEGIN PRAGMA SELECT COMMIT"),
            ("get", lambda: self.store.get("a"), "BEGIN PRAGMA SELECT SELECT COMMIT"),
            ("next_event", lambda: self.store.next_event(["default"]), "BEGIN PRAGMA SELECT SELECT COMMIT"),
            ("has_ready", lambda: self.store.has_ready(["default"]), "BEGIN PRAGMA SELECT COMMIT"),
            ("data_version", lambda: self.store.data_version(), "PRAGMA"),
        ):
            self.assertEqual(" ".join(self.statements(operation)), expected, name)

    def test_settling_many_takes_one_statement_and_two_for_all_their_dependents(self) -> None:
        self.add_many([{"id": f"{n}"} for n in range(20)])
        self.add_many([{"depends_on": [f"{n}", f"{(n + 1) % 20}"]} for n in range(20)])
        outcomes = [(job.seq, token(job), None) for job in self.claim(limit=20)]
        got = self.statements(lambda: self.store.complete_many(outcomes, now_ms=NOW))
        self.assertEqual(got, ["BEGIN", "UPDATE", "SELECT", "UPDATE", "COMMIT"])
        outcomes = [(job.seq, token(job), None) for job in self.claim(limit=20)]
        got = self.statements(lambda: self.store.complete_many(outcomes, now_ms=NOW))
        self.assertEqual(got, ["BEGIN", "UPDATE", "SELECT", "COMMIT"])

    def test_an_idle_turn_writes_nothing(self) -> None:
        self.add(run_at=NOW + 1)
        commits, size = self.store.commits, self.store.wal_bytes()

        def turn() -> None:
            with self.store.transaction():
                self.store.complete_many([], now_ms=NOW)
                self.store.recover_expired(now_ms=NOW)
                self.store.promote(now_ms=NOW)
                self.store.claim(WORKER, now_ms=NOW, lease_ms=1, limit=4)

        # The claim came back with less than it asked for, hence the second UPDATE of it.
        self.assertEqual(self.statements(turn), ["BEGIN", "SELECT", "UPDATE", "UPDATE", "UPDATE", "COMMIT"])
        self.assertEqual((self.store.commits, self.store.wal_bytes()), (commits, size))

    def test_opening_a_queue_takes_no_write_lock(self) -> None:
        seen: list[str] = []
        connect = type(self.store)._connect

        def connect_traced(store: Any, mode: str) -> Any:
            opened = connect(store, mode)
            opened.set_trace_callback(seen.append)
            return opened

        with mock.patch.object(type(self.store), "_connect", connect_traced):
            self.open().close()
        self.assertGreater(len(seen), 5)
        self.assertEqual([sql for sql in seen if not sql.startswith(("PRAGMA", "SELECT", "-- PRAGMA"))], [])
        self.assertNotIn("PRAGMA journal_mode = WAL", seen)


if __name__ == "__main__":
    unittest.main()
