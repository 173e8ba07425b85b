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
only start or await a transfer (`c10d::...`) are neither, nor is what torch.compile does. An operator around
such a call (an autograd function, a gradient hook) waits in it as long as the transfer lasts, or it compiles,
and computes in the rest of its time.

Beside these sums, every moment of a rank is one thing: compute, transfer, memory, waiting or idle.

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.trace import intervals as sets
from meshwise.trace.events import DEVICE_KINDS, STARTS_TRANSFER, Ints, Kind, Trace, once_a_trace
from meshwise.trace.intervals import Spans, covered, difference, intersection, joined, length, merged, shares
from meshwise.trace.nesting import compiling, inclusive, launchers, parents

PARTS = ("compute", "transfer", "memory", "wait", "idle")
COMPILER = "torch.compile"
CAUSES = ("host", "device", "dependency", "unknown")
_BETWEEN_KERNELS_NS = 5_000


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
    window: Spans
    """From the start of the first to the end of the last, or that of chosen steps."""


@once_a_trace
def work(trace: Trace) -> RankWork:
    """The work of a rank: its kernels where it has a device, else its operators and gloo transfers.

    Of chosen steps, the events launched in them, and whatever runs in their window.
    """
    selected = np.ones(len(trace), dtype=bool) if trace.selected is None else trace.selected
    if trace.window is not None:
        every = work(replace(trace, selected=None, window=None))
        kind = np.where(selected, every.kind, np.int8(Kind.OTHER))
        spans = {one: sets.clipped(found, trace.window) for one, found in every.spans.items()}
        return RankWork(kind, spans, trace.window)
    if trace.has_device:
        kind = np.where(np.isin(trace.kind, DEVICE_KINDS) & selected, trace.kind, np.int8(Kind.OTHER))
        spans = {one: union(trace, np.flatnonzero(kind == one)) for one in DEVICE_KINDS}
    else:
        kind, spans = _host_work(trace, selected)
    start, end = joined(*spans.values())
    return RankWork(kind, spans, (start[:1], end[-1:]))


def _host_work(trace: Trace, selected: NDArray[np.bool_]) -> tuple[NDArray[np.int8], dict[Kind, Spans]]:
    kind = np.full(len(trace), Kind.OTHER, dtype=np.int8)
    kind[(trace.kind == Kind.HOST_COMMUNICATION) & selected] = Kind.COMMUNICATION
    starts = trace.named(lambda name: name.startswith(STARTS_TRANSFER)) | compiling(trace)
    operator = trace.kind == Kind.CPU_OP
    kind[operator & ~starts & selected] = Kind.COMPUTE
    communication = union(trace, np.flatnonzero(kind == Kind.COMMUNICATION))
    started, parent = np.flatnonzero(operator & starts), parents(trace)
    waits = operator & ~starts & (inclusive((operator & starts).astype(np.int64), parent) > 0)
    kind[waits] = Kind.OTHER
    outermost, up = np.arange(len(trace)), parent.copy()
    while (inside := up >= 0).any():
        outermost = np.where(inside & waits[up], up, outermost)
        up = np.where(inside, parent[up], -1)
    moved = trace.where(Kind.HOST_COMMUNICATION)
    moved = moved[np.isin(launchers(trace)[moved], started)]
    left = np.minimum(trace.end_ns[moved], trace.end_ns[outermost[launchers(trace)[moved]]])
    awaited = joined(merged(trace.start_ns[moved], left), union(trace, started))
    compute = union(trace, np.flatnonzero(kind == Kind.COMPUTE))
    compute = joined(compute, difference(union(trace, np.flatnonzero(waits & selected)), awaited))
    return kind, {Kind.COMPUTE: compute, Kind.COMMUNICATION: communication, Kind.MEMORY: sets.NO_SPANS}


def union(trace: Trace, events: Ints) -> Spans:
    """When any of the `events` ran."""
    start = trace.start_ns[events]
    return merged(start, start + trace.duration_ns[events])


def breakdown(trace: Trace) -> Breakdown:
    """The breakdown of one rank; all zero where the trace holds no work."""
    return split(trace, work(trace).window)


def split(trace: Trace, window: Spans) -> Breakdown:
    """The breakdown of what one rank did in a window."""
    found = work(trace).spans
    compute, communication, memory = (sets.clipped(found[kind], window) for kind in DEVICE_KINDS)
    span, busy = length(window), length(joined(compute, communication, memory))
    hidden, total, own = length(intersection(compute, communication)), length(communication), length(compute)
    ns = {"span": span, "busy": busy, "idle": span - busy, "exposed_communication": total - hidden}
    ns |= {"compute": own, "communication": total, "memory": length(memory), "non_compute": busy - own}
    seconds = {f"{name}_s": one / 1e9 for name, one in ns.items()}
    device, overlap_frac = "gpu" if trace.has_device else "cpu", hidden / total if total else None
    return Breakdown(trace.rank, device, overlap_frac=overlap_frac, **seconds)


