"""The steps of FSDP2, played for their peak: those of a grid that run alike together.

Steps run alike under the same pipeline, ZeRO stage and recomputation. What their parts keep and hold is the
walk's (`program.walk`), as columns of numbers; `estimate.fsdp2_peak` plays them. Beside the peak a rank has
shards of weights and states.

A search need not look at plans that do not fit anyway: `least_step_bytes` are alive in any case, whatever the
order of the step:

- weights: without a pipeline all below ZeRO 3, in one those of the chunks that stay gathered;
- activations: microbatches in flight, and a block or the head in its backward on top; of a schedule that
  splits its backwards none of the latter, and not what goes first in them;
- gradients when the last backward begins: shards from ZeRO 2 on without a pipeline, or else whole sums.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns
from meshwise.core.numbers import added, larger
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES, in_flight_microbatches, weight_copies
from meshwise.estimate import fsdp2_peak
from meshwise.estimate.fsdp2_peak import Chunk, LivePart, UnitBytes
from meshwise.estimate.memory import MAX_GATHERED_BLOCKS, Memory
from meshwise.estimate.priced_model import PricedModel
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import RECOMPUTE
from meshwise.plan.stages import Stage, chunks_of_rank, num_on_host
from meshwise.program import fsdp2
from meshwise.program.cut import Cut
from meshwise.program.exchange import FSDP2, at_stage
from meshwise.program.order import ACTIVE_CHUNKS, Moments, moments
from meshwise.program.parts import block_input_bytes
from meshwise.program.walk import PartBytes, mapped, selected

_LIKE = {"dualpipe-v": "zb-v", "zb-v": "zb-v", "dualpipe": "dualpipe"}
_LAYOUTS = np.array([SCHEDULES.index(_LIKE.get(name, "1f1b")) for name in SCHEDULES])
"""Of each schedule, one that deals the same chunks to each rank."""
_FULL, _SELECTIVE = RECOMPUTE.index("full"), RECOMPUTE.index("selective")
_SPLIT = tuple(i for i, name in enumerate(SCHEDULES) if name.startswith(("zb", "dualpipe")))


def fsdp2_memory(
    of: PricedModel, stage: Stage, held: Sequence[fsdp2.Unit], wanted: Any = True
) -> tuple[Memory, Num]:
    """Memory of one rank of `stage` at its peak, and the most that it keeps for the backward at once.

    `held` are the units of its weights. Of the peak, gradients take what the optimizer reads, activations
    what is kept, and buffers the rest. `wanted`: the plans to tell it for.
    """
    step, kept = _step_bytes(of, stage, held, wanted)
    return _memory(of, held, step, kept), kept


def least_memory(of: PricedModel, stage: Stage, held: Sequence[fsdp2.Unit]) -> tuple[Memory, Num]:
    """What a rank of `stage` needs in any case, nothing of it told apart as kept."""
    return _memory(of, held, least_step_bytes(of, stage, held)), 0.0


def _memory(of: PricedModel, held: Sequence[fsdp2.Unit], step: Num, kept: Num = 0.0) -> Memory:
    """Memory with a peak of `step` bytes beside weights and states, or that of the update if it is more."""
    mesh, cut, overheads = of.mesh, of.cut, of.machine.overheads
    local = added(unit.count * unit.local_bytes(mesh, cut) for unit in held)
    weights = (1.0 - mesh.offload_optimizer) * local
    states = fsdp2.optimizer_bytes(held, mesh, cut)
    gradients = _shards(held, mesh, cut)
    step = np.maximum(step, gradients + _update_bytes(held, mesh, cut))
    gradients = np.minimum(gradients, step)
    activations = np.minimum(kept, step - gradients)
    buffers = step - gradients - activations
    overhead = overheads.context_bytes + overheads.fragment_frac * (weights + states + step)
    return Memory(weights, gradients, states, activations, buffers=buffers, overhead=overhead)


def gradient_bytes(held: Sequence[fsdp2.Unit], mesh: Mesh, cut: Cut) -> Num:
    """Bytes of the gradients that the optimizer reads, the rank's shards."""
    return fsdp2.shard_bytes(mesh, cut) * fsdp2.held_params([unit.trained for unit in held], mesh, cut)


def _shards(held: Sequence[fsdp2.Unit], mesh: Mesh, cut: Cut) -> Num:
    """Those of them that lie on the device."""
    return (1.0 - mesh.offload_optimizer) * gradient_bytes(held, mesh, cut)


