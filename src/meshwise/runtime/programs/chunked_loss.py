"""The loss in chunks of tokens: logits of one chunk at a time, and their gradients at once.

The backward of a chunk follows its forward, so that no more than its logits are ever there; what is kept is
the gradient of the hidden states, and that of the head's matrix. Matmuls are those of a whole loss. As
torchtitan's ChunkedLossWrapper (0.3.0) and Liger's fused linear cross entropy (arXiv 2410.10989) do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from meshwise.runtime.programs.linear_layers import local

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of the logits [tokens, vocabulary] of the labels [tokens]."""


class LossInChunks(torch.autograd.Function):
    """Mean loss of hidden states [tokens, hidden] under the head's matrix [vocabulary, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, number: int, loss_of: Loss) -> Tensor:
        """`loss_of` takes the logits of one of `number` chunks."""
        grad = torch.empty_like(x)
        sums: list[Tensor] = []
        losses: list[Tensor] = []
        num_trained = sum(ctx.needs_input_grad[:2])  # a frozen matrix has no gradient
        for mine, part, targets in zip(*(one.chunk(number) for one in (grad, x, labels)), strict=True):
            leaves = part.detach(), weight.detach()
            with torch.enable_grad():
                trained = [leaf.requires_grad_() for leaf in leaves[:num_trained]]
                loss = loss_of(F.linear(*leaves), targets) / number
            of_part, *more = torch.autograd.grad(loss, trained)
            mine.copy_(of_part)
            sums = [total.add_(one) for total, one in zip(sums, more, strict=True)] if losses else more
            losses.append(loss.detach())
            del loss, of_part, more  # before the next chunk makes its own
        ctx.save_for_backward(grad, *sums)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """What the forward has found, times the gradient of the loss."""
        of_x, of_weight, *_ = *((one * grad).to(one.dtype) for one in ctx.saved_tensors), None
        return of_x, of_weight, None, None, None


def loss_in_chunks(x: Tensor, weight: Tensor, labels: Tensor, number: int, loss_of: Loss) -> Tensor:
    """Mean loss of [batch, own tokens, hidden]; a `weight` cut by tp over the vocabulary sees all tokens."""
    if not isinstance(weight, DTensor):
        return LossInChunks.apply(x.flatten(0, 1), weight, labels.flatten(), number, loss_of)
    mesh = weight.device_mesh
    mine = Shard(1) if x.shape[1] < labels.shape[1] else Replicate()  # of the tokens of a sequence, or all
    rows = DTensor.from_local(x, mesh, [mine]).redistribute(placements=[Replicate()])
    hidden = rows.to_local(grad_placements=[Partial()]).flatten(0, 1)

    def of_parts(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(DTensor.from_local(logits, mesh, [Shard(1)], run_check=False), targets)

    return LossInChunks.apply(hidden, local(weight), labels.flatten(), number, of_parts)
