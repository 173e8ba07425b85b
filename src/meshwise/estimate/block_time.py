"""From the ops of a block to its seconds: per phase, and by what they were spent on.

The phases are those that a pipeline schedule moves: forward (F), gradient of the input (B), gradient
of the weights (W), and the core attention that selective recomputation runs again. Within a phase
the ops run one after the other. A collective that may hide behind an op costs what sticks out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwise.core.units import Num
from meshwise.estimate.timing import OpTime
from meshwise.machine.overheads import NONE, Overheads
from meshwise.program.context import CORE
from meshwise.program.op import Op


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Seconds by what they were spent on; parts add, and their sum is the time.

    `compute`: ops that the matrix or vector units bind; `memory`: ops that memory binds; `host`: waiting
    for the CPU to hand out work; `comm_*`: communication that nothing hides.
    """

    compute: Num = 0.0
    memory: Num = 0.0
    host: Num = 0.0
    comm_tp: Num = 0.0
    comm_cp: Num = 0.0
    comm_ep: Num = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.compute + other.compute,
            self.memory + other.memory,
            self.host + other.host,
            self.comm_tp + other.comm_tp,
            self.comm_cp + other.comm_cp,
            self.comm_ep + other.comm_ep,
        )

    def __mul__(self, times: Num) -> Parts:
        return Parts(
            self.compute * times,
            self.memory * times,
            self.host * times,
            self.comm_tp * times,
            self.comm_cp * times,
            self.comm_ep * times,
        )

    @property
    def total_s(self) -> Num:
        """Their sum."""
        return self.compute + self.memory + self.host + self.comm_tp + self.comm_cp + self.comm_ep


@dataclass(frozen=True, slots=True, eq=False)
class BlockTime:
    """One microbatch of one block: seconds by phase, bytes kept, weights, on one rank.

    `widest_bytes` is the largest gradient of an activation that the backward holds; `adding_s`, a part of
    `weight`, is the time of adding the gradients of the weights to those of the microbatches before.
    """

    forward: Parts
    backward: Parts
    weight: Parts
    core: Parts
    saved_bytes: Num
    core_bytes: Num
    num_params: Num
    num_expert_params: Num
    widest_bytes: Num
    exchange_bytes: Num
    adding_s: Num


def exposed_s(
    op: Op, time: OpTime, ops: Sequence[Op], times: Sequence[OpTime], overheads: Overheads = NONE
) -> Num:
    """Time that the collective `op` costs: what sticks out of its `hides_behind` op, and interference.

    Collectives behind one op share it: each takes a part in proportion to its own time. What is hidden
    is not all won: it slows the compute that hides it, or the software does not hide it at all.
    """
    if not op.hides_behind:
        return time.comm_s
    same = [
        (other, t)
        for other, t in zip(ops, times, strict=True)
        if other.module == op.module and other.phase == op.phase
    ]
    cover_s = sum(
        _all(other, t.busy_s)
        for other, t in same
        if other.name == op.hides_behind and other.kind != "collective"
    )
    all_s = sum(t.comm_s * other.count for other, t in same if other.hides_behind == op.hides_behind)
    stick_out_frac = np.maximum(all_s - cover_s, 0.0) / np.maximum(all_s, 1e-30)
    return time.comm_s * (stick_out_frac + overheads.not_hidden_frac(op.axis) * (1.0 - stick_out_frac))


