"""The command line: options, exit codes, streams, and the five commands on a real file.

Most tests call `main` in this process with streams of their own; what depends on real ones
(closed pipes, full devices, signals, encodings) runs `python -m jobqueue`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import types
import unittest
from typing import Any, NamedTuple
from unittest import mock

import jobqueue
from jobqueue import cli, errors
from jobqueue.commands import enqueue, files, keep
from jobqueue.commands.common import Failure
from jobqueue.jobs import FIELDS
from jobqueue.queue import Queue
from tests.support import TempDirTestCase, command, environment, file_bytes, jobs, run

FORBIDDEN = {
    "asyncio", "contextlib", "dataclasses", "difflib", "http", "inspect", "logging", "multiprocessing", "random",
    "secrets", "shutil", "typing", "jobqueue.child", "jobqueue.handlers", "jobqueue.pool", "jobqueue.render",
    "jobqueue.worker",
}  # fmt: skip


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


class CliTestCase(TempDirTestCase):
    """Runs `main` in this process."""

    def main(self, *args: object, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with mock.patch.dict(os.environ, env or {}), \
                mock.patch.multiple(sys, stdin=io.TextIOWrapper(io.BytesIO(stdin)), stdout=out, stderr=err):
            if not env or "JOBQUEUE_DATABASE" not in env:
                os.environ.pop("JOBQUEUE_DATABASE", None)
            code = cli.main([str(arg) for arg in args])
        return Done(code, out.getvalue(), err.getvalue())

    def ok(self, *args: object, stdin: bytes = b"") -> str:
        """Run a command on `self.db`, expect success and silence on stderr, and return stdout."""
        done = self.main(*args, "--database", self.db, stdin=stdin)
        self.assertEqual((done.code, done.err), (0, ""))
        return done.out

    def refused(self, code: int, phrase: str, *args: object, stdin: bytes = b"") -> None:
        """Expect an exit code, nothing on stdout, and one sentence on stderr with `phrase` in it."""
        done = self.main(*args, stdin=stdin)
        self.assertEqual((done.code, done.out), (code, ""), done.err)
        self.assertRegex(done.err, r"\Ajobqueue: [^\n]+\n\Z")
        self.assertIn(phrase, done.err)

    def create(self) -> None:
        self.assertEqual(self.main("init", "--database", self.db).code, 0)

    def stored(self) -> list[dict[str, Any]]:
        """Return all jobs, oldest first."""
        lines = self.main("list", "--database", self.db, "--json").out.splitlines()
        return [json.loads(line) for line in reversed(lines)]

    def fail_all(self) -> None:
        """Claim whatever is due and fail it for good, if it may start only once."""
        with Queue(self.db) as queue:
            for job in queue.claim("w1", limit=100):
                assert job.lease_token is not None
                self.assertTrue(queue.fail(job.id, job.lease_token, "boom\x1b[31m"))


class UsageTest(CliTestCase):
    def test_what_is_wrong_is_said_in_one_sentence_with_exit_2(self) -> None:
        one, db = ("enqueue", "--type", "t"), ("--database", self.db)
        for phrase, args in (
            ("name a command", ()),
            ("name a command", ("",)),
            ("there is no command 'enqeue'; did you mean 'enqueue'?", ("enqeue",)),
            ("choose from init, enqueue, worker, list, show, ", ("xyzzy",)),
            ("there is no command 'hlep'", ("help", "hlep")),
            ("the command comes first", ("--database", "x", "list")),
            ("the command comes first", ("--verbose",)),
            ("use --database PATH, or set JOBQUEUE_DATABASE", ("list",)),
            ("use --database PATH, or set JOBQUEUE_DATABASE", ("init",)),
            ("use --database PATH, or set JOBQUEUE_DATABASE", ("worker",)),
            ("use --database PATH, or set JOBQUEUE_DATABASE", one),
            ("the path is empty", ("list", "--database", "")),
            ("there is no option '--databse'; did you mean '--database'?", ("list", "--databse", "x")),
            ("there is no option '--prio'", (*one, "--prio=3")),
            ("did you mean '--payload'?", ("enqueue", "--paylod", "{}")),
            ("there is no option '--version'", ("list", "--version")),
            ("there is no option '--allow-abbrev'", ("list", "--allow-abbrev")),
            ("there is no option '--data'; did you mean '--database'?", ("list", "--data", "x")),
            ("no place for the argument 'hello'", (*one, "hello")),
            (r"no place for the argument '\x1b[2J'", (*one, "\x1b[2J")),
            ("--priority needs a value", (*one, "--priority")),
            ("--id needs a value, written --id=VALUE if it begins with a dash", (*one, "--id", "-x")),
            ("--drain: ignored explicit argument", ("worker", "--drain=1")),
            ("not valid UTF-8", ("list", "--type", "\udcff")),
            ("not valid UTF-8", ("\udcff",)),
            ("not valid UTF-8", (*one, "--id", "a\udc80")),
            ("give --type TYPE for one job, or --file FILE for many", ("enqueue", *db)),
            ("give --type TYPE", ("enqueue", "--payload", "1", *db)),
            ("leave out --type, --max-attempts, --depends-on",
             ("enqueue", "--file", "x", "--max-attempts", "2", "--depends-on", "1", "--type", "t", *db)),
            ("--priority: must be a whole number, not '1.5'", (*one, "--priority", "1.5")),
            ("--priority: must be a whole number, not '1_0'", (*one, "--priority", "1_0")),
            (r"--priority: must be a whole number, not '\u0663'", (*one, "--priority", "\u0663")),
            ("--priority: must be a whole number, not ''", (*one, "--priority", "")),
            ("--priority: must be a whole number, not '999", (*one, "--priority", "9" * 100_000)),
            ("priority must lie between", (*one, "--priority", str(2**63))),
            ("max_attempts must lie between", (*one, "--max-attempts", "0")),
            ("--status: there is no status 'faild'; did you mean 'failed'?", ("list", "--status", "faild")),
            ("choose from pending, running, retrying, completed, failed, canceled", ("list", "--status", "")),
            ("--limit: must be a whole number from 1", ("list", "--limit", "0")),
            ("--limit: must be a whole number from 1", ("list", "--limit", "-1")),
            ("--limit: must be a whole number from 1", ("list", "--limit", "1e3")),
        ):  # fmt: skip
            with self.subTest(args=[str(arg)[:40] for arg in args]):
                self.refused(2, phrase, *args)
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_worker_options(self) -> None:
        for phrase, args in (
            ("--workers: must be a whole number from 1 to 1,024", ("--workers", "0")),
            ("--workers: must be a whole number from 1 to 1,024", ("--workers", "1025")),
            ("--workers: must be a whole number from 1 to 1,024", ("--workers", "two")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "0")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "-1")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "0.49")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "nan")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "inf")),
            ("--lease-seconds: must be a number from 0.5", ("--lease-seconds", "1e3")),
            ("--grace-seconds: must be a number from 0", ("--grace-seconds", "-1")),
            ("--grace-seconds: must be a number from 0", ("--grace-seconds", "9" * 20)),
            ("--max-jobs-per-child: must be a whole number from 1", ("--max-jobs-per-child", "0")),
            ("--default-timeout", ("--default-timeout", "soon")),
            ("--default-timeout must be at least", ("--default-timeout", "0")),
            ("--queue must have 1 to 255 characters", ("--queue", "")),
            ("--log-format: there is no log format 'xml'", ("--log-format", "xml")),
            ("did you mean 'warning'?", ("--log-level", "warn1ng")),
        ):  # fmt: skip
            with self.subTest(args=args):
                self.refused(2, phrase, "worker", "--database", self.db, *args)

    def test_values_on_the_border_reach_the_worker(self) -> None:
        for option, value, name, wanted in (
            ("--workers", "1", "workers", 1), ("--workers", "1024", "workers", 1024),
            ("--lease-seconds", "0.5", "lease_seconds", 0.5), ("--grace-seconds", "0", "grace_seconds", 0),
            ("--default-timeout", "1h30m", "default_timeout_ms", 5_400_000),
            ("--max-jobs-per-child", "1", "max_jobs_per_child", 1), ("--drain", None, "drain", True),
            ("--log-format", "json", "log_format", "json"), ("--log-level", "debug", "log_level", "debug"),
            ("--allow-shared", None, "allow_shared", True),
            ("--purge-after", "30d", "purge_after_ms", 2_592_000_000),
        ):  # fmt: skip
            with self.subTest(option=option, value=value):
                code, given = self.worker(option, *([value] if value else []))
                self.assertEqual(code, 7)
                self.assertEqual(given[name], wanted)

    def test_what_the_worker_gets_by_default_and_by_repetition(self) -> None:
        _, given = self.worker()
        self.assertGreaterEqual(given.pop("workers"), 1)
        self.assertEqual(given, {
            "lease_seconds": 30, "drain": False, "grace_seconds": 30, "handlers": [], "queues": ["default"],
            "default_timeout_ms": None, "max_jobs_per_child": None, "log_format": "text", "log_level": "info",
            "allow_shared": False, "purge_after_ms": None,
        })
        _, given = self.worker(
            "--queue", "b", "--queue", "a", "--queue", "b", "--handlers", "./x.py", "--handlers", "y.z",
        )
        self.assertEqual((given["queues"], given["handlers"]), (["b", "a"], ["./x.py", "y.z"]))

    def test_ctrl_c_before_the_worker_listens_is_a_stop_like_any_other(self) -> None:
        stand_in = types.ModuleType("jobqueue.worker")
        stand_in.run = mock.Mock(side_effect=KeyboardInterrupt)  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules, {"jobqueue.worker": stand_in}):
            self.assertEqual(self.main("worker", "--database", self.db), (0, "", ""))

    def worker(self, *args: str) -> tuple[int, dict[str, Any]]:
        """Run `worker` with a stand-in for the worker that returns 7; return exit code and what it was given."""
        stand_in = types.ModuleType("jobqueue.worker")
        stand_in.run = mock.Mock(return_value=7)  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules, {"jobqueue.worker": stand_in}):
            done = self.main("worker", "--database", self.db, *args)
        self.assertEqual(stand_in.run.call_args.args, (str(self.db),))
        return done.code, dict(stand_in.run.call_args.kwargs)


class HelpTest(CliTestCase):
    def test_every_command_shows_examples_first_and_all_its_options(self) -> None:
        for name in cli.COMMANDS:
            for args in ((name, "--help"), (name, "-h"), ("help", name)):
                with self.subTest(args=args):
                    done = self.main(*args)
                    self.assertEqual((done.code, done.err), (0, ""))
                    self.assertLess(done.out.index("examples:"), done.out.index("options:"))
                    self.assertIn(f"python -m jobqueue {name} ", done.out)
                    for option in cli.command_parser(name)[0]._option_string_actions:
                        self.assertIn(option, done.out)

    def test_help_fits_a_terminal(self) -> None:
        for args in (["--help"], *([name, "--help"] for name in cli.COMMANDS)):
            prose = [line for line in self.main(*args).out.splitlines() if "python -m jobqueue" not in line]
            with self.subTest(args=args):
                self.assertLessEqual(max(map(len, prose)), 82)

    def test_the_top_names_all_commands(self) -> None:
        for args in (("--help",), ("-h",), ("help",)):
            done = self.main(*args)
            self.assertEqual((done.code, done.err), (0, ""))
            for name in cli.COMMANDS:
                self.assertIn(f"\n  {name} ", done.out)

    def test_version(self) -> None:
        self.assertEqual(self.main("--version"), (0, f"jobqueue {jobqueue.__version__}\n", ""))

    def test_the_examples_parse(self) -> None:
        import shlex

        found = 0
        for name in ["--help", *cli.COMMANDS]:
            for line in self.main("help", *([] if name == "--help" else [name])).out.splitlines():
                match = re.search(r"python -m jobqueue ([a-z-]+) (-[^|)>]*?)(?:   .*|[|)>].*)?$", line)
                if not match or "[options]" in line:
                    continue
                with self.subTest(line=line):
                    found += 1
                    cli.command_parser(match[1])[0].parse(shlex.split(match[2]))
        self.assertGreater(found, 15)

    def test_enqueue_has_an_option_for_each_field_of_a_job(self) -> None:
        parser, _ = cli.command_parser("enqueue")
        names = {action.dest for action in parser._actions}
        self.assertEqual(FIELDS - names, set())
        self.assertEqual(names - FIELDS, {"help", "database", "allow_shared", "file", "json", "quiet"})


class ExitCodeTest(CliTestCase):
    def ends(self, error: BaseException, env: dict[str, str] | None = None) -> Done:
        def run(options: argparse.Namespace) -> int:
            raise error

        entry = ("", lambda parser: None, run)
        with mock.patch.dict(keep.COMMANDS, {"init": entry}):
            return self.main("init", env=env)

    def test_each_error_has_its_code_and_its_sentence(self) -> None:
        for error, code, sentence in (
            (errors.InvalidJob("type is bad"), 2, "type is bad"),
            (errors.DependencyCycle("a ring", ["a", "a"]), 2, "a ring"),
            (errors.HandlerLoadError("no module"), 2, "no module"),
            (errors.DatabaseBusy("still locked"), 75, "still locked"),
            (errors.DatabaseError("not ours"), 1, "not ours"),
            (errors.UnknownJobError("17"), 1, "there is no job '17'"),
            (errors.JobQueueError("hm"), 1, "hm"),
            (Failure("did not work"), 1, "did not work"),
            (OSError(28, "No space left on device"), 1, "No space left on device"),
            (PermissionError(13, "Permission denied", "x.db"), 1, "x.db: Permission denied"),
            (ZeroDivisionError("x\ny"), 1,
             r"internal error, ZeroDivisionError: x\ny; with JOBQUEUE_DEBUG=1 it shows where"),
            (MemoryError(), 1, "internal error, MemoryError: ; with JOBQUEUE_DEBUG=1 it shows where"),
            (errors.JobQueueError("a\x1b[2J\u202e\nb"), 1, r"a\x1b[2J\u202e\nb"),
        ):  # fmt: skip
            with self.subTest(error=error):
                self.assertEqual(self.ends(error), (code, "", f"jobqueue: {sentence}\n"))

    def test_interruption_and_a_closed_pipe_are_silent(self) -> None:
        self.assertEqual(self.ends(KeyboardInterrupt()), (130, "", ""))
        self.assertEqual(self.ends(BrokenPipeError(32, "Broken pipe")), (0, "", ""))

    def test_a_defect_shows_where_on_request(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            self.ends(ZeroDivisionError(), {"JOBQUEUE_DEBUG": "1"})

    def test_a_full_device_is_a_failure(self) -> None:
        class Full(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError(28, "No space left on device")

        err = io.StringIO()
        with mock.patch.multiple(sys, stdout=Full(), stderr=err):
            self.assertEqual(cli.main(["--version"]), 1)
        self.assertEqual(err.getvalue(), "jobqueue: cannot write to standard output: No space left on device\n")


class InitTest(CliTestCase):
    def test_creates_a_private_file_and_says_so(self) -> None:
        self.assertEqual(self.main("init", "--database", self.db), (0, "", f"jobqueue: created {self.db}\n"))
        self.assertEqual(stat.S_IMODE(self.db.stat().st_mode), 0o600)

    def test_again_changes_nothing(self) -> None:
        self.create()
        before = file_bytes(self.db)
        done = self.main("init", "--database", self.db)
        self.assertEqual(done, (0, "", f"jobqueue: {self.db} is already a queue; nothing changed\n"))
        self.assertEqual(file_bytes(self.db), before)

    def test_refuses_a_foreign_file(self) -> None:
        self.db.write_text("dear diary")
        self.refused(1, str(self.db), "init", "--database", self.db)
        self.assertEqual(self.db.read_text(), "dear diary")

    def test_refuses_a_place_that_does_not_exist(self) -> None:
        self.refused(1, "nowhere", "init", "--database", self.dir / "nowhere" / "jobs.db")
        self.refused(1, str(self.dir), "init", "--database", self.dir)

    def test_the_environment_names_the_database_and_the_option_wins(self) -> None:
        env = {"JOBQUEUE_DATABASE": str(self.dir / "env.db")}
        self.assertEqual(self.main("init", env=env).code, 0)
        self.assertEqual(self.main("init", "--database", self.db, env=env).code, 0)
        self.assertTrue((self.dir / "env.db").exists() and self.db.exists())
        self.assertEqual(self.main("list", env={"JOBQUEUE_DATABASE": ""}).code, 2)

    def test_strange_paths(self) -> None:
        for name in ("a b.db", "q?mode=memory", "x#y", "100%41", "日本.db", "file:x", "-dash.db"):
            with self.subTest(name=name):
                path = self.dir / name
                self.assertEqual(self.main("init", "--database", path).code, 0)
                self.assertTrue(path.exists())
                self.assertEqual(self.main("enqueue", "--type", "t", f"--database={path}").out, "1\n")
        for name in (":memory:", "-dash.db"):
            with self.subTest(name=name):
                done = run("init", f"--database={name}", cwd=self.dir)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue((self.dir / name).exists())

    def test_every_other_command_names_init_and_creates_nothing(self) -> None:
        for args in (
            ("enqueue", "--type", "t"), ("list",), ("list", "--json"), ("retry-failed",), ("worker", "--drain"),
        ):  # fmt: skip
            with self.subTest(args=args):
                self.refused(1, "init", *args, "--database", self.db)
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_a_path_that_no_file_can_have(self) -> None:
        for path in ("a\0b", "x" * 5_000):
            for args in (("init",), ("list",), ("enqueue", "--type", "t"), ("worker", "--drain")):
                with self.subTest(path=path[:3], args=args):
                    done = self.main(*args, "--database", path)
                    self.assertIn(done.code, (1, 2))
                    self.assertNotIn("internal error", done.err)


class EnqueueTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.create()

    def test_the_id_alone_is_printed(self) -> None:
        self.assertEqual(self.ok("enqueue", "--type", "t"), "1\n")
        self.assertEqual(self.ok("enqueue", "--type", "t", "--id", "my id"), "my id\n")
        self.assertEqual(json.loads(self.ok("enqueue", "--type", "t", "--json")), {"id": "3", "created": True})

    def test_every_option_arrives(self) -> None:
        self.ok("enqueue", "--type", "t", "--id", "parent")
        self.ok("enqueue", "--type", "t2", "--payload", '{"a":[1,"ü"]}', "--queue", "q", "--id", "x",
                "--priority", "-7", "--max-attempts", "9", "--idempotency-key", "k",
                "--run-at", "2030-01-31T08:00:00+02:00", "--timeout", "1m30s",
                "--depends-on", "parent", "--depends-on", "parent", "--trace", "tr")
        job = self.stored()[-1]
        self.assertEqual({name: job[name] for name in FIELDS - {"delay", "timeout", "depends_on"}}, {
            "type": "t2", "payload": {"a": [1, "ü"]}, "queue": "q", "id": "x", "priority": -7, "max_attempts": 9,
            "idempotency_key": "k", "run_at": "2030-01-31T06:00:00.000Z", "trace": "tr",
        })
        self.assertEqual((job["timeout_seconds"], job["depends_on"]), (90, ["parent"]))

    def test_defaults(self) -> None:
        self.ok("enqueue", "--type", "t")
        (job,) = self.stored()
        names = ("payload", "queue", "priority", "max_attempts", "idempotency_key", "timeout_seconds")
        self.assertEqual([job[name] for name in names], [None, "default", 0, 3, None, None])
        self.assertEqual(job["run_at"], job["created_at"])

    def test_delay(self) -> None:
        from jobqueue.times import parse_time_ms

        for text, ms in (("90", 90_000), ("5m", 300_000), ("2h", 7_200_000), ("0", 0)):
            self.ok("enqueue", "--type", "t", "--delay", text)
            job = self.stored()[-1]
            with self.subTest(text=text):
                self.assertEqual(parse_time_ms(job["run_at"]) - parse_time_ms(job["created_at"]), ms)

    def test_payload_from_stdin_and_from_a_file(self) -> None:
        path = self.dir / "p.json"
        for data in (b'{"a": "\xc3\xbc"}', b'\xef\xbb\xbf {"a": "\xc3\xbc"}\n'):
            path.write_bytes(data)
            self.ok("enqueue", "--type", "t", "--payload", f"@{path}")
            self.ok("enqueue", "--type", "t", "--payload", "-", stdin=data)
        self.assertEqual([job["payload"] for job in self.stored()], [{"a": "ü"}] * 4)

    def test_negative_numbers_are_values(self) -> None:
        self.ok("enqueue", "--type", "t", "--payload", "-1", "--priority", "-5")
        self.ok("enqueue", "--type", "t", "--payload=-1e5")
        self.assertEqual([job["payload"] for job in self.stored()], [-1, -1e5])

    def test_the_same_key_again(self) -> None:
        one = ("enqueue", "--type", "t", "--idempotency-key", "k", "--database", self.db)
        self.assertEqual(self.main(*one), (0, "1\n", ""))
        done = self.main(*one)
        self.assertEqual((done.code, done.out), (0, "1\n"))
        self.assertRegex(done.err, r"\Ajobqueue: [^\n]*'k'[^\n]*\n\Z")
        done = self.main(*one, "--json")
        self.assertEqual(json.loads(done.out), {"id": "1", "created": False})
        self.assertEqual(len(self.stored()), 1)

    def test_invalid_input_exits_2_and_changes_nothing(self) -> None:
        self.ok("enqueue", "--type", "t")
        before = file_bytes(self.db)
        missing = self.dir / "missing"
        for code, phrase, args in (
            (2, "payload is not JSON", ("--payload", "{message:hello}")),
            (2, "payload is not JSON", ("--payload", "")),
            (2, "payload is not JSON", ("--payload", "NaN")),
            (2, "payload is not JSON", ("--payload", "[Infinity]")),
            (2, "payload is not JSON", ("--payload", "1e999")),
            (2, "payload", ("--payload", "9" * 5_000)),
            (2, "surrogate", ("--payload", r'"\ud800"')),
            (2, "64 deep", ("--payload", "[" * 100_000)),
            (2, "64 deep", ("--payload", "[" * 65 + "]" * 65)),
            (2, "1,048,576", ("--payload", "-")),
            (1, "cannot read", ("--payload", f"@{missing}")),
            (1, "cannot read", ("--payload", f"@{self.dir}")),
            (1, "cannot read", ("--payload", "@")),
            (2, "type must have", ("--type", "")),
            (2, "type must have", ("--type", "x" * 256)),
            (2, "control characters", ("--type", "a\x1bb")),
            (2, "id must have", ("--id", "")),
            (2, "control characters", ("--id", "a\nb")),
            (2, "idempotency_key must have", ("--idempotency-key", "")),
            (2, "queue must have", ("--queue", "x" * 256)),
            (2, "run_at", ("--run-at", "2030-01-31T08:00:00")),
            (2, "run_at", ("--run-at", "tomorrow")),
            (2, "run_at", ("--run-at", "2030-02-30T08:00:00Z")),
            (2, "delay", ("--delay", "-5")),
            (2, "delay", ("--delay", "soon")),
            (2, "not both", ("--delay", "5", "--run-at", "2030-01-31T08:00:00Z")),
            (2, "timeout", ("--timeout", "0")),
            (2, "nobody", ("--depends-on", "nobody")),
            (2, "depends_on", ("--depends-on", "")),
            (2, "1", ("--id", "1")),
        ):  # fmt: skip
            with self.subTest(args=[arg[:40] for arg in args]):
                self.refused(code, phrase, "enqueue", "--type", "t", *args, "--database", self.db,
                             stdin=b'"' + b"x" * 2**20 + b'"')
        self.assertEqual(file_bytes(self.db), before)

    def test_a_payload_that_is_not_text_or_too_large_names_its_source(self) -> None:
        path = self.dir / "p.json"
        path.write_bytes(b'"\xff"')
        self.refused(2, f"{path}: byte 2 is not UTF-8", "enqueue", "--type", "t", "--payload", f"@{path}",
                     "--database", self.db)
        self.refused(2, "standard input: payload is not JSON", "enqueue", "--type", "t", "--payload", "-",
                     "--database", self.db)
        self.refused(2, "standard input holds more than", "enqueue", "--type", "t", "--payload", "-",
                     "--database", self.db, stdin=b" " * (enqueue.MAX_LINE_BYTES + 1))


class EnqueueFileTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.create()
        self.file = self.dir / "jobs.jsonl"

    def enqueue(self, data: bytes, *args: str) -> Done:
        self.file.write_bytes(data)
        return self.main("enqueue", "--file", self.file, "--database", self.db, *args)

    def test_ids_come_in_order(self) -> None:
        done = self.enqueue(b'{"type":"a"}\n{"type":"b","id":"x"}\n{"type":"c"}\n')
        self.assertEqual(done.code, 0, done.err)
        self.assertEqual((done.out.splitlines()[1], done.err), ("x", ""))
        self.assertEqual([job["type"] for job in self.stored()], ["a", "b", "c"])
        self.assertEqual(done.out.splitlines(), [job["id"] for job in self.stored()])

    def test_all_fields(self) -> None:
        done = self.enqueue(
            b'{"type":"t","payload":{"\xc3\xbc":1},"queue":"q","id":"p","priority":5,"max_attempts":1,'
            b'"idempotency_key":"k","run_at":"2030-01-31T08:00:00Z","timeout":"5m","trace":"x"}\n'
            b'{"type":"t","delay":1.5,"depends_on":["p"],"timeout":2}'
        )
        self.assertEqual(done.code, 0, done.err)
        first, second = self.stored()
        self.assertEqual((first["payload"], first["run_at"], first["timeout_seconds"]),
                         ({"ü": 1}, "2030-01-31T08:00:00.000Z", 300))
        self.assertEqual((second["depends_on"], second["timeout_seconds"]), (["p"], 2))

    def test_stdin_blank_lines_crlf_and_byte_order_mark(self) -> None:
        out = self.ok("enqueue", "--file", "-", stdin=b'\xef\xbb\xbf{"type":"a"}\r\n\r\n   \n{"type":"b"}')
        self.assertEqual(out, "1\n2\n")

    def test_json(self) -> None:
        done = self.enqueue(b'{"type":"a"}\n{"type":"b","id":"\xc3\xbc"}\n', "--json")
        self.assertEqual([json.loads(line)["id"] for line in done.out.splitlines()], ["1", "ü"])

    def test_keys_seen_before_give_the_first_id(self) -> None:
        line = b'{"type":"a","idempotency_key":"k"}\n'
        self.assertEqual(self.enqueue(line * 2).out, "1\n1\n")
        self.assertEqual(self.enqueue(line).out, "1\n")
        self.assertEqual(len(self.stored()), 1)

    def test_nothing_to_do_is_said(self) -> None:
        done = self.enqueue(b"\n\n")
        self.assertEqual((done.code, done.out), (0, ""))
        self.assertIn("holds no job", done.err)

    def test_an_error_names_its_line_and_nothing_is_stored(self) -> None:
        good = b'{"type":"a"}\n'
        before = file_bytes(self.db)
        for number, phrase, data in (
            (2, "Expecting", good + b"{type:a}\n" + good),
            (4, "the line is not JSON", good + b"\n\n" + b'{"type":'),
            (1, "must be an object", b"[]\n"),
            (1, "must be an object", b"null\n"),
            (3, "'type' is missing", good * 2 + b"{}\n"),
            (2, "unknown key 'typ'", good + b'{"typ":"a"}\n'),
            (2, "type must", good + b'{"type":null}\n'),
            (2, "type must", good + b'{"type":["a"]}\n'),
            (2, "byte 10 is not UTF-8", good + b'{"type":"\xff"}\n'),
            (2, "surrogate", good + b'{"type":"t","payload":"\\ud800"}\n'),
            (2, "surrogate", good + b'{"type":"t","\\ud800":1}\n'.replace(b'"\\ud800":1', b'"id":"\\ud800"')),
            (2, "NaN", good + b'{"type":"t","payload":NaN}\n'),
            (2, "deep", good + b'{"type":"t","payload":' + b"[" * 100_000),
            (2, "deep", good + b'{"type":"t","payload":' + b"[" * 65 + b"]" * 65 + b"}"),
            (2, "1,048,576", good + b'{"type":"t","payload":"' + b"x" * 2**20 + b'"}'),
            (2, "longer than 8,388,608 bytes", good + b'{"type":"t","payload":"' + b"x" * 2**23 + b'"}\n' + good),
            (2, "max_attempts", good + b'{"type":"t","max_attempts":0}'),
            (2, "priority", good + b'{"type":"t","priority":true}'),
            (2, "priority", good + b'{"type":"t","priority":' + b"9" * 30 + b"}"),
            (2, "depends_on", good + b'{"type":"t","depends_on":"a"}'),
            (2, "nobody", good + b'{"type":"t","depends_on":["nobody"]}'),
            (3, "x", b'{"type":"t","id":"x"}\n\n{"type":"t","id":"x"}'),
            (2, "not both", good + b'{"type":"t","delay":1,"run_at":"2030-01-31T08:00:00Z"}'),
        ):  # fmt: skip
            with self.subTest(data=data[:60]):
                done = self.enqueue(data)
                self.assertEqual((done.code, done.out), (2, ""), done.err)
                self.assertRegex(done.err, rf"\Ajobqueue: {re.escape(str(self.file))}, line {number}: [^\n]+\n\Z")
                self.assertIn(phrase, done.err)
                self.assertIn("nothing was queued", done.err)
        self.assertEqual(file_bytes(self.db), before)

    def test_a_ring_of_dependencies_is_refused(self) -> None:
        done = self.enqueue(b'{"type":"t","id":"a","depends_on":["b"]}\n{"type":"t","id":"b","depends_on":["a"]}\n')
        self.assertEqual((done.code, done.out), (2, ""))
        self.assertEqual(self.stored(), [])

    def test_a_payload_as_deep_as_allowed_passes_in_a_line(self) -> None:
        done = self.enqueue(b'{"type":"t","payload":' + b"[" * 64 + b"]" * 64 + b"}")
        self.assertEqual((done.code, done.out), (0, "1\n"), done.err)

    def test_a_file_that_cannot_be_read_is_a_failure_that_names_it(self) -> None:
        for path in (self.dir / "missing", self.dir):
            self.refused(1, f"cannot read {path}", "enqueue", "--file", path, "--database", self.db)

    def test_a_file_that_breaks_off_stores_nothing(self) -> None:
        class Breaking(io.BytesIO):
            def readline(self, size: int | None = -1, /) -> bytes:
                line = super().readline(size)
                if not line:
                    raise OSError(5, "Input/output error")
                return line

        with mock.patch.object(files, "open", create=True, return_value=Breaking(b'{"type":"a"}\n')):
            done = self.main("enqueue", "--file", "x", "--database", self.db)
        self.assertEqual(done, (1, "", "jobqueue: cannot read x: Input/output error\n"))
        self.assertEqual(self.stored(), [])

    def test_memory_does_not_grow_with_the_file(self) -> None:
        def peak_kb(lines: int) -> int:
            code = (
                "import resource, sys; from jobqueue.cli import main; code = main(sys.argv[1:])\n"
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
            )
            argv = [sys.executable, "-c", code, "enqueue", "--file", "-", "--database", str(self.db)]
            line = b'{"type":"t","payload":"%s"}\n' % (b"x" * 500)
            done = subprocess.run(argv, input=line * lines, env=environment(), capture_output=True, timeout=60)
            self.assertEqual((done.returncode, done.stdout.count(b"\n")), (0, lines), done.stderr)
            return int(done.stderr) // (1024 if sys.platform == "darwin" else 1)

        self.assertLess(peak_kb(60_000), peak_kb(2_000) + 12_000)


class ListTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.create()

    def test_an_empty_list_says_so_beside_stdout(self) -> None:
        for args in ((), ("--json",)):
            done = self.main("list", "--database", self.db, *args)
            self.assertEqual(done, (0, "", "jobqueue: there are no jobs\n"))
        self.ok("enqueue", "--type", "t")
        for filter in (("--type", "x"), ("--queue", "x"), ("--status", "failed")):
            done = self.main("list", "--database", self.db, *filter)
            self.assertEqual(done, (0, "", "jobqueue: no job matches\n"))

    def test_newest_first(self) -> None:
        for kind in "abc":
            self.ok("enqueue", "--type", kind)
        lines = self.ok("list").splitlines()
        self.assertEqual(lines[0].split(), ["ID", "TYPE", "STATUS", "PRIO", "TRIES", "CREATED", "DETAIL"])
        self.assertEqual([line.split()[:5] for line in lines[1:]], [
            ["3", "c", "pending", "0", "0/3"], ["2", "b", "pending", "0", "0/3"], ["1", "a", "pending", "0", "0/3"],
        ])

    def test_filters(self) -> None:
        self.ok("enqueue", "--type", "a", "--max-attempts", "1")
        self.fail_all()
        self.ok("enqueue", "--type", "b")
        self.ok("enqueue", "--type", "b", "--queue", "q")
        for args, wanted in (
            (("--type", "b"), ["3", "2"]), (("--queue", "q"), ["3"]), (("--status", "failed"), ["1"]),
            (("--type", "b", "--queue", "default"), ["2"]), (("--limit", "2"), ["3", "2"]), ((), ["3", "2", "1"]),
        ):  # fmt: skip
            with self.subTest(args=args):
                done = self.main("list", "--database", self.db, "--json", *args)
                self.assertEqual([json.loads(line)["id"] for line in done.out.splitlines()], wanted)
                self.assertEqual(done.err, "")
                done = self.main("list", "--database", self.db, *args)
                self.assertEqual([line.split()[0] for line in done.out.splitlines()[1:]], wanted)

    def test_the_limit_is_100_for_people_and_said(self) -> None:
        self.ok("enqueue", "--file", "-", stdin=b'{"type":"t"}\n' * 100)
        self.assertEqual(self.ok("list").count("\n"), 101)
        self.ok("enqueue", "--type", "t")
        done = self.main("list", "--database", self.db)
        self.assertEqual((done.code, done.out.count("\n")), (0, 101))
        self.assertEqual(done.err, "jobqueue: showing the newest 100; --limit N shows more\n")
        self.assertEqual(self.ok("list", "--limit", "101").count("\n"), 102)
        self.assertEqual(self.ok("list", "--json").count("\n"), 101)

    def test_json_has_stable_names_and_control_characters_never_come_out(self) -> None:
        self.ok("enqueue", "--type", "t", "--max-attempts", "1", "--payload", r'"\u001b[2J\u009b\u202e\u2028ü"')
        self.fail_all()
        line = self.ok("list", "--json")
        job = json.loads(line)
        self.assertEqual(" ".join(job), (
            "id queue type payload priority created_at run_at status attempts max_attempts idempotency_key "
            "last_error lease_owner lease_expires_at started_at finished_at result depends_on timeout_seconds "
            "progress trace"
        ))
        self.assertEqual((job["payload"], job["last_error"]), ("\x1b[2J\x9b\u202e\u2028ü", "boom\x1b[31m"))
        self.assertTrue(line.removesuffix("\n").isprintable())
        self.assertIn("ü", line)
        table = self.ok("list")
        self.assertIn(r"boom\x1b[31m", table)
        self.assertTrue(table.replace("\n", "").isprintable())


class RetryFailedTest(CliTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.create()
        for kind in "aab":
            self.ok("enqueue", "--type", kind, "--max-attempts", "1")
        self.fail_all()
        self.ok("enqueue", "--type", "a")

    def retry(self, *args: str) -> Done:
        return self.main("retry-failed", "--database", self.db, *args)

    def statuses(self) -> list[str]:
        return [job["status"] for job in self.stored()]

    def test_all(self) -> None:
        self.assertEqual(self.retry(), (0, "3\n", "jobqueue: 3 failed jobs are pending again\n"))
        self.assertEqual([(job["status"], job["attempts"]) for job in self.stored()], [("pending", 0)] * 4)
        self.assertEqual(self.retry(), (0, "0\n", "jobqueue: no failed job matches; nothing changed\n"))

    def test_a_type(self) -> None:
        self.assertEqual(self.retry("--type", "b"), (0, "1\n", "jobqueue: 1 failed job is pending again\n"))
        self.assertEqual(self.statuses(), ["failed", "failed", "pending", "pending"])

    def test_an_id(self) -> None:
        self.assertEqual(self.retry("--id", "2").out, "1\n")
        self.assertEqual(self.statuses(), ["failed", "pending", "failed", "pending"])
        self.refused(1, "there is no job '99'", "retry-failed", "--database", self.db, "--id", "99")

    def test_a_job_that_has_not_failed_is_left_alone(self) -> None:
        before = self.stored()
        done = self.retry("--id", "4")
        self.assertEqual((done.code, done.out), (0, "0\n"))
        self.assertEqual(self.stored(), before)

    def test_a_dry_run_changes_nothing(self) -> None:
        before = self.stored()
        done = self.retry("--dry-run")
        self.assertEqual(done, (0, "3\n", "jobqueue: 3 failed jobs would be pending again\n"))
        done = self.retry("--dry-run", "--type", "a", "--json")
        self.assertEqual(json.loads(done.out), {"retried": 2, "dry_run": True})
        self.assertEqual(self.stored(), before)

    def test_json(self) -> None:
        self.assertEqual(json.loads(self.retry("--json").out), {"retried": 3, "dry_run": False})


class ProcessTest(TempDirTestCase):
    """What only a real process shows."""

    def setUp(self) -> None:
        super().setUp()
        self.assertEqual(run("init", "--database", self.db).returncode, 0)

    def fill(self, count: int, line: str = '{"type":"t","payload":"x"}') -> None:
        done = run("enqueue", "--database", self.db, "--file", "-", input=f"{line}\n" * count)
        self.assertEqual((done.returncode, done.stdout.count("\n")), (0, count), done.stderr)

    def test_a_day_with_it(self) -> None:
        done = run("enqueue", "--database", self.db, "--type", "print", "--payload", '{"message":"hello"}')
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "1\n", ""))
        done = run("list", env={"JOBQUEUE_DATABASE": str(self.db)})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("print", done.stdout)

    def test_a_worker_does_what_is_due(self) -> None:
        run("enqueue", "--database", self.db, "--type", "print", "--payload", '{"message":"hello"}')
        run("enqueue", "--database", self.db, "--type", "print", "--payload", "{}", "--max-attempts", "1")
        done = run("worker", "--database", self.db, "--workers", "1", "--drain", "--log-level", "error")
        self.assertEqual((done.returncode, done.stdout), (0, "hello\n"), done.stderr)
        self.assertEqual([job["status"] for job in jobs(self.db)], ["failed", "completed"])

    def test_looking_needs_no_write_lock(self) -> None:
        self.fill(1)
        connection = sqlite3.connect(self.db, isolation_level=None)
        self.addCleanup(connection.close)
        connection.execute("BEGIN IMMEDIATE")
        for args in (("list",), ("list", "--json"), ("retry-failed", "--dry-run"), ("init",)):
            with self.subTest(args=args):
                done = run(*args, "--database", self.db)
                self.assertEqual(done.returncode, 0, done.stderr)
        connection.execute("ROLLBACK")

    def test_a_closed_pipe_is_silent(self) -> None:
        self.fill(3_000)
        for args in (("list", "--json"), ("list", "--limit", "3000")):
            with self.subTest(args=args), subprocess.Popen(
                command(*args, "--database", self.db), env=environment(),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ) as process:
                assert process.stdout is not None and process.stderr is not None
                process.stdout.readline()
                process.stdout.close()
                self.assertEqual(process.stderr.read(), b"")
                self.assertEqual(process.wait(30), 0)

    def test_a_reader_that_has_gone_before_is_silent(self) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        for args in (("--help",), ("enqueue", "--help"), ("enqueue", "--type", "t", "--database", str(self.db))):
            done = subprocess.run(command(*args), env=environment({"PYTHONUNBUFFERED": None}), stdout=write_end,
                                  stderr=subprocess.PIPE, timeout=30)
            with self.subTest(args=args):
                self.assertEqual((done.returncode, done.stderr), (0, b""))
        os.close(write_end)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_full_device_is_said_and_that_the_job_is_queued(self) -> None:
        cannot = b"cannot write to standard output"
        for args, phrase in (
            (("list",), cannot), (("list", "--json"), cannot), (("--version",), cannot),
            (("list", "--help"), cannot),
            (("enqueue", "--type", "t"), b"job '2' is queued, but: " + cannot),
        ):  # fmt: skip
            if args == ("list",):
                self.fill(1)
            for unbuffered in (None, "1"):
                if unbuffered and args[0] == "enqueue":
                    continue
                argv = command(*args) + ([] if args[0] == "--version" else ["--database", str(self.db)])
                with self.subTest(args=args, unbuffered=unbuffered), open("/dev/full", "wb") as full:
                    done = subprocess.run(argv, env=environment({"PYTHONUNBUFFERED": unbuffered}), stdout=full,
                                          stderr=subprocess.PIPE, timeout=30)
                    self.assertEqual(done.returncode, 1)
                    self.assertRegex(done.stderr, rb"\Ajobqueue: [^\n]+\n\Z")
                    self.assertIn(phrase, done.stderr)

    def test_closed_streams_do_no_harm(self) -> None:
        for redirection in (">&-", "2>&-", "<&-", "<&- >&- 2>&-"):
            with self.subTest(redirection=redirection):
                argv = command("enqueue", "--type", "t", "--database", str(self.db))
                done = subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *argv], env=environment(),
                                      capture_output=True, timeout=30)
                self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertEqual(run("list", "--database", self.db, "--json").stdout.count("\n"), 4)

    def test_a_stdout_that_knows_only_ascii(self) -> None:
        self.fill(1, '{"type":"日本","payload":"ü","id":"é\u0301"}')
        for args in (("list",), ("list", "--json"), ("enqueue", "--type", "t", "--id", "ü"),
                     ("enqueue", "--type", "t", "--id", "ö", "--json"), ("list", "--type", "ß")):
            with self.subTest(args=args):
                done = run(*args, "--database", self.db, env={"PYTHONIOENCODING": "ascii"})
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue((done.stdout + done.stderr).isascii())
                if "--json" in args:
                    self.assertIn(json.loads(done.stdout.splitlines()[-1])["id"], ("é\u0301", "ö"))
        done = run("enqueue", "--id", "日\n", "--type", "t", env={"PYTHONIOENCODING": "ascii"})
        self.assertEqual(done.returncode, 2)

    def test_arguments_that_are_not_utf_8(self) -> None:
        argv = [os.fsencode(arg) for arg in command("enqueue", "--database", self.db)] + [b"--type", b"\xff"]
        done = subprocess.run(argv, env=environment(), capture_output=True, timeout=30)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, rb"\Ajobqueue: [^\n]+ is not valid UTF-8\n\Z")

    def test_ctrl_c_while_it_reads_is_quiet_and_stores_nothing(self) -> None:
        process = self.start("enqueue", "--file", "-", "--database", self.db, stdin=subprocess.PIPE)
        assert process.stdin is not None
        # More than a pipe holds: once this is through, the command is reading.
        process.stdin.write(b'{"type":"t"}\n' * 20_000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        done = process.finish()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (130, "", ""))
        self.assertEqual(run("list", "--database", self.db, "--json").stdout, "")

    def test_no_colour_and_no_cuts_when_it_is_no_terminal(self) -> None:
        self.fill(1, json.dumps({"type": "t" * 200, "id": "i" * 255}))
        done = run("list", "--database", self.db)
        self.assertIn("t" * 200, done.stdout)
        self.assertNotIn("\x1b", done.stdout)

    def test_a_terminal_gets_colour_and_lines_that_fit(self) -> None:
        try:
            import fcntl
            import pty
            import struct
            import termios
        except ImportError:
            self.skipTest("no terminals here")
        self.fill(1, json.dumps({"type": "t" * 200, "id": "日" * 100, "max_attempts": 1}))
        with Queue(self.db) as queue:
            (job,) = queue.claim("w1")
            assert job.lease_token is not None
            queue.fail(job.id, job.lease_token, "boom " * 50)
        for changes, coloured in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
            master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            try:
                env = environment({"COLUMNS": None, **changes})
                argv = command("list", "--database", self.db)
                subprocess.run(argv, env=env, stdout=slave, timeout=30, check=True)
                os.set_blocking(master, False)
                text = os.read(master, 65536).decode()
            finally:
                os.close(slave)
                os.close(master)
            with self.subTest(**changes):
                self.assertEqual("\x1b[1;31mfailed\x1b[0m" in text, coloured)
                lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
                self.assertEqual(len(lines), 2)
                cells = [sum(2 if character == "日" else 1 for character in line) for line in lines]
                self.assertLessEqual(max(cells), 80)
                self.assertIn("…", lines[1])

    def test_enqueue_imports_only_what_it_needs(self) -> None:
        code = (
            "import argparse, json, re, sqlite3, sys; before = set(sys.modules)\n"
            "from jobqueue.cli import main; code = main(sys.argv[1:])\n"
            "print(*sorted(set(sys.modules) - before), file=sys.stderr); sys.exit(code)"
        )
        one = ("--type", "t", "--payload", '{"a":1}', "--priority", "3", "--delay", "5m", "--depends-on", "first")
        for args, needed, spared in (
            (one, "jobqueue.intake", {"queue", "db", "leases", "catalogue", "roster", "batch", "shared_commit"}),
            (("--file", "-"), "jobqueue.queue", set()),
        ):
            self.fill(1, '{"type":"t","id":"first","idempotency_key":"first"}')
            argv = [sys.executable, "-c", code, "enqueue", "--database", str(self.db), *args]
            done = subprocess.run(argv, env=environment(), input=b'{"type":"t"}', capture_output=True, timeout=30)
            self.assertEqual(done.returncode, 0, done.stderr)
            loaded = set(done.stderr.decode().split())
            with self.subTest(args=args):
                self.assertIn(needed, loaded)
                self.assertEqual(loaded & (FORBIDDEN | {f"jobqueue.{name}" for name in spared}), set())


class FuzzTest(CliTestCase):
    def test_no_command_line_ends_in_a_traceback(self) -> None:
        self.create()
        words = [
            *cli.COMMANDS, "help", "--help", "--version", "--database", str(self.db), "--json", "--type", "t",
            "--payload", "{}", "[1", "-", "@", "--file", "--id", "1", "--limit", "-1", "0", "", "--status",
            "failed", "--priority", "99999999999999999999", "--delay", "5m", "--run-at", "2030-01-31T08:00:00Z",
            "--timeout", "1e9", "--depends-on", "--max-attempts", "--idempotency-key", "k", "--dry-run", "--queue",
            "\x1b", "\udcff", "\u202e", "--", "-x", "--=", "=", "%s", "%(prog)s", "{0}", "--database=",
            "--payload=null", "a\0b",
        ]  # fmt: skip
        words.remove("worker")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.dir)  # any word may turn out to be the name of a database
        chance = random.Random(7)
        reached = set()
        for _ in range(1_500):
            args = [chance.choice(["enqueue", "list", "retry-failed", "init", chance.choice(words)])]
            if chance.random() < 0.7:
                args += ["--database", str(self.db)]
            args += chance.choices(words, k=chance.randrange(6))
            with mock.patch.object(enqueue, "open", create=True, side_effect=FileNotFoundError(2, "No such file")):
                done = self.main(*args, stdin=b'{"type":"t"}\nnull\n')
            reached.add(done.code)
            self.assertIn(done.code, (0, 1, 2), (args, done))
            self.assertNotIn("internal error", done.err, args)
            self.assertNotRegex(done.err.replace("\n", ""), r"[\x00-\x1f\u202e\ud800-\udfff]", args)
        self.assertEqual(reached, {0, 1, 2})


if __name__ == "__main__":
    unittest.main()
