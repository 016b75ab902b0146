"""The registry of handlers: `@handler`, `JobContext`, the built-in types, loading of modules.

A handler is a callable `(payload, context)`, plain or `async def`, registered for one type
of job.  `load` imports the modules that hold them, `call` runs one.  What a handler reports
goes through callables that the context was made with, so nothing here knows of pipes or
processes.  Never touches the database, never writes to stdout.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time

from .errors import HandlerLoadError, InvalidJob
from .jobs import check_name, clean_error, duration_ms, encode_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Any, TypeVar

    Handler = Callable[[Any, "JobContext"], Any]
    AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])

MAX_NOTE_LENGTH = 200
MAX_SLEEP_SECONDS = 1e9


class Retry(Exception):
    """Raised by a handler to have the job run again; the attempt counts.

    Args:
        after: seconds until then (or text such as `5m`); None: the usual backoff.
        reason: kept as the attempt's error.

    Raises:
        InvalidJob: `after` is no duration, or negative.
    """

    def __init__(self, after: float | str | None = None, reason: str | None = None) -> None:
        super().__init__("the handler asked for a retry" if reason is None else reason)
        self.after_ms = None if after is None else duration_ms(after, "after")


class Reject(Exception):
    """Raised by a handler to fail the job for good, whatever attempts are left."""

    def __init__(self, reason: str = "the handler rejected the job") -> None:
        super().__init__(reason)


class Stopped(BaseException):
    """Raised inside a handler that was asked to stop and did not; clean up and let it pass."""


class JobContext:
    """What a handler knows of its job, and its way to report; valid until the handler returns.

    Attributes:
        job_id, type: of the job.
        attempt: number of this attempt, from 1 to `max_attempts`.
        trace: a W3C traceparent or any trace id that came with the job; None: none did.

    Safe to use from the handler's threads.  The three callables of the constructor get the context
    itself first, so that whoever made it can tell a living one from one whose job is over.
    """

    __slots__ = ("_emit", "_progress", "_stopping", "attempt", "job_id", "max_attempts", "trace", "type")

    def __init__(
        self, job_id: str, type: str, attempt: int, max_attempts: int, trace: str | None,
        progress: Callable[[JobContext, float, str | None], None],
        stopping: Callable[[JobContext], bool],
        emit: Callable[[JobContext, str], None],
    ) -> None:
        self.job_id = job_id
        self.type = type
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.trace = trace
        self._progress = progress
        self._stopping = stopping
        self._emit = emit

    def progress(self, fraction: float, note: str | None = None) -> None:
        """Report how far the job is.

        Args:
            fraction: 0 to 1.
            note: a few words for people; control characters become spaces, the rest is cut at
                200 characters.  None: no note.

        Raises:
            ValueError: `fraction` is no number from 0 to 1.
        """
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ValueError(f"progress must be a number from 0 to 1, not {fraction!r:.60}")
        self._progress(self, float(fraction), None if note is None else _clean_note(note))

    @property
    def stopping(self) -> bool:
        """Whether the handler was asked to end (cancel, timeout, lost lease, shutdown); costs a microsecond.

        A handler that has seen True and returns counts as stopped, not as done.
        """
        return self._stopping(self)

    def emit(self, line: str) -> None:
        """Have a line printed on the worker's stdout before the job is settled; for built-in types."""
        self._emit(self, line)


def _clean_note(note: object) -> str:
    shown = "".join(character if character.isprintable() else " " for character in clean_error(note))
    return " ".join(shown.split())[:MAX_NOTE_LENGTH]


# -- registry -------------------------------------------------------------------------

_handlers: dict[str, Handler] = {}


def handler(type: str) -> Callable[[AnyHandler], AnyHandler]:
    """Register the decorated callable for jobs of `type`.

    Raises:
        HandlerLoadError: the type is no name, is built in, or has another handler already.
    """
    if not isinstance(type, str):
        raise HandlerLoadError('@handler needs the type of job: write @handler("type")')

    def register(function: AnyHandler) -> AnyHandler:
        add(type, function)
        return function

    return register


def add(type: str, function: Handler) -> None:
    """Register `function` for jobs of `type`; the same function again is no error.

    Raises:
        HandlerLoadError: the type is no name, is built in, or has another handler already.
    """
    try:
        check_name(type, "the type of a handler")
    except InvalidJob as error:
        raise HandlerLoadError(f"{error}, at {_place(function)}") from None
    if not callable(function):
        raise HandlerLoadError(f"the handler for {type!r} must be callable, not {function!r:.60}")
    other = _handlers.get(type)
    if other is not None and getattr(other, "__module__", None) == __name__:
        raise HandlerLoadError(f"the type {type!r} is built in; choose another name at {_place(function)}")
    # A file that is loaded and imported too defines its functions twice: same place, same handler.
    if other is not None and other is not function and _place(other) != _place(function):
        raise HandlerLoadError(
            f"the type {type!r} has two handlers, at {_place(other)} and at {_place(function)}; rename one"
        )
    _handlers[type] = function


