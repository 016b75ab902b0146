"""Records of jobs, and every rule an input must obey.

`new_job` checks what a caller wants to queue and returns a `NewJob` whose payload is
compact JSON text; `Job` is what comes back out of a store.  All faces and commands come
through here, so that a rule is written once.  No clock, no file, no SQL.

Plain `__slots__` classes instead of dataclasses: importing `dataclasses` would cost an
`enqueue` from cron about half of its start-up.
"""

from __future__ import annotations

import json
import re
from json import encoder as _json_encoder

from .errors import DependencyCycle, InvalidJob
from .lifecycle import DEFAULT_MAX_ATTEMPTS
from .times import MAX_MS, elapsed_ms, format_time, parse_duration_ms, parse_time_ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 0
MAX_NAME_LENGTH = 255
MAX_JSON_BYTES = 1024 * 1024
MAX_JSON_DEPTH = 64
MAX_DEPENDENCIES = 10_000
NO_DEPENDENCIES: tuple[str, ...] = ()
MAX_QUEUES = 250
"""For one claim; SQLite joins at most 500 SELECTs (https://sqlite.org/limits.html)."""
MAX_INTEGER = 2**63 - 1
MAX_ERROR_LENGTH = 4_000

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_INFINITY = float("inf")
_NO_BRACKETS = r"[^\[\]{}]+"  # text, as `re` compiles it when it is first used
_JSON_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_LONG_INTEGER = re.compile("(?<![0-9])[0-9]{4301}")  # no Python reads more, unless told to
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_make_encoder = getattr(_json_encoder, "c_make_encoder", None)


# -- JSON -----------------------------------------------------------------------------

