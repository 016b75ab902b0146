"""SIGINT and SIGTERM of a worker: counted, and nothing else.

The handler only counts, so no transaction is ever cut short; the worker's loop looks at the
count, and a `poll` ends early when a signal comes.  `python -m jobqueue worker` installs it
before its slow imports: a Ctrl+C during these would raise in the middle of them.
"""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Counts the signals that ask this process to stop; a context manager that puts the old handlers back.

    Main thread only.

    Attributes:
        count: how many have come.
        last: the number of the latest; 0: none yet.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self._old: dict[int, Any] = {}
        self._for_good = False

    def install(self) -> None:
        """Begin to count, until the end of the process: so late a signal should not change how that ended."""
        self._install()
        self._for_good = True

    def _install(self) -> None:
        if not self._old:
            self._old = {number: signal.signal(number, self._note) for number in _NUMBERS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = number

    def __enter__(self) -> Signals:
        self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._for_good:
            return
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self.__init__()  # type: ignore[misc]


SIGNALS = Signals()
"""Those of this process."""
