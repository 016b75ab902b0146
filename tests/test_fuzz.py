"""Some histories of random input with fixed seeds, and that `fuzz` finds what it is there to find.

`python -m tests.fuzz --seconds 600 --seed N` goes on for as long as one likes.
"""

from __future__ import annotations

import io
import sqlite3
import sys
import time
import unittest
from contextlib import ExitStack
from pathlib import Path
from random import Random
from unittest import mock

from jobqueue import MemoryQueue, cli
from tests import fuzz, fuzz_faces
from tests.fuzz import Done, Found, History
from tests.fuzz_values import Dice
from tests.support import TempDirTestCase


class FuzzTest(unittest.TestCase):
    def test_a_history_of_random_commands_ends_without_a_fault(self) -> None:
        past = fuzz.history(seed=1, steps=100)
        self.assertLessEqual(cli.COMMANDS.keys(), {name for name, _ in past.exits})
        self.assertGreater(sum(past.exits[name, 0] > 0 for name in cli.COMMANDS), len(cli.COMMANDS) // 2)
        self.assertGreater(past.exits["enqueue", 0], 20)
        self.assertGreater(past.exits["enqueue", 2], 20)
        self.assertGreater(len(past.accepted), 20)
        self.assertGreater(past.echoed, 10)

    def test_every_option_of_every_command_is_tried(self) -> None:
        dice = Dice(Random(1), Path("."))
        with mock.patch.object(Dice, "written", return_value="file"):
            for name in cli.COMMANDS:
                seen = {word.partition("=")[0] for _ in range(150) for word in fuzz.command_line(dice, name)}
                options = cli.command_parser(name)[0]._option_string_actions
                missing = {option for option in options if option.startswith("--")} - seen
                self.assertLessEqual(missing, {"--help"}, name)  # that one is rare

    def test_a_seed_makes_the_same_commands_again(self) -> None:
        with mock.patch.object(Dice, "written", return_value="file"):
            first, second, other = (
                [fuzz.command_line(dice, "enqueue") for _ in range(20)]
                for dice in (Dice(Random(seed), Path(".")) for seed in (7, 7, 8)))
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)


class FaultTest(TempDirTestCase):
    """What must be found is found."""

    def history(self) -> History:
        return History(1, self.dir)

    def enqueue(self, past: History, *args: str) -> Done:
        return past.must(["enqueue", "--database", str(past.path), "--type", "echo", *args])

    def broken(self, main: object) -> mock._patch[object]:
        return mock.patch.object(cli, "main", main)

    def test_a_command_that_ends_badly(self) -> None:
        argv = ["enqueue", "--priority=x", "--json"]
        good = "jobqueue: --priority: must be a whole number, not 'x'\n"
        self.assertIsNone(fuzz.fault(argv, Done(2, "", good, None)))
        for phrase, done in (
            ("raised", Done(None, "", "", ValueError())),
            ("exited with None", Done(None, "", "", None)),
            ("exited with 3", Done(3, "", good, None)),
            ("internal error", Done(1, "", "jobqueue: internal error, KeyError: 'x'\n", None)),
            ("internal error", Done(2, "", "Traceback (most recent call last):\n", None)),
            ("on stderr", Done(2, "", "jobqueue: priority \x1b[2J\n", None)),
            ("on stdout", Done(0, '{"id": "\u202e"}\n', "", None)),
            ("not the program's", Done(1, "", "oh\n", None)),
            ("one sentence", Done(1, "", "", None)),
            ("one sentence", Done(2, "", good * 2, None)),
            ("wrote to stdout", Done(2, "1\n", good, None)),
            ("does not name", Done(2, "", "jobqueue: it is wrong\n", None)),
        ):
            with self.subTest(phrase=phrase):
                self.assertIn(phrase, str(fuzz.fault(argv, done)))

    def test_a_command_that_fails_and_changes_the_file(self) -> None:
        past = self.history()

        def fails(argv: list[str]) -> int:
            with sqlite3.connect(past.path) as connection:
                connection.execute("INSERT INTO outputs VALUES (1, 1, 'x', x'00')")
            connection.close()
            sys.stderr.write("jobqueue: database trouble\n")
            return 1

        with self.broken(fails), self.assertRaisesRegex(Found, "changed a file"):
            past.must(["retry-failed"])

    def test_a_command_that_changes_a_foreign_file(self) -> None:
        past = self.history()

        def fails(argv: list[str]) -> int:
            (self.dir / "text").write_text("", "utf-8")
            sys.stderr.write("jobqueue: database trouble\n")
            return 1

        with self.broken(fails), self.assertRaisesRegex(Found, "changed a file"):
            past.must(["init"])

    def test_a_command_that_does_not_end(self) -> None:
        with mock.patch.object(fuzz, "SOON_SECONDS", 0.01), self.broken(lambda argv: time.sleep(60)):
            self.assertIsInstance(fuzz.main(["list"]).crash, TimeoutError)

    def test_a_job_that_is_lost_and_one_that_comes_back_changed(self) -> None:
        past = self.history()
        self.enqueue(past, "--payload", '{"a": "\u202e\U0001f642"}', "--id", "\u05d0\u200b")
        past.check_lists()
        past.accepted["\u05d0\u200b"] = {"a": "other"}
        with self.assertRaisesRegex(Found, "not what was accepted"):
            past.check_lists()
        past.accepted.clear()
        with self.assertRaisesRegex(Found, "not what was accepted"):
            past.check_lists()
        with mock.patch.object(sys, "stdout", io.StringIO()), self.assertRaisesRegex(Found, "0 ids for 1 jobs"):
            with self.broken(lambda argv: 0):
                self.enqueue(past)

    def test_a_worker_that_changes_a_payload(self) -> None:
        past = self.history()
        self.enqueue(past, "--payload", "[1.0, \"\\u0000\"]")
        handlers = fuzz.HANDLERS.replace("return payload", "return payload and payload[:1]")
        with mock.patch.object(fuzz, "HANDLERS", handlers), self.assertRaisesRegex(Found, "another result"):
            past.check_worker("json")

    def test_a_log_that_is_none(self) -> None:
        line = "2030-01-31T08:00:00.000Z INFO    job 1"
        self.assertIsNone(fuzz.log_fault(f"{line}\n{line}\n", "text"))
        self.assertIsNotNone(fuzz.log_fault(f"{line}\nTraceback\n", "text"))
        self.assertIsNotNone(fuzz.log_fault('{"time": 1}\n', "json"))

    def test_a_face_that_accepts_what_others_refuse(self) -> None:
        with mock.patch.object(MemoryQueue, "enqueue", lambda *args: None):
            with self.assertRaisesRegex(AssertionError, "do not agree"):
                fuzz_faces.compare(Dice(Random(1), self.dir), 100)

    def test_a_face_that_changes_a_payload(self) -> None:
        with mock.patch.object(fuzz_faces.Faces, "payloads", lambda *args: {"x": object()}):
            with self.assertRaisesRegex(AssertionError, "another payload"):
                fuzz_faces.compare(Dice(Random(1), self.dir), 100)

    def test_a_refused_job_that_is_there(self) -> None:
        with ExitStack() as stack:
            faces = fuzz_faces.Faces(Dice(Random(1), self.dir), stack)
            self.assertEqual(set(faces.offer({"type": "t", "id": "x", "priority": None}).values()), {False})
            with mock.patch.object(faces.queue, "enqueue", side_effect=ValueError):
                with self.assertRaises(ValueError):
                    faces.offer({"type": "t", "id": "y"})


if __name__ == "__main__":
    unittest.main()
