"""Two dimensions: SUMMA on a grid of columns x rows (`layout.tensor_2d`), in one or several depths.

`ab`, `abt` and `atb` are the three products of blocks; each panel is on its way while the one before is
multiplied. Operands are [batch, rows, columns]: a linear layer is a batch of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import (
    Heads,
    Sequence,
    SplitHeads,
    core_attention,
    drop,
    softmax,
)
from meshwise.runtime.programs.tensor_parallel.block import (
    Layout,
    Pieces,
    Weights,
    everything,
    norm,
    sections,
    with_vectors,
)
from meshwise.runtime.programs.tensor_parallel.block_1d import bias_gradient
from meshwise.runtime.programs.tensor_parallel.exchange import (
    Axis,
    Finish,
    axis,
    gather,
    scatter,
    start_broadcast,
    start_reduce,
    start_sum,
)
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, flat, part, rank_spans, split

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


class Linear(torch.autograd.Function):
    """Y = X W + b by SUMMA; keeps the rank's block of X."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, on: Layout2D, name: str) -> Tensor:
        """[tokens / rows, K / columns] -> [tokens / rows, N / columns]."""
        ctx.on, ctx.name, ctx.has_bias = on, name, bias is not None
        ctx.save_for_backward(x, weight)
        with on.recorder.op(name):
            return ab(on.grid, x[None], weight[None], bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """dX = dY W', dW = X' dY, the latter summed over the depths."""
        on, (x, weight) = ctx.on, ctx.saved_tensors
        with on.recorder.op(ctx.name):
            dx = abt(on.grid, grad[None], weight[None])[0]
            d_weight = on.sum_over_depth(atb(on.grid, x[None], grad[None])[0])()
        return dx, d_weight, bias_gradient(grad, ctx), None, None


class Logits(torch.autograd.Function):
    """Scores S = Q K', of heads whose width is cut over the columns. Keeps the own blocks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, on: Layout2D) -> Tensor:
        """q [B, group x tokens, d/c], k [B, tokens, d/c] -> [B, group x tokens, seq/c], c columns."""
        ctx.on = on
        ctx.save_for_backward(q, k)
        return abt(on.grid, q, on.all_depths(k))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """dQ = dS K, dK = dS' Q."""
        on, (q, k) = ctx.on, ctx.saved_tensors
        dq = ab(on.grid, grad, on.all_depths(k))
        return dq, on.own_depth(atb(on.grid, grad, q)), None


class Attend(torch.autograd.Function):
    """The mix O = P V. Keeps the own blocks."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, on: Layout2D) -> Tensor:
        """p [B, group x tokens, seq/c], v [B, tokens, d/c] -> [B, group x tokens, d/c], c columns."""
        ctx.on = on
        ctx.save_for_backward(p, v)
        return ab(on.grid, p, on.all_depths(v))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """dP = dO V', dV = P' dO."""
        on, (p, v) = ctx.on, ctx.saved_tensors
        dp = abt(on.grid, grad, on.all_depths(v))
        return dp, on.own_depth(atb(on.grid, p, grad)), None


# --- the layout --------------------------------------------------------------------------------


class Layout2D(Layout):
    """A grid of columns x rows: the rank has T / rows tokens in h / columns of their width."""

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        self.depth: Axis | None = None
        self.row, self.column, self.over_tokens = self._groups()
        self.axes = [axis for axis in (self.row, self.column, self.depth) if axis]
        panels = int(cut.panels) * math.lcm(self.row.size, self.column.size)
        self.grid = Grid(self.row, self.column, panels)
        self.sequence = Sequence(self.seq, model.causal, self.over_tokens)
        columns = self.row.size
        self.heads = Heads(
            heads=model.num_heads // (1 if cut.grid_scores else columns),
            kv_heads=model.num_kv_heads // (1 if cut.grid_scores else columns),
            head_dim=model.head_dim // (columns if cut.grid_scores else 1),
            batch=self.batch,
            sequence=self.sequence,
            recorder=self.recorder,
            dropout_frac=model.dropout_frac,
        )

    def _groups(self) -> tuple[Axis, Axis, Axis]:
        """The row, the column, and the ranks that hold the other tokens of the same columns."""
        columns, rows = map(int, self.cut.grid)
        mesh = self.context.mesh(tp_row=rows, tp_col=columns)
        return axis(mesh, "tp_col"), axis(mesh, "tp_row"), axis(mesh, "tp_row")

    @property
    def tokens(self) -> Spans:
        """The rank's part of the sequence."""
        return self.sequence.mine

    @property
    def columns(self) -> Index:
        """The columns of the rank's place in its row."""
        return np.split(everything(self.model.hidden), self.row.size)[self.row.index]

    def pieces(self) -> Pieces:
        """Blocks of all matrices. The order of inner columns is that in which the row holds them."""
        whole, inner = everything(self.model.hidden), {}
        for name, parts in sections(self.model).items():
            within = self.cut.grid_scores and name in ("qkv", "out_proj")
            inner[name] = split(parts, self.row.size, within=within)
        my_rows = np.split(whole, self.column.size)[self.column.index]
        matrices: Pieces = {}
        for first, second in (("qkv", "out_proj"), ("fc1", "fc2")):
            matrices[first] = (my_rows, inner[first][self.row.index])
            rows = np.split(np.concatenate(inner[second]), self.column.size)
            matrices[second] = (rows[self.column.index], self.columns)
        return with_vectors(self.model, matrices, self.columns)

    def norm(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Rows are spread over the row of ranks."""
        return norm(self, x, weights, name, along=self.row)

    def first(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """SUMMA."""
        return Linear.apply(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), self, name)

    second = first

    def shared(self) -> list[tuple[list[str], Axis]]:
        """All vectors: norms and biases."""
        return [([name for name, piece in self.pieces().items() if len(piece) == 1], self.over_tokens)]

    def attend(self, qkv: Tensor) -> Tensor:
        """Heads split over the columns, or the scores over the grid."""
        if not self.cut.grid_scores:
            return core_attention(qkv, self.heads, is_fused=self.cut.flash)
        on, model, op = self.heads, self.model, self.recorder.op
        q, k, v = grouped(qkv, on)
        with op("logits"):
            scores = Logits.apply(q, k, self)
        spans = flat(self.tokens, on.heads // on.kv_heads), flat(self._score_columns())
        p = softmax(scores, model.head_dim**-0.5, spans, model.causal, self.row, self.recorder)
        p = drop(p, "dropout_softmax", model.dropout_frac, self.recorder)
        with op("attend"):
            return ungrouped(Attend.apply(p, v, self), on)

    def _score_columns(self) -> Spans:
        """The keys of the rank's columns of the scores: those of all rows in turn, of all depths each."""
        depths = self.depth.size if self.depth else 1
        keys: Spans = ()
        for row in range(self.column.size):
            for depth in range(depths):
                place, num = depth * self.column.size + row, depths * self.column.size
                keys += rank_spans(self.seq, num, place, is_causal=self.model.causal)
        return part(keys, self.row.index, self.row.size)

    def all_depths(self, keys: Tensor) -> Tensor:
        """Keys (values) of the row's tokens of all depths."""
        return gather(keys, self.depth, 1) if self.depth else keys

    def own_depth(self, grad: Tensor) -> Tensor:
        """The gradient of the own keys (values): the sum over the depths that read them."""
        return scatter(grad, self.depth, 1) if self.depth else grad

    def sum_over_depth(self, grad: Tensor) -> Finish:
        """The gradient of a weight that all depths hold."""
        return start_sum(grad, self.depth) if self.depth else lambda: grad


def grouped(qkv: Tensor, on: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q [batch x kv_heads, group x tokens, d]; k and v [batch x kv_heads, tokens, d]."""
    q, k, v = SplitHeads.apply(qkv, on)
    return q.view(k.shape[0], -1, on.head_dim), k, v


def ungrouped(mixed: Tensor, on: Heads) -> Tensor:
    """[batch x kv_heads, group x tokens, d] -> [tokens x batch, heads d]."""
    by_head = mixed.reshape(on.batch, on.heads, -1, on.head_dim)
    return by_head.permute(2, 0, 1, 3).reshape(-1, on.heads * on.head_dim)
