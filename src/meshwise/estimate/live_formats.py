"""Numbers in fp8 or fewer bits, as tensors that are nothing but their bytes: what casts there and back hold.

Operands of a product, in bf16, are cast with a scale for each tensor by way of fp32, and again in the
backward; where their columns become rows they are copied once more. A matrix in few bits is widened for each
product. Inputs of activation functions may be kept in fp8, and tokens go to experts with a scale a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwise.estimate.live_tensors import Memory, Storage
from meshwise.program.parts import FP8_TILE

FP4_BLOCK = 16.0
"""Numbers of a row that share a scale in NVFP4."""

Operand = tuple[float, float, bool]
"""Rows, columns, and whether columns become rows."""


@dataclass(frozen=True, slots=True)
class Products:
    """In a narrow `form`, fp8 or fp4 (or not); `is_packed`: the matrix is kept in few bits.

    Input, matrix and result take so many bytes: [tokens, d_in], [d_out, d_in] and [tokens, d_out] in bf16.
    """

    memory: Memory
    form: str
    is_packed: bool

    def multiplied(self, x: float, matrix: float, y: float, result: Callable[[], Storage]) -> Storage:
        """x W^T, which `result` makes."""
        tokens, d_in, d_out = _dims(x, matrix, y)
        _wide = self._widened(matrix)
        return self._product((tokens, d_in, False), (d_out, d_in, False), result)

    def gradient_of_input(self, x: float, matrix: float, y: float) -> Storage:
        """dy W."""
        tokens, d_in, d_out = _dims(x, matrix, y)
        _wide = self._widened(matrix)
        return self._product((tokens, d_out, False), (d_in, d_out, True), partial(self.memory.new, x))

    def gradient_of_matrix(self, x: float, matrix: float, y: float) -> Storage:
        """dy^T x."""
        tokens, d_in, d_out = _dims(x, matrix, y)
        return self._product((d_out, tokens, True), (d_in, tokens, True), partial(self.memory.new, matrix))

    def _widened(self, matrix: float) -> Storage | None:
        return self.memory.new(matrix) if self.is_packed else None

    def _product(self, left: Operand, right: Operand, result: Callable[[], Storage]) -> Storage:
        cast = {"": None, "fp8": self._in_fp8, "fp4": self._in_fp4}[self.form]
        _operands = [cast(*operand) for operand in (left, right)] if cast else []
        return result()

    def _in_fp4(self, rows: float, columns: float, _: bool) -> Storage:
        """Two numbers a byte, a scale of a byte each block of a row, and one for all."""
        blocks = rows * math.ceil(columns / FP4_BLOCK)
        return self.memory.new(blocks * (FP4_BLOCK / 2.0 + 1.0) + 4.0)

    def _in_fp8(self, rows: float, columns: float, turns: bool) -> tuple[Storage, Storage]:
        """With a scale: the largest number over fp8's largest."""
        new, number = self.memory.new, rows * columns
        scale = new(2.0 * number)
        for size_of_one in (2.0, 4.0, 4.0, 4.0):  # largest, in fp32, not 0, over that of fp8
            scale = new(size_of_one)
        wide = new(4.0 * number)
        scaled = new(4.0 * number)
        del wide
        narrow = new(number)
        del scaled
        return (new(number) if turns else narrow), scale


def _dims(x: float, matrix: float, y: float) -> tuple[float, float, float]:
    """Tokens, d_in and d_out (of a stack of matrices, which is in no narrow form, they say nothing)."""
    tokens = max(round(math.sqrt(x * y / matrix / 2.0)), 1)
    return float(tokens), x / 2.0 / tokens, y / 2.0 / tokens


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
