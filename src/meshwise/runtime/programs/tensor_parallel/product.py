"""Products over ranks: what a layout says of C = A B and its gradients, and how autograd calls it.

Operands are [batch, rows, columns]; a linear layer is a batch of one. A product keeps the rank's own blocks.
`Gathered` serves one and three dimensions, `block_2d.Summa` two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from meshwise.runtime.programs.tensor_parallel.exchange import (
    Axis,
    Finish,
    start_gather,
    start_scatter,
    start_sum,
)

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Recorder


class Product(Protocol):
    """C = A B, each operand in blocks over the ranks."""

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The rank's block of C + bias."""

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rank's blocks of dA and dB, and the dC whose rows sum to the bias's gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A is gathered over one axis, B over another, C scattered over the third, all by rows.

    `has_whole_rows`: no activation is cut by rows, so a gather is nothing and a scatter an all-reduce.
    `transposed`: C = A B'.
    """

    a: Axis
    b: Axis
    c: Axis
    has_whole_rows: bool = False
    transposed: bool = False

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The first rank of `c` adds the bias to its part of the sum."""
        left, right = self._gather(a, self.a)(), start_gather(b, self.b, 1)()
        right = right.transpose(1, 2) if self.transposed else right
        has_bias = bias is not None and self.c.index == 0
        product = torch.baddbmm(bias, left, right) if has_bias else torch.bmm(left, right)
        return self._scatter(product, self.c)()

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A comes beside dA's product, dA leaves beside dB's."""
        grad, right = self._gather(grad, self.c)(), start_gather(b, self.b, 1)()
        gathering = self._gather(a, self.a)
        scattering = self._scatter(
            torch.bmm(grad, right if self.transposed else right.transpose(1, 2)), self.a
        )
        left = gathering()
        pair = (grad, left) if self.transposed else (left, grad)
        db = start_scatter(torch.bmm(pair[0].transpose(1, 2), pair[1]), self.b, 1)()
        return scattering(), db, grad

    def _gather(self, x: Tensor, along: Axis) -> Finish:
        return (lambda: x) if self.has_whole_rows else start_gather(x, along, 1)

    def _scatter(self, x: Tensor, along: Axis) -> Finish:
        return start_sum(x, along) if self.has_whole_rows else start_scatter(x, along, 1)


class Linear(torch.autograd.Function):
    """Y = X W + b of rows X; the sum for the bias's gradient is a row of its own in the ledger."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, recorder: Recorder,
        name: str,
    ) -> Tensor:  # fmt: skip
        """[rows, K] x [K, N] -> [rows, N], the rank's blocks of them."""
        ctx.product, ctx.recorder, ctx.name, ctx.has_bias = product, recorder, name, bias is not None
        ctx.save_for_backward(x, weight)
        return product.forward(x[None], weight[None], bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """dX = dY W', dW = X' dY."""
        x, weight = ctx.saved_tensors
        with ctx.recorder.op(ctx.name):
            dx, d_weight, whole = ctx.product.backward(grad[None], x[None], weight[None])
        d_bias = None
        if ctx.has_bias:
            with ctx.recorder.op(f"{ctx.name}_bias"):
                d_bias = whole[0].sum(0)
        return dx[0], d_weight[0], d_bias, None, None, None


def linear(
    x: Tensor, weights: Mapping[str, Tensor], name: str, product: Product, recorder: Recorder
) -> Tensor:
    """The linear layer `name` of x [rows, K]."""
    with recorder.op(name):
        return Linear.apply(
            x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), product, recorder, name
        )


class OfActivations(torch.autograd.Function):
    """A product of two activations: scores Q K', or their mix P V."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: Product) -> Tensor:
        """Blocks of A and B to a block of C."""
        ctx.product = product
        ctx.save_for_backward(a, b)
        return product.forward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """dA and dB."""
        da, db, _ = ctx.product.backward(grad, *ctx.saved_tensors)
        return da, db, None
