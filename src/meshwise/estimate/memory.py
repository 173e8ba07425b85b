"""Memory of one rank at its peak: states of the weights, activations in flight, and workspace.

States, per parameter a rank holds: the weight itself (2 bytes in mixed precision), its gradient, and
the optimizer's numbers (Adam in mixed precision: fp32 master weight and two moments, 12 bytes). ZeRO
cuts over the replicas the optimizer states (stage 1), the gradients too (2), the weights too (3):
arXiv 1910.02054. With fp16 gradients that is the 16 bytes per parameter of that paper; Megatron keeps
gradients in fp32, 18 bytes.

Activations: what the forward keeps, per microbatch, times the microbatches in flight on that stage
under the schedule. Selective recomputation drops the core attention's (arXiv 2205.05198), full
recomputation keeps only each block's input, and at the peak one block whole while it is redone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.cost.schedule import in_flight_microbatches, weight_copies
from meshwise.estimate.block_time import BlockTime
from meshwise.estimate.degrees import Degrees, shard_ranks
from meshwise.estimate.stage import Blocks, Stage, recomputed
from meshwise.machine.overheads import Overheads
from meshwise.model.architecture import Model

OPTIMIZER_BYTES = {
    "adam": 12.0,  # fp32 master, m, v
    "adam-fp32": 8.0,  # fp32 weights themselves are the master
    "adam-bf16": 4.0,  # bf16 m, v, no master
    "adam-8bit": 6.0,  # fp32 master, 8-bit m, v (arXiv 2110.02861)
    "muon": 8.0,  # fp32 master and one momentum (arXiv 2502.16982)
    "sgd": 4.0,  # fp32 master
    "none": 0.0,
}
"""Bytes per parameter that each optimizer keeps beside weight and gradient."""

EXPONENTIAL_BYTES = 4.0
"""What `layout.vocabulary` keeps per logit; memory counts `Overheads.loss_bytes` in its place."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes of one rank of a stage at its peak, by what they hold; `total` is their sum."""

    weights: Num
    gradients: Num
    optimizer: Num
    activations: Num
    buffers: Num
    overhead: Num

    @property
    def total(self) -> Num:
        """All of it."""
        return (
            self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.overhead
        )


def weight_bytes(on: Degrees) -> float:
    """Bytes of one weight: 4 in fp32 and tf32, 2 under every narrower type (fp8 keeps bf16 weights)."""
    return max(2.0, DTYPE_BYTES[on.plan.dtype])


def grad_bytes(on: Degrees) -> float:
    """Bytes of one gradient as it is accumulated and reduced."""
    return DTYPE_BYTES[on.plan.grad_dtype]


def held_params(stage: Stage, blocks: Blocks) -> tuple[Num, Num]:
    """Parameters on one rank of a stage: dense ones, and those of experts."""
    parts = blocks.of(stage)
    dense = sum(count * part.num_params for count, part in parts)
    experts = sum(count * part.num_expert_params for count, part in parts)
    return dense, experts


def state_bytes(
    stage: Stage, blocks: Blocks, on: Degrees, *, second_grad_bytes: float = 0.0, trains: bool = True
) -> tuple[Num, Num, Num]:
    """Bytes of weights, gradients and optimizer states of one rank.

    `second_grad_bytes`: of a gradient in the type of the weights, where the sum is kept in a wider one.
    """
    copies = weight_copies(on.schedule)
    sizes = (
        weight_bytes(on),
        grad_bytes(on) + (second_grad_bytes if grad_bytes(on) > weight_bytes(on) else 0.0),
        OPTIMIZER_BYTES[on.plan.optimizer] * (1 - on.offload_optimizer),
    )
    totals: list[Num] = []
    for per_param, from_stage in zip(sizes, (3, 2, 1), strict=True):
        dense, experts = held_params(stage, blocks)
        shard = dense / shard_ranks(on, from_stage) + experts / shard_ranks(on, from_stage, experts=True)
        totals.append(copies * per_param * shard * (1.0 if trains or from_stage == 3 else 0.0))
    return totals[0], totals[1], totals[2]


def block_input_bytes(model: Model, on: Degrees) -> Num:
    """The input of a block as a rank keeps it."""
    cut = on.cut()
    return cut.split_tokens * model.hidden * cut.precision.act_bytes


