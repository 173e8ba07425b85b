"""What is alive at each moment of a part's forward and backward: values, gradients, and weights' gradients.

The walk (`program.walk`) says what is kept; a moment adds what an op holds while it runs:

    forward     what is kept so far, what a later op reads, what the op reads and makes
    backward    what of that is still there or back, the gradients of what the op makes and reads, and those
                of the weights whose gradients were computed before

A tensor that several ops read has a gradient of each until they are added; a sum passes its gradient on as it
is. `Op.workspace_bytes` come on top.

A block whose experts are a unit of weights of their own goes through its backward in three spans: before,
with, and behind them; the gradients of their weights are gone when they are through.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from operator import or_
from typing import NamedTuple

import numpy as np

from meshwise.core.units import Num
from meshwise.program.loss import KERNEL as LOSS_KERNEL
from meshwise.program.op import Op
from meshwise.program.walk import Walk, each, of_structures

IN_EXPERTS = ("expert_fc1", "expert_act", "expert_fc2")
"""Ops inside the module of a block's experts."""


class BackwardBytes(NamedTuple):
    """The most bytes alive in the spans of a part's backward.

    `experts_done`: when the experts are through, the gradients of their weights apart. `waiting`: gradients
    of the results of ops with weights, which wait for these where a backward is split; `freed`: what such
    ops alone keep.
    """

    before: Num
    experts: Num
    behind: Num
    experts_done: Num
    waiting: Num
    freed: Num

    @property
    def most(self) -> Num:
        """In all spans."""
        return np.maximum(np.maximum(self.before, self.experts), self.behind)


class PartBytes(NamedTuple):
    """The most bytes alive in a part, its input included.

    `forward` and `backward` under selective recomputation, `whole_forward` and `whole_backward` where nothing
    is recomputed, `bare_forward` where nothing is kept. `saved`: what is kept where nothing is recomputed.
    """

    forward: Num
    backward: BackwardBytes
    whole_forward: Num
    whole_backward: BackwardBytes
    bare_forward: Num
    saved: Num

    def without_recomputation(self) -> PartBytes:
        """The same where nothing is recomputed."""
        return self._replace(forward=self.whole_forward, backward=self.whole_backward)

    def with_loss(self, loss_bytes: Num) -> PartBytes:
        """The same with a loss that fills so many bytes in its turn, what the part keeps included."""
        filled = [kind._replace(before=np.maximum(kind.before, loss_bytes)) for kind in self[1:4:2]]
        return self._replace(backward=filled[0], whole_backward=filled[1])


def part_bytes(ops: Sequence[Op], grad_bytes: float) -> PartBytes:
    """The moments of a part, the gradients of whose weights take `grad_bytes` an element."""
    if not any(op.phase == "forward" for op in ops):
        nothing = BackwardBytes(*[0.0] * len(BackwardBytes._fields))
        return PartBytes(0.0, nothing, 0.0, nothing, 0.0, 0.0)
    workspace: dict[tuple[str, str], Num] = {}
    for op in ops:
        if op.phase == "backward":
            place = op.module, op.name
            workspace[place] = np.maximum(workspace.get(place, 0.0), op.workspace_bytes)
    return of_structures(ops, lambda walk: PartMoments(walk, workspace, grad_bytes).most())


