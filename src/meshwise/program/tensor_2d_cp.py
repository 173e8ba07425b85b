"""One block cut by columns and by sequence: m1 tensor-parallel ranks x m2 context-parallel ones.

The m1 ranks of a row work as in one dimension (`tensor_1d`, with sequence parallelism among them), each
row on its own 1/m2 of the sequence; keys and values are all-gathered over the m2 rows. Weights are cut by
m1 alone: every row holds a copy, and sums its gradients with the others once a step.

Source: the layout `2d-seqp` of ShashankSubramanian/transformer-perf-estimates (arXiv 2410.00273).
"""

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from meshwise.core.units import Num
from meshwise.model.architecture import Model
from meshwise.model.weights import Weight, Weights
from meshwise.program import tensor_1d
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, collected, collective
from meshwise.program.weights_of_ops import num_held


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: those of a row."""
    return tensor_1d.shards(weight, _row(cut))


def attention(model: Model, cut: Cut, x: Tensor) -> Stated:
    """The attention of one row, with the keys and values of all."""
    return (yield from _on_grid(tensor_1d.attention(model, _row(cut), x), cut))


def mlp(model: Model, cut: Cut, x: Tensor, *attended: Tensor) -> Stated:
    """The MLP of one row."""
    return (yield from _on_grid(tensor_1d.mlp(model, _row(cut), x, *attended), cut))


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: what a row shares, as in one dimension; then all weights over the rows."""
    for op in tensor_1d.shared_gradients(weights, _row(cut)):
        yield structs.replace(op, axis=cut.axis(0)["axis"])
    payload = num_held(weights, cut, shards) * cut.precision.act_bytes
    yield collective("block", "shared_gradients", "step", "all_reduce", payload_bytes=payload, **cut.axis(1))


def _row(cut: Cut) -> Cut:
    """The cut of one row in the words of one dimension."""
    return replace(cut, tp=cut.grid[0], ring=cut.grid[1], ulysses=1.0, gather_keys=True)


def _on_grid(stated: Stated, cut: Cut) -> Stated:
    """What is `stated`, its collectives on the axes of the grid: tp is the row, cp the column."""
    axes = {"tp": cut.axis(0), "cp": cut.axis(1)}
    ops: list[Op] = []
    y = collected(stated, ops)
    for op in ops:
        if op.kind != "collective":
            yield op
        elif op.collective != "all_to_all":
            yield structs.replace(op, **axes[op.axis])
    return y
