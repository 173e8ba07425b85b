"""Attention over ranks that share a sequence, as tensors that are nothing but their bytes.

A ring is torch's (torch/distributed/tensor/experimental/_context_parallel): keys and values come
round, blocks are merged in fp32, and gradients of keys and values go round after them. Each rank holds an
early and a late part of the sequence, so a block is half of its keys, or half of its queries. `by_heads`
exchanges heads for tokens before attention and back after it (Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwise.estimate.live_tensors import Graph, Memory, Storage, Tensor

CoreAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
NewStorage = Callable[[float], Storage]


@dataclass(frozen=True, slots=True)
class Ring:
    """A place in a ring: local `heads` and `kv_heads`, and `rows` of heads of all sequences.

    `lse`: bytes of a number of each query; `wide_frac`: of the type in which blocks are merged over that of
    tensors. `gathers`: keys come all at once.
    """

    rank: int
    size: int
    heads: float
    kv_heads: float
    rows: float
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
    return tuple(memory.new(size) for size in sizes[1:] if ring.kv_heads > 1)


def ring_attention(memory: Memory, ring: Ring, result: NewStorage, sizes: Sizes) -> tuple[Storage, Storage]:
    """Attention to one block after the other; `result` makes what a block and an exchange give."""
    out, lse = _merged(memory, ring, result, sizes)
    if ring.has_parts and ring.heads > 1:  # as the projection after it reads it
        ordered = memory.new(out.size)
        out = ordered
    return out, lse


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
        _lse = new(ring.lse * queries) if queries < 1.0 and ring.rows > 1 else None
        _held = keys
        _parts = new(q * queries), new(k * rows), new(v * rows)
        if step:
            assert of_came is not None
            sent = of_came
            _of_pair = (sent,)
        if rows < 1.0:
            _of_pair = new(k * wide), new(v * wide)
        flat = [new(size * wide) for size in (k, v) if not step and ring.kv_heads > 1]
        sent = new((k + v) * wide)
        flat.clear()
        of_came = new((k + v) * wide)
        of_q = of_q if queries == 1.0 else new(q * wide)
    assert of_came is not None
    of_q = new(q) if wide > 1.0 else of_q
    both = new(k + v) if wide > 1.0 else of_came
    return of_q, both, both


def by_heads(
    graph: Graph, ranks: int, attend: CoreAttention, tensors: tuple[Tensor, ...], heads: tuple[float, ...]
) -> Tensor:
    """Of all tokens of a sequence to 1 / `ranks` of the `heads` of queries, keys and values."""
    q, k, v = tensors
    new, repeats = graph.memory.new, max(1.0, ranks // heads[1])
    sizes = [q.size, k.size * repeats, v.size * repeats]
    k, v = (_repeated(graph, each, repeats) for each in (k, v))
    flat = [new(size) for size in sizes[1:]]
    qkv = graph.op(new(sum(sizes)), lambda grad: (grad, grad, grad), q, k, v)
    flat.clear()
    dealt = _dealt(graph, qkv, sizes)
    local = [count * (repeats if place else 1.0) / ranks for place, count in enumerate(heads)]
    parts = [
        _by_head(graph, Tensor(dealt.storage, dealt.origin, place, size), count)
        for place, (size, count) in enumerate(zip(sizes, local, strict=True))
    ]
    mixed = attend(*parts)
    return graph.op(_put_together(new, [mixed.size]), partial(_sent, new, mixed.size), mixed)


def _repeated(graph: Graph, x: Tensor, repeats: float) -> Tensor:
    """Heads as often as there are ranks for each."""
    size = x.size
    return graph.op(
        graph.memory.new(size * repeats), lambda grad: (graph.memory.new(size) if repeats > 1 else grad,), x
    )


def _dealt(graph: Graph, qkv: Tensor, sizes: list[float]) -> Tensor:
    """Heads of all tokens, in three parts of one memory, whose gradients are put together first."""
    new, size = graph.memory.new, qkv.size
    (sent,) = _sent(new, size, None)
    dealt = graph.op(sent, lambda _: (_put_together(new, sizes),), qkv)
    return graph.op(sent, lambda *_: (new(size),), dealt)


def _sent(new: NewStorage, size: float, _: Storage | None) -> tuple[Storage]:
    """By rank, and to each."""
    by_rank = new(size)
    sent = new(size)
    del by_rank
    return (sent,)


def _put_together(new: NewStorage, sizes: list[float]) -> Storage:
    """What came from each rank, part by part in order, and all of it."""
    came = new(sum(sizes))
    parts = [new(size) for size in sizes]
    whole = new(sum(sizes))
    del came, parts
    return whole


def _by_head(graph: Graph, x: Tensor, num_heads: float) -> Tensor:
    """A view, whose gradient is a copy where there are several heads."""
    size = x.size
    found = graph.op(x.storage, lambda grad: (graph.memory.new(size) if num_heads > 1 else grad,), x)
    return Tensor(found.storage, found.origin, 0, size)
