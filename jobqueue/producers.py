"""The way in for programs that speak SQL only: a view `enqueue` that turns rows into jobs.

    INSERT INTO enqueue(type, payload) VALUES ('print', '{"message": "hi"}')

Its trigger stores a job as `intake` would, with the same defaults, and refuses what breaks a
rule of `jobs` with a message.  A column left out, or NULL, has its default; a row whose
idempotency key is known stores nothing.  What SQL cannot see in a payload (`"\\ud800"`, depth, `1e999`, an
integer of thousands of digits) makes the job fail when it is run: see `jobs.stored_value`.

Only text: `schema` puts it into the file, where it needs nothing but SQLite 3.38, and reads the
clock of the machine.  With `trusted_schema=OFF` that SQLite knows no JSON function, only the table
`json_each`, so a value is wrapped in arrays and taken out again: checked, compact.
"""

from __future__ import annotations

from .jobs import (
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    MAX_DEPENDENCIES,
    MAX_JSON_BYTES,
    MAX_NAME_LENGTH,
)
from .lifecycle import COMPLETED, DEFAULT_MAX_ATTEMPTS, PENDING
from .times import MAX_MS

COLUMNS = ("type", "payload", "queue", "id", "priority", "run_at", "delay_seconds", "max_attempts",
           "timeout_seconds", "idempotency_key", "depends_on", "trace")
_NAMES = ("type", "queue", "id", "idempotency_key", "trace")

_NOW = "CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
_MOMENT = "CAST(round((julianday(upper(NEW.run_at)) - 2440587.5) * 86400000) AS INTEGER)"
_RUN_AT = f"iif(typeof(NEW.run_at) = 'text', {_MOMENT}, NEW.run_at)"
# The date comes back as it is unless there is no such day; SQLite knows an hour 24.
_IS_TIME = """(upper(NEW.run_at) GLOB '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-5][0-9]*'
        AND (upper(NEW.run_at) GLOB '*Z' OR NEW.run_at GLOB '*[+-][0-9][0-9]:[0-9][0-9]')
        AND date(substr(NEW.run_at, 1, 10), '+0 days') = substr(NEW.run_at, 1, 10)
        AND substr(NEW.run_at, 12, 2) < '24')"""
_DEPENDS_ON = "json_each(coalesce(NEW.depends_on, '[]'))"
_ALL_NAMES = " || ' ' || ".join(f"coalesce(NEW.{name}, '')" for name in _NAMES)
_PAYLOAD = "(SELECT substr(value, 2, length(value) - 2) FROM json_each('[[' || NEW.payload || ']]'))"
_TEXT = f"{_ALL_NAMES} || coalesce({_PAYLOAD}, '')"
_ASCII = ' etaoinsrhldcumfpgwybvkxjqz0123456789",:{}[].-_ETAOINSRHLDCUMFPGWYBVKXJQZ\\/()+*=@#%&$!?;<>^`|~' + "''"
# SQLite minds no bytes that are not UTF-8, Python would.  So each character beyond ASCII that the text begins
# with is made anew, compared, and blotted out everywhere, until none is left.
_IS_NO_TEXT = f"""EXISTS (
        WITH RECURSIVE rest(t) AS (
          SELECT ltrim({_TEXT}, '{_ASCII}') UNION ALL
          SELECT ltrim(replace(t, substr(t, 1, 1), ' '), '{_ASCII}') FROM rest WHERE t <> '')
        SELECT 1 FROM rest WHERE t <> '' AND char(unicode(t)) <> substr(t, 1, 1))"""


def _refuse(condition: str, message: str) -> str:
    return f"WHEN {condition}\n      THEN RAISE(ABORT, '{message}')"


def _no_name(name: str) -> str:
    given = f"NEW.{name} IS NOT NULL AND " if name != "type" else ""
    return _refuse(f"{given}(typeof(NEW.{name}) <> 'text' "
                   f"OR length(NEW.{name}) NOT BETWEEN 1 AND {MAX_NAME_LENGTH})",
                   f"{name} must be text of 1 to {MAX_NAME_LENGTH} characters")


def _no_span(name: str, minimum: float) -> str:
    return _refuse(f"typeof(NEW.{name}) NOT IN ('null', 'integer', 'real') "
                   f"OR NEW.{name} NOT BETWEEN {minimum:g} AND {MAX_MS // 1_000}",
                   f"{name} must be a number of seconds, at least {minimum:g}")


