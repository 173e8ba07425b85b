"""FSDP2: what a rank holds of the weights, and what the replicas exchange of weights and gradients.

FSDP2 gathers a *unit* of weights (the embedding, each block, its experts, the head; a tied table makes the
ends one unit) where they are used: the ends once a microbatch, a block again in its backward. In a pipeline
they stay gathered: a chunk is gathered once a step, or each time that the schedule comes back to it
(`program.order.gathers`). Under ZeRO 1 and 2 all stay gathered from their first use in a step to its end.
FSDP2 cuts each weight along its first dim into equal parts, the last ones short or empty, and moves full
parts in the type of the matmuls. Groups of `zero_group` ranks share the states (HSDP); under ZeRO 0 every
rank is such a group. The two ways of DualPipe hold copies too. With `offload_optimizer` (CPUOffloadPolicy)
the parts lie on the host: they come over its link before each gather, and gradients go there behind each
reduction. Gradients are reduced in fp32 (fp64 under fp64), or in `grad_dtype`, when the last microbatch is
through; without a pipeline, under ZeRO 2 and 3, which keep no whole gradients, after every microbatch (as
torchtitan leaves it). Experts are cut along their width, among the ranks that hold the same ones.

Weights that all tensor-parallel ranks hold whole (norms, learned positions, routers) have their gradients
summed over tp one by one, once a step; the sums of several microbatches are fp32, and from 2.15 on all
of them. So has a table that both ends of a pipeline read: a tied one, or that in which multi-token prediction
looks up the next token.

Beside weights in fp32, which need no master copy, AdamW keeps two moments in the type of the weights. In 8
bits (arXiv 2110.02861, as bitsandbytes stores them) each is a byte a number and an fp32 scale for each
`BLOCK` numbers of a tensor; tensors of fewer than `LEAST` numbers keep fp32.

Source: torch.distributed.fsdp.fully_shard; torchtitan, arXiv 2410.06511.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshwise.core.numbers import added
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.machine.overheads import SOFTWARE
from meshwise.model import weights as model_weights
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.model.weights import Weight, Weights, embedding_weights, frozen
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS
from meshwise.plan.stages import Stage, chunks_of_rank, holds_table_twice, num_on_host
from meshwise.program.cut import Cut
from meshwise.program.exchange import FSDP2, at_stage, exchange, num_reductions, replicas
from meshwise.program.op import Op
from meshwise.program.order import gathers
from meshwise.program.tensor_1d import shards
from meshwise.program.weights_of_ops import is_quantized

STATES = {"adam": 2.0, "adam-fp32": 2.0, "adam-bf16": 2.0, "sgd": 0.0, "none": 0.0}
"""Numbers, in the type of the weights, that optimizers keep for each."""
BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale."""
LEAST = 4096
"""Numbers of the smallest tensor whose moments are kept in 8 bits."""


