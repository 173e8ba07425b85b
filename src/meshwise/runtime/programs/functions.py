"""Differentiable pieces that programs share: SwiGLU, a projection of every head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

aten = torch.ops.aten


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up; keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """[..., f] x 2 -> [..., f]."""
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Computes silu(gate) again."""
        gate, up = ctx.saved_tensors
        return aten.silu_backward(grad * up, gate), grad * silu(gate)


class Project(torch.autograd.Function):
    """x [N, d] times one matrix per head, W [h, d, e] -> [h, N, e]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x is read by every head, not copied."""
        ctx.save_for_backward(x, weight)
        return torch.bmm(x.expand(weight.shape[0], *x.shape), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """dx sums over heads inside one matmul, [N, h e] x [h e, d]."""
        x, weight = ctx.saved_tensors
        heads, tokens, width = grad.shape
        dweight = torch.bmm(x.t().expand(heads, x.shape[1], tokens), grad)
        rows = grad.transpose(0, 1).contiguous().view(tokens, heads * width)
        columns = weight.transpose(1, 2).contiguous().view(heads * width, x.shape[1])
        return torch.mm(rows, columns), dweight
