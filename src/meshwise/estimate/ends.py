"""Ends: how many layers fewer the first and the last chunk of a pipeline hold (`Mesh.ends`).

Embedding and head take as long as some layers; first layers of another kind (dense ones before experts) count
for what they take less. Ends are rounded up or down, or none, whichever makes the slowest stage fastest
(`best_ends`). Others may make the whole step faster, if stages differ in what they exchange or update: those
around the ends with which the stages are as even as can be in seconds and in weights (`other_ends`). Where
kinds of layers alternate, these count the layers of the last chunk both as mean ones and as what they are.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns, some_columns
from meshwise.core.numbers import added, larger, smaller, where
from meshwise.core.units import Num
from meshwise.estimate.memory import held_params, recomputed
from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.priced_part import DENSE, EXPERTS
from meshwise.estimate.tower import FRONT, tower_time, towers_of
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import MIRRORED, ROUND, folding, layers_before, loses_step, patterns_of, stages_of

Ends = tuple[Num, Num]
Weights = Sequence[Num]
"""What each part of a model weighs: embedding, blocks by kind, head."""

AROUND = np.array([*itertools.product((1.0, 0.0, -1.0, -2.0), repeat=2)]).T[:, :, None]
"""What is added to ends to try those around them [first or last, tried, plans]."""


def best_ends(model: Model, mesh: Mesh, seconds: Sequence[Num]) -> tuple[Num, Num]:
    """The `ends` with which the slowest stage is fastest; `seconds` of each part a microbatch."""
    (evenly_s,) = _heaviest(model, even := replace(mesh, ends=(0.0, 0.0)), [seconds])
    if np.all((evenly_s <= least_of_others_s(model, even, seconds)) & ~loses_step(model, even)):
        return even.ends
    exact, needs = _ends(model, seconds), -model.num_layers % (mesh.pp * mesh.vpp) > 0
    first, last = (np.ceil(end) for end in exact)
    rounded = ((first - down, last - 1.0 + up) for down, up in itertools.product((0.0, 1.0), repeat=2))
    tried: list[tuple[Any, Any]] = [(0.0, 0.0), *rounded, *_in_step(model, mesh, exact, needs)]
    sizes = np.broadcast_arrays(mesh.pp, mesh.vpp, mesh.schedule, *seconds, *itertools.chain(*tried))
    ends = np.stack(sizes[-2 * len(tried) :]).reshape(len(tried), 2, *sizes[0].shape).swapaxes(0, 1)
    (slowest_s,) = _heaviest(model, of := replace(mesh, ends=tuple(ends)), [seconds])
    runs = ~loses_step(model, of) & ((mesh.pp > 1) | np.all(ends == 0.0, axis=0))
    fastest = np.argmin(where(runs, slowest_s, np.inf), axis=0)
    first, last = np.take_along_axis(ends, fastest[None, None], axis=1)[:, 0]
    return first[()], last[()]


def least_of_others_s(model: Model, mesh: Mesh, seconds: Weights) -> Num:
    """What a microbatch takes at least on the slowest stage with other ends than those of `mesh`.

    Layers are not divided: the fullest stage holds as many as the mean, rounded up, and one more where all
    hold as many with the ends that they have; of two stages that share a rank, the mean counts. `seconds` of
    each part.
    """
    layers, fold = float(model.num_layers), folding(mesh)
    a_rank = 1.0 + (fold == MIRRORED)
    is_even = (mesh.ends[0] == 0) & (mesh.ends[1] == 0) & (layers % (mesh.pp * mesh.vpp) == 0)
    is_even = is_even & ((len(seconds) == 3) | (fold == ROUND))  # other kinds may fold, and be as many
    return (np.ceil(a_rank * layers / mesh.pp) + is_even) / a_rank * reduce(smaller, seconds[1:-1])


def other_ends(of: PricedModel) -> Iterator[tuple[Ends, Num]]:
    """Ends with which no others beat both the slowest and the heaviest stage, but those that its mesh has.

    One of each plan at a time, the fastest first, with what its slowest stage then takes: without end where
    a plan has no more.
    """
    model, mesh, weights = of.model, of.mesh, part_weights(of, again=1.0)
    layers = smaller(mesh.recompute_layers, float(model.num_layers))
    matters = mesh.recompute, layers, mesh.pp, mesh.vpp, mesh.schedule, mesh.is_paired * 1.0, *mesh.ends
    spread = np.broadcast_arrays(*matters, *itertools.chain(*weights))
    shape = spread[0].shape
    table = np.stack(spread).reshape(len(spread), -1)
    first_of, kind = distinct_columns(table)
    of_kinds = partial(some_columns, places=first_of, num=len(kind))
    mesh, weights = mesh.mapped(of_kinds), [list(map(of_kinds, one)) for one in weights]
    own = table[len(matters) - 2 : len(matters), first_of]
    number, ends, is_other = _ends_around(model, mesh, weights, own)
    at = partial(some_columns, places=number, num=len(first_of))
    tried = replace(mesh.mapped(at), ends=tuple(ends))
    heaviest = _heaviest(model, tried, [list(map(at, weight)) for weight in weights])
    slowest_s, *params = (np.broadcast_to(one, number.shape) for one in heaviest)
    is_unbeaten = np.any([_unbeaten(number, slowest_s, most) for most in params], axis=0)
    table = np.stack([number, *ends, slowest_s])[:, is_unbeaten & is_other]
    for nth in _by_rank(table[:, np.lexsort((table[3], table[0]))]):
        found = np.stack([*own, np.full(own.shape[1], np.inf)])
        found[:, nth[0].astype(np.intp)] = nth[1:]
        first, last, slowest = (one[kind].reshape(shape)[()] for one in found)
        yield (first, last), slowest


def _by_rank(table: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """The first columns of each plan in a table sorted by the plan's number, then the second ones, and on."""
    rank = np.arange(table.shape[1]) - np.searchsorted(table[0], table[0])
    return (table[:, rank == nth] for nth in range(np.max(rank, initial=-1) + 1))


