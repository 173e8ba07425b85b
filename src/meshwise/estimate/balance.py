"""The step of a plan whose layers are placed so that it is as fast as it can be.

Embedding and head take as long as some layers; first layers of another kind (dense ones before experts) count
for what they take less. The first and the last chunk get so many layers fewer, their *ends* (`Mesh.ends`).
How many is decided by the step itself:

1. Ends are rounded up or down, or none, whichever makes the slowest stage fastest, recomputation left out
   (`best_ends`). Where layers are alike, no placement with one chunk a rank has a faster slowest stage.
2. The step can only be shorter with others by what the stages differ (`_Bound`): in time, and in what they
   exchange and update. Where that is worth it, ends are tried around those with which the stages are as even
   as can be (`other_ends`), in seconds (recomputation included) and in weights; the fastest step is taken.

A rate that rises makes none of the steps that are compared slower, so it makes the fastest no slower either.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import chosen_cells, distinct_columns, some_columns
from meshwise.core.numbers import larger, smaller, where
from meshwise.core.units import Num
from meshwise.estimate.memory import held_params, recomputed
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.priced_part import DENSE, EXPERTS
from meshwise.estimate.stage_cost import StageCost
from meshwise.estimate.step import StepCost, Wants, mean_phases_s, price_step, waits_s
from meshwise.estimate.timing import Machine
from meshwise.estimate.tower import FRONT, tower_time, towers_of
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import MIRRORED, ROUND, folding, has_fixed_ends, loses_step, patterns_of, stages_of

Ends = tuple[Num, Num]
Weights = Sequence[Num]
"""What each part of a model weighs: embedding, blocks by kind, head."""

AROUND = np.array([*itertools.product((1.0, 0.0, -1.0, -2.0), repeat=2)]).T[:, :, None]
"""What is added to ends to try those around them [first or last, tried, plans]."""

NO_GAIN_FRAC = 1e-4
"""Share of a step for which no other ends are looked for."""


def step_cost(model: Model, mesh: Mesh, machine: Machine) -> StepCost:
    """The cost of one step of the plans of `mesh`, with the `ends` that make it fastest."""
    return placed_cost(placed(priced_model(model, mesh, machine)))


def with_ends(of: PricedModel, ends: Ends) -> PricedModel:
    """The same plans with other ends."""
    return replace(of, mesh=replace(of.mesh, ends=ends))


def placed(of: PricedModel) -> PricedModel:
    """The plans with the `ends` that make the slowest stage fastest; with none where layers are dealt evenly.

    Of stages that the plan states, with the ends that it would have without stating them.
    """
    mesh = of.mesh
    if has_fixed_ends(mesh):
        return of
    if mesh.plan.stages:
        unstated = replace(of, mesh=replace(mesh, plan=replace(mesh.plan, stages=None)))
        return with_ends(of, placed_cost(placed(unstated)).of.mesh.ends)
    seconds, *_ = part_weights(of, again=0.0)
    return with_ends(of, best_ends(of.model, mesh, seconds))


def placed_cost(of: PricedModel, wants: Wants | None = None) -> StepCost:
    """The cost of one step of `placed` plans, with other ends wherever they are faster.

    `wants`: the plans whose memory is told (`price_step`) and whose other ends are
    tried; None: all. In a grid `step_s`, `memory_bytes` and the mesh alone are those of the fastest ends; the
    rest is as it is with those that make the slowest stage fastest.
    """
    if has_fixed_ends(of.mesh):
        return price_step(of, wants=wants)
    found = price_step(of)
    return found if of.mesh.plan.stages or not of.mesh.trains else _with_faster_ends(found, wants)


def _with_faster_ends(found: StepCost, wants: Wants | None) -> StepCost:
    """`found` with other ends wherever its step is faster by them; see `placed_cost`."""
    of, bound, worth_s = found.of, _bound(found), found.step_s * (1.0 - NO_GAIN_FRAC)
    others_s = least_of_others_s(of.model, of.mesh, [part.total_s for part in of.by_part])
    least_s = bound.step_s(of.mesh, larger(sum(bound.mean_s), others_s))
    is_open = least_s < worth_s
    needed = 0.0 if wants is None else _least(found, lambda cost: cost.memory.total)
    if wants is not None:
        is_open = is_open & wants(of.mesh, least_s, needed)
    shape = np.shape(np.atleast_1d(worth_s))
    cells = np.nonzero(np.broadcast_to(is_open, shape))
    if not cells[0].size:
        return found
    flat = partial(chosen_cells, cells=cells, shape=shape)
    opened = of.of_rows(cells[-1], of.mesh.mapped(flat))
    bound, worth_s, needed = bound.mapped(flat), flat(worth_s), flat(needed)
    for ends, slowest_s in other_ends(opened):
        least_s = np.atleast_1d(bound.step_s(opened.mesh, slowest_s))
        is_open = least_s < worth_s
        if wants is not None:
            is_open = is_open & wants(opened.mesh, least_s, needed)
        some = np.nonzero(is_open)
        if some[0].size:
            of_some = partial(chosen_cells, cells=some, shape=cells[0].shape)
            first, last = map(of_some, ends)
            cost = price_step(with_ends(opened.of_rows(some, opened.mesh.mapped(of_some)), (first, last)))
            found = _with_faster(found, cost, of_some(worth_s), tuple(index[some] for index in cells))
    return found


def _with_faster(
    found: StepCost, cost: StepCost, worth_s: Num, cells: tuple[NDArray[np.intp], ...]
) -> StepCost:
    """`found` with the `cost` of some of its cells wherever it is better, and below `worth_s`."""
    shape = np.shape(found.step_s)
    if not shape:
        return cost if _is_better(cost, found.step_s, found.memory_bytes, worth_s) else found
    before = found.step_s, found.memory_bytes, *found.of.mesh.ends
    wholes = [np.array(np.broadcast_to(one, shape), dtype=np.float64) for one in before]
    is_better = _is_better(cost, wholes[0][cells], wholes[1][cells], worth_s)
    for whole, other in zip(wholes, (cost.step_s, cost.memory_bytes, *cost.of.mesh.ends), strict=True):
        whole[cells] = where(is_better, other, whole[cells])
    step_s, memory_bytes, first, last = wholes
    return replace(found, of=with_ends(found.of, (first, last)), step_s=step_s, memory_bytes=memory_bytes)


def _is_better(cost: StepCost, step_s: Num, memory_bytes: Num, worth_s: Num) -> Any:
    """Where a `cost` is below `worth_s`, and faster than `step_s`, or as fast with less memory."""
    is_less = (cost.step_s == step_s) & (cost.memory_bytes < memory_bytes)
    return (cost.step_s < worth_s) & ((cost.step_s < step_s) | is_less)


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """What plans take at least with any ends: stages that take `mean_s` by phase, and once a step `rest_s`.

    All stages together take what they take, so the slowest takes at least the mean; of what they differ in
    else, the largest is at least the smallest. Where exchanges slow every microbatch (`is_bound`), the
    slowest stage may hide all that the others wait. Stragglers take `slowed` times as long.
    """

    mean_s: Sequence[Num]
    is_bound: Num
    hop_s: Num
    rest_s: Num
    slowed: float

    def step_s(self, mesh: Mesh, slowest_s: Num) -> Num:
        """The least step where the slowest stage takes `slowest_s`."""
        lead_s = slowest_s + (3.0 * mesh.pp * self.is_bound - 1.0) * sum(self.mean_s)
        waits = sum(waits_s(mesh, self.mean_s, self.hop_s, lead_s))
        return self.slowed * (mesh.num_microbatches * slowest_s + waits + self.rest_s)

    def mapped(self, of: Callable[[Num], Num]) -> _Bound:
        """The bound with something done to each of its times."""
        mean_s = list(map(of, self.mean_s))
        return _Bound(mean_s, of(self.is_bound), of(self.hop_s), of(self.rest_s), self.slowed)


def _bound(found: StepCost) -> _Bound:
    mesh, overheads = found.of.mesh, found.of.machine.overheads
    lone_s = _least(found, lambda cost: cost.time.unpaired_s)
    return _Bound(
        mean_s=mean_phases_s(mesh, found.stages),
        is_bound=(sum(cost.exposed_s for cost in found.stages) > 0.0) * 1.0,
        hop_s=found.hop_s,
        rest_s=smaller(mesh.pp, mesh.num_microbatches) * lone_s
        + _least(found, lambda cost: cost.comm_dp_s)
        + _least(found, lambda cost: cost.optimizer_s),
        slowed=1.0 + overheads.straggler_frac * np.log2(mesh.world),
    )


def _least(found: StepCost, number: Callable[[StageCost], Num]) -> Num:
    """The least of a number of the stages."""
    return reduce(smaller, (where(cost.stage.num_stages > 0, number(cost), np.inf) for cost in found.stages))


# --- ends -----------------------------------------------------------------------------------------


def best_ends(model: Model, mesh: Mesh, seconds: Sequence[Num]) -> tuple[Num, Num]:
    """The `ends` with which the slowest stage is fastest; `seconds` of each part a microbatch."""
    (evenly_s,) = _heaviest(model, even := replace(mesh, ends=(0.0, 0.0)), [seconds])
    if np.all(evenly_s <= least_of_others_s(model, even, seconds)):
        return even.ends
    exact = _ends(model, seconds)
    first, last = (np.ceil(end) for end in exact)
    rounded = ((first - down, last - 1.0 + up) for down, up in itertools.product((0.0, 1.0), repeat=2))
    tried: list[tuple[Any, Any]] = [(0.0, 0.0), *rounded, *_in_step(model, mesh, exact)]
    sizes = np.broadcast_arrays(mesh.pp, mesh.vpp, mesh.schedule, *seconds, *itertools.chain(*tried))
    ends = np.stack(sizes[-2 * len(tried) :]).reshape(len(tried), 2, *sizes[0].shape).swapaxes(0, 1)
    (slowest_s,) = _heaviest(model, of := replace(mesh, ends=tuple(ends)), [seconds])
    runs = (mesh.pp > 1) & ~loses_step(model, of) | np.all(ends == 0.0, axis=0)
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
    if len(seconds) > 3:  # folded chunks may hold other kinds, and as many
        is_even = is_even & (fold == ROUND)
    fullest = (np.ceil(a_rank * layers / mesh.pp) + is_even) / a_rank
    return fullest * reduce(smaller, seconds[1:-1])


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
    tried: list[NDArray[np.float64]] = [own[:, None], np.zeros_like(own[:, None])]
    for weight in weights:
        exact = _ends(model, weight)
        tried.append(
            np.ceil(np.stack([np.broadcast_to(end, own.shape[1]) for end in exact]))[:, None] + AROUND
        )
        tried += [
            np.stack(np.broadcast_arrays(*ends, own[0])[:2])[:, None] for ends in _in_step(model, mesh, exact)
        ]
    ends = np.concatenate(tried, axis=1)
    mesh = replace(mesh, ends=(ends[0], ends[1]))
    patterns, pattern = patterns_of(model, mesh)
    runs = ~loses_step(model, mesh) & (mesh.pp > 1)
    number = np.nonzero(runs)[1]
    _, first = np.unique(number * len(patterns) + pattern[runs], return_index=True)
    number = number[first]
    return number, ends[:, runs][:, first], (pattern != pattern[0])[runs][first]


def _in_step(model: Model, mesh: Mesh, ends: tuple[Num, Num]) -> Iterator[tuple[Num, Num]]:
    """`ends` with which all chunks of an interleaved schedule but the first and the last are alike.

    Both together hold as many layers fewer as leave a multiple of the chunks: the next below and above what
    the ends cost, so divided that both take as long, each rounded up and down.
    """
    num_chunks = mesh.pp * mesh.vpp
    needs = mesh.is_interleaved & (-model.num_layers % num_chunks > 0)
    if not np.any(needs):
        return
    least = tuple(smaller(np.ceil(end), 0.0) - 1.0 for end in ends)  # light layers: the chunk holds more
    missing = -model.num_layers % num_chunks
    below = missing + np.floor((sum(ends) - missing) / num_chunks) * num_chunks
    for fewer, up in itertools.product((below, below + num_chunks), (0.0, 1.0)):
        first = np.floor((fewer + ends[0] - ends[1]) / 2.0) + up
        most = (model.num_layers + fewer) // num_chunks
        lowest, highest = larger(least[0], fewer - most), smaller(most, fewer - least[1])
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


def _heaviest(model: Model, mesh: Mesh, weights: Sequence[Weights]) -> list[Num]:
    """The most that a stage weighs in each of the `weights`: what a microbatch passes of it."""
    heaviest: list[Num] = [0.0 for _ in weights]
    for stage in stages_of(model, mesh):
        held = stage.embeddings, *stage.layers, stage.heads
        counts = [(stage.num_stages > 0) * stage.share * count for count in held]
        for i, weight in enumerate(weights):
            heaviest[i] = larger(heaviest[i], sum(map(operator.mul, counts, weight)))
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
    of_head = held_params(of, head)  # a tied table may lie there again
    params = [[part.held[kind].params for part in by_part] for kind in kinds]
    return [seconds, *params, *([[*params[DENSE][:-1], of_head[DENSE].params]] * model.tied_embedding)]


def _unbeaten(number: NDArray[np.intp], slowest_s: NDArray[Any], params: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ends no others of the same plan beat in both the slowest stage and the one with most weights."""
    order = np.lexsort((params, slowest_s, number))
    share = params[order] / larger(np.max(params, initial=0.0), 1.0)
    falling = share - 2.0 * number[order]  # less in each plan than in all before it
    is_unbeaten = np.zeros(number.shape, dtype=bool)
    is_unbeaten[order] = falling < np.concatenate([[np.inf], np.minimum.accumulate(falling)[:-1]])
    return is_unbeaten
