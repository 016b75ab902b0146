"""Many at once: commands on one file, children of one worker, jobs that depend on each other, queues.

Nothing is lost, nothing is done twice, nobody waits for somebody slow while another is free.
"""

from __future__ import annotations

import shlex
import unittest
from collections import Counter

from jobqueue import Queue
from tests.support import FakeClock, Process, WorkerTestCase, command, locked, sql, until


class CommandsTest(WorkerTestCase):
    """Several commands at the same time."""

    def test_20_processes_init_enqueue_and_drain_a_new_path_at_once(self) -> None:
        path = self.dir / "new.db"
        processes = []
        for number in range(20):
            payload = f'{{"message":"line {number}"}}'
            steps = (
                command("init", "--database", path),
                command("enqueue", "--database", path, "--type", "print", "--payload", payload),
                command("worker", "--database", path, "--drain", "--workers", 1),
            )
            processes.append(self.spawn(["sh", "-c", " && ".join(map(shlex.join, steps))]))
        ends = [process.finish(60) for process in processes]
        for done in ends:
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
        lines = [line for done in ends for line in done.stdout.splitlines() if line.startswith("line")]
        self.assertEqual(sorted(lines), sorted(f"line {number}" for number in range(20)))
        self.assertEqual({(job.status, job.attempts) for job in self.make_queue(path).list()}, {("completed", 1)})
        self.assertEqual(sum("created" in done.stderr for done in ends), 1)

    def test_2_workers_with_4_children_each_drain_20000_print_jobs_once(self) -> None:
        messages = [f"message {number}" for number in range(20_000)]
        self.queue.enqueue_many([{"type": "print", "payload": {"message": message}} for message in messages])
        workers = [self.worker("--workers", 4, "--drain", "--log-level", "warning") for _ in range(2)]
        ends = [worker.finish(60) for worker in workers]
        self.assertEqual([(done.returncode, done.stderr) for done in ends], [(0, "")] * 2)
        printed = [line for done in ends for line in done.stdout.splitlines()]
        self.assertEqual(sorted(printed), sorted(messages))
        self.assertEqual(sql(self.db, "SELECT DISTINCT status, attempts FROM jobs"), [("completed", 1)])
        # Both took part.
        self.assertTrue(all(done.stdout for done in ends))


class SlowJobTest(WorkerTestCase):
    """A slow job holds back nothing that was handed out behind it."""

    def behind_a_slow_one(self, id: str, type: str, payload: object, behind: list[dict[str, object]]) -> Queue:
        """Return a queue with short jobs, which make a child be handed many, a slow one, and those behind it."""
        queue = self.make_queue(self.dir / f"{id}.db")
        queue.enqueue_many([{"type": "echo"}] * 400)
        queue.enqueue(type, payload, id=id)
        queue.enqueue_many(behind)
        return queue

    def test_while_another_child_is_free(self) -> None:
        steps: list[dict[str, object]] = [{"type": "step"}] * 200
        large: list[dict[str, object]] = [{"type": "size", "payload": "x" * 1_000_000}] * 10
        wait = {"gate": "go"}
        queues = {
            "waits": self.behind_a_slow_one("waits", "step", wait, steps),
            "holds-gil": self.behind_a_slow_one("holds-gil", "hold-gil", None, steps),
            "is-large": self.behind_a_slow_one("is-large", "step", wait | {"pad": "x" * 1_000_000}, steps),
            "before-large": self.behind_a_slow_one("before-large", "step", wait, large),
        }
        workers = {id: self.worker("--workers", 2, db=self.dir / f"{id}.db") for id in queues}
        for id, queue in queues.items():
            with self.subTest(id):
                total = sum(self.counts(queue).values())
                self.until_counts({"running": 1, "completed": total - 1}, "all the others to be done", queue=queue)
                self.assertEqual(self.job(id, queue).status, "running")
        self.open_gate("go")
        for id in ("waits", "is-large", "before-large"):
            self.assertEqual(queues[id].wait(id, 10).attempts, 1)
        starts = Counter(event.job for event in self.trace("start"))
        self.assertEqual({id: starts[id] for id in queues}, dict.fromkeys(queues, 1))
        self.assertIsNone(workers["holds-gil"].poll())

    def test_while_another_worker_is_free(self) -> None:
        queue = self.behind_a_slow_one("slow", "step", {"gate": "go"}, [{"type": "step"}] * 200)
        first = self.worker(db=self.dir / "slow.db")
        self.until_started("slow")
        self.worker(db=self.dir / "slow.db")
        self.until_counts({"running": 1, "completed": 600}, "the second to do the others", queue=queue)
        self.open_gate("go")
        self.assertEqual(queue.wait("slow", 10).attempts, 1)
        self.assertEqual({job.attempts for job in queue.list()}, {1})
        self.assertEqual(max(Counter(event.job for event in self.trace("start")).values()), 1)
        self.assertIsNone(first.poll())

    def test_when_nobody_is_free_the_rest_stays_in_the_file(self) -> None:
        large: list[dict[str, object]] = [{"type": "size", "payload": "x" * 500_000}] * 20
        queue = self.behind_a_slow_one("slow", "step", {"gate": "go"}, large)
        worker = self.worker("--lease-seconds", 0.5, db=self.dir / "slow.db")
        self.until_started("slow")
        query = "SELECT lease_expires_at - started_at FROM jobs WHERE id = 'slow'"
        until(lambda: sql(self.dir / "slow.db", query) > [(1_500,)], 10, "some heartbeats")
        self.assertEqual(self.counts(queue), {"completed": 400, "running": 1, "pending": 20})
        self.open_gate("go")
        self.until_counts({"completed": 421}, "the rest", queue=queue)
        # A worker that claims and gives back all the time would have said so thousands of times.
        self.assertLess(worker.stderr_text().count("given back"), 200)

    def test_jobs_of_one_child_are_shared_with_one_that_becomes_free(self) -> None:
        # 30 ms each: with all of them in one child this would take its time, and one pid.
        self.queue.enqueue_many([{"type": "step", "payload": {"seconds": 0.03}}] * 20)
        self.drain("--workers", 4)
        per_child = Counter(event.pid for event in self.trace("start"))
        self.assertEqual(len(per_child), 4)
        self.assertLessEqual(max(per_child.values()), 8)


