"""The command that runs jobs: `worker`.  Checks the numbers; the work is in `worker.py`."""

from __future__ import annotations

import os

from ..jobs import DEFAULT_QUEUE, MAX_QUEUES, check_name, duration_ms
from ..log import FORMATS, LEVELS
from .common import EXIT_DONE, Usage, add_database, database_path, number_between, one_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from .common import Command

MAX_WORKERS = 1_024
MIN_LEASE_SECONDS = 0.5
YEAR_SECONDS = 31_536_000

_WORKER = """\
Run jobs until told to stop. The first Ctrl+C or SIGTERM lets running jobs finish
for --grace-seconds and gives the rest back; the second one stops at once.

examples:
  python -m jobqueue worker --database jobs.db --workers 4 --lease-seconds 30
  python -m jobqueue worker --handlers ./tasks.py --handlers mypackage.jobs
  python -m jobqueue worker --drain                      do what is due, then exit
  python -m jobqueue worker --queue mail --queue default --log-format json

Built-in types are print, sleep and fail; --handlers adds yours:

  from jobqueue import handler

  @handler("thumbnail")
  def thumbnail(payload, context):
      return {"path": "out.png"}

exit status: 0 stopped or drained; 1 failed; 2 usage, or a module of handlers that
does not import; 75 database busy; 130 or 143 stopped by a second signal.
"""


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    seconds = number_between(0, YEAR_SECONDS)
    add_database(parser)
    add("--workers", metavar="N", type=number_between(1, MAX_WORKERS, whole=True),
        help="child processes that run jobs (the number of CPUs)")
    add("--queue", metavar="NAME", action="append", dest="queues",
        help="serve this queue; repeatable (default)")
    add("--handlers", metavar="MODULE", action="append", default=[],
        help="package.module or ./file.py with handlers; repeatable")
    add("--drain", action="store_true", help="exit once no job is due and none runs in this worker")
    add("--lease-seconds", metavar="S", type=number_between(MIN_LEASE_SECONDS, YEAR_SECONDS), default=30.0,
        help="how long after its last heartbeat a worker counts as dead (30)")
    add("--grace-seconds", metavar="S", type=seconds, default=30.0,
        help="how long running jobs may go on after the first signal (30)")
    add("--default-timeout", metavar="SPAN", help="for jobs without a timeout of their own: 90, 5m (none)")
    add("--max-jobs-per-child", metavar="N", type=number_between(1, 10**12, whole=True),
        help="replace a child process after so many jobs (never)")
    add("--purge-after", metavar="SPAN",
        help="delete completed and canceled jobs so long after their end: 30d (never)")
    add("--log-format", metavar="text|json", type=one_of(FORMATS, "log format"), default="text",
        help="how log lines on stderr look (text)")
    add("--log-level", metavar="LEVEL", type=one_of(LEVELS, "log level"),
        default="info", help="debug, info, warning or error (info)")


def _worker(options: Namespace) -> int:
    path = database_path(options)
    timeout = options.default_timeout
    timeout_ms = None if timeout is None else duration_ms(timeout, "--default-timeout", 1)
    purge_after = options.purge_after
    purge_after_ms = None if purge_after is None else duration_ms(purge_after, "--purge-after")
    queues = [check_name(name, "--queue") for name in dict.fromkeys(options.queues or [DEFAULT_QUEUE])]
    if len(queues) > MAX_QUEUES:
        raise Usage(f"--queue can be given {MAX_QUEUES} times at most, not {len(queues):,}")
    try:
        from ..worker import run

        return run(
            path,
            workers=options.workers or _cpus(), lease_seconds=options.lease_seconds, drain=options.drain,
            grace_seconds=options.grace_seconds, handlers=options.handlers, queues=queues,
            default_timeout_ms=timeout_ms, max_jobs_per_child=options.max_jobs_per_child,
            log_format=options.log_format, log_level=options.log_level,
            allow_shared=options.allow_shared, purge_after_ms=purge_after_ms,
        )
    except KeyboardInterrupt:  # it came before the worker was listening, so nothing has been claimed
        return EXIT_DONE


def _cpus() -> int:
    """Return how many CPUs this process may use, which can be fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(allowed or 1, MAX_WORKERS)


COMMANDS: dict[str, Command] = {"worker": (_WORKER, _add_options, _worker)}
