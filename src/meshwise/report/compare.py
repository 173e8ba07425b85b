"""A comparison of instruments: where they differ, and the seconds of a cluster beside those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from meshwise.core.compare import TIME, Comparison, Row
from meshwise.core.units import duration
from meshwise.report.answer import Section
from meshwise.report.table import Table

_MOST_ROWS, _MOST_DIFFERENCES = 20, 50


def parts(result: Comparison) -> Iterator[Section]:
    """Whether all numbers agree, or those that do not; the seconds of a cluster where it has them."""
    differing = result.differences()
    if times := [row for row in result.rows if row.column == TIME]:
        yield times_table(times)
    num_counts = len(result.rows) - len(times)
    instruments = list(result.rows[0].values) if result.rows else []
    if not differing:
        yield f"all {num_counts} numbers agree: {', '.join(instruments)}"
        return
    place = ("module", "op", "phase", "shape", "column")
    yield _table("Where they differ", differing[:_MOST_DIFFERENCES], place, lambda value: f"{value:,.10g}")
    yield f"{len(differing)} of {num_counts} numbers differ"


def times_table(times: Sequence[Row]) -> Table:
    """The longest ops; instruments as columns."""
    longest = sorted(times, key=lambda row: -max(value or 0.0 for value in row.values.values()))[:_MOST_ROWS]
    title = f"The {len(longest)} longest ops of {len(times)}"
    return _table(title, longest, ("module", "op", "phase", "shape"), duration)


def _table(title: str, rows: Sequence[Row], place: Sequence[str], show: Callable[[float], str]) -> Table:
    """Where in the program each row is, and what each instrument says."""
    instruments = list(rows[0].values)
    cells = [
        [getattr(row, name) for name in place]
        + ["-" if (value := row.values.get(one)) is None else show(value) for one in instruments]
        for row in rows
    ]
    return Table(title, (*place, *instruments), cells, left=place)
