"""Two dimensions: SUMMA on a grid of columns x rows (`program.tensor_2d`), in one or several depths.

`ab`, `abt` and `atb` are the three products of blocks; each panel is on its way while the one before is
multiplied. Operands are [batch, rows, columns]: a linear layer is a batch of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import Sequence
from meshwise.runtime.programs.tensor_parallel.block import (
    PAIRS,
    Layout,
    Pieces,
    everything,
    with_vectors,
)
from meshwise.runtime.programs.tensor_parallel.exchange import (
    Axis,
    Finish,
    all_sum,
    axis,
    gather,
    scatter,
    start_broadcast,
    start_reduce,
)
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, part, rank_spans

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

# --- products of blocks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A rank's place: `in_row` are the ranks of its row, one per column; `in_column` those of its column."""

    in_row: Axis
    in_column: Axis
    panels: int

    def panel(self, x: Tensor, number: int, dim: int, along: Axis) -> tuple[Tensor, int]:
        """Where panel `number` lies in the block x, cut in `dim` over `along`, and which rank owns it."""
        per_rank = self.panels // along.size
        return x.chunk(per_rank, dim)[number % per_rank], number // per_rank

    def fetched(self, x: Tensor, dim: int, along: Axis) -> Iterator[Tensor]:
        """All panels of the blocks x, one after the other, the next on its way while one is used."""
        coming = start_broadcast(*self.panel(x, 0, dim, along), along)
        for number in range(1, self.panels + 1):
            panel = coming()
            if number < self.panels:
                coming = start_broadcast(*self.panel(x, number, dim, along), along)
            yield panel

    def delivered(self, panels: Iterator[Tensor], block: Tensor, dim: int, along: Axis) -> Tensor:
        """`block`, filled with the sums of its panels, one on its way while the next is made."""
        going: list[tuple[int, Finish]] = []
        for number, panel in enumerate(panels):
            owner = self.panel(block, number, dim, along)[1]
            going.append((number, start_reduce(panel, owner, along)))
            if len(going) > 1:
                self._put(*going.pop(0), block, dim, along)
        self._put(*going.pop(), block, dim, along)
        return block

    def _put(self, number: int, finish: Finish, block: Tensor, dim: int, along: Axis) -> None:
        place, owner = self.panel(block, number, dim, along)
        panel = finish()
        if owner == along.index:
            place.copy_(panel)


