"""The most that is kept for the backward at once on a rank under FSDP2 and torch's pipelines, to the byte.

It follows from the order of the rank's forwards and backwards (`program.order`):

    the largest sum over its chunks of  alive microbatches x what one keeps,
    and for the chunk whose backward runs, what recomputation brings back beyond what is gone by then,
    for the one whose forward runs, what a loss in pieces needs beyond what is kept of it

A backward that is split lets go of what the loss keeps, or of what weighs experts' answers in a last block,
when the gradient of the input is there, and of the rest with that of the weights. It recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.memory import kept_bytes, recomputed
from meshwise.estimate.priced_part import Part
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, chunks_of_rank, num_on_host
from meshwise.program.cut import Cut
from meshwise.program.order import Pattern, moments, patterns
from meshwise.program.parts import block_input_bytes


def kept_peak_bytes(model: Model, stage: Stage, parts: Sequence[Part], mesh: Mesh, cut: Cut) -> Num:
    """The most bytes that are kept at once for the backward on a rank of `stage`."""
    selective, full = recomputed(stage, mesh)
    is_full = (full > 0) * 1.0
    embedding, *blocks, head = parts
    kept = [kept_bytes(part, 0.0, selective, 0.0) for part in blocks]
    back = [is_full * part.saved_bytes + selective * part.redone_bytes for part in blocks]
    redone = np.where(full > 0, mesh.recompute_layers / mesh.vpp, 0.0)
    loss = head.loose_bytes * (cut.loss_chunks == 1)  # in pieces its gradient of the matrix stays too
    numbers = [embedding.saved_bytes, head.saved_bytes, loss, _in_a_piece(model, cut)]
    numbers += [mesh.offload_activations, block_input_bytes(model, cut), redone, *kept, *back]
    numbers += [part.loose_bytes for part in blocks]
    distinct, which = patterns(mesh, stage)
    cells = np.stack(np.broadcast_arrays(which, *numbers))
    peaks = np.empty(cells.shape[1:])
    for place, pattern in enumerate(distinct):
        here = cells[0] == place
        peaks[here] = _peak_of_pattern(model, mesh, cut, pattern, cells[1:, here])
    return peaks[()]


def _peak_of_pattern(
    model: Model, mesh: Mesh, cut: Cut, pattern: Pattern, cells: NDArray[np.float64]
) -> NDArray[Any]:
    """The peak of each of the `cells`, columns of numbers as in `kept_peak_bytes`, under one pipeline."""
    schedule, pp, vpp, _, rank = pattern
    embedding, head, loss, in_a_piece, share, one_input, redone = cells[:7]
    kept, back, loose = np.split(cells[7:], 3)
    sizes, pieces, beyond, let_go = [], [], [], []
    for chunk, layers in chunks_of_rank(model, pp, vpp, SCHEDULES[schedule], mesh.plan.stages, rank):
        kinds = [layer_kinds(model).index(layer_kind(model, layer)) for layer in layers]
        rest = np.array([_counted(model, kinds[i:]) for i in range(len(kinds) + 1)])
        on_host = np.asarray(num_on_host(share, float(len(kinds))))
        blocks = _kept_from(on_host, rest, kept, redone, one_input)
        sizes.append(chunk.embeddings * embedding + blocks + chunk.heads * head)
        pieces.append(chunk.heads * in_a_piece)
        largest = np.zeros_like(head)
        for start, kind in {kind: (i, kind) for i, kind in enumerate(kinds)}.values():
            done = np.where(redone > 0, np.minimum(start, redone - 1.0), start + 1)
            later = _kept_from(np.maximum(done, on_host), rest, kept, redone, one_input)
            largest = np.maximum(largest, back[kind] - chunk.heads * head - later)
        beyond.append(largest)
        gone = loss * (chunk.heads or not kinds)
        if kinds and (cut.lora_rank or not chunk.heads):  # a frozen head goes as its loss does
            gone = gone + loose[kinds[-1]] * (on_host < len(kinds))
        let_go.append((1.0 - chunk.embeddings) * gone)
    found = moments(*pattern)
    held = found.alive @ sizes - found.turned @ let_go + found.entering @ pieces + found.turning @ beyond
    return np.asarray(held.max(axis=0))


def _kept_from(
    first: NDArray[np.float64], rest: NDArray[np.float64], kept: NDArray[np.float64],
    redone: NDArray[np.float64], one_input: NDArray[np.float64],
) -> NDArray[np.float64]:  # fmt: skip
    """What the layers of a chunk from number `first` on keep; of those redone, each its input.

    `rest`: how many of each kind there are from each layer on.
    """
    number = len(rest) - 1.0
    first = np.minimum(first, number)
    numbers = rest[first.astype(int)].T
    again = np.minimum(np.maximum(redone - first, 0.0), numbers)
    inputs = np.maximum(np.minimum(redone, number) - first, 0.0)
    return np.asarray(((numbers - again) * kept).sum(axis=0) + inputs * one_input)


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


def _counted(model: Model, kinds: Sequence[int]) -> NDArray[np.float64]:
    return np.bincount(kinds, minlength=len(layer_kinds(model))).astype(np.float64)
