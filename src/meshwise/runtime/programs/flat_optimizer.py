"""torch's optimizers of single numbers, which take those that this rank has of each weight, in a row.

Of whole weights DTensor would ask, for each op of each, how the result is spread; numbers that move alone
have nothing to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.plan.plan import Plan
from meshwise.runtime.programs.local import local


class FlatOptimizer:
    """AdamW or SGD, as the plan has it, of this rank's numbers of the weights `trained`."""

    def __init__(self, plan: Plan, trained: Sequence[Tensor], lr: float) -> None:
        self._plan, self._trained, self._lr = plan, trained, lr
        self._weights: list[nn.Parameter] = []
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """A step of all weights."""
        if not self._weights:  # the first forward of FSDP2 may move shards
            self._weights = [nn.Parameter(_flat(parameter)) for parameter in self._trained]
            kind = torch.optim.SGD if self._plan.optimizer == "sgd" else torch.optim.AdamW
            self._optimizer = kind([{"params": self._weights}], lr=self._lr, foreach=False)
            self.state = self._optimizer.state
        for parameter, weight in zip(self._trained, self._weights, strict=True):
            if parameter.grad is not None:
                weight.grad = _flat(parameter.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()


@torch.no_grad()
def _flat(tensor: Tensor) -> Tensor:
    """This rank's numbers, in a row."""
    return local(tensor).detach().view(-1)
