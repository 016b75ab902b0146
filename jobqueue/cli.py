"""The command line: finds the command, parses its options, turns errors into exit codes.

    python -m jobqueue COMMAND --database PATH ...

Exit codes: 0 done; 1 failed; 2 usage or invalid input; 75 the database stayed busy;
130 interrupted.  An error is one sentence on stderr, never a traceback.  The commands
themselves live in `commands/`, and only the one that was asked for is imported, since
`enqueue` from cron should start about as fast as Python.  No rules and no SQL here.
"""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__
from .commands.common import (
    EXIT_BUSY,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Failure,
    Usage,
    emit,
    flush,
    say,
    shown,
    suggestion,
)
from .errors import DatabaseBusy, HandlerLoadError, InvalidJob, JobQueueError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO, NoReturn

PROGRAM = "python -m jobqueue"

COMMANDS = {
    "init": ("keep", "create the database file"),
    "enqueue": ("enqueue", "queue a job, or many from a file"),
    "worker": ("work", "run jobs"),
    "list": ("see", "show jobs, the newest first"),
    "show": ("show", "show everything about a job"),
    "explain": ("show", "tell why a job is not running"),
    "stats": ("stats", "show how the queue is doing"),
    "wait": ("wait", "wait until jobs have ended"),
    "cancel": ("steer", "keep jobs from running"),
    "retry": ("steer", "give failed or canceled jobs a new start"),
    "retry-failed": ("steer", "give all failed jobs a new start"),
    "purge": ("keep", "delete jobs that finished long ago"),
    "backup": ("keep", "copy the database while it is in use"),
    "export": ("transfer", "write all jobs as JSON Lines"),
    "import": ("transfer", "take in what export wrote"),
    "completion": ("completion", "print a script that completes commands in your shell"),
    "doctor": ("doctor", "check the database, change nothing"),
}
"""name -> (module in `commands/`, what it does)"""

_HELP = """\
usage: {program} COMMAND --database PATH [options]

A durable job queue in one SQLite file.

examples:
  {program} init --database jobs.db
  {program} enqueue --database jobs.db --type print --payload '{{"message":"hello"}}'
  {program} worker --database jobs.db --workers 4
  {program} list --database jobs.db

commands:
{commands}

  {program} COMMAND --help tells more; --version shows the version.

JOBQUEUE_DATABASE stands in for --database, NO_COLOR turns colours off.
Data goes to stdout, everything else to stderr.

exit status: 0 done; 1 failed; 2 usage or invalid input; 75 database busy: try
again; 130, 143 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; nothing but a defect of Python itself is raised.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Call it from the main thread.  Stdout and stderr are set to escape what their
    encoding cannot write.
    """
    _prepare_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough
        _discard_stdout()
        code = EXIT_DONE
    except Exception as error:
        if os.environ.get("JOBQUEUE_DEBUG"):
            raise
        code, message = _explain(error)
        say(message)
    return _flushed(code)


def _run(argv: list[str]) -> int:
    for argument in argv:
        if not argument.isascii() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise Usage(f"the argument {shown(argument)} is not valid UTF-8")
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        emit([_help().rstrip()])
        return EXIT_DONE
    if name == "--version":
        emit([f"jobqueue {__version__}"])
        return EXIT_DONE
    if name not in COMMANDS:
        raise Usage(_no_command(name))
    parser, run = command_parser(name)
    try:
        options = parser.parse(argv[1:])
    except SystemExit:  # --help has been printed
        return EXIT_DONE
    if name == "completion":  # it tells of all the others
        options.commands = {name: (summary, command_parser(name)[0]) for name, (_, summary) in COMMANDS.items()}
    return run(options)


def command_parser(name: str) -> tuple[Parser, Callable[[argparse.Namespace], int]]:
    """Return the parser of a command, and the function that runs it on the parsed options.

    Raises:
        KeyError: there is no such command.
    """
    from importlib import import_module

    module = import_module(".commands." + COMMANDS[name][0], __package__)
    description, add_options, run = module.COMMANDS[name]
    parser = Parser(f"{PROGRAM} {name}", description)
    add_options(parser)
    return parser, run


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return _HELP.format(program=PROGRAM, commands=commands)


def _no_command(name: str) -> str:
    known = ", ".join(COMMANDS)
    if not name:
        return f"name a command, one of {known}; {PROGRAM} --help tells more"
    if name.startswith("-"):
        return f"the command comes first, before {shown(name)}: one of {known}"
    return f"there is no command {shown(name)}" + (suggestion(name, COMMANDS) or f"; choose from {known}")


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the sentence for an error."""
    if isinstance(error, Failure):
        return error.exit_code, str(error)
    if isinstance(error, (InvalidJob, HandlerLoadError)):
        return EXIT_USAGE, str(error)
    if isinstance(error, DatabaseBusy):
        return EXIT_BUSY, str(error)
    if isinstance(error, JobQueueError):
        return EXIT_FAILED, str(error)
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return EXIT_FAILED, f"{name}{error.strerror or error}"
    kind = type(error).__name__
    return EXIT_FAILED, f"internal error, {kind}: {error}; with JOBQUEUE_DEBUG=1 it shows where"


# -- parser ---------------------------------------------------------------------------

class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps at a fixed width: argparse would import `shutil` to ask the terminal, at each start."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=79)


class Parser(argparse.ArgumentParser):
    """A parser that raises `Usage` with one sentence, and helps with mistyped options."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter,
            usage=f"{prog} [options]",
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed options.

        Raises:
            Usage: they are wrong.
            SystemExit: help was asked for and has been printed.
        """
        options, rest = self.parse_known_args(argv)
        if rest:
            raise Usage(self._unknown(rest[0]))
        return options

    def error(self, message: str) -> NoReturn:
        """Raise argparse's complaint as `Usage`."""
        message = message.removeprefix("argument ")
        if message.endswith("expected one argument"):
            option = message.partition(":")[0]
            message = f"{option} needs a value, written {option}=VALUE if it begins with a dash"
        raise Usage(message)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print the help where data goes, with the same care."""
        emit([self.format_help().rstrip()])

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-") or argument == "--":
            return f"there is no place for the argument {shown(argument)}; try {self.prog} --help"
        option = argument.partition("=")[0]
        hint = suggestion(option, self._option_string_actions) or f"; try {self.prog} --help"
        return f"there is no option {shown(option)}{hint}"


# -- streams --------------------------------------------------------------------------

def _prepare_streams() -> None:
    """Make stdout and stderr safe to write any text to."""
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _open_closed_streams() -> None:
    """Put the null device where `<&-` or `>&-` left a hole, so that no other file gets that number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _flushed(code: int) -> int:
    """Flush stdout and return `code`, or 1 instead of 0 when that fails."""
    try:
        flush()
    except BrokenPipeError:
        _discard_stdout()
    except Failure as error:
        _discard_stdout()
        if code == EXIT_DONE:
            say(str(error))
            return EXIT_FAILED
    return code


def _discard_stdout() -> None:
    """Lead stdout into the void, so that the interpreter's own flush at exit does not complain."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file, as in tests
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
