"""The view `enqueue`: jobs queued by SQL alone, in Python's `sqlite3` as it comes and in the `sqlite3` shell.

Whatever it takes must be what `Queue.enqueue` would have stored; whatever it refuses changes nothing.  What it
cannot see must fail the job and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import subprocess
import time
import unittest
from contextlib import closing
from typing import Any

from jobqueue import producers
from jobqueue.aio import WorkQueue
from jobqueue.db import Store
from jobqueue.errors import InvalidJob
from jobqueue.jobs import FIELDS, Job, new_job
from jobqueue.queue import Queue
from jobqueue.scheduler import JobScheduler
from tests.engine import counted
from tests.support import TOP, WorkerTestCase, file_bytes, run, until
from tests.test_cli import CliTestCase

HOUR_MS = 3_600_000
NOT_UTF8 = (b"\x80", b"\xa0", b"\xc3", b"\xc3\xa9\xa9", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xed\xa0\x80",
            b"\xc0\x80", b"\xf0\x9f\x98", b"\xe2\x82", b"\xf5\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xff",
            b"\xe6\xc3\xa9\x97\xa5")
BROKEN = {
    '"\\ud800"': "lone surrogate", "1e999": "too large a number", "[-1e999]": "too large a number",
    "[" * 65 + "]" * 65: "nested more than 64 deep", "[" * 1_500 + "]" * 1_500: "nested more than 64 deep",
    "9" * 4_301: "payload is not JSON", '{"a":["\\uDFFF"]}': "lone surrogate",
}
"""JSON that SQLite takes for good, and what breaks in it."""


class SqlCase(CliTestCase):
    """A test with a queue and a foreign program's connection to it."""

    def setUp(self) -> None:
        super().setUp()
        self.create()
        self.sql = self.foreign()

    def foreign(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.db, isolation_level=None, timeout=10)
        self.addCleanup(connection.close)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def insert(self, connection: sqlite3.Connection | None = None, **fields: object) -> None:
        fields = {"type": "t", **fields}
        marks = ", ".join(f":{name}" for name in fields)
        (connection or self.sql).execute(f"INSERT INTO enqueue({', '.join(fields)}) VALUES ({marks})", fields)

    def job(self, id: str) -> Job:
        with closing(Store(self.db)) as store:
            job = store.get(id)
        assert job is not None, id
        return job

    def rows(self, table: str = "jobs") -> list[Any]:
        return self.sql.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()

    def reject(self, phrase: str, **fields: object) -> None:
        """Expect that a row is refused with a message, and that nothing has changed."""
        before = [self.rows(table) for table in ("jobs", "dependencies", "sqlite_sequence")]
        with self.assertRaises(sqlite3.Error) as caught:
            self.insert(**fields)
        self.assertIn(phrase, str(caught.exception))
        self.assertEqual([self.rows(table) for table in ("jobs", "dependencies", "sqlite_sequence")], before)


