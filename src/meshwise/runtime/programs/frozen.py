"""QLoRA: frozen matrices kept in few bits, widened each time they are used (arXiv 2305.14314).

Each `FROZEN_GROUP` numbers of a row share an fp32 scale, their largest; the rest of a number becomes the
nearest of those that its format has between -1 and 1: those of e2m1 (fp4), fifteen of equal distance (int4),
or those of e4m3 (fp8). Codes and scales of a row lie behind one another as bytes of one parameter, which
FSDP2 cuts, and gathers, as it is. A tensor-parallel rank packs its own part of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.library import custom_op
from torch.nn import functional as F

from meshwise.core.units import DTYPE_BYTES
from meshwise.program.fsdp2 import FROZEN_GROUP
from meshwise.runtime.programs.narrow import PRODUCTS, CutLinear

LEVELS = {
    "int4": [level / 7.0 for level in range(-7, 8)],
    "fp4": [sign * level / 6.0 for sign in (-1.0, 1.0) for level in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)],
}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed_width(width: int, form: str) -> int:
    """Bytes of a row of so many numbers."""
    return round(width * (DTYPE_BYTES[form] + 4.0 / FROZEN_GROUP))


def unpacked_width(size_bytes: int, form: str) -> int:
    """The inverse of `packed_width`."""
    return round(size_bytes / (DTYPE_BYTES[form] + 4.0 / FROZEN_GROUP))


def wide_shape(parameter: Tensor, form: str) -> tuple[int, ...]:
    """The shape of the matrix of which `parameter` is, or is the packed one."""
    if parameter.is_floating_point():
        return tuple(parameter.shape)
    return *parameter.shape[:-1], unpacked_width(parameter.shape[-1], form)


def pack(wide: Tensor, form: str) -> Tensor:
    """[..., width] -> bytes [..., packed width]; of a distributed matrix each rank's part by itself."""
    if not isinstance(wide, DTensor):
        return packed(wide, form)
    mesh, placements = wide.device_mesh, wide.placements
    return DTensor.from_local(packed(wide.to_local(), form), mesh, placements, run_check=False)


@custom_op("meshwise::packed", mutates_args=())
def packed(wide: Tensor, form: str) -> Tensor:
    """`pack` of a plain tensor."""
    groups = wide.unflatten(-1, (-1, FROZEN_GROUP)).float()
    scales = groups.abs().amax(-1)
    parts = groups / scales.clamp(min=1e-30).unsqueeze(-1)
    if form == "fp8":
        codes = (parts * LARGEST).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    else:
        levels = parts.new_tensor(LEVELS[form])
        halves = (parts.unsqueeze(-1) - levels).abs().argmin(-1).to(torch.uint8).flatten(-2)
        codes = halves[..., ::2] << 4 | halves[..., 1::2]
    return torch.cat([codes, scales.view(torch.uint8)], dim=-1)


@packed.register_fake
def _(wide: Tensor, form: str) -> Tensor:
    return wide.new_empty(*wide.shape[:-1], packed_width(wide.shape[-1], form), dtype=torch.uint8)


@custom_op("meshwise::widened", mutates_args=())
def widened(kept: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """The inverse of `packed`, but for what was rounded."""
    width = unpacked_width(kept.shape[-1], form)
    size = int(width * DTYPE_BYTES[form])
    codes, scales = kept.split([size, kept.shape[-1] - size], dim=-1)
    if form == "fp8":
        parts = codes.contiguous().view(torch.float8_e4m3fn).float() / LARGEST
    else:
        halves = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)
        parts = torch.tensor(LEVELS[form], device=kept.device)[halves.int()]
    groups = parts.unflatten(-1, (-1, FROZEN_GROUP)) * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return groups.flatten(-2).to(dtype)


@widened.register_fake
def _(kept: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    return kept.new_empty(*kept.shape[:-1], unpacked_width(kept.shape[-1], form), dtype=dtype)


def packed_like(parameter: Tensor, form: str) -> nn.Parameter:
    """A parameter for `parameter` in few bits, its bytes not set."""
    shape = (*parameter.shape[:-1], packed_width(parameter.shape[-1], form))
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


class Multiply(torch.autograd.Function):
    """A product with a frozen matrix (or a stack of them), of which only the packed one is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, form: str, kind: str) -> Tensor:
        """`kind`: one of `KINDS`."""
        ctx.save_for_backward(kept)
        ctx.form, (product, ctx.gradient) = form, KINDS[kind]
        return product(x, widened(kept, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """With the matrix widened once more."""
        (kept,) = ctx.saved_tensors
        return ctx.gradient(grad, widened(kept, ctx.form, grad.dtype)), None, None, None


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "": (F.linear, torch.matmul),
    **PRODUCTS,
    "stack": (torch.bmm, lambda grad, stack: torch.bmm(grad, stack.transpose(1, 2))),
}
"""Products with a matrix, in the type of x or a narrow one, or with a stack; and the gradient of x."""


class FrozenLinear(CutLinear):
    """x W^T + b, its matrix kept in few bits; `narrow`: the type of the product, where it has its own."""

    def __init__(self, layer: nn.Linear, form: str, *, narrow: str) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.form, self.narrow = packed_like(layer.weight, form), form, narrow

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""
        return Multiply.apply(x, weight, self.form, self.narrow)
