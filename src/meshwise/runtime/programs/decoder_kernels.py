"""What a decoder does between its matmuls, each keeping for the backward what `cost.op.KERNELS` says.

Activations are [batch, tokens, width], heads [batch, heads, tokens, head size].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwise.runtime.programs.functions import (
    empty_gradients,
    empty_lse,
    flash_attention,
    flash_attention_backward,
)


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


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@custom_op("meshwise::grouped_attention", mutates_args=())
def grouped_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Fused attention: output and log-sum-exp; fewer key heads are shared by as many query heads each.

    The output lies in memory as [batch, tokens, heads, width], as the projection after it reads it.
    """
    heads = query.shape[1]
    out, lse = flash_attention(query, _repeated(key, heads), _repeated(value, heads), is_causal)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


@grouped_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2), empty_lse(query)


@custom_op("meshwise::grouped_attention_backward", mutates_args=())
def grouped_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; a key head's is the sum over the query heads that share it."""
    heads, kv_heads = query.shape[1], key.shape[1]
    repeated = _repeated(key, heads), _repeated(value, heads)
    dq, dk, dv = flash_attention_backward(
        grad.contiguous(), query, *repeated, out.contiguous(), lse.contiguous(), is_causal
    )
    if kv_heads != heads:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


grouped_attention_backward.register_fake(empty_gradients)


class Attend(torch.autograd.Function):
    """Fused attention with its backward; keeps q, k, v, the output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """[batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
        out, lse = grouped_attention(q, k, v, is_causal)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Recomputes the scores from log-sum-exp."""
        q, k, v, out, lse = ctx.saved_tensors
        return *grouped_attention_backward(grad.transpose(1, 2), q, k, v, out, lse, ctx.is_causal), None


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
