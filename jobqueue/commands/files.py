"""Files that an option names: read as bytes, line by line, with errors that carry the name."""

from __future__ import annotations

import os
import sys

from ..errors import InvalidJob
from .common import Usage, cannot_read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, TypeVar

    from ..progress import ProgressBar

    Parsed = TypeVar("Parsed")

BOM = b"\xef\xbb\xbf"
JOBS_PER_LOOK = 1_000
"""How often the progress bar is told."""


def read_lines(file: InputFile, parse: Callable[[str], Parsed], bar: ProgressBar, *,
               most_bytes: int) -> Iterator[tuple[int, Parsed]]:
    """Yield (line number, what `parse` makes of it) for each line that is not blank.

    Raises:
        InvalidJob: a line is too long, is not UTF-8, or `parse` objects; `.index` is its number.
    """
    number = 0
    size, done = file.size(), 0
    while line := file.read_line(most_bytes + 1):
        number += 1
        done += len(line)
        if len(line) > most_bytes:
            raise InvalidJob(f"the line is longer than {most_bytes:,} bytes", number)
        if number == 1:
            line = line.removeprefix(BOM)
        line = line.strip()
        if not line:
            continue
        try:
            parsed = parse(text_of(line))
        except InvalidJob as error:
            raise InvalidJob(str(error).replace(": line 1 column ", " at column "), number) from None
        file.jobs += 1
        if file.jobs % JOBS_PER_LOOK == 0:
            bar.update(file.jobs, done / size if size else None)
        yield number, parsed
    bar.say(f"storing {file.jobs:,} jobs ...")


def text_of(data: bytes) -> str:
    """Return UTF-8 as text; raises `InvalidJob` if it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidJob(f"byte {error.start + 1} is not UTF-8") from None


class InputFile:
    """A file that an option names, or stdin for `-`; what goes wrong with it is a `Failure` with its name.

    Attributes:
        name: for messages.
        jobs: how many have been read from it.
    """

    def __init__(self, path: str) -> None:
        self.name = "standard input" if path == "-" else path
        self.jobs = 0
        self._own = path != "-"
        try:
            self._file: BinaryIO = open(path, "rb") if self._own else sys.stdin.buffer  # noqa: SIM115
        except OSError as error:
            cannot_read(path, error)
        except ValueError as error:
            raise Usage(f"cannot read {path!r}: {error}") from None

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._own:
            self._file.close()

    def size(self) -> int | None:
        """Return how many bytes are in it; None if that cannot be known before its end, as of a pipe."""
        return os.fstat(self._file.fileno()).st_size if self._own and os.path.isfile(self.name) else None

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, less only at the end."""
        try:
            return self._file.read(size)
        except OSError as error:
            cannot_read(self.name, error)

    def read_line(self, size: int) -> bytes:
        """Return the next line, cut after `size` bytes; empty at the end."""
        try:
            return self._file.readline(size)
        except OSError as error:
            cannot_read(self.name, error)
