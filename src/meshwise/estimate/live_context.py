"""Attention over ranks that share a sequence, as tensors that are nothing but their bytes.

A ring is torch's (torch/distributed/tensor/experimental/_context_parallel): keys and values come
round, blocks are merged in fp32, and gradients of keys and values go round after them. Each rank holds an
early and a late part of the sequence, so a block is half of its keys, or half of its queries. `deal_heads`
exchanges heads for tokens before attention, and `deal_back` does after it (Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwise.estimate.live_tensors import Graph, Memory, Slice, Storage, Tensor

NewStorage = Callable[[float], Storage]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of `queries` and of `keys` that a rank attends with, of `sequences` at a time.

    `ranks`: how many dealt them out (`deal_heads`); those of keys were repeated before, `repeats` times.
    """

    queries: float
    keys: float
    sequences: float
    ranks: int
    repeats: float

    @property
    def is_dealt(self) -> bool:
        """Whether they lie token by token, in parts of a wider tensor, not sequence by sequence."""
        return self.ranks > 1

    @property
    def is_mixed(self) -> bool:
        """Whether tokens of several sequences lie beside each other."""
        return self.is_dealt and self.sequences > 1


@dataclass(frozen=True, slots=True)
class Order:
    """Which of the gradients of `q`, `k` and `v`, and of results (`mixed`), of attention lie head by head.

    They are copied, token by token.
    """

    q: bool
    k: bool
    v: bool
    mixed: bool


@dataclass(frozen=True, slots=True)
class Ring:
    """A place in a ring.

    `lse`: bytes of a number of each query; `wide_frac`: of the type in which blocks are merged over that of
    tensors. `gathers`: keys come all at once.
    """

    rank: int
    size: int
    heads: Heads
    lse: float
    wide_frac: float
    gathers: bool

    @property
    def has_parts(self) -> bool:
        """Whether some block is of half of the queries."""
        return self.rank < self.size - 1


Sizes = tuple[float, float, float]


def _in_one_piece(memory: Memory, ring: Ring, sizes: Sizes) -> tuple[Storage, ...]:
    """Keys and values; of several heads they lie token by token, and are copied."""
    is_apart = ring.heads.keys > 1 or ring.heads.is_dealt
    return tuple(memory.new(size) for size in sizes[1:] if is_apart)


def ring_attention(memory: Memory, ring: Ring, result: NewStorage, sizes: Sizes) -> tuple[Storage, Storage]:
    """Attention to one block after the other; `result` makes what a block and an exchange give."""
    out, lse = _merged(memory, ring, result, sizes)
    is_copied = ring.heads.queries > 1 if ring.has_parts else ring.heads.is_mixed
    return memory.new(out.size) if is_copied else out, lse  # as the projection behind it reads it


def _merged(memory: Memory, ring: Ring, result: NewStorage, sizes: Sizes) -> tuple[Storage, Storage]:
    new, (q, k, v) = memory.new, sizes
    merged = _Merged(memory)
    keys: object = _in_one_piece(memory, ring, sizes)
    came = gathered = out = lse = None
    for step in range(ring.size):
        if step:
            keys = gathered if ring.gathers else came
        if step < ring.size - 1:
            both = new(k + v)
            if not ring.gathers:
                came = result(k + v)
            gathered = gathered or (new((k + v) * ring.size) if ring.gathers else None)
            del both
        _held = keys
        part = 0.5 if step > ring.rank else 1.0
        out, lse = result(q * v / k * part), result(ring.lse * part)
        merged.take(new(out.size * ring.wide_frac) if ring.wide_frac > 1.0 else out, lse, part)
    assert merged.out is not None
    assert merged.lse is not None
    return new(q * v / k) if ring.wide_frac > 1.0 else merged.out, merged.lse


class _Merged:
    """Output and log-sum-exp of the blocks so far."""

    def __init__(self, memory: Memory) -> None:
        self.new = memory.new
        self.out: Storage | None = None
        self.lse: Storage | None = None

    def take(self, block: Storage, block_lse: Storage, part: float) -> None:
        """One more; where it is a `part` of the queries, the result is put together again."""
        if self.out is None:
            self.out, self.lse = block, block_lse
            return
        out, lse = self._weighed(block.size, block_lse.size), self._logarithm(block_lse.size)
        self.lse = lse if part == 1.0 else self.new(lse.size / part)
        self.out = out if part == 1.0 else self.new(out.size / part)

    def _weighed(self, size: float, lse: float) -> Storage:
        share = self._share(lse)
        gap = self.new(size)
        product = self.new(size)
        del share, gap
        found = self.new(size)
        del product
        return found

    def _share(self, lse: float) -> Storage:
        difference = self.new(lse)
        share = self.new(lse)
        del difference
        return share

    def _logarithm(self, lse: float) -> Storage:
        difference = self.new(lse)
        found, buffer = self.new(lse), self.new(lse)
        del difference, buffer
        summed = self.new(lse)
        del found
        return summed


