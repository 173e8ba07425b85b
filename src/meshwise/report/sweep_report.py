"""A finished sweep as a table and a figure.

The figure has one panel per numeric result (four at most). Its x axis is the grid's first key with several
numbers, and every combination of the other keys is a line; without such a key, points are bars in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.core.errors import MissingExtraError
from meshwise.report.figure import check_format, new_figure, save_figure
from meshwise.report.table import table
from meshwise.sweep.sweep import Row, Sweep, csv_rows

_MAX_PANELS = 4
_MAX_LINES = 20


def print_sweep(sweep: Sweep, rows: Sequence[Row], console: Console) -> None:
    """Print the table of all finished points; an error stands in its row, shortened."""
    head, *lines = csv_rows(sweep, rows)
    texts = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line] for line in lines]
    shown = table("", head, texts, left=head)
    for i, column in enumerate(shown.columns[:-1]):  # the last one, an error, gives way
        column.no_wrap, column.min_width = True, max(len(str(line[i])) for line in [head, *texts])
    shown.columns[-1].no_wrap = True
    console.print(shown)


def draw_sweep(sweep: Sweep, rows: Sequence[Row], path: Path) -> Path | None:
    """Draw the results to `path`; None if there is nothing to draw or matplotlib is not installed."""
    done = [row for row in rows if row.status == "done"]
    panels = [name for name in sweep.results if any(_is_number(row.results[name]) for row in done)][
        :_MAX_PANELS
    ]
    if not panels:
        return None
    check_format(path)
    try:
        figure = new_figure(5.5 * len(panels), 4)
    except MissingExtraError:
        return None
    axis = _axis(sweep)
    for panel, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, x, y in _lines(done, axis, name):
            panel.plot(x, y, marker="o", markersize=4, label=label)
        panel.set_xlabel(axis or "point")
        panel.set_title(name)
        if axis and len(panel.lines) > 1:
            panel.legend(fontsize="x-small")
    save_figure(figure, path)
    return path


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axis(sweep: Sweep) -> str | None:
    """The first key of the grid that takes several values, all numbers."""
    keys = dict.fromkeys(key for point in sweep.points for key in point.values)
    for key in keys:
        values = {point.values.get(key) for point in sweep.points}
        if len(values) > 1 and all(_is_number(value) for value in values):
            return key
    return None


def _lines(rows: Sequence[Row], axis: str | None, name: str) -> list[tuple[str, list[Any], list[Any]]]:
    """(label, x, y) of every line: the rows that agree in all keys but the axis."""
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for number, row in enumerate(rows):
        if _is_number(row.results[name]):
            others = [f"{key}={value}" for key, value in row.values.items() if key != axis]
            label = ", ".join(others) if axis else ""
            lines.setdefault(label, []).append((row.values[axis] if axis else number, row.results[name]))
    chosen = [(label, sorted(line)) for label, line in list(lines.items())[:_MAX_LINES]]
    return [(label, [x for x, _ in line], [y for _, y in line]) for label, line in chosen]
