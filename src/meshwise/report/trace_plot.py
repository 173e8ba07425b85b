"""One picture of all ranks: what each of them did when, and in sum.

A rank is a row on the common clock; the colour of a point is the mixture of what the rank did then. To the
right the same in sum. Above stand the findings, and the ranks that they name are marked.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwise.report.figure import check_format, new_figure, save_figure
from meshwise.trace.align import Alignment
from meshwise.trace.findings import Finding
from meshwise.trace.intervals import covered
from meshwise.trace.partition import PARTS, Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_COLORS = {
    "compute": "#3d7ab5",
    "transfer": "#f0a13a",
    "memory": "#8e6bbf",
    "wait": "#d7503f",
    "idle": "#e9e9e9",
}
_NUM_BINS = 1600
_NUM_FINDINGS = 3
_MOST_LABELS = 33


def draw_ranks(
    partitions: Sequence[Partition], alignment: Alignment, findings: Sequence[Finding], path: Path
) -> None:
    """Draw all ranks to `path` (png, svg, pdf); DataError or MissingExtraError where that cannot be."""
    check_format(path)
    height = min(16.0, 2.6 + 0.16 * len(partitions))
    figure = new_figure(13.0, height)
    lanes, sums = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    _draw_lanes(lanes, partitions, alignment)
    _draw_sums(sums, partitions)
    named = {rank for one in findings if len(one.ranks) < len(partitions) for rank in one.ranks}
    _label_ranks(lanes, [one.rank for one in partitions], named)
    lines = [one.text for one in findings[:_NUM_FINDINGS]] or ["no rank, link or cause stands out"]
    text = "\n".join(textwrap.fill(line[0].upper() + line[1:], 150) for line in lines)
    figure.suptitle(text, x=0.01, ha="left", fontsize=9)
    save_figure(figure, path)


def _draw_lanes(axes: Axes, partitions: Sequence[Partition], alignment: Alignment) -> None:
    offsets = [alignment.offsets_ns[one.rank] for one in partitions]
    begin, end = common_span(partitions, offsets)
    edges = begin + np.linspace(0, end - begin, _NUM_BINS + 1).astype(np.int64)
    rows = [_row(one, edges + offset) for one, offset in zip(partitions, offsets, strict=True)]
    extent = (0.0, (end - begin) / 1e9, len(partitions) - 0.5, -0.5)
    axes.imshow(np.array(rows), aspect="auto", interpolation="nearest", extent=extent)
    axes.set_xlabel("time on the common clock [s]")
    for part in PARTS:
        axes.barh(0, 0, color=PART_COLORS[part], label=part)
    axes.legend(fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    axes.set(xlim=extent[:2], ylim=extent[2:])


def common_span(partitions: Sequence[Partition], offsets: Sequence[int]) -> tuple[int, int]:
    """First and last moment [ns] of all ranks on the common clock; `offsets` [ns] lead from it to theirs."""
    bounds = [
        (start - offset, end - offset)
        for one, offset in zip(partitions, offsets, strict=True)
        for starts, ends in one.spans.values()
        for start, end in zip(starts[:1], ends[-1:], strict=True)
    ]
    return min((b[0] for b in bounds), default=0), max((b[1] for b in bounds), default=1)


def shares(one: Partition, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """What share of each bin between `edges` [ns, the rank's clock] each of `PARTS` fills: [part, bin]."""
    found = np.zeros((len(PARTS), len(edges) - 1))
    for i, part in enumerate(PARTS):
        found[i] = np.diff(covered(one.spans[part], edges)) / np.maximum(np.diff(edges), 1)
    return found


def _row(one: Partition, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Colour of each bin between `edges` [ns]: the parts' colours weighted by their shares, else white."""
    from matplotlib.colors import to_rgb

    colors = np.array([to_rgb(PART_COLORS[part]) for part in PARTS])
    return np.clip(1.0 + shares(one, edges).T @ (colors - 1.0), 0.0, 1.0)


def _draw_sums(axes: Axes, partitions: Sequence[Partition]) -> None:
    left = np.zeros(len(partitions))
    for part in PARTS:
        width = np.array([one.seconds[part] for one in partitions])
        axes.barh(np.arange(len(partitions)), width, 0.9, left, color=PART_COLORS[part])
        left += width
    axes.set_xlabel("in sum [s]")


def _label_ranks(axes: Axes, ranks: Sequence[int], named: set[int]) -> None:
    """Label the rows: all of them if there is room, else some, and always those that a finding names."""
    step = 1 + len(ranks) // _MOST_LABELS
    places = [i for i, rank in enumerate(ranks) if i % step == 0 or rank in named]
    axes.set_yticks(places, [f"rank {ranks[i]}" for i in places], fontsize=7)
    for label, i in zip(axes.get_yticklabels(), places, strict=True):
        if ranks[i] in named:
            label.set(color=PART_COLORS["wait"], fontweight="bold")
