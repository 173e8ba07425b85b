"""The optimizers of a plan: torch's, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from meshwise.runtime.programs.adam_8bit import Adam8bit


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer that a plan calls `name` of parameters and a learning rate `lr`."""
    if name == "adam-8bit":
        return Adam8bit
    return partial(torch.optim.SGD if name == "sgd" else torch.optim.AdamW, foreach=False)
