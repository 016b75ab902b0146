"""What a worker says, all its wording in one place: one line for each transition.

Lines are gathered and written once a turn, through a `Writer`, as text for people or as
JSON for machines.  The `logging` package is not used: at tens of thousands of jobs a
second its cost per record would be most of the work.
"""

from __future__ import annotations

import json

from .lifecycle import COMPLETED, FAILED
from .text import escape, escape_json, headline
from .times import format_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .jobs import Job

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_DEBUG, _INFO, _WARNING, _ERROR = range(len(LEVELS))


class Log:
    """The log of one worker.

    Args:
        write: takes a string of whole lines; must not block.
        clock: milliseconds since the epoch.
        worker: this worker's id, a field of each JSON line.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], int], worker: str,
                 format: str = "text", level: str = "info") -> None:
        self._write = write
        self._clock = clock
        self._worker = worker
        self._json = format == "json"
        self._level = LEVELS.index(level)
        self._lines: list[str] = []
        self._time = ""

    def flush(self) -> None:
        """Write what has been gathered."""
        if self._lines:
            self._write("".join(self._lines))
            self._lines.clear()
        self._time = ""

    def _add(self, level: int, event: str, job: Job | None, message: str, **fields: object) -> None:
        if level < self._level:
            return
        if not self._time:
            self._time = format_time(self._clock())  # once a turn
        if self._json:
            about = {} if job is None else {"job_id": job.id, "type": job.type, "attempt": job.attempts,
                                            "trace": job.trace}
            line = json.dumps({"time": self._time, "level": LEVELS[level], "event": event, "worker": self._worker,
                               **about, **fields, "message": message})
            self._lines.append(escape_json(line) + "\n")
        else:
            about_text = "" if job is None else (
                f" job {job.id} ({job.type}), attempt {job.attempts}/{job.max_attempts}:")
            self._lines.append(f"{self._time} {LEVELS[level].upper():7}{escape(f'{about_text} {message}')}\n")

    # -- the worker ----------------------------------------------------------------------

    def started(self, children: int, queues: list[str], types: tuple[str, ...]) -> None:
        """The children are ready."""
        self._add(_INFO, "started", None, f"{self._worker} serves {', '.join(queues)}; children: {children}; "
                  f"types: {', '.join(types)}", queues=queues, types=types)

    def stopping(self, running: int, grace_seconds: float) -> None:
        """A first signal has come."""
        self._add(_INFO, "stopping", None, f"stopping: jobs still running: {running}, time to finish: "
                  f"{grace_seconds:g} s; a second signal stops them at once")

    def stopped(self, completed: int, failed: int, kept: int) -> None:
        """The worker ends; `kept` jobs could not be given back."""
        if kept:
            self._add(_ERROR, "jobs kept", None, f"jobs that could not be given back: {kept}; others can have "
                      "them when their leases run out", kept=kept)
        self._add(_INFO, "stopped", None, f"stopped; attempts completed: {completed}, failed: {failed}",
                  completed=completed, failed=failed)

    def stdout_broken(self, error: OSError) -> None:
        """What jobs print has nowhere to go."""
        self._add(_ERROR, "stdout broken", None, f"stdout cannot be written: {error.strerror or error}; stopping, "
                  "and giving back what was to be printed there")

    def stopped_early(self) -> None:
        """A signal came before the children were ready."""
        self._add(_INFO, "stopped", None, "stopped before any job was claimed")

    def database_trouble(self, error: Exception, outcomes: int) -> None:
        """A turn could not be committed; it will be tried again."""
        self._add(_WARNING, "database trouble", None, f"{error}; trying again, {outcomes} outcomes kept")

    def database_back(self, seconds: float) -> None:
        """A turn was committed after some that were not."""
        self._add(_INFO, "database back", None, f"the database works again after {seconds:.1f} s")

    def file_replaced(self, path: str) -> None:
        """The path names another file, or none."""
        self._add(_ERROR, "file replaced", None, f"{path} was replaced or removed while this worker had it open; "
                  "stopping, as nothing it writes would be seen")

    def wal_large(self, size: int) -> None:
        """Something keeps checkpoints from making progress."""
        self._add(_WARNING, "wal large", None, f"the write-ahead log has grown to {size / 1e6:.0f} MB: some "
                  "program keeps a read transaction open", bytes=size)

    def purged(self, count: int) -> None:
        """A purge has ended that deleted something."""
        self._add(_INFO, "purged", None, f"deleted {count:,} jobs that finished long ago", count=count)

    def child_failed(self, error: str) -> None:
        """A replacement child did not come up."""
        self._add(_ERROR, "child failed", None, f"a child process did not start: {error}; trying again")

    # -- transitions ---------------------------------------------------------------------

    def claimed(self, job: Job) -> None:
        """pending, retrying -> running."""
        if self._level == _DEBUG:
            self._add(_DEBUG, "claimed", job, "claimed")

    def completed(self, job: Job, run_us: int) -> None:
        """running -> completed."""
        took = f"{run_us / 1e3:.1f} ms" if run_us < 1e6 else f"{run_us / 1e6:,.1f} s"
        self._add(_INFO, COMPLETED, job, f"completed in {took}", run_ms=run_us / 1_000)

    def attempt_failed(self, job: Job, status: str, error: str) -> None:
        """running -> retrying or failed."""
        if status == FAILED:
            self._add(_ERROR, FAILED, job, f"failed for good: {headline(error)}", error=error)
        else:
            self._add(_WARNING, "attempt failed", job, f"failed, will be retried: {headline(error)}", error=error)

    def released(self, job: Job) -> None:
        """running -> pending, the attempt returned."""
        self._add(_INFO, "released", job, "given back, not counted as an attempt")

    def expired(self, job: Job, status: str) -> None:
        """running -> retrying or failed, because a lease ran out."""
        after = "failed for good" if status == FAILED else "claimable again"
        self._add(_WARNING, "lease expired", job, f"the lease of {job.lease_owner} ran out; {after}")

    def stale(self, job: Job, what: str) -> None:
        """Something was refused because its lease was no longer held."""
        self._add(_WARNING, "stale result refused", job, f"the lease was lost meanwhile, refused: {what}")

    def lease_lost(self, job: Job) -> None:
        """A heartbeat found the lease gone: canceled, expired, or taken over."""
        self._add(_WARNING, "lease lost", job, "the lease is lost (canceled, or it ran out); stopping the handler")
