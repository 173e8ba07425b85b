"""What a plan keeps in host memory: states of the optimizer, and what blocks keep for the backward.

On ranks whose device is the host, copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.plan.stages import num_on_host
from meshwise.runtime.programs.context import Recorder
from meshwise.runtime.programs.local import local

HOST = torch.device("cpu")


def kept_on_host(recorder: Recorder) -> saved_tensors_hooks:
    """Inside, autograd keeps copies in host memory, but for weights; each comes back when it is used."""

    def pack(tensor: Tensor) -> Any:
        if recorder.is_weight(tensor):
            return tensor
        return tensor.device, tensor.detach().to(HOST, copy=True)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, kept = packed
        return kept.to(device, copy=True)

    return saved_tensors_hooks(pack, unpack)


def one_group(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """`parameters` as torch's optimizers take them where a rank may train none."""
    return [{"params": list(parameters)}]


class HostOptimizer:
    """An optimizer of which `share` is the host's: gradients go there, and new weights come back.

    The share is that of the rank's shards, one after the other as in DeepSpeed's flat partitions, so one of
    them may lie in both places. Optimizers of single numbers only: what they compute does not change.
    """

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], parameters: Sequence[Tensor],
        share: float,
    ) -> None:  # fmt: skip
        flat = [_flat(parameter) for parameter in parameters]
        left = int(num_on_host(share, sum(map(len, flat))))
        self._parameters, self._here, self._there = parameters, [], []
        for weights in flat:
            there, here = weights.tensor_split([left])
            left -= len(there)
            self._there.append(nn.Parameter(there.to(HOST, copy=True)))
            self._here.append(nn.Parameter(here))
        self._optimizers = [make(one_group(pieces)) for pieces in (self._there, self._here)]
        self.state = self._optimizers[1].state  # that of the device

    def step(self) -> None:
        """A step of all weights, of which a part is made on the host."""
        pieces = list(zip(self._parameters, self._there, self._here, strict=True))
        for parameter, there, here in pieces:
            if parameter.grad is not None:
                grad = _flat(parameter.grad)
                there.grad, here.grad = grad[: len(there)].to(HOST, copy=True), grad[len(there) :]
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for parameter, there, _ in pieces:
                _flat(parameter)[: len(there)].copy_(there)

    def zero_grad(self) -> None:
        """Let go of the gradients on the device."""
        for parameter in self._parameters:
            parameter.grad = None


def _flat(tensor: Tensor) -> Tensor:
    """This rank's numbers, in a row."""
    return local(tensor.detach()).view(-1)
