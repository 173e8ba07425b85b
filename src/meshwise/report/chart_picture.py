"""Charts as one picture: drawn by matplotlib, which is imported late, and written whole or not at all."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra
from meshwise.core.files import whole_file
from meshwise.core.units import duration, with_prefix
from meshwise.report import answer as plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH, PX_PER_INCH = 160, 90
WIDTH_INCHES, CHARACTERS_PER_INCH = 12.0, 14.0
MOST_NAMES = 33
"""Lanes that are named; of more, every second one, every third one and so on."""
LINES = {"": "none", "solid": "-", "dash": "--", "dot": ":"}


def check_format(path: Path, *, also: tuple[str, ...] = ()) -> None:
    """Raise DataError unless `path` ends in a format we draw (or in one of `also`)."""
    if path.suffix.lower() not in (*FORMATS, *also):
        raise DataError(f"cannot draw {path}: its name must end in {', '.join((*FORMATS, *also))}")


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure that arranges its own axes; MissingExtraError without matplotlib.

    It belongs to no window, so drawing never opens one and never changes the caller's backend.
    """
    new = import_extra("matplotlib.figure", "plot").Figure
    figure: Figure = new(figsize=(width_inches, height_inches), layout="constrained")
    import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the ending of `path` names; DataError where that cannot be."""
    check_format(path)
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix.lower().removeprefix("."), dpi=DOTS_PER_INCH)


def draw_picture(picture: plot.Picture, path: Path) -> None:
    """Write all charts of `picture` to `path`; DataError or MissingExtraError where that cannot be."""
    check_format(path)
    save_figure(picture_figure(picture), path)


def picture_figure(picture: plot.Picture) -> Figure:
    """All charts of `picture`, drawn."""
    title = _wrapped(picture.title, WIDTH_INCHES * 8.5 / 10.5)  # in larger letters than a finding
    heights = [max(chart.height for chart in row) / PX_PER_INCH + 0.4 for row in picture.rows]
    figure = new_figure(WIDTH_INCHES, sum(heights) + 0.2 * (1 + title.count("\n")))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    columns = max(map(len, picture.rows))
    widths = picture.widths or [1.0] * columns
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights, width_ratios=widths)
    drawn: list[tuple[Axes, plot.Chart]] = []
    for i, charts in enumerate(picture.rows):
        for j, chart in enumerate(charts):
            alone = len(charts) == 1
            axes = figure.add_subplot(grid[i, :] if alone else grid[i, j])
            draw_chart(axes, chart, WIDTH_INCHES * (1.0 if alone else widths[j] / sum(widths)) - 1.5)
            drawn.append((axes, chart))
    figure.draw_without_rendering()  # arranges the axes, so that places in pixels are final
    for axes, chart in drawn:
        _draw_names(axes, chart)
    return figure


def draw_chart(axes: Axes, chart: plot.Chart, width_inches: float) -> None:
    """Draw all of `chart` but its names into matplotlib axes."""
    finding = _wrapped(chart.finding, width_inches)
    lines = finding.count("\n") + bool(finding)
    axes.set_title(chart.title, loc="left", fontsize=9.5, fontweight="bold", pad=6 + 12 * lines)
    told = axes.annotate(finding, (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points",
                         fontsize=8.5, color="#555555")  # fmt: skip
    told.set_in_layout(False)
    for i, mark in enumerate(chart.marks):
        _DRAW[type(mark)](axes, mark, [one for one in chart.marks[:i] if isinstance(one, plot.Bars)])
    _set_axis(axes, "x", chart.x)
    if not any(isinstance(mark, plot.Bars | plot.Lanes) for mark in chart.marks):
        _set_axis(axes, "y", chart.y)
    axes.tick_params(labelsize=8)
    if not any(isinstance(mark, plot.Lanes) for mark in chart.marks):
        axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        legend: Any = axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for handle in legend.legend_handles:
            if hasattr(handle, "set_sizes"):
                handle.set_sizes([30])


def _wrapped(text: str, width_inches: float) -> str:
    width = int(CHARACTERS_PER_INCH * width_inches)
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def _set_axis(axes: Axes, name: str, axis: plot.ChartAxis) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    one: Any = getattr(axes, f"{name}axis")
    axes.set(**{f"{name}label": axis.title})
    one.label.set_fontsize(8.5)
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
    top = 1.05 * one.get_view_interval()[1] if axis.low == 0 and axis.high is None else axis.high
    axes.set(**{f"{name}lim": (axis.low, top)})
    if axis.log:
        low, high = one.get_view_interval()
        subs = (1.0, 2.0, 5.0) if high < 3e3 * low else (1.0,)
        one.set_major_locator(LogLocator(subs=subs, numticks=40) if high > 8 * low else MaxNLocator(6))
        one.set_minor_locator(NullLocator())
    if axis.ticks:
        one.set_ticks(_apart(axis.ticks, np.log if axis.log else np.asarray))
    shown: dict[str, Callable[[float], str]] = {
        "percent": lambda value: f"{value:.0%}",
        "count": lambda value: f"{value:,.12g}",
        "prefix": duration if axis.unit == "s" else lambda value: with_prefix(value, axis.unit),
    }
    if show := shown.get(axis.numbers):
        one.set_major_formatter(lambda value, _: show(round(value, 15)) if value else "0")


def _apart(ticks: Sequence[float], scale: Callable[[Any], Any]) -> list[float]:
    """Those of `ticks` whose names do not touch, the last among them."""
    kept = [ticks[-1]]
    for tick in reversed(ticks):
        if scale(kept[-1]) - scale(tick) > 0.12 * (scale(ticks[-1]) - scale(ticks[0])):
            kept.append(tick)
    return kept


def _draw_bars(axes: Axes, bars: plot.Bars, before: Sequence[plot.Bars]) -> None:
    rows, height = np.arange(len(bars.names)) + 0.0, 0.72
    if bars.starts is None and before:  # the second of two that stand one below the other
        rows, height = rows + 0.2, 0.36
    starts: Any = 0.0 if bars.starts is None else bars.starts
    axes.barh(rows, bars.values, height, starts, color=bars.colors, label=bars.name or None)
    axes.set_yticks(np.arange(len(bars.names)), bars.names)
    axes.set_ylim(len(bars.names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    if bars.texts:
        beside: Any = axes.secondary_yaxis("right")
        beside.set_yticks(rows, bars.texts, fontsize=8)
        beside.tick_params(length=0)
        beside.spines["right"].set_visible(False)


def _draw_series(axes: Axes, series: plot.Series, _: Sequence[plot.Bars]) -> None:
    x, y, color, label = series.x, series.y, series.color, series.name or None
    if series.line:
        steps: Any = "steps-post" if series.steps else "default"
        axes.plot(x, y, LINES[series.line], color=color, drawstyle=steps, lw=1.4, label=label)
        label = None
    size = np.asarray(series.size, dtype=float)
    if (size > 0).any():
        is_open, marker = series.symbol == "circle-open", "^" if series.symbol == "triangle-up" else "o"
        look: Any = {"facecolors": "none" if is_open else color, "edgecolors": color if is_open else "none"}
        look |= {"marker": marker, "alpha": series.opacity, "lw": 0.8}
        axes.scatter(x, y, (0.75 * size) ** 2, label=label, **look)


def _draw_lanes(axes: Axes, lanes: plot.Lanes, _: Sequence[plot.Bars]) -> None:
    from matplotlib.colors import ListedColormap

    half = (lanes.times[1] - lanes.times[0]) / 2
    extent = (lanes.times[0] - half, lanes.times[-1] + half, len(lanes.names) - 0.5, -0.5)
    colors, shown = ListedColormap(list(lanes.kinds.values())), np.ma.masked_less(lanes.grid, 0)
    look: Any = {"aspect": "auto", "interpolation": "nearest", "vmin": -0.5, "vmax": len(lanes.kinds) - 0.5}
    axes.imshow(shown, cmap=colors, extent=extent, **look)
    for i, (kind, color) in enumerate(lanes.kinds.items()):
        if (lanes.grid == i).any():
            axes.barh(0, 0, color=color, label=kind)
    every = -(-len(lanes.names) // MOST_NAMES)
    axes.set_yticks(range(0, len(lanes.names), every), lanes.names[::every])
    axes.set_ylim(extent[2:])


def _draw_bound(axes: Axes, bound: plot.Bound, _: Sequence[plot.Bars]) -> None:
    draw = axes.axvline if bound.axis == "x" else axes.axhline
    draw(bound.value, color=bound.color, lw=1.2, linestyle=LINES[bound.line])


_DRAW: dict[type[plot.Mark], Callable[[Any, Any, Sequence[plot.Bars]], None]] = {
    **{plot.Bars: _draw_bars, plot.Series: _draw_series, plot.Lanes: _draw_lanes, plot.Bound: _draw_bound},
    plot.Names: lambda *_: None,
}


# --- names beside points -------------------------------------------------------------------------

_LEADER = {"arrowstyle": "-", "color": plot.OTHER_COLOR, "lw": 0.5, "shrinkA": 0, "shrinkB": 0}
_DIRECTIONS = np.radians([-45, -90, -135, -20, -160, 0, 180, -65, -115, 45, 135, 90])
_WAYS = np.column_stack([np.cos(_DIRECTIONS), np.sin(_DIRECTIONS)])


def _draw_names(axes: Axes, chart: plot.Chart) -> None:
    """Write each name at the nearest place to its point that is free, in the order of their importance.

    Free means inside the axes, clear of marks and lines, of other names and the lines that lead to them. Near
    places come first, below before above.
    """
    from matplotlib.path import Path as Outline
    from matplotlib.transforms import Bbox

    figure: Any = axes.get_figure(root=True)
    pixels = figure.dpi / 72
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    boxes: list[Bbox] = []
    for marks in axes.collections:
        centers: Any = axes.transData.transform(marks.get_offsets())
        sizes: Any = marks.get_sizes()  # type: ignore[attr-defined]
        halves = np.broadcast_to(np.sqrt(sizes)[:, None] * pixels / 2, centers.shape)
        boxes += [Bbox([center - half, center + half]) for center, half in zip(centers, halves, strict=True)]
    low, high = axes.bbox.min, axes.bbox.max
    distances = np.arange(5, 110, 5)[:, None, None] * pixels
    for names in (mark for mark in chart.marks if isinstance(mark, plot.Names)):
        for x, y, text, color in zip(names.x, names.y, names.texts, names.colors, strict=True):
            label = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=8, ha="center",
                                  va="center", color=color, arrowprops=_LEADER)  # fmt: skip
            label.set_in_layout(False)
            half = np.array(label.get_window_extent().size) / 2 + pixels
            center = axes.transData.transform((x, y))
            places = (center + _WAYS * (distances + half * np.abs(_WAYS))).reshape(-1, 2)
            inside = ((places - half >= low) & (places + half <= high)).all(axis=1)
            for place in places[inside]:
                box = Bbox([place - half, place + half])
                if box.count_overlaps(boxes) or any(line.intersects_bbox(box, False) for line in lines):
                    continue
                label.set_position(tuple((place - center) / pixels))
                boxes.append(box)
                lines.append(Outline([center, place]))
                break
            else:
                label.remove()
