"""Rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwise.model.architecture import Model


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
