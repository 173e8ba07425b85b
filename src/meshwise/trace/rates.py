"""What kernels and collectives reach: FLOP and bytes a second, for each operator and each collective.

Operators of known work, for each shape and dtype: matmuls and attention have the FLOP and bytes of
`cost.op`; of elementwise operators and norms the inputs are read once and one result as large as the largest
is written once. The time is that of the kernels which the operator launched (on a rank without a device, of
itself), each counted for the innermost such operator around it. Shapes must have been recorded
(`record_shapes=True`; `meshwise profile` does).

    roof_s = max(flop / matrix peak, bytes / memory bandwidth)      roof_frac = roof_s / time

Collectives, by kind, group and size, against the links:

    algorithm bandwidth    bytes of the full tensor / seconds on the wire
    bus bandwidth          bytes that leave a rank / seconds on the wire (as in nccl-tests)

Seconds on the wire are without the waiting for the last rank (see `collectives`), the median over the calls.
The link is that of the cluster's innermost level that joins the whole group; `predicted_s` is what the cost
model gives for the same call on that cluster, of as many ranks in each block of the level inside it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import by_key
from meshwise.core.ledger import COLLECTIVES, Collective as CollectiveKind, shape_text
from meshwise.core.units import DTYPE_BYTES
from meshwise.cost.op import Cost, attended_pairs, flash_attention, flash_attention_backward, matmul
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Chip, Cluster
from meshwise.machine.overheads import NONE
from meshwise.trace.breakdown import work
from meshwise.trace.collectives import Collective
from meshwise.trace.events import NAMES, Ints, Kind, Trace, inputs
from meshwise.trace.nesting import added_at, around, parents
from meshwise.trace.operators import callers, spent_ns
from meshwise.trace.transfers import element_bytes

_MATMULS, _ATTENTION, _ELEMENTWISE = NAMES["matmuls"], NAMES["attention"], NAMES["elementwise"]["names"]
Tensors = list[tuple[list[int], str]]


@dataclass(frozen=True, slots=True)
class OpRate:
    """All calls of one operator on inputs of one shape and dtype; FLOP, bytes and seconds of one call."""

    kind: str
    """matmul, attention, attention backward, elementwise."""
    op: str
    shape: str
    dtype: str
    count: int
    total_s: float
    median_s: float
    spread_frac: float
    """Median distance of the calls from their median, over the median."""
    flop: float
    bytes: float
    roof_s: float | None = None
    """On the chip's data sheet, if one was given."""

    @property
    def roof_frac(self) -> float | None:
        """How near the median call comes to the roof."""
        return None if self.roof_s is None else self.roof_s / self.median_s

    @property
    def flop_per_s(self) -> float:
        """FLOP a second of the median call."""
        return self.flop / self.median_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of the median call."""
        return self.bytes / self.median_s


def op_rates(traces: Sequence[Trace], chip: Chip | None = None) -> list[OpRate]:
    """The operators of known work over all `traces`, the longest total first; against `chip` if given."""
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    tensors: dict[tuple[str, str], tuple[Tensors, bool]] = {}
    for trace in traces:
        for (label, shape), seconds in _calls(trace).items():
            key = trace.labels[label][1], "".join(trace.shapes[shape])
            calls[key] += seconds
            tensors.setdefault(key, (trace.tensors(shape), _is_causal(trace, label, shape)))
    found = []
    for (name, text), seconds in calls.items():
        known = _work(name, *tensors[name, text])
        if known is None or not (median := float(np.median(seconds))):
            continue
        kind, shapes, dtype, cost = known
        flop, moved = float(cost.flop), float(cost.read_bytes + cost.write_bytes)
        spread = float(np.median(np.abs(np.array(seconds) - median))) / median
        roof = _roof_s(chip, dtype, flop, moved) if chip else None
        times = len(seconds), sum(seconds), median, spread
        found.append(OpRate(kind, name, shapes, dtype, *times, flop, moved, roof))
    return sorted(found, key=lambda row: (-row.total_s, row.op, row.shape))


def _roof_s(chip: Chip, dtype: str, flop: float, moved_bytes: float) -> float | None:
    dtypes = ("tf32", "fp32") if dtype == "fp32" else (dtype,)  # PyTorch may multiply fp32 in tf32
    tables = chip.matrix_flop_per_s, chip.vector_flop_per_s
    peak = max(table.get(one, 0.0) for one in dtypes for table in tables)
    return max(flop / peak, moved_bytes / chip.memory_bytes_per_s) if peak else None


def _calls(trace: Trace) -> dict[tuple[int, int], list[float]]:
    """Seconds of every call of an operator of known work, by label and shape."""
    known = _of_names(trace, lambda name: name in {*_MATMULS, *_ATTENTION, *_ELEMENTWISE})
    done, inner = np.flatnonzero(work(trace).kind == Kind.COMPUTE), np.flatnonzero(known)
    outer = around(trace, parents(trace)[inner], known)  # a DTensor's operator runs its own on the shard
    known[outer[(outer >= 0) & (trace.label[outer] == trace.label[inner])]] = False
    owner = callers(trace, done, known)
    seconds = added_at(owner, spent_ns(trace)[done] / 1e9, len(trace))
    calls = np.flatnonzero(known & (seconds > 0))
    kinds = zip(trace.label[calls].tolist(), trace.shape[calls].tolist(), strict=True)
    return by_key(zip(kinds, seconds[calls].tolist(), strict=True))


def _of_names(trace: Trace, is_known: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Which events are operators with shapes whose names are known."""
    return trace.named(is_known) & (trace.shape >= 0) & (trace.kind == Kind.CPU_OP)


