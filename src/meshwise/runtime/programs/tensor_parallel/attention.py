"""Fused attention on the tokens and heads of one rank, its keys and values gathered over the sequence.

A rank has projected queries, keys and values of its own tokens: qkv [tokens x batch, (heads + 2 kv_heads) d],
tokens outermost. Tokens that attend are spans of positions, `((begin, end), ...)`: under a causal mask later
tokens cost more, so a sequence over n ranks is cut in 2n chunks and rank r holds the chunks r and 2n - 1 - r:
all ranks see as many keys. Keys and values of the other ranks are all-gathered when they are needed, forward
and backward; what is kept are the own ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwise.runtime.programs.attention_kernels import attention, attention_backward
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, start_gather, start_scatter
from meshwise.runtime.recorder import OpRecorder

Spans = tuple[tuple[int, int], ...]


def chunk_order(num_ranks: int, *, is_causal: bool) -> list[int]:
    """The chunks of a sequence in the order in which the ranks hold them: 0 3 1 2 for two causal ranks."""
    if not is_causal or num_ranks == 1:
        return list(range(num_ranks))
    return [chunk for rank in range(num_ranks) for chunk in (rank, 2 * num_ranks - 1 - rank)]


@dataclass(frozen=True, slots=True, eq=False)
class LocalHeads:
    """The attention of one rank: so many of its heads, of so many sequences, cut `along` an axis."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    seq: int
    is_causal: bool
    along: MeshAxis
    recorder: OpRecorder

    @property
    def num_tokens(self) -> int:
        """How many they are."""
        return self.seq // self.along.size

    @property
    def spans(self) -> Spans:
        """This rank's tokens."""
        order = chunk_order(self.along.size, is_causal=self.is_causal)
        size = self.seq // len(order)
        mine = np.split(np.array(order), self.along.size)[self.along.index].tolist()
        return tuple((chunk * size, (chunk + 1) * size) for chunk in mine)

    def gathered(self, keys_values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [batch, kv_heads, seq, d], from the own [tokens, batch, 2 kv_heads, d]."""
        with self.recorder.op("keys_values"):
            whole = self._reordered(start_gather(keys_values, self.along)(), back=False)
            key, value = whole.permute(1, 2, 0, 3).chunk(2, 1)
        return key, value

    def scattered(self, dk: Tensor, dv: Tensor) -> Tensor:
        """This rank's tokens of the sum over all ranks of the gradients of all keys and values."""
        with self.recorder.op("keys_values"):
            whole = self._reordered(torch.cat([dk, dv], dim=1).permute(2, 0, 1, 3), back=True)
            return start_scatter(whole, self.along)()

    def _reordered(self, x: Tensor, *, back: bool) -> Tensor:
        """Tokens in the order of the sequence, from that in which the ranks hold them, or `back`."""
        if self.along.size == 1:
            return x
        order = chunk_order(self.along.size, is_causal=self.is_causal)
        chunks = x.chunk(len(order))
        return torch.cat([chunks[place if back else order.index(i)] for i, place in enumerate(order)])


class FusedAttention(torch.autograd.Function):
    """Fused attention of the rank's queries to all keys; keeps qkv, the output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, on: LocalHeads) -> Tensor:
        """Queries stay views into qkv; keys and values are gathered together."""
        query, keys_values = _views(qkv, on)
        key, value = on.gathered(keys_values)
        with on.recorder.op("flash"):
            out, lse = attention(query, key, value, sum(on.spans, ()), on.is_causal)
        result = out.permute(2, 0, 1, 3).view(qkv.shape[0], -1)
        ctx.on = on
        ctx.save_for_backward(qkv, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gathers keys and values again, and returns their gradients to the ranks that hold them."""
        on, (qkv, result, lse) = ctx.on, ctx.saved_tensors
        query, keys_values = _views(qkv, on)
        key, value = on.gathered(keys_values)
        shape, spans = (-1, on.batch, on.heads, on.head_dim), sum(on.spans, ())
        with on.recorder.op("flash"):
            out, grad = (x.view(shape).permute(1, 2, 0, 3) for x in (result, grad))
            dq, dk, dv = attention_backward(grad, query, key, value, out, lse, spans, on.is_causal)
        return torch.cat([dq.permute(2, 0, 1, 3), on.scattered(dk, dv)], dim=2).view_as(qkv), None


def _views(qkv: Tensor, on: LocalHeads) -> tuple[Tensor, Tensor]:
    """Queries [batch, heads, tokens, d], and keys with values [tokens, batch, 2 kv_heads, d]."""
    by_head = qkv.view(-1, on.batch, on.heads + 2 * on.kv_heads, on.head_dim)
    query, keys_values = by_head.split([on.heads, 2 * on.kv_heads], dim=2)
    return query.permute(1, 2, 0, 3), keys_values