def _ends_around(
    model: Model, mesh: Mesh, weights: Sequence[Weights], own: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.bool_]]:
    """A plan's number, ends, and whether its stages are others than with its `own` ends.

    Of its own ends, none, and those around the ones that are even in a weight; of ends with which the stages
    are the same, one.
    """

    def spread(ends: Ends) -> NDArray[np.float64]:
        return np.stack(np.broadcast_arrays(*ends, own[0])[:2])[:, None]

    tried = [own[:, None], np.zeros_like(own[:, None])]
    _, regular = _layers_by_kind(model)
    last = (0.0, model.num_layers // (mesh.pp * mesh.vpp))[: 1 + (max(regular) < sum(regular))]
    for exact in itertools.starmap(partial(_ends, model), itertools.product(weights, last)):
        tried += [np.ceil(spread(exact)) + AROUND, *map(spread, _in_step(model, mesh, exact))]
    ends = np.concatenate(tried, axis=1)
    mesh = replace(mesh, ends=(ends[0], ends[1]))
    patterns, pattern = patterns_of(model, mesh)
    runs = ~loses_step(model, mesh) & (mesh.pp > 1)
    number = np.nonzero(runs)[1]
    # ties go to what is tried first, whatever else the grid has
    first = np.sort(np.unique(number * len(patterns) + pattern[runs], return_index=True)[1])
    number = number[first]
    return number, ends[:, runs][:, first], (pattern != pattern[0])[runs][first]


def _in_step(model: Model, mesh: Mesh, ends: Ends, needs: Any = True) -> Iterator[Ends]:
    """`ends` with which all chunks of an interleaved schedule but the first and the last are alike.

    Both together hold as many layers fewer as leave a multiple of the chunks: the least that do, and the next
    below and above what the ends cost, so divided that both take as long, each rounded up and down. `needs`:
    the plans for which they are told.
    """
    num_chunks = mesh.pp * mesh.vpp
    if not np.any(needs := needs & mesh.is_interleaved):
        return
    least = tuple(smaller(np.ceil(end), 0.0) - 1.0 for end in ends)  # light layers: the chunk holds more
    missing = -model.num_layers % num_chunks
    below = missing + np.floor((added(ends) - missing) / num_chunks) * num_chunks
    for fewer, up in itertools.product((missing, below, below + num_chunks), (0.0, 1.0)):
        first = np.floor((fewer + ends[0] - ends[1]) / 2.0) + up
        most = (model.num_layers + fewer) // num_chunks
        lowest, highest = larger(least[0], fewer - most), smaller(most, fewer - least[1])
        first, holds = np.clip(first, lowest, highest), needs & (lowest <= highest)
        yield holds * first, holds * (fewer - first)  # other cells have none, as alone


def _ends(model: Model, seconds: Weights, last: Num = 0.0) -> Ends:
    """How many layers embedding (with the first layers, if they are of another kind) and head take.

    The head counts with what the `last` layers of the model take more than as many mean ones.
    """
    embedding, *blocks, head = seconds
    before, (first, regular) = layers_before(model), _layers_by_kind(model)
    layer_s = added(n * block_s for n, block_s in zip(regular, blocks, strict=True)) / sum(regular)
    front_s = embedding + added(n * (block_s - layer_s) for n, block_s in zip(first, blocks, strict=True))
    in_last = before[-1] - before[np.intp(model.num_layers - last)]
    head_s = head + added(map(operator.mul, in_last.T, blocks)) - last * layer_s
    return front_s / layer_s, head_s / layer_s


@lru_cache(maxsize=256)
def _layers_by_kind(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of each kind: of the first ones, if their kind does not come again, and of the others."""
    layers = [layer_kind(model, layer) for layer in range(model.num_layers)]
    start = next((i for i, layer in enumerate(layers) if layer != layers[0]), 0)
    start = 0 if layers[0] in layers[start:] else start
    counts = (Counter(some) for some in (layers[:start], layers[start:]))
    first, regular = (tuple(count[kind] for kind in layer_kinds(model)) for count in counts)
    return first, regular


def _heaviest(model: Model, mesh: Mesh, weights: Sequence[Weights]) -> list[Num]:
    """The most that a stage weighs in each of the `weights`: what a microbatch passes of it."""
    heaviest: list[Num] = [0.0 for _ in weights]
    for stage in stages_of(model, mesh):
        held = stage.embeddings, *stage.layers, stage.heads
        counts = [(stage.num_stages > 0) * stage.share * count for count in held]
        for i, weight in enumerate(weights):
            heaviest[i] = larger(heaviest[i], added(map(operator.mul, counts, weight)))
    return heaviest


def part_weights(of: PricedModel, again: float) -> list[Weights]:
    """Seconds of a microbatch, with `again` times what all layers recompute; dense weights; experts."""
    model, mesh, by_part = of.model, of.mesh, of.by_part
    seconds = [part.total_s if mesh.trains else part.forward_s for part in by_part]
    for tower in towers_of(of):
        seconds[0] = seconds[0] + tower_time(tower, FRONT).total_s
    if again:
        selective, full = recomputed(replace(FRONT, layers=(model.num_layers / mesh.pp,)), mesh)
        for i, block in enumerate(by_part[1:-1], 1):
            seconds[i] = seconds[i] + again * (selective * block.core_s + np.floor(full) * block.again_s)
    kinds = (DENSE,) if model.moe is None else (DENSE, EXPERTS)
    head = replace(FRONT, embeddings=0.0, heads=1.0, layers=(0.0,) * len(by_part[1:-1]))
    of_head = held_params(of, head)  # the table of tokens may lie there again
    params = [[part.held[kind].params for part in by_part] for kind in kinds]
    return [seconds, *params, *([[*params[DENSE][:-1], of_head[DENSE].params]] * model.shares_table)]


def _unbeaten(number: NDArray[np.intp], slowest_s: NDArray[Any], params: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ends no others of the same plan beat in both the slowest stage and the one with most weights."""
    order = np.lexsort((params, slowest_s, number))
    share = params[order] / larger(np.max(params, initial=0.0), 1.0)
    falling = share - 2.0 * number[order]  # less in each plan than in all before it
    is_unbeaten = np.zeros(number.shape, dtype=bool)
    is_unbeaten[order] = falling < np.concatenate([[np.inf], np.minimum.accumulate(falling)[:-1]])
    return is_unbeaten
