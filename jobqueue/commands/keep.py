"""Commands that look after the file: `init`, `purge`, `backup`."""

from __future__ import annotations

from ..lifecycle import CANCELED, COMPLETED, FAILED, FINISHED
from .common import (
    EXIT_DONE,
    Failure,
    Usage,
    add_database,
    add_json,
    add_quiet,
    database_path,
    emit,
    emit_json,
    one_of,
    open_queue,
    say,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

_INIT = """\
Create the database file, readable by you alone. On a file that already is a queue
it changes nothing; any other file is refused and left as it is.

examples:
  python -m jobqueue init --database jobs.db
  JOBQUEUE_DATABASE=jobs.db python -m jobqueue init
"""


def _init(options: Namespace) -> int:
    path = database_path(options)
    from ..queue import Queue

    with Queue(path, create=True, allow_shared=options.allow_shared) as queue:
        say(f"created {path}" if queue.created else f"{path} is already a queue; nothing changed")
    return EXIT_DONE


_PURGE = f"""\
Delete jobs that finished long ago, and give their room back to the disk. Prints
how many.

examples:
  python -m jobqueue purge --database jobs.db --older-than 30d --dry-run
  python -m jobqueue purge --older-than 30d
  python -m jobqueue purge --older-than 90d --status {FAILED} --type mail

Without --status, {COMPLETED} and {CANCELED} jobs go. A job that an unfinished one
depends on, at any depth, stays. With a job its failures, its outputs and its
idempotency key are forgotten: the same key makes a new job then.

It works in many short transactions, so workers go on meanwhile, and it may be
stopped at any time. A worker does the same now and then with --purge-after.
"""


def _add_purge(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--older-than", metavar="SPAN", help="only jobs finished for longer than this: 12h, 30d (required)")
    add("--status", metavar="STATUS", action="append", dest="statuses", type=one_of(FINISHED, "finished status"),
        help=f"{', '.join(FINISHED)}; repeatable ({COMPLETED} and {CANCELED})")
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--dry-run", action="store_true", help="count them, change nothing")
    add_quiet(parser)
    add_json(parser, 'print {"purged": N, "kept": N, "freed_bytes": N, "dry_run": false}')


def _purge(options: Namespace) -> int:
    if options.older_than is None:
        raise Usage("say which jobs may go: --older-than SPAN, as in --older-than 30d")
    from ..progress import ProgressBar

    with open_queue(options) as queue, ProgressBar("purging", quiet=options.quiet) as bar:
        purge = queue.purge(options.older_than, statuses=options.statuses, type=options.type,
                            dry_run=options.dry_run, progress=bar.update)
    if options.json:
        emit_json([{"purged": purge.jobs, "kept": purge.needed, "freed_bytes": purge.freed_bytes,
                    "dry_run": options.dry_run}])
    else:
        emit([str(purge.jobs)])
    verb = "would be" if options.dry_run else "is" if purge.jobs == 1 else "are"
    parts = [f"{_jobs(purge.jobs)} {verb} deleted"]
    if not options.dry_run:
        parts.append(f"{purge.freed_bytes:,} bytes given back")
    if purge.needed:
        parts.append(f"{_jobs(purge.needed)} kept, as others depend on {'it' if purge.needed == 1 else 'them'}")
    say("; ".join(parts))
    return EXIT_DONE


def _jobs(count: int) -> str:
    return f"{count:,} job" + ("" if count == 1 else "s")


_BACKUP = """\
Write a copy of the database as it is at this moment, while workers go on.

examples:
  python -m jobqueue backup --database jobs.db jobs-backup.db
  python -m jobqueue backup "backups/jobs-$(date +%F).db"
  python -m jobqueue backup --force latest.db

The copy is checked, made readable by you alone, and put in place whole: whatever
happens, there is never half a file under its name. It is a queue like any other.
To go back to it, stop the workers, remove jobs.db, jobs.db-wal and jobs.db-shm,
which belong together, and give the copy the name jobs.db.
"""


def _add_backup(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    parser.usage = f"{parser.prog} FILE [options]"
    add("file", metavar="FILE", nargs="?", help="where to write the copy")
    add("--force", action="store_true", help="replace FILE if it is there")
    add_quiet(parser)
    add_json(parser, 'print {"file": PATH, "bytes": N}')


def _backup(options: Namespace) -> int:
    if not options.file:
        raise Usage("name the file to write: backup FILE")
    if options.file == "-":
        raise Usage("a backup needs a file of its own; it cannot be written to standard output")
    from ..progress import ProgressBar

    with open_queue(options) as queue, ProgressBar("copying", "pages", quiet=options.quiet) as bar:
        try:
            size = queue.backup(options.file, force=options.force, progress=bar.update)
        except FileExistsError:
            raise Failure(f"{options.file} is there already; choose another name, "
                          "or replace it with --force") from None
    if options.json:
        emit_json([{"file": options.file, "bytes": size}])
    say(f"wrote {options.file}, {size:,} bytes")
    return EXIT_DONE


COMMANDS: dict[str, Command] = {
    "init": (_INIT, add_database, _init),
    "purge": (_PURGE, _add_purge, _purge),
    "backup": (_BACKUP, _add_backup, _backup),
}
