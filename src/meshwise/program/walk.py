"""What a rank keeps of a part of the model between forward and backward, from the tensors of its ops.

A forward op keeps tensors for its backward. A tensor is kept once, whoever needs it. Two things change that:

    remade     the result of an op that runs again wherever the backward needs it (Megatron-LM gathers the
               input of a pair of matmuls once more): what the op reads is kept in its place
    segments   runs of ops that selective recomputation runs again together: what enters a segment is kept,
               and what other ops keep of its results, unless it drops these too; what its own ops keep comes
               back when the backward reaches it, and goes op by op

What the walk finds are sets of tensors; sizes come last, so that one walk serves a grid of plans. What a
collective among one rank makes is what it read: plans of a grid that differ in that differ in structure,
and each structure is walked once.

A *moment* adds what an op holds while it runs:

    forward     what is kept so far, what a later op reads, what the op reads and makes
    backward    what of that is still there or back, the gradients of what the op makes and reads, and those
                of the weights whose gradients were computed before

A tensor that several ops read has a gradient of each until they are added; a sum passes its gradient on as it
is. `Op.workspace_bytes` come on top.

A block whose experts are a unit of weights of their own goes through its backward in three spans: before,
with, and behind them; the gradients of their weights are gone when they are through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, chain, groupby
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from meshwise.core.columns import by_key
from meshwise.core.numbers import added, larger
from meshwise.core.units import Num
from meshwise.program.loss import KERNEL as LOSS_KERNEL
from meshwise.program.op import Op, Tensor


class Activations(NamedTuple):
    """Bytes of one microbatch of a part on one rank.

    `saved_bytes` are kept without recomputation, `kept_bytes` under selective recomputation, whose backward
    holds `back_bytes` more than these at its fullest moment.
    """

    saved_bytes: Num
    kept_bytes: Num
    back_bytes: Num


def activations(ops: Sequence[Op]) -> Activations:
    """What the ops of a part keep."""
    found: Activations = of_structures(ops, Walk.activations)
    return found


def with_saved_bytes(ops: Sequence[Op]) -> list[Op]:
    """`ops`, each forward one with the bytes that it is the first to keep, nothing recomputed."""
    saved = iter(of_structures(ops, lambda walk: tuple(walk.saved_bytes())))
    return [structs.replace(op, saved_bytes=next(saved)) if op.phase == "forward" else op for op in ops]


def of_structures(ops: Sequence[Op], told: Callable[[Walk], Any]) -> Any:
    """What is `told` of the walk of the forward of `ops`: in each cell, of that of its structure."""
    forward = [op for op in ops if op.phase == "forward"]
    sizes: dict[int, Num] = {}
    of_all = ((cells, Walk(forward, views, sizes)) for cells, views in structures(forward))
    cells, walks = zip(*of_all, strict=True)
    found = [told(walk) for walk in walks]
    return found[0] if len(found) == 1 else selected(cells, found)


def mapped(change: Callable[..., Any], *trees: Any) -> Any:
    """A tree of tuples like each of `trees`, whose leaves are made of theirs."""
    if not isinstance(trees[0], tuple):
        return change(*trees)
    leaves = (mapped(change, *values) for values in zip(*trees, strict=True))
    kind = type(trees[0])
    return kind(*leaves) if hasattr(kind, "_fields") else tuple(leaves)


def selected(cells: Sequence[Any], found: Sequence[Any]) -> Any:
    """Of several trees of numbers the one that holds in each cell: the first whose `cells` are true."""
    return mapped(lambda *leaves: np.select(cells, leaves), *found)


class Room(NamedTuple):
    """Bytes of tensors that come and go: the most that they fill at once, and what is booked for them."""

    filled_bytes: Num
    booked_bytes: Num


def room(ops: Sequence[Op]) -> Room:
    """The room of the tensors of `ops`, which run in this order.

    A tensor is there from the first op that names it to the last. It takes the tightest free place that is
    large enough, as in PyTorch's caching allocator, or a new one.
    """
    named = [{id(one): one.bytes for one in (*op.reads, *op.makes, *op.keeps)} for op in ops]
    last = {key: i for i, tensors in enumerate(named) for key in tensors}
    places: list[Num] = []
    alive: dict[int, tuple[Num, int]] = {}
    filled: Num = 0.0
    for i, tensors in enumerate(named):
        for key in [key for key in tensors if key not in alive]:
            taken = {place for _, place in alive.values()}
            free = [at for at, size in enumerate(places) if at not in taken and np.all(size >= tensors[key])]
            place = min(free, key=lambda at: np.max(places[at]), default=len(places))
            places += [tensors[key]] * (place == len(places))
            alive[key] = tensors[key], place
        filled = larger(filled, added(size for size, _ in alive.values()))
        alive = {key: found for key, found in alive.items() if last[key] > i}
    return Room(filled, added(places))


def structures(forward: Sequence[Op]) -> Iterator[tuple[Any, dict[int, bool]]]:
    """The cells of each structure, and which tensors lie in the memory of another one there."""
    named = (one for op in forward for one in (*op.reads, *op.makes, *op.keeps))
    made = {id(one): one for one in named if one.storage is not None}
    flags = {id(one.is_view): one.is_view for one in made.values()}
    arrays = {key: flag for key, flag in flags.items() if np.ndim(flag)}
    fixed = {key: bool(flag) for key, flag in flags.items() if key not in arrays}
    if not arrays:
        yield True, {key: fixed[id(one.is_view)] for key, one in made.items()}
        return
    table = np.stack(np.broadcast_arrays(*arrays.values()))
    codes = np.tensordot(2 ** np.arange(len(table)), table, 1)
    for code in np.unique(codes):
        chosen = fixed | {key: bool(int(code) >> i & 1) for i, key in enumerate(arrays)}
        yield codes == code, {key: chosen[id(one.is_view)] for key, one in made.items()}


class Walk:
    """The ops of one structure, their tensors as bits; `sizes`: of the tensors that another one had."""

    def __init__(self, forward: Sequence[Op], views: dict[int, bool], sizes: dict[int, Num]) -> None:
        self.views, self.numbers, self.tensors = views, dict[int, int](), list[Tensor]()
        self.sizes = sizes
        self.ops: list[Op] = []
        self.reads: list[int] = []
        self.makes: list[int] = []
        self.keeps: list[int] = []
        self.stays: list[int] = []
        self.maker: dict[int, int] = {}
        for op in forward:
            reads, makes = self._bits(op.reads), self._bits(op.makes)
            if op.kind == "collective" and makes == reads:
                makes = 0  # among one rank: nothing is made, nor made again
            for bit in each(makes & ~reads):
                self.maker.setdefault(bit, len(self.ops))
            self.ops.append(op)
            self.reads.append(reads)
            self.makes.append(makes)
            self.keeps.append(self._bits(op.keeps))
            self.stays.append(self._bits(op.stays) if makes else 0)
        self.remade = sum(bit for bit, i in self.maker.items() if self.ops[i].remade)
        self.dropped = sum(bit for bit, i in self.maker.items() if self.ops[i].drops)
        self.segments = by_key((op.segment, i) for i, op in enumerate(self.ops) if op.segment)

    def activations(self) -> Activations:
        """What is kept with and without recomputation, and the most that comes back."""
        saved_bytes = self.bytes(self.kept(recomputes=False))
        if not self.segments:
            return Activations(saved_bytes, saved_bytes, 0.0)
        kept_bytes = most = self.bytes(self.kept(recomputes=True))
        moments = {alive for _, alive in self.backward(recomputes=True)}
        for moment in moments:
            if not any(moment | other == other != moment for other in moments):
                most = larger(most, self.bytes(moment))
        return Activations(saved_bytes, kept_bytes, larger(most - kept_bytes, 0.0))

    def saved_bytes(self) -> Iterator[Num]:
        """What each op is the first to keep."""
        seen = 0
        for i in range(len(self.ops)):
            own = self.resolved(i, self.keeps[i], recomputes=False) & ~seen
            seen |= own
            yield self.bytes(own)

    def kept(self, *, recomputes: bool) -> int:
        """What is kept of all ops."""
        return reduce(or_, (self.kept_for(i, recomputes=recomputes) for i in range(len(self.ops))), 0)

    def kept_for(self, i: int, *, recomputes: bool) -> int:
        """What is kept for the backward of op `i`."""
        if recomputes and self.ops[i].segment:
            return self.resolved(i, self.entering(i), recomputes=True) | self.stays[i]
        return self.resolved(i, self.keeps[i], recomputes=recomputes)

    def entering(self, i: int) -> int:
        """What op `i` of a segment reads of other ops."""
        own = self.ops[i].segment
        makers = ((bit, self.maker.get(bit)) for bit in each(self.reads[i]))
        return sum(bit for bit, maker in makers if maker is None or self.ops[maker].segment != own)

    def resolved(self, i: int, bits: int, *, recomputes: bool) -> int:
        """What stands for tensors that op `i` needs: themselves, or what they are made again of."""
        found = bits & ~(self.remade | self.dropped)
        for bit in each(bits & ~found):
            j = self.maker[bit]
            if j != i and self.ops[j].remade:
                found |= self.resolved(j, self.reads[j], recomputes=recomputes)
            elif not (recomputes and self.ops[j].drops and self.ops[j].segment != self.ops[i].segment):
                found |= bit
        return found

    def backward(self, *, recomputes: bool) -> Iterator[tuple[int, int]]:
        """What is alive of the forward when each op's backward begins, and before it while ops run again."""
        return _Backward(self, recomputes=recomputes).moments()

    def _bits(self, tensors: Iterable[Tensor]) -> int:
        bits = 0
        for one in tensors:
            if one.is_weight:  # held whatever runs
                continue
            while one.storage is not None and self.views[id(one)]:
                one = one.storage
                if one.storage is not None and id(one) not in self.views:
                    break
            number = self.numbers.setdefault(id(one), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(one)
            bits |= 1 << number
        return bits

    def bytes(self, bits: int) -> Num:
        total: Num = 0.0
        for bit in each(bits):
            one = self.tensors[bit.bit_length() - 1]
            if id(one) not in self.sizes:
                self.sizes[id(one)] = one.bytes
            total = total + self.sizes[id(one)]
        return total


class _Backward:
    """What is alive of the forward while the backward of a walk runs, op by op."""

    def __init__(self, walk: Walk, *, recomputes: bool) -> None:
        self.walk, self.alive = walk, walk.kept(recomputes=recomputes)
        self.waiting = dict(walk.segments) if recomputes else {}
        self.before = list(accumulate(walk.keeps, or_, initial=0))

    def moments(self) -> Iterator[tuple[int, int]]:
        """As `Walk.backward`."""
        walk = self.walk
        for i in reversed(range(len(walk.ops))):
            yield from self._bring(i, walk.keeps[i])
            yield i, self.alive
            still = self.before[i]
            for j in chain.from_iterable(self.waiting.values()):
                still |= walk.reads[j] | walk.stays[j]
            for bit in each(still & walk.remade):  # and what those are made of that ops make again
                still |= walk.reads[walk.maker[bit]]
            self.alive &= still

    def _run(self, segment: str, needed_by: int) -> Iterator[tuple[int, int]]:
        walk, again = self.walk, 0
        for i in self.waiting.pop(segment):
            yield from self._bring(i, walk.entering(i))
            again |= walk.resolved(i, walk.keeps[i], recomputes=False)
            self.alive |= again
            if walk.ops[i].drops:
                self.alive |= walk.makes[i] & self.before[-1]
            if walk.stays[i] and walk.ops[i].kind != "matmul":  # whose input is kept before it is taken
                self.alive &= ~walk.stays[i] | again
            yield needed_by, self.alive
            self.alive &= ~walk.stays[i] | again

    def _bring(self, i: int, bits: int) -> Iterator[tuple[int, int]]:
        walk = self.walk
        for bit in each(walk.resolved(i, bits, recomputes=False) & ~self.alive):
            segment = walk.ops[walk.maker[bit]].segment if bit in walk.maker else ""
            if segment in self.waiting:
                yield from self._run(segment, i)
                self.alive |= bit


def each(bits: int) -> Iterator[int]:
    """Each of the bits by itself."""
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest


# --- moments -----------------------------------------------------------------------------------

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
        return larger(larger(self.before, self.experts), self.behind)


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
        filled = [kind._replace(before=larger(kind.before, loss_bytes)) for kind in self[1:4:2]]
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
            workspace[place] = larger(workspace.get(place, 0.0), op.workspace_bytes)
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
        again = bool(self.walk.segments)
        kept = (self.forward(recomputes=True), self.backward(recomputes=True)) if again else whole
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
            most = larger(most, walk.bytes(kept | read_later | walk.makes[i]) + op.workspace_bytes)
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
                spans[span] = larger(spans[span], walk.bytes(alive) + gradients.bytes() + weights)
            waiting |= gradients.of_results(i) if self.trains[i] else 0
            for held in walk.ops[i].weights:
                size = self.grad_bytes * held.num_params * held.weight.trains
                dense = dense + size * (not held.weight.is_expert)
                of_experts = of_experts + size * held.weight.is_expert
            moment = walk.bytes(values) + gradients.through(i) + dense + of_experts * (span == 1)
            workspace = self.workspace.get((walk.ops[i].module, walk.ops[i].name), 0.0)
            spans[span] = larger(spans[span], moment + workspace)
            if i == self.experts.start:
                done = walk.bytes(values) + gradients.bytes() + dense
        freed = self._kept(recomputes, trains=True) & ~self._kept(recomputes, trains=False)
        before, experts, behind = spans
        return BackwardBytes(before, experts, behind, done, walk.bytes(waiting), walk.bytes(freed))

    def _kept(self, recomputes: bool, *, trains: bool) -> int:
        """What ops whose weights train, or the others, keep."""
        of = (i for i, is_one in enumerate(self.trains) if is_one == trains)
        return reduce(or_, (self.walk.kept_for(i, recomputes=recomputes) for i in of), 0)


class _Gradients:
    """The gradients of a part's tensors while its backward runs; a loss has none of its results."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        made = zip(walk.ops, walk.makes, strict=True)
        self.is_loss = [op.kernel == LOSS_KERNEL and bits > 0 for op, bits in made]
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
