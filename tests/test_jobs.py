"""Every input rule as a row, on both sides of its boundary; the records that come out."""

from __future__ import annotations

import itertools
import json
import sys
import unittest
from collections import OrderedDict, UserDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from unittest import mock

from jobqueue import errors, jobs
from jobqueue.errors import InvalidJob

LAST_MS = 253_402_300_799_999
HUGE = 10**5_000  # an integer that Python refuses to print


def nested(depth: int) -> Any:
    """Return lists in lists, `depth` of them."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def ring() -> list[Any]:
    value: list[Any] = []
    value.append([value])
    return value


class PayloadTest(unittest.TestCase):
    """`encode_json`: any JSON value, as compact text."""

    def test_stored_as_compact_utf8(self) -> None:
        rows: list[tuple[object, str]] = [
            (None, "null"),
            (True, "true"),
            (0, "0"),
            (-1.5, "-1.5"),
            (1e300, "1e+300"),
            (2**100, "1267650600228229401496703205376"),
            ("", '""'),
            ("a\x00\n\x7f\"\\/", '"a\\u0000\\n\x7f\\"\\\\/"'),
            ("\u00e9\u2028\U0001f600", '"\u00e9\u2028\U0001f600"'),
            ([], "[]"),
            ((1, "x"), '[1,"x"]'),
            ({}, "{}"),
            ({"seconds": 0}, '{"seconds":0}'),
            ({"b": [1, {"c": None}], "a": 2.5}, '{"b":[1,{"c":null}],"a":2.5}'),
            ({1: "x", None: "y"}, '{"1":"x","null":"y"}'),
            (OrderedDict(z=1, a=2), '{"z":1,"a":2}'),
            ("x" * 200, '"' + "x" * 200 + '"'),
        ]
        for value, expected in rows:
            with self.subTest(ascii(value)):
                self.assertEqual(jobs.encode_json(value), expected)
                self.assertEqual(jobs.new_job("t", value).payload, expected)

    def test_refused(self) -> None:
        rows: list[tuple[object, str]] = [
            (float("nan"), "payload is not JSON"),
            (float("inf"), "payload is not JSON"),
            (float("-inf"), "payload is not JSON"),
            (json.loads("1e999"), "payload is not JSON"),
            ({"deep": [1, {"x": float("nan")}]}, "payload is not JSON"),
            ({float("inf"): 1}, "payload is not JSON"),
            ({1, 2}, "payload is not JSON"),
            (b"bytes", "payload is not JSON"),
            (Decimal(1), "payload is not JSON"),
            (object(), "payload is not JSON"),
            ({(1, 2): 3}, "payload is not JSON"),
            (1j, "payload is not JSON"),
            (ring(), "payload is not JSON: Circular"),
            ("\ud800", "payload holds a lone surrogate"),
            ("x" * 300 + "\udfff", "payload holds a lone surrogate"),
            ({"\udc80": 1}, "payload holds a lone surrogate"),
            ("\ud83d\ude00", "payload holds a lone surrogate"),  # a pair in two halves is no character either
            (json.loads('"\\ud800"'), "payload holds a lone surrogate"),
            (HUGE, "payload is not JSON"),
            ([-HUGE], "payload is not JSON"),
            (10**4_300, "payload is not JSON"),
        ]
        for value, message in rows:
            with self.subTest(type(value)), self.assertRaisesRegex(InvalidJob, message):
                jobs.encode_json(value)
            with self.subTest(type(value)), self.assertRaisesRegex(InvalidJob, message):
                jobs.new_job("t", value)

    def test_the_message_begins_with_what_it_is_about(self) -> None:
        for value in ("\ud800", float("nan"), nested(65), "x" * 2**20, object()):
            with self.subTest(type(value)), self.assertRaisesRegex(InvalidJob, "^result "):
                jobs.encode_json(value, "result")

    def test_integers_up_to_4300_digits(self) -> None:
        for value in (10**4_300 - 1, -(10**4_300) + 1, [10**4_299] * 2):
            self.assertEqual(json.loads(jobs.encode_json(value)), value)
        self.assertEqual(len(jobs.encode_json("1" * 5_000)), 5_002)
        self.assertEqual(len(jobs.encode_json({'"\\' + "1" * 5_000: 1})), 5_010)

    def test_longer_integers_are_refused_also_where_python_may_print_them(self) -> None:
        self.addCleanup(sys.set_int_max_str_digits, sys.get_int_max_str_digits())
        sys.set_int_max_str_digits(0)
        for value in (10**4_300, -(10**4_300), {"x": [1, HUGE]}):
            with self.assertRaisesRegex(InvalidJob, "payload holds an integer of more than 4,300 digits"):
                jobs.encode_json(value)
        self.assertEqual(len(jobs.encode_json(10**4_300 - 1)), 4_300)

    def test_one_mebibyte_exactly_and_one_more(self) -> None:
        mebibyte = 1_048_576
        for character, size in (("x", 1), ("\u00e9", 2), ("\u20ac", 3), ("\U0001f600", 4)):
            count, rest = divmod(mebibyte - 2, size)
            fits = character * count + "x" * rest
            with self.subTest(character):
                self.assertEqual(len(jobs.encode_json(fits).encode()), mebibyte)
                with self.assertRaisesRegex(InvalidJob, "takes 1,048,577 bytes as JSON; at most 1,048,576"):
                    jobs.encode_json(fits + "x")
        self.assertEqual(len(jobs.encode_json([1] * 524_287)), 1_048_575)
        with self.assertRaisesRegex(InvalidJob, "takes 1,048,577 bytes"):
            jobs.encode_json([1] * 524_288)

    def test_depth_64_and_65(self) -> None:
        rows: list[tuple[object, object]] = [
            (nested(64), nested(65)),
            ({"k": nested(63)}, {"k": nested(64)}),
            ([nested(63)] * 40, [nested(63), nested(64)]),
            ([*[[]] * 500, nested(63)], [*[[]] * 500, nested(64)]),
            (["\u00e9", nested(63)], ["\u00e9", nested(64)]),
        ]
        for number, (good, bad) in enumerate(rows):
            with self.subTest(number):
                self.assertEqual(json.loads(jobs.encode_json(good)), good)
                with self.assertRaisesRegex(InvalidJob, "nested more than 64 deep"):
                    jobs.encode_json(bad)

    def test_brackets_inside_of_strings_are_no_depth(self) -> None:
        for value in ("[" * 100_000, {"[{" * 100: '"' + "[" * 100}, ["\\", "[" * 100, '\\"' + "{" * 100]):
            with self.subTest(type(value)):
                self.assertEqual(json.loads(jobs.encode_json(value)), value)
                self.assertEqual(jobs.decode_json(json.dumps(value)), value)

    def test_100_000_levels_are_refused_without_recursion(self) -> None:
        objects: Any = None
        for _ in range(100_000):
            objects = {"k": objects}
        for value in (nested(100_000), objects):
            with self.assertRaisesRegex(InvalidJob, "nested more than 64 deep"):
                jobs.encode_json(value)

    def test_a_failure_leaves_no_trace_in_the_next_call(self) -> None:
        shared: list[object] = [1]
        for _ in range(3):
            with self.assertRaises(InvalidJob):
                jobs.encode_json([shared, object()])
            self.assertEqual(jobs.encode_json([shared, shared]), "[[1],[1]]")

    def test_without_the_c_part_of_json_the_text_is_the_same(self) -> None:
        values: list[object] = [{"a": [1, 2.5, None, True, "\u00e9\n"]}, "x" * 500, nested(64)]
        fast = [jobs.encode_json(value) for value in values]
        with mock.patch.object(jobs, "_make_encoder", None):
            self.assertEqual([jobs.encode_json(value) for value in values], fast)
            for bad in (float("nan"), ring(), object(), "\ud800", nested(65)):
                with self.assertRaises(InvalidJob):
                    jobs.encode_json(bad)


class DecodeTest(unittest.TestCase):
    """`decode_json`: text that somebody wrote by hand."""

    def test_understood(self) -> None:
        rows: list[tuple[str, object]] = [
            ("null", None), (" [1, 2.5e1]\n", [1, 25.0]), ('{"a":{"b":[]}}', {"a": {"b": []}}),
            ('"\\u00e9\\ud83d\\ude00"', "\u00e9\U0001f600"), ("[" * 64 + "]" * 64, nested(64)),
            ("[" + "[]," * 1_000 + "0]", [[]] * 1_000 + [0]),
        ]  # fmt: skip
        for text, expected in rows:
            with self.subTest(text[:30]):
                self.assertEqual(jobs.decode_json(text), expected)

    def test_refused(self) -> None:
        rows = [
            ("", "is not JSON"),
            ("{", "is not JSON"),
            ("{'a': 1}", "is not JSON"),
            ("[1,]", "is not JSON"),
            ("1 2", "is not JSON"),
            ("\ufeff1", "is not JSON"),
            ('"\n"', "is not JSON"),
            ('"abc\\', "is not JSON"),
            ("]" * 100 + "[" * 100, "is not JSON"),
            ("NaN", "NaN is not allowed"),
            ("[Infinity]", "Infinity is not allowed"),
            ('{"a":-Infinity}', "-Infinity is not allowed"),
            ("1" + "0" * 4_300, "is not JSON"),
            ("[-1" + "0" * 4_300 + "]", "is not JSON"),
            ("[" * 65 + "]" * 65, "nested more than 64 deep"),
            ("[" * 100_000, "nested more than 64 deep"),
            ('{"k":' * 100_000, "nested more than 64 deep"),
            ("[{" * 50_000, "nested more than 64 deep"),
        ]
        for text, message in rows:
            with self.subTest(text[:30]), self.assertRaisesRegex(InvalidJob, f"^payload .*{message}"):
                jobs.decode_json(text)

    def test_the_depth_is_an_argument(self) -> None:
        self.assertEqual(jobs.decode_json("[[[]]]", max_depth=3), [[[]]])
        with self.assertRaisesRegex(InvalidJob, "^line is nested more than 2 deep"):
            jobs.decode_json("[[[]]]", "line", max_depth=2)

    def test_what_json_can_write_but_a_payload_must_not_hold_is_refused_one_step_later(self) -> None:
        for text in ("1e999", "-1e999", '"\\ud800"', '{"\\udfff":1}'):
            with self.subTest(text), self.assertRaises(InvalidJob):
                jobs.new_job("t", jobs.decode_json(text))


class NameTest(unittest.TestCase):
    """Names: of types, queues, jobs, keys, traces, dependencies."""

    GOOD = (
        "x", "x" * 255, "\U0001f600" * 255, "a b", " ", "caf\u00e9", "\u4e2d\u6587", "a/b:c#d?%", "0", "-",
        "\u00a0", "\u2028", "\u200b", "e\u0301", "'; DROP TABLE jobs; --",
    )  # fmt: skip
    BAD: tuple[tuple[object, str], ...] = (
        ("", "1 to 255 characters, not 0"),
        ("x" * 256, "1 to 255 characters, not 256"),
        ("x" * 1_000_000, "1 to 255 characters, not 1,000,000"),
        ("a\x00", "control characters"),
        ("a\n", "control characters"),
        ("\t", "control characters"),
        ("\x1b[31m", "control characters"),
        ("a\x1f", "control characters"),
        ("a\x7f", "control characters"),
        ("a\x80", "control characters"),
        ("a\x85", "control characters"),
        ("a\x9f", "control characters"),
        ("\u2028\x01", "control characters"),
        ("\ud800", "lone surrogates"),
        ("x\udfff", "lone surrogates"),
        (1, "a string, not 1"),
        (True, "a string, not True"),
        (b"x", "a string, not bytes"),
        (["x"], "a string, not list"),
        (HUGE, "a string, not an integer"),
    )

    def fields(self, name: str, value: object) -> dict[str, Any]:
        return {"type": "t", name: [value] if name == "depends_on" else value}

    def test_good_in_every_field(self) -> None:
        for field in ("type", "queue", "id", "idempotency_key", "trace", "depends_on"):
            for value in self.GOOD:
                with self.subTest(field=field, value=ascii(value)):
                    stored = getattr(jobs.new_job(**self.fields(field, value)), field)
                    self.assertEqual(stored, (value,) if field == "depends_on" else value)

    def test_bad_in_every_field(self) -> None:
        shown = {"depends_on": "an id in depends_on"}
        for field in ("type", "queue", "id", "idempotency_key", "trace", "depends_on"):
            for value, message in self.BAD:
                with (
                    self.subTest(field=field, value=ascii(value) if value is not HUGE else "10**5000"),
                    self.assertRaisesRegex(InvalidJob, f"^{shown.get(field, field)} must .*{message}"),
                ):
                    jobs.new_job(**self.fields(field, value))

    def test_none_means_absent_only_where_a_field_may_be_absent(self) -> None:
        job = jobs.new_job("t", id=None, idempotency_key=None, trace=None, run_at=None, delay=None, timeout=None)
        self.assertEqual((job.id, job.idempotency_key, job.trace, job.run_at), (None, None, None, None))
        for field in ("type", "queue", "priority", "max_attempts", "depends_on"):
            with self.subTest(field), self.assertRaisesRegex(InvalidJob, f"{field} must be .*not None"):
                jobs.new_job(**{"type": "t", field: None})

    def test_messages_are_safe_to_print(self) -> None:
        for value in ("\x1b[2J", "\ud800", "a\n" * 100):
            with self.assertRaises(InvalidJob) as caught:
                jobs.new_job(value)
            self.assertTrue(str(caught.exception).isprintable())
            self.assertTrue(str(caught.exception).isascii())


class IntegerTest(unittest.TestCase):
    """Counters and priorities: signed 64 bits, and no bool."""

    def test_good(self) -> None:
        rows = [
            ("priority", 0), ("priority", -1), ("priority", 2**63 - 1), ("priority", -(2**63)),
            ("max_attempts", 1), ("max_attempts", 3), ("max_attempts", 2**63 - 1),
        ]  # fmt: skip
        for field, value in rows:
            with self.subTest(field=field, value=value):
                self.assertEqual(getattr(jobs.new_job(**{"type": "t", field: value}), field), value)

    def test_bad(self) -> None:
        rows: list[tuple[str, object, str]] = [
            ("priority", 2**63, "priority must lie between -9,223,372,036,854,775,808 and"),
            ("priority", -(2**63) - 1, "priority must lie between"),
            ("priority", HUGE, "priority must lie between"),
            ("priority", True, "priority must be a whole number, not True"),
            ("priority", False, "priority must be a whole number, not False"),
            ("priority", 1.0, "priority must be a whole number, not 1.0"),
            ("priority", float("nan"), "priority must be a whole number, not nan"),
            ("priority", "1", "priority must be a whole number, not '1'"),
            ("priority", [1], "priority must be a whole number, not list"),
            ("max_attempts", 0, "max_attempts must lie between 1 and 9,223,372,036,854,775,807"),
            ("max_attempts", -1, "max_attempts must lie between"),
            ("max_attempts", 2**63, "max_attempts must lie between"),
            ("max_attempts", True, "max_attempts must be a whole number, not True"),
            ("max_attempts", 3.0, "max_attempts must be a whole number, not 3.0"),
        ]
        for field, value, message in rows:
            with self.subTest(field=field, message=message), self.assertRaisesRegex(InvalidJob, message):
                jobs.new_job(**{"type": "t", field: value})

    def test_explicit_bounds(self) -> None:
        self.assertEqual(jobs.check_integer(5, "n", 5, 5), 5)
        for value in (4, 6):
            with self.assertRaisesRegex(InvalidJob, "n must lie between 5 and 5"):
                jobs.check_integer(value, "n", 5, 5)


class WhenTest(unittest.TestCase):
    """`run_at`, `delay` and `timeout`."""

    def test_moments(self) -> None:
        east = timezone(timedelta(hours=2))
        rows: list[tuple[object, int]] = [
            (0, 0),
            (LAST_MS, LAST_MS),
            ("1970-01-01T00:00:00Z", 0),
            ("2030-01-31T10:00:00.25+02:00", 1_896_076_800_250),
            ("2024-02-29T00:00:00z", 1_709_164_800_000),
            ("9999-12-31T23:59:59.999Z", LAST_MS),
            (datetime(1970, 1, 1, tzinfo=UTC), 0),
            (datetime(1970, 1, 1, 2, tzinfo=east), 0),
            (datetime(2030, 1, 31, 10, 0, 0, 250_999, tzinfo=east), 1_896_076_800_250),
            (datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), LAST_MS),
            # By way of timestamp() this one comes out a millisecond early.
            (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=34_870_843_104_269), 34_870_843_104_269),
        ]
        for value, expected in rows:
            with self.subTest(value):
                self.assertEqual(jobs.new_job("t", run_at=value).run_at, expected)

    def test_moments_refused(self) -> None:
        east = timezone(timedelta(hours=2))
        rows: list[tuple[object, str]] = [
            (-1, "run_at must lie between 0 and 253,402,300,799,999"),
            (LAST_MS + 1, "run_at must lie between"),
            (HUGE, "run_at must lie between"),
            (True, "run_at must be a whole number"),
            (1.5, "run_at must be a whole number, not 1.5"),
            (float("nan"), "run_at must be a whole number"),
            ("2030-01-31T08:00:00", "run_at: .* is no time with an offset"),
            ("2030-02-29T08:00:00Z", "run_at: .* is no valid time"),
            ("1970-01-01T01:00:00+02:00", "run_at: .* outside the years 1970 to 9999"),
            ("", "run_at: "),
            (datetime(2030, 1, 31), "run_at must be a datetime with a time zone"),
            (datetime(1970, 1, 1, 1, tzinfo=east), "run_at must lie between"),
            (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "run_at must lie between"),
            (datetime, "run_at must be a whole number, not type"),
            (date(2030, 1, 31), "run_at must be a whole number, not date"),
            (time(8, tzinfo=UTC), "run_at must be a whole number, not time"),
            (UTC, "run_at must be a whole number, not timezone"),
            ([], "run_at must be a whole number, not list"),
        ]
        for value, message in rows:
            with self.subTest(message), self.assertRaisesRegex(InvalidJob, message):
                jobs.new_job("t", run_at=value)

    def test_durations(self) -> None:
        rows: list[tuple[object, int]] = [
            (0, 0), (-0.0, 0), (90, 90_000), (0.25, 250), (0.001, 1), (0.0004, 0), ("5m", 300_000),
            ("90", 90_000), ("1h30m", 5_400_000), ("250ms", 250), (253_402_300_799, 253_402_300_799_000),
        ]  # fmt: skip
        for value, expected in rows:
            with self.subTest(value):
                job = jobs.new_job("t", delay=value)
                self.assertEqual((job.delay_ms, job.run_at), (expected, None))

    def test_timeouts_are_at_least_a_millisecond(self) -> None:
        rows: list[tuple[object, int]] = [(0.001, 1), ("1ms", 1), (30, 30_000), ("2h", 7_200_000)]
        for value, expected in rows:
            with self.subTest(value):
                self.assertEqual(jobs.new_job("t", timeout=value).timeout_ms, expected)
        for bad in (0, 0.0004, "0", "0.4ms", -1):
            with self.subTest(bad), self.assertRaisesRegex(InvalidJob, "timeout must be at least 0.001 seconds"):
                jobs.new_job("t", timeout=bad)

    def test_durations_refused(self) -> None:
        rows: list[tuple[object, str]] = [
            (-1, " must be at least 0.* seconds, not -1$"),
            (-0.001, " must be at least 0.* seconds, not -0.001$"),
            ("-5", ": '-5' is no duration"),
            ("soon", ": 'soon' is no duration"),
            ("", ": '' is no duration"),
            ("999999999999w", ": the duration '999999999999w' is too long"),
            (253_402_300_800, " must be a sensible number of seconds, not 253402300800"),
            (-253_402_300_800, " must be a sensible number of seconds"),
            (float("nan"), " must be a sensible number of seconds, not nan"),
            (float("inf"), " must be a sensible number of seconds, not inf"),
            (float("-inf"), " must be a sensible number of seconds, not -inf"),
            (1e308, " must be a sensible number of seconds"),
            (10**400, " must be a sensible number of seconds"),
            (HUGE, " must be a sensible number of seconds, not an integer"),
            (-HUGE, " must be a sensible number of seconds, not an integer"),
            (True, " must be seconds or text such as '5m', not True"),
            ([], " must be seconds or text such as '5m', not list"),
            (timedelta(seconds=1), " must be seconds or text such as '5m', not timedelta"),
        ]
        for value, message in rows:
            for field in ("delay", "timeout"):
                with (
                    self.subTest(f"{field}: {message}"),
                    self.assertRaisesRegex(InvalidJob, f"^{field}{message}"),
                ):
                    jobs.new_job(**{"type": "t", field: value})

    def test_not_both(self) -> None:
        for run_at, delay in itertools.product((0, "2030-01-31T08:00:00Z"), (0, 5, "5m")):
            with self.assertRaisesRegex(InvalidJob, "give run_at or delay, not both"):
                jobs.new_job("t", run_at=run_at, delay=delay)


class DependenciesTest(unittest.TestCase):
    """`depends_on`."""

    def test_good(self) -> None:
        rows: list[tuple[object, tuple[str, ...]]] = [
            ((), ()),
            ([], ()),
            (iter(()), ()),
            (["a", "b"], ("a", "b")),
            (("b", "a", "b", "a"), ("b", "a")),
            ((name for name in "xyz"), ("x", "y", "z")),
            ({"a": 1}, ("a",)),
            (["a"] * 20_000, ("a",)),
        ]
        for value, expected in rows:
            with self.subTest(expected):
                self.assertEqual(jobs.new_job("t", depends_on=value).depends_on, expected)

    def test_refused(self) -> None:
        rows: list[tuple[object, str]] = [
            ("abc", "depends_on must be a list of ids, not 'abc'"),
            ("", "depends_on must be a list of ids, not ''"),
            (b"abc", "depends_on must be a list of ids, not bytes"),
            (5, "depends_on must be a list of ids, not 5"),
            (HUGE, "depends_on must be a list of ids, not an integer"),
            ([5], "an id in depends_on must be a string, not 5"),
            ([None], "an id in depends_on must be a string, not None"),
            ([[]], "an id in depends_on must be a string, not list"),
            (["me"], "job 'me' depends on itself"),
            (["a", "me"], "job 'me' depends on itself"),
        ]
        for value, message in rows:
            with self.subTest(message), self.assertRaisesRegex(InvalidJob, message):
                jobs.new_job("t", id="me", depends_on=value)

    def test_10_000_and_one_more(self) -> None:
        names = [str(number) for number in range(10_001)]
        self.assertEqual(len(jobs.new_job("t", depends_on=names[:10_000]).depends_on), 10_000)
        self.assertEqual(len(jobs.new_job("t", depends_on=names[:10_000] * 2).depends_on), 10_000)
        with self.assertRaisesRegex(InvalidJob, "at most 10,000 others, not 10,001"):
            jobs.new_job("t", depends_on=names)

    def test_the_list_is_not_kept(self) -> None:
        given = ["a"]
        job = jobs.new_job("t", depends_on=given)
        given.append("b")
        self.assertEqual(job.depends_on, ("a",))


class NewJobTest(unittest.TestCase):
    """The record, and jobs given as mappings."""

    EVERYTHING = MappingProxyType({
        "type": "resize", "payload": {"n": 1}, "queue": "images", "id": "j1", "priority": 5, "max_attempts": 7,
        "delay": "5m", "timeout": 30, "idempotency_key": "k1", "depends_on": ["a", "b"], "trace": "00-ab-cd-01",
    })  # fmt: skip

    def stored(self, job: jobs.NewJob) -> dict[str, object]:
        return {name: getattr(job, name) for name in jobs.NewJob.__slots__}

    def test_defaults(self) -> None:
        expected = {
            "type": "t", "payload": "null", "queue": "default", "id": None, "priority": 0, "max_attempts": 3,
            "run_at": None, "delay_ms": 0, "timeout_ms": None, "idempotency_key": None, "trace": None,
            "depends_on": (),
        }  # fmt: skip
        self.assertEqual(self.stored(jobs.new_job("t")), expected)
        self.assertEqual(self.stored(jobs.new_job_from({"type": "t"})), expected)

    def test_every_argument_arrives_in_its_own_place(self) -> None:
        expected = {
            "type": "resize", "payload": '{"n":1}', "queue": "images", "id": "j1", "priority": 5,
            "max_attempts": 7, "run_at": None, "delay_ms": 300_000, "timeout_ms": 30_000,
            "idempotency_key": "k1", "trace": "00-ab-cd-01", "depends_on": ("a", "b"),
        }  # fmt: skip
        self.assertEqual(self.stored(jobs.new_job_from(self.EVERYTHING)), expected)
        moment = {**self.EVERYTHING, "delay": None, "run_at": 12}
        self.assertEqual(
            self.stored(jobs.new_job_from(moment)), {**expected, "delay_ms": 0, "run_at": 12}
        )

    def test_any_mapping_will_do_and_is_not_changed(self) -> None:
        for given in ({"type": "t", "depends_on": ["a"]}, OrderedDict(type="t"), UserDict(type="t")):
            before = repr(given)
            self.assertEqual(jobs.new_job_from(given).type, "t")
            self.assertEqual(repr(given), before)

    def test_mappings_refused(self) -> None:
        rows: list[tuple[Any, str]] = [
            (None, "a job must be an object with the key 'type', not None"),
            (5, "a job must be an object with the key 'type', not 5"),
            (HUGE, "a job must be an object with the key 'type', not an integer"),
            ("t", "a job must be an object with the key 'type', not 't'"),
            (["type"], "a job must be an object with the key 'type', not list"),
            ([("type", "t")], "a job must be an object with the key 'type', not list"),
            (dict, "a job must be an object with the key 'type', not type"),
            ({}, "the key 'type' is missing"),
            ({"payload": 1}, "the key 'type' is missing"),
            ({"type": "t", "pay_load": 1}, "unknown key 'pay_load'; a job has delay depends_on id"),
            ({"type": "t", "z": 1, "a": 1}, "unknown key 'a', 'z'; a job has"),
            ({"type": "t", 5: 1}, "unknown key 5; a job has"),
            ({"type": "t", HUGE: 1}, "unknown key an integer of thousands of digits; a job has"),
            ({"type": "t", "\x1b": 1}, r"unknown key '\\x1b'; a job has"),
            ({"pay_load": 1}, "unknown key 'pay_load'"),
            ({"type": None}, "type must be a string, not None"),
            ({"type": "t", "priority": True}, "priority must be a whole number"),
        ]
        for given, message in rows:
            with self.subTest(message), self.assertRaisesRegex(InvalidJob, message):
                jobs.new_job_from(given)

    def test_a_mapping_that_breaks_shows_its_own_error(self) -> None:
        class Broken(UserDict):  # type: ignore[type-arg]
            def __getitem__(self, key: object) -> object:
                raise TypeError("the disk of this mapping is gone")

        with self.assertRaisesRegex(TypeError, "disk of this mapping"):
            jobs.new_job_from(Broken(type="t"))

    def test_errors_are_value_errors_of_this_package(self) -> None:
        for kind in (ValueError, errors.JobQueueError):
            with self.assertRaises(kind):
                jobs.new_job("")

    def test_the_keys_are_the_arguments(self) -> None:
        code = jobs.new_job.__code__
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.assertEqual(jobs.FIELDS, set(arguments))


class CleanErrorTest(unittest.TestCase):
    """`clean_error`: what of an error is stored."""

    def test_stored(self) -> None:
        rows: list[tuple[object, str]] = [
            ("boom", "boom"),
            ("", ""),
            (None, "None"),
            (ValueError("x"), "x"),
            ("caf\u00e9\n\x00", "caf\u00e9\n\x00"),
            ("a\ud800b", "a\\ud800b"),
            ("x" * 4_000, "x" * 4_000),
            ("x" * 4_001, "x" * 3_997 + "..."),
            ("\ud800" * 4_000, ("\\ud800" * 667)[:3_997] + "..."),
        ]
        for given, expected in rows:
            with self.subTest(ascii(given)[:30]):
                self.assertEqual(jobs.clean_error(given), expected)


class JobTest(unittest.TestCase):
    """What comes back out of a store."""

    def row(self, **changes: object) -> jobs.Job:
        values: dict[str, Any] = {
            "seq": 7, "id": "j1", "queue": "images", "type": "resize", "payload": '{"n":1}', "priority": 5,
            "created_at": 0, "run_at": 1_896_076_800_250, "status": "pending", "ready": 1, "unmet": 0,
            "attempts": 0, "max_attempts": 3, "timeout_ms": None, "idempotency_key": None, "lease_owner": None,
            "lease_token": None, "lease_expires_at": None, "started_at": None, "finished_at": None,
            "result": None, "last_error": None, "progress": None, "progress_note": None, "trace": None,
        }  # fmt: skip
        return jobs.Job(**{**values, **changes})

    def test_the_columns_are_the_arguments_in_order(self) -> None:
        arguments = jobs.Job.__init__.__code__.co_varnames[1 : len(jobs.Job.COLUMNS) + 2]
        self.assertEqual((*jobs.Job.COLUMNS, "depends_on"), arguments)

    def test_as_shown_when_waiting(self) -> None:
        self.assertEqual(self.row().as_dict(), {
            "id": "j1", "queue": "images", "type": "resize", "payload": {"n": 1}, "priority": 5,
            "created_at": "1970-01-01T00:00:00.000Z", "run_at": "2030-01-31T08:00:00.250Z",
            "status": "pending", "attempts": 0, "max_attempts": 3, "idempotency_key": None, "last_error": None,
            "lease_owner": None, "lease_expires_at": None, "started_at": None, "finished_at": None,
            "result": None, "depends_on": None, "timeout_seconds": None, "progress": None, "trace": None,
        })  # fmt: skip

    def test_as_shown_when_everything_is_set(self) -> None:
        job = self.row(
            status="running", attempts=2, timeout_ms=1_500, idempotency_key="k", lease_owner="w",
            lease_token="secret", lease_expires_at=1_000, started_at=0, finished_at=2, result="[1]",
            last_error="boom", progress=0.5, progress_note="half", trace="t", depends_on=("a", "b"),
        )  # fmt: skip
        self.assertEqual(job.as_dict(), {
            "id": "j1", "queue": "images", "type": "resize", "payload": {"n": 1}, "priority": 5,
            "created_at": "1970-01-01T00:00:00.000Z", "run_at": "2030-01-31T08:00:00.250Z",
            "status": "running", "attempts": 2, "max_attempts": 3, "idempotency_key": "k",
            "last_error": "boom", "lease_owner": "w", "lease_expires_at": "1970-01-01T00:00:01.000Z",
            "started_at": "1970-01-01T00:00:00.000Z", "finished_at": "1970-01-01T00:00:00.002Z",
            "result": [1], "depends_on": ["a", "b"], "timeout_seconds": 1.5, "progress": 0.5, "trace": "t",
        })  # fmt: skip
        self.assertNotIn("secret", repr(job.as_dict()) + repr(job))

    def test_values_are_parsed_anew_by_each_look(self) -> None:
        job = self.row(result="[]")
        job.payload["n"] = 2
        job.result.append(1)
        self.assertEqual((job.payload, job.result), ({"n": 1}, []))

    def test_a_result_of_null_reads_like_none(self) -> None:
        self.assertIsNone(self.row(result="null").result)
        self.assertIsNone(self.row().result)

    def test_repr(self) -> None:
        self.assertEqual(repr(self.row()), "<Job j1 resize pending>")


class ErrorsTest(unittest.TestCase):
    """The exception tree and what it carries."""

    def test_tree(self) -> None:
        rows: list[tuple[type, tuple[type, ...]]] = [
            (errors.InvalidJob, (errors.JobQueueError, ValueError)),
            (errors.DependencyCycle, (errors.InvalidJob,)),
            (errors.UnknownJobError, (errors.JobQueueError, KeyError)),
            (errors.HandlerLoadError, (errors.JobQueueError,)),
            (errors.DatabaseError, (errors.JobQueueError,)),
            (errors.DatabaseBusy, (errors.DatabaseError,)),
        ]
        for kind, bases in rows:
            with self.subTest(kind.__name__):
                self.assertEqual(kind.__bases__, bases)

    def test_what_they_carry(self) -> None:
        self.assertEqual(errors.InvalidJob("m").index, None)
        self.assertEqual(errors.InvalidJob("m", 3).index, 3)
        cycle = errors.DependencyCycle("m", ["a", "b", "a"], 1)
        self.assertEqual((str(cycle), cycle.cycle, cycle.index), ("m", ("a", "b", "a"), 1))
        unknown = errors.UnknownJobError("x\n")
        self.assertEqual((str(unknown), unknown.job_id), ("there is no job 'x\\n'", "x\n"))


if __name__ == "__main__":
    unittest.main()
