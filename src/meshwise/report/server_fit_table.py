"""What records of a server changed in an engine's constants, as text."""

from __future__ import annotations

from rich.console import Console

from meshwise.calibrate.fit_server import ServerFit
from meshwise.core.units import duration
from meshwise.report.table import Table


def print_server_fit(found: ServerFit, console: Console) -> None:
    """Print the constants before and after, and how far predictions lie off the records."""
    document = found.to_json()
    rows = [
        (name, *(_constant(name, values[when]) for when in ("before", "after")))
        for name, values in document["constants"].items()
    ]
    console.print(Table(f"constants of {document['engine']}", ("constant", "before", "after"), rows))
    columns = ("record", "quantity", "measured", "before", "after")
    misses = [
        (row["record"].rpartition("/")[2], name, *(duration(row[f"{name}_s"][key]) for key in columns[2:]))
        for row in document["rows"]
        for name in ("ttft", "tpot")
        if f"{name}_s" in row
    ]
    console.print(Table("records", columns, misses, left=columns[1:2]))
    for name, after in document["mean_abs_frac"]["after"].items():
        before = document["mean_abs_frac"]["before"][name]
        console.print(f"{name}: off by {after:.1%} in the mean, {before:.1%} before")


def _constant(name: str, value: float) -> str:
    return duration(value) if name.endswith("_s") else f"{value:.3f}"
