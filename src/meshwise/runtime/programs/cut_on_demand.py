"""FSDP2 cuts each weight into one part a rank to take its own; here a part is cut when it is asked for.

In a dry run of a large world, all those views of every weight take longer than the step itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Parts:
    """The parts of `whole` along `dim` as `torch.chunk` cuts them, empty ones behind, each made on demand."""

    def __init__(self, whole: Tensor, number: int, dim: int) -> None:
        self._whole, self._number, self._dim = whole, number, dim

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, place: int) -> Tensor:
        rows = self._whole.shape[self._dim]
        size = -(-rows // self._number)
        begin = min(range(self._number)[place] * size, rows)
        part = self._whole.narrow(self._dim, begin, min(size, rows - begin))
        return part if part.shape[self._dim] else torch.empty_like(part).view(-1)
