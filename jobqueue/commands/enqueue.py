"""The command that queues work: `enqueue`, one job from options or many from a file.

A file is read as a stream and handed to the store as one atomic batch, so that its size
costs no memory; an error names the line.  What a job may be is decided in `jobs.py`.
"""

from __future__ import annotations

from itertools import chain, islice

from ..errors import InvalidJob
from ..jobs import FIELDS, MAX_JSON_DEPTH, decode_json, new_job, new_job_from
from ..times import now_ms
from .common import (
    EXIT_DONE,
    Failure,
    Usage,
    add_database,
    add_json,
    add_quiet,
    database_path,
    emit_ids,
    emit_json,
    open_queue,
    say,
    whole_number,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from ..jobs import NewJob
    from .common import Command

MAX_LINE_BYTES = 8 * 1024 * 1024
"""A payload of 1 MiB, were every character of it escaped as \\uXXXX, still fits a line."""

_ENQUEUE = """\
Queue a job, or with --file many at once, and print the id.

examples:
  python -m jobqueue enqueue --database jobs.db --type print --payload '{"message":"hello"}'
  python -m jobqueue enqueue --type report --run-at 2030-01-31T08:00:00Z --priority 10
  python -m jobqueue enqueue --type mail --payload @mail.json --idempotency-key mail-2030-01-31
  first=$(python -m jobqueue enqueue --type fetch)
  python -m jobqueue enqueue --type parse --depends-on "$first" --timeout 10m
  python -m jobqueue enqueue --file jobs.jsonl

A line of the file is one job, as in
  {"type":"print","payload":{"message":"hi"},"delay":"5m"}
Its keys: type payload queue id priority max_attempts idempotency_key run_at delay
timeout depends_on (a list of ids, also of jobs in the same file) trace.

exit status: 0 queued, or the key was there already; 1 failed, as when a file
cannot be read; 2 invalid job or usage; 75 database busy: try again. Unless it is
0, nothing was queued.
"""

def _add_options(parser: ArgumentParser) -> None:
    # No option has a default: which ones were given matters beside --file, and the
    # defaults live in jobs.py.
    add = parser.add_argument
    add_database(parser)
    add("--type", metavar="TYPE", help="what kind of job, so which handler runs it")
    add("--payload", metavar="JSON", help="any JSON value; - reads it from stdin, @FILE from a file (null)")
    add("--queue", metavar="NAME", help="the lane it waits in (default)")
    add("--id", metavar="ID", help="its id (the next number)")
    add("--priority", metavar="N", type=whole_number, help="higher runs first (0)")
    add("--max-attempts", metavar="N", type=whole_number, help="starts before it counts as failed (3)")
    add("--idempotency-key", metavar="KEY",
        help="a second job with this key is not queued: the first one's id is printed, exit 0")
    add("--run-at", metavar="TIME", help="not before, as in 2030-01-31T08:00:00Z or ...+02:00")
    add("--delay", metavar="SPAN", help="not before this long from now: 90 (seconds), 5m, 2h, 1d")
    add("--timeout", metavar="SPAN", help="how long one attempt may run (the worker's --default-timeout)")
    add("--depends-on", metavar="ID", action="append", help="a job that must complete first; repeatable")
    add("--trace", metavar="ID", help="a W3C traceparent, or any id that travels along")
    add("--file", metavar="FILE", help="many jobs as JSON Lines, stored all or none; - reads stdin")
    add_quiet(parser)
    add_json(parser, 'print {"id": ..., "created": ...}; with --file {"id": ...} for each job')


def _enqueue(options: Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name in FIELDS and value is not None}
    if options.file is not None:
        if given:
            named = ", ".join("--" + name.replace("_", "-") for name in given)
            raise Usage(f"--file takes its jobs from the file: leave out {named}")
        return _enqueue_file(options)
    if "type" not in given:
        raise Usage("give --type TYPE for one job, or --file FILE for many")
    if "payload" in given:
        given["payload"] = _payload(given["payload"])
    job = new_job(**given)
    id, created = _add(options, job)
    if not created:
        say(f"the key {job.idempotency_key!r} belongs to job {id!r} already; nothing was queued")
    try:
        if options.json:
            emit_json([{"id": id, "created": created}])
        else:
            emit_ids([id])
    except Failure as error:
        raise Failure(f"job {id!r} is queued, but: {error}") from error
    return EXIT_DONE


def _add(options: Namespace, job: NewJob) -> tuple[str, bool]:
    """Store one job with no more of the engine loaded than that takes: this command is to start fast."""
    from ..intake import Intake

    intake = Intake(database_path(options), allow_shared=options.allow_shared)
    try:
        with intake.transaction():
            return intake.add(job, now_ms=now_ms())
    finally:
        intake.close()


def _payload(source: str) -> object:
    if source != "-" and not source.startswith("@"):
        return decode_json(source)
    from .files import BOM, InputFile, text_of

    with InputFile(source.removeprefix("@") if source != "-" else "-") as file:
        data = file.read(MAX_LINE_BYTES + 1)
        if len(data) > MAX_LINE_BYTES:
            raise Usage(f"{file.name} holds more than {MAX_LINE_BYTES:,} bytes, too much for a payload")
        try:
            return decode_json(text_of(data.removeprefix(BOM)))
        except InvalidJob as error:
            raise Usage(f"{file.name}: {error}") from None


def _enqueue_file(options: Namespace) -> int:
    from ..progress import ProgressBar
    from .files import InputFile, read_lines

    with InputFile(options.file) as file, open_queue(options) as queue:
        try:
            with ProgressBar("reading", quiet=options.quiet) as bar:
                ids = iter(queue.add_many(read_lines(file, _job, bar, most_bytes=MAX_LINE_BYTES)))
                first = list(islice(ids, 1))  # everything is stored once there is an id
        except InvalidJob as error:
            where = file.name if error.index is None else f"{file.name}, line {error.index}"
            raise Usage(f"{where}: {error}; nothing was queued") from None
        try:
            if options.json:
                emit_json({"id": id} for id in chain(first, ids))
            else:
                emit_ids(chain(first, ids))
        except Failure as error:
            raise Failure(f"the jobs of {file.name} are queued, but: {error}") from error
    if not file.jobs:
        say(f"{file.name} holds no job; nothing was queued")
    return EXIT_DONE


def _job(line: str) -> NewJob:
    return new_job_from(decode_json(line, "the line", max_depth=MAX_JSON_DEPTH + 1))


COMMANDS: dict[str, Command] = {"enqueue": (_ENQUEUE, _add_options, _enqueue)}
