"""Every moment of a rank is one thing: compute, transfer, memory, waiting or idle.

    compute     a compute kernel runs (an operator, on a rank without a device), whatever else does
    transfer    communication is on the wire, and no compute hides it
    memory      copies, and neither of these
    wait        nothing but communication that waits for its last rank
    idle        nothing

So the five sum to the span, and ranks that run in step differ in what each spends on its own account: the
rank that the others wait for is the one that waits least, and what it spends more than they do is why.

Idle time of a device has a cause:

    host          the kernel that ends it was launched only after it began: the device had nothing to do
    device        launched before, and the gap is below 5 us: what the device takes between kernels
    dependency    launched before, and the gap is longer: the kernel waited for another stream or an event
    unknown       nothing tells the launch; on a rank without a device all idle time is of this kind
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.breakdown import work
from meshwise.trace.events import Kind, Trace
from meshwise.trace.intervals import NO_SPANS, Spans, difference, joined, length, merged
from meshwise.trace.nesting import launchers

PARTS = ("compute", "transfer", "memory", "wait", "idle")
CAUSES = ("host", "device", "dependency", "unknown")
_BETWEEN_KERNELS_NS = 5_000


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The parts of one rank as disjoint sets of intervals [ns] on its own clock."""

    rank: int
    seconds: dict[str, float]
    """Of each part; they sum to the span."""
    host_bound_s: float | None
    """Idle time that the host is the cause of; None where the trace holds no launches."""
    spans: Mapping[str, Spans]
    """Empty where only seconds were asked for (see `parts`)."""
    idle_cause: NDArray[np.int64]
    """Of each idle stretch, its place in `CAUSES`."""

    def idle(self, cause: str) -> Spans:
        """The idle stretches of one cause."""
        (start, end), is_meant = self.spans["idle"], self.idle_cause == CAUSES.index(cause)
        return start[is_meant], end[is_meant]

    def why_idle(self, start: int, end: int) -> str:
        """The cause of the stretch that ends at `end`; where work went on since `start`, none."""
        idle = self.spans["idle"]
        at = int(np.searchsorted(idle[0], end)) - 1
        return CAUSES[self.idle_cause[at]] if at >= 0 and idle[1][at] > start else "beside other work"


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
    cause = _causes(trace, spans["idle"])
    by_host = np.diff(spans["idle"], axis=0)[0][cause == CAUSES.index("host")].sum()
    return Partition(
        rank=trace.rank,
        seconds={part: length(spans[part]) / 1e9 for part in PARTS},
        host_bound_s=int(by_host) / 1e9 if (cause != CAUSES.index("unknown")).any() else None,
        spans=spans,
        idle_cause=cause,
    )


def parts(trace: Trace, wait_ns: Mapping[int, int]) -> Partition:
    """The same without intervals: small, for many ranks."""
    return replace(partition(trace, wait_ns), spans={}, idle_cause=np.zeros(0, dtype=np.int64))


def _causes(trace: Trace, idle: Spans) -> NDArray[np.int64]:
    """The cause of each idle stretch; unknown where the trace holds no launches of kernels."""
    kernels = np.flatnonzero(work(trace).kind != Kind.OTHER)
    launcher = launchers(trace)[kernels]
    if not trace.has_device or not (launcher >= 0).any():
        return np.full(len(idle[0]), CAUSES.index("unknown"))
    ending = np.minimum(np.searchsorted(trace.start_ns[kernels], idle[1]), len(kernels) - 1)
    launch = launcher[ending]
    late, short = trace.start_ns[launch] >= idle[0], idle[1] - idle[0] < _BETWEEN_KERNELS_NS
    return np.select([launch < 0, late, short], [3, 0, 1], 2)
