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

from meshwise.trace.breakdown import work
from meshwise.trace.events import Kind, Trace
from meshwise.trace.intervals import NO_SPANS, Spans, difference, joined, length, merged
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
    work_spans, end_ns = work(trace).spans, trace.end_ns
    communication = np.flatnonzero(work(trace).kind == Kind.COMMUNICATION)
    wait_end = trace.start_ns.copy()
    for event, wait in wait_ns.items():
        wait_end[event] += wait
    sets = {
        "compute": work_spans[Kind.COMPUTE],
        "transfer": merged(wait_end[communication], end_ns[communication]),
        "memory": work_spans[Kind.MEMORY],
        "wait": merged(trace.start_ns[communication], wait_end[communication]),
    }
    taken = NO_SPANS
    spans: dict[str, Spans] = {}
    for part, found in sets.items():
        spans[part] = difference(found, taken)
        taken = joined(taken, found)
    spans["idle"] = difference((taken[0][:1], taken[1][-1:]), taken)
    return Partition(trace.rank, spans, _host_bound_s(trace, spans["idle"]))


def _host_bound_s(trace: Trace, idle: Spans) -> float | None:
    """Seconds of those idle stretches that end with a kernel launched after they had begun."""
    if not trace.has_device:
        return None
    kernels = np.flatnonzero(work(trace).kind != Kind.OTHER)
    launcher = launchers(trace)[kernels]
    if not (launcher >= 0).any():
        return None
    first = np.searchsorted(trace.start_ns[kernels], idle[1])
    known = (first < len(kernels)) & (launcher[np.minimum(first, len(kernels) - 1)] >= 0)
    launched = trace.start_ns[launcher[np.minimum(first, len(kernels) - 1)]]
    late = known & (launched >= idle[0])
    return float((idle[1] - idle[0])[late].sum()) / 1e9
