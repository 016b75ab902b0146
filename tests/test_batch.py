"""Storing jobs, one or many: ids and numbers, idempotency keys, all or nothing, a short hold of the lock."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Iterator
from typing import Any

from jobqueue.errors import DatabaseError, InvalidJob, JobQueueError
from jobqueue.jobs import NewJob, new_job
from tests.engine import NOW, StoreTestCase, add_batch, ids, traced


class NumbersTest(StoreTestCase):
    """Without an id of its own a job is called by its number, skipping numbers whose text is taken."""

    def test_one_by_one(self) -> None:
        self.assertEqual([self.add(), self.add("x"), self.add(), self.add()], ["1", "x", "3", "4"])

    def test_one_by_one_numbers_are_skipped_whose_text_is_taken(self) -> None:
        self.add("3")
        self.add("4")
        self.assertEqual([self.add(), self.add(), self.add()], ["5", "6", "7"])
        self.add("9")
        self.assertEqual([self.add(), self.add(), self.add()], ["10", "11", "12"])

    def test_in_a_batch_too(self) -> None:
        self.add("3")
        self.add("5")
        self.assertEqual(self.add_many([{}] * 4), ["4", "6", "7", "8"])
        self.assertEqual(self.add(), "9")

    def test_ids_given_in_a_batch_go_first(self) -> None:
        got = self.add_many([{}, {"id": "2"}, {}, {"id": "1"}, {}])
        self.assertEqual((got[1], got[3]), ("2", "1"))
        self.assertEqual(len(set(got)), 5)
        self.assertEqual(ids(self.store.list()), got[::-1], "the order of storing is the order of the batch")
        numbers = [int(id) for id in (got[0], got[2], got[4])]
        self.assertEqual(numbers, sorted(numbers))
        self.assertGreater(numbers[0], 2)

    def test_only_the_very_text_of_a_number_takes_it(self) -> None:
        for id in ("3rd", "4.0", "05", "+6", " 7", "0", "-8", "9" * 30, "9223372036854775807", "\u0661"):
            self.add(id)
        self.assertEqual(self.add_many([{}, {}]), ["11", "12"])
        self.clear()
        self.add("2nd")
        self.assertEqual(self.add_many([{}, {"id": "3rd"}, {}]), ["2", "3rd", "4"])
        self.assertEqual(self.add(), "5")

    def test_a_long_row_of_taken_numbers_is_skipped_in_few_steps(self) -> None:
        self.add_many([{"id": str(n)} for n in range(3_001, 6_001)])
        ((last,),) = self.query("SELECT max(seq) FROM jobs")
        self.assertLess(last, 3_001)
        self.add_many([{}] * (3_000 - last))
        with traced(self.store.sqlite) as statements:
            self.assertEqual(self.add_many([{}]), ["6001"])
        self.assertLess(len(statements), 50)

    def test_numbers_are_never_given_twice_though_jobs_may_go(self) -> None:
        self.add_many([{}] * 3)
        with self.store.transaction():
            self.store.sqlite.execute("DELETE FROM jobs")
        self.assertEqual(self.add(), "4")
        self.assertEqual(self.add_many([{}, {}]), ["5", "6"])

    def test_a_taken_id_is_refused(self) -> None:
        self.add("x")
        self.add()
        before = self.contents()
        for id in ("x", "2"):
            with self.assertRaisesRegex(InvalidJob, f"there is a job '{id}' already; choose another id"):
                self.add(id)
            with self.assertRaisesRegex(InvalidJob, f"there is a job '{id}' already") as caught:
                self.add_many([{}, {}, {"id": id}, {}])
            self.assertEqual(caught.exception.index, 2)
        self.assertEqual(self.contents(), before)

    def test_an_id_twice_in_a_batch_is_refused(self) -> None:
        with self.assertRaisesRegex(InvalidJob, "the id 'x' is given to two jobs of the batch") as caught:
            self.add_many([{"id": "x"}, {}, {"id": "x"}, {}])
        self.assertEqual(caught.exception.index, 2)
        self.assertEqual(self.contents()["jobs"], [])

    def test_ids_differ_by_every_character(self) -> None:
        names = ["e\u0301", "\xe9", "E\u0301", "a", "A", "a ", "1", "01"]
        self.assertEqual(self.add_many([{"id": name} for name in names]), names)
        self.assertEqual(sorted(ids(self.store.list())), sorted(names))


class KeysTest(StoreTestCase):
    """The same idempotency key never makes two jobs."""

    def test_the_second_is_not_stored_and_answers_with_the_first(self) -> None:
        first = self.store.add(new_job("t", 1, id="a", idempotency_key="k"), now_ms=NOW)
        before = self.contents()
        again = self.store.add(new_job("other", 2, id="b", idempotency_key="k", depends_on=["nobody"]), now_ms=NOW)
        self.assertEqual((first, again), (("a", True), ("a", False)))
        self.assertEqual(self.contents(), before)

    def test_it_counts_in_whatever_state_the_first_is(self) -> None:
        self.add("a", idempotency_key="k")
        cancel, retry = (lambda: self.store.cancel("a", now_ms=NOW)), (lambda: self.store.retry("a", now_ms=NOW))
        for move in (self.take, cancel, retry):
            move()
            self.assertEqual(self.add("b", idempotency_key="k", queue="q"), "a")
            self.assertEqual(self.add_many([{"idempotency_key": "k"}]), ["a"])
        self.finish("a")
        self.assertEqual(self.add(idempotency_key="k"), "a")

    def test_within_a_batch_and_with_the_file(self) -> None:
        self.add("old", idempotency_key="k1")
        got = self.add_many([
            {"idempotency_key": "k1"}, {"idempotency_key": "k2", "id": "x"}, {"idempotency_key": "k2", "id": "y"},
            {}, {"idempotency_key": "k3"}, {"idempotency_key": "k3"}, {"idempotency_key": "k2"},
        ])
        self.assertEqual([got[0], got[1], got[2], got[6]], ["old", "x", "x", "x"])
        self.assertEqual(got[4], got[5])
        self.assertEqual(len(set(got)), 4)
        self.assertEqual(self.query("SELECT count(*) FROM jobs"), [(4,)])

    def test_a_job_known_by_its_key_may_name_what_is_gone_or_taken(self) -> None:
        self.add("a", idempotency_key="k")
        before = self.contents()
        fields: dict[str, Any] = {"id": "a", "idempotency_key": "k", "depends_on": ["gone"]}
        self.assertEqual(self.add(**fields), "a")
        self.assertEqual(self.add_many([fields, fields]), ["a", "a"])
        self.assertEqual(self.contents(), before)

    def test_an_edge_to_a_repeated_job_leads_to_the_one_that_is_stored(self) -> None:
        self.add("old", idempotency_key="k1")
        self.add_many([{"id": "alias", "idempotency_key": "k1"}, {"id": "x", "idempotency_key": "k2"},
                       {"id": "y", "idempotency_key": "k2"}, {"id": "child", "depends_on": ["alias", "y"]}])
        self.assertEqual(sorted(self.job("child").depends_on or ()), ["old", "x"])
        self.assertIsNone(self.store.get("y"))

    def test_an_id_cannot_mean_two_jobs_by_way_of_a_key(self) -> None:
        with self.assertRaisesRegex(InvalidJob, "the id 'b' is given to two jobs of the batch") as caught:
            self.add_many([{"id": "a", "idempotency_key": "k"}, {"id": "b", "idempotency_key": "k"}, {"id": "b"}])
        self.assertEqual(caught.exception.index, 2)


class AtomicTest(StoreTestCase):
    """A batch is stored whole or not at all, and the engine goes on."""

    def test_any_error_stores_nothing_and_the_next_batch_works(self) -> None:
        self.add("taken", idempotency_key="known")
        before = self.contents()
        good: list[dict[str, Any]] = [{"id": "a"}, {"idempotency_key": "n"}, {"depends_on": ["a", "taken"]}]
        for bad in ({"id": "taken"}, {"id": "a"}, {"depends_on": ["nobody"]}, {"payload": float("nan")},
                    {"id": ""}, {"id": "x", "depends_on": ["x"]}, {"priority": 2**63}):
            for place in range(4):
                with self.subTest(bad=bad, place=place):
                    with self.assertRaises(InvalidJob):
                        self.add_many([*good[:place], bad, *good[place:]])
                    self.assertEqual(self.contents(), before)
        self.assertEqual(len(self.add_many(good)), 3)

    def test_an_error_within_the_final_transaction_leaves_nothing_behind(self) -> None:
        before = self.contents()
        with self.assertRaisesRegex(InvalidJob, "nobody"), self.store.transaction():
            self.add("in the same transaction")
            self.add_many([{"id": "a"}, {"depends_on": ["nobody"]}])
        self.assertEqual(self.contents(), before)

    def test_a_refused_job_writes_nothing_into_a_transaction_that_goes_on(self) -> None:
        self.add("parent")
        before = self.contents()
        with self.store.transaction():
            for bad in ({"depends_on": ["parent", "nobody"]}, {"id": "parent"}):
                with self.assertRaises(InvalidJob):
                    self.add(**bad)
                with self.assertRaises(InvalidJob):
                    self.add_many([{"depends_on": ["parent"]}, bad])
        self.assertEqual(self.contents(), before)
        self.assertEqual(self.job(self.add()).depends_on, ())

    def test_what_the_caller_raises_passes_through(self) -> None:
        def jobs() -> Iterator[NewJob]:
            for _ in range(2_500):
                yield new_job("t")
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            add_batch(self.store, jobs())
        self.assertEqual(self.contents()["jobs"], [])
        self.assertEqual(self.add_many([{}]), ["1"])

    def test_an_empty_batch_stores_nothing(self) -> None:
        commits = self.store.commits
        self.assertEqual(self.add_many([]), [])
        self.assertEqual(self.contents()["jobs"], [])
        self.assertEqual(self.store.commits, commits)

    def test_a_batch_forgotten_before_it_is_stored_leaves_nothing(self) -> None:
        with self.store.batch() as batch:
            batch.extend(enumerate([new_job("t", id="a")]))
            batch.check()
        self.assertEqual(self.query("SELECT count(*) FROM sqlite_temp_master"), [(0,)])
        self.assertEqual(self.add_many([{"id": "a"}]), ["a"])

    def test_the_file_can_be_closed_within_a_batch(self) -> None:
        with self.assertRaisesRegex(DatabaseError, "is closed"), self.store.batch() as batch:
            self.store.close()
            batch.extend(enumerate([new_job("t")]))

    def test_ids_come_in_order_over_many_pages(self) -> None:
        got = self.add_many([{"id": f"x{n}"} if n % 3 == 0 else {} for n in range(2_501)])
        self.assertEqual(len(got), 2_501)
        self.assertEqual([id for n, id in enumerate(got) if n % 3 == 0], [f"x{n}" for n in range(0, 2_501, 3)])
        self.assertEqual(ids(self.store.list()), got[::-1])

    def test_all_of_a_batch_have_one_time(self) -> None:
        self.add_many([{}, {"delay": 2}, {"run_at": NOW - 5}, {"run_at": NOW + 5}])
        self.assertEqual(self.query("SELECT created_at, run_at, ready FROM jobs ORDER BY seq"), [
            (NOW, NOW, 1), (NOW, NOW + 2_000, 0), (NOW, NOW - 5, 1), (NOW, NOW + 5, 0)])


class ThreadsTest(StoreTestCase):
    """An engine has room for one batch; others wait, other work goes on."""

    def test_other_threads_work_while_a_batch_is_filled(self) -> None:
        other = self.open()
        filling, added = threading.Event(), threading.Event()

        def jobs() -> Iterator[tuple[int, NewJob]]:
            for n in range(5_000):
                if n == 2_500:
                    filling.set()
                    self.assertTrue(added.wait(10))
                yield n, new_job("t")

        def work() -> None:
            self.assertTrue(filling.wait(10))
            for store in (self.store, other):  # the same connection, and another's write lock
                store.add(new_job("t", queue="q"), now_ms=NOW)
            added.set()

        thread = threading.Thread(target=work)
        thread.start()
        with self.store.batch() as batch:
            batch.extend(jobs())
            batch.check()
            batch.store(now_ms=NOW)
            self.assertEqual(list(batch.ids()), [str(n) for n in range(3, 5_003)])
        thread.join(10)
        self.assertFalse(thread.is_alive())

    def test_batches_of_many_threads_are_each_stored_whole(self) -> None:
        results: dict[int, list[str]] = {}

        def work(n: int) -> None:
            jobs = ({"id": f"{n}-{m}", "depends_on": [f"{n}-0"] if m else []} for m in range(50))
            results[n] = self.add_many(jobs)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.assertEqual(results, {n: [f"{n}-{m}" for m in range(50)] for n in range(12)})
        self.assertEqual(self.query("SELECT count(*) FROM jobs"), [(600,)])
        self.assertEqual(self.query("SELECT count(*) FROM dependencies"), [(588,)])
        order = self.query("SELECT id FROM jobs ORDER BY seq")
        for start in range(0, 600, 50):  # no batch between the jobs of another
            self.assertEqual(len({id.split("-")[0] for (id,) in order[start : start + 50]}), 1)

    def test_a_batch_within_a_batch_of_the_same_thread_is_an_error_not_a_hang(self) -> None:
        with self.store.batch() as batch:
            with self.assertRaisesRegex(JobQueueError, "this thread is still storing another batch"):
                self.add_many([{}])
            batch.extend(enumerate([new_job("t", id="a")]))
            batch.check()
            batch.store(now_ms=NOW)
        self.assertEqual(self.add_many([{}]), ["2"])


class LockHoldTest(StoreTestCase):
    """The write lock is held for a handful of statements, however many jobs there are."""

    def statements_under_lock(self, jobs: Iterator[NewJob]) -> list[str]:
        with self.store.batch() as batch:
            batch.extend(enumerate(jobs))
            batch.check()
            with traced(self.store.sqlite) as statements:
                batch.store(now_ms=NOW)
        self.assertEqual(statements.count("BEGIN IMMEDIATE"), 1, "one transaction, so one sync")
        return statements[statements.index("BEGIN IMMEDIATE") : statements.index("COMMIT") + 1]

    def test_100000_jobs_take_no_more_statements_than_3(self) -> None:
        job = new_job("t", {"n": 1})
        few = self.statements_under_lock(job for _ in range(3))
        self.clear()
        many = self.statements_under_lock(job for _ in range(100_000))
        self.assertEqual(len(many), len(few))
        self.assertLessEqual(len(many), 6)
        self.assertEqual(self.query("SELECT count(*), min(seq), max(seq) FROM jobs"), [(100_000, 1, 100_000)])

    def test_ids_keys_and_dependencies_take_no_more_statements_either(self) -> None:
        def jobs(count: int) -> Iterator[NewJob]:
            yield new_job("t", id="root")
            for n in range(count):
                yield new_job("t", id=f"j{n}", idempotency_key=f"k{n // 2}", depends_on=["root"])

        few = self.statements_under_lock(jobs(4))
        self.clear()
        many = self.statements_under_lock(jobs(10_000))
        self.assertEqual(len(many), len(few))
        self.assertLessEqual(len(many), 14)
        self.assertEqual(self.query("SELECT count(*) FROM jobs"), [(5_001,)])

    def test_leases_of_workers_get_the_time_back_that_a_batch_took_from_them(self) -> None:
        self.store.worker_arrives("worker-1", host="h", pid=1, queues=["default"], types=[], now_ms=NOW)
        self.add_many([{"id": id} for id in ("held", "expired", "of nobody", "waiting")])
        self.take("held", lease_ms=101)
        self.take("expired", lease_ms=100)
        self.store.claim("a program", now_ms=NOW, lease_ms=101)
        self.store.prolong_for_workers(now_ms=NOW + 100, by_ms=50)
        self.assertEqual({job.id: job.lease_expires_at for job in self.store.list()}, {
            "held": NOW + 151, "expired": NOW + 100, "of nobody": NOW + 101, "waiting": None})
        self.assertEqual([job.id for job, _ in self.store.recover_expired(now_ms=NOW + 101)],
                         ["expired", "of nobody"])

    def test_nothing_but_the_final_transaction_asks_for_the_lock(self) -> None:
        other = self.open(patience_seconds=0)
        with self.store.batch() as batch:
            with other.transaction():
                batch.extend(enumerate(new_job("t", id=f"{n}") for n in range(2_500)))
                batch.check()
            batch.store(now_ms=NOW)
            with other.transaction():
                self.assertEqual(len(list(batch.ids())), 2_500)


if __name__ == "__main__":
    unittest.main()
