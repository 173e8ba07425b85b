"""What a plan keeps in host memory: states of the optimizer, and what blocks keep for the backward.

On ranks whose device is the host, copies are made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

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
    """An optimizer of copies in host memory: gradients go there, and new weights come back."""

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], parameters: Sequence[Tensor]
    ) -> None:
        self._parameters = parameters
        self._copies = [nn.Parameter(_on_host(parameter)) for parameter in parameters]
        self._optimizer = make(one_group(self._copies))
        self.state: dict[Tensor, dict[str, Any]] = {}  # none on the device

    def step(self) -> None:
        """A step of the weights on the device, which is made on the host."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.grad = None if parameter.grad is None else _on_host(parameter.grad)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                local(parameter).copy_(copy)

    def zero_grad(self) -> None:
        """Let go of the gradients on the device."""
        for parameter in self._parameters:
            parameter.grad = None


def _on_host(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).to(HOST, copy=True)
