"""Random, mutated and hostile input: nothing may crash, and nothing that is refused may change the file.

    python -m tests.fuzz --seconds 600 --seed 1

One seed is one history: some hundred commands in this process, on one file, then real workers on all that was
accepted, then odd jobs through every face (`fuzz_faces`). The options come from the parsers of the commands, so a
new command is tried as soon as it is in `cli.COMMANDS`; one that would not end by itself has to be named in
`RUNNERS`, one that only looks in `READERS`. `fuzz_values` makes the values.

What is expected of every command (`fault`): exit code 0, 1, 2 or 75 and no exception; on failure one sentence on
stderr that names what was wrong, and tables that are as they were; no character that could steer a terminal. What
was accepted must come back equal from `list --json`, and from the worker as the result of a handler that echoes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from jobqueue import Job, Queue, cli, connection
from jobqueue.errors import UnknownJobError
from jobqueue.jobs import FIELDS
from jobqueue.lifecycle import FINISHED
from tests import fuzz_faces
from tests.fuzz_values import SCRIPTS, Dice, command_line
from tests.support import run

EXIT_CODES = (0, 1, 2, 75)
RUNNERS = {"worker": "jobqueue.worker.run"}
"""What a command hands its options to that would not end by itself: here it only pretends to run."""
READERS = {"list", "show", "explain", "stats", "wait", "backup", "export", "completion", "doctor"}
"""Commands that change nothing, whatever they are told."""
MOVERS = {"purge", "import"}
"""Commands that may take jobs out of the file or bring others in."""
SOON_SECONDS = 30
STEPS = 120
BYSTANDERS = ("text", "foreign.db")
"""Files that are no queue."""
TABLES = ("jobs", "dependencies", "failures", "outputs", "workers", "sqlite_sequence")
BOM = b"\xef\xbb\xbf"

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What steers a terminal, but for newlines."""
UNSEEN = re.compile(CONTROL.pattern[:-1] + "\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""That, and what hides or reorders other characters."""

HANDLERS = """\
import json, pathlib
from jobqueue import handler

def echo(payload, context):
    context.progress(0.5, context.type[:50])
    return payload

for name in json.loads((pathlib.Path(__file__).parent / "types.json").read_text("utf-8")):
    handler(name)(echo)
"""


class Found(AssertionError):
    """A fault, with the command line and the input that show it."""


class Done(NamedTuple):
    """How a command ended; `crash` is the exception that it let out."""

    code: int | None
    out: str
    err: str
    crash: BaseException | None


def takes_many(name: str) -> bool:
    """Return whether a command does something for each of its arguments, so that it can fail in part."""
    return name in cli.COMMANDS and any(
        action.nargs in ("+", "*") for action in cli.command_parser(name)[0]._actions if not action.option_strings)


# -- one command ----------------------------------------------------------------------

class Stream(io.TextIOWrapper):
    """A stdout or stderr that keeps what it gets."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding, newline="\n")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        data: bytes = self.buffer.getvalue()  # type: ignore[attr-defined]
        return data.decode(self.encoding)


def main(argv: list[str], stdin: bytes = b"", encoding: str = "utf-8", terminal: bool = False) -> Done:
    """Run one command in this process; that it does not end is an exception, too."""
    out, err = Stream(encoding, terminal), Stream(encoding, terminal)
    streams = {"stdin": io.TextIOWrapper(io.BytesIO(stdin)), "stdout": out, "stderr": err}
    code: object = None
    crash: BaseException | None = None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(sys, **streams))
        stack.enter_context(mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "70"}))
        for name in ("JOBQUEUE_DATABASE", "JOBQUEUE_DEBUG"):
            os.environ.pop(name, None)
        for target in RUNNERS.values():
            stack.enter_context(mock.patch(target, return_value=0))
        stack.enter_context(mock.patch.object(Queue, "wait", _do_not_wait))
        stack.enter_context(soon())
        try:
            code = cli.main(argv)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            crash = error
    return Done(code if isinstance(code, int) else None, out.text(), err.text(), crash)


def _do_not_wait(queue: Queue, id: str, timeout: float | None = None) -> Job:
    job = queue.get(id)
    if job is None:
        raise UnknownJobError(id)
    if job.status not in FINISHED:
        raise TimeoutError
    return job


@contextmanager
def soon() -> Iterator[None]:
    """Raise `TimeoutError` in what has not ended after half a minute; main thread only."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {SOON_SECONDS} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SOON_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def fault(argv: list[str], done: Done) -> str | None:
    """Return what is wrong with the way a command ended; None: nothing."""
    if done.crash is not None:
        return f"it raised {done.crash!r}"
    if done.code not in EXIT_CODES:
        return f"it exited with {done.code!r}"
    plain_id = argv[:1] == ["enqueue"] and "--json" not in argv  # scripts need it as it is
    for name, text, unsafe in (("stdout", done.out, CONTROL if plain_id else UNSEEN), ("stderr", done.err, UNSEEN)):
        if "Traceback" in text or "internal error" in text:
            return f"there is an internal error on {name}"
        if found := unsafe.search(text):
            return f"there is {found[0]!a} on {name}"
    if not re.fullmatch(r"(?:jobqueue: [^\n]+\n)*", done.err):
        return "stderr has lines that are not the program's"
    if done.code and done.err.count("\n") != 1 and (done.code == 2 or not takes_many(argv[0]) or not done.err):
        return "it failed with more or less than one sentence on stderr"
    if done.code == 2 and done.out:
        return "it refused its input and wrote to stdout"
    return None if done.code != 2 or names_something(argv, done.err) else "stderr does not name what was wrong"


def names_something(argv: list[str], message: str) -> bool:
    """Return whether a message has in it an option, a field, the place in a file, or a word of the command line."""
    words = {"command", "argument", "database", "line", "standard input", *FIELDS}
    words |= {argument.partition("=")[0] for argument in argv if argument.startswith("--")}
    pieces = {piece for argument in argv for piece in (argument, argument.partition("=")[2])}
    words |= {ascii(piece.removeprefix("@"))[1:-1] for piece in pieces if len(piece) < 20}
    if argv[:1] and argv[0] in cli.COMMANDS:  # it may be one that is missing
        words |= {word for action in cli.command_parser(argv[0])[0]._actions
                  for word in (*action.option_strings, action.dest, str(action.metavar))}
    text = message.removeprefix("jobqueue: ")
    return any(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text) for word in words if word)


