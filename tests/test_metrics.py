"""`stats --format prometheus`: valid exposition text, checked by a strict parser, whatever the names hold."""

from __future__ import annotations

import io
import re
import sys
import unittest
from typing import NamedTuple

from jobqueue.cli import main
from tests.look_case import LookTestCase
from tests.support import run

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|(?=\}))')
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Family(NamedTuple):
    kind: str
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    """(name, labels) -> value"""


def parse(text: str) -> dict[str, Family]:
    """Read exposition text as the format's definition has it; anything else is an AssertionError.

    HELP, then TYPE, then the samples of a family, which come together; none twice.
    """
    assert text.endswith("\n") and "\r" not in text, "lines end with a line feed"
    families: dict[str, Family] = {}
    helped = current = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# HELP "):
            helped, _, words = line.removeprefix("# HELP ").partition(" ")
            assert NAME.fullmatch(helped) and words and "\\" not in words, line
        elif line.startswith("# TYPE "):
            current, _, kind = line.removeprefix("# TYPE ").partition(" ")
            assert current == helped and current not in families, line
            assert kind in ("gauge", "counter", "summary"), line
            assert (kind == "counter") == current.endswith("_total"), line
            families[current] = Family(kind, {})
        else:
            assert not line.startswith("#"), line
            family = families[current]
            match = NAME.match(line)
            assert match, line
            name = match[0]
            allowed = {current, f"{current}_sum", f"{current}_count"} if family.kind == "summary" else {current}
            assert name in allowed, line
            labels, rest = read_labels(line[len(name):])
            value = rest.removeprefix(" ")
            assert rest != value and NUMBER.fullmatch(value), line
            assert ("quantile" in labels) == (family.kind == "summary" and name == current), line
            key = name, frozenset(labels.items())
            assert key not in family.samples, f"twice: {line}"
            family.samples[key] = float(value)
    return families


def read_labels(text: str) -> tuple[dict[str, str], str]:
    """Return the labels in braces at the beginning, and what comes after."""
    labels: dict[str, str] = {}
    if not text.startswith("{"):
        return labels, text
    text = text[1:]
    while not text.startswith("}"):
        match = LABEL.match(text)
        assert match and match[1] not in labels, text
        labels[match[1]] = re.sub(r"\\.", lambda escape: ESCAPES[escape[0]], match[2])
        text = text[match.end():]
    return labels, text[1:]


class ParserTest(unittest.TestCase):
    def test_it_refuses_what_is_not_valid(self) -> None:
        head = "# HELP a b\n# TYPE a gauge\n"
        parse(head + 'a{x="1",y="\\n\\"\\\\"} 1.5e-7\n')
        for bad in ("a", 'a{x="1" 1', 'a{x="a"b"} 1', 'a{x="\\d"} 1', "a  1", "a NaNs", "b 1", 'a{x="1",x="2"} 1',
                    "a 1\na 1", "# TYPE a gauge", "a_sum 1", 'a{quantile="0.5"} 1', "a 1\r", "a 1\n", 'a{1x="1"} 1',
                    'a{x="1"}1', "# HELP b\n# TYPE b gauge", "# HELP c d\n# TYPE c counter"):
            with self.subTest(bad=bad), self.assertRaises((AssertionError, KeyError)):
                parse(head + bad + "\n")