def block_time(
    ops: Sequence[Op],
    times: Sequence[OpTime],
    *,
    hide: Iterable[str] = (),
    overheads: Overheads = NONE,
    memory_bytes_per_s: Num = np.inf,
) -> BlockTime:
    """Add up the ops of one block; the axes named in `hide` (tp, ep) overlap with the phase's compute.

    A phase never takes less than the CPU needs to launch its ops, and that much more where launches block;
    adding the gradients to those of the microbatches before is memory traffic of the weight phase.
    """
    sums: dict[str, dict[str, Num]] = {phase: {} for phase in ("forward", "backward", "weight", "core")}
    for op, time in zip(ops, times, strict=True):
        _spend(sums["weight" if op.is_weight_grad else op.phase], op, time, ops, times, overheads)
        if op.phase == "forward" and op.name in CORE:
            _spend(sums["core"], op, time, ops, times, overheads)
    phases = {phase: Parts(**spent) for phase, spent in sums.items()}
    for axis in hide:
        for phase in ("forward", "backward"):
            phases[phase] = _hidden(phases[phase], f"comm_{axis}", overheads.not_hidden_frac(axis))
    weight_s = phases["weight"].total_s
    for phase, beside_s in (("forward", 0.0), ("backward", weight_s)):
        floor_s = _host_s(ops, phase, overheads)
        busy_s = 0.0 if overheads.launches_block else phases[phase].total_s + beside_s
        waiting_s = np.maximum(floor_s - busy_s, 0.0)
        phases[phase] = replace(phases[phase], host=waiting_s)
    forward = [op for op in ops if op.phase == "forward"]
    num_params = sum(op.num_params for op in forward)
    adding_s = overheads.accumulate_bytes * num_params / memory_bytes_per_s
    phases["weight"] = phases["weight"] + Parts(memory=adding_s)
    return BlockTime(
        **phases,
        saved_bytes=sum(op.saved_bytes for op in forward),
        core_bytes=sum(op.recomputed_bytes for op in forward),
        num_params=sum(op.num_params for op in forward if not _is_expert(op)),
        num_expert_params=sum(op.num_params for op in forward if _is_expert(op)),
        widest_bytes=_widest_bytes(ops),
        exchange_bytes=_exchange_bytes(ops),
        adding_s=adding_s,
    )


def _widest_bytes(ops: Sequence[Op]) -> Num:
    widest: Num = 0.0
    for op in ops:
        if op.phase == "backward" and op.kind in ("matmul", "kernel") and not op.is_weight_grad:
            widest = np.maximum(widest, op.cost.write_bytes)
    return widest


def _exchange_bytes(ops: Sequence[Op]) -> Num:
    """The largest tensor that a tensor-parallel exchange gathers, or brings to be scattered."""
    largest: Num = 0.0
    for op in ops:
        if op.axis.startswith("tp") and op.collective != "all_reduce":
            largest = np.maximum(largest, op.payload_bytes)
    return largest


def _host_s(ops: Sequence[Op], phase: str, overheads: Overheads) -> Num:
    """Time the CPU needs to launch the ops of a phase; a collective of one rank is not launched."""
    alike = [op for op in ops if op.phase == phase]
    launches: Num = 0.0
    for op in alike:
        is_launched = np.where(np.asarray(op.group_size) > 1, 1.0, 0.0) if op.kind == "collective" else 1.0
        launches = launches + _all(op, is_launched)
    routing_s = overheads.moe_host_s if any(map(_is_expert, alike)) else 0.0
    return overheads.host_s * launches + routing_s


def _spend(
    sums: dict[str, Num],
    op: Op,
    time: OpTime,
    ops: Sequence[Op],
    times: Sequence[OpTime],
    overheads: Overheads,
) -> None:
    """Add the time of one op to the part it is spent on; a part that nothing adds to costs nothing."""
    if op.kind == "collective":
        name = f"comm_{op.axis[:2]}"  # the axes of a tensor grid (tp_row, tp_col) are tensor parallelism
        sums[name] = sums.get(name, 0.0) + exposed_s(op, time, ops, times, overheads) * op.count
        return
    busy_s = _all(op, time.busy_s)
    by_memory_s = busy_s * _memory_binds(time)
    sums["memory"] = sums.get("memory", 0.0) + by_memory_s
    sums["compute"] = sums.get("compute", 0.0) + (busy_s - by_memory_s)


def _all(op: Op, value: Num) -> Num:
    """`value` of all occurrences of `op`; nearly all ops occur once."""
    return value if isinstance(op.count, float) and op.count == 1.0 else value * op.count


def _memory_binds(time: OpTime) -> Num:
    """1 where memory takes longer than the arithmetic, else 0."""
    if isinstance(time.memory_s, float) and isinstance(time.compute_s, float):
        return float(time.memory_s > time.compute_s)
    return np.where(np.asarray(time.memory_s) > time.compute_s, 1.0, 0.0)


def _hidden(parts: Parts, name: str, interference_frac: float) -> Parts:
    """`parts` with the communication `name` behind the phase's compute, except what sticks out."""
    busy_s, comm_s = parts.compute + parts.memory, getattr(parts, name)
    sticks_out_s = np.maximum(comm_s - busy_s, 0.0)
    return replace(parts, **{name: sticks_out_s + interference_frac * (comm_s - sticks_out_s)})


def _is_expert(op: Op) -> bool:
    return op.name.startswith("expert_")
