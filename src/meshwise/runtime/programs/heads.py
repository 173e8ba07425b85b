"""Ulysses: from some tokens of all heads to all tokens of some heads, and back (arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, swap_parts


def deal(x: Tensor, heads: Sequence[int], batch: int, dim: int, along: MeshAxis, *, to_heads: bool) -> Tensor:
    """All-to-all over n ranks: [tokens x batch, n heads dim] -> [n tokens x batch, heads dim], or back.

    `heads`: of each kind that is dealt out apart (queries, keys, values), those of one rank.
    """
    num = along.size
    if to_heads:
        by_kind = x.view(-1, batch, num * sum(heads), dim).split([num * number for number in heads], dim=2)
        dealt = torch.cat([part.unflatten(2, (num, -1)).movedim(2, 0) for part in by_kind], dim=3)
        return swap_parts(dealt, along.group).reshape(-1, sum(heads) * dim)
    by_rank = swap_parts(x.view(num, -1, batch, sum(heads), dim), along.group)
    parts = [part.movedim(0, 2).flatten(2, 3) for part in by_rank.split(list(heads), dim=3)]
    return torch.cat(parts, dim=2).view(-1, num * sum(heads) * dim)


def deal_heads(along: MeshAxis, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """From a rank's own tokens of all heads [batch, heads, tokens, width] to all tokens of its own heads.

    Key heads that are fewer than the ranks are repeated.
    """
    batch, _, tokens, _ = q.shape
    k, v = (x.repeat_interleave(max(1, along.size // x.shape[1]), dim=1) for x in (k, v))
    widths = [x.shape[1] * x.shape[3] // along.size for x in (q, k, v)]
    qkv = torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in (q, k, v)], dim=2).view(tokens * batch, -1)
    parts = deal(qkv, widths, batch, 1, along, to_heads=True).unflatten(0, (-1, batch)).split(widths, dim=2)
    kinds = zip(parts, (q, k, v), strict=True)
    return tuple(part.unflatten(2, (-1, x.shape[3])).permute(1, 2, 0, 3) for part, x in kinds)


def deal_back(along: MeshAxis, mixed: Tensor) -> Tensor:
    """[batch, all tokens, own heads, width] -> [batch, own tokens, all heads, width]."""
    batch, tokens, heads, width = mixed.shape
    mixed = mixed.transpose(0, 1).reshape(-1, heads * width)
    mixed = deal(mixed, [heads], batch, width, along, to_heads=False)
    return mixed.view(tokens // along.size, batch, -1, width).transpose(0, 1).contiguous()
