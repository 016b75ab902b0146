"""`completion`: the script for bash in a real bash, the others as far as they can be read without their shells.

A driver sets what bash sets when Tab is pressed, calls the function, and prints what it offers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import unittest

from jobqueue import cli
from jobqueue.commands.common import OneOf
from jobqueue.queue import Queue
from tests.support import environment
from tests.test_cli import CliTestCase

BASH = shutil.which("bash")

DRIVER = """
source "$1"
complete -p jobqueue >/dev/null || exit 9
shift
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
for line; do
    COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
    _jobqueue
    printf '%s\\0' "$line" "${COMPREPLY[@]}"
    printf '\\0'
done
"""
ODD = ("a b", "$(touch hacked)", "`touch hacked`", "x;touch hacked", "quo'te", 'dou"ble', "*", "ns:one",
       "ns:two", "ümlaut")


@unittest.skipUnless(BASH, "there is no bash here")
class BashTest(CliTestCase):
    """What Tab offers."""

    def setUp(self) -> None:
        super().setUp()
        self.script = self.dir / "jobqueue.bash"
        self.script.write_text(self.main("completion", "bash").out)

    def offered(self, *lines: str) -> list[list[str]]:
        """Return what is offered at the end of each line."""
        assert BASH is not None
        done = subprocess.run([BASH, "--norc", "-c", DRIVER, "driver", self.script, *lines], capture_output=True,
                              text=True, cwd=self.dir, env=environment({"LC_ALL": "C.UTF-8"}), timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = [block.split("\0") for block in done.stdout.removesuffix("\0\0").split("\0\0")]
        self.assertEqual([block[0] for block in found], list(lines))
        return [[name for name in block[1:] if name] for block in found]

    def test_it_is_a_script_that_bash_takes(self) -> None:
        assert BASH is not None
        subprocess.run([BASH, "-n", self.script], check=True)

    def test_commands_options_and_words(self) -> None:
        every, some, elsewhere, words, attached, flag, none = self.offered(
            "jobqueue ", "jobqueue re", "python3 -m jobqueue ca", "jobqueue list --status ",
            "jobqueue list --status=re", "jobqueue cancel --al", "jobqueue list --limit ")
        self.assertEqual(every, [*cli.COMMANDS, "--help", "--version"])
        self.assertEqual(some, ["retry", "retry-failed"])
        self.assertEqual(elsewhere, ["cancel"])
        self.assertEqual(words, ["pending", "running", "retrying", "completed", "failed", "canceled"])
        self.assertEqual(attached, ["retrying"])
        self.assertEqual(flag, ["--allow-shared", "--all-pending"])
        self.assertEqual(none, [])

    def test_every_option_and_word_of_every_command(self) -> None:
        lines, wanted = [], []
        for name in cli.COMMANDS:
            parser, _ = cli.command_parser(name)
            shown = parser._actions
            lines.append(f"jobqueue {name} -")
            wanted.append([option for action in shown for option in action.option_strings])
            for action in shown:
                for option in action.option_strings if isinstance(action.type, OneOf) else ():
                    assert isinstance(action.type, OneOf)
                    lines.append(f"jobqueue {name} {option} ")
                    wanted.append(list(action.type.words))
        self.assertGreater(len(lines), 20)
        self.assertEqual(dict(zip(lines, self.offered(*lines), strict=True)), dict(zip(lines, wanted, strict=True)))

    def test_types_and_ids_are_those_of_the_file(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": "mail", "id": "m1"}, {"type": "make", "id": "m2", "queue": "other"},
                                {"type": "mail", "id": "n1"}])
        db = f"--database {self.db}"
        types, filtered, ids, more, option, attached, own = self.offered(
            f"jobqueue list {db} --type ", f"jobqueue cancel --database={self.db} --type mak",
            f"jobqueue show {db} ", f"jobqueue wait {db} n1 m", f"jobqueue list {db} --depends-on n",
            f"jobqueue retry-failed {db} --id=m2", f"jobqueue enqueue {db} --id ")
        self.assertEqual((types, filtered), (["mail", "make"], ["make"]))
        self.assertEqual((ids, more, option, attached, own), (["n1", "m2", "m1"], ["m2", "m1"], ["n1"], ["m2"], []))

    def test_names_are_quoted_and_never_evaluated(self) -> None:
        with Queue(self.db, create=True) as queue:
            queue.enqueue_many([{"type": name, "id": name} for name in ODD])
        ids, types, behind = self.offered(f"jobqueue show --database {self.db} ",
                                          f"jobqueue list --database {self.db} --type ",
                                          f"jobqueue show --database {self.db} ns:")
        assert BASH is not None
        for offered in (ids, types):
            back = subprocess.run([BASH, "-c", f"printf '%s\\0' {' '.join(offered)}"], capture_output=True,
                                  text=True, cwd=self.dir, env=environment({"LC_ALL": "C.UTF-8"}), check=True)
            self.assertEqual(sorted(back.stdout.split("\0")[:-1]), sorted(ODD))
        self.assertEqual(sorted(behind), ["one", "two"], "readline keeps what stands before the colon")
        self.assertFalse((self.dir / "hacked").exists())

    def test_files(self) -> None:
        (self.dir / "jobs.jsonl").touch()
        (self.dir / "jobs dir").mkdir()
        self.assertEqual(sorted(self.offered("jobqueue enqueue --file jobs")[0]), ["jobs dir", "jobs.jsonl"])

    def test_without_a_file_nothing_is_offered_and_nothing_said(self) -> None:
        self.assertEqual(self.offered("jobqueue show ", "jobqueue show --database nowhere.db "), [[], []])


class ScriptTest(CliTestCase):
    """The scripts as text, and the command."""

    def test_all_shells_know_all_commands_and_their_words(self) -> None:
        for shell in ("bash", "zsh", "fish"):
            with self.subTest(shell=shell):
                done = self.main("completion", shell)
                self.assertEqual((done.code, done.err), (0, ""))
                self.assertNotRegex(done.out, "@[A-Z]+@")
                for word in (*cli.COMMANDS, "depends-on", "prometheus"):
                    self.assertRegex(done.out, rf"\b{re.escape(word)}\b")
                program = shutil.which(shell)
                if program is not None:
                    subprocess.run([program, "-n", "-c", done.out], check=True)

    def test_usage(self) -> None:
        self.refused(2, "name the shell, one of bash, zsh, fish", "completion")
        self.refused(2, "there is no shell 'fsh'; did you mean 'fish'?", "completion", "fsh")
        self.refused(2, "use --database PATH", "completion", "--types")

    def test_what_the_scripts_ask_for(self) -> None:
        self.create()
        self.assertEqual(self.ok("completion", "--types"), "")
        with Queue(self.db) as queue:
            queue.enqueue_many({"type": f"t{n % 3}", "queue": f"q{n % 2}"} for n in range(1_010))
        self.assertEqual(self.ok("completion", "--types"), "t0\nt1\nt2\n")
        self.assertEqual(self.ok("completion", "--ids").split(), [str(n) for n in range(1_010, 10, -1)])


if __name__ == "__main__":
    unittest.main()
