"""The profiler's table: per operator, section and kernel its CPU and device time, memory and calls.

    CPU total       from start to end; self CPU leaves out the operators called inside
    device total    the kernels launched inside, on whatever stream they ran; self: launched by itself
    memory          bytes allocated minus bytes freed inside; self leaves out the operators called inside

As in PyTorch's own table, a kernel is a row too, with device time only, and gloo's transfers have a CPU
total but no self CPU, for they run beside the thread that waits. Unlike it, a section's device time holds
the communication launched inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.nesting import HOST_KINDS, added_at, enclosing, inclusive, launchers, parents


@dataclass(frozen=True, slots=True)
class OperatorTotal:
    """All calls of one name on one rank; seconds and bytes."""

    name: str
    kind: str
    count: int
    self_cpu_s: float
    cpu_s: float
    self_device_s: float
    device_s: float
    self_cpu_bytes: int
    cpu_bytes: int
    self_device_bytes: int
    device_bytes: int


def operator_totals(trace: Trace) -> list[OperatorTotal]:
    """The table of one rank, the largest CPU total first."""
    parent = parents(trace)
    host = trace.where(*HOST_KINDS)
    cpu = np.zeros(len(trace), dtype=np.int64)
    cpu[host] = trace.duration_ns[host]
    self_cpu = self_time(trace, parent)
    device = _launched(trace, parent, trace.where(*DEVICE_KINDS))
    memory = [_memory(trace, parent, on_device=on_device) for on_device in (False, True)]
    columns = [self_cpu, cpu, device, inclusive(device, parent)]
    columns += [memory[0], inclusive(memory[0], parent), memory[1], inclusive(memory[1], parent)]
    kernels = trace.where(*DEVICE_KINDS)
    for column in columns[2:4]:
        column[kernels] = trace.duration_ns[kernels]
    shown = np.concatenate([host, kernels])
    once = shown[~_is_repeated(trace, parent)[shown]]
    sums = [
        np.bincount(trace.label[events], weights=column[events], minlength=len(trace.labels))
        for column, events in zip(columns, [shown, once] * 4, strict=True)
    ]
    counts = np.bincount(trace.label[once], minlength=len(trace.labels))
    rows = [
        OperatorTotal(
            trace.labels[i][1],
            Kind(trace.label_kind[i]).name.lower(),
            int(counts[i]),
            *(float(column[i]) / 1e9 for column in sums[:4]),  # type: ignore[arg-type]
            *(int(column[i]) for column in sums[4:]),
        )
        for i in np.flatnonzero(counts).tolist()
    ]
    return sorted(rows, key=lambda row: (-row.cpu_s, -row.device_s, row.name))


def _is_repeated(trace: Trace, parent: Ints) -> NDArray[np.bool_]:
    """Whether an event is the only one inside another of its name: PyTorch takes the two for one call."""
    children = np.bincount(parent[parent >= 0], minlength=len(trace))
    inner = np.flatnonzero(parent >= 0)
    repeated = np.zeros(len(trace), dtype=bool)
    around = parent[inner]
    repeated[inner] = (trace.label[inner] == trace.label[around]) & (children[around] == 1)
    return repeated


def self_time(trace: Trace, parent: Ints) -> Ints:
    """Duration [ns] of each host event without the events it encloses; 0 for gloo's transfers and kernels."""
    own, host = np.zeros(len(trace), dtype=np.int64), trace.where(*HOST_KINDS)
    own[host] = trace.duration_ns[host]
    own -= added_at(parent[host], trace.duration_ns[host], len(trace))
    own[trace.where(Kind.HOST_COMMUNICATION)] = 0
    return np.maximum(own, 0)


def _launched(trace: Trace, parent: Ints, events: Ints) -> Ints:
    """For every operator the time [ns] of the `events` it launched itself, through whatever runtime call."""
    owner, is_call = launchers(trace)[events], trace.kind == Kind.RUNTIME
    while (up := (owner >= 0) & is_call[owner] & (parent[owner] >= 0)).any():
        owner[up] = parent[owner[up]]
    return added_at(owner, trace.duration_ns[events], len(trace))


def _memory(trace: Trace, parent: Ints, *, on_device: bool) -> Ints:
    """For every host event the bytes that it allocated itself, less those it freed."""
    memory, rows = trace.memory, trace.memory.on_device == on_device
    event = enclosing(trace, parent, memory.track[rows], memory.time_ns[rows])
    return added_at(event, memory.delta_bytes[rows], len(trace))
