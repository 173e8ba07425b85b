"""Differentiable pieces that programs share: activations, a projection of every head, collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu, silu

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]
aten = torch.ops.aten


def kept_as(x: Tensor, narrow: bool) -> Tensor:
    """x as an activation function keeps it: in one byte an element where `narrow`, cut off at +-448."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn) if narrow else x


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up; keeps both, in fp8 where `narrow`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, narrow: bool = False) -> Tensor:
        """[..., f] x 2 -> [..., f]."""
        ctx.save_for_backward(kept_as(gate, narrow), kept_as(up, narrow))
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Computes silu(gate) again."""
        gate, up = (kept.to(grad.dtype) for kept in ctx.saved_tensors)
        return aten.silu_backward(grad * up, gate), grad * silu(gate), None


class Gelu(torch.autograd.Function):
    """gelu(x); keeps x, in fp8 where `narrow`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: bool) -> Tensor:
        """[..., f] -> the same."""
        ctx.save_for_backward(kept_as(x, narrow))
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[..., f] -> the same."""
        return aten.gelu_backward(grad, ctx.saved_tensors[0].to(grad.dtype)), None


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


class DifferentiableCollective(torch.autograd.Function):
    """The collective `there`, whose gradient is the collective `back`: a gather and a scatter, say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective, group: dist.ProcessGroup) -> Tensor:
        """`there` of x, which is contiguous."""
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """`back` of the gradient."""
        return ctx.back(grad.contiguous(), ctx.group), None, None, None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of dim 0 goes to rank i of `group`; the part from rank i comes to place i. Its own inverse."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of dim 0 from all ranks, in their order: [n, ...] -> [n x ranks, ...]."""
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of dim 0 of the sum over all ranks: [n x ranks, ...] -> [n, ...]."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x, group=group)
    return out
