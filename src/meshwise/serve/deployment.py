"""What runs a fleet, and checks it: manifests, commands, and what they cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.files import make_folder, write_text


@dataclass(frozen=True, slots=True)
class Deployment:
    """Files by name; `commands` that apply them, then load the fleet; `not_expressed`, one sentence each."""

    target: str
    files: dict[str, str]
    commands: tuple[str, ...]
    not_expressed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The key `deployment` of the document of `meshwise serve --json`."""
        return msgspec.to_builtins(self)

    def write(self, folder: Path) -> list[Path]:
        """Write all files into `folder`, which is made where it is missing."""
        make_folder(folder)
        for name, text in self.files.items():
            write_text(folder / name, text)
        return [folder / name for name in self.files]
