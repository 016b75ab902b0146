"""What jobs look like: escaping, widths, time spans, JSON lines, tables."""

from __future__ import annotations

import io
import json
import os
import unittest
from typing import Any

from jobqueue import render
from jobqueue.jobs import Job
from jobqueue.text import escape

NOW = 1_700_000_000_000


def job(**changes: Any) -> Job:
    """Return a job as a store would, queued four minutes before NOW."""
    fields: dict[str, Any] = dict.fromkeys(Job.COLUMNS)
    fields.update(seq=1, id="1", queue="default", type="print", payload="null", priority=0,
                  created_at=NOW - 240_000, run_at=NOW - 240_000,
                  status="pending", ready=1, unmet=0, attempts=0, max_attempts=3)
    fields.update(changes)
    return Job(**fields)


class Terminal(io.StringIO):
    """A stream that claims to be a terminal and has no size."""

    def isatty(self) -> bool:
        return True


class EscapeTest(unittest.TestCase):
    def test_what_could_drive_or_deceive_a_terminal_is_escaped(self) -> None:
        for raw, shown in (
            ("\x00", r"\x00"), ("\x07", r"\x07"), ("\x1b[31m", r"\x1b[31m"), ("\x7f", r"\x7f"),
            ("\x80", r"\x80"), ("\x9b2J", r"\x9b2J"), ("\x9f", r"\x9f"), ("\xad", r"\xad"),
            ("a\nb", r"a\nb"), ("a\rb", r"a\rb"), ("a\tb", r"a\tb"), ("\x0b", r"\x0b"),
            ("\u061c", r"\u061c"), ("\u200b", r"\u200b"), ("\u200d", r"\u200d"), ("\u200f", r"\u200f"),
            ("\u2028", r"\u2028"), ("\u2029", r"\u2029"), ("\u202a", r"\u202a"), ("\u202e", r"\u202e"),
            ("\u2060", r"\u2060"), ("\u2066", r"\u2066"), ("\u2069", r"\u2069"), ("\ufeff", r"\ufeff"),
            ("\ud800", r"\ud800"), ("\udfff", r"\udfff"), ("\U000e0041", r"\U000e0041"),
        ):  # fmt: skip
            with self.subTest(shown=shown):
                self.assertEqual(escape(raw), shown)

    def test_ordinary_text_stays(self) -> None:
        for text in ("", "plain ~", "Grüße", "日本語", "é", "🎉", "עברית", "\xa0", "\\x1b"):
            with self.subTest(text=text):
                self.assertEqual(escape(text), text)


class WidthTest(unittest.TestCase):
    def test_cells(self) -> None:
        for text, cells in (
            ("", 0), ("abc", 3), ("Grüße", 5), ("日本", 4), ("\uff46", 2), ("\uff71", 1), ("e\u0301", 1), ("한", 2),
            ("\u1112\u1161\u11ab", 2), ("🎉", 2), ("…", 1), ("\ufe0f", 0),
        ):  # fmt: skip
            with self.subTest(text=text):
                self.assertEqual(render.width_of(text), cells)

    def test_cut(self) -> None:
        for text, width, shown in (
            ("abcdef", 6, "abcdef"), ("abcdef", 5, "abcd…"), ("abcdef", 1, "…"), ("日本語", 6, "日本語"),
            ("日本語", 5, "日本…"), ("日本語", 4, "日…"), ("日本語", 2, "…"),
            ("e\u0301e\u0301e\u0301", 2, "e\u0301…"),
        ):  # fmt: skip
            with self.subTest(text=text, width=width):
                self.assertEqual(render.cut(text, width), shown)


class TimeTest(unittest.TestCase):
    def test_spans(self) -> None:
        for ms, shown in (
            (0, "0 ms"), (999, "999 ms"), (1_000, "1 s"), (1_299, "1.2 s"), (9_999, "9.9 s"), (10_000, "10 s"),
            (59_999, "59 s"), (60_000, "1 min"), (3_599_999, "59 min"), (3_600_000, "1 h"),
            (172_799_999, "47 h"), (172_800_000, "2 d"), (365_000 * 86_400_000, "365,000 d"),
        ):  # fmt: skip
            with self.subTest(ms=ms):
                self.assertEqual(render.span(ms), shown)

    def test_relative(self) -> None:
        for distance, shown in (
            (0, "now"), (999, "now"), (-999, "now"), (1_000, "in 1 s"), (-1_000, "1 s ago"),
            (240_000, "in 4 min"), (-10_800_000, "3 h ago"),
        ):  # fmt: skip
            with self.subTest(distance=distance):
                self.assertEqual(render.relative(NOW + distance, NOW), shown)