# -- one history ----------------------------------------------------------------------

class History:
    """Commands on one file.

    Attributes:
        accepted: the payloads of all jobs that were stored, by id.
        exits: how often a command ended how.
        echoed: how many results of workers were compared.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        self.dir = directory
        self.dice = Dice(Random(seed), directory)
        self.path = directory / "jobs.db"
        self.accepted: dict[str, Any] = {}
        self.exits: Counter[tuple[str, int | None]] = Counter()
        self.echoed = 0
        self.steps = 0
        (directory / "text").write_text("not a database\n" * 100)
        with closing(sqlite3.connect(directory / "foreign.db")) as foreign:
            foreign.executescript("CREATE TABLE jobs(id); PRAGMA user_version = 7")
        self.must(["init", "--database", str(self.path)])

    def contents(self) -> list[Any]:
        """Return all rows of all tables, and the bytes of the files that are no queue."""
        strangers = [(self.dir / name).read_bytes() for name in BYSTANDERS]
        if not self.path.exists():
            return strangers
        uri = f"file:{self.path}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=10, isolation_level=None)) as reader:
            rows = [reader.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in TABLES]
        return [*strangers, *rows]

    def must(self, argv: list[str], stdin: bytes = b"", encoding: str = "utf-8", terminal: bool = False) -> Done:
        """Run a command, raise `Found` at a fault, and take note of what it stored."""
        before = self.contents()
        done = main(argv, stdin, encoding, terminal)
        wrong = fault(argv, done)
        name = argv[0] if argv else ""
        untouched = done.code == 2 or name in READERS or (done.code and not takes_many(name))
        if wrong is None and untouched and self.contents() != before:
            wrong = "it changed a file"
        if wrong is None and done.code == 0 and name == "enqueue":
            wrong = self.remember(argv, stdin, done.out)
        if wrong is None and name in MOVERS:
            self.accepted = {job["id"]: job["payload"] for job in self.jobs()}
        if wrong is not None:
            raise Found(described(wrong, argv, stdin, done))
        self.exits[name, done.code] += 1
        return done

    def remember(self, argv: list[str], stdin: bytes, out: str) -> str | None:
        """Take note of the payloads that were stored; return what is wrong with the ids that were printed."""
        if "--help" in argv or "-h" in argv:
            return None
        options = cli.command_parser("enqueue")[0].parse(argv[1:])
        if options.database != str(self.path):
            return None  # an `init` has made another one
        ids = out.split("\n")[:-1]
        ids = [json.loads(line)["id"] for line in ids] if options.json else [unescaped(id) for id in ids]
        if options.file is not None:
            data = stdin if options.file == "-" else Path(options.file).read_bytes()
            lines = [line for line in data.removeprefix(BOM).split(b"\n") if line.strip()]
            payloads = [json.loads(line).get("payload") for line in lines]
        else:
            source = "null" if options.payload is None else options.payload
            given = stdin if source == "-" else source.encode()
            given = Path(source[1:]).read_bytes() if source.startswith("@") else given
            payloads = [json.loads(given.removeprefix(BOM))]
        if len(ids) != len(payloads):
            return f"it printed {len(ids)} ids for {len(payloads)} jobs"
        for id, payload in zip(ids, payloads, strict=True):
            self.accepted.setdefault(id, payload)  # there already: by its idempotency key
            self.dice.ids = [*self.dice.ids[-50:], id]
        return None

    def step(self) -> None:
        """Run one command, whatever it be."""
        dice = self.dice
        self.steps += 1
        name = "enqueue" if self.steps % 2 else list(cli.COMMANDS)[self.steps // 2 % len(cli.COMMANDS)]
        argv = command_line(dice, name)
        if dice.chance(0.02):
            argv[:1] = [dice.random.choice((dice.text(), "help", "--version", "-h", dice.mangled(name, 1)))]
        many = "--file=-" in argv or ("--file" in argv and "-" in argv)
        stdin = dice.lines() if many else dice.json().encode("utf-8", "surrogatepass")
        encoding = dice.random.choice(("utf-8", "utf-8", "ascii", "latin-1"))
        self.must(argv, stdin, encoding, dice.chance(0.2))

    def enqueue_every_script(self, prefix: str) -> None:
        """Offer a job for each script, named in it all over; its type is one that the worker will know."""
        for letters in SCRIPTS:
            name = prefix + letters
            self.must(["enqueue", f"--database={self.path}", f"--type={name}", f"--id={name}", f"--trace={name}",
                       f"--payload={json.dumps({name: letters})}"])

    # -- what became of it -------------------------------------------------------------

    def jobs(self, encoding: str = "utf-8") -> list[dict[str, Any]]:
        """Return all jobs as `list --json` tells them."""
        done = self.must(["list", "--database", str(self.path), "--json"], encoding=encoding)
        return [json.loads(line) for line in done.out.split("\n")[:-1]]

    def check_lists(self) -> None:
        """Have all jobs listed; each payload must come back equal, in any encoding."""
        for encoding in ("utf-8", "ascii", "latin-1"):
            told = {job["id"]: job["payload"] for job in self.jobs(encoding)}
            if told != self.accepted:
                lost, new = self.accepted.keys() - told.keys(), told.keys() - self.accepted.keys()
                other = [id for id in told.keys() & self.accepted.keys() if told[id] != self.accepted[id]]
                raise Found(f"list --json in {encoding} is not what was accepted: it lacks {lost!a}, adds {new!a}, "
                            f"and has another payload for {other!a}")
        for encoding, terminal in (("utf-8", True), ("utf-8", False), ("latin-1", True)):
            argv = ["list", "--database", str(self.path), "--limit", "1000000"]
            lines = self.must(argv, encoding=encoding, terminal=terminal).out.count("\n")
            if lines != len(self.accepted) + bool(self.accepted):
                raise Found(f"list shows {lines} lines for {len(self.accepted)} jobs")

    def check_worker(self, log_format: str) -> None:
        """Let a real worker run what is due; every second type is known to it, and its result is the payload."""
        jobs = self.jobs()
        own = {job["type"] for job in jobs if job["type"] in ("echo", job["id"])}
        types = [*own, *sorted({job["type"] for job in jobs} - {"print", "sleep", "fail"} - own)[::2]]
        (self.dir / "types.json").write_text(json.dumps(types), "utf-8")
        (self.dir / "echoes.py").write_text(HANDLERS, "utf-8")
        queues = [f"--queue={name}" for name in sorted({job["queue"] for job in jobs})[:250]]
        argv = ["worker", "--database", str(self.path), "--workers", "1", "--drain", "--log-level", "debug",
                "--handlers", str(self.dir / "echoes.py"), "--log-format", log_format, *queues]
        done = run(*argv, timeout=120)
        wrong = None
        if done.returncode != 0 or "Traceback" in done.stderr:
            wrong = f"the worker exited with {done.returncode}"
        elif found := UNSEEN.search(done.stderr):
            wrong = f"the worker's log has {found[0]!a} in it"
        wrong = wrong or log_fault(done.stderr, log_format)
        for job in self.jobs():
            known = job["type"] in types
            if job["status"] == "running" or (known and job["attempts"] and job["status"] != "completed"):
                wrong = f"job {job['id']!a} of type {job['type']!a} is {job['status']}: {job['last_error']!a:.200}"
            elif known and job["status"] == "completed":
                self.echoed += 1
                if job["result"] != job["payload"]:
                    wrong = f"job {job['id']!a} has another result than its payload"
        if wrong is not None:
            raise Found(described(wrong, argv, b"", Done(done.returncode, done.stdout, done.stderr, None)))


def log_fault(text: str, log_format: str) -> str | None:
    """Return what is wrong with a worker's log; None: each line is one."""
    for line in text.split("\n")[:-1]:
        if log_format == "text":
            if not re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?:DEBUG|INFO|WARNING|ERROR) ", line):
                return f"the log has a line that is none: {line!a:.200}"
        elif not {"time", "level", "event", "message"} <= json.loads(line).keys():
            return f"the log has an incomplete line: {line!a:.200}"
    return None


