"""Taking in records that `archive` has written down: all of them, or none.

A `Batch` of jobs that bring a past along.  As there, everything is first put into TEMP tables and checked
without a lock.  Ids stay; a lease cannot travel: a job that was running comes in as one whose lease has just
run out.  Whatever follows from other fields (what a job still waits for, whether it is due) is worked out anew.
"""

from __future__ import annotations

from .archive import ROW, Arrival
from .batch import Batch
from .errors import InvalidJob
from .intake import taken
from .lifecycle import CLAIMABLE, COMPLETED, FINISHED, LEASE_EXPIRED, RUNNING
from .schema import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

CHUNK = 500

_MORE = ", ".join(ROW)
_CREATE = (
    f"CREATE TEMP TABLE more(n INTEGER PRIMARY KEY, {_MORE})",
    "CREATE TEMP TABLE history(n INTEGER, attempt, owner, started_at, ended_at, reason, error)",
    "CREATE TEMP TABLE pieces(n INTEGER, attempt, stream, data)",
)
_DROP = tuple(f"DROP TABLE IF EXISTS temp.{name}" for name in ("more", "history", "pieces"))
_ADD_MORE = f"INSERT INTO temp.more(n, {_MORE}) VALUES ({', '.join('?' * (1 + len(ROW)))})"
_ADD_HISTORY = "INSERT INTO temp.history VALUES (?, ?, ?, ?, ?, ?, ?)"
_ADD_PIECE = "INSERT INTO temp.pieces VALUES (?, ?, ?, ?)"

_INDEX_KEYS = "CREATE INDEX temp.more_keys ON more(own_key) WHERE own_key IS NOT NULL"
_REPEATED_KEY = """SELECT max(n), own_key FROM temp.more WHERE own_key IS NOT NULL
                   GROUP BY own_key HAVING count(*) > 1 ORDER BY max(n) LIMIT 1"""
_FIND_EXISTING = "UPDATE temp.batch SET twin = (SELECT seq FROM main.jobs WHERE jobs.id = batch.id)"
_EXISTING = "SELECT n, id FROM temp.batch WHERE twin IS NOT NULL ORDER BY n LIMIT 1"
_TAKEN_KEY = """SELECT n, own_key, jobs.id FROM temp.more JOIN temp.batch USING (n)
                JOIN main.jobs ON jobs.idempotency_key = own_key
                WHERE own_key IS NOT NULL AND twin IS NULL ORDER BY n LIMIT 1"""
_EXPIRED = "'the lease of ' || coalesce(owner, 'a worker') || ' ran out'"
_INSERT = f"""
INSERT INTO main.jobs(seq, id, queue, type, payload, priority, created_at, run_at, status, ready, unmet, attempts,
                      max_attempts, timeout_ms, idempotency_key, started_at, finished_at, result, last_error,
                      progress, progress_note, trace)
SELECT :base + place, id, queue, type, payload, priority, created_at,
       iif(status = '{RUNNING}' AND then_status IN {quoted(CLAIMABLE)}, :now, starts_at),
       iif(status = '{RUNNING}', then_status, status), 0, 0, attempts, max_attempts, timeout_ms, own_key,
       started_at, iif(status = '{RUNNING}' AND then_status IN {quoted(FINISHED)}, :now, finished_at), result,
       iif(status = '{RUNNING}', {_EXPIRED}, last_error), progress, progress_note, trace
FROM temp.batch JOIN temp.more USING (n) WHERE twin IS NULL ORDER BY n"""
_INSERT_EDGES = """
INSERT OR IGNORE INTO main.dependencies(job, depends_on)
SELECT :base + place, parent FROM temp.edges JOIN temp.batch USING (n) WHERE twin IS NULL"""
_COUNT_UNMET = f"""
UPDATE main.jobs SET unmet = open.n
FROM (SELECT job, sum(parent.status <> '{COMPLETED}') AS n
      FROM temp.batch JOIN main.dependencies ON job = :base + place
      JOIN main.jobs AS parent ON parent.seq = depends_on
      WHERE twin IS NULL GROUP BY job) AS open
WHERE jobs.seq = open.job AND open.n > 0"""
_MARK_READY = f"""
UPDATE main.jobs SET ready = 1
WHERE seq > :base AND unmet = 0 AND run_at <= :now AND status IN {quoted(CLAIMABLE)}"""
_INSERT_FAILURES = """
INSERT INTO main.failures(job, attempt, owner, started_at, ended_at, reason, error)
SELECT :base + place, attempt, owner, started_at, ended_at, reason, error
FROM temp.history JOIN temp.batch USING (n) WHERE twin IS NULL ORDER BY n, history.rowid"""
_INSERT_EXPIRED = f"""
INSERT INTO main.failures(job, attempt, owner, started_at, ended_at, reason, error)
SELECT :base + place, attempts, owner, started_at, :now, '{LEASE_EXPIRED}', {_EXPIRED}
FROM temp.batch JOIN temp.more USING (n) WHERE twin IS NULL AND status = '{RUNNING}' ORDER BY n"""
_INSERT_OUTPUTS = """
INSERT INTO main.outputs(job, attempt, stream, data)
SELECT :base + place, attempt, stream, data
FROM temp.pieces JOIN temp.batch USING (n) WHERE twin IS NULL ORDER BY n, pieces.rowid"""
_COUNTS = "SELECT count(*) FILTER (WHERE twin IS NULL), count(twin) FROM temp.batch"


