"""Where a queue's file lies, and whether it may lie there; nothing here opens a database.

Write-ahead logging needs memory that all processes share, which network and virtual-machine
mounts do not offer: on some of them files were seen to be corrupted within a minute.
"""

from __future__ import annotations

import os
import sys

from .errors import DatabaseError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_NETWORK_FILE_SYSTEMS = ("9p", "afs", "ceph", "cifs", "glusterfs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs")
_ALLOW_NETWORK = "JOBQUEUE_ALLOW_NETWORK_MOUNT"


def resolve(shown: str) -> str:
    """Return the real path of a queue's file, links followed, so that the WAL lies beside its target.

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
    kind = file_system(path)
    if (kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")) and not os.environ.get(_ALLOW_NETWORK):
        raise DatabaseError(f"{shown} lies on a network or shared mount ({kind}), where write-ahead logging can "
                            f"corrupt it; use a local disk, or set {_ALLOW_NETWORK}=1 if only this machine ever "
                            "opens it")
    return path


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
