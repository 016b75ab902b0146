"""Putting a batch of jobs of any size into the file: whole, or not at all.

The jobs are first written into a TEMP table, which takes no lock, and checked there among
themselves.  The write lock is held only for the final `INSERT ... SELECT`, so that nobody's
lease runs out while a million lines are being read, and memory does not grow with them.

Within a batch the ids given by callers go first: a job that is called by its number gets
one whose text is free.  Jobs may depend on others of the batch, in any order.
"""

from __future__ import annotations

from threading import get_ident

from .errors import DependencyCycle, InvalidJob, JobQueueError
from .intake import Intake, taken, unknown
from .lifecycle import CLAIMABLE, COMPLETED, PENDING
from .schema import NUMBER_AHEAD, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from .jobs import NewJob

CHUNK = 1_000

# A row of temp.batch: `n` is the caller's number of the job, `place` where it stands behind
# the last number in use, `first` the n of an earlier job of the batch with the same
# idempotency key, `twin` the seq of the job in the file that this one turned out to be.
_CREATE = (
    """CREATE TEMP TABLE batch(
        n INTEGER PRIMARY KEY, place INTEGER, id TEXT, queue TEXT, type TEXT, payload TEXT, priority INTEGER,
        run_at INTEGER, delay_ms INTEGER, max_attempts INTEGER, timeout_ms INTEGER, idempotency_key TEXT,
        trace TEXT, first INTEGER, twin INTEGER)""",
    "CREATE TEMP TABLE edges(n INTEGER, name TEXT, parent INTEGER)",
)
_DROP = ("DROP TABLE IF EXISTS temp.batch", "DROP TABLE IF EXISTS temp.edges")
_ADD = """INSERT INTO temp.batch(n, place, id, queue, type, payload, priority, run_at, delay_ms, max_attempts,
          timeout_ms, idempotency_key, trace) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_ADD_EDGE = "INSERT INTO temp.edges(n, name) VALUES (?, ?)"

_INDEX_IDS = "CREATE INDEX temp.batch_ids ON batch(id) WHERE id IS NOT NULL"
_INDEX_KEYS = "CREATE INDEX temp.batch_keys ON batch(idempotency_key) WHERE idempotency_key IS NOT NULL"
_MARK_REPEATED_KEYS = """
UPDATE temp.batch SET first = earlier.n
FROM (SELECT idempotency_key AS key, min(n) AS n FROM temp.batch WHERE idempotency_key IS NOT NULL
      GROUP BY idempotency_key HAVING count(*) > 1) AS earlier
WHERE idempotency_key = earlier.key AND batch.n > earlier.n"""
_REPEATED_ID = """SELECT max(n), id FROM temp.batch WHERE id IS NOT NULL
                  GROUP BY id HAVING count(DISTINCT coalesce(first, n)) > 1 ORDER BY max(n) LIMIT 1"""
_INNER_EDGES = """
SELECT DISTINCT child.n AS child, coalesce(parent.first, parent.n) AS parent
FROM temp.edges JOIN temp.batch AS child ON child.n = edges.n
JOIN temp.batch AS parent ON parent.id = edges.name"""
_FORWARD_EDGE = f"SELECT 1 FROM ({_INNER_EDGES}) WHERE parent >= child LIMIT 1"

_FIND_TWINS = """
UPDATE temp.batch SET twin = (SELECT seq FROM main.jobs WHERE idempotency_key = batch.idempotency_key)
WHERE idempotency_key IS NOT NULL AND first IS NULL"""
_FOLLOW_FIRSTS = """UPDATE temp.batch SET twin = (SELECT coalesce(f.twin, ? + f.place) FROM temp.batch AS f
                                                  WHERE f.n = batch.first) WHERE first IS NOT NULL"""
_TAKEN_ID = """SELECT n, id FROM temp.batch WHERE id IS NOT NULL AND twin IS NULL AND first IS NULL
               AND EXISTS (SELECT 1 FROM main.jobs WHERE jobs.id = batch.id) ORDER BY n LIMIT 1"""
_TAKEN_NUMBERS = f"""
SELECT CAST(id AS INTEGER) FROM main.jobs WHERE {NUMBER_AHEAD} AND CAST(id AS INTEGER) BETWEEN :low AND :high
AND id = CAST(CAST(id AS INTEGER) AS TEXT)
UNION
SELECT CAST(id AS INTEGER) FROM temp.batch WHERE CAST(id AS INTEGER) BETWEEN :low AND :high
AND id = CAST(CAST(id AS INTEGER) AS TEXT)"""
_INSERT = f"""
INSERT INTO main.jobs(seq, id, queue, type, payload, priority, created_at, run_at, status, ready,
                      max_attempts, timeout_ms, idempotency_key, trace)
