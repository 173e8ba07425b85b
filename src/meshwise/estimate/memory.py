"""Memory of one rank at its peak: states of the weights, activations in flight, and workspace.

States, per parameter a rank holds: the weight itself (2 bytes in mixed precision), its gradient, and
the optimizer's numbers (Adam in mixed precision: fp32 master weight and two moments, 12 bytes). ZeRO
cuts over the replicas the optimizer states (stage 1), the gradients too (2), the weights too (3):
arXiv 1910.02054. With fp16 gradients that is the 16 bytes per parameter of that paper; Megatron keeps
gradients in fp32, 18 bytes. Frozen weights have neither gradient nor optimizer states.

Activations: what the forward keeps, per microbatch, times the microbatches in flight on that stage
under the schedule. Selective recomputation drops the core attention's (arXiv 2205.05198), full
recomputation keeps only each block's input, and at the peak one block whole while it is redone.
"""

from dataclasses import dataclass, fields

import msgspec
import numpy as np

from meshwise.core.files import read_catalog
from meshwise.core.numbers import added, anywhere, larger, largest, smaller, where
from meshwise.core.units import Num
from meshwise.cost.schedule import in_flight_microbatches
from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.priced_part import DENSE, EXPERTS, Part
from meshwise.model.architecture import layer_kinds
from meshwise.model.weights import table_params
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import RECOMPUTE
from meshwise.plan.stages import Stage, holds_table_twice
from meshwise.program.exchange import STAGES, Column, Held, at_stage, grad_bytes, sums_on_host, weight_bytes
from meshwise.program.fsdp2 import STATES, shard_bytes
from meshwise.program.implementation import shards_each_weight
from meshwise.program.parts import block_input_bytes
from meshwise.program.serving import cache_bytes, is_wide, working_bytes

MAX_GATHERED_BLOCKS = 2.0
"""Blocks that ZeRO-3 holds whole at once: the one that computes and the one prefetched."""


class Optimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that an optimizer keeps for each parameter beside weight and gradient (catalog).

    All of its states (of 8-bit Adam: `Implementation`); of these a second moment, and what matrices lack that
    it updates its own way. `has_master`: one is an fp32 copy of weights which are not fp32 themselves.
    """

    state_bytes: float = 0.0
    moment_bytes: float = 0.0
    spared_bytes: float = 0.0
    has_master: bool = False


OPTIMIZERS = msgspec.convert(read_catalog("optimizers.toml"), dict[str, Optimizer])


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes of one rank of a stage at its peak, by what they hold; `total` is their sum."""

    weights: Num
    gradients: Num = 0.0
    optimizer: Num = 0.0
    activations: Num = 0.0
    cache: Num = 0.0
    buffers: Num = 0.0
    overhead: Num = 0.0

    @property
    def total(self) -> Num:
        """All of it."""
        return added(getattr(self, field.name) for field in fields(self))


def recomputed(stage: Stage, mesh: Mesh) -> tuple[Num, Num]:
    """Shares of a stage's layers whose core attention, and whose whole forward, the backward runs again."""
    selective = (mesh.recompute == RECOMPUTE.index("selective")) * 1.0
    full = (mesh.recompute == RECOMPUTE.index("full")) * 1.0
    return selective, full * smaller(mesh.recompute_layers / larger(stage.layers_passed, 1.0), 1.0)


def held_params(of: PricedModel, stage: Stage) -> tuple[Held, Held]:
    """Dense weights and experts on one rank of a stage; the last stage may hold the table of tokens too."""
    there, model, cut = of.contents(stage), of.model, of.cut
    dense, experts = (
        Held(*(added(count * part.held[kind][i] for count, part in there) for i in range(len(Held._fields))))
        for kind in (DENSE, EXPERTS)
    )
    copy = model.vocab * model.hidden / cut.tp * stage.heads * holds_table_twice(model, stage, of.mesh)
    trained = dense.trained + copy * (cut.lora_rank == 0)
    return dense._replace(params=dense.params + copy, trained=trained), experts


