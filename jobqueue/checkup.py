"""Is this file in order, and what is to be done if not: what `doctor` finds.

Reads only.  A file that nobody has open is opened so that nothing is made beside it; where there is a
write-ahead log, as a reader beside the others.  Every check is a function that yields findings; one that
cannot be made because the file is damaged is a finding itself, never a traceback.

The thorough checks read the whole file.  All others read the indexes of what runs or is ready, the newest
jobs and the header: their cost does not grow with the finished jobs.
"""

from __future__ import annotations

import os
import stat
import time

from . import place, schema
from .connection import Connection
from .errors import DatabaseBusy, DatabaseError
from .explain import ALIVE_MS
from .lifecycle import CLAIMABLE, COMPLETED
from .schema import IS_FINISHED, IS_READY, IS_RUNNING, IS_WAITING, quoted
from .times import WALL_CLOCK_MS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

OK = "ok"
NOTE = "note"
"""Worth knowing; nothing has to be done."""
WARNING = "warning"
PROBLEM = "problem"
FAULTS = (WARNING, PROBLEM)
"""What makes a file not healthy."""

LARGE_WAL_BYTES = 64_000_000
AHEAD_MS = 5_000
"""Clocks may differ by so much before anybody minds."""
OVERDUE_MS = 60_000
"""A lease that ran out so long ago should have been reclaimed."""
NEWEST = 1_000
READER_LOOK_SECONDS = 0.2
_READ_LOCKS = range(123, 128)
"""Where in the -shm file readers hold their locks (https://sqlite.org/walformat.html#wal_locks)."""
_WAL_RESET_FIXED = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
_REBUILD = ("stop all workers and make a new file of it: python -m jobqueue export > jobs.jsonl, then init and "
            "import with another --database")
_RESTORE = "stop all workers and restore the newest backup; python -m jobqueue export tells what can still be read"

_DANGLING = """
SELECT count(*) FROM dependencies WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE seq = job)
                                     OR NOT EXISTS (SELECT 1 FROM jobs WHERE seq = depends_on)"""
_MISCOUNTED = f"""
SELECT count(*), sum(counted.n < child.unmet), min(child.id)
FROM (SELECT job, sum(parent.status <> '{COMPLETED}') AS n FROM dependencies
      JOIN jobs AS parent ON parent.seq = depends_on GROUP BY job) AS counted
JOIN jobs AS child ON child.seq = counted.job
WHERE child.status IN {quoted(CLAIMABLE)} AND counted.n <> child.unmet"""
_WAITING_FOR_NOTHING = f"""
SELECT count(*), count(*), min(id) FROM jobs
WHERE {IS_WAITING} AND NOT EXISTS (SELECT 1 FROM dependencies WHERE job = seq)"""
_EXPIRED = f"""
SELECT count(*), min(lease_expires_at), min(id), min(queue) FROM jobs
WHERE {IS_RUNNING} AND lease_expires_at BETWEEN {WALL_CLOCK_MS} AND :now - {OVERDUE_MS}"""
_ORPHANS = f"""
SELECT count(*), min(lease_owner) FROM jobs
WHERE {IS_RUNNING} AND lease_expires_at > :now AND lease_owner NOT IN (SELECT id FROM workers)"""
_AHEAD = f"""
SELECT 'a job was queued', max(created_at) FROM (SELECT created_at FROM jobs ORDER BY seq DESC LIMIT {NEWEST})
UNION ALL SELECT 'a job was started', max(started_at) FROM (SELECT started_at FROM jobs WHERE {IS_RUNNING})
UNION ALL SELECT 'a job ended', max(finished_at) FROM jobs WHERE {IS_FINISHED}
UNION ALL SELECT 'a worker was seen', max(seen_at) FROM workers"""
_READY_TOO_EARLY = f"SELECT count(*) FROM (SELECT 1 FROM jobs WHERE {IS_READY} AND run_at > :now LIMIT 1000)"
_ANY_READY = f"SELECT EXISTS (SELECT 1 FROM jobs WHERE {IS_READY})"


