"""What is kept of an exception that a handler raised: what it says, and where it came from.

    ValueError: no path
      File "/srv/app/tasks.py", line 12, in thumbnail
      File "/srv/app/images.py", line 40, in load
      caused by KeyError: 'path'

The first line is what `str` says, the others are indented: the frames of the handler and of what
it called, the deepest last, by file, line and function alone.  No values, no source text.
"""

from __future__ import annotations

import os

from .jobs import clean_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

MAX_FRAMES = 10
"""The deepest are kept."""
MAX_CAUSES = 3

_OURS = os.path.dirname(__file__) + os.sep
_LOOP = os.path.join(os.path.dirname(os.__file__), "asyncio") + os.sep
"""Stands between us and an `async` handler."""


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, at most 4,000 characters, whatever its own `__str__` does."""
    return clean_error(_headline(error))


def describe_in_full(error: BaseException) -> str:
    """Return what `describe` does, with a line for each frame of the handler and for each cause."""
    lines = [_headline(error), *_frames(error.__traceback__)]
    seen = {id(error)}
    cause = _cause(error)
    while cause is not None and id(cause) not in seen and len(seen) <= MAX_CAUSES:
        seen.add(id(cause))
        lines.append("  caused by " + _headline(cause).partition("\n")[0])
        cause = _cause(cause)
    return clean_error("\n".join(lines))


def _headline(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # the handler's own __str__ is broken
        text = "(no text: its __str__ fails)"
    return f"{name}: {text}" if text else name


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(traceback: TracebackType | None) -> list[str]:
    found: list[str] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OURS) and (found or not code.co_filename.startswith(_LOOP)):
            found.append(f'  File "{code.co_filename}", line {traceback.tb_lineno}, in {code.co_name}')
        traceback = traceback.tb_next
    hidden = len(found) - MAX_FRAMES
    return found if hidden <= 0 else [f"  ({hidden} more)", *found[hidden:]]
