"""Commands that change what becomes of jobs: `cancel`, `retry`, `retry-failed`."""

from __future__ import annotations

from ..lifecycle import CANCELED, FAILED, PENDING, RETRYING, RUNNING, sources
from .common import (
    EXIT_DONE,
    EXIT_FAILED,
    Usage,
    add_database,
    add_ids,
    add_json,
    add_quiet,
    emit,
    emit_ids,
    emit_json,
    for_each_id,
    open_queue,
    say,
    shown,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from ..queue import Queue
    from .common import Command

_CANCEL = f"""\
Cancel jobs, so that they do not run. One that runs loses its lease at once, and
its worker stops it with the next heartbeat. Prints the ids, or how many.

examples:
  python -m jobqueue cancel --database jobs.db 17 18
  python -m jobqueue cancel --all-pending --dry-run
  python -m jobqueue cancel --type mail
  python -m jobqueue cancel --all-pending --type mail --queue slow

--all-pending means whatever waits: {PENDING} or {RETRYING}. --type or --queue
alone means {RUNNING} jobs, too. What depends on a {CANCELED} job waits until you
retry it.

exit status: 0 all that were named are {CANCELED} now, or were; 1 one is unknown, or
had finished otherwise (the others are {CANCELED} nevertheless).
"""

_RETRY = f"""\
Give jobs that {FAILED} or were {CANCELED} a new start: all attempts back, {PENDING}
again, their dependents unblocked. What went wrong so far stays on record. Prints
the ids.

examples:
  python -m jobqueue retry --database jobs.db 17 18
  python -m jobqueue retry --dry-run 17

exit status: 0 done; 1 one is unknown, or neither {FAILED} nor {CANCELED} (the others
are retried nevertheless).
"""

_RETRY_FAILED = f"""\
Give {FAILED} jobs a new start: all attempts back, {PENDING} again, their dependents
unblocked. Prints how many.

examples:
  python -m jobqueue retry-failed --database jobs.db --dry-run
  python -m jobqueue retry-failed --type mail
  python -m jobqueue retry-failed --error "Connection refused"
  python -m jobqueue retry-failed --id 17
"""


# -- jobs that are named -----------------------------------------------------------------

def _add_cancel(parser: ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = f"{parser.prog} [ID...] [options]"
    add("ids", metavar="ID", nargs="*", help="which job; several at once")
    add_database(parser)
    add("--all-pending", action="store_true", help="all that wait for a worker")
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--queue", metavar="NAME", help="only jobs in this queue")
    add("--dry-run", action="store_true", help="say what would be canceled, change nothing")
    add_quiet(parser)
    add_json(parser, 'print {"id": ..., "status": ..., "canceled": true} for each, or {"canceled": N, ...}')


def _cancel(options: Namespace) -> int:
    chosen = options.all_pending or options.type is not None or options.queue is not None
    if options.ids and chosen:
        raise Usage("name jobs by their ids or choose them by --all-pending, --type and --queue, not both")
    if options.ids:
        return _each(options, "cancel", CANCELED)
    if not chosen:
        raise Usage("name the jobs: by their ids, or with --all-pending, --type or --queue")
    from ..progress import ProgressBar

    with open_queue(options) as queue, ProgressBar("canceling", quiet=options.quiet) as bar:
        count = queue.cancel_many(type=options.type, queue=options.queue, running=not options.all_pending,
                                  dry_run=options.dry_run, progress=bar.update)
    return _tell_count(options, CANCELED, count, "unfinished", CANCELED)


def _add_retry(parser: ArgumentParser) -> None:
    add_ids(parser)
    add_database(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be retried, change nothing")
    add_json(parser, 'print {"id": ..., "status": ..., "retried": true} for each')


def _retry(options: Namespace) -> int:
    return _each(options, "retry", "retried")


def _each(options: Namespace, move: str, done: str) -> int:
    """Move jobs one by one; say which could not be moved and why."""
    with open_queue(options) as queue:
        found, code = for_each_id(options.ids, lambda id: (id, *_moved(queue, move, id, options.dry_run)))
    if options.json:
        emit_json({"id": id, "status": status, done: changed, "dry_run": options.dry_run}
                  for id, status, changed in found)
    else:
        emit_ids(id for id, _, changed in found if changed)
    for id, status, changed in found:
        if changed:
            continue
        say(f"job {shown(id)} is {status} already; nothing changed" if status == done else
            f"job {shown(id)} is {status}, so it cannot be {done}; nothing changed")
        code = code if status == done else EXIT_FAILED
    return code


def _moved(queue: Queue, move: str, id: str, dry_run: bool) -> tuple[str, bool]:
    """Move a job, or with `dry_run` only see whether it could be; return its status, and whether it was."""
    changed = False if dry_run else queue.cancel(id) if move == "cancel" else queue.retry(id)
    status = queue.known(id).status
    return status, changed or (dry_run and status in sources(move))


# -- jobs that are chosen ----------------------------------------------------------------

def _add_retry_failed(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_database(parser)
    add("--type", metavar="TYPE", help="only jobs of this type")
    add("--error", metavar="TEXT", help="only jobs whose last error holds this text, to the letter")
    add("--id", metavar="ID", help="only this job")
    add("--dry-run", action="store_true", help="count them, change nothing")
    add_quiet(parser)
    add_json(parser, 'print {"retried": N, "dry_run": false}')


def _retry_failed(options: Namespace) -> int:
    from ..progress import ProgressBar

    with open_queue(options) as queue, ProgressBar("moving", quiet=options.quiet) as bar:
        count = queue.retry_failed(type=options.type, id=options.id, error=options.error,
                                   dry_run=options.dry_run, progress=bar.update)
    return _tell_count(options, "retried", count, FAILED, f"{PENDING} again")


def _tell_count(options: Namespace, name: str, count: int, before: str, after: str) -> int:
    if options.json:
        emit_json([{name: count, "dry_run": options.dry_run}])
    else:
        emit([str(count)])
    verb = "would be" if options.dry_run else "is" if count == 1 else "are"
    one = getattr(options, "id", None)
    nothing = f"no {before} job matches" if one is None else f"job {shown(one)} is not {before}, or does not match"
    some = f"{count:,} {before} job{'' if count == 1 else 's'} {verb} {after}"
    say(some if count else f"{nothing}; nothing changed")
    return EXIT_DONE


COMMANDS: dict[str, Command] = {
    "cancel": (_CANCEL, _add_cancel, _cancel),
    "retry": (_RETRY, _add_retry, _retry),
    "retry-failed": (_RETRY_FAILED, _add_retry_failed, _retry_failed),
}
