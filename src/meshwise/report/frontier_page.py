"""Frontiers as a page: utilization against training compute, what binds, every assumption and its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwise.published.frontier.document import run_document
from meshwise.published.frontier.run import RESOURCES, Frontier, Limits, Point
from meshwise.report.html import COLORS, Chart, Page
from meshwise.report.table import Table


def frontier_page(frontier: Frontier, others: Sequence[Frontier] = ()) -> Page:
    """The best utilization of a device at each training compute; `others` are drawn beside it."""
    found, ideal, failing = (frontier, *others), frontier.ideal, frontier.with_failures
    days = f"{frontier.run.duration_s / 86400:.0f} days"
    headline = (
        f"runs of {days} on {frontier.device.name} keep 80 % of their utilization up to "
        f"{_flop(ideal.limit_80pct_flop)} and end at {_flop(ideal.wall_flop)}; with failures at "
        f"{_flop(failing.wall_flop)}"
    )
    rows = [
        (
            f"{point.training_flop:.1e}", f"{point.utilization:.1%}",
            f"{failed.utilization:.1%}" if failed.plan else "none", f"{point.devices:.3g}", _split(point),
            point.binds,
        )
        for point, failed in zip(ideal.curve[::5], failing.curve[::5], strict=True)
        if point.plan
    ]  # fmt: skip
    columns = ("FLOP", "utilization", "with failures", "devices", "plan", "binds")
    axis = {"type": "log", "title": {"text": "training compute [FLOP]"}, "exponentformat": "power"}
    share = {"tickformat": ".0%", "rangemode": "tozero"}
    curves = [curve for i, one in enumerate(found) for curve in _curves(one, COLORS[i % len(COLORS)])]
    busy = [
        _line(ideal, lambda point, name=name: point.busy_frac[name], name=name, line={"color": color})
        for name, color in zip(RESOURCES, COLORS, strict=False)
    ]
    document = run_document(frontier)
    assumed = [
        (name, f"{value['name']} ({value['source']})" if isinstance(value, dict) else _plain(value))
        for name, value in {**document["assumptions"], **document["failures"]}.items()
    ]
    return Page(
        f"Largest training runs on {', '.join(one.device.name for one in found)}",
        headline,
        [
            Chart(
                "Utilization of the best run", curves,
                {"xaxis": axis, "yaxis": share, "hovermode": "closest"},
                f"The plateau is {ideal.plateau:.1%}; dashed lines lose time to failures.",
                Table("", columns, rows, left=("FLOP", "plan", "binds")), 400,
            ),
            Chart("How busy each resource is", busy, {"xaxis": axis, "yaxis": share | {"range": [0, 1]}},
                  "Without failures; what no resource is busy with is latency, bubble and gradients."),
            Table("Assumptions", ("choice", "value"), assumed, left=("choice", "value")),
        ],
        ideal.wall is not None or bool(rows),
    )  # fmt: skip


def _flop(value: float | None) -> str:
    return f"{value:.1e} FLOP" if value else "beyond the curve"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _curves(frontier: Frontier, color: str) -> list[dict[str, Any]]:
    name = frontier.device.name
    return [
        _line(limits, lambda point: point.utilization, name=name + what, line={"color": color, "dash": dash})
        for limits, dash, what in (
            (frontier.ideal, "solid", ""),
            (frontier.with_failures, "dash", ", with failures"),
        )
    ]


def _line(limits: Limits, height: Any, **look: Any) -> dict[str, Any]:
    points = [point for point in limits.curve if point.plan]
    return {
        "type": "scatter", "mode": "lines", "x": [point.training_flop for point in points],
        "y": [height(point) for point in points], "text": [_hover(point) for point in points],
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    } | look  # fmt: skip


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