def matmul_shapes(trace: Trace, events: Ints) -> Ints:
    """The matmul that ran each of `events`, as the number of its shape in `trace.shapes`; -1 for none."""
    owner = callers(trace, events, _of_names(trace, _MATMULS.__contains__))
    return np.where(owner >= 0, trace.label[owner] * len(trace.shapes) + trace.shape[owner], -1)


def matmul_shape(trace: Trace, number: int) -> str:
    """Sizes of a matmul, `batch x rows x columns x inner`, by its number from `matmul_shapes`."""
    label, shape = divmod(number, len(trace.shapes))
    known = _work(trace.labels[label][1], trace.tensors(shape), False)
    return known[1] if known else ""


def _is_causal(trace: Trace, label: int, shape: int) -> bool:
    place = _ATTENTION.get(trace.labels[label][1])
    return place is not None and inputs(trace.shapes[shape][2])[place : place + 1] == ["True"]


def _work(name: str, tensors: Tensors, causal: bool) -> tuple[str, str, str, Cost] | None:
    """Kind, shape and dtype of an operator and its work; None if its inputs are not what they should be."""
    dtype = NAMES["dtypes"].get(tensors[0][1].lower(), "") if tensors else ""
    if not dtype:
        return None
    dims, size = [dim for dim, _ in tensors], DTYPE_BYTES[dtype]
    if name in _MATMULS:
        a, b = [*dims[_MATMULS[name] :], [], []][:2]
        if not 2 <= len(a) == len(b) <= 3 or a[-1] != b[-2]:
            return None
        batch = a[0] if len(a) == 3 else 1
        text = f"{batch} x " * (batch > 1) + f"{a[-2]}x{b[-1]}x{a[-1]}"
        return "matmul", text, dtype, matmul(a[-2], b[-1], a[-1], elem_bytes=size, batch=batch)
    if name in _ATTENTION:
        is_backward = name.endswith("backward")
        q, k, v = [*dims[is_backward:], [], [], []][:3]
        if not len(q) == len(k) == len(v) == 4:
            return None
        (batch, heads, seq_q, width), (_, groups, seq_k, _) = q, k
        sizes = (attended_pairs(seq_q, seq_k, causal=causal), heads, groups, seq_q, seq_k, width, v[3])
        of = flash_attention_backward if is_backward else flash_attention
        text = f"{shape_text(q)}, {seq_k} keys" + ", causal" * causal
        return "attention" + " backward" * is_backward, text, dtype, of(*sizes, batch=batch, elem_bytes=size)
    moved = [float(np.prod(dim)) * element_bytes(kind) for dim, kind in tensors]
    largest = max(range(len(moved)), key=lambda i: moved[i])
    reads, writes = (moved[1:2], moved[0]) if name == "aten::copy_" else (moved, moved[largest])
    return "elementwise", shape_text(dims[largest]), dtype, Cost(0.0, float(sum(reads)), writes)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """All calls of one collective in one group on one size."""

    name: str
    group: str
    group_size: int | None
    bytes: float
    count: int
    wire_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float | None
    link: str = ""
    link_frac: float | None = None
    predicted_s: float | None = None


def bandwidths(found: Sequence[Collective], cluster: Cluster | None = None) -> list[Bandwidth]:
    """One row for each kind, group and size that several ranks recorded, the longest in sum first."""
    known = [one for one in found if one.bytes and one.wire_s and one.num_ranks > 1]
    calls = by_key(((one.name, one.group, one.bytes), one) for one in known)
    ordered = sorted(calls.values(), key=lambda same: -sum(one.wire_s for one in same))
    return [_row(same, cluster) for same in ordered]


def _row(calls: Sequence[Collective], cluster: Cluster | None) -> Bandwidth:
    one, wire_s = calls[0], float(np.median([call.wire_s for call in calls]))
    speeds = [call.sent_bytes_per_s for call in calls if call.sent_bytes_per_s]
    bus, size = float(np.median(speeds)) if speeds else None, one.bytes or 0.0
    link, frac, predicted_s = "", None, None
    if cluster is not None and bus:
        ranks = sorted(one.wait_s)
        blocks, ends = [1.0, *(level.ranks for level in cluster.levels)], (ranks[0], ranks[-1])
        at = next(at for at, block in enumerate(blocks[1:]) if ends[0] // block == ends[1] // block)
        link, frac = cluster.levels[at].name, bus / cluster.levels[at].bytes_per_s
        kind = "send" if one.name == "send_recv" else one.name
        if kind in COLLECTIVES:
            sharing = max(Counter(rank // blocks[at] for rank in ranks).values())
            known, stride = cast(CollectiveKind, kind), max(ranks[1] - ranks[0], blocks[at] / sharing)
            machine_s = machine(cluster, "fp32", overheads=NONE).collective_s
            predicted_s = float(machine_s(known, size, one.group_size or len(ranks), stride))
    rates = size / wire_s, bus, link, frac, predicted_s
    return Bandwidth(one.name, one.group, one.group_size, size, len(calls), wire_s, *rates)