def activation_bytes(model: Model, stage: Stage, blocks: Blocks, on: Degrees) -> Num:
    """Bytes kept for the backward on one rank of a stage when most microbatches are in flight."""
    selective, full = recomputed(on)
    one_input = block_input_bytes(model, on)
    in_flight = in_flight_microbatches(on.schedule, on.pp, on.num_microbatches, on.vpp, stage.index)
    per_microbatch: Num = stage.embeddings * blocks.embed.saved_bytes
    for count, part in ((stage.dense_layers, blocks.dense), (stage.moe_layers, blocks.moe)):
        if part is not None:
            per_microbatch = per_microbatch + count * _kept_bytes(part, one_input, selective, full)
    return per_microbatch * in_flight * (1 - on.offload_activations)


def _kept_bytes(part: BlockTime, one_input: Num, selective: Num, full: Num) -> Num:
    return (1 - full) * (part.saved_bytes - selective * part.core_bytes) + full * one_input


def turn_bytes(model: Model, stage: Stage, blocks: Blocks, on: Degrees, loss_bytes: float) -> Num:
    """Bytes that live only while one microbatch turns round on a stage: the larger of two moments.

    At the head: its kept inputs, the logits and what the loss makes of them (`loss_bytes` per logit), and
    its weight gradient. In a block: what recomputation brings back, the widest gradient of an activation,
    and the gradients of its weights and of the head's, before they are added to the sum (experts add
    theirs one by one).
    """
    cut, elem_bytes = on.cut(), on.cut().precision.act_bytes
    selective, full = recomputed(on)
    one_input = block_input_bytes(model, on)
    logits = cut.tokens * model.vocab / cut.tp
    head_grads = stage.heads * elem_bytes * model.hidden * model.vocab / cut.tp
    kept_inputs = np.maximum(blocks.head.saved_bytes - EXPONENTIAL_BYTES * logits, 0.0)
    largest = stage.heads * (kept_inputs + loss_bytes * logits) + head_grads
    for count, part in ((stage.dense_layers, blocks.dense), (stage.moe_layers, blocks.moe)):
        if part is None:
            continue
        redone = part.saved_bytes - _kept_bytes(part, one_input, selective, full)
        in_block = redone + part.widest_bytes + elem_bytes * part.num_params + head_grads
        largest = np.maximum(largest, np.where(np.asarray(count) > 0, in_block, 0.0))
    return largest


def buffer_bytes(model: Model, stage: Stage, blocks: Blocks, on: Degrees, loss_bytes: float) -> Num:
    """Workspace: gathered activations, pipeline messages, gathered weights, and what one turn needs.

    Two gathered tensors of [tokens, hidden] (forward input, backward gradient) live at once under
    sequence parallelism; a pipeline holds two messages of each direction; ZeRO-3 two gathered blocks
    (the one computing and the one prefetched).
    """
    cut = on.cut()
    gathered = 2.0 * cut.tokens * model.hidden * cut.precision.act_bytes
    if cut.layout not in ("1d", "2d-cp"):  # panels, or the blocks of a product
        gathered = 2.0 * blocks.dense.exchange_bytes
    gathered = gathered * np.where(np.asarray(on.tp) > 1, 1.0, 0.0)
    messages = 4.0 * block_input_bytes(model, on) * np.where(np.asarray(on.pp) > 1, 1.0, 0.0)
    block_params = blocks.dense.num_params if blocks.moe is None else blocks.moe.num_params
    block_experts = 0.0 if blocks.moe is None else blocks.moe.num_expert_params
    prefetched = (
        2.0 * weight_bytes(on) * (block_params + block_experts) * np.where(np.asarray(on.zero) >= 3, 1.0, 0.0)
    )
    return gathered + messages + prefetched + turn_bytes(model, stage, blocks, on, loss_bytes)


def stage_memory(
    model: Model, stage: Stage, blocks: Blocks, on: Degrees, *, overheads: Overheads, trains: bool = True
) -> Memory:
    """Memory of one rank of `stage` at its peak; beyond its tensors, what `overheads` says."""
    weights, gradients, optimizer = state_bytes(
        stage, blocks, on, second_grad_bytes=overheads.second_grad_bytes, trains=trains
    )
    activations = activation_bytes(model, stage, blocks, on) if trains else block_input_bytes(model, on)
    buffers = buffer_bytes(model, stage, blocks, on, overheads.loss_bytes)
    tensors = weights + gradients + optimizer + activations + buffers
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=buffers,
        overhead=overheads.context_bytes + overheads.fragment_frac * tensors,
    )
