"""The answer of a published model as a document, CSV and ledger, whatever its own tables look like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwise.core.files import csv_text
from meshwise.core.ledger import Ledger
from meshwise.core.units import Num
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.workload import Workload

TABLES = ("mlp", "sa")
WAYS = (("fwd", "forward"), ("bwd", "backward"))
"""What the published tables call the two directions, and what a ledger does."""

LedgerRow = dict[str, Any]


def table_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """`rows` in the order of `columns`; absent cells are empty, several values in a cell joined by `+`."""
    cells = ([row.get(column) for column in columns] for row in rows)
    joined = (["+".join(map(str, x)) if isinstance(x, list) else x for x in row] for row in cells)
    return csv_text([columns, *joined])


def document(
    convention: str, model: Model, cluster: Cluster, workload: Workload, *, plan: dict[str, Any],
    ranks: float, tables: dict[str, Any], step_s: float, flop: float, memory_bytes: dict[str, float],
    comm_s: dict[str, float], ledger: Ledger, notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The document that `meshwise estimate --json` prints: `flop` [FLOP] of one of `ranks` in `step_s` [s].

    `comm_s` are the parts of the step besides compute; they and compute sum to `step_s`.
    """
    peak_flop = cluster.chip.matrix_peak("fp16") * step_s
    total_bytes = sum(memory_bytes.values())
    return {
        "model": {"name": model.name},
        "cluster": {"name": cluster.name, "chip": cluster.chip.name},
        "plan": plan,
        "workload": {"batch": workload.batch, "seq": workload.seq},
        "convention": convention,
        **tables,
        "step_s": step_s,
        "tokens_per_s": workload.num_tokens / step_s,
        "tokens_per_s_per_gpu": workload.num_tokens / step_s / ranks,
        "flop_per_step": flop * ranks,
        "mfu": flop / peak_flop,
        "hfu": flop / peak_flop,
        "memory_bytes": {**memory_bytes, "buffers": 0.0, "total": total_bytes},
        "fits": total_bytes <= cluster.chip.memory_bytes,
        "time_s": {"compute": step_s - sum(comm_s.values()), **comm_s},
        "ledger": ledger.to_json(),
        "notes": notes,
    }


def work_row(
    flop: Num, traffic_bytes: Num, compute_s: Num, memory_s: Num, time_s: Num, write_bytes: float = math.nan
) -> LedgerRow:
    """The ledger row of an op in one direction; all traffic counts as read where `write_bytes` is NaN."""
    return {
        "flop": flop,
        "read_bytes": traffic_bytes - (0.0 if math.isnan(write_bytes) else write_bytes),
        "write_bytes": write_bytes,
        "compute_s": compute_s,
        "memory_s": memory_s,
        "time_s": time_s,
    }


def comm_row(kind: str, axis: str, ranks: Num, payload_bytes: Num, comm_s: Num, exposed_s: Num) -> LedgerRow:
    """The ledger row of a communication."""
    return {
        "collective": kind,
        "axis": axis,
        "group_size": ranks,
        "payload_bytes": payload_bytes,
        "comm_s": comm_s,
        "exposed_s": exposed_s,
        "time_s": exposed_s,
    }


def op_rows(
    module: str, op: str, phase: str, kept: dict[str, Num], rows: Iterable[LedgerRow]
) -> Iterator[LedgerRow]:
    """`rows` with the columns they share; the first row of the forward also has `kept`, what the op saves."""
    for i, row in enumerate(rows):
        first = kept if phase == "forward" and i == 0 else {}
        yield {"origin": "estimate", "rank": 0.0, "module": module, "op": op, "phase": phase, **row, **first}
