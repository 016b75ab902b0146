"""`show`: everything about a job, and trees of dependencies."""

from __future__ import annotations

import io
import sys
import unittest
from unittest import mock

from jobqueue import views
from jobqueue.history import MAX_ATTEMPTS_TOLD, blocked_among, history, tree
from tests.look_case import LookTestCase

TIME = "2023-11-14T22:13:20.000Z"


class ShowTest(LookTestCase):
    def test_everything_about_a_job(self) -> None:
        self.queue.enqueue("fetch", {"url": "x", "n": [1]}, id="a")
        self.queue.enqueue("t", id="b", delay="1h")
        self.queue.enqueue("mail", {"to": "ü"}, id="job", depends_on=["a"], priority=5, timeout=90, max_attempts=2,
                           idempotency_key="key", trace="00-1")
        self.queue.enqueue("t", id="child", depends_on=["job", "b"])
        self.clock.advance(60_000)
        self.end("a")
        self.end("job", "ValueError: boom\n  File \"tasks.py\", line 3, in send", 1_500, final=False)
        self.clock.advance(2_000)
        self.end("job", "again", 250, final=True)
        self.clock.advance(240_000)
        self.assertEqual(self.lines("show", "job"), [
            "job job  mail  failed",
            "  queue       default",
            "  priority    5",
            "  attempts    2 of 2",
            f"  created     {TIME}, 5 min ago",
            "  started     2023-11-14T22:14:23.500Z, 4 min ago",
            "  finished    2023-11-14T22:14:23.750Z, 4 min ago, took 250 ms",
            "  timeout     1 min",
            "  key         key",
            "  trace       00-1",
            "  depends on  a completed",
            "  needed by   child pending",
            "payload:",
            "  {",
            '    "to": "ü"',
            "  }",
            "failed attempts:",
            "  1  2023-11-14T22:14:21.500Z, 4 min ago, took 1.5 s, on w1: error",
            "      ValueError: boom",
            '        File "tasks.py", line 3, in send',
            "  2  2023-11-14T22:14:23.750Z, 4 min ago, took 250 ms, on w1: error",
            "      again",
        ])
        self.assertIn("result:", self.lines("show", "a"))
        self.assertEqual(self.lines("show", "child")[0], "job child  t  pending, blocked")
        self.assertIn("  not before  2023-11-14T23:13:20.000Z, in 54 min", self.lines("show", "b"))

    def test_a_running_job(self) -> None:
        self.queue.enqueue("t")
        job = self.take("1")
        assert job.lease_token is not None
        with self.queue._store.transaction():
            self.queue._store.report("1", job.lease_token, 0.5, "half\x1b[31m", now_ms=self.clock())
        lines = self.lines("show", "1")
        self.assertIn("  worker       w1", lines)
        self.assertIn("  lease until  2023-11-14T22:13:50.000Z, in 30 s", lines)
        self.assertIn(r"  progress     50% half\x1b[31m", lines)

    def test_json_has_the_names_of_list_and_more(self) -> None:
        self.queue.enqueue("t", id="a")
        self.queue.enqueue("t", id="b", depends_on=["a"])
        self.end("a", "no", 500)
        a, b = self.objects("show", "a", "b")
        listed = self.objects("list")[1]
        self.assertEqual({name: a[name] for name in listed}, listed)
        self.assertEqual(a["failures"], [{
            "attempt": 1, "worker": "w1", "started_at": TIME, "ended_at": "2023-11-14T22:13:20.500Z",
            "seconds": 0.5, "reason": "error", "error": "no"}])
        self.assertEqual((a["dependents"], a["dependents_in_all"]),
                         ([{"id": "b", "type": "t", "status": "pending"}], 1))
        self.assertEqual((b["dependencies"], b["blocked"]), ([{"id": "a", "type": "t", "status": "failed"}], True))
        self.assertEqual((a["dependencies"], a["blocked"], b["failures"]), ([], False, []))

    def test_an_unknown_id_is_named_and_the_others_are_served(self) -> None:
        self.queue.enqueue("t")
        for command in (("show",), ("explain",), ("show", "--tree")):
            with self.subTest(command=command):
                done = self.look(*command, "x\x1b", "1", "y", "1")
                self.assertEqual(done.code, 1)
                self.assertEqual(done.err, "jobqueue: there is no job 'x\\x1b'\njobqueue: there is no job 'y'\n")
                self.assertEqual([line for line in done.out.splitlines() if "1  t  pending" in line],
                                 [done.out.splitlines()[0]])
                self.refused(2, "arguments are required: ID", *command, "--database", self.db)
        self.refused(2, "--reverse goes with --tree", "show", "1", "--reverse", "--database", self.db)

    def test_hostile_text_stays_on_its_line(self) -> None:
        nasty = "\x1b[2J\u202e\u2028\x9b"
        self.queue.enqueue("t\u202e", {nasty: nasty}, id="i\u200b", queue="q\u2060", idempotency_key="k\ufeff")
        (job,) = self.queue.claim("w\u202e", queues=["q\u2060"])
        assert job.lease_token is not None
        self.queue.fail(job.id, job.lease_token, nasty + "\n" + nasty)
        for args in (("show", job.id), ("show", "--tree", job.id), ("explain", job.id), ("stats",),
                     ("stats", "--json"), ("show", "--json", job.id), ("explain", "--json", job.id)):
            with self.subTest(args=args):
                lines = self.ok(*args).split("\n")
                self.assertTrue(all(line.isprintable() for line in lines), lines)

    def test_a_payload_that_python_cannot_read_is_shown_as_it_is(self) -> None:
        self.queue.enqueue("t")
        for text in ("1e999", "[" * 5_000 + "]" * 5_000, '"\\ud800"', '{"a":'):
            with self.subTest(text=text[:10]):
                with self.queue._store.transaction():
                    self.queue._store.sqlite.execute("UPDATE jobs SET payload = ?", (text,))
                self.assertIn("  " + text, self.lines("show", "1"))

    def test_long_stories_are_cut(self) -> None:
        self.queue.enqueue("t", id="a")
        with self.queue._store.transaction():
            self.queue._store.sqlite.executemany(
                "INSERT INTO failures(job, attempt, owner, started_at, ended_at, reason, error) "
                "VALUES (1, ?, NULL, NULL, ?, 'error', 'x')", [(n, n) for n in range(MAX_ATTEMPTS_TOLD + 7)])
        self.queue.enqueue_many([{"type": "t", "depends_on": ["a"]} for _ in range(30)])
        lines = self.lines("show", "a")
        self.assertIn("  987 earlier ones; --json shows more", lines)
        self.assertEqual(sum(line == "      x" for line in lines), 20)
        self.assertEqual(lines[-2].split()[0], str(MAX_ATTEMPTS_TOLD + 6))
        (needed,) = (line for line in lines if line.startswith("  needed by"))
        self.assertTrue(needed.endswith("20 pending, 21 pending and 10 more"), needed)
        (told,) = self.objects("show", "a")
        self.assertEqual(len(told["failures"]), MAX_ATTEMPTS_TOLD)
        self.assertEqual(told["failures_in_all"], MAX_ATTEMPTS_TOLD + 7)
        self.assertEqual(told["failures"][-1]["attempt"], MAX_ATTEMPTS_TOLD + 6)


