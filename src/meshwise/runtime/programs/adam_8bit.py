"""AdamW whose moments take a byte each (arXiv 2110.02861), stored as bitsandbytes does it.

The numbers of a shard are cut into blocks, each with the largest of its own as a scale. What remains, at
most 1, becomes the nearest of 256 numbers that lie the denser the closer they are to 0 (dynamic tree
quantisation): of both signs for the first moment, positive for the second. A step computes in fp32, and
rounds what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from meshwise.program.optimizer_states import BLOCK, LEAST

DECADES = 7
"""Powers of ten that the table spans; each holds twice as many numbers as the one below it."""


class Adam8bit(torch.optim.Optimizer):
    """AdamW with torch's defaults."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, self.state[parameter], group)

    def _step(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = number = state.get("step", 0) + 1
        numbers, (beta1, beta2) = grad.float(), group["betas"]
        first = _moved(state, "first", numbers, 1.0 - beta1)
        second = _moved(state, "second", numbers.square(), 1.0 - beta2)
        weight.mul_(1.0 - group["lr"] * group["weight_decay"])
        deviation = (second / (1.0 - beta2**number)).sqrt_().add_(group["eps"])
        weight.addcdiv_(first, deviation, value=-group["lr"] / (1.0 - beta1**number))


def _moved(state: dict[str, Any], name: str, towards: Tensor, share: float) -> Tensor:
    """The moment `name`, moved by this share towards new numbers; what is kept of it is rounded."""
    is_signed, scales = name == "first", f"{name}_scales"
    if name not in state:
        moment = torch.zeros_like(towards)
    elif scales in state:
        moment = widened(state[name], state[scales], is_signed).view_as(towards)
    else:
        moment = state[name]
    state[name] = moment = moment.lerp(towards, share)
    if moment.numel() >= LEAST:
        state[name], state[scales] = narrowed(moment, is_signed)
    return moment


@custom_op("meshwise::narrowed_to_8bit", mutates_args=())
def narrowed(moment: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """The code of each number, and the scale of each block."""
    table = moment.new_tensor(_table(is_signed))
    blocks = _blocks(moment)
    scales = blocks.abs().amax(-1)
    parts = blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(-1)
    codes = torch.bucketize(parts, (table[1:] + table[:-1]) / 2.0)
    return codes.flatten()[: moment.numel()].to(torch.uint8), scales


narrowed.register_fake(
    lambda moment, _: (
        moment.new_empty(moment.numel(), dtype=torch.uint8),
        moment.new_empty(-(-moment.numel() // BLOCK)),
    )
)


@custom_op("meshwise::widened_from_8bit", mutates_args=())
def widened(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """The numbers, in a row."""
    numbers = scales.new_tensor(_table(is_signed))[codes.int()]
    return (_blocks(numbers) * scales.unsqueeze(-1)).flatten()[: len(codes)].clone()


widened.register_fake(lambda codes, scales, _: scales.new_empty(len(codes)))


def _blocks(numbers: Tensor) -> Tensor:
    """[blocks, BLOCK]; the last one filled up with zeros."""
    return F.pad(numbers.flatten(), (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)


@lru_cache
def _table(is_signed: bool) -> tuple[float, ...]:
    """The 256 numbers, from the smallest to the largest, 1."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        number = 2 ** (decade + 1 - is_signed)
        middles = [0.1 + 0.9 * (place + 0.5) / number for place in range(number)]
        scaled = [middle * 10.0 ** (decade + 1 - DECADES) for middle in middles]
        found += [*scaled, *(-one for one in scaled * is_signed)]
    return tuple(sorted(found))
