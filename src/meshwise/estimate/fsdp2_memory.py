"""Memory of a rank under FSDP2 and torch's pipelines: states as it shards them, activations to the byte.

The most that is kept at once follows from the order of the rank's forwards and backwards (`program.order`):

    the largest sum over its chunks of  alive microbatches x what one keeps,
    and for the chunk whose backward runs, what recomputation brings back beyond what is gone by then,
    for the one whose forward runs, what a loss in pieces needs beyond what is kept of it

A backward that is split lets go of what the loss keeps, or of what weighs experts' answers in a last block,
when the gradient of the input is there, and of the rest with that of the weights. It recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.memory import Memory, kept_bytes, recomputed
from meshwise.estimate.priced_part import Part
from meshwise.machine.overheads import Overheads
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, chunks_of_rank, num_on_host
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, held_params, optimizer_bytes, shard_bytes, unsharded_bytes
from meshwise.program.order import Pattern, moments, patterns
from meshwise.program.parts import block_input_bytes


def fsdp2_memory(
    model: Model, stage: Stage, parts: Sequence[Part], held: Sequence[Unit], mesh: Mesh, cut: Cut,
    overheads: Overheads,
) -> Memory:  # fmt: skip
    """Memory of one rank of `stage` at its peak; `held` are the units of its weights."""
    held_bytes = sum((unit.count * unit.local_bytes(mesh, cut) for unit in held), 0.0)
    trained = [unit.trained for unit in held]
    trained_bytes = shard_bytes(mesh, cut) * held_params(trained, mesh, cut)
    state_bytes = optimizer_bytes(held, mesh, cut)
    activations, filled, booked = _activation_peaks(model, stage, parts, mesh, cut)
    buffers = _buffer_bytes(model, parts, mesh, cut) + unsharded_bytes(held, stage, mesh, cut)
    buffers = buffers + (filled - activations)
    return Memory(
        weights=held_bytes,
        gradients=trained_bytes,
        optimizer=state_bytes,
        activations=activations,
        cache=0.0,
        buffers=buffers,
        overhead=overheads.context_bytes
        + (booked - filled)
        + overheads.fragment_frac * (held_bytes + trained_bytes + state_bytes + activations + buffers),
    )


def _buffer_bytes(model: Model, parts: Sequence[Part], mesh: Mesh, cut: Cut) -> Num:
    """Workspace beside whole weights and the loss: gathered activations, messages, the widest gradient."""
    gathered = 2.0 * cut.tokens * model.hidden * cut.precision.act_bytes * (mesh.tp > 1)
    messages = 4.0 * block_input_bytes(model, cut) * (mesh.pp > 1)
    return gathered + messages + _widest_bytes(parts)


def _widest_bytes(parts: Sequence[Part]) -> Num:
    return reduce(np.maximum, (part.widest_bytes for part in parts[1:-1]))


def _activation_peaks(
    model: Model, stage: Stage, parts: Sequence[Part], mesh: Mesh, cut: Cut
) -> NDArray[np.float64]:
    """The most bytes that are kept at once for the backward on a rank of `stage`.

    Then the same with what a loss fills in its turn instead of the widest gradient, and with what an
    allocator books for that.
    """
    selective, full = recomputed(stage, mesh)
    is_full = (full > 0) * 1.0
    embedding, *blocks, head = parts
    kept = [kept_bytes(part, 0.0, selective, 0.0) for part in blocks]
    back = [is_full * part.saved_bytes + selective * part.redone_bytes for part in blocks]
    redone = np.where(full > 0, mesh.recompute_layers / mesh.vpp, 0.0)
    loss = head.loose_bytes * (cut.loss_chunks == 1)  # in pieces its gradient of the matrix stays too
    numbers = [embedding.saved_bytes, head.saved_bytes, loss]
    numbers += _of_the_loss(model, parts, cut)
    numbers += [mesh.offload_activations, block_input_bytes(model, cut), redone, *kept, *back]
    numbers += [part.loose_bytes for part in blocks]
    distinct, which = patterns(mesh, stage)
    cells = np.stack(np.broadcast_arrays(which, *numbers))
    peaks = np.empty((3, *cells.shape[1:]))
    for place, pattern in enumerate(distinct):
        here = cells[0] == place
        peaks[:, here] = _peaks_of_pattern(model, mesh, cut, pattern, cells[1:, here])
    return peaks


def _peaks_of_pattern(
    model: Model, mesh: Mesh, cut: Cut, pattern: Pattern, cells: NDArray[np.float64]
) -> NDArray[Any]:
    """The peaks of each of the `cells`, columns of numbers as in `_activation_peaks`, under one pipeline."""
    schedule, pp, vpp, _, rank = pattern
    embedding, head, loss = cells[:3]
    in_a_piece, in_turn = cells[3:6], cells[6:9]
    share, one_input, redone = cells[9:12]
    kept, back, loose = np.split(cells[12:], 3)
    sizes, pieces, beyond, let_go = [], [], [], []
    every = mesh.plan.recompute_every
    for chunk, layers in chunks_of_rank(model, pp, vpp, SCHEDULES[schedule], mesh.plan.stages, rank):
        kinds = [layer_kinds(model).index(layer_kind(model, layer)) for layer in layers]
        rest = np.array([_counted(model, kinds[i:]) for i in range(len(kinds) + 1)])
        on_host = np.asarray(num_on_host(share, float(len(kinds))))
        blocks = _kept_from(on_host, rest, kept, redone, every, one_input)
        sizes.append(chunk.embeddings * embedding + blocks + chunk.heads * head)
        pieces.append(chunk.heads * in_a_piece)
        largest = chunk.heads * in_turn
        for start in _last_of_each_kind(kinds, every):
            inside = _counted(model, kinds[start : start + every])
            done = np.where(redone > 0, np.minimum(start, redone - 1.0), start + every)
            later = _kept_from(np.maximum(done, on_host), rest, kept, redone, every, one_input)
            largest = np.maximum(largest, inside @ back - chunk.heads * head - later)
        beyond.append(largest)
        gone = loss * (chunk.heads or not kinds)
        if kinds and (cut.lora_rank or not chunk.heads):  # a frozen head goes as its loss does
            gone = gone + loose[kinds[-1]] * (on_host < len(kinds))
        let_go.append((1.0 - chunk.embeddings) * gone)
    found = moments(*pattern)
    standing = found.alive @ sizes - found.turned @ let_go
    held = [
        standing
        + found.entering @ [piece[kind] for piece in pieces]
        + found.turning @ [more[kind] for more in beyond]
        for kind in range(len(in_turn))
    ]
    return np.asarray(held).max(axis=1)


def _kept_from(
    first: NDArray[np.float64], rest: NDArray[np.float64], kept: NDArray[np.float64],
    redone: NDArray[np.float64], every: int, one_input: NDArray[np.float64],
) -> NDArray[np.float64]:  # fmt: skip
    """What the layers of a chunk from number `first` on keep; of those redone, each run of `every` its input.

    `rest`: how many of each kind there are from each layer on.
    """
    number = len(rest) - 1.0
    first = np.minimum(first, number)
    numbers = rest[first.astype(int)].T
    again = np.minimum(np.maximum(redone - first, 0.0), numbers)
    runs = np.ceil(np.minimum(redone, number) / every) - np.ceil(first / every)
    return np.asarray(((numbers - again) * kept).sum(axis=0) + np.maximum(runs, 0.0) * one_input)


def _of_the_loss(model: Model, parts: Sequence[Part], cut: Cut) -> list[Num]:
    """What a loss needs beyond what is kept after it: in the forward, if it is in pieces, and in its turn.

    Each three times: what it keeps for its own backward, what it fills, and what is booked for that, beyond
    the widest gradient of a block. In pieces the gradients of the hidden states take as much as these did,
    which a frozen matrix does not keep.
    """
    head, widest = parts[-1], _widest_bytes(parts)
    if cut.loss_chunks == 1:
        room = (np.maximum(size - widest, 0.0) for size in (head.loss_bytes, head.booked_loss_bytes))
        return [0.0, 0.0, 0.0, 0.0, *room]
    prec, vocab = cut.precision, model.vocab / cut.tp
    logit_bytes = prec.act_bytes if cut.loss.keeps == "logits" else prec.stat_bytes
    kept_after = prec.act_bytes * (cut.tokens if cut.lora_rank else vocab) * model.hidden
    kept = np.maximum(logit_bytes * cut.tokens / cut.loss_chunks * vocab + prec.stat_bytes - kept_after, 0.0)
    room = (
        np.maximum(kept, size - kept_after - widest) for size in (head.loss_bytes, head.booked_loss_bytes)
    )
    return [kept, *room, 0.0, 0.0, 0.0]


def _last_of_each_kind(kinds: Sequence[int], every: int) -> Iterable[int]:
    """Where the last of all runs of `every` layers begins that hold alike ones."""
    return {tuple(sorted(kinds[i : i + every])): i for i in range(0, len(kinds), every)}.values()


def _counted(model: Model, kinds: Sequence[int]) -> NDArray[np.float64]:
    return np.bincount(kinds, minlength=len(layer_kinds(model))).astype(np.float64)
