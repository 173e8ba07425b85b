"""Layers placed so that the slowest pipeline stage is as fast as it can be.

Embedding and head take as long as some layers; first layers of another kind (dense ones before experts) count
for what they take less. The first and the last chunk get so many layers fewer (`Mesh.ends`), rounded up or
down, or none, whichever makes the slowest stage fastest; of equals the one with fewer layers at the front,
where most microbatches are alive. Where layers are alike, no placement with one chunk a rank has a faster
slowest stage.

What counts is forward and backward of a microbatch. Recomputation is left out: the ends would differ along
one more axis of a search, which would take up to twice as long, for steps that are at most 4 % faster, most
less than 1 % (`docs/log.md`). Some schedules need chunks alike: an interleaved one keeps in step only if no
chunk but the first and the last is shorter, so these take all that layers lack; DualPipe hides the exchange
of experts of each layer behind a layer of the chunk that it is paired with (arXiv 2412.19437), and keeps them
all alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.priced_part import Part
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import EVEN
from meshwise.plan.stages import chunk_layers, stages_of

_INTERLEAVED = SCHEDULES.index("interleaved")


def balanced(model: Model, mesh: Mesh, by_part: Sequence[Part], front_s: Num = 0.0) -> Mesh:
    """`mesh` with the `ends` that make the slowest stage fastest.

    `front_s`: what a microbatch takes beside the embedding. Engines, PyTorch's own pipeline
    (implementation=fsdp2) and stages=even place layers evenly.
    """
    plan = mesh.plan
    is_even = plan.stages == EVEN or mesh.serves or plan.implementation == "fsdp2"
    if is_even or not np.any(np.asarray(mesh.pp) > 1):
        return mesh
    if plan.stages:
        unstated = replace(mesh, plan=replace(plan, stages=None))
        return replace(mesh, ends=balanced(model, unstated, by_part, front_s).ends)
    seconds = [part.forward_s + (part.backward_s + part.weight_s if mesh.trains else 0.0) for part in by_part]
    seconds[0] = seconds[0] + front_s
    return replace(mesh, ends=_best_ends(model, mesh, seconds))


def _best_ends(model: Model, mesh: Mesh, seconds: Sequence[Num]) -> tuple[Num, Num]:
    """The `ends` with which the slowest stage is fastest; `seconds` of each part a microbatch."""
    exact = _ends(model, seconds)
    first, last = (np.ceil(end) for end in exact)
    ends: tuple[Num, Num] = (0.0, 0.0)
    fastest_s = _slowest_s(model, replace(mesh, ends=ends), seconds)
    rounded = ((first - down, last - 1.0 + up) for down, up in itertools.product((0.0, 1.0), repeat=2))
    for tried in itertools.chain(rounded, _in_step(model, mesh, exact)):
        slowest_s = _slowest_s(model, replace(mesh, ends=tried), seconds)
        is_faster = (slowest_s < fastest_s) & (mesh.pp > 1)
        fastest_s = np.minimum(slowest_s, fastest_s)
        ends = ends[0] + is_faster * (tried[0] - ends[0]), ends[1] + is_faster * (tried[1] - ends[1])
    return ends


def _in_step(model: Model, mesh: Mesh, ends: tuple[Num, Num]) -> Iterator[tuple[Num, Num]]:
    """`ends` with which all chunks of an interleaved schedule but the first and the last are alike.

    Both together hold as many layers fewer as leave a multiple of the chunks: the next below and above what
    the ends cost, so divided that both take as long, each rounded up and down.
    """
    num_chunks = mesh.pp * mesh.vpp
    needs = (mesh.schedule == _INTERLEAVED) & (-model.num_layers % num_chunks > 0)
    if not np.any(needs):
        return
    least = tuple(np.minimum(np.ceil(end), 0.0) - 1.0 for end in ends)  # light layers: the chunk holds more
    missing = -model.num_layers % num_chunks
    below = missing + np.floor((sum(ends) - missing) / num_chunks) * num_chunks
    for fewer, up in itertools.product((below, below + num_chunks), (0.0, 1.0)):
        first = np.floor((fewer + ends[0] - ends[1]) / 2.0) + up
        most = (model.num_layers + fewer) // num_chunks
        lowest, highest = np.maximum(least[0], fewer - most), np.minimum(most, fewer - least[1])
        first, holds = np.clip(first, lowest, highest), needs & (lowest <= highest)
        yield holds * first, holds * (fewer - first)  # other cells have none, as alone


def _ends(model: Model, seconds: Sequence[Num]) -> tuple[Num, Num]:
    """How many layers embedding (with the first layers, if they are of another kind) and head take."""
    embedding, *blocks, head = seconds
    first, regular = _layers_by_kind(model)
    layer_s = sum(n * block_s for n, block_s in zip(regular, blocks, strict=True)) / sum(regular)
    front_s = embedding + sum(n * (block_s - layer_s) for n, block_s in zip(first, blocks, strict=True))
    return front_s / layer_s, head / layer_s


@lru_cache(maxsize=256)
def _layers_by_kind(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each kind: of the first ones, if their kind does not come again, and of the others."""
    layers = [layer_kind(model, layer) for layer in range(model.num_layers)]
    start = next((i for i, layer in enumerate(layers) if layer != layers[0]), 0)
    start = 0 if layers[0] in layers[start:] else start
    counts = (Counter(some) for some in (layers[:start], layers[start:]))
    first, regular = (tuple(count[kind] for kind in layer_kinds(model)) for count in counts)
    return first, regular


def _slowest_s(model: Model, mesh: Mesh, seconds: Sequence[Num]) -> Num:
    """Time of one microbatch on the slowest stage; infinite where the schedule loses its step."""
    slowest_s: Num = 0.0
    for stage in stages_of(model, mesh):
        held = (stage.embeddings, *stage.layers, stage.heads)
        stage_s = stage.share * sum(count * part_s for count, part_s in zip(held, seconds, strict=True))
        slowest_s = np.maximum(slowest_s, (stage.num_stages > 0) * stage_s)
    return np.where(_loses_step(model, mesh), np.inf, slowest_s)[()]


def _loses_step(model: Model, mesh: Mesh) -> Any:
    """Where the schedule needs chunks that are more alike (see the top of this file)."""
    num_chunks, layers = mesh.pp * mesh.vpp, model.num_layers + sum(mesh.ends)
    is_shorter_within = (-layers % num_chunks > 2) | (np.maximum(*mesh.ends) > layers // num_chunks)
    is_moved = (mesh.ends[0] != 0) | (mesh.ends[1] != 0)
    return (mesh.schedule == _INTERLEAVED) & is_shorter_within | mesh.is_paired & is_moved


def differ(model: Model, mesh: Mesh) -> Any:
    """Where the stages that the plan states are not those that it would have without stating them."""
    stated = mesh.plan.stages

    def is_other(first: float, last: float) -> bool:
        return chunk_layers(model.num_layers, len(stated or ()), (int(first), int(last))) != stated

    return (np.vectorize(is_other, otypes=[bool])(*mesh.ends) | _loses_step(model, mesh))[()]