class Finding:
    """One thing that was looked at.

    Attributes:
        check: the name of the check; stable, for programs.
        severity: `ok`, `note`, `warning` or `problem`.
        what: a sentence without its full stop.
        remedy: what to do about it; None: nothing.
    """

    __slots__ = ("check", "remedy", "severity", "what")

    def __init__(self, check: str, severity: str, what: str, remedy: str | None = None) -> None:
        self.check = check
        self.severity = severity
        self.what = what
        self.remedy = remedy

    def as_dict(self) -> dict[str, str | None]:
        """Return it as `--json` shows it."""
        return {"check": self.check, "severity": self.severity, "what": self.what, "remedy": self.remedy}


class Glance(Connection):
    """A connection that changes nothing, not even by being closed.

    Args:
        alone: nobody has the file open: make nothing beside it.
    """

    def __init__(self, path: str, *, alone: bool) -> None:
        self._mode = "ro&immutable=1" if alone else "ro"
        super().__init__(path, allow_shared=True)

    def _open(self, create: bool) -> None:
        self._sqlite = self._connect(self._mode)


def examine(path: str, *, now_ms: int, quick: bool = False) -> Iterator[Finding]:
    """Look at a queue's file and yield what is found, good and bad, check by check.

    Not for a process that has the file open itself.

    Args:
        quick: leave out the checks that read the whole file.

    Raises:
        DatabaseError: there is no file.
        DatabaseBusy: another process kept the file locked.
    """
    if not os.path.exists(path):
        raise DatabaseError(f"there is no database {path}; create it with: "
                            f"python -m jobqueue init --database {path}")
    try:
        yield from _examine(path, now_ms, quick)
    except DatabaseBusy:
        raise
    except DatabaseError as error:
        what, _, remedy = str(error).rpartition("; ")
        yield Finding("file", PROBLEM, what or remedy, remedy if what else _RESTORE)


def _examine(path: str, now_ms: int, quick: bool) -> Iterator[Finding]:
    real = place.resolve(path)  # refuses a network mount
    yield Finding("mount", OK, f"on a local file system ({place.file_system(real) or 'of unknown kind'})")
    yield from _rights(path, real)
    alone = not os.path.exists(real + "-wal") and not os.path.exists(real + "-journal")
    before = _state(real)
    found = list(_look_inside(path, alone, now_ms, quick))
    if alone and _state(real) != before:  # somebody began to use it meanwhile
        found = list(_look_inside(path, False, now_ms, quick))
    yield from found


def _state(path: str) -> tuple[bool, int, int]:
    now = os.stat(path)
    return os.path.exists(path + "-wal"), now.st_mtime_ns, now.st_size


def _look_inside(path: str, alone: bool, now_ms: int, quick: bool) -> Iterator[Finding]:
    glance = Glance(path, alone=alone)
    try:
        with glance.snapshot():
            version = schema.check_ours(glance.sqlite, glance.shown_path)
        checks: list[Callable[[Look], Iterator[Finding]]] = [
            _sqlite_version, _schema, _settings, _log, _leases, _workers, _clocks]
        if not quick:
            checks += [_pages, _dependencies]
        look = Look(glance, version, now_ms)
        for check in checks:
            try:
                with glance.snapshot():
                    findings = list(check(look))
            except DatabaseBusy:
                raise
            except DatabaseError as error:
                findings = [Finding(check.__name__.strip("_"), PROBLEM, str(error).partition(";")[0], _RESTORE)]
            yield from findings
    finally:
        glance.close()


class Look:
    """What a check may use: the open file, its version, the time."""

    __slots__ = ("file", "now_ms", "version")

    def __init__(self, file: Glance, version: int, now_ms: int) -> None:
        self.file = file
        self.version = version
        self.now_ms = now_ms

    def rows(self, sql: str) -> list[Any]:
        """Return the rows of a query; `:now` in it is the time."""
        return self.file.sqlite.execute(sql, {"now": self.now_ms} if ":now" in sql else {}).fetchall()

    def value(self, sql: str) -> Any:
        """Return the only value of a query."""
        return self.rows(sql)[0][0]


# -- around the file ------------------------------------------------------------------

