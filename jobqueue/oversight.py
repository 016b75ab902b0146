"""The half of `Queue` that people use: look at jobs, wait for them, steer them, keep the file.

Thin: a clock, units, and the engine or a module of functions over it (`history`, `explain`,
`figures`, `selection`, `steering`, `upkeep`, `archive`, ...), each loaded when it is first needed, as most
programs need few.  No rule and no statement lives here.
"""

from __future__ import annotations

import time

from .errors import UnknownJobError
from .jobs import duration_ms, moment_ms
from .lifecycle import FAILED, FINISHED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from typing import Any, TypeVar

    from .db import Store
    from .explain import Cause
    from .figures import Figures
    from .history import History, Tree
    from .jobs import Job
    from .upkeep import Purge

    Found = TypeVar("Found")
    Done = TypeVar("Done")
    Causes = list[Cause]
    Jobs = list[Job]  # inside the class, `list` is a method
    Ids = list[str]

LOOK_SECONDS, CALM_LOOK_SECONDS = 0.004, 0.05
"""How often `wait` looks for commits of others: at first, and after some seconds; it costs next to no CPU."""
LONG_HOLD_MS = 100
"""When a batch holds the write lock for longer than this, workers get the time back on their leases."""
MAX_HOLD_MS = 600_000
"""No batch takes so long: the clock has jumped."""


