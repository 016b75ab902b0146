"""Times and durations as tables: what is understood, as which number, and what is refused."""

from __future__ import annotations

import os
import time
import unittest
from datetime import UTC, datetime, timedelta, timezone
from unittest import mock

from jobqueue import times

LAST_MS = 253_402_300_799_999


class DurationTest(unittest.TestCase):
    """`5m` and its kin."""

    def test_understood(self) -> None:
        rows = [
            ("0", 0),
            ("1", 1_000),
            ("90", 90_000),
            ("0.25", 250),
            ("0.001", 1),
            ("0.0001", 0),
            ("250ms", 250),
            ("0ms", 0),
            ("1s", 1_000),
            ("5m", 300_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
            ("1.5d", 129_600_000),
            ("1w", 604_800_000),
            ("1h30m", 5_400_000),
            ("1m1ms", 60_001),
            ("30m1h", 5_400_000),
            ("1s1s", 2_000),
            ("007", 7_000),
            (" 5m\n", 300_000),
            ("0.000000001w", 1),
            ("253402300799.999", LAST_MS),
            ("253402300799999ms", LAST_MS),
        ]
        for text, expected in rows:
            with self.subTest(text):
                result = times.parse_duration_ms(text)
                self.assertEqual(result, expected)
                self.assertIs(type(result), int)

    def test_refused(self) -> None:
        rows = [
            "", " ", "m", "5M", "5 m", "5m 3s", "-5", "+5", "-5m", "1e3", ".5", "5.", "1.5.5s", "5min",
            "1h30", "0x10", "nan", "inf", "\uff11", "\uff15m", "1_000", "1,000", "P1D", "5m\x00", "1." + "0" * 10,
            "1" * 16,
        ]  # fmt: skip
        for text in rows:
            with self.subTest(text), self.assertRaisesRegex(ValueError, "is no duration: write"):
                times.parse_duration_ms(text)

    def test_too_long(self) -> None:
        for text in ("253402300800", "253402300800000ms", "999999999999999w", "253402300799s1s" + "999ms"):
            with self.subTest(text), self.assertRaisesRegex(ValueError, "too long"):
                times.parse_duration_ms(text)

    def test_long_nonsense_is_refused_in_linear_time(self) -> None:
        for text in ("1" * 1_000_000, "1s" * 300_000 + "x", "1.1" * 300_000):
            with self.subTest(text[:6]), self.assertRaises(ValueError):
                times.parse_duration_ms(text)


class TimeTest(unittest.TestCase):
    """RFC 3339."""

    def test_understood(self) -> None:
        rows = [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:00.001Z", 1),
            ("1970-01-01T00:00:00+00:00", 0),
            ("1970-01-01T00:00:00-00:00", 0),
            ("2030-01-31T08:00:00Z", 1_896_076_800_000),
            ("2030-01-31t08:00:00z", 1_896_076_800_000),
            ("2030-01-31 08:00:00Z", 1_896_076_800_000),
            ("2030-01-31T08:00Z", 1_896_076_800_000),
            (" 2030-01-31T08:00:00Z\n", 1_896_076_800_000),
            ("2030-01-31T10:00:00+02:00", 1_896_076_800_000),
            ("2030-01-31T10:00:00+0200", 1_896_076_800_000),
            ("2030-01-31T02:30:00-05:30", 1_896_076_800_000),
            ("2030-02-01T07:59:00+23:59", 1_896_076_800_000),
            ("2030-01-30T08:01:00-23:59", 1_896_076_800_000),
            ("2030-01-31T08:00:00.5Z", 1_896_076_800_500),
            ("2030-01-31T08:00:00.25z", 1_896_076_800_250),
            ("2030-01-31T08:00:00.123456789Z", 1_896_076_800_123),
            ("2030-01-31T08:00:00.9999Z", 1_896_076_800_999),
            ("2024-02-29T00:00:00Z", 1_709_164_800_000),
            ("2000-02-29T23:59:59.999Z", 951_868_799_999),
            ("1969-12-31T23:00:00-01:00", 0),
            ("1970-01-01T01:00:00+01:00", 0),
            ("9999-12-31T23:59:59.999Z", LAST_MS),
            ("9999-12-31T23:59:59.999999999Z", LAST_MS),
            ("9999-12-31T22:59:59.999-01:00", LAST_MS),
        ]
        for text, expected in rows:
            with self.subTest(text):
                result = times.parse_time_ms(text)
                self.assertEqual(result, expected)
                self.assertIs(type(result), int)

    def test_refused(self) -> None:
        rows = [
            # no offset, or no time at all
            ("", "no time with an offset"),
            ("2030-01-31T08:00:00", "no time with an offset"),
            ("2030-01-31", "no time with an offset"),
            ("2030-01-31Z", "no time with an offset"),
            ("08:00:00Z", "no time with an offset"),
            ("tomorrow", "no time with an offset"),
            ("1896076800", "no time with an offset"),
            ("2030-1-31T08:00:00Z", "no time with an offset"),
            ("20300131T080000Z", "no time with an offset"),
            ("2030-W05-4T08:00:00Z", "no time with an offset"),
            ("2030-01-31T08Z", "no time with an offset"),
            ("2030-01-31T08:00:00,5Z", "no time with an offset"),
            ("2030-01-31T08:00:00.Z", "no time with an offset"),
            ("2030-01-31T08:00:00.1234567890Z", "no time with an offset"),
            ("2030-01-31T08:00:00 Z", "no time with an offset"),
            ("2030-01-31T08:00:00UTC", "no time with an offset"),
            ("2030-01-31T08:00:00+02", "no time with an offset"),
            ("2030-01-31T08:00:00+02:0", "no time with an offset"),
            ("2030-01-31T08:00:00+02:00:30", "no time with an offset"),
            ("2030-01-31T08:00:00+24:00", "no time with an offset"),
            ("2030-01-31T08:00:00+01:60", "no time with an offset"),
            ("-2030-01-31T08:00:00Z", "no time with an offset"),
            ("12030-01-31T08:00:00Z", "no time with an offset"),
            ("\uff12\uff10\uff13\uff10-01-31T08:00:00Z", "no time with an offset"),
            ("2030-01-31T08:00:00Z\x00", "no time with an offset"),
            # no such day or hour
            ("2030-02-29T00:00:00Z", "no valid time"),
            ("2100-02-29T00:00:00Z", "no valid time"),
            ("2030-04-31T00:00:00Z", "no valid time"),
            ("2030-13-01T00:00:00Z", "no valid time"),
            ("2030-00-01T00:00:00Z", "no valid time"),
            ("2030-01-31T25:00:00Z", "no valid time"),
            ("2030-01-31T08:60:00Z", "no valid time"),
            ("2030-01-31T23:59:60Z", "no valid time"),
            ("0000-01-01T00:00:00Z", "no valid time"),
            # outside 1970 to 9999, also by the offset alone
            ("1969-12-31T23:59:59.999Z", "outside the years"),
            ("1970-01-01T00:59:59.999+01:00", "outside the years"),
            ("1970-01-01T01:00:00+02:00", "outside the years"),
            ("9999-12-31T23:59:59-00:01", "outside the years"),
            ("0001-01-01T00:00:00+23:59", "outside the years"),
        ]
        for text, message in rows:
            with self.subTest(text), self.assertRaisesRegex(ValueError, message):
                times.parse_time_ms(text)

    def test_datetimes_lose_no_millisecond(self) -> None:
        # By way of timestamp() the first three come out a millisecond early.
        rows = [
            (139_751_028_864_291, 291_000),
            (69_607_108_086_831, 831_000),
            (34_870_843_104_269, 269_000),
            (1_893_456_000_001, 1_000),
        ]
        for ms, microsecond in rows:
            with self.subTest(ms):
                moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=ms // 1_000)
                moment = moment.replace(microsecond=microsecond)
                self.assertEqual(times.elapsed_ms(moment), ms)
                self.assertEqual(times.elapsed_ms(moment.astimezone(timezone(timedelta(hours=-7)))), ms)

    def test_datetimes_are_rounded_down(self) -> None:
        rows = [
            (datetime(1970, 1, 1, 0, 0, 0, 1_999, tzinfo=UTC), 1),
            (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
            (datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=2))), -3_600_000),
        ]
        for moment, expected in rows:
            with self.subTest(moment):
                self.assertEqual(times.elapsed_ms(moment), expected)


