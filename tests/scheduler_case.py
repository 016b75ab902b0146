"""What the tests of `JobScheduler` share.

Time is a number that the tests pass in, so nothing here waits for it. Costs are counted in instructions of
SQLite's virtual machine, which do not depend on how busy the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jobqueue.scheduler import JobScheduler
from tests.support import TempDirTestCase

T = 1_000
LEASE = 100
_R = TypeVar("_R")


def job(job_id: str, *dependencies: str, **fields: Any) -> dict[str, Any]:
    """Return a job for `add_jobs` that says nothing it need not say."""
    extra = {"dependencies": list(dependencies)} if dependencies else {}
    return {"job_id": job_id, "payload": None, **extra, **fields}


def together(*calls: Callable[[], _R], seconds: float = 60) -> list[_R]:
    """Run the calls in threads that start at the same moment; return their answers, or raise what one raised."""
    barrier = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def work(number: int, call: Callable[[], _R]) -> None:
        try:
            barrier.wait(seconds)
            answers[number] = call()
        except BaseException as error:  # handed on below
            errors.append(error)

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        if thread.is_alive():
            raise AssertionError(f"a thread still runs after {seconds} s")
    if errors:
        raise errors[0]
    return answers


class SchedulerTestCase(TempDirTestCase):
    """A test with a scheduler (`self.scheduler`) on an empty file."""

    def setUp(self) -> None:
        super().setUp()
        self.scheduler = self.open()

    def open(self, **options: Any) -> JobScheduler:
        """Return another scheduler on the same file, open until the end of the test."""
        scheduler = JobScheduler(self.db, **options)
        self.addCleanup(scheduler.close)
        return scheduler

    def claim(self, now_ms: int = T, lease_ms: int = LEASE, worker: str = "w") -> dict[str, Any]:
        """Claim what there must be."""
        claimed = self.scheduler.claim_job(worker, now_ms, lease_ms)
        assert claimed is not None, f"nothing to claim at {now_ms}"
        return claimed

    def look(self, job_id: str) -> dict[str, Any]:
        found = self.scheduler.get_job(job_id)
        assert found is not None, f"no job {job_id}"
        return found

    def stats(self, now_ms: int = T) -> dict[str, int]:
        """Return the counters that are not zero."""
        return {name: count for name, count in self.scheduler.get_stats(now_ms).items() if count}

    def succeed(self, now_ms: int = T) -> str:
        """Claim and complete the next job and return its id."""
        claimed = self.claim(now_ms)
        self.assertTrue(self.scheduler.complete_job(claimed["job_id"], claimed["lease_token"], None, now_ms))
        return str(claimed["job_id"])

    def fail_for_good(self, job_id: str) -> None:
        """Claim the next job, which must be this one with a single attempt, and fail it."""
        claimed = self.claim()
        self.assertEqual(claimed["job_id"], job_id)
        self.assertTrue(self.scheduler.fail_job(job_id, claimed["lease_token"], "broken", T))
        self.assertEqual(self.look(job_id)["status"], "failed")

    def steps(self, call: Callable[[], object], every: int = 20) -> int:
        """Return about how many instructions SQLite carries out during a call."""
        count = 0

        def tick() -> int:
            nonlocal count
            count += 1
            return 0

        connection = self.scheduler._store.sqlite
        connection.set_progress_handler(tick, every)
        try:
            call()
        finally:
            connection.set_progress_handler(None, 0)
        return count * every
