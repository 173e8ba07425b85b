"""Convention `nersc-2024-02`: the two tables of the transformer-estimates notebook, cell by cell.

The notebook's time of an op is its roofline at published peaks (matmuls at the matrix rate, the rest at
the fp16 vector rate), plus its communication at the flat bandwidth of the level that the group fits in.
Units are the notebook's: TFLOP, GB (1e9 bytes), ms. `totals` are its column sums times the depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from meshwise.core.ledger import Ledger
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import ANY, Convention, Excerpt, PublishedStep, Scope
from meshwise.published.nersc.notebook_ops import NotebookOp, block
from meshwise.published.nersc.tables import (
    GPT_BLOCKS,
    NERSC_TABLES,
    TABLES,
    WAYS,
    LedgerRow,
    comm_row,
    op_rows,
    work_row,
)

COLUMNS = tuple(NERSC_TABLES["notebook"]["columns"])
SCOPE = Scope(
    convention="nersc-2024-02",
    plan={
        **{"tp": ANY, "sp": ANY, "dp": (None, 1), "dtype": ("bf16", "fp16"), "zero": (1, 0)},
        **{"attention": ("flash", "unfused"), "optimizer": ("adam", "none")},
    },
    workload={"batch": ANY, "seq": ANY, "microbatch": ANY},
    model=GPT_BLOCKS,
)
"""The notebook's tensors are 2 bytes wide, its attention is unfused, and it has no optimizer."""
_TFLOP, _GB, _MS = 1e12, 1e9, 1e-3
_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter"}


