"""A consistent copy of a queue's file, made while others work on it.

SQLite's backup API copies page by page.  It begins again whenever another process writes between two
steps, unless the source is inside a read transaction: so the whole copy is made in one snapshot, some
pages a step.  Writers are never held up, only checkpoints: until the copy is done the write-ahead log
grows.  The copy is written beside its final name, checked, brought to the disk, and only then gets it.

Nothing here changes the source, and nothing reads a clock.
"""

from __future__ import annotations

import os

from . import place
from .connection import Connection
from .errors import DatabaseError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .db import Store

PAGES_PER_STEP = 1_000
SQLITE_FULL = 13
"""SQLite's code for a disk without room (https://sqlite.org/rescode.html#full)."""
BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite puts beside a database."""


class _Reader(Connection):
    """A second connection to the queue's file, so that the snapshot holds up nobody in this process."""

    def _open(self, create: bool) -> None:
        self._sqlite = self._connect("ro")


class _Target(Connection):
    """The file that is being written; any disk will do for a file that nobody has open."""

    _any_disk = True

    def _open(self, create: bool) -> None:
        place.create_empty(self.path, self.shown_path)
        self._sqlite = self._connect("rw")
        for pragma in ("journal_mode = MEMORY", "synchronous = OFF"):  # it counts only once it is whole
            self._sqlite.execute(f"PRAGMA {pragma}").fetchall()

    def fill_from(self, source: Connection, progress: Callable[[int, float], object] | None) -> None:
        """Copy the source as it is now."""

        def told(_: int, left: int, total: int) -> None:
            if progress is not None:
                progress(total - left, (total - left) / total if total else 1.0)

        with source.snapshot():
            try:
                source.sqlite.backup(self.sqlite, pages=PAGES_PER_STEP, progress=told)
            except Exception as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == SQLITE_FULL:
                    raise DatabaseError(f"cannot write the backup beside {self.path}: the disk is full; make room "
                                        "or choose another place") from error
                raise


class _Copy(Connection):
    """The file that was written, opened so that nothing is made beside it."""

    _any_disk = True

    def _open(self, create: bool) -> None:
        self._sqlite = self._connect("ro&immutable=1")

    def check(self) -> str:
        """Return what is wrong with it, empty if nothing is."""
        with self.snapshot():
            ((answer,),) = self.sqlite.execute("PRAGMA quick_check(1)").fetchall()
        return "" if answer == "ok" else str(answer)


def backup(store: Store, path: str | os.PathLike[str], *, force: bool = False,
           progress: Callable[[int, float], object] | None = None) -> int:
    """Write a copy of a queue's file, as it is now, to `path`; return its size in bytes.

    See `Queue.backup` for the arguments and errors.
    """
    shown = os.fspath(path)
    target = _checked(store, shown, force)
    temporary = f"{target}.{os.getpid()}-{os.urandom(3).hex()}.part"
    try:
        copy = _Target(temporary, allow_shared=True)
        try:
            source = _Reader(store.path, allow_shared=True)
            try:
                copy.fill_from(source, progress)
            finally:
                source.close()
        finally:
            copy.close()
        finished = _Copy(temporary, allow_shared=True)
        try:
            fault = finished.check()
        finally:
            finished.close()
        if fault:
            raise DatabaseError(f"{store.shown_path} is damaged, so no backup was made; python -m jobqueue doctor "
                                f"tells more (SQLite says: {fault})")
        size = os.stat(temporary).st_size
        _put_in_place(temporary, target, force)
    finally:
        for name in (temporary, *(temporary + suffix for suffix in BESIDE)):
            if os.path.lexists(name):
                os.unlink(name)
    return size


def _checked(store: Store, shown: str, force: bool) -> str:
    """Return the path to write to, links followed.

    Raises:
        DatabaseError: it must not be written to.
        FileExistsError: there is a file, and it is not to be replaced.
    """
    if not shown or "\0" in shown:
        raise DatabaseError("the name of the backup is no path")
    target = os.path.realpath(shown)
    if os.path.isdir(target):
        raise DatabaseError(f"{shown} is a directory; name a file in it")
    own = [store.path, *(store.path + suffix for suffix in BESIDE)]
    if target in own or (os.path.exists(target) and place.identity(target) in map(place.identity, own)):
        raise DatabaseError(f"{shown} is the queue's own file; choose another name for the backup")
    if os.path.lexists(target):
        if not os.path.isfile(target):
            raise DatabaseError(f"{shown} is no regular file; choose another name for the backup")
        if not force:
            raise FileExistsError(f"{shown} is there already")
    for name in (target + suffix for suffix in BESIDE):
        if os.path.lexists(name):  # SQLite would take it for a part of the copy
            raise DatabaseError(f"{name} shows that {shown} is in use, or was when its program was killed; "
                                "choose another name for the backup")
    if not os.path.isdir(os.path.dirname(target)):
        raise DatabaseError(f"cannot write {shown}: there is no directory {os.path.dirname(target)}")
    return target


def _put_in_place(temporary: str, target: str, force: bool) -> None:
    """Bring the copy to the disk and give it its name, in one step."""
    _sync(temporary)
    if force:
        os.replace(temporary, target)
    else:
        try:
            os.link(temporary, target)  # unlike a rename, it never replaces what came there meanwhile
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise FileExistsError(f"{target} is there already") from None
            os.replace(temporary, target)
    _sync(os.path.dirname(target))


def _sync(path: str) -> None:
    """Wait until a file, or what a directory lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
