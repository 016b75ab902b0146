"""What the commands share: exit codes, the two streams, the database option, numbers.

Data goes to stdout through `emit`, everything else to stderr through `say`.  This
module is on the way of every `enqueue` from cron, so it imports next to nothing.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentTypeError
from itertools import islice

from ..errors import UnknownJobError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable
    from typing import NoReturn, TypeVar

    from ..queue import Queue

    Found = TypeVar("Found")
    Command = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]
    """(description for --help, adds the options to a parser, runs and returns the exit code)"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_BUSY = 75
EXIT_INTERRUPTED = 130

DATABASE_VARIABLE = "JOBQUEUE_DATABASE"
LINES_PER_WRITE = 500


class Failure(Exception):
    """A command could not do its work; the text is the sentence for stderr."""

    exit_code = EXIT_FAILED


class Usage(Failure):
    """The command line, or the input it names, is wrong."""

    exit_code = EXIT_USAGE


# -- streams --------------------------------------------------------------------------

def say(message: str) -> None:
    """Write one line about the work to stderr, unsafe characters escaped; a closed stderr is no error."""
    if not (message.isascii() and message.isprintable()):
        from ..text import escape

        message = escape(message)
    try:
        sys.stderr.write(f"jobqueue: {message}\n")
        sys.stderr.flush()
    except OSError:
        pass  # there is no place left to complain to


def emit(lines: Iterable[str]) -> None:
    """Write data to stdout, a line each, and flush; `lines` is consumed bit by bit.

    Raises:
        BrokenPipeError: the reader has gone.
        Failure: stdout cannot be written.
    """
    iterator = iter(lines)
    while chunk := list(islice(iterator, LINES_PER_WRITE)):
        _on_stdout(sys.stdout.write, "\n".join(chunk) + "\n")
    flush()


def emit_ids(ids: Iterable[str]) -> None:
    """Write ids of jobs, a line each: to the letter for programs, unsafe characters escaped on a terminal."""
    if sys.stdout.isatty():
        from ..text import escape

        ids = map(escape, ids)
    emit(ids)


def flush() -> None:
    """Flush stdout; raises what `emit` raises."""
    _on_stdout(sys.stdout.flush)


def _on_stdout(action: Callable[..., object], *arguments: str) -> None:
    try:
        action(*arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Failure(f"cannot write to standard output: {error.strerror or error}") from error


def emit_json(values: Iterable[object]) -> None:
    """Write JSON Lines to stdout: UTF-8, or pure ASCII where stdout is not UTF-8."""
    from ..render import json_line

    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    ascii_only = encoding.lower().replace("-", "").replace("_", "") != "utf8"
    emit(json_line(value, ascii_only) for value in values)


# -- options --------------------------------------------------------------------------

def add_database(parser: ArgumentParser) -> None:
    """Add `--database`, and what belongs to it, to the parser of a command."""
    parser.add_argument("--database", metavar="PATH", help=f"the queue's file (${DATABASE_VARIABLE})")
    parser.add_argument("--allow-shared", action="store_true",
                        help="use it even if every user of the machine could change or replace it")


def add_quiet(parser: ArgumentParser) -> None:
    """Add `--quiet` to the parser of a command that shows a progress bar."""
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")


def add_json(parser: ArgumentParser, help: str) -> None:
    """Add `--json` to the parser of a command that has data to print."""
    parser.add_argument("--json", action="store_true", help=help)


def add_ids(parser: ArgumentParser, help: str = "which job; several at once") -> None:
    """Add the ids of jobs, at least one, to the parser of a command."""
    parser.add_argument("ids", metavar="ID", nargs="+", help=help)
    parser.usage = f"{parser.prog} ID... [options]"


def for_each_id(ids: Iterable[str], look: Callable[[str], Found]) -> tuple[list[Found], int]:
    """Return what `look` answers for each id, and the exit code: a failure if there is no such job for one,
    which is then named on stderr while the others are served."""
    found, code = [], EXIT_DONE
    for id in dict.fromkeys(ids):
        try:
            found.append(look(id))
        except UnknownJobError as error:
            say(str(error))
            code = EXIT_FAILED
    return found, code


def database_path(options: Namespace) -> str:
    """Return the path that `--database` or the environment names.

    Raises:
        Usage: neither does.
    """
    path: str | None = options.database
    if path == "":
        raise Usage("--database names no file: the path is empty")
    if path and "\0" in path:  # only a caller in this process can bring one along
        raise Usage("--database names no file: the path holds a NUL")
    path = path or os.environ.get(DATABASE_VARIABLE)
    if not path:
        raise Usage(f"no database given: use --database PATH, or set {DATABASE_VARIABLE}")
    return path


def open_queue(options: Namespace) -> Queue:
    """Open the queue that the options name; raises what `Queue` raises, and `Usage` without a path."""
    path = database_path(options)
    from ..queue import Queue

    return Queue(path, allow_shared=options.allow_shared)


def whole_number(text: str) -> int:
    """Return the integer of an option's value; `int` itself would take `1_0` and other scripts' digits."""
    if not re.fullmatch(r"[+-]?[0-9]{1,1000}", text):
        raise ArgumentTypeError(f"must be a whole number, not {shown(text)}")
    return int(text)


def number_between(minimum: float, maximum: float, *, whole: bool = False) -> Callable[[str], float]:
    """Return a converter for an option whose value lies between two bounds, both included."""
    pattern = re.compile(r"[0-9]{1,20}" if whole else r"[0-9]{1,20}(?:\.[0-9]{1,20})?")
    kind = "a whole number" if whole else "a number"

    def convert(text: str) -> float:
        value = (int if whole else float)(text) if pattern.fullmatch(text) else None
        if value is None or not minimum <= value <= maximum:
            raise ArgumentTypeError(f"must be {kind} from {minimum:,} to {maximum:,}, not {shown(text)}")
        return value

    return convert


class OneOf:
    """A converter for an option that takes one of a few words, and helps with a mistyped one.

    Attributes:
        words: those it takes.
    """

    def __init__(self, words: Iterable[str], what: str) -> None:
        self.words = tuple(words)
        self._what = what

    def __call__(self, text: str) -> str:
        """Return the word if it is one; raises `ArgumentTypeError`."""
        if text not in self.words:
            hint = suggestion(text, self.words) or f"; choose from {', '.join(self.words)}"
            raise ArgumentTypeError(f"there is no {self._what} {shown(text)}{hint}")
        return text


def one_of(words: Iterable[str], what: str) -> OneOf:
    """Return a converter for an option that takes one of a few words."""
    return OneOf(words, what)


def shown(text: str) -> str:
    """Return a word of the command line as it may stand in a message: quoted, short, and safe to print."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a mistyped word, or nothing when no known one resembles it."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def cannot_read(name: str, error: OSError) -> NoReturn:
    """Raise the failure for a file that an option names."""
    raise Failure(f"cannot read {name}: {error.strerror or error}") from error
