"""The one table that every instrument fills: a row is one op in one phase on one rank.

Quantities of a row are those of **one occurrence**; `count` says how often it occurs in a step. So
`flop` belongs to `shape`, and a total is `sum(count * column)`, which `Ledger.total` computes. A
communication is a row of its own: the op it serves in `op`, its kind in `collective`, the full
tensor in `payload_bytes`, what this rank puts on the wire in `sent_bytes`.

A ledger is columns, not objects: numpy arrays of equal length, in the order of `COLUMNS`. Absent
numbers are NaN inside and empty (CSV) or null (JSON) outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra
from meshwise.core.files import csv_text, write_text
from meshwise.core.notebook import Printed

if TYPE_CHECKING:
    import pandas
    import polars

TEXT_COLUMNS = ("origin", "module", "op", "phase", "shape", "dtype", "collective", "axis")
COLUMNS = (
    *("origin", "rank", "module", "op", "phase", "count", "shape", "dtype"),
    *("flop", "read_bytes", "write_bytes", "saved_bytes", "weight_bytes"),
    *("collective", "axis", "group_size", "payload_bytes", "sent_bytes"),
    *("compute_s", "memory_s", "comm_s", "exposed_s", "time_s", "start_s"),
    *("live_bytes", "peak_bytes"),
)
PHASES = ("forward", "backward", "recompute", "optimizer", "step", "peak")
Collective = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "dispatch", "broadcast", "reduce", "send",
    "recv",
]  # fmt: skip
"""All kinds of communication. A `dispatch` is an all-to-all of tokens that each go to the ranks of their
choice; `send` and `recv` are the two ends of one message."""
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


def shape_text(shape: Sequence[float]) -> str:
    """`(2048, 12288)` as the text of a cell: `2048x12288`; a scalar is the empty text."""
    return "x".join(f"{dim:.15g}" for dim in shape)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ledger(Printed):
    """Columns by name, all of one length; make one with `Ledger.from_rows`."""

    columns: dict[str, NDArray[Any]]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """A ledger of `rows`; a row may leave columns out, `shape` may be a tuple or its text."""
        rows = list(rows)
        if unknown := sorted({name for row in rows for name in row}.difference(COLUMNS)):
            raise DataError(f"a ledger has no column {', '.join(unknown)}; it has {', '.join(COLUMNS)}")
        columns: dict[str, NDArray[Any]] = {}
        for name in COLUMNS:
            if name in TEXT_COLUMNS:
                cells = [row.get(name) or "" for row in rows]
                texts = [cell if isinstance(cell, str) else shape_text(cell) for cell in cells]
                columns[name] = np.array(texts, dtype=object)
            else:
                empty = 1.0 if name == "count" else math.nan
                numbers = (row.get(name) for row in rows)
                columns[name] = np.array([empty if x is None else x for x in numbers], dtype=np.float64)
        return cls(columns)

    def __len__(self) -> int:
        return len(self.columns["op"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def where(self, **wanted: Any) -> Ledger:
        """The rows whose columns equal `wanted`; a tuple or list admits any of its values."""
        keep = np.ones(len(self), dtype=bool)
        for name, value in wanted.items():
            column = self.columns[name]
            keep &= np.isin(column, list(value)) if isinstance(value, tuple | list) else column == value
        return Ledger({name: column[keep] for name, column in self.columns.items()})

    def total(self, name: str) -> float:
        """Sum over the rows of `count` times the column `name`; rows without a number add nothing."""
        return float(np.nansum(self.columns["count"] * self.columns[name]))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows as dictionaries, absent numbers as None."""
        cells = (map(_cell, self.columns[name].tolist()) for name in COLUMNS)
        return (dict(zip(COLUMNS, row, strict=True)) for row in zip(*cells, strict=True))

    def used_columns(self) -> list[str]:
        """The columns in which some row says something."""
        columns = ((name, self.columns[name].tolist()) for name in COLUMNS)
        return [name for name, column in columns if any(_cell(x) not in (None, "") for x in column)]

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON values (whole numbers as integers, absent ones as null)."""
        return list(self.rows())

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV text; written to `path` too, whole or not at all."""
        text = csv_text([COLUMNS, *(row.values() for row in self.rows())])
        if path is not None:
            write_text(Path(path), text)
        return text

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas frame (needs pandas)."""
        return import_extra("pandas", "frames").DataFrame(self.columns)

    def to_polars(self) -> polars.DataFrame:
        """The table as a polars frame (needs polars)."""
        pl = import_extra("polars", "frames")
        return pl.DataFrame(self.columns, schema_overrides=dict.fromkeys(TEXT_COLUMNS, pl.String))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**63 else value