class Arrivals(Batch):
    """Records on their way into the file: a `Batch` whose jobs bring a past along.

    Fill it with `extend_from`, call `check`, then `bring_in`.
    """

    def __enter__(self) -> Arrivals:
        super().__enter__()
        try:
            with self._engine.snapshot():
                for statement in (*_DROP, *_CREATE):
                    self._query(statement)
        except BaseException:
            super().__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            with self._engine.snapshot():
                for statement in _DROP:
                    self._query(statement)
        finally:
            super().__exit__(*exception)

    def extend_from(self, records: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Take records in, each with its number: a rising int that errors refer to.

        Raises:
            InvalidJob: a record breaks a rule.
        """
        chunk: list[tuple[int, Arrival]] = []
        for n, record in records:
            try:
                chunk.append((n, Arrival(record)))
            except InvalidJob as error:
                error.index = n
                raise
            if len(chunk) >= CHUNK:
                self._take(chunk)
                chunk = []
        self._take(chunk)

    def _take(self, chunk: list[tuple[int, Arrival]]) -> None:
        self.extend((n, arrival.job) for n, arrival in chunk)
        with self._engine.snapshot():
            many = self._engine.sqlite.executemany
            many(_ADD_MORE, [(n, *arrival.row) for n, arrival in chunk])
            many(_ADD_HISTORY, [(n, *row) for n, arrival in chunk for row in arrival.failures])
            many(_ADD_PIECE, [(n, *row) for n, arrival in chunk for row in arrival.outputs])

    def check(self) -> None:
        """Look for faults of the records among themselves, before any lock is taken.

        Raises:
            InvalidJob: one id or key stands for two jobs; `.index` is the number of the later one.
            DependencyCycle: jobs depend on each other in a ring.
        """
        super().check()
        with self._engine.snapshot():
            self._query(_INDEX_KEYS)
            for n, key in self._query(_REPEATED_KEY):
                raise InvalidJob(f"the idempotency key {key!r} is given to two jobs", n)

    def bring_in(self, *, now_ms: int, skip_existing: bool = False) -> tuple[int, int]:
        """Put the checked records into the file in one transaction; return how many, and how many were skipped.

        Raises:
            InvalidJob: an id or key is taken, or a dependency unknown; `.index` is the record's number.
        """
        with self._engine.transaction():
            self._base = self._engine.last_seq()
            self._query(_FIND_EXISTING)
            if not skip_existing:
                for n, job_id in self._query(_EXISTING):
                    raise InvalidJob(f"{taken(job_id).partition(';')[0]}; --skip-existing leaves such jobs out", n)
            for n, key, job_id in self._query(_TAKEN_KEY):
                raise InvalidJob(f"the idempotency key {key!r} belongs to job {job_id!r} already", n)
            if self._has_edges:
                self._find_parents()
            values = {"base": self._base, "now": now_ms}
            self._query(_INSERT, values)
            for statement in ((_INSERT_EDGES, _COUNT_UNMET) if self._has_edges else ()):
                self._query(statement, values)
            for statement in (_MARK_READY, _INSERT_FAILURES, _INSERT_EXPIRED, _INSERT_OUTPUTS):
                self._query(statement, values)
            ((stored, skipped),) = self._query(_COUNTS)
        return int(stored), int(skipped)
