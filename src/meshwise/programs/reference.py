"""What the parallel programs must equal: the same mathematics in one process, in the plainest form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.instruments.context import Context

if TYPE_CHECKING:
    from meshwise.programs.ulysses import Options


def plain_attention(x: Tensor, weights: list[Tensor], *, is_causal: bool) -> Tensor:
    """[N, d] tokens through q, k, v and output projections of [h, d, e], [h, e, d] weights."""
    q, k, v = (torch.einsum("nd,hde->hne", x, weight) for weight in weights[:3])
    scores = torch.einsum("hne,hme->hnm", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hnm,hme,hed->nd", scores.softmax(-1), v, weights[3])


def ulysses_difference(
    options: Options, context: Context, inputs: Mapping[str, Tensor], output: Tensor
) -> dict[str, float]:
    """Largest difference on any rank, of the output and of every gradient, to one process in float64."""
    with torch.enable_grad():
        parts = [_tokens(options, context, 0, rank) for rank in range(context.world_size)]
        x = torch.cat(parts).double().requires_grad_()
        weights = [tensor.detach().double().requires_grad_() for tensor in list(inputs.values())[1:]]
        expected = plain_attention(x, weights, is_causal=options.causal)
    mine = slice(context.rank * output.shape[0], (context.rank + 1) * output.shape[0])
    pairs = {"output": (output, expected[mine])}
    if options.backward:
        parts = [_tokens(options, context, 5, rank) for rank in range(context.world_size)]
        expected.backward(torch.cat(parts).double())
        for name, one, all_tokens in zip(inputs, inputs.values(), [x, *weights], strict=True):
            gradient = all_tokens.grad
            assert gradient is not None
            pairs[f"d {name}"] = (one.grad, gradient[mine] if name == "input" else gradient)
    return {name: largest_difference(*pair) for name, pair in pairs.items()}


def largest_difference(one: Tensor | None, other: Tensor) -> float:
    """The largest absolute difference over all elements and all ranks."""
    assert one is not None
    difference = (one.detach().double() - other.detach()).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)


def _tokens(options: Options, context: Context, place: int, rank: int) -> Tensor:
    shape = options.seq // context.world_size, options.hidden
    return context.normal(*shape, dtype=context.dtype(options.dtype), key=(options.seed, place, rank))
