"""The seconds of a comparison: what a cluster would take for each op, beside what the run took."""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.compare import Row
from meshwise.core.units import duration
from meshwise.report.table import Table

_MOST_ROWS = 20


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
