"""What is kept of an exception: a first line as ever, then the handler's own frames and the causes."""

from __future__ import annotations

import re
import unittest

from jobqueue import handlers, tracebacks
from jobqueue.jobs import MAX_ERROR_LENGTH
from tests.support import TOP, WorkerTestCase, run

HERE = re.escape(__file__)
TASKS = """
from jobqueue import Reject, handler

def load(path):
    try:
        return {}[path]
    except KeyError as error:
        raise ValueError("no path\\nsecond line") from error

@handler("plain")
def plain(payload, context):
    return load("secret value")

@handler("looped")
async def in_a_loop(payload, context):
    load("x")

@handler("deep")
def deep(payload, context):
    return deep(payload, context)

@handler("refuse")
def reject(payload, context):
    raise Reject("never")
"""


def caught(function: object) -> BaseException:
    """Call a function and return what it raises."""
    try:
        function()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


class DescribeTest(unittest.TestCase):
    def test_frames_by_file_line_and_function(self) -> None:
        def inner() -> None:
            raise ValueError("why")

        def outer() -> None:
            inner()

        self.assertRegex(tracebacks.describe_in_full(caught(outer)), rf'\AValueError: why\n'
                         rf'  File "{HERE}", line \d+, in caught\n  File "{HERE}", line \d+, in outer\n'
                         rf'  File "{HERE}", line \d+, in inner\Z')
        self.assertEqual(tracebacks.describe(caught(outer)), "ValueError: why")

    def test_the_deepest_ten(self) -> None:
        def deep(n: int) -> None:
            if n == 0:
                raise KeyError
            deep(n - 1)

        lines = tracebacks.describe_in_full(caught(lambda: deep(20))).split("\n")
        self.assertEqual((lines[:2], len(lines)), (["KeyError", "  (13 more)"], 12))
        self.assertTrue(lines[-1].endswith("in deep"))

    def test_causes_are_a_line_each_and_few(self) -> None:
        last: BaseException | None = None
        for n in range(6):
            error = LookupError(f"cause {n}\nmore")
            error.__context__ = last
            last = error
        lines = tracebacks.describe_in_full(error).split("\n")
        self.assertEqual([line for line in lines if "caused" in line],
                         [f"  caused by LookupError: cause {n}" for n in (4, 3, 2)])

    def test_a_suppressed_or_circular_cause(self) -> None:
        def suppressed() -> None:
            try:
                raise KeyError("hidden")
            except KeyError:
                raise ValueError("shown") from None

        self.assertNotIn("hidden", tracebacks.describe_in_full(caught(suppressed)))
        ring = ValueError("a")
        ring.__cause__ = KeyError("b")
        ring.__cause__.__cause__ = ring
        self.assertEqual(tracebacks.describe_in_full(ring), "ValueError: a\n  caused by KeyError: 'b'")

    def test_it_is_capped_and_survives_a_broken_str(self) -> None:
        class Broken(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        self.assertEqual(tracebacks.describe_in_full(Broken()), "Broken: (no text: its __str__ fails)")
        self.assertEqual(len(tracebacks.describe_in_full(ValueError("x" * 10_000))), MAX_ERROR_LENGTH)

    def test_our_own_frames_are_left_out(self) -> None:
        error = caught(lambda: handlers.call("no-such-type", None, None))  # type: ignore[arg-type]
        frames = tracebacks.describe_in_full(error).split("\n")[1:]
        self.assertEqual([frame.rpartition(" ")[2] for frame in frames], ["caught", "<lambda>"])


class WorkedTest(WorkerTestCase):
    """As a real worker stores and logs them."""

    def test_what_the_file_the_log_and_the_listing_have(self) -> None:
        (self.dir / "tasks.py").write_text(TASKS)
        types = ("plain", "looped", "deep", "refuse", "fail", "nobody")
        for type in types:
            self.queue.enqueue(type, {"message": "boom"} if type == "fail" else None, id=type, max_attempts=1)
        log = self.drain("--handlers", "./tasks.py").stderr
        found = {id: self.job(id).last_error or "" for id in types}
        file = re.escape(str(self.dir / "tasks.py"))
        own = rf'ValueError: no path\nsecond line\n  File "{file}", line \d+, in (plain|in_a_loop)\n' \
              rf"  File \"{file}\", line 8, in load\n  caused by KeyError: '(secret value|x)'"
        self.assertRegex(found["plain"], rf"\A{own}\Z")
        self.assertRegex(found["looped"], rf"\A{own}\Z")
        self.assertEqual(found["deep"].count("in deep"), 10)
        self.assertEqual((found["refuse"], found["fail"]), ("never", "RuntimeError: boom"))
        self.assertRegex(found["nobody"], r"\ALookupError: no handler for the type [^\n]*\Z")
        self.assertEqual(self.failures("plain")[0][2], found["plain"])
        lines = [line for line in log.splitlines() if "(plain)" in line]
        self.assertEqual(len(lines), 1)
        self.assertTrue(lines[0].endswith(r"failed for good: ValueError: no path\nsecond line"), lines)
        self.assertNotIn("caused by", log)
        shown = run("list", "--database", self.db).stdout
        self.assertNotIn("tasks.py", shown)
        self.assertIn("ValueError: no path", shown)
        self.assertNotIn(str(TOP / "jobqueue"), "".join(found.values()))


if __name__ == "__main__":
    unittest.main()
