"""Collectives along one axis of the mesh, as the layouts use them; an axis of one rank exchanges nothing.

What can run beside a product is started first and finished later: `start_gather(...)` returns the function
that waits and hands over the result.

Collectives with gradients (`swap_parts`, `gather_parts`, `scatter_sums`) are for programs whose memory is
compared to the digit: torch's functional ones leave it to gloo's threads when their input is let go of;
these wait first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def axis(mesh: DeviceMesh, name: str) -> MeshAxis:
    """The axis of `mesh` called `name`."""
    group = mesh.get_group(name)
    return MeshAxis(group, dist.get_world_size(group), dist.get_rank(group))


def _after(work: dist.Work, result: Tensor) -> Finish:
    """`result`, when the exchange `work` is through."""

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def start_gather(x: Tensor, along: MeshAxis) -> Finish:
    """All-gather: the parts of all ranks, one after the other in dim 0."""
    if along.size == 1:
        return lambda: x
    mine = x.contiguous()
    whole = mine.new_empty(along.size * mine.shape[0], *mine.shape[1:])
    work = dist.all_gather_single(whole, mine, group=along.group, async_op=True)
    return _after(work, whole)


def start_scatter(x: Tensor, along: MeshAxis) -> Finish:
    """Reduce-scatter: this rank's part in dim 0 of the sum over all ranks."""
    if along.size == 1:
        return lambda: x
    whole = x.contiguous()
    mine = whole.new_empty(whole.shape[0] // along.size, *whole.shape[1:])
    work = dist.reduce_scatter_single(mine, whole, group=along.group, async_op=True)
    return _after(work, mine)


def all_sum(x: Tensor, along: MeshAxis) -> Tensor:
    """All-reduce, in place."""
    if along.size > 1:
        dist.all_reduce(x, group=along.group)
    return x


def all_max(x: Tensor, along: MeshAxis) -> Tensor:
    """All-reduce by maximum, in place."""
    if along.size > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=along.group)
    return x


def all_to_all(x: Tensor, along: MeshAxis) -> Tensor:
    """Part i of dim 0 goes to rank i; the part from rank i comes to place i."""
    if along.group is None or along.size == 1:
        return x
    return exchange_parts(x.contiguous(), along.group)


def start_broadcast(panel: Tensor, owner: int, along: MeshAxis) -> Finish:
    """Broadcast of the owner's `panel`; the others' holds the shape and is not read."""
    if along.size == 1:
        return lambda: panel
    buffer = panel.contiguous() if along.index == owner else torch.empty_like(panel).contiguous()
    work = dist.broadcast(buffer, group=along.group, group_src=owner, async_op=True)
    return _after(work, buffer)


def start_reduce(panel: Tensor, owner: int, along: MeshAxis) -> Finish:
    """Sum of all ranks' `panel`, right on its owner only."""
    if along.size == 1:
        return lambda: panel
    return _after(dist.reduce(panel, group=along.group, group_dst=owner, async_op=True), panel)


Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def swap_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of dim 0 goes to rank i of `group`; the part from rank i comes to place i. Its own inverse."""
    return _Differentiable.apply(x, exchange_parts, exchange_parts, group)


def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of dim 0 from all ranks, in their order: [n, ...] -> [n x ranks, ...]."""
    return _Differentiable.apply(x, _all_gather, _reduce_scatter, group)


def scatter_sums(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of dim 0 of the sum over all ranks: [n x ranks, ...] -> [n, ...]."""
    return _Differentiable.apply(x, _reduce_scatter, _all_gather, group)


class _Differentiable(torch.autograd.Function):
    """The collective `there`, whose gradient is the collective `back`: a gather and a scatter, say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective, group: dist.ProcessGroup) -> Tensor:
        """`there` of x, which is contiguous."""
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """`back` of the gradient."""
        return ctx.back(grad.contiguous(), ctx.group), None, None, None


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The all-to-all of a contiguous x, without a gradient."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x, group=group)
    return out
