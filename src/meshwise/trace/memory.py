"""Memory over time: the peak, the operator that reached it, and who allocated what was held then.

The profiler records every allocation and free with its address, and the total after it. An allocation is held
until the next record of its address. It belongs to the outermost operator that ran on its thread, inside the
innermost section (a `record_function` name). What was allocated before the capture began is in the total
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.columns import by_key
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.nesting import enclosing, parents
from meshwise.trace.steps import PROFILER_STEP


@dataclass(frozen=True, slots=True)
class Holder:
    """Bytes that were held at the peak, by the operator that allocated them."""

    name: str
    bytes: float
    count: int


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The largest total of one device (or of the host) as one rank recorded it."""

    rank: int
    device: str
    peak_bytes: float
    reserved_bytes: float | None
    """Of the allocator, at the same moment."""
    time_s: float
    """Since the first event of the rank."""
    operator: str
    """What ran then: the section and the operators in it."""
    held_before_bytes: float
    """Allocated before the capture began."""
    holders: list[Holder]


def memory_peaks(traces: Sequence[Trace]) -> list[MemoryPeak]:
    """One row for each rank and device with records of memory."""
    found = []
    for trace in traces:
        for device in np.unique(trace.memory.device).tolist():
            found.append(_peak(trace, np.flatnonzero(trace.memory.device == device), device))
    return found


def timeline(trace: Trace, device: int) -> tuple[Ints, Ints]:
    """When memory changes [ns], and the bytes allocated from then on."""
    rows = trace.memory.device == device
    return trace.memory.time_ns[rows], trace.memory.total_bytes[rows]


def _peak(trace: Trace, rows: Ints, device: int) -> MemoryPeak:
    memory = trace.memory
    peak = int(memory.total_bytes[rows].argmax())
    at = rows[peak]
    by_address = rows[np.lexsort((memory.time_ns[rows], memory.address[rows]))]
    same = np.append(memory.address[by_address][1:] == memory.address[by_address][:-1], False)
    ends = np.where(same, np.append(by_address[1:], len(memory.time_ns)), len(memory.time_ns))
    allocated = memory.delta_bytes[by_address] > 0
    held = by_address[allocated & (by_address <= at) & (ends > at)]
    event = enclosing(trace, memory.track[held], memory.time_ns[held])
    owners = (_owner(trace, one) for one in event.tolist())
    by_name = by_key(zip(owners, memory.delta_bytes[held].tolist(), strict=True))
    holders = [Holder(name, float(sum(sizes)), len(sizes)) for name, sizes in by_name.items()]
    now = enclosing(trace, memory.track[at : at + 1], memory.time_ns[at : at + 1])
    total, reserved = float(memory.total_bytes[at]), float(memory.reserved_bytes[at])
    known = float(memory.delta_bytes[rows[: peak + 1]].sum())
    device_name = "host" if device < 0 else f"device {device}"
    time_s = (int(memory.time_ns[at]) - int(trace.start_ns[0])) / 1e9
    operator, before = _owner(trace, int(now[0])), max(total - known, 0.0)
    holders.sort(key=lambda one: (-one.bytes, one.name))
    figures = total, reserved if reserved > 0 else None, time_s, operator, before
    return MemoryPeak(trace.rank, device_name, *figures, holders)


def _owner(trace: Trace, event: int) -> str:
    """The innermost section around an event and the outermost operator in it."""
    operator = ""
    while event >= 0:
        name, kind = trace.name(event), trace.kind[event]
        if kind == Kind.CPU_OP:
            operator = name
        elif kind == Kind.ANNOTATION and not name.startswith(PROFILER_STEP):
            return f"{name}: {operator}" if operator else name
        event = int(parents(trace)[event])
    return operator or "outside all operators"