class JsonLineTest(unittest.TestCase):
    def test_every_character_survives_and_none_is_dangerous(self) -> None:
        text = "".join(map(chr, [*range(0x250), *range(0x600, 0x620), *range(0x2000, 0x2070), 0xFEFF, 0xFFF9,
                                 0x1F389, 0xE0001, 0xE007F]))
        for ascii_only in (False, True):
            with self.subTest(ascii_only=ascii_only):
                line = render.json_line({text: text}, ascii_only)
                self.assertEqual(json.loads(line), {text: text})
                self.assertEqual(escape(line), line)
                self.assertEqual(line.isascii(), ascii_only)

    def test_text_is_readable(self) -> None:
        self.assertEqual(render.json_line({"a": "日本", "b": [1, None]}), '{"a": "日本", "b": [1, null]}')


class StreamTest(unittest.TestCase):
    def test_width(self) -> None:
        self.assertIsNone(render.terminal_width(io.StringIO(), {"COLUMNS": "50"}))
        self.assertEqual(render.terminal_width(Terminal(), {"COLUMNS": "50"}), 50)
        for nonsense in ("", "0", "-5", "wide", "99999999"):
            with self.subTest(columns=nonsense):
                self.assertEqual(render.terminal_width(Terminal(), {"COLUMNS": nonsense}), 80)

    def test_width_of_a_real_terminal(self) -> None:
        try:
            import fcntl
            import pty
            import struct
            import termios
        except ImportError:
            self.skipTest("no terminals here")
        master, slave = pty.openpty()
        self.addCleanup(os.close, master)
        with open(slave, "w", encoding="utf-8") as stream:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 63, 0, 0))
            self.assertEqual(render.terminal_width(stream, {}), 63)

    def test_colour(self) -> None:
        for stream, environ, wanted in (
            (Terminal(), {}, True), (Terminal(), {"NO_COLOR": ""}, True), (Terminal(), {"NO_COLOR": "1"}, False),
            (Terminal(), {"TERM": "dumb"}, False), (io.StringIO(), {}, False),
        ):  # fmt: skip
            with self.subTest(environ=environ):
                self.assertIs(render.use_colour(stream, environ), wanted)


class TableTest(unittest.TestCase):
    def test_columns_line_up_by_cells(self) -> None:
        columns = [render.Column("A"), render.Column("N", right=True), render.Column("LAST")]
        self.assertEqual(
            list(render.table(columns, [("日本", "7", "x"), ("e\u0301", "1000", ""), ("a\nb", "", "y")])),
            ["A        N  LAST", "日本     7  x", "e\u0301     1000", "a\\nb        y"],
        )

    def test_no_rows(self) -> None:
        self.assertEqual(list(render.table([render.Column("A"), render.Column("B")], [])), ["A  B"])

    def test_nothing_is_cut_off_a_terminal(self) -> None:
        long = "x" * 300
        self.assertEqual(list(render.table([render.Column("A", shrinks=True)], [(long,)]))[1], long)

    def test_colour_does_not_move_columns(self) -> None:
        columns = [render.Column("S", colours={"bad": "31"}), render.Column("B")]
        self.assertEqual(
            list(render.table(columns, [("bad", "x"), ("other", "y")], colour=True)),
            ["S      B", "\x1b[31mbad\x1b[0m    x", "other  y"],
        )

    def test_rows_are_consumed_bit_by_bit(self) -> None:
        consumed = 0

        def rows() -> Any:
            nonlocal consumed
            for number in range(100_000):
                consumed += 1
                yield (str(number),)

        lines = render.table([render.Column("A")], rows())
        next(lines)
        next(lines)
        self.assertLessEqual(consumed, 1_000)
        self.assertEqual(sum(1 for _ in lines), 99_999)


