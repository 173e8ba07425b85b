"""What the replicas of a model exchange once a step, or once a microbatch: gradients and weights.

Ranks that hold the same weights keep them whole or as shards, sum gradients over microbatches in whole
tensors or in shards, and update all optimizer states or a shard (`Sharding`, one table for memory and
traffic, so that no stage has the memory of one row and the exchanges of another). What is exchanged follows:
weights held as shards are gathered where they are used; whole weights whose states are shards are gathered
once a step; sums held as shards are reduced after the backward of every microbatch, whole ones once a step.
So ZeRO-0 all-reduces gradients, 1 reduce-scatters them and all-gathers the new weights, 2 reduce-scatters
after every microbatch, 3 (FSDP) does too and gathers the weights of each block before its forward and its
backward, frozen ones in the few bits in which they are held (QLoRA). Where ZeRO shards over a group of the
replicas only, the shards of gradients are summed across groups. Dense weights are exchanged over data and
context parallel ranks, experts over the ranks that hold the same ones. Only weights that train have
gradients. All of it travels in messages: those of a block where its tensors are shards between microbatches
(Megatron-FSDP), buckets otherwise.

ZeRO 1, 2 and 3 are DeepSpeed's stages (arXiv 1910.02054) and Megatron-FSDP's `optim`, `optim_grads` and
`optim_grads_params`. FSDP2 (`program.fsdp2`) always has shards between steps, and within one under stage 3;
under stages 0 and 1 it sums whole gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from meshwise.core.columns import grouped
from meshwise.core.numbers import SINGLE, added, anywhere, larger, where
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, holds_table_twice
from meshwise.program.cut import GRID_AXES, Cut
from meshwise.program.op import Op, collective, precision

Column = tuple[float, float, float, float]
"""1 where a tensor is held as shards, for each ZeRO stage."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What is held as shards under ZeRO stages 0 to 3: weights between their uses in a step, sums of
    gradients between microbatches, and optimizer states.
    """

    weights: Column
    sums: Column
    states: Column


STAGES = Sharding(weights=(0.0, 0.0, 0.0, 1.0), sums=(0.0, 0.0, 1.0, 1.0), states=(0.0, 1.0, 1.0, 1.0))
FSDP2 = Sharding(weights=(0.0, 0.0, 0.0, 1.0), sums=(0.0, 0.0, 1.0, 1.0), states=(1.0, 1.0, 1.0, 1.0))


def at_stage(column: Column, zero: Num) -> Num:
    """The entry of `column` for each ZeRO stage of a grid."""
    return column[int(zero)] if isinstance(zero, SINGLE) else np.array(column)[zero.astype(np.intp)]


def num_reductions(sums_are_shards: Num, num_microbatches: Num) -> Num:
    """How often in a step gradients are reduced: once, or for each microbatch where the sums are shards."""
    return 1.0 + sums_are_shards * (num_microbatches - 1.0)


def sums_on_host(mesh: Mesh) -> Num:
    """Share of the gradients that goes to offloaded states once reduced (ZeRO-Offload, arXiv 2101.06840)."""
    return mesh.offload_optimizer * at_stage(STAGES.sums, mesh.zero)


def weight_bytes(mesh: Mesh) -> float:
    """Bytes of one weight: 4 in fp32 and tf32, 2 under every narrower type, unless `param_dtype` says fp8."""
    return 1.0 if mesh.plan.param_dtype == "fp8" else max(2.0, DTYPE_BYTES[mesh.plan.dtype])


def grad_bytes(mesh: Mesh) -> float:
    """Bytes of one gradient as it is accumulated and reduced."""
    return DTYPE_BYTES[mesh.plan.grad_dtype]


class Held(NamedTuple):
    """Weights on one rank: how many, and how many of them train, or are kept in the plan's `frozen_dtype`.

    Of those that train, `in_matrices` of blocks, which Muon orthogonalizes in `newton_schulz_flop`, and which
    a sampling keeps as its matmuls read them.
    """

    params: Num = 0.0
    trained: Num = 0.0
    quantized: Num = 0.0
    in_matrices: Num = 0.0
    newton_schulz_flop: Num = 0.0

    def bytes(self, mesh: Mesh) -> Num:
        """What they take where they are held, and as they are gathered."""
        wide, plan = weight_bytes(mesh), mesh.plan
        if mesh.kind == "sampling":
            spared = wide - precision(plan.dtype, plan.weight_dtype).weight_bytes
            return wide * self.params - spared * self.in_matrices
        spared = 0.0 if plan.frozen_dtype is None else wide - DTYPE_BYTES[plan.frozen_dtype]
        return wide * self.params - spared * self.quantized


def replicas(mesh: Mesh, *, of_experts: bool) -> tuple[Num, Num]:
    """Ranks that hold the same weights or shares of them, and how many of all replicas lie between two."""
    return (mesh.expert_replicas, mesh.etp * mesh.ep / mesh.tp) if of_experts else (mesh.replicas, 1.0)


def exchange(
    name: str, phase: str, kind: str, payload_bytes: Num, group_size: Num, axis: str = "dp", **more: Any
) -> Op:
    """Collectives of a step, which the compute of `phase` may hide, or which run in it."""
    return collective("step", name, phase, kind, axis, payload_bytes, group_size, **more)


def occurs(one: Op) -> bool:
    """Whether anything is exchanged, in some plan of a grid at least."""
    happens = (one.count > 0) & ((one.group_size > 1) | (one.host_bytes > 0))
    return bool(happens.any() if isinstance(happens, np.ndarray) else happens)


def exchanges(
    held: tuple[Held, Held], stage: Stage, mesh: Mesh, *, bucket_params: Num, messages_per_block: float
) -> Iterator[Op]:
    """The exchanges of one rank of `stage` in one step.

    Under DualPipe a rank holds two stages, each of which sees half of the microbatches there and half on the
    rank at the mirrored place: all ranks of both places are replicas of both stages.
    """
    copies = 1.0 / stage.share
    mirrored = mesh.apart(np.abs(mesh.pp - 1.0 - 2.0 * stage.index))
    of_blocks = messages_per_block * stage.num_layers
    sharded, gathered = at_stage(STAGES.states, mesh.zero), at_stage(STAGES.weights, mesh.zero)
    passing = stage.share * mesh.num_microbatches
    rounds = 1.0 + gathered * (passing - 1.0)
    summed = at_stage(STAGES.sums, mesh.zero)
    reductions = num_reductions(summed, passing)
    for of_experts, (params, trained, quantized, *_) in enumerate(held):
        if isinstance(params, SINGLE) and params == 0:
            continue
        name, (ranks, first) = "expert_" * of_experts, replicas(mesh, of_experts=bool(of_experts))
        at_place, trained = mesh.group_ranks(ranks), trained * mesh.trains
        group = copies * at_place
        (stride, runs), (far, far_runs) = mesh.replica_runs(first), mesh.replica_runs(first * at_place)
        if anywhere(copies > 1):
            runs = where(copies > 1, at_place, runs[0]), where(copies > 1, mirrored, runs[1])

        def messages(params: Num, by_block: Num) -> Num:
            number = larger(by_block * of_blocks + (1.0 - by_block) * params / bucket_params, 1.0)
            return number * (params > 0)  # no message where nothing is held

        grads = messages(trained, summed)
        grad_payload = grad_bytes(mesh) * trained / larger(grads, 1.0)
        moved = gathered * params + (1.0 - gathered) * trained  # frozen weights do not change
        weights = messages(moved, gathered)
        weight_payload = Held(moved, quantized=gathered * quantized).bytes(mesh) / larger(weights, 1.0)
        copied = gathered * group
        of_grads = f"{name}gradients", "backward"
        how: dict[str, Any] = {"stride": stride, "runs": runs}
        sharing = how | {"shards_copied": copied}
        yield exchange(
            *of_grads, "reduce_scatter", grad_payload, group, count=sharded * reductions * grads,
            host_bytes=sums_on_host(mesh) * grad_payload / group, **sharing,
        )  # fmt: skip
        whole = (1.0 - sharded) * grads  # DDP
        yield exchange(*of_grads, "all_reduce", grad_payload, group, count=whole, **how)
        for phase, share in (("forward", sharded), ("backward", gathered * mesh.trains)):
            of = f"{name}weights", phase, "all_gather", weight_payload, group
            yield exchange(*of, count=rounds * share * weights, **sharing)
        yield exchange(
            *of_grads, "all_reduce", grad_payload / group, ranks / at_place, stride=far, runs=far_runs,
            count=reductions * grads,
        )  # fmt: skip


def shared_weights(model: Model, shared: list[list[Op]], stage: Stage, mesh: Mesh, cut: Cut) -> Iterator[Op]:
    """Gradients of weights that several ranks of one replica hold, summed once a step.

    `shared`: what the tensor-parallel ranks exchange for each part (`block.shared_gradients`), in one
    message for each group. Under sequence parallelism and in layouts of several dimensions ranks of a
    tensor-parallel group see different tokens of the same norms.
    """
    if mesh.trains and mesh.plan.lora_rank == 0:
        apart = holds_table_twice(model, stage, mesh)
        payload = grad_bytes(mesh) * model.vocab * model.hidden / cut.tp
        yield exchange(
            "tied_embedding", "step", "all_reduce", payload, 1.0 + apart, "pp",
            stride=mesh.apart(mesh.pp - 1.0), count=apart,
        )  # fmt: skip
    replicated = ("cp",) if cut.layout != "2d-cp" else ("cp", GRID_AXES[1])
    found = [
        (count * op.payload_bytes, op)
        for count, ops in zip((*stage.layers, stage.heads), shared, strict=True)
        for op in ops
        if mesh.trains and op.axis not in replicated  # those are replicas, whose exchange is `exchanges`'
    ]
    for each in grouped(found, lambda one: (one[1].name, one[1].axis)).values():
        payload = added(size for size, _ in each) * (grad_bytes(mesh) / cut.precision.act_bytes)
        named = structs.replace(each[0][1], module="step", name="shared_norms")
        yield structs.replace(named, payload_bytes=payload, count=(payload > 0) * 1.0)