class StoredTest(SqlCase):
    """What gets in."""

    def test_a_row_is_what_enqueue_would_have_stored(self) -> None:
        parents = [{"type": "p", "id": "a"}, {"type": "p", "id": "b"}]
        by_sql = {"payload": ' { "k" : [1, 2.5, "ü\\n"] } ', "queue": "other", "id": "x", "priority": -5,
                  "run_at": "2030-01-31T08:00:00.250+02:00", "max_attempts": 7, "timeout_seconds": 1.5,
                  "idempotency_key": "k", "depends_on": '["a", "b", "a"]', "trace": "00-1"}
        own = {"payload": {"k": [1, 2.5, "ü\n"]}, "queue": "other", "id": "x", "priority": -5,
               "run_at": "2030-01-31T08:00:00.250+02:00", "max_attempts": 7, "timeout": 1.5, "idempotency_key": "k",
               "depends_on": ["a", "b", "a"], "trace": "00-1"}
        for given, wanted in (({}, {}), (by_sql, own)):
            found = []
            for path in ("sql.db", "own.db"):
                with Queue(self.dir / path, create=True) as queue:
                    if not given:
                        queue.enqueue_many(parents)
                    if path == "sql.db":
                        with closing(sqlite3.connect(self.dir / path, isolation_level=None)) as connection:
                            self.insert(connection, **given)
                    else:
                        queue.enqueue("t", **wanted)  # type: ignore[arg-type]
                    (job,) = queue.list(limit=1)
                    fields = {name: getattr(job, name) for name in Job.__slots__}
                    self.assertLess(abs(fields.pop("created_at") - time.time() * 1_000), 60_000)
                    if not given:
                        self.assertEqual(job.run_at, job.created_at)
                        fields.pop("run_at")
                    fields["payload_json"] = json.loads(fields["payload_json"])
                    found.append(fields)
            self.assertEqual(found[0], found[1])

    def test_every_argument_of_enqueue_is_a_column(self) -> None:
        renamed = {"delay_seconds": "delay", "timeout_seconds": "timeout"}
        self.assertEqual({renamed.get(name, name) for name in producers.COLUMNS}, FIELDS)

    def test_payloads_are_kept_to_the_letter_and_compact(self) -> None:
        for n, (given, stored) in enumerate({
            "null": "null", " 1 ": "1", '"a b"': '"a b"', "1.50": "1.50", "[]": "[]", "{ }": "{}",
            " [1 ,\n2] ": "[1,2]",
            '{"a": {"b": [true, false, null]}}': '{"a":{"b":[true,false,null]}}', '"\\u00e9\\ud83d\\ude00"': None,
            '"日本語😀\u200b"': '"日本語😀\u200b"', '"]],[["': '"]],[["', "123456789012345678901234567890": None,
        }.items(), 1):
            self.insert(payload=given)
            job = self.job(str(n))
            self.assertEqual(job.payload_json, given if stored is None else stored)
            self.assertEqual(job.payload, json.loads(given))

    def test_times(self) -> None:
        for n, (given, ms) in enumerate({
            "1970-01-01T00:00:00Z": 0, "2030-01-31T08:00:00Z": 1896076800000,
            "2030-01-31t08:00:00.123z": 1896076800123,
            "2030-01-31 08:00+00:00": 1896076800000, "2024-02-29T23:59:59.999-11:30": 1709292599999,
            1896076800123: 1896076800123, 0: 0,
        }.items(), 1):
            self.insert(run_at=given)
            job = self.job(str(n))
            self.assertEqual((job.run_at, job.ready), (ms, int(ms <= job.created_at)), given)
        self.insert(delay_seconds=3600.25)
        job = self.job(str(n + 1))
        self.assertEqual((job.run_at - job.created_at, job.ready), (HOUR_MS + 250, 0))

    def test_numbers_skip_what_is_some_callers_id(self) -> None:
        for id in ("1", "3", "4", "9 lives"):
            self.insert(id=id)
        self.sql.execute("INSERT INTO enqueue(type) VALUES ('t'), ('t'), ('t'), ('t'), ('t')")
        self.insert(id="12")
        self.sql.execute("INSERT INTO enqueue(type) SELECT 't' FROM jobs LIMIT 3")
        with closing(Store(self.db)) as store:
            store.add(new_job("t"), now_ms=1)
            ids = {job.seq: job.id for job in store.list()}
        self.assertEqual(ids, {1: "1", 2: "3", 3: "4", 4: "9 lives", 5: "5", 6: "6", 7: "7", 8: "8", 9: "9",
                               10: "12", 11: "11", 13: "13", 14: "14", 15: "15"})

    def test_a_statement_with_many_rows_costs_as_much_for_each(self) -> None:
        def steps(count: int) -> int:
            rows = json.dumps([0] * count)
            with counted(self.sql) as found:
                self.sql.execute("INSERT INTO enqueue(type) SELECT 't' FROM json_each(?)", (rows,))
            return found[0]

        few = steps(50)
        self.assertLess(steps(500), 11 * few)

    def test_dependencies_count_what_has_not_completed(self) -> None:
        with Queue(self.db) as queue:
            for id in ("done", "dead"):
                queue.enqueue("t", id=id)
                (job,) = queue.claim("w")
                queue.complete(id, job.lease_token or "") if id == "done" else queue.cancel(id)
            self.insert(id="only-done", depends_on='["done"]')
            self.insert(id="both", depends_on='["done", "dead", "only-done"]')
            self.insert(id="none", depends_on="[]")
            self.assertEqual([(self.job(id).unmet, self.job(id).ready) for id in ("only-done", "both", "none")],
                             [(0, 1), (2, 0), (0, 1)])
            self.assertEqual(set(self.job("both").depends_on or ()), {"done", "dead", "only-done"})
            self.assertEqual(queue.stats()["blocked"], 1)

    def test_a_known_key_stores_nothing_and_is_no_error(self) -> None:
        self.insert(idempotency_key="k")
        self.insert(idempotency_key="k", type="other", id="1", depends_on='["nobody"]')
        self.sql.execute("INSERT INTO enqueue(type, idempotency_key) VALUES ('a', 'k'), ('b', 'l'), ('c', 'l')")
        self.assertEqual([(job.type, job.idempotency_key) for job in (self.job("1"), self.job("2"))],
                         [("t", "k"), ("b", "l")])
        self.assertEqual(len(self.rows()), 2)

    def test_a_transaction_with_a_bad_row_stores_what_its_program_decides(self) -> None:
        with self.assertRaisesRegex(sqlite3.Error, "type must be"):
            self.sql.execute("INSERT INTO enqueue(type) VALUES ('a'), (''), ('c')")
        self.assertEqual(self.rows(), [])

    def test_it_works_where_the_schema_is_not_trusted_and_in_defensive_mode(self) -> None:
        self.sql.execute("PRAGMA trusted_schema = OFF")
        if hasattr(self.sql, "setconfig"):
            self.sql.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
        self.insert(payload='{"a": 1}', run_at="2030-01-31T08:00:00Z", idempotency_key="ü")
        self.insert(depends_on='["1"]')
        self.assertEqual(self.job("2").depends_on, ("1",))
        self.reject("payload must be JSON text", payload="1, 2")

    def test_the_example_of_the_readme(self) -> None:
        (text,) = re.findall(r"```sql\n(.*?)```", (TOP / "README.md").read_text("utf-8"), re.DOTALL)
        self.sql.executescript(text)
        self.assertEqual([job.id for job in (self.job("1"), self.job("r-17"), self.job("3"))], ["1", "r-17", "3"])

    def test_the_view_reads_as_empty(self) -> None:
        self.insert()
        self.assertEqual(self.rows("enqueue"), [])
        for statement in ("DELETE FROM enqueue", "UPDATE enqueue SET type = 't'"):
            with self.assertRaises(sqlite3.Error):
                self.sql.execute(statement)


