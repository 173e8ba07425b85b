"""The step of a plan whose layers are placed so that it is as fast as it can be.

Embedding and head take as long as some layers; first layers of another kind (dense ones before experts) count
for what they take less. The first and the last chunk get so many layers fewer (`Mesh.ends`). How many is
decided by the step itself:

1. Ends are rounded up or down, or none, whichever makes the slowest stage fastest, recomputation left out.
   Where layers are alike, no placement with one chunk a rank has a faster slowest stage.
2. The step can only be shorter with others by what the stages differ (`_Bound`): in time, and in what they
   exchange and update. Where that is worth it, ends are tried around those with which the stages are as even
   as can be, in seconds (recomputation included) and in weights, and the fastest step is taken.

A rate that rises makes none of the steps that are compared slower, so it makes the fastest no slower either.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.memory import held_params, recomputed
from meshwise.estimate.priced_part import DENSE, EXPERTS
from meshwise.estimate.step import (
    PricedParts,
    StageCost,
    StepCost,
    Wants,
    mean_phases_s,
    price_step,
    priced_parts,
    tower_parts,
    tower_time,
    waits_s,
)
from meshwise.estimate.timing import Machine
from meshwise.estimate.tower import FRONT
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import EVEN
from meshwise.plan.stages import loses_step, stages_of
from meshwise.program.parts import cut_of

NO_GAIN_FRAC = 1e-4
"""Share of a step for which no other ends are looked for."""

_INTERLEAVED = SCHEDULES.index("interleaved")

Ends = tuple[Num, Num]
Weights = Sequence[Num]
"""What each part of a model weighs: embedding, blocks by kind, head."""


def step_cost(
    model: Model, mesh: Mesh, machine: Machine, parts: PricedParts | None = None, wants: Wants | None = None
) -> StepCost:
    """The cost of one step of the plans of `mesh`, with the `ends` that make it fastest.

    Engines, PyTorch's own pipeline (implementation=fsdp2) and stages=even place layers evenly. `parts`:
    those of `mesh` where they are priced already. `wants`: the plans whose memory is told (`price_step`) and
    whose other ends are tried; None: all. In a grid `step_s`, `memory_bytes` and `mesh` alone are those of
    the fastest ends; the rest is as it is with those that make the slowest stage fastest.
    """
    plan, parts = mesh.plan, parts or priced_parts(model, mesh, machine)
    is_even = plan.stages == EVEN or mesh.serves or plan.implementation == "fsdp2"
    if is_even or not np.any(np.asarray(mesh.pp) > 1):
        return price_step(model, mesh, machine, None, parts, wants)
    if plan.stages:
        unstated = replace(mesh, plan=replace(plan, stages=None))
        mesh = replace(mesh, ends=step_cost(model, unstated, machine, parts).mesh.ends)
        return price_step(model, mesh, machine, None, parts)
    seconds, *_ = _weights(model, mesh, machine, parts, again=0.0)
    mesh = replace(mesh, ends=_best_ends(model, mesh, seconds))
    found = price_step(model, mesh, machine, None, parts)
    return _with_faster_ends(model, found, machine, parts, wants) if mesh.trains else found


def _with_faster_ends(
    model: Model, found: StepCost, machine: Machine, parts: PricedParts, wants: Wants | None
) -> StepCost:
    """`found` with other ends wherever its step is faster by them; see `step_cost`."""
    bound, worth_s = _bound(found, machine), found.step_s * (1.0 - NO_GAIN_FRAC)
    least_s = bound.step_s(found.mesh, sum(bound.mean_s))
    is_open = least_s < worth_s
    if wants is not None:
        is_open = is_open & wants(found.mesh, least_s, _least(found, lambda cost: cost.memory.total))
    shape = np.shape(found.step_s) or (1,)
    plans = _Plans(found.mesh, parts, shape, np.nonzero(np.broadcast_to(is_open, shape)))
    if not len(plans):
        return found
    tried = _other_ends(model, plans, machine)
    if not tried.number.size:
        return found
    plans = plans.some(tried.number)
    may_be = bound.at(plans).step_s(plans.mesh, tried.slowest_s) < plans.at(worth_s)
    tried, plans = tried.some(may_be), plans.some(may_be)
    if not len(plans):
        return found
    if not np.shape(found.step_s):
        each = (
            replace(found.mesh, ends=(float(first), float(last)))
            for first, last in zip(*tried.ends, strict=True)
        )
        priced = [price_step(model, mesh, machine, None, parts) for mesh in each]
        fastest = min(priced, key=lambda cost: (cost.step_s, cost.memory_bytes))
        return fastest if fastest.step_s < worth_s else found
    cost = price_step(model, replace(plans.mesh, ends=tried.ends), machine, None, plans.parts)
    step_s, memory_bytes = (np.broadcast_to(one, len(plans)) for one in (cost.step_s, cost.memory_bytes))
    order = np.lexsort((memory_bytes, step_s, tried.number))
    which = order[np.unique(tried.number[order], return_index=True)[1]]
    which = which[step_s[which] < plans.at(worth_s)[which]]
    places, (first, last), before = plans.some(which).index, tried.some(which).ends, found.mesh.ends

    def changed(value: Num, to: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = np.array(np.broadcast_to(value, shape), dtype=np.float64)
        whole[places] = to
        return whole

    return replace(
        found,
        mesh=replace(found.mesh, ends=(changed(before[0], first), changed(before[1], last))),
        step_s=changed(found.step_s, step_s[which]),
        memory_bytes=changed(found.memory_bytes, memory_bytes[which]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Plans:
    """Some plans of a grid of `shape`, one after another; of one plan, itself as often as it is asked for."""

    whole: Mesh
    of_whole: PricedParts
    shape: tuple[int, ...]
    index: tuple[NDArray[np.intp], ...]

    def __len__(self) -> int:
        return self.index[0].size

    def some(self, which: NDArray[Any]) -> _Plans:
        """Those of these numbers, or where it is true."""
        return replace(self, index=tuple(axis[which] for axis in self.index))

    def at(self, value: Num) -> NDArray[np.float64]:
        """A number of the grid, of each of them."""
        return np.broadcast_to(value, self.shape)[self.index]

    @property
    def mesh(self) -> Mesh:
        """Their mesh."""
        return self.whole.mapped(lambda value: self.at(value) if isinstance(value, np.ndarray) else value)

    @property
    def parts(self) -> PricedParts:
        """Their parts."""
        return self.of_whole.of_rows(self.index[-1])

    def alike(self) -> tuple[_Plans, NDArray[np.intp]]:
        """One of all that have the same layout and recomputation, and which of these each is."""
        varies = np.shape(self.whole.recompute + self.whole.recompute_layers)
        varies = (1,) * (len(self.shape) - len(varies)) + varies
        matters = [size > 1 for size in varies[:-1]] + [True]
        index = tuple(axis * own for axis, own in zip(self.index, matters, strict=True))
        codes = np.ravel_multi_index(index, self.shape)
        _, first, kind = np.unique(codes, return_index=True, return_inverse=True)
        return self.some(first), kind


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """Ends that are tried, one after another: the number of their plan, and what its slowest stage takes."""

    number: NDArray[np.intp]
    ends: tuple[NDArray[np.float64], NDArray[np.float64]]
    slowest_s: NDArray[np.float64]

    def some(self, which: NDArray[Any]) -> _Tried:
        """Those of these places, or where it is true."""
        first, last = self.ends
        return _Tried(self.number[which], (first[which], last[which]), self.slowest_s[which])

    def of_all(self, kind: NDArray[np.intp]) -> _Tried:
        """Those of plans each of which is of a `kind`, the number that it has here."""
        ordered = self.some(np.argsort(self.number, kind="stable"))
        num_tried = np.bincount(self.number, minlength=kind.max() + 1)
        times = num_tried[kind]
        before = np.repeat((np.cumsum(num_tried) - num_tried)[kind] - (np.cumsum(times) - times), times)
        of_all = ordered.some(before + np.arange(times.sum()))
        return replace(of_all, number=np.repeat(np.arange(len(kind)), times))


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """What plans take at least with any ends: stages that take `mean_s` by phase, and once a step `rest_s`.

    All stages together take what they take, so the slowest takes at least the mean; of what they differ in
    else, the largest is at least the smallest. Stragglers take `slowed` times as long.
    """

    mean_s: Sequence[Num]
    hop_s: Num
    rest_s: Num
    slowed: float

    def step_s(self, mesh: Mesh, slowest_s: Num) -> Num:
        """The least step where the slowest stage takes `slowest_s`."""
        waits = sum(waits_s(mesh, self.mean_s, self.hop_s, slowest_s))
        return self.slowed * (mesh.num_microbatches * slowest_s + waits + self.rest_s)

    def at(self, plans: _Plans) -> _Bound:
        """That of some plans."""
        mean_s = [plans.at(one) for one in self.mean_s]
        return _Bound(mean_s, plans.at(self.hop_s), plans.at(self.rest_s), self.slowed)


def _bound(found: StepCost, machine: Machine) -> _Bound:
    mesh = found.mesh
    lone_s = _least(found, lambda cost: cost.time.unpaired_s)
    return _Bound(
        mean_s=mean_phases_s(mesh, found.stages),
        hop_s=found.hop_s,
        rest_s=np.minimum(mesh.pp, mesh.num_microbatches) * lone_s
        + _least(found, lambda cost: cost.comm_dp_s)
        + _least(found, lambda cost: cost.optimizer_s),
        slowed=1.0 + machine.overheads.straggler_frac * np.log2(mesh.world),
    )


def _least(found: StepCost, number: Callable[[StageCost], Num]) -> Num:
    """The least of a number of the stages."""
    return reduce(
        np.minimum, (np.where(cost.stage.num_stages > 0, number(cost), np.inf) for cost in found.stages)
    )


def _weights(model: Model, mesh: Mesh, machine: Machine, parts: PricedParts, again: float) -> list[Weights]:
    """Seconds of a microbatch, with `again` times what all layers recompute; dense weights; experts."""
    by_part = list(parts.spread().values())
    seconds = [part.total_s if mesh.trains else part.forward_s for part in by_part]
    for tower in tower_parts(model, mesh, machine):
        seconds[0] = seconds[0] + tower_time(tower, FRONT, machine).total_s
    if again:
        selective, full = recomputed(replace(FRONT, layers=(model.num_layers / mesh.pp,)), mesh)
        for i, block in enumerate(by_part[1:-1], 1):
            seconds[i] = seconds[i] + again * (selective * block.core_s + np.floor(full) * block.again_s)
    kinds = (DENSE,) if model.moe is None else (DENSE, EXPERTS)
    head = replace(FRONT, embeddings=0.0, heads=1.0, layers=(0.0,) * len(by_part[1:-1]))
    of_head = held_params(model, head, by_part, cut_of(mesh))  # a tied table may lie there again
    params = [[part.held[kind].params for part in by_part] for kind in kinds]
    return [seconds, *params, *([[*params[DENSE][:-1], of_head[DENSE].params]] * model.tied_embedding)]


def _other_ends(model: Model, plans: _Plans, machine: Machine) -> _Tried:
    """Other ends of `plans`: those with which no others beat both the slowest and the heaviest stage."""
    alike, kind = plans.alike()
    weights = _weights(model, alike.mesh, machine, alike.parts, again=1.0)
    number, ends = _ends_around(model, alike, weights)
    if not number.size:
        return _Tried(number, ends, ends[0])
    mesh = replace(alike.some(number).mesh, ends=ends)
    of_each = [[one[number] if isinstance(one, np.ndarray) else one for one in weight] for weight in weights]
    slowest_s, *params = (np.broadcast_to(one, number.shape) for one in _heaviest(model, mesh, of_each))
    is_unbeaten = np.any([_unbeaten(number, slowest_s, most) for most in params], axis=0)
    before = alike.some(number).mesh.ends
    is_new = (ends[0] != before[0]) | (ends[1] != before[1])
    return _Tried(number, ends, slowest_s).some(is_unbeaten & is_new).of_all(kind)


def _ends_around(
    model: Model, plans: _Plans, weights: Sequence[Weights]
) -> tuple[NDArray[np.intp], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Ends of some plans: their own, none, and those around the ones that are even in a weight."""
    mesh = plans.mesh
    tried: list[Ends] = [mesh.ends, (0.0, 0.0)]
    for weight in weights:
        exact = _ends(model, weight)
        first, last = (np.ceil(end) for end in exact)
        tried += [(first + i, last + j) for i, j in itertools.product((1.0, 0.0, -1.0, -2.0), repeat=2)]
        tried += _in_step(model, mesh, exact)
    first, last = (np.stack([np.broadcast_to(ends[i], len(plans)) for ends in tried]) for i in (0, 1))
    runs = ~loses_step(model, replace(mesh, ends=(first, last))) & (mesh.pp > 1)
    table = np.stack([np.nonzero(runs)[1], first[runs], last[runs]])
    number, first, last = table[:, distinct_columns(table)[0]]
    return number.astype(np.intp), (first, last)