def stage_memory(of: PricedModel, stage: Stage, held: tuple[Held, Held]) -> Memory:
    """Memory of one rank of `stage`, which holds `held`, at its peak."""
    mesh, overheads = of.mesh, of.machine.overheads
    if mesh.serves:
        return serving_memory(of, stage)
    weights, gradients, optimizer = state_bytes(of, held, stage.share)
    activations, buffers = _activation_bytes(of, stage), _buffer_bytes(of, stage)
    turn, at_end, cached = _turn_bytes(of, stage, activations)
    at_end = larger(at_end, _optimizer_turn_bytes(of, optimizer) - buffers)  # nothing is gathered then
    # Gradients that no buffer waits for take the place of a lone microbatch's activations, block by block.
    fresh = (mesh.zero >= 3) | (mesh.replicas == 1) & (overheads.frees_gradients > 0)
    gone = smaller(fresh * (mesh.num_microbatches == 1) * gradients, activations + turn - at_end)
    gone_first = larger(smaller(gone, activations), 0.0)
    activations, buffers = activations - gone_first, buffers + turn - (gone - gone_first)
    tensors = weights + gradients + optimizer + activations + buffers
    pieces_frac = overheads.fragment_frac + overheads.stream_frac * _is_sharded(mesh)
    overhead = overheads.context_bytes + pieces_frac * tensors + cached
    return Memory(weights, gradients, optimizer, activations, buffers=buffers, overhead=overhead)


def serving_memory(of: PricedModel, stage: Stage) -> Memory:
    """Of a serving engine: weights (layers as the plan keeps them, the ends in bf16), cache, and one pass.

    Tables of n-grams have 8 bits a number where layers have no more (as Qwen3.8-Flash-Next is released).
    """
    model, cut, form = of.model, of.cut, of.cut.precision
    embedding, *blocks, head = of.by_part
    ends = stage.embeddings * embedding.held[DENSE].params + stage.heads * head.held[DENSE].params
    of_tables = stage.embeddings * table_params(model) / cut.tp
    weights = form.act_bytes * ends - (form.act_bytes - max(form.weight_bytes, 1.0)) * of_tables
    cache: Num = 0.0
    for count, part, kind in zip(stage.layers, blocks, layer_kinds(model), strict=True):
        dense, experts = part.held
        weights = weights + count * (form.weight_bytes * dense.params + form.expert_bytes * experts.params)
        wide: Num = added(row.op.num_params for row in part.rows if is_wide(row.op, cut))
        weights = weights + count * (form.act_bytes - form.weight_bytes) * wide
        cache = cache + count * of.mesh.num_microbatches * cache_bytes(model, cut, kind)
    working = working_bytes(model, cut)
    return Memory(weights, cache=cache, buffers=working, overhead=of.machine.overheads.context_bytes)


def state_bytes(of: PricedModel, held: tuple[Held, Held], share: Num) -> tuple[Num, Num, Num]:
    """Bytes of weights, gradients and optimizer states of one rank; `share` as in `Stage`.

    Where gradients are summed in a wider type than they are computed in, `second_grad_bytes` are kept too.
    Where software casts the fp32 weights of the optimizer as it reads them, it holds no others, but for those
    that were gathered from the shards of other ranks for the whole step (ZeRO 1 and 2).
    """
    mesh, overheads = of.mesh, of.machine.overheads
    in_two_types = grad_bytes(mesh) > weight_bytes(mesh)
    per_grad = grad_bytes(mesh) + overheads.second_grad_bytes * in_two_types
    per_state = _optimizer_param_bytes(mesh) * (1.0 - mesh.offload_optimizer)

    def shard(name: str, column: Column) -> Num:
        # Both places of a stage under DualPipe are replicas, which share what is sharded.
        is_shard = at_stage(column, mesh.zero) > 0
        dense, experts = (
            getattr(one, name) / where(is_shard, mesh.group_ranks(ranks), 1.0)
            for one, ranks in zip(held, (mesh.replicas, mesh.expert_replicas), strict=True)
        )
        return where(is_shard, share, 1.0) * (dense + experts)

    kept = {name: shard(name, STAGES.weights) for name in ("params", "quantized", "in_matrices")}
    weights = Held(**kept).bytes(mesh)
    copies = where(mesh.zero >= 3, overheads.sharded_copies, 1.0) * overheads.weight_copies
    if mesh.trains and OPTIMIZERS[mesh.plan.optimizer].has_master and anywhere(copies < 1.0):
        gathered = at_stage(STAGES.states, mesh.zero) > at_stage(STAGES.weights, mesh.zero)
        own = where(gathered, shard("trained", STAGES.states), shard("trained", STAGES.weights))
        weights = weights - weight_bytes(mesh) * own * (1.0 - copies)
    if not mesh.trains:
        return weights, 0.0, 0.0
    sums = per_grad * shard("trained", STAGES.sums) * (not mesh.plan.optimizer_in_bwd)
    spared = OPTIMIZERS[mesh.plan.optimizer].spared_bytes * shard("in_matrices", STAGES.states)
    states = per_state * shard("trained", STAGES.states) - spared
    return weights, sums * (1.0 - sums_on_host(mesh)), states


