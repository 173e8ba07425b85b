"""An optimizer of single numbers, which takes those that this rank has of each weight, in a row.

Of whole weights DTensor would ask, for each op of each, how the result is spread; numbers that move alone
have nothing to ask. A share of them may live in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.plan.stages import num_on_host
from meshwise.runtime.programs.local import local

HOST = torch.device("cpu")


class FlatOptimizer:
    """The optimizer that `make` makes, of the numbers of `parameters` on this rank.

    `share` of them are the host's: gradients go there, and new weights come back. The share is that of the
    rank's shards, one after the other as in DeepSpeed's flat partitions, so one may lie in both places.
    """

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], parameters: Sequence[Tensor],
        share: float = 0.0,
    ) -> None:  # fmt: skip
        self._make, self._parameters = make, parameters
        flat = [_flat(parameter) for parameter in parameters]
        left = int(num_on_host(share, sum(map(len, flat))))
        self._there = []
        for weights in flat:
            self._there.append(nn.Parameter(weights[:left].to(HOST, copy=True)))
            left -= len(self._there[-1])
        self._here: list[nn.Parameter] = []
        self._optimizers = [self._of([there for there in self._there if len(there)])]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What is kept of each weight on the device."""
        return self._optimizers[-1].state

    @torch.no_grad()
    def step(self) -> None:
        """A step of all weights, of which a part may be made on the host."""
        if not self._here:  # the first forward of FSDP2 may move shards
            both = zip(self._parameters, self._there, strict=True)
            self._here = [nn.Parameter(_flat(parameter)[len(there) :]) for parameter, there in both]
            self._optimizers.append(self._of(self._here))
        pieces = list(zip(self._parameters, self._there, self._here, strict=True))
        for parameter, there, here in pieces:
            if parameter.grad is not None:
                grad = _flat(parameter.grad)
                here.grad = grad[len(there) :]
                if len(there):
                    there.grad = grad[: len(there)].to(HOST, copy=True)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for parameter, there, _ in pieces:
            if len(there):
                _flat(parameter)[: len(there)].copy_(there)

    def zero_grad(self) -> None:
        """Let go of the gradients on the device."""
        for parameter in self._parameters:
            parameter.grad = None

    def _of(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self._make([{"params": weights}])  # as torch's optimizers take them where there are none


@torch.no_grad()
def _flat(tensor: Tensor) -> Tensor:
    """This rank's numbers, in a row."""
    return local(tensor).detach().view(-1)
