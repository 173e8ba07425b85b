"""The profiler's table: per operator, section and kernel its CPU and device time, memory and calls.

    CPU total       from start to end; self CPU leaves out the operators called inside
    device total    the kernels launched inside, on whatever stream they ran; self: launched by itself
    memory          bytes allocated minus bytes freed inside; self leaves out the operators called inside

As in PyTorch's own table, a kernel is a row too, with device time only, and gloo's transfers have a CPU
total but no self CPU, for they run beside the thread that waits. Unlike it, a section's device time holds
the communication launched inside.

A *section* is a `record_function` name. Its work is what was launched while it was open on the launching
thread, so the communication of a section is in it, split as in `collectives`: transfer, and waiting for
the last rank. Sections nest; the outer one holds the inner one's numbers too.

Of kernels there is a table of its own over all ranks or one, by name. On a rank without a device, operators
stand for kernels, each without the operators that it calls.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import by_key
from meshwise.trace.breakdown import work
from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.nesting import HOST_KINDS, added_at, around, enclosing, inclusive, launchers, parents
from meshwise.trace.steps import PROFILER_STEP

_HAS_WAITING = ("communication", "wait")


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
    parent, host, kernels = parents(trace), trace.where(*HOST_KINDS), trace.where(*DEVICE_KINDS)
    cpu = np.zeros(len(trace), dtype=np.int64)
    cpu[host] = trace.duration_ns[host]
    columns = [self_time(trace), cpu]
    memory = (_memory(trace, on_device=on_device) for on_device in (False, True))
    for own in (_launched(trace, parent, kernels), *memory):
        columns += [own, inclusive(own, parent)]
    for column in columns[2:4]:
        column[kernels] = trace.duration_ns[kernels]
    shown = np.concatenate([host, kernels])
    once = shown[~_is_repeated(trace, parent)[shown]]
    num, sides = len(trace.labels), zip(columns, [shown, once] * 4, strict=True)
    sums = [np.bincount(trace.label[at], weights=column[at], minlength=num) for column, at in sides]
    counts = np.bincount(trace.label[once], minlength=len(trace.labels))
    rows = []
    for i in np.flatnonzero(counts).tolist():
        name, kind = trace.labels[i][1], Kind(trace.label_kind[i]).name.lower()
        seconds, sizes = (float(of[i]) / 1e9 for of in sums[:4]), (int(of[i]) for of in sums[4:])
        rows.append(OperatorTotal(name, kind, int(counts[i]), *seconds, *sizes))  # type: ignore[arg-type]
    return sorted(rows, key=lambda row: (-row.cpu_s, -row.device_s, row.name))


def _is_repeated(trace: Trace, parent: Ints) -> NDArray[np.bool_]:
    """Whether an event is the only one inside another of its name: PyTorch takes the two for one call."""
    children = np.bincount(parent[parent >= 0], minlength=len(trace))
    inner = np.flatnonzero(parent >= 0)
    repeated = np.zeros(len(trace), dtype=bool)
    around = parent[inner]
    repeated[inner] = (trace.label[inner] == trace.label[around]) & (children[around] == 1)
    return repeated


def self_time(trace: Trace) -> Ints:
    """Duration [ns] of each host event without the events it encloses; 0 for gloo's transfers and kernels."""
    own, host = np.zeros(len(trace), dtype=np.int64), trace.where(*HOST_KINDS)
    own[host] = trace.duration_ns[host]
    own -= added_at(parents(trace)[host], trace.duration_ns[host], len(trace))
    own[trace.where(Kind.HOST_COMMUNICATION)] = 0
    return np.maximum(own, 0)


def spent_ns(trace: Trace) -> Ints:
    """What each event takes, of operators on a rank without a device without the events they enclose."""
    return np.where(trace.has_device | (trace.kind != Kind.CPU_OP), trace.duration_ns, self_time(trace))


def _launched(trace: Trace, parent: Ints, events: Ints) -> Ints:
    """For every operator the time [ns] of the `events` it launched itself, through whatever runtime call."""
    owner, is_call = launchers(trace)[events], trace.kind == Kind.RUNTIME
    while (up := (owner >= 0) & is_call[owner] & (parent[owner] >= 0)).any():
        owner[up] = parent[owner[up]]
    return added_at(owner, trace.duration_ns[events], len(trace))


def _memory(trace: Trace, *, on_device: bool) -> Ints:
    """For every host event the bytes that it allocated itself, less those it freed."""
    memory, rows = trace.memory, (trace.memory.device >= 0) == on_device
    event = enclosing(trace, memory.track[rows], memory.time_ns[rows])
    return added_at(event, memory.delta_bytes[rows], len(trace))


@dataclass(frozen=True, slots=True)
class Section:
    """All runs of one section on one rank, in seconds; communication = transfer + waiting (where known)."""

    name: str
    rank: int
    count: int
    cpu_s: float
    compute_s: float
    communication_s: float
    wait_s: float
    memory_s: float


@dataclass(frozen=True, slots=True)
class AcrossRanks:
    """One quantity over all ranks: imbalance is max / mean, the straggler the rank with the most.

    Of communication and waiting, it is the rank with the least: the one that the others waited for.
    """

    name: str
    quantity: str
    num_ranks: int
    min_s: float
    mean_s: float
    max_s: float
    imbalance: float
    straggler: int


