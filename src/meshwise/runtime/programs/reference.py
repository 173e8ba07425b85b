"""What the parallel programs must equal: the same mathematics in one process, in the plainest form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from meshwise.runtime.programs import model_2d, ulysses
    from meshwise.runtime.programs.context import Context


def plain_attention(x: Tensor, weights: list[Tensor], *, is_causal: bool) -> Tensor:
    """[N, d] tokens through q, k, v and output projections of [h, d, e], [h, e, d] weights."""
    q, k, v = (torch.einsum("nd,hde->hne", x, weight) for weight in weights[:3])
    scores = torch.einsum("hne,hme->hnm", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hnm,hme,hed->nd", scores.softmax(-1), v, weights[3])


def ulysses_difference(
    options: ulysses.Options, context: Context, inputs: Mapping[str, Tensor], output: Tensor
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


def _tokens(options: ulysses.Options, context: Context, place: int, rank: int) -> Tensor:
    shape = options.seq // context.world_size, options.hidden
    return context.normal(*shape, dtype=context.dtype(options.dtype), key=(options.seed, place, rank))


def plain_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Layers x + relu(x W1) W2 of [L, d, f] and [L, f, d] weights, one after the other."""
    for weight_in, weight_out in zip(first, second, strict=True):
        x = x + torch.relu(x @ weight_in) @ weight_out
    return x


def model_2d_difference(
    options: model_2d.Options, context: Context, tp: int, start: Tensor, grads: list[Tensor], output: Tensor
) -> dict[str, float]:
    """Largest difference on any rank, of the output and of every gradient, to one process in float64.

    `start` is this rank's input of the layers, `grads` the gradients of W1, W2.
    """
    from meshwise.runtime.programs.model_2d import local_weights, output_gradient

    column = context.rank % tp
    with torch.enable_grad():
        shards = [local_weights(options, context, tp, place) for place in range(tp)]
        first = torch.cat([shard[0] for shard in shards], dim=2).double().requires_grad_()
        second = torch.cat([shard[1] for shard in shards], dim=1).double().requires_grad_()
        x = _from_all_ranks(start).double().requires_grad_()
        expected = plain_mlp(x, first, second)
    rows = output.shape[0]
    mine = slice(context.rank * rows, (context.rank + 1) * rows)
    pairs = {"output": (output, expected[mine])}
    if options.backward:
        parts = [output_gradient(options, context, rank, output) for rank in range(context.world_size)]
        expected.backward(torch.cat(parts).double())
        assert x.grad is not None and first.grad is not None and second.grad is not None
        pairs["d input"] = (start.grad, x.grad[mine])
        pairs["dW1"] = (grads[0], first.grad.chunk(tp, dim=2)[column])
        pairs["dW2"] = (grads[1], second.grad.chunk(tp, dim=1)[column])
    return {name: largest_difference(*pair) for name, pair in pairs.items()}


def _from_all_ranks(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)
