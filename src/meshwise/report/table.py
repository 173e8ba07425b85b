"""Tables of results: stated once, shown on a terminal, in a page and as Markdown.

On a narrow terminal a table breaks its headings first, then the cells of its widest columns: at spaces and
behind commas, hyphens and slashes; names are shortened instead. Columns that still find no room follow below,
beside those that name the row. So a number is never cut, and no word is broken while there is another way.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwise.core.expressions import value_of
from meshwise.core.files import read_catalog
from meshwise.core.units import duration, with_prefix

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GAP = 3
"""Blanks between two columns."""
_LEAST_NAME = 16
"""How short names may become."""
_NUMBER = re.compile(r"[-+<$]?[\d.,]+( ?\S+)?$")
_PARTS = re.compile(r"(?<!\S)--[a-z][a-z-]*|[^\s,/-]*[,/-]+|[^\s,/-]+")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with one cell for each of `columns` (text, number, a link of a page); None is an empty cell.

    The columns named in `left` are flush left (None: the first one), all others flush right. `no_wrap`: a
    row is one line, so a terminal shortens the names in columns that are flush left. `shares` are drawn on a
    terminal as a bar behind each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: Collection[str] | None = None
    no_wrap: bool = False
    shares: Sequence[float] = ()

    def is_left(self, column: str) -> bool:
        """Whether a column is flush left."""
        return column in (self.columns[:1] if self.left is None else self.left)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table as Drawn

        rows = [["" if cell is None else str(cell) for cell in row] for row in self.rows]
        columns = [
            _Column(name, [row[i] for row in rows], self.is_left(name), self.no_wrap)
            for i, name in enumerate(self.columns)
        ]
        if self.shares:
            bars = [bar(share, 40) for share in self.shares]
            columns.append(_Column("", bars, is_left=True, no_wrap=False))
        title = self.title or None
        for block in _blocks(columns, options.max_width):
            drawn = Drawn(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
            texts = []
            for column, width in zip(block, _widths(block, options.max_width), strict=True):
                side = "left" if column.is_left else "right"
                drawn.add_column(wrapped(column.heading, width), justify=side, overflow="fold")  # type: ignore[arg-type]
                fitted = short if column.no_wrap and column.is_left else wrapped
                texts.append([fitted(cell, width) for cell in column.cells])
            for row in zip(*texts, strict=True):
                drawn.add_row(*row)
            yield drawn
            title = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Names, and beside each what holds for it; long ones go on below themselves."""

    rows: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = max((len(name) for name, _ in self.rows), default=0)
        for name, text in self.rows:
            lines = wrapped(text, options.max_width - first - 2).split("\n")
            yield "\n".join(f"{name if not i else '':{first}}  {line}" for i, line in enumerate(lines))


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading and its cells as text."""

    heading: str
    cells: Sequence[str]
    is_left: bool
    no_wrap: bool

    def widths(self) -> tuple[int, int, int]:
        """What it would like, what it needs with its heading on several lines, and with its cells broken."""
        heading, whole = _longest(_parts(self.heading)), _longest(self.cells)
        broken = _longest(itertools.chain.from_iterable(map(_parts, self.cells)))
        if self.no_wrap:
            broken = min(whole, _LEAST_NAME) if self.is_left else whole
        return _longest([self.heading, *self.cells]), max(heading, whole), max(heading, broken)


def _blocks(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """The columns as tables that fit `width`: each has those that name the row, and some of the others."""
    num_names = len(list(itertools.takewhile(lambda column: column.is_left, columns)))
    names = columns[: 1 if num_names in (0, len(columns)) else num_names]
    blocks: list[list[_Column]] = [[]]
    for column in columns[len(names) :]:
        least = [GAP + one.widths()[2] for one in (*names, *blocks[-1], column)]
        if blocks[-1] and sum(least) > width:
            blocks.append([])
        blocks[-1].append(column)
    return [[*names, *block] for block in blocks]


def _parts(text: str) -> list[str]:
    """The pieces of a text that stay on one line."""
    return [text] if _NUMBER.match(text) else _PARTS.findall(text)


def _longest(texts: Iterable[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """The width of each column: all it would like, or less where there is too little room."""
    like, *stages = map(list, zip(*(column.widths() for column in columns), strict=True))
    for least in stages:
        while sum(like) > width - GAP * len(columns) and like != least:
            widest = max(range(len(like)), key=lambda i: (like[i] > least[i], like[i]))
            like[widest] -= 1
    return like


def wrapped(text: str, width: int) -> str:
    """`text` on lines of `width` at most, where its pieces allow it."""
    if "\n" in text:
        return "\n".join(wrapped(line, width) for line in text.split("\n"))
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


WORDS: dict[str, Any] = read_catalog("words.toml")
"""What reports call things, and what they say of them."""
UNITS: dict[str, str] = WORDS["units"]
"""Units by the end of a name, the longest first."""
TABLES: dict[str, dict[str, str]] = read_catalog("tables.toml")
"""What tables show of their records: headings, and the expression of each."""
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
    title: str, records: Iterable[Any], columns: Mapping[str, str], *, no_wrap: bool = False, **names: Any
) -> Table:
    """A row for each of `records`: under each heading an expression of its fields and of `names`.

    Columns with `<` before their expression are flush left (where there is none, the first one). Those that
    no record fills are left out, if there is any.
    """

    def cell(one: _Record, of: str) -> object:
        expression, _, form = of.removeprefix("<").partition(":")
        value = value_of(expression, one)
        if form:
            return "" if value is None else format(value, form)
        return value if isinstance(value, str) else cell_text(expression, value)

    records = [_Record(one, names) for one in records]
    cells = {heading: [cell(one, of) for one in records] for heading, of in columns.items()}
    filled = {name: column for name, column in cells.items() if not records or any(c != "" for c in column)}
    left = [heading for heading, of in columns.items() if of.startswith("<")] or None
    return Table(title, tuple(filled), list(zip(*filled.values(), strict=True)), left, no_wrap)


class _Record(dict[str, Any]):
    """The fields of a record by their names, functions and other `names`, and the record itself as `row`."""

    def __init__(self, row: Any, names: Mapping[str, Any]) -> None:
        super().__init__(_FUNCTIONS, row=row, **names)

    def __missing__(self, name: str) -> Any:
        row = self["row"]
        return row[name] if isinstance(row, Mapping) else getattr(row, name)


def bar(share: float, width: int) -> str:
    """A share as a bar, at least one character long; the whole is `width` of them."""
    return "█" * max(1, round(width * share)) if share else ""


def short(text: str, width: int = MOST_CHARACTERS) -> str:
    """A text cut in its middle to a width that tables bear: names may differ at their end alone."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[width // 2 + 1 - width :]}"


def difference_text(value: float, show: Callable[[float], str] = duration) -> str:
    """A difference with its sign; of times, or of what `show` shows."""
    return ("+" if value >= 0 else "-") + show(abs(value))


def pair_row(name: str, a: float, b: float, show: Callable[[float], str]) -> tuple[str, ...]:
    """The cells of a row: two values, and by how much the second is more."""
    return name, show(a), show(b), difference_text(b - a, show)


def percent(frac: float | None, *, sign: bool = False) -> str:
    """`0.0423` as `4.2 %`; no number as the empty text."""
    return "" if frac is None else f"{100 * frac:{'+' * sign}.1f} %"


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"format": format, "str": str, "short": short, "duration": duration},
    **{"percent": percent, "signed": partial(percent, sign=True), "difference": difference_text},
    "plan_text": lambda plan: import_module("meshwise.plan.plan").plan_text(plan),  # help needs no numpy
    **{"with_prefix": with_prefix, "len": len, "largest": lambda of: max(of, key=of.get)},
}
"""What expressions of columns may call."""
