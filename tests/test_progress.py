"""The progress bar: what it draws, when, and that nothing but a terminal ever sees it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from jobqueue import Queue
from jobqueue.progress import QUIET_SECONDS, REDRAW_SECONDS, ProgressBar


class Terminal(io.StringIO):
    """A text stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True

    def screen(self) -> str:
        """Return what the line shows after all that was written."""
        shown: list[str] = []
        column = 0
        for character in self.getvalue():
            if character == "\r":
                column = 0
            else:
                shown[column:column + 1] = [character]
                column += 1
        return "".join(shown).rstrip()


class ProgressBarTest(unittest.TestCase):
    """A bar under an injected clock on a made-up terminal of 60 columns."""

    def setUp(self) -> None:
        self.terminal = Terminal()
        self.now = 100.0
        self.enterContext(mock.patch.dict(os.environ, {"COLUMNS": "80"}))

    def bar(self, **options: object) -> ProgressBar:
        options = {"stream": self.terminal, "clock": lambda: self.now, **options}
        return ProgressBar("reading", **options)  # type: ignore[arg-type]

    def test_count_rate_bar_and_time_left(self) -> None:
        bar = self.bar()
        self.now += 10
        bar.update(250_000, 0.25)
        self.assertEqual(self.terminal.screen(),
                         "reading 250,000 jobs, 25,000/s [######------------------] 25%, 30 s left")

    def test_nobody_knows_how_much_there_is(self) -> None:
        bar = self.bar(unit="rows")
        self.now += 2
        bar.update(1_000)
        self.assertEqual(self.terminal.screen(), "reading 1,000 rows, 500/s")

    def test_short_work_shows_nothing(self) -> None:
        with self.bar() as bar:
            self.now += QUIET_SECONDS - 0.01
            bar.update(1_000, 0.5)
            bar.say("storing ...")
        self.assertEqual(self.terminal.getvalue(), "")

    def test_it_is_not_redrawn_all_the_time(self) -> None:
        bar = self.bar()
        self.now += 1
        bar.update(1, 0.1)
        drawn = self.terminal.getvalue()
        self.now += REDRAW_SECONDS - 0.01
        bar.update(2, 0.2)
        self.assertEqual(self.terminal.getvalue(), drawn)
        self.now += 0.02
        bar.update(3, 0.3)
        self.assertIn("reading 3 jobs", self.terminal.screen())

    def test_a_text_replaces_it_and_the_end_erases_it(self) -> None:
        with self.bar() as bar:
            self.now += 1
            bar.update(5, 0.999)
            bar.say("storing 5 jobs ...")
            self.assertEqual(self.terminal.screen(), "storing 5 jobs ...")
        self.assertEqual(self.terminal.screen(), "")
        self.assertTrue(self.terminal.getvalue().endswith("\r"))

    def test_it_is_cut_to_the_terminal(self) -> None:
        with mock.patch.dict(os.environ, {"COLUMNS": "30"}):
            bar = self.bar()
            self.now += 10
            bar.update(250_000, 0.25)
        self.assertEqual(self.terminal.screen(), "reading 250,000 jobs, 25,000/")

    def test_a_fraction_beyond_the_end_and_none_done(self) -> None:
        bar = self.bar()
        self.now += 1
        bar.update(5, 1.5)
        self.assertIn(" 100%, 0 ms left", self.terminal.screen())
        self.now += 1
        bar.update(0, 0.0)
        self.assertTrue(self.terminal.screen().endswith(" 0%"), self.terminal.screen())

    def test_quiet_and_no_terminal(self) -> None:
        plain = io.StringIO()
        for bar in (self.bar(quiet=True), self.bar(stream=plain)):
            with bar:
                self.now += 10
                bar.update(5, 0.5)
                bar.say("storing")
        self.assertEqual((self.terminal.getvalue(), plain.getvalue()), ("", ""))

    def test_a_terminal_that_goes_away_is_no_error(self) -> None:
        with self.bar() as bar:
            self.now += 1
            with mock.patch.object(self.terminal, "write", side_effect=OSError(5, "gone")):
                bar.update(5, 0.5)
            self.now += 1
            bar.update(6, 0.6)
        self.assertEqual(self.terminal.getvalue(), "")


@unittest.skipUnless(os.name == "posix", "pseudo-terminals are POSIX")
class EnqueueFileTest(unittest.TestCase):
    """`enqueue --file` on a real pseudo-terminal."""

    def run_it(self, *options: str) -> tuple[str, str]:
        """Enqueue a file while stderr is a terminal; return (stdout, what the terminal was sent)."""
        with tempfile.TemporaryDirectory() as directory:
            path, lines = Path(directory, "jobs.db"), Path(directory, "jobs.jsonl")
            Queue(path, create=True).close()
            lines.write_text('{"type":"sleep","payload":{"seconds":0}}\n' * 3_000, encoding="utf-8")
            script = ("import jobqueue.progress as p, sys; p.QUIET_SECONDS = p.REDRAW_SECONDS = -1\n"
                      "from jobqueue.cli import main; sys.exit(main())")
            ours, theirs = os.openpty()
            with open(ours, "rb") as terminal:
                try:
                    done = subprocess.run(
                        [sys.executable, "-c", script, "enqueue", "--database", path, "--file", lines, *options],
                        stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True)
                    os.set_blocking(ours, False)
                    return done.stdout.decode(), (terminal.read() or b"").decode()
                finally:
                    os.close(theirs)

    def test_it_shows_on_a_terminal_and_not_in_the_data(self) -> None:
        stdout, screen = self.run_it()
        self.assertEqual(stdout, "".join(f"{n}\n" for n in range(1, 3_001)))
        self.assertIn("\rreading 1,000 jobs, ", screen)
        self.assertIn("] 67%, ", screen)
        self.assertIn("\rstoring 3,000 jobs ...", screen)
        self.assertTrue(screen.endswith("\r"), screen)

    def test_quiet(self) -> None:
        self.assertEqual(self.run_it("--quiet")[1], "")


if __name__ == "__main__":
    unittest.main()
