"""The engine: every operation on a queue's file, with the time given by the caller.

`Store` is put together from parts that can each be read alone:

    connection   open, wait, transactions, checkpoints
    intake       store one job              batch      store many, atomically
    leases       claim, complete, fail, extend, release, recover, cancel, retry
    catalogue    get, list, count           roster     which workers there are
    schema       tables, indexes, migrations

The engine never reads a clock and never starts a thread.  Every method takes part in a
transaction that the caller has begun, so that a worker can settle, recover and claim in
one commit:

    with store.transaction():
        now = clock()                       # after the lock is held: waiting may have taken long
        store.complete_many(..., now_ms=now)
        jobs = store.claim(..., now_ms=now)
"""

from __future__ import annotations

from .catalogue import Catalogue
from .intake import Intake
from .leases import Leases
from .roster import Roster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .batch import Batch


class Store(Intake, Leases, Catalogue, Roster):
    """A queue's file, open.

    Safe across threads (one lock; they take turns) and across processes; refuses use after
    a fork.  All times are integer milliseconds since the Unix epoch.  The arguments and
    errors of the constructor are those of `connection.Connection`.
    """

    def batch(self) -> Batch:
        """Return an empty batch, to be used in a `with` statement."""
        from .batch import Batch  # a single enqueue does without

        return Batch(self)
