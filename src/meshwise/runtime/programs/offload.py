"""What a plan keeps in host memory of what blocks keep for the backward.

On ranks whose device is the host, copies are made all the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwise.runtime.programs.context import Recorder
from meshwise.runtime.programs.flat_optimizer import HOST


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