def known_types() -> tuple[str, ...]:
    """Return the registered types, sorted."""
    return tuple(sorted(map(str, _handlers)))


def call(type: str, payload: object, context: JobContext) -> object:
    """Run the handler of `type` and return its result; an awaitable is awaited in a fresh event loop.

    Raises:
        LookupError: no handler is known for the type.
        BaseException: whatever the handler raises.
    """
    function = _handlers.get(type)
    if function is None:
        raise LookupError(f"no handler for the type {type!r}; this worker knows {', '.join(known_types())}")
    result = function(payload, context)
    if result is not None and hasattr(result, "__await__"):
        import asyncio  # slow to import: only the first async handler pays

        async def wait() -> object:
            return await result

        return asyncio.run(wait())
    return result


def _place(function: object) -> str:
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


# -- built-in types -------------------------------------------------------------------

def _field(payload: object, name: str) -> object:
    if not isinstance(payload, dict):
        raise ValueError(f'the payload must be an object with "{name}", not {type(payload).__name__}')
    if name not in payload:
        raise ValueError(f'payload["{name}"] is missing')
    return payload[name]


def _print(payload: object, context: JobContext) -> None:
    message = _field(payload, "message")
    context.emit(message if isinstance(message, str) else encode_json(message, 'payload["message"]'))


def _sleep(payload: object, context: JobContext) -> None:
    seconds = _field(payload, "seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError(f'payload["seconds"] must be a number, not {type(seconds).__name__}')
    if not 0 <= seconds <= MAX_SLEEP_SECONDS:
        raise ValueError(f'payload["seconds"] must lie between 0 and {MAX_SLEEP_SECONDS:g}')
    if seconds:
        time.sleep(seconds)


def _fail(payload: object, context: JobContext) -> None:
    message = payload.get("message") if isinstance(payload, dict) else None
    if message is None:
        raise RuntimeError("a job of the type 'fail' fails")
    raise RuntimeError(message if isinstance(message, str) else encode_json(message, 'payload["message"]'))


_handlers.update({"print": _print, "sleep": _sleep, "fail": _fail})


# -- loading --------------------------------------------------------------------------

def load(specs: Iterable[str]) -> None:
    """Import the modules that register handlers.

    Args:
        specs: `package.module`, or the path of a file ending in `.py`.  The current directory and
            the file's own are searched last for what they import.

    Raises:
        HandlerLoadError: one of them is not there, does not compile, fails while it is imported,
            or registers a type that is taken.
    """
    for spec in specs:
        path = spec.endswith(".py") or os.sep in spec
        try:
            if path:
                _load_file(spec)
            else:
                _search(os.getcwd())
                importlib.import_module(spec)
        except (HandlerLoadError, Stopped):
            raise
        except SyntaxError as error:
            raise HandlerLoadError(
                f"handlers {spec!r}: {error.msg} in {error.filename}, line {error.lineno}"
            ) from None
        except BaseException as error:  # a module that calls sys.exit() did not load either
            raise HandlerLoadError(_explain(spec, error)) from None


def _search(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)  # last: a stray json.py there must not hide the library's


def _load_file(spec: str) -> None:
    path = os.path.realpath(spec)
    if not os.path.isfile(path):
        raise HandlerLoadError(f"handlers {spec!r}: there is no such file; give a path or a package.module")
    name = "jobqueue_handlers:" + path  # no module anyone could import by accident
    if name in sys.modules:
        return
    _search(os.path.dirname(path))
    loader = importlib.machinery.SourceFileLoader(name, path)
    module_spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _explain(spec: str, error: BaseException) -> str:
    where = _last_line(error.__traceback__)
    if where is None and isinstance(error, ModuleNotFoundError):
        return f"handlers {spec!r}: there is no module {error.name!r}; give a package.module or a file.py"
    shown = clean_error(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    return f"handlers {spec!r}: {shown}" + (f" in {where}" if where else "")


def _last_line(trace: TracebackType | None) -> str | None:
    """Return the line of a traceback to look at: the last one outside Python's library.

    None: it never got into any file but the importer's.
    """
    library = os.path.dirname(os.__file__)
    last = None
    where = None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<frozen") and name not in (__file__, importlib.__file__):
            last = f"{name}, line {trace.tb_lineno}"
            if not name.startswith(library):
                where = last
        trace = trace.tb_next
    return where or last