FROZEN_GROUP = 64
"""Numbers of a row of a frozen matrix in few bits that share an fp32 scale (QLoRA's blocks)."""
TABLES = ("tokens", "positions", "token_types", "class_token", "ngrams")
"""Embeddings are stored as rows, [numbers, hidden]; other matrices as [d_out, d_in]."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Weights that are gathered together; a rank of a stage has `count` units like this.

    `gathers`: how often all of these together are gathered in the forward, and in the backward, of a step.
    """

    weights: Weights
    count: Num
    gathers: tuple[Num, Num]

    @property
    def is_experts(self) -> bool:
        """Whether these are the experts of a block."""
        return any(weight.is_expert for weight in self.weights)

    def replicas(self, mesh: Mesh) -> tuple[Num, Num]:
        """Ranks that hold these weights or parts of them, and how many of all replicas lie between two."""
        return replicas(mesh, of_experts=self.is_experts)

    def sharing(self, mesh: Mesh) -> Num:
        """Over how many of them the weights are cut; groups of so many neighbours hold copies (HSDP)."""
        return mesh.shard_ranks(self.replicas(mesh)[0])

    @property
    def trained(self) -> Unit:
        """Those of them that have gradients."""
        return replace(self, weights=tuple(weight for weight in self.weights if weight.trains))

    def padded_size(self, mesh: Mesh, cut: Cut) -> Num:
        """Elements that are moved: each first dim rounded up to a multiple of the ranks."""
        return added(self._padded_sizes(mesh, cut))

    def _padded_sizes(self, mesh: Mesh, cut: Cut) -> Iterator[Num]:
        ranks = self.sharing(mesh)
        return (np.ceil(rows / ranks) * ranks * width for rows, width in self.stored(cut))

    def gathered_bytes(self, mesh: Mesh, cut: Cut) -> Num:
        """Bytes that are moved of the weights: in the type of the matmuls, frozen ones as they are kept."""
        return self._bytes(self._padded_sizes(mesh, cut), cut, cut.precision.act_bytes)

    def local_bytes(self, mesh: Mesh, cut: Cut) -> Num:
        """Bytes of the rank's parts of the weights, wherever they are kept."""
        return self._bytes(self.local_sizes(mesh, cut), cut, shard_bytes(mesh, cut))

    def host_bytes(self, mesh: Mesh, cut: Cut) -> Num:
        """Those of them that lie on the host."""
        on_host = mesh.offload_optimizer
        return on_host * self.local_bytes(mesh, cut) if np.any(on_host) else 0.0

    def _bytes(self, sizes: Iterable[Num], cut: Cut, wide: float) -> Num:
        of_each = [elem_bytes(weight, cut, wide) for weight in self.weights]
        return added(size * each for size, each in zip(sizes, of_each, strict=True))

    def local_size(self, mesh: Mesh, cut: Cut) -> Num:
        """Elements that the rank keeps."""
        return added(self.local_sizes(mesh, cut))

    def local_sizes(self, mesh: Mesh, cut: Cut) -> list[Num]:
        """Of each weight."""
        ranks = self.sharing(mesh)
        shard = 0.0 if self.is_experts else mesh.shard % ranks
        parts = [(rows, np.ceil(rows / ranks), width) for rows, width in self.stored(cut)]
        return [np.clip(rows - shard * part, 0.0, part) * width for rows, part, width in parts]

    def stored(self, cut: Cut) -> Iterator[tuple[Num, Num]]:
        """Each weight as a tensor-parallel rank has it: the dim that is cut, and the size of the others."""
        for weight in self.weights:
            rows: Num = float(weight.shape[1 if weight.is_expert else 0 if weight.op in TABLES else -1])
            if weight.op in TABLES or weight.cut == model_weights.COLUMNS:
                rows = rows / (1.0 if weight.is_expert else shards(weight, cut))
            elif weight.is_expert:
                rows = rows / cut.etp
            yield rows, weight.size / shards(weight, cut) / rows


def units(model: Model, stage: Stage, mesh: Mesh) -> list[Unit]:
    """The units of a rank of `stage`; under DualPipe those of both ways."""
    lora_rank, trains = mesh.plan.lora_rank, mesh.trains
    of_ends = (embedding_weights(model), model_weights.head_weights(model), model_weights.mtp_weights(model))
    embedding, head, join = map(frozen, of_ends) if lora_rank or not trains else of_ends
    table = tuple(weight for weight in embedding if weight.op == "tokens")
    alone = (mesh.pp == 1) * 1.0
    apart = 1.0 - alone * model.tied_embedding
    in_first, *in_blocks, in_last = _gathers_of_parts(model, stage, mesh)
    found = [
        Unit(embedding, stage.embeddings * apart, (in_first * apart, 0.0)),
        Unit(head + table * model.tied_embedding, stage.heads * apart, (in_last * apart, 0.0)),
        Unit(embedding + head, stage.heads * (1.0 - apart), (in_last * (1.0 - apart), 0.0)),
    ]
    further = float(model.mtp_layers)
    blocks = [*zip(layer_kinds(model), stage.layers, in_blocks, strict=True)]
    if further:
        found.append(Unit(join, further * stage.heads, (further * in_last, 0.0)))
        copies = (1.0 - alone) * (not model.tied_embedding)
        found.append(Unit(table, copies * stage.heads, (copies * in_last, 0.0)))
        blocks.append((layer_kind(model, model.num_layers - 1), further * stage.heads, further * in_last))
    for kind, count, in_forward in blocks:
        in_backward = trains * count * mesh.num_microbatches * alone * at_stage(FSDP2.weights, mesh.zero)
        for is_expert in (False, True):
            of_block = model_weights.block_weights(model, kind, lora_rank, mesh.plan.lora_targets)
            weights = tuple(one for one in of_block if one.is_expert == is_expert)
            weights = weights if trains else frozen(weights)
            if weights or not is_expert:
                found.append(Unit(weights, count, (in_forward, in_backward)))
    return found


