"""LayerNorm and RMSNorm of rows that may be spread over ranks, each half an op of its own in a ledger.

Where rows are spread, their sums are exchanged between the halves. Row statistics are fp32 (fp64 for
fp64 inputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwise.runtime.programs.attention_kernels import lse_dtype
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_sum

EPSILON = 1e-5


class Norm(torch.autograd.Function):
    """LayerNorm (`is_centered`) or RMSNorm; keeps x, and 1 / deviation (and the mean) of each row.

    `width`: columns of the whole rows, which may be spread over the ranks `along` an axis.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_centered: bool, width: int,
        along: MeshAxis,
    ) -> Tensor:  # fmt: skip
        """[..., columns] -> the same."""
        rows = x.flatten(0, -2)
        scales = all_sum(norm_sums(rows, is_centered), along)
        norm_scales_(scales, width)
        ctx.width, ctx.along, ctx.has_bias = width, along, bias is not None
        ctx.save_for_backward(x, scales, weight)
        return norm_apply(rows, scales, weight, bias).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """One exchange of the sums that the gradient of x needs; the weights' are of the rank's tokens."""
        x, scales, weight = ctx.saved_tensors
        rows, d_rows = x.flatten(0, -2), grad.flatten(0, -2)
        sums = all_sum(norm_gradient_sums(d_rows, rows, scales, weight), ctx.along)
        dx, d_weight, d_bias = norm_backward(d_rows, rows, scales, weight, sums, ctx.width)
        return dx.view(x.shape), d_weight, d_bias if ctx.has_bias else None, None, None, None


@custom_op("meshwise::norm_sums", mutates_args=())
def norm_sums(x: Tensor, is_centered: bool) -> Tensor:
    """Per row of x: the sum of squares and, for a norm that subtracts the mean, the sum."""
    wide = x.to(lse_dtype(x))
    sums = [wide.square().sum(-1), wide.sum(-1)]
    return torch.stack(sums[: 1 + is_centered], dim=-1)


norm_sums.register_fake(lambda x, is_centered: x.new_empty(x.shape[0], 1 + is_centered, dtype=lse_dtype(x)))


@custom_op("meshwise::norm_scales_", mutates_args={"sums"})
def norm_scales_(sums: Tensor, width: int) -> None:
    """From sums over `width` columns to 1 / deviation and mean."""
    sums.div_(width)
    if sums.shape[1] == 2:
        sums[:, 0] -= sums[:, 1].square()
    sums[:, 0] = (sums[:, 0] + EPSILON).rsqrt()


@custom_op("meshwise::norm_apply", mutates_args=())
def norm_apply(x: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x - mean) / deviation * weight + bias."""
    y = _normed(x, scales) * weight
    return (y if bias is None else y + bias).to(x.dtype)


norm_apply.register_fake(lambda x, *_: torch.empty_like(x))


@custom_op("meshwise::norm_gradient_sums", mutates_args=())
def norm_gradient_sums(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """Per row: the sums that the gradient of x needs over the whole width."""
    inner = grad.to(scales.dtype) * weight
    sums = [(inner * _normed(x, scales)).sum(-1), inner.sum(-1)]
    return torch.stack(sums[: scales.shape[1]], dim=-1)


norm_gradient_sums.register_fake(lambda grad, x, scales, *_: torch.empty_like(scales))


@custom_op("meshwise::norm_backward", mutates_args=())
def norm_backward(
    grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor, sums: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    normed, wide = _normed(x, scales), grad.to(scales.dtype)
    inner = wide * weight - normed * (sums[:, :1] / width)
    if sums.shape[1] == 2:
        inner = inner - sums[:, 1:] / width
    dx = inner * scales[:, :1]
    return dx.to(x.dtype), (wide * normed).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype)


norm_backward.register_fake(
    lambda grad, x, scales, weight, *_: tuple(torch.empty_like(of) for of in (x, weight, weight))
)


def _normed(x: Tensor, scales: Tensor) -> Tensor:
    wide = x.to(scales.dtype)
    if scales.shape[1] == 2:
        wide = wide - scales[:, 1:]
    return wide * scales[:, :1]
