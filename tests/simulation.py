"""Many processes on one file, simulated: one seed is one history, checked after every step.

    python -m tests.simulation --seed 7          replay a history
    python -m tests.simulation --seconds 600     look for a history that goes wrong

One thread plays producers, workers and operators in turns, each a generator with a real `Store` of its own on
one real file, and a clock of its own.  They die at every point between claim and settle, come back late with
tokens that are worth nothing any more, recover and promote over each other, and now and then find the file
locked.  Each answer and, after each step, the whole file are compared with `simulation_model.Model`.

What holds under which clocks:

- Always: a job has at most one token that is worth anything, the last one given out; no other can change the
  job, and this one not when its lease is over by the clock of who uses it.  Nothing starts before `run_at`, or is
  recovered before its lease is over, by the clock of who looks.
- In calm histories, whose clocks agree and only move on: while a worker believes in a lease (neither settled, nor
  canceled, nor past its end), nobody else gets one for that job.  With clocks apart that cannot be: who is behind
  believes in a lease that others have seen end; its token is refused then.

At the end of each history everybody is dead, the clocks agree, and one new worker must bring all to an end.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from jobqueue.db import Store
from jobqueue.jobs import new_job
from tests.simulation_model import DEAD, ENDED
from tests.simulation_steps import QUEUES, Complaint, Dead, Process, Steps

HOUR_MS = 3_600_000
LARGEST_SKEW_MS = 20_000
LEASES_MS = (1_000, 5_000, 30_000)
Opener = Callable[[Path], Store]


class Simulation(Steps):
    """One history on a new file in `directory`; see the module."""

    def __init__(self, seed: int, directory: Path, steps: int = 100, opener: Opener = Store) -> None:
        path = directory / f"{seed}.db"
        path.write_bytes(_empty())
        super().__init__(seed, path)
        self.steps = steps
        self._opener = opener
        self._born = 0
        self.processes += [self._spawn(self._new_store()) for _ in range(5)]

    def close(self) -> None:
        """Close the file."""
        for process in self.processes:
            process.store.close()
        self.look.close()

    def run(self) -> None:
        """Live through the history; raise `Complaint` as soon as anything is wrong."""
        for _ in range(self.steps):
            self.now += self.random.choice((0, 0, 1, 10, 200, 500, 1_000, 3_000, 20_000))
            index = self.random.randrange(len(self.processes))
            process = self.processes[index]
            if not self.calm and self.random.random() < 0.03:
                process.offset_ms = self.random.choice((self._skew(), self._skew(), -HOUR_MS, HOUR_MS))
                self.told(process, f"clock set to {process.offset_ms:+,} ms")
            try:
                if self.random.random() < 0.04:
                    raise Dead
                next(process.life)
            except Dead:
                self.told(process, f"dies, holding {sorted(process.held)}")
                self.ghosts += [(id, token) for id, (token, _) in process.held.items()]
                store = process.store
                if self.random.random() < 0.3:
                    store.close()
                    store = self._new_store()
                self.processes[index] = self._spawn(store)
        self.heal()

    # -- processes -----------------------------------------------------------------------

    def _new_store(self) -> Store:
        store = self._opener(self.path)
        store.patience_seconds = 0
        store.sqlite.execute("PRAGMA busy_timeout = 0").fetchall()
        store.sqlite.execute("PRAGMA synchronous = OFF").fetchall()
        return store

    def _skew(self) -> int:
        return 0 if self.calm else self.random.randint(-LARGEST_SKEW_MS, LARGEST_SKEW_MS)

    def _spawn(self, store: Store) -> Process:
        kind = self.random.choice((self.producer, self.worker, self.worker, self.operator))
        if self._born < 4:  # so that each history has one of each
            kind = (self.producer, self.worker, self.worker, self.operator)[self._born]
        self._born += 1
        process = Process(f"{kind.__name__}-{self._born}", store, self._skew())
        process.life = kind(process)
        return process

    def producer(self, me: Process) -> Iterator[None]:
        """Store jobs, one at a time or in batches."""
        while True:
            size = self.random.choice((1, 1, 1, 2, 5))
            if len(self.model.jobs) < 45:
                self.add(me, [self._new_job(n) for n in range(size)], self.random.random() < 0.5)
            else:
                self.act(me, "promote", lambda now: self._promote(me, now, QUEUES))
            yield

    def _new_job(self, place: int) -> dict[str, Any]:
        pick, known = self.random.choice, [*self.model.jobs][-12:]
        fresh = f"j{len(self.model.jobs)}.{place}"
        names = [pick(known) for _ in range(pick((0, 0, 0, 1, 2, 3))) if known]
        if place and self.random.random() < 0.6:
            names.append(f"j{len(self.model.jobs)}.{self.random.randrange(place)}")
        if self.random.random() < 0.02:
            names.append("nobody")
        return {"id": pick((*[fresh] * 5, *known[-1:])) if place or self.random.random() < 0.5 else None,
                "queue": pick(QUEUES), "priority": pick((0, 0, 1, -1)), "max_attempts": pick((1, 2, 3, 3)),
                "delay_ms": pick((0, 0, 0, 1, 700, 30_000)), "depends_on": names,
                "idempotency_key": pick((None, None, None, f"k{self.random.randrange(8)}"))}  # fmt: skip

    def worker(self, me: Process) -> Iterator[None]:
        """Claim, work for a while, settle; the next claim often shares the transaction, as in a worker's turn."""
        settle: list[Callable[[int], None]] = []
        while True:
            lease_ms = self.random.choice(LEASES_MS)
            limit = self.random.choice((1, 1, 2, 4))
            queues = self.random.choice((QUEUES[:1], QUEUES[1:], QUEUES, QUEUES[::-1]))
            self._turn(me, settle, queues, limit, lease_ms)
            settle = []
            yield
            for _ in range(self.random.randrange(4)):
                if me.held:
                    self._beat(me, lease_ms)
                    yield
            settle = self._outcomes(me)
            if settle and self.random.random() < 0.5:
                for outcome in settle:
                    self.act(me, "settle", outcome)
                    yield
                settle = []

    def _turn(self, me: Process, settle: list[Callable[[int], None]], queues: tuple[str, ...], limit: int,
              lease_ms: int) -> None:
        recover, promote = self.random.random() < 0.6, self.random.random() < 0.95
        whole = me.store.transaction if self.random.random() < 0.6 else nullcontext  # one commit, or one for each

        def turn(now: int) -> None:
            with whole():
                for outcome in settle:
                    outcome(now)
                if recover:
                    self._recover(me, now, queues, 1_000)
                if promote:
                    self._promote(me, now, queues)
                self._claim(me, now, queues, limit, lease_ms)

        self.act(me, f"turn, claims {limit} of {queues} for {lease_ms} ms", turn)

    def _beat(self, me: Process, lease_ms: int) -> None:
        """Extend the leases, report progress, or do nothing for a while."""
        what = self.random.choice(("extend", "report", "pause"))
        progress = self.random.random()

        def beat(now: int) -> None:
            for id, (token, _) in list(me.held.items()):
                if what == "extend":
                    held = me.store.extend(id, token, now_ms=now, lease_ms=lease_ms)
                    self.same(f"extend {id}", held, self.model.extend(id, token, now, lease_ms))
                    self._believe(me, id, token, now + lease_ms if held else None)
                else:
                    held = me.store.report(id, token, progress, None, now_ms=now)
                    self.same(f"report {id}", held, self.model.report(id, token, now, progress))

        if what != "pause":
            self.act(me, what, beat)

    def _outcomes(self, me: Process) -> list[Callable[[int], None]]:
        """Decide what becomes of the jobs held; those that end well may be settled together."""
        outcomes: list[Callable[[int], None]] = []
        done: list[tuple[str, str]] = []
        for id, (token, _) in list(me.held.items()):
            what = self.random.choice(("complete", "complete", "complete", "fail", "fail", "release", "forget"))
            if what == "complete":
                done.append((id, token))
            elif what == "forget":
                self.ghosts.append((id, token))
                del me.held[id]
            else:
                outcomes.append(self._settling(me, what, id, token))
        if len(done) > 1 and self.random.random() < 0.7:
            outcomes.append(lambda now: self._complete_together(me, done, now))
        else:
            outcomes += [self._settling(me, "complete", id, token) for id, token in done]
        return outcomes

    def operator(self, me: Process) -> Iterator[None]:
        """Cancel and retry, recover what has expired, settle for the dead, and try every token there was."""
        while True:
            jobs = [*self.model.jobs]
            queues = self.random.choice((QUEUES, QUEUES[:1], QUEUES[1:]))
            limit = self.random.choice((1, 2, 1_000))
            moves = ("cancel", "retry", "retry", "retry_failed", "recover", "late", "late", "probe")
            what = self.random.choice(moves)
            if what == "recover":
                self.act(me, f"recover {limit} of {queues}",
                         lambda now, q=queues, n=limit: self._recover(me, now, q, n))
            elif what == "retry_failed":
                self.act(me, what, lambda now: self._retry_failed(me, now))
            elif what == "late" and self.ghosts:
                id, token = self.random.choice(self.ghosts)
                move = self.random.choice(("complete", "fail", "release"))
                self.act(me, f"late {move} {id}", self._settling(me, move, id, token))
            elif what == "probe" and jobs:
                self._probe(me, self.random.choice(jobs))
            elif what in ("cancel", "retry") and jobs:
                dead = [id for id in jobs if self.model.jobs[id].status in DEAD]
                id = self.random.choice(dead if what == "retry" and dead else jobs)
                self.act(me, f"{what} {id}", lambda now, w=what, i=id: self._steer(me, w, i, now))
            yield

    def add(self, me: Process, batch: list[dict[str, Any]], ring: bool = False) -> None:
        """Store a batch; `ring`: now and then as one whose jobs wait for each other."""
        if ring and len(batch) > 1 and batch[0]["id"] is not None and batch[0]["idempotency_key"] is None:
            batch[0]["depends_on"].append(batch[1]["id"])
            batch[1]["depends_on"].append(batch[0]["id"])
            batch[1]["idempotency_key"] = None
        single = len(batch) == 1 and self.random.random() < 0.8
        if any(fields["id"] in fields["depends_on"] for fields in batch):
            return  # one waits for itself: that is refused before the file is asked
        jobs = []
        for fields in batch:
            known = {name: value for name, value in fields.items() if name != "delay_ms"}
            jobs.append(new_job("t", delay=fields["delay_ms"] / 1_000, **known))
        self.act(me, f"add {batch}", lambda now: self._add(me, batch, jobs, single, now))

    # -- the end -------------------------------------------------------------------------

    def heal(self) -> None:
        """Everybody is dead, the clocks agree and move on: one new worker must end all that can be ended."""
        self.told(None, "everybody is dead, the clocks agree")
        self.trouble = 0.0
        self.now = max(self.now + process.offset_ms for process in self.processes)
        me = self.processes[0] = Process("healer", self.processes[0].store, 0)
        for process in self.processes:
            process.offset_ms, process.held = 0, {}
        for _ in range(600):
            self._turn(me, [], QUEUES, 4, LEASES_MS[-1])
            if me.held:
                for outcome in self._outcomes(me):
                    self.act(me, "settle", outcome)
                me.held.clear()  # what it forgot to settle comes back when the lease is over
                continue
            blocked = self.model.blocked()
            if all(job.status in ENDED or job.id in blocked for job in self.model.jobs.values()):
                return
            self.now = max(self.now, me.store.next_event(QUEUES) or self.now)
        raise self.complaint("a healthy worker does not come to an end")