def _gathers_of_parts(model: Model, stage: Stage, mesh: Mesh) -> list[Num]:
    """How often in a step a rank of `stage` gathers embeddings, blocks of each kind, and heads."""
    numbers = (mesh.schedule, mesh.pp, mesh.vpp, mesh.num_microbatches, stage.index)
    cells = np.stack(np.broadcast_arrays(*numbers)).astype(np.int64)
    distinct, which = np.unique(cells.reshape(len(numbers), -1), axis=1, return_inverse=True)
    which = which.reshape(cells.shape[1:])
    table = np.array([_gathers_of_pattern(model, mesh.plan.stages, *map(int, one)) for one in distinct.T])
    held = (stage.embeddings, *stage.layers, stage.heads)
    gathered = np.moveaxis(table[which], -1, 0)
    is_given_back = at_stage(FSDP2.weights, mesh.zero) > 0
    return [np.where(is_given_back, again, once) for again, once in zip(gathered, held, strict=True)]


def reductions(stage: Stage, mesh: Mesh) -> Num:
    """How often in a step the gradients of a unit are reduced; under DualPipe one sees half of the batch."""
    return num_reductions(sums_are_shards(mesh), stage.share * mesh.num_microbatches)


def sums_are_shards(mesh: Mesh) -> Num:
    """1 where gradients are reduced after every microbatch, which torch's pipelines never do."""
    return at_stage(FSDP2.sums, mesh.zero) * (mesh.pp == 1)


@lru_cache(maxsize=1024)
def _gathers_of_pattern(
    model: Model, stages: Any, schedule: int, pp: int, vpp: int, num_microbatches: int, rank: int
) -> tuple[float, ...]:
    held = chunks_of_rank(model, pp, vpp, SCHEDULES[schedule], stages, rank)
    times = gathers(schedule, pp, vpp, num_microbatches, rank) if pp > 1 else (num_microbatches,) * vpp
    parts = zip(*((chunk.embeddings, *chunk.layers, chunk.heads) for chunk, _ in held), strict=True)
    return tuple(float(np.dot(part, times)) for part in parts)


def held_params(held: Sequence[Unit], mesh: Mesh, cut: Cut) -> Num:
    """Weights that the rank keeps, its shards."""
    return added(unit.count * unit.local_size(mesh, cut) for unit in held)


def optimizer_bytes(held: Sequence[Unit], mesh: Mesh, cut: Cut) -> Num:
    """Bytes of the states of the optimizer on the rank's device, of the weights behind those of the host."""
    kept, elem_bytes, share = mesh.plan.optimizer, shard_bytes(mesh, cut), mesh.offload_optimizer
    if kept != "adam-8bit":
        num_trained = held_params([unit.trained for unit in held], mesh, cut)
        return STATES[kept] * elem_bytes * (num_trained - num_on_host(share, num_trained))
    whole: Num = 0.0
    for unit in (one.trained for one in held):
        for size in unit.local_sizes(mesh, cut):
            wide, narrow = 4.0 * size, size + 4.0 * np.ceil(size / BLOCK)
            whole = whole + unit.count * 2.0 * np.where(np.asarray(size) < LEAST, wide, narrow)
    return (1.0 - share) * whole