def _optimizer_turn_bytes(of: PricedModel, optimizer: Num) -> Num:
    """What Adam makes of all its second moments at once, as large as these; `optimizer`: bytes of states."""
    copies = of.machine.overheads.moment_copies * OPTIMIZERS[of.mesh.plan.optimizer].moment_bytes
    return copies / (_optimizer_param_bytes(of.mesh) or 1.0) * optimizer  # which may keep nothing


def _optimizer_param_bytes(mesh: Mesh) -> float:
    """Bytes of the optimizer's states for each parameter that trains."""
    if mesh.plan.optimizer == "adam-8bit":
        return mesh.plan.done_by.adam_8bit_bytes
    of = OPTIMIZERS[mesh.plan.optimizer]
    return of.state_bytes - 4.0 * (of.has_master and weight_bytes(mesh) >= 4.0)


def checkpoint_param_bytes(of: PricedModel) -> float:
    """Bytes of a checkpoint for each parameter that trains: the weight as it is held, and its states."""
    if shards_each_weight(of.cut):
        elem_bytes = shard_bytes(of.mesh, of.cut)
        return elem_bytes + STATES.get(of.mesh.plan.optimizer, 2.0 / elem_bytes) * elem_bytes
    return weight_bytes(of.mesh) * bool(of.machine.overheads.weight_copies) + _optimizer_param_bytes(of.mesh)


def kept_bytes(part: Part, one_input: Num, selective: Num, full: Num) -> Num:
    """What a block keeps of a microbatch under recomputation."""
    return (1.0 - full) * (part.saved_bytes - selective * part.core_bytes) + full * one_input


def checkpoint_layers(stage: Stage, mesh: Mesh) -> Num:
    """Layers behind one kept input where all of a stage are recomputed, its chunks taken as equal."""
    return smaller(mesh.plan.recompute_every, larger(stage.layers_passed / mesh.vpp, 1.0))


def microbatch_bytes(of: PricedModel, stage: Stage) -> Num:
    """What a stage keeps of one microbatch between its forward and its backward, the head's part left out."""
    mesh = of.mesh
    selective, full = recomputed(stage, mesh)
    a_chunk = larger(stage.layers_passed / mesh.vpp, 1.0)
    inputs_frac = np.ceil(a_chunk / checkpoint_layers(stage, mesh)) / a_chunk
    one_input = block_input_bytes(of.model, of.cut) * inputs_frac
    embedding, *blocks, _ = of.by_part
    kept = stage.embeddings * embedding.saved_bytes
    for count, part in zip(stage.layers, blocks, strict=True):
        kept = kept + count * kept_bytes(part, one_input, selective, full)
    return stage.share * kept


def _activation_bytes(of: PricedModel, stage: Stage) -> Num:
    """Bytes kept for the backward on one rank of a stage when most microbatches are in flight."""
    mesh = of.mesh
    if not mesh.trains:
        return block_input_bytes(of.model, of.cut)
    in_flight = in_flight_microbatches(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, stage.index)
    return microbatch_bytes(of, stage) * in_flight * (1.0 - mesh.offload_activations)


