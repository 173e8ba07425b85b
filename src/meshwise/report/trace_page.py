"""The traces of a job as a page: findings, ranks over time, what would shorten it, memory, rates, tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwise.core.units import duration, with_prefix
from meshwise.machine.hardware import Cluster
from meshwise.report.html import Chart, Page, Section, Text, lanes
from meshwise.report.trace_details import (
    bandwidth_tables,
    launch_tables,
    memory_tables,
    path_tables,
    rate_tables,
)
from meshwise.report.trace_plot import PART_COLORS, common_span, shares
from meshwise.report.trace_table import summary_tables
from meshwise.trace.bandwidths import bandwidths
from meshwise.trace.critical_path import critical_path
from meshwise.trace.launches import stream_launches
from meshwise.trace.memory import memory_peaks, timeline
from meshwise.trace.op_rates import op_rates
from meshwise.trace.partition import PARTS
from meshwise.trace.summary import Summary

NUM_BINS = 800
MOST_ROWS = 30
MOST_POINTS = 2000
MOST_LINES = 16


def trace_page(summary: Summary, cluster: Cluster | None = None) -> Page:
    """What the ranks of a job did, and why the slow one is slow; rates beside the peaks of `cluster`."""
    findings = [one.text for one in summary.findings]
    problems = [f"{one.file + ': ' if one.file else ''}{one.reason}" for one in summary.problems]
    clocks = f"clocks aligned by {summary.alignment.method}"
    sections: list[Section] = [Text("Findings", findings)] if findings else []
    sections += [_ranks(summary)] if summary.partitions else []
    sections += path_tables(critical_path(summary), limit=MOST_ROWS)
    sections += _memory(summary)
    sections += _rates(summary, cluster)
    if launched := stream_launches(summary.traces):
        sections += launch_tables(launched, limit=MOST_ROWS)
    sections += [
        *summary_tables(summary, limit=MOST_ROWS),
        Text("Notes", [clocks, *problems]),
    ]
    headline = findings[0] if findings else "no rank, link or cause stands out"
    return Page(f"{len(summary.traces)} ranks", headline, sections, bool(summary.traces))


def _ranks(summary: Summary) -> Chart:
    offsets = [summary.alignment.offsets_ns[one.rank] for one in summary.partitions]
    begin, end = common_span(summary.partitions, offsets)
    edges = begin + np.linspace(0, end - begin, NUM_BINS + 1).astype(np.int64)
    grid = []
    for one, offset in zip(summary.partitions, offsets, strict=True):
        share = shares(one, edges + offset)
        grid.append(np.where(share.sum(axis=0) > 0, share.argmax(axis=0), -1))
    times = ((edges[1:] + edges[:-1]) / 2 - begin) / 1e9
    names = [f"rank {one.rank}" for one in summary.partitions]
    idle = {one.rank: one.seconds["idle"] for one in summary.partitions}
    most = max(idle, key=lambda rank: idle[rank])
    layout = {
        "xaxis": {"title": {"text": "seconds on the common clock"}, "showgrid": False},
        "yaxis": {"autorange": "reversed", "type": "category", "showgrid": False},
    }
    finding = f"Each moment shows what fills most of it; rank {most} is idle longest, {duration(idle[most])}."
    data = lanes(np.array(grid), times, names, {part: PART_COLORS[part] for part in PARTS})
    return Chart("Ranks over time", data, layout, finding, height=min(140 + 20 * len(names), 900))


def _memory(summary: Summary) -> list[Section]:
    """The peaks, and the allocated bytes of each rank over time: of the device that holds most."""
    peaks = memory_peaks(summary.traces)
    if not peaks:
        return []
    most = max(peaks, key=lambda one: one.peak_bytes)
    offsets = summary.alignment.offsets_ns
    device = -1 if most.device == "host" else int(most.device.split()[1])
    lines = {trace.rank: timeline(trace, device) for trace in summary.traces[:MOST_LINES]}
    origin = min(int(time[0]) - offsets[rank] for rank, (time, _) in lines.items() if len(time))
    data = [
        {
            "type": "scatter", "mode": "lines", "line": {"shape": "hv", "width": 1}, "name": f"rank {rank}",
            "x": (time - offsets[rank] - origin)[:: 1 + len(time) // MOST_POINTS] / 1e9,
            "y": total[:: 1 + len(time) // MOST_POINTS],
        }
        for rank, (time, total) in lines.items()
    ]  # fmt: skip
    layout = {"xaxis": {"title": {"text": "seconds"}}, "yaxis": {"tickformat": "~s", "ticksuffix": "B"}}
    text = (
        f"The largest peak, {with_prefix(most.peak_bytes, 'B')}, is on rank {most.rank} in {most.operator}."
    )
    chart = Chart("Memory over time", data, layout, text)
    return [chart, *(memory_tables(peaks, limit=MOST_ROWS))]


def _rates(summary: Summary, cluster: Cluster | None) -> list[Section]:
    """What operators and collectives reach, and the operators under the roof of the chip."""
    sections: list[Section] = []
    rates = op_rates(summary.traces, cluster.chip if cluster else None)
    points = [one for one in rates if one.flop]
    if points:
        intensity = [one.flop / one.bytes for one in points]
        area = np.sqrt([one.total_s for one in points])
        data: list[dict[str, Any]] = [{
            "type": "scatter", "mode": "markers", "name": "operators", "x": intensity,
            "y": [one.flop_per_s for one in points], "marker": {"size": 6 + 20 * area / area.max()},
            "text": [f"{one.op} {one.shape} {one.dtype}" for one in points],
        }]  # fmt: skip
        if cluster:
            along = np.geomspace(min(intensity) / 2, max(intensity) * 2, 60)
            for dtype in dict.fromkeys(one.dtype for one in points):
                peak = cluster.chip.matrix_flop_per_s.get(dtype) or cluster.chip.vector_flop_per_s.get(dtype)
                if peak:
                    roof = np.minimum(peak, along * cluster.chip.memory_bytes_per_s)
                    name = f"{cluster.chip.name}, {dtype}"
                    data.append({"type": "scatter", "mode": "lines", "name": name, "x": along, "y": roof})
        layout = {
            "xaxis": {"type": "log", "title": {"text": "FLOP a byte"}},
            "yaxis": {"type": "log", "title": {"text": "FLOP/s"}},
        }
        text = "The larger a point, the longer all calls of the operator took."
        sections.append(Chart("Matmuls and attention under the roofline", data, layout, text, height=380))
    if rates:
        sections += rate_tables(rates, limit=MOST_ROWS)
    if wires := bandwidths(summary.collectives, cluster):
        sections += bandwidth_tables(wires, limit=MOST_ROWS)
    return sections
