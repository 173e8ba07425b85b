"""Results show themselves in notebooks. `report` builds the pages, above the results, so the method that a
notebook calls on a result finds its page by name when it is called.
"""

from __future__ import annotations

from importlib import import_module


class Shown:
    """A result that a notebook shows as its page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(import_module("meshwise.report.pages").notebook(self))
