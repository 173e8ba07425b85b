"""The cluster that a job has shown: rates of its traces as a cluster file (`meshwise calibrate --from DIR`).

The matrix rate of a dtype is the FLOP of all matmuls and attention in it over the median time of each size,
the memory rate the same of elementwise operators. Bandwidth and latency of a link are fitted to the times
from the entry of a collective's last rank to the exit of the last, which add up to what a step pays where
ranks leave one after the other (gloo); where hosts of several ranks meet, groups inside a host give the inner
link (a copy's rate stands in where there are none) and the others, whose members on one host share its way
out, the outer one. Where a link carries no large collective, messages between stages tell its bandwidth.
Calls of one size do not tell the latency, and that of presets stands in; the names of links say what is
assumed. On ranks without a device, the time in which nothing of this ran (dispatch, small operators, late
ranks) is what the host adds to each matrix op. Traces that show a rate only a few times, or whose calls
differ too much for a median, are refused.
"""

import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from meshwise.calibrate.cluster_file import Calibration, Sample, fit_link, measured_cluster
from meshwise.core.columns import grouped
from meshwise.core.errors import DataError
from meshwise.core.ledger import COLLECTIVES, Collective
from meshwise.core.refusals import refuse
from meshwise.cost.collective import carried_out, collective_s
from meshwise.machine.hardware import Level, Link
from meshwise.trace.collectives import Collective as Seen
from meshwise.trace.events import Trace
from meshwise.trace.rates import Bandwidth, OpRate, bandwidths, op_rates
from meshwise.trace.summary import Summary, summarize_paths

_MIN_CALLS = 5
_MAX_SPREAD_FRAC = 0.25
"""Of elementwise calls: beyond it they went into fresh pages."""
_MAX_ERROR_FRAC, _ERROR_OF_MEDIAN = 0.1, 1.86
"""Standard error of a rate, and that of a median over (median distance / sqrt(calls)) for normal noise."""
_MAX_LINK_ERROR_FRAC = 0.5
_MOST_TIMES_USUAL = 5.0
_NUM_SAMPLES = 20
_INSIDE_S, _BETWEEN_S = 0.9e-6, 5e-6
"""Latency of a hop inside a host (NVLink) and between hosts (InfiniBand), as presets have it."""
_LEAST_BYTES = 1 << 16
"""Calls on less take as long whatever the link's bandwidth is."""
_IN_CACHE_BYTES = 1e6
"""Elementwise operators on less say nothing of the memory."""


def calibrate_from(paths: Sequence[str | Path], *, steps: str = "") -> Calibration:
    """The rates that the traces of one job show.

    Raises:
        DataError: A trace is unreadable, or shows too little or too noisily.
    """
    summary = summarize_paths(paths, steps=steps)
    summary.check_readable()
    ops = op_rates(summary.traces)
    matrix = _rates([one for one in ops if one.flop], "flop")
    large = _large(ops)
    steady = [one for one in large if one.spread_frac <= _MAX_SPREAD_FRAC]  # not those into fresh pages
    moved = _rates(steady or large, "bytes", by_dtype=False)
    refuse("rates of traces", DataError, matrix=matrix, moved=moved, size=_IN_CACHE_BYTES, calls=_MIN_CALLS)
    by_sharing = _wires(summary)
    levels = _links(summary.traces, by_sharing, moved[""])
    wires = sorted(itertools.chain(*by_sharing.values()), key=lambda one: -one.count * one.wire_s)
    name = _chip_name(summary.traces[0])
    cluster = measured_cluster(
        name, max(summary.traces[0].world_size or 0, len(summary.traces)), *levels,
        source=f"meshwise calibrate --from traces of {len(summary.traces)} ranks on {name}",
        memory_bytes=_memory_bytes(summary.traces[0]), memory_bytes_per_s=moved[""], matrix_flop_per_s=matrix,
        vector_flop_per_s={"fp32": matrix.get("fp32", min(matrix.values()))},
        op_host_s=0.0 if summary.traces[0].has_device else _op_host_s(summary, ops, wires),
    )  # fmt: skip
    samples = (*map(_op_sample, ops[:_NUM_SAMPLES]), *map(_wire_sample, wires[:_NUM_SAMPLES]))
    return Calibration(cluster, samples)


