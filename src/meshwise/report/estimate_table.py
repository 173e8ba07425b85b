"""An estimate as tables on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from meshwise.core.ledger import PHASES, Ledger
from meshwise.core.units import dollars, duration, long_duration, with_prefix
from meshwise.estimate.intervals import Interval
from meshwise.estimate.one_plan import Estimate
from meshwise.plan.plan import plan_text
from meshwise.plan.workload import Workload
from meshwise.report.search_table import why_none
from meshwise.report.table import Facts, Table
from meshwise.search.next_step import NextStep, largest_cost, next_step, other_plans


def print_estimate(
    estimate: Estimate,
    console: Console,
    *,
    run: Mapping[str, float] | None = None,
    per_layer: bool = False,
) -> None:
    """Print the totals (of a whole `run` too), the parts, the stages, and perhaps the ops of a layer."""
    _print_head(estimate, run or {}, console)
    console.print(
        _share_table(f"time of a {unit_of_work(estimate)}", estimate.time_s, estimate.step_s, duration)
    )
    memory = dict(estimate.memory_bytes)
    total = memory.pop("total")
    console.print(_share_table("memory of the fullest rank", memory, total, lambda x: with_prefix(x, "B")))
    if len(estimate.step.stages) > 1:
        console.print(stage_table(estimate))
    if per_layer:
        print_ledger(estimate.layer(), console)
    for note in estimate.notes():
        console.print(f"note: {note}")


def figures(estimate: Estimate) -> list[tuple[str, str]]:
    """The totals of an estimate, each with its name."""
    plan, on, chips = estimate.plan, estimate.mesh, estimate.cluster.num_chips
    degrees = f"tp={plan.tp} cp={plan.cp} pp={plan.pp} dp={int(on.dp)}"
    if estimate.model.moe:
        degrees += f" ep={plan.ep} etp={int(on.etp)}"
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    capacity = with_prefix(estimate.cluster.chip.memory_bytes, "B")
    rate, per_gpu = (
        with_prefix(value, "") for value in (estimate.tokens_per_s, estimate.tokens_per_s / chips)
    )
    lines = [
        ("plan", f"{degrees}, {plan.implementation}"),
        (unit_of_work(estimate), f"{duration(estimate.step_s)} ({between(estimate.step_s_interval)})"),
        ("tokens/s", f"{rate} ({per_gpu} per GPU)"),
        ("MFU / HFU", f"{estimate.mfu:.1%} / {estimate.hfu:.1%}"),
        ("model FLOP", with_prefix(estimate.flop_per_step, "FLOP") + f" per {unit_of_work(estimate)}"),
        ("memory", f"{with_prefix(estimate.memory_bytes['total'], 'B')} of {capacity}: {verdict}"),
    ]
    if watts := estimate.power_watts:
        chip, node = (with_prefix(value, "W", 3) for value in (watts["chip"], watts["node"]))
        lines.append(("power", f"{chip} a chip, {node} of its node at the wall"))
    if hidden := hidden_text(estimate):
        lines.append(("hidden", hidden))
    return lines + ([("experts", experts_text(estimate.experts))] if estimate.experts is not None else [])


def hidden_text(estimate: Estimate) -> str:
    """Communication that hides behind compute, where it is at least a hundredth of the step."""
    hidden = {name: s for name, s in estimate.hidden_s.items() if s >= 0.01 * estimate.step_s}
    each = ", ".join(f"{name} {duration(seconds)}" for name, seconds in hidden.items())
    return f"{each} behind compute" if each else ""


def next_text(estimate: Estimate) -> str:
    """The largest cost and the change that shortens the step most; or what would fit."""
    if not estimate.trains:
        return ""
    step = next_step(estimate)
    if not estimate.fits:
        return _fitting_text(estimate, step)
    name, seconds = largest_cost(estimate)
    cost = f"{name} takes {seconds / estimate.step_s:.0%}; "
    if step is None:
        return f"{cost}no change of one key is faster: meshwise search looks at all plans"
    less = 1 - step.run.step_s / estimate.step_s
    return f"{cost}{' and '.join(step.changes)} takes {duration(step.run.step_s)} a step, {less:.1%} less"


def _fitting_text(estimate: Estimate, step: NextStep | None) -> str:
    """A plan that fits, as near as there is one; else what else would do."""
    what, run = (" and ".join(step.changes), step.run) if step is not None else ("", None)
    if run is None:
        found = other_plans(estimate)
        if not found.best:
            *_, last = why_none(found).split("\n")
            return f"no plan fits; {last}"
        run = found.best[0]
        what = f"--plan {plan_text(run.plan)} --microbatch {run.workload.microbatch}"
    size = with_prefix(run.memory_bytes["total"], "B")
    return f"{what} fits: {size}, {duration(run.step_s)} a step"


_GAUGE = 24
"""Characters of a drawn interval and of a gauge."""


def drawn_interval(estimate: Estimate) -> str:
    """The interval of the step as a line with a mark at the prediction."""
    low, high = estimate.step_s_interval
    at = round((estimate.step_s - low) / (high - low) * (_GAUGE - 1)) if high > low else 0
    return "├" + "".join("●" if i == at else "─" for i in range(_GAUGE)) + "┤"


def gauge(frac: float) -> str:
    """A share as a bar of fixed length."""
    full = min(round(frac * _GAUGE), _GAUGE)
    return "█" * full + "░" * (_GAUGE - full) + f" {frac:.0%}"


def _print_head(estimate: Estimate, run: Mapping[str, float], console: Console) -> None:
    work = estimate.workload
    console.print(
        f"{estimate.model.name} on {estimate.cluster.num_chips} x {estimate.cluster.chip.name}, "
        f"batch {work.batch} x {work.seq}, microbatch {work.microbatch}{sampled(work)}"
    )
    frac = estimate.memory_bytes["total"] / estimate.cluster.chip.memory_bytes
    drawn = {unit_of_work(estimate): drawn_interval(estimate), "memory": gauge(frac)}
    lines = [(name, f"{text}   {drawn[name]}" if name in drawn else text) for name, text in figures(estimate)]
    following = next_text(estimate)
    console.print(Facts([*lines, *_run_lines(run), *([("next", following)] if following else [])]))


def unit_of_work(estimate: Estimate) -> str:
    """What is timed: a step, or a whole sampling."""
    return "sampling" if estimate.workload.kind == "sampling" else "step"


def sampled(work: Workload) -> str:
    """How often a sampling runs the model, behind what it samples; nothing for other work."""
    if work.kind != "sampling":
        return ""
    return f", {work.steps} steps" + (" with and without guidance" if work.guidance else "")


def experts_text(experts: Mapping[str, float | None]) -> str:
    """How many experts the tokens of a layer meet; with a capacity, what is dropped and padded."""
    met = "{distinct_experts:.0f} of {num_experts} for the {tokens:,} tokens of a rank"
    slots = "; {capacity:,} slots each, {padded_frac:.1%} empty, {dropped_frac:.1%} of choices dropped"
    return (met + (slots if experts["capacity"] else "")).format(**experts)


def between(interval: Interval) -> str:
    """`12.9 to 15.1`, in the unit of the number before it; with units where they differ."""
    low, high = duration(float(f"{interval.p10:.3g}")), duration(float(f"{interval.p90:.3g}"))
    same = low.split()[1] == high.split()[1]
    return f"{low.split()[0]} to {high.split()[0]}" if same else f"{low} to {high}"


def _run_lines(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a million tokens cost, and a whole run: days, GPU-hours, cost, energy, and with failures."""
    price = run.get("usd_per_million_tokens")
    cost = [] if price is None else [("cost", f"${price:,.3g} a million tokens")]
    if "tokens" not in run:
        return cost
    failing = run["with_failures"]
    num_failures = failing["num_failures"]
    lines = [
        *cost,
        (
            f"{with_prefix(run['tokens'], '')} tokens",
            f"{long_duration(run['run_s'])}, {with_prefix(run['gpu_hours'], '', 3)} GPU-hours",
        ),
        (
            "with failures",
            f"{long_duration(failing['run_s'])} (goodput {failing['goodput_frac']:.1%}, "
            f"{num_failures:{',.0f' if num_failures >= 10 else '.2g'}} failures, "
            f"a checkpoint of {with_prefix(failing['checkpoint_bytes'], 'B')} every "
            f"{duration(failing['checkpoint_every_s'])})",
        ),
    ]
    if "cost" in run:
        lines.append(
            ("cost of the run", f"{dollars(run['cost'])} ({dollars(failing['cost'])} with failures)")
        )
    if "energy_joules" in run:
        energy, failing_energy = (with_prefix(each["energy_joules"] / 3600, "Wh") for each in (run, failing))
        per_gpu = with_prefix(run["watts_per_gpu"], "W", 3)
        lines.append(("energy", f"{energy} ({failing_energy} with failures), {per_gpu} for each GPU"))
    if "co2_kg" in run:
        tonnes, failing_tonnes = (f"{each['co2_kg'] / 1000:,.1f} t" for each in (run, failing))
        lines.append(("CO2", f"{tonnes} ({failing_tonnes} with failures)"))
    return lines