class PrometheusTest(LookTestCase):
    def families(self) -> dict[str, Family]:
        return parse(self.look("stats", "--format", "prometheus").out)

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the samples of one name, by the values of its labels in this order."""
        family = self.families()[name.removesuffix("_sum").removesuffix("_count")]
        return {tuple(dict(found)[label] for label in labels): value
                for (sample, found), value in family.samples.items()
                if sample == name and len(found) == len(labels)}

    def test_the_names_and_zero_for_an_empty_queue(self) -> None:
        families = self.families()
        self.assertEqual({name: family.kind for name, family in families.items()}, {
            "jobqueue_jobs": "gauge", "jobqueue_ready_jobs": "gauge", "jobqueue_scheduled_jobs": "gauge",
            "jobqueue_waiting_jobs": "gauge", "jobqueue_blocked_jobs": "gauge",
            "jobqueue_oldest_ready_age_seconds": "gauge", "jobqueue_wait_seconds": "summary",
            "jobqueue_run_seconds": "summary", "jobqueue_failed_attempts_total": "counter",
            "jobqueue_workers": "gauge"})
        for name in ("ready_jobs", "scheduled_jobs", "waiting_jobs", "blocked_jobs", "oldest_ready_age_seconds"):
            self.assertEqual(self.values(f"jobqueue_{name}", "queue"), {("default",): 0})
        self.assertEqual(self.values("jobqueue_workers"), {(): 0})

    def test_values(self) -> None:
        self.worker()
        self.queue.enqueue("a", id="a", max_attempts=1)
        self.queue.enqueue("b", depends_on=["a"])
        self.clock.advance(250)
        self.end("a", "no", 1_500)
        self.queue.enqueue("b", queue="q")
        self.clock.advance(60_000)
        self.assertEqual(self.values("jobqueue_jobs", "queue", "type", "status"), {
            ("default", "a", "failed"): 1, ("default", "b", "pending"): 1, ("q", "b", "pending"): 1})
        self.assertEqual(self.values("jobqueue_ready_jobs", "queue"), {("default",): 0, ("q",): 1})
        self.assertEqual(self.values("jobqueue_blocked_jobs", "queue"), {("default",): 1, ("q",): 0})
        self.assertEqual(self.values("jobqueue_oldest_ready_age_seconds", "queue"), {("default",): 0, ("q",): 60})
        self.assertEqual(self.values("jobqueue_run_seconds", "queue", "type", "quantile"),
                         {("default", "a", "0.5"): 1.5, ("default", "a", "0.95"): 1.5})
        self.assertEqual(self.values("jobqueue_wait_seconds_sum", "queue", "type"), {("default", "a"): 0.25})
        self.assertEqual(self.values("jobqueue_wait_seconds_count", "queue", "type"), {("default", "a"): 1})
        self.assertEqual(self.values("jobqueue_failed_attempts_total"), {(): 1})
        self.assertEqual(self.values("jobqueue_workers"), {(): 1})

    def test_hostile_names(self) -> None:
        names = ['"', "\\", '\\"', "}", 'a"} 1 #', "x=y,", "日本", "\u2028\u202e", "# HELP", "\\n", " ", "é" * 255]
        for name in names:
            self.queue.enqueue(name, queue=name)
        with self.queue._store.transaction():  # as only SQL can: a line feed and a carriage return
            self.queue._store.sqlite.execute("UPDATE jobs SET type = 'a' || char(10) || 'b' WHERE id = '1'")
        for (job,) in (self.queue.claim("w", queues=[name]) for name in names[1:]):
            assert job.lease_token is not None
            self.queue.complete(job.id, job.lease_token)
        self.assertEqual(self.values("jobqueue_jobs", "queue", "type", "status"), {
            **{(name, name, "completed"): 1 for name in names[1:]}, ('"', "a\nb", "pending"): 1})
        self.assertEqual(self.values("jobqueue_run_seconds_count", "queue", "type"),
                         {(name, name): 1 for name in names[1:]})
        self.assertEqual(set(self.values("jobqueue_ready_jobs", "queue")),
                         {("default",), *((name,) for name in names)})

    def test_utf_8_wherever_stdout_goes(self) -> None:
        self.queue.enqueue("日本")
        done = run("stats", "--database", self.db, "--format", "prometheus", env={"PYTHONIOENCODING": "ascii"})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn('type="日本"', done.stdout)
        parse(done.stdout)

    def test_a_terminal_gets_no_control_characters(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        self.queue.enqueue("a\u202eb")
        stream, before = Terminal(), sys.stdout
        try:
            sys.stdout = stream
            self.assertEqual(main(["stats", "--database", str(self.db), "--format", "prometheus"]), 0)
        finally:
            sys.stdout = before
        self.assertIn(r'type="a\u202eb"', stream.getvalue())
        self.assertTrue(stream.getvalue().replace("\n", "").isprintable())


if __name__ == "__main__":
    unittest.main()