def ab(grid: Grid, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """C = A B + bias: a [B, m, k / columns], b [B, k / rows, n] -> [B, m, n]."""
    c: Tensor | None = None
    for left, right in zip(grid.fetched(a, 2, grid.in_row), grid.fetched(b, 1, grid.in_column), strict=True):
        if c is not None:
            c.baddbmm_(left, right)
        else:
            c = torch.bmm(left, right) if bias is None else torch.baddbmm(bias, left, right)
    assert c is not None
    return c


def abt(grid: Grid, a: Tensor, b: Tensor) -> Tensor:
    """C = A B': a [B, m, k], b [B, n / rows, k] -> [B, m, n / columns]."""
    num_columns = b.shape[1] * grid.in_column.size // grid.in_row.size
    panels = (torch.bmm(a, right.transpose(1, 2)) for right in grid.fetched(b, 1, grid.in_column))
    return grid.delivered(panels, a.new_empty(*a.shape[:2], num_columns), 2, grid.in_row)


def atb(grid: Grid, a: Tensor, b: Tensor) -> Tensor:
    """C = A' B: a [B, k, m / columns], b [B, k, n] -> [B, m / rows, n]."""
    num_rows = a.shape[2] * grid.in_row.size // grid.in_column.size
    panels = (torch.bmm(left.transpose(1, 2), b) for left in grid.fetched(a, 2, grid.in_row))
    return grid.delivered(panels, b.new_empty(b.shape[0], num_rows, b.shape[2]), 1, grid.in_column)


@dataclass(frozen=True, slots=True, eq=False)
class Summa:
    """A product of blocks (`transposed`: C = A B'); with several depths, each has the rows of its tokens.

    A weight B is the same in all `depths`, which add up its gradient; keys and values are those of the own
    tokens (`has_tokens`), gathered over the depths, their gradients scattered.
    """

    grid: Grid
    depths: Axis | None
    has_tokens: bool = False
    transposed: bool = False

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Two operands travel, or one operand and the result."""
        whole = self._whole(b)
        return abt(self.grid, a, whole) if self.transposed else ab(self.grid, a, whole, bias)

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dA = dC B', dB = A' dC; or dA = dC B, dB = dC' A."""
        whole = self._whole(b)
        da = ab(self.grid, grad, whole) if self.transposed else abt(self.grid, grad, whole)
        db = atb(self.grid, grad, a) if self.transposed else atb(self.grid, a, grad)
        if self.depths is not None:
            db = scatter(db, self.depths, 1) if self.has_tokens else all_sum(db, self.depths)
        return da, db, grad

    def _whole(self, b: Tensor) -> Tensor:
        return gather(b, self.depths, 1) if self.depths is not None and self.has_tokens else b


# --- the layout --------------------------------------------------------------------------------


class Layout2D(Layout):
    """A grid of columns x rows: the rank has T / rows tokens in h / columns of their width.

    With a depth (2.5 dimensions) there are several such grids, which share their weights: T / (rows depth).
    """

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        self.depth: Axis | None = None
        self.row, self.column, self.over_tokens = self._groups()
        self.row_axis = self.row
        sequence = Sequence(self.seq, model.causal, self.over_tokens)
        self.take_heads(sequence, parts=self.row.size, width_parts=self.row.size)
        self.tokens = sequence.mine
        self.columns = np.split(everything(model.hidden), self.row.size)[self.row.index]
        panels = int(cut.panels) * math.lcm(self.row.size, self.column.size)
        self.into_pair = self.out_of_pair = Summa(Grid(self.row, self.column, panels), self.depth)
        self.mix = replace(self.into_pair, has_tokens=True)
        self.scores = replace(self.mix, transposed=True)

    def _groups(self) -> tuple[Axis, Axis, Axis]:
        """The row, the column, and the ranks of all depths that hold other tokens of the same columns."""
        columns, rows, *depths = map(int, self.cut.grid)
        if not depths:
            mesh = self.context.mesh(tp_row=rows, tp_col=columns)
            return axis(mesh, "tp_col"), axis(mesh, "tp_row"), axis(mesh, "tp_row")
        mesh = self.context.mesh(tp_depth=depths[0], tp_row=rows, tp_col=columns)
        over_tokens = self.context.mesh(tp_seq=depths[0] * rows, tp_col=columns)
        self.depth = axis(mesh, "tp_depth")
        return axis(mesh, "tp_col"), axis(mesh, "tp_row"), axis(over_tokens, "tp_seq")

    def pieces(self) -> Pieces:
        """Blocks of all matrices. The order of inner columns is that in which the row holds them."""
        matrices: Pieces = {}
        for _, first, second in PAIRS:
            inner = self.inner_columns(first, self.row)[self.row.index]
            matrices[first] = (self._of_column(everything(self.model.hidden)), inner)
            rows = np.concatenate(self.inner_columns(second, self.row))
            matrices[second] = (self._of_column(rows), self.columns)
        return with_vectors(self.model, matrices, self.columns)

    def _of_column(self, rows: Index) -> Index:
        return np.split(rows, self.column.size)[self.column.index]

    def shared(self) -> list[tuple[list[str], Axis]]:
        """All vectors: norms and biases."""
        return [([name for name, piece in self.pieces().items() if len(piece) == 1], self.over_tokens)]

    def score_tokens(self) -> tuple[Spans, Spans]:
        """The rank's queries; the keys of all rows in turn, of all depths each, of which it has a part."""
        depths = self.depth.size if self.depth else 1
        keys: Spans = ()
        for row in range(self.column.size):
            for depth in range(depths):
                place, num = depth * self.column.size + row, depths * self.column.size
                keys += rank_spans(self.seq, num, place, is_causal=self.model.causal)
        return self.tokens * self.heads.group, part(keys, self.row.index, self.row.size)