def _rights(path: str, real: str) -> Iterator[Finding]:
    if os.name != "posix":
        return
    found = os.stat(real)
    try:
        place.refuse_shared(path, real)
    except DatabaseError as error:
        what, _, remedy = str(error).rpartition("; ")
        yield Finding("rights", WARNING, what.replace(" was not opened", ""), remedy)
        return
    if found.st_mode & stat.S_IROTH:
        yield Finding("rights", WARNING, "every user of this machine may read the jobs and keep the file locked",
                      f"chmod o-rwx {_quoted(real)}")
    elif not os.access(real, os.R_OK | os.W_OK):
        yield Finding("rights", WARNING, f"you may not write the file, which belongs to user {found.st_uid}",
                      f"run commands as that user, or: chown $(id -u) {_quoted(real)}")
    else:
        yield Finding("rights", OK, f"mode {stat.S_IMODE(found.st_mode):04o}, owned by user {found.st_uid}")
    for beside in (real + "-wal", real + "-shm"):
        try:
            other = os.stat(beside)
        except OSError:
            continue
        if (other.st_uid, stat.S_IMODE(other.st_mode)) != (found.st_uid, stat.S_IMODE(found.st_mode)):
            yield Finding("rights", WARNING, f"{beside} has another mode or owner than the file, so that some "
                          "who may use the one cannot use the other",
                          f"stop all workers, then: chown {found.st_uid} {_quoted(beside)}; "
                          f"chmod {stat.S_IMODE(found.st_mode):04o} {_quoted(beside)}")


def _quoted(path: str) -> str:
    from shlex import quote

    return quote(path)


def _sqlite_version(look: Look) -> Iterator[Finding]:
    text = str(look.value("SELECT sqlite_version()"))
    numbers = tuple(map(int, text.split(".")[:3]))
    if has_wal_reset_bug(numbers):
        yield Finding("sqlite", NOTE, f"SQLite {text} has the WAL-reset bug; this program's own checkpoints "
                      "avoid it, those of other programs that have the file open do not",
                      "let no other program (a sqlite3 shell, say) write while workers run, "
                      "or use a Python with SQLite 3.51.3 or newer")
    else:
        yield Finding("sqlite", OK, f"SQLite {text}, without the WAL-reset bug")


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Return whether this SQLite can damage a file when a checkpoint meets a writer that resets the log."""
    if not (3, 7, 0) <= version < _WAL_RESET_FIXED[-1]:
        return False
    return not any(version[:2] == fixed[:2] and version >= fixed for fixed in _WAL_RESET_FIXED)


def _log(look: Look) -> Iterator[Finding]:
    size = look.file.wal_bytes()
    if size <= LARGE_WAL_BYTES:
        yield Finding("log", OK, f"the write-ahead log has {size:,} bytes")
        return
    first = _readers(look.file.path + "-shm")
    time.sleep(READER_LOOK_SECONDS)
    pids = sorted((first & _readers(look.file.path + "-shm")) - {os.getpid()})
    who = f"process {', '.join(map(str, pids))} has" if pids else "a process may have"
    yield Finding("log", WARNING, f"the write-ahead log has grown to {size:,} bytes; {who} been reading for long, "
                  "which keeps it from being emptied", "end that process, such as a sqlite3 shell, or an export "
                  "that waits for its reader; the next commits empty the log")


def _readers(path: str) -> set[int]:
    """Return the pids that hold a reader's lock now, as far as the system tells (Linux)."""
    pids: set[int] = set()
    try:
        inode = os.stat(path).st_ino
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            for line in locks:
                words = line.split()
                if len(words) >= 8 and words[1] == "POSIX" and words[5].rpartition(":")[2] == str(inode) \
                        and int(words[6]) in _READ_LOCKS:
                    pids.add(int(words[4]))
    except (OSError, ValueError):
        pass  # no such system, or a line that is none: then nobody is named
    return pids


# -- the file itself ------------------------------------------------------------------

def _schema(look: Look) -> Iterator[Finding]:
    if look.version < schema.VERSION:
        yield Finding("schema", NOTE, f"the file has format {look.version}; this program writes {schema.VERSION}",
                      "the next command that opens it for writing brings it up to date")
        return
    faults = schema.differences(look.file.sqlite)
    for fault in faults:
        severity = PROBLEM if fault.endswith("missing") else WARNING
        yield Finding("schema", severity, f"{fault}, compared with what this program creates", _REBUILD)
    if not faults:
        yield Finding("schema", OK, f"format {look.version}, as this program creates it")


