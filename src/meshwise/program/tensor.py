"""A tensor of one rank: what an op reads, makes or keeps."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from msgspec import Struct

from meshwise.core.units import DTYPE_BYTES, Num

ELEMENT_BYTES = DTYPE_BYTES | {"int64": 8.0, "bool": 1.0, "uint8": 1.0}


class Tensor(Struct, frozen=True, eq=False):
    """`shape` elements of `dtype` on one rank; sizes may be arrays over a grid of plans.

    Two tensors are the same only if they are the same object. Where `is_view` holds (an array over a grid),
    it is not memory of its own but lies in `storage`: what an exchange among one rank makes is what it read.
    It lives from the op that makes it to the last that reads or keeps it (`program.walk`,
    `program.lifetime`); `is_weight`: it is a weight of the model, or part of one.
    """

    name: str
    shape: tuple[Num, ...]
    dtype: str
    storage: Tensor | None = None
    is_view: Any = True
    is_weight: bool = False

    @property
    def elements(self) -> Num:
        """Their number."""
        return prod(self.shape)

    @property
    def bytes(self) -> Num:
        """Of all its elements."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def memory(self) -> Tensor:
        """The tensor in whose memory a view of it lies: itself, unless it is one."""
        return self.storage or self

    def view(self, name: str, *shape: Num) -> Tensor:
        """Some of its elements under another name and shape."""
        return Tensor(name, shape, self.dtype, self.memory, is_weight=self.is_weight)


def bytes_of(tensors: Iterable[Tensor]) -> Num:
    """Of all elements of several tensors."""
    return sum((tensor.bytes for tensor in tensors), 0.0)


def made(module: str, name: str, shape: tuple[Num, ...], dtype: str) -> Tensor:
    """What the op `name` of `module` makes."""
    return Tensor(f"{module}.{name}", shape, dtype)


def exchanged(x: Tensor, name: str, shape: tuple[Num, ...], group_size: Num) -> Tensor:
    """What a collective of `group_size` ranks makes of `x`: among one rank, `x` itself."""
    return Tensor(name, shape, x.dtype, x, group_size == 1)
