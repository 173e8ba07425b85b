"""Pictures of a frontier: utilization against training compute, what binds, and what the limits hang on.

One device gets its curve with and without failures, and below it where the time of a step goes; several
devices get one curve each. A path that ends in .html gets an interactive plotly page, any other a
matplotlib picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.published.frontier.run import RESOURCES, Frontier, Limits
from meshwise.report.figure import check_format, new_figure, open_frame, save_figure
from meshwise.report.frontier_page import frontier_page
from meshwise.report.html import write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4a8fc2", "#f0913a", "#8172b2", "#4fa14a", "#c44e52", "#937860", "#da8bc3", "#555555")
WAITS = {"latency": ("#c44e52", ":"), "bubble": ("#937860", ":"), "gradients": ("#555555", ":")}
"""Shares of a step in which what binds stands still: color and line."""
FAILURE_COLOR = "#c44e52"


def plot_frontiers(frontiers: list[Frontier], path: str | Path) -> None:
    """Draw the curves of `frontiers` to `path`, by its ending with matplotlib or plotly.

    Raises `DataError` for an ending that is neither, `MissingExtraError` without the package.
    """
    path = Path(path)
    check_format(path, also=(".html",))
    if path.suffix == ".html":
        write_page(frontier_page(frontiers[0], frontiers[1:]), path)
        return
    single = len(frontiers) == 1
    figure = new_figure(8, 7 if single else 4.5)
    heights = [3, 2] if single else [1]
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    draw_utilization(rows[0], frontiers)
    if single:
        draw_busy(rows[1], frontiers[0])
    rows[-1].set_xlabel("training compute [FLOP]")
    save_figure(figure, path)


def draw_utilization(axes: Axes, frontiers: list[Frontier]) -> None:
    """Draw utilization curves into matplotlib axes; limits are marked, failures dashed."""
    single = len(frontiers) == 1
    for frontier, color in zip(frontiers, COLORS, strict=False):
        name = "without failures" if single else frontier.device.name
        _draw_curve(axes, frontier.ideal, "-", color, name)
        failure_color = FAILURE_COLOR if single else color
        _draw_curve(axes, frontier.with_failures, "--", failure_color, "with failures" if single else None)
        if single:
            _name_limits(axes, frontier.ideal, color, "left")
            _name_limits(axes, frontier.with_failures, FAILURE_COLOR, "right")
    axes.set_xscale("log")
    axes.set_ylim(0, None)
    axes.set_ylabel("utilization")
    legend: Any = {} if single else {"title": "dashed: with failures; dots: 80 % of the plateau"}
    axes.legend(frameon=False, fontsize=8, title_fontsize=8, loc="lower left", **legend)
    run = frontiers[0].run
    axes.set_title(
        f"{frontiers[0].device.name + ': ' if single else ''}best run of at most "
        f"{run.duration_s / 86400:.0f} days, batch {run.batch.name}, {run.schedule}",
        loc="left",
        fontsize=10,
    )
    _finish(axes)


def _draw_curve(axes: Axes, limits: Limits, line: str, color: str, label: str | None) -> None:
    points = [point for point in limits.curve if point.plan]
    points += [limits.wall] if limits.wall is not None else []
    flop = [point.training_flop for point in points]
    axes.plot(flop, [point.utilization for point in points], line, color=color, linewidth=1.6, label=label)
    if limits.limit is not None:
        axes.plot(limits.limit.training_flop, limits.limit.utilization, "o", color=color, markersize=5)


def _name_limits(axes: Axes, limits: Limits, color: str, side: str) -> None:
    """Write where a curve ends, and its limit on the given side of the text."""
    look: Any = {"textcoords": "offset points", "fontsize": 8, "color": color}
    if limits.wall is not None:
        flop = limits.wall.training_flop
        axes.axvline(flop, color=color, linewidth=0.8, linestyle=":")
        axes.annotate(f"wall {flop:.1e}", (flop, 0.02), (4, 0), rotation=90, va="bottom", **look)
    if limits.limit is not None:
        text = f"80 % of the plateau\n{limits.limit.training_flop:.1e} FLOP"
        at = (limits.limit.training_flop, limits.limit.utilization)
        axes.annotate(text, at, (8 if side == "left" else -8, 0), ha=side, va="center", **look)


def draw_busy(axes: Axes, frontier: Frontier) -> None:
    """Draw how busy each resource is along the curve without failures, and how long all of them wait."""
    points = [point for point in frontier.ideal.curve if point.plan]
    flop = [point.training_flop for point in points]
    for name, color in zip(RESOURCES, COLORS, strict=False):
        axes.plot(flop, [point.busy_frac[name] for point in points], color=color, linewidth=1.4, label=name)
    for name, (color, line) in WAITS.items():
        axes.plot(flop, [point.time_frac[name] for point in points], line, color=color, lw=1.2, label=name)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of a step")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _finish(axes)


def plot_sensitivity(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Draw the limit and the wall of each row of `frontier.run.sensitivity`, the first row as lines."""
    path = Path(path)
    check_format(path)
    base, others = rows[0], rows[1:]
    figure = new_figure(8, 0.24 * len(others) + 1)
    axes = figure.subplots()
    for key, marker, color, label in (
        ("limit_80pct_flop", "o", COLORS[0], "80 % of the plateau"),
        ("wall_flop", "s", FAILURE_COLOR, "wall"),
    ):
        found = [(row[key], place) for place, row in enumerate(others) if row[key] is not None]
        axes.plot(*zip(*found, strict=True), marker, color=color, markersize=5, label=label, linestyle="none")
        if base[key] is not None:
            axes.axvline(base[key], color=color, linewidth=0.8)
            axes.hlines(
                [place for _, place in found], base[key], [flop for flop, _ in found], color=color, lw=1.2
            )
    axes.set_yticks(range(len(others)), [f"{row['choice']}: {row['value']}" for row in others], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("training compute [FLOP]; no mark: beyond the curve")
    axes.grid(alpha=0.25, axis="x")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    open_frame(axes)
    save_figure(figure, path)


def _finish(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.25)
    open_frame(axes)
