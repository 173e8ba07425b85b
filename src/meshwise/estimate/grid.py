"""A grid of plans priced at once: every key of a plan may have several values.

Keys that are numbers (`plan.plan.NUMBERS`, and the microbatch) become axes. Those of the layout of ranks are
flattened into *rows*, of which only the valid ones are priced; those that act on a whole step alone (`TAIL`)
stay axes of their own, in front of the rows, so that what does not depend on them is computed once. Keys that
change which ops exist make a grid each, a `Cells`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import MeshwiseError, PlanError
from meshwise.core.units import Num
from meshwise.estimate.step import StepCost, step_cost
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import find_overheads
from meshwise.model.architecture import Model
from meshwise.plan.layouts import check_layout
from meshwise.plan.mesh import Mesh, mesh_of, rules
from meshwise.plan.plan import NUMBERS, Plan, number_of
from meshwise.plan.workload import Workload

TAIL = (
    *("recompute", "recompute_layers", "offload_activations", "zero", "offload_optimizer"),
    *("overlap_dp", "overlap_pp"),
)
"""Keys that leave the parts of a model as they are: axes in front of the rows."""

ROWS = (*(key for key in NUMBERS if key not in TAIL), "microbatch")
KEYS = (*(field.name for field in fields(Plan)), "microbatch")

Space = Mapping[str, Sequence[Any]]
"""Values of the keys that vary."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Plans that differ in numbers alone, priced: arrays of the shape [tail axes..., rows].

    `values` are those of each key that is an axis, `switches` that of each other key that varies (`plan` has
    it too); `rows` is the index of each row into the values of the row keys.
    `broken` is true where a cell is no plan after all (it breaks a rule that looks at a tail axis).
    """

    plan: Plan
    switches: dict[str, Any]
    values: dict[str, Sequence[Any]]
    rows: tuple[NDArray[np.intp], ...]
    mesh: Mesh
    step: StepCost
    broken: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each tail axis, then the number of rows."""
        return (*(len(self.values[key]) for key in _named(TAIL, self.values)), len(self.rows[0]))

    def array(self, value: Num) -> NDArray[np.float64]:
        """A number of every cell."""
        return np.broadcast_to(np.asarray(value, dtype=np.float64), self.shape)

    def plan_at(self, cell: tuple[int, ...]) -> tuple[Plan, int]:
        """The plan of one cell, and its microbatch."""
        chosen = {
            key: self.values[key][i] for key, i in zip(_named(TAIL, self.values), cell[:-1], strict=True)
        }
        for key, index in zip(_named(ROWS, self.values), self.rows, strict=True):
            chosen[key] = self.values[key][index[cell[-1]]]
        microbatch = chosen.pop("microbatch")
        return replace(self.plan, **chosen), int(microbatch)


def price_grid(
    model: Model, cluster: Cluster, workload: Workload, space: Space, base: Plan, *, chunk_rows: int = 4096
) -> Iterator[Cells]:
    """Price all combinations of `space` on `cluster`; what it leaves out is as in `base` and `workload`.

    Combinations that are no plans are left out. PlanError for a key that a plan does not have.
    """
    unknown = sorted(set(space) - set(KEYS))
    if unknown:
        raise PlanError(f"a plan has no key {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    by_layout = ("tp",) if any(name != "1d" for name in space.get("layout", (base.layout,))) else ()
    switches = [key for key in space if key not in (*ROWS, *TAIL) or key in by_layout]
    numbers = {key: space[key] for key in space if key not in switches}
    numbers.setdefault("microbatch", (workload.microbatch,))
    for chosen in itertools.product(*(space[key] for key in switches)):
        try:
            stated = dict(zip(switches, chosen, strict=True))
            plan = replace(base, **stated)
            if plan.layout != "1d":
                check_layout(model, plan, workload.seq)
            cluster.chip.matrix_peak(plan.dtype)
        except MeshwiseError:
            continue
        yield from _cells(model, cluster, workload, numbers, plan, stated, chunk_rows)


def _cells(
    model: Model, cluster: Cluster, workload: Workload, values: Mapping[str, Sequence[Any]], plan: Plan,
    stated: dict[str, Any], chunk_rows: int,
) -> Iterator[Cells]:  # fmt: skip
    tail, row_keys = _named(TAIL, values), _named(ROWS, values)
    num_axes = len(tail) + len(row_keys)
    axes: dict[str, NDArray[np.float64]] = {
        key: _axis([_number(key, value) for value in values[key]], i, num_axes)
        for i, key in enumerate((*tail, *row_keys))
    }
    fixed: dict[str, Num] = {key: number_of(key, getattr(plan, key)) for key in NUMBERS if key not in axes}
    mesh, sizes = _mesh(plan, workload, cluster, {**fixed, **axes})
    shape = tuple(len(values[key]) for key in row_keys)
    valid = np.ones(shape, dtype=bool)
    for rule in rules(model, mesh, sizes, cluster):
        broken = np.asarray(rule.is_broken)
        if broken.ndim == 0 or prod(broken.shape[: len(tail)]) == 1:
            valid &= ~broken.reshape(broken.shape[len(tail) :] if broken.ndim else ())
    rows = np.nonzero(valid)
    runs_on = machine(cluster, plan.dtype, overheads=find_overheads(cluster.chip, plan.software))
    for first in range(0, len(rows[0]), chunk_rows):
        some = tuple(index[first : first + chunk_rows] for index in rows)
        flat: dict[str, Num] = {
            key: axes[key].reshape(-1)[index] for key, index in zip(row_keys, some, strict=True)
        }
        flat |= {key: axes[key].reshape((*axes[key].shape[: len(tail)], 1)) for key in tail}
        mesh, sizes = _mesh(plan, workload, cluster, fixed | flat)
        broken = np.zeros((), dtype=bool)
        for rule in rules(model, mesh, sizes, cluster):
            broken = broken | np.asarray(rule.is_broken)
        yield Cells(plan, stated, dict(values), some, mesh, step_cost(model, mesh, runs_on), broken)


def _mesh(
    plan: Plan, workload: Workload, cluster: Cluster, sizes: dict[str, Num]
) -> tuple[Mesh, dict[str, Num]]:
    microbatch = sizes.pop("microbatch")
    return mesh_of(plan, workload, cluster.num_chips, sizes, microbatch), sizes


def _named(keys: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    return [key for key in keys if key in values]


def _number(key: str, value: Any) -> float:
    return float(value) if key == "microbatch" else number_of(key, value)


def _axis(values: Sequence[float], place: int, num_axes: int) -> NDArray[np.float64]:
    shape = [1] * num_axes
    shape[place] = len(values)
    return np.array(values, dtype=np.float64).reshape(shape)
