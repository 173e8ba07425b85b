"""A finished sweep as a table and a figure.

The figure has one panel per numeric result (four at most, those that vary first). Its x axis is the grid's
first key with several numbers, and every combination of the other keys is a line; without such a key,
points are bars in order, named by what differs between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.core.errors import MissingExtraError
from meshwise.core.units import duration, with_prefix
from meshwise.report.figure import check_format, new_figure, open_frame, save_figure
from meshwise.report.table import Table
from meshwise.sweep.sweep import FinishedPoint, Sweep, csv_rows

_MAX_PANELS = 4
_MAX_LINES = 20
_MAX_TICKS = 8


def print_sweep(sweep: Sweep, rows: Sequence[FinishedPoint], console: Console) -> None:
    """Print the table of all finished points, and under it why others failed, each sentence once."""
    head, *lines = csv_rows(sweep, rows)
    shown = [name for name in head if name not in ("status", "seconds", "error")]
    texts = [[_text(name, cell) for name, cell in zip(shown, line, strict=False)] for line in lines]
    columns = [name.replace("_", " ") for name in shown]
    console.print(Table("", columns, texts, left=columns))
    for sentence, number in Counter(row.error for row in rows if row.error).items():
        console.print(f"{number} failed: {sentence}", markup=False)


def draw_sweep(sweep: Sweep, rows: Sequence[FinishedPoint], path: Path) -> Path | None:
    """Draw the results to `path`; None if there is nothing to draw or matplotlib is not installed."""
    done = [row for row in rows if row.status == "done"]
    values = {
        name: {row.results[name] for row in done if _is_number(row.results[name])} for name in sweep.results
    }
    panels = sorted((name for name in values if values[name]), key=lambda name: len(values[name]) == 1)[
        :_MAX_PANELS
    ]
    if not panels:
        return None
    check_format(path)
    try:
        figure = new_figure(5.5 * len(panels), 4)
    except MissingExtraError:
        return None
    from matplotlib.ticker import FuncFormatter

    axis = _axis(sweep)
    for panel, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, x, y in _lines(done, axis, name):
            if axis:
                panel.plot(x, y, marker="o", markersize=4, label=label)
            else:
                panel.bar(x, y, width=0.6)
        panel.set(xlabel=axis or "", title=name)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _, name=name: _text(name, float(value))))
        if axis and _is_wide(done, axis):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ticks = _ticks(done, axis)
        if len(ticks) <= _MAX_TICKS:
            panel.set_xticks(list(ticks), list(ticks.values()), fontsize="small")
            panel.minorticks_off()
        open_frame(panel)
        if axis and len(panel.lines) > 1:
            panel.legend(fontsize="x-small")
    save_figure(figure, path)
    return path


def _text(name: str, cell: Any) -> str:
    """A cell for people, in the unit that its name ends with; the CSV file has the plain number."""
    if name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s")):
        return duration(cell) if isinstance(cell, float) else str(cell)
    if not isinstance(cell, float):
        return "" if cell is None else str(cell)
    units = (("_bytes_per_s", "B/s"), ("_bytes", "B"), ("_flop", "FLOP"))
    unit = next((unit for end, unit in units if name.endswith(end)), "")
    return with_prefix(cell, unit) if abs(cell) >= 1 else f"{cell:.4g}"


def _is_wide(rows: Sequence[FinishedPoint], axis: str) -> bool:
    """Whether the values of a key span so much that powers of two read better."""
    values: list[Any] = [row.values[axis] for row in rows if axis in row.values]
    return min(values) > 0 and max(values) >= 8 * min(values)


def _ticks(rows: Sequence[FinishedPoint], axis: str | None) -> dict[Any, str]:
    """Where points lie on the x axis, and their names: numbers, or what differs between the rows."""
    if axis:
        return {value: f"{value:g}" for value in sorted({row.values[axis] for row in rows})}
    keys = dict.fromkeys(key for row in rows for key in row.values)
    differ = [key for key in keys if len({row.values.get(key) for row in rows}) > 1]
    return {
        number: "\n".join(str(row.values.get(key, "")) for key in differ) for number, row in enumerate(rows)
    }


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


def _lines(
    rows: Sequence[FinishedPoint], axis: str | None, name: str
) -> list[tuple[str, list[Any], list[Any]]]:
    """(label, x, y) of every line: the rows that agree in all keys but the axis."""
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for number, row in enumerate(rows):
        if _is_number(row.results[name]):
            others = [f"{key}={value}" for key, value in row.values.items() if key != axis]
            label = ", ".join(others) if axis else ""
            lines.setdefault(label, []).append((row.values[axis] if axis else number, row.results[name]))
    chosen = [(label, sorted(line)) for label, line in list(lines.items())[:_MAX_LINES]]
    return [(label, [x for x, _ in line], [y for _, y in line]) for label, line in chosen]
