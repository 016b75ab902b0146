"""`explain`: why a job is not running, one cause after the other, and the way out."""

from __future__ import annotations

import shlex
import unittest

from jobqueue import cli, explain
from tests.look_case import LookTestCase

NOBODY = "no worker has ever been seen, or all have ended"


class ExplainTest(LookTestCase):
    def causes(self, id: str) -> list[tuple[str, str, str | None]]:
        """Return (kind, sentence, remedy) of each cause; each remedy must be a command that exists."""
        (told,) = self.objects("explain", "--", id)
        self.assertEqual(told["id"], id)
        for cause in told["causes"]:
            if cause["remedy"] and "--allow-exec" not in cause["remedy"]:
                name, *rest = shlex.split(cause["remedy"])
                if name in cli.COMMANDS:
                    cli.command_parser(name)[0].parse(rest)
        heading, *shown = self.lines("explain", "--", id)
        self.assertEqual(heading, f"job {id}  {told['type']}  {told['status']}")
        self.assertEqual(shown, [f"  {cause['sentence']}" + (f" [{cause['remedy']}]" if cause["remedy"] else "")
                                 for cause in told["causes"]])
        return [(cause["kind"], cause["sentence"], cause["remedy"]) for cause in told["causes"]]

    def test_due_later(self) -> None:
        self.worker()
        self.queue.enqueue("t", delay="4m")
        self.assertEqual(self.causes("1"), [("scheduled", "it is due in 4 min, 2023-11-14T22:17:20.000Z", None)])
        self.clock.advance(240_000)
        self.worker()
        self.assertEqual(self.causes("1"), [("ready", "it is ready, and next in its queue", None)])

    def test_backing_off(self) -> None:
        self.worker()
        self.queue.enqueue("t")
        self.end("1", "first", final=False)
        self.clock.advance(1_000)
        self.end("1", "OSError: no\nsecond line\x1b", final=False)
        self.assertEqual(self.causes("1"), [(
            "backing-off", "it is backing off after attempt 2 of 3, due in 2 s, 2023-11-14T22:13:23.000Z; "
            "the last error: OSError: no", None)])

    def test_waiting_for_others(self) -> None:
        self.worker()
        for id in ("a", "b", "c"):
            self.queue.enqueue("t", id=id)
        self.queue.enqueue("t", id="job", depends_on=["a", "b", "c"])
        self.end("a")
        self.take("b")
        self.assertEqual(self.causes("job"), [
            ("waiting", "it waits for jobs b, c (running, pending)", "explain b")])

    def test_many_are_not_all_named(self) -> None:
        self.worker()
        parents = self.queue.enqueue_many([{"type": "t"} for _ in range(15)])
        self.queue.enqueue("t", id="job", depends_on=parents)
        ((_, sentence, _),) = self.causes("job")
        self.assertEqual(sentence, "it waits for jobs 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 5 more "
                                   f"({', '.join(['pending'] * 10)})")

    def test_blocked_at_any_depth_by_the_shortest_way(self) -> None:
        self.worker()
        for id, parents in (("9", ""), ("x", ""), ("-a", "9"), ("b", ["-a"]), ("job", ["b", "x", "-a"])):
            self.queue.enqueue("t", id=id, depends_on=list(parents))
        self.end("9", "no")
        self.assertEqual(self.causes("job"), [
            ("blocked", "it is blocked by failed job 9, through -a", "retry 9"),
            ("waiting", "it waits for job x (pending)", "explain x"),
        ])
        self.assertEqual(self.causes("b"), [("blocked", "it is blocked by failed job 9, through -a", "retry 9")])
        self.queue.cancel("-a")
        self.assertEqual(self.causes("b"), [("blocked", "it is blocked by canceled job -a", "retry -- -a")])
        self.queue.retry("9")
        self.queue.retry("-a")
        self.assertEqual([kind for kind, *_ in self.causes("job")], ["waiting"])

    def test_at_most_five_dead_jobs_are_named(self) -> None:
        self.worker()
        dead = self.queue.enqueue_many([{"type": "t"} for _ in range(7)])
        for id in dead:
            self.queue.cancel(id)
        self.queue.enqueue("t", id="job", depends_on=dead)
        self.assertEqual([remedy for *_, remedy in self.causes("job")], [f"retry {n}" for n in range(1, 6)])

    def test_ready_behind_others(self) -> None:
        self.worker()
        self.queue.enqueue("t", priority=1)
        self.queue.enqueue("t")
        self.queue.enqueue("t", id="job")
        self.queue.enqueue("t")
        self.queue.enqueue("t", queue="elsewhere", priority=9)
        self.queue.enqueue("t", priority=9, delay="1h")
        self.assertEqual(self.causes("job"), [("ready", "it is ready; 2 jobs are ahead of it", None)])
        self.queue.cancel("2")
        self.assertEqual(self.causes("job"), [("ready", "it is ready; 1 job is ahead of it", None)])
        self.clock.advance(3_600_000)  # due, and nobody has marked it as ready yet
        self.worker()
        self.assertEqual(self.causes("job"), [("ready", "it is ready; 2 jobs are ahead of it", None)])

    def test_so_many_ahead_that_nobody_counts(self) -> None:
        self.worker()
        self.queue.enqueue_many([{"type": "t"} for _ in range(9)])
        before, explain.MAX_AHEAD = explain.MAX_AHEAD, 8
        try:
            self.assertEqual(self.causes("9")[0][1], "it is ready; at least 8 jobs are ahead of it")
            self.assertEqual(self.causes("8")[0][1], "it is ready; 7 jobs are ahead of it")
        finally:
            explain.MAX_AHEAD = before

    def test_no_worker(self) -> None:
        self.queue.enqueue("t", queue="my queue")
        remedy = "worker --queue 'my queue'"
        self.assertEqual(self.causes("1")[0], ("no-worker", NOBODY, remedy))
        self.worker(queues=("my queue",), age_ms=360_000)
        self.worker("older", queues=("my queue",), age_ms=400_000)
        self.assertEqual(self.causes("1")[0], (
            "no-worker", "no worker has been seen for 6 min; the last was on host, pid 7", remedy))
        self.worker(queues=("my queue",), age_ms=150_000)
        self.assertEqual([kind for kind, *_ in self.causes("1")], ["ready"])
        self.worker(queues=("my queue",), age_ms=150_001)
        self.assertEqual([kind for kind, *_ in self.causes("1")], ["no-worker", "ready"])

    def test_nobody_serves_the_queue_or_has_the_handler(self) -> None:
        self.queue.enqueue("y", queue="x")
        self.worker("one", queues=("default", "z"), types=("y",))
        self.assertEqual(self.causes("1")[0], (
            "queue-not-served", "no live worker serves queue x; served: default, z", "worker --queue x"))
        self.worker("two", queues=("x",), types=("t", "print"))
        self.worker("three", queues=("x",), types=("y",), age_ms=200_000)
        self.assertEqual(self.causes("1")[0], (
            "no-handler", "no live worker that serves queue x has a handler for type y; an attempt would fail",
            "worker --queue x --handlers MODULE"))
        self.worker("three", queues=("x",), types=("y",))
        self.assertEqual([kind for kind, *_ in self.causes("1")], ["ready"])

    def test_exec_has_to_be_allowed(self) -> None:
        self.queue.enqueue("exec", {"argv": ["true"]})
        self.worker()
        self.assertEqual(self.causes("1")[0], (
            "exec-not-allowed", "no live worker that serves queue default runs jobs of type exec",
            "worker --queue default --allow-exec"))
        self.worker("two", allow_exec=True)
        self.assertEqual([kind for kind, *_ in self.causes("1")], ["ready"])

    def test_running_and_a_lease_that_ran_out(self) -> None:
        self.worker()
        self.queue.enqueue("t")
        self.queue.enqueue("t")
        self.take("1", "host-7-abc")
        self.take("2", "me\u202e")
        self.clock.advance(10_000)
        where, since = "host, pid 7", "since 2023-11-14T22:13:20.000Z (10 s ago)"
        until = "lease until 2023-11-14T22:13:50.000Z (in 20 s)"
        self.assertEqual(self.causes("1"), [("running", f"it is running on {where} {since}, {until}", "cancel 1")])
        self.assertEqual(self.causes("2")[0][1], f"it is running on 'me\\u202e' {since}, {until}")
        self.clock.advance(60_000)
        since = "since 2023-11-14T22:13:20.000Z (1 min ago)"
        ran_out = ("lease-expired", f"it was started on {where} {since}; its lease ran out 40 s ago and nobody has "
                   "reclaimed it", None)
        self.assertEqual(self.causes("1"), [ran_out])
        self.clock.advance(600_000)
        self.assertEqual([kind for kind, *_ in self.causes("1")], ["lease-expired", "no-worker"])

    def test_what_has_ended(self) -> None:
        self.queue.enqueue_many([{"type": "t"} for _ in range(3)])
        self.end("1")
        self.end("2", "boom\nmore")
        self.queue.cancel("3")
        when = "2023-11-14T22:13:20.000Z (5 min ago)"
        self.clock.advance(300_000)
        self.assertEqual([self.causes(id) for id in "123"], [
            [("completed", f"it has completed, {when}", "show 1")],
            [("failed", f"it failed for good, after 1 attempt, {when}: boom", "retry 2")],
            [("canceled", f"it was canceled, {when}", "retry 3")],
        ])

    def test_the_worst_comes_first(self) -> None:
        self.queue.enqueue("t", id="dead")
        self.queue.enqueue("t", id="alive")
        self.queue.enqueue("t", id="job", depends_on=["dead", "alive"], delay="1h")
        self.queue.cancel("dead")
        kinds = [kind for kind, *_ in self.causes("job")]
        self.assertEqual(kinds, ["blocked", "no-worker", "waiting", "scheduled"])

    def test_it_names_the_kinds_that_its_help_names(self) -> None:
        told = " ".join(self.main("explain", "--help").out.split())
        for kind in ("blocked", "no-worker", "queue-not-served", "no-handler", "exec-not-allowed", "waiting",
                     "scheduled", "backing-off", "ready", "running", "lease-expired", "completed", "failed",
                     "canceled"):
            self.assertIn(kind, told)


if __name__ == "__main__":
    unittest.main()
