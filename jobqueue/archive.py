"""All jobs as records that can be written down and taken in again (by `arrivals`).

A record is what `Job.as_dict` says, with three more keys, so that nothing of a job is lost but its lease:

    progress_note   text, or null
    failures        a list, oldest first, of {attempt, owner, started_at, ended_at, reason, error}
    outputs         a list of {attempt, stream, data}, the data in base64

Times are RFC 3339 with milliseconds, in UTC; a time outside the years 1970 to 9999 is the plain number of
milliseconds, as text.  Records come in the order in which the jobs were made, and get their places in that
order when they are taken in, so equal jobs start in the same order as before.

`Arrival` checks a record by the rules of `jobs` and `lifecycle`; nothing here writes.
"""

from __future__ import annotations

from .db import Store
from .errors import InvalidJob
from .jobs import (
    MAX_INTEGER,
    MAX_JSON_BYTES,
    Job,
    NewJob,
    check_integer,
    check_name,
    encode_json,
    new_job,
)
from .lifecycle import CLAIMABLE, FINISHED, RUNNING, STATUSES, after_expiry
from .times import format_time, parse_time_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    Record = dict[str, Any]

PAGE = 200

_PARENTS = """SELECT job, parent.id FROM dependencies JOIN jobs AS parent ON parent.seq = depends_on
              WHERE job IN (SELECT value FROM json_each(?)) ORDER BY job, depends_on"""
_FAILURES = """SELECT job, attempt, owner, started_at, ended_at, reason, error FROM failures
               WHERE job IN (SELECT value FROM json_each(?)) ORDER BY job, rowid"""
_OUTPUTS = """SELECT job, attempt, stream, data FROM outputs
              WHERE job IN (SELECT value FROM json_each(?)) ORDER BY job, rowid"""


# -- out ------------------------------------------------------------------------------

def export(store: Store, *, status: str | None = None, type: str | None = None,
           queue: str | None = None) -> Iterator[Record]:
    """Yield the record of each job, or only of some, oldest first; all as of the moment of the first.

    Args:
        status, type, queue: only jobs with this; None: any.

    Raises:
        ValueError: there is no such status.
    """
    if status is not None and status not in STATUSES:
        raise ValueError(f"there is no status {status!r}; the statuses are {', '.join(STATUSES)}")
    wanted = {"status = ?": status, "type = ?": type, "queue = ?": queue}
    where = "".join(f" AND {condition}" for condition, value in wanted.items() if value is not None)
    values = [value for value in wanted.values() if value is not None]
    columns = ", ".join(Job.COLUMNS)
    page = f"SELECT {columns} FROM jobs WHERE seq > ?{where} ORDER BY seq LIMIT {PAGE}"
    reader = Store(store.path, allow_shared=True)  # its snapshot stays open: it must hold up nobody in this process
    try:
        with reader.snapshot():
            last = 0
            while rows := reader.sqlite.execute(page, (last, *values)).fetchall():
                yield from _records(reader, [Job(*row) for row in rows])
                last = rows[-1][0]
    finally:
        reader.close()


def _records(reader: Store, jobs: list[Job]) -> Iterator[Record]:
    seqs = "[" + ",".join(str(job.seq) for job in jobs) + "]"
    parents: dict[int, list[str]] = {}
    for seq, parent in reader.sqlite.execute(_PARENTS, (seqs,)).fetchall():
        parents.setdefault(seq, []).append(parent)
    failures: dict[int, list[Record]] = {}
    for seq, *row in reader.sqlite.execute(_FAILURES, (seqs,)).fetchall():
        failures.setdefault(seq, []).append(_failure(*row))
    outputs: dict[int, list[Record]] = {}
    for seq, *row in reader.sqlite.execute(_OUTPUTS, (seqs,)).fetchall():
        outputs.setdefault(seq, []).append(_output(*row))
    for job in jobs:
        job.depends_on = tuple(parents.get(job.seq, ()))
        yield {**job.as_dict(), "progress_note": job.progress_note, "failures": failures.get(job.seq, []),
               "outputs": outputs.get(job.seq, [])}


def _failure(attempt: int, owner: str | None, started_at: int | None, ended_at: int, reason: str,
             error: str) -> Record:
    return {"attempt": attempt, "owner": owner,
            "started_at": None if started_at is None else format_time(started_at),
            "ended_at": format_time(ended_at), "reason": reason, "error": error}


def _output(attempt: int, stream: str, data: bytes) -> Record:
    from base64 import b64encode

    return {"attempt": attempt, "stream": stream, "data": b64encode(data).decode("ascii")}


# -- one record -----------------------------------------------------------------------

_REQUIRED = ("id", "type", "status", "created_at")
_OPTIONAL = ("queue", "payload", "priority", "run_at", "attempts", "max_attempts", "idempotency_key", "last_error",
             "lease_owner", "lease_expires_at", "started_at", "finished_at", "result", "depends_on",
             "timeout_seconds", "progress", "trace", "progress_note", "failures", "outputs")
KEYS = frozenset((*_REQUIRED, *_OPTIONAL))
_FAILURE_KEYS = ("attempt", "owner", "started_at", "ended_at", "reason", "error")
_OUTPUT_KEYS = ("attempt", "stream", "data")


ROW = ("status", "attempts", "created_at", "starts_at", "own_key", "started_at", "finished_at", "result",
       "last_error", "progress", "progress_note", "owner", "then_status")
"""`starts_at` is `run_at`; `then_status` what becomes of the job if it was running."""


