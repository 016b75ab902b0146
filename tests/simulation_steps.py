"""The steps of a simulation: each asks a `Store` and the model the same, and then looks at the whole file.

`Steps` knows how to take a step and what must be so after it; who takes which step when is `simulation`'s.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobqueue.db import Store
from jobqueue.errors import DatabaseBusy, InvalidJob
from jobqueue.jobs import NewJob
from tests.engine import NOW, add_batch
from tests.simulation_model import COLUMNS, ENDED, WAITING, Entry, Model, Refused
from tests.support import locked

QUEUES = ("default", "other")
NEEDS_NO_LOCK = "needs no lock"
"""What a step returns that was refused before the file had to be asked."""
TELL = 30
"""How many steps are told when something is wrong."""


class Complaint(AssertionError):
    """The queue did something else than it promises; the text tells the history."""


class Dead(Exception):
    """The process that takes this step dies in its middle."""


class Process:
    """One simulated process.

    Attributes:
        held: the leases that it believes in, by job: (token, until when by its own clock).
    """

    def __init__(self, name: str, store: Store, offset_ms: int) -> None:
        self.name = name
        self.store = store
        self.offset_ms = offset_ms
        self.held: dict[str, tuple[str, int]] = {}
        self.life: Iterator[None] = iter(())


class Steps:
    """What a simulation can do, and how it is checked; `calm`: the clocks agree and only move on."""

    def __init__(self, seed: int, path: Path) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.calm = self.random.random() < 0.4
        self.trouble = 0.02
        """How likely a step is to find the file locked, and as likely to die before its commit."""
        self.now = NOW
        self.model = Model()
        self.log: list[str] = []
        self.used: Counter[str] = Counter()
        self.ghosts: list[tuple[str, str]] = []
        """Leases (job, token) of those who died or gave up; their results may still come in."""
        self.processes: list[Process] = []
        self.path = path
        self.look = sqlite3.connect(path, isolation_level=None)
        self.look.execute("PRAGMA synchronous = OFF")  # the last to close writes the log back
        self._before: dict[str, str] = {}
        self._ready: set[str] = set()

    # -- steps: each asks the file and the model, and compares the answers --------------------

    def act(self, me: Process, text: str, deed: Callable[[int], object]) -> None:
        """Take a step; before it the file may be found locked, or the process may die at the end, uncommitted."""
        self.told(me, text)
        if self.random.random() < self.trouble:
            with locked(self.path):
                try:
                    through = deed(self.now + me.offset_ms) != NEEDS_NO_LOCK
                except DatabaseBusy:
                    through = False
                    self.used["DatabaseBusy"] += 1
                if through:
                    raise self.complaint("a step went through while another process held the write lock")
            self.check("busy")
        if self.random.random() < self.trouble:
            kept = self.model.copy()
            try:
                with me.store.transaction():
                    deed(self.now + me.offset_ms)
                    raise Dead
            except Dead:
                self.model = kept
                self.check("dies before the commit")
                raise
        deed(self.now + me.offset_ms)
        self.check(text)

    def _add(self, me: Process, batch: list[dict[str, Any]], jobs: list[NewJob], single: bool, now: int) -> object:
        answer: list[str] | str
        try:
            answer = [me.store.add(jobs[0], now_ms=now)[0]] if single else add_batch(me.store, jobs, now)
        except InvalidJob as error:
            answer = "InvalidJob"
            self.used[type(error).__name__] += 1
        try:
            wanted = self.model.add(batch, now)
        except Refused:
            self.same("add", answer, "InvalidJob")
            return None if single else NEEDS_NO_LOCK
        if isinstance(answer, str):
            raise self.complaint(f"add was refused: {answer}")
        seqs = dict(self._rows(me.store.sqlite, "SELECT id, seq FROM jobs"))
        for id, (entry, new) in zip(answer, wanted, strict=True):
            problem = self.model.number(entry, id, seqs[id]) if new else entry.id != id and f"{id} for a known key"
            if problem:
                raise self.complaint(problem)
        return None

    def _promote(self, me: Process, now: int, queues: tuple[str, ...]) -> None:
        self.same("promote", me.store.promote(now_ms=now, queues=queues), False)

    def _claim(self, me: Process, now: int, queues: tuple[str, ...], limit: int, lease_ms: int) -> None:
        query = "SELECT id FROM jobs WHERE ready"  # nothing else can be claimed before it is promoted
        ready = {id for (id,) in self._rows(me.store.sqlite, query)}
        wanted = [job for job in self.model.heads(now, queues, 1_000) if job.id in ready][:limit]
        claimed = me.store.claim(me.name, now_ms=now, lease_ms=lease_ms, limit=limit, queues=queues)
        self.same("claim", [job.id for job in claimed], [job.id for job in wanted])
        for job, entry in zip(claimed, wanted, strict=True):
            token = job.lease_token or ""
            problem = self.model.start(entry, me.name, token, now, lease_ms)
            if problem:
                raise self.complaint(problem)
            self.same(f"attempts of {job.id}", (job.attempts, job.status), (entry.attempts, "running"))
            for other in self.processes:
                if self.calm and other.held.get(job.id, ("", 0))[1] > now:
                    raise self.complaint(f"{me.name} got job {job.id}, whose lease {other.name} still holds")
            self._believe(me, job.id, token, now + lease_ms)

    def _believe(self, me: Process, id: str, token: str, until: int | None) -> None:
        if until is None:
            me.held.pop(id, None)
            self.ghosts.append((id, token))
        else:
            me.held[id] = token, until

    def _settling(self, me: Process, move: str, id: str, token: str) -> Callable[[int], None]:
        delay_ms, final = self.random.choice((None, None, 0, 700)), self.random.random() < 0.15

        def settle(now: int) -> None:
            got: object
            if move == "complete":
                got = me.store.complete(id, token, id, now_ms=now)
                self.same(f"complete {id}", got, self.model.complete(id, token, now, f'"{id}"'))
            elif move == "fail":
                got = me.store.fail(id, token, "no", now_ms=now, delay_ms=delay_ms, final=final)
                self.same(f"fail {id}", got, self.model.fail(id, token, now, delay_ms, final))
            else:
                got = me.store.release(id, token, now_ms=now)
                self.same(f"release {id}", got, self.model.release(id, token, now))
            self.used[f"stale {move}" if not got else move] += 1
            self._believe(me, id, token, None)

        return settle

    def _complete_together(self, me: Process, done: list[tuple[str, str]], now: int) -> None:
        outcomes = [(self.model.jobs[id].seq, token, f'"{id}"') for id, token in done]
        answers = me.store.complete_many(outcomes, now_ms=now)
        wanted = [self.model.complete(id, token, now, f'"{id}"') for id, token in done]
        self.same(f"complete {done} together", answers, wanted)
        self.used["together"] += 1
        for id, token in done:
            self._believe(me, id, token, None)

    def _recover(self, me: Process, now: int, queues: tuple[str, ...], limit: int) -> None:
        me.store.pull_back(now_ms=now, queues=queues)
        self.model.pull_back(now, queues)
        over = self.model.over(now, queues)
        recovered = me.store.recover_expired(now_ms=now, queues=queues, limit=limit)
        self.same("how many were recovered", len(recovered), min(limit, len(over)))
        for job, status in recovered:
            entry = self.model.jobs[job.id]
            if entry not in over:
                raise self.complaint(f"job {job.id} was recovered, whose lease is not over")
            self.same(f"the end of job {job.id}", status, self.model.miss(entry, now, "lease expired", 0))
            self.used["recover"] += 1

    def _steer(self, me: Process, what: str, id: str, now: int) -> None:
        if what == "retry":
            self.same(f"retry {id}", me.store.retry(id, now_ms=now), bool(self.model.retry([id], now)))
            return
        self.same(f"cancel {id}", me.store.cancel(id, now_ms=now), self.model.cancel(id, now))
        for process in self.processes:  # what it holds is worth nothing now, though it does not know
            if id in process.held:
                self.ghosts.append((id, process.held[id][0]))
                process.held[id] = process.held[id][0], 0

    def _retry_failed(self, me: Process, now: int) -> None:
        total, last = 0, 0
        while True:
            count, last = me.store.retry_failed(now_ms=now, after_seq=last)
            if not count:
                break
            total += count
        self.same("retry_failed", total, self.model.retry([*self.model.jobs], now, ("failed",)))

    def _probe(self, me: Process, id: str) -> None:
        """Try all tokens that the job ever had, by each clock: only one may work.  Then take it all back."""
        tokens = [token for token, owner in self.model.tokens.items() if owner == id]
        self.told(me, f"tries the {len(tokens)} tokens of {id}")
        try:
            with me.store.transaction():
                for clock in self.processes:
                    now = self.now + clock.offset_ms
                    until = self.model.jobs[id].lease_expires_at or 0  # kept the same, lest one extend for the next
                    for token in tokens:
                        works = until > now and self.model.jobs[id].lease_token == token
                        got = me.store.extend(id, token, now_ms=now, lease_ms=until - now)
                        self.same(f"extend {id} with the token {token}", got, works)
                raise Dead
        except Dead:
            self.check("probe")

    # -- what must be so at all times ----------------------------------------------------

    def check(self, step: str) -> None:
        """Compare the file with the model, and with what must be so whatever the model says."""
        self.used[step.partition(" ")[0].rstrip(",")] += 1
        rows = self._rows(self.look, f"SELECT unmet, ready, {', '.join(COLUMNS)} FROM jobs ORDER BY seq")
        wanted = sorted(self.model.jobs.values(), key=lambda job: job.seq)
        if len(rows) != len(wanted):
            raise self.complaint(f"the file has {len(rows)} jobs instead of {len(wanted)}")
        edges = []
        self._ready = {id for _, ready, _, id, *_ in rows if ready}
        for (unmet, ready, *values), job in zip(rows, wanted, strict=True):
            expected = [getattr(job, name) for name in COLUMNS]
            if values != expected or unmet != self.model.unmet(job):
                self._differ(job, dict(zip(("unmet", *COLUMNS), (unmet, *values), strict=True)))
            if ready and (unmet or job.status not in WAITING):
                raise self.complaint(f"job {job.id} is {job.status} with {unmet} unmet dependencies, and ready")
            edges += [(job.seq, parent.seq) for parent in job.parents]
        self.same("edges", sorted(self._rows(self.look, "SELECT job, depends_on FROM dependencies")), sorted(edges))
        failures = [(job.seq, *failure) for job in wanted for failure in job.failures]
        query = "SELECT job, attempt, owner, reason FROM failures ORDER BY job, rowid"
        self.same("failures", self._rows(self.look, query), failures)
        statuses = {job.id: job.status for job in wanted}
        for id, old in self._before.items():
            if old in ENDED and statuses[id] != old and (old == "completed" or "retry" not in step):
                raise self.complaint(f"job {id} was {old}, and is {statuses[id]} without an operator's command")
        self._before = statuses
        if self.random.random() < 0.4:  # half of the time goes into this
            self._check_counts()

    def _differ(self, job: Entry, found: dict[str, Any]) -> None:
        wanted = {"unmet": self.model.unmet(job), **{name: getattr(job, name) for name in COLUMNS}}
        faults = [f"{name} is {got!r}, not {wanted[name]!r}" for name, got in found.items() if got != wanted[name]]
        raise self.complaint(f"job {job.id}: {'; '.join(faults)}")

    def _check_counts(self) -> None:
        """What the engine says of the whole, by the clock of somebody: counts, shares, and when to look again."""
        somebody = self.random.choice(self.processes)
        queue, now = self.random.choice((None, *QUEUES)), self.now + somebody.offset_ms
        self.same("counts", somebody.store.counts(queue), self.model.counts(queue))
        self.same("shares", somebody.store.shares(queue, now_ms=now), self.model.shares(queue, now))
        if self.random.random() < 0.4:
            self.same("blocked", set(somebody.store.blocked()), self.model.blocked())
        queues = (queue,) if queue else QUEUES
        due = [job for job in self.model.jobs.values() if job.queue in queues and job.id not in self._ready
               and self.model.claimable(job, now)]  # fmt: skip
        self.same("has_due", somebody.store.has_due(now_ms=now, queues=queues),
                  bool(due or self.model.over(now, queues)
                       or any(self.model.last_is_from_ahead(each, now) for each in queues)))
        if not somebody.store.has_ready(queues):  # then this is all that could wake a worker
            moments = [job.run_at if job.status in WAITING else job.lease_expires_at
                       for job in self.model.jobs.values() if job.queue in queues and (
                           job.status == "running" or (job.status in WAITING and not self.model.unmet(job)))]
            self.same("next_event", somebody.store.next_event(queues), min(moments, default=None))  # type: ignore[type-var]

    def _rows(self, connection: sqlite3.Connection, query: str) -> list[Any]:
        return connection.execute(query).fetchall()

    # -- telling -------------------------------------------------------------------------

    def same(self, what: str, got: object, wanted: object) -> None:
        """Complain unless the queue answered as it should."""
        if got != wanted:
            raise self.complaint(f"{what}: {got!r} instead of {wanted!r}")

    def told(self, process: Process | None, text: str) -> None:
        """Note a step."""
        moment = self.now + (process.offset_ms if process else 0) - NOW
        self.log.append(f"  {len(self.log):4} {process.name if process else 'all'} at {moment:+,} ms: {text}")

    def complaint(self, text: str) -> Complaint:
        """Return an error that tells the history."""
        head = f"{text}\nreplay: python -m tests.simulation --seed {self.seed}; the last steps were:"
        return Complaint("\n".join([head, *self.log[-TELL:]]))