class TreeTest(LookTestCase):
    def setUp(self) -> None:
        super().setUp()
        for id, parents in (("a", ""), ("b", ""), ("c", "a"), ("d", "ab"), ("e", "cd"), ("f", "e"), ("g", "ed")):
            self.queue.enqueue("t", id=id, depends_on=list(parents))
        self.end("a", "no")

    def test_what_a_job_depends_on_each_branch_once(self) -> None:
        self.assertEqual(self.lines("show", "--tree", "g"), [
            "g  t  pending",
            "├── d  t  pending",
            "│   ├── a  t  failed",
            "│   └── b  t  pending",
            "└── e  t  pending",
            "    ├── c  t  pending",
            "    │   └── a  t  failed",
            "    └── d  t  pending  (see above)",
        ])

    def test_what_depends_on_it(self) -> None:
        self.assertEqual(self.lines("show", "--tree", "--reverse", "d"), [
            "d  t  pending", "├── e  t  pending", "│   ├── f  t  pending", "│   └── g  t  pending",
            "└── g  t  pending"])

    def test_json_has_each_job_once(self) -> None:
        told = {job["id"]: job for job in self.objects("show", "--tree", "e")}
        self.assertEqual({id: job["branches"] for id, job in told.items()},
                         {"e": ["c", "d"], "c": ["a"], "d": ["a", "b"], "a": [], "b": []})
        self.assertEqual(told["a"], {"id": "a", "type": "t", "status": "failed", "branches": []})

    def test_it_is_cut_at_a_number_of_edges_and_in_a_narrow_terminal(self) -> None:
        self.queue.enqueue_many([{"type": "日" * 60, "id": f"n{n}", "depends_on": [f"n{n - 1}" if n else "a"]}
                                 for n in range(1_200)])
        lines = self.lines("show", "--tree", "n1199")
        self.assertEqual((len(lines), lines[-1]), (1_002, "... and more"))
        found = tree(self.queue._store, "n2")
        assert found is not None
        wide = list(views.tree_view(found, width=40))
        self.assertEqual(wide[0], "n2  " + "日" * 14 + "…pending")
        self.assertEqual(list(views.tree_view(found, ascii_only=True))[1][:6], "`-- n1")

    def test_ascii_where_the_terminal_has_no_lines(self) -> None:
        class Latin(io.StringIO):
            encoding = "latin-1"

        from jobqueue.render import can_draw
        self.assertTrue(can_draw(sys.stdout))
        with mock.patch("jobqueue.render.can_draw", return_value=False):
            self.assertIn("|-- c  t  pending", self.lines("show", "--tree", "e"))
        self.assertFalse(can_draw(Latin()))


class BlockedTest(LookTestCase):
    def test_it_agrees_with_the_engine_job_by_job(self) -> None:
        import random
        rng = random.Random(6)
        store = self.queue._store
        for n in range(60):
            parents = rng.sample(range(n), min(n, rng.choice((0, 0, 1, 2, 3))))
            self.queue.enqueue("t", id=str(n), depends_on=[str(parent) for parent in parents])
        for id in ("0", "7", "20"):
            self.queue.cancel(id)
        while (jobs := self.queue.claim("w", limit=5)) and rng.random() < 0.8:
            for job in jobs:
                assert job.lease_token is not None
                self.queue.complete(job.id, job.lease_token)
        blocked = {job.seq for job in self.queue.list() if store.is_blocked(job.id)}
        self.assertGreater(len(blocked), 5)
        self.assertEqual(blocked_among(store, self.queue.list()), blocked)
        for job in self.queue.list():
            found = history(store, job.id)
            assert found is not None
            self.assertEqual(found.blocked, job.seq in blocked)
            _, causes = self.queue.explain(job.id)
            self.assertEqual("blocked" in [cause.kind for cause in causes], job.seq in blocked, job)


if __name__ == "__main__":
    unittest.main()