class PartMoments:
    """The moments of one structure of a part."""

    def __init__(self, walk: Walk, workspace: dict[tuple[str, str], Num], grad_bytes: float) -> None:
        self.walk, self.workspace, self.grad_bytes = walk, workspace, grad_bytes
        self.last_reader = {bit: i for i, bits in enumerate(walk.reads) for bit in each(bits)}
        inside = [i for i, op in enumerate(walk.ops) if op.name in IN_EXPERTS and op.kind != "collective"]
        self.experts = range(inside[0], inside[-1] + 1) if inside else range(len(walk.ops), len(walk.ops))
        self.trains = [any(held.weight.trains for held in op.weights) for op in walk.ops]

    def most(self) -> PartBytes:
        """The most of all moments."""
        whole = self.forward(recomputes=False), self.backward(recomputes=False)
        kept = whole
        if self.walk.segments:
            kept = self.forward(recomputes=True), self.backward(recomputes=True)
        saved = self.walk.bytes(self.walk.kept(recomputes=False))
        return PartBytes(*kept, *whole, self.forward(recomputes=False, keeps=False), saved)

    def forward(self, *, recomputes: bool, keeps: bool = True) -> Num:
        """The most in the forward."""
        walk = self.walk
        most: Num = 0.0
        kept = made = 0
        for i, op in enumerate(walk.ops):
            if keeps:
                kept |= walk.kept_for(i, recomputes=recomputes)
            made |= walk.makes[i] | walk.reads[i]
            read_later = sum(bit for bit in each(made) if self.last_reader.get(bit, i) >= i)
            most = np.maximum(most, walk.bytes(kept | read_later | walk.makes[i]) + op.workspace_bytes)
        return most

    def backward(self, *, recomputes: bool) -> BackwardBytes:
        """The most in each span of the backward."""
        walk, gradients = self.walk, _Gradients(self.walk)
        spans: list[Num] = [0.0, 0.0, 0.0]
        dense: Num = 0.0
        of_experts: Num = 0.0
        done: Num = 0.0
        waiting = 0
        for i, found in groupby(walk.backward(recomputes=recomputes), key=lambda one: one[0]):
            span = 1 if i in self.experts else 0 if i >= self.experts.stop else 2
            *again, (_, values) = found
            weights = dense + of_experts * (span == 1)
            for _, alive in again:
                spans[span] = np.maximum(spans[span], walk.bytes(alive) + gradients.bytes() + weights)
            waiting |= gradients.of_results(i) if self.trains[i] else 0
            for held in walk.ops[i].weights:
                size = self.grad_bytes * held.num_params * held.weight.trains
                dense, of_experts = (
                    dense + size * (not held.weight.is_expert),
                    of_experts + size * held.weight.is_expert,
                )
            moment = walk.bytes(values) + gradients.through(i) + dense + of_experts * (span == 1)
            workspace = self.workspace.get((walk.ops[i].module, walk.ops[i].name), 0.0)
            spans[span] = np.maximum(spans[span], moment + workspace)
            if i == self.experts.start:
                done = walk.bytes(values) + gradients.bytes() + dense
        freed = self._kept(recomputes, trains=True) & ~self._kept(recomputes, trains=False)
        before, experts, behind = spans
        return BackwardBytes(before, experts, behind, done, walk.bytes(waiting), walk.bytes(freed))

    def _kept(self, recomputes: bool, *, trains: bool) -> int:
        """What ops whose weights train, or the others, keep."""
        found = 0
        for i, is_one in enumerate(self.trains):
            if is_one == trains:
                found |= self.walk.kept_for(i, recomputes=recomputes)
        return found


class _Gradients:
    """The gradients of a part's tensors while its backward runs; a loss has none of its results."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.is_loss = [
            op.kernel == LOSS_KERNEL and bits > 0 for op, bits in zip(walk.ops, walk.makes, strict=True)
        ]
        last = max((i for i, bits in enumerate(walk.makes) if bits), default=0)
        results = 0 if any(self.is_loss) else walk.makes[last]
        self.owner = {bit: bit for bit in each(results)}  # in whose gradient's place that of a tensor lies

    def of_results(self, i: int) -> int:
        """Of the results of op `i`."""
        return reduce(or_, (self.owner[bit] for bit in each(self.walk.makes[i]) if bit in self.owner), 0)

    def bytes(self) -> Num:
        """Of all that are there."""
        return self.walk.bytes(reduce(or_, self.owner.values(), 0))

    def through(self, i: int) -> Num:
        """The backward of op `i` runs: bytes of all that are there before or after it."""
        walk, results = self.walk, self.of_results(i)
        alive, seconds = reduce(or_, self.owner.values(), 0), 0
        for bit in each(walk.makes[i]):
            self.owner.pop(bit, None)
        if results or self.is_loss[i]:
            for bit in each(walk.reads[i]):
                own = results & -results if walk.ops[i].kernel == "residual" and results else bit
                if bit in self.owner:
                    seconds, own = seconds | bit, bit
                alive |= own
                self.owner[bit] = own
        return walk.bytes(alive) + walk.bytes(seconds)
