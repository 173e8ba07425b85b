"""Files are written whole or not at all: first beside their place, then moved onto it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from meshwise.errors import DataError


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all; a place that cannot be written raises DataError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` whole or not at all; a place that cannot be written raises DataError."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