def _settings(look: Look) -> Iterator[Finding]:
    if look.value("PRAGMA auto_vacuum") != 2:
        yield Finding("settings", WARNING, "the file was made without auto_vacuum=INCREMENTAL, so it never gives "
                      "room back to the disk", _REBUILD)
    pages, free, size = (look.value(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size"))
    yield Finding("size", OK, f"{pages * size:,} bytes, of which {free * size:,} are free for new jobs")


def _pages(look: Look) -> Iterator[Finding]:
    answers = [str(answer) for (answer,) in look.rows("PRAGMA quick_check(5)")]
    if answers == ["ok"]:
        yield Finding("pages", OK, "quick_check: every page and every row is as it should be")
        return
    for answer in answers:
        yield Finding("pages", PROBLEM, f"quick_check: {answer}", _RESTORE)


def _dependencies(look: Look) -> Iterator[Finding]:
    faults = []
    dangling = look.value(_DANGLING)
    if dangling:
        faults.append(Finding("dependencies", PROBLEM, f"{dangling:,} dependencies name a job that is not there",
                              _REBUILD))
    for count, waiting, first in (*look.rows(_MISCOUNTED), *look.rows(_WAITING_FOR_NOTHING)):
        if count:
            what = f"{waiting:,} would wait for ever, {count - waiting:,} would start too early"
            faults.append(Finding("dependencies", PROBLEM, f"{count:,} jobs have miscounted what they wait for "
                                  f"({what}), as job {first!r}", _REBUILD))
    yield from faults or [Finding("dependencies", OK, "all dependencies lead to jobs, and are counted right")]


# -- who works on it ------------------------------------------------------------------

def _leases(look: Look) -> Iterator[Finding]:
    ((expired, oldest, first, queue),) = look.rows(_EXPIRED)
    if expired:
        yield Finding("leases", WARNING, f"the leases of {expired:,} jobs, as {first!r}, ran out "
                      f"{_ago(look.now_ms - oldest)} ago and less, and nobody has reclaimed them",
                      f"start a worker for their queue: python -m jobqueue worker --queue {_quoted(queue)}")
    ((orphans, owner),) = look.rows(_ORPHANS)
    if orphans:
        yield Finding("leases", NOTE, f"{orphans:,} running jobs belong to somebody who is not in the list of "
                      f"workers, as {owner!r}", "nothing: a program of yours may claim jobs itself; otherwise they "
                      "are reclaimed when their leases run out")
    if not expired and not orphans:
        yield Finding("leases", OK, "no lease has been forgotten")


def _workers(look: Look) -> Iterator[Finding]:
    rows = look.rows("SELECT host, pid, seen_at FROM workers ORDER BY seen_at DESC")
    alive = [row for row in rows if row[2] >= look.now_ms - ALIVE_MS]
    for host, pid, seen_at in rows[len(alive):]:
        yield Finding("workers", NOTE, f"the worker on {host}, process {pid}, was last seen "
                      f"{_ago(look.now_ms - seen_at)} ago and has not said farewell",
                      "nothing: its jobs are reclaimed when their leases run out; it is forgotten after a week")
    if alive:
        yield Finding("workers", OK, f"{len(alive):,} alive, last seen {_ago(look.now_ms - alive[0][2])} ago")
    elif look.value(_ANY_READY):
        yield Finding("workers", NOTE, "jobs are ready, but no worker is alive",
                      "start one: python -m jobqueue worker")
    else:
        yield Finding("workers", OK, "none is alive, and no job is ready")


def _clocks(look: Look) -> Iterator[Finding]:
    ahead = [(what, then - look.now_ms) for what, then in look.rows(_AHEAD)
             if then is not None and then - look.now_ms > AHEAD_MS]
    for what, by_ms in ahead:
        yield Finding("clocks", WARNING, f"by this machine's clock, {what} {_ago(by_ms)} in the future: it was set "
                      "back, or somebody else's is ahead", "set the clocks right (timedatectl, chronyc tracking); "
                      "leases and delays are off by as much until then")
    early = look.value(_READY_TOO_EARLY)
    if early and not ahead:
        yield Finding("clocks", NOTE, f"{early:,} jobs are marked ready before their time: the clock was set back",
                      "nothing: they wait for their time all the same")
    if not ahead and not early:
        yield Finding("clocks", OK, "no time lies in the future")


def _ago(ms: int) -> str:
    """Return a length of time in the unit that fits."""
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if ms >= 2 * unit_ms:
            return f"{ms // unit_ms:,} {unit}"
    return f"{max(ms, 0) // 1_000} s"
