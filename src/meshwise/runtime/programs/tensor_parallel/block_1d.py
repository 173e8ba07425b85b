"""One dimension: the first matmul of a pair cut by columns, the second by rows (`layout.tensor_1d`).

With sequence parallelism a rank holds 1/t of the tokens between the pairs: they are gathered where a pair
begins and reduce-scattered where it ends. Without it every rank holds all tokens, and an all-reduce does
both at once. The rows of a `Rows` layout may stand on a grid of several, each with its part of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import Heads, Sequence, core_attention
from meshwise.runtime.programs.tensor_parallel.block import (
    Layout,
    Pieces,
    Weights,
    everything,
    norm,
    sections,
    with_vectors,
)
from meshwise.runtime.programs.tensor_parallel.exchange import (
    Axis,
    Finish,
    axis,
    gather,
    start_gather,
    start_scatter,
    start_sum,
)
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, part, split

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


class Layout1D(Layout):
    """t ranks, each with 1/t of the heads and of the MLP's width."""

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        self.tp, self.sequence = self._groups()
        self.axes = [axis for axis in (self.tp, self.sequence.along) if axis]
        tp = self.tp.size
        self.heads = Heads(
            heads=model.num_heads // tp,
            kv_heads=model.num_kv_heads // tp,
            head_dim=model.head_dim,
            batch=self.batch,
            sequence=self.sequence,
            recorder=self.recorder,
            dropout_frac=model.dropout_frac,
        )

    def _groups(self) -> tuple[Axis, Sequence]:
        mesh = self.context.mesh(tp=self.context.world_size)
        return axis(mesh, "tp"), Sequence(self.seq, self.model.causal)

    @property
    def tokens(self) -> Spans:
        """The sequence, or 1/t of it."""
        mine = self.sequence.mine
        return part(mine, self.tp.index, self.tp.size) if self.cut.sequence_parallel else mine

    @property
    def columns(self) -> Index:
        """All of them."""
        return everything(self.model.hidden)

    def pieces(self) -> Pieces:
        """Columns of the first matrices, rows of the second, all of the rest."""
        whole = everything(self.model.hidden)
        mine = {
            name: split(parts, self.tp.size)[self.tp.index] for name, parts in sections(self.model).items()
        }
        matrices: Pieces = {
            "qkv": (whole, mine["qkv"]),
            "out_proj": (mine["out_proj"], whole),
            "fc1": (whole, mine["fc1"]),
            "fc2": (mine["fc2"], whole),
        }
        return with_vectors(self.model, matrices, whole)

    def norm(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Whole rows: local."""
        return norm(self, x, weights, name)

    def first(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Cut by columns."""
        return ColumnLinear.apply(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), self, name)

    def attend(self, qkv: Tensor) -> Tensor:
        """The rank's heads, of its row's tokens."""
        return core_attention(qkv, self.heads, is_fused=self.cut.flash)

    def second(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Cut by rows."""
        return RowLinear.apply(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), self, name)

    def shared(self) -> list[tuple[list[str], Axis]]:
        """The norms, where each rank has seen its own tokens only."""
        norms = [name for name in self.pieces() if name.startswith("norm")]
        return [(norms, self.tp)] if self.cut.sequence_parallel else []

    def enter(self, x: Tensor) -> Finish:
        """All tokens, at the beginning of a pair (or of its gradient, at the end)."""
        return start_gather(x, self.tp) if self.cut.sequence_parallel else lambda: x

    def leave(self, x: Tensor) -> Finish:
        """The sum over the ranks: of the own tokens, or of all."""
        return start_scatter(x, self.tp) if self.cut.sequence_parallel else start_sum(x, self.tp)


class ColumnLinear(torch.autograd.Function):
    """Y = X W + b, W cut by columns: gathers the tokens of X, forward and backward; keeps the own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, on: Layout1D, name: str) -> Tensor:
        """[tokens / t, K] -> [tokens, N / t]."""
        ctx.on, ctx.name, ctx.has_bias = on, name, bias is not None
        ctx.save_for_backward(x, weight)
        with on.recorder.op(name):
            return multiply(on.enter(x)(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """X is gathered beside dX = dY W', and dX scattered beside dW = X' dY."""
        on, (x, weight) = ctx.on, ctx.saved_tensors
        with on.recorder.op(ctx.name):
            gathering = on.enter(x)
            scattering = on.leave(torch.mm(grad, weight.t()))
            d_weight = torch.mm(gathering().t(), grad)
            dx = scattering()
        return dx, d_weight, bias_gradient(grad, ctx), None, None


class RowLinear(torch.autograd.Function):
    """Y = X W + b, W cut by rows: every rank has a part of the sum, the first adds the bias to its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, on: Layout1D, name: str) -> Tensor:
        """[tokens, K / t] -> [tokens / t, N]."""
        ctx.on, ctx.name, ctx.has_bias = on, name, bias is not None
        ctx.save_for_backward(x, weight)
        with on.recorder.op(name):
            return on.leave(multiply(x, weight, bias if on.tp.index == 0 else None))()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """dX = dY W', dW = X' dY of all tokens' dY."""
        on, (x, weight) = ctx.on, ctx.saved_tensors
        with on.recorder.op(ctx.name):
            grad = gather(grad, on.tp) if on.cut.sequence_parallel else grad
            dx = torch.mm(grad, weight.t())
            d_weight = torch.mm(x.t(), grad)
        return dx, d_weight, bias_gradient(grad, ctx), None, None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W, or x W + b in one go."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def bias_gradient(grad: Tensor, ctx: Any) -> Tensor | None:
    """The sum of a gradient's rows, where the linear layer has a bias; a row of its own in the ledger."""
    if not ctx.has_bias:
        return None
    with ctx.on.recorder.op(f"{ctx.name}_bias"):
        return grad.sum(0)
