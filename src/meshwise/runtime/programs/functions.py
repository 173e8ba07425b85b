"""Differentiable pieces that programs share: SwiGLU, a projection of every head, rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from meshwise.model.architecture import Model

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
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=places.device, dtype=wide) / width)
    angles = torch.outer(places.to(wide), frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned_width(model: Model) -> int:
    """How many numbers of a head positions turn: all, or a part of latent attention's."""
    return model.mla.qk_rope_head_dim if model.mla else model.head_dim


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
