"""A line on the terminal that tells how far long work has come: count, rate, bar, time left.

It is drawn over and over on stderr, a few times a second, only where stderr is a terminal
and only once the work has lasted for a moment; it is gone when the work ends.  Plain ASCII
and `\\r`, so that every terminal shows it.  Nothing here knows what the work is.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

QUIET_SECONDS = 0.5
"""Work that ends sooner shows nothing."""
REDRAW_SECONDS = 0.2
BAR_WIDTH = 24


class ProgressBar:
    """A context manager around long work; nothing is written but to a terminal.

    Not safe across threads.

    Args:
        verb: what is being done, as in `reading`.
        unit: what is counted, in the plural.
        quiet: show nothing at all.
        stream: where to draw; None: stderr.
        clock: monotonic seconds.
    """

    def __init__(self, verb: str, unit: str = "jobs", *, quiet: bool = False, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._unit = verb, unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream is not None and self._stream.isatty()
        self._begun = clock()
        self._next = self._begun + QUIET_SECONDS
        self._width = 0  # of what stands on the terminal now

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._draw("")
        self._shown = False

    def update(self, count: int, fraction: float | None = None) -> None:
        """Tell how much is done; draws if it is time to.

        Args:
            fraction: of the whole, 0 to 1; None: nobody knows, so there is no bar and no time left.
        """
        now = self._clock()
        if self._shown and now >= self._next:
            self._next = now + REDRAW_SECONDS
            self._draw(self._line(count, fraction, now - self._begun))

    def say(self, text: str) -> None:
        """Show a text in place of the bar, if the work has lasted long enough for one."""
        if self._clock() >= self._begun + QUIET_SECONDS:
            self._draw(text)

    def _line(self, count: int, fraction: float | None, seconds: float) -> str:
        line = f"{self._verb} {count:,} {self._unit}, {count / seconds:,.0f}/s"
        if fraction is None:
            return line
        fraction = min(max(fraction, 0.0), 1.0)
        filled = int(fraction * BAR_WIDTH)
        line += f" [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {fraction:.0%}"
        if fraction > 0:
            from .times import span

            line += f", {span(round(1_000 * (seconds / fraction - seconds)))} left"
        return line

    def _draw(self, line: str) -> None:
        if not self._shown or not (line or self._width):
            return
        from .render import FALLBACK_WIDTH, terminal_width  # not before there is a bar to draw

        line = line[:(terminal_width(self._stream, os.environ) or FALLBACK_WIDTH) - 1]
        try:
            self._stream.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
            self._stream.flush()
        except OSError:
            self._shown = False  # the terminal has gone, the work has not
        self._width = len(line)
