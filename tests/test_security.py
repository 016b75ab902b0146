"""Who may touch a queue's file, what jobs can do to a terminal or a log, and what never gets into the file.

The table in the README's section "Security" says the same in words.
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import re
import stat
import sys
import unicodedata
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from jobqueue import JobScheduler, Queue, WorkQueue, cli, place, render
from jobqueue.commands import common
from jobqueue.db import Store
from jobqueue.errors import DatabaseError
from jobqueue.log import Log
from jobqueue.text import escape, escape_json
from tests.support import TOP, TempDirTestCase, WorkerTestCase, file_bytes, run

POSIX = os.name == "posix"
COMMANDS: dict[str, tuple[str, ...]] = {
    "init": (), "enqueue": ("--type", "t"), "worker": ("--drain",), "list": (), "retry-failed": (),
}
"""Commands of every kind, with what else they need."""


def main(*args: object, terminal: bool = False) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    if terminal:
        out.isatty = lambda: True  # type: ignore[method-assign]
    with mock.patch.multiple(sys, stdout=out, stderr=err):
        code = cli.main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


async def open_async(path: Path, **options: Any) -> None:
    """Open and close the asyncio face."""
    async with WorkQueue(path, **options):
        pass


FACES: dict[str, Callable[..., object]] = {
    "Store": lambda path, **options: Store(path, create=True, **options).close(),
    "Queue": lambda path, **options: Queue(path, create=True, **options).close(),
    "JobScheduler": lambda path, **options: JobScheduler(path, **options).close(),
    "WorkQueue": lambda path, **options: asyncio.run(open_async(path, **options)),
}


@unittest.skipUnless(POSIX, "the mode of a file means something on POSIX only")
class SharedTest(TempDirTestCase):
    """A file that every user of the machine could change or replace is refused, unless that is meant."""

    def setUp(self) -> None:
        super().setUp()
        self.place = self.dir / "place"
        self.place.mkdir(0o700)
        self.db = self.place / "jobs.db"

    def make(self) -> None:
        """Make the file, with a job in it."""
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t")

    def assert_refused(self, path: Path, culprit: Path) -> None:
        """Expect that no face and no command opens the file, that the remedy is told, and nothing changes."""
        before, names = file_bytes(self.db), sorted(os.listdir(self.place))
        for name, face in FACES.items():
            with self.subTest(name), self.assertRaises(DatabaseError) as caught:
                face(path)
            message = str(caught.exception)
            self.assertIn(f"every user of this machine may write {'the directory ' * culprit.is_dir()}{culprit}, ",
                          message)
            self.assertRegex(message, rf"; run chmod o-w {re.escape(str(culprit))}, or pass --allow-shared ")
        for name, options in COMMANDS.items():
            code, out, err = main(name, "--database", path, *options)
            self.assertEqual((name, code, out), (name, 1, ""), err)
            self.assertRegex(err, rf"\Ajobqueue: {re.escape(str(path))} was not opened: [^\n]+\n\Z")
        self.assertEqual((file_bytes(self.db), sorted(os.listdir(self.place))), (before, names))

    def assert_allowed(self, path: Path) -> None:
        """Expect that each face and each command opens the file when told to."""
        for name, face in FACES.items():
            with self.subTest(name):
                face(path, allow_shared=True)
        for name, options in COMMANDS.items():
            argv = (name, "--database", path, *options, "--allow-shared")
            if name == "worker":
                done = run(*argv)
                self.assertEqual(done.returncode, 0, done.stderr)
            else:
                self.assertEqual(main(*argv)[0], 0, name)

    def test_every_command_that_opens_a_file_has_the_option_and_hands_it_on(self) -> None:
        for name in cli.COMMANDS:
            options = {action.dest for action in cli.command_parser(name)[0]._actions}
            self.assertEqual("database" in options, "allow_shared" in options, name)
        openers = ("Queue", "Store", "Intake", "Connection")
        for path in (TOP / "jobqueue" / "commands").glob("*.py"):
            for call in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in openers:
                    self.assertIn("allow_shared", [keyword.arg for keyword in call.keywords],
                                  f"{path.name}:{call.lineno}")

    def test_a_file_that_others_may_write(self) -> None:
        self.make()
        self.db.chmod(0o602)
        self.assert_refused(self.db, self.db)
        self.assert_allowed(self.db)
        self.assertEqual(stat.S_IMODE(self.db.stat().st_mode), 0o602, "the mode is its owner's affair")

    def test_a_directory_that_others_may_write(self) -> None:
        self.make()
        self.place.chmod(0o707)
        self.assert_refused(self.db, self.place)

    def test_no_file_is_made_in_such_a_directory(self) -> None:
        self.place.chmod(0o777)
        self.assert_refused(self.db, self.place)
        self.assertEqual(os.listdir(self.place), [])

    def test_a_link_in_a_directory_that_others_may_write(self) -> None:
        self.make()
        (self.dir / "links").mkdir()
        (self.dir / "links" / "second").symlink_to("../place/jobs.db")
        (self.dir / "first").symlink_to("links/second")
        for link in (self.dir / "first", self.dir / "links" / "second"):
            Queue(link).close()
            (self.dir / "links").chmod(0o777)
            with self.assertRaisesRegex(DatabaseError, "may write the directory .*/links, "):
                Queue(link)
            Queue(link, allow_shared=True).close()
            (self.dir / "links").chmod(0o700)

    def test_what_lies_in_the_directory_of_the_target_counts_too(self) -> None:
        self.make()
        (self.dir / "link").symlink_to(self.db)
        self.place.chmod(0o777)
        self.assert_refused(self.dir / "link", self.place)

    def test_a_log_that_others_may_write(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue("t")
            for suffix in ("-wal", "-shm"):
                log = Path(f"{self.db}{suffix}")
                log.chmod(0o606)
                with self.subTest(suffix), self.assertRaisesRegex(DatabaseError, f"may write {log}, "):
                    Queue(self.db)
                log.chmod(0o600)
            Queue(self.db).close()

    def test_what_is_no_danger(self) -> None:
        self.make()
        for file, directory in ((0o660, 0o700), (0o644, 0o755), (0o600, 0o775), (0o664, 0o2775), (0o600, 0o1777)):
            self.db.chmod(file)
            self.place.chmod(directory)
            with self.subTest(file=oct(file), directory=oct(directory)):
                for face in FACES.values():
                    face(self.db)

    def test_a_log_laid_beside_the_file_in_a_shared_directory(self) -> None:
        self.make()
        look = place._look
        for suffix in ("-wal", "-shm", "-journal"):
            log = f"{self.db}{suffix}"
            Path(log).touch(0o600)

            def of_a_stranger(path: str, log: str = log) -> tuple[int, int]:
                mode, owner = look(path)
                return mode, owner + 1 if path == log else owner

            with mock.patch.object(place, "_look", of_a_stranger):
                Queue(self.db, allow_shared=True).close()
                Path(log).touch(0o600)
                place.refuse_shared(str(self.db), str(self.db))
                self.place.chmod(0o1777)
                with self.assertRaisesRegex(DatabaseError, f"{log}, which is read as .* belongs to user \\d+,"):
                    Queue(self.db)
            Queue(self.db).close()
            self.place.chmod(0o700)

    def test_nothing_is_asked_where_modes_mean_nothing(self) -> None:
        self.make()
        self.place.chmod(0o777)
        with mock.patch.object(place.os, "name", "nt"):
            place.refuse_shared(str(self.db), str(self.db))
        with self.assertRaises(DatabaseError):
            place.refuse_shared(str(self.db), str(self.db))

    def test_all_files_are_private_whatever_the_umask(self) -> None:
        for umask in (0, 0o077, 0o777):
            with self.subTest(umask=oct(umask)):
                self.db = self.place / f"{umask}.db"
                before = os.umask(umask)
                try:
                    queue = Queue(self.db, create=True)
                    with closing(queue):
                        queue.enqueue("t")
                        modes = {path.name: stat.S_IMODE(path.stat().st_mode)
                                 for path in self.place.iterdir() if path.name.startswith(self.db.name)}
                finally:
                    os.umask(before)
                wanted = 0o600 & ~umask
                self.assertEqual(modes, {f"{self.db.name}{end}": wanted for end in ("", "-wal", "-shm")})


# -- what is shown --------------------------------------------------------------------

CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180e" \
    "\u200b\u200c\u200d\u2060\u2064\u3164\ufe0f\ufeff\uffa0\U000e0100"
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
DANGEROUS = "\x07\x08\r\n\t\x1b[2J\x1b]0;title\x07\x7f\x85\x9b2J\xad\u2028\u2029\U000e0041" + UNSEEN + BIDI
IN_NAMES = "".join(character for character in DANGEROUS if unicodedata.category(character) != "Cc")
"""What a name may hold: no rule forbids it, as it is text in some script."""


def raw(text: str) -> list[str]:
    """Return the characters of a text, line ends aside, that should not have come out as they are."""
    bad = set(UNSEEN + BIDI)
    return sorted({ascii(character) for character in text.replace("\n", "")
                   if unicodedata.category(character) in CATEGORIES or character in bad})


class EscapeTest(unittest.TestCase):
    """The one function that all goes through."""

    def test_every_character_of_the_kinds_that_deceive(self) -> None:
        for code in (*range(0x20000), *range(0xE0000, 0xE1000)):
            character = chr(code)
            if unicodedata.category(character) in CATEGORIES or character in UNSEEN + BIDI:
                shown = escape(character)
                self.assertRegex(shown, r"\A\\([nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})\Z")
                if len(shown) > 2:
                    self.assertEqual(int(shown[2:], 16), code)
                quoted = escape_json(json.dumps(character, ensure_ascii=False))
                self.assertEqual((raw(quoted), json.loads(quoted)), ([], character))

    def test_what_is_seen_stays(self) -> None:
        text = "plain ~ Grüße, e\u0301, 日本語, 한국어, हिन्दी, עברית, العربية, 🎉, \xa0, \u3000, →, €"
        self.assertEqual((escape(text), escape_json(text)), (text, text))


class ShownTest(WorkerTestCase):
    """Each way out, with jobs that bring along all that is dangerous."""

    def setUp(self) -> None:
        super().setUp()
        self.id = self.queue.enqueue(f"type {IN_NAMES}", DANGEROUS, id=f"id {IN_NAMES}", max_attempts=1,
                                     idempotency_key="key", priority=9)
        self.queue.enqueue("raise", DANGEROUS, id=f"raises {IN_NAMES}", max_attempts=1, priority=8)
        self.queue.enqueue("print", {"message": f"a {DANGEROUS}\nb"}, priority=7)

    def test_the_worker_and_what_is_listed_afterwards(self) -> None:
        mine, its = os.openpty()
        try:
            done = self.worker("--drain", "--log-level", "debug", stdout=its).finish()
            printed = os.read(mine, 65_536).decode()
        finally:
            os.close(mine)
            os.close(its)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("raises ", done.stderr)
        self.assertEqual(raw(done.stderr), [])
        self.assertEqual(raw(printed.replace("\r\n", "\n")), [])
        self.assertEqual(printed.count("\n"), DANGEROUS.count("\n") + 2)

        for terminal in (False, True):
            for extra in ((), ("--json",)):
                code, out, err = main("list", "--database", self.db, *extra, terminal=terminal)
                self.assertEqual((code, err), (0, ""))
                self.assertEqual(raw(re.sub("\x1b\\[[0-9;]*m", "", out)), [])
                if extra:
                    found = {job["id"]: job for job in map(json.loads, out.splitlines())}
                    self.assertEqual(found[self.id]["payload"], DANGEROUS)
                    self.assertEqual(found[self.id]["type"], f"type {IN_NAMES}")

    def test_the_log_for_machines(self) -> None:
        lines: list[str] = []
        log = Log(lines.append, lambda: 0, "worker", "json", "debug")
        job = self.queue.get(self.id)
        assert job is not None
        log.attempt_failed(job, "failed", DANGEROUS)
        log.file_replaced(DANGEROUS)
        log.flush()
        self.assertEqual(raw("".join(lines)), [])
        first, second = map(json.loads, "".join(lines).splitlines())
        self.assertEqual((first["job_id"], first["error"]), (self.id, DANGEROUS))
        self.assertIn(DANGEROUS, second["message"])

    def test_messages_of_commands(self) -> None:
        (self.dir / f"jobs{IN_NAMES}").write_text(json.dumps({"type": "t", "depends_on": [IN_NAMES]}))
        odd = (f"x{IN_NAMES}", DANGEROUS)
        for argv in (
            ("list", "--database", self.dir / odd[0]), ("init", "--database", f"{self.dir}/{odd[1]}/jobs.db"),
            ("enqueue", "--database", self.db, "--type", odd[1]), ("enqueue", "--database", self.db, odd[0], "--x"),
            ("enqueue", "--database", self.db, "--type", "t", "--depends-on", odd[0]),
            ("enqueue", "--database", self.db, "--type", "t", "--id", self.id),
            ("enqueue", "--database", self.db, "--type", "t", "--payload", f"@{odd[1]}"),
            ("enqueue", "--database", self.db, "--type", "t", "--idempotency-key", "key"),
            ("enqueue", "--database", self.db, "--file", self.dir / f"jobs{IN_NAMES}"),
            ("retry-failed", "--database", self.db, "--id", self.id), (odd[0],), (odd[1],),
            ("worker", "--database", self.db, "--handlers", f"./{odd[1]}.py"),
            ("worker", "--database", self.db, "--log-level", odd[1]),
            ("list", "--database", self.db, "--status", odd[1]),
        ):
            with self.subTest(argv=ascii(argv)):
                _, out, err = main(*argv, terminal=True)
                self.assertEqual(raw(out + err), [])
                self.assertEqual(err.count("\n"), 1)

    def test_ids_are_exact_for_programs_and_escaped_on_a_terminal(self) -> None:
        argv = ("enqueue", "--database", self.db, "--type", "t", "--idempotency-key", "key")
        self.assertEqual(main(*argv)[1], self.id + "\n")
        self.assertEqual(main(*argv, terminal=True)[1], escape(self.id) + "\n")
        file = self.dir / "jobs.jsonl"
        file.write_text('{"type":"t","idempotency_key":"key"}\n')
        argv = ("enqueue", "--database", self.db, "--file", file)
        self.assertEqual(main(*argv)[1], self.id + "\n")
        self.assertEqual(main(*argv, terminal=True)[1], escape(self.id) + "\n")

    def test_the_log_of_the_asyncio_face(self) -> None:
        async def work() -> None:
            async with WorkQueue(self.db, queue="async", retry_limit=1) as queue:
                await queue.enqueue(f"async {IN_NAMES}", None, type=IN_NAMES)
                lease = await queue.lease("w")
                assert lease is not None
                await queue.fail(lease.job_id, lease.lease_token, DANGEROUS)

        with self.assertLogs("jobqueue", logging.DEBUG) as logs:
            asyncio.run(work())
        self.assertEqual(len(logs.records), 3)
        for record in logs.records:
            self.assertEqual(raw(record.getMessage()), [])
            self.assertEqual(getattr(record, "job_id"), f"async {IN_NAMES}")  # noqa: B009

    def test_say(self) -> None:
        with mock.patch.object(sys, "stderr", io.StringIO()) as err:
            for character in DANGEROUS:
                common.say(character)
        self.assertEqual(raw(err.getvalue()), [])

    def test_a_table_takes_the_width_of_what_is_shown(self) -> None:
        (heading, line) = render.table([render.Column("A"), render.Column("B")], [["\u202e", "b"]])
        self.assertEqual((heading, line), ("A       B", r"\u202e  b"))


# -- what is in the file --------------------------------------------------------------

class NamesTest(WorkerTestCase):
    """A job's type only ever chooses among the handlers that the worker was given."""

    def test_no_type_imports_anything(self) -> None:
        (self.dir / "evil.py").write_text("open('evil-ran', 'w').close()\ndef run(*args): open('evil-ran', 'w')\n")
        (self.dir / "watching.py").write_text(
            "import os, sys\nfrom jobqueue import handler\n"
            "log = os.open('imports', os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)\n"
            "def hook(event, args):\n"
            "    if event in ('import', 'exec', 'open', 'os.system', 'subprocess.Popen'):\n"
            "        os.write(log, f'{event} {args[0]}\\n'.encode())\n"
            "@handler('watch')\ndef watch(payload, context): sys.addaudithook(hook)\n"
            "@handler('import')\ndef imports(payload, context): import this_is_seen\n")
        types = ("evil", "evil.run", "evil:run", "evil.py", "./evil.py", str(self.dir / "evil.py"), "../x", "os",
                 "os.system", "subprocess.run", "jobqueue.handlers", "builtins.exec", "eval", "__import__('evil')",
                 "print.__class__", "import evil", "xmlrpc.client")
        self.queue.enqueue("watch", id="watch", priority=2)
        self.queue.enqueue("import", id="import", priority=1, max_attempts=1)
        for type in types:
            self.queue.enqueue(type, "evil", id=type, max_attempts=1)
        self.drain("--handlers", "./watching.py", "--queue", "default")
        for type in types:
            job = self.job(type)
            self.assertEqual(job.status, "failed")
            self.assertRegex(job.last_error or "", "no handler for the type ")
        self.assertEqual(self.job("watch").status, "completed")
        seen = (self.dir / "imports").read_text()
        self.assertIn("import this_is_seen", seen)
        after = seen[seen.index("this_is_seen"):]
        self.assertEqual([line for line in after.splitlines()[1:] if not line.endswith(".pyc")], [])
        self.assertFalse((self.dir / "evil-ran").exists())