def sections(trace: Trace, wait_ns: Mapping[int, int] | None = None) -> list[Section]:
    """The sections of one rank, longest first; `wait_ns` is the waiting inside an event, by its number.

    The profiler's marks of steps are none.
    """
    kind = work(trace).kind
    waits = np.zeros(len(trace), dtype=np.int64)
    for event, wait in (wait_ns or {}).items():
        waits[event] = wait
    kinds = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.MEMORY)
    compute, communication, memory = (_inside(trace, kind == one) for one in kinds)
    waiting = inclusive(added_at(launchers(trace), waits, len(trace)), parents(trace))
    events = trace.where(Kind.ANNOTATION)
    events = events[trace.named(lambda name: not name.startswith(PROFILER_STEP))[events]]
    columns = (trace.duration_ns, compute, communication, waiting, memory)
    rows = []
    for label in np.unique(trace.label[events]).tolist():
        runs = events[trace.label[events] == label]
        sums = [int(column[runs].sum()) / 1e9 for column in columns]
        rows.append(Section(trace.labels[label][1], trace.rank, len(runs), *sums))
    return sorted(rows, key=lambda row: (-row.cpu_s, row.name))


def _inside(trace: Trace, chosen: np.ndarray) -> Ints:
    """For every host event the time [ns] of the `chosen` work launched inside it.

    Kernels and transfers count where they were launched; operators of a CPU trace count their self time.
    """
    launcher = launchers(trace)
    own = np.where(chosen & (launcher < 0), self_time(trace), 0)
    launched = np.where(chosen & (launcher >= 0), trace.duration_ns, 0)
    return inclusive(own + added_at(launcher, launched, len(trace)), parents(trace))


def joint(found: Iterable[tuple[str, str, int, float]]) -> Iterator[AcrossRanks]:
    """One row per name and quantity of what is `found` of ranks in seconds; ranks without it count as 0."""
    values = by_key(((name, quantity), (rank, seconds)) for name, quantity, rank, seconds in found)
    ranks = sorted({rank for by_rank in values.values() for rank, _ in by_rank})
    for (name, quantity), same in values.items():
        by_rank = dict(same)
        seconds = np.array([by_rank.get(rank, 0.0) for rank in ranks])
        least, mean, most = float(seconds.min()), float(seconds.mean()), float(seconds.max())
        straggler = ranks[int((-seconds if quantity in _HAS_WAITING else seconds).argmax())]
        imbalance = most / mean if mean else 1.0
        yield AcrossRanks(name, quantity, len(by_rank), least, mean, most, imbalance, straggler)


def joint_sections(found: Sequence[Section]) -> list[AcrossRanks]:
    """The joint table of the sections of all ranks: CPU time, compute, communication and waiting of each."""
    parts = ("cpu", "compute", "communication", "wait")
    rows = joint((one.name, part, one.rank, getattr(one, f"{part}_s")) for one in found for part in parts)
    return [row for row in rows if row.max_s > 0]


def joint_operators(rows: Mapping[int, list[OperatorTotal]], *, sort_by: str = "cpu") -> list[AcrossRanks]:
    """The joint table of the operators of all ranks: their CPU (or device) time, the largest mean first."""
    seconds = "cpu_s" if sort_by == "cpu" else "device_s"
    found = ((one.name, sort_by, rank, getattr(one, seconds)) for rank, own in rows.items() for one in own)
    return sorted(joint(found), key=lambda row: -row.mean_s)


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All runs of the kernel of one name, on one rank or on all."""

    name: str
    kind: str
    count: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    share_frac: float = 0.0
    """Of the sum over all kernels, where all ranks are summed."""


def callers(trace: Trace, events: Ints, known: NDArray[np.bool_]) -> Ints:
    """The nearest of the `known` operators around each of `events` (kernels, or operators on a CPU)."""
    return around(trace, launchers(trace)[events] if trace.has_device else events, known)


def kernels_of(trace: Trace) -> Iterator[tuple[str, KernelTotal]]:
    """The kernels of one rank by name and kind, and by the sizes of inputs that an operator recorded."""
    kind, spent = work(trace).kind, spent_ns(trace)
    done = np.flatnonzero(kind != Kind.OTHER)
    owner = callers(trace, done, (trace.shape >= 0) & (trace.kind == Kind.CPU_OP))
    sizes, shape = np.unique([dims for dims, _, _ in trace.shapes] + [""], return_inverse=True)
    sized = shape[np.where(owner >= 0, trace.shape[owner], -1)]
    key = trace.label[done] * len(sizes) + sized
    order = np.argsort(key, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        runs = done[alike]
        sums = spent[runs].sum(), spent[runs].mean(), spent[runs].min(), spent[runs].max()
        name, of = trace.name(runs[0]), Kind(kind[runs[0]]).name.lower()
        total = KernelTotal(name, of, len(runs), *(float(ns) / 1e9 for ns in sums))
        yield str(sizes[sized[alike[0]]]), total


def kernel_totals(found: Iterable[tuple[str, KernelTotal]]) -> list[KernelTotal]:
    """Kernels by name over all ranks whose kernels are `found`, the longest total first."""
    alike = by_key(((one.name, one.kind), one) for _, one in found)
    totals_ns = {key: sum(round(1e9 * one.total_s) for one in same) for key, same in alike.items()}
    whole_s, totals = sum(totals_ns.values()) / 1e9, []
    for key, same in alike.items():
        total_s, count = totals_ns[key] / 1e9, sum(one.count for one in same)
        ends_s = min(one.min_s for one in same), max(one.max_s for one in same)
        share_frac = total_s / whole_s if whole_s else 0.0
        totals.append(KernelTotal(*key, count, total_s, total_s / count, *ends_s, share_frac))
    return sorted(totals, key=lambda kernel: (-kernel.total_s, kernel.name))
