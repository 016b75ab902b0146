"""Noticing that another process has committed, within a millisecond and at hardly any cost.

`PRAGMA data_version` tells for sure, but has to be asked.  On Linux, inotify(7) on the
write-ahead log tells when to ask: a commit first writes there, then syncs, and is visible
only after that, so for a while after each write the question is put every millisecond.
A slow look stays, as a net.  Elsewhere the question is put every few milliseconds.

inotify is not in the standard library, so it is called through `ctypes`.  It watches by
name: no descriptor of the file is opened, whose closing would drop SQLite's locks.
"""

from __future__ import annotations

import os
import sys
import time
from selectors import EVENT_READ

from .errors import DatabaseError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from selectors import BaseSelector

    from .db import Store

ALERT_SECONDS = 0.05
"""How long after a write to look often: longer than most syncs take."""
ALERT_LOOK_SECONDS = 0.001
CALM_LOOK_SECONDS = 0.1
"""How often to look while nothing has been written: only a lost event makes it matter."""
BLIND_LOOK_SECONDS = 0.004
"""How often to look without inotify; a look costs about 5 us, and waking for it some more."""
_IN_MODIFY = 0x2


class CommitWatch:
    """Watches one queue's file for commits of others.

    Args:
        selector: gets a descriptor that becomes readable at each write, with a callable as its data.
    """

    def __init__(self, store: Store, selector: BaseSelector) -> None:
        self._store = store
        self._version = -1
        self._written_at = time.monotonic()
        self._descriptor = _watch_writes(store.path + "-wal")
        if self._descriptor is not None:
            selector.register(self._descriptor, EVENT_READ, self._on_write)

    def close(self) -> None:
        """Stop watching; the selector is closed by its owner."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _on_write(self) -> None:
        self._written_at = time.monotonic()
        assert self._descriptor is not None
        try:
            os.read(self._descriptor, 65_536)
        except BlockingIOError:
            return

    def look_seconds(self, now: float) -> float:
        """Return how long to sleep at most, at the monotonic time `now`, before asking `has_changed`."""
        if self._descriptor is None:
            return BLIND_LOOK_SECONDS
        return ALERT_LOOK_SECONDS if now - self._written_at < ALERT_SECONDS else CALM_LOOK_SECONDS

    def remember(self, version: int) -> None:
        """Take the `data_version` of a transaction that has seen everything so far."""
        self._version = version

    def has_changed(self) -> bool:
        """Return whether anybody else has committed since; also true when the file cannot be asked."""
        try:
            return self._store.data_version()[0] != self._version
        except DatabaseError:
            return True


def _watch_writes(path: str) -> int | None:
    """Return a descriptor that becomes readable when `path` is written; None where there is no inotify."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except (ImportError, OSError, AttributeError):
        return None
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        os.close(descriptor)
        return None
    return descriptor