def _op_host_s(summary: Summary, ops: Sequence[OpRate], wires: Sequence[Bandwidth]) -> float:
    """Seconds that no matrix op, no large elementwise operator and no transfer took, for each matrix op.

    Between the stages of a pipeline ranks wait for each other by plan: there only what operators take counts.
    """
    matrix = _real([one for one in ops if one.flop], "flop")
    spent_s = -sum(map(_usual_s, (*matrix, *_large(ops))))
    if any(one.name == "send_recv" for one in summary.collectives):
        spent_s += sum(parts.seconds["compute"] for parts in summary.partitions)
    else:
        spent_s += sum(sum(parts.seconds.values()) for parts in summary.partitions)
        spent_s -= sum(one.count * one.wire_s * (one.group_size or 1) for one in wires)
    return max(spent_s, 0.0) / sum(one.count for one in matrix)


def _large(ops: Sequence[OpRate]) -> list[OpRate]:
    """Elementwise operators that show the memory."""
    return [one for one in ops if one.kind == "elementwise" and one.bytes >= _IN_CACHE_BYTES]


def _rates(ops: Sequence[OpRate], of: str, *, by_dtype: bool = True) -> dict[str, float]:
    """Work over the usual time by dtype (all as one, under no name); DataError if calls differ too much."""
    found: dict[str, float] = {}
    for dtype, every in grouped(ops, lambda one: one.dtype if by_dtype else "").items():
        rows = _real(every, of)
        count, seconds = sum(one.count for one in rows), sum(map(_usual_s, rows))
        if count < _MIN_CALLS:
            continue
        error = math.sqrt(sum((one.spread_frac * _usual_s(one)) ** 2 / one.count for one in rows)) / seconds
        what = f"{dtype} matmuls" if by_dtype else "elementwise operators"
        names = {"what": what, "count": count, "error": _ERROR_OF_MEDIAN * error, "most": _MAX_ERROR_FRAC}
        refuse("noise of traces", DataError, **names)
        found[dtype] = sum(one.count * float(getattr(one, of)) for one in rows) / seconds
    return found


def _usual_s(one: OpRate) -> float:
    """All calls of an operator, each in the median time."""
    return one.count * one.median_s


def _real(rows: Sequence[OpRate], of: str) -> list[OpRate]:
    """Without calls far above what most of the time reaches: those on tensors without data (DTensor's)."""
    speed = np.array([float(getattr(one, of)) / one.median_s for one in rows])
    order = np.argsort(speed)
    until = np.cumsum([rows[i].total_s for i in order])
    most = _MOST_TIMES_USUAL * speed[order[np.searchsorted(until, until[-1] / 2)]]
    return [one for one, reached in zip(rows, speed.tolist(), strict=True) if reached <= most]


def _links(
    traces: Sequence[Trace], wires: Mapping[int, Sequence[Bandwidth]], copied_bytes_per_s: float
) -> Sequence[Level]:
    """The inner link; and the outer one, where hosts of several ranks met."""
    name = _library(traces[0])
    copy = Level(name=f"{name} (assumed)", bytes_per_s=copied_bytes_per_s, latency_s=_INSIDE_S)
    node_ranks = min(Counter(trace.host for trace in traces).values())
    if not wires and len(traces) == 1:
        return [copy]
    if node_ranks == 1 or not any(wires):
        calls = itertools.chain(*wires.values())
        return [_fitted(name, [*calls], _BETWEEN_S if any(wires) else _INSIDE_S)]
    inside = _fitted(name, wires[0], _INSIDE_S) if 0 in wires else copy
    sharing = [replace(one, bytes=one.bytes / share) for share in wires if share for one in wires[share]]
    share = min(filter(None, wires))  # a ring leaves a host once in so many hops
    outer = _fitted(f"{name} between hosts", sharing, _BETWEEN_S / share)
    return replace(inside, ranks=float(node_ranks)), replace(outer, latency_s=share * outer.latency_s)