class RefusedTest(SqlCase):
    """What does not."""

    def test_names(self) -> None:
        self.insert(id="taken")
        for name in ("type", "queue", "id", "idempotency_key", "trace"):
            for value in ("", "x" * 256, 5, 1.5, b"x"):
                self.reject(f"{name} must be text of 1 to 255 characters", **{name: value})
            for value in ("a\nb", "\x00", "a\x00b", "\x7f", "\x80", "\x9f", "\x1f"):
                with self.subTest(name=name, value=value):
                    self.reject("", **{name: value})
            self.insert(**{name: f"ü{name}日😀"[:255]})
            self.insert(**{name: f"{name}" + "ü" * (255 - len(name))})
        self.reject("type must be text", type=None)
        self.reject("there is a job with this id already", id="taken")

    def test_bytes_that_are_not_utf8(self) -> None:
        for raw in NOT_UTF8:
            for column in ("payload", "type", "queue", "id", "idempotency_key", "trace"):
                value = b'"' + raw + b'"' if column == "payload" else b"a" + raw + b"z"
                columns, values = ("type", "CAST(? AS TEXT)") if column == "type" else (
                    f"type, {column}", "'t', CAST(? AS TEXT)")
                with self.subTest(raw=raw, column=column), self.assertRaisesRegex(sqlite3.Error, "UTF-8|control"):
                    self.sql.execute(f"INSERT INTO enqueue({columns}) VALUES ({values})", (value,))
        self.assertEqual(self.rows(), [])

    def test_payloads(self) -> None:
        for value in (5, 1.5, b"1", "", "1,2", "1 2", "  "):
            self.reject("payload must be JSON text" if value != "1 2" else "JSON", payload=value)
        for value in ("{", "nul", "[1,]", "1],[2", "]", "{\"a\":1}}", "\x00", '"\n"'):
            self.reject("JSON", payload=value)
        self.reject("payload takes more than 1,048,576 bytes as JSON", payload='"' + "x" * (2**20 - 1) + '"')
        self.reject("payload takes more than 1,048,576 bytes as JSON", payload='"' + "ü" * 2**19 + '"')
        self.insert(payload='"' + "x" * (2**20 - 2) + '"')

    def test_numbers(self) -> None:
        for phrase, fields in (
            ("priority must be a whole number", {"priority": 1.5}), ("priority must be", {"priority": "1"}),
            ("max_attempts must be a whole number, at least 1", {"max_attempts": 0}),
            ("max_attempts must be", {"max_attempts": 1.0}),
            ("delay_seconds must be a number of seconds, at least 0", {"delay_seconds": -0.5}),
            ("delay_seconds must be", {"delay_seconds": "5"}), ("delay_seconds must be", {"delay_seconds": 1e300}),
            ("delay_seconds must be", {"delay_seconds": float("inf")}),
            ("timeout_seconds must be a number of seconds, at least 0.001", {"timeout_seconds": 0}),
            ("timeout_seconds must be", {"timeout_seconds": "5m"}),
            ("give run_at or delay_seconds, not both", {"run_at": 0, "delay_seconds": 0}),
        ):
            with self.subTest(**fields):
                self.reject(phrase, **fields)

    def test_times(self) -> None:
        for value in ("now", "", "2030-01-31", "2030-01-31T08:00:00", "08:00:00Z", "2462532.5",
                      "2030-02-30T00:00:00Z", "2029-02-29T00:00:00Z", "2030-01-31T24:00:00Z",
                      "2030-13-01T00:00:00Z", "2030-01-31T08:60:00Z", "1969-12-31T23:59:59Z",
                      "2030-01-31T08:00:00+02", "2030-01-31T08:00:00Zz", "x2030-01-31T08:00:00Z",
                      "2030-01-31T08:00:00 UTC", -1, 253_402_300_800_000, 1.5, b"x"):
            with self.subTest(value=value):
                self.reject("run_at must be a time with an offset", run_at=value)

    def test_dependencies(self) -> None:
        for value in (5, "", "x", "{}", '{"a":"b"}', '"a"', "null", "[", '["a"],["b"]'):
            self.reject("JSON", depends_on=value)
        for value in ("[1]", "[null]", '[["a"]]'):
            self.reject("depends_on must be a JSON array of ids in quotes", depends_on=value)
        self.reject("depends_on names a job that does not exist", depends_on='["nobody"]')
        self.reject("depends_on names the job itself", depends_on='["me"]', id="me")
        self.reject("at most 10,000 others", depends_on=json.dumps([str(n) for n in range(10_001)]))

    def test_whatever_it_refuses_python_refuses_too(self) -> None:
        """So that neither door is narrower than the other by more than is said in `producers`."""
        for fields in ({"type": ""}, {"id": "a\x7f"}, {"priority": 1.5}, {"max_attempts": 0}, {"delay": -1},
                       {"run_at": "2030-02-30T00:00:00Z"}, {"depends_on": [1]}, {"queue": "x" * 256}):
            with self.assertRaises(InvalidJob):
                new_job(**{"type": "t", **fields})  # type: ignore[arg-type]


