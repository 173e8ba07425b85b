"""Softmax of attention scores that lie in memory, in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten
_MASK_BLOCK = 1024


@custom_op("meshwise::softmax_", mutates_args={"scores"})
def softmax_(scores: Tensor, scale: float, is_causal: bool) -> None:
    """Softmax of `scale * scores` over the last dim, in place; `is_causal` masks above the diagonal."""
    scores.mul_(scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        for begin in range(0, rows, _MASK_BLOCK):
            end = min(begin + _MASK_BLOCK, rows)
            scores[..., begin:end, end:columns].fill_(float("-inf"))
            size = end - begin
            above = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., begin:end, begin:end].masked_fill_(above, float("-inf"))
    aten._softmax.out(scores, -1, False, out=scores)


@custom_op("meshwise::softmax_backward_", mutates_args={"grad"})
def softmax_backward_(grad: Tensor, probabilities: Tensor, scale: float) -> None:
    """Gradient of `softmax_`, in place of the gradient of its result."""
    aten._softmax_backward_data.out(grad, probabilities, -1, grad.dtype, grad_input=grad)
    grad.mul_(scale)


class SoftmaxInPlace(torch.autograd.Function):
    """Softmax of scaled scores, under a causal mask perhaps, in their place; keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, is_causal: bool) -> Tensor:
        """[heads, tokens, tokens] -> the same."""
        softmax_(scores, scale, is_causal)
        ctx.scale = scale
        ctx.mark_dirty(scores)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """In place of the gradient, which nobody else reads."""
        softmax_backward_(grad, ctx.saved_tensors[0], ctx.scale)
        return grad, None, None
