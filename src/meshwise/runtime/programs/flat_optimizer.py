"""torch's optimizers of single numbers, which take those that this rank has of each weight, in a row.

Of whole weights DTensor would ask, for each op of each, how the result is spread; numbers that move alone
have nothing to ask. They may live in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.plan.plan import Plan
from meshwise.runtime.programs.local import local

HOST = torch.device("cpu")


def make_optimizer(plan: Plan, trained: Sequence[Tensor], lr: float) -> FlatOptimizer:
    """That of a plan, of the weights `trained`."""
    kind = torch.optim.SGD if plan.optimizer == "sgd" else torch.optim.AdamW
    return FlatOptimizer(partial(kind, lr=lr, foreach=False), trained, on_host=plan.offload_optimizer > 0)


class FlatOptimizer:
    """The optimizer that `make` makes, of the numbers of `parameters` on this rank.

    Those that are `on_host` are the host's: gradients go there, and new weights come back.
    """

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], parameters: Sequence[Tensor],
        *, on_host: bool = False,
    ) -> None:  # fmt: skip
        self._make, self._parameters, self._on_host = make, parameters, on_host
        self._weights: list[nn.Parameter] = []
        self._optimizer = self._of([])

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What is kept of each weight on the device."""
        return {} if self._on_host else self._optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        """A step of all weights, which may be made on the host."""
        if not self._weights:  # the first forward of FSDP2 may move shards
            self._weights = [nn.Parameter(self._taken(parameter)) for parameter in self._parameters]
            self._optimizer = self._of(self._weights)
        pairs = list(zip(self._parameters, self._weights, strict=True))
        for parameter, weight in pairs:
            if parameter.grad is not None:
                weight.grad = self._taken(parameter.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, weight in pairs if self._on_host else ():
            _flat(parameter).copy_(weight)

    def zero_grad(self) -> None:
        """Let go of the gradients on the device."""
        for parameter in self._parameters:
            parameter.grad = None

    def _taken(self, tensor: Tensor) -> Tensor:
        """This rank's numbers, or a copy of them on the host."""
        return _flat(tensor).to(HOST, copy=True) if self._on_host else _flat(tensor)

    def _of(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self._make([{"params": weights}])  # as torch's optimizers take them where there are none


@torch.no_grad()
def _flat(tensor: Tensor) -> Tensor:
    """This rank's numbers, in a row."""
    return local(tensor).detach().view(-1)
