"""A sample of the space of a search, for its picture: plans drawn evenly from all that are priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwise.estimate.grid import Grid, grids
from meshwise.launch.runs import refused
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import DEFAULTS, KEYS
from meshwise.plan.workload import Workload
from meshwise.search.best_plans import listed, num_listed
from meshwise.search.space import Stated, free_values


@dataclass(frozen=True, slots=True)
class Sampled:
    """One plan of the sample: the keys that vary, the text of the plan, and its two figures."""

    values: dict[str, Any]
    plan_text: str
    step_s: float
    memory_bytes: float


def cloud(
    model: Model, cluster: Cluster, workload: Workload, stated: Stated | None = None, to: str = "", *,
    most: int = 2000,
) -> list[Sampled]:  # fmt: skip
    """At most `most` plans of the space that `search` prices, the same ones at every call."""
    job, draw = (model, cluster, workload), np.random.default_rng(0)
    outside = partial(refused, to, model) if to else lambda mesh: ()
    opened = list(grids(*job, free_values(*job, stated or {}, to), distinct=True, refused=outside))
    share = most / max(sum(map(num_listed, opened)), most)
    return [one for grid in opened for one in _drawn(grid, round(share * num_listed(grid)), draw)]


def _drawn(grid: Grid, number: int, draw: np.random.Generator) -> Iterator[Sampled]:
    """About so many plans of one grid."""
    rows = draw.permutation(len(grid.rows[0]))[:number]
    for cells in grid.price(rows):
        places = np.flatnonzero(np.broadcast_to(listed(grid, cells.mesh, cells.broken), cells.shape))
        seconds, memory = cells.array(cells.step.step_s), cells.array(cells.step.memory_bytes)
        for place in draw.permutation(places)[: number * cells.shape[-1] // len(rows)]:
            at = tuple(int(axis) for axis in np.unravel_index(place, cells.shape))
            values = cells.values_at(at)
            yield Sampled(values, _text(values), float(seconds[at]), float(memory[at]))


def _text(values: dict[str, Any]) -> str:
    chosen = {key: value for key, value in values.items() if key in KEYS and value != DEFAULTS[key]}
    return ",".join(f"{key}={KEYS[key].show(value)}" for key, value in chosen.items())
