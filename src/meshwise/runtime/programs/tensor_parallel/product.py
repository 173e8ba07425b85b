"""Products over ranks: what a layout says of C = A B and its gradients, and how autograd calls it.

A product keeps the rank's own blocks. `Gathered` serves one and three dimensions, `block_2d.Summa` two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, start_gather, start_scatter
from meshwise.runtime.recorder import OpRecorder


class DistributedProduct(Protocol):
    """C = A B, each operand in blocks over the ranks."""

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The rank's block of C + bias."""

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rank's blocks of dA and dB, and the dC whose rows sum to the bias's gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A is gathered over one axis, B over another, C scattered over the third, all by rows."""

    a: MeshAxis
    b: MeshAxis
    c: MeshAxis

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The first rank of `c` adds the bias to its part of the sum."""
        left, right = start_gather(a, self.a)(), start_gather(b, self.b)()
        has_bias = bias is not None and self.c.index == 0
        product = torch.addmm(bias, left, right) if has_bias else torch.mm(left, right)
        return start_scatter(product, self.c)()

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A comes beside dA's product, dA leaves beside dB's."""
        grad, right = start_gather(grad, self.c)(), start_gather(b, self.b)()
        gathering = start_gather(a, self.a)
        scattering = start_scatter(torch.mm(grad, right.t()), self.a)
        db = start_scatter(torch.mm(gathering().t(), grad), self.b)()
        return scattering(), db, grad


class DistributedLinear(torch.autograd.Function):
    """Y = X W + b of rows X; the sum for the bias's gradient is a row of its own in the ledger."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: DistributedProduct,
        recorder: OpRecorder, name: str,
    ) -> Tensor:  # fmt: skip
        """[rows, K] x [K, N] -> [rows, N], the rank's blocks of them."""
        ctx.product, ctx.recorder, ctx.name, ctx.has_bias = product, recorder, name, bias is not None
        ctx.save_for_backward(x, weight)
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """dX = dY W', dW = X' dY."""
        x, weight = ctx.saved_tensors
        with ctx.recorder.op(ctx.name):
            dx, d_weight, whole = ctx.product.backward(grad, x, weight)
        d_bias = None
        if ctx.has_bias:
            with ctx.recorder.op(f"{ctx.name}_bias"):
                d_bias = whole.sum(0)
        return dx, d_weight, d_bias, None, None, None


def linear(
    x: Tensor, weights: Mapping[str, Tensor], name: str, product: DistributedProduct, recorder: OpRecorder
) -> Tensor:
    """The linear layer `name` of x [rows, K]."""
    with recorder.op(name):
        return DistributedLinear.apply(
            x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), product, recorder, name
        )
