"""Break the package on purpose, one safety check at a time, and see that the tests notice.

    python -m tests.mutants                     all of them; exit 1 if one survives
    python -m tests.mutants --list
    python -m tests.mutants --only held-token --only claim-order --jobs 2

A mutation (see `mutations`) replaces a few words of one module in a copy of the package, and names the tests that
must fail then: a short list of the quickest ones that cover the promise. They run in the order given until the
first failure. A copy that cannot be imported proves nothing and counts as an error, and so does a mutation whose
words are not found exactly as often as they should be. First of all the tests run without any mutation: one that
fails then catches nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.mutations import MUTATIONS, Mutation
from tests.support import TOP, _kill

FAILED = re.compile(r"^(?:FAIL|ERROR): (.+)$", re.MULTILINE)
LIMIT_SECONDS = 180
"""Tests that run for longer are taken to hang, which is a failure of theirs."""


class Verdict(NamedTuple):
    """What became of a mutation: `caught` by a test, `survived`, or `error`."""

    mutation: Mutation
    what: str
    by: str
    seconds: float


def mutated(mutation: Mutation, source: str) -> str:
    """Return the source with the mutation in it.

    Raises:
        ValueError: its words are not there as often as they should be.
    """
    found = source.count(mutation.old)
    if found != mutation.times:
        raise ValueError(f"{mutation.name}: {mutation.old!r} is {found} times in {mutation.file}, not "
                         f"{mutation.times}; adjust it in tests/mutations.py")
    changed = source.replace(mutation.old, mutation.new)
    if changed == source:
        raise ValueError(f"{mutation.name}: it changes nothing")
    return changed


def missing_tests(mutation: Mutation) -> list[str]:
    """Return those of its tests that are not in the source of the tests."""
    return [name for name in mutation.tests if not _is_there(*name.split("."))]


def _is_there(module: str, *inside: str) -> bool:
    path = TOP / "tests" / f"{module}.py"
    if not path.exists() or not inside:
        return path.exists()
    nodes = ast.parse(path.read_text("utf-8")).body
    for name in inside:
        found = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
        if not found:
            return False
        nodes = found[0].body
    return True


@contextmanager
def copied() -> Iterator[Path]:
    """Return a copy of the package and its tests, for the time being."""
    with tempfile.TemporaryDirectory(prefix="jobqueue-mutant-") as directory:
        copy = Path(directory)
        for name in ("jobqueue", "tests"):
            shutil.copytree(TOP / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "pyproject.toml", "Makefile"):
            shutil.copy(TOP / name, copy)
        yield copy


def try_out(mutation: Mutation, failing: Collection[str] = ()) -> Verdict:
    """Run the tests of a mutation in a copy that has it; `failing` are those that fail without it, too."""
    begun = time.monotonic()
    with copied() as copy:
        target = copy / "jobqueue" / mutation.file
        try:
            target.write_text(mutated(mutation, target.read_text("utf-8")), "utf-8")
            what, by = _judge(mutation.tests, copy, failing)
        except ValueError as error:
            what, by = "error", str(error)
    return Verdict(mutation, what, by, time.monotonic() - begun)


def already_failing(mutations: Iterable[Mutation]) -> set[str]:
    """Run the tests of all these in an unchanged copy; return which fail."""
    names = sorted({name for mutation in mutations for name in mutation.tests})
    with copied() as copy:
        code, text = _run(names, copy)
    return set(FAILED.findall(text)) or ({"all"} if code else set())


def _judge(tests: Iterable[str], copy: Path, failing: Collection[str]) -> tuple[str, str]:
    """Return what the tests say of a copy with a mutation, and which of them has failed."""
    code, text = _run(["-f", *tests], copy)
    failed = FAILED.findall(text)
    if code is None:
        return "caught", f"no end within {LIMIT_SECONDS} s"
    if code == 0:
        return "survived", ""
    if not failed or "unittest.loader._FailedTest" in text:
        return "error", f"its tests did not run: {text[-600:]}"
    if failed[0] in failing:
        return "error", f"fails without it, too: {failed[0]}"
    return "caught", failed[0]


def _run(tests: Iterable[str], copy: Path) -> tuple[int | None, str]:
    """Return the exit code and the report of tests; the code is None if they do not end."""
    names = [name if name.startswith("-") else f"tests.{name}" for name in tests]
    argv = [sys.executable, "-m", "unittest", *names]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    with subprocess.Popen(argv, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            _, err = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _kill(process)
    return process.returncode, err.decode("utf-8", "replace")


def verdicts(mutations: list[Mutation], jobs: int, failing: Collection[str] = ()) -> Iterator[Verdict]:
    """Yield what becomes of each, in order; so many at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(try_out, failing=failing), mutations)


def _listed(mutation: Mutation) -> str:
    return f"{mutation.name:30} promise {mutation.promise:2}  {mutation.file:20} {', '.join(mutation.tests)}"


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break the package on purpose.")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this mutation; repeatable")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="so many at a time (1)")
    options = parser.parse_args()
    strangers = set(options.only or ()) - {mutation.name for mutation in MUTATIONS}
    if strangers:
        parser.error(f"there is no mutation {', '.join(sorted(strangers))}; --list names them")
    chosen = [mutation for mutation in MUTATIONS if options.only is None or mutation.name in options.only]
    if options.list:
        print("\n".join(map(_listed, chosen)))
        return 0
    failing = already_failing(chosen)
    for name in sorted(failing):
        print(f"this fails without any mutation: {name}", file=sys.stderr)
    bad = len(failing)
    for verdict in verdicts(chosen, options.jobs, failing):
        bad += verdict.what != "caught"
        by = re.sub(r"^(\w+) \(tests\.([\w.]+?)(?:\.\1)?\)", r"\2.\1", verdict.by)
        about = f"{verdict.mutation.promise:2} {verdict.mutation.name:30}"
        print(f"{about} {verdict.what:8} {verdict.seconds:6.1f} s  {by}", flush=True)
    print(f"{len(chosen)} mutations, {bad} troubles")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(_main())
