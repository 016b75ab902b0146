"""Handlers: registration, the context, built-in types, loading of modules, each without a process."""

from __future__ import annotations

import asyncio
import sys
import unittest
from typing import Any

import jobqueue
from jobqueue import handlers
from jobqueue.errors import HandlerLoadError, InvalidJob
from jobqueue.handlers import JobContext, Reject, Retry, handler
from tests.support import TempDirTestCase


class Recorder:
    """Makes contexts and keeps what goes through them."""

    def __init__(self, stopping: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop = stopping

    def context(self) -> JobContext:
        return JobContext(
            "7", "t", 2, 3, "trace-1",
            lambda context, fraction, note: self.calls.append((fraction, note)),
            lambda context: self.stop,
            lambda context, line: self.calls.append((line,)),
        )  # fmt: skip


class RegistryTestCase(TempDirTestCase):
    """Gives each test the built-in types alone, and takes back what it imports."""

    def setUp(self) -> None:
        super().setUp()
        registered, modules, path = dict(handlers._handlers), set(sys.modules), list(sys.path)
        for name in set(handlers._handlers) - {"print", "sleep", "fail"}:
            del handlers._handlers[name]

        def restore() -> None:
            handlers._handlers.clear()
            handlers._handlers.update(registered)
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith(("jobqueue_handlers:", "jq_")):
                    del sys.modules[name]

        self.addCleanup(restore)


class RegistryTest(RegistryTestCase):
    def test_the_package_exports_what_handlers_need(self) -> None:
        for name in ("handler", "JobContext", "Retry", "Reject"):
            self.assertIs(getattr(jobqueue, name), getattr(handlers, name))

    def test_a_registered_callable_is_called_with_payload_and_context(self) -> None:
        @handler("double")
        def double(payload: Any, context: JobContext) -> Any:
            return payload * 2, context.job_id

        self.assertEqual(handlers.call("double", 21, Recorder().context()), (42, "7"))
        self.assertEqual(handlers.known_types(), ("double", "fail", "print", "sleep"))

    def test_awaitables_are_awaited(self) -> None:
        @handler("coroutine")
        async def coroutine(payload: Any, context: JobContext) -> Any:
            await asyncio.sleep(0)
            return payload

        class Later:
            def __await__(self) -> Any:
                yield from asyncio.sleep(0).__await__()
                return 5

        handlers.add("awaitable", lambda payload, context: Later())
        self.assertEqual(handlers.call("coroutine", "x", Recorder().context()), "x")
        self.assertEqual(handlers.call("awaitable", None, Recorder().context()), 5)

    def test_an_unknown_type_names_itself_and_those_known(self) -> None:
        with self.assertRaisesRegex(LookupError, "'nope'.*fail, print, sleep"):
            handlers.call("nope", None, Recorder().context())

    def test_two_handlers_for_one_type_name_both_places(self) -> None:
        @handler("twice")
        def first(payload: Any, context: JobContext) -> None: ...

        with self.assertRaises(HandlerLoadError) as caught:
            @handler("twice")
            def second(payload: Any, context: JobContext) -> None: ...

        places = [f"{__file__}:{function.__code__.co_firstlineno}" for function in (first,)]
        places.append(f"{__file__}:{first.__code__.co_firstlineno + 4}")
        for place in places:
            self.assertIn(place, str(caught.exception))
        self.assertIs(handlers._handlers["twice"], first)

    def test_the_same_function_may_register_twice(self) -> None:
        def made() -> Any:
            def function(payload: Any, context: JobContext) -> None: ...

            return function

        handlers.add("same", made())
        again = made()
        handlers.add("same", again)
        self.assertIs(handlers._handlers["same"], again)

    def test_bad_registrations(self) -> None:
        rows: list[tuple[Any, Any, str]] = [
            ("print", lambda payload, context: None, "'print' is built in.*test_handlers.py"),
            ("sleep", lambda payload, context: None, "'sleep' is built in"),
            ("", lambda payload, context: None, "1 to 255 characters"),
            ("a\nb", lambda payload, context: None, "control characters"),
            ("x" * 256, lambda payload, context: None, "1 to 255 characters"),
            ("fine", 5, "must be callable"),
        ]
        for type, function, message in rows:
            with self.subTest(type=type), self.assertRaisesRegex(HandlerLoadError, message):
                handlers.add(type, function)
        with self.assertRaisesRegex(HandlerLoadError, r'write @handler\("type"\)'):
            handler(lambda payload, context: None)  # type: ignore[arg-type]


class ContextTest(unittest.TestCase):
    def test_it_tells_of_the_job(self) -> None:
        context = Recorder().context()
        shown = (context.job_id, context.type, context.attempt, context.max_attempts, context.trace)
        self.assertEqual(shown, ("7", "t", 2, 3, "trace-1"))

    def test_stopping_is_asked_anew_each_time(self) -> None:
        recorder = Recorder()
        context = recorder.context()
        self.assertFalse(context.stopping)
        recorder.stop = True
        self.assertTrue(context.stopping)

    def test_progress(self) -> None:
        rows: list[tuple[float, Any, tuple[float, str | None]]] = [
            (0, None, (0.0, None)),
            (1, "end", (1.0, "end")),
            (0.25, "a\tb\x1b[31m\n c", (0.25, "a b [31m c")),
            (0.5, "x" * 201, (0.5, "x" * 200)),
            (0.5, "bad \ud800", (0.5, "bad \\ud800")),
            (0.5, 17, (0.5, "17")),
        ]
        for fraction, note, expected in rows:
            with self.subTest(fraction=fraction, note=note):
                recorder = Recorder()
                recorder.context().progress(fraction, note)
                self.assertEqual(recorder.calls, [expected])

    def test_progress_that_is_none(self) -> None:
        for fraction in (-0.001, 1.001, float("nan"), float("inf"), True, "0.5", None):
            with self.subTest(fraction=fraction):
                recorder = Recorder()
                with self.assertRaisesRegex(ValueError, "from 0 to 1"):
                    recorder.context().progress(fraction)  # type: ignore[arg-type]
                self.assertEqual(recorder.calls, [])

    def test_retry_and_reject(self) -> None:
        rows: list[tuple[Exception, int | None, str]] = [
            (Retry(), None, "the handler asked for a retry"),
            (Retry(1.5), 1_500, "the handler asked for a retry"),
            (Retry(0, "again"), 0, "again"),
            (Retry("5m"), 300_000, "the handler asked for a retry"),
        ]
        for error, after_ms, text in rows:
            with self.subTest(error=error):
                self.assertEqual((getattr(error, "after_ms"), str(error)), (after_ms, text))  # noqa: B009
        self.assertEqual(str(Reject("no")), "no")
        for after in (-1, float("nan"), True, "soon"):
            with self.subTest(after=after), self.assertRaises(InvalidJob):
                Retry(after)


class BuiltInTest(unittest.TestCase):
    def test_print_gives_its_line_to_the_context(self) -> None:
        rows: list[tuple[Any, str]] = [
            ("hello", "hello"), ("", ""), ("ä\nb", "ä\nb"), (None, "null"), (1.5, "1.5"),
            ({"a": ["ü"]}, '{"a":["ü"]}'),
        ]  # fmt: skip
        for message, line in rows:
            with self.subTest(message=message):
                recorder = Recorder()
                self.assertIsNone(handlers.call("print", {"message": message}, recorder.context()))
                self.assertEqual(recorder.calls, [(line,)])

    def test_a_bad_payload_names_the_field(self) -> None:
        rows: list[tuple[str, Any, str]] = [
            ("print", {}, r'payload\["message"\] is missing'),
            ("print", ["message"], 'the payload must be an object with "message", not list'),
            ("print", None, 'the payload must be an object with "message", not NoneType'),
            ("sleep", {}, r'payload\["seconds"\] is missing'),
            ("sleep", {"seconds": "1"}, r'payload\["seconds"\] must be a number, not str'),
            ("sleep", {"seconds": True}, r'payload\["seconds"\] must be a number, not bool'),
            ("sleep", {"seconds": None}, r'payload\["seconds"\] must be a number'),
            ("sleep", {"seconds": -0.1}, r'payload\["seconds"\] must lie between'),
            ("sleep", {"seconds": 1e300}, r'payload\["seconds"\] must lie between'),
            ("sleep", {"seconds": 10**400}, r'payload\["seconds"\] must lie between'),
        ]
        for type, payload, message in rows:
            with self.subTest(type=type, payload=payload), self.assertRaisesRegex(ValueError, message):
                handlers.call(type, payload, Recorder().context())

    def test_sleep_accepts_numbers(self) -> None:
        for seconds in (0, 0.0, 0.001):
            with self.subTest(seconds=seconds):
                self.assertIsNone(handlers.call("sleep", {"seconds": seconds}, Recorder().context()))

    def test_fail_fails(self) -> None:
        rows: list[tuple[Any, str]] = [
            ({"message": "boom"}, "^boom$"), ({"message": {"a": 1}}, '^{"a":1}$'), ({}, "fails$"),
            (None, "fails$"), ([1], "fails$"), ({"message": None}, "fails$"),
        ]  # fmt: skip
        for payload, message in rows:
            with self.subTest(payload=payload), self.assertRaisesRegex(RuntimeError, message):
                handlers.call("fail", payload, Recorder().context())


GOOD = """
from jobqueue import handler
@handler("%s")
def function(payload, context):
    return payload
"""


class LoadTest(RegistryTestCase):
    def write(self, name: str, source: str) -> str:
        path = self.dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return str(path)

    def test_a_file_and_a_module(self) -> None:
        path = self.write("own.py", GOOD % "from-file")
        self.write("jq_package/__init__.py", "")
        self.write("jq_package/tasks.py", GOOD % "from-module")
        sys.path.insert(0, str(self.dir))
        handlers.load([path, "jq_package.tasks", path])
        self.assertEqual(handlers.known_types(), ("fail", "from-file", "from-module", "print", "sleep"))

    def test_a_file_finds_its_neighbours(self) -> None:
        self.write("jq_neighbour.py", "NAME = 'by-neighbour'")
        path = self.write("own.py", f"import jq_neighbour{GOOD % '%s'}".replace('"%s"', "jq_neighbour.NAME"))
        handlers.load([path])
        self.assertIn("by-neighbour", handlers.known_types())

    def test_a_file_imported_as_a_module_too_is_no_conflict(self) -> None:
        path = self.write("jq_both.py", GOOD % "both")
        handlers.load([path])
        handlers.load(["jq_both"])
        self.assertIn("both", handlers.known_types())

    def test_what_does_not_load(self) -> None:
        rows = [
            ("syntax.py", "x = 1\ndef f(:\n", r"invalid syntax in .*syntax.py, line 2"),
            ("raises.py", "x = 1\n\nraise OSError('no disk')\n", r"OSError: no disk in .*raises.py, line 3"),
            ("deep.py", "import json\n\n\njson.loads('{')\n", r"JSONDecodeError: .*deep.py, line 4"),
            ("imports.py", "\nimport jq_missing\n", r"No module named 'jq_missing' in .*imports.py, line 2"),
            ("exits.py", "import sys\nsys.exit(3)\n", r"SystemExit: 3 in .*exits.py, line 2"),
            ("interrupts.py", "raise KeyboardInterrupt\n", r"KeyboardInterrupt in .*interrupts.py, line 1"),
            ("taken.py", GOOD % "print", r"'print' is built in.*taken.py:3"),
            ("no-such-file.py", None, r"'.*no-such-file.py': there is no such file"),
            ("null.py", "x = '\0'", "null"),
        ]
        for name, source, message in rows:
            with self.subTest(name=name):
                path = str(self.dir / name) if source is None else self.write(name, source)
                with self.assertRaisesRegex(HandlerLoadError, message) as caught:
                    handlers.load([path])
                self.assertNotIn("\n", str(caught.exception))
                self.assertNotIn("jobqueue_handlers:" + path, sys.modules)

    def test_a_module_that_is_not_there(self) -> None:
        for spec, missing in (("jq_nope", "jq_nope"), ("jq_nope.tasks", "jq_nope"), ("json.jq_no", "json.jq_no")):
            with self.subTest(spec=spec), self.assertRaisesRegex(HandlerLoadError, f"no module '{missing}'"):
                handlers.load([spec])
        for spec in ("", ".", "..x", "a..b", "/"):
            with self.subTest(spec=spec), self.assertRaises(HandlerLoadError):
                handlers.load([spec])


if __name__ == "__main__":
    unittest.main()
