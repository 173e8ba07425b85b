"""An answer, stated once: sentences, tables and charts, for a terminal, a page, a picture and a notebook.

The module of a result (`report.estimate`, `report.search`, ...) says what is shown of it: `parts` are what a
terminal prints, `page` adds what only a browser shows, `picture` is what a file shows. A terminal prints
of a chart the table of its numbers; `report.html` writes the same parts as HTML.

A chart says what it shows, its axes with their units, and colors by meaning. `chart_page` hands it to plotly
for a page, `chart_picture` to matplotlib for a file. Neither decides anything that a reader could take for a
statement: numbers, names, colors and sentences are all in the `Chart`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from numpy.typing import NDArray

from meshwise.report.table import WORDS, Facts, Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, slots=True)
class PageLink:
    """A cell that leads to an address or, in the page in the browser only, to a `#state` of the page."""

    text: str
    href: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences, as a list under a title; on a terminal `lead` stands before each, and no title.

    `verbatim`: commands and files, whose lines nobody breaks.
    """

    title: str
    lines: Sequence[str]
    lead: str = ""
    verbatim: bool = False

    def __str__(self) -> str:
        return "\n".join(f"{self.lead}{line}" for line in self.lines)


# --- charts ---------------------------------------------------------------------------------------

COLORS = ("#4a8fc2", "#e0812c", "#8172b2", "#4fa14a", "#c44e52", "#937860", "#da8bc3", "#7f7f7f")
LIMIT_COLOR, FRONT_COLOR, SUM_COLOR, ROOF_COLOR = "#d62728", "#d62728", "#7f7f7f", "#7f7f7f"
MORE_COLOR, LESS_COLOR = COLORS[4], COLORS[3]
"""What takes longer than expected, and what takes less."""
PART_COLORS: dict[str, str] = WORDS["part_colors"]
"""The parts of a step's time and of a rank's memory."""
OTHER_COLOR, INK, IDLE_COLOR = "#999999", "#333333", "#e9e9e9"
"""A page shows the last two, and white, in its own colors of text, lines and paper."""
Numbers = Sequence[Any] | NDArray[Any]
LineStyle = Literal["solid", "dash", "dot"]
LINES: tuple[LineStyle, ...] = ("solid", "dash", "dot")
Symbol = Literal["circle", "triangle-up", "circle-open"]
SYMBOLS: tuple[Symbol, ...] = get_args(Symbol)


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """An axis from `low` to `high` (None: as the data want), its numbers with SI prefixes and `unit`.

    `numbers`: shares as percents, counts, or large numbers as powers of ten, instead of prefixes; `ticks` are
    where numbers stand (empty: wherever they read well).
    """

    title: str = ""
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    numbers: Literal["prefix", "percent", "count", "power"] = "prefix"
    ticks: Sequence[float] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """A horizontal bar for each of `names`, the first at the top, from `starts` (None: from zero, and several
    `Bars` of a chart stand one below the other). `texts` are shown beside the names.
    """

    names: Sequence[str]
    values: Numbers
    colors: Sequence[str]
    starts: Numbers | None = None
    name: str = ""
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Points (`x`, `y`) of one `color`: joined by a `line` (steps go right first), marked, or both.

    `size` is the diameter of a mark, 0 for none. `texts` are told when a reader points at a mark, and lead to
    `links`. A series without a name is not in the legend.
    """

    x: Numbers
    y: Numbers
    name: str = ""
    color: str = COLORS[0]
    line: LineStyle | Literal[""] = "solid"
    steps: bool = False
    size: Any = 0
    symbol: Symbol = "circle"
    opacity: float = 1.0
    texts: Sequence[str] = ()
    links: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Lanes:
    """Who did what when: `grid[lane, moment]` is an index into `kinds` (names and their colors) or -1."""

    grid: Any
    times: Any
    names: Sequence[str]
    kinds: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Bound:
    """A line across the chart at a value that bounds something."""

    value: float
    axis: Literal["x", "y"] = "x"
    color: str = LIMIT_COLOR
    line: LineStyle = "solid"


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Names beside points of a picture, the most important first; those that find no room are left out.

    A page leaves them out: there a reader points at the mark.
    """

    x: Numbers
    y: Numbers
    texts: Sequence[str]
    colors: Sequence[str]


Mark = Bars | Series | Lanes | Bound | Names


@dataclass(frozen=True, slots=True)
class Chart:
    """Marks on two axes: `finding` says what they show, `table` has their numbers; `height` is in pixels."""

    title: str
    marks: Sequence[Mark]
    x: ChartAxis = field(default_factory=ChartAxis)
    y: ChartAxis = field(default_factory=ChartAxis)
    finding: str = ""
    table: Table | None = None
    height: int = 320

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.table is not None:
            yield self.table


@dataclass(frozen=True, slots=True)
class Picture:
    """Rows of charts in one file, under a title; `widths` are relative ones of the columns."""

    rows: Sequence[Sequence[Chart]]
    title: str = ""
    widths: Sequence[float] = ()


Section = str | Text | Facts | Table | Chart


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown of one result: a title, the answer in one sentence, and sections.

    `ok` is False where the answer is no.
    """

    title: str
    headline: str
    sections: Sequence[Section]
    ok: bool = True


def waterfall(
    title: str, parts: Mapping[str, float], total: str, show: Callable[[float], str], axis: ChartAxis
) -> Chart:
    """A bar for each part above zero, from where the last one ended, and one for their sum, named `total`."""
    shown = {name: value for name, value in parts.items() if value > 0}
    values = list(shown.values())
    whole = sum(values)
    bars = Bars(
        [*shown, total],
        [*values, whole],
        [*(PART_COLORS.get(name, OTHER_COLOR) for name in shown), SUM_COLOR],
        [*(sum(values[:i]) for i in range(len(values))), 0.0],
        texts=[*(f"{show(value)}  {value / whole:.0%}" for value in values), show(whole)],
    )
    rows = [(name, show(value), f"{value / whole:.1%}") for name, value in shown.items()]
    shares = [*(value / whole for value in values), 0.0]
    columns, rows = ("part", "value", "share"), [*rows, ("total", show(whole), "100%")]
    table, height = Table(title, columns, rows, shares=shares), 90 + 26 * len(rows)
    return Chart(title, [bars], replace(axis, low=0.0, high=1.02 * whole), table=table, height=height)


def roofline(
    title: str,
    marks: Sequence[Mark],
    peaks: Mapping[str, float],
    bytes_per_s: float,
    ends: tuple[float, float],
) -> Chart:
    """`marks` over FLOP per byte, under the roofs of memory and of `peaks` [FLOP/s] by name."""
    left, right = ends
    roofs: list[Mark] = []
    for line, (name, peak) in zip(itertools.cycle(LINES), peaks.items(), strict=False):
        ridge = min(max(peak / bytes_per_s, left), right)
        heights = [min(peak, x * bytes_per_s) for x in (left, ridge, right)]
        roofs.append(Series([left, ridge, right], heights, name, ROOF_COLOR, line))
    axes = (
        ChartAxis("FLOP/byte", log=True, low=left, high=right, numbers="count"),
        ChartAxis("FLOP/s", log=True),
    )
    return Chart(title, [*roofs, *marks], *axes, height=400)
