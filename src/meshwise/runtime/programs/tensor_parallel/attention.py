"""Fused attention on the tokens and heads of one rank, its keys and values gathered over the sequence.

A rank has projected queries, keys and values of its own tokens: qkv [tokens x batch, (heads + 2 kv_heads)
d], tokens outermost. Keys and values of the other ranks are all-gathered when they are needed, forward and
backward; what is kept are the own ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwise.runtime.programs.attention_kernels import attention, attention_backward
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, gather, scatter
from meshwise.runtime.programs.tensor_parallel.spans import Spans, chunk_order, flat, rank_spans

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Recorder


@dataclass(frozen=True, slots=True, eq=False)
class CutSequence:
    """A sequence of `seq` tokens cut over the ranks of an axis (None: not cut)."""

    seq: int
    is_causal: bool
    along: MeshAxis | None = None

    @property
    def mine(self) -> Spans:
        """This rank's tokens."""
        num_ranks, rank = (self.along.size, self.along.index) if self.along else (1, 0)
        return rank_spans(self.seq, num_ranks, rank, is_causal=self.is_causal)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All tokens in order, from this rank's along `dim`."""
        if self.along is None or self.along.size == 1:
            return x
        order = chunk_order(self.along.size, is_causal=self.is_causal)
        chunks = gather(x, self.along, dim).chunk(len(order), dim)
        return torch.cat([chunks[order.index(place)] for place in range(len(order))], dim)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of the sum over all ranks of `x`, all tokens in order."""
        if self.along is None or self.along.size == 1:
            return x
        order = chunk_order(self.along.size, is_causal=self.is_causal)
        chunks = x.chunk(len(order), dim)
        return scatter(torch.cat([chunks[chunk] for chunk in order], dim), self.along, dim)


@dataclass(frozen=True, slots=True, eq=False)
class LocalHeads:
    """The attention of one rank: so many of its heads, of so many sequences, over a `sequence`."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    sequence: CutSequence
    recorder: Recorder


class FusedAttention(torch.autograd.Function):
    """Fused attention of the rank's queries to all keys; keeps qkv, the output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, on: LocalHeads) -> Tensor:
        """Queries stay views into qkv; keys and values are gathered together."""
        query, keys_values = _views(qkv, on)
        with on.recorder.op("keys_values"):
            key, value = on.sequence.gather(keys_values, 0).permute(1, 2, 0, 3).chunk(2, 1)
        with on.recorder.op("flash"):
            spans = flat(on.sequence.mine)
            out, lse = attention(query, key, value, spans, on.sequence.is_causal)
        result = out.permute(2, 0, 1, 3).view(qkv.shape[0], -1)
        ctx.on = on
        ctx.save_for_backward(qkv, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gathers keys and values again, and returns their gradients to the ranks that hold them."""
        on, (qkv, result, lse) = ctx.on, ctx.saved_tensors
        query, keys_values = _views(qkv, on)
        with on.recorder.op("keys_values"):
            key, value = on.sequence.gather(keys_values, 0).permute(1, 2, 0, 3).chunk(2, 1)
        with on.recorder.op("flash"):
            out, grad = (
                x.view(-1, on.batch, on.heads, on.head_dim).permute(1, 2, 0, 3) for x in (result, grad)
            )
            dq, dk, dv = attention_backward(
                grad, query, key, value, out, lse, flat(on.sequence.mine), on.sequence.is_causal
            )
        with on.recorder.op("keys_values"):
            d_keys_values = on.sequence.scatter(torch.cat([dk, dv], dim=1).permute(2, 0, 1, 3), 0)
        return torch.cat([dq.permute(2, 0, 1, 3), d_keys_values], dim=2).view_as(qkv), None


def _views(qkv: Tensor, on: LocalHeads) -> tuple[Tensor, Tensor]:
    """Queries [batch, heads, tokens, d], and keys with values [tokens, batch, 2 kv_heads, d]."""
    by_head = qkv.view(-1, on.batch, on.heads + 2 * on.kv_heads, on.head_dim)
    query, keys_values = by_head.split([on.heads, 2 * on.kv_heads], dim=2)
    return query.permute(1, 2, 0, 3), keys_values
