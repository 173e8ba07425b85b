"""Frontiers as a page: utilization against training compute, what binds, every assumption and its source."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.published.frontier import RESOURCES, Frontier, Limits, Point
from meshwise.report.chart import (
    COLORS,
    MORE_COLOR,
    Bars,
    Bound,
    Chart,
    ChartAxis,
    LineStyle,
    Mark,
    Names,
    Picture,
    Series,
)
from meshwise.report.chart_picture import check_format, draw_picture
from meshwise.report.frontier_table import curve_table, flop
from meshwise.report.html import Page, write_page
from meshwise.report.table import Table

WAITS = ("latency", "bubble", "gradients")
"""Shares of a step in which what binds stands still."""
FAILURE_COLOR = MORE_COLOR
_COMPUTE = ChartAxis("training compute [FLOP]", log=True, numbers="power")


def frontier_page(frontier: Frontier, others: Sequence[Frontier] = ()) -> Page:
    """The best utilization of a device at each training compute; `others` are drawn beside it."""
    found, ideal = [frontier, *others], frontier.ideal
    days = f"{frontier.run.duration_s / 86400:.0f} days"
    headline = (
        f"runs of {days} on {frontier.device.name} keep 80 % of their utilization up to "
        f"{flop(ideal.limit_80pct_flop)} and end at {flop(ideal.wall_flop)}; with failures at "
        f"{flop(frontier.with_failures.wall_flop)}"
    )
    document = frontier.to_json()
    assumed = [
        (name, f"{value['name']} ({value['source']})" if isinstance(value, dict) else _plain(value))
        for name, value in {**document["assumptions"], **document["failures"]}.items()
    ]
    return Page(
        f"Largest training runs on {', '.join(one.device.name for one in found)}",
        headline,
        [
            replace(_utilization(found), table=curve_table(document)),
            _busy(ideal),
            Table("Assumptions", ("choice", "value"), assumed, left=("choice", "value")),
        ],
        any(point.plan for point in ideal.curve),
    )  # fmt: skip


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _utilization(found: Sequence[Frontier]) -> Chart:
    """A curve for each frontier, and one with failures; of a single one the limits are named."""
    marks: list[Mark] = []
    for frontier, color in zip(found, itertools.cycle(COLORS)):
        ideal, failing = frontier.ideal, frontier.with_failures
        name, worse = frontier.device.name, FAILURE_COLOR if len(found) == 1 else color
        marks += _curve(ideal, name, color, "solid", named=len(found) == 1)
        marks += _curve(failing, f"{name}, with failures", worse, "dash", named=len(found) == 1)
    run = found[0].run
    finding = (
        f"The plateau is {found[0].ideal.plateau:.1%}; dashed lines lose time to failures, dots are 80 % of "
        f"the plateau. At most {run.duration_s / 86400:.0f} days, batch {run.batch.name}, {run.schedule}."
    )
    share = ChartAxis("utilization", low=0.0, numbers="percent")
    return Chart("Utilization of the best run", marks, _COMPUTE, share, finding, height=420)


def _curve(limits: Limits, name: str, color: str, line: LineStyle, *, named: bool) -> list[Mark]:
    points = [point for point in limits.curve if point.plan]
    points += [limits.wall] if limits.wall is not None else []
    marks: list[Mark] = [_line(points, lambda point: point.utilization, name, color, line)]
    if (limit := limits.limit) is not None:
        at = [limit.training_flop], [limit.utilization]
        marks.append(Series(*at, color=color, line="", size=8, texts=["80 % of the plateau"]))
        if named:
            marks.append(Names(*at, [f"80 % of the plateau: {flop(limit.training_flop)}"], [color]))
    if (wall := limits.wall) is not None and named:
        marks.append(Bound(wall.training_flop, color=color, line="dot"))
        marks.append(Names([wall.training_flop], [0.1], [f"wall: {flop(wall.training_flop)}"], [color]))
    return marks


def _busy(ideal: Limits) -> Chart:
    """How busy each resource is along the curve without failures, and what all of them wait for."""
    points = [point for point in ideal.curve if point.plan]
    marks = [
        _line(points, lambda point, name=name: point.busy_frac[name], name, color)
        for name, color in zip(RESOURCES, COLORS, strict=False)
    ]
    marks += [
        _line(points, lambda point, name=name: point.time_frac[name], name, color, "dot")
        for name, color in zip(WAITS, COLORS[::-1], strict=False)
    ]
    finding = "Without failures. Dotted: shares of a step in which what binds stands still."
    share = ChartAxis("share of a step", low=0.0, high=1.0, numbers="percent")
    return Chart("How busy each resource is", marks, _COMPUTE, share, finding)


def _line(points: Sequence[Point], height: Any, name: str, color: str, line: LineStyle = "solid") -> Series:
    return Series(
        [point.training_flop for point in points], [height(point) for point in points], name, color, line,
        texts=[_hover(point) for point in points],
    )  # fmt: skip


def frontier_picture(frontiers: Frontier | Sequence[Frontier]) -> Picture:
    """Curves of one or several devices; of one, what is busy too."""
    found = [frontiers] if isinstance(frontiers, Frontier) else list(frontiers)
    names = ", ".join(one.device.name for one in found)
    rows = [[_utilization(found)], *([[_busy(found[0].ideal)]] if len(found) == 1 else [])]
    return Picture(rows, f"Largest training runs on {names}")


def draw_frontiers(frontiers: Sequence[Frontier], path: Path) -> None:
    """Draw the curves of `frontiers` to `path`: as a page where it ends in .html, else as a picture."""
    check_format(path, also=(".html",))
    if path.suffix == ".html":
        write_page(frontier_page(frontiers[0], frontiers[1:]), path)
    else:
        draw_picture(frontier_picture(frontiers), path)


def sensitivity_picture(rows: Sequence[dict[str, Any]]) -> Picture:
    """How far each choice moves the limit and the wall from those of the first of `rows`."""
    base, others = rows[0], rows[1:]
    marks: list[Mark] = []
    for key, name, color in (
        ("limit_80pct_flop", "80 % of the plateau", COLORS[0]),
        ("wall_flop", "wall", FAILURE_COLOR),
    ):
        if (start := base[key]) is None:
            continue
        names = [f"{row['choice']}: {row['value']}" for row in others]
        moved = [(row[key] or start) - start for row in others]
        marks += [
            Bars(names, moved, [color] * len(names), [start] * len(names), name),
            Bound(start, color=color),
        ]
    finding = (
        "From the line to the end of a bar: what another choice changes. No bar: nothing, or out of reach."
    )
    height = 60 + 24 * len(others)
    return Picture(
        [[Chart("How far each choice moves the limits", marks, _COMPUTE, finding=finding, height=height)]]
    )


def _split(point: Point) -> str:
    plan = point.plan or {}
    return (
        f"tp {plan['tp_in']:.0f} x {plan['tp_out']:.0f}, pp {plan['pp']:.0f}, dp {plan['dp']:.0f}, "
        f"ep {plan['ep']:.0f}"
    )


def _hover(point: Point) -> str:
    plan = point.plan or {}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in point.time_frac.items() if share > 0.005)
    return (
        f"{point.training_flop:.2e} FLOP, {point.utilization:.1%}<br>"
        f"{point.params:.2e} parameters, {point.devices:.3g} devices<br>{_split(point)}<br>"
        f"{plan['microbatches']:.0f} microbatches of {plan['microbatch_tokens']:.0f} tokens per device<br>"
        f"{shares}"
    )
