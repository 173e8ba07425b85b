"""Convention `nersc-2024-02`: the two tables of the transformer-estimates notebook, cell by cell.

A GPT block under 1D tensor parallelism with sequence parallelism, in two tables: `mlp` and `sa` (self
attention, with both layer norms), each op a row of formulas. Its rules, reproduced with their errors:

- A dot product of length k is 2k - 1 FLOP, a bias one more per output. Additions of a reduction are free.
- Forward traffic: inputs, weights and outputs once. Backward traffic: `grad_bytes`, weight gradients, weights
  (matmuls only), and what the forward saved.
- A communication moves the whole tensor once (no ring factor) at one flat bandwidth, and serves one op.
- No bias on qkv, no residual adds, no embedding, no head; backward all-gathers of the inputs are missing.

Source: the notebook's printed tables; ShashankSubramanian/transformer-perf-estimates at cf96a49. The
notebook's time of an op is its roofline at published peaks (matmuls at the matrix rate, the rest at the fp16
vector rate), plus its communication at the flat bandwidth of the level that the group fits in. Units are the
notebook's: TFLOP, GB (1e9 bytes), ms. `totals` are its column sums times the depth.
"""

import math
from collections.abc import Iterator
from typing import Any

import meshwise.published.nersc.tables as nersc
from meshwise.core.expressions import formulas
from meshwise.core.ledger import Ledger
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import Convention, Excerpt, PublishedStep
from meshwise.published.nersc.paper_ops import product_flop

COLUMNS = tuple(nersc.NERSC_TABLES["notebook"]["columns"])
SCOPE = nersc.scope("nersc-2024-02")
_TFLOP, _GB, _MS = 1e12, 1e9, 1e-3
_COLLECTIVES = {"allgather": "all_gather", "reducescatter": "reduce_scatter"}


def notebook(model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> PublishedStep:
    """Price one layer as the notebook does; PlanError for what it does not know."""
    SCOPE.check(model, plan, workload)
    SCOPE.check_links(cluster)
    sizes = {name: (getattr(model, name), plan.tp) for name in ("num_heads", "hidden", "ffn_hidden")}
    SCOPE.check_divides(model, sizes)
    num_chips = cluster.num_chips
    SCOPE.check_rules(plan=plan, work=workload, num_chips=num_chips, num_groups=plan.data_parallel(num_chips))
    tables = {name: list(_table(name, model, cluster, plan, workload)) for name in nersc.TABLES}
    totals = {name: _totals(rows, model.num_layers) for name, rows in tables.items()}

    def total(*names: str) -> float:
        return sum(totals[table][name] for name in names for table in nersc.TABLES)

    shares = {  # the notebook's "time spend in comms": of the forward
        name: float(sum(row["t_comm_fwd"] for row in rows) / sum(row["t_total_fwd"] for row in rows))
        for name, rows in tables.items()
    }
    results = {
        name: {"rows": rows, "totals": totals[name], "comm_frac": shares[name]}
        for name, rows in tables.items()
    }
    return PublishedStep(
        convention=SCOPE.convention,
        model=model,
        cluster=cluster,
        workload=workload,
        plan={"tp": plan.tp, "sp": plan.sequence_parallel},
        ranks=plan.tp,
        columns=("table", *COLUMNS),
        rows=[{"table": name, **row} for name in nersc.TABLES for row in tables[name]],
        tables=tables,
        results={"tables": results},
        excerpts=[_excerpt(name, tables[name], totals[name], shares[name]) for name in nersc.TABLES],
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


def _totals(rows: list[dict[str, Any]], depth: int) -> dict[str, float]:
    """Column sums over the rows of a table, times the number of layers."""
    names = nersc.NERSC_TABLES["notebook"]["totalled"]
    return {name: sum(row[name] for row in rows) * depth for name in names}


def _excerpt(name: str, rows: list[dict[str, Any]], totals: dict[str, float], comm_frac: float) -> Excerpt:
    """A table with its totals and its share of communication."""
    sums = (f"{column:<20}{value:>12.6f}" for column, value in totals.items())
    return Excerpt(
        title=f"{name} (TFLOP, GB, ms)",
        columns=("layer", "flops_fwd", "weights_mem", "t_fwd", "t_comm_fwd", "t_total_fwd", "t_total_bwd"),
        rows=rows,
        sentences=(*sums, f"time spend in comms = {comm_frac}\n"),
    )


def _table(name: str, model: Model, cluster: Cluster, plan: Plan, work: Workload) -> Iterator[dict[str, Any]]:
    """The rows of a table, by the notebook's formulas (`catalog/nersc.toml`)."""
    of = nersc.NERSC_TABLES["notebook"]
    sizes = {"batch": work.batch, "seq": work.seq, "hidden": model.hidden, "tp": plan.tp}
    sizes |= {"ffn": model.ffn_hidden, "heads": model.num_heads}
    names: dict[str, Any] = {key: float(size) for key, size in sizes.items()}
    names |= {"chip": cluster.chip, "levels": cluster.levels, "sequence_parallel": plan.sequence_parallel}
    names |= {"max": max, "product": product_flop, "kernels": of["kernels"]}
    names |= formulas(of["sizes"], names)
    for op in of[name]:
        own = {key: value for key, value in op.items() if key not in ("layer", "form")}
        known = names | formulas(own, names)
        known |= formulas(of["forms"][op["form"]], known)
        found = formulas(of["cells"], known) | {"layer": op["layer"]}
        yield {column: found[column] for column in COLUMNS}


def _ledger_rows(tables: dict[str, list[dict[str, Any]]]) -> Iterator[nersc.LedgerRow]:
    """Each op in both directions, and its communications."""
    for table, cells in ((name, row) for name in nersc.TABLES for row in tables[name]):
        kept = {"saved_bytes": cells["activation_buffer"] * _GB, "weight_bytes": cells["weights_mem"] * _GB}
        for way, phase in nersc.WAYS:
            flop, traffic_bytes = cells[f"flops_{way}"] * _TFLOP, cells[f"total_mem_{way}"] * _GB
            compute_s, memory_s, time_s = (cells[f"{name}_{way}"] * _MS for name in ("t_comp", "t_mem", "t"))
            write_bytes = cells["activation_out_mem"] * _GB if way == "fwd" else math.nan
            rows = [nersc.work_row(flop, traffic_bytes, compute_s, memory_s, time_s, write_bytes)]
            if payload_gb := cells[f"comm_{way}"]:
                kind, comm_s = _COLLECTIVES[cells[f"comm_{way}_type"]], cells[f"t_comm_{way}"] * _MS
                rows.append(nersc.comm_row(kind, "tp", cells["comm_size"], payload_gb * _GB, comm_s, comm_s))
            yield from nersc.op_rows(table, cells["layer"], phase, kept, rows)


CONVENTION = Convention(price=notebook, default_batch=1)
