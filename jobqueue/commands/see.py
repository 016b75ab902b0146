"""Commands that look at jobs and change nothing: `list`."""

from __future__ import annotations

import os
import sys
from itertools import chain, islice

from ..lifecycle import STATUSES
from ..times import now_ms, parse_since_ms
from .common import (
    EXIT_DONE,
    Usage,
    add_database,
    add_json,
    emit,
    emit_json,
    number_between,
    one_of,
    open_queue,
    say,
    shown,
    suggestion,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

DEFAULT_LIMIT = 100

ORDERS = {"newest": "newest", "oldest": "oldest", "priority": "most urgent", "due": "first due",
          "finished": "last finished"}
"""name -> which jobs a list in this order begins with; the orders themselves are in `selection`."""

_LIST = f"""\
Show jobs, the newest first.

examples:
  python -m jobqueue list --database jobs.db
  python -m jobqueue list --status failed --type mail --since 2h
  python -m jobqueue list --blocked --columns id,type,depends_on
  python -m jobqueue list --depends-on 17 --sort due
  python -m jobqueue list --json | head -1

Times are relative to now; --json has them in full. TRIES is how often the job was
started and how often it may be. A status is one of
{', '.join(STATUSES)}.
A blocked job waits, at any depth, for one that failed or was canceled. --sort
priority is the order of starting, due is by time, finished leaves out jobs that
have not ended. The columns are the names in --json, and detail.
"""


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--status", metavar="STATUS", type=one_of(STATUSES, "status"), help="only jobs in this status")
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--queue", metavar="NAME", help="only jobs in this queue")
    add("--since", metavar="WHEN", help="only jobs queued, started or ended since: 2h, 1d, or a time")
    add("--blocked", action="store_true", help="only jobs that wait for one that failed or was canceled")
    add("--depends-on", metavar="ID", help="only jobs that depend on this one, directly")
    add("--sort", metavar="ORDER", type=one_of(ORDERS, "order"), default="newest",
        help=f"{', '.join(ORDERS)} first (newest)")
    add("--columns", metavar="NAMES", help="what to show, as in id,status,last_error")
    add("--limit", metavar="N", type=number_between(1, 10**12, whole=True),
        help=f"at most so many ({DEFAULT_LIMIT}; with --json all)")
    add_json(parser, "one JSON object a line, all fields or those of --columns")


def _list(options: Namespace) -> int:
    columns = None if options.columns is None else _columns(options.columns, options.json)
    filters = {name: getattr(options, name) for name in ("status", "type", "queue", "depends_on")}
    filters = {name: value for name, value in filters.items() if value is not None}
    if options.blocked:
        filters["blocked"] = True
    if options.since is not None:
        try:
            filters["since"] = parse_since_ms(options.since, now_ms())
        except ValueError as error:
            raise Usage(f"--since: {error}") from None
    limit: int | None = options.limit or (None if options.json else DEFAULT_LIMIT)
    with open_queue(options) as queue:
        # One more than is shown tells whether there are more.
        jobs = queue.iterate(**filters, sort=options.sort, limit=None if limit is None else limit + 1)
        first = next(jobs, None)
        if first is None:
            say("no job matches" if filters else "there are no jobs")
            return EXIT_DONE
        jobs = chain((first,), jobs)
        if options.json:
            dicts = (job.as_dict() for job in islice(jobs, limit))
            emit_json(dicts if columns is None else ({name: job[name] for name in columns} for job in dicts))
            return EXIT_DONE
        from .. import render

        emit(render.jobs_table(
            islice(jobs, limit), now_ms(), render.terminal_width(sys.stdout, os.environ),
            render.use_colour(sys.stdout, os.environ), columns, queue.blocked_among,
        ))
        if next(jobs, None) is not None:
            say(f"showing the {ORDERS[options.sort]} {limit:,}; --limit N shows more")
    return EXIT_DONE


def _columns(text: str, for_programs: bool) -> list[str]:
    from ..render import COLUMNS

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    known = COLUMNS[:-1] if for_programs else COLUMNS
    for name in names:
        if name not in known:
            hint = suggestion(name, known) or f"; choose from {', '.join(known)}"
            raise Usage(f"--columns: there is no column {shown(name)}{hint}")
    return names


COMMANDS: dict[str, Command] = {"list": (_LIST, _add_options, _list)}