class Arrival:
    """A job that has passed all checks, on its way in.

    Attributes:
        job: what a new job has, too; its `run_at` and `idempotency_key` are here instead.
        row: the columns that a new job does not have, in the order of `ROW`.
        failures, outputs: rows, without the job.
    """

    __slots__ = ("failures", "job", "outputs", "row")

    def __init__(self, record: Mapping[str, Any]) -> None:
        _check_keys(record, KEYS, _REQUIRED, "a record")
        given = {key: value for key, value in record.items() if value is not None}
        options: dict[str, Any] = {}
        for name in ("queue", "priority", "max_attempts", "depends_on", "trace"):
            if name in given:
                options[name] = given[name]
        if "timeout_seconds" in given:
            options["timeout"] = _number(given["timeout_seconds"], "timeout_seconds")
        self.job: NewJob = new_job(given["type"], record.get("payload"), id=given["id"], **options)
        key = given.get("idempotency_key")
        status, attempts = _check_state(given, self.job.max_attempts)
        result = given.get("result")
        created_at = _time(given["created_at"], "created_at")
        owner = given.get("lease_owner")
        self.row = (
            status, attempts, created_at, _time(given["run_at"], "run_at") if "run_at" in given else created_at,
            None if key is None else check_name(key, "idempotency_key"),
            *(_time(given[name], name) if name in given else None for name in ("started_at", "finished_at")),
            None if result is None else encode_json(result, "result"),
            _text(given["last_error"], "last_error") if "last_error" in given else None,
            _number(given["progress"], "progress") if "progress" in given else None,
            _text(given["progress_note"], "progress_note") if "progress_note" in given else None,
            None if owner is None else check_name(owner, "lease_owner"),
            after_expiry(attempts, self.job.max_attempts)[0],
        )
        self.failures = [_failure_row(each) for each in _list(given, "failures")]
        self.outputs = [_output_row(each) for each in _list(given, "outputs")]


def _check_keys(record: object, known: Iterable[str], required: Iterable[str], what: str) -> None:
    if not isinstance(record, dict):
        raise InvalidJob(f"{what} must be an object")
    unknown = [key for key in record if key not in known]
    if unknown:
        raise InvalidJob(f"{what} has an unknown key {ascii(unknown[0])[:60]}; is it one that export wrote?")
    missing = [key for key in required if record.get(key) is None]
    if missing:
        raise InvalidJob(f"the key '{missing[0]}' of {what} is missing; is it one that export wrote?")


def _check_state(given: Mapping[str, Any], max_attempts: int) -> tuple[str, int]:
    """Return status and attempts, if they and the times can go together."""
    status = given["status"]
    if status not in STATUSES:
        raise InvalidJob(f"there is no status {ascii(status)[:60]}; the statuses are {', '.join(STATUSES)}")
    attempts = check_integer(given.get("attempts", 0), "attempts", 0)
    if attempts > max_attempts:
        raise InvalidJob(f"attempts is {attempts:,}, but max_attempts only {max_attempts:,}")
    if status in CLAIMABLE and attempts == max_attempts:
        raise InvalidJob(f"a job that is {status} must have an attempt left, but all {max_attempts:,} are used")
    if status == RUNNING and attempts == 0:
        raise InvalidJob(f"a job that is {status} has made an attempt, but attempts is 0")
    if (status in FINISHED) != ("finished_at" in given):
        raise InvalidJob(f"a job that is {status} must {'have' if status in FINISHED else 'not have'} finished_at")
    return status, attempts


def _list(given: Mapping[str, Any], key: str) -> list[Any]:
    value = given.get(key, [])
    if not isinstance(value, list):
        raise InvalidJob(f"{key} must be a list")
    return value


def _failure_row(record: object) -> tuple[object, ...]:
    _check_keys(record, _FAILURE_KEYS, ("attempt", "ended_at", "reason", "error"), "an entry of failures")
    assert isinstance(record, dict)
    owner, started_at = record.get("owner"), record.get("started_at")
    return (check_integer(record["attempt"], "attempt", 0), None if owner is None else _text(owner, "owner"),
            None if started_at is None else _time(started_at, "started_at"), _time(record["ended_at"], "ended_at"),
            _text(record["reason"], "reason"), _text(record["error"], "error"))


def _output_row(record: object) -> tuple[object, ...]:
    from base64 import b64decode

    _check_keys(record, _OUTPUT_KEYS, _OUTPUT_KEYS, "an entry of outputs")
    assert isinstance(record, dict)
    try:
        data = b64decode(_text(record["data"], "data", None), validate=True)
    except ValueError:
        raise InvalidJob("data of an entry of outputs must be base64") from None
    return check_integer(record["attempt"], "attempt", 0), _text(record["stream"], "stream"), data


def _time(value: object, what: str) -> int:
    """Return milliseconds since the epoch for what `format_time` has written."""
    if not isinstance(value, str):
        raise InvalidJob(f"{what} must be a time as text, as in '2030-01-31T08:00:00.000Z'")
    if value.isascii() and value.removeprefix("-").isdigit() and len(value) < 21:
        return check_integer(int(value), what)
    try:
        return parse_time_ms(value)
    except ValueError as error:
        raise InvalidJob(f"{what}: {error}") from None


def _text(value: object, what: str, most: int | None = MAX_JSON_BYTES) -> str:
    if not isinstance(value, str):
        raise InvalidJob(f"{what} must be text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidJob(f"{what} holds a lone surrogate, which is no Unicode text") from None
    if most is not None and size > most:
        raise InvalidJob(f"{what} takes {size:,} bytes; at most {most:,} are allowed")
    return value


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise InvalidJob(f"{what} must be a number")
    return value
