"""Commands that carry jobs from one file to another, or elsewhere: `export`, `import`."""

from __future__ import annotations

import sys

from ..errors import InvalidJob
from ..jobs import MAX_JSON_DEPTH, decode_json
from ..lifecycle import STATUSES
from .common import EXIT_DONE, Usage, add_database, add_json, add_quiet, emit_json, one_of, open_queue, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator, Mapping
    from typing import Any

    from ..progress import ProgressBar
    from ..queue import Queue
    from .common import Command

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A record has a payload, a result, a history and outputs."""
JOBS_PER_LOOK = 1_000

_EXPORT = """\
Write all there is to know of each job as JSON Lines, oldest first, all as of one
moment, while workers go on.

examples:
  python -m jobqueue export --database jobs.db > jobs.jsonl
  python -m jobqueue export --status failed | gzip > failed.jsonl.gz
  python -m jobqueue export --database old.db |
    python -m jobqueue import --database new.db -

A line has the keys of `list --json`, and
  progress_note   text, or null
  failures        a list of {attempt, owner, started_at, ended_at, reason, error}
  outputs         a list of {attempt, stream, data}, the data in base64
Until it ends, the write-ahead log beside the database only grows: write to a
file, not to something that waits for a person.
"""


def _add_export(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--status", metavar="STATUS", type=one_of(STATUSES, "status"), help="only jobs in this status")
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--queue", metavar="NAME", help="only jobs in this queue")
    add_quiet(parser)
    add_json(parser, "no difference: it always is JSON")


def _export(options: Namespace) -> int:
    from ..progress import ProgressBar

    quiet = options.quiet or sys.stdout.isatty()  # the bar would be drawn among the lines
    with open_queue(options) as queue, ProgressBar("exporting", quiet=quiet) as bar:
        emit_json(_told(queue, options, bar))
    return EXIT_DONE


def _told(queue: Queue, options: Namespace, bar: ProgressBar) -> Iterator[Mapping[str, Any]]:
    records = queue.export(status=options.status, type=options.type, queue=options.queue)
    for count, record in enumerate(records, 1):
        yield record
        if count % JOBS_PER_LOOK == 0:
            bar.update(count)


_IMPORT = """\
Take in the jobs that export wrote: all of them, or none if anything is wrong
with one. Ids, states, times, history, results and dependencies stay as they are.

examples:
  python -m jobqueue import --database new.db jobs.jsonl
  zcat failed.jsonl.gz | python -m jobqueue import --database jobs.db -
  python -m jobqueue import --skip-existing jobs.jsonl

Only a lease cannot travel: a job that was running counts as one whose lease has
just run out, so it is due at once, or has failed if that was its last attempt.
An id that is taken is refused, and so is an idempotency key. Jobs get their
places in the order of the lines. A line needs id, type, status and created_at;
export --help tells the others. Do not run the same jobs from both files.

exit status: 0 imported; 1 failed; 2 something is wrong with a line, which is
named; 75 database busy. Unless it is 0, nothing was imported.
"""


def _add_import(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    parser.usage = f"{parser.prog} FILE [options]"
    add("file", metavar="FILE", nargs="?", help="what export wrote; - reads it from stdin")
    add("--skip-existing", action="store_true", help="leave out jobs whose id is taken")
    add_quiet(parser)
    add_json(parser, 'print {"imported": N, "skipped": N}')


def _import(options: Namespace) -> int:
    if not options.file:
        raise Usage("name the file to read: import FILE, or - for standard input")
    from ..progress import ProgressBar
    from .files import InputFile, read_lines

    with InputFile(options.file) as file, open_queue(options) as queue:
        try:
            with ProgressBar("reading", quiet=options.quiet) as bar:
                stored, skipped = queue.import_jobs(
                    read_lines(file, _record, bar, most_bytes=MAX_LINE_BYTES), skip_existing=options.skip_existing)
        except InvalidJob as error:
            where = file.name if error.index is None else f"{file.name}, line {error.index}"
            raise Usage(f"{where}: {error}; nothing was imported") from None
    if options.json:
        emit_json([{"imported": stored, "skipped": skipped}])
    left_out = f"; {skipped:,} left out, as their ids are taken" if skipped else ""
    say(f"imported {stored:,} job{'' if stored == 1 else 's'}{left_out}")
    return EXIT_DONE


def _record(line: str) -> Any:
    return decode_json(line, "the line", max_depth=MAX_JSON_DEPTH + 1)


COMMANDS: dict[str, Command] = {
    "export": (_EXPORT, _add_export, _export),
    "import": (_IMPORT, _add_import, _import),
}
