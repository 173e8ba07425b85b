"""A comparison of instruments: where they differ, and the seconds of a cluster beside those of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    rows = [
        [getattr(row, name) for name in place]
        + ["-" if value is None else f"{value:,.10g}" for value in map(row.values.get, instruments)]
        for row in differing[:_MOST_DIFFERENCES]
    ]
    yield Table("Where they differ", (*place, *instruments), rows, left=place)
    yield f"{len(differing)} of {num_counts} numbers differ"


def times_table(times: Sequence[Row]) -> Table:
    """The longest ops; instruments as columns."""
    place = ("module", "op", "phase", "shape")
    longest = sorted(times, key=lambda row: -max(value or 0.0 for value in row.values.values()))
    rows = [
        [*(getattr(row, name) for name in place)]
        + ["-" if value is None else duration(value) for value in row.values.values()]
        for row in longest[:_MOST_ROWS]
    ]
    title = f"The {len(rows)} longest ops of {len(times)}"
    return Table(title, (*place, *times[0].values), rows, left=place)
