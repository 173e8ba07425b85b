"""Frontier answers as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.published.frontier import Frontier
from meshwise.report.table import Table

EVERY = 5
"""Of the points of a curve every fifth is printed: two to a decade."""


def print_layer(document: dict[str, Any], console: Console) -> None:
    """Print the times of one layer, what binds, and the what-ifs."""
    rows = [
        (name.removesuffix("_s"), duration(document[name]), f"{document[name] / document['fwd_bwd_s']:.0%}")
        for name in ("flop_s", "memory_s", "network_s")
    ]
    title, columns = "forward + backward of a microbatch", ("resource", "time", "of the longest")
    console.print(Table(title, columns, rows))
    what_ifs = document["what_ifs"]
    lines = [
        f"{document['binds']} binds: {document['fwd_bwd_s']!r} s on a flat network",
        f"end of batch: {duration(document['end_of_batch_s'])}",
        f"the network would bind below {_rate(what_ifs['network_binds_below_bytes_per_s'])}, "
        f"memory below {_rate(what_ifs['memory_binds_below_bytes_per_s'])}",
        f"largest split before the network binds: {what_ifs['max_balanced_split']:.0f} ways balanced, "
        f"{what_ifs['max_1d_split']:.0f} ways in one dimension",
    ]
    if what_ifs["memory_flop_crossing_tokens"] is not None:
        tokens = what_ifs["memory_flop_crossing_tokens"]
        lines.append(f"memory takes longer than arithmetic below {tokens:.0f} tokens per device")
    if "two_level" in document:
        two = document["two_level"]
        lines.append(
            f"on the device's two levels of links: {two['binds']} binds, {duration(two['fwd_bwd_s'])} "
            f"({duration(two['inner_s'])} inside a domain, {duration(two['outer_s'])} between)"
        )
    for line in lines:
        console.print(line)


def curve_table(document: Mapping[str, Any]) -> Table:
    """The best run at each training compute, with failures and without."""
    curves = zip(document["curve"], document["with_failures"]["curve"], strict=True)
    rows = [
        (
            f"{point['training_flop']:.1e}", f"{point['utilization']:.1%}",
            f"{failing['utilization']:.1%}" if failing["plan"] else "none",
            with_prefix(point["devices"], "", 3),
            f"tp={plan['tp_in']:.0f}x{plan['tp_out']:.0f},pp={plan['pp']:.0f},dp={plan['dp']:.0f}",
            point["binds"], point["lost_to"],
        )
        for point, failing in list(curves)[::EVERY]
        if (plan := point["plan"]) is not None
    ]  # fmt: skip
    title = f"{document['device']['name']}: the best run at each training compute"
    columns = ("FLOP", "MFU", "with failures", "devices", "plan", "binds", "lost to")
    return Table(title, columns, rows, left=("FLOP", "plan", "binds", "lost to"))


def print_frontier(found: Frontier, console: Console) -> None:
    """Print a frontier at the prices and the power that hold where none is stated."""
    print_run(found.to_json(), console)


def print_run(document: dict[str, Any], console: Console) -> None:
    """Print the curve, with failures and without, and where it ends."""
    console.print(curve_table(document))
    for name, limits in (("without failures", document), ("with failures", document["with_failures"])):
        console.print(
            f"{name}: plateau {limits['plateau']:.1%}; 80 % of it up to "
            f"{flop(limits['limit_80pct_flop'])}; wall at {flop(limits['wall_flop'])}"
        )
        limit = limits["limit"]
        if limit is not None:
            price = f", price {with_prefix(limit['price'], '', 3)}" if limit["price"] else ""
            watts, joules = limit["power_watts"], limit["energy_j"]
            power = f", {with_prefix(watts, 'W', 3)}, {with_prefix(joules, 'J', 3)}" if watts else ""
            devices = with_prefix(limit["devices"], "", 3)
            console.print(f"  there: {devices} devices, {duration(limit['training_s'])}{power}{price}")


def print_sensitivity(document: dict[str, Any], console: Console) -> None:
    """Print the limits with one choice changed at a time."""
    for title, rows in (("without failures", document["rows"]), ("", document["with_failures"])):
        cells = [
            (
                *(row["choice"], row["value"], f"{row['plateau']:.1%}"),
                *(flop(row["limit_80pct_flop"]), flop(row["wall_flop"])),
            )
            for row in rows
        ]
        columns = ("choice", "value", "plateau", "80 % limit", "wall")
        console.print(Table(title, columns, cells, left=columns[:2]))


def flop(value: float | None) -> str:
    """A training compute, or that it lies beyond the curve."""
    return "beyond the curve" if value is None else f"{value:.2g} FLOP"


def _rate(bytes_per_s: float) -> str:
    return with_prefix(bytes_per_s, "B/s", 3) if bytes_per_s < 1e12 else with_prefix(bytes_per_s, "B/s")
