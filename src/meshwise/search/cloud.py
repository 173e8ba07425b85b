"""A sample of the space of a search, for its picture: plans drawn evenly from all that are priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwise.estimate.grid import Cells, price_grid
from meshwise.launch.runs import refused
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import DEFAULTS, KEYS
from meshwise.plan.workload import Workload
from meshwise.search.best_plans import listed
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
    job = model, cluster, workload
    space = free_values(*job, stated or {}, to)
    kept: list[tuple[float, Sampled]] = []
    draw = np.random.default_rng(0)
    outside = partial(refused, to, model) if to else lambda mesh: ()
    for cells in price_grid(*job, space, distinct=True, refused=outside):
        kept = sorted([*kept, *_drawn(model, cells, draw, most)], key=lambda pair: pair[0])[:most]
    return [one for _, one in kept]


def _drawn(
    model: Model, cells: Cells, draw: np.random.Generator, most: int
) -> Iterator[tuple[float, Sampled]]:
    """The plans of one grid with the smallest random numbers, and these numbers."""
    places = np.flatnonzero(np.broadcast_to(listed(model, cells.mesh, cells.broken), cells.shape))
    numbers = draw.random(places.size)
    seconds, memory = cells.array(cells.step.step_s), cells.array(cells.step.memory_bytes)
    for i in np.argsort(numbers)[:most]:
        at = tuple(int(axis) for axis in np.unravel_index(places[i], cells.shape))
        values = cells.values_at(at)
        yield float(numbers[i]), Sampled(values, _text(values), float(seconds[at]), float(memory[at]))


def _text(values: dict[str, Any]) -> str:
    chosen = {key: value for key, value in values.items() if key in KEYS and value != DEFAULTS[key]}
    return ",".join(f"{key}={KEYS[key].show(value)}" for key, value in chosen.items())