def _share_table(title: str, parts: dict[str, float], total: float, show: Any) -> Table:
    shares = {name: (value, value / total) for name, value in parts.items() if value > 0}
    rows = [
        (name, show(value), f"{share:.1%}", "█" * max(1, round(40 * share)))
        for name, (value, share) in shares.items()
    ]
    columns = ("part", "value", "share", "")
    return Table(title, columns, [*rows, ("total", show(total), "100%", "")], left=("part", ""))


def stage_table(estimate: Estimate) -> Table:
    """What each kind of stage holds, and its times for one microbatch."""
    rows = []
    for cost in estimate.step.stages:
        stage, time = cost.stage, cost.time
        ends = ("embedding + " if stage.embeddings else "") + f"{float(stage.num_layers):g}"
        rows.append(
            (
                int(stage.index),
                int(stage.num_stages),
                ends + (" + head" if stage.heads else ""),
                duration(float(time.forward_s)),
                duration(float(time.backward_s + time.weight_s)),
                with_prefix(float(cost.memory.total), "B"),
            )
        )
    columns = ("stage", "alike", "layers", "forward", "backward", "memory")
    return Table("pipeline stages (one microbatch)", columns, rows, left=())


def layer_totals(ledger: Ledger) -> dict[str, dict[str, float]]:
    """FLOP, bytes and seconds of each phase; `comm_frac` is the share of exposed communication."""
    return {phase: _totals(rows) for phase in PHASES if len(rows := ledger.where(phase=phase))}


