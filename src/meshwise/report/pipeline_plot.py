"""A picture of a simulated pipeline: one lane per rank, one cell per action, time to the right.

Blue is forward, green the backward (its input half where it is split), orange the weight half, and
what stays white is bubble; second and later chunks of a rank are darker. Cells carry the number of
their microbatch as long as there is room. In a DualPipe pair the forward is the upper half of a
cell, the backward the lower.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwise.core.errors import MissingExtraError
from meshwise.cost.simulate import KINDS, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "F": ("#9ecae8", "#4a8fc2"),
    "B": ("#a8d8a0", "#4fa14a"),
    "I": ("#a8d8a0", "#4fa14a"),
    "W": ("#fdd0a2", "#f0913a"),
}
_SEND_COLOR = "#d62728"
_MAX_NUMBERED = 700


def draw_timeline(axes: Axes, timeline: Timeline, title: str | None = None, unit_s: float = 1.0) -> None:
    """Draw a timeline into matplotlib axes, the time axis in units of `unit_s`."""
    start, end = timeline.start_s / unit_s, timeline.end_s / unit_s
    below_pair = np.append(False, timeline.paired[:-1])
    bottom = timeline.rank + np.where(timeline.paired, -0.42, np.where(below_pair, 0.0, -0.42))
    height = np.where(timeline.paired | below_pair, 0.42, 0.84)
    for kind, name in enumerate(KINDS):
        for chunk in range(timeline.chunk.max() + 1):
            rows = np.flatnonzero((timeline.kind == kind) & (timeline.chunk == chunk))
            axes.barh(
                bottom[rows],
                (end - start)[rows],
                height[rows],
                start[rows],
                align="edge",
                color=_COLORS[name][min(chunk, 1)],
                edgecolor="white",
                linewidth=0.4,
            )
    sends = np.flatnonzero(timeline.send_s)
    axes.barh(timeline.rank[sends], timeline.send_s[sends] / unit_s, 0.84, end[sends], color=_SEND_COLOR)
    if len(start) <= _MAX_NUMBERED:
        for row in range(len(start)):
            axes.text(
                (start[row] + end[row]) / 2,
                bottom[row] + height[row] / 2,
                str(timeline.microbatch[row]),
                ha="center",
                va="center",
                fontsize=5.5 if height[row] > 0.5 else 4.0,
                color="#222222",
            )
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan_s / unit_s)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(title or timeline.schedule, loc="left", fontsize=8.5)


def plot_timelines(
    timelines: dict[str, Timeline], path: str | Path, *, unit_s: float = 1.0, unit_name: str = "s"
) -> None:
    """Write one picture with the timelines below each other on a common time axis, by title.

    Raises MissingExtraError without matplotlib.
    """
    pyplot = _pyplot()
    heights = [0.24 * t.num_ranks + 0.45 for t in timelines.values()]
    figure, rows = pyplot.subplots(
        len(timelines),
        1,
        figsize=(10, sum(heights) + 0.3),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axes, (title, timeline) in zip(rows[:, 0], timelines.items(), strict=True):
        draw_timeline(axes, timeline, title, unit_s)
    rows[-1, 0].set_xlim(0, max(t.makespan_s for t in timelines.values()) / unit_s)
    rows[-1, 0].set_xlabel(f"time [{unit_name}]", fontsize=8)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("pictures need matplotlib; install meshwise[plot]") from None
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot
