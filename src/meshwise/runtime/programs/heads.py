"""Ulysses: from some tokens of all heads to all tokens of some heads, and back (arXiv 2309.14509)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_to_all

Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v [batch, heads, tokens, width]; k and v may have fewer heads."""


class DealHeads(torch.autograd.Function):
    """All-to-all over an axis: from 1/n of the tokens of some heads to n times the tokens of 1/n of them.

    `sections` are the numbers of heads that are dealt out apart (queries, keys, values); `to_heads` False is
    the way back. Each way is the other's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sections: list[int], to_heads: bool, batch: int, dim: int, along: MeshAxis
    ) -> Tensor:
        """[tokens x batch, heads dim] -> [n tokens x batch, heads dim / n], or back."""
        ctx.to_heads, ctx.rest = to_heads, (sections, batch, dim, along)
        return _dealt(x, to_heads, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """The other way."""
        return _dealt(grad, not ctx.to_heads, *ctx.rest), None, None, None, None, None


def _dealt(x: Tensor, to_heads: bool, sections: list[int], batch: int, dim: int, along: MeshAxis) -> Tensor:
    num = along.size
    if to_heads:
        by_head = x.view(-1, batch, sum(sections), dim).split(sections, dim=2)
        dealt = torch.cat([part.unflatten(2, (num, -1)).movedim(2, 0) for part in by_head], dim=3)
        return all_to_all(dealt, along).reshape(-1, sum(sections) // num * dim)
    by_rank = all_to_all(x.view(num, -1, batch, sum(sections) // num, dim), along)
    parts = by_rank.split([section // num for section in sections], dim=3)
    return torch.cat([part.movedim(0, 2).flatten(2, 3) for part in parts], dim=2).view(
        -1, sum(sections) * dim
    )


def deal_heads(along: MeshAxis, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """From a rank's own tokens of all heads to all tokens of its own; key heads that are fewer than the
    ranks are repeated.
    """
    batch, _, tokens, _ = q.shape
    k, v = (x.repeat_interleave(max(1, along.size // x.shape[1]), dim=1) for x in (k, v))
    sections = [x.shape[1] * x.shape[3] for x in (q, k, v)]
    qkv = torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v)], dim=2).view(tokens * batch, -1)
    dealt = DealHeads.apply(qkv, sections, True, batch, 1, along).unflatten(0, (-1, batch))
    parts = dealt.split([section // along.size for section in sections], dim=2)
    q, k, v = (
        part.unflatten(2, (-1, x.shape[3])).permute(1, 2, 0, 3)
        for part, x in zip(parts, (q, k, v), strict=True)
    )
    return q, k, v


def deal_back(along: MeshAxis, mixed: Tensor) -> Tensor:
    """[batch, all tokens, own heads, width] -> [batch, own tokens, all heads, width]."""
    batch, tokens, heads, width = mixed.shape
    mixed = mixed.transpose(0, 1).reshape(-1, heads * width)
    mixed = DealHeads.apply(mixed, [heads * along.size], False, batch, width, along)
    return mixed.view(tokens // along.size, batch, -1, width).transpose(0, 1).contiguous()
