"""A finished sweep as a table and a figure.

The figure has one panel per numeric result (four at most, those that vary first). Its x axis is the grid's
first key with several numbers, and every combination of the other keys is a line; without such a key,
points are bars in order, named by what differs between them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwise.core.errors import MissingExtraError
from meshwise.report.answer import COLORS, LINES, Bars, Chart, ChartAxis, Picture, Section, Series
from meshwise.report.chart_picture import draw_picture
from meshwise.report.table import Table, cell_text, unit_of
from meshwise.sweep.sweep import FinishedPoint, Sweep, csv_rows

_MAX_PANELS = 4
_MAX_LINES = 20
_MAX_TICKS = 8


def parts(sweep: Sweep, rows: Sequence[FinishedPoint]) -> Iterator[Section]:
    """The table of all finished points, and under it why others failed, each sentence once."""
    head, *lines = csv_rows(sweep, rows)
    shown = [name for name in head if name not in ("status", "seconds", "error")]
    texts = [[_text(name, cell) for name, cell in zip(shown, line, strict=False)] for line in lines]
    columns = [name.replace("_", " ") for name in shown]
    yield Table("", columns, texts, left=columns)
    for sentence, number in Counter(row.error for row in rows if row.error).items():
        yield f"{number} failed: {sentence}"
    done = [row.results for row in rows if not row.error]
    missing = (path for name, path in sweep.results.items() if all(each[name] is None for each in done))
    yield from (f"no document of a point has {path}, which [results] names" for path in missing if done)


def draw_sweep(sweep: Sweep, rows: Sequence[FinishedPoint], path: Path) -> Path | None:
    """Draw the results to `path`; None if there is nothing to draw or matplotlib is not installed."""
    done = [row for row in rows if row.status == "done"]
    results = {name: [row.results[name] for row in done] for name in sweep.results}
    values = {name: set(filter(_is_number, found)) for name, found in results.items()}
    panels = sorted(filter(values.get, values), key=lambda name: len(values[name]) == 1)[:_MAX_PANELS]
    if not panels:
        return None
    axis = _axis(sweep)
    last = {len(panels) - 1, *range(1, len(panels), 2)}  # of a row, which has the legend of both
    charts = [_chart(done, axis, name, has_legend=i in last) for i, name in enumerate(panels)]
    try:
        draw_picture(Picture([charts[i : i + 2] for i in range(0, len(charts), 2)]), path)
    except MissingExtraError:
        return None
    return path


def _chart(rows: Sequence[FinishedPoint], axis: str | None, name: str, *, has_legend: bool) -> Chart:
    """One result of all points: lines along a key with numbers, or a bar for each point."""
    title = name.replace("_", " ")
    result = ChartAxis(title, unit_of(name) or "")
    rows = [row for row in rows if _is_number(row.results[name])]
    if axis is None:
        keys = dict.fromkeys(key for row in rows for key in row.values)
        differ = [key for key in keys if len({row.values.get(key) for row in rows}) > 1]
        names = [", ".join(str(row.values.get(key, "")) for key in differ) for row in rows]
        bars = Bars(names, [row.results[name] for row in rows], [COLORS[0]] * len(rows))
        return Chart(title, [bars], result, height=100 + 30 * len(rows))
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        label = ", ".join(_named(key, value) for key, value in row.values.items() if key != axis)
        lines.setdefault(label, []).append((row.values[axis], row.results[name]))
    marks = []
    for i, (label, line) in enumerate(list(lines.items())[:_MAX_LINES]):
        x, y = zip(*sorted(line), strict=True)
        look = COLORS[i % len(COLORS)], LINES[i // len(COLORS) % len(LINES)]  # no two lines look alike
        marks.append(Series(x, y, label if has_legend and len(lines) > 1 else "", *look, size=6))
    values: list[Any] = sorted({row.values[axis] for row in rows})
    is_wide = values[0] > 0 and values[-1] >= 8 * values[0]
    ticks = values if len(values) <= _MAX_TICKS else ()
    return Chart(title, marks, ChartAxis(axis, log=is_wide, numbers="count", ticks=ticks), result)


def _named(key: str, value: Any) -> str:
    """A value of the grid in a legend: `tp=2`, and of a switch `profile` or `no profile`."""
    return f"{'' if value else 'no '}{key}" if isinstance(value, bool) else f"{key}={value}"


def _text(name: str, cell: Any) -> object:
    """A cell for people; the CSV file has the plain number, and a plan is never cut."""
    return str(cell) if isinstance(cell, str | dict | list) else cell_text(name, cell)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axis(sweep: Sweep) -> str | None:
    """The first key of the grid that takes several values, all numbers."""
    keys = dict.fromkeys(key for point in sweep.points for key in point.values)
    values = ((key, {point.values.get(key) for point in sweep.points}) for key in keys)
    return next((key for key, found in values if len(found) > 1 and all(map(_is_number, found))), None)
