"""Three dimensions: products of a cube of q x q x q ranks (`layout.tensor_3d`).

Rank (i, j, l) stands at depth i, row j, column l. The axis `depth` joins the ranks of all i, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import Heads, Sequence, core_attention, drop, softmax
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
from meshwise.runtime.programs.tensor_parallel.block_2d import grouped, ungrouped
from meshwise.runtime.programs.tensor_parallel.exchange import (
    Axis,
    all_to_all,
    axis,
    gather,
    scatter,
    start_gather,
    start_scatter,
)
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, flat, part, rank_spans, split

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The axes of a product C = A B: A is gathered over one, B over another, C scattered over the third.

    Blocks are [batch, rows, columns], gathered and scattered by rows.
    """

    a: Axis
    b: Axis
    c: Axis

    def forward(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, *, transposed: bool = False
    ) -> Tensor:
        """The rank's rows of C = A B (or A B'); the first rank of `c` adds the bias."""
        left, right = gather(a, self.a, 1), gather(b, self.b, 1)
        right = right.transpose(1, 2) if transposed else right
        has_bias = bias is not None and self.c.index == 0
        product = torch.baddbmm(bias, left, right) if has_bias else torch.bmm(left, right)
        return scatter(product, self.c, 1)

    def backward(
        self, grad: Tensor, a: Tensor, b: Tensor, *, transposed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of dA and dB, and dC gathered. A comes beside dA's product, dA leaves beside dB's."""
        grad, right = gather(grad, self.c, 1), gather(b, self.b, 1)
        gathering = start_gather(a, self.a, 1)
        scattering = start_scatter(torch.bmm(grad, right if transposed else right.transpose(1, 2)), self.a, 1)
        left = gathering()
        pair = (grad, left) if transposed else (left, grad)
        db = scatter(torch.bmm(pair[0].transpose(1, 2), pair[1]), self.b, 1)
        return scattering(), db, grad


class Linear(torch.autograd.Function):
    """Y = X W + b on the cube; keeps the rank's block of X."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, on: Layout3D, name: str
    ) -> Tensor:
        """[tokens / q^2, K / q] -> [tokens / q^2, N / q]."""
        ctx.product, ctx.on, ctx.name, ctx.has_bias = product, on, name, bias is not None
        ctx.save_for_backward(x, weight)
        with on.recorder.op(name):
            return product.forward(x[None], weight[None], bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """dX and dW."""
        x, weight = ctx.saved_tensors
        with ctx.on.recorder.op(ctx.name):
            dx, d_weight, whole = ctx.product.backward(grad[None], x[None], weight[None])
        return dx[0], d_weight[0], bias_gradient(whole[0], ctx), None, None, None


class OfActivations(torch.autograd.Function):
    """A product of two activations: scores Q K' (`transposed`), or their mix P V. Keeps the own blocks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: Product, transposed: bool) -> Tensor:
        """Blocks of A and B to a block of C."""
        ctx.product, ctx.transposed = product, transposed
        ctx.save_for_backward(a, b)
        return product.forward(a, b, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """dA and dB."""
        da, db, _ = ctx.product.backward(grad, *ctx.saved_tensors, transposed=ctx.transposed)
        return da, db, None, None


class Exchange(torch.autograd.Function):
    """All-to-all over an axis: from 1/n of the tokens of some heads to n times the tokens of 1/n of them.

    `sections` are the numbers of heads that are dealt out apart (queries, keys, values); `to_heads` False is
    the way back. Each way is the other's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sections: list[int], to_heads: bool, on: Heads, along: Axis) -> Tensor:
        """[tokens x batch, heads d] -> [n tokens x batch, heads d / n], or back."""
        ctx.rest = (sections, to_heads, on, along)
        return _exchange(x, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The other way."""
        sections, to_heads, on, along = ctx.rest
        return _exchange(grad, sections, not to_heads, on, along), None, None, None, None


def _exchange(x: Tensor, sections: list[int], to_heads: bool, on: Heads, along: Axis) -> Tensor:
    num, dim = along.size, on.head_dim
    if to_heads:
        by_head = x.view(-1, on.batch, sum(sections), dim).split(sections, dim=2)
        dealt = torch.cat([part.unflatten(2, (num, -1)).movedim(2, 0) for part in by_head], dim=3)
        return all_to_all(dealt, along).reshape(-1, sum(sections) // num * dim)
    by_rank = all_to_all(x.view(num, -1, on.batch, sum(sections) // num, dim), along)
    parts = by_rank.split([section // num for section in sections], dim=3)
    return torch.cat([part.movedim(0, 2).flatten(2, 3) for part in parts], dim=2).view(
        -1, sum(sections) * dim
    )


class Layout3D(Layout):
    """A cube: the rank has T / q^2 tokens in h / q of their width."""

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        columns, rows, depths = map(int, cut.grid)
        mesh = context.mesh(tp_depth=depths, tp_row=rows, tp_col=columns)
        self.col, self.row, self.depth = (axis(mesh, name) for name in ("tp_col", "tp_row", "tp_depth"))
        self.axes = [self.col, self.row, self.depth]
        self.into_pair = Product(self.row, self.depth, self.col)
        self.out_of_pair = Product(self.col, self.depth, self.row)
        self.sequence = Sequence(self.seq, model.causal, self.depth)
        share = rows if cut.grid_scores else rows * columns
        self.heads = Heads(
            heads=model.num_heads if cut.grid_scores else model.num_heads // share,
            kv_heads=model.num_kv_heads if cut.grid_scores else model.num_kv_heads // share,
            head_dim=model.head_dim // (rows if cut.grid_scores else 1),
            batch=self.batch,
            sequence=self.sequence,
            recorder=self.recorder,
            dropout_frac=model.dropout_frac,
        )

    @property
    def tokens(self) -> Spans:
        """Of the tokens of its depth, those of its row."""
        return part(self.sequence.mine, self.row.index, self.row.size)

    @property
    def columns(self) -> Index:
        """Those of its column of the cube."""
        return np.split(everything(self.model.hidden), self.col.size)[self.col.index]

    def pieces(self) -> Pieces:
        """Of the block that its product multiplies, the rows of its depth."""
        inner = {}
        for name, parts in sections(self.model).items():
            within = self.cut.grid_scores and name in ("qkv", "out_proj")
            inner[name] = split(parts, self.row.size, within=within)[self.row.index]
        matrices: Pieces = {}
        for first, second in (("qkv", "out_proj"), ("fc1", "fc2")):
            matrices[first] = (self._own(self.columns), inner[first])
            matrices[second] = (self._own(inner[second]), self.columns)
        return with_vectors(self.model, matrices, self.columns)

    def _own(self, rows: Index) -> Index:
        return np.split(rows, self.depth.size)[self.depth.index]

    def norm(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Rows are spread over the columns of the cube."""
        return norm(self, x, weights, name, along=self.col)

    def first(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Tokens (i, j) in columns l -> tokens (i, l) in columns j."""
        bias = weights.get(f"{name}.bias")
        return Linear.apply(x, weights[f"{name}.weight"], bias, self.into_pair, self, name)

    def second(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Tokens (i, l) in columns j -> tokens (i, j) in columns l."""
        bias = weights.get(f"{name}.bias")
        return Linear.apply(x, weights[f"{name}.weight"], bias, self.out_of_pair, self, name)

    def shared(self) -> list[tuple[list[str], Axis]]:
        """The norms over the rows, then all vectors over the depth."""
        vectors = [name for name, piece in self.pieces().items() if len(piece) == 1]
        norms = [name for name in vectors if name.startswith("norm")]
        return [(norms, self.row), (vectors, self.depth)]

    def attend(self, qkv: Tensor) -> Tensor:
        """Heads split over rows and columns, or the scores over the cube."""
        return self._scores_split(qkv) if self.cut.grid_scores else self._heads_split(qkv)

    def _heads_split(self, qkv: Tensor) -> Tensor:
        on, num, op = self.heads, self.col.size, self.recorder.op
        dealt = [on.heads * num, on.kv_heads * num, on.kv_heads * num]
        with op("ulysses_qkv"):
            qkv = Exchange.apply(qkv, dealt, True, on, self.col)
        mixed = core_attention(qkv, on, is_fused=self.cut.flash)
        with op("ulysses_out"):
            return Exchange.apply(mixed, dealt[:1], False, on, self.col)

    def _scores_split(self, qkv: Tensor) -> Tensor:
        on, model, op = self.heads, self.model, self.recorder.op
        q, k, v = grouped(qkv, on)
        with op("logits"):
            scores = OfActivations.apply(q, k, self.out_of_pair, True)
        rows, columns = self._score_tokens()
        p = softmax(
            scores, model.head_dim**-0.5, (flat(rows), flat(columns)), model.causal, self.col, self.recorder
        )
        p = drop(p, "dropout_softmax", model.dropout_frac, self.recorder)
        with op("attend"):
            return ungrouped(OfActivations.apply(p, v, self.into_pair, False), on)

    def _score_tokens(self) -> tuple[Spans, Spans]:
        """Queries and keys of the rank's scores: a row's share of the depth's queries, the column's keys."""
        causal = self.model.causal
        of_depth = [
            rank_spans(self.seq, self.depth.size, i, is_causal=causal) for i in range(self.depth.size)
        ]
        columns = [part(spans, self.col.index, self.col.size) for spans in of_depth]
        group = self.heads.heads // self.heads.kv_heads
        places = [part(self.sequence.mine, place, self.col.size) * group for place in range(self.col.size)]
        queries = sum(places, ())
        return part(queries, self.row.index, self.row.size), sum(columns, ())
