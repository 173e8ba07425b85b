"""Attention in three steps, with its scores in memory: a product, a softmax in its place, another product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwise.runtime.programs.functions import softmax_, softmax_backward_


def attend_unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [batch, heads, tokens, width] -> [batch, tokens, heads, width].

    Key heads that are fewer than query heads are repeated.
    """
    batch, heads, _, width = q.shape
    if k.shape[1] < heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        q = q.contiguous()  # which may lie beside the keys that were repeated
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    probabilities = Softmax.apply(torch.bmm(q, k.transpose(1, 2)), width**-0.5)
    return torch.bmm(probabilities, v).unflatten(0, (batch, heads)).transpose(1, 2)


class Softmax(torch.autograd.Function):
    """Softmax of scaled scores under a causal mask, in their place; keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        """[heads, tokens, tokens] -> the same."""
        softmax_(scores, scale, True)
        ctx.scale = scale
        ctx.mark_dirty(scores)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """In place of the gradient, which nobody else reads."""
        softmax_backward_(grad, ctx.saved_tensors[0], ctx.scale)
        return grad, None
