"""Differentiable pieces that programs share: SwiGLU, a projection of every head, rotary positions, norms.

LayerNorm and RMSNorm are of rows that may be spread over ranks, each half an op of its own in a ledger; where
rows are spread, their sums are exchanged between the halves. Row statistics are fp32 (fp64 for fp64 inputs).
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import silu

from meshwise.model.architecture import Model
from meshwise.runtime.programs.attention_kernels import wide_dtype
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_sum

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


class Rotate(torch.autograd.Function):
    """Rotary embedding, halves paired; keeps nothing: the way back turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, heads, width], each token turned by its angles (`turns`)."""
        ctx.turns = cos, sin
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The inverse of a rotation is its transpose."""
        cos, sin = ctx.turns
        return _turned(grad, cos, -sin), None, None


def turns(places: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of heads at `places`, base 10,000: [tokens, 1, width / 2] each."""
    wide = wide_dtype(dtype)
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=places.device, dtype=wide) / width)
    angles = torch.outer(places.to(wide), frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned_width(model: Model) -> int:
    """How many numbers of a head positions turn: all, or a part of latent attention's."""
    return model.mla.qk_rope_head_dim if model.mla else model.head_dim


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


EPSILON = 1e-5


class Norm(torch.autograd.Function):
    """LayerNorm (`is_centered`) or RMSNorm; keeps x, and the sum of squares (and the sum) of each row.

    `width`: columns of the whole rows, which may be spread over the ranks `along` an axis.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_centered: bool, width: int,
        along: MeshAxis,
    ) -> Tensor:  # fmt: skip
        """[..., columns] -> the same."""
        rows = x.flatten(0, -2)
        sums = all_sum(norm_sums(rows, is_centered), along)
        ctx.width, ctx.along, ctx.has_bias = width, along, bias is not None
        ctx.save_for_backward(x, sums, weight)
        return norm_apply(rows, sums, weight, bias, width).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """One exchange of the sums that the gradient of x needs; the weights' are of the rank's tokens."""
        x, sums, weight = ctx.saved_tensors
        of = grad.flatten(0, -2), x.flatten(0, -2), sums, weight
        d_sums = all_sum(norm_gradient_sums(*of, ctx.width), ctx.along)
        dx, d_weight, d_bias = norm_backward(*of, d_sums, ctx.width)
        return dx.view(x.shape), d_weight, d_bias if ctx.has_bias else None, None, None, None


@custom_op("meshwise::norm_sums", mutates_args=())
def norm_sums(x: Tensor, is_centered: bool) -> Tensor:
    """Per row of x: the sum of squares and, for a norm that subtracts the mean, the sum."""
    wide = x.to(wide_dtype(x.dtype))
    sums = [wide.square().sum(-1), wide.sum(-1)]
    return torch.stack(sums[: 1 + is_centered], dim=-1)


norm_sums.register_fake(
    lambda x, is_centered: x.new_empty(x.shape[0], 1 + is_centered, dtype=wide_dtype(x.dtype))
)


@custom_op("meshwise::norm_apply", mutates_args=())
def norm_apply(x: Tensor, sums: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """(x - mean) / deviation * weight + bias."""
    y = _normed(x, sums, width)[0] * weight
    return (y if bias is None else y + bias).to(x.dtype)


norm_apply.register_fake(lambda x, *_: torch.empty_like(x))


@custom_op("meshwise::norm_gradient_sums", mutates_args=())
def norm_gradient_sums(grad: Tensor, x: Tensor, sums: Tensor, weight: Tensor, width: int) -> Tensor:
    """Per row: the sums that the gradient of x needs over the whole width."""
    inner = grad.to(sums.dtype) * weight
    found = [(inner * _normed(x, sums, width)[0]).sum(-1), inner.sum(-1)]
    return torch.stack(found[: sums.shape[1]], dim=-1)


norm_gradient_sums.register_fake(lambda grad, x, sums, *_: torch.empty_like(sums))


@custom_op("meshwise::norm_backward", mutates_args=())
def norm_backward(
    grad: Tensor, x: Tensor, sums: Tensor, weight: Tensor, d_sums: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    (normed, scale), wide = _normed(x, sums, width), grad.to(sums.dtype)
    inner = wide * weight - normed * (d_sums[:, :1] / width)
    if sums.shape[1] == 2:
        inner = inner - d_sums[:, 1:] / width
    dx = inner * scale
    return dx.to(x.dtype), (wide * normed).sum(0).to(weight.dtype), wide.sum(0).to(weight.dtype)


norm_backward.register_fake(
    lambda grad, x, sums, weight, *_: tuple(torch.empty_like(of) for of in (x, weight, weight))
)


def _normed(x: Tensor, sums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """x less its mean (where it is centered) over its deviation, and 1 / deviation, of each row."""
    means, wide = sums / width, x.to(sums.dtype)
    mean = means[:, 1:]  # none of a norm that is not centered
    scale = (means[:, :1] - mean.square().sum(1, keepdim=True) + EPSILON).rsqrt()
    return (wide - mean if mean.shape[1] else wide) * scale, scale
