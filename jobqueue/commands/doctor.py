"""The command that tells whether the file is in order: `doctor`."""

from __future__ import annotations

import os
import sys

from ..text import escape
from ..times import now_ms
from .common import EXIT_DONE, EXIT_FAILED, add_database, add_json, database_path, emit, emit_json, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

    from ..checkup import Finding
    from .common import Command

_DOCTOR = """\
Check the database and what is around it, and say what to do about each finding.
Nothing is changed.

examples:
  python -m jobqueue doctor --database jobs.db
  python -m jobqueue doctor --quick --json

It looks at the rights and the place of the file, at SQLite's version, the
schema, the write-ahead log, leases, workers and clocks, and then, unless
--quick, through the whole file: every page, every dependency, every counter.

exit status: 0 healthy (notes do not count); 1 there are warnings or problems, or
there is no file; 75 database busy.
"""


def _add_options(parser: ArgumentParser) -> None:
    add_database(parser)
    parser.add_argument("--quick", action="store_true",
                        help="leave out what reads the whole file")
    add_json(parser, 'print {"check", "severity", "what", "remedy"} for each check')


def _doctor(options: Namespace) -> int:
    from ..checkup import FAULTS, examine

    path = database_path(options)
    findings = list(examine(path, now_ms=now_ms(), quick=options.quick))
    if options.json:
        emit_json(finding.as_dict() for finding in findings)
    else:
        emit(_lines(findings))
    faults = sum(finding.severity in FAULTS for finding in findings)
    if not faults:
        say(f"{path} is healthy" + (" as far as --quick looks" if options.quick else ""))
        return EXIT_DONE
    say(f"{path} is not healthy: {faults} finding{'' if faults == 1 else 's'}")
    return EXIT_FAILED


def _lines(findings: list[Finding]) -> Iterator[str]:
    from ..checkup import NOTE, OK, PROBLEM, WARNING
    from ..render import use_colour

    colours = {OK: "32", NOTE: "36", WARNING: "33", PROBLEM: "1;31"} if use_colour(sys.stdout, os.environ) else {}
    for finding in findings:
        mark = f"{finding.severity:<7}"
        if colours:
            mark = f"\x1b[{colours[finding.severity]}m{mark}\x1b[0m"
        yield f"{mark}  {finding.check}: {escape(finding.what)}"
        if finding.remedy:
            yield f"{'':<9}-> {escape(finding.remedy)}"


COMMANDS: dict[str, Command] = {"doctor": (_DOCTOR, _add_options, _doctor)}
