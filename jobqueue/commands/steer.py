"""Commands that change what becomes of jobs: `retry-failed`."""

from __future__ import annotations

from ..lifecycle import FAILED, PENDING
from .common import EXIT_DONE, add_database, add_json, emit, emit_json, open_queue, say, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

_RETRY_FAILED = f"""\
Give {FAILED} jobs a new start: all attempts back, {PENDING} again, their dependents
unblocked. Prints how many.

examples:
  python -m jobqueue retry-failed --database jobs.db --dry-run
  python -m jobqueue retry-failed --type mail
  python -m jobqueue retry-failed --id 17
"""


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--id", metavar="ID", help="only this job")
    add("--dry-run", action="store_true", help="count them, change nothing")
    add_json(parser, 'print {"retried": N, "dry_run": false}')


def _retry_failed(options: Namespace) -> int:
    with open_queue(options) as queue:
        count = queue.retry_failed(type=options.type, id=options.id, dry_run=options.dry_run)
    if options.json:
        emit_json([{"retried": count, "dry_run": options.dry_run}])
    else:
        emit([str(count)])
    jobs = f"{count:,} {FAILED} job" + ("" if count == 1 else "s")
    verb = "would be" if options.dry_run else "is" if count == 1 else "are"
    nothing = f"no {FAILED} job matches; nothing changed" if options.id is None else (
        f"job {shown(options.id)} is not {FAILED}, or of another type; nothing changed")
    say(f"{jobs} {verb} {PENDING} again" if count else nothing)
    return EXIT_DONE


COMMANDS: dict[str, Command] = {"retry-failed": (_RETRY_FAILED, _add_options, _retry_failed)}