class EnvironmentTest(WorkerTestCase):
    """Nothing of the environment gets into the file unasked."""

    MARK = "s3cr3t-0f-the-env1ronment"
    NAMES = ("API_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HOSTNAME", "LOGNAME", "USER", "USERNAME",
             "MAIL", "SSH_AUTH_SOCK", "PWD", "OLDPWD", "EDITOR", "SUDO_USER", "INVOCATION_ID", "COLUMNS",
             "JOBQUEUE_TOKEN", "JOBQUEUE_SECRET", "JOBQUEUE_DEBUG", "JOBQUEUE_ALLOW_NETWORK_MOUNT")

    def test_no_secret_is_stored(self) -> None:
        db = self.dir / f"{self.MARK}.db"
        env = {**dict.fromkeys(self.NAMES, self.MARK), "JOBQUEUE_DATABASE": str(db)}
        (self.dir / "jobs.jsonl").write_text("".join(
            json.dumps({"max_attempts": 1, "id": f"job {number}", **job}) + "\n" for number, job in enumerate((
                {"type": "print", "payload": {"message": "hi"}}, {"type": "fail"}, {"type": "nowhere"},
                {"type": "raise", "payload": "no"}, {"type": "exit", "payload": 3}, {"type": "not-json"},
                {"type": "exit-at-once", "payload": 4}, {"type": "kill-itself", "payload": "SIGKILL"},
                {"type": "until-stopped", "timeout": 0.1}, {"type": "about"}, {"type": "fail", "max_attempts": 2},
                {"type": "step", "payload": {"gate": "go"}, "priority": -1},
            ))))
        for argv in (("init",), ("enqueue", "--file", self.dir / "jobs.jsonl"), ("enqueue", "--type", "about")):
            done = run(*argv, env=env)
            self.assertEqual(done.returncode, 0, done.stderr)
        worker = self.start("worker", "--workers", 1, "--handlers", self.HANDLERS, env=env, cwd=self.dir)
        with Queue(db) as queue:
            self.until_counts({"completed": 3, "failed": 8, "retrying": 1, "running": 1}, "all but two to end",
                              queue=queue)
            found = file_bytes(db)
        self.assertIsNone(worker.poll())
        self.assertEqual(len(found), 3)
        everything = b"".join(found.values())
        for stored in (b"job 9", b"ValueError: no", b"SIGKILL", str(worker.pid).encode() + b"-"):
            self.assertIn(stored, everything)
        self.assertNotIn(self.MARK.encode(), everything)
        self.assertNotIn(self.MARK.encode("utf-16-le"), everything)


if __name__ == "__main__":
    unittest.main()