def unescaped(id: str) -> str:
    """Return an id that was printed to a stream which could not hold all of its characters."""
    pattern = r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))"
    return re.sub(pattern, lambda found: chr(int(found[1] or found[2] or found[3], 16)), id)


def described(wrong: str, argv: list[str], stdin: bytes, done: Done) -> str:
    """Return a fault with all that is needed to see it again."""
    words = [word if len(word) < 2_000 else f"{word[:1_000]}({len(word)} characters){word[-50:]}" for word in argv]
    return (f"{wrong}\n  argv: {shlex.join(words).encode('ascii', 'backslashreplace').decode()}"
            f"\n  stdin: {stdin[:2_000]!r}\n  exit: {done.code}\n  stdout: {done.out[:500]!a}"
            f"\n  stderr: {done.err[-2_000:]!a}")


def history(seed: int, steps: int = STEPS) -> History:
    """Live through one history; raises `Found` with the seed in it."""
    here = os.getcwd()
    hasty = [pragma.replace("synchronous = FULL", "synchronous = OFF") for pragma in connection._PRAGMAS]
    with tempfile.TemporaryDirectory(prefix="jobqueue-fuzz-") as name, \
            mock.patch.object(connection, "_PRAGMAS", hasty):  # in this process nothing waits for the disk
        os.chdir(name)  # whatever is taken for a path is one in here
        try:
            past = History(seed, Path(name).resolve())
            for log_format in ("json", "text"):
                past.enqueue_every_script(log_format)
                for _ in range(steps // 2):
                    past.step()
                past.check_lists()
                past.check_worker(log_format)
                past.must(["retry-failed", "--database", str(past.path)])
                past.check_lists()
            fuzz_faces.compare(past.dice, steps // 2)
        except Exception as error:
            again = f"python -m tests.fuzz --seed {seed} --steps {steps}"
            raise Found(f"seed {seed}, see it again with: {again}\n{error}") from error
        finally:
            os.chdir(here)
    return past


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed random input to the commands.")
    parser.add_argument("--seconds", type=float, default=0, help="go on with the next seeds for so long (0)")
    parser.add_argument("--seed", type=int, default=1, help="of the first history (1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"commands in each history ({STEPS})")
    options = parser.parse_args()
    until, seed = time.monotonic() + options.seconds, options.seed
    exits: Counter[tuple[str, int | None]] = Counter()
    while seed == options.seed or time.monotonic() < until:
        try:
            exits += history(seed, options.steps).exits
        except Found as error:
            print(error, file=sys.stderr)
            return 1
        seed += 1
    print(f"seeds {options.seed} to {seed - 1}: nothing found")
    for (name, code), count in sorted(exits.items(), key=str):
        if name in cli.COMMANDS:
            print(f"{count:8} {name} exit {code}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
