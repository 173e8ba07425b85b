"""Predicted against measured, on logarithmic axes, one color per chip; the diagonal is a perfect model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.calibrate.errors import grouped
from meshwise.calibrate.validate import Prediction, Validation
from meshwise.core.errors import DataError
from meshwise.report.figure import check_format, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "step_s": "step time [s]",
    "memory_bytes": "memory per GPU [bytes]",
    "gemm_s": "matmul [s]",
    "attention_s": "attention [s]",
    "decode_s": "decode attention [s]",
    "collective_s": "collective [s]",
    "experts_s": "experts [s]",
    "dispatch_s": "dispatch and combine [s]",
}


def draw_accuracy(validation: Validation, path: Path) -> None:
    """Draw one panel per quantity that has predictions."""
    check_format(path)
    panels = {
        quantity: rows
        for quantity in validation.quantities
        if quantity in LABELS and (rows := [row for row in validation.of(quantity) if row.expressed])
    }
    if not panels:
        raise DataError("no row was expressed, so there is nothing to draw")
    figure = new_figure(5.2 * len(panels), 5.0)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (quantity, rows) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, quantity, rows)
    save_figure(figure, path)


def _draw_panel(axes: Axes, quantity: str, rows: list[Prediction]) -> None:
    values = [value for row in rows for value in (row.measured or 0.0, row.predicted or 0.0)]
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color="#dddddd", lw=0)
    axes.plot([low, high], [low, high], color="#555555", lw=0.8)
    for chip, members in grouped(rows, lambda row: row.chip).items():
        axes.plot(
            [row.measured or 0.0 for row in members],
            [row.predicted or 0.0 for row in members],
            "o",
            ms=2.5 if len(rows) < 2000 else 1.0,
            alpha=0.7,
            label=f"{chip} ({len(members)})",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel=f"measured {LABELS[quantity]}", ylabel=f"predicted {LABELS[quantity]}")
    axes.set_aspect("equal")
    axes.legend(fontsize=7, loc="upper left", frameon=False)
