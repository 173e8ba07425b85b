"""Results of attention that are kept where its inputs are computed again: attention itself is not.

The first forward leaves them in a `Results`, from which `Remember`, a node behind the recomputed region,
takes them to keep. Its backward, the first to come, hands them back to the region, which then runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Output and log-sum-exp of attention."""


class Results:
    """Output and log-sum-exp on their way between a recomputed region and what keeps them; empty else."""

    def __init__(self) -> None:
        self._pair: Pair | None = None

    def put(self, pair: Pair) -> Pair:
        """Leave them for the next who takes."""
        self._pair = pair
        return pair

    def take(self) -> Pair | None:
        """What was left, if anything was."""
        pair, self._pair = self._pair, None
        return pair


def known(results: Results | None, compute: Callable[[], Pair]) -> Pair:
    """What is in `results`; where nothing is, what `compute` makes, which is left there."""
    if results is None:
        return compute()
    return results.take() or results.put(compute())


class Remember(torch.autograd.Function):
    """Nothing, forward; keeps what is in `results`, and hands it back before what lies before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, results: Results) -> Tensor:
        """Any shape -> the same."""
        ctx.results = results
        ctx.save_for_backward(*(results.take() or ()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        ctx.results.put(ctx.saved_tensors)
        return grad, None