def _unbeaten(
    number: NDArray[np.intp], slowest_s: NDArray[np.float64], params: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which ends no others of the same plan beat in both the slowest stage and the one with most weights."""
    order = np.lexsort((params, slowest_s, number))
    share = params[order] / np.maximum(np.max(params, initial=0.0), 1.0)
    falling = share - 2.0 * number[order]  # less in each plan than in all before it
    is_unbeaten = np.zeros(number.shape, dtype=bool)
    is_unbeaten[order] = falling < np.concatenate([[np.inf], np.minimum.accumulate(falling)[:-1]])
    return is_unbeaten


def _best_ends(model: Model, mesh: Mesh, seconds: Sequence[Num]) -> tuple[Num, Num]:
    """The `ends` with which the slowest stage is fastest; `seconds` of each part a microbatch."""
    exact = _ends(model, seconds)
    first, last = (np.ceil(end) for end in exact)
    ends: tuple[Num, Num] = (0.0, 0.0)
    (fastest_s,) = _heaviest(model, replace(mesh, ends=ends), [seconds])
    rounded = ((first - down, last - 1.0 + up) for down, up in itertools.product((0.0, 1.0), repeat=2))
    for tried in itertools.chain(rounded, _in_step(model, mesh, exact)):
        (slowest_s,) = _heaviest(model, of := replace(mesh, ends=tried), [seconds])
        is_faster = (slowest_s < fastest_s) & (mesh.pp > 1) & ~loses_step(model, of)
        fastest_s = np.where(is_faster, slowest_s, fastest_s)[()]
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


def _heaviest(model: Model, mesh: Mesh, weights: Sequence[Weights]) -> list[Num]:
    """The most that a stage weighs in each of the `weights`: what a microbatch passes of it."""
    heaviest: list[Num] = [0.0 for _ in weights]
    for stage in stages_of(model, mesh):
        held = stage.embeddings, *stage.layers, stage.heads
        counts = [(stage.num_stages > 0) * stage.share * count for count in held]
        for i, weight in enumerate(weights):
            heaviest[i] = np.maximum(heaviest[i], sum(map(operator.mul, counts, weight)))
    return heaviest
