"""What the README shows is true: its commands and its Python are run as they stand there."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import unittest

from tests.support import TOP, TempDirTestCase, environment, jobs, run, until

README = (TOP / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in one language."""
    return [text for kind, text in BLOCKS if kind == language]


class ReadmeTest(TempDirTestCase):
    """Each block by itself, in an empty directory."""

    def test_python_runs(self) -> None:
        scripts = [text for text in blocks("python") if not text.startswith("# tasks.py")]
        self.assertGreaterEqual(len(scripts), 5)
        for number, text in enumerate(scripts):
            with self.subTest(number=number):
                done = subprocess.run([sys.executable, "-W", "error", "-c", text], cwd=self.dir, timeout=30,
                                      env=environment(), capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_its_handler_is_loaded_and_runs(self) -> None:
        (handlers,) = (text for text in blocks("python") if text.startswith("# tasks.py"))
        (self.dir / "tasks.py").write_text(handlers, "utf-8")
        run("init", "--database", self.db)
        run("enqueue", "--database", self.db, "--type", "thumbnail", "--payload", '{"path":"a"}')
        done = run("worker", "--database", self.db, "--handlers", "./tasks.py", "--drain", cwd=self.dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(jobs(self.db)[0]["result"], {"path": "a.png"})

    def test_the_five_commands(self) -> None:
        (text,) = (text for text in blocks("sh") if "--idempotency-key example-1" in text)
        commands = [shlex.split(line) for line in text.splitlines()]
        self.assertEqual([command[:3] for command in commands], [["python", "-m", "jobqueue"]] * 5)
        names = [command[3] for command in commands]
        self.assertEqual(names, ["init", "enqueue", "worker", "list", "retry-failed"])
        for command in commands:
            arguments = command[3:]
            if arguments[0] == "worker":  # runs until it is told to stop
                worker = self.start(*arguments, cwd=self.dir)
                until(lambda: jobs(self.dir / "jobs.db")[0]["status"] == "completed", what="the job to be done")
                worker.send_signal(signal.SIGINT)
                self.assertEqual(worker.finish(10).returncode, 0)
                self.assertEqual(worker.stdout_text(), "hello\n")
            else:
                done = run(*arguments, cwd=self.dir)
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_cron_lines_are_commands_of_ours(self) -> None:
        (text,) = blocks("cron")
        for line in text.splitlines():
            for command in re.findall(r"python3 -m jobqueue (\w+)", line):
                self.assertIn(command, ("enqueue", "worker"))
        self.assertEqual(text.count("python3 -m jobqueue"), 2)

    def test_every_command_is_in_the_table(self) -> None:
        from jobqueue.cli import COMMANDS

        listed = re.findall(r"^\| `([a-z-]+)` \|", README, re.MULTILINE)
        self.assertEqual([name for name in COMMANDS if name not in listed], [])


if __name__ == "__main__":
    unittest.main()
