"""What a queue's file must hold after each step of a simulation: the promises of the queue, written once more.

`Model` is a few dozen lines over plain dicts, made from the words of the life cycle and not from an engine:
nothing is stored that can be told from something else (what is unmet, due or blocked is looked up each time),
there are no indexes, chunks or caches, and no rule is taken from the package.  Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

BACKOFF_MS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000)
WAITING = ("pending", "retrying")
DEAD = ("failed", "canceled")
ENDED = ("completed", *DEAD)
STATUSES = ("pending", "running", "retrying", *ENDED)


class Refused(Exception):
    """The queue has to refuse this as an invalid job."""


@dataclass(eq=False)
class Entry:
    """A job as the file must hold it; `unmet` and `ready` are not stored here."""

    seq: int
    id: str
    queue: str
    priority: int
    run_at: int
    max_attempts: int
    idempotency_key: str | None
    parents: tuple[Entry, ...]
    status: str = "pending"
    attempts: int = 0
    lease_owner: str | None = None
    lease_token: str | None = None
    lease_expires_at: int | None = None
    started_at: int | None = None
    finished_at: int | None = None
    result: str | None = None
    progress: float | None = None
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(attempt, owner, reason) of each failed attempt."""


COLUMNS = tuple(name for name in Entry.__dataclass_fields__ if name not in ("parents", "failures"))


