"""The command that waits for jobs to end: `wait`."""

from __future__ import annotations

import time

from ..errors import UnknownJobError
from ..jobs import duration_ms
from ..lifecycle import COMPLETED
from ..text import headline
from .common import (
    EXIT_BUSY,
    EXIT_DONE,
    EXIT_FAILED,
    Usage,
    add_database,
    add_ids,
    add_json,
    emit_json,
    for_each_id,
    open_queue,
    say,
    shown,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from ..jobs import Job
    from .common import Command

_WAIT = f"""\
Wait until jobs have ended, in whatever way; it costs next to no CPU.

examples:
  python -m jobqueue wait --database jobs.db 17
  id=$(python -m jobqueue enqueue --type fetch) && python -m jobqueue wait "$id"
  python -m jobqueue wait --result "$id"                 print what its handler returned
  python -m jobqueue wait --timeout 5m 17 18 19
  python -m jobqueue wait --json 17

--result prints a line of JSON for each {COMPLETED} job, --json the jobs themselves,
both in the order in which they are named.

exit status: 0 all {COMPLETED}; 1 one did not, or is unknown (the others are waited
for nevertheless); 75 --timeout is over; 130 Ctrl+C.
"""


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_ids(parser)
    add_database(parser)
    add("--timeout", metavar="SPAN", help="give up after so long: 90 (seconds), 5m, 2h; exit 75 (never)")
    add("--result", action="store_true", help="print the result of each as JSON")
    add_json(parser, "one JSON object a line, all fields")


def _wait(options: Namespace) -> int:
    if options.result and options.json:
        raise Usage("--json has the result among the fields: leave out --result")
    timeout = None if options.timeout is None else duration_ms(options.timeout, "--timeout") / 1_000
    deadline = None if timeout is None else time.monotonic() + timeout
    late = False
    with open_queue(options) as queue:
        jobs, code = for_each_id(options.ids, queue.known)
        for job in jobs:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                ended = queue.wait(job.id, left)
            except TimeoutError:
                say(f"job {shown(job.id)} has not ended within {options.timeout}")
                late = True
            except UnknownJobError as error:  # deleted meanwhile
                say(str(error))
                code = EXIT_FAILED
            else:
                code = _tell(options, ended) or code
    return EXIT_BUSY if late else code


def _tell(options: Namespace, job: Job) -> int:
    if options.json:
        emit_json([job.as_dict()])
    elif options.result and job.status == COMPLETED:
        emit_json([job.result])
    if job.status == COMPLETED:
        return EXIT_DONE
    error = f": {headline(job.last_error)}" if job.last_error else ""
    say(f"job {shown(job.id)} is {job.status}{error}")
    return EXIT_FAILED


COMMANDS: dict[str, Command] = {"wait": (_WAIT, _add_options, _wait)}
