"""Torture: enqueuers and workers are killed, stopped and continued at random under load; then nothing may be lost.

    python -m tests.torture --seconds 600 --seed 7

A round takes place in a directory of its own.  Enqueuers log what they are about to store, and what was
acknowledged; handlers log each start and each end; triggers in the file log each move of a job.  A log is
written with O_APPEND, a line a write, so a line is there whole or, if its writer was killed in the write, broken
off and does not count.  After the havoc all are continued, the workers killed, and healthy ones drain what
is left.  `History.faults` then compares the logs with the file.  The seed decides who is hit, when and how; how
the machine schedules the processes it cannot decide, so the same seed is alike, not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from jobqueue import Queue
from jobqueue.errors import DatabaseBusy
from tests.support import children_of, command, environment, members_of, sql, zombies_of
from tests.torture_check import Event, History, JobRow, Move, read_calls

LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # for what has to happen once all are healthy
GONE_SECONDS = 5.0
"""How long the children of a killed worker may take to end, and zombies to be reaped."""
PAUSES = (0.05, 0.25)
"""Seconds between two blows: from, to."""
STOPS = (0.1, 0.5, 2.5)
"""Seconds for which a process is stopped at most; the last is for longer than a lease."""

LOST_CHILD = r"\Ajobqueue: child \d+ was killed by SIGKILL while it loaded the handlers\n\Z"
"""What a worker says, before it ends, that lost a child when it had not even begun to serve."""
UNBORN = re.compile(r"(?s)Traceback(?:(?!Traceback).)*?/spawn\.py(?:(?!Traceback).)*?EOFError: Ran out of input")
"""What Python says in a child whose supervisor was killed while starting it: none of our code runs yet."""

HANDLERS = """
import os, time
from jobqueue import Reject, Retry, handler

