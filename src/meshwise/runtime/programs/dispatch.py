"""All-to-all of tokens to the ranks of their experts, and of answers back, in the activations' type or fp8.

In fp8 (DeepSeek-V3, arXiv 2412.19437, section 3.3) each token goes in e4m3 with an fp32 scale for each
`FP8_TILE` of its elements, numbers and scales in one message, and is widened where it arrives. Tokens to
experts may go so, and in the backward the gradients that follow them; what comes back does not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.program.parts import FP8_TILE
from meshwise.runtime.torch_private import all_to_all_single

NARROW = torch.float8_e4m3fn


def exchange(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Equal parts of the rows to the ranks of `group`."""
    return rows if group is None else all_to_all_single(rows, None, None, group)


class NarrowExchange(torch.autograd.Function):
    """`exchange` in fp8 one way: of the rows (`there`), or else of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None, there: bool) -> Tensor:
        """[rows, hidden] -> [rows received, hidden]."""
        ctx.back = group, not there
        return _exchanged(rows, group, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient goes back, as if nothing had been rounded."""
        return _exchanged(grad, *ctx.back), None, None


def _exchanged(rows: Tensor, group: dist.ProcessGroup | None, is_narrow: bool) -> Tensor:
    if not is_narrow:
        return exchange(rows, group)
    return _widened(exchange(_packed(rows), group), rows.dtype)


def _packed(rows: Tensor) -> Tensor:
    """[rows, hidden] -> bytes [rows, hidden + 4 hidden / FP8_TILE]."""
    tiles = rows.unflatten(-1, (-1, FP8_TILE)).float()
    scales = tiles.abs().amax(-1).clamp(min=1e-12) / torch.finfo(NARROW).max
    numbers = (tiles / scales.unsqueeze(-1)).to(NARROW).flatten(-2)
    return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def _widened(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_packed`."""
    hidden = packed.shape[-1] * FP8_TILE // (FP8_TILE + 4)
    numbers, scales = packed.split([hidden, packed.shape[-1] - hidden], dim=-1)
    tiles = numbers.contiguous().view(NARROW).float().unflatten(-1, (-1, FP8_TILE))
    return (tiles * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)
