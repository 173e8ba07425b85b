"""Results show themselves in notebooks. `report` builds the pages, above the results, so the method that a
notebook calls on a result finds its page by name when it is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


class Shown:
    """A result that a notebook shows as its page, and that can be written as one."""

    __slots__ = ()

    def to_html(self, path: str | Path) -> None:
        """Write this result as one self-contained HTML page; DataError where it cannot be written."""
        import_module("meshwise.report.pages").write_html(self, path)

    def _repr_html_(self) -> str:
        return str(import_module("meshwise.report.pages").notebook(self))
