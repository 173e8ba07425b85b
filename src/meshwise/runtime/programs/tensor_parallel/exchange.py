"""Collectives along one axis of the mesh, as the layouts use them; an axis of one rank exchanges nothing.

What can run beside a product is started first and finished later: `start_gather(...)` returns the function
that waits and hands over the result.

Collectives with gradients (`swap_parts`, `gather_parts`, `scatter_sums`) are for programs whose memory is
compared to the digit: torch's functional ones leave it to gloo's threads when their input is let go of;
these wait first. Ulysses (arXiv 2309.14509) exchanges tokens of all heads for heads of all tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Finish = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class MeshAxis:
    """A rank's place along one axis: its group, the size of it, and its index in it."""

    group: dist.ProcessGroup | None
    size: int
    index: int


ALONE = MeshAxis(None, 1, 0)
"""An axis of one rank."""
Start = Callable[[Tensor, MeshAxis], Finish]


def axis_of(group: dist.ProcessGroup) -> MeshAxis:
    """This rank's place in `group`."""
    size = dist.get_world_size(group)
    return ALONE if size == 1 else MeshAxis(group, size, dist.get_rank(group))


def axis(mesh: DeviceMesh, name: str) -> MeshAxis:
    """The axis of `mesh` called `name`."""
    return axis_of(mesh.get_group(name))


def _after(work: dist.Work, result: Tensor) -> Finish:
    """`result`, when the exchange `work` is through."""

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def start_gather(x: Tensor, along: MeshAxis) -> Finish:
    """All-gather: the parts of all ranks, one after the other in dim 0."""
    if along.group is None:
        return lambda: x
    mine = x.contiguous()
    whole = mine.new_empty(along.size * mine.shape[0], *mine.shape[1:])
    return _after(dist.all_gather_single(whole, mine, group=along.group, async_op=True), whole)


def start_scatter(x: Tensor, along: MeshAxis) -> Finish:
    """Reduce-scatter: this rank's part in dim 0 of the sum over all ranks."""
    if along.group is None:
        return lambda: x
    whole = x.contiguous()
    mine = whole.new_empty(whole.shape[0] // along.size, *whole.shape[1:])
    return _after(dist.reduce_scatter_single(mine, whole, group=along.group, async_op=True), mine)


def all_sum(x: Tensor, along: MeshAxis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce, in place: the sum, or what `op` says."""
    if along.group is not None:
        dist.all_reduce(x, op, group=along.group)
    return x


all_max = partial(all_sum, op=dist.ReduceOp.MAX)
"""All-reduce by maximum, in place."""


def start_swap(x: Tensor, along: MeshAxis) -> Finish:
    """All-to-all: part i of dim 0 goes to rank i; the part from rank i comes to place i."""
    if along.group is None:
        return lambda: x
    mine = x.contiguous()
    result = torch.empty_like(mine)
    return _after(dist.all_to_all_single(result, mine, group=along.group, async_op=True), result)


def start_broadcast(panel: Tensor, owner: int, along: MeshAxis) -> Finish:
    """Broadcast of the owner's `panel`; the others' holds the shape and is not read."""
    if along.group is None:
        return lambda: panel
    buffer = panel.contiguous() if along.index == owner else torch.empty_like(panel).contiguous()
    return _after(dist.broadcast(buffer, group=along.group, group_src=owner, async_op=True), buffer)


def start_reduce(panel: Tensor, owner: int, along: MeshAxis) -> Finish:
    """Sum of all ranks' `panel`, right on its owner only."""
    if along.group is None:
        return lambda: panel
    return _after(dist.reduce(panel, group=along.group, group_dst=owner, async_op=True), panel)


class _Differentiable(torch.autograd.Function):
    """The collective `there`, whose gradient is the collective `back`: a gather and a scatter, say."""

    @staticmethod
    def forward(ctx: Any, there: Start, back: Start, x: Tensor, along: MeshAxis) -> Tensor:
        """`there` of x."""
        ctx.back, ctx.along = back, along
        return there(x, along)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        """`back` of the gradient."""
        return None, None, ctx.back(grad, ctx.along)(), None


swap_parts = partial(_Differentiable.apply, start_swap, start_swap)
"""All-to-all of x along an axis, its own inverse."""
gather_parts = partial(_Differentiable.apply, start_gather, start_scatter)
"""Parts of dim 0 of x from all ranks along an axis, in their order: [n, ...] -> [n x ranks, ...]."""
scatter_sums = partial(_Differentiable.apply, start_scatter, start_gather)
"""This rank's part of dim 0 of the sum over all ranks along an axis: [n x ranks, ...] -> [n, ...]."""


def deal(x: Tensor, heads: Sequence[int], batch: int, dim: int, along: MeshAxis, *, to_heads: bool) -> Tensor:
    """All-to-all over n ranks: [tokens x batch, n heads dim] -> [n tokens x batch, heads dim], or back.

    `heads`: of each kind that is dealt out apart (queries, keys, values), those of one rank.
    """
    num = along.size
    if to_heads:
        by_kind = x.view(-1, batch, num * sum(heads), dim).split([num * number for number in heads], dim=2)
        dealt = torch.cat([part.unflatten(2, (num, -1)).movedim(2, 0) for part in by_kind], dim=3)
        return swap_parts(dealt, along).reshape(-1, sum(heads) * dim)
    by_rank = swap_parts(x.view(num, -1, batch, sum(heads), dim), along)
    parts = [part.movedim(0, 2).flatten(2, 3) for part in by_rank.split(list(heads), dim=3)]
    return torch.cat(parts, dim=2).view(-1, num * sum(heads) * dim)


def deal_heads(along: MeshAxis, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """From a rank's own tokens of all heads [batch, heads, tokens, width] to all tokens of its own heads.

    Key heads that are fewer than the ranks are repeated.
    """
    batch, _, tokens, _ = q.shape
    k, v = (x.repeat_interleave(max(1, along.size // x.shape[1]), dim=1) for x in (k, v))
    widths = [x.shape[1] * x.shape[3] // along.size for x in (q, k, v)]
    qkv = torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v)], dim=2).view(tokens * batch, -1)
    parts = deal(qkv, widths, batch, 1, along, to_heads=True).unflatten(0, (-1, batch)).split(widths, dim=2)
    kinds = zip(parts, (q, k, v), strict=True)
    return tuple(part.unflatten(2, (-1, x.shape[3])).permute(1, 2, 0, 3) for part, x in kinds)


def deal_back(along: MeshAxis, mixed: Tensor) -> Tensor:
    """[batch, all tokens, own heads, width] -> [batch, own tokens, all heads, width]."""
    batch, tokens, heads, width = mixed.shape
    mixed = mixed.transpose(0, 1).reshape(-1, heads * width)
    mixed = deal(mixed, [heads], batch, width, along, to_heads=False)
    return mixed.view(tokens // along.size, batch, -1, width).transpose(0, 1).contiguous()
