"""The measure of how far one file goes: the same operations on a very large file and on a small one."""

from __future__ import annotations

from pathlib import Path

from jobqueue import Queue
from tests.bench_base import NO_OP, Bench, Figure, alternate, figure, timed
from tests.bench_files import BULK
from tests.bench_look import LIMIT_MS, mix

SMALL = 1_000


def far(bench: Bench) -> list[Figure]:
    """9: one file with very many jobs, half of them done, beside one with a thousand."""
    with bench.file() as large, bench.file(("waiting", SMALL)) as small:
        seconds = timed(lambda: mix(large, bench.sizes.far))
        return [
            figure("filling it, by SQL", [bench.sizes.far / seconds], "jobs/s"),
            figure("the file", [large.stat().st_size / bench.sizes.far], "bytes a job"),
            *_calls(bench, small, large),
            *_looks(bench, large),
        ]


def _calls(bench: Bench, small: Path, large: Path) -> list[Figure]:
    """Put jobs in and take them out of both files, by turns."""
    sizes = bench.sizes
    with Queue(small) as few, Queue(large) as many:

        def enqueue(queue: Queue) -> None:
            for _ in range(sizes.slice):
                queue.enqueue("sleep", NO_OP)

        def work(queue: Queue) -> None:
            for _ in range(sizes.slice):
                (job,) = queue.claim("bench")
                queue.complete(job.id, job.lease_token or "")

        def bulk(queue: Queue) -> None:
            queue.enqueue_many([{"type": "sleep", "payload": NO_OP}] * BULK)

        figures = []
        for name, action, jobs in (("Queue.enqueue", enqueue, sizes.slice), ("claim, complete", work, sizes.slice),
                                   (f"enqueue_many, {BULK:,} a call", bulk, BULK)):  # fmt: skip
            action(few), action(many)
            pairs = alternate(sizes.runs * sizes.turns, lambda: action(few), lambda: action(many))  # noqa: B023
            figures.append(figure(name, [jobs / more for _, more in pairs], "jobs/s",
                                  [more / less for less, more in pairs],
                                  f"the time beside {SMALL:,}", high=1.3))  # fmt: skip
    return figures


def _looks(bench: Bench, large: Path) -> list[Figure]:
    with Queue(large) as queue:
        looks = (
            ("Queue.get, oldest", lambda: queue.get("1")),
            ("Queue.list(limit=100)", lambda: queue.list(limit=100)),
            ("Queue.list('failed', limit=100)", lambda: queue.list("failed", limit=100)),
            ("Queue.list(type='rare', limit=100)", lambda: queue.list(type="rare", limit=100)),
            ("Queue.stats()", queue.stats),
        )
        return [figure(name, [timed(look) * 1e3 for _ in range(bench.sizes.runs)], "ms", high=LIMIT_MS)
                for name, look in looks]  # fmt: skip
