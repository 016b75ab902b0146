"""What SQLite's errors mean here: each becomes one of ours, with a sentence that says what to do.

Pure functions of the error and the path to be named; see https://sqlite.org/rescode.html for
the codes.
"""

from __future__ import annotations

import sqlite3

from .errors import DatabaseBusy, DatabaseDamaged, DatabaseError, DatabaseReadOnly


def code(error: BaseException) -> int:
    """Return SQLite's primary result code of an error, or of the one that ours was made of; 0 if it has none."""
    if isinstance(error, DatabaseError):
        error = error.__cause__ or error
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def is_busy(error: BaseException) -> bool:
    """Return whether another connection was in the way."""
    return code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def explained(error: sqlite3.Error | UnicodeDecodeError, path: str, patience_seconds: float) -> DatabaseError:
    """Return our error for one of SQLite's, or for text of the file that is none.

    Args:
        path: as the caller named it.
        patience_seconds: how long the file was waited for.
    """
    if isinstance(error, UnicodeDecodeError) or "not decode to UTF-8" in str(error):  # which has no code
        return DatabaseDamaged(f"{path} is damaged: it holds text that is not UTF-8; restore a backup")
    if is_busy(error):
        return DatabaseBusy(f"{path} stayed locked by another process for {patience_seconds:g} seconds; try again")
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
        return DatabaseError(f"{path} has an unfinished change of another program beside it, in {path}-journal, so "
                             "both were left alone; open it with that program first, or choose another path")
    kind, what = {
        sqlite3.SQLITE_NOTADB: (DatabaseDamaged, "is not a SQLite database, so it was left alone; choose another "
                                                 "path"),
        sqlite3.SQLITE_CORRUPT: (DatabaseDamaged, "is damaged; restore a backup"),
        sqlite3.SQLITE_READONLY: (DatabaseReadOnly, "cannot be written: check the permissions of the file and its "
                                                    f"directory, and of {path}-wal"),
        sqlite3.SQLITE_FULL: (DatabaseError, "cannot grow: the disk is full; make room and try again"),
        sqlite3.SQLITE_PERM: (DatabaseError, "cannot be opened: check its permissions"),
        sqlite3.SQLITE_CANTOPEN: (DatabaseError, "cannot be opened: check the permissions of the file and its "
                                                 "directory"),
        sqlite3.SQLITE_IOERR: (DatabaseError, "cannot be read or written: check the disk"),
    }.get(code(error), (DatabaseError, "does not answer as expected"))
    return kind(f"{path} {what} (SQLite says: {error})")
