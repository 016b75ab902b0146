"""What must hold after `tests.torture`: the logs of all who took part, compared with what the file says.

Only data comes in and only sentences go out, so each check can be shown a history that breaks it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

LEGAL = {
    ("pending", "running"), ("retrying", "running"), ("running", "completed"), ("running", "retrying"),
    ("running", "failed"), ("running", "pending"),
}  # fmt: skip
"""What may happen to a job where no operator steers; `running` to `pending` is a job given back unstarted."""


class Call(NamedTuple):
    """An enqueuer's call: what it stored, and the answer; neither `ids` nor `busy`: it never came."""

    producer: str
    tags: tuple[str, ...]
    key: str | None
    ids: tuple[str, ...] | None
    busy: bool


class Event(NamedTuple):
    """A handler's note, in the order in which all were written."""

    what: str
    job: str
    attempt: int


class JobRow(NamedTuple):
    """A job as it is in the file at the end."""

    id: str
    tag: str
    key: str | None
    status: str
    attempts: int
    max_attempts: int
    unmet: int


class Move(NamedTuple):
    """A change of a job's status, in the order of the commits."""

    job: str
    old: str
    new: str
    token: str | None


class History(NamedTuple):
    """All that is known of a round; `killed` are the enqueuers that were, `edges` (job, what it depends on)."""

    calls: list[Call]
    killed: set[str]
    events: list[Event]
    jobs: dict[str, JobRow]
    edges: list[tuple[str, str]]
    moves: list[Move]

    def faults(self) -> list[str]:
        """Return what is wrong, a sentence each."""
        return list(chain(self._missing(), self._unknown(), self._unfinished(), self._starts(), self._moved(),
                          self._order()))

    def _missing(self) -> Iterator[str]:
        """Nothing that was acknowledged is missing, and each id names what its caller stored."""
        for call in self.calls:
            if call.ids is not None and len(call.ids) != len(call.tags):
                yield f"{call} was answered with {len(call.ids)} ids"
            for tag, id in zip(call.tags, call.ids or ()):  # noqa: B905
                job = self.jobs.get(id)
                if job is None:
                    yield f"job {id} was acknowledged to {call.producer} and is missing"
                elif job.key != call.key or (call.key is None and job.tag != tag):
                    yield f"job {id} was acknowledged to {call.producer} as {tag}, key {call.key}, but is {job}"

    def _unknown(self) -> Iterator[str]:
        """What is in the file was asked for, and acknowledged unless the enqueuer was killed in that very call."""
        calls = {tag: call for call in self.calls for tag in call.tags}
        for producer, last in {call.producer: call for call in self.calls}.items():
            for call in self.calls:
                if call.producer == producer and call.ids is None and not call.busy and \
                        (call is not last or producer not in self.killed):
                    yield f"{call} was not answered, though {producer} was not killed in it"
        stored = Counter(job.tag for job in self.jobs.values())
        for tag, count in stored.items():
            call = calls.get(tag)
            if call is None:
                yield f"{tag} is in the file, and nobody stored it"
            elif call.busy:
                yield f"{tag} is in the file, though {call.producer} was told that the file is busy"
            elif any(stored[each] != 1 for each in call.tags):
                yield f"{tag} is in the file {count} times; of its batch: {[stored[each] for each in call.tags]}"

    def _unfinished(self) -> Iterator[str]:
        """Every job has ended, but for those that a failed one blocks."""
        parents: dict[str, list[str]] = {}
        for job, parent in self.edges:
            parents.setdefault(job, []).append(parent)
        blocked: dict[str, bool] = {}
        for job in self.jobs.values():  # by age: what a job depends on is older, or of the same batch
            blocked[job.id] = self._is_blocked(job.id, parents, blocked)
        for job in self.jobs.values():
            if blocked[job.id] and job.status == "pending":
                continue
            if job.status not in ("completed", "failed"):
                yield f"{job} has not ended"
            if job.unmet:
                yield f"{job} has ended with {job.unmet} dependencies unmet"

    def _is_blocked(self, id: str, parents: dict[str, list[str]], known: dict[str, bool]) -> bool:
        waiting, seen = [id], {id}
        while waiting:
            for parent in parents.get(waiting.pop(), ()):
                if self.jobs[parent].status == "failed" or known.get(parent):
                    return True
                if parent not in seen:
                    seen.add(parent)
                    waiting.append(parent)
        return False

    def _starts(self) -> Iterator[str]:
        """At most so many starts as allowed, each counted; at least one for what is completed, and it ended."""
        starts = Counter((event.job, event.attempt) for event in self.events if event.what == "start")
        per_job = Counter(event.job for event in self.events if event.what == "start")
        ends = {event.job for event in self.events if event.what == "end"}
        for (job, attempt), count in starts.items():
            if count > 1:
                yield f"attempt {attempt} of job {job} was started {count} times"
        for id in per_job.keys() - self.jobs.keys():
            yield f"job {id} was started and is not in the file"
        for job in self.jobs.values():
            if per_job[job.id] > job.max_attempts:
                yield f"job {job.id} was started {per_job[job.id]} times, and {job.max_attempts} are allowed"
            if per_job[job.id] > job.attempts or job.attempts > job.max_attempts:
                yield f"{job} was started {per_job[job.id]} times"
            if job.status == "completed" and (job.id not in ends or not starts[job.id, job.attempts]):
                yield f"{job} is completed, and no handler has noted it"

    def _moved(self) -> Iterator[str]:
        """Jobs moved by the rules: completed once, final when finished, a new token and an attempt a claim."""
        now = dict.fromkeys(self.jobs, "pending")
        claims: Counter[str] = Counter()
        completions: Counter[str] = Counter()
        for move in self.moves:
            if (move.old, move.new) not in LEGAL or now.get(move.job) != move.old:
                yield f"{move}, though the job was {now.get(move.job)}"
            now[move.job] = move.new
            claims[move.job] += (move.new == "running") - ((move.old, move.new) == ("running", "pending"))
            completions[move.job] += move.new == "completed"
        for token, count in Counter(move.token for move in self.moves if move.new == "running").items():
            if count > 1:
                yield f"the token {token} was given {count} times"
        for job in self.jobs.values():
            if completions[job.id] > 1:
                yield f"job {job.id} was completed {completions[job.id]} times"
            if now[job.id] != job.status:
                yield f"{job} was last seen to become {now[job.id]}"
            if claims[job.id] != job.attempts:
                yield f"{job} was claimed {claims[job.id]} times, those given back left out"

    def _order(self) -> Iterator[str]:
        """No job started, nor was claimed, before all it depends on had ended well."""
        started: dict[str, int] = {}
        ended: dict[str, int] = {}
        for place, event in enumerate(self.events):
            (started if event.what == "start" else ended).setdefault(event.job, place)
        claimed: dict[str, int] = {}
        completed: dict[str, int] = {}
        for place, move in enumerate(self.moves):
            if move.new == "running":
                claimed.setdefault(move.job, place)
            elif move.new == "completed":
                completed.setdefault(move.job, place)
        for job, parent in self.edges:
            if job in started and ended.get(parent, len(self.events)) > started[job]:
                yield f"job {job} was started before job {parent}, which it depends on, had ended"
            if job in claimed and completed.get(parent, len(self.moves)) > claimed[job]:
                yield f"job {job} was claimed before job {parent}, which it depends on, was completed"


def read_calls(path: Path) -> Iterator[Call]:
    """Return the calls of one producer from its log; the last line counts only if it is whole."""
    waiting: Call | None = None
    for line in path.read_bytes().split(b"\n")[:-1]:
        said = json.loads(line)
        if "tags" in said:
            waiting = Call(path.stem, tuple(said["tags"]), said["key"], None, False)
            continue
        assert waiting is not None
        yield waiting._replace(busy=True) if "busy" in said else waiting._replace(ids=tuple(said["ids"]))
        waiting = None
    if waiting is not None:
        yield waiting