def notebook(model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> PublishedStep:
    """Price one layer as the notebook does; PlanError for what it does not know."""
    _check_known(model, cluster, plan, workload)
    sizes = (workload.batch, workload.seq, model.hidden, model.ffn_hidden, model.num_heads, plan.tp)
    sp = plan.sequence_parallel
    ops = block(*map(float, sizes), sequence_parallel=sp)
    tables = {name: [_row(op, cluster) for op in table] for name, table in ops.items()}
    totals = {name: _totals(rows, model.num_layers) for name, rows in tables.items()}

    def total(*names: str) -> float:
        return sum(totals[table][name] for name in names for table in TABLES)

    shares = {name: _comm_frac(rows) for name, rows in tables.items()}
    results = {
        name: {"rows": rows, "totals": totals[name], "comm_frac": shares[name]}
        for name, rows in tables.items()
    }
    return PublishedStep(
        convention=SCOPE.convention,
        model=model,
        cluster=cluster,
        workload=workload,
        plan={"tp": plan.tp, "sp": sp},
        ranks=plan.tp,
        columns=("table", *COLUMNS),
        rows=[{"table": name, **row} for name in TABLES for row in tables[name]],
        tables=tables,
        results={"tables": results},
        excerpts=[_excerpt(name, tables[name], totals[name], shares[name]) for name in TABLES],
        step_s=total("t_total_fwd", "t_total_bwd") * _MS,
        flop=total("flops_fwd", "flops_bwd") * _TFLOP,
        memory_bytes={
            "weights": total("weights_mem") * _GB,
            "gradients": total("weights_grad_mem") * _GB,
            "optimizer": 0.0,
            "activations": total("activation_buffer") * _GB,
        },
        comm_s={"comm_tp": total("t_comm_fwd", "t_comm_bwd") * _MS},
        ledger=Ledger.from_rows(_ledger_rows(tables)),
        notes=["the notebook's own counting and timing: blocks only, one flat bandwidth, no optimizer"],
    )


def _check_known(model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> None:
    SCOPE.check(model, plan, workload)
    SCOPE.check_links(cluster)
    sizes = {name: (getattr(model, name), plan.tp) for name in ("num_heads", "hidden", "ffn_hidden")}
    SCOPE.check_divides(model, sizes)
    num_chips = cluster.num_chips
    SCOPE.check_rules(plan=plan, work=workload, num_chips=num_chips, num_groups=plan.data_parallel(num_chips))


def _totals(rows: list[dict[str, Any]], depth: int) -> dict[str, float]:
    """Column sums over the rows of a table, times the number of layers."""
    return {name: sum(row[name] for row in rows) * depth for name in NERSC_TABLES["notebook"]["totalled"]}


def _comm_frac(rows: list[dict[str, Any]]) -> float:
    """The notebook's "time spend in comms": share of the forward."""
    return float(sum(row["t_comm_fwd"] for row in rows) / sum(row["t_total_fwd"] for row in rows))


def _excerpt(name: str, rows: list[dict[str, Any]], totals: dict[str, float], comm_frac: float) -> Excerpt:
    """A table with its totals and its share of communication."""
    sums = (f"{column:<20}{value:>12.6f}" for column, value in totals.items())
    return Excerpt(
        title=f"{name} (TFLOP, GB, ms)",
        columns=("layer", "flops_fwd", "weights_mem", "t_fwd", "t_comm_fwd", "t_total_fwd", "t_total_bwd"),
        rows=rows,
        sentences=(*sums, f"time spend in comms = {comm_frac}\n"),
    )


def _row(op: NotebookOp, cluster: Cluster) -> dict[str, Any]:
    chip = cluster.chip
    peak = chip.matrix_peak("fp16") if op.matmul else chip.vector_peak("fp16")
    inside = op.comm_size <= cluster.levels[0].ranks
    link = cluster.levels[0 if inside else -1]
    row: dict[str, Any] = {
        "layer": op.layer,
        "activation_in_mem": op.in_bytes / _GB,
        "activation_in_other_mem": op.other_bytes / _GB,
        "activation_out_mem": op.out_bytes / _GB,
        "activation_buffer": op.saved_bytes / _GB,
        "weights_mem": op.weight_bytes / _GB,
        "weights_grad_mem": op.weight_bytes / _GB,
        "activation_grad_mem": op.grad_bytes / _GB,
        "comm_size": op.comm_size or None,
        "comm_topology": ("nvlink" if inside else "ib") if op.comm_size else None,
    }
    ways = (
        ("fwd", op.flop, op.forward_bytes, op.forward_comm),
        ("bwd", op.backward_flop, op.backward_bytes, op.backward_comm),
    )
    for way, flop, moved, comm in ways:
        comm_bytes = op.comm_bytes if comm and op.comm_size > 1 else 0.0
        row |= {
            f"flops_{way}": flop / _TFLOP,
            f"total_mem_{way}": moved / _GB,
            f"comm_{way}": comm_bytes / _GB if comm else None,
            f"comm_{way}_type": comm or None,
            f"t_comp_{way}": flop / peak / _MS,
            f"t_mem_{way}": moved / chip.memory_bytes_per_s / _MS,
            f"t_comm_{way}": comm_bytes / link.bytes_per_s / _MS,
        }
        row[f"t_{way}"] = max(row[f"t_comp_{way}"], row[f"t_mem_{way}"])
        row[f"t_total_{way}"] = row[f"t_{way}"] + row[f"t_comm_{way}"]
        row[f"frac_t_comm_{way}"] = row[f"t_comm_{way}"] / row[f"t_total_{way}"]
    row["intensity"] = row["t_comp_fwd"] / row["t_mem_fwd"]
    return row


def _ledger_rows(tables: dict[str, list[dict[str, Any]]]) -> Iterator[LedgerRow]:
    """Each op in both directions, and its communications."""
    for table, cells in ((name, row) for name in TABLES for row in tables[name]):
        kept = {"saved_bytes": cells["activation_buffer"] * _GB, "weight_bytes": cells["weights_mem"] * _GB}
        for way, phase in WAYS:
            flop, traffic_bytes = cells[f"flops_{way}"] * _TFLOP, cells[f"total_mem_{way}"] * _GB
            compute_s, memory_s, time_s = (cells[f"{name}_{way}"] * _MS for name in ("t_comp", "t_mem", "t"))
            write_bytes = cells["activation_out_mem"] * _GB if way == "fwd" else math.nan
            rows = [work_row(flop, traffic_bytes, compute_s, memory_s, time_s, write_bytes)]
            if payload_gb := cells[f"comm_{way}"]:
                kind, comm_s = _COLLECTIVES[cells[f"comm_{way}_type"]], cells[f"t_comm_{way}"] * _MS
                rows.append(comm_row(kind, "tp", cells["comm_size"], payload_gb * _GB, comm_s, comm_s))
            yield from op_rows(table, cells["layer"], phase, kept, rows)


CONVENTION = Convention(
    name=SCOPE.convention,
    answers="the block of a GPT on one tensor-parallel group, forward and backward",
    columns=COLUMNS,
    units="TFLOP, GB (1e9 bytes), ms",
    rules=SCOPE,
    price=notebook,
    default_batch=1,
)
