"""The traces of a job as a page: findings, all ranks over time, their time by kind, kernels, collectives."""

from __future__ import annotations

import numpy as np

from meshwise.core.units import duration
from meshwise.report.html import Chart, Page, Section, Table, Text, lanes
from meshwise.report.trace_plot import PART_COLORS, common_span, shares
from meshwise.trace.partition import PARTS
from meshwise.trace.summary import Summary

NUM_BINS = 800
MOST_ROWS = 30


def trace_page(summary: Summary) -> Page:
    """What the ranks of a job did, and why the slow one is slow."""
    findings = [one.text for one in summary.findings]
    columns = ("rank", "span", *PARTS)
    rows = [
        (str(parts.rank), duration(rank.span_s), *(duration(parts.seconds[part]) for part in PARTS))
        for rank, parts in zip(summary.ranks, summary.partitions, strict=True)
    ]
    kernels = [
        (one.name, f"{one.count:,}", duration(one.total_s), duration(one.mean_s))
        for one in summary.kernels[:MOST_ROWS]
    ]
    waited = sorted(summary.collectives, key=lambda one: -sum(one.wait_s.values()))[:MOST_ROWS]
    collectives = [
        (
            one.name, str(one.index), duration(one.wire_s), duration(sum(one.wait_s.values())),
            str(one.last_rank),
        )
        for one in waited
    ]  # fmt: skip
    of_calls = ("collective", "call", "on the wire", "waits", "last rank")
    problems = [f"{one.file + ': ' if one.file else ''}{one.reason}" for one in summary.problems]
    clocks = f"clocks aligned by {summary.alignment.method}"
    sections: list[Section] = [Text("Findings", findings)] if findings else []
    sections += [_ranks(summary)] if summary.partitions else []
    sections += [
        Table("Time of each rank", columns, rows),
        Table("Kernels", ("kernel", "calls", "total", "mean"), kernels),
        Table("Collectives, longest waits first", of_calls, collectives),
        Text("Notes", [clocks, *problems]),
    ]
    headline = findings[0] if findings else "no rank, link or cause stands out"
    return Page(f"{len(summary.traces)} ranks", headline, sections, bool(summary.traces))


def _ranks(summary: Summary) -> Chart:
    offsets = [summary.alignment.offsets_ns[one.rank] for one in summary.partitions]
    begin, end = common_span(summary.partitions, offsets)
    edges = np.linspace(begin, end, NUM_BINS + 1)
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
