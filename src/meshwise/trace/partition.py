"""Every moment of a rank is one thing: compute, transfer, memory, waiting or idle.

    compute     a compute kernel runs (an operator, on a rank without a device), whatever else does
    transfer    communication is on the wire, and no compute hides it
    memory      copies, and neither of these
    wait        nothing but communication that waits for its last rank
    idle        nothing

So the five sum to the span, and ranks that run in step differ in what each spends on its own account: the
rank that the others wait for is the one that waits least, and what it spends more than they do is why.

Idle time is the host's where the kernel that ends it was launched only after it began: the device had nothing
to do. It is not, where the launch came before: then the kernel waited for another stream or an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwise.trace.breakdown import work_kind
from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.intervals import Spans, difference, length, merged
from meshwise.trace.nesting import launchers

PARTS = ("compute", "transfer", "memory", "wait", "idle")


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The parts of one rank as disjoint sets of intervals [ns] on its own clock."""

    rank: int
    spans: Mapping[str, Spans]
    host_bound_s: float | None
    """Idle time that the host is the cause of; None where the trace holds no launches."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part; they sum to the span."""
        return {part: length(self.spans[part]) / 1e9 for part in PARTS}

    @property
    def longest_idle_s(self) -> float:
        """The longest single stretch of idle time."""
        start, end = self.spans["idle"]
        return float((end - start).max(initial=0)) / 1e9


def partition(trace: Trace, wait_ns: Mapping[int, int]) -> Partition:
    """The parts of one rank; `wait_ns` is the waiting at the beginning of an event, by its number."""
    kind, end_ns = work_kind(trace), trace.end_ns
    wait_end = trace.start_ns.copy()
    for event, wait in wait_ns.items():
        wait_end[event] += wait
    by_kind = {k: np.flatnonzero(kind == k) for k in DEVICE_KINDS}
    communication = by_kind[Kind.COMMUNICATION]
    sets = {
        "compute": _union(trace.start_ns, end_ns, by_kind[Kind.COMPUTE]),
        "transfer": _union(wait_end, end_ns, communication),
        "memory": _union(trace.start_ns, end_ns, by_kind[Kind.MEMORY]),
        "wait": _union(trace.start_ns, wait_end, communication),
    }
    work = np.flatnonzero(kind != Kind.OTHER)
    none = np.zeros(0, dtype=np.int64)
    taken: Spans = (none, none)
    spans: dict[str, Spans] = {}
    for part, found in sets.items():
        spans[part] = difference(found, taken)
        taken = merged(np.concatenate([taken[0], found[0]]), np.concatenate([taken[1], found[1]]))
    whole = (trace.start_ns[work].min(), end_ns[work].max()) if len(work) else (0, 0)
    spans["idle"] = difference(merged(*(np.array([time]) for time in whole)), taken)
    return Partition(trace.rank, spans, _host_bound_s(trace, spans["idle"]))


def _union(start: Ints, end: Ints, events: Ints) -> Spans:
    return merged(start[events], end[events])


def _host_bound_s(trace: Trace, idle: Spans) -> float | None:
    """Seconds of those idle stretches that end with a kernel launched after they had begun."""
    if not trace.has_device:
        return None
    kernels = trace.where(*DEVICE_KINDS)
    launcher = launchers(trace)[kernels]
    if not (launcher >= 0).any():
        return None
    first = np.searchsorted(trace.start_ns[kernels], idle[1])
    known = (first < len(kernels)) & (launcher[np.minimum(first, len(kernels) - 1)] >= 0)
    launched = trace.start_ns[launcher[np.minimum(first, len(kernels) - 1)]]
    late = known & (launched >= idle[0])
    return float((idle[1] - idle[0])[late].sum()) / 1e9
