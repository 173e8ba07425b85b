"""An estimate as a page: step, memory, the roofline of its ops, the pipeline over time; two side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.ledger import Ledger
from meshwise.core.units import duration, with_prefix
from meshwise.cost.simulate import Timeline
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.pipeline import play
from meshwise.model.architecture import layer_counts
from meshwise.plan.plan import plan_text
from meshwise.program.parts import layer_names
from meshwise.report.chart import (
    COLORS,
    SUM_COLOR,
    Bars,
    Bound,
    Chart,
    ChartAxis,
    Lanes,
    Mark,
    Names,
    Picture,
    Series,
    roofline,
    waterfall,
)
from meshwise.report.estimate_table import between, binds, figures, next_text, stage_table
from meshwise.report.html import Page, Section, Text
from meshwise.report.table import Table

MAX_ACTIONS = 20_000
"""A pipeline that cannot be shown with fewer actions is not drawn."""
_ACTIONS = {
    "forward": COLORS[0],
    "backward": COLORS[3],
    "input gradient": COLORS[3],
    "weight gradient": COLORS[2],
}
_PHASES: dict[str, tuple[str, Any]] = {
    "forward": (COLORS[0], "circle"), "backward": (COLORS[3], "triangle-up"),
}  # fmt: skip
"""Color and mark of an op on the roofline."""
_NAMED_FRAC = 0.01
"""An op with at least this share of the layer's time is named in a picture."""
NUM_BINS = 600
"""Moments that a timeline shows."""
NUM_SHOWN = NUM_BINS // 3
"""Actions of a stage that it can show."""


def estimate_page(estimate: Estimate) -> Page:
    """What one plan costs: time, memory, notes, the roofline of its ops, the pipeline over time."""
    page = summary_page(estimate)
    return replace(page, sections=[*page.sections, *op_sections(estimate)])


def summary_page(estimate: Estimate) -> Page:
    """What one plan costs: time, memory, notes."""
    sections: list[Section] = [
        _time(estimate), _memory(estimate), _figures(estimate), Text("Notes", estimate.notes()),
    ]  # fmt: skip
    return Page(_title(estimate), headline(estimate), sections, estimate.fits)


def op_sections(estimate: Estimate) -> list[Section]:
    """Where the time of one plan goes: the roofline of its ops, the pipeline over time, its stages."""
    stages = stage_table(estimate) if len(estimate.step.stages) > 1 else None
    following = next_text(estimate)
    tried = Text("Try next", [following]) if following else None
    sections = tried, _roofline(estimate), _pipeline(estimate), stages
    return [section for section in sections if section is not None]


def estimate_picture(estimate: Estimate) -> Picture:
    """Time, memory and roofline of one plan."""
    rows = [[_time(estimate), _memory(estimate)], [_roofline(estimate)]]
    rate = f"{estimate.tokens_per_s / estimate.cluster.num_chips:,.1f} tokens/s per GPU"
    shares = f"MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}"
    return Picture(rows, f"{_title(estimate)}\n{headline(estimate)}; {rate}, {shares}")


def headline(estimate: Estimate) -> str:
    """The answer in one sentence."""
    total, capacity = estimate.memory_bytes["total"], estimate.cluster.chip.memory_bytes
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    return (
        f"{duration(estimate.step_s)} a step ({between(estimate.step_s_interval)}), "
        f"{with_prefix(total, 'B')} of {with_prefix(capacity, 'B')}: {verdict}"
    )


def compare_page(left: Estimate, right: Estimate) -> Page:
    """Two plans side by side, term by term."""
    names = ("A: " + _words(left), "B: " + _words(right))
    if (left.plan, left.workload, left.model, left.cluster) == (
        right.plan, right.workload, right.model, right.cluster
    ):  # fmt: skip
        return Page("; ".join(names), "A and B are the same plan", [Text("A and B", names)], left.fits)
    change = right.step_s / left.step_s - 1
    totals = left.memory_bytes["total"], right.memory_bytes["total"]
    rows = [
        _both("step", left.step_s, right.step_s, duration),
        _both("tokens/s", left.tokens_per_s, right.tokens_per_s, lambda x: with_prefix(x, "")),
        _both("MFU", left.mfu, right.mfu, lambda x: f"{x:.1%}"),
        _both("memory", *totals, lambda x: with_prefix(x, "B")),
    ]
    terms = [_both(name, a, b, duration) for name, a, b in _terms(left.time_s, right.time_s)]
    held = [
        _both(name, a, b, lambda x: with_prefix(x, "B"))
        for name, a, b in _terms(left.memory_bytes, right.memory_bytes)
    ]
    columns = ("", "A", "B", "B - A", "change")
    differs = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} than A"
    headline = f"B takes {duration(right.step_s)} a step, {differs} ({duration(left.step_s)})"
    return Page(
        "; ".join(names),
        headline,
        [
            Text("A and B", [headline, _fits_text(left, right), *names]),
            Table("B against A", columns, rows),
            _bars("Time of a step, A and B", left.time_s, right.time_s, "s", Table("", columns, terms)),
            _bars("Memory, A and B", left.memory_bytes, right.memory_bytes, "B", Table("", columns, held)),
        ],
        left.fits and right.fits,
    )


