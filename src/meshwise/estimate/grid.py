"""A grid of plans priced at once: every key of a plan may have several values.

Keys that are numbers (`plan.plan.NUMBERS`, and the microbatch) become axes. Those of the layout of ranks are
flattened into *stems*, and these with the chunks and schedules of a pipeline into *rows*, of which only the
valid ones are priced; those that act on a whole step alone (`TAIL`) stay axes of their own, in front of the
rows. So what depends on few of them is computed once. Keys that change which ops exist make a grid each, a
`Grid`; the rows of one that are priced together are a `Cells`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import any_of, chosen_cells, distinct_columns, some_columns
from meshwise.core.errors import MeshwiseError, PlanError
from meshwise.core.units import Num
from meshwise.estimate.adverse import Adversity
from meshwise.estimate.balance import placed, placed_cost, worse_cost
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.step import StepCost, Wants, least_of_ops, least_step_s
from meshwise.estimate.timing import machine_for
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.layouts import default_grid, layout_rules
from meshwise.plan.mesh import Mesh, mesh_of
from meshwise.plan.plan import DEFAULTS, NUMBERS, Plan, number_of, refuse
from meshwise.plan.rules import rules
from meshwise.plan.workload import Workload

TAIL = (
    *(("recompute", "recompute_layers"), ("offload_activations",), ("zero",), ("offload_optimizer",)),
    *(("overlap_dp",), ("overlap_pp",)),
)
"""Keys that leave the parts of a model as they are: axes in front of the rows."""

TAIL_KEYS = tuple(key for keys in TAIL for key in keys)
CELLS_AT_ONCE = 2**19
"""Cells priced together: their arrays stay in the cache."""

NO_GRID: tuple[tuple[str, Any], ...] = (("grid", ()), ("panels", 1))
"""What layout=1d must have of keys that are for grids."""

CHUNKS = ("vpp", "schedule")
"""Keys of one axis: which schedule it is, and how many chunks a rank has, says each for the other. No part
of a model depends on them."""

NUMBER_KEYS = (*NUMBERS, "microbatch")
ROWS = (CHUNKS, *((key,) for key in NUMBER_KEYS if key not in (*TAIL_KEYS, *CHUNKS)))
KEYS = (*(field.name for field in fields(Plan)), "microbatch")

Space = Mapping[str, Sequence[Any]]
"""Values of the keys that vary."""

Refusals = Callable[[Mesh], Iterable[Any]]
"""Where plans of a mesh are not wanted, one reason after another."""


def num_stated(values: Mapping[str, Any]) -> int:
    """How many of these keys have another value than by default."""
    return sum(value not in (None, DEFAULTS.get(key, 1)) for key, value in values.items())


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """An axis of a grid: its keys, and a tuple of their values for each place."""

    keys: tuple[str, ...]
    values: list[tuple[Any, ...]]

    def numbers(self, key: str) -> NDArray[np.float64]:
        """The values of one of its keys as numbers."""
        column = self.keys.index(key)
        return np.array([number_of(key, values[column]) for values in self.values], dtype=np.float64)

    @property
    def num_stated(self) -> NDArray[np.intp]:
        """How many of its keys have another value than by default, at each place."""
        return np.array([num_stated(dict(zip(self.keys, values, strict=True))) for values in self.values])


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Plans that differ in numbers alone, before they are priced.

    `switches` are the values of the keys that vary and are no axis (`plan` has them too). `rows`: of each row
    the place on the first of the `row_axes`, that of `CHUNKS`, and the stem; `stems`: of each stem the place
    on each of the others. `fixed`: the numbers that do not vary. `planned`: the model in every stem,
    `priced`: under adversity.
    `least_s`: no plan of a row takes less (`step.least_step_s`). `broken`: where cells are no plans by rules
    that look at a tail axis, along all axes.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    plan: Plan
    switches: dict[str, Any]
    tail_axes: list[Axis]
    row_axes: list[Axis]
    stems: tuple[NDArray[np.intp], ...]
    rows: tuple[NDArray[np.intp], NDArray[np.intp]]
    fixed: dict[str, Num]
    broken: list[NDArray[np.bool_]]
    planned: PricedModel
    priced: PricedModel
    least_s: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each tail axis, then the number of rows."""
        return (*(len(axis.values) for axis in self.tail_axes), len(self.rows[0]))

    @property
    def firsts(self) -> dict[str, Num]:
        """The first number of each key of the tail axes."""
        return _first_of(self.tail_axes)

    @property
    def rows_at_once(self) -> int:
        """How many rows are priced together."""
        return max(CELLS_AT_ONCE // prod(self.shape[:-1]), 256)

    def mesh(self, some: NDArray[np.intp]) -> tuple[Mesh, Any]:
        """The meshes of some rows, all of their cells; where a cell is no plan after all."""
        return self._mesh_at(self._places(some))

    def mesh_of_all(self) -> tuple[Mesh, Any]:
        """The meshes of all stems, chunks along the axis before them; where a cell is none of a row."""
        chunks = np.arange(len(self.row_axes[0].values))
        is_row = np.zeros((len(chunks), len(self.stems[0])), dtype=bool)
        is_row[self.rows] = True
        mesh, broken = self._mesh_at((chunks[:, None], *self.stems))
        return mesh, broken | ~is_row

    def _places(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
        """The places of some rows on each of the row axes."""
        chunks, stems = (index[rows] for index in self.rows)
        return chunks, *(index[stems] for index in self.stems)

    def _mesh_at(self, places: Sequence[NDArray[np.intp]]) -> tuple[Mesh, Any]:
        """The meshes at places on the row axes, all of their cells; where a cell is no plan after all."""
        num_tail, num_axes = len(self.tail_axes), np.broadcast(*places).ndim
        numbers = self.fixed | _spread(self.tail_axes, num_tail + num_axes) | _flat(self.row_axes, places)
        mesh = mesh_of(self.plan, self.workload, self.cluster.num_chips, numbers)
        broken = (
            one[(..., *map(operator.mul, places, np.greater(one.shape[num_tail:], 1)))] for one in self.broken
        )
        return mesh, any_of((np.False_, *broken))

    def price(self, some: NDArray[np.intp] | None = None, wants: Wants | None = None) -> Iterator[Cells]:
        """Price some rows [all], as many at once as stay in the cache.

        `wants`: the plans worth it, by a first look at all of them; None: every one.
        """
        some = np.arange(len(self.rows[0])) if some is None else some
        num_axes = len(self.tail_axes) + 1
        tail = [_along(np.arange(len(axis.values)), i, num_axes) for i, axis in enumerate(self.tail_axes)]
        for first in range(0, len(some), self.rows_at_once):
            of = some[first : first + self.rows_at_once]
            mesh, broken = self.mesh(of)
            priced = placed(self.priced.of_rows(self.rows[1][of], mesh))
            if wants is None:
                yield self._cells([*tail, of], priced, wants, broken)
            else:
                yield from self._wanted(of, priced, wants, broken)

    def _wanted(
        self, rows: NDArray[np.intp], priced: PricedModel, wants: Wants, broken: Any
    ) -> Iterator[Cells]:
        """Price the wanted plans of some rows, by what their ops take and need: a few, then what is left."""
        shape = (*self.shape[:-1], len(rows))
        least = [np.broadcast_to(one, shape) for one in least_of_ops(priced)]
        left = np.nonzero(np.broadcast_to(~np.asarray(broken) & wants(priced.mesh, *least), shape))
        for few in (True, False):
            if not left[0].size:
                return
            of_left = priced.mesh.mapped(partial(chosen_cells, cells=left, shape=shape))
            worth = wants(of_left, *(one[left] for one in least), few=few)
            chosen, left = (tuple(index[is_in] for index in left) for is_in in (worth, ~worth))
            if chosen[0].size:
                some = partial(some_columns, places=np.flatnonzero(worth), num=len(worth))
                places = [*chosen[:-1], rows[chosen[-1]]]
                yield self._cells(places, priced.of_rows(chosen[-1], of_left.mapped(some)), wants)

    def _cells(
        self, at: Sequence[NDArray[np.intp]], priced: PricedModel, wants: Wants | None, broken: Any = False
    ) -> Cells:
        """Price the cells of a mesh, which are `at` these places on the tail axes and rows."""
        own = self.planned.of_rows(self.rows[1][at[-1]], priced.mesh)
        cost = placed_cost(priced, wants) if self.planned is self.priced else worse_cost(own, priced, wants)
        return Cells(self, (*at[:-1], *self._places(at[-1])), cost, broken)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Some plans of a grid, priced: all of some rows as [tail axes..., rows], or chosen ones as [plans].

    `places`: the index of each into the values of each tail axis and row axis. `broken` is true where a cell
    is no plan after all (it breaks a rule that looks at a tail axis).
    """

    grid: Grid
    places: tuple[NDArray[np.intp], ...]
    step: StepCost
    broken: Any

    @property
    def mesh(self) -> Mesh:
        """Their mesh."""
        return self.step.of.mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the arrays of all plans."""
        return np.broadcast_shapes(*(index.shape for index in self.places))

    @property
    def _axes(self) -> Iterator[tuple[Axis, NDArray[np.intp]]]:
        """Every axis of the grid, and each cell's place on it."""
        axes, shape = (*self.grid.tail_axes, *self.grid.row_axes), self.shape
        return ((axis, np.broadcast_to(i, shape)) for axis, i in zip(axes, self.places, strict=True))

    def array(self, value: Num) -> NDArray[np.float64]:
        """A number of every cell."""
        return np.broadcast_to(np.asarray(value, dtype=np.float64), self.shape)

    def values_at(self, cell: tuple[int, ...]) -> dict[str, Any]:
        """The values of the keys that vary, in one cell."""
        return self.grid.switches | {
            key: value
            for axis, place in self._axes
            for key, value in zip(axis.keys, axis.values[place[cell]], strict=True)
        }

    def num_stated(self, cells: NDArray[np.intp]) -> NDArray[np.intp]:
        """How many keys have another value than by default, in the cells of these flat indices."""
        at = np.unravel_index(cells, self.shape)
        num = np.full(len(cells), num_stated(self.grid.switches))
        for axis, place in self._axes:
            num += axis.num_stated[place[at]]
        return num


def grids(
    model: Model, cluster: Cluster, workload: Workload, space: Space, *, distinct: bool = False,
    refused: Refusals = lambda mesh: (), under: Callable[[Plan], Adversity] = lambda plan: Adversity(),
) -> Iterator[Grid]:  # fmt: skip
    """All combinations of `space` on `cluster`; a cell is the plan that states its values alone.

    Combinations that are no plans, or that are `refused`, are left out. `distinct`: of rows that are one plan
    in other words, keep one. `under`: adversities of each plan. PlanError for a key that no plan has.
    """
    unknown = sorted(set(space) - set(KEYS))
    if unknown:
        raise PlanError(f"a plan has no key {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    layouts = space.get("layout", ("1d",))
    if "1d" in layouts and len(layouts) > 1:  # tp is an axis there, and sets the grid of the others
        of_grids = {"layout": tuple(name for name in layouts if name != "1d")}
        of_one = {"layout": ("1d",)} | {key: (one,) for key, one in NO_GRID if one in space.get(key, ())}
        for of_layout in (of_one, of_grids):
            some = {**space, **of_layout}
            yield from grids(model, cluster, workload, some, distinct=distinct, refused=refused, under=under)
        return
    by_layout = ("tp",) if layouts != ("1d",) else ()
    seen: set[Plan] = set()
    switches = [key for key in space if key not in NUMBER_KEYS or key in by_layout]
    numbers: dict[str, Sequence[Any]] = {"vpp": (1,), "microbatch": (workload.microbatch,)}
    numbers |= {key: space[key] for key in space if key not in switches}
    for chosen in itertools.product(*(space[key] for key in switches)):
        stated = dict(zip(switches, chosen, strict=True))
        for plan, some in _alike(stated, numbers):
            try:
                if plan.layout != "1d":
                    refuse(layout_rules(model, plan, workload.seq), {"plan": plan})
                if distinct and _canonical(plan) in seen:
                    continue
                cluster.chip.matrix_peak(plan.dtype)
            except MeshwiseError:
                continue
            if distinct:
                seen |= {_canonical(plan), *_selective(plan, some)}
            before = {
                key: space[key][: space[key].index(stated[key])] for key in stated if distinct and key != "tp"
            }
            repeats = _Repeats(distinct, before)
            yield from _grid(model, cluster, workload, some, plan, stated, repeats, refused, under(plan))


def _alike(
    stated: dict[str, Any], numbers: dict[str, Sequence[Any]]
) -> Iterator[tuple[Plan, dict[str, Sequence[Any]]]]:
    """Parts of a grid whose plans agree in what they leave open: a plan of each part, and its numbers.

    DualPipe with experts implies other values of such keys than other plans.
    """
    if plan := _first_plan(stated, numbers, is_paired=False):
        yield plan, numbers
    paired = {
        "schedule": [name for name in numbers.get("schedule", ()) if name.startswith("dualpipe")],
        "ep": [ep for ep in numbers.get("ep", ()) if ep > 1],
    }
    numbers = numbers | {key: values for key, values in paired.items() if key in numbers}
    if kinds := sorted(numbers.get("recompute", ()), key="selective".__eq__):
        stated = stated | {"recompute": kinds[0]}  # of which others than selective name no modules
    if plan := _first_plan(stated, numbers, is_paired=True):
        yield plan, numbers


def _first_plan(stated: dict[str, Any], numbers: dict[str, Sequence[Any]], *, is_paired: bool) -> Plan | None:
    """A plan with what is `stated` and the first `numbers` that make it one, DualPipe with experts or not."""
    of_stages = ("pp", "vpp") if stated.get("stages") else ()
    keys = [key for key in ("schedule", "ep", *of_stages) if key in numbers]
    for values in itertools.product(*(numbers[key] for key in keys)):
        try:
            plan = Plan(**stated, **dict(zip(keys, values, strict=True)))
        except PlanError:
            continue
        if plan.is_paired == is_paired:
            return plan
    return None


def _selective(plan: Plan, numbers: Mapping[str, Sequence[Any]]) -> Iterator[Plan]:
    """`plan` where it recomputes selectively, of which it says not what: another may say the same modules."""
    if not plan.recompute_modules and "selective" in numbers.get("recompute", ()):
        yield _canonical(replace(plan, recompute="selective"))


def _canonical(plan: Plan) -> Plan:
    """The plan in the words that all that are the same share."""
    grid = plan.grid or default_grid(plan.layout, plan.tp)
    return replace(plan, grid=grid, sp=None if plan.sp else plan.sp)


def _grid(
    model: Model, cluster: Cluster, workload: Workload, values: Mapping[str, Sequence[Any]], plan: Plan,
    switches: dict[str, Any], repeats: _Repeats, refused: Refusals, adversity: Adversity,
) -> Iterator[Grid]:  # fmt: skip
    axes = [axis for keys in (*TAIL, *ROWS) if (axis := _axis(keys, values, plan)) is not None]
    if not all(axis.values for axis in axes):
        return
    num_axes, num_tail = len(axes), sum(axis.keys in TAIL for axis in axes)
    spread = _spread(axes, num_axes)
    fixed: dict[str, Num] = {key: number_of(key, getattr(plan, key)) for key in NUMBERS if key not in spread}
    mesh = mesh_of(plan, workload, cluster.num_chips, sizes := fixed | spread)
    broken = [
        np.array(one, dtype=bool, ndmin=num_axes)
        for one in (
            mesh.is_paired != plan.is_paired,
            repeats.dropped_chunks(mesh),
            *(rule.is_broken for rule in rules(model, mesh, sizes, cluster)),
            *refused(mesh),
        )
    ]
    for i, axis in enumerate(axes):
        axes[i], broken = _narrowed(axis, i, broken)
    tail, row_axes = axes[:num_tail], axes[num_tail:]
    if not all(axis.values for axis in tail):
        return

    def mesh_of_stems(is_stem: NDArray[np.bool_]) -> tuple[Mesh, tuple[NDArray[np.intp], ...]]:
        stems = np.unravel_index(np.flatnonzero(is_stem), lengths)
        return mesh_of(plan, workload, cluster.num_chips, of_all | _flat(row_axes[1:], stems)), stems

    of_rows = [one[(0,) * len(tail)] for one in broken if prod(one.shape[: len(tail)]) == 1]
    num_chunks, *lengths = (len(axis.values) for axis in row_axes)
    is_row = ~np.broadcast_to(any_of(of_rows), [num_chunks, *lengths]).reshape(num_chunks, prod(lengths))
    of_all = fixed | _first_of(tail) | _spread(row_axes[:1], 2)
    is_stem = np.any(is_row, axis=0)
    if repeats.are_dropped:
        mesh, stems = mesh_of_stems(is_stem)
        is_row[:, is_stem] &= ~repeats.repeated(mesh, is_row[:, is_stem])
        is_stem = np.any(is_row, axis=0)
    if not is_stem.any():
        return
    mesh, stems = mesh_of_stems(is_stem)
    of_stems, of_chunks = np.nonzero(is_row[:, is_stem].T)
    rows = of_chunks, of_stems
    planned = priced_model(model, mesh, machine_for(cluster, plan, workload.kind))
    priced = adversity.priced(planned)
    least_s = np.broadcast_to(least_step_s(priced), (num_chunks, len(stems[0])))
    yield Grid(
        model, cluster, workload, plan, switches, tail, row_axes, stems, rows, fixed,
        [one for one in broken if prod(one.shape[: len(tail)]) > 1 and one.any()],
        planned, priced, least_s[rows],
    )  # fmt: skip


def _narrowed(axis: Axis, i: int, broken: list[NDArray[np.bool_]]) -> tuple[Axis, list[NDArray[np.bool_]]]:
    """Axis `i` of a grid, and what is `broken`, without places at which a rule is wherever others are."""
    others = tuple(j for j in range(broken[0].ndim) if j != i)
    never = [np.all(one, axis=others) for one in broken if one.shape[i] > 1]
    kept = np.flatnonzero(~any_of((np.zeros(len(axis.values), dtype=bool), *never)))
    return replace(axis, values=[axis.values[place] for place in kept]), [
        one if one.shape[i] == 1 else np.take(one, kept, axis=i) for one in broken
    ]


def _spread(axes: Sequence[Axis], num_axes: int) -> dict[str, Num]:
    """The numbers of axes by key, each along its own of `num_axes`, of which these are the first."""
    return {key: _along(axis.numbers(key), i, num_axes) for i, axis in enumerate(axes) for key in axis.keys}


def _first_of(tail: Sequence[Axis]) -> dict[str, Num]:
    """The numbers of the tail axes at their first values, by key."""
    return {key: float(axis.numbers(key)[0]) for axis in tail for key in axis.keys}


def _flat(row_axes: list[Axis], rows: Sequence[NDArray[np.intp]]) -> dict[str, Num]:
    """The numbers of each row, by key."""
    return {
        key: axis.numbers(key)[index] for axis, index in zip(row_axes, rows, strict=True) for key in axis.keys
    }


ONLY_WITH: dict[str, Callable[[Mesh], Any]] = {
    "sp": lambda mesh: mesh.tp > 1,
    "overlap_tp": lambda mesh: (mesh.tp > 1) | (mesh.plan.layout != "1d"),
    "overlap_ep": lambda mesh: mesh.ep > 1,
}
"""Where a key that is no number makes a difference at all."""


@dataclass(frozen=True, slots=True)
class _Repeats:
    """Which rows repeat another in other words; `before`: values of the keys that were priced already."""

    are_dropped: bool
    before: Mapping[str, Sequence[Any]]

    def dropped_chunks(self, mesh: Mesh) -> Any:
        """Where the axis of `CHUNKS` has a schedule and chunks that it had before in other words."""
        chunks = np.stack(np.broadcast_arrays(mesh.vpp, mesh.schedule))
        first, kind = distinct_columns(chunks.reshape(2, -1))
        return self.are_dropped & (first[kind] != np.arange(len(kind))).reshape(chunks.shape[1:])

    def repeated(self, mesh: Mesh, is_row: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of the rows [chunks, stems] are another in other words; chunks lie along an axis of `mesh`.

        Without a pipeline all schedules are alike.
        """
        columns = (
            *(mesh.tp, mesh.ulysses, mesh.ring, mesh.gathers_keys & (mesh.ring > 1), mesh.pp, mesh.dp),
            *(mesh.ep, mesh.etp, mesh.dispatch * (mesh.ep > 1), mesh.zero_group, mesh.microbatch),
            mesh.imbalance,
        )
        num_stems = is_row.shape[1]
        table = np.stack([np.broadcast_to(np.asarray(column, float), num_stems) for column in columns])
        first, kind = distinct_columns(table)
        found = np.broadcast_to(first[kind] != np.arange(num_stems), is_row.shape)
        for key, values in self.before.items():
            if values and key in ONLY_WITH:
                found = found | np.logical_not(ONLY_WITH[key](mesh))
        for order in self.before.get("placement", ()):
            found = found | np.logical_not(_differ(order, mesh))
        alone, found = np.broadcast_to(mesh.pp == 1, num_stems), np.array(found)
        found[:, alone] |= is_row[:, alone] & (np.cumsum(is_row[:, alone], axis=0) > 1)
        return found


def _differ(order: Sequence[str], mesh: Mesh) -> Any:
    """Where the plan's placement puts the axes of more than one rank in another order than `order`."""
    differ: Any = False
    for inner, outer in itertools.combinations(order, 2):
        if mesh.plan.placement.index(inner) > mesh.plan.placement.index(outer):
            differ = differ | ((getattr(mesh, inner) > 1) & (getattr(mesh, outer) > 1))
    return differ


def _axis(keys: tuple[str, ...], values: Mapping[str, Sequence[Any]], plan: Plan) -> Axis | None:
    """The axis of `keys`, all combinations of their values, or None where none of them varies."""
    if not any(key in values for key in keys):
        return None
    return Axis(keys, [*itertools.product(*(values.get(key, (getattr(plan, key, None),)) for key in keys))])


def _along(numbers: NDArray[Any], place: int, num_axes: int) -> NDArray[Any]:
    shape = [1] * num_axes
    shape[place] = len(numbers)
    return numbers.reshape(shape)