def _update_bytes(held: Sequence[fsdp2.Unit], mesh: Mesh, cut: Cut) -> Num:
    """What the update of one weight makes on the way: Adam, the root of a moment, and that divided."""
    if not mesh.plan.optimizer.startswith("adam"):
        return 0.0
    sizes = (size * (unit.count > 0) for unit in held for size in unit.trained.local_sizes(mesh, cut))
    return 2.0 * fsdp2.shard_bytes(mesh, cut) * reduce(larger, [0.0, *sizes]) * (1.0 - mesh.offload_optimizer)


class _Way(NamedTuple):
    """How the steps of some plans run: what comes after what, but for the number of microbatches in flight.

    `layout`: the schedule that stands for all that deal chunks to ranks alike. `rounds`: without a pipeline,
    microbatches that differ. `zero`: the ZeRO stage, without one. `num_redone`: layers of a chunk whose
    forward runs again.
    """

    layout: int
    pp: int
    vpp: int
    rank: int
    rounds: int
    zero: int
    num_redone: int
    on_host_frac: float


class _Sizes(NamedTuple):
    """What the layers of a rank are made of, for the plans of a grid or for those that run alike.

    `ends`: units of the embedding, of the head, of both as one; `blocks`: units of each kind of layer. Of
    each part `kept` is kept of a microbatch but where the whole forward runs again; `loose`, `back` as in
    `LivePart`, `in_piece` as in `Chunk`.
    `table`: the gradient of the table, as tensor-parallel ranks make it; `shared` that of its other use.
    `further`: multi-token prediction outside its blocks.
    """

    ends: tuple[UnitBytes, UnitBytes, UnitBytes]
    blocks: tuple[tuple[UnitBytes, ...], ...]
    live: tuple[PartBytes, ...]
    further: tuple[tuple[UnitBytes, PartBytes], ...]
    kept: tuple[Num, ...]
    loose: tuple[Num, ...]
    back: tuple[Num, ...]
    in_piece: Num
    one_input: Num
    table: Num
    shared: Num


def _step_bytes(of: PricedModel, stage: Stage, held: Sequence[fsdp2.Unit], wanted: Any) -> tuple[Num, Num]:
    """The most that is alive in a step beside shards of weights and states, and the most that is kept."""
    model, mesh = of.model, of.mesh
    in_pipeline = mesh.pp > 1
    most_layers = np.ceil(model.num_layers / (mesh.pp * mesh.vpp)) if not mesh.plan.stages else np.inf
    redone = np.minimum(np.ceil(np.minimum(mesh.recompute_layers, model.num_layers) / mesh.vpp), most_layers)
    redone = np.where(mesh.recompute == _FULL, redone, 0.0)
    *keys, schedule, num_microbatches = np.broadcast_arrays(
        np.where(in_pipeline, _LAYOUTS[np.asarray(mesh.schedule, dtype=np.intp)], 0), mesh.pp, mesh.vpp,
        stage.index, np.where(in_pipeline, 0, np.minimum(mesh.num_microbatches, fsdp2_peak.MICROBATCHES)),
        np.where(in_pipeline, 0, mesh.zero), redone,
        mesh.offload_activations, mesh.schedule, mesh.num_microbatches,
    )  # fmt: skip
    shape, orders = num_microbatches.shape, np.stack([schedule.ravel(), num_microbatches.ravel()])
    is_stage = stage.num_layers + stage.embeddings + stage.heads > 0
    is_there = _along(is_stage & wanted, shape).ravel()
    columns = _SizeTable(_sizes(of, held), shape)
    there = np.flatnonzero(is_there)
    table = np.stack([key.ravel()[there] for key in keys])
    first, which = distinct_columns(table)
    found = np.zeros((2, orders.shape[1]))
    for number, column in enumerate(table[:, first].T):
        here = there[which == number]
        *numbers, on_host_frac = column.tolist()
        way = _Way(*map(int, numbers), on_host_frac)  # type: ignore[call-arg]
        found[:, here] = _peak(model, mesh, way, columns.at(here), orders[:, here])
    peaks, kept = found.reshape(2, *shape)
    return peaks[()], kept[()]


