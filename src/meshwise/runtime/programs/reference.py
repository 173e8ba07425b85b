"""What the parallel programs must equal: the same mathematics in one process, in the plainest form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def ulysses_difference(
    inputs: Mapping[str, Tensor], tokens: Sequence[Tensor], grads: Sequence[Tensor], output: Tensor, *,
    is_causal: bool,
) -> dict[str, float]:  # fmt: skip
    """Largest difference on any rank, of the output and of every gradient, to one process in float64.

    `inputs` are this rank's tokens and the weights; `tokens` and `grads` (of the output; empty without a
    backward) those of all ranks.
    """
    mine = _rows_of(output)
    with torch.enable_grad():
        x = torch.cat(list(tokens)).double().requires_grad_()
        weights = [tensor.detach().double().requires_grad_() for tensor in list(inputs.values())[1:]]
        q, k, v = (torch.einsum("nd,hde->hne", x, weight) for weight in weights[:3])
        mixed = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        expected = torch.einsum("hne,hed->nd", mixed, weights[3])
    pairs = {"output": (output, expected[mine])}
    if grads:
        expected.backward(torch.cat(list(grads)).double())
        for name, one, whole in zip(inputs, inputs.values(), [x, *weights], strict=True):
            assert whole.grad is not None
            pairs[f"d {name}"] = (one.grad, whole.grad[mine] if name == "input" else whole.grad)
    return largest_differences(pairs)


def model_2d_difference(
    start: Tensor, shards: Sequence[tuple[Tensor, Tensor]], column: int, weight_grads: Sequence[Tensor],
    grads: Sequence[Tensor], output: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Largest difference on any rank, of the output and of every gradient, to one process in float64.

    `start` is this rank's input of the layers, `shards` are W1, W2 of each tensor-parallel rank, of which
    this one is number `column`; `weight_grads` are its gradients of them, `grads` those of all outputs.
    """
    mine, tp = _rows_of(output), len(shards)
    with torch.enable_grad():
        first = torch.cat([shard[0] for shard in shards], dim=2).double().requires_grad_()
        second = torch.cat([shard[1] for shard in shards], dim=1).double().requires_grad_()
        x = _from_all_ranks(start).double().requires_grad_()
        expected = x
        for weight_in, weight_out in zip(first, second, strict=True):
            expected = expected + torch.relu(expected @ weight_in) @ weight_out
    pairs = {"output": (output, expected[mine])}
    if grads:
        expected.backward(torch.cat(list(grads)).double())
        assert x.grad is not None and first.grad is not None and second.grad is not None
        pairs["d input"] = (start.grad, x.grad[mine])
        pairs["dW1"] = (weight_grads[0], first.grad.chunk(tp, dim=2)[column])
        pairs["dW2"] = (weight_grads[1], second.grad.chunk(tp, dim=1)[column])
    return largest_differences(pairs)


def _rows_of(output: Tensor) -> slice:
    """The rows of the whole output that this rank has."""
    return slice(dist.get_rank() * output.shape[0], (dist.get_rank() + 1) * output.shape[0])


def largest_differences(
    pairs: Mapping[str, tuple[Tensor | None, Tensor]], groups: Iterable[dist.ProcessGroup | None] = (None,)
) -> dict[str, float]:
    """Of each pair, the largest absolute difference over all elements and the ranks of `groups` (all)."""
    groups, found = list(groups), {}
    for name, (one, other) in pairs.items():
        assert one is not None
        difference = (one.detach().double() - other.detach()).abs().max()
        for group in groups:
            dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
        found[name] = float(difference)
    return found


def _from_all_ranks(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.cat(parts)
