"""The one way from an `Op` to a row of the ledger; times and live bytes are added by who knows them."""

from __future__ import annotations

from typing import Any

from meshwise.cost.collective import sent_bytes
from meshwise.program.op import Op


def op_row(op: Op, *, weight_elem_bytes: float = 2.0) -> dict[str, Any]:
    """The columns of one occurrence of `op`, and how often it occurs.

    `weight_elem_bytes`: size [bytes] of an element of the weights that the op reads.
    """
    row: dict[str, Any] = {
        "module": op.module,
        "op": op.name,
        "phase": op.phase,
        "count": float(op.count),
        "shape": tuple(float(dim) for dim in op.shape),
        "dtype": op.dtype,
    }
    if op.kind == "collective":
        return row | {
            "collective": op.collective,
            "axis": op.axis,
            "group_size": float(op.group_size),
            "payload_bytes": float(op.payload_bytes),
            "sent_bytes": float(sent_bytes(op.collective, op.payload_bytes, op.group_size)),  # type: ignore[arg-type]
        }
    return row | {
        "flop": float(op.cost.flop),
        "read_bytes": float(op.cost.read_bytes),
        "write_bytes": float(op.cost.write_bytes),
        "saved_bytes": float(op.saved_bytes),
        "weight_bytes": float(op.num_params) * weight_elem_bytes,
    }
