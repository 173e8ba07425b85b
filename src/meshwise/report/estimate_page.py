"""An estimate as a page: step, memory, the roofline of its ops, the pipeline over time; two side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import duration, with_prefix
from meshwise.cost.simulate import Timeline
from meshwise.estimate.pipeline import play
from meshwise.estimate.single import Estimate
from meshwise.plan.plan import plan_text
from meshwise.report.estimate_plot import layer_ops
from meshwise.report.estimate_table import between, binds, stage_table
from meshwise.report.html import COLORS, LIMIT_COLOR, Chart, Page, Section, Text, lanes, waterfall
from meshwise.report.table import Table

MAX_ACTIONS = 20_000
"""A pipeline that cannot be shown with fewer actions is not drawn."""
_ACTIONS = {
    "forward": COLORS[0],
    "backward": COLORS[3],
    "input gradient": COLORS[3],
    "weight gradient": COLORS[2],
}
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
    sections = _roofline(estimate), _pipeline(estimate), stages
    return [section for section in sections if section is not None]


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
    change = right.step_s / left.step_s - 1
    rows = [_both(name, a, b, duration) for name, a, b in _terms(left.time_s, right.time_s)]
    rows += [
        _both("step", left.step_s, right.step_s, duration),
        _both("tokens/s", left.tokens_per_s, right.tokens_per_s, lambda x: with_prefix(x, "")),
        _both("MFU", left.mfu, right.mfu, lambda x: f"{x:.1%}"),
    ]
    held = [
        _both(name, a, b, lambda x: with_prefix(x, "B"))
        for name, a, b in _terms(left.memory_bytes, right.memory_bytes)
    ]
    names = ("A: " + _words(left), "B: " + _words(right))
    columns = ("", "A", "B", "B - A", "change")
    differs = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} than A"
    headline = f"B takes {duration(right.step_s)} a step, {differs} ({duration(left.step_s)})"
    return Page(
        "; ".join(names),
        headline,
        [
            Text("A and B", [headline, *names]),
            _bars("Time of a step, A and B", left.time_s, right.time_s, "s", Table("", columns, rows)),
            _bars("Memory, A and B", left.memory_bytes, right.memory_bytes, "B", Table("", columns, held)),
        ],
        left.fits and right.fits,
    )


def _title(estimate: Estimate) -> str:
    work = estimate.workload
    where = f"{estimate.cluster.num_chips} x {estimate.cluster.chip.name}"
    return f"{estimate.model.name} on {where}, {_words(estimate)}, batch {work.batch} x {work.seq}"


def _words(estimate: Estimate) -> str:
    return plan_text(estimate.plan) or "data parallel"


def _figures(estimate: Estimate) -> Table:
    work, chips = estimate.workload, estimate.cluster.num_chips
    rows = [
        ("tokens/s", f"{with_prefix(estimate.tokens_per_s, '')} ({estimate.tokens_per_s / chips:.4g} a GPU)"),
        ("MFU / HFU", f"{estimate.mfu:.1%} / {estimate.hfu:.1%}"),
        ("model FLOP", f"{with_prefix(estimate.flop_per_step, 'FLOP')} a step"),
        ("ranks", f"{chips}: " + " x ".join(_degrees(estimate))),
        ("work", f"{work.kind}, {work.batch} sequences of {work.seq} tokens, microbatch {work.microbatch}"),
    ]
    return Table("Figures", ("quantity", "value"), rows, left=("quantity", "value"))


def _degrees(estimate: Estimate) -> list[str]:
    return [f"{axis}={int(getattr(estimate.mesh, axis))}" for axis in ("tp", "cp", "pp", "dp")]


def _time(estimate: Estimate) -> Chart:
    parts = [(name, value, duration(value)) for name, value in estimate.time_s.items()]
    name, value = max(estimate.time_s.items(), key=lambda item: item[1])
    return waterfall(
        "Time of a step", parts, duration(estimate.step_s),
        finding=f"The largest part is {name}: {value / estimate.step_s:.0%} of the step on rank "
        f"{estimate.pace_rank}, which sets the pace.",
        layout={"xaxis": {"ticksuffix": " s", "range": [0, 1.02 * estimate.step_s]}},
    )  # fmt: skip


def _memory(estimate: Estimate) -> Chart:
    held, capacity = dict(estimate.memory_bytes), estimate.cluster.chip.memory_bytes
    total = held.pop("total")
    name, value = max(held.items(), key=lambda item: item[1])
    parts = [(part, size, with_prefix(size, "B")) for part, size in held.items()]
    line = {"type": "line", "x0": capacity, "x1": capacity, "yref": "paper", "y0": 0, "y1": 1}
    free = f"{with_prefix(capacity - total, 'B')} of {estimate.cluster.chip.name} is free"
    if not estimate.fits:
        free = f"{with_prefix(total - capacity, 'B')} more than {estimate.cluster.chip.name} has"
    return waterfall(
        "Memory of the fullest rank", parts, with_prefix(total, "B"),
        finding=f"The largest part is {name}: {value / total:.0%}; {free}. The red line is its capacity.",
        layout={
            "shapes": [line | {"line": {"color": LIMIT_COLOR, "width": 2}}],
            "xaxis": {"ticksuffix": "B", "tickformat": "~s", "range": [0, 1.02 * max(total, capacity)]},
        },
    )  # fmt: skip


def _roofline(estimate: Estimate) -> Chart:
    chip, ops = estimate.cluster.chip, layer_ops(estimate)
    peak, rate = max(map(chip.matrix_peak, estimate.machine.by_dtype)), chip.memory_bytes_per_s
    intensity, reached = ops["flop"] / (ops["read_bytes"] + ops["write_bytes"]), ops["flop"] / ops["time_s"]
    ridge = peak / rate
    ends = [min(intensity.min(), ridge) / 2, ridge, 4 * max(intensity.max(), ridge)]
    roof = {
        "type": "scatter", "mode": "lines", "name": "roof", "x": ends, "y": [ends[0] * rate, peak, peak],
        "line": {"color": COLORS[7]}, "hoverinfo": "skip",
    }  # fmt: skip
    marks = []
    area = ops["time_s"] / ops["time_s"].sum()
    for phase, color in (("forward", COLORS[0]), ("backward", COLORS[3])):
        mine = np.flatnonzero(ops["phase"] == phase)
        if mine.size:
            marks.append(
                {
                    "type": "scatter", "mode": "markers", "name": phase,
                    "x": intensity[mine], "y": reached[mine],
                    "text": [f"{ops['op'][i]}: {duration(ops['time_s'][i])}" for i in mine],
                    "hovertemplate": "%{text}<br>%{x:.3g} FLOP/B, %{y:.3s}FLOP/s<extra></extra>",
                    "marker": {"color": color, "size": 7 + 30 * np.sqrt(area[mine])},
                }
            )  # fmt: skip
    rows = [
        (
            row["op"],
            row["phase"],
            row["shape"],
            f"{x:.3g}",
            with_prefix(y, "FLOP/s"),
            duration(row["time_s"]),
            binds(row),
        )
        for row, x, y in zip(ops.rows(), intensity, reached, strict=True)
    ]
    columns = ("op", "phase", "shape", "FLOP/byte", "reached", "time", "binds")
    bound = sum(share for share, row in zip(area, rows, strict=True) if row[-1] == "memory")
    return Chart(
        "Roofline: the ops of one layer", [roof, *marks],
        {
            "xaxis": {"type": "log", "title": {"text": "FLOP/byte"}, "tickformat": "~s"},
            "yaxis": {"type": "log", "title": {"text": "FLOP/s"}, "tickformat": "~s"},
        },
        f"{bound:.0%} of the ops' time is bound by memory, the rest by compute; a mark's area is its time.",
        Table("", columns, rows, left=("phase", "shape", "binds")), 380,
    )  # fmt: skip


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
    grid = timeline_bins(timeline, NUM_BINS)
    times = (np.arange(NUM_BINS) + 0.5) * timeline.makespan_s / NUM_BINS
    names = [f"stage {rank}" for rank in range(timeline.num_ranks)]
    busy = timeline.busy_s / timeline.makespan_s
    rows = [(name, f"{share:.1%}", f"{1 - share:.1%}") for name, share in zip(names, busy, strict=True)]
    look = {
        "xaxis": {"title": {"text": "seconds"}, "showgrid": False},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
    }
    title = f"Pipeline over time: {plan.schedule}"
    finding = (
        f"Ranks compute {busy.mean():.0%} of the {duration(timeline.makespan_s)} that the pipeline takes"
    )
    if num_drawn < num_all:
        title += f" with {num_drawn} of its {num_all:,} microbatches"
        bubble_frac = estimate.time_s["bubble"] / estimate.step_s
        finding += f" with {num_drawn} microbatches; with all, {bubble_frac:.1%} of the step is bubble"
    return Chart(
        title, lanes(grid, times, names, _ACTIONS), look, f"{finding}.",
        Table("", ("stage", "computes", "waits"), rows), min(130 + 22 * len(names), 700),
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
    data = [
        {
            "type": "bar", "orientation": "h", "name": side,
            "y": [t[0] for t in terms], "x": [t[i] for t in terms],
            "marker": {"color": color},
        }
        for side, i, color in (("A", 1, COLORS[0]), ("B", 2, COLORS[1]))
    ]  # fmt: skip
    name, a, b = max(terms, key=lambda term: abs(term[2] - term[1]))
    show = duration if unit == "s" else lambda value: with_prefix(value, "B")
    finding = f"The largest difference is {name}: {show(a)} in A, {show(b)} in B."
    layout = {
        "barmode": "group", "xaxis": {"ticksuffix": unit, "tickformat": "~s"},
        "yaxis": {"autorange": "reversed"},
    }  # fmt: skip
    return Chart(title, data, layout, finding, table, 80 + 34 * len(terms))
