"""Bytes that a step under FSDP2 has alive in any case, beside shards of weights and states.

Told without the order of the step (`estimate.fsdp2_peak`), so that a search need not look at plans that do
not fit anyway:

- weights: without a pipeline all below ZeRO 3, in one those of the chunks that stay gathered;
- activations: microbatches in flight, and a block or the head in its backward on top; of a schedule that
  splits its backwards none of the latter, and not what goes first in them;
- gradients when the last backward begins: shards from ZeRO 2 on without a pipeline, or else whole sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES, in_flight_microbatches, weight_copies
from meshwise.estimate.priced_part import Part
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import RECOMPUTE
from meshwise.plan.stages import Stage
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, reduced_bytes, sums_are_shards
from meshwise.program.order import ACTIVE_CHUNKS
from meshwise.program.parts import block_input_bytes
from meshwise.program.sharding import FSDP2, at_stage

_FULL, _SELECTIVE = RECOMPUTE.index("full"), RECOMPUTE.index("selective")
_SPLIT = tuple(i for i, name in enumerate(SCHEDULES) if name.startswith(("zb", "dualpipe")))


def least_step_bytes(
    model: Model, stage: Stage, parts: Sequence[Part], held: Sequence[Unit], shards: Num, mesh: Mesh, cut: Cut
) -> Num:
    """The least that a step has alive on a rank of `stage`; `shards`: bytes of the gradients' shards."""
    whole = sum((unit.count * unit.gathered_bytes(mesh, cut) for unit in held), 0.0)
    stored = (unit.count * rows * width for unit in held for rows, width in unit.trained.stored(cut))
    sums = np.where(sums_are_shards(mesh) > 0, shards, reduced_bytes(mesh, cut) * sum(stored, 0.0))
    sums = sums * (mesh.num_microbatches > 1)
    a_microbatch, a_layer = _kept(model, stage, parts, mesh, cut)
    turn = _turn(stage, parts, mesh)
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


def _kept(model: Model, stage: Stage, parts: Sequence[Part], mesh: Mesh, cut: Cut) -> tuple[Num, Num]:
    """What the layers of a rank keep of a microbatch, and one of them, at least."""
    one_input, is_full = block_input_bytes(model, cut), np.equal(mesh.recompute, _FULL)
    blocks = [
        part.saved_bytes - np.equal(mesh.recompute, _SELECTIVE) * part.core_bytes for part in parts[1:-1]
    ]
    least, most = (reduce(of_two, blocks) for of_two in (np.minimum, np.maximum))
    of_chunk = np.ceil(np.minimum(mesh.recompute_layers, model.num_layers) / mesh.vpp)
    redone = np.minimum(of_chunk * mesh.vpp * weight_copies(mesh.schedule), stage.num_layers)
    in_all = sum((count * kept for count, kept in zip(stage.layers, blocks, strict=True)), 0.0)
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


def _turn(stage: Stage, parts: Sequence[Part], mesh: Mesh) -> Num:
    """What the head, or the first block of a backward, holds in its turn beyond what it keeps."""
    is_selective = np.equal(mesh.recompute, _SELECTIVE)
    turns = []
    for part in parts[1:]:
        live = part.live[0]
        most = np.where(is_selective, live.backward.before, live.whole_backward.before)
        turns.append(np.maximum(most - part.saved_bytes, 0.0))
    *of_blocks, of_head = turns
    return np.maximum(reduce(np.minimum, of_blocks), stage.heads * of_head)
