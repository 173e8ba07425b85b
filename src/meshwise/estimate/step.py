"""A whole step from its parts: blocks, stages, the pipeline, data parallelism, the optimizer.

    step = m t_max + bubble + exposed p2p + exposed data-parallel exchange + optimizer + stragglers

m microbatches, t_max one of them on the slowest stage. All of it is arithmetic on `Degrees`, so one
call prices one plan or a grid: what depends on few axes (a block on tp, cp and the microbatch) is
computed along those alone, and only the last sums run over the whole grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.schedule import bubble_s
from meshwise.estimate.block_time import Parts, block_time
from meshwise.estimate.degrees import Degrees, shard_ranks
from meshwise.estimate.memory import (
    OPTIMIZER_BYTES,
    Memory,
    block_input_bytes,
    grad_bytes,
    held_params,
    stage_memory,
    weight_bytes,
)
from meshwise.estimate.stage import Blocks, Stage, StageTime, stage_time
from meshwise.estimate.timing import Machine, op_times
from meshwise.model.architecture import Layer, Model
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import precision
from meshwise.program.vocabulary import embed, head

HOST_BYTES_PER_S = 25e9  # a GPU's share of PCIe 4.0 x16, of which 32 GB/s nominal; for offloading


@dataclass(frozen=True, slots=True, eq=False)
class StepCost:
    """A step of one plan, or of each plan of a grid.

    `time` holds the parts of the slowest stage over all microbatches; with `bubble_s`, `comm_pp_s`,
    `comm_dp_s`, `optimizer_s` and `straggler_s` they add up to `step_s`. `memory` is the fullest stage's.
    """

    step_s: Num
    time: Parts
    bubble_s: Num
    comm_pp_s: Num
    comm_dp_s: Num
    optimizer_s: Num
    straggler_s: Num
    memory: Memory
    stages: tuple[StageCost, ...]
    blocks: Blocks
    hop_s: Num


@dataclass(frozen=True, slots=True, eq=False)
class StageCost:
    """One kind of stage: what it holds, its times per microbatch, its memory at the peak."""

    stage: Stage
    time: StageTime
    memory: Memory
    comm_dp_s: Num
    optimizer_s: Num


def price_blocks(model: Model, on: Degrees, machine: Machine) -> Blocks:
    """Time the parts of the model on one rank and one microbatch."""
    cut: Cut = on.cut()
    hide = tuple(axis for axis in ("tp", "ep") if getattr(on.plan, f"overlap_{axis}"))
    numbers = {field.name: getattr(cut, field.name) for field in fields(cut) if field.name != "precision"}
    if any(isinstance(number, np.ndarray) for number in numbers.values()):
        return _price(model, cut, hide, machine)
    # Plans that cut a block alike share its price, whatever their depth.
    shape = replace(model, name="", num_layers=max(2, 1 + _first_dense(model)), source="")
    return _price_alike(shape, tuple(numbers.items()), on.plan.dtype, hide, machine)


def _first_dense(model: Model) -> int:
    return model.moe.first_dense_layers if model.moe else 0


@lru_cache(maxsize=512)
def _price_alike(
    model: Model, numbers: tuple[tuple[str, Any], ...], dtype: str, hide: tuple[str, ...], machine: Machine
) -> Blocks:
    return _price(model, Cut(precision=precision(dtype), **dict(numbers)), hide, machine)


def _price(model: Model, cut: Cut, hide: tuple[str, ...], machine: Machine) -> Blocks:
    parts = {"dense": block(model, cut), "embed": embed(model, cut), "head": head(model, cut)}
    if model.moe is not None:
        parts["moe"] = block(model, cut, Layer(moe=True))
    times = iter(op_times([op for ops in parts.values() for op in ops], machine))
    stream = machine.base.memory_bytes_per_s * machine.efficiency.memory.memory_frac
    common: dict[str, Any] = {"overheads": machine.overheads, "memory_bytes_per_s": stream}
    timed = {
        name: block_time(ops, list(islice(times, len(ops))), hide=hide, **common)
        for name, ops in parts.items()
    }
    embedded = replace(
        timed["embed"], forward=timed["embed"].forward + Parts(host=machine.overheads.microbatch_s)
    )
    return Blocks(timed["dense"], timed.get("moe"), embedded, timed["head"])


def step_cost(
    model: Model, on: Degrees, machine: Machine, stages: Sequence[Stage], *,
    trains: bool = True,
) -> StepCost:  # fmt: skip
    """The cost of one step of the plans `on`; `trains` False prices the forward alone."""
    blocks = price_blocks(model, on, machine)
    costs = tuple(_stage_cost(model, stage, blocks, on, machine, trains=trains) for stage in stages)
    exists = [np.where(np.asarray(cost.stage.ranks) > 0, 1.0, 0.0) for cost in costs]
    times = [cost.time if trains else _forward_only(cost.time) for cost in costs]
    slowest = _largest([time.total.total_s for time in times], exists)
    parts = _chosen([time.total for time in times], slowest)
    time = parts * on.num_microbatches
    f_s, b_s, w_s = (
        _mean([getattr(time, phase).total_s for time in times], costs, on.pp)
        for phase in ("forward", "backward", "weight")
    )
    hop_s = _p2p_s(model, on, machine)
    fill = partial(bubble_s, on.schedule, on.pp, on.num_microbatches, on.vpp, f_s, b_s, w_s)
    waiting_s = fill(p2p_s=0.0)
    # The pipe fills and drains at the mean pace of the stages and runs at that of the slowest.
    lead_s = time.total_s / on.num_microbatches - (f_s + b_s + w_s)
    bubble = np.where(np.asarray(on.pp) > 1, np.maximum(waiting_s - lead_s, 0.0), 0.0)
    comm_pp = fill(p2p_s=hop_s) - waiting_s + _held_s(on, hop_s)
    comm_pp = comm_pp * (1.0 if trains else 0.5)
    comm_dp = _largest_of([cost.comm_dp_s for cost in costs], exists) if trains else 0.0
    optimizer = _largest_of([cost.optimizer_s for cost in costs], exists) if trains else 0.0
    alone_s = time.total_s + bubble + comm_pp + comm_dp + optimizer
    straggler = alone_s * machine.overheads.straggler_frac * np.log2(on.world)
    return StepCost(
        step_s=alone_s + straggler,
        time=time,
        bubble_s=bubble,
        comm_pp_s=comm_pp,
        comm_dp_s=comm_dp,
        optimizer_s=optimizer,
        straggler_s=straggler,
        memory=_chosen(
            [cost.memory for cost in costs], _largest([cost.memory.total for cost in costs], exists)
        ),
        stages=costs,
        blocks=blocks,
        hop_s=hop_s,
    )


def _forward_only(time: StageTime) -> StageTime:
    return StageTime(time.stage, time.forward, Parts(), Parts())


def _stage_cost(
    model: Model, stage: Stage, blocks: Blocks, on: Degrees, machine: Machine, *,
    trains: bool,
) -> StageCost:  # fmt: skip
    time = stage_time(stage, blocks, on)
    return StageCost(
        stage=stage,
        time=time,
        memory=stage_memory(model, stage, blocks, on, overheads=machine.overheads, trains=trains),
        comm_dp_s=data_parallel_s(stage, time, blocks, on, machine),
        optimizer_s=optimizer_s(stage, blocks, on, machine),
    )


def _p2p_s(model: Model, on: Degrees, machine: Machine) -> Num:
    """Time of one message to the next stage: a block's input, its shard of each rank of tp."""
    shard = 1.0 if on.cut().sequence_parallel else on.tp  # sent in tp pieces either way
    return machine.collective_s("send", block_input_bytes(model, on) / shard, on.pp, on.stride("pp"))


