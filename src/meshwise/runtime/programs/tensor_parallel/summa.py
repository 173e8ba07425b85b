"""SUMMA: products of blocks on a grid of columns x rows, in one or several depths (`program.grid`).

`ab`, `abt` and `atb` are the three products of blocks; each panel is on its way while the one before is
multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import meshwise.runtime.programs.tensor_parallel.exchange as exchange
from meshwise.runtime.programs.tensor_parallel.exchange import Finish, MeshAxis


@dataclass(frozen=True, slots=True, eq=False)
class SummaGrid:
    """A rank's place: `in_row` are the ranks of its row, one per column; `in_column` those of its column."""

    in_row: MeshAxis
    in_column: MeshAxis
    panels: int

    def panel(self, x: Tensor, number: int, dim: int, along: MeshAxis) -> tuple[Tensor, int]:
        """Where panel `number` lies in the block x, cut in `dim` over `along`, and which rank owns it."""
        per_rank = self.panels // along.size
        return x.chunk(per_rank, dim)[number % per_rank], number // per_rank

    def fetched(self, x: Tensor, dim: int, along: MeshAxis) -> Iterator[Tensor]:
        """All panels of the blocks x, one after the other, the next on its way while one is used."""
        coming = exchange.start_broadcast(*self.panel(x, 0, dim, along), along)
        for number in range(1, self.panels + 1):
            panel = coming()
            if number < self.panels:
                coming = exchange.start_broadcast(*self.panel(x, number, dim, along), along)
            yield panel

    def delivered(self, panels: Iterator[Tensor], block: Tensor, dim: int, along: MeshAxis) -> Tensor:
        """`block`, filled with the sums of its panels, one on its way while the next is made."""
        going: list[tuple[int, Finish]] = []
        for number, panel in enumerate(panels):
            owner = self.panel(block, number, dim, along)[1]
            going.append((number, exchange.start_reduce(panel, owner, along)))
            if len(going) > 1:
                self._put(*going.pop(0), block, dim, along)
        self._put(*going.pop(), block, dim, along)
        return block

    def _put(self, number: int, finish: Finish, block: Tensor, dim: int, along: MeshAxis) -> None:
        place, owner = self.panel(block, number, dim, along)
        panel = finish()
        if owner == along.index:
            place.copy_(panel)


def ab(grid: SummaGrid, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """C = A B + bias: a [m, k / columns], b [k / rows, n] -> [m, n]."""
    c: Tensor | None = None
    for left, right in zip(grid.fetched(a, 1, grid.in_row), grid.fetched(b, 0, grid.in_column), strict=True):
        if c is not None:
            c.addmm_(left, right)
        else:
            c = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    assert c is not None
    return c


def abt(grid: SummaGrid, a: Tensor, b: Tensor) -> Tensor:
    """C = A B': a [m, k], b [n / rows, k] -> [m, n / columns]."""
    num_columns = b.shape[0] * grid.in_column.size // grid.in_row.size
    panels = (torch.mm(a, right.t()) for right in grid.fetched(b, 0, grid.in_column))
    return grid.delivered(panels, a.new_empty(a.shape[0], num_columns), 1, grid.in_row)


def atb(grid: SummaGrid, a: Tensor, b: Tensor) -> Tensor:
    """C = A' B: a [k, m / columns], b [k, n] -> [m / rows, n]."""
    num_rows = a.shape[1] * grid.in_row.size // grid.in_column.size
    panels = (torch.mm(left.t(), b) for left in grid.fetched(a, 1, grid.in_row))
    return grid.delivered(panels, b.new_empty(num_rows, b.shape[1]), 0, grid.in_column)


@dataclass(frozen=True, slots=True, eq=False)
class Summa:
    """A product of blocks; each of several `depths` has the rows of its tokens, and they add up dB."""

    grid: SummaGrid
    depths: MeshAxis

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Both operands travel."""
        return ab(self.grid, a, b, bias)

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dA = dC B', dB = A' dC: one operand travels, and the result."""
        da, db = abt(self.grid, grad, b), atb(self.grid, a, grad)
        return da, exchange.all_sum(db, self.depths), grad
