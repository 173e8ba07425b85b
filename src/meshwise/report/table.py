"""Tables of results: stated once, shown on a terminal, in a page and as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as Shown


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with one cell for each of `columns` (text, number, a link of a page); None is an empty cell.

    The columns named in `left` are flush left (None: the first one), all others flush right. `no_wrap`: a
    terminal cuts long cells off.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: Collection[str] | None = None
    no_wrap: bool = False

    def is_left(self, column: str) -> bool:
        """Whether a column is flush left."""
        return column in (self.columns[:1] if self.left is None else self.left)

    def __rich__(self) -> Shown:
        """The table on a terminal."""
        from rich import box
        from rich.table import Table as Shown

        shown = Shown(title=self.title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for column in self.columns:
            side = "left" if self.is_left(column) else "right"
            shown.add_column(column, justify=side, no_wrap=self.no_wrap, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows:
            shown.add_row(*("" if cell is None else str(cell) for cell in row))
        return shown


def percent(frac: float | None, *, sign: bool = False) -> str:
    """`0.0423` as `4.2 %`; no number as the empty text."""
    if frac is None:
        return ""
    return f"{100 * frac:+.1f} %" if sign else f"{100 * frac:.1f} %"
