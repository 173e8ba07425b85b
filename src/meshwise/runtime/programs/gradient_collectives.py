"""Collectives with gradients, for programs whose memory is compared to the digit.

torch's functional collectives leave it to gloo's threads when their input is let go of; these wait first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of dim 0 goes to rank i of `group`; the part from rank i comes to place i. Its own inverse."""
    return _Differentiable.apply(x, exchange_parts, exchange_parts, group)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of dim 0 from all ranks, in their order: [n, ...] -> [n x ranks, ...]."""
    return _Differentiable.apply(x, _all_gather, _reduce_scatter, group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of dim 0 of the sum over all ranks: [n x ranks, ...] -> [n, ...]."""
    return _Differentiable.apply(x, _reduce_scatter, _all_gather, group)


class _Differentiable(torch.autograd.Function):
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


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The all-to-all of a contiguous x, without a gradient."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x, group=group)
    return out
