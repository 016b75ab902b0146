"""What the supervisor learns from its children: plain records, made by `pool`, read by `worker`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .jobs import Job


class Outcome:
    """A job has ended.

    Attributes:
        kind, value: DONE: the result as JSON text, or None.  ERROR, REJECT: the error's text.
            RETRY: (delay in ms or None, text).  LATE: None, it was not started, its deadline had passed.
            STOPPED: the reason given to `stop_job` or `close`.
        text: what to print on stdout, whole lines with their line ends; None: nothing.
        run_us: run time of the handler in microseconds.
    """

    __slots__ = ("job", "kind", "run_us", "text", "value")

    def __init__(self, job: Job, kind: str, value: Any, text: str | None, run_us: int) -> None:
        self.job = job
        self.kind = kind
        self.value = value
        self.text = text
        self.run_us = run_us

    def __repr__(self) -> str:
        return f"<Outcome {self.job.id} {self.kind} {self.value!r:.80}>"


class Started:
    """The handler of a job with a timeout starts now."""

    __slots__ = ("job",)

    def __init__(self, job: Job) -> None:
        self.job = job


class Progress:
    """A handler reported its progress: 0 to 1, and a note or None."""

    __slots__ = ("fraction", "job", "note")

    def __init__(self, job: Job, fraction: float, note: str | None) -> None:
        self.job = job
        self.fraction = fraction
        self.note = note


class Returned:
    """Jobs that were given and never started, back from a child that died or is being stopped."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs


class LoadFailed:
    """A replacement ended before it was ready; the next one is tried after a pause."""

    __slots__ = ("error",)

    def __init__(self, error: str) -> None:
        self.error = error


if TYPE_CHECKING:
    Event = Outcome | Started | Progress | Returned | LoadFailed
