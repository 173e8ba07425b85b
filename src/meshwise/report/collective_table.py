"""One collective by size as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.estimate.collective import CollectiveTime
from meshwise.report.figure import new_figure, open_frame, save_figure
from meshwise.report.table import Table, percent


def collective_json(
    times: Sequence[CollectiveTime], measured_s: Mapping[float, float]
) -> list[dict[str, Any]]:
    """A row a size; `measured_s` is None where nothing was measured."""
    return [asdict(one) | {"measured_s": measured_s.get(one.payload_bytes)} for one in times]


def print_collective(
    times: Sequence[CollectiveTime], measured_s: Mapping[float, float], console: Console
) -> None:
    """Print a row a size, and the measured times where there are any."""
    columns = ["size", "time", "algorithm", "bus bandwidth", "of ceiling"]
    rows = []
    for one in times:
        seconds = measured_s.get(one.payload_bytes)
        rows.append(
            [
                _binary(one.payload_bytes),
                duration(one.time_s),
                one.algorithm,
                with_prefix(one.bus_bytes_per_s, "B/s"),
                percent(one.bus_bytes_per_s / one.ceiling_bytes_per_s),
                *(
                    (duration(seconds), percent(one.time_s / seconds - 1, sign=True))
                    if seconds
                    else ("", "") * bool(measured_s)
                ),
            ]
        )
    if measured_s:
        columns += ["measured", "error"]
    console.print(Table("", columns, rows, left=("algorithm",)))
    ceiling = with_prefix(times[0].ceiling_bytes_per_s, "B/s")
    console.print(
        f"ceiling of the bus bandwidth: {ceiling} (a ring or direct copies at the links' full rate)"
    )


def draw_collective(times: Sequence[CollectiveTime], measured_s: Mapping[float, float], path: Path) -> None:
    """Bus bandwidth by size, under its ceiling, with what was measured as dots."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.loglog(
        [one.payload_bytes for one in times], [one.bus_bytes_per_s / 1e9 for one in times], label="predicted"
    )
    dots = [(one.payload_bytes, one.time_s * one.bus_bytes_per_s / measured_s[one.payload_bytes] / 1e9)
            for one in times if one.payload_bytes in measured_s]  # fmt: skip
    if dots:
        axes.loglog(*zip(*dots, strict=True), "o", markersize=4, label="measured")
    axes.axhline(times[0].ceiling_bytes_per_s / 1e9, color="0.6", linestyle="--", label="links' full rate")
    axes.set(xlabel="size [bytes]", ylabel="bus bandwidth [GB/s]")
    axes.legend(frameon=False)
    open_frame(axes)
    save_figure(figure, path)


def _binary(size: float) -> str:
    """`1048576` as `1 MiB`; a size that is no whole number of them in SI units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power and (size / 1024**power).is_integer():
            return f"{size / 1024**power:g} {unit}"
    return with_prefix(size, "B")
