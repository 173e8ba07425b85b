"""What a search keeps of the plans that it prices: the fastest of each family, and the Pareto front.

A *family* is the plans with the same degrees (`FAMILY`), which differ in details. The front has the plans
that fit, take up to `FRONT_FRAC` times as long as the fastest, and that no other beats in both step time and
memory. Of plans that are equal, that one is kept of which fewest keys have another value than by default.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import any_of, chosen_cells, distinct_columns, pareto_front
from meshwise.core.numbers import largest
from meshwise.core.units import Num, duration
from meshwise.cost.schedule import weight_copies
from meshwise.estimate.grid import TAIL, Cells, Grid, num_stated
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DATA_PARALLEL, DEFAULTS, KEYS, Plan, plan_text

FAMILY = ("tp", "cp", "pp", "ep", "etp")
"""Degrees that tell one family of plans from another."""

FRONT_FRAC = 1.25
"""How many times the step of the fastest a plan of the front may take."""

NEAR, NEAR_FRAC = 10, 1.1
"""Families that may be as fast as the first: so many, and up to so many times its step."""

TIE_FRAC = 1e-12
"""Plans are equal whose figures differ by no more: sums in another order do."""

FEW = 256
"""Plans wanted first while none is known, or none that runs: the fastest of them rules out most others."""

Floats = NDArray[np.float64]
Family = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """One plan of the space, as the grid prices it: `base` with the `values` of some keys and the microbatch.

    Thousands are found for each that is shown, so the plan is made when it is asked for.
    """

    base: Plan
    values: Mapping[str, Any]
    step_s: float
    memory_bytes: float

    @property
    def plan(self) -> Plan:
        """The plan itself, without words for axes of one rank."""
        plan = replace(self.base, **{key: value for key, value in self.values.items() if key != "microbatch"})
        alone = {"cp_kind": plan.cp == 1, "sp": plan.tp == 1 and plan.layout == "1d"}
        return replace(plan, **{key: DEFAULTS[key] for key, is_alone in alone.items() if is_alone})

    @property
    def text(self) -> str:
        """What the plan states, which need not be the shortest text of it."""
        chosen = {key: of for key, of in self.values.items() if of not in (None, DEFAULTS.get(key, of))}
        return ",".join(f"{key}={KEYS[key].show(value)}" for key, value in chosen.items())

    @property
    def microbatch(self) -> int:
        """Sequences of its microbatch."""
        return int(self.values["microbatch"])

    @property
    def num_stated(self) -> int:
        """How many keys have another value than by default."""
        return num_stated(self.values)

    def to_json(self, step: str = "step_s") -> dict[str, Any]:
        """The plan as text, and its two figures; `step` names the first by what it was priced under."""
        named = {"plan_text": plan_text(self.plan), "microbatch": self.microbatch}
        return named | {step: self.step_s, "memory_bytes": self.memory_bytes}


@dataclass(slots=True)
class BestPlans:
    """The plans kept so far, of those that need at most `capacity_bytes`; `miss` needs the least of all.

    `with_miss`: it is looked for where none fits; else plans are ruled out that cannot fit.
    `top`: how many families are asked for. `considered`: plans of the space; `priced`: those that no bound
    ruled out, of which `feasible` fit. `front` is fastest first. `runnable` is the fastest of those for which
    `runs` holds; `can_run`: whether it may hold at all.
    """

    capacity_bytes: float
    runs: Callable[[Mesh], Any] = lambda mesh: False
    can_run: bool = False
    top: int = 1
    with_miss: bool = False
    considered: int = 0
    priced: int = 0
    feasible: int = 0
    fastest: dict[Family, Found] = field(default_factory=dict)
    front: list[Found] = field(default_factory=list)
    miss: Found | None = None
    runnable: Found | None = None
    stopped: bool = False

    @property
    def fastest_s(self) -> float:
        """The step of the fastest plan; infinite before there is one."""
        return min((found.step_s for found in self.fastest.values()), default=np.inf)

    @property
    def runnable_s(self) -> float:
        """The step of the fastest plan that runs; infinite before there is one."""
        return self.runnable.step_s if self.runnable else np.inf

    @property
    def family_limit_s(self) -> float:
        """The longest step of a plan that could still be the fastest of one of the best families."""
        steps_s = sorted(found.step_s for found in self.fastest.values())
        if len(steps_s) < self.top:
            return np.inf
        near_s = min([NEAR_FRAC * steps_s[0], *steps_s[NEAR - 1 : NEAR]])
        return max(steps_s[self.top - 1], near_s) * (1.0 + TIE_FRAC)

    @property
    def limit_s(self) -> float:
        """The longest step of a plan that could still be among these or on the front."""
        return max(self.family_limit_s, FRONT_FRAC * self.fastest_s)

    def wants(self, mesh: Mesh, step_s: Num, least_bytes: Num, *, few: bool = False) -> NDArray[np.bool_]:
        """Which plans could still be among the best (`estimate.step.Wants`)."""
        seconds, needed = np.broadcast_arrays(np.asarray(step_s, float), np.asarray(least_bytes, float))
        if not self.fastest:
            nearest = self.miss.memory_bytes if self.miss else np.inf
            fits = needed <= (max(self.capacity_bytes, nearest) if self.with_miss else self.capacity_bytes)
            return _fastest(FEW, np.where(fits, seconds, np.inf)) if few else fits
        may_be_first = np.asarray(seconds <= self.family_limit_s)
        fits = needed <= self.capacity_bytes
        wanted = fits & may_be_first
        near = np.nonzero(fits & ~may_be_first & (seconds <= FRONT_FRAC * self.fastest_s))
        wanted[near] = ~self._beaten(seconds[near], needed[near])
        may_run = np.nonzero(fits & (seconds <= self.runnable_s) & ~wanted)
        if self.can_run and may_run[0].size:
            mesh = mesh.mapped(partial(chosen_cells, cells=may_run, shape=wanted.shape))
            times = np.where(self.runs(mesh), seconds[may_run], np.inf)
            wanted[may_run] = _fastest(FEW if few else times.size, times)
        return wanted

    @property
    def ranked(self) -> list[Found]:
        """The fastest of each family, fastest first."""
        return fastest_first(self.fastest.values())

    @property
    def first(self) -> Found | None:
        """The fastest plan; None before there is one."""
        return next(iter(self.ranked), None)

    @property
    def so_far(self) -> str:
        """How many plans were priced, and the fastest of them."""
        priced = f"{self.priced:,} plans priced"
        if (first := self.first) is None:
            return priced
        return f"{priced}; so far {plan_text(first.plan) or DATA_PARALLEL}, {duration(first.step_s)}"

    @property
    def near_front(self) -> list[Found]:
        """The front as far as it is told (`FRONT_FRAC`)."""
        return [found for found in self.front if found.step_s <= FRONT_FRAC * self.front[0].step_s]

    def add(self, cells: Cells) -> None:
        """Look at the plans of some rows of a grid."""
        plans = distinct(cells)
        memory = cells.array(cells.step.memory_bytes)
        fits = plans & (memory <= self.capacity_bytes)
        counted = plans & listed(cells.grid, cells.mesh, cells.broken)
        self.priced += int((counted & np.isfinite(memory)).sum())
        self.feasible += int((counted & fits).sum())
        if fits.any():
            times = np.where(fits, cells.array(cells.step.step_s), np.inf)
            self._add_families(cells, times)
            self._add_front(cells, times, memory)
            if self.can_run:
                self._add_runnable(cells, times)
        elif not self.fastest:
            needed = np.where(plans, memory, np.inf)
            self.miss = _first(cells, needed, np.arange(cells.shape[-1]), self.miss, "memory_bytes")

    def _add_families(self, cells: Cells, times: Floats) -> None:
        by_row = times.reshape(-1, times.shape[-1])
        best = by_row.min(axis=0)
        degrees = np.stack([np.broadcast_to(getattr(cells.mesh, name), best.shape) for name in FAMILY])
        first, of_row = distinct_columns(degrees)
        fastest_s = np.full(len(first), np.inf)
        np.minimum.at(fastest_s, of_row, best)
        tie_s = fastest_s[of_row] * (1.0 + TIE_FRAC)
        rows = np.flatnonzero(np.isfinite(best) & (best <= tie_s))
        tails, picked = np.nonzero(by_row[:, rows] <= tie_s[rows])
        places = tails * best.size + rows[picked]
        stated, kinds = cells.num_stated(places), of_row[rows[picked]]
        order = np.lexsort((stated, kinds))
        for i in order[np.unique(kinds[order], return_index=True)[1]]:
            family = tuple(map(float, degrees[:, first[kinds[i]]]))
            kept = self.fastest.get(family)
            figures = float(times.flat[places[i]]), int(stated[i])
            if _comes_first(figures, None if kept is None else (kept.step_s, kept.num_stated)):
                self.fastest[family] = found_at(cells, int(places[i]))

    def _add_runnable(self, cells: Cells, times: Floats) -> None:
        """Look at the rows alone that have a faster plan and one that runs."""
        in_front = tuple(range(times.ndim - 1))
        least_s = self.runnable_s * (1.0 + TIE_FRAC)
        rows = np.flatnonzero(np.less(times.min(axis=in_front), least_s))
        if not rows.size:
            return
        runs = np.broadcast_to(self.runs(cells.mesh), cells.shape)
        rows = rows[np.any(runs[..., rows], axis=in_front)]
        figures = np.where(runs[..., rows], times[..., rows], np.inf)
        self.runnable = _first(cells, figures, rows, self.runnable, "step_s")

    def _add_front(self, cells: Cells, times: Floats, memory: Floats) -> None:
        """Plans of rows whose corner (least time, least memory) the front does not beat."""
        by_row = times.reshape(-1, times.shape[-1])
        held = np.where(np.isfinite(by_row), memory.reshape(by_row.shape), np.inf)
        corner_s, corner_bytes = by_row.min(axis=0), held.min(axis=0)
        some = np.flatnonzero(np.isfinite(corner_s) & ~self._beaten(corner_s, corner_bytes))
        if not some.size:
            return
        seconds, size = by_row[:, some].ravel(), held[:, some].ravel()
        cells_of = np.flatnonzero(np.isfinite(seconds))
        at = cells_of[~self._beaten(seconds[cells_of], size[cells_of])]
        order = at[np.lexsort((size[at], seconds[at]))]
        least = np.minimum.accumulate(size[order])
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = least[1:] < least[:-1]
        tails, picked = np.divmod(order[is_new], len(some))
        places = tails * by_row.shape[1] + some[picked]
        ordered = fastest_first([*self.front, *(found_at(cells, int(place)) for place in places)])
        self.front = pareto_front(ordered, lambda one: one.memory_bytes)

    def _beaten(self, step_s: Floats, memory: Floats) -> NDArray[np.bool_]:
        """Which of these a plan of the front beats, or equals, in both."""
        front_s = np.array([found.step_s for found in self.front])
        least = np.array([np.inf, *(found.memory_bytes for found in self.front)])
        return memory >= least[np.searchsorted(front_s, step_s, side="right")]


def _fastest(number: int, times: Floats) -> NDArray[np.bool_]:
    """Which are among so many with the least of finite `times`."""
    if times.size <= number:
        return np.isfinite(times)
    return np.isfinite(times) & (times <= np.partition(times, number - 1)[number - 1])


def distinct(cells: Cells) -> NDArray[np.bool_]:
    """Which cells are plans that no other cell is in other words, along the axes in front of the rows."""
    most = largest(cost.stage.num_layers for cost in cells.step.stages)
    return np.broadcast_to(_distinct(cells.grid, cells.mesh, cells.broken, most), cells.shape)


def listed(grid: Grid, mesh: Mesh, broken: Any) -> Any:
    """Where a plan is counted, priced or not: as `distinct`, with layers placed evenly."""
    return _distinct(grid, mesh, broken, np.ceil(grid.model.num_layers / mesh.pp))


def num_listed(grid: Grid) -> int:
    """How many plans a grid has."""
    mesh, broken = grid.mesh_of_all()
    shape = *grid.shape[:-1], *np.shape(broken)[-2:]
    found = np.asarray(listed(grid, mesh, broken))
    return int(np.count_nonzero(found)) * (prod(shape) // found.size)


def _distinct(grid: Grid, mesh: Mesh, broken: Any, layers: Num) -> Any:
    """Where no other cell is the same plan; `layers`: those of the fullest stage.

    Without replicas, and copies of a stage (DualPipe), all ZeRO stages and overlaps of exchanges are alike,
    of which the first is kept (not FSDP2's stages: it lets go of a weight in any case); recomputing as many
    layers as a stage has is recomputing all, of which the first is kept too.
    """
    alone = (mesh.replicas == 1) & (mesh.expert_replicas == 1) & (weight_copies(mesh.schedule) == 1)
    alike = {
        "zero": alone & (not mesh.plan.done_by.shards_each_weight) & (mesh.offload_optimizer == 0),
        "overlap_dp": alone,
        "overlap_pp": mesh.pp == 1,
    }
    repeats = [alike[key] & (getattr(mesh, key) != grid.firsts[key]) for key in alike if key in grid.firsts]
    again = [n for axis in grid.tail_axes if TAIL[0] == axis.keys for n in axis.numbers("recompute_layers")]
    all_again: Num = np.inf
    for number in reversed(again):
        all_again = np.where(number >= layers, number, all_again)
    repeats.append((mesh.recompute_layers >= layers) & (mesh.recompute_layers != all_again))
    return ~any_of([broken, *repeats])


def found_at(cells: Cells, cell: int) -> Found:
    """The plan of one cell, by its flat index."""
    index = tuple(int(i) for i in np.unravel_index(cell, cells.shape))
    step_s, memory = cells.array(cells.step.step_s)[index], cells.array(cells.step.memory_bytes)[index]
    return Found(cells.mesh.plan, cells.values_at(index), float(step_s), float(memory))


def _first(
    cells: Cells, figures: Floats, rows: NDArray[np.intp], kept: Found | None, name: str
) -> Found | None:
    """Of the cells of `rows` the one with the least of `figures`, or what is `kept` if that comes first."""
    if not np.isfinite(least := figures.min(initial=np.inf)):
        return kept
    tails, picked = np.divmod(np.flatnonzero(figures <= least * (1.0 + TIE_FRAC)), len(rows))
    places = tails * cells.shape[-1] + rows[picked]
    stated = cells.num_stated(places)
    before = None if kept is None else (getattr(kept, name), kept.num_stated)
    is_first = _comes_first((float(least), int(stated.min())), before)
    return found_at(cells, int(places[np.argmin(stated)])) if is_first else kept


def _comes_first(one: tuple[float, int], other: tuple[float, int] | None) -> bool:
    """Whether a figure is less than the kept one, or as much with fewer keys that are not the default's."""
    if other is None or one[0] < other[0] * (1.0 - TIE_FRAC):
        return True
    return one[0] <= other[0] * (1.0 + TIE_FRAC) and one[1] < other[1]


def fastest_first(found: Iterable[Found]) -> list[Found]:
    """Sorted by step time, then by memory."""
    return sorted(found, key=lambda one: (one.step_s, one.memory_bytes))