def _along(wanted: Any, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Where any cell is wanted, along the axes of `shape`: along others, as overlaps, memory is the same."""
    wanted = np.broadcast_to(wanted, np.broadcast_shapes(np.shape(wanted), shape))
    in_shape = (1,) * (wanted.ndim - len(shape)) + shape
    same = tuple(axis for axis, size in enumerate(in_shape) if size < wanted.shape[axis])
    return np.asarray(wanted.any(axis=same, keepdims=True)).reshape(shape)


class _SizeTable:
    """The numbers of a tree of tuples over the cells of a grid, of which some cells are taken at once."""

    def __init__(self, tree: Any, shape: tuple[int, ...]) -> None:
        arrays: list[Any] = []
        mapped(lambda leaf: arrays.append(np.broadcast_to(leaf, shape).ravel()), tree)
        self.tree, self.table = tree, np.stack(arrays)

    def at(self, cells: Any) -> Any:
        """The tree of the numbers of `cells`."""
        rows = iter(self.table[:, cells])
        return mapped(lambda _: next(rows), self.tree)


def _sizes(of: PricedModel, held: Sequence[fsdp2.Unit]) -> _Sizes:
    model, mesh, cut, parts = of.model, of.mesh, of.cut, of.by_part
    is_selective = np.equal(mesh.recompute, _SELECTIVE)
    # Under tp DTensor makes the gradient of the whole table on each rank, and sums it over microbatches.
    of_table = model.vocab * model.hidden * (not cut.lora_rank)
    sums_whole = (mesh.num_microbatches > 1) * (1.0 - fsdp2.sums_are_shards(mesh))
    beyond = of_table * (1.0 - 1.0 / mesh.tp) * sums_whole
    embedding, head, tied = (
        UnitBytes.of(unit, mesh, cut, more)
        for unit, more in zip(held[:3], (beyond, 0.0, beyond), strict=True)
    )
    blocks: list[tuple[UnitBytes, ...]] = []
    join = 2 * (model.mtp_layers > 0)
    for unit in held[3 + join :]:
        of_unit = UnitBytes.of(unit, mesh, cut)
        blocks[len(blocks) - unit.is_experts :] = [(*(blocks[-1] if unit.is_experts else ()), of_unit)]
    further: tuple[tuple[UnitBytes, PartBytes], ...] = ()
    if model.mtp_layers:
        joined, copy = held[3:5]
        of_copy = UnitBytes.of(copy, mesh, cut, beyond).times((copy.count > 0) * 1.0)
        further = ((UnitBytes.of(joined, mesh, cut).plus(of_copy), parts[-1].live[1]),)
    return _Sizes(
        ends=(embedding, head, tied),
        blocks=tuple(blocks),
        live=tuple(
            selected([is_selective, True], [part.live[0], part.live[0].without_recomputation()])
            for part in parts
        ),
        further=further,
        kept=(
            *(part.saved_bytes - is_selective * part.core_bytes for part in parts[:-1]),
            parts[-1].saved_bytes,
        ),
        loose=tuple(part.loose_bytes for part in parts),
        back=tuple(is_selective * part.redone_bytes for part in parts),
        in_piece=_in_a_piece(model, cut),
        one_input=block_input_bytes(model, cut),
        table=cut.precision.act_bytes * of_table * (1.0 + (mesh.tp > 1) / mesh.tp),
        shared=tied.grad if model.tied_embedding else cut.precision.act_bytes * of_table,
    )


def _peak(model: Model, mesh: Mesh, way: _Way, sizes: _Sizes, orders: NDArray[np.float64]) -> tuple[Num, Num]:
    """The most in a step of plans that run alike, and kept; `orders`: schedule and microbatches of each."""
    adapts = mesh.plan.lora_rank > 0
    if way.pp == 1:
        chunk = _chunk(model, way, sizes, range(model.num_layers), adapts, has_embedding=True, has_head=True)
        kept = chunk.kept + np.maximum(chunk.in_piece, chunk.brought_back)
        return fsdp2_peak.peak_without_pipeline(chunk, way.rounds, way.zero), kept
    schedule = SCHEDULES[way.layout]
    passing = orders[1] / (2.0 if schedule == "dualpipe" else 1.0)
    alike: dict[Any, Chunk] = {}
    found = []
    for stage, layers in chunks_of_rank(model, way.pp, way.vpp, schedule, mesh.plan.stages, way.rank):
        has_embedding, has_head = bool(stage.embeddings), bool(stage.heads)
        key = has_embedding, has_head, *(layer_kind(model, layer) for layer in layers)
        if key not in alike:
            chunk = _chunk(model, way, sizes, layers, adapts, has_embedding=has_embedding, has_head=has_head)
            # A chunk keeps its result until the backward; its input lies in the buffer that received it.
            size = chunk.kept + (float(has_embedding) - float(has_head)) * sizes.one_input
            received = (2.0 - has_embedding - has_head) * passing * sizes.one_input
            alike[key] = chunk._replace(size=size, received=received)
        found.append(alike[key])
    rank = fsdp2_peak.PipelineRank(found, orders.shape[1])
    most, kept = np.empty((2, orders.shape[1]))
    first, which = distinct_columns(orders)
    of_moments: dict[Moments, list[int]] = {}
    for number, (order, num_microbatches) in enumerate(orders[:, first].T.astype(int).tolist()):
        of_moments.setdefault(moments(order, way.pp, way.vpp, num_microbatches, way.rank), []).append(number)
    for of_rank, numbers in of_moments.items():
        here = np.isin(which, numbers)
        most[here], kept[here] = rank.peak(of_rank, here), rank.kept(of_rank, here)
    return most, kept


def _chunk(
    model: Model, way: _Way, sizes: _Sizes, layers: Sequence[int], adapts: bool, *, has_embedding: bool,
    has_head: bool,
) -> Chunk:  # fmt: skip
    """Those of a rank's parts that belong to one chunk; `adapts`: adapters train, and the ends do not."""
    is_tied = model.tied_embedding and has_embedding and has_head
    shared = sizes.shared * (model.shares_table and has_embedding and has_head)
    kinds = layer_kinds(model)
    num_on_host_here = num_on_host(way.on_host_frac, float(len(layers)))
    parts: list[LivePart] = []
    for i, number in enumerate(layers):
        kind = kinds.index(layer_kind(model, number))
        layer = _layer(sizes, 1 + kind, sizes.blocks[kind], is_redone=i < way.num_redone)
        parts.append(layer._replace(kept=0.0) if i < num_on_host_here else layer)
    # A frozen head goes as its loss does.
    top = parts[-1:] if adapts or not has_head else []
    let_go = added(np.minimum(layer.loose, layer.kept) for layer in top) + has_head * sizes.loose[-1]
    # In a pipeline nothing is given back before the end: the top layer of a run has the most below it.
    parts = fsdp2_peak.shortened(parts, 2, 2) if way.pp == 1 else fsdp2_peak.shortened(parts, 0, 1)
    if has_embedding:
        ends = (sizes.ends[2 if is_tied else 0],)
        parts.insert(0, _layer(sizes, 0, ends)._replace(table=sizes.table, shared=shared))
    if has_head:
        head = _layer(sizes, -1, () if is_tied else (sizes.ends[1],))
        if sizes.further:
            head = head._replace(kept=head.part.saved, shared=sizes.ends[1].last_grad)
        parts.append(head)
    for unit, part in sizes.further if has_head else ():
        kind = kinds.index(layer_kind(model, model.num_layers - 1))
        block = _layer(sizes, 1 + kind, sizes.blocks[-1])
        block = block._replace(part=block.part.without_recomputation(), kept=block.part.saved, back=0.0)
        parts += [block] * model.mtp_layers
        of_head = added(layer.kept for layer in parts[-1 - model.mtp_layers :])
        parts.append(LivePart((unit,), part, sizes.kept[-1] - of_head))  # what both keep is kept once
    let_go, in_piece = (not has_embedding) * let_go, has_head * sizes.in_piece
    return Chunk(parts, sizes.one_input, has_embedding, let_go, in_piece)


def _layer(sizes: _Sizes, part: int, units: tuple[UnitBytes, ...], *, is_redone: bool = False) -> LivePart:
    kept = sizes.one_input if is_redone else sizes.kept[part]
    is_block = 0 < part < len(sizes.live) - 1
    live, loose = sizes.live[part], sizes.loose[part]
    back = live.saved - kept if is_redone else sizes.back[part]
    return LivePart(units, live, kept, is_redone, loose=loose, back=back, is_block=is_block)


def _in_a_piece(model: Model, cut: Cut) -> Num:
    """What the loss of a piece of the tokens keeps for its own backward, beyond the gradients kept after it.

    Those of the hidden states take as much as these did, which a frozen matrix does not keep.
    """
    if cut.loss_chunks == 1:
        return 0.0
    prec, vocab = cut.precision, model.vocab / cut.tp
    logit_bytes = prec.act_bytes if cut.loss.keeps == "logits" else prec.stat_bytes
    kept = logit_bytes * cut.tokens / cut.loss_chunks * vocab + prec.stat_bytes
    rows = cut.tokens if cut.lora_rank else vocab
    return np.maximum(kept - prec.act_bytes * rows * model.hidden, 0.0)


def least_step_bytes(of: PricedModel, stage: Stage, held: Sequence[fsdp2.Unit]) -> Num:
    """The least that a step has alive on a rank of `stage`; without a backward, all that it has."""
    model, mesh, cut = of.model, of.mesh, of.cut
    shards = _shards(held, mesh, cut)
    whole = added(unit.count * unit.gathered_bytes(mesh, cut) for unit in held)
    if not mesh.trains:
        widest = reduce(larger, ((unit.count > 0) * unit.gathered_bytes(mesh, cut) for unit in held))
        of_weights = np.where(mesh.zero >= 3, MAX_GATHERED_BLOCKS * widest, whole)
        return of_weights + block_input_bytes(model, cut)
    stored = (unit.count * rows * width for unit in held for rows, width in unit.trained.stored(cut))
    sums = np.where(fsdp2.sums_are_shards(mesh) > 0, shards, fsdp2.reduced_bytes(mesh, cut) * added(stored))
    sums = sums * (mesh.num_microbatches > 1)
    a_microbatch, a_layer = _kept(of, stage)
    turn = _turn(of, stage)
    alone = (1.0 - at_stage(FSDP2.weights, mesh.zero)) * whole + sums + a_microbatch + turn
    is_split = np.isin(mesh.schedule, _SPLIT)
    num_chunks = mesh.vpp * weight_copies(mesh.schedule)
    active = np.minimum(ACTIVE_CHUNKS / num_chunks, 1.0) * whole
    in_flight = in_flight_microbatches(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, stage.index)
    of_chunk = np.floor(model.num_layers / (mesh.pp * mesh.vpp)) * a_layer * (not mesh.plan.stages)
    alive = np.maximum(in_flight * mesh.vpp * of_chunk, a_microbatch)
    # The last backward finds the sums of all chunks, and of one microbatch, or of one chunk all but one.
    is_one_chunk = np.equal(mesh.vpp, 1) & ~is_split
    left = np.where(is_one_chunk, np.maximum(in_flight - 1.0, 0.0), ~is_split * 1.0) * a_microbatch
    has_sums = is_one_chunk | (mesh.num_microbatches > 2.0 * mesh.pp)
    alive = np.maximum(alive, has_sums * (sums + left))
    return np.where(mesh.pp > 1, active + alive + turn * ~is_split, alone)[()]


def _kept(of: PricedModel, stage: Stage) -> tuple[Num, Num]:
    """What the layers of a rank keep of a microbatch, and one of them, at least."""
    model, mesh, parts = of.model, of.mesh, of.by_part
    one_input, is_full = block_input_bytes(model, of.cut), np.equal(mesh.recompute, _FULL)
    blocks = [
        part.saved_bytes - np.equal(mesh.recompute, _SELECTIVE) * part.core_bytes for part in parts[1:-1]
    ]
    least, most = (reduce(of_two, blocks) for of_two in (np.minimum, np.maximum))
    of_chunk = np.ceil(np.minimum(mesh.recompute_layers, model.num_layers) / mesh.vpp)
    redone = np.minimum(of_chunk * mesh.vpp * weight_copies(mesh.schedule), stage.num_layers)
    in_all = added(count * kept for count, kept in zip(stage.layers, blocks, strict=True))
    a_layer = np.where(is_full, np.minimum(one_input, least), least)
    loose = reduce(np.maximum, (part.loose_bytes for part in parts[1:-1]))  # goes first in a split backward
    a_layer = np.maximum(a_layer - np.isin(mesh.schedule, _SPLIT) * loose, 0.0)
    kept = np.maximum(
        in_all - is_full * redone * np.maximum(most - one_input, 0.0), stage.num_layers * a_layer
    )
    # A last chunk's input lies in the buffer that received it.
    on_chip = np.equal(mesh.offload_activations, 0.0)
    kept = on_chip * np.maximum(stage.share * kept - stage.heads * one_input, 0.0)
    return kept, on_chip * a_layer * np.equal(stage.heads, 0.0)


def _turn(of: PricedModel, stage: Stage) -> Num:
    """What the head, or the first block of a backward, holds in its turn beyond what it keeps."""
    is_selective = np.equal(of.mesh.recompute, _SELECTIVE)
    turns = []
    for part in of.by_part[1:]:
        live = part.live[0]
        most = np.where(is_selective, live.backward.before, live.whole_backward.before)
        turns.append(np.maximum(most - part.saved_bytes, 0.0))
    *of_blocks, of_head = turns
    return np.maximum(reduce(np.minimum, of_blocks), stage.heads * of_head)