SELECT :base + place, coalesce(id, CAST(:base + place AS TEXT)), queue, type, payload, priority, :now,
       coalesce(run_at, :now + delay_ms), '{PENDING}', coalesce(run_at, :now + delay_ms) <= :now,
       max_attempts, timeout_ms, idempotency_key, trace
FROM temp.batch WHERE twin IS NULL ORDER BY n"""
_FIND_PARENTS = """
UPDATE temp.edges SET parent = coalesce(
    (SELECT coalesce(twin, ? + place) FROM temp.batch WHERE batch.id = edges.name),
    (SELECT seq FROM main.jobs WHERE jobs.id = edges.name))"""
_UNKNOWN_PARENT = """SELECT n, name FROM temp.edges JOIN temp.batch USING (n)
                     WHERE parent IS NULL AND twin IS NULL ORDER BY n LIMIT 1"""
_INSERT_EDGES = """
INSERT OR IGNORE INTO main.dependencies(job, depends_on)
SELECT ? + place, parent FROM temp.edges JOIN temp.batch USING (n) WHERE twin IS NULL"""
_COUNT_UNMET = f"""
UPDATE main.jobs SET unmet = open.n, ready = ready AND open.n = 0
FROM (SELECT job, sum(parent.status <> '{COMPLETED}') AS n
      FROM temp.batch JOIN main.dependencies ON job = ? + place
      JOIN main.jobs AS parent ON parent.seq = depends_on
      WHERE twin IS NULL GROUP BY job) AS open
