"""Small layers beside the large ones of a block (`model.Side`): gates, compressors of keys, further norms.

Each is one matmul, or one norm, of the rank's own tokens. What they read is kept by the layers that they
stand beside, so only their own time and weights are stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import structs

from meshwise.model.architecture import Model, Side
from meshwise.program.cut import Cut
from meshwise.program.op import Op, elementwise
from meshwise.program.tensor import made
from meshwise.program.tensor_1d import plain_linear


def side_ops(model: Model, cut: Cut, sides: Iterable[Side]) -> Iterator[Op]:
    """The ops of `sides`, forward and backward, but for numbers that another op uses."""
    for side in sides:
        if side.op:
            continue
        rows = cut.split_tokens * side.times / side.every
        x = made(
            side.module, f"{side.name}_input", (rows, float(side.d_in or side.d_out)), cut.precision.act_dtype
        )
        ops: Iterator[Op] = (
            plain_linear(side.module, side.name, x, {side.name: float(side.d_out)}, cut, bias=side.bias)
            if side.d_in
            else elementwise(side.module, side.name, model.norm, x, cut.precision)
        )
        for op in ops:
            yield structs.replace(op, keeps=())
