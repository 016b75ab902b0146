"""`export` and `import`: a round trip in every state, and that whatever is wrong with one line stores nothing."""

from __future__ import annotations

import json
import unittest
from typing import Any

from jobqueue import Queue
from jobqueue.errors import DependencyCycle, InvalidJob
from jobqueue.lifecycle import STATUSES
from tests.engine import NOW, StoreTestCase, token
from tests.support import FakeClock, run, sql
from tests.test_cli import CliTestCase

RECORD = {"id": "a", "type": "t", "status": "pending", "created_at": "2026-01-01T00:00:00.000Z"}
DONE = {**RECORD, "status": "completed", "attempts": 1, "finished_at": "2026-01-01T00:00:01.000Z"}


class RoundTripTest(StoreTestCase):
    def fill(self) -> None:
        """Put jobs in every state into `self.store`, with all that can be said of a job."""
        payload = {"text": "é\u202e\n", "numbers": [1, 2.5, -0.0, 10**30]}
        self.add("done", payload=payload, priority=-3, timeout=1.001, idempotency_key="key", trace="00-1")
        job = self.take("done")
        self.store.report(job.id, token(job), 0.25, "a \x1b note", now_ms=NOW)
        self.store.fail("done", token(job), "ValueError: no\n  in f", now_ms=NOW + 1, delay_ms=0)
        job = self.take("done", NOW + 2)
        self.store.complete("done", token(job), {"path": "x"}, now_ms=NOW + 3)
        self.store.sqlite.execute("INSERT INTO outputs VALUES (?, 2, 'stdout', ?)", (job.seq, bytes(range(256))))
        self.add("dead", max_attempts=1)
        self.kill("dead")
        self.add("retrying")
        self.store.fail("retrying", token(self.take("retrying")), "later", now_ms=NOW)
        self.add("17", queue="other", run_at=NOW + 1_000)
        self.add("canceled", depends_on=["dead", "done"])
        self.store.cancel("canceled", now_ms=NOW)
        self.add("waiting", depends_on=["canceled", "dead", "done"])
        self.add("free", depends_on=["done"])
        self.add()

    def export(self, queue: Queue) -> list[dict[str, Any]]:
        return list(queue.export())

    def test_into_a_new_file_and_out_again_all_is_the_same(self) -> None:
        self.fill()
        self.add("running")
        with Queue(self.db) as queue:
            records = self.export(queue)
            self.assertEqual({record["status"] for record in records}, set(STATUSES) - {"running"})
            with Queue(self.dir / "new.db", create=True, clock=FakeClock(NOW)) as new:
                self.assertEqual(new.import_jobs(enumerate(records)), (len(records), 0))
                self.assertEqual(self.export(new), records)
                self.assertEqual(new.stats(), queue.stats() | {"scheduled": 2, "ready": 3})
        internal = "SELECT id, unmet, status, ready FROM jobs ORDER BY seq"
        self.assertEqual(sql(self.dir / "new.db", internal), sql(self.db, internal))
        self.assertEqual(sql(self.dir / "new.db", "PRAGMA integrity_check"), [("ok",)])

    def test_the_imported_jobs_live_on(self) -> None:
        self.fill()
        with Queue(self.db) as queue, Queue(self.dir / "new.db", create=True, clock=FakeClock(NOW + 5_000)) as new:
            new.import_jobs(enumerate(queue.export()))
            self.assertTrue(new.retry("dead") and new.retry("canceled"))
            order = []
            while jobs := new.claim("w"):
                order.append(jobs[0].id)
                new.complete(jobs[0].id, jobs[0].lease_token or "")
            self.assertEqual(order, ["dead", "retrying", "canceled", "waiting", "free", "8"])
            self.assertEqual([new.enqueue("t") for _ in range(9)],
                             [str(n) for n in range(9, 19) if n != 17])

    def test_a_lease_cannot_travel(self) -> None:
        for id, attempts in (("again", 2), ("last", 1)):
            self.add(id, max_attempts=attempts)
            self.take(id)
        with Queue(self.db) as queue, Queue(self.dir / "new.db", create=True, clock=FakeClock(NOW + 7)) as new:
            new.import_jobs(enumerate(queue.export()))
            again, last = self.export(new)
        self.assertEqual((again["status"], again["attempts"], again["finished_at"]), ("retrying", 1, None))
        self.assertEqual((last["status"], last["finished_at"]), ("failed", "2023-11-14T22:13:20.007Z"))
        for record in (again, last):
            self.assertEqual(record["failures"], [{
                "attempt": 1, "owner": "worker-1", "started_at": "2023-11-14T22:13:20.000Z",
                "ended_at": "2023-11-14T22:13:20.007Z", "reason": "lease expired",
                "error": "the lease of worker-1 ran out"}])
        self.assertEqual(sql(self.dir / "new.db", "SELECT ready FROM jobs"), [(1,), (0,)])

    def test_merging_two_files(self) -> None:
        self.fill()
        with Queue(self.db) as queue:
            queue.enqueue("t", id="mine", depends_on=["waiting"])
            records = self.export(queue)
            new = [*records[:2], {**RECORD, "id": "z", "depends_on": ["done", "mine", "dead"]}]
            self.assertEqual(queue.import_jobs(enumerate(new), skip_existing=True), (1, 2))
            self.assertEqual(self.export(queue)[-1]["depends_on"], ["done", "dead", "mine"])
            self.assertEqual(sql(self.db, "SELECT unmet FROM jobs WHERE id = 'z'"), [(2,)])

    def test_the_export_is_of_one_moment_and_may_be_left_early(self) -> None:
        self.add_many([{}] * 450)
        with Queue(self.db) as queue:
            records = queue.export()
            first = next(records)
            queue.cancel("450")
            self.assertEqual([first["status"], *(record["status"] for record in records)], ["pending"] * 450)
            self.assertEqual(len(list(queue.export(status="canceled"))), 1)
            self.assertEqual(len(list(queue.export(type="u"))), 0)
            next(queue.export())
            with self.assertRaises(ValueError):
                next(queue.export(status="odd"))


class RefusedTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.create()

    def refuse(self, phrase: str, *records: object) -> None:
        text = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
        self.refused(2, phrase, "import", "--database", self.db, "-", stdin=text.encode())
        self.assertEqual([sql(self.db, f"SELECT count(*) FROM {table}")
                          for table in ("jobs", "failures", "dependencies", "outputs")], [[(0,)]] * 4)

    def test_what_is_wrong_is_named_with_its_line_and_nothing_is_stored(self) -> None:
        for phrase, change in (
            ("unknown key 'odd'", {"odd": 1}), ("the key 'id' of a record is missing", {"id": None}),
            ("no status 'odd'", {"status": "odd"}), ("no status ['pending']", {"status": ["pending"]}),
            ("attempts is 4, but max_attempts only 3", {"attempts": 4}),
            ("must have an attempt left", {"attempts": 3}), ("attempts must lie between 0", {"attempts": -1}),
            ("has made an attempt", {"status": "running"}),
            ("must have finished_at", {"status": "failed", "attempts": 1}),
            ("must not have finished_at", {"finished_at": "2026-01-01T00:00:00Z"}),
            ("created_at: ", {"created_at": "yesterday"}), ("run_at must be a time as text", {"run_at": 5}),
            ("priority must be a whole number", {"priority": 1.5}), ("priority must lie", {"priority": 2**63}),
            ("type must have 1 to 255", {"type": ""}), ("result", {"result": "\ud800"}),
            ("timeout", {"timeout_seconds": 0}), ("timeout_seconds must be a number", {"timeout_seconds": "5m"}),
            ("progress must be a number", {"progress": True}), ("last_error must be text", {"last_error": 1}),
            ("failures must be a list", {"failures": {}}), ("an entry of failures must be", {"failures": [1]}),
            ("the key 'reason'", {"failures": [{"attempt": 1, "ended_at": "1", "error": ""}]}),
            ("base64", {"outputs": [{"attempt": 1, "stream": "s", "data": "?"}]}),
            ("depends_on names 'nobody'", {"depends_on": ["nobody"]}), ("depends on itself", {"depends_on": ["b"]}),
            ("depends_on must be a list", {"depends_on": "a"}),
        ):  # fmt: skip
            with self.subTest(change=change), Queue(self.db) as queue:
                with self.assertRaises(InvalidJob) as caught:
                    queue.import_jobs([(1, RECORD), (2, {**RECORD, "id": "b", **change})])
                self.assertIn(phrase, str(caught.exception))
                self.assertEqual((caught.exception.index, queue.list()), (2, []))
        for phrase, lines in (
            ("line 2: the line is not JSON", (RECORD, "{")), ("line 3", (RECORD, "", "[]")),
            ("line 2: the id 'a' is given to two jobs", (RECORD, RECORD)),
            ("line 2: the idempotency key 'k' is given to two jobs",
             ({**RECORD, "idempotency_key": "k"}, {**RECORD, "id": "b", "idempotency_key": "k"})),
            ("in a ring: 'a' -> 'b' -> 'a'",
             ({**RECORD, "depends_on": ["b"]}, {**RECORD, "id": "b", "depends_on": ["a"]})),
            ("line 1: payload is not JSON",
             ('{"id":"a","type":"t","status":"pending","created_at":"1","payload":1e999}',)),
        ):  # fmt: skip
            with self.subTest(phrase=phrase):
                self.refuse(phrase, *lines)

    def test_a_taken_id_or_key_is_refused(self) -> None:
        self.ok("enqueue", "--type", "t", "--id", "a", "--idempotency-key", "k")
        line = json.dumps(DONE).encode()
        self.refused(2, "line 1: there is a job 'a' already; --skip-existing", "import", "--database", self.db, "-",
                     stdin=line)
        done = self.main("import", "--database", self.db, "-", "--skip-existing", "--json", stdin=line)
        self.assertEqual((done.code, json.loads(done.out)), (0, {"imported": 0, "skipped": 1}))
        other = json.dumps({**DONE, "id": "b", "idempotency_key": "k"}).encode()
        self.refused(2, "the idempotency key 'k' belongs to job 'a' already", "import", "--database", self.db, "-",
                     "--skip-existing", stdin=other)
        self.assertEqual(len(self.stored()), 1)

    def test_usage(self) -> None:
        self.refused(2, "name the file", "import", "--database", self.db)
        self.refused(1, "cannot read", "import", "--database", self.db, self.dir / "nix")
        self.refused(2, "did you mean 'failed'", "export", "--database", self.db, "--status", "faild")
        self.refused(1, "there is no database", "export", "--database", self.dir / "nix")

    def test_errors_of_the_library_carry_the_number(self) -> None:
        with Queue(self.db) as queue:
            for error, records in (
                (InvalidJob, [(7, {**RECORD, "id": ""})]),
                (DependencyCycle, [(7, {**RECORD, "depends_on": ["b"]}), (8, {**RECORD, "id": "b",
                                                                              "depends_on": ["a"]})]),
            ):
                with self.assertRaises(error) as caught:
                    queue.import_jobs(records)
                self.assertIn(caught.exception.index, (7, 8))


class CommandTest(CliTestCase):
    def test_through_a_pipe_byte_for_byte(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": "t", "id": "ä", "payload": "\u202e"}, {"type": "t", "depends_on": ["ä"]}])
            queue.cancel("ä")
        first = run("export", "--database", self.db)
        self.assertEqual((first.returncode, first.stderr, len(first.stdout.splitlines())), (0, "", 2))
        self.assertNotIn("\u202e", first.stdout)
        new = self.dir / "new.db"
        self.assertEqual(run("init", "--database", new).returncode, 0)
        done = run("import", "--database", new, "-", input=first.stdout)
        self.assertEqual((done.returncode, done.stderr), (0, "jobqueue: imported 2 jobs\n"))
        self.assertEqual(run("export", "--database", new).stdout, first.stdout)
        self.assertEqual(self.main("export", "--database", new, "--type", "u"), (0, "", ""))


if __name__ == "__main__":
    unittest.main()