def _wires(summary: Summary) -> dict[int, list[Bandwidth]]:
    """Calls alike, from the last entry to the last exit, by the members that share a host's way out.

    0: of groups inside a host.
    """
    hosts = {trace.rank: trace.host for trace in summary.traces}
    found: dict[int, list[Seen]] = defaultdict(list)
    for one in summary.collectives:
        name = "send" if one.name == "send_recv" else one.name
        if name in COLLECTIVES and one.group_size and one.num_ranks > 1:
            members = Counter(hosts[rank] for rank in one.wait_s)
            sharing = max(members.values()) if len(members) > 1 else 0
            group = f"{one.group_size} ranks"
            found[sharing].append(replace(one, name=name, wire_s=one.together_s, group=group))
    return {sharing: bandwidths(calls) for sharing, calls in found.items()}


def _library(trace: Trace) -> str:
    """Whose collectives a job runs: of `cpu:gloo,cuda:nccl` the one of its device."""
    device, usual = ("cuda", "nccl") if trace.has_device else ("cpu", "gloo")
    named = re.search(rf"(?:^|{device}:)(\w+)(?:,|$)", trace.backend)
    return named[1] if named else usual


def _fitted(name: str, wires: Sequence[Bandwidth], usual_s: float) -> Level:
    """The link that explains these calls; its name says where they do not tell its latency.

    Messages stand in where no collective is large enough to tell a bandwidth.
    """
    collective = [one for one in wires if one.name != "send"]
    wires = collective if any(one.bytes >= _LEAST_BYTES for one in collective) else wires
    calls = [_carried(name, one) for one in wires]
    weights = [one.count * one.wire_s**2 for one in wires]  # of absolute errors: they add up to a step
    refuse("calls of a link", DataError, num=sum(one.count for one in wires), name=name, least=_MIN_CALLS)
    told = "" if fit_link(calls, weights)[1] else " (latency assumed)"
    speed, latency = fit_link(calls, weights, usual_s)
    links = (Link(speed, latency, math.inf),)
    wrong = [abs(float(collective_s(kind, size, n, links=links)) / time - 1) for kind, size, n, time in calls]
    error = float(np.average(wrong, weights=weights))
    told_of = {"speed": speed, "largest": max(one.bytes for one in wires), "least": _LEAST_BYTES}
    refuse("link of traces", DataError, name=name, error=error, most=_MAX_LINK_ERROR_FRAC, **told_of)
    return Level(name=name + told, bytes_per_s=speed, latency_s=latency)


def _carried(library: str, one: Bandwidth) -> tuple[Collective, float, int, float]:
    """What goes over the link: the collective that the library carries out, bytes, ranks and seconds."""
    ranks = one.group_size or 2
    kind, twice = carried_out(cast(Collective, one.name), ranks, by_gloo=library.startswith("gloo"))
    return kind, one.bytes * (1.0 + float(twice)), ranks, one.wire_s


def _op_sample(one: OpRate) -> Sample:
    rate, unit = (one.flop_per_s, "FLOP/s") if one.flop else (one.bytes_per_s, "B/s")
    return Sample(one.op, one.shape, one.dtype, one.median_s, rate, unit)


def _wire_sample(one: Bandwidth) -> Sample:
    shape = f"{one.bytes:.0f} B over {one.group}"
    return Sample(one.name, shape, "", one.wire_s, one.algorithm_bytes_per_s, "B/s")


def _chip_name(trace: Trace) -> str:
    name = str(trace.device_properties.get("name") or ("device" if trace.has_device else "cpu"))
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()


def _memory_bytes(trace: Trace) -> float:
    """Of the device as the trace tells it; else that of this machine."""
    size = trace.device_properties.get("totalGlobalMem")
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(size if isinstance(size, int) and size > 0 else here)