def _turn_bytes(of: PricedModel, stage: Stage, activations: Num) -> tuple[Num, Num, Num]:
    """Bytes that live only while one microbatch turns round on a stage, of them those at the very end, and
    what the allocator keeps beside them of places that the loss gave back.

    The former are the larger of two moments. At the head: what it keeps, what the loss (of a chunk) books
    beyond that, and its weight gradient. In a block: what recomputation brings back (of a checkpoint of
    several layers, those of a kind as neighbours), the widest gradient of an activation, and the gradients of
    its weights and of the head's, before they are added to the sum (experts add theirs one by one). At the
    end, when all gradients are there: what a block needs beside them, or the gradient of the embedding and
    its sum with that of a tied head.
    """
    model, cut, elem_bytes = of.model, of.cut, of.cut.precision.act_bytes
    selective, full = recomputed(stage, of.mesh)
    one_input = block_input_bytes(model, cut)
    _, *blocks, head = of.by_part
    trains_head = (head.held[DENSE].trained == head.held[DENSE].params) * 1.0
    alike = checkpoint_layers(stage, of.mesh)
    head_grads = stage.heads * elem_bytes * model.hidden * model.vocab / cut.tp * trains_head
    in_chunks = cut.loss_chunks > 1
    hidden_bytes = in_chunks * elem_bytes * cut.tokens * model.hidden  # beside their kept gradients
    logits_bytes = elem_bytes * cut.tokens / cut.loss_chunks * model.vocab / cut.tp
    in_loss = head.loss_room.filled_bytes + of.machine.overheads.logits_stay * logits_bytes
    at_head = stage.heads * (head.saved_bytes + hidden_bytes + in_loss) + head_grads
    booked = at_head + stage.heads * larger(head.loss_room.booked_bytes - in_loss, 0.0)
    # Beside frozen weights, FSDP1 keeps the inputs of checkpoints that are reentrant until the backward ends.
    stay = of.machine.overheads.inputs_stay * (cut.lora_rank > 0) * full * _is_sharded(of.mesh) * activations
    most: Num = 0.0
    at_end = 2.0 * head_grads * model.tied_embedding * stage.embeddings
    for count, part in zip(stage.layers, blocks, strict=True):
        redone = part.saved_bytes - kept_bytes(part, one_input, selective, full)
        redone = redone + full * part.saved_bytes * (smaller(alike, stage.share * count) - 1.0)
        in_block = (redone + part.widest_bytes) * (count > 0)
        at_end = larger(at_end, in_block)
        in_block = in_block + (elem_bytes * part.held[DENSE].trained + head_grads) * (count > 0)
        most = larger(most, in_block)
    turn = larger(at_head, most + stay)
    return turn, at_end, larger(booked - turn, 0.0)


def _buffer_bytes(of: PricedModel, stage: Stage) -> Num:
    """Workspace: gathered activations, pipeline messages, gathered weights.

    Two gathered tensors of [tokens, hidden] (forward input, backward gradient) live at once under
    sequence parallelism; a pipeline holds two messages of each direction; ZeRO-3 two gathered blocks
    (the one computing and the one prefetched, which there is none of where the end of a backward is the
    fullest moment), and the ends of the model where they are FSDP's root, which stays whole.
    """
    model, mesh, cut, overheads = of.model, of.mesh, of.cut, of.machine.overheads
    embedding, *blocks, head = of.by_part
    gathered = 2.0 * cut.tokens * model.hidden * cut.precision.act_bytes
    if cut.layout not in ("1d", "2d-cp"):  # panels, or the blocks of a product
        gathered = 2.0 * blocks[0].exchange_bytes
    gathered = gathered * (mesh.tp > 1)
    messages = 4.0 * block_input_bytes(model, cut) * (mesh.pp > 1)
    widest = largest(added(held.bytes(mesh) for held in part.held) for part in blocks)
    ends = stage.embeddings * embedding.held[DENSE].params + stage.heads * head.held[DENSE].params
    num_blocks = MAX_GATHERED_BLOCKS - overheads.inputs_stay * (cut.lora_rank > 0)
    return gathered + messages + _is_sharded(mesh) * (num_blocks * widest + overheads.root_bytes * ends)


def _is_sharded(mesh: Mesh) -> Num:
    """1 where weights are gathered before they are used, else 0."""
    return 1.0 * ((mesh.zero >= 3) & ((mesh.replicas > 1) | (mesh.expert_replicas > 1)))