def ring_gradients(memory: Memory, ring: Ring, sizes: Sizes) -> tuple[Storage, ...]:
    """Those of keys and values lie in one piece."""
    new, (q, k, v), wide = memory.new, sizes, ring.wide_frac
    num_rows = ring.heads.queries * ring.heads.sequences
    of_q = new(q * wide)
    _of_pair: tuple[Storage, ...] = (new(k * wide), new(v * wide))
    keys: object = _in_one_piece(memory, ring, sizes)
    came = gathered = sent = of_came = None
    for step in range(ring.size):
        if step:
            keys = gathered if ring.gathers else came
        if step < ring.size - 1:
            _both = new(k + v)
            if not ring.gathers:
                came = new(k + v)
            gathered = gathered or (new((k + v) * ring.size) if ring.gathers else None)
        queries, rows = 0.5 if step > ring.rank else 1.0, 0.5 if 0 < step <= ring.rank else 1.0
        _lse = new(ring.lse * queries) if queries < 1.0 and num_rows > 1 else None
        _held = keys
        _parts = new(q * queries), new(k * rows), new(v * rows)
        if step:
            assert of_came is not None
            sent = of_came
            _of_pair = (sent,)
        if rows < 1.0:
            _of_pair = new(k * wide), new(v * wide)
        is_apart = ring.heads.keys > 1 or ring.heads.is_mixed
        flat = [new(size * wide) for size in (k, v) if not step and is_apart]
        sent = new((k + v) * wide)
        flat.clear()
        of_came = new((k + v) * wide)
        of_q = of_q if queries == 1.0 else new(q * wide)
    assert of_came is not None
    of_q = new(q) if wide > 1.0 else of_q
    both = new(k + v) if wide > 1.0 else of_came
    return of_q, both, both


def deal_heads(
    graph: Graph, heads: Heads, order: Order, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """From some tokens of all heads to all tokens of a sequence of some heads."""
    new = graph.memory.new
    sizes = [q.size, k.size * heads.repeats, v.size * heads.repeats]
    k, v = (repeated(graph, each, heads.repeats) for each in (k, v))
    flat = [new(size) for size in sizes[1:]]
    qkv = graph.op(new(sum(sizes)), lambda grad: (grad, grad, grad), q, k, v)
    flat.clear()
    dealt = _dealt(graph, qkv, sizes)
    return tuple(
        _by_head(graph, Tensor(Slice(dealt.storage, size), dealt.origin, place), is_copied=is_copied)
        for place, (size, is_copied) in enumerate(zip(sizes, (order.q, order.k, order.v), strict=True))
    )


def deal_back(graph: Graph, heads: Heads, order: Order, mixed: Tensor) -> Tensor:
    """From all tokens of a sequence of some heads to some tokens of all heads."""
    mixed = token_by_token(graph, mixed, is_copied=order.mixed)
    new, size = graph.memory.new, mixed.size
    parts = [size] if heads.queries > 1 else []
    mixed = graph.op(_put_together(new, size, parts), partial(_sent, new, size), mixed)
    return graph.op(new(size), lambda _: (new(size),), mixed) if heads.sequences > 1 else mixed


def token_by_token(graph: Graph, mixed: Tensor, *, is_copied: bool) -> Tensor:
    """What attention gives, as the matmul behind it reads it."""
    return copied(graph, mixed) if is_copied else mixed


def copied(graph: Graph, x: Tensor) -> Tensor:
    """In another order, as its gradient may be read."""
    return graph.op(graph.memory.new(x.size), lambda grad: (grad,), x)


def repeated(graph: Graph, x: Tensor, repeats: float) -> Tensor:
    """Heads as often as there are ranks for each."""
    size = x.size
    return graph.op(
        graph.memory.new(size * repeats), lambda grad: (graph.memory.new(size) if repeats > 1 else grad,), x
    )


def _dealt(graph: Graph, qkv: Tensor, sizes: list[float]) -> Tensor:
    """Heads of all tokens, in three parts of one memory, whose gradients are put together first."""
    new, size = graph.memory.new, qkv.size
    (sent,) = _sent(new, size, None)
    dealt = graph.op(sent, lambda _: (_put_together(new, size, sizes),), qkv)
    return graph.op(sent, lambda *_: (new(size),), dealt)


def _sent(new: NewStorage, size: float, _: Storage | None) -> tuple[Storage]:
    """By rank, and to each."""
    by_rank = new(size)
    sent = new(size)
    del by_rank
    return (sent,)


def _put_together(new: NewStorage, size: float, sizes: list[float]) -> Storage:
    """What came from each rank, copies of parts in order, and all of it."""
    came = new(size)
    parts = [new(size) for size in sizes]
    whole = new(size)
    del came, parts
    return whole


def _by_head(graph: Graph, x: Tensor, *, is_copied: bool) -> Tensor:
    """A view, whose gradient may lie in another order."""
    size = x.size
    return graph.op(x.storage, lambda grad: (graph.memory.new(size) if is_copied else grad,), x)