@dataclass(frozen=True, slots=True)
class Partition:
    """Seconds of each of the `PARTS` of one rank; they sum to its span."""

    rank: int
    seconds: dict[str, float]
    host_bound_s: float | None
    """Idle time that the host is the cause of; None where the trace holds no launches."""
    idle_in_s: dict[str, float] = field(default_factory=dict)
    """Idle time while each section was open, of those mostly idle, and while `COMPILER` ran."""


@dataclass(frozen=True, slots=True, eq=False)
class RankIntervals:
    """The parts of one rank as disjoint sets of intervals [ns] on its own clock."""

    rank: int
    spans: Mapping[str, Spans]
    idle_cause: Ints
    """Of each idle stretch, its place in `CAUSES`."""

    @property
    def partition(self) -> Partition:
        """The seconds of the parts."""
        is_known = not self.idle_cause.size or (self.idle_cause != CAUSES.index("unknown")).any()
        host_bound_s = length(self.idle("host")) / 1e9 if is_known else None
        return Partition(self.rank, {part: length(self.spans[part]) / 1e9 for part in PARTS}, host_bound_s)

    def idle(self, cause: str) -> Spans:
        """The idle stretches of one cause."""
        (start, end), is_meant = self.spans["idle"], self.idle_cause == CAUSES.index(cause)
        return start[is_meant], end[is_meant]

    def why_idle(self, start: int, end: int) -> str:
        """The cause of the stretch that ends at `end`; where work went on since `start`, none."""
        idle = self.spans["idle"]
        at = int(np.searchsorted(idle[0], end)) - 1
        return CAUSES[self.idle_cause[at]] if at >= 0 and idle[1][at] > start else "beside other work"


def intervals(trace: Trace, wait_ns: Mapping[int, int]) -> RankIntervals:
    """The parts of one rank; `wait_ns` is the waiting at the beginning of an event, by its number."""
    done, end_ns, wait_end = work(trace), trace.end_ns, trace.start_ns.copy()
    communication = np.flatnonzero(done.kind == Kind.COMMUNICATION)
    for event, wait in wait_ns.items():
        wait_end[event] += wait
    begin, arrived, end = (times[communication] for times in (trace.start_ns, wait_end, end_ns))
    of_others = difference(done.spans[Kind.COMMUNICATION], merged(begin, end))  # launched in no chosen step
    by_part = {
        "compute": done.spans[Kind.COMPUTE],
        "transfer": sets.clipped(joined(merged(arrived, end), of_others), done.window),
        "memory": done.spans[Kind.MEMORY],
        "wait": sets.clipped(merged(begin, arrived), done.window),
    }
    taken = sets.NO_SPANS
    spans: dict[str, Spans] = {}
    for part, found in by_part.items():
        spans[part] = difference(found, taken)
        taken = joined(taken, found)
    spans["idle"] = difference(done.window, taken)
    return RankIntervals(trace.rank, spans, _causes(trace, spans["idle"]))


def with_calls(trace: Trace, wait_ns: Mapping[int, int]) -> tuple[Partition, dict[int, list[float]]]:
    """The partition of one rank, and by event the seconds of its calls; `wait_ns` as for `intervals`.

    Of each call those that it waits, and those that it waits and transfers while the rank does nothing else.
    What calls in flight together share counts once.
    """
    found, event = intervals(trace, wait_ns), np.array([*wait_ns], dtype=np.int64)
    begin, end = trace.start_ns[event], trace.end_ns[event]
    arrived = begin + np.array([*wait_ns.values()], dtype=np.int64)
    waits = (shares(begin, arrived, spans) for spans in (merged(begin, arrived), found.spans["wait"]))
    seconds = np.stack([*waits, shares(arrived, end, found.spans["transfer"])], axis=1) / 1e9
    opened = trace.where(Kind.ANNOTATION)
    inside = np.subtract(*(covered(found.spans["idle"], of[opened]) for of in (trace.end_ns, trace.start_ns)))
    idle, lasts = (np.bincount(trace.label[opened], ns) for ns in (inside, trace.duration_ns[opened]))
    idle_in_s = {trace.labels[i][1]: float(idle[i]) / 1e9 for i in np.flatnonzero(idle * 2 > lasts).tolist()}
    compiles = union(trace, np.flatnonzero(compiling(trace)))
    idle_in_s[COMPILER] = length(intersection(found.spans["idle"], compiles)) / 1e9
    return replace(found.partition, idle_in_s=idle_in_s), dict(zip(wait_ns, seconds.tolist(), strict=True))


def _causes(trace: Trace, idle: Spans) -> NDArray[np.int64]:
    """The cause of each idle stretch; unknown where the trace holds no launches of kernels."""
    kernels = trace.where(*DEVICE_KINDS)
    launcher = launchers(trace)[kernels]
    if not trace.has_device or not (launcher >= 0).any():
        return np.full(len(idle[0]), CAUSES.index("unknown"))
    ending = np.minimum(np.searchsorted(trace.start_ns[kernels], idle[1]), len(kernels) - 1)
    launch = launcher[ending]
    late, short = trace.start_ns[launch] >= idle[0], idle[1] - idle[0] < _BETWEEN_KERNELS_NS
    return np.select([launch < 0, late, short], [3, 0, 1], 2)