class Oversight:
    """What `Queue` inherits: see there."""

    _store: Store
    _clock: Callable[[], int]

    # -- looking -------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        """Return a job as it is now, None if there is none."""
        return self._store.get(id)

    def known(self, id: str) -> Job:
        """Return a job as it is now; raises `UnknownJobError` if there is none."""
        return _known(self._store.get(id), id)

    def list(self, status: str | None = None, type: str | None = None, limit: int | None = None,
             queue: str | None = None) -> Jobs:
        """Return jobs, newest first; None: of any status, type, queue, and without a limit.

        Raises:
            ValueError: there is no such status.
        """
        return list(self.iterate(status, type, limit, queue))

    def iterate(self, status: str | None = None, type: str | None = None, limit: int | None = None,
                queue: str | None = None, *, since: str | int | datetime | None = None, blocked: bool = False,
                depends_on: str | None = None, sort: str = "newest") -> Iterator[Job]:
        """Yield what `list` returns, page by page, so that memory stays flat; the rest is `selection.select`'s."""
        if since is None and not blocked and depends_on is None and sort == "newest":
            return self._store.iterate(status=status, type=type, queue=queue, limit=limit)
        from .selection import select

        return select(self._store, status=status, type=type, queue=queue, limit=limit, blocked=blocked, sort=sort,
                      since_ms=None if since is None else moment_ms(since, "since"), depends_on=depends_on)

    def blocked_among(self, jobs: Iterable[Job]) -> set[int]:
        """Return the `seq` of those of a list that wait for a dead job; see `history.blocked_among`."""
        from .history import blocked_among

        return blocked_among(self._store, jobs)

    def history(self, id: str) -> History:
        """Return all about a job: itself, failed attempts, dependencies, dependents."""
        from .history import history

        return _known(history(self._store, id), id)

    def tree(self, id: str, *, reverse: bool = False) -> Tree:
        """Return what a job depends on, or with `reverse` what depends on it, at any depth, up to 1,000 edges."""
        from .history import tree

        return _known(tree(self._store, id, reverse=reverse), id)

    def explain(self, id: str) -> tuple[Job, Causes]:
        """Return a job and why it is not running, the most important cause first; see `explain.Cause`."""
        from .explain import explain

        return _known(explain(self._store, id, now_ms=self._clock()), id)

    def figures(self, queue: str | None = None) -> Figures:
        """Return counts, ages, rates and percentiles of one queue or (None) of the file; see `figures.Figures`."""
        from .figures import figures

        return figures(self._store, queue, now_ms=self._clock())

    def types(self) -> Ids:
        """Return the types of the jobs in the file, sorted, at most a thousand."""
        from .hints import types

        return types(self._store)

    def newest_ids(self) -> Ids:
        """Return the ids of the newest thousand jobs."""
        from .hints import ids

        return ids(self._store)

    def stats(self, queue: str | None = None) -> dict[str, int]:
        """Return how many jobs have each status, and how many of the waiting ones are
        `ready`, `scheduled`, `waiting` (for dependencies) or `blocked`; None: in the whole file."""
        with self._store.snapshot():
            return {**self._store.counts(queue), **self._store.shares(queue, now_ms=self._clock())}

    def wait(self, id: str, timeout: float | None = None) -> Job:
        """Return a job once it is finished, in whatever way.

        Args:
            timeout: seconds; None: wait for ever.

        Raises:
            TimeoutError: it was not finished in time.
            UnknownJobError: there is no such job.
        """
        begun = time.monotonic()
        while True:
            version = self._store.data_version()
            job = self.known(id)
            if job.status in FINISHED:
                return job
            while True:  # one pause at least, as others may commit all the time
                waited = time.monotonic() - begun
                if timeout is not None and waited >= timeout:
                    raise TimeoutError(f"job {id!r} was still {job.status} after {timeout:g} seconds")
                pause = min(max(LOOK_SECONDS, waited / 100), CALM_LOOK_SECONDS)
                time.sleep(pause if timeout is None else min(pause, timeout - waited))
                if self._store.data_version() != version:
                    break

    # -- steering ------------------------------------------------------------------------

    def cancel(self, id: str) -> bool:
        """Cancel a job that is not finished; a running one loses its lease.  False if it is finished."""
        with self._store.transaction():
            return self._store.cancel(id, now_ms=self._clock())

    def retry(self, id: str) -> bool:
        """Give a failed or canceled job a new budget of attempts; False if it is neither."""
        with self._store.transaction():
            return self._store.retry(id, now_ms=self._clock())

    def retry_failed(self, type: str | None = None, id: str | None = None, dry_run: bool = False,
                     error: str | None = None, progress: Callable[[int], object] | None = None) -> int:
        """Give all failed jobs a new budget, or only some; return how many.

        Args:
            type: only those of this type.
            id: only this one.
            dry_run: only count them.
            error: only those whose last error holds this text.
            progress: told now and then how many it has been.

        Raises:
            UnknownJobError: `id` names no job.
        """
        if id is not None:
            job = self.known(id)
            chosen = job.status == FAILED and type in (None, job.type) and (error or "") in (job.last_error or "")
            return int(chosen and (dry_run or self.retry(id)))
        from .steering import retry_failed

        return retry_failed(self._store, self._clock, type=type, error=error, dry_run=dry_run, progress=progress)

    def cancel_many(self, type: str | None = None, queue: str | None = None, running: bool = False,
                    dry_run: bool = False, progress: Callable[[int], object] | None = None) -> int:
        """Cancel the jobs that wait for a worker, of a type or queue or (None) all; return how many.

        Args:
            running: those that run, too; they lose their leases.
            dry_run, progress: as for `retry_failed`.
        """
        from .steering import cancel_many

        return cancel_many(self._store, self._clock, type=type, queue=queue, running=running, dry_run=dry_run,
                           progress=progress)

    # -- keeping the file ----------------------------------------------------------------

    def purge(self, older_than: float | str, *, statuses: Sequence[str] | None = None, type: str | None = None,
              dry_run: bool = False, progress: Callable[[int, float], object] | None = None) -> Purge:
        """Delete jobs that finished longer ago than `older_than` (seconds, or as `30d`), and shrink the file.

        A job that an unfinished one depends on, at any depth, stays.  With a job its history, its outputs
        and its idempotency key are forgotten.  Works in many short transactions, with pauses for others.

        Args:
            statuses: of finished jobs; None: completed and canceled.
            dry_run: only count.
            progress: told now and then how many jobs are deleted, and how far it has come, 0 to 1.

        Returns:
            what was done: see `upkeep.Purge` for its attributes `jobs`, `needed`, `freed_bytes`.

        Raises:
            ValueError: one of the statuses is none of a finished job.
        """
        from .upkeep import purge

        cutoff_ms = self._clock() - duration_ms(older_than, "older_than")
        return purge(self._store, progress, cutoff_ms=cutoff_ms, statuses=statuses, type=type, dry_run=dry_run)

    def backup(self, path: str | os.PathLike[str], *, force: bool = False,
               progress: Callable[[int, float], object] | None = None) -> int:
        """Write a copy of the file as it is now, whole or not at all, readable by you alone; return its bytes.

        Args:
            force: replace a file that is there.
            progress: told now and then how many pages are copied, and how far it has come, 0 to 1.

        Raises:
            FileExistsError: there is something at `path`.
            DatabaseError: it cannot be written, is this very queue, or this file is damaged.
        """
        from .backup import backup

        return backup(self._store, path, force=force, progress=progress)

    def export(self, *, status: str | None = None, type: str | None = None,
               queue: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield all there is to know of each job, oldest first, as of one moment: see `archive`; memory is flat."""
        from .archive import export

        return export(self._store, status=status, type=type, queue=queue)

    def import_jobs(self, records: Iterable[tuple[int, Mapping[str, Any]]], *,
                    skip_existing: bool = False) -> tuple[int, int]:
        """Store what `export` yielded, all or none; return how many jobs, and how many were skipped.

        Args:
            records: each with a rising number, which `InvalidJob.index` gives back.
            skip_existing: leave out jobs whose id is taken; False: they are an `InvalidJob`.

        Raises:
            InvalidJob: a record breaks a rule, an id or key is taken, a dependency unknown.
        """
        from .arrivals import Arrivals

        with Arrivals(self._store) as arrivals:
            arrivals.extend_from(records)
            arrivals.check()
            return self._in_one_go(
                lambda now_ms: arrivals.bring_in(now_ms=now_ms, skip_existing=skip_existing))

    # -- pieces --------------------------------------------------------------------------

    def _in_one_go(self, action: Callable[[int], Done]) -> Done:
        """Do what may hold the write lock for long; workers, whose heartbeats cannot come through, get it back."""
        with self._store.transaction():
            begun = self._clock()
            done = action(begun)
            held_ms = self._clock() - begun
            if LONG_HOLD_MS < held_ms < MAX_HOLD_MS:
                self._store.prolong_for_workers(now_ms=begun, by_ms=2 * held_ms)  # the commit takes long too
        return done


def _known(found: Found | None, id: str) -> Found:
    if found is None:
        raise UnknownJobError(id)
    return found
