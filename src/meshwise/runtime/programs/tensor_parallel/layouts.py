"""What a rank holds of a block under each layout, and over which axes its products work.

1d, columns x sequence (2d-cp) and 3d are one form, `Gathered` products on a cube: into a pair of matmuls the
tokens are gathered over the rows, out of it their sum is scattered there; columns and depth, of one rank in
one dimension, are gathered and scattered likewise (`program.tensor_1d`, `tensor_2d_cp`, `grid`). 2d and
2.5d multiply by SUMMA on a grid (`program.grid`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import GRID_AXES, Cut
from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.tensor_parallel.attention import FusedAttention, LocalHeads
from meshwise.runtime.programs.tensor_parallel.block import BlockParts, Gathered, Summa, Weights, shapes
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, all_sum, axis, deal


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TensorLayout:
    """One rank's part of a block.

    `between`: rows and columns of x that the rank holds between the matmuls; `shapes`: of its part of each
    weight. `sums`: weights whose gradients are summed once a step, by the beginnings of their names (vectors
    where there is none), and over which axis.
    """

    parts: BlockParts
    heads: LocalHeads
    between: tuple[int, int]
    shapes: Mapping[str, tuple[int, ...]]
    sums: tuple[tuple[str | None, MeshAxis], ...]


def new_layout(context: Context, model: Model, cut: Cut) -> TensorLayout:
    """The rank's part of a block of `model` under `cut`, on groups of `context`."""
    return (_on_grid if cut.layout in ("2d", "2.5d") else _on_cube)(context, model, cut)


def _on_cube(context: Context, model: Model, cut: Cut) -> TensorLayout:
    """The rank has 1 / (rows x depths) of the tokens in 1 / columns of their width.

    Into a pair tokens (i, j) in columns l become tokens (i, l) in columns j; out of it, the other way. Heads
    are cut over rows and, by Ulysses' exchange, columns.
    """
    column = depth = sequence = ALONE
    if cut.layout == "1d":
        row = axis(context.mesh(tp=context.world_size), "tp")
    elif cut.layout == "2d-cp":
        row, sequence, _ = _axes(context, cut)
    else:
        column, row, depth = _axes(context, cut)
        sequence = depth
    heads = _heads(context, model, cut, sequence, row.size * column.size)
    op = context.recorder.op

    def attend(qkv: Tensor) -> Tensor:
        if column.size == 1:
            return FusedAttention.apply(qkv, heads)
        sections = [heads.heads, heads.kv_heads, heads.kv_heads]
        with op("ulysses_qkv"):
            qkv = deal(qkv, sections, heads.batch, heads.head_dim, column, to_heads=True)
        mixed = FusedAttention.apply(qkv, heads)
        with op("ulysses_out"):
            return deal(mixed, sections[:1], heads.batch, heads.head_dim, column, to_heads=False)

    second = row.size * depth.size, column.size
    return TensorLayout(
        parts=BlockParts(
            model=model, recorder=context.recorder, attend=attend, row_axis=column,
            into_pair=Gathered(row, depth, column), out_of_pair=Gathered(column, depth, row),
        ),
        heads=heads,
        between=(heads.num_tokens // row.size * heads.batch, model.hidden // column.size),
        shapes=local_shapes(model, (column.size * depth.size, row.size), second),
        sums=(("norm", row), (None, depth), ("", ALONE if cut.layout == "3d" else sequence)),
    )  # fmt: skip


def _on_grid(context: Context, model: Model, cut: Cut) -> TensorLayout:
    """The rank has 1 / rows of the tokens in 1 / columns of their width.

    With a depth (2.5 dimensions) there are several such grids, which share their weights: 1 / (rows depth).
    """
    row, column, depth = _axes(context, cut)
    sequence = column
    if cut.layout == "2.5d":
        sequence = axis(context.mesh(tp_seq=depth.size * column.size, tp_col=row.size), "tp_seq")
    heads = _heads(context, model, cut, sequence, row.size)
    summa = Summa(row, column, math.lcm(row.size, column.size), depth)
    return TensorLayout(
        parts=BlockParts(
            model=model, recorder=context.recorder, into_pair=summa, out_of_pair=summa, row_axis=row,
            attend=lambda qkv: FusedAttention.apply(qkv, heads),
        ),
        heads=heads,
        between=(heads.num_tokens * heads.batch, model.hidden // row.size),
        shapes=local_shapes(model, (column.size, row.size), (column.size, row.size)),
        sums=((None, sequence),),
    )  # fmt: skip


def _axes(context: Context, cut: Cut) -> list[MeshAxis]:
    """The axes of a grid: the ranks of this one's row, those of its column, and those of its depth."""
    sizes = dict(zip(GRID_AXES, map(int, cut.grid), strict=False))
    mesh = context.mesh(**dict(reversed(sizes.items())))
    return [axis(mesh, name) for name in sizes] + [ALONE] * (3 - len(sizes))


def sum_shared_gradients(on: TensorLayout, weights: Weights) -> None:
    """Once a step: add up the gradients of weights that several ranks hold, one exchange per axis."""
    recorder = on.parts.recorder
    with recorder.section("block"), recorder.op("shared_gradients"), recorder.phase("step"):
        for begin, along in on.sums:
            held = [w for n, w in weights.items() if (w.dim() == 1 if begin is None else n.startswith(begin))]
            grads = [weight.grad for weight in held if weight.grad is not None]
            if along.size == 1 or not grads:
                continue
            total = all_sum(torch.cat([grad.flatten() for grad in grads]), along)
            for grad, summed in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(summed.view_as(grad))


def local_shapes(model: Model, first: tuple[int, int], second: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a rank's part of each weight, where each pair's matrices are cut so many ways.

    Biases are cut as the columns of their matrices, norms as those of x.
    """
    ways = {"qkv": first, "fc1": first}
    return {
        name: tuple(np.floor_divide(shape, ways.get(name.partition(".")[0], second)[-len(shape) :]).tolist())
        for name, shape in shapes(model).items()
    }


def _heads(context: Context, model: Model, cut: Cut, along: MeshAxis, parts: int) -> LocalHeads:
    """1 / `parts` of the heads over a sequence that is cut `along` an axis."""
    return LocalHeads(
        model.num_heads // parts, model.num_kv_heads // parts, model.head_dim, int(cut.microbatch),
        int(cut.seq), model.causal, along, context.recorder,
    )  # fmt: skip
