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
from meshwise.report.table import TABLES, Table, records_table

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
    given = document["device"] | document["assumptions"] | document["failures"]
    assumed = [
        (name, f"{value['name']} ({value['source']})" if isinstance(value, dict) else _plain(value))
        for name, value in given.items()
    ]
    return Page(
        f"Largest training runs on {', '.join(one.device.name for one in found)}",
        headline,
        [
            replace(_utilization(found), table=curve_table(document, name)),
            curve_table(document["with_failures"], f"{name}, with failures"),
            _busy(frontier),
            *told("machine of a frontier", **document),
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
    shares = ", ".join(f"{name} {share:.0%}" for name, share in point.time_frac.items() if share > 0.005)
    return (
        f"{point.training_flop:.2e} FLOP, {point.utilization:.1%}<br>"
        f"{point.params:.2e} parameters, {point.devices:.3g} devices<br>{_degrees(plan)}<br>"
        f"{plan['microbatches']:.0f} microbatches of {plan['microbatch_tokens']:.0f} tokens per device<br>"
        f"{shares}"
    )


def layer_parts(document: dict[str, Any]) -> Iterator[Section]:
    """The times of one layer, what binds, and the what-ifs."""
    rows = [
        (name.removesuffix("_s"), duration(document[name]), f"{document[name] / document['fwd_bwd_s']:.0%}")
        for name in ("flop_s", "memory_s", "network_s")
    ]
    yield Table("forward + backward of a microbatch", ("resource", "time", "of the longest"), rows)
    yield from told("layer of a frontier", **{"two_level": None} | document)


def curve_table(limits: Mapping[str, Any], name: str) -> Table:
    """The best run at each training compute: a row is one run."""
    points = [point for point in limits["curve"][::EVERY] if point["plan"]]
    title = f"{name}: the best run at each training compute"
    return records_table(title, points, TABLES["curve"], degrees=_degrees)


def _degrees(plan: Mapping[str, float]) -> str:
    """The degrees of a plan; virtual stages and experts where they are more than one."""
    more = "".join(f",{name}={plan[name]:.0f}" for name in ("interleave", "ep") if plan[name] > 1)
    return "tp={tp_in:.0f}x{tp_out:.0f},pp={pp:.0f},dp={dp:.0f}".format(**plan) + more


def parts(found: Frontier) -> Iterator[Section]:
    """A frontier at the prices and the power that hold where none is stated."""
    yield from run_parts(found.to_json())


def run_parts(document: dict[str, Any]) -> Iterator[Section]:
    """The curve without failures and with them, where each ends, the machine, and what is left out."""
    for name, limits in (("without failures", document), ("with failures", document["with_failures"])):
        if limits["plateau"]:
            yield curve_table(limits, f"{document['device']['name']}, {name}")
        yield f"{name}: {ends(limits)}"
        limit = limits["limit"]
        if limit is not None:
            price = f", {dollars(limit['price'])}" if limit["price"] else ""
            watts, joules = limit["power_watts"], limit["energy_j"]
            power = f", {with_prefix(watts, 'W', 3)}, {with_prefix(joules / 3600, 'Wh', 3)}" if watts else ""
            devices = with_prefix(limit["devices"], "", 3)
            yield f"  at 80 %: {devices} devices, {duration(limit['training_s'])}{power}{price}"
    yield from told("machine of a frontier", **document)


def ends(limits: Mapping[str, Any]) -> str:
    """Where a curve ends, or that no run of it ends in time."""
    if not limits["plateau"]:
        return f"no run of {flop(limits['curve'][0]['training_flop'])} or more ends in time"
    most, wall = flop(limits["limit_80pct_flop"]), flop(limits["wall_flop"])
    return f"plateau {limits['plateau']:.1%}; 80 % of it up to {most}; wall at {wall}"


def flop(value: float | None) -> str:
    """A training compute, or that it lies beyond the curve."""
    return "beyond the curve" if value is None else f"{value:.2g} FLOP"
