"""The order in which the plans of a space are priced: those first whose least time is least.

A few plans of a large space come first, so that there is a good one early. Each row of a grid has a time that
none of its plans stays below (`estimate.step`): rows are priced in that order until it is longer than what
could still change the answer (`BestPlans.limit_s`), and of a row those plans alone that may be among the best
by what their ops take and need. What is left is ruled out: the answer is that of pricing every plan.
"""

from collections.abc import Callable, Iterable
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwise.estimate.grid import Grid, Space
from meshwise.search.best_plans import BestPlans, num_listed

FEW_ROWS = 256
"""Rows that are priced together at first, four times as many each time: with each the limit may come down."""

PROBED = ("tp", "pp", "ep", "dispatch", "recompute")
"""Keys that the first plans differ in; all others have their first value there."""

WORTH_A_PROBE = 10_000
"""Combinations of a space from which on a few of them are priced before all are listed."""


class _Open:
    """A grid whose rows are priced as they are needed; `order`: those that are left, by their least times.

    Rows that take more than `limit_s` are never needed.
    """

    def __init__(self, grid: Grid, limit_s: float) -> None:
        self.grid = grid
        rows = np.flatnonzero(grid.least_s <= limit_s)
        self.order = rows[np.argsort(grid.least_s[rows], kind="stable")]

    def take(self, number: int) -> NDArray[np.intp]:
        """The next rows, which are no longer left."""
        taken, self.order = self.order[:number], self.order[number:]
        return taken

    def up_to(self, limit_s: float) -> int:
        """How many rows are left whose least time is at most a limit."""
        return int(np.searchsorted(self.grid.least_s[self.order], limit_s, side="right"))


Grids = Callable[[Space], Iterable[Grid]]


def best_first(grids: Grids, space: Space, kept: BestPlans, on_plans: Callable[[BestPlans], None]) -> None:
    """Price into `kept` what can be among the best of `space`; `on_plans` hears of what it keeps on the way.

    `grids`: those of a space.
    """

    def add(grid: Grid, rows: NDArray[np.intp] | None = None) -> None:
        for cells in grid.price(rows, kept.wants):
            kept.add(cells)
            on_plans(kept)

    if prod(map(len, space.values())) > WORTH_A_PROBE:
        for grid in grids({key: values if key in PROBED else values[:1] for key, values in space.items()}):
            add(grid)
    opened = []
    for grid in grids(space):
        kept.considered += num_listed(grid)
        opened.append(_Open(grid, max(kept.limit_s, kept.runnable_s if kept.can_run else 0.0)))
    at_once, kept.priced, kept.feasible = FEW_ROWS, 0, 0  # what was probed comes again
    for one in sorted(opened, key=lambda one: one.grid.least_s.min(initial=np.inf)):
        while number := one.up_to(kept.limit_s):
            add(one.grid, one.take(min(number, at_once, one.grid.rows_at_once)))
            at_once *= 4
    for one in opened if kept.can_run else ():
        rows = one.take(one.up_to(kept.runnable_s))
        if rows.size:
            mesh, broken = one.grid.mesh(rows)
            runs = np.broadcast_to(kept.runs(mesh) & ~np.asarray(broken), (*one.grid.shape[:-1], rows.size))
            add(one.grid, rows[runs.any(axis=tuple(range(runs.ndim - 1)))])