def _held_s(on: Degrees, hop_s: Num) -> Num:
    """Time a stage is held by its own messages, two a microbatch and chunk, where they do not overlap."""
    held_s = 2.0 * hop_s * on.num_microbatches * on.vpp
    return np.where((np.asarray(on.pp) > 1) & (not on.plan.overlap_pp), held_s, 0.0)


def data_parallel_s(stage: Stage, time: StageTime, blocks: Blocks, on: Degrees, machine: Machine) -> Num:
    """Time of exchanging gradients and weights over the replicas that no compute hides.

    ZeRO-0 all-reduces gradients; 1 and 2 reduce-scatter them and all-gather the new weights; 3 gathers
    each block's weights before its forward and its backward and scatters gradients, every microbatch.
    The gradient of a block travels while the blocks below it compute, so at best one block's part of it
    sticks out, and likewise the gather of the first block's weights. All of it travels in messages: those
    of a block under ZeRO-3, buckets otherwise (`Overheads.messages_per_block`, `bucket_bytes`).
    """
    dense, experts = held_params(stage, blocks)
    of_blocks = machine.overheads.messages_per_block * stage.layers
    rounds = np.where(np.asarray(on.zero) >= 3, on.num_microbatches, 1.0)
    grads_s = _sharded_s("reduce_scatter", grad_bytes(on), dense, experts, of_blocks, on, machine)
    weights_s = _sharded_s("all_gather", weight_bytes(on), dense, experts, of_blocks, on, machine)
    gathers = np.where(np.asarray(on.zero) >= 3, 2.0, np.where(np.asarray(on.zero) >= 1, 1.0, 0.0))
    # Without ZeRO the gradients come back by the second half of an all-reduce.
    grads_s = grads_s + np.where(
        np.asarray(on.zero) >= 1,
        0.0,
        _sharded_s("all_gather", grad_bytes(on), dense, experts, of_blocks, on, machine),
    )
    if not on.plan.overlap_dp:
        return rounds * (grads_s + gathers * weights_s)
    pieces = np.maximum(stage.layers, 1.0)
    backward_s = (time.backward + time.weight).total_s
    forward_s = time.forward.total_s
    behind_backward = grads_s + np.maximum(gathers - 1.0, 0.0) * weights_s
    behind_forward = np.minimum(gathers, 1.0) * weights_s
    tail_s = grads_s / pieces
    first_s = behind_forward / pieces
    sticks_out_s = np.maximum(behind_backward - tail_s - backward_s, 0.0) + np.maximum(
        behind_forward - first_s - forward_s, 0.0
    )
    hidden_s = behind_backward + behind_forward - tail_s - first_s - sticks_out_s
    return rounds * (sticks_out_s + machine.overheads.interference_frac * hidden_s) + (tail_s + first_s)


