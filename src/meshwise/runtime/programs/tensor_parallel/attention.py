"""Core attention on the tokens and heads of one rank, its keys and values gathered over the sequence.

A rank has projected queries, keys and values of its own tokens: qkv [tokens x batch, (heads + 2 kv_heads)
d], tokens outermost. Keys and values of the other ranks are all-gathered when they are needed, forward and
backward; what is kept are the own ones. Fused attention is one op; separate ops write the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwise.runtime.programs.attention_kernels import (
    attention,
    attention_backward,
    divide_rows_,
    exponentials_,
    row_products,
    scale_and_mask_,
    scores_backward_,
)
from meshwise.runtime.programs.tensor_parallel.exchange import Axis, all_max, all_sum, gather, scatter
from meshwise.runtime.programs.tensor_parallel.product import OfActivations
from meshwise.runtime.programs.tensor_parallel.spans import Spans, chunk_order, flat, rank_spans

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Recorder


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A sequence of `seq` tokens cut over the ranks of an axis (None: not cut)."""

    seq: int
    is_causal: bool
    along: Axis | None = None

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
class Heads:
    """The attention of one rank: so many of its heads, of so many sequences, over a `sequence`."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    sequence: Sequence
    recorder: Recorder
    dropout_frac: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


def core_attention(qkv: Tensor, on: Heads, *, is_fused: bool) -> Tensor:
    """qkv [tokens x batch, (heads + 2 kv_heads) d] -> [tokens x batch, heads d]."""
    if is_fused:
        return FusedAttention.apply(qkv, on)
    q, k, v = SplitHeads.apply(qkv, on)
    with on.recorder.op("logits"):
        scores = OfActivations.apply(q, k, OverSequence(on, transposed=True))
    rows, columns = flat(on.sequence.mine), [0, on.sequence.seq]
    with on.recorder.op("softmax"):
        probabilities = Softmax.apply(scores, on.head_dim**-0.5, rows, columns, on.sequence.is_causal, None)
    probabilities = drop(probabilities, "dropout_softmax", on.dropout_frac, on.recorder)
    with on.recorder.op("attend"):
        mixed = OfActivations.apply(probabilities, v, OverSequence(on))
        return mixed.view(on.batch, on.heads, -1, on.head_dim).permute(2, 0, 1, 3).reshape(qkv.shape[0], -1)


def drop(x: Tensor, name: str, dropout_frac: float, recorder: Recorder) -> Tensor:
    """Dropout that keeps its mask, one byte an element."""
    if not dropout_frac:
        return x
    with recorder.op(name):
        return torch.native_dropout(x, dropout_frac, True)[0]


# --- fused -------------------------------------------------------------------------------------


class FusedAttention(torch.autograd.Function):
    """Fused attention of the rank's queries to all keys; keeps qkv, the output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, on: Heads) -> Tensor:
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


def _views(qkv: Tensor, on: Heads) -> tuple[Tensor, Tensor]:
    """Queries [batch, heads, tokens, d], and keys with values [tokens, batch, 2 kv_heads, d]."""
    by_head = qkv.view(-1, on.batch, on.heads + 2 * on.kv_heads, on.head_dim)
    query, keys_values = by_head.split([on.heads, 2 * on.kv_heads], dim=2)
    return query.permute(1, 2, 0, 3), keys_values


# --- in separate ops ---------------------------------------------------------------------------


class SplitHeads(torch.autograd.Function):
    """qkv -> q, k, v, each [batch x heads, tokens, d] in memory of its own."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, on: Heads) -> tuple[Tensor, ...]:
        """Copies; keeps nothing."""
        ctx.on = on
        heads = qkv.view(-1, on.batch, on.heads + 2 * on.kv_heads, on.head_dim).permute(1, 2, 0, 3)
        parts = heads.split([on.heads, on.kv_heads, on.kv_heads], dim=1)
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return tuple(copy.view(-1, *copy.shape[2:]) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The way back."""
        heads = torch.cat([grad.unflatten(0, (ctx.on.batch, -1)) for grad in grads], dim=1)
        return heads.permute(2, 0, 1, 3).flatten(2).flatten(0, 1), None


@dataclass(frozen=True, slots=True, eq=False)
class OverSequence:
    """q [batch x heads, tokens, d] times all keys (`transposed`), or probabilities times all values.

    Query heads that share a key head each get a copy of it, for the moment.
    """

    on: Heads
    transposed: bool = False

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """S = q k', or O = P v."""
        right = _all_keys(b, self.on)
        return torch.bmm(a, right.transpose(1, 2) if self.transposed else right)

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq = dS k, dk' = q' dS, or dP = dO v', dv = P' dO; those of the own keys, summed over the ranks."""
        right = _all_keys(b, self.on)
        da = torch.bmm(grad, right if self.transposed else right.transpose(1, 2))
        db = torch.bmm(a.transpose(1, 2), grad)
        shared = _shared(db.transpose(1, 2) if self.transposed else db, self.on)
        return da, self.on.sequence.scatter(shared, 1), grad


def _all_keys(x: Tensor, on: Heads) -> Tensor:
    return on.sequence.gather(x, 1).repeat_interleave(on.group, dim=0)


def _shared(grad: Tensor, on: Heads) -> Tensor:
    """The gradient of a key head: the sum over the query heads that share it."""
    return grad.unflatten(0, (-1, on.group)).sum(1)


class Softmax(torch.autograd.Function):
    """Softmax of `scale` times scores [batch, rows, columns], in place.

    `rows` and `columns` are the tokens (`flat` spans) of queries and keys; the ranks `along` an axis may each
    have a part of the columns.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, scale: float, rows: list[int], columns: list[int], is_causal: bool,
        along: Axis | None,
    ) -> Tensor:  # fmt: skip
        """Maxima, then sums, over all columns. The product before has kept nothing of the scores' memory."""
        scores = scores.detach()
        maxima = scale_and_mask_(scores, scale, rows, columns, is_causal)
        if along is not None:
            all_max(maxima, along)
        sums = exponentials_(scores, maxima)
        if along is not None:
            all_sum(sums, along)
        divide_rows_(scores, sums)
        ctx.scale, ctx.along = scale, along
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """In place of `grad`, which the mix (or its dropout) has just made for this op alone."""
        (probabilities,) = ctx.saved_tensors
        products = row_products(grad, probabilities)
        if ctx.along is not None:
            all_sum(products, ctx.along)
        scores_backward_(grad, probabilities, products, ctx.scale)
        return grad, None, None, None, None, None
