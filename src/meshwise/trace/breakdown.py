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
On a rank without a device, operators are the compute and gloo's transfers the communication; operators
that only start or await a transfer (`c10d::...`) are neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import DEVICE_KINDS, Kind, Trace
from meshwise.trace.intervals import intersection, length, merged

_STARTS_TRANSFER = ("c10d::", "_c10d_functional", "c10d_functional", "record_param_comms")


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


def work_kind(trace: Trace) -> NDArray[np.int8]:
    """The kind of each event as work of its rank: `COMPUTE`, `COMMUNICATION`, `MEMORY`, else `OTHER`.

    On a device trace these are the kernels; otherwise operators and gloo transfers.
    """
    by_label = np.full(len(trace.label_kind), Kind.OTHER, dtype=np.int8)
    if trace.has_device:
        on_device = np.isin(trace.label_kind, DEVICE_KINDS)
        by_label[on_device] = trace.label_kind[on_device]
    else:
        by_label[trace.label_kind == Kind.HOST_COMMUNICATION] = Kind.COMMUNICATION
        starts = np.array([name.startswith(_STARTS_TRANSFER) for _, name in trace.labels] or [False])
        by_label[(trace.label_kind == Kind.CPU_OP) & ~starts] = Kind.COMPUTE
    return by_label[trace.label]


def breakdown(trace: Trace) -> Breakdown:
    """The breakdown of one rank; all zero where the trace holds no work."""
    kind = work_kind(trace)

    def union(*kinds: Kind) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chosen = np.isin(kind, kinds)
        return merged(trace.start_ns[chosen], trace.end_ns[chosen])

    work = kind != Kind.OTHER
    span = int(trace.end_ns[work].max() - trace.start_ns[work].min()) if work.any() else 0
    busy = length(union(*DEVICE_KINDS))
    compute, communication = union(Kind.COMPUTE), union(Kind.COMMUNICATION)
    hidden = length(intersection(compute, communication))
    total = length(communication)
    return Breakdown(
        rank=trace.rank,
        device="gpu" if trace.has_device else "cpu",
        span_s=span / 1e9,
        compute_s=length(compute) / 1e9,
        communication_s=total / 1e9,
        memory_s=length(union(Kind.MEMORY)) / 1e9,
        busy_s=busy / 1e9,
        idle_s=(span - busy) / 1e9,
        non_compute_s=(busy - length(compute)) / 1e9,
        exposed_communication_s=(total - hidden) / 1e9,
        overlap_frac=hidden / total if total else None,
    )