def _sharded_s(
    kind: str,
    elem_bytes: float,
    dense: Num,
    experts: Num,
    messages_of_blocks: Num,
    on: Degrees,
    machine: Machine,
) -> Num:
    """One pass over gradients or weights: within the sharing group, then (gradients) across groups."""
    total: Num = 0.0
    inner_axis = "cp" if on.plan.placement.index("cp") < on.plan.placement.index("dp") else "dp"
    stride = on.stride(inner_axis)
    for params, replicas, step in (
        (dense, on.replicas, stride),
        (experts, on.expert_replicas, on.stride("tp") * on.etp * on.ep),
    ):
        if isinstance(params, float | int) and params == 0:
            continue
        group = np.minimum(on.zero_group, replicas)
        in_buckets = elem_bytes * params / machine.overheads.bucket_bytes
        messages = np.maximum(np.where(np.asarray(on.zero) >= 3, messages_of_blocks, in_buckets), 1.0)
        message_bytes = elem_bytes * params / messages
        seconds = machine.collective_s(kind, message_bytes, group, step)
        if kind == "reduce_scatter":
            outer = replicas / group
            seconds = seconds + machine.collective_s("all_reduce", message_bytes / group, outer, step * group)
        copies_s = np.where(np.asarray(on.zero) >= 3, machine.overheads.shard_copy_s * group, 0.0)
        seconds = messages * (seconds + copies_s)
        total = total + np.where(np.asarray(params) > 0, seconds, 0.0)  # no message where nothing is held
    return total


def optimizer_s(stage: Stage, blocks: Blocks, on: Degrees, machine: Machine) -> Num:
    """The optimizer's pass over its states: each read and written once, gradients read twice (norm, update).

    Offloaded states are updated on the host: gradients go there and weights come back over PCIe.
    """
    dense, experts = held_params(stage, blocks)
    params = dense / shard_ranks(on, 1) + experts / shard_ranks(on, 1, experts=True)
    per_param = 2 * OPTIMIZER_BYTES[on.plan.optimizer] + 2 * grad_bytes(on) + weight_bytes(on)
    rate = machine.base.memory_bytes_per_s * machine.efficiency.memory.memory_frac
    on_chip = (1 - on.offload_optimizer) * per_param / rate
    on_host = on.offload_optimizer * (grad_bytes(on) + weight_bytes(on)) / HOST_BYTES_PER_S
    return params * (on_chip + on_host)


def _largest(values: Sequence[Num], exists: Sequence[Num]) -> Num:
    """Which of `values` is largest, among those that exist."""
    masked = [np.where(there > 0, value, -1.0) for value, there in zip(values, exists, strict=True)]
    if len(masked) == 1:
        return np.zeros_like(masked[0], dtype=np.intp)
    return np.argmax(np.stack(np.broadcast_arrays(*masked)), axis=0)


def _largest_of(values: Sequence[Num], exists: Sequence[Num]) -> Num:
    largest: Num = 0.0
    for value, there in zip(values, exists, strict=True):
        largest = np.maximum(largest, np.where(there > 0, value, 0.0))
    return largest


_Record = TypeVar("_Record", Parts, Memory)


def _chosen(items: Sequence[_Record], index: Num) -> _Record:
    """Field by field, the item that `index` names."""
    if len(items) == 1:
        return items[0]
    names = (field.name for field in fields(items[0]))
    return type(items[0])(*(_choose([getattr(item, name) for item in items], index) for name in names))


def _choose(values: Sequence[Num], index: Num) -> Num:
    chosen = values[0]
    for i, value in enumerate(values[1:], start=1):
        chosen = np.where(index == i, value, chosen)
    return chosen


def _mean(values: Sequence[Num], costs: Sequence[StageCost], pp: Num) -> Num:
    return sum(value * cost.stage.ranks for value, cost in zip(values, costs, strict=True)) / pp