class ShellTest(SqlCase):
    """The program `sqlite3`, as it comes."""

    def setUp(self) -> None:
        super().setUp()
        if shutil.which("sqlite3") is None:
            self.skipTest("there is no sqlite3 here")

    def shell(self, statement: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sqlite3", self.db, statement], capture_output=True, text=True, timeout=30)

    def test_a_job(self) -> None:
        done = self.shell("""INSERT INTO enqueue(type, payload) VALUES('print', '{"message":"hi"}')""")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        self.assertEqual(self.job("1").payload, {"message": "hi"})

    def test_a_bad_one(self) -> None:
        before = file_bytes(self.db)["jobs.db"]
        done = self.shell("INSERT INTO enqueue(type, priority) VALUES('print', 'high')")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("priority must be a whole number", done.stderr)
        self.assertEqual((self.rows(), file_bytes(self.db)["jobs.db"]), ([], before))


class UnseenTest(SqlCase):
    """What breaks a rule that SQL cannot check: the job fails, nothing else does."""

    def setUp(self) -> None:
        super().setUp()
        for payload in BROKEN:
            self.insert(payload=payload, max_attempts=5)

    def test_what_is_read_says_so(self) -> None:
        for job, (payload, why) in zip(reversed(self.stored_jobs()), BROKEN.items(), strict=True):
            with self.assertRaisesRegex(InvalidJob, why):
                _ = job.payload
            self.assertEqual((job.payload_json, job.as_dict()["payload"]), (payload, payload))
            self.assertRegex(job.payload_fault() or "", why)

    def stored_jobs(self) -> list[Job]:
        with Queue(self.db) as queue:
            return queue.list()

    def test_listings_are_whole_and_valid(self) -> None:
        def refuse(constant: str) -> None:
            self.fail(f"{constant} is no JSON")

        for args in (("list", "--json"), ("show", "--json", "1", "2", "3"), ("export",)):
            out = self.main(*args, "--database", self.db).out
            for line in out.splitlines():
                json.loads(line, parse_constant=refuse)
            self.assertGreaterEqual(len(out.splitlines()), 3)
        self.assertEqual(len(self.ok("list").splitlines()), 1 + len(BROKEN))
        self.assertEqual(self.main("show", *map(str, range(1, len(BROKEN) + 1)), "--database", self.db).code, 0)

    def test_the_scheduler_and_the_asyncio_queue_go_on_to_the_next(self) -> None:
        for queue in ("scheduler", "aio"):
            for payload in [*BROKEN, '"good"']:
                self.insert(payload=payload, queue=queue)
        now = time.time_ns() // 1_000_000 + 60_000
        with JobScheduler(self.db) as scheduler:
            job = scheduler.claim_job("w", now, 1_000)
            assert job is not None
            self.assertEqual(job["payload"], "good")

        async def lease() -> Any:
            async with WorkQueue(self.db, queue="aio") as queue:
                lease = await queue.lease("w")
                assert lease is not None
                await queue.complete(lease.job_id, lease.lease_token)
                return lease.payload

        with self.assertLogs("jobqueue") as logged:
            self.assertEqual(asyncio.run(lease()), "good")
        self.assertEqual(sum("nested more than 64 deep" in line for line in logged.output), 2)
        counts = self.sql.execute("SELECT queue, status, count(*) FROM jobs WHERE queue <> 'default' "
                                  "GROUP BY 1, 2").fetchall()
        self.assertEqual(counts, [("aio", "completed", 1), ("aio", "failed", len(BROKEN)),
                                  ("scheduler", "failed", len(BROKEN)), ("scheduler", "running", 1)])


class WorkedTest(WorkerTestCase):
    """A real worker."""

    def test_an_idle_worker_wakes_runs_what_is_good_and_fails_what_is_not(self) -> None:
        worker = self.ready(self.worker("--lease-seconds", 30))
        with closing(sqlite3.connect(self.db, isolation_level=None)) as other:
            for n, payload in enumerate([*BROKEN, '"good"', '"日本\\ud83d\\ude00"']):
                other.execute("INSERT INTO enqueue(type, id, payload) VALUES ('echo', ?, ?)", (str(n), payload))
        until(lambda: self.counts() == {"failed": len(BROKEN), "completed": 2}, 15, "them to end")
        self.assertEqual(self.job(str(len(BROKEN) + 1)).result, "日本😀")
        for n, why in enumerate(BROKEN.values()):
            job = self.job(str(n))
            self.assertEqual(job.attempts, 1, "another attempt could not do better")
            self.assertRegex(job.last_error or "", why)
        self.assertIsNone(worker.poll(), worker.stderr_text())
        self.assertEqual(run("retry", "--database", self.db, "0").returncode, 0)
        until(lambda: len(self.failures("0")) == 2, 15, "the second failure")


if __name__ == "__main__":
    unittest.main()
