"""The runner of the suite counts what unittest tells, and misses no failure."""

from __future__ import annotations

import io
import unittest
from contextlib import redirect_stdout
from unittest import mock

from tests import parallel


class CountsTest(unittest.TestCase):
    """What is read out of the words of unittest."""

    def test_the_last_words_count(self) -> None:
        for said, status, expected in (
            ("..\nRan 2 tests in 0.1s\n\nOK\n", 0, {"tests": 2}),
            ("Ran 1 test in 0.1s\n\nOK (skipped=1)\n", 0, {"tests": 1, "skipped": 1}),
            ("Ran 9 tests in 9s\n\nFAILED (failures=2, errors=1, skipped=3)\n", 1,
             {"tests": 9, "failures": 2, "errors": 1, "skipped": 3}),
            ("Ran 9 tests in 9s\n\nFAILED (unexpected successes=1)\n", 1, {"tests": 9, "unexpected successes": 1}),
            ("Ran 5 tests in 1s\n\nOK\nRan 7 tests in 1s\n\nFAILED (errors=1)\n", 1, {"tests": 7, "errors": 1}),
        ):
            self.assertEqual(+parallel.counts(said, status), expected, said)

    def test_what_did_not_run_or_ended_badly_is_an_error(self) -> None:
        for said, status in (("", 0), ("ImportError: no\n", 1), ("Ran 0 tests in 0.0s\n\nNO TESTS RAN\n", 5),
                             ("Ran 3 tests in 0.1s\n\nOK\n", -11)):
            self.assertTrue(parallel.is_bad(parallel.counts(said, status)), said)


class RunTest(unittest.TestCase):
    """The program itself, on few modules."""

    def main(self, *modules: str) -> tuple[int, str]:
        with mock.patch.object(parallel, "modules", lambda: list(modules)), redirect_stdout(io.StringIO()) as out:
            return parallel.main(["--jobs", "2"]), out.getvalue()

    def test_a_good_module_and_one_that_is_not_there(self) -> None:
        code, said = self.main("tests.test_lifecycle")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"\nRan [1-9]\d* tests in [\d.]+s\n\nOK\n$")
        code, said = self.main("tests.test_lifecycle", "tests.test_of_nothing")
        self.assertEqual(code, 1)
        self.assertIn("== tests.test_of_nothing\n", said)
        self.assertRegex(said, r"\nFAILED \(errors=\d\)\n$")

    def test_it_runs_every_module(self) -> None:
        self.assertEqual(len(parallel.modules()), len(set(parallel.modules())))
        self.assertIn(__name__, parallel.modules())


if __name__ == "__main__":
    unittest.main()
