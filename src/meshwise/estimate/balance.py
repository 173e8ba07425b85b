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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import chosen_cells
from meshwise.core.numbers import added, larger, smaller, where
from meshwise.core.units import Num
from meshwise.estimate.ends import Ends, best_ends, least_of_others_s, other_ends, part_weights
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.stage_cost import StageCost
from meshwise.estimate.step import StepCost, Wants, least_needed, mean_phases_s, price_step, waits_s
from meshwise.estimate.timing import Machine
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import has_fixed_ends

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


def worse_cost(planned: PricedModel, worse: PricedModel, wants: Wants | None) -> StepCost:
    """The cost of plans that turn out `worse` when their layers are placed, and fit as `planned` too."""
    before = placed_cost(placed(planned), wants)
    found = price_step(with_ends(worse, before.of.mesh.ends), wants=wants)
    return replace(found, memory_bytes=larger(found.memory_bytes, before.memory_bytes))


def _with_faster_ends(found: StepCost, wants: Wants | None) -> StepCost:
    """`found` with other ends wherever its step is faster by them; see `placed_cost`."""
    of, bound, worth_s = found.of, _bound(found), found.step_s * (1.0 - NO_GAIN_FRAC)
    others_s = least_of_others_s(of.model, of.mesh, [part.total_s for part in of.by_part])
    least_s = bound.step_s(of.mesh, larger(added(bound.mean_s), others_s))
    is_open = least_s < worth_s
    memories = [(cost.stage, cost.memory) for cost in found.stages]
    needed = 0.0 if wants is None else least_needed(of.mesh, memories)
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
        lead_s = slowest_s + (3.0 * mesh.pp * self.is_bound - 1.0) * added(self.mean_s)
        waits = added(waits_s(mesh, self.mean_s, self.hop_s, lead_s))
        return self.slowed * (mesh.num_microbatches * slowest_s + waits + self.rest_s)

    def mapped(self, of: Callable[[Num], Num]) -> _Bound:
        """The bound with something done to each of its times."""
        mean_s = list(map(of, self.mean_s))
        return _Bound(mean_s, of(self.is_bound), of(self.hop_s), of(self.rest_s), self.slowed)


def _bound(found: StepCost) -> _Bound:
    mesh, overheads = found.of.mesh, found.of.machine.overheads
    return _Bound(
        mean_s=mean_phases_s(mesh, found.stages),
        is_bound=(added(cost.exposed_s for cost in found.stages) > 0.0) * 1.0,
        hop_s=found.hop_s,
        rest_s=_least(found, lambda cost: cost.comm_dp_s) + _least(found, lambda cost: cost.optimizer_s),
        slowed=1.0 + overheads.straggler_frac * np.log2(mesh.world),
    )


def _least(found: StepCost, number: Callable[[StageCost], Num]) -> Num:
    """The least of a number of the stages."""
    return reduce(smaller, (where(cost.stage.num_stages > 0, number(cost), np.inf) for cost in found.stages))
