"""That every mutation still fits the source, and that `mutants` tells a test that notices from one that does not.

`python -m tests.mutants` tries them all, which takes minutes.
"""

from __future__ import annotations

import unittest

from tests import mutants
from tests.mutations import MUTATIONS, Mutation
from tests.support import TOP

PROMISES = range(1, 16)
SAMPLE = Mutation(7, "sample", "lifecycle.py", "attempts >= max_attempts", "attempts > max_attempts",
                  ("test_lifecycle",))


class MutationsTest(unittest.TestCase):
    def test_each_still_fits_the_source(self) -> None:
        sources = {each.file: (TOP / "jobqueue" / each.file).read_text("utf-8") for each in MUTATIONS}
        for mutation in MUTATIONS:
            with self.subTest(name=mutation.name):
                mutants.mutated(mutation, sources[mutation.file])

    def test_each_has_a_name_of_its_own_and_tests_that_are_there(self) -> None:
        names = [mutation.name for mutation in MUTATIONS]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual([mutation.name for mutation in MUTATIONS if not mutation.tests], [])
        everything = tuple(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
        self.assertEqual(mutants.missing_tests(SAMPLE._replace(tests=everything)), [])

    def test_every_promise_is_broken_by_some(self) -> None:
        self.assertEqual({mutation.promise for mutation in MUTATIONS}, set(PROMISES))


class MutantsTest(unittest.TestCase):
    def test_words_that_are_not_there_or_change_nothing_are_an_error(self) -> None:
        for source, changes, phrase in (
            ("a = 1", {"old": "b", "new": "c"}, "0 times in lifecycle.py, not 1"),
            ("a = a", {"old": "a", "new": "b"}, "2 times in lifecycle.py, not 1"),
            ("a = 1", {"old": "a", "new": "a"}, "changes nothing"),
        ):
            with self.subTest(phrase=phrase), self.assertRaisesRegex(ValueError, phrase):
                mutants.mutated(SAMPLE._replace(**changes), source)
        self.assertEqual(mutants.mutated(SAMPLE._replace(old="a", new="b", times=2), "a = a"), "b = b")

    def test_tests_that_are_not_there_are_named(self) -> None:
        here = ("test_mutants", "test_mutants.MutantsTest", f"test_mutants.MutantsTest.{self._testMethodName}")
        gone = ("test_nothing", "test_mutants.Nothing", "test_mutants.MutantsTest.test_nothing")
        self.assertEqual(mutants.missing_tests(SAMPLE._replace(tests=here + gone)), list(gone))

    def test_caught_survived_and_error(self) -> None:
        caught = mutants.try_out(SAMPLE)
        self.assertEqual(caught.what, "caught", caught.by)
        self.assertIn("test_", caught.by)
        harmless = SAMPLE._replace(old="import annotations", new="import annotations  # harmless")
        self.assertEqual(mutants.try_out(harmless).what, "survived")
        broken = SAMPLE._replace(old="from __future__ import annotations", new="import nothing_of_this_name")
        self.assertEqual(mutants.try_out(broken).what, "error")


if __name__ == "__main__":
    unittest.main()
