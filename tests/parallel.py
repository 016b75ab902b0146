"""The whole suite in as many processes as there are CPUs, a test module at a time.

    python -m tests.parallel [--jobs N]

Tells what `python -m unittest discover` would, in the same words at the end, in half the time on two CPUs. Each
module has an interpreter of its own, with the warning options of this one. Exit status 1: a test failed, or a
module ran none.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS_EACH = 600
_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_VERDICT = re.compile(r"^(OK|FAILED|NO TESTS RAN)(?: \((.*)\))?$", re.MULTILINE)


def modules() -> list[str]:
    """Return the names of all test modules, the longest file first: none of them should be left for the end."""
    files = sorted(ROOT.glob("tests/test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    return [f"tests.{path.stem}" for path in files]


def run(module: str) -> tuple[str, Counter[str], str]:
    """Run one module; return its name, the counts of its verdict, and what it said."""
    argv = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-m", "unittest", module]
    try:
        done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
                              stderr=subprocess.STDOUT, timeout=SECONDS_EACH)  # fmt: skip
        said, status = done.stdout.decode(errors="replace"), done.returncode
    except subprocess.TimeoutExpired as error:
        said, status = (error.stdout or b"").decode(errors="replace") + f"\nended after {SECONDS_EACH} s\n", 1
    return module, counts(said, status), said


def counts(said: str, status: int) -> Counter[str]:
    """Return `tests`, `failures`, `errors`, `skipped` and so on, of what unittest said at its end."""
    found: Counter[str] = Counter()
    ran, verdict = _RAN.findall(said), list(_VERDICT.finditer(said))
    found["tests"] = int(ran[-1]) if ran else 0
    for part in (verdict[-1][2] or "").split(", ") if verdict else ():
        name, _, number = part.partition("=")
        if number:
            found[name] = int(number)
    if not found["tests"] or (status and not is_bad(found)):
        found["errors"] += 1
    return found


def is_bad(found: Counter[str]) -> bool:
    """Return whether counts tell of a failure."""
    return any(found[name] for name in ("failures", "errors", "unexpected successes"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all modules; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parallel", description="Run the suite on all CPUs.")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="processes (the CPUs)")
    options = parser.parse_args(argv)
    begun = time.monotonic()
    total: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for module, found, said in pool.map(run, modules()):
            total += found
            if is_bad(found):
                print(f"== {module}\n{said}", flush=True)
    print("-" * 70 + f"\nRan {total.pop('tests', 0)} tests in {time.monotonic() - begun:.3f}s\n")
    parts = ", ".join(f"{name}={number}" for name, number in sorted(total.items()))
    print(("FAILED" if is_bad(total) else "OK") + (f" ({parts})" if parts else ""))
    return int(is_bad(total))


if __name__ == "__main__":
    sys.exit(main())
