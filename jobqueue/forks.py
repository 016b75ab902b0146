"""What a forked child does with the connections that it inherits: it gives them up.

SQLite counts a process's locks by file, and a child inherits the count without the locks.
A connection that it opened beside an inherited one would therefore go unprotected: when the
parent closes the file, the write-ahead log is removed under the child, and what it commits
from then on is lost.  Worse, the end of a child that inherited half a transaction rolls back
in memory that it shares with its parent.

So a fork waits for the transactions of other threads, and the child's first act is to let go
of all connections.  This module knows nothing of SQLite and nothing of jobs.
"""

from __future__ import annotations

import os
import threading
from _weakrefset import WeakSet  # all that is needed of weakref, and loaded already

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Inheritable(Protocol):
        """What `watch` takes."""

        def hold(self) -> bool:
            """Keep other threads out; return False if they do not come to an end."""

        def resume(self) -> None:
            """Let other threads in again, after a `hold` that returned True."""

        def disown(self, held: bool) -> None:
            """Give up what a child has inherited; `held` is what `hold` returned before the fork."""


_watched: WeakSet[Inheritable] = WeakSet()
_held: dict[Inheritable, bool] = {}
opening = threading.Lock()
"""Held while a connection is being opened, until it is watched: a fork waits for that, too."""


def watch(connection: Inheritable) -> None:
    """Give a connection up in the children that this process forks from now on, as long as it is referenced."""
    _watched.add(connection)


def _before() -> None:
    opening.acquire()
    for connection in list(_watched):
        _held[connection] = connection.hold()


def _in_parent() -> None:
    for connection, held in _held.items():
        if held:
            connection.resume()
    _held.clear()
    opening.release()


def _in_child() -> None:
    for connection, held in _held.items():
        connection.disown(held)
    _in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
