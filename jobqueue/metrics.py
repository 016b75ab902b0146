"""Figures of a queue as Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/).

Version 0.0.4 of the format, which node_exporter's textfile collector reads: HELP and TYPE before
each family, base units (seconds), label values escaped.  A pure function; it reads no clock and
writes nothing.
"""

from __future__ import annotations

from .jobs import DEFAULT_QUEUE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .figures import Figures, Times

    Sample = tuple[str, tuple[tuple[str, str], ...], float]
    """(suffix of the name, labels, value)"""

_OF_WINDOW = ("of the jobs that ended in the last 5 minutes (the newest 10,000 at most); the sum and the count are "
              "of that window too, so they also fall")
_WAITING = (
    ("ready", "Jobs that could start now."),
    ("scheduled", "Jobs that are not due yet, those that back off included."),
    ("waiting", "Jobs whose dependencies have not completed, but may."),
    ("blocked", "Jobs with a failed or canceled dependency, at any depth."),
)


def exposition(figures: Figures) -> Iterator[str]:
    """Yield the lines of the exposition; numbers about jobs carry their queue (and type, status) as labels."""
    lanes = {lane.queue: lane for lane in figures.lanes}
    # Zero is said, so that an alert sees it: of every queue that has jobs, and of the default one.
    queues = sorted({DEFAULT_QUEUE, *lanes, *(kind.queue for kind in figures.kinds)})

    def each(name: str, unit: float = 1) -> Iterator[Sample]:
        for queue in queues:
            value = getattr(lanes[queue], name) if queue in lanes else None
            yield "", (("queue", queue),), (value or 0) * unit

    yield from _family("jobqueue_jobs", "gauge", "Jobs in the file.", (
        ("", (("queue", kind.queue), ("type", kind.type), ("status", kind.status)), kind.jobs)
        for kind in figures.kinds))
    for name, help in _WAITING:
        yield from _family(f"jobqueue_{name}_jobs", "gauge", help, each(name))
    yield from _family("jobqueue_oldest_ready_age_seconds", "gauge",
                       "How long ago the ready job that was due first was due; 0 if none is ready.",
                       each("oldest_ready_ms", 0.001))
    recent = figures.recent.items()
    yield from _family("jobqueue_wait_seconds", "summary",
                       f"From when the last attempt could have started to its start, {_OF_WINDOW}.",
                       _summaries((kind, wait) for kind, (wait, _) in recent))
    yield from _family("jobqueue_run_seconds", "summary",
                       f"From the start of the last attempt to its end, {_OF_WINDOW}.",
                       _summaries((kind, run) for kind, (_, run) in recent))
    if figures.failed_attempts is not None:
        yield from _family("jobqueue_failed_attempts_total", "counter",
                           "Attempts that failed since the file was made; falls only when the newest are purged.",
                           [("", (), figures.failed_attempts)])
    yield from _family("jobqueue_workers", "gauge", "Worker commands seen within 150 seconds.",
                       [("", (), len(figures.alive))])


def _summaries(times: Iterable[tuple[tuple[str, str], Times]]) -> Iterator[Sample]:
    for (queue, type), found in times:
        labels = (("queue", queue), ("type", type))
        for quantile, value in (("0.5", found.p50_ms), ("0.95", found.p95_ms)):
            if value is not None:
                yield "", (*labels, ("quantile", quantile)), value / 1_000
        yield "_sum", labels, found.sum_ms / 1_000
        yield "_count", labels, found.jobs


def _family(name: str, kind: str, help: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"
    for suffix, labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        yield f"{name}{suffix}{'{' + inside + '}' if inside else ''} {value:.15g}"


def _escaped(text: str) -> str:
    """Return the value of a label: backslash, quote and line feed are all that the format escapes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
