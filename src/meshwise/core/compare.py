"""Holds ledgers of one program against each other: what was estimated, dry-run, and run.

Counts must agree to the last digit: rows are joined by their place in the program (module, op, phase,
what kind of collective, shape), and every counted column is compared. Times are shown beside each other
where they are asked for; they are predictions, and never counted as a difference.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown

KEY = ("module", "op", "phase", "shape", "dtype", "collective", "axis", "group_size")
COUNTED = (
    *("count", "flop", "read_bytes", "write_bytes", "saved_bytes", "weight_bytes"),
    *("payload_bytes", "sent_bytes", "live_bytes", "peak_bytes"),
)
TIME = "time_s"

ALIVE = ("live_bytes", "peak_bytes")
WORK = ("count", "flop", "saved_bytes", "payload_bytes", "sent_bytes")
"""Columns that the ops of a layout state as exactly as a program counts them."""


TOTALS = ("count", "flop", "payload_bytes", "sent_bytes", "weight_bytes", "saved_bytes")
"""Columns of `totals_of`."""
OPS_BY_DIMS = {4: "matmul", 7: "attention"}
"""Ops by the number of dims of their shape (see `program.op.Op`)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of one op as each instrument gives it; None where the instrument has no such op."""

    module: str
    op: str
    phase: str
    column: str
    shape: str
    values: dict[str, float | None]

    @property
    def agrees(self) -> bool:
        """Whether all instruments give the same number; times need not."""
        return self.column == TIME or len(set(self.values.values())) == 1

    def to_json(self) -> dict[str, Any]:
        """The row with one key per instrument."""
        place = {name: getattr(self, name) for name in ("module", "op", "phase", "column", "shape")}
        return place | self.values | {"agrees": self.agrees}


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """All rows of a comparison, in the order of the first ledger."""

    rows: tuple[Row, ...]

    @property
    def agree(self) -> bool:
        """Whether every number agrees."""
        return all(row.agrees for row in self.rows)

    def differences(self) -> list[Row]:
        """The rows that do not."""
        return [row for row in self.rows if not row.agrees]

    def to_json(self) -> dict[str, Any]:
        """The document that `compare --json` prints."""
        return {"agree": self.agree, "rows": [row.to_json() for row in self.rows]}


def compare(
    ledgers: Mapping[str, Ledger], columns: Sequence[str] = COUNTED, partial: Collection[str] = (), *,
    timed: bool = False, peaks: Mapping[str, float] | None = None,
) -> Comparison:  # fmt: skip
    """Join `ledgers`, by the instruments' names, and compare `columns`; an absent number counts as zero.

    `timed`: with a row of seconds for each op. `partial` instruments state only some ops, and not what is
    alive at each: where they are silent they are left out. `peaks`: the most bytes that are ever alive, as
    each instrument that knows it says, one more row, of no module.
    """
    columns = (*columns, TIME) if timed else columns
    tables = {name: _by_place(ledger, columns) for name, ledger in ledgers.items()}
    places = dict.fromkeys(place for table in tables.values() for place in table)
    rows = []
    for place in places:
        module, op, phase, shape = place[:4]
        for column in columns:
            silent = partial if column in ALIVE else [name for name in partial if place not in tables[name]]
            stating = {name: table for name, table in tables.items() if name not in silent}
            values = {name: table.get(place, {}).get(column) for name, table in stating.items()}
            if any(values.values()) or None in values.values():
                rows.append(Row(module, op, phase, column, shape, values))
    if peaks:
        rows.append(Row("", "whole program", "", "peak_bytes", "", dict(peaks)))
    return Comparison(tuple(rows))


def work_of(ledger: Ledger) -> Ledger:
    """The rows of `ledger` that a layout states: matmuls, attention, collectives, and what each op keeps.

    A layout names the kernels of a block and what they cost, not the copies between them, nor how many
    torch ops make up a kernel; so kernels are left with what they keep for the backward, by module and op.
    """
    rows: list[dict[str, Any]] = []
    kept: dict[tuple[str, str, str], float] = {}
    for row in ledger.rows():
        place = (row["module"], row["op"], row["phase"])
        if row["saved_bytes"]:
            kept[place] = kept.get(place, 0.0) + row["count"] * row["saved_bytes"]
        if row["collective"]:
            rows.append(row | {"shape": "", "dtype": "", "saved_bytes": None})
        elif row["flop"]:
            rows.append(row | {"saved_bytes": None})
    for (module, op, phase), saved_bytes in kept.items():
        rows.append({"module": module, "op": op, "phase": phase, "saved_bytes": saved_bytes})
    return Ledger.from_rows(rows)


def totals_of(ledger: Ledger) -> Ledger:
    """Only matmuls, attention, collectives and states (module `states`), wherever in the program they are.

    A collective is told by its bytes, not by its shape. A program knows no phase of a message.
    """
    rows = []
    for row in ledger.rows():
        if row["module"] != "states":
            kind = row["collective"] or OPS_BY_DIMS.get(row["shape"].count("x") + 1, "")
            if not kind or not (row["flop"] or row["payload_bytes"]):
                continue
            row |= {"module": "", "op": kind, "weight_bytes": None, "saved_bytes": None}
            if row["collective"]:
                row |= {"shape": f"{row['payload_bytes']:.15g} B", "dtype": ""}
            if kind in ("send", "recv"):
                row["phase"] = ""
            elif kind == "all_gather" and row["axis"] == "dp" and row["phase"] == "recompute":
                row["phase"] = "backward"  # weights stay gathered from a recomputation to its backward
        rows.append(row)
    return Ledger.from_rows(rows)


def _by_place(ledger: Ledger, columns: Sequence[str]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Totals of the rows that share a place: sums of count times number, maxima of what is alive."""
    table: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in ledger.rows():
        total = table.setdefault(tuple(row[name] for name in KEY), dict.fromkeys(columns, 0.0))
        for name in columns:
            number = row[name] or 0.0
            if name in ALIVE:
                total[name] = max(total[name], number)
            else:
                total[name] += number if name == "count" else row["count"] * number
    return table