def _totals(rows: Ledger) -> dict[str, float]:
    columns = ("flop", "read_bytes", "write_bytes", "saved_bytes", "payload_bytes", "time_s")
    totals = {name: rows.total(name) for name in columns}
    exposed_s = rows.total("exposed_s")
    return totals | {"comm_frac": exposed_s / totals["time_s"] if totals["time_s"] else 0.0}


WIDE_COLUMNS = 105
"""Width of a terminal from which on a ledger shows its bytes too."""


def print_ledger(ledger: Ledger, console: Console) -> None:
    """Print a ledger phase by phase: what each op does, what binds it, how long it takes."""
    for phase in PHASES:
        rows = ledger.where(phase=phase)
        if len(rows):
            console.print(_phase_table(rows, phase, wide=console.width >= WIDE_COLUMNS))


def _phase_table(ledger: Ledger, phase: str, *, wide: bool) -> Table:
    shown = ("FLOP", "bytes", "FLOP/B", "saved", "binds", "time") if wide else ("FLOP", "binds", "time")
    rows = []
    for row in ledger.rows():
        on_axis = f"{row['collective']}, {row['axis']}={row['group_size']}" if row["collective"] else ""
        cells = _ledger_cells(row) | {"binds": binds(row)}
        rows.append((row["op"], on_axis or row["shape"], *(cells[name] for name in shown)))
    sums = _totals(ledger)
    cells = _ledger_cells(sums | {"payload_bytes": None})
    cells["binds"] = f"{sums['comm_frac']:.0%} link" if sums["comm_frac"] else ""
    rows.append(("total", "", *(cells[name] for name in shown)))
    columns = ("op", "shape, or collective")
    title = f"{phase} of one layer, one microbatch, one rank"
    return Table(title, (*columns, *shown), rows, left=columns, no_wrap=True)


def _ledger_cells(row: Mapping[str, Any]) -> dict[str, str]:
    flop, moved = row["flop"] or 0, (row["read_bytes"] or 0) + (row["write_bytes"] or 0)
    return {
        "FLOP": _number(flop),
        "bytes": _number(row["payload_bytes"] or moved),
        "FLOP/B": f"{flop / moved:.3g}" if flop and moved else "",
        "saved": _number(row["saved_bytes"]),
        "time": duration(row["time_s"] or 0.0),
    }


def _number(value: float | None) -> str:
    return with_prefix(value, "", 3) if value else ""


def binds(row: dict[str, Any]) -> str:
    """What binds an op: the links, memory or compute."""
    if row["collective"]:
        return "link"
    return "memory" if (row["memory_s"] or 0.0) > (row["compute_s"] or 0.0) else "compute"
