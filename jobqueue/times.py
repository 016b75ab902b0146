"""Times and durations as people write them.

The file and the engines know only integer milliseconds since the Unix epoch, UTC.
This module turns RFC 3339 text and durations such as `5m` into them and back.  It
never reads a time zone from the machine, and reads a clock only in `now_ms`.
"""

from __future__ import annotations

import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime

MAX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, the end of what RFC 3339 can write."""
WALL_CLOCK_MS = 1_577_836_800_000
"""2020.  What a file says happened before was timed by a caller's own clock (see `scheduler`), not by this one."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
# Patterns as text: `re` compiles one when it is first used, and most commands use none.
_DURATION = rf"(?:{_NUMBER}(?:ms|[smhdw]))+"
_PART = rf"({_NUMBER})(ms|[smhdw])"
_TIME = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):?[0-5][0-9])"
)


def now_ms() -> int:
    """Return the wall clock in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a duration: `90` (seconds), `5m`, `2h`, `1h30m`, `250ms`, `1.5d`.

    Units are ms, s, m, h, d and w; a bare number means seconds.

    Raises:
        ValueError: the text is no such duration, is negative, or is longer than 8,000 years.
    """
    text = text.strip()
    if re.fullmatch(_NUMBER, text):
        text += "s"
    if not re.fullmatch(_DURATION, text):
        raise ValueError(f"{text!r} is no duration: write seconds, or a number with a unit, "
                         "as in 90, 5m, 2h, 1d")
    total = round(sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text)))
    if total > MAX_MS:
        raise ValueError(f"the duration {text!r} is too long")
    return total


def parse_time_ms(text: str) -> int:
    """Return the milliseconds since the epoch of an RFC 3339 time with `Z` or an offset.

    Digits beyond the millisecond are cut off.

    Raises:
        ValueError: no such time, no offset, or outside the years 1970 to 9999.
    """
    from datetime import datetime  # 1 ms of start-up that only this needs

    shown = text.strip()
    if not re.fullmatch(_TIME, shown):
        raise ValueError(f"{text!r} is no time with an offset: write it as in 2030-01-31T08:00:00Z "
                         "or ...+02:00")
    try:
        moment = datetime.fromisoformat(shown.upper())
    except ValueError as error:
        raise ValueError(f"{text!r} is no valid time: {error}") from None
    result = elapsed_ms(moment)
    if not 0 <= result <= MAX_MS:
        raise ValueError(f"the time {text!r} lies outside the years 1970 to 9999")
    return result


def parse_since_ms(text: str, now_ms: int) -> int:
    """Return the moment of an RFC 3339 time, or of so long before now: `2h`, `30m`, `1d`.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(_TIME, text.strip()):
        return parse_time_ms(text)
    try:
        return max(0, now_ms - parse_duration_ms(text))
    except ValueError:
        raise ValueError(f"{text!r} is neither how long ago, as in 90, 30m, 2h, 1d, nor a time, as in "
                         "2030-01-31T08:00:00Z") from None


def elapsed_ms(moment: datetime) -> int:
    """Return the milliseconds from the epoch to a `datetime` that has a time zone, rounded down.

    In integers: by way of `timestamp()` one time in 150 comes out a millisecond early.
    """
    from datetime import UTC, datetime, timedelta

    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def format_time(ms: int) -> str:
    """Return milliseconds since the epoch as RFC 3339 in UTC, as in `2030-01-31T08:00:00.250Z`.

    What lies outside the years 1970 to 9999 (only a caller's own clock can put it there)
    comes as the plain number.
    """
    if not 0 <= ms <= MAX_MS:
        return str(ms)
    seconds, rest = divmod(ms, 1_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:03d}Z"


def span(ms: int) -> str:
    """Return a length of time as people say it: `250 ms`, `1.2 s`, `45 s`, `4 min`, `7 h`, `3 d`; cut down."""
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 10_000:
        return f"{ms // 100 / 10:g} s"
    for unit, unit_ms, limit in (("s", 1_000, 60), ("min", 60_000, 60), ("h", 3_600_000, 48)):
        if ms < limit * unit_ms:
            return f"{ms // unit_ms} {unit}"
    return f"{ms // 86_400_000:,} d"


def relative(then_ms: int, now_ms: int) -> str:
    """Return a moment as seen from now: `in 4 min`, `3 h ago`, `now` within a second."""
    distance = then_ms - now_ms
    if abs(distance) < 1_000:
        return "now"
    return f"in {span(distance)}" if distance > 0 else f"{span(-distance)} ago"