class DependencyTest(WorkerTestCase):
    """Jobs that wait for others."""

    def test_a_diamond_whose_parents_settle_in_one_turn_frees_its_child(self) -> None:
        self.queue.enqueue_many([
            {"id": "left", "type": "step", "payload": {"gate": "go"}},
            {"id": "right", "type": "step", "payload": {"gate": "go"}},
            {"id": "bottom", "type": "step", "depends_on": ["left", "right", "left"]},
        ])  # fmt: skip
        worker = self.worker("--workers", 2)
        self.until_started("left", "right")
        with locked(self.db):  # until both outcomes wait for the next turn
            self.open_gate("go")
            until(lambda: "2 outcomes kept" in worker.stderr_text(), 10, "both parents to end")
        bottom = self.queue.wait("bottom", 10)
        self.assertEqual((bottom.status, bottom.attempts), ("completed", 1))
        self.assertEqual(self.job("left").finished_at, self.job("right").finished_at)

    def test_a_wide_fan_in_and_fan_out(self) -> None:
        wide = [f"wide-{n}" for n in range(300)]
        self.queue.enqueue_many([
            {"id": "top", "type": "step"},
            *({"id": id, "type": "step", "depends_on": ["top"]} for id in wide),
            {"id": "bottom", "type": "step", "depends_on": wide},
        ])  # fmt: skip
        self.drain("--workers", 2)
        order = [event.job for event in self.trace("start")]
        self.assertEqual((order[0], order[-1], len(order)), ("top", "bottom", 302))
        self.assertEqual(self.counts(), {"completed": 302})


class QueueTest(WorkerTestCase):
    """Workers serve the queues they name, and no other."""

    def test_a_worker_leaves_other_queues_alone(self) -> None:
        past = FakeClock(1_700_000_000_000)
        with Queue(self.db, clock=past) as queue:
            for name in ("a", "b", "default"):
                queue.enqueue("step", id=f"expired-{name}", queue=name)
                queue.claim("the dead", queues=(name,))
                queue.enqueue("step", id=f"scheduled-{name}", queue=name, delay=60)
        self.drain("--queue", "a")
        self.assertEqual({event.job for event in self.trace("start")}, {"expired-a", "scheduled-a"})
        for name in ("b", "default"):
            expired, scheduled = self.job(f"expired-{name}"), self.job(f"scheduled-{name}")
            self.assertEqual((expired.status, expired.attempts, expired.lease_owner), ("running", 1, "the dead"))
            self.assertEqual((scheduled.status, scheduled.attempts), ("pending", 0))

    def test_several_queues_are_one_line_by_priority_and_age(self) -> None:
        for id, queue, priority in (("1", "a", 0), ("2", "b", 0), ("3", "a", 5), ("4", "b", 9), ("5", "c", 99)):
            self.queue.enqueue("step", id=id, queue=queue, priority=priority)
        self.drain("--queue", "a", "--queue", "b")
        self.assertEqual([event.job for event in self.trace("start")], ["4", "3", "1", "2"])

    def test_workers_of_different_queues_share_a_file(self) -> None:
        names = ("a", "b", "c")
        self.queue.enqueue_many([{"type": "step", "queue": name, "id": f"{name}-{n}"}
                                 for n in range(100) for name in names])  # fmt: skip
        workers: dict[str, Process] = {name: self.worker("--queue", name, "--drain") for name in names}
        for worker in workers.values():
            self.assertEqual(worker.finish().returncode, 0)
        self.assertEqual(self.counts(), {"completed": 300})
        pids: dict[str, set[int]] = {name: set() for name in names}
        for event in self.trace("start"):
            pids[event.job[0]].add(event.pid)
        self.assertEqual([len(found) for found in pids.values()], [1, 1, 1])
        self.assertEqual(len(set.union(*pids.values())), 3)


if __name__ == "__main__":
    unittest.main()
