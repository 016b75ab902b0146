"""How jobs look: tables for people, JSON lines for programs, widths, colour.

Everything that a job brings along (ids, errors, types) passes through `text.escape` on its way
to a terminal, and through `json_line` on its way to a program, so that no control
character, and no character that hides or reorders others, ever gets out.

Pure functions of their arguments: nothing here writes, opens a file or reads a clock;
only `terminal_width` and `use_colour` look at the stream they are given.
"""

from __future__ import annotations

import json
import os
import re
from itertools import islice

from .jobs import DEFAULT_QUEUE
from .lifecycle import CANCELED, COMPLETED, FAILED, PENDING, RETRYING, RUNNING
from .text import escape, escape_json
from .times import relative, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TextIO

    from .jobs import Job

ELLIPSIS = "…"
GAP = "  "
ROWS_MEASURED = 1_000
"""The widths of a table's columns are those of its first rows, so that a long list streams."""
FALLBACK_WIDTH = 80
MIN_COLUMN = 4
MIN_LAST_COLUMN = 20

_COLOURS = {COMPLETED: "32", FAILED: "1;31", RUNNING: "36", RETRYING: "33", CANCELED: "2"}


# -- text -----------------------------------------------------------------------------

def width_of(text: str) -> int:
    """Return how many terminal cells escaped text takes: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(map(_cells, text))


def _cells(character: str) -> int:
    if character < "\u0300":
        return 1
    from unicodedata import category, east_asian_width

    if category(character) in ("Mn", "Me", "Cf") or "\u1160" <= character <= "\u11ff":  # Hangul vowels join
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return escaped text cut to `width` cells; what is missing shows as an ellipsis."""
    if width_of(text) <= width:
        return text
    kept, room = [], width - 1
    for character in text:
        room -= _cells(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + ELLIPSIS


# -- JSON -----------------------------------------------------------------------------

def json_line(value: object, ascii_only: bool = False) -> str:
    """Return a value as one line of JSON in which unsafe characters are escaped.

    `ascii_only` escapes all that is not ASCII, for a stdout that is not UTF-8.
    """
    return escape_json(json.dumps(value, ensure_ascii=ascii_only, separators=(", ", ": ")))


# -- the stream -----------------------------------------------------------------------

def terminal_width(stream: TextIO, environ: Mapping[str, str]) -> int | None:
    """Return the columns of a terminal (`COLUMNS` wins); None: the stream is no terminal."""
    if not stream.isatty():
        return None
    wanted = environ.get("COLUMNS", "")
    if re.fullmatch(r"[1-9][0-9]{0,5}", wanted):
        return int(wanted)
    try:
        return os.get_terminal_size(stream.fileno()).columns or FALLBACK_WIDTH
    except OSError:
        return FALLBACK_WIDTH


def use_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether colour is welcome: on a terminal that is not dumb, unless `NO_COLOR` is set."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def can_draw(stream: TextIO) -> bool:
    """Return whether a stream's encoding has the characters of a tree."""
    try:
        "│├└─".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# -- tables ---------------------------------------------------------------------------

class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        right: aligned to the right, for numbers.
        shrinks: may be cut when the terminal is narrow.
        colours: cell text -> SGR code.
    """

    __slots__ = ("colours", "right", "shrinks", "title")

    def __init__(
        self, title: str, *, right: bool = False, shrinks: bool = False,
        colours: Mapping[str, str] | None = None,
    ) -> None:
        self.title = title
        self.right = right
        self.shrinks = shrinks
        self.colours = colours or {}


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None = None, colour: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table, its heading first; cells are escaped here.

    Args:
        columns: the last one takes what room is left.
        rows: consumed bit by bit; columns are as wide as the first thousand rows need.
        width: cut lines to so many cells; None: never cut anything.
    """
    iterator = iter(rows)
    block = [[escape(cell) for cell in row] for row in islice(iterator, ROWS_MEASURED)]
    titles = [column.title for column in columns]
    widths = [max(map(width_of, cells)) for cells in zip(titles, *block, strict=True)]
    if width is not None:
        _shrink(widths, columns, width)
    yield _line(columns, titles, widths, width is not None, False)
    while block:
        for row in block:
            yield _line(columns, row, widths, width is not None, colour)
        block = [[escape(cell) for cell in row] for row in islice(iterator, ROWS_MEASURED)]


def _shrink(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Make a table fit: the last column gives way first, then whichever of the others is widest."""
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
    last = len(widths) - 1
    given = max(0, min(excess, widths[last] - MIN_LAST_COLUMN))
    widths[last] -= given
    excess -= given
    while excess > 0:
        candidates = [n for n, column in enumerate(columns) if column.shrinks and widths[n] > MIN_COLUMN]
        if not candidates:
            break
        widths[max(candidates, key=widths.__getitem__)] -= 1
        excess -= 1


def _line(
    columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], cutting: bool, colour: bool,
) -> str:
    parts = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        shown = cut(cell, width) if cutting else cell
        padding = " " * (width - width_of(shown))
        if colour and cell in column.colours:
            shown = f"\x1b[{column.colours[cell]}m{shown}\x1b[0m"
        parts.append(padding + shown if column.right else shown + padding)
    return GAP.join(parts).rstrip()


def coloured(status: str, colour: bool = True) -> str:
    """Return a status in its colour."""
    return f"\x1b[{_COLOURS[status]}m{status}\x1b[0m" if colour and status in _COLOURS else status


def jobs_table(
    jobs: Iterable[Job], now_ms: int, width: int | None = None, colour: bool = False,
    columns: Sequence[str] | None = None, blocked_among: Callable[[Sequence[Job]], set[int]] | None = None,
) -> Iterator[str]:
    """Yield the lines of the table that `list` shows; times are relative to `now_ms`.

    Args:
        width, colour: as in `table`.
        columns: names out of `COLUMNS`; None: the usual ones, with the queue only if one of the first
            thousand jobs is not in the default one.
        blocked_among: tells the `seq` of those jobs of a list that are blocked; None: nobody knows.
    """
    iterator = iter(jobs)
    first = list(islice(iterator, ROWS_MEASURED))
    if columns is None:
        with_queue = any(job.queue != DEFAULT_QUEUE for job in first)
        columns = [name for name in USUAL_COLUMNS if name != "queue" or with_queue]

    def rows() -> Iterator[list[str]]:
        block = first
        while block:
            blocked = blocked_among(block) if blocked_among is not None and "detail" in columns else ()
            for job in block:
                yield [detail(job, now_ms, job.seq in blocked) if name == "detail" else cell(job, name, now_ms)
                       for name in columns]
            block = list(islice(iterator, ROWS_MEASURED))

    return table([_column(name, name == columns[-1]) for name in columns], rows(), width, colour)


COLUMNS = (
    "id", "queue", "type", "payload", "priority", "created_at", "run_at", "status", "attempts", "max_attempts",
    "idempotency_key", "last_error", "lease_owner", "lease_expires_at", "started_at", "finished_at", "result",
    "depends_on", "timeout_seconds", "progress", "trace", "detail",
)
"""What a list can show: the names of `--json`, and what matters most about a job in its status."""
USUAL_COLUMNS = ("id", "queue", "type", "status", "priority", "attempts", "created_at", "detail")
_TITLES = {"priority": "PRIO", "attempts": "TRIES"}
_MOMENTS = frozenset(name for name in COLUMNS if name.endswith("_at"))
_RIGHT = frozenset(("priority", "attempts", "max_attempts", "timeout_seconds", "progress"))
_WHOLE = _MOMENTS | _RIGHT | {"status"}


def _column(name: str, is_last: bool) -> Column:
    title = _TITLES.get(name) or name.removesuffix("_at").upper().replace("_", " ")
    return Column(title, right=name in _RIGHT, shrinks=is_last or name not in _WHOLE,
                  colours=_COLOURS if name == "status" else None)


def cell(job: Job, name: str, now_ms: int) -> str:
    """Return one field of a job, by its name in `--json`, as a table shows it; unescaped."""
    if name == "attempts":
        return f"{job.attempts}/{job.max_attempts}"
    if name in ("payload", "result"):
        return getattr(job, f"{name}_json") or ""
    if name == "depends_on":
        return ", ".join(job.depends_on or ())
    if name == "timeout_seconds":
        return "" if job.timeout_ms is None else f"{job.timeout_ms / 1_000:g}"
    value = getattr(job, name)
    if value is None:
        return ""
    if name in _MOMENTS:
        return relative(value, now_ms)
    if name == "last_error":
        return str(value).partition("\n")[0]
    return f"{value:.0%}" if name == "progress" else str(value)


def detail(job: Job, now_ms: int, blocked: bool = False) -> str:
    """Return what matters most about a job in its status: why it waits, how it goes, what went wrong."""
    if job.status == RUNNING:
        return _running(job, now_ms)
    if job.status == COMPLETED and job.started_at is not None and job.finished_at is not None:
        return f"took {span(max(0, job.finished_at - job.started_at))}"
    error = (job.last_error or "").partition("\n")[0]
    if job.status not in (PENDING, RETRYING):
        return error
    due = f"due {relative(job.run_at, now_ms)}" if job.run_at > now_ms else ""
    waits = f"waits for {job.unmet:,} job{'s' if job.unmet > 1 else ''}" if job.unmet else ""
    return ", ".join(filter(None, ("blocked" if blocked else "", due, waits, error)))


def _running(job: Job, now_ms: int) -> str:
    parts = [] if job.started_at is None else [f"for {span(max(0, now_ms - job.started_at))}"]
    if job.progress is not None:
        parts.append(f"{job.progress:.0%}" + (f" {job.progress_note}" if job.progress_note else ""))
    if job.lease_expires_at is not None and job.lease_expires_at <= now_ms:
        parts.append("lease expired")
    return ", ".join(parts)
