"""Attention with its scores in memory, as tensors that are nothing but their bytes.

A product, a softmax in its place, and another product, of all heads and sequences at once; keys and values
of fewer heads are repeated, and what lies in another order is copied.
"""

from __future__ import annotations

from meshwise.estimate.live_context import Heads, copied, repeated
from meshwise.estimate.live_tensors import Graph, Storage, Tensor


def attend_unfused(
    graph: Graph, heads: Heads, scores: float, q: Tensor, k: Tensor, v: Tensor, *, is_in_order: bool
) -> Tensor:
    """Keeps what it reads, and `scores` bytes of probabilities. `is_in_order`: all lies head by head."""
    new, size = graph.memory.new, q.size * v.size / k.size
    repeats = heads.queries / heads.keys
    has_several = heads.sequences > 1 and heads.queries > 1
    if repeats > 1:
        k, v = (repeated(graph, each, repeats) for each in (k, v))
        q = copied(graph, q)
    elif has_several and not is_in_order:
        q, k, v = (copied(graph, each) for each in (q, k, v))
    found = _product(graph, scores, q, k)
    found = graph.op(found.storage, lambda grad, _: (grad,), found, saved=(found.storage,))
    mixed = _product(graph, size, found, v)
    if not has_several or heads.is_dealt:
        return mixed
    return graph.op(mixed.storage, lambda _: (new(size),), mixed)


def _product(graph: Graph, size: float, left: Tensor, right: Tensor) -> Tensor:
    """The gradient of the right factor comes first."""
    sizes = left.size, right.size

    def back(*_: Storage) -> tuple[Storage, Storage]:
        of_right = graph.memory.new(sizes[1])
        return graph.memory.new(sizes[0]), of_right

    return graph.op(graph.memory.new(size), back, left, right, saved=(left.storage, right.storage))
