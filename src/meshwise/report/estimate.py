"""What one plan costs: figures, time, memory, stages; on a page the roofline of its ops and the pipeline.

Below it the ops of one layer, phase by phase, and two plans side by side, term by term.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.ledger import PHASES, TEXT_COLUMNS, Ledger
from meshwise.core.units import dollars, duration, long_duration, mass, of_capacity, with_prefix
from meshwise.cost.simulate import Timeline
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.rows import spent_on
from meshwise.estimate.step import play
from meshwise.machine.hardware import cluster_text
from meshwise.model.architecture import layer_counts
from meshwise.plan.plan import DATA_PARALLEL, plan_text
from meshwise.program.parts import layer_names
from meshwise.report import answer as plot
from meshwise.report.answer import COLORS, Bars, Chart, ChartAxis, Page, Section, Text
from meshwise.report.search import why_none
from meshwise.report.table import TABLES, WORDS, Facts, Table, pair_row, records_table
from meshwise.search.basis import hidden_text
from meshwise.search.next_step import NextStep, largest_cost, next_step, other_plans, with_batch

MAX_ACTIONS = 20_000
"""A pipeline that cannot be shown with fewer actions is not drawn."""
_ACTIONS: dict[str, str] = WORDS["action_colors"]
_PHASES: dict[str, tuple[str, Any]] = {
    "forward": (plot.COLORS[0], "circle"), "backward": (plot.COLORS[3], "triangle-up"),
}  # fmt: skip
"""Color and mark of an op on the roofline."""
_NAMED_FRAC = 0.01
"""An op with at least this share of the layer's time is named in a picture."""
NUM_BINS = 600
"""Moments that a timeline shows."""
NUM_SHOWN = NUM_BINS // 3
"""Actions of a stage that it can show."""
_GAUGE = 24
"""Characters of a drawn interval and of a gauge."""


def parts(
    estimate: Estimate, *, run: Mapping[str, float] | None = None, per_layer: bool = False
) -> Iterator[Section]:
    """The totals (of a whole `run` too), the parts, the stages, and perhaps the ops of a layer."""
    work = estimate.workload
    sampled = f", {work.steps} steps" * (work.kind == "sampling")
    yield (
        f"{estimate.model.name} on {estimate.cluster.num_chips} x {estimate.cluster.chip.name}, "
        f"batch {work.batch} x {work.seq}, microbatch {work.microbatch}{sampled}"
        + " with and without guidance"
        * work.guidance
    )
    following = next_text(estimate)
    yield Facts([*_facts(estimate, run), *([("next", following)] if following else [])])
    yield from (_time(estimate), _memory(estimate))
    yield from filter(None, [stage_table(estimate)])
    if per_layer:
        yield from layer_tables(estimate)
    yield Text("Notes", estimate.notes(), "note: ")


def page(estimate: Estimate, run: Mapping[str, Any] | None = None) -> Page:
    """What one plan (and a whole `run`) costs, where its time goes, and what to try next."""
    summary = summary_page(estimate, run)
    return replace(summary, sections=[*summary.sections, *op_sections(estimate)])


def summary_page(estimate: Estimate, run: Mapping[str, Any] | None = None) -> Page:
    """What one plan costs: time, memory, figures, notes."""
    facts, notes = Facts(_facts(estimate, run)), Text("Notes", estimate.notes())
    sections: list[Section] = [_time(estimate), _memory(estimate), facts, notes]
    return Page(_title(estimate), headline(estimate), sections, estimate.fits)