def _fits_text(left: Estimate, right: Estimate) -> str:
    if left.fits == right.fits:
        return "Both fit." if left.fits else "Neither fits."
    return f"{'A' if left.fits else 'B'} fits, {'B' if left.fits else 'A'} does not."


def _title(estimate: Estimate) -> str:
    work = estimate.workload
    where = f"{estimate.cluster.num_chips} x {estimate.cluster.chip.name}"
    return f"{estimate.model.name} on {where}, {_words(estimate)}, batch {work.batch} x {work.seq}"


def _words(estimate: Estimate) -> str:
    return plan_text(estimate.plan) or "data parallel"


def _figures(estimate: Estimate) -> Table:
    work = estimate.workload
    done = f"{work.kind}, {work.batch} sequences of {work.seq} tokens, microbatch {work.microbatch}"
    columns = ("quantity", "value")
    return Table("Figures", columns, [*figures(estimate), ("work", done)], left=columns)


def _time(estimate: Estimate) -> Chart:
    name, value = max(estimate.time_s.items(), key=lambda item: item[1])
    chart, interval = waterfall("Time of a step", estimate.time_s, "step", duration), estimate.step_s_interval
    ends = [Bound(end, color=SUM_COLOR, line="dash") for end in interval]
    return replace(
        chart,
        marks=[*chart.marks, *ends],
        x=replace(chart.x, high=1.04 * interval.p90),
        finding=f"The largest part is {name}: {value / estimate.step_s:.0%} of the step on rank "
        f"{estimate.pace_rank}, which sets the pace. 8 of 10 measured steps end between the dashed lines "
        f"({between(interval)}).",
    )


def _memory(estimate: Estimate) -> Chart:
    parts, chip = dict(estimate.memory_bytes), estimate.cluster.chip
    total, capacity = parts.pop("total"), chip.memory_bytes
    name, value = max(parts.items(), key=lambda item: item[1])
    free = f"{with_prefix(capacity - total, 'B')} of {chip.name} is free"
    if not estimate.fits:
        free = f"{with_prefix(total - capacity, 'B')} more than {chip.name} has"
    chart = waterfall(
        "Memory of the fullest rank", parts, "peak", lambda size: with_prefix(size, "B"), unit="B"
    )
    return replace(
        chart,
        marks=[*chart.marks, Bound(capacity)],
        x=replace(chart.x, high=1.02 * max(total, capacity)),
        finding=f"The largest part is {name}: {value / total:.0%}; {free}. The red line is its capacity.",
    )


def _roofline(estimate: Estimate) -> Chart:
    """The ops of one layer under the roofs; the longest of each kind are named."""
    chip, ops = estimate.cluster.chip, layer_ops(estimate)
    peaks = {dtype: chip.matrix_peak(dtype) for dtype in estimate.machine.by_dtype}
    rate, ridge = chip.memory_bytes_per_s, max(peaks.values()) / chip.memory_bytes_per_s
    intensity, reached = ops["flop"] / (ops["read_bytes"] + ops["write_bytes"]), ops["flop"] / ops["time_s"]
    area = ops["time_s"] / ops["time_s"].sum()
    marks: list[Mark] = []
    for phase, (color, symbol) in _PHASES.items():
        mine = np.flatnonzero(ops["phase"] == phase)
        if mine.size:
            hints = [f"{ops['op'][i]}: {duration(ops['time_s'][i])}" for i in mine]
            look: Any = {"color": color, "symbol": symbol, "opacity": 0.75, "texts": hints, "line": ""}
            marks.append(
                Series(intensity[mine], reached[mine], phase, size=7 + 30 * np.sqrt(area[mine]), **look)
            )
    longest: dict[tuple[str, str], int] = {}
    for i in np.argsort(-area, kind="stable"):
        if area[i] >= _NAMED_FRAC:
            longest.setdefault((ops["op"][i], ops["phase"][i]), int(i))
    named = list(longest.values())
    texts = [op + " bwd" * (phase == "backward") for op, phase in longest]
    marks.append(Names(intensity[named], reached[named], texts, [_PHASES[phase][0] for _, phase in longest]))
    rows = [
        (row["op"], row["phase"], row["shape"], f"{x:.3g}", with_prefix(y, "FLOP/s"), duration(row["time_s"]),
         binds(row))
        for row, x, y in zip(ops.rows(), intensity, reached, strict=True)
    ]  # fmt: skip
    columns = ("op", "phase", "shape", "FLOP/byte", "reached", "time", "binds")
    bound = sum(share for share, row in zip(area, rows, strict=True) if row[-1] == "memory")
    roofs = {f"{dtype}, {with_prefix(peak, 'FLOP/s')}": peak for dtype, peak in peaks.items()}
    chart = roofline(
        "Roofline: the ops of one layer", marks, roofs, rate,
        (min(intensity.min(), ridge) / 2, 4 * max(intensity.max(), ridge)),
    )  # fmt: skip
    return replace(
        chart,
        finding=f"{bound:.0%} of the ops' time is bound by memory ({with_prefix(rate, 'B/s')}), the rest by "
        "compute; a mark's area is its time.",
        table=Table("", columns, rows, left=("phase", "shape", "binds")),
    )


