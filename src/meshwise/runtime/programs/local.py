"""This rank's part of a tensor that several ranks hold."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def local(x: Tensor) -> Tensor:
    """This rank's part; of a weight that several ranks hold, each finds its own part of the gradient."""
    if not isinstance(x, DTensor):
        return x
    if not any(placement.is_replicate() for placement in x.placements):
        return x.to_local()
    return x.to_local(grad_placements=[Partial()] * len(x.placements))
