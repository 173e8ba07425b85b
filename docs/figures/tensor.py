"""Draws the figures of docs/tensor_parallel.md and prints its table: `python docs/figures/tensor.py`."""

from __future__ import annotations

from pathlib import Path

from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.report.layout_plot import Point, plot_blocks, plot_scaling

RANKS = [2**power for power in range(2, 13)]
SHOWN = (8, 64, 512, 4096)


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