def layer_ops(estimate: Estimate) -> Ledger:
    """The ops (not the collectives) of the kind of layer that the model has most of, one microbatch."""
    model, ledger = estimate.model, estimate.layer()
    numbers = layer_counts(model)
    names = dict(zip(numbers, layer_names(model), strict=True))
    kind = names[max(numbers, key=lambda layer: (numbers[layer], layer.moe, not layer.window))]
    of_kind = np.array([module.partition(".")[0] == kind for module in ledger["module"]])
    phases = list(_PHASES) if estimate.trains else ["forward"]
    keep = of_kind & (ledger["flop"] > 0) & np.isin(ledger["phase"], phases)
    return Ledger({name: column[keep] for name, column in ledger.columns.items()})


def _pipeline(estimate: Estimate) -> Section | None:
    mesh, plan = estimate.mesh, estimate.plan
    if not estimate.trains or plan.pp == 1:
        return None
    num_all, every = int(mesh.num_microbatches), 2 * plan.pp
    num_drawn = min(num_all, max(NUM_SHOWN // (2 * plan.vpp) // every, 1) * every)
    if 2 * plan.pp * plan.vpp * num_drawn > MAX_ACTIONS:
        return Text("Pipeline", [f"{plan.pp} stages are too many to draw; use --trace for Perfetto"])
    timeline = play(
        estimate.model, replace(mesh, num_microbatches=num_drawn), estimate.step, estimate.machine,
        hop_s=float(estimate.step.hop_s),
    )  # fmt: skip
    times = (np.arange(NUM_BINS) + 0.5) * timeline.makespan_s / NUM_BINS
    names = [f"stage {rank}" for rank in range(timeline.num_ranks)]
    busy = timeline.busy_s / timeline.makespan_s
    rows = [(name, f"{share:.1%}", f"{1 - share:.1%}") for name, share in zip(names, busy, strict=True)]
    title = f"Pipeline over time: {plan.schedule}"
    finding = (
        f"Ranks compute {busy.mean():.0%} of the {duration(timeline.makespan_s)} that the pipeline takes"
    )
    if num_drawn < num_all:
        title += f" with {num_drawn} of its {num_all:,} microbatches"
        bubble_frac = estimate.time_s["bubble"] / estimate.step_s
        finding += f" with {num_drawn} microbatches; with all, {bubble_frac:.1%} of the step is bubble"
    return Chart(
        title, [Lanes(timeline_bins(timeline, NUM_BINS), times, names, _ACTIONS)], ChartAxis(unit="s"),
        finding=f"{finding}.", table=Table("", ("stage", "computes", "waits"), rows),
        height=min(110 + 22 * len(names), 700),
    )  # fmt: skip


def timeline_bins(timeline: Timeline, num_bins: int) -> NDArray[np.int64]:
    """The action (an index into `_ACTIONS`) of each rank at `num_bins` moments; -1 where it waits."""
    moments = (np.arange(num_bins) + 0.5) * timeline.makespan_s / num_bins
    grid = np.full((timeline.num_ranks, num_bins), -1)
    for rank in range(timeline.num_ranks):
        mine = np.flatnonzero((timeline.rank == rank) & ~timeline.paired)
        at = np.searchsorted(timeline.start_s[mine], moments, side="right") - 1
        inside = (at >= 0) & (moments < timeline.end_s[mine][at])
        grid[rank, inside] = timeline.kind[mine][at[inside]]
    return grid


def _terms(left: dict[str, float], right: dict[str, float]) -> list[tuple[str, float, float]]:
    return [(name, left[name], right[name]) for name in left if left[name] or right[name]]


def _both(name: str, a: float, b: float, show: Any) -> tuple[str, ...]:
    sign = "-" if b < a else "+"
    return (name, show(a), show(b), f"{sign}{show(abs(b - a))}", f"{b / a - 1:+.1%}" if a else "")


def _bars(title: str, left: dict[str, float], right: dict[str, float], unit: str, table: Table) -> Chart:
    terms = [term for term in _terms(left, right) if term[0] != "total"]
    terms.sort(key=lambda term: -abs(term[2] - term[1]))
    names = [term[0] for term in terms]
    bars = [
        Bars(names, [term[i] for term in terms], [color] * len(terms), name=side)
        for side, i, color in (("A", 1, COLORS[0]), ("B", 2, COLORS[1]))
    ]
    name, a, b = max(terms, key=lambda term: abs(term[2] - term[1]))
    show = duration if unit == "s" else lambda value: with_prefix(value, "B")
    finding = f"The largest difference is {name}: {show(a)} in A, {show(b)} in B."
    return Chart(title, bars, ChartAxis(unit=unit), finding=finding, table=table, height=80 + 34 * len(terms))