@cache
def _empty() -> bytes:
    """Return a new file: to make one takes as long as a quarter of a history."""
    with tempfile.TemporaryDirectory(prefix="jobqueue-test-") as directory:
        path = Path(directory) / "jobs.db"
        Store(path, create=True).close()
        return path.read_bytes()


def simulate(seed: int, steps: int = 100, opener: Opener = Store) -> Simulation:
    """Live through one history in a temporary directory and return it, over; raise `Complaint` if it goes wrong."""
    with tempfile.TemporaryDirectory(prefix="jobqueue-test-") as directory:
        simulation = Simulation(seed, Path(directory), steps, opener)
        try:
            simulation.run()
        except Complaint:
            raise
        except Exception as error:
            raise simulation.complaint(f"{type(error).__name__}: {error}") from error
        finally:
            simulation.close()
    return simulation


def main(arguments: list[str] | None = None, opener: Opener = Store) -> int:
    """Replay a seed, or try random ones for some time; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.simulation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, metavar="N", help="replay this history")
    parser.add_argument("--seconds", type=float, metavar="S", default=60.0, help="try random ones for so long (60)")
    options = parser.parse_args(arguments)
    begun = told = time.monotonic()
    seeds: Iterator[int] = iter([options.seed]) if options.seed is not None else iter(
        lambda: random.SystemRandom().randrange(10**9), -1)
    histories = steps = 0
    for seed in seeds:
        try:
            steps += len(simulate(seed, opener=opener).log)
        except Complaint as complaint:
            print(complaint)
            return 1
        histories += 1
        now = time.monotonic()
        if (now - told > 5 and sys.stdout.isatty()) or now - told > 30:
            told = now
            print(f"{now - begun:,.0f} s: {histories:,} histories, {steps:,} steps, nothing wrong", flush=True)
        if options.seed is None and now - begun >= options.seconds:
            break
    print(f"{histories:,} histories, {steps:,} steps, nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
