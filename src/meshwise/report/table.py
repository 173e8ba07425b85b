"""Tables of results: stated once, shown on a terminal, in a page and as Markdown.

On a narrow terminal a table breaks its headings first, then the cells of its widest columns: at spaces and
behind commas, hyphens and slashes. A number keeps its unit, and no word is broken while there is another way.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwise.core.units import duration, with_prefix

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as Shown

GAP = 3
"""Blanks between two columns."""
_NUMBER = re.compile(r"[-+<$]?[\d.,]+( ?\S+)?$")
_PARTS = re.compile(r"[^\s,/-]*[,/-]+|[^\s,/-]+")


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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.shown(options.max_width)

    def shown(self, width: float) -> Shown:
        """The table on a terminal of `width` columns."""
        from rich import box
        from rich.table import Table

        rows = [["" if cell is None else str(cell) for cell in row] for row in self.rows]
        cells = [[row[i] for row in rows] for i in range(len(self.columns))]
        widths = _widths(self.columns, cells, width - GAP * len(self.columns))
        wrapped = (lambda text, _: text) if self.no_wrap else _wrapped
        shown = Table(title=self.title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for column, width in zip(self.columns, widths, strict=True):
            side = "left" if self.is_left(column) else "right"
            shown.add_column(wrapped(column, width), justify=side, no_wrap=self.no_wrap, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            shown.add_row(*map(wrapped, row, widths))
        return shown


def _parts(text: str) -> list[str]:
    """The pieces of a text that stay on one line."""
    return [text] if _NUMBER.match(text) else _PARTS.findall(text)


def _longest(texts: Iterable[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def _widths(headings: Sequence[str], cells: Sequence[Sequence[str]], room: float) -> list[int]:
    """The width of each column: all it would like, or less where `room` is short."""
    like = [_longest([heading, *column]) for heading, column in zip(headings, cells, strict=True)]
    heading_parts = [_longest(_parts(heading)) for heading in headings]
    for whole in (True, False):  # first the headings break, then the cells
        least = [
            max(part, _longest(column if whole else itertools.chain.from_iterable(map(_parts, column))))
            for part, column in zip(heading_parts, cells, strict=True)
        ]
        while sum(like) > room and like != least:
            widest = max(range(len(like)), key=lambda i: (like[i] > least[i], like[i]))
            like[widest] -= 1
    return like


def _wrapped(text: str, width: int) -> str:
    """`text` on lines of `width` at most, where its pieces allow it."""
    if "\n" in text:
        return "\n".join(_wrapped(line, width) for line in text.split("\n"))
    if len(text) <= width:
        return text
    lines, end = [""], 0
    for part in _parts(text):
        start = text.index(part, end)
        joined = lines[-1] + text[end:start] * bool(lines[-1]) + part
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
        end = start + len(part)
    return "\n".join(lines)


UNITS = {
    **{"bytes_per_s": "B/s", "flop_per_s": "FLOP/s", "per_s": "", "bytes": "B", "flop": "FLOP"},
    **{"_s": "s", "seconds": "s"},
}
"""Units by the end of a name, the longest first."""
Fields = dict[str, str | Callable[[Any], object]]
"""What a table shows of a record: headings, and for each a field by its name or a function."""
MOST_CHARACTERS = 60
"""Longer names of kernels, operators and files are cut."""


def unit_of(name: str) -> str | None:
    """The unit that the end of a name states; None where it states none."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), None)


def cell_text(name: str, value: Any) -> object:
    """A value for people, in the unit that the end of its name states."""
    if isinstance(value, str):
        return short(value)
    if value is None or isinstance(value, bool):
        return "" if value is None else value
    if name.endswith("_frac"):
        return percent(value)
    unit = unit_of(name)
    if unit is None:
        return f"{value:.4g}" if isinstance(value, float) else value
    return duration(value) if unit == "s" else with_prefix(value, unit)


def records_table(
    title: str, records: Iterable[Any], columns: Fields, *, left: Collection[str] | None = None
) -> Table:
    """A row for each of `records`: under each heading a field, by its name in its unit, or by a function."""
    rows = [
        [
            cell_text(field, getattr(one, field)) if isinstance(field, str) else field(one)
            for field in columns.values()
        ]
        for one in records
    ]
    return Table(title, tuple(columns), rows, left=left, no_wrap=True)


def short(text: str, width: int = MOST_CHARACTERS) -> str:
    """A text cut to a width that tables bear."""
    return text if len(text) <= width else text[: width - 1] + "…"


def percent(frac: float | None, *, sign: bool = False) -> str:
    """`0.0423` as `4.2 %`; no number as the empty text."""
    if frac is None:
        return ""
    return f"{100 * frac:+.1f} %" if sign else f"{100 * frac:.1f} %"
