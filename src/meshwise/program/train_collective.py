"""A collective of a training step as a row of the ledger."""

from __future__ import annotations

from math import prod
from typing import Any

from meshwise.cost.collective import sent_bytes


def collective_row(
    kind: str, phase: str, shape: tuple[int, ...], axis: str, ranks: int, elem_bytes: int, dtype: str
) -> dict[str, Any]:
    """A collective over the full tensor of `shape`."""
    payload_bytes = prod(shape) * elem_bytes
    return {
        "op": kind,
        "phase": phase,
        "shape": shape,
        "dtype": dtype,
        "collective": kind,
        "axis": axis,
        "group_size": ranks,
        "payload_bytes": payload_bytes,
        "sent_bytes": float(sent_bytes(kind, payload_bytes, ranks)),  # type: ignore[arg-type]
    }
