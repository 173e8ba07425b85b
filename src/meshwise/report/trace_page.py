"""The traces of a job as a page: findings, ranks over time, what would shorten it, memory, rates, tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwise.core.files import read_catalog
from meshwise.core.units import duration, with_prefix
from meshwise.machine.hardware import Cluster
from meshwise.report import trace_table as tables
from meshwise.report.answer import Page, Section, Text
from meshwise.report.chart import COLORS, Bars, Chart, ChartAxis, Lanes, Picture, Series, roofline
from meshwise.report.trace_table import summary_parts as parts
from meshwise.trace.breakdown import PARTS
from meshwise.trace.critical_path import critical_path
from meshwise.trace.intervals import covered
from meshwise.trace.memory import memory_peaks, timeline
from meshwise.trace.rates import bandwidths, op_rates
from meshwise.trace.summary import Summary

__all__ = ["page", "parts", "picture"]

PARTS_COLORS = dict(zip(PARTS, ("#3d7ab5", "#f0a13a", "#8e6bbf", "#d7503f", "#e9e9e9"), strict=True))
_LATE = (-np.inf, -1e9, 0.02, 0.05, 0.1, 0.2, 0.5)
_LATE_COLORS: dict[str, str] = read_catalog("words.toml")["lateness_colors"]
_MOST_LANES = 64
NUM_BINS = 1200
_NUM_FINDINGS = 3
MOST_ROWS = 30
MOST_POINTS = 2000
MOST_LINES = 16


def page(summary: Summary, cluster: Cluster | None = None) -> Page:
    """What the ranks of a job did, and why the slow one is slow; rates beside the peaks of `cluster`."""
    others = [one.text for one in summary.findings[1:]]
    sections: list[Section] = [Text("Findings", others)] if others else []
    sections += _over_time(summary) if summary.partitions else []
    if summary.has_all_ranks:
        sections += tables.path_tables(critical_path(summary), limit=MOST_ROWS)
    sections += _memory(summary)
    sections += _rates(summary, cluster)
    sections += tables.summary_tables(summary, limit=MOST_ROWS)
    sections.append(Text("Notes", [tables.clocks_text(summary), *(one.text for one in summary.problems)]))
    title, first = f"{len(summary.traces)} ranks", tables.headline(summary.findings)
    return Page(title, first, sections, bool(summary.traces))


def _over_time(summary: Summary) -> list[Section]:
    """All ranks over time; of many, how late each is in each step, and the worst over time."""
    if len(summary.partitions) <= tables.MANY_RANKS:
        return [_ranks(summary)]
    worst = summary.of_ranks(summary.worst(MOST_LINES))
    return [*_late_in_steps(summary), _ranks(worst)]


def _late_in_steps(summary: Summary) -> list[Chart]:
    """A map of ranks against steps: by how much of a step each works longer than the median rank.

    Work is the span of a step but for exposed communication. A row of several ranks shows the latest.
    """
    ranks = [one.rank for one in summary.partitions]
    numbers = sorted({step.number for step in summary.steps})
    if len(numbers) < 2:
        return []
    row, column = ({one: i for i, one in enumerate(of)} for of in (ranks, numbers))
    work, span = np.full((2, len(ranks), len(numbers)), np.nan)
    for step in summary.steps:
        at, done = (row[step.breakdown.rank], column[step.number]), step.breakdown
        work[at], span[at] = done.span_s - done.exposed_communication_s, done.span_s
    usual = np.nanmedian(work, axis=0)
    late_frac = np.nan_to_num((work - usual) / np.nanmedian(span), nan=-np.inf)
    each = -(-len(ranks) // _MOST_LANES)
    first = np.arange(0, len(ranks), each)
    shown = np.digitize(np.maximum.reduceat(late_frac, first), _LATE) - 1
    blocks = [ranks[i : i + each] for i in first.tolist()]
    names = _rank_names(summary, blocks)
    most = np.unravel_index(int(late_frac.argmax()), late_frac.shape)
    finding = (
        f"Work beyond that of the median rank in the same step, as a share of a step; rank {ranks[most[0]]} "
        f"works {late_frac[most]:.0%} of a step longer in step {numbers[most[1]]}."
    )
    lanes = Lanes(shown, np.array(numbers, dtype=float), names, _LATE_COLORS)
    axis, height = ChartAxis("step"), min(160 + 12 * len(names), 900)
    return [Chart("Ranks against steps", [lanes], axis, finding=finding, height=height)]


def _ranks(summary: Summary) -> Chart:
    """What fills most of each moment of each rank; the ranks that a finding names are marked."""
    offsets = summary.alignment.offsets_ns
    done = [(one.spans, offsets[one.rank]) for one in summary.intervals()]
    parts = [(span, offset) for spans, offset in done for span in spans.values() if len(span[0])]
    bounds = [(starts[0] - offset, ends[-1] - offset) for (starts, ends), offset in parts]
    begin, end = min((b[0] for b in bounds), default=0), max((b[1] for b in bounds), default=1)
    edges = begin + np.linspace(0, end - begin, NUM_BINS + 1).astype(np.int64)
    grid = []
    for spans, offset in done:
        filled = np.array([np.diff(covered(spans[part], edges + offset)) for part in PARTS])
        grid.append(np.where(filled.sum(axis=0) > 0, filled.argmax(axis=0), -1))
    times = ((edges[1:] + edges[:-1]) / 2 - begin) / 1e9
    idle = {one.rank: one.seconds["idle"] for one in summary.partitions}
    most = max(idle, key=lambda rank: idle[rank])
    lanes = Lanes(np.array(grid), times, _rank_names(summary), PARTS_COLORS)
    finding = f"Each moment shows what fills most of it; rank {most} is idle longest, {duration(idle[most])}."
    height = min(120 + 20 * len(lanes.names), 900)
    axis, title = ChartAxis("on the common clock", "s"), "Ranks over time"
    return Chart(title, [lanes], axis, finding=finding, height=height)


def _rank_names(summary: Summary, blocks: Sequence[Sequence[int]] = ()) -> list[str]:
    """The names of the ranks (or of blocks of them), with an arrow before those that a finding names."""
    ranks = [(one.rank,) for one in summary.partitions]
    named = {rank for one in summary.findings if len(one.ranks) < len(ranks) for rank in one.ranks}
    texts = ((of, f"rank {of[0]}" + f"-{of[-1]}" * (len(of) > 1)) for of in blocks or ranks)
    return ["▸ " * (not named.isdisjoint(of)) + text for of, text in texts]


def picture(summary: Summary) -> Picture:
    """All ranks over time, and beside them how long each did what in sum, under the first findings.

    Of many ranks, how late each is in each step, and the worst over time.
    """
    lines = [one.text for one in summary.findings[:_NUM_FINDINGS]] or [tables.NOTHING]
    title = "\n".join(map(tables.sentence, lines))
    if len(summary.partitions) > tables.MANY_RANKS:
        return Picture([[chart] for chart in _over_time(summary) if isinstance(chart, Chart)], title)
    lanes, parts = _ranks(summary), [one.seconds for one in summary.partitions]
    names, starts, bars = _rank_names(summary), np.zeros(len(parts)), []
    for part, color in PARTS_COLORS.items():
        seconds = np.array([of[part] for of in parts])
        bars.append(Bars(names, seconds, [color] * len(parts), starts.copy()))
        starts += seconds
    sums = Chart("In sum", bars, ChartAxis("time", "s"), height=lanes.height)
    return Picture([[lanes, sums]], title, (3.5, 1.0))


def _memory(summary: Summary) -> list[Section]:
    """The peaks, and the allocated bytes of each rank over time: of the device that holds most."""
    peaks = memory_peaks(summary.traces)
    if not peaks:
        return []
    most = max(peaks, key=lambda one: one.peak_bytes)
    offsets = summary.alignment.offsets_ns
    device = -1 if most.device == "host" else int(most.device.split()[1])
    lines = {trace.rank: timeline(trace, device) for trace in itertools.islice(summary.traces, MOST_LINES)}
    origin = min(int(time[0]) - offsets[rank] for rank, (time, _) in lines.items() if len(time))
    marks = [
        Series(
            (time - offsets[rank] - origin)[:: 1 + len(time) // MOST_POINTS] / 1e9,
            total[:: 1 + len(time) // MOST_POINTS], f"rank {rank}", color, steps=True,
        )
        for (rank, (time, total)), color in zip(lines.items(), itertools.cycle(COLORS), strict=False)
    ]  # fmt: skip
    peak = with_prefix(most.peak_bytes, "B")
    text = f"The largest peak, {peak}, is on rank {most.rank} in {most.operator}."
    chart = Chart("Memory over time", marks, ChartAxis("time", "s"), ChartAxis("allocated", "B"), text)
    return [chart, *(tables.memory_tables(peaks, limit=MOST_ROWS))]


def _rates(summary: Summary, cluster: Cluster | None) -> list[Section]:
    """What operators and collectives reach, and the operators under the roof of the chip."""
    sections: list[Section] = []
    rates = op_rates(summary.traces, cluster.chip if cluster else None)
    points = [one for one in rates if one.flop]
    if points:
        intensity = [one.flop / one.bytes for one in points]
        area = np.sqrt([one.total_s for one in points])
        operators = Series(
            intensity, [one.flop_per_s for one in points], "operators", line="",
            size=6 + 20 * area / area.max(), texts=[f"{one.op} {one.shape} {one.dtype}" for one in points],
        )  # fmt: skip
        chip = cluster.chip if cluster else None
        peaks = {
            f"{chip.name}, {dtype}": peak
            for dtype in dict.fromkeys(one.dtype for one in points)
            if chip and (peak := chip.matrix_flop_per_s.get(dtype) or chip.vector_flop_per_s.get(dtype))
        }
        ends = min(intensity) / 2, max(intensity) * 2
        title, rate = "Matmuls and attention under the roofline", chip.memory_bytes_per_s if chip else 1.0
        text = "The larger a point, the longer all calls of the operator took."
        sections.append(replace(roofline(title, [operators], peaks, rate, ends), finding=text))
    if rates:
        sections += tables.rate_tables(rates, limit=MOST_ROWS)
    if wires := bandwidths(summary.collectives, cluster):
        sections += tables.bandwidth_tables(wires, limit=MOST_ROWS)
    return sections
