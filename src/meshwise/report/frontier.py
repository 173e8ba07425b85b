"""Frontiers: utilization against training compute, what binds; on a page every assumption and its source."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.core.refusals import told
from meshwise.core.units import dollars, duration, with_prefix
from meshwise.published.frontier import RESOURCES, Frontier, Limits, Point
from meshwise.report import answer as plot
from meshwise.report.answer import Page, Section
from meshwise.report.chart_picture import check_format, draw_picture
from meshwise.report.html import write_page
from meshwise.report.table import Table

EVERY = 5
"""Of the points of a curve every fifth is printed: two to a decade."""
WAITS = ("latency", "bubble", "gradients")
"""Shares of a step in which what binds stands still."""
FAILURE_COLOR = plot.MORE_COLOR
_COMPUTE = plot.ChartAxis("training compute [FLOP]", log=True, numbers="power")


def page(frontier: Frontier, others: Sequence[Frontier] = ()) -> Page:
    """The best utilization of a device at each training compute; `others` are drawn beside it."""
    found, name, document = [frontier, *others], frontier.device.name, frontier.to_json()
    of_each = "; on ".join(f"{one.device.name}: {ends(one.to_json())}" for one in found)
    failing = "" if others else f"; with failures: {ends(document['with_failures'])}"
    headline = f"runs of {frontier.run.duration_s / 86400:.0f} days on {of_each}{failing}"
    assumed = [
        (name, f"{value['name']} ({value['source']})" if isinstance(value, dict) else _plain(value))
        for name, value in {**document["assumptions"], **document["failures"]}.items()
    ]
    return Page(
        f"Largest training runs on {', '.join(one.device.name for one in found)}",
        headline,
        [
            replace(_utilization(found), table=curve_table(document)),
            _busy(frontier),
            Table(f"Assumptions of {name}", ("choice", "value"), assumed, left=("choice", "value")),
        ],
        any(point.plan for point in frontier.ideal.curve),
    )  # fmt: skip


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _utilization(found: Sequence[Frontier]) -> plot.Chart:
    """A curve for each frontier, and one with failures; of a single one the limits are named."""
    marks: list[plot.Mark] = []
    for frontier, color in zip(found, itertools.cycle(plot.COLORS)):
        ideal, failing = frontier.ideal, frontier.with_failures
        name, worse = frontier.device.name, FAILURE_COLOR if len(found) == 1 else color
        marks += _curve(ideal, name, color, "solid", named=len(found) == 1)
        marks += _curve(failing, f"{name}, with failures", worse, "dash", named=len(found) == 1)
    run = found[0].run
    plateaus = ", ".join(f"{one.ideal.plateau:.1%} on {one.device.name}" for one in found)
    finding = (
        f"The plateau is {plateaus}; dashed lines lose time to failures, dots are 80 % of "
        f"the plateau. At most {run.duration_s / 86400:.0f} days, batch {run.batch.name}, {run.schedule}."
    )
    share = plot.ChartAxis("utilization", low=0.0, numbers="percent")
    return plot.Chart("Utilization of the best run", marks, _COMPUTE, share, finding, height=420)


def _curve(limits: Limits, name: str, color: str, line: plot.LineStyle, *, named: bool) -> list[plot.Mark]:
    points = [point for point in limits.curve if point.plan]
    points += [limits.wall] if limits.wall is not None else []
    marks: list[plot.Mark] = [_line(points, lambda point: point.utilization, name, color, line)]
    if (limit := limits.limit) is not None:
        at = [limit.training_flop], [limit.utilization]
        marks.append(plot.Series(*at, color=color, line="", size=8, texts=["80 % of the plateau"]))
        if named:
            marks.append(plot.Names(*at, [f"80 % of the plateau: {flop(limit.training_flop)}"], [color]))
    if (wall := limits.wall) is not None and named:
        marks.append(plot.Bound(wall.training_flop, color=color, line="dot"))
        marks.append(plot.Names([wall.training_flop], [0.1], [f"wall: {flop(wall.training_flop)}"], [color]))
    return marks


def _busy(frontier: Frontier) -> plot.Chart:
    """How busy each resource is along the curve without failures, and what all of them wait for."""
    points = [point for point in frontier.ideal.curve if point.plan]
    marks = [
        _line(points, lambda point, name=name: point.busy_frac[name], name, color)
        for name, color in zip(RESOURCES, plot.COLORS, strict=False)
    ]
    marks += [
        _line(points, lambda point, name=name: point.time_frac[name], name, color, "dot")
        for name, color in zip(WAITS, plot.COLORS[::-1], strict=False)
    ]
    finding = "Without failures. Dotted: shares of a step in which what binds stands still."
    share = plot.ChartAxis("share of a step", low=0.0, high=1.0, numbers="percent")
    return plot.Chart(f"How busy each resource is: {frontier.device.name}", marks, _COMPUTE, share, finding)


def _line(
    points: Sequence[Point], height: Any, name: str, color: str, line: plot.LineStyle = "solid"
) -> plot.Series:
    return plot.Series(
        [point.training_flop for point in points], [height(point) for point in points], name, color, line,
        texts=[_hover(point) for point in points],
    )  # fmt: skip


def picture(frontiers: Frontier | Sequence[Frontier]) -> plot.Picture:
    """Curves of one or several devices; of one, what is busy too."""
    found = [frontiers] if isinstance(frontiers, Frontier) else list(frontiers)
    names = ", ".join(one.device.name for one in found)
    rows = [[_utilization(found)], *([[_busy(found[0])]] if len(found) == 1 else [])]
    return plot.Picture(rows, f"Largest training runs on {names}")


def draw_frontiers(frontiers: Sequence[Frontier], path: Path) -> None:
    """Draw the curves of `frontiers` to `path`: as a page where it ends in .html, else as a picture."""
    check_format(path, also=(".html",))
    if path.suffix == ".html":
        write_page(page(frontiers[0], frontiers[1:]), path)
    else:
        draw_picture(picture(frontiers), path)


def _hover(point: Point) -> str:
    plan = point.plan or {}
    degrees = "tp {tp_in:.0f} x {tp_out:.0f}, pp {pp:.0f}, dp {dp:.0f}, ep {ep:.0f}".format(**plan)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in point.time_frac.items() if share > 0.005)
    return (
        f"{point.training_flop:.2e} FLOP, {point.utilization:.1%}<br>"
        f"{point.params:.2e} parameters, {point.devices:.3g} devices<br>{degrees}<br>"
        f"{plan['microbatches']:.0f} microbatches of {plan['microbatch_tokens']:.0f} tokens per device<br>"
        f"{shares}"
    )


def layer_parts(document: dict[str, Any]) -> Iterator[Section]:
    """The times of one layer, what binds, and the what-ifs."""
    rows = [
        (name.removesuffix("_s"), duration(document[name]), f"{document[name] / document['fwd_bwd_s']:.0%}")
        for name in ("flop_s", "memory_s", "network_s")
    ]
    title, columns = "forward + backward of a microbatch", ("resource", "time", "of the longest")
    yield Table(title, columns, rows)
    of = document["what_ifs"]
    ends = {name: _rate(of[f"{name}_binds_below_bytes_per_s"]) for name in ("network", "memory")}
    yield from told("layer of a frontier", **{"two_level": None} | document | ends)


def curve_table(document: Mapping[str, Any]) -> Table:
    """The best run at each training compute, with failures and without."""
    curves = zip(document["curve"], document["with_failures"]["curve"], strict=True)
    rows = [
        (
            f"{point['training_flop']:.1e}", f"{point['utilization']:.1%}",
            f"{failing['utilization']:.1%}" if failing["plan"] else "none",
            with_prefix(point["devices"], "", 3),
            f"tp={plan['tp_in']:.0f}x{plan['tp_out']:.0f},pp={plan['pp']:.0f},dp={plan['dp']:.0f}",
            point["binds"], point["lost_to"],
        )
        for point, failing in list(curves)[::EVERY]
        if (plan := point["plan"]) is not None
    ]  # fmt: skip
    title = f"{document['device']['name']}: the best run at each training compute"
    columns = ("FLOP", "MFU", "with failures", "devices", "plan", "binds", "lost to")
    return Table(title, columns, rows, left=("FLOP", "plan", "binds", "lost to"))


def parts(found: Frontier) -> Iterator[Section]:
    """A frontier at the prices and the power that hold where none is stated."""
    yield from run_parts(found.to_json())


def run_parts(document: dict[str, Any]) -> Iterator[Section]:
    """The curve, with failures and without, and where it ends."""
    if document["plateau"]:
        yield curve_table(document)
    for name, limits in (("without failures", document), ("with failures", document["with_failures"])):
        yield f"{name}: {ends(limits)}"
        limit = limits["limit"]
        if limit is not None:
            price = f", {dollars(limit['price'])}" if limit["price"] else ""
            watts, joules = limit["power_watts"], limit["energy_j"]
            power = f", {with_prefix(watts, 'W', 3)}, {with_prefix(joules, 'J', 3)}" if watts else ""
            devices = with_prefix(limit["devices"], "", 3)
            yield f"  at 80 %: {devices} devices, {duration(limit['training_s'])}{power}{price}"


def ends(limits: Mapping[str, Any]) -> str:
    """Where a curve ends, or that no run of it ends in time."""
    if not limits["plateau"]:
        return f"no run of {flop(limits['curve'][0]['training_flop'])} or more ends in time"
    most, wall = flop(limits["limit_80pct_flop"]), flop(limits["wall_flop"])
    return f"plateau {limits['plateau']:.1%}; 80 % of it up to {most}; wall at {wall}"


def flop(value: float | None) -> str:
    """A training compute, or that it lies beyond the curve."""
    return "beyond the curve" if value is None else f"{value:.2g} FLOP"


def _rate(bytes_per_s: float) -> str:
    return with_prefix(bytes_per_s, "B/s", 3) if bytes_per_s < 1e12 else with_prefix(bytes_per_s, "B/s")
