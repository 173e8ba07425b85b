"""Pictures of a search: what less memory costs in time; how machines compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.core.units import with_prefix
from meshwise.plan.plan import plan_text
from meshwise.report.figure import check_format as check_format
from meshwise.report.figure import new_figure, open_frame, save_figure
from meshwise.search.search import Result
from meshwise.search.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FRONT, _BEST, _LIMIT = "#4a8fc2", "#d62728", "#999999"
_NEAR = 0.05
"""Machines whose speed and cost differ by no more share a place: their names stand one above the other."""


def draw_search(found: Result | Study, path: str | Path) -> None:
    """Draw the Pareto front of a search, or the machines of a study, to `path`.

    Raises DataError for an ending that cannot be drawn, MissingExtraError without matplotlib.
    """
    check_format(Path(path))
    figure = new_figure(9, 4)
    if isinstance(found, Study):
        speed, cost = figure.subplots(1, 2)
        _machines(found, speed, cost)
    else:
        _front(found, figure.subplots())
    save_figure(figure, Path(path))


def _front(result: Result, axes: Axes) -> None:
    memory = [one.memory_bytes / 1e9 for one in result.pareto]
    axes.step(memory, [one.step_s for one in result.pareto], where="pre", color=_FRONT, marker="o")
    for one in result.pareto[:: max(len(result.pareto) // 8, 1)]:
        text = f"{plan_text(one.plan) or 'default plan'}, microbatch {one.microbatch}"
        place = one.memory_bytes / 1e9, one.step_s
        is_left = place[0] < (memory[0] + memory[-1]) / 2
        side = {"xytext": (4, 4)} if is_left else {"xytext": (-4, -9), "ha": "right"}
        axes.annotate(text, place, fontsize=6, textcoords="offset points", **side)
    axes.axvline(result.capacity_bytes / 1e9, color=_LIMIT, linestyle="--")
    axes.set_xlabel("memory of the fullest GPU [GB] (dashed: what a plan may need)")
    axes.set_ylabel("step [s]")
    axes.margins(x=0.12)
    open_frame(axes)


def _machines(study: Study, speed: Axes, cost: Axes) -> None:
    found = [(point, point.measures()) for point in study.points if point.best is not None]
    names = [", ".join(f"{key} {value}" for key, value in point.changes.items()) for point, _ in found]
    chips = [values["num_chips"] for _, values in found]
    tokens_per_s = [1.0 / values["s_per_token"] for _, values in found]
    if len(set(chips)) == len(chips) > 1:
        first = tokens_per_s[0] / chips[0]
        speed.loglog(chips, [first * num for num in chips], color=_LIMIT, linestyle="--", label="ideal")
        speed.loglog(chips, tokens_per_s, color=_FRONT, marker="o", label="best plan")
        speed.set_xticks(chips, [f"{num:.0f}" for num in chips])
        speed.set_yticks(tokens_per_s, [with_prefix(rate, "", 3) for rate in tokens_per_s])
        speed.minorticks_off()
        speed.set_xlabel("GPUs")
        speed.set_ylabel("tokens a second")
        speed.legend(frameon=False)
    else:
        speed.barh(names, tokens_per_s, color=_FRONT)
        speed.invert_yaxis()
        speed.set_xlabel("tokens a second")
        speed.ticklabel_format(axis="x", scilimits=(0, 3))
    front = set(study.front("gpu_s_per_token"))
    at = {id(point): i for i, point in enumerate(study.points)}
    places = [
        (rate, 1e6 / 3600 * values["gpu_s_per_token"])
        for rate, (_, values) in zip(tokens_per_s, found, strict=True)
    ]
    for i, ((point, _), name, place) in enumerate(zip(found, names, places, strict=True)):
        color = _BEST if at[id(point)] in front else _FRONT
        cost.plot(*place, "o", color=color)
        num_below = sum(math.dist(map(math.log, one), map(math.log, place)) < _NEAR for one in places[:i])
        right = min((other for other in places if other[0] > place[0]), default=place)
        height = 4 + 8 * num_below if right[1] <= place[1] else -10 - 8 * num_below
        cost.annotate(name, place, fontsize=6, xytext=(4, height), textcoords="offset points")
    cost.set_ylim(0.0, 1.15 * cost.dataLim.ymax)
    cost.set_xscale("log")
    first, last = min(tokens_per_s), max(tokens_per_s)
    cost.set_xticks([first, last], [with_prefix(rate, "", 3) for rate in (first, last)])
    cost.minorticks_off()
    cost.margins(x=0.25)
    cost.set_xlabel("tokens a second")
    cost.set_ylabel("GPU-hours a million tokens (red: front)")
    for axes in (speed, cost):
        open_frame(axes)
