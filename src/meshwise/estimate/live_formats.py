"""Numbers in fp8 or fewer bits, as tensors that are nothing but their bytes: what casts there and back hold.

Operands of a product, in bf16, are cast with a scale for each tensor by way of fp32, and again in the
backward; where their columns become rows they are copied once more. A matrix in few bits is widened for each
product. Inputs of activation functions may be kept in fp8, and tokens go to experts with a scale a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwise.estimate.live_tensors import Memory, Storage
from meshwise.program.parts import FP8_TILE

Operand = tuple[float, bool]
"""Bytes, and whether columns become rows."""


@dataclass(frozen=True, slots=True)
class Products:
    """`is_narrow`: in fp8; `is_packed`: the matrix is kept in few bits. Sizes are bytes."""

    memory: Memory
    is_narrow: bool
    is_packed: bool

    def multiplied(self, x: float, matrix: float, result: Callable[[], Storage]) -> Storage:
        """x W^T, which `result` makes."""
        _wide = self._widened(matrix)
        return self._product((x, False), (matrix, False), result)

    def gradient_of_input(self, grad: float, matrix: float, size: float) -> Storage:
        """dy W, of `size` bytes."""
        _wide = self._widened(matrix)
        return self._product((grad, False), (matrix, True), partial(self.memory.new, size))

    def gradient_of_matrix(self, grad: float, x: float, size: float) -> Storage:
        """dy^T x."""
        return self._product((grad, True), (x, True), partial(self.memory.new, size))

    def _widened(self, matrix: float) -> Storage | None:
        return self.memory.new(matrix) if self.is_packed else None

    def _product(self, left: Operand, right: Operand, result: Callable[[], Storage]) -> Storage:
        _operands = [self._cast(*operand) for operand in (left, right) if self.is_narrow]
        return result()

    def _cast(self, size: float, turns: bool) -> tuple[Storage, Storage]:
        """In fp8, and the scale: the largest number over fp8's largest."""
        new, scale = self.memory.new, self.memory.new(size)
        for size_of_one in (2.0, 4.0, 4.0, 4.0):  # largest, in fp32, not 0, over that of fp8
            scale = new(size_of_one)
        wide = new(2.0 * size)
        scaled = new(2.0 * size)
        del wide
        narrow = new(size / 2.0)
        del scaled
        return (new(size / 2.0) if turns else narrow), scale


def kept_narrow(memory: Memory, size: float, elem_bytes: float) -> Storage:
    """In fp8, cut off at its largest number."""
    _clamped = memory.new(size)
    return memory.new(size / elem_bytes)


def sent_narrow(
    memory: Memory, sent: float, elem_bytes: float, exchange: Callable[[Storage], Storage]
) -> Storage:
    """Tokens in fp8 with a scale a tile, and what comes of their `exchange` in the tokens' type."""
    came = exchange(_packed(memory, sent / elem_bytes, elem_bytes))
    return _widened(memory, came, elem_bytes)


def _packed(memory: Memory, number: float, elem_bytes: float) -> Storage:
    new, scale = memory.new, 4.0 * number / FP8_TILE
    _wide = new(4.0 * number) if elem_bytes != 4.0 else None
    scales = new(4.0 * number)
    for _ in range(3):  # the largest of a tile, not 0, over that of fp8
        scales = new(scale)
    scaled = new(4.0 * number)
    narrow = new(number)
    del scaled
    return new(narrow.size + scales.size)


def _widened(memory: Memory, came: Storage, elem_bytes: float) -> Storage:
    new, number = memory.new, came.size / (1.0 + 4.0 / FP8_TILE)
    narrow = new(number)
    _wide = new(4.0 * number)
    del narrow
    scales = new(4.0 * number / FP8_TILE)
    scaled = new(4.0 * number)
    del scales
    return new(number * elem_bytes) if elem_bytes != 4.0 else scaled
