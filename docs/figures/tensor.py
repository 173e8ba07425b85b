"""Draws the figures of docs/tensor_parallel.md and prints its table: `python docs/figures/tensor.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.units import Num
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.priced_part import price_parts
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.layouts import block_rules
from meshwise.plan.plan import refuse
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.report.chart_picture import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = [2**power for power in range(2, 13)]
SHOWN = (8, 64, 512, 4096)


Span = tuple[Fraction, Fraction]
Block = tuple[Span, Span]
MATRICES = ("x", "W first", "inside", "W second")
LAYOUTS = ("1d", "2d", "2d-cp", "2.5d", "3d")
STATE_BYTES = 18.0  # per parameter: bf16 weight, fp32 gradient, Adam with an fp32 master

_EXCHANGES = {
    "1d": "gather x before the first,\nreduce-scatter after the second",
    "2d": "SUMMA: panels of x along a row,\npanels of W along a column",
    "2d-cp": "1d in each row; keys and values\ngathered in each column",
    "2.5d": "SUMMA in each depth; gradients of W\nall-reduced over the depths",
    "3d": "gather x and W, multiply,\nreduce-scatter the product",
}
_COLORS = {"1d": "#333333", "2d": "#1f77b4", "2d-cp": "#2ca02c", "2.5d": "#ff7f0e", "3d": "#d62728"}


# --- who holds which block ---------------------------------------------------------------------


def held_blocks(layout: str, grid: Sequence[int], rank: int) -> dict[str, Block]:
    """What `rank` of a grid (1d: of one number) holds of each of `MATRICES`."""
    columns, rows, depths = (*grid, 1, 1)[:3]
    c, r, d = rank % columns, rank // columns % rows, rank // (columns * rows)
    whole, column = _span((0, 1)), _span((c, columns))
    if layout in ("1d", "2d-cp"):
        row = _span((r, rows))
        x = (_span((r, rows), (c, columns)), whole)
        return dict(zip(MATRICES, (x, (whole, column), (row, column), (column, whole)), strict=True))
    if layout == "3d":
        row = _span((r, rows))
        x, inside = (_span((d, depths), (r, rows)), column), (_span((d, depths), (c, columns)), row)
        first, second = (_span((c, columns), (d, depths)), row), (_span((r, rows), (d, depths)), column)
        return dict(zip(MATRICES, (x, first, inside, second), strict=True))
    tokens, weight = (_span((d, depths), (r, rows)), column), (_span((r, rows)), column)
    return dict(zip(MATRICES, (tokens, weight, tokens, weight), strict=True))


def _span(*cuts: tuple[int, int]) -> Span:
    """Part `index` of `count`, of which again a part, and so on."""
    begin, size = Fraction(0), Fraction(1)
    for index, count in cuts:
        size /= count
        begin += index * size
    return begin, begin + size


def plot_blocks(layouts: dict[str, tuple[int, ...]], path: Path) -> None:
    """Draw the blocks of each layout on its grid, with the ranks that hold them."""
    figure = new_figure(12, 2.05 * len(layouts))
    rows = figure.subplots(len(layouts), len(MATRICES), squeeze=False)
    for (layout, grid), line in zip(layouts.items(), rows, strict=True):
        for name, axes in zip(MATRICES, line, strict=True):
            _draw_blocks(axes, layout, grid, name)
        line[0].set_ylabel(f"{layout} on {'x'.join(map(str, grid))}", fontsize=10, labelpad=8)
        line[-1].text(1.08, 0.5, _EXCHANGES[layout], fontsize=8.5, va="center", transform=line[-1].transAxes)
    for name, axes in zip(MATRICES, rows[0], strict=True):
        what = "tokens x width" if name in ("x", "inside") else "in x out"
        axes.set_title(f"{name}\n{what}", fontsize=9.5)
    save_figure(figure, path)


def _draw_blocks(axes: Axes, layout: str, grid: tuple[int, ...], name: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    holders: dict[Block, list[int]] = defaultdict(list)
    for rank in range(math.prod(grid)):
        holders[held_blocks(layout, grid, rank)[name]].append(rank)
    colors = colormaps["tab20"].colors
    for (rows, columns), ranks in holders.items():
        (top, bottom), (left, right) = (tuple(map(float, span)) for span in (rows, columns))
        color = (*colors[(2 * ranks[0] + ranks[0] // 10) % 20], 0.75)
        size = (right - left, bottom - top)
        axes.add_patch(Rectangle((left, top), *size, facecolor=color, edgecolor="white", lw=1.5))
        axes.text(
            (left + right) / 2,
            (top + bottom) / 2,
            " ".join(map(str, ranks)),
            ha="center",
            va="center",
            fontsize=8,
        )
    axes.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


# --- how it scales -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """A layout of one block on `ranks` ranks: bytes sent per rank and layer, memory, and time of a layer.

    `fits`: the grid divides the model and the sequence; else they would have to be padded to it.
    """

    layout: str
    grid: tuple[int, ...]
    ranks: int
    sent_bytes: float
    memory_bytes: float
    time_s: float
    fits: bool


def scaling(
    model: Model, cluster: Cluster, layout: str, ranks: Sequence[int], *, seq: int
) -> Iterator[Point]:
    """The layout on the squarest grid that fits, for each number of ranks that has one; one sequence.

    Sent bytes are of one layer, forward and backward. Memory holds the whole model on the ranks: states of
    18 bytes a parameter, activations of all layers (fused attention, nothing recomputed), and two of the
    largest exchanges. The time of a layer, forward and backward, is that on `cluster`.
    """
    runs_on = machine(cluster, "bf16")
    for count in ranks:
        grids = [grid for grid in _grids(layout, count) if _heads_cut(layout, grid, count) <= model.num_heads]
        grids.sort(key=lambda grid: float(np.ptp(np.log(grid or (1,)))))
        if not grids:
            continue
        fitting = [grid for grid in grids if _fits(model, layout, grid, count, seq)]
        grid = (fitting or grids)[0]
        cut = Cut(
            microbatch=1.0, seq=float(seq), tp=float(count), layout=layout, grid=tuple(map(float, grid)),
            sequence_parallel=True,
        )  # fmt: skip
        ops = block(model, cut)
        cost = price_parts({"layer": ops}, runs_on)["layer"]
        kept = (STATE_BYTES * cost.held[0].params + cost.saved_bytes) * model.num_layers
        yield Point(
            layout=layout,
            grid=grid,
            ranks=count,
            sent_bytes=float(sum(map(_sent_bytes, ops))),
            memory_bytes=float(kept + 2.0 * cost.exchange_bytes),
            time_s=float(cost.forward_s + cost.backward_s + cost.weight_s),
            fits=bool(fitting),
        )


def _sent_bytes(op: Op) -> Num:
    if op.kind != "collective":
        return 0.0
    return op.count * sent_bytes(op.collective, op.payload_bytes, op.group_size)  # type: ignore[arg-type]


def _heads_cut(layout: str, grid: tuple[int, ...], ranks: int) -> int:
    """Over how many ranks the heads are dealt."""
    return {"1d": ranks, "3d": math.prod(grid[:2])}.get(layout, grid[0] if grid else 1)


def _fits(model: Model, layout: str, grid: tuple[int, ...], ranks: int, seq: int) -> bool:
    try:
        refuse(block_rules(model, layout, grid, ranks, seq))
    except PlanError:
        return False
    return True


def _grids(layout: str, ranks: int) -> list[tuple[int, ...]]:
    sides = [side for side in range(2, ranks) if ranks % side == 0]
    if layout == "1d":
        return [()]
    if layout in ("2d", "2d-cp"):
        return [(side, ranks // side) for side in sides]
    if layout == "3d":
        return [(side,) * 3 for side in sides if side**3 == ranks]
    return [(side, side, ranks // side**2) for side in sides if ranks % side**2 == 0 and side**2 < ranks]


def plot_scaling(
    jobs: dict[str, tuple[Model, int]], cluster: Cluster, ranks: Sequence[int], path: Path
) -> dict[str, list[Point]]:
    """Draw volume, memory and GPU time of each job (model and sequence, by title); returns the points."""
    figure = new_figure(4.6 * len(jobs), 9.2)
    rows = figure.subplots(3, len(jobs), squeeze=False, sharex=True)
    found: dict[str, list[Point]] = {}
    for i, (title, (model, seq)) in enumerate(jobs.items()):
        found[title] = [p for layout in LAYOUTS for p in scaling(model, cluster, layout, ranks, seq=seq)]
        rows[0, i].set_title(title, fontsize=10)
        for layout in LAYOUTS:
            points = [point for point in found[title] if point.layout == layout]
            x = [point.ranks for point in points]
            style = {
                "color": _COLORS[layout],
                "marker": "o",
                "markersize": 3.5,
                "linewidth": 1.4,
                "label": layout,
            }
            fits = np.array([point.fits for point in points])
            numbers = (
                [point.sent_bytes / 1e9 for point in points],
                [point.memory_bytes / 1e9 for point in points],
                [point.time_s * point.ranks for point in points],
            )
            for axes, y in zip(rows[:, i], numbers, strict=True):
                axes.plot(x, y, **style)
                axes.plot(
                    np.array(x)[~fits], np.array(y)[~fits], "o", color="white", markersize=2.2, zorder=3
                )
        rows[1, i].axhline(cluster.chip.memory_bytes / 1e9, color="#888888", linestyle="--", linewidth=1)
        rows[1, i].text(
            ranks[0], cluster.chip.memory_bytes / 1e9 * 1.1, cluster.chip.name, fontsize=7, color="#666666"
        )
        rows[2, i].set_xlabel("GPUs of one tensor-parallel group", fontsize=9)
    for line, label in zip(
        rows, ("GB sent per GPU and layer", "GB of memory per GPU", "GPU seconds of a layer"), strict=True
    ):
        line[0].set_ylabel(label, fontsize=9)
        for axes in line:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(list(ranks)[::2], [str(count) for count in list(ranks)[::2]], fontsize=8)
            axes.minorticks_off()
            axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    rows[0, 0].legend(fontsize=8)
    save_figure(figure, path)
    return found


def cell(points: list[Point], number: str, scale: float) -> str:
    """The layouts that exist, the best first, with their grids and numbers."""
    best = sorted(points, key=lambda point: float(getattr(point, number)))
    return "<br>".join(
        f"{'**' * (point is best[0])}{name(point)} {short(getattr(point, number) / scale)}"
        f"{'**' * (point is best[0])}"
        for point in best
    )


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def name(point: Point) -> str:
    """`2d:8x8`; `(padded)` where the grid does not divide the model."""
    grid = "x".join(map(str, point.grid))
    padded = "" if point.fits else " (padded)"
    return f"{point.layout}{':' * bool(grid)}{grid}{padded}"


def table(points: list[Point]) -> str:
    """Sent bytes, memory and GPU time of every layout at some numbers of GPUs."""
    lines = [
        "| GPUs | GB sent per GPU and layer | GB of memory per GPU | ms of a layer |",
        "| --- | --- | --- | --- |",
    ]
    for count in SHOWN:
        here = [point for point in points if point.ranks == count]
        columns = (("sent_bytes", 1e9), ("memory_bytes", 1e9), ("time_s", 1e-3))
        lines.append(f"| {count} | " + " | ".join(cell(here, *column) for column in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    plot_blocks(
        {"1d": (4,), "2d": (2, 2), "2d-cp": (2, 2), "2.5d": (2, 2, 2), "3d": (2, 2, 2)},
        here / "tensor_blocks.png",
    )
    jobs = {
        "GPT-1T, 2048 tokens": (find_model("gpt-1t"), 2048),
        "ViT of ERA5, 64800 tokens": (find_model("vit-era5-64800"), 64800),
    }
    found = plot_scaling(jobs, find_cluster("dgx-h200:4096"), RANKS, here / "tensor_scaling.png")
    for title, points in found.items():
        print(f"{title}\n\n{table(points)}\n")


if __name__ == "__main__":
    main()
