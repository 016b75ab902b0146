"""The promises of the README: each names tests that fail when it is broken, and those exist and run.

Where no other test would fail, one is here.
"""

from __future__ import annotations

import importlib
import re
import sys
import unittest
from pathlib import Path

from tests.engine import LEASE_MS, NOW, StoreTestCase, ids, token
from tests.support import TOP, WorkerTestCase, until

PROMISES = 15
TEST_ID = re.compile(r"\btests\.test_\w+(?:\.\w+)*")


def promises(readme: str) -> dict[int, str]:
    """Return the numbered items of the section "Guarantees"."""
    section = readme.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)[1:]
    return {int(number): text.partition("\n\n")[0] for number, text in zip(items[::2], items[1::2], strict=True)}


def fault(test_id: str) -> str | None:
    """Return what is wrong with the name of a test; None: it names one that runs on this system."""
    module_name, _, rest = test_id.removeprefix("tests.").partition(".")
    case_name, _, name = rest.partition(".")
    try:
        module = importlib.import_module(f"tests.{module_name}")
    except ModuleNotFoundError:
        return f"there is no module tests.{module_name}"
    case = getattr(module, case_name, None)
    if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
        return f"tests.{module_name} has no class {case_name}"
    method = getattr(case, name, None)
    if not name.startswith("test") or not callable(method):
        return f"{case_name} has no test {name}"
    if sys.platform.startswith("linux"):
        if getattr(case, "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False):
            return f"{test_id} is skipped"
    return None


class ReadmeTest(unittest.TestCase):
    """The list of promises and of their tests."""

    PROMISES = promises((TOP / "README.md").read_text("utf-8"))

    def test_there_are_fifteen(self) -> None:
        self.assertEqual(list(self.PROMISES), list(range(1, PROMISES + 1)))

    def test_each_names_its_tests_and_they_run(self) -> None:
        for number, text in self.PROMISES.items():
            with self.subTest(promise=number):
                found = TEST_ID.findall(text)
                self.assertGreaterEqual(len(found), 1, "it names no test")
                self.assertEqual([wrong for wrong in map(fault, found) if wrong], [])

    def test_a_name_that_leads_nowhere_is_found_out(self) -> None:
        class Skipped(unittest.TestCase):
            @unittest.skip("never")
            def test_nothing(self) -> None: ...

        own = f"{__name__}.ReadmeTest"
        self.assertIsNone(fault(f"{own}.test_there_are_fifteen"))
        for name in ("tests.test_nowhere.A.test_a", "tests.test_promises", "tests.test_promises.Nobody.test_a", own,
                     "tests.test_promises.promises.test_a", f"{own}.test_nothing", f"{own}.PROMISES",
                     f"{own}.setUp"):
            with self.subTest(name):
                self.assertIsNotNone(fault(name))
        setattr(sys.modules[__name__], "Skipped", Skipped)  # noqa: B010
        self.addCleanup(delattr, sys.modules[__name__], "Skipped")
        self.assertEqual(fault(f"{__name__}.Skipped.test_nothing") is None, not sys.platform.startswith("linux"))
        self.assertEqual(promises("# x\n\n## Guarantees\n\n1. a\n   b\n2. c\n\nNot:\n\n- d\n\n## e\n3. f\n"),
                         {1: "a\n   b\n", 2: "c"})


class DependencyTest(StoreTestCase):
    """Promise 9: nothing but a completion lets a dependent start, whenever that was stored."""

    def test_a_job_stored_after_the_fate_of_its_dependency_waits_all_the_same(self) -> None:
        fates = {
            "running": lambda job: None,
            "retrying": lambda job: self.store.fail(job.id, token(job), "x", now_ms=NOW, delay_ms=10**10),
            "failed": lambda job: self.store.fail(job.id, token(job), "x", now_ms=NOW, final=True),
            "canceled": lambda job: self.store.cancel(job.id, now_ms=NOW),
            "completed": lambda job: self.store.complete(job.id, token(job), now_ms=NOW),
        }
        for status, happens in fates.items():
            self.add(status)
            happens(self.take(status, lease_ms=10**10))
            self.assertEqual(self.job(status).status, status)
        for status in fates:
            self.add(f"after {status}", depends_on=["completed", status])
            self.add_many([{"id": f"batch after {status}", "depends_on": [status, "completed"]}])
        later = NOW + 10**9
        self.assertEqual(ids(self.claim(later, limit=99)), ["after completed", "batch after completed"])
        self.store.retry("failed", now_ms=later)
        self.finish("failed", later)
        self.assertEqual(ids(self.claim(later, limit=99)), ["after failed", "batch after failed"])


class ClockTest(StoreTestCase):
    """Promise 12: a clock that jumps may delay or hasten a lease, and no more."""

    JUMPS_MS = (-1_000_000, -LEASE_MS, -1, 0, 1, LEASE_MS - 1, LEASE_MS, 1_000_000)

    def test_whatever_the_clock_does_between_claims_only_the_last_token_counts(self) -> None:
        for first in self.JUMPS_MS:
            for second in self.JUMPS_MS:
                with self.subTest(first=first, second=second):
                    self.clear()
                    self.add("job", max_attempts=9)
                    held = [token(self.take("job"))]
                    now = NOW
                    for jump in (first, second):
                        now += jump
                        self.store.recover_expired(now_ms=now)
                        held += [token(job) for job in self.claim(now)]
                    self.assertEqual(len(set(held)), len(held), "every claim has a token of its own")
                    self.assertEqual((self.job("job").attempts, self.job("job").lease_token), (len(held), held[-1]))
                    before = self.contents()
                    for stale in held[:-1]:
                        for at in (now, NOW - 2_000_000, NOW + 2_000_000):
                            self.assertFalse(self.store.complete("job", stale, '"stale"', now_ms=at))
                            self.assertFalse(self.store.extend("job", stale, now_ms=at, lease_ms=LEASE_MS))
                            self.assertFalse(self.store.release("job", stale, now_ms=at))
                            self.assertIsNone(self.store.fail("job", stale, "stale", now_ms=at))
                    self.assertEqual(self.contents(), before)
                    self.assertTrue(self.store.complete("job", held[-1], '"last"', now_ms=now))
                    before = self.contents()
                    self.store.recover_expired(now_ms=now + 2_000_000)
                    self.assertEqual(self.claim(now + 2_000_000), [])
                    self.assertEqual(self.contents(), before, "what is finished stays so")


@unittest.skipUnless(sys.platform.startswith("linux"), "only Linux tells the memory of another process so easily")
class MemoryTest(WorkerTestCase):
    """Promise 15: what a worker keeps in memory does not grow with the jobs it has run."""

    SMALL, LARGE = 1_000, 6_000
    ALLOWED_KB = 2_500
    """SQLite's cache grows with the file, about 170 bytes a job; a record kept for each job would be 1,000."""

    def test_a_worker_does_not_keep_what_it_has_done(self) -> None:
        self.queue.enqueue_many([{"type": "echo"}] * self.LARGE)
        worker = self.worker("--log-level", "error")
        until(lambda: self.queue.stats()["completed"] >= self.SMALL, 30, "the first jobs")
        small = self.memory_kb(worker.pid)
        until(lambda: self.queue.stats()["completed"] == self.LARGE, 60, "all jobs")
        self.assertLess(self.memory_kb(worker.pid) - small, self.ALLOWED_KB)

    @staticmethod
    def memory_kb(pid: int) -> int:
        """Return how much memory a process has of its own."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    unittest.main()
