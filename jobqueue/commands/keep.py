"""Commands that look after the file: `init`."""

from __future__ import annotations

from .common import EXIT_DONE, add_database, database_path, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from .common import Command

_INIT = """\
Create the database file, readable by you alone. On a file that already is a queue
it changes nothing; any other file is refused and left as it is.

examples:
  python -m jobqueue init --database jobs.db
  JOBQUEUE_DATABASE=jobs.db python -m jobqueue init
"""


def _init(options: Namespace) -> int:
    path = database_path(options)
    from ..queue import Queue

    with Queue(path, create=True) as queue:
        say(f"created {path}" if queue.created else f"{path} is already a queue; nothing changed")
    return EXIT_DONE


COMMANDS: dict[str, Command] = {"init": (_INIT, add_database, _init)}
