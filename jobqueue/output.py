"""A thread that writes to one stream, so that a reader who stalls holds up nothing else.

The supervisor must never block on its stdout or stderr: heartbeats would stop and leases
run out.  It hands whole lines to a `Writer` and learns later, by `finished`, which have
been written.  Lines never tear: each write is a number of whole lines.

It writes to the descriptor itself.  A thread stuck in a write of Python's buffered stream
would hold that stream's lock, and the process could not end: the interpreter flushes stdout
and stderr at its end, waits for the lock, and aborts.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO

MAX_WAITING_BYTES = 4_000_000
"""More than this in lines that nobody waits for (log lines) is dropped, and their number told."""


class Writer:
    """Writes text to `stream` in a thread of its own; nothing else may write to the stream meanwhile.

    Args:
        wake: called in that thread whenever `finished` has something new; must not block.
    """

    def __init__(self, stream: TextIO, wake: Callable[[], object]) -> None:
        self._stream = stream
        self._wake = wake
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Any]] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._written: deque[tuple[Any, OSError | None]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="jobqueue-writer", daemon=True)
        self._thread.start()

    def write(self, text: str, token: Any = None) -> None:
        """Have whole lines written.

        Args:
            token: comes back from `finished`; None: nobody asks, so these lines may be dropped
                while more than 4 MB of them wait.
        """
        with self._changed:
            if token is None:
                if self._waiting_bytes > MAX_WAITING_BYTES:
                    self._dropped += text.count("\n")
                    return
                self._waiting_bytes += len(text)
            self._waiting.append((text, token))
            self._changed.notify()

    def finished(self) -> list[tuple[Any, OSError | None]]:
        """Return the tokens whose lines have been written since the last call, each with its error or None."""
        result = []
        while self._written:
            result.append(self._written.popleft())
        return result

    def close(self, timeout: float) -> None:
        """Wait until all is written, for at most `timeout` seconds; what is left then is given up.

        Called again, it does not wait again.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                batch = list(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                dropped, self._dropped = self._dropped, 0
            error = self._put("".join(text for text, _ in batch)
                              + (f"jobqueue: {dropped} log lines were dropped\n" if dropped else ""))
            tokens = [(token, error) for _, token in batch if token is not None]
            if tokens:
                self._written.extend(tokens)
                self._wake()

    def _put(self, text: str) -> OSError | None:
        try:
            self._write_through(text)
        except OSError as error:
            return error
        except ValueError:  # closed by somebody
            return OSError("the stream is closed")
        return None

    def _write_through(self, text: str) -> None:
        encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "strict"
        left = memoryview(text.encode(encoding, errors))
        descriptor = self._stream.fileno()
        while left:
            try:
                left = left[os.write(descriptor, left):]
            except BlockingIOError:  # some program that shares the pipe has made it non-blocking
                select.select([], [descriptor], [])
