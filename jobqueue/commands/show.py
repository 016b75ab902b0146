"""Commands that tell about single jobs: `show`, `explain`."""

from __future__ import annotations

import os
import sys

from .common import (
    Usage,
    add_database,
    add_ids,
    add_json,
    emit,
    emit_json,
    for_each_id,
    open_queue,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

_SHOW = """\
Show everything about jobs: what is set, payload and result, what they depend on
and what depends on them, and every attempt that failed, with its error.

examples:
  python -m jobqueue show --database jobs.db 17
  python -m jobqueue show --tree 17                 what it depends on, at any depth
  python -m jobqueue show --tree --reverse 17       what depends on it
  python -m jobqueue show --json 17 18

Times are in UTC. --json names at most the newest 1,000 failed attempts and the
oldest 1,000 dependents, a tree the nearest 1,000 dependencies. An unknown id is
exit 1, with the others shown.
"""

_EXPLAIN = """\
Tell why jobs are not running: a line for each cause, the most important first,
with the way out in brackets.

examples:
  python -m jobqueue explain --database jobs.db 17
  python -m jobqueue explain --json 17 18

A worker counts as alive for 150 seconds after it was last seen; each writes that
once a minute. Programs that claim jobs by themselves are not seen. The kinds in
--json are blocked, no-worker, queue-not-served, no-handler, exec-not-allowed,
waiting, scheduled, backing-off, ready, running, lease-expired, completed, failed
and canceled. An unknown id is exit 1, with the others explained.
"""


def _add_show(parser: ArgumentParser) -> None:
    add_ids(parser)
    add_database(parser)
    parser.add_argument("--tree", action="store_true", help="show what it depends on, as a tree")
    parser.add_argument("--reverse", action="store_true", help="with --tree, what depends on it")
    add_json(parser, "one JSON object a line: a job, or with --tree each job of it")


def _show(options: Namespace) -> int:
    if options.reverse and not options.tree:
        raise Usage("--reverse goes with --tree")
    return _tree(options) if options.tree else _jobs(options)


def _jobs(options: Namespace) -> int:
    from .. import views
    from ..times import now_ms

    with open_queue(options) as queue:
        found, code = for_each_id(options.ids, queue.history)
    if options.json:
        emit_json(map(views.history_as_dict, found))
        return code
    now, colour = now_ms(), _colour()
    for n, job in enumerate(found):
        emit([*([""] if n else []), *views.job_view(job, now, colour)])
    return code


def _tree(options: Namespace) -> int:
    from .. import render, views

    with open_queue(options) as queue:
        found, code = for_each_id(options.ids, lambda id: queue.tree(id, reverse=options.reverse))
    width = render.terminal_width(sys.stdout, os.environ)
    ascii_only = not render.can_draw(sys.stdout)
    for n, tree in enumerate(found):
        if options.json:
            emit_json(views.tree_as_dicts(tree))
        else:
            emit([*([""] if n else []), *views.tree_view(tree, _colour(), ascii_only, width)])
    return code


def _add_explain(parser: ArgumentParser) -> None:
    add_ids(parser)
    add_database(parser)
    add_json(parser, "one JSON object a line: a job and its causes")


def _explain(options: Namespace) -> int:
    from .. import views

    with open_queue(options) as queue:
        found, code = for_each_id(options.ids, queue.explain)
    if options.json:
        emit_json(views.causes_as_dict(job, causes) for job, causes in found)
        return code
    for job, causes in found:
        emit(views.causes_view(job, causes, _colour()))
    return code


def _colour() -> bool:
    from ..render import use_colour

    return use_colour(sys.stdout, os.environ)


COMMANDS: dict[str, Command] = {
    "show": (_SHOW, _add_show, _show),
    "explain": (_EXPLAIN, _add_explain, _explain),
}
