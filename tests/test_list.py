"""`list`: its filters, orders and columns, and how it tells blocked, waiting and scheduled jobs apart."""

from __future__ import annotations

import unittest
from unittest import mock

from jobqueue.render import COLUMNS, width_of
from jobqueue.selection import ORDERS
from tests.look_case import LookTestCase
from tests.test_plans import Explainer


class FilterTest(LookTestCase):
    def ids(self, *args: object) -> list[str]:
        """Return the ids of a list, which must be the same as JSON and as a table."""
        ids = [job["id"] for job in self.objects("list", *args)]
        done = self.look("list", "--columns", "id", *args)
        self.assertEqual((done.code, done.out.split()[1:]), (0, ids))
        return ids

    def test_since_means_queued_started_or_ended(self) -> None:
        self.queue.enqueue_many([{"type": "t"} for _ in range(4)])
        self.end("1", after_ms=3_600_000 - 1)
        self.clock.advance(1)
        self.take("2")
        self.queue.enqueue("new")
        self.clock.advance(60_000)
        self.assertEqual(self.ids("--since", "10m"), ["5", "2", "1"])
        self.assertEqual(self.ids("--since", "61s", "--status", "completed"), ["1"])
        self.assertEqual(self.ids("--since", "2h", "--type", "t", "--limit", "2"), ["4", "3"])
        self.assertEqual(self.ids("--since", "2023-11-14T23:13:20Z"), ["5", "2"])
        self.assertEqual(self.ids("--since", "2023-11-15T01:13:20+02:00", "--sort", "oldest"), ["2", "5"])
        self.assertEqual(self.look("list", "--since", "59s").err, "jobqueue: no job matches\n")
        for nonsense in ("", "soon", "-5m", "2030-01-01T00:00:00"):
            self.refused(2, "neither how long ago", "list", "--database", self.db, f"--since={nonsense}")

    def test_blocked(self) -> None:
        for id, parents in (("a", ""), ("b", ""), ("c", "a"), ("d", "bc"), ("e", "b")):
            self.queue.enqueue("t", id=id, depends_on=list(parents))
        self.queue.cancel("a")
        self.assertEqual(self.ids("--blocked"), ["d", "c"])
        self.assertEqual(self.ids("--blocked", "--depends-on", "b"), ["d"])
        self.assertEqual(self.look("list", "--blocked", "--type", "x").err, "jobqueue: no job matches\n")
        self.queue.retry("a")
        self.assertEqual(self.look("list", "--blocked").out, "")

    def test_depends_on(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.enqueue("t", id="b", depends_on=["a"])
        self.queue.enqueue("u", id="c", depends_on=["b", "a"])
        self.assertEqual(self.ids("--depends-on", "a"), ["c", "b"])
        self.assertEqual(self.ids("--depends-on", "a", "--type", "u"), ["c"])
        self.assertEqual(self.look("list", "--depends-on", "c").err, "jobqueue: no job matches\n")
        self.refused(1, r"there is no job 'x\x1b'", "list", "--database", self.db, "--depends-on", "x\x1b")

    def test_orders(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.enqueue("t", id="b", priority=5, delay="1h")
        self.queue.enqueue("t", id="c", priority=5, delay="2m")
        self.queue.enqueue("t", id="d", run_at=1_000)
        self.end("a")
        self.clock.advance(1)
        self.end("d", "no")
        for order, ids in (("newest", "dcba"), ("oldest", "abcd"), ("priority", "bcad"), ("due", "dacb"),
                           ("finished", "da")):
            with self.subTest(order=order):
                self.assertEqual(self.ids("--sort", order), list(ids))
                self.assertEqual(self.ids("--sort", order, "--limit", "1"), list(ids[:1]))
                self.assertEqual([job.id for job in self.queue.iterate(sort=order, limit=2)], list(ids[:2]))
        self.assertEqual(self.ids("--sort", "due", "--status", "pending"), ["c", "b"])
        self.refused(2, "there is no order 'prio'", "list", "--database", self.db, "--sort", "prio")
        from jobqueue.commands.see import ORDERS as SHOWN
        self.assertEqual(list(SHOWN), list(ORDERS))
        with self.assertRaisesRegex(ValueError, "there is no order"):
            list(self.queue.iterate(sort="prio"))
        with self.assertRaisesRegex(ValueError, "there is no status"):
            list(self.queue.iterate("x", sort="due"))

    def test_the_limit_counts_in_every_order(self) -> None:
        self.queue.enqueue_many([{"type": "t", "priority": n % 7} for n in range(1_203)])
        for order, words in (("priority", "the most urgent"), ("due", "the first due"), ("newest", "the newest")):
            done = self.look("list", "--sort", order)
            self.assertEqual(done.out.count("\n"), 101)
            self.assertEqual(done.err, f"jobqueue: showing {words} 100; --limit N shows more\n")
        listed = [(-job["priority"], int(job["id"])) for job in self.objects("list", "--sort", "priority")]
        self.assertEqual(listed, sorted(listed))
        self.assertEqual(len(listed), 1_203)

    def test_what_vanishes_between_two_pages_is_left_out(self) -> None:
        self.queue.enqueue_many([{"type": "t"} for _ in range(600)])
        jobs = self.queue.iterate(sort="oldest")
        next(jobs)
        with self.queue._store.transaction():
            self.queue._store.sqlite.execute("DELETE FROM jobs WHERE seq = 550")
        self.assertEqual(len(list(jobs)), 598)

    def test_finished_and_blocked_ones_are_found_by_their_indexes(self) -> None:
        store = self.queue._store
        for options, ways in (
            ({"sort": "finished"}, {"jobs_finished"}),
            ({"blocked": True}, {"jobs_dead", "dependencies_reverse"}),
            ({"depends_on": "1"}, {"sqlite_autoindex_jobs_1", "dependencies_reverse"}),
        ):
            self.queue.enqueue("t")
            explainer = Explainer(store.sqlite)
            store._sqlite = explainer  # type: ignore[assignment]
            try:
                list(self.queue.iterate(limit=5, **options))  # type: ignore[arg-type]
            finally:
                store._sqlite = explainer._sqlite
            found = {way for sql, found in explainer.found.items() if "ORDER BY" in sql for way in found}
            self.assertLessEqual(ways, {way.removeprefix("a scan of jobs USING INDEX ") for way in found}, options)
            self.assertNotIn("a scan of jobs", found, options)


class ColumnsTest(LookTestCase):
    def test_those_named_in_that_order(self) -> None:
        self.queue.enqueue("t", {"a": [1, "ü"]}, id="a", timeout=1.5)
        self.queue.enqueue("t", id="b", depends_on=["a"], idempotency_key="k")
        self.end("a", "ValueError: x\nsecond line")
        self.clock.advance(240_000)
        names = "status, id,payload,timeout_seconds,finished_at,last_error"
        self.assertEqual(self.lines("list", "--columns", names), [
            "STATUS   ID  PAYLOAD        TIMEOUT SECONDS  FINISHED   LAST ERROR",
            "pending  b   null",
            'failed   a   {"a":[1,"ü"]}              1.5  4 min ago  ValueError: x',
        ])
        self.assertEqual(self.lines("list", "--columns", "id,depends_on,idempotency_key,detail"), [
            "ID  DEPENDS ON  IDEMPOTENCY KEY  DETAIL", "b   a           k                blocked, waits for 1 job",
            "a                                ValueError: x"])
        self.assertEqual(self.objects("list", "--columns", "status,id")[0], {"status": "pending", "id": "b"})
        line = self.lines("list", "--json", "--columns", "status,id")[0]
        self.assertEqual(line, '{"status": "pending", "id": "b"}')

    def test_every_field_is_a_column(self) -> None:
        self.queue.enqueue("t", id="a", trace="x")
        self.end("a")
        (job,) = self.objects("list")
        self.assertEqual([*job, "detail"], list(COLUMNS))
        heading, line = self.lines("list", "--columns", ",".join(COLUMNS))
        self.assertEqual(len(heading.split("  ")) > 20, True)
        self.assertIn('{"ok":"a"}', line)

    def test_one_that_is_not_there(self) -> None:
        for columns, phrase in (("id,staus", "no column 'staus'; did you mean 'status'?"), ("", "no column ''"),
                                ("id,", "no column ''"), ("\x1b", r"no column '\x1b'")):
            self.refused(2, phrase, "list", "--database", self.db, "--columns", columns)
        self.refused(2, "no column 'detail'", "list", "--database", self.db, "--columns", "detail", "--json")

    def test_it_fits_eighty_columns_and_wide_characters(self) -> None:
        self.queue.enqueue("日本" * 30, {"x": "語" * 300}, id="i" * 100)
        self.queue.enqueue("t")
        for columns in (None, "id,type,payload", "payload,id,status"):
            with mock.patch("jobqueue.render.terminal_width", return_value=80):
                lines = self.lines("list", *(["--columns", columns] if columns else []))
            self.assertLessEqual(max(map(width_of, lines)), 80)
            self.assertGreater(max(map(width_of, lines)), 76)


class TellingApartTest(LookTestCase):
    def test_pending_for_different_reasons(self) -> None:
        self.queue.enqueue("t", id="dead")
        self.queue.enqueue("t", id="ready")
        self.queue.enqueue("t", id="later", delay="4m")
        self.queue.enqueue("t", id="waiting", depends_on=["ready"])
        self.queue.enqueue("t", id="blocked", depends_on=["dead"])
        self.queue.enqueue("t", id="deep", depends_on=["blocked", "ready"])
        self.queue.cancel("dead")
        details = {line.split("  ")[0]: line.partition("now")[2].strip() for line in self.lines("list")[1:]}
        self.assertEqual(details, {
            "dead": "", "ready": "", "later": "due in 4 min", "waiting": "waits for 1 job",
            "blocked": "blocked, waits for 1 job", "deep": "blocked, waits for 2 jobs"})

    def test_it_costs_nothing_where_nothing_waits(self) -> None:
        self.queue.enqueue_many([{"type": "t"} for _ in range(20)])
        store = self.queue._store
        explainer = Explainer(store.sqlite)
        store._sqlite = explainer  # type: ignore[assignment]
        try:
            self.assertEqual(self.queue.blocked_among(self.queue.list()), set())
        finally:
            store._sqlite = explainer._sqlite
        self.assertFalse(any("RECURSIVE" in sql for sql in explainer.found))


if __name__ == "__main__":
    unittest.main()
