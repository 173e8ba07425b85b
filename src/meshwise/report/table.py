"""Tables on a terminal: how all of them look."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    left: Collection[str] | None = None,
    no_wrap: bool = False,
) -> Table:
    """A table of `rows`, each with one cell for each of `columns`; None is an empty cell.

    The columns named in `left` are flush left (None: the first one), all others flush right.
    """
    shown = Table(title=title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns:
        is_left = column in (columns[:1] if left is None else left)
        shown.add_column(column, justify="left" if is_left else "right", no_wrap=no_wrap, overflow="fold")
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    return shown


def percent(frac: float | None, *, sign: bool = False) -> str:
    """`0.0423` as `4.2 %`; no number as the empty text."""
    if frac is None:
        return ""
    return f"{100 * frac:+.1f} %" if sign else f"{100 * frac:.1f} %"
