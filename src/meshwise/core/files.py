"""Files are written whole or not at all: first beside their place, then moved onto it."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from meshwise.core.errors import DataError


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all; a place that cannot be written raises DataError."""
    write_bytes(path, text.encode())


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """`rows` (the head first) as CSV; None is an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def check_writable(path: Path) -> None:
    """DataError if a file at `path` cannot be made: before the work whose result it is to hold."""
    folder = path.parent
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a folder; name a file")
    if not folder.is_dir():
        raise DataError(f"cannot write {path}: there is no folder {folder}; make it, or name another place")
    if not os.access(folder, os.W_OK):
        raise DataError(f"cannot write {path}: {folder} is not writable; name another place")


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` whole or not at all; a place that cannot be written raises DataError."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece that appears at `path` only when all is written; else DataError."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
