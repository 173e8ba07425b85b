"""The optimizers of a plan: torch's, and those that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwise.plan.plan import Plan
from meshwise.runtime.programs.adam_8bit import Adam8bit
from meshwise.runtime.programs.flat_optimizer import FlatOptimizer
from meshwise.runtime.programs.muon import Muon

Stepping: TypeAlias = FlatOptimizer | Muon


def make_optimizer(plan: Plan, trained: Sequence[Tensor], matrices: Sequence[Any], lr: float) -> Stepping:
    """That of a plan, of the weights `trained`, among them `matrices` between the ends of the model."""
    if plan.optimizer == "muon":
        known = {id(matrix) for matrix in matrices}
        return Muon(matrices, [weight for weight in trained if id(weight) not in known], lr)
    return FlatOptimizer(partial(optimizer_of(plan.optimizer), lr=lr), trained, plan.offload_optimizer)


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What makes the optimizer that a plan calls `name` of parameters and a learning rate `lr`."""
    if name == "adam-8bit":
        return Adam8bit
    return partial(torch.optim.SGD if name == "sgd" else torch.optim.AdamW, foreach=False)