class PrintTest(unittest.TestCase):
    """`format_time`, and that what it prints is read again as the same."""

    def test_printed(self) -> None:
        rows = [
            (0, "1970-01-01T00:00:00.000Z"),
            (1, "1970-01-01T00:00:00.001Z"),
            (1_896_076_800_250, "2030-01-31T08:00:00.250Z"),
            (1_709_164_800_000, "2024-02-29T00:00:00.000Z"),
            (951_868_799_999, "2000-02-29T23:59:59.999Z"),
            (LAST_MS, "9999-12-31T23:59:59.999Z"),
        ]
        for ms, expected in rows:
            with self.subTest(ms):
                self.assertEqual(times.format_time(ms), expected)
                self.assertEqual(times.parse_time_ms(expected), ms)

    def test_outside_of_the_years_it_is_the_number(self) -> None:
        for ms, expected in ((-1, "-1"), (LAST_MS + 1, "253402300800000"), (2**62, "4611686018427387904")):
            with self.subTest(ms):
                self.assertEqual(times.format_time(ms), expected)

    def test_the_time_zone_of_the_machine_does_not_matter(self) -> None:
        self.addCleanup(time.tzset)
        with mock.patch.dict(os.environ, {"TZ": "Asia/Kathmandu"}):
            time.tzset()
            self.assertEqual(times.format_time(0), "1970-01-01T00:00:00.000Z")
            self.assertEqual(times.parse_time_ms("1970-01-01T00:00:00Z"), 0)
            self.assertEqual(times.elapsed_ms(datetime(1970, 1, 1, tzinfo=UTC)), 0)


class ClockTest(unittest.TestCase):
    """`now_ms`."""

    def test_whole_milliseconds_are_cut_off_not_rounded(self) -> None:
        with mock.patch("time.time_ns", return_value=1_700_000_000_123_999_999):
            self.assertEqual(times.now_ms(), 1_700_000_000_123)


if __name__ == "__main__":
    unittest.main()
