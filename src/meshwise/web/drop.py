"""The folder of traces that a browser dropped: kept in a temporary folder of the server until the next one.

A browser hides where a folder lies, and sends its files. They lie below the server's own folder, which is
bounded in size and is gone when the server ends.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from meshwise.core.errors import DataError

MOST_BYTES = 2**33
"""A dropped folder is no larger, nor than half of the room that the disk has."""
MOST_FILES = 10_000
_TOO_LARGE = "the folder is too large to send; start the page with it: meshwise web --traces DIR"
ENDINGS = (".json", ".json.gz")


class Drop:
    """The folder that was dropped last; `name` is that by which the page asks for it (empty: none yet)."""

    def __init__(self) -> None:
        self.name = ""
        self._home: TemporaryDirectory[str] | None = None
        self._bytes_left = 0
        self._files_left = 0

    def start(self) -> str:
        """Forget the folder of before; the name of the new one."""
        self.close()
        self._home = TemporaryDirectory(prefix="meshwise-traces-")
        self._bytes_left = min(MOST_BYTES, shutil.disk_usage(self._home.name).free // 2)
        self._files_left = MOST_FILES
        self.name = f"dropped-{secrets.token_hex(8)}"
        return self.name

    def folder(self, name: str) -> Path:
        """Where the files of the folder `name` lie. DataError where another was dropped after it."""
        if self._home is None or name != self.name:
            raise DataError(f"the folder {name} is no longer here; drop it again")
        return Path(self._home.name)

    async def receive(self, name: str, file: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a file of the folder, `file` below it, as its bytes arrive."""
        parts = PurePosixPath(file).parts
        if not file.endswith(ENDINGS) or ".." in parts or "\0" in file or PurePosixPath(file).is_absolute():
            raise DataError(f"{file!r} is no trace; drop files that end in {' or '.join(ENDINGS)}")
        path = self.folder(name).joinpath(*parts)
        self._files_left -= 1
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as written:
                async for piece in pieces:
                    self._bytes_left -= len(piece)
                    if min(self._bytes_left, self._files_left) < 0:
                        self.close()
                        raise DataError(_TOO_LARGE)
                    written.write(piece)
        except BaseException:  # the client may go away at any piece
            path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Delete what was dropped."""
        if self._home is not None:
            self._home.cleanup()
        self.name, self._home = "", None
