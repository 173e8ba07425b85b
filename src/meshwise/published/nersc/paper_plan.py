"""A plan of ours under convention `nersc-2024-10`: priced as the paper prices it, as tables and JSON.

The paper searches two things that a `Plan` does not name. The placement: here the axes fill a fast domain
in the order of `plan.placement`, each with the members that divide what room is left. The panels of SUMMA:
here the fewest, max(m1, m2). `layout=2d-cp` is the paper's `2d-seqp`.
"""

import math
from collections.abc import Iterator
from typing import Any

import meshwise.published.nersc.paper as sheet
import meshwise.published.nersc.tables as nersc
from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.expressions import formulas
from meshwise.core.ledger import Ledger
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.published.convention import Convention, Excerpt, PublishedStep
from meshwise.published.nersc.paper_ops import PaperCut, PaperOp, layer

_PAPER = nersc.NERSC_TABLES["paper"]
SCOPE = nersc.scope("nersc-2024-10")


def paper(model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> PublishedStep:
    """Price a plan as the paper does; PlanError for what it does not know."""
    run = _paper_run(model, cluster, plan, workload)
    cut, priced = run.cut, sheet.price(run, sheet.paper_system(cluster))
    totals = {name: float(value) for name, value in priced.totals.items()}
    others = [{"table": "other"} | row for row in (priced.dp_comm, priced.pp_comm)]
    rows = [{"table": name} | row for name in nersc.TABLES for row in priced.tables[name]] + others
    shown_plan: dict[str, Any] = {"strategy": cut.strategy, "attention": cut.attention, "inside": run.inside}
    results = {"tables": priced.tables, "dp_comm": priced.dp_comm, "pp_comm": priced.pp_comm}
    notes = ["the paper's own counting and timing, its known errors included: blocks only, no embeddings"]
    if cut.strategy == "2d":
        notes.append(f"SUMMA in {cut.panels:g} steps: `panels` times the longer side of the grid")
    excerpt = Excerpt(
        title="one layer, one microbatch (TFLOP, GB, s)",
        columns=("name", "flops_fwd", "activation_buffer", "weights_mem", "t_fwd_comm", "t_fwd", "t_bwd"),
        rows=rows,
        sentences=(
            *(f"{name:<26}{value:>16.6f}" for name, value in totals.items()),
            "fits" if priced.fits else "DOES NOT FIT",
            *(f"note: {note}" for note in notes),
        ),
    )
    return PublishedStep(
        convention=SCOPE.convention,
        model=model,
        cluster=cluster,
        workload=workload,
        plan=shown_plan | {"m1": int(cut.m1), "m2": int(cut.m2), "pp": plan.pp, "dp": int(run.dp)},
        ranks=plan.model_ranks * float(run.dp),
        columns=("table", *sheet.COLUMNS),
        rows=rows,
        tables=priced.tables,
        results=results | {"totals": totals},
        excerpts=[excerpt],
        step_s=totals["t"],
        flop=totals["flops_per_gpu"] * sheet.TFLOP,
        memory_bytes={name: totals[f"{part}_mem"] * sheet.GB for name, part in _PAPER["memory"].items()},
        comm_s={name: totals[f"t_{part}"] for name, part in _PAPER["times"].items()},
        ledger=Ledger.from_rows(_ledger_rows(run, cluster, priced)),
        notes=notes,
    )


def _ledger_rows(run: sheet.PaperRun, cluster: Cluster, priced: sheet.Iteration) -> Iterator[nersc.LedgerRow]:
    """The ops of one layer, one microbatch, on one rank."""
    tables, system = layer(run.cut), sheet.paper_system(cluster)
    for table in nersc.TABLES:
        for op, cells in zip(tables[table], priced.tables[table], strict=True):
            kept = {name: op[name] for name in ("saved_bytes", "weight_bytes")}
            for way, phase in nersc.WAYS:
                rows = _op_ledger_rows(sheet.work_of(op, phase), op["panels"], cells, way, run, system)
                yield from nersc.op_rows(table, op["name"], phase, kept, rows)


def _op_ledger_rows(
    work: PaperOp, panels: Any, cells: sheet.Row, way: str, run: sheet.PaperRun, system: sheet.PaperSystem
) -> Iterator[nersc.LedgerRow]:
    """One direction of an op, and its communications, which share what the op waits for them."""
    compute_s, wait_s = cells[f"t_{way}_comp"], cells[f"t_{way}_comm"]
    memory_s = compute_s / cells[f"intensity_{way}"]
    flop, time_s = cells[f"flops_{way}"] * sheet.TFLOP, cells[f"t_{way}"] - wait_s
    yield nersc.work_row(flop, work["traffic"], compute_s, memory_s, time_s)
    seconds = sheet.comm_seconds(work["comms"], panels, run, system)
    for (kind, axis, volume_bytes), comm_s in zip(work["comms"], seconds, strict=True):
        if comm_s > 0:
            ranks, exposed_s = run.groups[axis][0], wait_s * comm_s / sum(seconds)
            yield nersc.comm_row(kind, axis, ranks, volume_bytes, comm_s, exposed_s)


def _paper_run(model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> sheet.PaperRun:
    SCOPE.check(model, plan, workload)
    if plan.layout != "1d" and not plan.grid:
        raise PlanError(f"layout={plan.layout} needs its grid here, as in layout={plan.layout}:4x2")
    SCOPE.check_rules(plan=plan)
    SCOPE.check_links(cluster)
    m1, m2 = plan.grid if plan.layout != "1d" else (plan.tp, 1)
    strategy = _PAPER["strategies"][plan.layout]
    both = math.lcm(m1, m2) if strategy == "2d" else m1
    names: dict[str, Any] = {"model": model, "plan": plan, "work": workload, "m1": m1, "m2": m2}
    names |= {"both": both, "by_blocks": strategy == "2d", "by_grid": plan.attention == "grid", "max": max}
    SCOPE.check_divides(model, formulas(_PAPER["divides"], names))
    dp = plan.data_parallel(cluster.num_chips)
    batch, microbatch = workload.batch, workload.microbatch
    names |= {"batch": batch, "dp": dp, "microbatch": microbatch, "least": dp * microbatch}
    refuse("batch of a plan", WorkloadError, **names)
    lengths = {name: float(length) for name, length in formulas(_PAPER["lengths"], names).items()}
    attention, recompute = _PAPER["attention"][plan.attention], plan.recompute == "selective"
    cut = PaperCut(strategy=strategy, attention=attention, recompute=recompute, **lengths)
    sizes = {"tp1": m1, "tp2": m2, "dp": dp, "pp": plan.pp}
    order = [axis for name in plan.placement for axis in {"tp": ("tp1", "tp2"), "cp": ()}.get(name, (name,))]
    inside = _inside({axis: sizes[axis] for axis in order}, cluster.levels[0].ranks)
    numbers = {"num_layers": model.num_layers, "batch": batch, "dp": dp, "pp": plan.pp}
    return sheet.PaperRun(cut=cut, inside=inside, **{name: float(number) for name, number in numbers.items()})


def _inside(sizes: dict[str, int], domain_ranks: float) -> dict[str, float]:
    """Members of each axis in one fast domain, which the axes fill in their order with what divides."""
    if math.prod(sizes.values()) <= domain_ranks:
        return {axis: float(size) for axis, size in sizes.items()}
    room, inside = int(domain_ranks), {}
    for axis, size in sizes.items():
        inside[axis] = float(math.gcd(size, room))
        room //= int(inside[axis])
    return inside


CONVENTION = Convention(price=paper)