class JobsTableTest(unittest.TestCase):
    def lines(self, *jobs: Job, width: int | None = None, colour: bool = False) -> list[str]:
        return list(render.jobs_table(jobs, NOW, width, colour))

    def test_a_plain_job(self) -> None:
        self.assertEqual(self.lines(job(id="17", priority=-5, attempts=1)), [
            "ID  TYPE   STATUS   PRIO  TRIES  CREATED    DETAIL",
            "17  print  pending    -5    1/3  4 min ago",
        ])

    def test_the_queue_shows_when_there_is_more_than_the_default_one(self) -> None:
        lines = self.lines(job(), job(queue="mail"))
        self.assertEqual([line.split()[1] for line in lines], ["QUEUE", "default", "mail"])

    def test_details(self) -> None:
        for changes, shown in (
            ({}, ""),
            ({"run_at": NOW + 240_000}, "due in 4 min"),
            ({"unmet": 1}, "waits for 1 job"),
            ({"unmet": 2, "run_at": NOW + 5_000}, "due in 5 s, waits for 2 jobs"),
            ({"status": "retrying", "run_at": NOW + 3_000, "last_error": "OSError: no"}, "due in 3 s, OSError: no"),
            ({"status": "retrying", "last_error": "OSError: no"}, "OSError: no"),
            ({"status": "failed", "last_error": "ValueError: bad"}, "ValueError: bad"),
            ({"status": "failed"}, ""),
            ({"status": "canceled"}, ""),
            ({"status": "completed", "started_at": NOW - 5_000, "finished_at": NOW - 3_500}, "took 1.5 s"),
            ({"status": "completed", "started_at": NOW, "finished_at": NOW - 1}, "took 0 ms"),
            ({"status": "completed"}, ""),
            ({"status": "running", "started_at": NOW - 61_000, "lease_expires_at": NOW + 1}, "for 1 min"),
            ({"status": "running", "started_at": NOW + 500}, "for 0 ms"),
            ({"status": "running", "lease_expires_at": NOW, "started_at": NOW - 31_000}, "for 31 s, lease expired"),
            ({"status": "running", "progress": 0.5}, "50%"),
            ({"status": "running", "progress": 1.0, "progress_note": "last page"}, "100% last page"),
        ):  # fmt: skip
            with self.subTest(**changes):
                self.assertEqual(render.detail(job(**changes), NOW), shown)

    def test_a_hostile_job_stays_on_its_line(self) -> None:
        lines = self.lines(job(type="a\u202eb", status="failed", last_error="x\x1b[2J\ny"))
        self.assertEqual(len(lines), 2)
        self.assertIn(r"a\u202eb", lines[1])
        self.assertTrue(lines[1].endswith(r"x\x1b[2J"), "the first line of an error is enough here")

    def test_it_fits_eighty_columns(self) -> None:
        jobs = [
            job(id="i" * 255, type="日" * 100, queue="q" * 50, status="failed", priority=2**63 - 1,
                last_error="boom " * 100),
            job(id="2", status="completed", started_at=NOW, finished_at=NOW),
        ]
        lines = self.lines(*jobs, width=80)
        self.assertLessEqual(max(map(render.width_of, lines)), 80)
        self.assertEqual(lines[1].count("…"), 4)
        self.assertIn("failed", lines[1])
        self.assertIn("completed", lines[2])

    def test_an_ordinary_list_keeps_ids_and_types_whole_and_cuts_the_detail(self) -> None:
        lines = self.lines(job(id="1234567", type="thumbnail", status="failed", last_error="boom " * 100), width=80)
        self.assertIn("1234567  thumbnail  failed", lines[1])
        self.assertEqual(render.width_of(lines[1]), 80)
        self.assertTrue(lines[1].endswith("…"))

    def test_statuses_are_coloured(self) -> None:
        self.assertIn("\x1b[1;31mfailed\x1b[0m", self.lines(job(status="failed"), colour=True)[1])
        self.assertNotIn("\x1b", self.lines(job(status="pending"), colour=True)[1])


if __name__ == "__main__":
    unittest.main()
