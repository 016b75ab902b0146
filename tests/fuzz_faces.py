"""The same job through every face: those that have a field in common accept or refuse it alike.

A job gets one or two odd values among good ones. `Queue` decides by `enqueue` and by `enqueue_many`, the command
line by a line of JSON, `JobScheduler`, `MemoryQueue` and `WorkQueue` by the fields that they have. A refusal is an
`InvalidJob` and leaves nothing behind; what was accepted comes back with an equal payload.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from jobqueue import InvalidJob, JobScheduler, MemoryQueue, Queue, WorkQueue
from jobqueue.commands import enqueue
from jobqueue.jobs import decode_json, new_job_from
from tests.fuzz_values import SPANS, TIMES, Dice

KNOWN = "known"
"""The id of a job that every face has."""

SCHEDULER = {"id": "job_id", "payload": "payload", "depends_on": "dependencies", "priority": "priority",
             "max_attempts": "max_attempts"}
WORK = {"id": "job_id", "payload": "payload", "type": "type", "trace": "trace_id", "priority": "priority",
        "run_at": "run_at", "delay": "delay", "max_attempts": "retry_limit", "timeout": "timeout",
        "depends_on": "depends_on"}
"""What a face calls a field of `Queue.enqueue`; the others it does not have."""
NUMBERS: tuple[Any, ...] = (0, 1, 3, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5_000, True, 1.0, math.nan,
                            "1", b"1")


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _ring() -> Any:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def odd_payload(dice: Dice) -> Any:
    """Return what may or may not be JSON."""
    odd: tuple[Callable[[], Any], ...] = (
        lambda: math.nan, lambda: -math.inf, lambda: b"x", lambda: {1, 2}, object, lambda: _nested(64),
        lambda: _nested(65), lambda: _nested(5_000), _ring, lambda: 10**4_299, lambda: 10**4_300,
        lambda: {1: 2, None: 3, False: 4, 1.5: 5}, lambda: {(1, 2): 3}, lambda: {b"x": 1}, lambda: (1, (2, 3)),
        lambda: "x" * (2**20 - 2), lambda: "é" * 2**19, lambda: "\ud800", lambda: {"\udfff": 1},
        lambda: {"a": [object()]}, lambda: "\x00", lambda: range(3), lambda: 1j,
    )  # fmt: skip
    return dice.random.choice(odd)() if dice.chance(0.5) else dice.value()


def odd_value(dice: Dice, field: str) -> Any:
    """Return a value for a field, as odd as it gets."""
    if field == "payload":
        return odd_payload(dice)
    if field in ("priority", "max_attempts"):
        return dice.random.choice(NUMBERS)
    if field == "depends_on":
        names = (KNOWN, KNOWN, "no such job", dice.text(), 7, None, b"x")
        chosen: Any = [dice.random.choice(names) for _ in range(dice.random.randint(0, 3))]
        return dice.random.choice((chosen, tuple(chosen), chosen, "known", 7))
    if field in ("run_at", "delay", "timeout"):
        return dice.random.choice((*NUMBERS, *(TIMES if field == "run_at" else SPANS), 1.5, -0.5, math.inf, [], {}))
    return dice.random.choice((dice.text(), dice.text(), "x" * 255, "x" * 256, "", 7, b"x", [], True, 1.5))


class Faces:
    """All faces, each on a place of its own, and what each decides about a job."""

    def __init__(self, dice: Dice, stack: ExitStack) -> None:
        self.runner = stack.enter_context(asyncio.Runner())
        base = dice.dir
        self.queue, self.batches, self.lines = (
            stack.enter_context(Queue(base / name, create=True)) for name in ("one.db", "many.db", "lines.db"))
        self.scheduler = stack.enter_context(JobScheduler(base / "plan.db"))
        self.memory = MemoryQueue(clock=lambda: 0.0)
        self.work = self.runner.run(WorkQueue(base / "work.db").__aenter__())
        stack.callback(lambda: self.runner.run(self.work.close()))
        self.offer({"type": "t", "id": KNOWN})

    def offer(self, job: dict[str, Any]) -> dict[str, bool]:
        """Offer a job to all faces that have its fields; return who has accepted it."""
        fields = job.keys() - ({"type"} if job["type"] == "t" else set())
        offers: dict[str, Callable[[], object]] = {
            "Queue.enqueue": lambda: self.queue.enqueue(**job),
            "Queue.enqueue_many": lambda: self.batches.enqueue_many([job]),
        }
        text = as_json(job)
        if text is not None:
            offers["a line of JSON"] = lambda: list(self.lines.add_many([(1, line_job(text))]))
        if fields <= SCHEDULER.keys():
            plan = {"payload": None, **{SCHEDULER[name]: job[name] for name in fields}}
            offers["JobScheduler.add_jobs"] = lambda: self.scheduler.add_jobs([plan], 0)
        if fields <= WORK.keys():
            task = {"payload": None, **{WORK[name]: value for name, value in job.items()}}
            offers["WorkQueue.enqueue"] = lambda: self.once(task)
        attempts = job.get("max_attempts", 3)
        if fields <= {"id", "depends_on", "max_attempts"} and type(attempts) is int:
            offers["MemoryQueue.enqueue"] = lambda: self.memory.enqueue(
                job["id"], 1, attempts - 1, job.get("depends_on", ()))
        return {name: accepted(offer) for name, offer in offers.items()}

    def once(self, task: dict[str, Any]) -> None:
        """Offer a job to the `WorkQueue`; an id that is known is no fault there, but one elsewhere."""
        if not self.runner.run(self.work.enqueue(**task)):
            raise InvalidJob("it is there already")

    def payloads(self, id: str) -> dict[str, Any]:
        """Return the payload of a job as each face that has it tells it."""
        jobs = {"Queue.get": self.queue.get(id), "after enqueue_many": self.batches.get(id),
                "after a line": self.lines.get(id)}
        told = {name: job.payload for name, job in jobs.items() if job is not None}
        for name, entry in (("JobScheduler.get_job", self.scheduler.get_job(id)),
                            ("WorkQueue.get", self.runner.run(self.work.get(id)))):
            if entry is not None:
                told[name] = entry["payload"]
        return told


def accepted(offer: Callable[[], object]) -> bool:
    """Return whether a job was accepted; whatever else is raised comes out."""
    try:
        offer()
    except InvalidJob as error:
        assert str(error) and str(error).isprintable(), f"no sentence: {error!r}"
        return False
    return True


def as_json(job: dict[str, Any]) -> str | None:
    """Return a job as a line of JSON; None: no line says the same."""
    try:
        text = json.dumps(job)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= enqueue.MAX_LINE_BYTES else None


def line_job(text: str) -> Any:
    """Return the job of a line, as the command line reads it."""
    return new_job_from(decode_json(text, "the line", max_depth=65))


def compare(dice: Dice, count: int) -> None:
    """Offer so many jobs to all faces; raises AssertionError when they do not agree."""
    names = ("payload", "id", "type", "priority", "max_attempts", "depends_on", "queue", "trace", "timeout",
             "run_at", "delay", "idempotency_key")
    stored: list[object] = [KNOWN]
    with ExitStack() as stack:
        faces = Faces(dice, stack)
        for number in range(count):
            job: dict[str, Any] = {"type": "t", "id": f"job-{number}"}
            for name in dice.random.sample(names, dice.random.choice((1, 1, 2))):
                job[name] = odd_value(dice, name)
            if job["id"] in stored:
                continue  # a face that has not all of the fields may not have it
            before = len(faces.queue.list())
            try:
                answers = faces.offer(job)
                assert len(set(answers.values())) == 1, f"they do not agree: {answers}"
                if not answers["Queue.enqueue"]:
                    assert len(faces.queue.list()) == before, "a job that was refused is there"
                    continue
                stored.append(job["id"])
                wanted = json.loads(json.dumps(job.get("payload")))
                for face, payload in faces.payloads(job["id"]).items():
                    assert payload == wanted, f"{face} tells another payload"
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n  job: {shown(job)}") from error


def shown(job: dict[str, Any]) -> dict[str, str]:
    """Return a job with values that can be printed."""
    return {name: hex(value)[:60] if isinstance(value, int) else f"{value!a:.300}" for name, value in job.items()}