def note(event, context):
    descriptor = os.open("trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"\\n{event} {context.job_id} {context.attempt}\\n".encode())
    os.close(descriptor)

@handler("work")
def work(payload, context):
    note("start", context)
    time.sleep(payload["seconds"])
    note("end", context)
    return payload["tag"]

@handler("falter")
def falter(payload, context):
    note("start", context)
    if context.attempt <= payload["times"]:
        raise Retry(after=0.05) if payload["times"] % 2 else RuntimeError("on purpose")
    note("end", context)

@handler("reject")
def reject(payload, context):
    note("start", context)
    raise Reject("on purpose")
"""
AUDIT = """
CREATE TABLE moves(n INTEGER PRIMARY KEY, job TEXT, old TEXT, new TEXT, token TEXT) STRICT;
CREATE TRIGGER moved AFTER UPDATE OF status ON jobs BEGIN
    INSERT INTO moves(job, old, new, token) VALUES (OLD.id, OLD.status, NEW.status, NEW.lease_token);
END
"""


# -- enqueuers ------------------------------------------------------------------------

class Producer:
    """One enqueuer: stores jobs of all kinds until it is killed, or a file named `stop` is there."""

    def __init__(self, directory: Path, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.name = name
        self.stored: list[str] = []
        self.count = 0
        self.queue = Queue(directory / "jobs.db")
        self.log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def run(self) -> None:
        """Store jobs by the library, and every tenth time by the command line."""
        while not (self.directory / "stop").exists():
            jobs = self.jobs()
            self.note(tags=[job["payload"]["tag"] for job in jobs], key=jobs[0].get("idempotency_key"))
            try:
                ids = self.by_command(jobs) if self.random.random() < 0.1 else self.queue.enqueue_many(jobs)
            except DatabaseBusy:
                self.note(busy=True)
                continue
            self.note(ids=ids)
            self.stored += ids
            time.sleep(self.random.uniform(0.001, 0.02))
        self.queue.close()

    def note(self, **line: object) -> None:
        """Append a line; it is in the file when this returns."""
        os.write(self.log, json.dumps(line).encode() + b"\n")

    def by_command(self, jobs: list[dict[str, Any]]) -> list[str]:
        """Store jobs by `enqueue --file -`."""
        lines = "".join(json.dumps(job) + "\n" for job in jobs).encode()
        argv = command("enqueue", "--database", self.directory / "jobs.db", "--file", "-")
        done = subprocess.run(argv, input=lines, capture_output=True, env=environment())
        if done.returncode == 75:
            raise DatabaseBusy(done.stderr.decode())
        if done.returncode != 0:
            raise AssertionError(f"enqueue exited {done.returncode}: {done.stderr.decode()}")
        return done.stdout.decode().split()

    def jobs(self) -> list[dict[str, Any]]:
        """Return what to store by the next call: one job, one with a key that others use too, or a small graph."""
        choose = self.random
        kind = choose.random()
        if kind < 0.1:
            return [self.job(idempotency_key=f"key-{choose.randrange(40)}")]
        if kind < 0.7:
            above = choose.sample(self.stored, min(len(self.stored), choose.choice((0, 0, 1))))
            return [self.job(depends_on=above)]
        jobs = [self.job(named=True) for _ in range(choose.randint(2, 5))]
        for place in range(1, len(jobs)):
            above = [job["id"] for job in jobs[:place]]
            jobs[place]["depends_on"] = choose.sample(above, choose.randint(0, len(above)))
        return jobs

    def job(self, named: bool = False, **fields: object) -> dict[str, Any]:
        """Return one job; most succeed, some at a later attempt only, some are slow, some fail for good."""
        choose = self.random
        self.count += 1
        tag = f"{self.name}-{self.count}"
        payload: dict[str, Any] = {"tag": tag, "seconds": 0}
        type = choose.choices(("work", "falter", "reject"), (20, 2, 1))[0]
        if type == "falter":
            payload["times"] = choose.randint(1, 3)
        elif choose.random() < 0.1:
            payload["seconds"] = choose.choice((0.005, 0.05, 0.3))
        elif choose.random() < 0.05:
            payload["pad"] = "x" * 60_000
        if named or choose.random() < 0.3:
            fields["id"] = tag
        return {"type": type, "payload": payload, "priority": choose.randint(-1, 2),
                "max_attempts": choose.choice((1, 2, 3, 3)), **fields}


# -- a round --------------------------------------------------------------------------

class Round:
    """One history: `havoc`, then `heal`; `faults` collects what was wrong.

    Args:
        directory: empty, and its own.
        seed: of all decisions.
    """

    def __init__(self, directory: Path, seed: int, *, workers: int = 3, producers: int = 3) -> None:
        self.directory = directory
        self.db = directory / "jobs.db"
        self.random = random.Random(seed)
        self.faults: list[str] = []
        self.blows = 0
        self.jobs = 0
        self.killed: set[str] = set()
        """The producers that were killed, by name."""
        self._workers = workers
        self._producers = producers
        self._started = 0
        self._groups: list[int] = []
        self._living: dict[str, subprocess.Popen[bytes]] = {}
        self._trackers: set[int] = set()
        """Resource trackers that were killed: multiprocessing reaps one only when it starts another."""
        self._stopped: dict[int, float] = {}
        """pid -> the monotonic time at which it goes on."""
        (directory / "handlers.py").write_text(HANDLERS)
        Queue(self.db, create=True).close()
        with closing(sqlite3.connect(self.db)) as connection:
            connection.executescript(AUDIT)

    def run(self, seconds: float) -> list[str]:
        """Wreak havoc for so long, heal, and return the faults; no process is left."""
        try:
            try:
                self.havoc(seconds)
                self.heal()
            finally:
                self.end()
        except AssertionError as error:
            self.faults.append(str(error))
        self.faults += self.history().faults()
        return self.faults

    def end(self) -> None:
        """Kill whoever is left."""
        for process in self._living.values():
            process.kill()
            process.wait()
        for group in filter(members_of, self._groups):
            os.killpg(group, signal.SIGKILL)

    # -- processes ---------------------------------------------------------------------

    def start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start a process in a group of its own; its stderr goes to a file with its name."""
        with open(self.directory / f"{name}.err", "wb") as stderr:
            process = subprocess.Popen(argv, cwd=self.directory, env=environment(), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        self._groups.append(process.pid)
        self._living[name] = process
        return process

    def start_worker(self, *args: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a worker with two children; return its name, too."""
        self._started += 1
        name = f"worker{self._started}"
        return name, self.start(name, command(
            "worker", "--database", self.db, "--workers", 2, "--handlers", self.directory / "handlers.py",
            "--lease-seconds", LEASE_SECONDS, *args))

    def start_producer(self) -> None:
        self._started += 1
        name = f"producer{self._started}"
        seed = self.random.randrange(2**32)
        self.start(name, [sys.executable, "-m", "tests.torture", "--produce", str(self.directory), name, str(seed)])

    def living(self, kind: str) -> list[str]:
        """Return the names of the workers, or producers, that were not killed."""
        return [name for name in self._living if name.startswith(kind)]

    def kill(self, name: str, whole_group: bool = False) -> None:
        """SIGKILL a process, or all in its group, and reap it."""
        process = self._living.pop(name)
        if process.poll() is None:
            if whole_group:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        elif process.returncode != 1 or not re.search(LOST_CHILD, self.stderr(name)):
            self.faults.append(f"{name} ended by itself with {process.returncode}: {self.stderr(name)}")
        process.wait()
        self._stopped.pop(process.pid, None)
        if name.startswith("producer"):
            self.killed.add(name)

    def stderr(self, name: str) -> str:
        """Return the end of what a process has said."""
        return (self.directory / f"{name}.err").read_text("utf-8", "replace")[-2_000:]

    # -- havoc -------------------------------------------------------------------------

    def havoc(self, seconds: float) -> None:
        """Keep so many workers and producers, and hit one of their processes again and again."""
        self.staff()
        if not wait(lambda: (self.directory / "trace").exists(), PATIENCE_SECONDS):
            raise AssertionError(f"no job was started within {PATIENCE_SECONDS} s")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.staff()
            time.sleep(self.random.uniform(*PAUSES))
            self.let_go(time.monotonic())
            self.blow()
            self.blows += 1

    def staff(self) -> None:
        """Start whoever is missing."""
        for name in [name for name, process in self._living.items() if process.poll() is not None]:
            self.kill(name)
        while len(self.living("worker")) < self._workers:
            self.start_worker()
        while len(self.living("producer")) < self._producers:
            self.start_producer()

    def let_go(self, now: float) -> None:
        """Continue those that have been stopped for long enough at the monotonic time `now`."""
        for pid in [pid for pid, until in self._stopped.items() if until <= now]:
            del self._stopped[pid]
            send(pid, signal.SIGCONT)

    def blow(self) -> None:
        """Hit one process."""
        choose = self.random
        name = choose.choice(self.living(choose.choice(("worker",) * 4 + ("producer",))))
        pid = self._living[name].pid
        children = children_of(pid)
        how = choose.choices(("kill", "kill group", "kill child", "stop", "stop child"), (1, 1, 4, 3, 4))[0]
        if how == "kill" or (how == "kill group" and not children):
            self.kill(name, whole_group=name.startswith("producer"))  # its `enqueue` would go on beyond the end
        elif how == "kill group":
            self.kill(name, whole_group=True)
        elif how == "kill child" and children and name.startswith("worker"):
            victim = choose.choice(children)
            if is_tracker(victim):
                self._trackers.add(victim)
            send(victim, signal.SIGKILL)
        elif how.startswith("stop"):
            victim = choose.choice(children) if how == "stop child" and children else pid
            send(victim, signal.SIGSTOP)
            self._stopped[victim] = time.monotonic() + choose.choice(STOPS) * choose.uniform(0.5, 1)

    # -- healing -----------------------------------------------------------------------

    def heal(self) -> None:
        """Continue all, end them, and let healthy workers do the rest; everything within a deadline."""
        self.let_go(float("inf"))
        (self.directory / "stop").touch()
        for name in self.living("producer"):
            process = self._living[name]
            wait(lambda process=process: process.poll() is not None, PATIENCE_SECONDS)
            if process.returncode == 0:
                del self._living[name]
            else:
                self.faults.append(f"{name} did not end well ({process.returncode}): {self.stderr(name)}")
                self.kill(name, whole_group=True)
        for name in self.living("worker"):
            pid = self._living[name].pid
            if not wait(lambda pid=pid: self._trackers.issuperset(zombies_of(pid)), GONE_SECONDS):
                self.faults.append(f"{name} does not reap its children {zombies_of(pid)}")
            self.kill(name)
        self.expect_nobody()
        deadline = time.monotonic() + PATIENCE_SECONDS
        self.drain(PATIENCE_SECONDS)  # also if all is done: who closes the file last, tidies it up
        while self.is_work_left() and time.monotonic() < deadline:
            self.drain(deadline - time.monotonic())
        self.expect_nobody()
        for path in sorted(self.directory.glob("*.err")):
            if "Traceback" in UNBORN.sub("", path.read_text("utf-8", "replace")):
                self.faults.append(f"a traceback of {path.stem}: {self.stderr(path.stem)}")

    def drain(self, timeout: float) -> None:
        """Run one healthy worker to its end."""
        name, worker = self.start_worker("--drain")
        if not wait(lambda: worker.poll() is not None, timeout):
            raise AssertionError(f"{name}, which should drain, was still running after {timeout:.0f} s: "
                                 f"{self.stderr(name)}")
        del self._living[name]
        if worker.returncode != 0:
            raise AssertionError(f"{name}, which should drain, exited {worker.returncode}: {self.stderr(name)}")
        if (self.directory / "jobs.db-wal").exists():
            self.faults.append(f"{name} closed the file last and left a write-ahead log behind")

    def is_work_left(self) -> bool:
        """Return whether a job runs, waits for its next attempt, or waits for nothing but a worker."""
        return sql(self.db, "SELECT 1 FROM jobs WHERE status IN ('running', 'retrying') OR "
                            "(status = 'pending' AND unmet = 0) LIMIT 1") != []  # fmt: skip

    def expect_nobody(self) -> None:
        """Note as a fault who is still there, of all groups that were ever started."""
        if not wait(lambda: not any(map(members_of, self._groups)), GONE_SECONDS):
            left = [pid for group in self._groups for pid in members_of(group)]
            self.faults.append(f"processes left behind: {left}")
        if mine := set(zombies_of(os.getpid())) & set(self._groups):
            self.faults.append(f"zombies left behind: {sorted(mine)}")

    # -- the record --------------------------------------------------------------------

    def history(self) -> History:
        """Read what the round has left in its directory."""
        if (health := sql(self.db, "PRAGMA integrity_check")) != [("ok",)]:
            self.faults.append(f"integrity_check: {health}")
        rows = [JobRow(*row) for row in sql(
            self.db, "SELECT id, json_extract(payload, '$.tag'), idempotency_key, status, attempts, max_attempts, "
                     "unmet FROM jobs ORDER BY seq")]  # fmt: skip
        edges = sql(self.db, "SELECT a.id, b.id FROM dependencies JOIN jobs a ON a.seq = job "
                             "JOIN jobs b ON b.seq = depends_on")  # fmt: skip
        moves = sql(self.db, "SELECT job, old, new, token FROM moves ORDER BY n")
        self.jobs = len(rows)
        calls = [call for path in sorted(self.directory.glob("producer*.log")) for call in read_calls(path)]
        trace = self.directory / "trace"
        lines = [line.split() for line in (trace.read_text().split("\n") if trace.exists() else ())]
        events = [Event(line[0], line[1], int(line[2])) for line in lines if len(line) == 3]
        return History(calls, self.killed, events, {row.id: row for row in rows},
                       [(job, parent) for job, parent in edges], [Move(*move) for move in moves])


def send(pid: int, number: int) -> None:
    """Send a signal to a child, or a child's child, that may just have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def is_tracker(pid: int) -> bool:
    """Return whether a process is the one that multiprocessing starts to clean up; False where nobody tells."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def wait(condition: Callable[[], bool], timeout: float) -> bool:
    """Ask until the answer is true; return False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def main() -> int:
    """Play rounds until the time is over; return 1 after the first one with a fault, whose directory stays."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for how long (60)")
    parser.add_argument("--round-seconds", type=float, default=10, help="of havoc in each round (10)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the first round")
    parser.add_argument("--produce", nargs=3, metavar=("DIR", "NAME", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        directory, name, seed = options.produce
        Producer(Path(directory), name, int(seed)).run()
        return 0
    end = time.monotonic() + options.seconds
    seed = options.seed
    while True:
        directory = Path(tempfile.mkdtemp(prefix="jobqueue-torture-")).resolve()
        begun = time.monotonic()
        torture = Round(directory, seed)
        faults = torture.run(options.round_seconds)
        print(f"seed {seed}: {torture.blows} blows, {torture.jobs} jobs, {time.monotonic() - begun:.1f} s, "
              f"{len(faults)} faults", flush=True)
        if faults:
            print(*faults[:20], sep="\n")
            print(f"{directory} holds what is left; again: python -m tests.torture "
                  f"--round-seconds {options.round_seconds:g} --seconds 0 --seed {seed}")
            return 1
        subprocess.run(["rm", "-rf", "--", directory], check=True)
        if time.monotonic() >= end:
            return 0
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