_BAD_FIELDS = (
    *map(_no_name, _NAMES),
    _refuse(f"instr({_ALL_NAMES}, char(0)) OR {_ALL_NAMES} GLOB '*[' || char(1, 45, 31, 127, 45, 159) || ']*'",
            f"{', '.join(_NAMES)} must not hold control characters"),
    _refuse("NEW.payload IS NOT NULL AND (typeof(NEW.payload) <> 'text' "
            "OR (SELECT count(*) FROM json_each('[' || NEW.payload || ']')) <> 1)",
            "payload must be JSON text, such as ''{\"message\":\"hi\"}''"),
    _refuse(f"length(CAST({_PAYLOAD} AS BLOB)) > {MAX_JSON_BYTES}",
            f"payload takes more than {MAX_JSON_BYTES:,} bytes as JSON"),
    _refuse(_IS_NO_TEXT,
            f"{', '.join(_NAMES)} and payload must be valid UTF-8"),
    _refuse("typeof(NEW.priority) NOT IN ('null', 'integer')", "priority must be a whole number"),
    _refuse("typeof(NEW.max_attempts) NOT IN ('null', 'integer') OR NEW.max_attempts < 1",
            "max_attempts must be a whole number, at least 1"),
    _refuse("NEW.run_at IS NOT NULL AND NEW.delay_seconds IS NOT NULL", "give run_at or delay_seconds, not both"),
    _refuse(f"NEW.run_at IS NOT NULL AND (CASE typeof(NEW.run_at) WHEN 'text' THEN {_IS_TIME} AND "
            f"{_MOMENT} BETWEEN 0 AND {MAX_MS}\n        WHEN 'integer' THEN NEW.run_at BETWEEN 0 AND {MAX_MS} END) "
            "IS NOT TRUE",
            "run_at must be a time with an offset, as in 2030-01-31T08:00:00Z or ...+02:00, or milliseconds since "
            "the epoch"),
    _no_span("delay_seconds", 0),
    _no_span("timeout_seconds", 0.001),
    _refuse("NEW.depends_on IS NOT NULL AND (typeof(NEW.depends_on) <> 'text' OR "
            "(SELECT group_concat(type) FROM json_each('[' || NEW.depends_on || ']')) IS NOT 'array')",
            "depends_on must be a JSON array of ids, such as ''[\"17\",\"18\"]''"),
    _refuse(f"EXISTS (SELECT 1 FROM {_DEPENDS_ON} WHERE type <> 'text')",
            "depends_on must be a JSON array of ids in quotes, such as ''[\"17\",\"18\"]''"),
    _refuse(f"NEW.id IN (SELECT value FROM {_DEPENDS_ON})", "depends_on names the job itself"),
    _refuse(f"(SELECT count(DISTINCT value) FROM {_DEPENDS_ON}) > {MAX_DEPENDENCIES}",
            f"a job may depend on at most {MAX_DEPENDENCIES:,} others"),
)
_BAD_IN_THIS_FILE = (
    _refuse("EXISTS (SELECT 1 FROM jobs WHERE jobs.id = NEW.id)",
            "there is a job with this id already; choose another id, or use an idempotency_key to queue it once"),
    _refuse(f"EXISTS (SELECT 1 FROM {_DEPENDS_ON} WHERE value NOT IN (SELECT jobs.id FROM jobs))",
            "depends_on names a job that does not exist"),
)

_LINE = "\n    "
VIEW = f"""
CREATE VIEW enqueue({', '.join(COLUMNS)}) AS SELECT {', '.join(['NULL'] * len(COLUMNS))} WHERE 0;

CREATE TRIGGER enqueue_a_row INSTEAD OF INSERT ON enqueue BEGIN
  SELECT CASE
    {_LINE.join(_BAD_FIELDS)}
  END;
  SELECT RAISE(IGNORE) FROM jobs WHERE idempotency_key = NEW.idempotency_key;
  SELECT CASE
    {_LINE.join(_BAD_IN_THIS_FILE)}
  END;
  INSERT INTO jobs(seq, id, queue, type, payload, priority, created_at, run_at, status, ready, unmet,
                   max_attempts, timeout_ms, idempotency_key, trace)
  SELECT number, coalesce(NEW.id, CAST(number AS TEXT)), coalesce(NEW.queue, '{DEFAULT_QUEUE}'), NEW.type,
         coalesce({_PAYLOAD}, 'null'), coalesce(NEW.priority, {DEFAULT_PRIORITY}), now, due, '{PENDING}',
         open = 0 AND due <= now, open, coalesce(NEW.max_attempts, {DEFAULT_MAX_ATTEMPTS}),
         CAST(round(NEW.timeout_seconds * 1000) AS INTEGER), NEW.idempotency_key, NEW.trace
  FROM (
    WITH RECURSIVE numbers(n) AS (
      SELECT max(seq, (SELECT coalesce(max(seq), 0) FROM jobs)) + 1 FROM sqlite_sequence WHERE name = 'jobs'
      UNION ALL
      SELECT n + 1 FROM numbers WHERE NEW.id IS NULL AND EXISTS (SELECT 1 FROM jobs WHERE id = CAST(n AS TEXT)))
    SELECT max(n) AS number, {_NOW} AS now,
           coalesce({_RUN_AT}, {_NOW} + CAST(round(coalesce(NEW.delay_seconds, 0) * 1000) AS INTEGER)) AS due,
           (SELECT count(*) FROM jobs WHERE status <> '{COMPLETED}'
            AND id IN (SELECT value FROM {_DEPENDS_ON})) AS open
    FROM numbers);
  INSERT INTO dependencies(job, depends_on)
  SELECT last_insert_rowid(), seq FROM jobs WHERE id IN (SELECT value FROM {_DEPENDS_ON});
END;
"""
