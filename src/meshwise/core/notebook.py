"""Results show themselves: as the lines of the command line, as tables of a notebook, as a page, as a frame.

`report` builds what is shown, above the results, so a method finds it by name when it is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from meshwise.core.extras import import_extra

if TYPE_CHECKING:
    import pandas
    import polars


class Printed:
    """What shows itself as text, and in a notebook as tables, as `report` states it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return import_module("meshwise.report.pages").text_of(self)

    def _repr_html_(self) -> str:
        return import_module("meshwise.report.pages").tables_of(self)


class Shown(Printed):
    """A result: printed, it is what the command line prints; `to_json` has all its numbers."""

    __slots__ = ()
    rows_in: ClassVar[str] = "rows"
    """The key of its document whose rows a frame has."""

    def to_json(self) -> dict[str, Any]:
        """The document that the command line prints with `--json`."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """The rows of its document that a frame has."""
        return self.to_json()[self.rows_in]

    def to_html(self, path: str | Path) -> None:
        """Write this result as one self-contained HTML page; DataError where it cannot be written."""
        import_module("meshwise.report.pages").write_html(self, path)

    def to_pandas(self) -> pandas.DataFrame:
        """Its rows as a pandas frame, a column a number (needs pandas)."""
        return import_extra("pandas", "frames").json_normalize(self.records())

    def to_polars(self) -> polars.DataFrame:
        """The same as a polars frame (needs polars)."""
        return import_extra("polars", "frames").json_normalize(self.records(), infer_schema_length=None)
