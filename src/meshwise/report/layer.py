"""The ops of one layer as tables, phase by phase: what each does, what binds it, how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwise.core.ledger import PHASES, TEXT_COLUMNS, Ledger
from meshwise.core.units import duration, with_prefix
from meshwise.report.table import Fields, Table, records_table


def layer_totals(ledger: Ledger) -> dict[str, dict[str, float]]:
    """FLOP, bytes and seconds of each phase; `comm_frac` is the share of exposed communication."""
    return {phase: _totals(rows) for phase in PHASES if len(rows := ledger.where(phase=phase))}


def _totals(rows: Ledger) -> dict[str, float]:
    columns = ("flop", "read_bytes", "write_bytes", "saved_bytes", "payload_bytes", "time_s")
    totals = {name: rows.total(name) for name in columns}
    exposed_s = rows.total("exposed_s")
    return totals | {"comm_frac": exposed_s / totals["time_s"] if totals["time_s"] else 0.0}


def layer_tables(ledger: Ledger) -> Iterator[Table]:
    """A table of each phase: what its ops do, what binds them, how long they take, and the sum."""
    for phase in PHASES:
        ops = ledger.where(phase=phase)
        if not len(ops):
            continue
        rows = []
        for row in ops.rows():
            on_axis = f"{row['collective']}, {row['axis']}={row['group_size']}" if row["collective"] else ""
            rows.append((row["op"], on_axis or row["shape"], *_cells(row, binds(row))))
        sums = _totals(ops)
        bound = f"{sums['comm_frac']:.0%} link" if sums["comm_frac"] else ""
        rows.append(("total", "", *_cells(sums | {"payload_bytes": None}, bound)))
        columns = ("op", "shape, or collective", "FLOP", "bytes", "FLOP/B", "saved", "binds", "time")
        title = f"{phase} of one layer, one microbatch, one rank"
        yield Table(title, columns, rows, left=columns[:2])


def ledger_parts(ledger: Ledger) -> Iterator[Table]:
    """The columns of a ledger that say something, its names first."""
    used = ledger.used_columns()
    names = [name for name in ("module", "op", "phase") if name in used]
    columns: Fields = {name: name for name in (*names, *(name for name in used if name not in names))}
    yield records_table("", ledger.rows(), columns, left=TEXT_COLUMNS)


def _cells(row: Mapping[str, Any], bound: str) -> tuple[str, ...]:
    flop, moved = row["flop"] or 0, (row["read_bytes"] or 0) + (row["write_bytes"] or 0)
    intensity = f"{flop / moved:{',.0f' if flop >= 100 * moved else '.3g'}}" if flop and moved else ""
    sizes = _number(flop), _number(row["payload_bytes"] or moved), intensity, _number(row["saved_bytes"])
    return *sizes, bound, duration(row["time_s"] or 0.0)


def _number(value: float | None) -> str:
    return with_prefix(value, "", 3) if value else ""


def binds(row: dict[str, Any]) -> str:
    """What binds an op: the links, memory or compute."""
    if row["collective"]:
        return "link"
    return "memory" if (row["memory_s"] or 0.0) > (row["compute_s"] or 0.0) else "compute"
