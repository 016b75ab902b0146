"""Disks that are full, files that may not be written, files that are damaged, links: by every command.

A full disk is a small file system of its own, where one may be mounted; where not, a limit of the kernel on the
size of files.  Root is held back by nobody's permissions, so there the commands give up the capability first.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from jobqueue import Queue, cli
from jobqueue.errors import JobQueueError
from tests.engine import token
from tests.support import FakeClock, TempDirTestCase, WorkerTestCase, file_bytes, run, sql, until

PROGRAM = """
import ctypes, json, os, resource, signal, sys, tempfile
sys.dont_write_bytecode = True  # under a limit Python would cut it short, and others would read that
from jobqueue.cli import main

def give_up_capabilities():
    "Let the permissions of files count for root as well: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER."
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    for number in range(3):
        data[number] &= ~0b1110
    assert libc.capset(header, data) == 0

def answer(argv, seconds):
    "Run a command in a process of its own; return its exit code, stdout and stderr."
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            signal.alarm(seconds)  # ends what would go on for ever
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(main(argv))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "surrogateescape"))
    return code, *texts

if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    if plan["humble"] and os.geteuid() == 0:
        give_up_capabilities()
    if plan["bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan["bytes"], resource.RLIM_INFINITY))
    for argv in plan["commands"]:
        print(json.dumps(answer(argv, plan["seconds"])), flush=True)
"""
COMMANDS = ("init", "enqueue --type sleep --payload {\"seconds\":0}", "list --json", "worker --drain --workers 1",
            "retry-failed")  # fmt: skip
ONE_LINE = r"\Ajobqueue: [^\n]+\n\Z"
FULL = "cannot grow: the disk is full; make room and try again|cannot be read or written: check the disk"
Answer = tuple[int, str, str]


class DiskTestCase(TempDirTestCase):
    """A test that gives commands under restrictions."""

    def commands(self, commands: Iterable[str], path: Path, *, humble: bool = False, bytes: int | None = None,
                 seconds: int = 20, by_environment: bool = False) -> dict[str, Answer]:
        """Run commands one after the other on a file; return (exit code, stdout, stderr) of each.

        Args:
            humble: have permissions count, also for root.
            bytes: no file may grow beyond that.
            seconds: a command that takes longer ends by SIGALRM, with -14.
            by_environment: name the file there, not as an argument.
        """
        program = self.dir / "program.py"
        program.write_text(PROGRAM)
        commands = list(commands)
        named = [] if by_environment else ["--database", str(path)]
        plan = {"commands": [[*command.split(), *named] for command in commands], "humble": humble, "bytes": bytes,
                "seconds": seconds}
        env = {"JOBQUEUE_DATABASE": str(path) if by_environment else None}
        done = self.spawn([sys.executable, str(program), json.dumps(plan)], env=env).finish(60)
        self.assertEqual(done.returncode, 0, done.stderr)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return dict(zip(commands, ((code, out, err) for code, out, err in answers), strict=True))

    def refused(self, answer: Answer, phrase: str) -> None:
        """Expect exit 1, nothing on stdout, and one line on stderr that says so."""
        self.assertEqual(answer[:2], (1, ""), answer[2])
        self.assertRegex(answer[2], ONE_LINE)
        self.assertRegex(answer[2], phrase)

    def make(self, name: str = "d") -> Path:
        """Make a queue with one job in a directory of its own."""
        (self.dir / name).mkdir()
        path = self.dir / name / "jobs.db"
        with Queue(path, create=True) as queue:
            queue.enqueue("sleep", {"seconds": 0}, id="old")
        return path

    def mount(self, megabytes: int) -> Path:
        """Mount a small file system and return its place; skip the test where that is not allowed."""
        place = self.dir / "small"
        place.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(place)]
        if not sys.platform.startswith("linux") or shutil.which("mount") is None:
            self.skipTest("no small file system can be mounted here")
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            self.skipTest(f"no small file system can be mounted here: {done.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "-l", str(place)], check=True)
        return place

    def remount(self, place: Path, megabytes: int) -> None:
        """Change the size of a small file system."""
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(place)], check=True)


def fill(place: Path, leave: int = 0) -> Path:
    """Fill a file system but for so many bytes; return the file that takes the room."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65_536):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave))
    return filler


class FullTest(DiskTestCase):
    """No room left."""

    def test_every_command_on_a_full_disk_says_so_and_goes_on_once_there_is_room(self) -> None:
        place = self.mount(2)
        path = place / "jobs.db"
        self.assertEqual(run("init", "--database", path).returncode, 0)
        self.assertEqual(self.commands(COMMANDS[1:2], path)[COMMANDS[1]][0], 0)
        before = file_bytes(path)
        filler = fill(place)
        writing = [command for command in COMMANDS if not command.startswith("worker")]
        for command, answer in self.commands(writing, path).items():
            with self.subTest(command):
                if answer[0] != 0 or command.startswith("enqueue"):
                    self.refused(answer, FULL)
        self.refused(self.commands(["init"], place / "new.db")["init"], FULL)
        self.assertEqual(file_bytes(path)["jobs.db"], before["jobs.db"])
        filler.unlink()
        for command, answer in self.commands(COMMANDS, path).items():
            self.assertEqual(answer[0], 0, (command, answer))
        self.assertEqual(sql(path, "SELECT id, status, attempts FROM jobs"),
                         [("1", "completed", 1), ("2", "completed", 1)])
        self.assertEqual(self.commands(["init"], place / "new.db")["init"][0], 0)

    def test_a_checkpoint_that_finds_no_room_loses_nothing(self) -> None:
        # Room for the log until it is worth a checkpoint, but then not for the file as well.
        place = self.mount(6)
        path = place / "jobs.db"
        queue = Queue(path, create=True)
        self.addCleanup(queue.close)
        told: list[str] = []
        with self.assertRaisesRegex(JobQueueError, FULL):
            told.extend(queue.enqueue("t", "x" * 100_000, id=f"{n}") for n in range(1_000))
        self.assertGreater(sum(os.stat(each).st_size for each in (path, f"{path}-wal")), 4_500_000)
        self.assertGreater(len(told), 20)
        self.assertEqual([job.id for job in queue.list()], told[::-1])
        with self.assertRaisesRegex(JobQueueError, FULL):
            queue.enqueue_many([{"type": "t", "payload": "x" * 500_000}] * 10)
        self.remount(place, 40)
        told += queue.enqueue_many([{"type": "t", "payload": "x" * 100_000, "id": f"more {n}"} for n in range(60)])
        (job,) = queue.claim("w")
        self.assertTrue(queue.complete(job.id, token(job)))
        queue.close()
        with Queue(path) as again:
            self.assertEqual([job.id for job in again.list()], told[::-1])
        self.assertEqual(sql(path, "PRAGMA integrity_check"), [("ok",)])

    def test_a_limit_on_the_size_of_files_is_a_full_disk_too(self) -> None:
        path = self.make()
        before = file_bytes(path)
        for command in ("enqueue --type t", "init"):
            where = path if command != "init" else path.parent / "new.db"
            self.refused(self.commands([command], where, bytes=1_000)[command], FULL)
        self.assertEqual(file_bytes(path)["jobs.db"], before["jobs.db"])
        self.assertEqual(self.commands(["enqueue --type t"], path)["enqueue --type t"][0], 0)
        self.assertEqual(self.commands(["init"], path.parent / "new.db")["init"][0], 0)


class FullWorkerTest(WorkerTestCase, DiskTestCase):
    """A worker whose disk is full when a job ends; `test_survival` has one whose files may not grow."""

    def test_it_stays_and_settles_once_there_is_room(self) -> None:
        place = self.mount(3)
        path = place / "jobs.db"
        queue = self.make_queue(path)
        queue.enqueue("step", {"gate": "go", "result": "x" * 200_000}, id="job")
        queue.enqueue_many([{"type": "step", "id": f"{n}"} for n in range(20)])
        worker = self.worker("--lease-seconds", 20, db=path)
        self.until_started("job")
        filler = fill(place)
        self.open_gate("go")
        until(lambda: "1 outcomes kept" in worker.stderr_text() or worker.poll() is not None, 10, "it to complain")
        self.assertRegex(worker.stderr_text(), FULL)
        self.assertIsNone(worker.poll())
        self.assertEqual(self.job("job", queue).status, "running")
        filler.unlink()
        self.until_counts({"completed": 21}, "all jobs", queue=queue)
        self.assertEqual({job.attempts for job in queue.list()}, {1})
        self.assertEqual(len(self.trace("start")), 21)
        self.assertIn("the database works again", worker.stderr_text())


CAN_GIVE_UP = os.name == "posix" and (os.geteuid() != 0 or hasattr(ctypes.CDLL(None), "capset"))


@unittest.skipUnless(CAN_GIVE_UP, "permissions do not hold root back here")
class PermissionTest(DiskTestCase):
    """Files and directories that may not be written."""

    WRITE = "cannot be written: check the permissions of the file and its directory"

    def no_writes(self, path: Path) -> None:
        """Expect that looking works, that what would write is refused, and that nothing is changed."""
        before = file_bytes(path)
        answers = self.commands(COMMANDS, path, humble=True)
        for command, answer in answers.items():
            with self.subTest(command, where=path.parent.name):
                if command.startswith(("enqueue", "worker")):
                    self.assertEqual((answer[0], "Traceback" in answer[2]), (1, False), answer)
                    self.assertIn(self.WRITE, answer[2])
                else:
                    self.assertEqual(answer[0], 0, answer)
        self.assertEqual(file_bytes(path)["jobs.db"], before["jobs.db"])

    def test_a_file_that_may_only_be_read(self) -> None:
        path = self.make()
        path.chmod(0o400)
        self.no_writes(path)

    def test_a_look_at_a_file_that_may_only_be_read_leaves_nothing_unsaid_that_bars_it(self) -> None:
        path = self.make()
        path.chmod(0o400)
        self.assertEqual(self.commands(["list --json"], path, humble=True)["list --json"][0], 0)
        path.chmod(0o600)
        answer = self.commands(["enqueue --type t"], path, humble=True)["enqueue --type t"]
        if answer[0] != 0:  # SQLite has given the log the mode of the file, and left it there
            self.refused(answer, "jobs.db-wal")

    def test_a_file_that_nobody_can_change(self) -> None:
        path = self.make()
        if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", path], capture_output=True).returncode:
            self.skipTest("no file can be made immutable here")
        self.addCleanup(subprocess.run, ["chattr", "-i", path], check=True)
        self.no_writes(path)

    def test_a_directory_that_may_only_be_read(self) -> None:
        path = self.make()
        before = file_bytes(path)
        path.parent.chmod(0o500)
        self.addCleanup(path.parent.chmod, 0o700)
        for command, answer in self.commands(COMMANDS, path, humble=True).items():
            with self.subTest(command):
                self.refused(answer, self.WRITE)
        new = self.commands(["init"], path.parent / "new.db", humble=True)["init"]
        self.refused(new, "cannot create .*/new.db: Permission denied")
        self.assertEqual(file_bytes(path), before)

    @unittest.skipUnless(os.name == "posix" and os.geteuid() == 0, "only root can give a file to another user")
    def test_the_file_of_another_user(self) -> None:
        path = self.make()
        os.chown(path, 65534, 65534)
        before = file_bytes(path)
        for command, answer in self.commands(COMMANDS, path, humble=True).items():
            with self.subTest(command):
                self.refused(answer, "cannot be opened: check the permissions of the file and its directory")
        self.assertEqual(file_bytes(path), before)
        path.chmod(0o644)
        self.no_writes(path)

    @unittest.skipUnless(os.name == "posix" and os.geteuid() == 0, "only root can give a file to another user")
    def test_what_root_leaves_beside_the_file_of_another_user_is_theirs(self) -> None:
        path = self.make()
        os.chown(path, 65534, 65534)
        path.chmod(0o640)
        with Queue(path) as queue:
            queue.enqueue("t")
            for suffix in ("", "-wal", "-shm"):
                found = os.stat(f"{path}{suffix}")
                self.assertEqual((found.st_uid, found.st_gid, found.st_mode & 0o777), (65534, 65534, 0o640), suffix)


class LinkTest(DiskTestCase):
    """Paths that lead elsewhere, and names that mean something to somebody."""

    def test_a_link_and_one_that_leads_to_nothing(self) -> None:
        (self.dir / "a").mkdir()
        (self.dir / "b").mkdir()
        target, link = self.dir / "a" / "target.db", self.dir / "b" / "link.db"
        link.symlink_to(target)
        for command, answer in self.commands(COMMANDS[1:], link).items():
            with self.subTest(command):
                self.refused(answer, f"there is no database {link}; create it with: .* init --database {link}$")
        self.assertEqual(os.listdir(target.parent), [])
        for command, answer in self.commands(COMMANDS, link).items():
            self.assertEqual(answer[0], 0, (command, answer))
        self.assertEqual((os.listdir(target.parent), os.listdir(link.parent)), (["target.db"], ["link.db"]))
        self.assertTrue(link.is_symlink())
        self.assertEqual(sql(target, "SELECT status, attempts FROM jobs"), [("completed", 1)])
        with Queue(target) as queue:  # the log lies beside the target, where a command that knows the link finds it
            queue.enqueue("fail", id="seen", max_attempts=1)
            self.assertIn('"id": "seen"', self.commands(["list --json"], link)["list --json"][1])
        link.unlink()
        link.symlink_to(self.dir / "c" / "target.db")
        refused = self.commands(["init"], link)["init"]
        self.refused(refused, f"cannot create {link}: there is no directory {self.dir}/c")

    def test_names_that_mean_something_elsewhere(self) -> None:
        names = ["a b?mode=memory&x=1#y%41;z\nline é \U0001f680"]
        if sys.platform.startswith("linux"):
            names.append(os.fsdecode(b"not utf-8 \xff\xfe"))
        for number, name in enumerate(names):
            path = self.dir / f"{number}" / name
            path.parent.mkdir()
            with self.subTest(ascii(name)):
                # An argument must be UTF-8; whoever has such a name gives it by the environment.
                for command, (code, _, err) in self.commands(COMMANDS, path, by_environment=True).items():
                    self.assertEqual(code, 0, (command, err))
                    self.assertTrue(all(line.isprintable() for line in err.split("\n")), err)
                    if command == "init":  # which names the file: its newline must not come out
                        self.assertRegex(err, ONE_LINE)
                self.assertEqual(os.listdir(path.parent), [name])
                listed = self.commands(["list --json"], path)["list --json"]
                if number == 0:
                    self.assertEqual(json.loads(listed[1])["status"], "completed", listed)
                else:
                    self.assertEqual(listed[0], 2)
                    self.assertRegex(listed[2], r"\Ajobqueue: the argument .* is not valid UTF-8\n\Z")

    def test_without_its_log_a_file_is_older_and_whole(self) -> None:
        # Nobody can see that a log was there, so what it held is lost; what the file holds must work.
        path = self.make()
        with Queue(path) as queue:
            queue.enqueue("sleep", {"seconds": 0}, id="new")
            copy = self.dir / "copy.db"
            shutil.copyfile(path, copy)  # no log; this process keeps no lock on the file that matters
        self.assertEqual([answer[0] for answer in self.commands(COMMANDS, copy).values()], [0] * 5)
        self.assertEqual(sql(copy, "SELECT id, status FROM jobs"), [("old", "completed"), ("2", "completed")])
        self.assertEqual(sql(copy, "PRAGMA integrity_check"), [("ok",)])


class DamageTest(DiskTestCase):
    """One bit of the file is not what it was."""

    maxDiff = None

    SEED = 5
    BITS = 40
    REFUSED = ("is damaged", "is not a SQLite database, so it was left alone", "is the database of another program",
               "was made by a newer version of jobqueue", "is empty; make it a queue")  # fmt: skip
    clock = FakeClock()

    def setUp(self) -> None:
        super().setUp()
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # hundreds of commits: no disk has to sync them
        place = tempfile.TemporaryDirectory(prefix="jobqueue-test-", dir=memory)
        self.addCleanup(place.cleanup)
        self.db = Path(place.name).resolve() / "jobs.db"
        with Queue(self.db, create=True, clock=self.clock) as queue:
            queue.enqueue_many([{"type": "t", "id": f"dead{n}", "max_attempts": 1} for n in range(6)])
            for job in queue.claim("w", limit=6):
                queue.fail(job.id, token(job), "boom")
            queue.enqueue_many([
                {"type": "t", "id": f"p{n}", "payload": {"text": "é" * 20}, "depends_on": ["p0"] * (n > 0),
                 "idempotency_key": f"k{n}"} for n in range(8)])  # fmt: skip
            (job,) = queue.claim("w")
            queue.complete(job.id, token(job), {"an": "answer"})
            queue.claim("w", limit=2)
        # Read and written as a plain file only while nobody has it open.
        self.whole = self.db.read_bytes()

    def lay(self, data: bytes) -> None:
        """Put the file there, and nothing beside it."""
        for path in self.db.parent.iterdir():
            path.unlink()
        self.db.write_bytes(data)

    def command(self, *args: str) -> Answer:
        """Run a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with mock.patch.multiple(sys, stdout=out, stderr=err):
            code = cli.main([*args, "--database", str(self.db)])
        return code, out.getvalue(), err.getvalue()

    def damaged(self) -> Iterable[tuple[int, bytes]]:
        """Return copies of the file with one bit flipped, and where: mostly where something is stored."""
        choose = random.Random(self.SEED)
        stored = [place for place, byte in enumerate(self.whole) if byte]
        for number in range(self.BITS):
            place = choose.choice((stored, stored, range(100), range(len(self.whole)))[number % 4])
            data = bytearray(self.whole)
            data[place] ^= 1 << choose.randrange(8)
            yield place, bytes(data)

    def complaint(self, place: int, answer: Answer) -> str:
        """Return what is wrong with a command's answer; empty if it worked, or said that the file is damaged."""
        code, _, err = answer
        if code == 0:
            return ""
        if code != 1 or err.count("\n") != 1 or "internal error" in err or "Traceback" in err:
            return f"exit {code}: {err}"
        in_header = place < 100  # what SQLite makes of a header that no version of it has written is its affair
        return "" if in_header or any(phrase in err for phrase in self.REFUSED) else err

    def test_every_command_works_or_says_that_it_is_damaged(self) -> None:
        complaints = []
        for place, data in self.damaged():
            for args in (("init",), ("list",), ("list", "--json"), ("enqueue", "--type", "t"), ("retry-failed",)):
                self.lay(data)
                answer = self.command(*args)
                what = self.complaint(place, answer)
                if answer[0] != 0 and self.db.read_bytes() != data:
                    what += " (and the file was changed)"
                if what:
                    complaints.append(f"{' '.join(args)}, byte {place}: {what}")
                if args == ("list", "--json") and answer[0] == 0:
                    for line in answer[1].splitlines():
                        json.loads(line)
        self.assertEqual(complaints, [], f"seed {self.SEED}")

    def test_every_call_works_or_raises_an_error_of_ours(self) -> None:
        complaints = []
        later = FakeClock(self.clock.now_ms + 3_600_000)
        for place, data in self.damaged():
            self.lay(data)
            try:
                with Queue(self.db, clock=later) as queue:
                    for job in queue.claim("w2", limit=5):
                        queue.complete(job.id, token(job), job.payload)
                    queue.stats()
                    queue.enqueue("t", depends_on=["p6"], idempotency_key="new")
                    queue.cancel("p7")
                    queue.retry_failed()
            except JobQueueError:
                continue
            except Exception as error:
                complaints.append(f"byte {place}: {error!r}")
        self.assertEqual(complaints, [], f"seed {self.SEED}")

    def test_a_refused_file_has_nothing_left_beside_it(self) -> None:
        for place in (16, 18, 19, 20, 56, 59, 63, 70, len(self.whole) - 100):
            data = bytearray(self.whole)
            data[place] ^= 0x41
            self.lay(data)
            if self.command("init")[0] != 0:
                with self.subTest(place):
                    self.assertEqual(os.listdir(self.db.parent), ["jobs.db"])

    def test_text_that_is_no_text_is_damage(self) -> None:
        for old, new in ((b'{"text":"', b'{"text":\xff'), (b"CREATE TABLE jobs", b"CREATE \xffABLE jobs")):
            self.assertIn(old, self.whole)
            self.lay(self.whole.replace(old, new))
            for args in (("list",), ("list", "--json"), ("retry-failed",)):
                with self.subTest(new, args=args):
                    answer = self.command(*args)
                    if answer[0] != 0 or (args[-1] == "--json"):
                        self.refused(answer, "damaged")

    def test_a_payload_that_is_no_json_is_shown_as_it_is(self) -> None:
        self.assertIn(b'{"text"', self.whole)
        self.lay(self.whole.replace(b'{"text"', b'{"text!'))
        self.assertEqual(self.command("list")[0], 0)
        code, out, err = self.command("list", "--json")
        self.assertEqual((code, err), (0, ""))
        payloads = [json.loads(line)["payload"] for line in out.splitlines()]
        self.assertTrue(any(isinstance(each, str) and each.startswith('{"text!') for each in payloads), payloads)

    def test_a_worker_ends_with_1(self) -> None:
        ((root,),) = sql(self.db, "SELECT rootpage FROM sqlite_master WHERE name = 'jobs_ready'")
        ((size,),) = sql(self.db, "PRAGMA page_size")
        data = bytearray(self.whole)
        data[(root - 1) * size : root * size] = b"\xff" * size
        self.lay(data)
        code, _, err = self.commands(["worker --drain --workers 1"], self.db).popitem()[1]
        self.assertEqual((code, "Traceback" in err), (1, False), err)
        self.assertRegex(err, "jobs.db is damaged; restore a backup")



if __name__ == "__main__":
    unittest.main()
