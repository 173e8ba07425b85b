"""A chart as a plotly figure: plain data for the page, whose script adds font and colors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from meshwise.report.answer import Bars, Bound, Chart, ChartAxis, Lanes, Mark, Names, Series

PX_PER_CHARACTER = 8
"""A character of a label is no wider on average."""


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """The `data` and the `layout` of a plotly figure."""
    data = [trace for mark in chart.marks for trace in _TRACES[type(mark)](mark)]
    lanes = any(isinstance(mark, Lanes | Bars) for mark in chart.marks)
    legend = sum(bool(trace.get("name")) for trace in data) > 1
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x),
        "yaxis": _axis(chart.y) | ({"autorange": "reversed", "type": "category"} if lanes else {}),
        "shapes": [_bound(mark) for mark in chart.marks if isinstance(mark, Bound)],
        "barmode": "overlay"
        if any(isinstance(m, Bars) and m.starts is not None for m in chart.marks)
        else "group",
        "hovermode": "closest",
        "showlegend": legend,
        "margin": _margins(chart, data, legend),
    }
    return {"data": data, "layout": layout}


def _margins(chart: Chart, data: list[dict[str, Any]], legend: bool) -> dict[str, int]:
    """Room [px] for the labels of the axes and a line of the legend, so that plotly need not measure them."""
    names = [name for trace in data for name in trace.get("y", ()) if isinstance(name, str)]
    widest = max(map(len, names), default=0)
    left = max(48 + 18 * bool(chart.y.title), 14 + PX_PER_CHARACTER * widest)
    return {"l": left, "r": 24, "t": 32 if legend else 8, "b": 48 if chart.x.title else 28}


_NUMBERS: dict[str, dict[str, Any]] = {
    "prefix": {"tickformat": "~s", "hoverformat": ".4~s"},
    "percent": {"tickformat": ".0%", "hoverformat": ".1%"},
    "count": {"tickformat": ",~f", "hoverformat": ",~f"},
    "power": {"exponentformat": "power", "hoverformat": ".2e"},
}


def _axis(axis: ChartAxis) -> dict[str, Any]:
    look = dict(_NUMBERS[axis.numbers])
    title = f"{axis.title} [{axis.unit}]" if axis.log and axis.unit else axis.title
    if title:
        look["title"] = {"text": title}
    if axis.ticks:
        look["tickvals"] = axis.ticks
    if axis.log:  # of the numbers between powers of ten, plotly shows a digit alone, without the unit
        look |= {"type": "log"} | ({"dtick": "D2"} if axis.numbers == "prefix" and not axis.ticks else {})
    else:
        look["ticksuffix"] = axis.unit
    if axis.low is not None and axis.high is not None:
        ends = [axis.low, axis.high]
        look["range"] = [math.log10(end) for end in ends] if axis.log else ends
    elif axis.low == 0:
        look["rangemode"] = "tozero"
    return look


def _bars(bars: Bars) -> list[dict[str, Any]]:
    names = [f"{name}  {text}" for name, text in zip(bars.names, bars.texts, strict=bool(bars.texts))]
    return [
        {
            "type": "bar", "orientation": "h", "name": bars.name, "y": names or bars.names, "x": bars.values,
            "marker": {"color": bars.colors}, "hovertemplate": "%{y}: %{x}<extra></extra>",
        } | ({} if bars.starts is None else {"base": bars.starts, "hovertemplate": "%{y}<extra></extra>"})
    ]  # fmt: skip


def _series(series: Series) -> list[dict[str, Any]]:
    marked = bool(np.any(np.asarray(series.size) > 0))
    mode = "+".join(["lines"] * bool(series.line) + ["markers"] * marked)
    trace: dict[str, Any] = {
        "type": "scatter", "mode": mode, "name": series.name, "x": series.x, "y": series.y,
        "showlegend": bool(series.name), "text": series.texts, "customdata": series.links,
    }  # fmt: skip
    if series.line:
        shape = "hv" if series.steps else "linear"
        trace["line"] = {"color": series.color, "dash": series.line, "width": 1.6, "shape": shape}
    if marked:
        look = {"size": series.size, "symbol": series.symbol, "opacity": series.opacity}
        trace["marker"] = look | {"color": series.color}
    return [trace]


def _lanes(lanes: Lanes) -> list[dict[str, Any]]:
    kinds = lanes.kinds
    ends = [i / len(kinds) for i in range(len(kinds) + 1)]
    scale = [(end, color) for i, color in enumerate(kinds.values()) for end in ends[i : i + 2]]
    image = {
        "type": "heatmap", "x": lanes.times, "y": lanes.names,
        "z": [[None if kind < 0 else kind for kind in row] for row in lanes.grid.tolist()],
        "zmin": -0.5, "zmax": len(kinds) - 0.5, "colorscale": scale, "showscale": False,
        "hovertemplate": "%{y}, %{x}<extra></extra>",
    }  # fmt: skip
    keys = [
        {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": kind,
            "marker": {"color": color, "symbol": "square", "size": 10},
        }
        for i, (kind, color) in enumerate(kinds.items())
        if (lanes.grid == i).any()
    ]  # fmt: skip
    return [image, *keys]


def _bound(bound: Bound) -> dict[str, Any]:
    across = "y" if bound.axis == "x" else "x"
    at = {f"{bound.axis}0": bound.value, f"{bound.axis}1": bound.value, f"{across}0": 0, f"{across}1": 1}
    line = {"color": bound.color, "width": 2, "dash": bound.line}
    return {"type": "line", f"{across}ref": "paper", "line": line} | at


_TRACES: dict[type[Mark], Callable[[Any], list[dict[str, Any]]]] = {
    **{Bars: _bars, Series: _series, Lanes: _lanes},
    **{Bound: lambda _: [], Names: lambda _: []},
}
