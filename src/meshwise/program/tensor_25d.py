"""One block under 2.5-dimensional tensor parallelism: d grids of q x q ranks (Tesseract, arXiv 2105.14500).

Each of the d depths is a SUMMA grid (`tensor_2d`) with 1/d of the tokens: a rank holds T/(q d) tokens in
h/q of their width. The weights are the same in every depth, blocks [K/q, N/q], so their gradients are
all-reduced over the depth in the backward. More depth means fewer panels of activations on the wire, and
more copies of the weights. Keys and values are gathered over the depths too.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.model.architecture import Model
from meshwise.program import tensor_2d
from meshwise.program.cut import Cut
from meshwise.program.op import Op, collective

shards, shared_gradients = tensor_2d.shards, tensor_2d.shared_gradients


def attention(model: Model, cut: Cut) -> Iterator[Op]:
    """The attention of a grid, and the sums of its weights' gradients over the depth."""
    yield from _with_sums(tensor_2d.attention(model, cut), model, cut)


def mlp(model: Model, cut: Cut) -> Iterator[Op]:
    """The MLP of a grid, and the sums of its weights' gradients over the depth."""
    yield from _with_sums(tensor_2d.mlp(model, cut), model, cut)


def _with_sums(ops: Iterator[Op], model: Model, cut: Cut) -> Iterator[Op]:
    """After the last panel of a weight's gradient, its sum over the depth."""
    panels = tensor_2d.num_panels(cut)
    is_first = True
    for op in ops:
        yield op
        if not (op.is_weight_grad and op.kind == "matmul"):
            continue
        if not is_first:
            _, panel_rows, columns, _ = op.shape
            payload = panel_rows * panels / cut.grid[1] * columns * cut.precision.act_bytes
            yield collective(
                op.module, op.name, "backward", "all_reduce", payload_bytes=payload, **cut.axis(2)
            )
        is_first = not is_first
