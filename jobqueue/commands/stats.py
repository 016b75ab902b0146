"""The command that tells how a queue is doing: `stats`."""

from __future__ import annotations

import os
import sys

from .common import EXIT_DONE, add_database, add_json, emit, emit_json, one_of, open_queue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable

    from .common import Command

FORMATS = ("text", "json", "prometheus")

_STATS = """\
Show how a queue is doing: jobs by type and status, what waits and why, how many
ended in the last 5 minutes and the last hour, how long they waited and ran, which
workers are alive.

examples:
  python -m jobqueue stats --database jobs.db
  python -m jobqueue stats --queue mail --json
  python -m jobqueue stats --format prometheus > jq.new && mv jq.new jq.prom

"ran" is the last attempt from start to end, "waited" the time before it since the
job was queued, due, and free of dependencies. Where more than 10,000 jobs ended
in a window, its figures are those of the newest 10,000. A job is blocked if one
that it depends on, at any depth, has failed or was canceled. Counting reads an
index entry for each job, 0.2 s for a million. --format prometheus is meant for
node_exporter's textfile collector.
"""


def _add_options(parser: ArgumentParser) -> None:
    add_database(parser)
    parser.add_argument("--queue", metavar="NAME", help="only this queue")
    parser.add_argument("--format", metavar="|".join(FORMATS), type=one_of(FORMATS, "format"), default=FORMATS[0],
                        help="how to print them (text)")
    add_json(parser, "the same as --format json: one object")


def _stats(options: Namespace) -> int:
    with open_queue(options) as queue:
        found = queue.figures(options.queue)
    if options.json or options.format == "json":
        from ..views import figures_as_dict

        emit_json([figures_as_dict(found)])
    elif options.format == "prometheus":
        from ..metrics import exposition

        _emit_utf8(exposition(found))
    else:
        from .. import render, views
        from ..times import now_ms

        emit(views.figures_view(found, now_ms(), render.terminal_width(sys.stdout, os.environ)))
    return EXIT_DONE


def _emit_utf8(lines: Iterable[str]) -> None:
    """Write lines in UTF-8, which the format demands, wherever stdout goes, but harmless on a terminal."""
    if sys.stdout.isatty():
        from ..text import escape

        lines = map(escape, lines)
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    emit(lines)


COMMANDS: dict[str, Command] = {"stats": (_STATS, _add_options, _stats)}