WHERE jobs.seq = open.job AND status IN {quoted(CLAIMABLE)}"""
_IDS = """SELECT n, jobs.id FROM temp.batch JOIN main.jobs ON seq = coalesce(twin, ? + place)
          WHERE n > ? ORDER BY n LIMIT ?"""


class Batch:
    """Jobs on their way into the file; a context manager that forgets them at its end.

    Fill it with `extend`, call `check` and `store` once each, then read `ids`.  An engine
    has room for one batch: a second one, in another thread, waits; in the same thread it is
    a `JobQueueError`.  Other work of other threads goes on in between.
    """

    def __init__(self, engine: Intake) -> None:
        self._engine = engine
        self._size = 0
        self._base = 0
        self._has_ids = self._has_keys = self._has_edges = False

    def __enter__(self) -> Batch:
        engine = self._engine
        _ = engine.sqlite  # refuses a forked child, which would wait for ever
        if not engine.batch_lock.acquire(blocking=False):
            if engine.batch_thread == get_ident():
                raise JobQueueError("this thread is still storing another batch of jobs: finish that one first")
            engine.batch_lock.acquire()
        engine.batch_thread = get_ident()
        try:
            with engine.snapshot():
                for statement in (*_DROP, *_CREATE):
                    self._query(statement)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            with self._engine.snapshot():
                for statement in _DROP:
                    self._query(statement)
        finally:
            self._release()

    def _release(self) -> None:
        self._engine.batch_thread = None
        self._engine.batch_lock.release()

    def _query(self, sql: str, parameters: Any = ()) -> list[Any]:
        return self._engine.sqlite.execute(sql, parameters).fetchall()

    def extend(self, jobs: Iterable[tuple[int, NewJob]]) -> None:
        """Take jobs in, each with its number: a rising int that errors refer to.

        What the iterable raises passes through.
        """
        rows: list[tuple[object, ...]] = []
        edges: list[tuple[int, str]] = []
        for n, job in jobs:
            self._size += 1
            rows.append((n, self._size, job.id, job.queue, job.type, job.payload, job.priority, job.run_at,
                         job.delay_ms, job.max_attempts, job.timeout_ms, job.idempotency_key, job.trace))
            if job.id is not None:
                self._has_ids = True
            if job.idempotency_key is not None:
                self._has_keys = True
            if job.depends_on:
                self._has_edges = True
                edges += [(n, name) for name in job.depends_on]
            if len(rows) >= CHUNK:
                self._write(rows, edges)
                rows, edges = [], []
        self._write(rows, edges)

    def _write(self, rows: list[tuple[object, ...]], edges: list[tuple[int, str]]) -> None:
        with self._engine.snapshot():
            self._engine.sqlite.executemany(_ADD, rows)
            self._engine.sqlite.executemany(_ADD_EDGE, edges)

    def check(self) -> None:
        """Look for faults of the batch in itself, before any lock is taken.

        Raises:
            InvalidJob: one id stands for two jobs; `.index` is the number of the later one.
            DependencyCycle: jobs depend on each other in a ring.
        """
        with self._engine.snapshot():
            if self._has_keys:
                self._query(_INDEX_KEYS)
                self._query(_MARK_REPEATED_KEYS)
            if self._has_ids or self._has_edges:
                self._query(_INDEX_IDS)
            if self._has_ids:
                for n, job_id in self._query(_REPEATED_ID):
                    raise InvalidJob(f"the id {job_id!r} is given to two jobs of the batch", n)
            # A ring needs a job that depends on itself or on a later one: most batches have none.
            if self._has_edges and self._query(_FORWARD_EDGE):
                self._refuse_ring()

    def _refuse_ring(self) -> None:
        from graphlib import CycleError, TopologicalSorter

        sorter: TopologicalSorter[int] = TopologicalSorter()
        for child, parent in self._query(_INNER_EDGES):
            sorter.add(child, parent)
        try:
            sorter.prepare()
        except CycleError as error:
            ring = error.args[1][::-1]  # so that each job depends on the next
            ids = [self._query("SELECT id FROM temp.batch WHERE n = ?", (n,))[0][0] for n in ring]
            shown = " -> ".join(map(repr, ids if len(ids) <= 8 else ids[:7])) + (" -> ..." if len(ids) > 8 else "")
            raise DependencyCycle(f"jobs depend on each other in a ring: {shown}", ids, ring[0]) from None

    def store(self, *, now_ms: int) -> None:
        """Put the checked batch into the file in one transaction.

        Raises:
            InvalidJob: an id is taken, or a dependency unknown; `.index` is the job's number.
        """
        with self._engine.transaction():
            self._base = self._engine.last_seq()
            if self._has_keys:
                self._query(_FIND_TWINS)
            if self._has_ids:
                for n, job_id in self._query(_TAKEN_ID):
                    raise InvalidJob(taken(job_id), n)
            self._skip_taken_numbers()
            if self._has_keys:
                self._query(_FOLLOW_FIRSTS, (self._base,))
            if self._has_edges:
                self._find_parents()
            self._query(_INSERT, {"base": self._base, "now": now_ms})
            if self._has_edges:
                self._query(_INSERT_EDGES, (self._base,))
                self._query(_COUNT_UNMET, (self._base,))

    def _skip_taken_numbers(self) -> None:
        """Move jobs behind the numbers whose text is an id already; hardly ever are there any."""
        spare = 0
        numbers: set[int] = set()
        while True:  # moving up may run into further ones
            bounds = {"low": self._base + 1, "high": self._base + self._size + spare}
            numbers = {number for (number,) in self._query(_TAKEN_NUMBERS, bounds)}
            if len(numbers) <= spare:
                break
            spare = 2 * len(numbers)  # doubled, as a long row of them would otherwise be met one by one
        if not numbers:
            return
        number, moved = self._base, []
        for (n,) in self._query("SELECT n FROM temp.batch ORDER BY n"):
            number += 1
            while number in numbers:
                number += 1
            moved.append((number - self._base, n))
        self._engine.sqlite.executemany("UPDATE temp.batch SET place = ? WHERE n = ?", moved)

    def _find_parents(self) -> None:
        """Look parents up before the jobs are there, so that none is taken for one by its new number."""
        self._query(_FIND_PARENTS, (self._base,))
        for n, name in self._query(_UNKNOWN_PARENT):
            raise InvalidJob(unknown(name), n)

    def ids(self) -> Iterator[str]:
        """Yield the id of each job, in order; of a job that was there already, its id."""
        last = -1
        while True:
            with self._engine.snapshot():
                page = self._query(_IDS, (self._base, last, CHUNK))
            if not page:
                return
            last = page[-1][0]
            yield from (job_id for _, job_id in page)
