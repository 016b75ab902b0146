"""Values for `fuzz`: names, numbers, times, JSON and whole files of it, most of them valid, the rest hostile.

`Dice` makes all of them from one stream of random numbers, so that a seed makes the same ones again. `SPECIAL` says
which of them an option takes, by the name under which it is stored; for all others the kind of the option tells.
`command_line` puts them together as the parser of a command wants them, or nearly so.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from jobqueue import cli

SCRIPTS = (
    "abcXYZ019 _-.:", "äöüßéñÅø", "Ωλπςάß", "Жщъюя", "שלוםא", "مرحبا", "नमस्ते", "ไทยก์", "漢字かな", "한국어",
    "ელა", "ቋንቋ", "🙂👩\u200d👩\u200d👧🇩🇪", "a\u0301\u0328e\u0308", "\u202e\u202d\u2066\u2069\u200f",
    "\u200b\u200d\ufeff\u2060\xad", "\x00\x01\x07\x08\x1b\x7f", "\n\r\t\x0b\x0c\x85\u2028",
    "\ue000\ufffd\ufffe\U0010ffff\U000e0041", "'\"\\$`;|&<>*?%s{}[]", "\ud800\udfff\udc80",
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "3", "10", "64", "255", "9223372036854775807", "9223372036854775808", "-1", "-0", "+5",
    "-9223372036854775808", "-9223372036854775809", "1e3", "1.5", " 7", "0x10", "1_000", "\u0663", "", "NaN",
    "inf", "9" * 30, "9" * 1_001, "9" * 5_000,
)  # fmt: skip
TIMES = (
    "2030-01-31T08:00:00Z", "1970-01-01T00:00:00Z", "2000-01-01t00:00:00.123456789z", "9999-12-31T23:59:59.999Z",
    "1969-12-31T23:59:59Z", "2030-02-30T00:00:00Z", "2030-01-31 08:00:00+02:00", "2030-01-31T24:00:00Z",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2030-01-31T08:00:60Z", "2030-01-31", "now", "",
    "2030-01-31T08:00:00", "\u0662\u0660\u0663\u0660-01-31T08:00:00Z", "2024-02-29T12:00:00-00:00",
    "1500-01-01T00:00Z", "2030-01-31T08:00:00+99:00",
)  # fmt: skip
SPANS = (
    "0", "90", "5m", "2h", "1h30m", "250ms", "1.5d", "1w", "0.0001s", "1e3", "-1", "5 m", "m", "", "0ms", "1h1h",
    "999999999999999w", "9" * 16, "1.0000000001s", "\u0665m", "3M",
)  # fmt: skip
JSON_TEXTS = (
    "null", "true", "1e999", "-1e999", "NaN", "Infinity", "-0.0", "1e-400", '"\\ud800"', '"\\u0000"', "[1,]", "01",
    '{"a":1,"a":2}', "{'a':1}", "\ufeff1", "1 2", "", " ", '"\\ud83d\\ude00"', "9" * 4_300, "9" * 4_301, "1e308",
    "-" + "9" * 4_301, "[" * 64 + "]" * 64, "[" * 65 + "]" * 65, "[" * 100_000, '{"a":' * 65 + "1" + "}" * 65,
    '"' + "[" * 70 + '"', '["' + '\\"[' * 70 + '"]', "5e-324", "123456789012345678901234567890",
    '"' + "x" * (2**20 - 2) + '"', '"' + "x" * (2**20 - 1) + '"', '"' + "é" * 2**19 + '"',
)  # fmt: skip


class Dice:
    """Makes values of every kind; the shares of the hostile ones are small enough that most jobs are accepted."""

    def __init__(self, random: Random, directory: Path) -> None:
        self.random = random
        self.dir = directory
        self.ids = ["1", "2", "none"]
        """Ids that a job may have."""

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # -- words -------------------------------------------------------------------------

    def text(self, most: int = 12) -> str:
        """Return text of one or two scripts, sometimes empty, sometimes at or beyond the limit of a name."""
        if self.chance(0.6):
            return "".join(self.random.choices("abcdefgh-0123", k=self.random.randint(1, most)))
        letters = "".join(self.random.choices(SCRIPTS, k=self.random.choice((1, 1, 2))))
        edges = (0, 1, 3, most, 254, 255, 256)
        size = self.random.choice(edges) if self.chance(0.3) else self.random.randint(1, most)
        return "".join(self.random.choices(letters, k=size))

    def number(self) -> str:
        return str(self.random.randint(1, 9)) if self.chance(0.7) else self.random.choice(NUMBERS)

    def time(self) -> str:
        return self.mangled(self.random.choice(TIMES[:3] if self.chance(0.6) else TIMES), 0.1)

    def span(self) -> str:
        return self.mangled(self.random.choice(SPANS[:8] if self.chance(0.7) else SPANS), 0.1)

    def id(self) -> str:
        return self.random.choice(self.ids) if self.chance(0.5) else self.text()

    def type(self) -> str:
        return self.random.choice(("print", "fail", "echo", "mail")) if self.chance(0.5) else self.text()

    def queue(self) -> str:
        return self.random.choice(("default", "mail", "Ω")) if self.chance(0.8) else self.text()

    # -- JSON --------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Any:
        """Return a JSON value; its text may hold what no UTF-8 can."""
        kind = self.random.randrange(9 if depth < 6 else 6)
        if kind < 2:
            return self.random.choice((None, True, False, 0, -1, 2**53 + 1, 2**63, -(2**64), 10**300, 1))
        if kind < 3:
            return self.random.choice((0.1, -0.0, 1e308, 5e-324, 1e22, -1.5, 2**53 + 2.0))
        if kind < 6:
            return self.text(40)
        if kind < 7:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 4))]
        if kind < 8:
            return {self.text(): self.value(depth + 1) for _ in range(self.random.randint(0, 4))}
        return {"message": self.value(depth + 1)}

    def json(self) -> str:
        """Return JSON text, or what looks like it."""
        if self.chance(0.2):
            return self.random.choice(JSON_TEXTS)
        text = json.dumps(self.value(), ensure_ascii=self.chance(0.5), indent=self.random.choice((None, None, 1)))
        return self.mangled(text, 0.08)

    def payload(self) -> str:
        """Return what `--payload` takes: JSON, `-` or `@FILE`."""
        if self.chance(0.85):
            return self.json()
        file = self.written(self.json().encode("utf-8", "surrogatepass"))
        return self.random.choice(("-", "-", f"@{file}", f"@{file}", "@missing", "@", "@.", "@\0"))

    def file(self) -> str:
        """Return what `--file` takes: `-`, or a file with JSON Lines."""
        file = str(self.written(self.lines()))
        return self.random.choice(("-", "-", "-", file, file, file, file, file, "missing", ".", "", "a\0b"))

    def lines(self) -> bytes:
        """Return JSON Lines, each a job or nearly so; the bytes are mangled now and then."""
        end = self.random.choice((b"\n", b"\n", b"\r\n", b"\n\n", b" \n", b"\r"))
        lines = [self.line().encode("utf-8", "surrogatepass") for _ in range(self.random.randint(0, 4))]
        data = self.random.choice((b"", b"", b"", b"\xef\xbb\xbf")) + end.join(lines)
        data += self.random.choice((b"", end))
        if not self.chance(0.1):
            return data
        at = self.random.randint(0, len(data))
        return data[:at] + bytes([self.random.randrange(256)]) + data[at + self.random.choice((0, 1, 1, 5)):]

    def line(self) -> str:
        """Return one line of a file: a JSON object with fields of a job."""
        choice = self.random.choice
        makers: dict[str, Callable[[], Any]] = {
            "payload": self.value, "queue": self.queue, "id": self.text, "run_at": self.time, "delay": self.span,
            "priority": lambda: choice((0, 1, -5, 2**63 - 1, 2**63, 1.0, "1", None, True)),
            "max_attempts": lambda: choice((1, 2, 3, 0, -1, 2**63, None, 1e3)), "trace": self.text,
            "timeout": lambda: choice((5, "5m", 0, 1.5, None, "x")), "idempotency_key": self.text,
            "depends_on": lambda: choice(([], [self.id()], [self.id(), self.id()], "1", None, 7, {})),
        }  # fmt: skip
        if self.chance(0.05):
            return self.json()
        job = {"type": self.type()}
        for name in self.random.sample(sorted(makers), choice((0, 1, 1, 2, 3))):
            job[name] = makers[name]()
        if self.chance(0.02):
            job[self.text()] = self.value()
        return self.mangled(json.dumps(job, ensure_ascii=self.chance(0.5)), 0.05)

    # -- files and faults --------------------------------------------------------------

    def written(self, data: bytes) -> Path:
        """Return a file with this content."""
        path = self.dir / f"input-{self.random.randrange(10**9)}"
        path.write_bytes(data)
        return path

    def database(self) -> str:
        """Return what `--database` takes, nearly always the one that is a queue."""
        good = str(self.dir / "jobs.db")
        bad = ("missing.db", "text", "foreign.db", "no/such", "jobs.db/x", ".")
        if self.chance(0.93):
            return good
        return self.random.choice(("", "a\0b", "\udcff", "/dev/null", *[str(self.dir / name) for name in bad]))

    def mangled(self, text: str, share: float) -> str:
        """Return the text; in this share of all cases cut, or with a character dropped, put in or changed."""
        if not self.chance(share):
            return text
        at = self.random.randint(0, len(text))
        left, right, new = text[:at], text[at:], self.random.choice(self.random.choice(SCRIPTS))
        rests = ("", right[1:], right * 2, new + right, new + right[1:])
        return left + self.random.choice(rests)


SPECIAL: dict[str, Callable[[Dice], str]] = {
    "database": Dice.database, "payload": Dice.payload, "file": Dice.file, "id": Dice.id, "ids": Dice.id,
    "depends_on": Dice.id, "type": Dice.type, "queue": Dice.queue, "queues": Dice.queue, "run_at": Dice.time,
    "delay": Dice.span, "timeout": Dice.span, "default_timeout": Dice.span, "older_than": Dice.span,
    "status": lambda dice: dice.mangled(dice.random.choice(("pending", "failed", "completed")), 0.2),
    "log_format": lambda dice: dice.mangled(dice.random.choice(("text", "json")), 0.2),
    "log_level": lambda dice: dice.mangled(dice.random.choice(("debug", "info", "error")), 0.2),
}  # fmt: skip
"""How to make the value of an option, by the name under which it is stored."""


def value_for(dice: Dice, action: argparse.Action) -> str:
    """Return a value for an option or argument; never a path outside of the current directory by chance."""
    if action.dest in SPECIAL:
        return SPECIAL[action.dest](dice)
    if action.choices:
        return dice.mangled(str(dice.random.choice(list(action.choices))), 0.2)
    return dice.number() if action.type is not None else dice.text().replace("/", "|")


def command_line(dice: Dice, name: str) -> list[str]:
    """Return the arguments of a command, mostly well formed."""
    argv = [name]
    for action in cli.command_parser(name)[0]._actions:
        if isinstance(action, argparse._HelpAction):
            use = 0.01
        elif not action.option_strings or action.required or action.dest in ("database", "type"):
            use = 0.97
        else:
            use = 0.05 if action.dest == "file" else 0.2
        if not dice.chance(use):
            continue
        flag = action.option_strings[-1:]
        many = isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*")
        for _ in range(dice.random.choice((1, 2, 3)) if many else 1):
            if action.nargs == 0:
                argv += flag
            elif flag and dice.chance(0.5):
                argv.append(f"{flag[0]}={value_for(dice, action)}")
            else:
                argv += [*flag, value_for(dice, action)]
    if any(re.match("--file(?:$|=)", argument) for argument in argv) and dice.chance(0.95):
        argv = only(argv, "--file", "--database")  # beside it, hardly anything is allowed
    if dice.chance(0.06):
        at = dice.random.randint(0, len(argv))
        junk = (dice.text(), "--", "-", "--" + dice.text(), "-x", dice.mangled(argv[at - 1], 1), "help", "")
        argv[at:at + dice.random.choice((0, 1))] = [dice.random.choice(junk)]
    return argv


def only(argv: list[str], *flags: str) -> list[str]:
    """Return a command line without all options but these."""
    kept = argv[:1]
    for at, argument in enumerate(argv):
        if argument.partition("=")[0] in flags:
            kept += [argument] if "=" in argument else argv[at:at + 2]
    return kept