class Model:
    """The jobs, by id in the order in which they came, and all tokens ever given out with their jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, Entry] = {}
        self.tokens: dict[str, str] = {}

    def copy(self) -> Model:
        """Return a model that changes by itself."""
        other = Model()
        other.jobs, other.tokens = deepcopy((self.jobs, self.tokens))
        return other

    # -- what follows from the rest ------------------------------------------------------

    def unmet(self, job: Entry) -> int:
        """Count the dependencies that have not completed."""
        return sum(parent.status != "completed" for parent in job.parents)

    def claimable(self, job: Entry, now: int) -> bool:
        """Whether a worker whose clock says `now` may start it."""
        return job.status in WAITING and job.run_at <= now and not self.unmet(job)

    def blocked(self) -> set[str]:
        """Return the jobs that wait, at any depth, for one that failed or was canceled."""
        found: set[str] = set()
        size = -1
        while len(found) != size:
            size = len(found)
            found |= {job.id for job in self.jobs.values() if job.status in WAITING and any(
                parent.status in DEAD or parent.id in found for parent in job.parents)}
        return found

    def counts(self, queue: str | None) -> dict[str, int]:
        """Count the jobs of a queue, or of all, by status."""
        found = [job.status for job in self.jobs.values() if queue in (None, job.queue)]
        return {status: found.count(status) for status in STATUSES}

    def shares(self, queue: str | None, now: int) -> dict[str, int]:
        """Divide the jobs that wait for a worker."""
        blocked = self.blocked()

        def share(job: Entry) -> str:
            if self.unmet(job):
                return "blocked" if job.id in blocked else "waiting"
            return "ready" if job.run_at <= now else "scheduled"

        found = [share(job) for job in self.jobs.values() if queue in (None, job.queue) and job.status in WAITING]
        return {name: found.count(name) for name in ("ready", "scheduled", "waiting", "blocked")}

    # -- jobs come in --------------------------------------------------------------------

    def add(self, batch: Sequence[dict[str, Any]], now: int) -> list[tuple[Entry, bool]]:
        """Take a batch in, whole or not at all; return for each the job it stands for, and whether it is new.

        A new job has no number yet and, unless the caller chose one, no id: `number` gives both.
        """
        _refuse_faults_within(batch)
        with_key = {job.idempotency_key: job for job in self.jobs.values() if job.idempotency_key is not None}
        answer: list[tuple[Entry, bool]] = []
        names: dict[str, Entry] = {}
        for fields in batch:
            known = with_key.get(fields["idempotency_key"])
            entry = known or Entry(0, fields["id"] or "", fields["queue"], fields["priority"],
                                   now + fields["delay_ms"], fields["max_attempts"], fields["idempotency_key"], ())
            if known is None and entry.id in self.jobs:
                raise Refused
            answer.append((entry, known is None))
            if entry.idempotency_key is not None:
                with_key[entry.idempotency_key] = entry
            if fields["id"]:
                names[fields["id"]] = entry
        for (entry, new), fields in zip(answer, batch, strict=True):
            if new:
                if any(name not in names and name not in self.jobs for name in fields["depends_on"]):
                    raise Refused
                parents = [names.get(name) or self.jobs[name] for name in fields["depends_on"]]
                entry.parents = tuple(dict.fromkeys(parents))
        return answer

    def number(self, entry: Entry, id: str, seq: int) -> str | None:
        """Give a new job the id and number that it has in the file; return what is wrong with them."""
        if any(seq <= job.seq for job in self.jobs.values()):
            return f"job {id} got the number {seq}, which is not behind those in use"
        if entry.id not in ("", id) or id in self.jobs or (not entry.id and id != str(seq)):
            return f"the job with id {entry.id!r} and number {seq} came back as {id!r}"
        entry.id, entry.seq = id, seq
        self.jobs[id] = entry
        return None

    # -- the moves -----------------------------------------------------------------------

    def heads(self, now: int, queues: Sequence[str], limit: int) -> list[Entry]:
        """Return the jobs that a claim has to take, in order: highest priority first, then the oldest."""
        found = [job for job in self.jobs.values() if job.queue in queues and self.claimable(job, now)]
        return sorted(found, key=lambda job: (-job.priority, job.seq))[:limit]

    def start(self, job: Entry, owner: str, token: str, now: int, lease_ms: int) -> str | None:
        """Give out a lease; return what is wrong with its token."""
        if token in self.tokens:
            return f"the token {token} of job {job.id} was given out before, for job {self.tokens[token]}"
        self.tokens[token] = job.id
        job.status, job.attempts, job.progress = "running", job.attempts + 1, None
        job.lease_owner, job.lease_token, job.lease_expires_at, job.started_at = owner, token, now + lease_ms, now
        return None

    def held(self, id: str, token: str, now: int) -> Entry | None:
        """Return the job if this is its present lease, and not over by the clock of who asks."""
        job = self.jobs[id]
        held = job.status == "running" and job.lease_token == token and (job.lease_expires_at or 0) > now
        return job if held else None

    def end(self, job: Entry, status: str, now: int) -> None:
        """End a lease, if there is one."""
        job.status = status
        job.lease_owner = job.lease_token = job.lease_expires_at = None
        job.finished_at = now if status in ENDED else None

    def extend(self, id: str, token: str, now: int, lease_ms: int) -> bool:
        """Let the lease end at `now + lease_ms`."""
        job = self.held(id, token, now)
        if job:
            job.lease_expires_at = now + lease_ms
        return job is not None

    def report(self, id: str, token: str, now: int, progress: float) -> bool:
        """Note how far it has come."""
        job = self.held(id, token, now)
        if job:
            job.progress = progress
        return job is not None

    def complete(self, id: str, token: str, now: int, result: str) -> bool:
        """running -> completed."""
        job = self.held(id, token, now)
        if job:
            self.end(job, "completed", now)
            job.result = result
        return job is not None

    def fail(self, id: str, token: str, now: int, delay_ms: int | None, final: bool) -> str | None:
        """running -> retrying, or failed; return which."""
        job = self.held(id, token, now)
        if job is None:
            return None
        wait_ms = BACKOFF_MS[min(job.attempts, len(BACKOFF_MS)) - 1] if delay_ms is None else delay_ms
        return self.miss(job, now, "error", wait_ms, final)

    def miss(self, job: Entry, now: int, reason: str, wait_ms: int, final: bool = False) -> str:
        """Count a failed attempt; return the status that follows."""
        job.failures.append((job.attempts, job.lease_owner or "", reason))
        if final or job.attempts == job.max_attempts:
            self.end(job, "failed", now)
        else:
            self.end(job, "retrying", now)
            if wait_ms:  # one whose lease ran out is due as it was
                job.run_at = now + wait_ms
        return job.status

    def release(self, id: str, token: str, now: int) -> bool:
        """running -> pending, as if it had never been claimed."""
        job = self.held(id, token, now)
        if job:
            self.end(job, "pending", now)
            job.attempts, job.started_at = job.attempts - 1, None
        return job is not None

    def from_ahead(self, job: Entry, now: int) -> bool:
        """Return whether a lease was granted by a clock that is ahead of one that says `now`."""
        started, ends = job.started_at or 0, job.lease_expires_at or 0
        return job.status == "running" and started > now + 1_000 and ends > max(started, now)

    def last_is_from_ahead(self, queue: str, now: int) -> bool:
        """Return whether the lease of a queue that ends last is such a one."""
        running = [job for job in self.jobs.values() if job.status == "running" and job.queue == queue]
        last = max(running, key=lambda job: (job.lease_expires_at or 0, job.seq), default=None)
        return last is not None and self.from_ahead(last, now)

    def pull_back(self, now: int, queues: Sequence[str]) -> None:
        """Let leases that were granted by a clock ahead begin now, where the one that ends last is such a one."""
        found = {queue for queue in queues if self.last_is_from_ahead(queue, now)}
        for job in self.jobs.values():
            if job.queue in found and self.from_ahead(job, now):
                job.lease_expires_at = (job.lease_expires_at or 0) - (job.started_at or 0) + now
                job.started_at = now

    def over(self, now: int, queues: Sequence[str]) -> list[Entry]:
        """Return the jobs whose leases have run out by a clock that says `now`, those that ended first in front."""
        found = [job for job in self.jobs.values() if job.status == "running" and job.queue in queues
                 and (job.lease_expires_at or 0) <= now]
        return sorted(found, key=lambda job: job.lease_expires_at or 0)

    def cancel(self, id: str, now: int) -> bool:
        """pending, retrying, running -> canceled."""
        job = self.jobs[id]
        if job.status in ENDED:
            return False
        self.end(job, "canceled", now)
        return True

    def retry(self, ids: Iterable[str], now: int, sources: Sequence[str] = DEAD) -> int:
        """failed, canceled -> pending with a new budget, due at once; return how many."""
        jobs = [self.jobs[id] for id in ids if self.jobs[id].status in sources]
        for job in jobs:
            self.end(job, "pending", now)
            job.attempts, job.run_at = 0, min(job.run_at, now)
            job.started_at = job.result = job.progress = None
        return len(jobs)


def _refuse_faults_within(batch: Sequence[dict[str, Any]]) -> None:
    """Refuse an id that stands for two jobs, and jobs that wait in a ring; the same key makes one job of two."""
    keys = [fields["idempotency_key"] for fields in batch]
    first = [n if key is None else keys.index(key) for n, key in enumerate(keys)]
    of_id: dict[str, int] = {}
    for n, fields in enumerate(batch):
        if fields["id"] and of_id.setdefault(fields["id"], first[n]) != first[n]:
            raise Refused
    waits = {n: {of_id[name] for name in fields["depends_on"] if name in of_id} for n, fields in enumerate(batch)}
    while free := [n for n, parents in waits.items() if not parents & waits.keys()]:
        for n in free:
            del waits[n]
    if waits:
        raise Refused
