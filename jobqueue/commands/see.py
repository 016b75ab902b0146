"""Commands that look at jobs and change nothing: `list`."""

from __future__ import annotations

import os
import sys
from itertools import chain, islice

from ..lifecycle import STATUSES
from ..times import now_ms
from .common import EXIT_DONE, add_database, add_json, emit, emit_json, number_between, one_of, open_queue, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

DEFAULT_LIMIT = 100

_LIST = f"""\
Show jobs, the newest first.

examples:
  python -m jobqueue list --database jobs.db
  python -m jobqueue list --status failed --type mail --limit 20
  python -m jobqueue list --json | head -1

Times are relative to now; --json has them in full. TRIES is how often the job was
started and how often it may be. A status is one of
{', '.join(STATUSES)}.
"""


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--status", metavar="STATUS", type=one_of(STATUSES, "status"), help="only jobs in this status")
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--queue", metavar="NAME", help="only jobs in this queue")
    add("--limit", metavar="N", type=number_between(1, 10**12, whole=True),
        help=f"at most so many ({DEFAULT_LIMIT}; with --json all)")
    add_json(parser, "one JSON object a line, all fields")


def _list(options: Namespace) -> int:
    with open_queue(options) as queue:
        jobs = queue.iterate(status=options.status, type=options.type, queue=options.queue)
        first = next(jobs, None)
        if first is None:
            filtered = options.status or options.type or options.queue
            say("no job matches" if filtered else "there are no jobs")
            return EXIT_DONE
        jobs = chain((first,), jobs)
        if options.json:
            emit_json(job.as_dict() for job in islice(jobs, options.limit))
            return EXIT_DONE
        from .. import render

        limit = options.limit or DEFAULT_LIMIT
        emit(render.jobs_table(
            islice(jobs, limit), now_ms(), render.terminal_width(sys.stdout, os.environ),
            render.use_colour(sys.stdout, os.environ),
        ))
        if next(jobs, None) is not None:
            say(f"showing the newest {limit:,}; --limit N shows more")
    return EXIT_DONE


COMMANDS: dict[str, Command] = {"list": (_LIST, _add_options, _list)}