def _facts(estimate: Estimate, run: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The totals, the interval of the step and the memory drawn, and those of a whole `run`."""
    frac = estimate.memory_bytes["total"] / estimate.cluster.chip.memory_bytes
    drawn = {unit_of_work(estimate): drawn_interval(estimate), "memory": gauge(frac)}
    lines = [(name, f"{text}   {drawn[name]}" if name in drawn else text) for name, text in figures(estimate)]
    return lines + _run_lines(run or {})


def op_sections(estimate: Estimate) -> list[Section]:
    """Where the time of one plan goes: the roofline of its ops, the pipeline over time, its stages."""
    following = next_text(estimate)
    tried = Text("Try next", [following]) if following else None
    return [one for one in (tried, _roofline(estimate), _pipeline(estimate), stage_table(estimate)) if one]


def picture(estimate: Estimate, run: Mapping[str, Any] | None = None) -> plot.Picture:
    """Time, memory and roofline of one plan."""
    rows = [[_time(estimate), _memory(estimate)], [_roofline(estimate)]]
    rate = f"{with_prefix(estimate.tokens_per_s / estimate.cluster.num_chips, '')} tokens/s per GPU"
    shares = f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    cost = [text for name, text in _run_lines(run or {}) if name == "cost"]
    return plot.Picture(rows, f"{_title(estimate)}\n{'; '.join([headline(estimate), rate, shares, *cost])}")


def headline(estimate: Estimate) -> str:
    """The answer in one sentence."""
    time = f"{duration(estimate.step_s)} a {unit_of_work(estimate)} ({between(estimate)})"
    return f"{time}, {_memory_text(estimate)}"


def _memory_text(estimate: Estimate) -> str:
    return of_capacity(estimate.memory_bytes["total"], estimate.cluster.chip.memory_bytes, estimate.fits)


def figures(estimate: Estimate) -> list[tuple[str, str]]:
    """The totals of an estimate, each with its name."""
    plan, on, chips = estimate.plan, estimate.mesh, estimate.cluster.num_chips
    degrees = f"tp={plan.tp} cp={plan.cp} pp={plan.pp} dp={int(on.dp)}"
    if estimate.model.moe:
        degrees += f" ep={plan.ep} etp={int(on.etp)}"
    rate, per_gpu = (with_prefix(estimate.tokens_per_s / number, "") for number in (1, chips))
    software = f" on {plan.software}" * (plan.software != plan.done_by.software)
    lines = [
        ("plan", f"{degrees}, {plan.implementation}{software}"),
        (unit_of_work(estimate), f"{duration(estimate.step_s)} ({between(estimate)})"),
        ("tokens/s", f"{rate} ({per_gpu} per GPU)"),
        ("MFU / HFU", f"{estimate.mfu:.1%} / {estimate.hfu:.1%}"),
        ("model FLOP", with_prefix(estimate.flop_per_step, "FLOP") + f" per {unit_of_work(estimate)}"),
        ("memory", _memory_text(estimate)),
    ]
    if watts := estimate.power_watts:
        chip, node = (with_prefix(watts[name], "W", 3) for name in ("chip", "node"))
        lines.append(("power", f"{chip} a chip, {node} of its node at the wall"))
    if hidden := hidden_text(estimate, 0.01):
        lines.append(("hidden", f"{hidden} behind compute"))
    return lines + ([("experts", experts_text(estimate.experts))] if estimate.experts is not None else [])


def next_text(estimate: Estimate) -> str:
    """The largest cost and the change that shortens the step most; or what would fit."""
    if not estimate.trains:
        return ""
    step = next_step(estimate)
    if not estimate.fits:
        return _fitting_text(estimate, step)
    name, share = largest_cost(estimate)
    cost = f"{name} takes {share:.0%}; " * (share > 5e-3)
    if step is None:
        return f"{cost}no change of one key is faster: meshwise search looks at all plans"
    less, what = (
        1 - step.run.step_s / estimate.step_s,
        with_batch(" and ".join(step.changes), step.run, estimate),
    )
    return f"{cost}{what} takes {duration(step.run.step_s)} a step, {less:.1%} less"


def _fitting_text(estimate: Estimate, step: NextStep | None) -> str:
    """A plan that fits, as near as there is one; else what else would do."""
    what, run = (" and ".join(step.changes), step.run) if step is not None else ("", None)
    if run is None:
        found = other_plans(estimate)
        if not found.best:
            return f"no plan fits; {'; '.join(why_none(found)[-2:])}"
        run = found.best[0]
        what = f"--plan {plan_text(run.plan)} --microbatch {run.workload.microbatch}"
    what = with_batch(what, run, estimate)
    return f"{what} fits: {with_prefix(run.memory_bytes['total'], 'B')}, {duration(run.step_s)} a step"


def drawn_interval(estimate: Estimate) -> str:
    """The interval of the step as a line with a mark at the prediction."""
    low, high = estimate.step_s_interval
    at = round((estimate.step_s - low) / (high - low) * (_GAUGE - 1)) if high > low else 0
    return "├" + "".join("●" if i == at else "─" for i in range(_GAUGE)) + "┤"


def gauge(frac: float) -> str:
    """A share as a bar of fixed length."""
    full = min(round(frac * _GAUGE), _GAUGE)
    return "█" * full + "░" * (_GAUGE - full) + f" {frac:.0%}"


def unit_of_work(estimate: Estimate) -> str:
    """What is timed: a step, or a whole sampling."""
    return "sampling" if estimate.workload.kind == "sampling" else "step"


def experts_text(experts: Mapping[str, float | None]) -> str:
    """How many experts the tokens of a layer meet; with a capacity, what is dropped and padded."""
    met = "{distinct_experts:.0f} of {num_experts} for the {tokens:,} tokens of a rank"
    slots = "; {capacity:,} slots each, {padded_frac:.1%} empty, {dropped_frac:.1%} of choices dropped"
    return (met + (slots if experts["capacity"] else "")).format(**experts)


def between(estimate: Estimate) -> str:
    """The interval of the step as `12.9 to 15.1`, in the unit of the step, which stands before it."""
    ends = (float(f"{end:.3g}") for end in estimate.step_s_interval)
    return " to ".join(duration(end, estimate.step_s).split()[0] for end in ends)


def _run_lines(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a million tokens cost, and a whole run: days, GPU-hours, cost, energy, and with failures."""
    price = run.get("usd_per_million_tokens")
    lines = [] if price is None else [("cost", f"${price:,.3g} a million tokens")]
    if "tokens" not in run:
        return lines
    failing = run["with_failures"]
    num_failures = failing["num_failures"]

    def both(key: str, show: Callable[[float], str]) -> str:
        return f"{show(run[key])} ({show(failing[key])} with failures)"

    hours = with_prefix(run["gpu_hours"], "", 3)
    taken, with_them = long_duration(run["run_s"]), long_duration(failing["run_s"])
    size, every = with_prefix(failing["checkpoint_bytes"], "B"), duration(failing["checkpoint_every_s"])
    failures = f"{num_failures:{',.0f' if num_failures >= 10 else '.2g'}} failures"
    each = f"goodput {failing['goodput_frac']:.1%}, {failures}, a checkpoint of {size} every {every}"
    lines.append((f"{with_prefix(run['tokens'], '')} tokens", f"{taken}, {hours} GPU-hours"))
    lines.append(("with failures", f"{with_them} ({each})"))
    if "cost" in run:
        lines.append(("cost of the run", both("cost", dollars)))
    if "energy_joules" in run:
        energy = both("energy_joules", lambda joules: with_prefix(joules / 3600, "Wh"))
        lines.append(("energy", f"{energy}, {with_prefix(run['watts_per_gpu'], 'W', 3)} for each GPU"))
    if "co2_kg" in run:
        lines.append(("CO2", both("co2_kg", mass)))
    return lines


def stage_table(estimate: Estimate) -> Table | None:
    """What each kind of stage holds, and its times for one microbatch; None where there is one stage."""
    title, stages = "pipeline stages (one microbatch)", estimate.step.stages
    return None if len(stages) == 1 else replace(records_table(title, stages, TABLES["stages"]), left=())


def _title(estimate: Estimate) -> str:
    work = estimate.workload
    where = f"{estimate.cluster.num_chips} x {estimate.cluster.chip.name}"
    return f"{estimate.model.name} on {where}, {plan_words(estimate)}, batch {work.batch} x {work.seq}"


def plan_words(estimate: Estimate) -> str:
    return plan_text(estimate.plan) or DATA_PARALLEL


def _time(estimate: Estimate) -> plot.Chart:
    name, value = max(estimate.time_s.items(), key=lambda item: item[1])
    unit, axis = unit_of_work(estimate), plot.ChartAxis("time", "s")
    chart = plot.waterfall(f"Time of a {unit}", estimate.time_s, unit, duration, axis)
    interval = estimate.step_s_interval
    ends = [plot.Bound(end, color=plot.SUM_COLOR, line="dash") for end in interval]
    return replace(
        chart,
        marks=[*chart.marks, *ends],
        x=replace(chart.x, high=1.04 * interval.p90),
        finding=f"The largest part is {name}: {value / estimate.step_s:.0%} of the {unit} on rank "
        f"{estimate.pace_rank}, which sets the pace. 8 of 10 measured {unit}s end between the dashed lines "
        f"({between(estimate)}).",
    )


def _memory(estimate: Estimate) -> plot.Chart:
    parts, chip = dict(estimate.memory_bytes), estimate.cluster.chip
    total, capacity = parts.pop("total"), chip.memory_bytes
    name, value = max(parts.items(), key=lambda item: item[1])
    free = f"{with_prefix(capacity - total, 'B')} of {chip.name} is free"
    if not estimate.fits:
        free = f"{with_prefix(total - capacity, 'B')} more than {chip.name} has"
    title, axis = "Memory of the fullest rank", plot.ChartAxis("memory", "B")
    chart = plot.waterfall(title, parts, "peak", lambda size: with_prefix(size, "B"), axis)
    return replace(
        chart,
        marks=[*chart.marks, plot.Bound(capacity)],
        x=replace(chart.x, high=1.02 * max(total, capacity)),
        finding=f"The largest part is {name}: {value / total:.0%}; {free}. The red line is its capacity.",
    )


def _roofline(estimate: Estimate) -> plot.Chart:
    """The ops of one layer under the roofs; the longest of each kind are named."""
    chip, ops = estimate.cluster.chip, layer_ops(estimate)
    peaks = {dtype: chip.matrix_peak(dtype) for dtype in estimate.machine.by_dtype}
    rate, ridge = chip.memory_bytes_per_s, max(peaks.values()) / chip.memory_bytes_per_s
    intensity, reached = ops["flop"] / (ops["read_bytes"] + ops["write_bytes"]), ops["flop"] / ops["time_s"]
    area = ops["time_s"] / ops["time_s"].sum()
    marks: list[plot.Mark] = []
    for phase, (color, symbol) in _PHASES.items():
        mine = np.flatnonzero(ops["phase"] == phase)
        if mine.size:
            hints = [f"{ops['op'][i]}: {duration(ops['time_s'][i])}" for i in mine]
            look: Any = {"color": color, "symbol": symbol, "opacity": 0.75, "texts": hints, "line": ""}
            sizes = 7 + 30 * np.sqrt(area[mine])
            marks.append(plot.Series(intensity[mine], reached[mine], phase, size=sizes, **look))
    longest: dict[tuple[str, str], int] = {}
    for i in np.argsort(-area, kind="stable"):
        if area[i] >= _NAMED_FRAC:
            longest.setdefault((ops["op"][i], ops["phase"][i]), int(i))
    named = list(longest.values())
    texts = [op + " bwd" * (phase == "backward") for op, phase in longest]
    colors = [_PHASES[phase][0] for _, phase in longest]
    marks.append(plot.Names(intensity[named], reached[named], texts, colors))
    bound = sum(share for share, row in zip(area, ops.rows(), strict=True) if binds(row) == "memory")
    roofs = {f"{dtype}, {with_prefix(peak, 'FLOP/s')}": peak for dtype, peak in peaks.items()}
    chart = plot.roofline(
        "Roofline: the ops of one layer", marks, roofs, rate,
        (min(intensity.min(), ridge) / 2, 4 * max(intensity.max(), ridge)),
    )  # fmt: skip
    return replace(
        chart,
        finding=f"{bound:.0%} of the ops' time is bound by memory ({with_prefix(rate, 'B/s')}), the rest by "
        "compute; a mark's area is its time.",
        table=records_table("", ops.rows(), TABLES["roofline"], binds=binds),
    )


def layer_ops(estimate: Estimate) -> Ledger:
    """The ops (not the collectives) of the kind of layer that the model has most of, one microbatch."""
    model, ledger = estimate.model, estimate.layer()
    numbers = layer_counts(model)
    names = dict(zip(numbers, layer_names(model), strict=True))
    kind = names[max(numbers, key=lambda layer: (numbers[layer], layer.moe, not layer.window))]
    ops = _of_kind(ledger, kind).where(phase=list(_PHASES) if estimate.trains else "forward")
    return Ledger({name: column[ops["flop"] > 0] for name, column in ops.columns.items()})


def _pipeline(estimate: Estimate) -> Section | None:
    mesh, plan = estimate.mesh, estimate.plan
    if not estimate.trains or plan.pp == 1:
        return None
    num_all, every = int(mesh.num_microbatches), 2 * plan.pp
    num_drawn = min(num_all, max(NUM_SHOWN // (2 * plan.vpp) // every, 1) * every)
    if 2 * plan.pp * plan.vpp * num_drawn > MAX_ACTIONS:
        return Text("Pipeline", [f"{plan.pp} stages are too many to draw; use --trace for Perfetto"])
    timeline = play(estimate.step, num_microbatches=num_drawn, hop_s=float(estimate.step.hop_s))
    times = (np.arange(NUM_BINS) + 0.5) * timeline.makespan_s / NUM_BINS
    names = [f"stage {rank}" for rank in range(timeline.num_ranks)]
    busy = timeline.busy_s / timeline.makespan_s
    rows = [(name, f"{share:.1%}", f"{1 - share:.1%}") for name, share in zip(names, busy, strict=True)]
    title = f"Pipeline over time: {plan.schedule}"
    taken = duration(timeline.makespan_s)
    finding = f"Ranks compute {busy.mean():.0%} of the {taken} that the pipeline takes and wait in between"
    if num_drawn < num_all:
        title += f" with {num_drawn} of its {num_all:,} microbatches"
        bubble_frac = estimate.time_s["bubble"] / estimate.step_s
        finding += f" with {num_drawn} microbatches; with all, {bubble_frac:.1%} of the step is bubble"
    lanes = plot.Lanes(_timeline_bins(timeline, times), times, names, _ACTIONS)
    return plot.Chart(
        title, [lanes], plot.ChartAxis("time", "s"),
        finding=f"{finding}.", table=Table("", ("stage", "computes", "waits"), rows),
        height=min(110 + 22 * len(names), 700),
    )  # fmt: skip


def _timeline_bins(timeline: Timeline, moments: NDArray[np.float64]) -> NDArray[np.int64]:
    """The action (an index into `_ACTIONS`; the last is to wait) of each rank at some moments."""
    grid = np.full((timeline.num_ranks, len(moments)), len(_ACTIONS) - 1)
    for rank in range(timeline.num_ranks):
        mine = np.flatnonzero((timeline.rank == rank) & ~timeline.paired)
        at = np.searchsorted(timeline.start_s[mine], moments, side="right") - 1
        inside = (at >= 0) & (moments < timeline.end_s[mine][at])
        grid[rank, inside] = timeline.kind[mine][at[inside]]
    return grid


# --- the ops of a layer ---------------------------------------------------------------------------


def layer_totals(ledger: Ledger) -> dict[str, dict[str, float]]:
    """FLOP, bytes and seconds of each phase; `comm_frac` is the share of exposed communication."""
    return {phase: _totals(rows) for phase in PHASES if len(rows := ledger.where(phase=phase))}


def _totals(rows: Ledger) -> dict[str, float]:
    columns = ("flop", "read_bytes", "write_bytes", "saved_bytes", "payload_bytes", "time_s")
    totals = {name: rows.total(name) for name in columns}
    return totals | {"comm_frac": rows.total("exposed_s") / totals["time_s"] if totals["time_s"] else 0.0}


def layer_tables(estimate: Estimate) -> Iterator[Table]:
    """A table of each kind of layer and phase: what its ops do, what binds them, their time, and the sum."""
    model, ledger = estimate.model, estimate.layer()
    kinds = zip(layer_names(model), layer_counts(model).items(), strict=True)
    for (name, (kind, number)), phase in product(kinds, PHASES):
        ops = _of_kind(ledger, name).where(phase=phase)
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
        name += f", {number} of {model.num_layers}" * (number < model.num_layers)
        name += f", window {kind.window}" * (kind.window > 0)
        yield Table(f"{phase} of one {name}, one microbatch, one rank", columns, rows, left=columns[:2])


def _of_kind(ledger: Ledger, name: str) -> Ledger:
    """The ops of the kind of layer `name`."""
    return ledger.where(module=[module for module in ledger["module"] if module.partition(".")[0] == name])


def ledger_parts(ledger: Ledger) -> Iterator[Table]:
    """The columns of a ledger that say something, its names first."""
    ordered = sorted(ledger.used_columns(), key=lambda name: name not in ("module", "op", "phase"))
    columns = {name: f"<short({name})" if name in TEXT_COLUMNS else name for name in ordered}
    yield records_table("", ledger.rows(), columns, no_wrap=True)


def _cells(row: Mapping[str, Any], bound: str) -> tuple[str, ...]:
    flop, moved = row["flop"] or 0, (row["read_bytes"] or 0) + (row["write_bytes"] or 0)
    intensity = f"{flop / moved:{',.0f' if flop >= 100 * moved else '.3g'}}" if flop and moved else ""
    sizes = _number(flop), _number(row["payload_bytes"] or moved), intensity, _number(row["saved_bytes"])
    return *sizes, bound, duration(row["time_s"] or 0.0)


def _number(value: float | None) -> str:
    return with_prefix(value, "", 3) if value else ""


def binds(row: dict[str, Any]) -> str:
    """What binds an op: the links, memory or compute."""
    return "link" if row["collective"] else spent_on(row)


# --- two plans side by side -----------------------------------------------------------------------

COLUMNS = ("", "A", "B", "B - A", "change")


def compare_page(left: Estimate, right: Estimate) -> Page:
    """Two plans side by side, term by term."""
    names = [f"A: {', '.join(_apart(left, right))}", f"B: {', '.join(_apart(right, left))}"]
    if all(getattr(left, name) == getattr(right, name) for name in ("plan", "workload", "model", "cluster")):
        headline = "A and B are the same plan"
        return Page("; ".join(names), headline, [Text("A and B", [headline, *names])], left.fits)
    change = right.step_s / left.step_s - 1
    totals = left.memory_bytes["total"], right.memory_bytes["total"]
    rows = [
        _both(unit_of_work(right), left.step_s, right.step_s, duration),
        _both("tokens/s", left.tokens_per_s, right.tokens_per_s, lambda x: with_prefix(x, "")),
        _both("MFU [%]", 100 * left.mfu, 100 * right.mfu, lambda x: f"{x:.1f}"),
        _both("memory", *totals, lambda x: with_prefix(x, "B")),
    ]
    differs = f"{abs(change):.1%} {'more' if change > 0 else 'less'} than A"
    headline = (
        f"B takes {duration(right.step_s)} a {unit_of_work(right)}, {differs} ({duration(left.step_s)})"
    )
    fits = ("Neither fits.", "B fits, A does not.", "A fits, B does not.", "Both fit.")
    if left.workload.num_tokens != right.workload.num_tokens:
        change = right.tokens_per_s / left.tokens_per_s - 1
        rates = [with_prefix(one.tokens_per_s, "") for one in (right, left)]
        differs = f"{abs(change):.1%} {'more' if change > 0 else 'less'} than A ({rates[1]})"
        headline = f"B gives {rates[0]} tokens/s, {differs}, with another number of tokens a step"
    sections: list[Section] = [
        Text("A and B", [headline, fits[2 * left.fits + right.fits], *names]),
        Table("B against A", COLUMNS, rows),
        _bars(f"Time of a {unit_of_work(right)}, A and B", left.time_s, right.time_s, "s"),
        _bars("Memory, A and B", left.memory_bytes, right.memory_bytes, "B"),
    ]
    return Page("; ".join(names), headline, sections, left.fits and right.fits)


def _apart(one: Estimate, other: Estimate) -> list[str]:
    """The plan of `one`, and what else of its model, cluster and workload sets it apart from another."""
    is_edited = one.cluster.name == other.cluster.name

    def lines(of: Estimate) -> list[str]:
        cluster = cluster_text(of.cluster).splitlines() if is_edited else [of.cluster.name]
        return [of.model.name, *cluster, *(f"{name} {value}" for name, value in asdict(of.workload).items())]

    return [plan_words(one), *(line for line in lines(one) if line not in lines(other))]


def _both(name: str, a: float, b: float, show: Callable[[float], str]) -> tuple[str, ...]:
    return *pair_row(name, a, b, show), f"{b / a - 1:+.1%}" if a else ""


def _bars(title: str, left: dict[str, float], right: dict[str, float], unit: str) -> Chart:
    """The parts of A and B that differ most first; in the table as they are."""
    show = duration if unit == "s" else lambda value: with_prefix(value, "B")
    both = [(name, left[name], right[name]) for name in left if left[name] or right[name]]
    table = Table("", COLUMNS, [_both(*term, show) for term in both])
    terms = [term for term in both if term[0] != "total"]
    terms.sort(key=lambda term: -abs(term[2] - term[1]))
    names, *sides = zip(*terms, strict=True)
    bars = [
        Bars(names, values, [color] * len(terms), name=side)
        for side, values, color in zip("AB", sides, COLORS, strict=False)
    ]
    name, a, b = terms[0]
    finding = f"The largest difference is {name}: {show(a)} in A, {show(b)} in B."
    axis, height = ChartAxis("time" if unit == "s" else "memory", unit), 80 + 34 * len(terms)
    return Chart(title, bars, axis, finding=finding, table=table, height=height)
