"""The steps of a worker's turn: what it has to say to the file, and to ask of it.

All steps of a turn run in one transaction that the worker has begun; they note in a `Turn`
what they did, which counts once the transaction is committed.  They change nothing else, so
a turn that failed can be taken again with the same arguments.
"""

from __future__ import annotations

import time

from .child import DONE, ERROR, REJECT, RETRY
from .leases import RECOVER_CHUNK
from .lifecycle import COMPLETED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .db import Store
    from .events import Outcome
    from .jobs import Job


class Turn:
    """What one transaction did.

    Attributes:
        now: the time it was done at, ms since the epoch, read after the lock was held.
        monotonic: the same moment by the monotonic clock, seconds.
        settled: outcomes, each with the status that followed, None if its lease was lost.
        released: jobs given back, each with whether the lease was still held.
        lost: jobs whose lease could not be extended.
        expired: jobs whose lease had run out, whoever held it, each with the status that followed.
        claimed: jobs to hand out now, the most urgent first.
        more: whether another claim might find something at once.
        next_event, version: what to wait for otherwise: see `Store.next_event`, `data_version`.
    """

    def __init__(self, now: int) -> None:
        self.now = now
        self.monotonic = time.monotonic()
        self.settled: list[tuple[Outcome, str | None]] = []
        self.released: list[tuple[Job, bool]] = []
        self.lost: list[Job] = []
        self.expired: list[tuple[Job, str]] = []
        self.claimed: list[Job] = []
        self.more = False
        self.next_event: int | None = None
        self.version = -1


def outlast_step(store: Store, turn: Turn, held: Collection[Job], step_ms: int, lease_ms: int) -> None:
    """Let the leases of `held` go on from where they were before the wall clock stepped ahead.

    A step that is longer than the lease would otherwise end them all, and start their jobs beside themselves.
    """
    store.extend_many([(job.seq, _token(job)) for job in held], now_ms=turn.now - step_ms,
                      lease_ms=lease_ms + step_ms)


def settle(store: Store, turn: Turn, outcomes: Sequence[Outcome], returned: Sequence[Job]) -> None:
    """Bring outcomes and jobs to be given back into the file."""
    done = [outcome for outcome in outcomes if outcome.kind == DONE]
    answers = store.complete_many([(outcome.job.seq, _token(outcome.job), outcome.value) for outcome in done],
                                  now_ms=turn.now)
    turn.settled += [(outcome, COMPLETED if held else None) for outcome, held in zip(done, answers, strict=True)]
    unstarted = list(returned)
    for outcome in outcomes:
        delay_ms, error = outcome.value if outcome.kind == RETRY else (None, outcome.value)
        if outcome.kind in (ERROR, RETRY, REJECT):
            turn.settled.append((outcome, store.fail(
                outcome.job.id, _token(outcome.job), error, now_ms=turn.now, delay_ms=delay_ms,
                final=outcome.kind == REJECT)))
        elif outcome.kind != DONE:  # late or stopped: it did not fail, it was kept from running
            unstarted.append(outcome.job)
    for job in unstarted:
        turn.released.append((job, store.release(job.id, _token(job), now_ms=turn.now)))


def heartbeat(store: Store, turn: Turn, held: Collection[Job], progress: Mapping[Job, tuple[float, str | None]],
              lease_ms: int) -> None:
    """Extend the leases of `held`, but for jobs that this turn has settled; store their progress."""
    over = {outcome.job for outcome, _ in turn.settled} | {job for job, _ in turn.released}
    leases = {(job.seq, _token(job)): job for job in held if job not in over}
    turn.lost = [leases[lease] for lease in store.extend_many(leases, now_ms=turn.now, lease_ms=lease_ms)]
    for job, (fraction, note) in progress.items():
        store.report(job.id, _token(job), fraction, note, now_ms=turn.now)


def claim(store: Store, turn: Turn, worker_id: str, queues: Sequence[str], lease_ms: int, room: int) -> None:
    """Recover expired leases, promote what has come due, and claim up to `room` jobs."""
    if store.has_due(now_ms=turn.now, queues=queues):
        store.pull_back(now_ms=turn.now, queues=queues)
        turn.expired = store.recover_expired(now_ms=turn.now, queues=queues)
        turn.more = store.promote(now_ms=turn.now, queues=queues) or len(turn.expired) >= RECOVER_CHUNK
    if room and not turn.more:
        turn.claimed = store.claim(worker_id, now_ms=turn.now, lease_ms=lease_ms, limit=room, queues=queues)
        turn.more = len(turn.claimed) == room
    elif not room:
        turn.more = turn.more or store.has_ready(queues)
    if not turn.more:
        turn.next_event = store.next_event(queues)
        turn.version, _ = store.data_version()


def _token(job: Job) -> str:
    assert job.lease_token is not None  # it came from a claim
    return job.lease_token
