"""Where the time of each rank went: compute, communication, memory, idle.

On a rank with a device the measure is its kernels on all streams, whatever the CPU does:

    span           from the start of the first kernel to the end of the last
    busy           the union of all kernels on all streams
    idle           span - busy
    compute        the union of compute kernels; communication and memory likewise (they may overlap)
    non-compute    busy - compute: communication and memory that no compute hides
    exposed        communication outside the union of compute kernels
    overlap_frac   the share of communication that compute hides: 1 - exposed / communication

So span = compute + non-compute + idle, the definition of HolisticTraceAnalysis (Meta, MIT licence) too.
On a rank without a device, operators are the compute and gloo's transfers the communication. Operators that
only start or await a transfer (`c10d::...`) are neither. An operator around such a call (an autograd
function, a gradient hook) waits in it as long as the transfer lasts, and computes in the rest of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import DEVICE_KINDS, STARTS_TRANSFER, Ints, Kind, Trace
from meshwise.trace.intervals import NO_SPANS, Spans, difference, intersection, joined, length, merged
from meshwise.trace.nesting import launchers, parents


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one rank by what its device (or CPU) did; see the top of this file."""

    rank: int
    device: str
    span_s: float
    compute_s: float
    communication_s: float
    memory_s: float
    busy_s: float
    idle_s: float
    non_compute_s: float
    exposed_communication_s: float
    overlap_frac: float | None


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank did, by event and as merged sets of intervals [ns]."""

    kind: NDArray[np.int8]
    """`COMPUTE`, `COMMUNICATION`, `MEMORY`, else `OTHER`, for each event."""
    spans: dict[Kind, Spans]


_known: WeakKeyDictionary[Trace, RankWork] = WeakKeyDictionary()


def work(trace: Trace) -> RankWork:
    """The work of a rank: its kernels where it has a device, else its operators and gloo transfers."""
    if trace not in _known:
        _known[trace] = _device_work(trace) if trace.has_device else _host_work(trace)
    return _known[trace]


def work_kind(trace: Trace) -> NDArray[np.int8]:
    """The kind of each event as work of its rank (see `Work`)."""
    return work(trace).kind


def _device_work(trace: Trace) -> RankWork:
    kind = np.where(np.isin(trace.kind, DEVICE_KINDS), trace.kind, np.int8(Kind.OTHER))
    if trace.selected is not None:
        kind[~trace.selected] = Kind.OTHER
    return RankWork(kind, {one: union(trace, np.flatnonzero(kind == one)) for one in DEVICE_KINDS})


def _host_work(trace: Trace) -> RankWork:
    selected = np.ones(len(trace), dtype=bool) if trace.selected is None else trace.selected
    kind = np.full(len(trace), Kind.OTHER, dtype=np.int8)
    kind[(trace.kind == Kind.HOST_COMMUNICATION) & selected] = Kind.COMMUNICATION
    starts = trace.named(lambda name: name.startswith(STARTS_TRANSFER))
    operator = trace.kind == Kind.CPU_OP
    kind[operator & ~starts & selected] = Kind.COMPUTE
    communication = union(trace, np.flatnonzero(kind == Kind.COMMUNICATION))
    parent = parents(trace)
    outermost: dict[int, int] = {}
    wrappers = set()
    for call in np.flatnonzero(operator & starts).tolist():
        outermost[call] = at = call
        while (at := int(parent[at])) >= 0:
            if operator[at] and not starts[at]:
                wrappers.add(at)
                outermost[call] = at
    around = np.array(sorted(wrappers), dtype=np.int64)
    around = around[selected[around]]
    kind[around] = Kind.OTHER
    launcher, end_ns = launchers(trace), trace.end_ns
    moved = [i for i in trace.where(Kind.HOST_COMMUNICATION).tolist() if int(launcher[i]) in outermost]
    left = np.array([min(end_ns[i], end_ns[outermost[int(launcher[i])]]) for i in moved], dtype=np.int64)
    calls = union(trace, np.flatnonzero(operator & starts))
    awaited = joined(merged(trace.start_ns[moved], left), calls)
    compute = union(trace, np.flatnonzero(kind == Kind.COMPUTE))
    compute = joined(compute, difference(union(trace, around), awaited))
    return RankWork(kind, {Kind.COMPUTE: compute, Kind.COMMUNICATION: communication, Kind.MEMORY: NO_SPANS})


def union(trace: Trace, events: Ints) -> Spans:
    """When any of the `events` ran."""
    start = trace.start_ns[events]
    return merged(start, start + trace.duration_ns[events])


def breakdown(trace: Trace) -> Breakdown:
    """The breakdown of one rank; all zero where the trace holds no work."""
    spans = work(trace).spans
    return split(trace.rank, "gpu" if trace.has_device else "cpu", spans)


def split(rank: int, device: str, spans: Mapping[Kind, Spans]) -> Breakdown:
    """The breakdown of what one rank did in `spans` (merged sets of intervals by kind)."""
    compute, communication = spans[Kind.COMPUTE], spans[Kind.COMMUNICATION]
    both = joined(*(spans[kind] for kind in DEVICE_KINDS))
    span, busy = (int(both[1][-1] - both[0][0]) if len(both[0]) else 0), length(both)
    hidden, total = length(intersection(compute, communication)), length(communication)
    return Breakdown(
        rank=rank,
        device=device,
        span_s=span / 1e9,
        compute_s=length(compute) / 1e9,
        communication_s=total / 1e9,
        memory_s=length(spans[Kind.MEMORY]) / 1e9,
        busy_s=busy / 1e9,
        idle_s=(span - busy) / 1e9,
        non_compute_s=(busy - length(compute)) / 1e9,
        exposed_communication_s=(total - hidden) / 1e9,
        overlap_frac=hidden / total if total else None,
    )