def encode_json(value: object, what: str = "payload") -> str:
    """Return `value` as compact JSON text, ready to be stored.

    Raises:
        InvalidJob: not JSON, NaN or Infinity, a lone surrogate, an integer of more than 4,300
            digits, more than 1 MiB, or nested more than 64 deep; the message begins with `what`.
    """
    try:
        text = _encode(value)
        if len(text) <= 2 * MAX_JSON_DEPTH and text.isascii():
            return text  # a level takes two brackets: so short a text is not too deep, nor too large
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise InvalidJob(f"{what} holds a lone surrogate, which is no Unicode text") from None
    except RecursionError:
        raise InvalidJob(f"{what} is nested more than {MAX_JSON_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"{what} is not JSON: {error}") from None
    if size > MAX_JSON_BYTES:
        raise InvalidJob(f"{what} takes {size:,} bytes as JSON; at most {MAX_JSON_BYTES:,} are allowed")
    if _too_deep(text, MAX_JSON_DEPTH):
        raise InvalidJob(f"{what} is nested more than {MAX_JSON_DEPTH} deep")
    if _LONG_INTEGER.search(text) and _LONG_INTEGER.search(_JSON_STRING.sub('""', text)):
        raise InvalidJob(f"{what} holds an integer of more than 4,300 digits")
    return text


def _encode(value: object) -> str:
    """Return what `_encoder.encode` does, without what it does again for each call: half of its time."""
    if _make_encoder is None:  # a Python without the C part of json
        return _encoder.encode(value)
    inside: dict[int, object] = {}  # the containers around, to find a ring; per call, for threads' sake
    encode = _make_encoder(inside, _encoder.default, _json_encoder.encode_basestring, None, ":", ",",
                           False, False, False)
    return "".join(encode(value, 0))


def decode_json(text: str, what: str = "payload", *, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Return the value of JSON text that somebody wrote by hand.

    Raises:
        InvalidJob: no JSON by RFC 8259 (so no NaN and no Infinity), or nested more than
            `max_depth` deep, which is checked before parsing, as the parser recurses.
    """
    if _too_deep(text, max_depth):
        raise InvalidJob(f"{what} is nested more than {max_depth} deep")
    try:
        return _decode(text)
    except ValueError as error:
        raise InvalidJob(f"{what} is not JSON: {error}") from None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


_decode = json.JSONDecoder(parse_constant=_reject_constant).decode


def stored_value(text: str, what: str = "payload") -> Any:
    """Return the value of JSON text from a file.

    Raises:
        InvalidJob: it breaks a rule, as only another program can have brought about (see `producers`).
    """
    try:
        if len(text) > 2 * MAX_JSON_DEPTH and _too_deep(text, MAX_JSON_DEPTH):
            raise InvalidJob(f"{what} is nested more than {MAX_JSON_DEPTH} deep")
        value, _ = _decode_stored(text)  # there is no white space to skip
        if "\\u" in text:
            _encode(value).encode()
    except UnicodeEncodeError:
        raise InvalidJob(f"{what} holds a lone surrogate, which is no Unicode text") from None
    except ValueError as error:
        raise error if isinstance(error, InvalidJob) else InvalidJob(f"{what} is not JSON: {error}") from None
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value in (_INFINITY, -_INFINITY):
        raise ValueError(f"{text if len(text) < 30 else text[:30] + '...'} is too large a number")
    return value


_decode_stored = json.JSONDecoder(parse_float=_finite, parse_constant=_reject_constant).raw_decode


def _too_deep(text: str, limit: int) -> bool:
    if text.count("[") + text.count("{") <= limit:
        return False
    brackets = left = re.sub(_NO_BRACKETS, "", _JSON_STRING.sub("", text)).replace("{", "[").replace("}", "]")
    for _ in range(limit):
        left = left.replace("[]", "")  # the innermost level
    if not left:
        return False
    depth = 0
    for character in brackets:  # too deep, or no JSON at all
        depth += 1 if character == "[" else -1
        if depth > limit:
            return True
    return False


# -- single fields --------------------------------------------------------------------

def check_name(value: object, what: str) -> str:
    """Return `value` if it is a name (of a job, queue, type, key): 1-255 characters, none of them control.

    Raises:
        InvalidJob: it is not.
    """
    if isinstance(value, str) and 1 <= len(value) <= MAX_NAME_LENGTH and value.isprintable():
        return value
    if not isinstance(value, str):
        raise InvalidJob(f"{what} must be a string, not {_shown(value)}")
    if not 1 <= len(value) <= MAX_NAME_LENGTH:
        raise InvalidJob(f"{what} must have 1 to {MAX_NAME_LENGTH} characters, not {len(value):,}")
    if _FORBIDDEN.search(value):
        raise InvalidJob(f"{what} must not hold control characters or lone surrogates: {value!a}")
    return value


def possible_name(value: object) -> str:
    """Return an id or token that a caller asks about if it could be one, else the empty text, which is none."""
    try:
        return check_name(value, "name")
    except InvalidJob:
        return ""


def check_integer(
    value: object, what: str, minimum: int = -MAX_INTEGER - 1, maximum: int = MAX_INTEGER
) -> int:
    """Return `value` if it is a whole number from `minimum` to `maximum`; True and False are none.

    Raises:
        InvalidJob: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidJob(f"{what} must be a whole number, not {_shown(value)}")
    if not minimum <= value <= maximum:
        raise InvalidJob(f"{what} must lie between {minimum:,} and {maximum:,}")
    return value


def duration_ms(value: object, what: str, minimum: int = 0) -> int:
    """Return a duration in milliseconds, given in seconds (a number) or as text such as `5m`.

    Raises:
        InvalidJob: no duration, or shorter than `minimum` milliseconds.
    """
    if isinstance(value, str):
        try:
            result = parse_duration_ms(value)
        except ValueError as error:
            raise InvalidJob(f"{what}: {error}") from None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -MAX_MS <= value * 1_000 <= MAX_MS:  # false for NaN too
            raise InvalidJob(f"{what} must be a sensible number of seconds, not {_shown(value)}")
        result = round(value * 1_000)
    else:
        raise InvalidJob(f"{what} must be seconds or text such as '5m', not {_shown(value)}")
    if result < minimum:
        raise InvalidJob(f"{what} must be at least {minimum / 1_000:g} seconds, not {_shown(value)}")
    return result


def moment_ms(value: object, what: str) -> int:
    """Return a point in time in milliseconds since the epoch.

    Args:
        value: RFC 3339 text or a `datetime`, both with an offset, or milliseconds since the epoch.

    Raises:
        InvalidJob: none of these, or outside the years 1970 to 9999.
    """
    if isinstance(value, str):
        try:
            return parse_time_ms(value)
        except ValueError as error:
            raise InvalidJob(f"{what}: {error}") from None
    if hasattr(value, "utcoffset"):  # so perhaps a datetime, without importing datetime for everybody
        from datetime import datetime

        if isinstance(value, datetime):
            if value.utcoffset() is None:
                raise InvalidJob(f"{what} must be a datetime with a time zone")
            value = elapsed_ms(value)
    return check_integer(value, what, 0, MAX_MS)


def _shown(value: object) -> str:
    """Return a value as it may stand in a message: short, and safe to print."""
    try:
        text = ascii(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def clean_error(text: object) -> str:
    """Return the text of an error as it is stored: valid Unicode, at most 4,000 characters."""
    shown = str(text).encode("utf-8", "backslashreplace").decode()
    return shown if len(shown) <= MAX_ERROR_LENGTH else shown[: MAX_ERROR_LENGTH - 3] + "..."


# -- records --------------------------------------------------------------------------

class NewJob:
    """A job that has passed all checks and is not stored yet; made by `new_job`.

    `payload` is JSON text.  `run_at` (ms since the epoch) is None for "now plus `delay_ms`",
    where now is the moment it is stored.
    """

    __slots__ = ("depends_on", "delay_ms", "id", "idempotency_key", "max_attempts", "payload", "priority",
                 "queue", "run_at", "timeout_ms", "trace", "type")

    def __init__(
        self, type: str, payload: str, queue: str, id: str | None, priority: int, max_attempts: int,
        run_at: int | None, delay_ms: int, timeout_ms: int | None, idempotency_key: str | None,
        trace: str | None, depends_on: tuple[str, ...],
    ) -> None:
        self.type = type
        self.payload = payload
        self.queue = queue
        self.id = id
        self.priority = priority
        self.max_attempts = max_attempts
        self.run_at = run_at
        self.delay_ms = delay_ms
        self.timeout_ms = timeout_ms
        self.idempotency_key = idempotency_key
        self.trace = trace
        self.depends_on = depends_on


def new_job(
    type: object, payload: object = None, *, queue: object = DEFAULT_QUEUE, id: object = None,
    priority: object = DEFAULT_PRIORITY, max_attempts: object = DEFAULT_MAX_ATTEMPTS, run_at: object = None,
    delay: object = None, timeout: object = None, idempotency_key: object = None,
    depends_on: object = NO_DEPENDENCIES, trace: object = None,
) -> NewJob:
    """Check what a caller wants to queue.

    Args:
        type: names the handler.
        payload: any JSON value.
        id: None: the store numbers it.
        priority: higher first.
        max_attempts: starts in all, at least 1.
        run_at: earliest start: RFC 3339 text or `datetime` with an offset, or ms since the epoch;
            None: at once.
        delay: instead of `run_at`, seconds from now, or text such as `5m`.
        timeout: how long one attempt may run, in seconds or as text; None: the worker's default.
        idempotency_key: a second job with the same key is not stored.
        depends_on: ids of jobs that must complete first; naming one twice counts once.
        trace: a W3C traceparent, or any id that should travel along.

    Raises:
        InvalidJob: some value breaks a rule; the message names the field.
    """
    if run_at is not None and delay is not None:
        raise InvalidJob("give run_at or delay, not both")
    return NewJob(  # in the order of its arguments; what is a default by identity needs no check
        check_name(type, "type"),
        encode_json(payload),
        DEFAULT_QUEUE if queue is DEFAULT_QUEUE else check_name(queue, "queue"),
        None if id is None else check_name(id, "id"),
        0 if priority is DEFAULT_PRIORITY else check_integer(priority, "priority"),
        DEFAULT_MAX_ATTEMPTS if max_attempts is DEFAULT_MAX_ATTEMPTS
        else check_integer(max_attempts, "max_attempts", 1),
        None if run_at is None else moment_ms(run_at, "run_at"),
        0 if delay is None else duration_ms(delay, "delay"),
        None if timeout is None else duration_ms(timeout, "timeout", 1),
        None if idempotency_key is None else check_name(idempotency_key, "idempotency_key"),
        None if trace is None else check_name(trace, "trace"),
        () if depends_on is NO_DEPENDENCIES else _dependencies(depends_on, id),
    )


FIELDS = frozenset(("type", "payload", "queue", "id", "priority", "max_attempts", "run_at", "delay",
                    "timeout", "idempotency_key", "depends_on", "trace"))
"""What `new_job` takes, and so the keys of a job in a batch or in a line of JSON."""


def new_job_from(fields: Mapping[str, object]) -> NewJob:
    """Check one job of a batch, given as a mapping with the arguments of `new_job`; it is not changed.

    Raises:
        InvalidJob: no mapping, an unknown key, no type, or what `new_job` objects to.
    """
    try:
        return new_job(**fields)
    except TypeError:  # only now: to look first would cost every good job time
        problem = _wrong_keys(fields)
        if problem is None:
            raise
        raise InvalidJob(problem) from None


def _wrong_keys(fields: object) -> str | None:
    """Return what keeps `fields` from being the arguments of `new_job`; None: nothing."""
    if not hasattr(fields, "keys") or isinstance(fields, type):
        return f"a job must be an object with the key 'type', not {_shown(fields)}"
    keys = list(fields.keys())
    unknown = sorted(_shown(key) for key in keys if key not in FIELDS)
    if unknown:
        return f"unknown key {', '.join(unknown)}; a job has {' '.join(sorted(FIELDS))}"
    return None if "type" in keys else "the key 'type' is missing"


def _dependencies(value: object, id: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise InvalidJob(f"depends_on must be a list of ids, not {_shown(value)}")
    names: Iterable[object] = value
    unique = tuple(dict.fromkeys(check_name(name, "an id in depends_on") for name in names))
    if len(unique) > MAX_DEPENDENCIES:
        raise InvalidJob(f"a job may depend on at most {MAX_DEPENDENCIES:,} others, not {len(unique):,}")
    if id in unique:
        raise DependencyCycle(f"job {id!r} depends on itself", (str(id), str(id)))
    return unique


class Job:
    """A job as it was when it was read; times in milliseconds since the Unix epoch.

    Attributes:
        seq: creation order; internal to the file.
        payload, result: the JSON values; `payload_json`, `result_json` the stored text.
        run_at: not to be started before.
        ready: due and without unmet dependencies when last looked at; internal.
        unmet: dependencies that have not completed.
        attempts: claims so far, those released again not counted.
        timeout_ms: for one attempt; None: the worker's default.
        lease_owner, lease_token, lease_expires_at: of a running job; else None.
        started_at: of the current or last claim; None before the first.
        finished_at: None until the job has completed, failed or been canceled.
        progress: 0 to 1 as last reported, with `progress_note`; None: never reported.
        trace: a W3C traceparent or any trace id.
        depends_on: ids, in no order that means anything; None: not read (`claim` leaves them out).
    """

    __slots__ = ("attempts", "created_at", "depends_on", "finished_at", "id", "idempotency_key", "last_error",
                 "lease_expires_at", "lease_owner", "lease_token", "max_attempts", "payload_json", "priority",
                 "progress", "progress_note", "queue", "ready", "result_json", "run_at", "seq", "started_at",
                 "status", "timeout_ms", "trace", "type", "unmet")

    COLUMNS = ("seq", "id", "queue", "type", "payload", "priority", "created_at", "run_at", "status", "ready",
               "unmet", "attempts", "max_attempts", "timeout_ms", "idempotency_key", "lease_owner",
               "lease_token", "lease_expires_at", "started_at", "finished_at", "result", "last_error",
               "progress", "progress_note", "trace")
    """The names of the constructor's arguments but the last, in the order of the table's columns."""

    def __init__(
        self, seq: int, id: str, queue: str, type: str, payload: str, priority: int, created_at: int,
        run_at: int, status: str, ready: int, unmet: int, attempts: int, max_attempts: int,
        timeout_ms: int | None, idempotency_key: str | None, lease_owner: str | None, lease_token: str | None,
        lease_expires_at: int | None, started_at: int | None, finished_at: int | None, result: str | None,
        last_error: str | None, progress: float | None, progress_note: str | None, trace: str | None,
        depends_on: tuple[str, ...] | None = None,
    ) -> None:
        self.seq = seq
        self.id = id
        self.queue = queue
        self.type = type
        self.payload_json = payload
        self.priority = priority
        self.created_at = created_at
        self.run_at = run_at
        self.status = status
        self.ready = ready
        self.unmet = unmet
        self.attempts = attempts
        self.max_attempts = max_attempts
        self.timeout_ms = timeout_ms
        self.idempotency_key = idempotency_key
        self.lease_owner = lease_owner
        self.lease_token = lease_token
        self.lease_expires_at = lease_expires_at
        self.started_at = started_at
        self.finished_at = finished_at
        self.result_json = result
        self.last_error = last_error
        self.progress = progress
        self.progress_note = progress_note
        self.trace = trace
        self.depends_on = depends_on

    @property
    def payload(self) -> Any:
        """The payload as a JSON value; parsed anew by each look, so nobody can change it.

        Raises:
            InvalidJob: a program that queued it by SQL broke a rule that SQL cannot check.
        """
        return stored_value(self.payload_json)

    def payload_fault(self) -> str | None:
        """Return which rule the payload breaks, None if it breaks none."""
        try:
            stored_value(self.payload_json)
        except InvalidJob as error:
            return str(error)
        return None

    @property
    def shown_payload(self) -> Any:
        """The payload to be looked at: its value, or its text if that breaks a rule."""
        return self.payload if self.payload_fault() is None else self.payload_json

    @property
    def result(self) -> Any:
        """What the handler returned; None while there is nothing, or when it returned None."""
        return None if self.result_json is None else json.loads(self.result_json)

    def as_dict(self) -> dict[str, Any]:
        """Return the job as `--json` shows it: stable names, RFC 3339 times, durations in seconds."""
        return {
            "id": self.id, "queue": self.queue, "type": self.type, "payload": self.shown_payload,
            "priority": self.priority, "created_at": format_time(self.created_at),
            "run_at": format_time(self.run_at), "status": self.status, "attempts": self.attempts,
            "max_attempts": self.max_attempts, "idempotency_key": self.idempotency_key,
            "last_error": self.last_error, "lease_owner": self.lease_owner,
            "lease_expires_at": _time_or_none(self.lease_expires_at),
            "started_at": _time_or_none(self.started_at), "finished_at": _time_or_none(self.finished_at),
            "result": self.result, "depends_on": None if self.depends_on is None else list(self.depends_on),
            "timeout_seconds": None if self.timeout_ms is None else self.timeout_ms / 1_000,
            "progress": self.progress, "trace": self.trace,
        }

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.type} {self.status}>"


def _time_or_none(ms: int | None) -> str | None:
    return None if ms is None else format_time(ms)
