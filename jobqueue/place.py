"""Where a queue's file lies, and whether it may lie there; nothing here opens a database.

Write-ahead logging needs memory that all processes share, which network and virtual-machine
mounts do not offer: on some of them files were seen to be corrupted within a minute.

Whoever can write the file, or swap it for another, decides what runs.  So a place where every
user of the machine could is refused (see `refuse_shared`) unless the caller allows it.
"""

from __future__ import annotations

import os
import stat
import sys

from .errors import DatabaseError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_NETWORK_FILE_SYSTEMS = ("9p", "afs", "ceph", "cifs", "glusterfs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs")
_ALLOW_NETWORK = "JOBQUEUE_ALLOW_NETWORK_MOUNT"
_MOST_LINKS = 40
"""The system itself follows no more in a row."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def resolve(shown: str, *, any_disk: bool = False) -> str:
    """Return the real path of a queue's file, links followed, so that the WAL lies beside its target.

    Args:
        any_disk: a network mount will do, as write-ahead logging is not used.

    Raises:
        DatabaseError: no path, not a regular file, or on a network mount.
    """
    if not shown:
        raise DatabaseError("the path of the database is empty")
    if "\0" in shown:
        raise DatabaseError(f"{shown!r} is no path: it holds a NUL character")
    path = os.path.realpath(shown)
    if os.path.isdir(path):
        raise DatabaseError(f"{shown} is a directory; name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for ever
        raise DatabaseError(f"{shown} is no regular file; choose another path")
    kind = "" if any_disk else file_system(path)
    if (kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")) and not os.environ.get(_ALLOW_NETWORK):
        raise DatabaseError(f"{shown} lies on a network or shared mount ({kind}), where write-ahead logging can "
                            f"corrupt it; use a local disk, or set {_ALLOW_NETWORK}=1 if only this machine ever "
                            "opens it")
    return path


def refuse_shared(shown: str, path: str) -> None:
    """Refuse a file that every user of the machine could change, or swap for another.

    That is one, or a log of it, which others may write, or which lies in a directory that others may
    write without its sticky bit; so are the links that lead to it.  What the file's group may do is its
    owner's choice.  Where a directory is shared and sticky, as /tmp is, nobody can swap the file, but
    anybody can lay a log beside it, so that one must be the owner's or one's own.  Only the mode and
    these directories are looked at: no access lists, no directories above.

    Args:
        shown: the path that the caller gave.
        path: what `resolve` made of it.

    Raises:
        DatabaseError: so it is; nothing was changed.
    """
    if os.name != "posix":
        return  # elsewhere the mode says nothing
    sticky = False
    for name in _led_through(shown, path):
        where = os.path.dirname(name) or "."
        mode = _look(where)[0]
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            _refuse(shown, "the directory ", where, "and so put another file in its place")
        sticky = bool(mode & stat.S_IWOTH)
    owner = _look(path)[1]
    for name in (path, path + "-wal", path + "-shm", path + "-journal"):
        mode, own = _look(name)
        if mode & stat.S_IWOTH:
            _refuse(shown, "", name, "and so decide what the workers run")
        if sticky and mode and own not in (owner, os.geteuid()):
            raise DatabaseError(f"{shown} was not opened: {name}, which is read as a part of it, belongs to user "
                                f"{own}, who is neither its owner nor you; use a directory of your own, "
                                "or pass --allow-shared (allow_shared=True) if you trust that user")


def _refuse(shown: str, what: str, name: str, why: str) -> None:
    from shlex import quote

    raise DatabaseError(f"{shown} was not opened: every user of this machine may write {what}{name}, {why}; run "
                        f"chmod o-w {quote(name)}, or pass --allow-shared (allow_shared=True) if that is meant")


def _look(path: str) -> tuple[int, int]:
    """Return mode and owner of what is there; (0, -1) if nothing is."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, -1
    return found.st_mode, found.st_uid


def _led_through(shown: str, path: str) -> list[str]:
    """Return the links that lead from the path given to the file, and the file."""
    names: list[str] = []
    name = shown
    while os.path.islink(name) and len(names) < _MOST_LINKS:
        names.append(name)
        name = os.path.join(os.path.dirname(name), os.readlink(name))
    return [*names, path]


def leads_back_to_blank(path: str) -> bool:
    """Return whether the journal beside a file belongs to the very first change of it, so that nothing is lost.

    A process that is killed while it makes a queue leaves such a journal: the file had no page then, or
    one with nothing on it (https://sqlite.org/fileformat.html#the_rollback_journal).
    """
    try:
        with open(path + "-journal", "rb") as file:
            header = file.read(28)
            pages, sector, size = (int.from_bytes(header[n:n + 4]) for n in (16, 20, 24))
            if not header.startswith(_JOURNAL_MAGIC) or len(header) < 28 or pages > 1:
                return False
            if pages == 0:
                return True
            file.seek(sector)
            record = file.read(4 + size)
    except OSError:
        return False
    page = record[4:]
    no_version, no_program, no_table = page[60:64], page[68:72], page[103:105]
    return len(page) == size >= 512 and int.from_bytes(record[:4]) == 1 and page.startswith(b"SQLite format 3\0") \
        and not any(no_version + no_program + no_table)


def create_empty(path: str, shown: str) -> None:
    """Make an empty file, for its owner alone; one that is there already stays as it is.

    Raises:
        DatabaseError: it cannot be made.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        return  # another process was quicker
    except OSError as error:
        where = os.path.dirname(path)
        why = error.strerror if os.path.isdir(where) else f"there is no directory {where}"
        raise DatabaseError(f"cannot create {shown}: {why}") from error


def written_at(path: str) -> int | None:
    """Return when a file was last written, in ns; None if it cannot be seen."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def identity(path: str) -> tuple[int, int] | None:
    """Return what tells one file from another; None if there is none at `path`."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def uri(path: str, options: str) -> str:
    """Return a path as a `file:` URI; `?`, `#` and `%` in it would otherwise mean something."""
    encoded = "".join(chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"/._-" else f"%{byte:02X}"
                      for byte in os.fsencode(path))
    return f"file:{encoded}?{options}"


def file_system(path: str) -> str:
    """Return the kind of file system that holds `path`; empty where the machine does not tell."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            return kind_of_mount(path, mounts)
    except OSError:
        return ""


def kind_of_mount(path: str, mounts: Iterable[str]) -> str:
    """Find `path`'s mount in the lines of proc(5)'s mountinfo: the longest mount point, the last of equals."""
    longest, kind = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].replace("\\040", " ").rstrip("/") + "/"
        if path.startswith(point) and len(point) >= len(longest):
            longest, kind = point, right.split(" ")[0]
    return kind