def exchanges(held: Sequence[Unit], stage: Stage, mesh: Mesh, cut: Cut) -> Iterator[Op]:
    """What the replicas exchange in a step: weights gathered, and gradients reduced once."""
    ways = 1.0 / stage.share
    to_other_way = mesh.apart(np.abs(mesh.pp - 1.0 - 2.0 * stage.index))
    for unit in held:
        trains = unit.trained
        (holders, first), ranks = unit.replicas(mesh), unit.sharing(mesh)
        (stride, runs), (far, far_runs) = mesh.replica_runs(first), mesh.replica_runs(first * ranks)
        if np.any(ways > 1):
            far_runs = holders / ranks, to_other_way
        gathered, name = unit.gathered_bytes(mesh, cut), "expert_" * unit.is_experts
        trained = trains.padded_size(mesh, cut)
        grad_bytes = trained * reduced_bytes(mesh, cut)
        rounds = unit.count * reductions(stage, mesh) * (trained > 0)
        place: dict[str, Any] = {"stride": stride, "runs": runs, "shards_copied": ranks}
        for phase, count in zip(("forward", "backward"), unit.gathers, strict=True):
            yield exchange(
                f"{name}weights", phase, "all_gather", gathered, ranks, count=count,
                host_bytes=unit.host_bytes(mesh, cut), **place,
            )  # fmt: skip
        of_grads = f"{name}gradients", "backward"
        yield exchange(
            *of_grads, "reduce_scatter", grad_bytes, ranks, host_bytes=trains.host_bytes(mesh, cut),
            count=rounds * ((ranks > 1) | (mesh.offload_optimizer > 0)), **place,
        )  # fmt: skip
        yield exchange(
            *of_grads, "all_reduce", grad_bytes / ranks, ways * holders / ranks, stride=far, runs=far_runs,
            count=rounds * (ways * holders > ranks),
        )  # fmt: skip


def shared_weights(model: Model, held: Sequence[Unit], stage: Stage, mesh: Mesh, cut: Cut) -> Iterator[Op]:
    """Gradients of weights that several ranks of one replica hold, summed once a step."""
    accumulates = (1.0 - sums_are_shards(mesh)) * ((mesh.pp > 1) | (mesh.num_microbatches > 1))
    is_wide = 1.0 if SOFTWARE[mesh.plan.software].sums_wide else accumulates
    narrow, wide = cut.precision.act_bytes, reduced_bytes(mesh, cut)
    for unit in held:
        for weight in unit.weights:
            is_part = weight.gradient == "part" or (weight.gradient == "tokens" and cut.sequence_parallel)
            if weight.cut == model_weights.WHOLE and is_part and weight.trains and not weight.is_expert:
                payload = weight.size * (narrow + is_wide * (wide - narrow))
                yield exchange(
                    "shared_weights", "backward", "all_reduce", payload, mesh.tp, "tp",
                    stride=mesh.stride("tp"), count=unit.count * reductions(stage, mesh) * (mesh.tp > 1),
                )  # fmt: skip
    if not mesh.plan.lora_rank:
        table = tuple(weight for weight in embedding_weights(model) if weight.op == "tokens")
        local = Unit(table, 1.0, (0.0, 0.0)).local_size(mesh, cut)
        apart = holds_table_twice(model, stage, mesh) * (local > 0)
        yield exchange(
            "tied_embedding", "backward", "all_reduce", local * shard_bytes(mesh, cut), 1.0 + apart, "pp",
            stride=mesh.apart(mesh.pp - 1.0), count=apart,
        )  # fmt: skip


def elem_bytes(weight: Weight, cut: Cut, wide: float) -> float:
    """Bytes of an element of a weight: `wide`, or few where it is frozen and kept so, scales included."""
    few = cut.frozen_bytes
    return wide if few is None or weight.trains or not is_quantized(weight) else few + 4.0 / FROZEN_GROUP


def shard_bytes(mesh: Mesh, cut: Cut) -> float:
    """Bytes of an element of a shard, of weights, gradients and states of the optimizer alike."""
    return cut.precision.act_bytes if mesh.plan.optimizer == "adam-bf16" else cut.precision.stat_bytes


def reduced_bytes(mesh: Mesh, cut: Cut) -> float:
    """Bytes of an element of a gradient as it is summed over microbatches and ranks."""
    is_wide = mesh.plan.grad_dtype == DEFAULTS["grad_dtype"]
    return cut.precision.stat_bytes if is_wide else DTYPE_BYTES[mesh.plan.grad_dtype]
