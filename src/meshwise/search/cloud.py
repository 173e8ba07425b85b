"""A sample of the space of a search, for its picture: plans drawn evenly from all that are priced."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from meshwise.estimate.grid import Grid, grids
from meshwise.launch.runs import refused
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.workload import Workload
from meshwise.search.best_plans import Found, found_at, listed, num_listed
from meshwise.search.space import Stated, free_values


def cloud(
    model: Model, cluster: Cluster, workload: Workload, stated: Stated | None = None, to: str = "", *,
    most: int = 2000,
) -> list[Found]:  # fmt: skip
    """At most `most` plans of the space that `search` prices, the same ones at every call."""
    job, draw = (model, cluster, workload), np.random.default_rng(0)
    outside = partial(refused, to, model) if to else lambda mesh: ()
    opened = list(grids(*job, free_values(*job, stated or {}, to), distinct=True, refused=outside))
    share = most / max(sum(map(num_listed, opened)), most)
    return [one for grid in opened for one in _drawn(grid, round(share * num_listed(grid)), draw)]


def _drawn(grid: Grid, number: int, draw: np.random.Generator) -> Iterator[Found]:
    """About so many plans of one grid."""
    rows = draw.permutation(len(grid.rows[0]))[:number]
    for cells in grid.price(rows):
        places = np.flatnonzero(np.broadcast_to(listed(grid, cells.mesh, cells.broken), cells.shape))
        for place in draw.permutation(places)[: number * cells.shape[-1] // len(rows)]:
            yield found_at(cells, int(place))
