"""How long a recorded step takes: its ops, priced as `estimate` prices ops, played out on their streams.

The host launches one op after the other, each in the time that it takes in compiled PyTorch, and waits where
the program asks for a value. An op begins when it is launched, and the ops before it on its stream and those
that the stream waits for have ended; a collective that is not waited for at once runs beside its stream until
a result of it is touched. Matmuls, attention and collectives take what they take in `estimate`, all other ops
the time to read and write their tensors, of look-ups what they find.

Other ranks do the same at the same time: what a stage of a pipeline waits for is there at once.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.compare import OPS_BY_DIMS
from meshwise.core.files import read_catalog
from meshwise.core.ledger import Ledger
from meshwise.cost.op import Cost, flash_attention, flash_attention_backward
from meshwise.estimate.intervals import UNMEASURED, Interval, far_chip, spreads
from meshwise.estimate.timing import machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import Overheads, find_overheads
from meshwise.program.op import ELEMENT_BYTES, Op
from meshwise.trace.intervals import NO_SPANS, difference, joined, length, merged, shares
from meshwise.trace.transfers import POINT_TO_POINT

SOFTWARE = "torch-2024"
"""Whose overheads a program pays that runs op by op: attention, launches, what kernels get of the memory."""
_MOVES = read_catalog("scripts.toml")["moves"]
_NS = 1e9

_NOTE = "messages of others are there at once: what stages of a pipeline wait for each other is not in it"

Launch = tuple[int, Sequence[int], Sequence[int], int]
"""A row of the ledger, the launches that it begins after, those that the host has waited for before, and how
far apart the ranks of a collective are."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Seconds of a step, and their parts, which sum to it; `ledger` is the step's with its times.

    `notes`: what is not in it.
    """

    step_s: float
    interval: Interval
    parts_s: dict[str, float]
    ledger: Ledger
    notes: tuple[str, ...]


def step_time(
    ledger: Ledger, launches: Sequence[Launch], cluster: Cluster, *, rank: int = 0, fp32: str = "fp32"
) -> StepTime:
    """What the `launches` of a step, whose rows are in `ledger`, take on `cluster`.

    `rank` has launched them; `fp32`: the dtype that its matmuls of fp32 run in.
    Raises ClusterError for a dtype that the chip has no units for.
    """
    overheads, axes, rows = find_overheads(cluster.chip, SOFTWARE), ledger["axis"], [*ledger.rows()]
    kinds = list(dict.fromkeys((row, stride) for row, *_, stride in launches))
    ops = [_op(rows[row], fp32, _apart(stride, rank, cluster)) for row, stride in kinds]
    seconds = dict(zip(kinds, _seconds(ops, cluster, overheads), strict=True))
    busy_on = dict(zip(kinds, (_busy(op, cluster) for op in ops), strict=True))
    of = np.array([row for row, *_ in launches], dtype=np.intp)
    each_ns = [round(_NS * seconds[row, stride]) for row, *_, stride in launches]
    on = [busy_on[row, stride] for row, *_, stride in launches]
    start, end, launched_ns = _played(launches, each_ns, on, round(_NS * overheads.host_s))
    parts_ns, open_ns, busy_ns = _spent(np.array(list(map(_kind, on)), dtype=str), start, end)
    # what hides takes cores and bandwidth from what it hides behind
    lost_ns = open_ns + overheads.interference_frac * (end - start - open_ns)
    lost_ns = np.where(axes != "", np.bincount(of, lost_ns, len(rows)), np.nan)
    parts_ns |= {f"comm_{axis}": lost_ns[axes == axis].sum() for axis in dict.fromkeys(axes[axes != ""])}
    parts_ns["host"] = max([launched_ns, *end.tolist()]) - busy_ns
    parts_ns["stragglers"] = sum(parts_ns.values()) * overheads.straggler_frac * math.log2(cluster.num_chips)
    parts_s = {name: float(each_ns) / _NS for name, each_ns in parts_ns.items()}
    step_s = sum(parts_s.values())
    times = np.maximum(np.bincount(of, minlength=len(rows)), 1) * _NS
    mean_s = np.bincount(of, each_ns, len(rows)) / times
    timed = Ledger(ledger.columns | {"time_s": mean_s, "exposed_s": lost_ns / times})
    notes = (_NOTE,) if {"send", "recv"} & {*ledger["collective"]} else ()
    return StepTime(step_s, _interval(step_s, cluster), parts_s, timed, notes)


def row_seconds(ledger: Ledger, cluster: Cluster) -> Ledger:
    """`ledger` with `time_s`, what each row takes alone on `cluster`, whose ranks lie side by side.

    ClusterError for a dtype that the chip has no units for.
    """
    ops = [_op(row, "fp32") for row in ledger.rows()]
    seconds = _seconds(ops, cluster, find_overheads(cluster.chip, SOFTWARE))
    return Ledger(ledger.columns | {"time_s": np.array(seconds)})


def _apart(stride: int, rank: int, cluster: Cluster) -> tuple[float, float]:
    """How far apart the ranks of a collective are, and a rank and its peer: in a node, or in two."""
    node = cluster.levels[0].ranks if cluster.levels else 1
    return abs(stride), 1.0 if rank // node == (rank + stride) // node else float(node)


def _op(row: Mapping[str, Any], fp32: str, apart: tuple[float, float] = (1.0, 1.0)) -> Op:
    """A recorded row as an op that is priced."""
    place = {name: row[name] for name in ("module", "phase", "dtype")} | {"name": row["op"]}
    if row["collective"]:
        sent = {name: row[name] for name in ("collective", "axis", "group_size", "payload_bytes")}
        if is_message := row["collective"] in POINT_TO_POINT:
            sent["group_size"] = 2.0
        return Op(kind="collective", stride=apart[is_message], **sent, **place)
    flop, (read_bytes, write_bytes) = row["flop"] or 0.0, _moved_bytes(row)
    if row["op"] in _MOVES["copies"] and not read_bytes:
        return Op(kind="kernel", host_bytes=write_bytes, **place)
    shape = tuple(map(float, filter(None, row["shape"].split("x"))))
    kind = OPS_BY_DIMS.get(len(shape), "kernel") if flop else "kernel"
    if flop and (kind == "kernel" or (kind == "matmul" and flop != 2.0 * math.prod(shape))):
        width = shape[1] if len(shape) > 1 else 1.0  # of a convolution: its channels
        kind, rows = "matmul", math.prod(shape) / width
        shape = (1.0, rows, width, flop / (2.0 * rows * width))
    if row["op"] == "_grouped_mm":  # it reads the weights of all groups, which share its rows
        _, m, n, k = shape
        groups = max(read_bytes / (ELEMENT_BYTES[row["dtype"]] * k * n) - m / n, 1.0)
        shape = (groups, m / groups, n, k)
    if kind == "attention":
        phase = "backward" if "backward" in row["op"] else "forward"
        place |= {"phase": phase, "causal": flop < _unmasked(shape, phase)}
    if kind != "kernel" and row["dtype"] == "fp32":
        place["dtype"] = fp32
    return Op(kind=kind, shape=shape, cost=Cost(flop, read_bytes, write_bytes), **place)


def _moved_bytes(row: Mapping[str, Any]) -> tuple[float, float]:
    """What an op reads and writes of the tensors that it touches."""
    op, read_bytes, write_bytes = row["op"], row["read_bytes"] or 0.0, row["write_bytes"] or 0.0
    if op in _MOVES["overwriting"] or op in _MOVES["in_part"]:
        read_bytes = max(read_bytes - write_bytes, 0.0)
    if op in _MOVES["look_ups"]:
        read_bytes = min(read_bytes, write_bytes)
    return read_bytes, read_bytes if op in _MOVES["in_part"] else write_bytes


def _unmasked(shape: tuple[float, ...], phase: str) -> float:
    """FLOP of an attention in which each query sees all keys."""
    batch, *sizes = shape
    work = flash_attention_backward if phase == "backward" else flash_attention
    return float(work(shape[3] * shape[4], *sizes, batch=batch, elem_bytes=0.0).flop)


def _busy(op: Op, cluster: Cluster) -> str:
    """What an op keeps busy, which does one thing at a time: the device, the way to the host, links."""
    if op.kind == "collective":
        is_far = op.group_size * op.stride > cluster.levels[0].ranks if cluster.levels else True
        return f"communication {'between' if is_far else 'in'} nodes {op.collective == 'recv'}"
    if op.kind != "kernel":
        return "compute"
    return "host" if op.host_bytes else "optimizer" if op.phase == "optimizer" else "memory"


def _kind(busy: str) -> str:
    """What a moment is spent on in which nothing but such ops runs."""
    return {"host": "memory"}.get(busy, busy.partition(" ")[0])


def _seconds(ops: Sequence[Op], cluster: Cluster, overheads: Overheads) -> list[float]:
    """Of each op, on the machine of its dtype; one that only moves bytes does so at any."""
    chip, seconds = cluster.chip, [0.0] * len(ops)
    dtypes = [op.dtype if op.kind in OPS_BY_DIMS.values() else chip.training_dtype for op in ops]
    for dtype in {*dtypes}:
        chosen = [number for number, one in enumerate(dtypes) if one == dtype]
        on = machine(cluster, dtype, overheads=overheads, job=cluster.num_chips)
        for number, each_s in zip(chosen, op_times([ops[number] for number in chosen], on), strict=True):
            seconds[number] = float(each_s) + float(ops[number].host_bytes) / on.host_bytes_per_s
    return seconds


def _played(
    launches: Sequence[Launch], each_ns: Sequence[int], on: Sequence[str], host_ns: int
) -> tuple[Any, Any, int]:
    """When each launch begins and ends, and when the last one was launched.

    A launch takes the first gap that is long enough in which what it keeps busy is free.
    """
    starts, ends, now = list[int](), list[int](), 0
    taken: dict[str, tuple[list[int], list[int]]] = {}
    for (_, after, waited, _), time_ns, busy in zip(launches, each_ns, on, strict=True):
        now = max([now, *map(ends.__getitem__, waited)]) + host_ns
        begin = max([now, *map(ends.__getitem__, after)])
        begins, stops = taken.setdefault(busy if busy == "host" or " " in busy else "device", ([], []))
        place = bisect_right(stops, begin)
        while place < len(begins) and begins[place] < begin + time_ns:
            begin, place = max(begin, stops[place]), place + 1
        begins.insert(place, begin)
        stops.insert(place, begin + time_ns)
        starts.append(begin)
        ends.append(begin + time_ns)
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64), now


def _spent(kinds: Any, start: Any, end: Any) -> tuple[dict[str, float], Any, int]:
    """Time of each kind of kernel, what of each collective lies beside no kernel, and all time of both.

    Time in which kernels of two kinds run is the first one's.
    """
    parts_ns: dict[str, float] = {}
    covered = NO_SPANS
    for kind in ("compute", "memory", "optimizer"):
        spans = difference(merged(start[kinds == kind], end[kinds == kind]), covered)
        parts_ns[kind], covered = length(spans), joined(covered, spans)
    sent, open_ns = kinds == "communication", np.zeros(len(kinds))
    spans = merged(start[sent], end[sent])
    open_ns[sent] = shares(start[sent], end[sent], difference(spans, covered))
    return parts_ns, open_ns, length(joined(covered, spans))


def _interval(step_s: float, cluster: Cluster) -> Interval:
    """As wide as that of the kind of training that is predicted worst: no script was measured."""
    table = spreads()
    known = [spread for name, spread in table.step_s.items() if not name.startswith(UNMEASURED)]
    measured = [name.removeprefix("on ") for name in table.measured["step_s"]["chip"]]
    widest = max(known, key=lambda spread: spread.p90)
    far = far_chip(cluster.chip, measured)
    return widest.around(step_s, "training runs that estimate priced", "source", far)
