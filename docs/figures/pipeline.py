"""Draws the figures of docs/pipeline.md and prints its tables: `python docs/figures/pipeline.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwise.cost import schedule as closed_form
from meshwise.cost.simulate import KINDS, Timeline, simulate
from meshwise.report.chart_picture import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
PUBLISHED = {
    "gpipe": (1.0, 1.0, 1.0, 1.0),
    "1f1b": (1.0, 1.0, 1.0, 1.0),
    "interleaved": (1.0, 1.0, 1.0, 1.0),
    "zb-h1": (1.0, 1.0, 1.0, -1.0),
    "zb-v": (1.0, 0.0, 0.0, 0.0),
    "dualpipe": (0.5, 1.0, 2.0, -1.0),
    "dualpipe-v": (1.0, 0.5, 1.0, -0.5),
}
"""The published bubble is (a pp - 1) (f F + b B + w W), per chunk when interleaved: a, f, b and w.

F&B, the pair that DualPipe overlaps, is taken as F + B + W: hidden communication is no work. ZB-V's zero
counts every rank from its own first action to its own last.
"""


def published_bubble_s(name: str, pp: int, v: int, time_s: float) -> float:
    """The bubble [s] as the papers print it, with F = B = W = `time_s` and free communication."""
    stages, *times = PUBLISHED[name]
    return (stages * pp - 1) * sum(times) * time_s / (v if name == "interleaved" else 1)


_COLORS = {
    "F": ("#9ecae8", "#4a8fc2"),
    "B": ("#a8d8a0", "#4fa14a"),
    "I": ("#a8d8a0", "#4fa14a"),
    "W": ("#fdd0a2", "#f0913a"),
}
_MAX_NUMBERED = 700


def draw_timeline(axes: Axes, timeline: Timeline, title: str) -> None:
    """Draw a timeline into matplotlib axes.

    Blue is forward, green the backward (its input half where it is split), orange the weight half, white is
    bubble; second and later chunks of a rank are darker. In a DualPipe pair the forward is the upper half.
    """
    start, end = timeline.start_s, timeline.end_s
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
    axes.set_xlim(0, timeline.makespan_s)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=8.5)


def plot_timelines(timelines: dict[str, Timeline], path: Path, *, unit_name: str = "s") -> None:
    """Write one picture with the timelines below each other on a common time axis, by title."""
    heights = [0.24 * timeline.num_ranks + 0.45 for timeline in timelines.values()]
    figure = new_figure(10, sum(heights) + 0.3)
    rows = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, (title, played) in zip(rows[:, 0], timelines.items(), strict=True):
        draw_timeline(axes, played, title)
    rows[-1, 0].set_xlim(0, max(played.makespan_s for played in timelines.values()))
    rows[-1, 0].set_xlabel(f"time [{unit_name}]", fontsize=8)
    save_figure(figure, path)


def timeline(schedule: str, pp: int, m: int, **options: object) -> Timeline:
    """A schedule with F = B = W = 1 per stage, in chunks where the schedule has them."""
    v = CHUNKS.get(schedule, 1)
    return simulate(schedule, 1 / v, 1 / v, 1 / v, pp=pp, m=m, v=v, **options)  # type: ignore[arg-type]


def table(pp: int, m: int) -> str:
    """Bubble and memory of every schedule, played, with F = B = W and free communication."""
    lines = [
        "| schedule | published bubble | bubble, all ranks wait | share of the phase "
        "| peak in flight by rank | weights per rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for index, name in enumerate(closed_form.SCHEDULES):
        played = timeline(name, pp, m)
        published = published_bubble_s(name, pp, CHUNKS.get(name, 1), 1.0)
        bubble = played.idle_s.max()
        peaks = ", ".join(f"{peak:g}" for peak in played.peak_in_flight)
        lines.append(
            f"| `{name}` | {published:g} | {bubble:g} | {bubble / played.makespan_s:.1%} | {peaks} "
            f"| {closed_form.weight_copies(index):g}× |"
        )
    return "\n".join(lines)


def hops_table(pp: int, microbatches: tuple[int, ...]) -> str:
    """How many hops between ranks the phase waits for, played, with short hops."""
    hop_s = 2.0**-10
    lines = [
        "| schedule | " + " | ".join(f"m = {m}" for m in microbatches) + " |",
        "| --- |" + " --- |" * len(microbatches),
    ]
    for name in closed_form.SCHEDULES:
        waits = [
            (timeline(name, pp, m, p2p_s=hop_s).makespan_s - timeline(name, pp, m).makespan_s) / hop_s
            for m in microbatches
        ]
        lines.append(f"| `{name}` | " + " | ".join(f"{wait:g}" for wait in waits) + " |")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    titles = {}
    for name in closed_form.SCHEDULES:
        played = timeline(name, 4, 8)
        peak = played.peak_in_flight.max()
        titles[f"{name}: bubble {played.idle_s.max():g}, at most {peak:g} microbatches in flight"] = played
    plot_timelines(titles, here / "pipeline_schedules.png", unit_name="F = B = W of one stage")

    head = np.array([1.0, 1.0, 1.0, 1.5])
    plot_timelines(
        {
            "1f1b, equal stages": timeline("1f1b", 4, 8),
            "1f1b, last stage 1.5 times the work (LM head)": simulate("1f1b", head, head, head, pp=4, m=8),
            "1f1b, rank 1 a straggler, 1.3 times slower": timeline("1f1b", 4, 8, slowdown=[1, 1.3, 1, 1]),
            "1f1b, a hop takes 0.3": timeline("1f1b", 4, 8, p2p_s=0.3),
            "interleaved, a hop takes 0.3": timeline("interleaved", 4, 8, p2p_s=0.3),
        },
        here / "pipeline_uneven.png",
        unit_name="F = B = W of one stage",
    )
    print(table(8, 32), hops_table(8, (16, 64, 256)), sep="\n\n")


if __name__ == "__main__":
    main()
