"""A block on a grid of ranks, where each has its own part of the tokens and of the width of an activation.

The block is the same under SUMMA (`tensor_2d`: two dimensions, or several depths of them) and on a cube
(`tensor_3d`); `Products` are what they do differently. Between the pairs of matmuls a rank has 1 / (rows x
depth) of the tokens in h / columns of their width; inside a pair it may have others. A norm sees a part of a
token's width and all-reduces its sums over the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from meshwise.core.units import Num
from meshwise.cost.op import KERNELS
from meshwise.model.architecture import Model
from meshwise.program.context import score_kernels
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, collective, elementwise
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import ATTENTION, MLP


class GridLinear(Protocol):
    """Y = X W + b of whole widths `d_in` and `d_out`, both ways; `kept` False: X is kept already."""

    def __call__(
        self, module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool, kept: bool = True
    ) -> Iterator[Op]: ...


class Products(NamedTuple):
    """The linear layers into and out of a pair, what lies between, and core attention.

    `inside` gives the tokens of a rank inside a pair, and over how many ranks their width is cut. With
    `keeps_mixed` fused attention keeps what the output projection reads, which then keeps nothing.
    """

    first: GridLinear
    second: GridLinear
    inside: Callable[[Cut], tuple[Num, Num]]
    attend: Callable[[Model, Cut], Iterator[Op]]
    keeps_mixed: bool


def attention(model: Model, cut: Cut, x: Tensor, by: Products) -> Stated:
    """Norm, projections, core attention, output projection, dropout, residual."""
    width = (model.num_heads + 2.0 * model.num_kv_heads) * model.head_dim
    yield from norm(model, cut, ATTENTION, "norm1", x)
    yield from by.first(ATTENTION, "qkv", model.hidden, width, cut, bias=model.qkv_bias)
    if model.positions == "rotary":
        rows, ranks = by.inside(cut)
        turned = (model.num_heads + model.num_kv_heads) * model.head_dim / ranks
        projected = made(ATTENTION, "qkv", (rows, turned), cut.precision.act_dtype)
        yield from elementwise(ATTENTION, "rotary", "rotary", projected, cut.precision)
    yield from by.attend(model, cut)
    d_in = float(model.num_heads * model.head_dim)
    kept = cut.grid_scores or not (cut.flash and by.keeps_mixed)
    yield from by.second(ATTENTION, "out_proj", d_in, model.hidden, cut, bias=model.out_bias, kept=kept)
    return (yield from _leave(model, cut, ATTENTION, 1, x))


def mlp(model: Model, cut: Cut, x: Tensor, by: Products) -> Stated:
    """Norm, fc1, activation, fc2, dropout, residual."""
    if model.num_norms > 1:
        yield from norm(model, cut, MLP, "norm2", x)
    ffn, (rows, ranks) = float(model.ffn_hidden), by.inside(cut)
    fc1 = 2.0 * ffn if model.gated else ffn
    yield from by.first(MLP, "fc1", model.hidden, fc1, cut, bias=model.linear_bias)
    names = ("gate", "up") if model.gated else ("up",)
    wide = [made(MLP, name, (rows, ffn / ranks), cut.precision.act_dtype) for name in names]
    yield from elementwise(MLP, model.activation, model.activation, wide, cut.precision)
    yield from by.second(MLP, "fc2", ffn, model.hidden, cut, bias=model.linear_bias)
    return (yield from _leave(model, cut, MLP, 2, x))


def tokens(cut: Cut) -> Num:
    """Tokens of one rank between the pairs."""
    return cut.tokens / math.prod(cut.grid[1:])


def norm(model: Model, cut: Cut, module: str, name: str, x: Tensor) -> Iterator[Op]:
    """A norm whose rows are spread over the ranks of a row: sums of a token are all-reduced, both ways."""
    payload = KERNELS[model.norm].statistics_bytes(tokens(cut), cut.precision.act_bytes)
    for op in elementwise(module, name, model.norm, x, cut.precision):
        yield op
        yield collective(module, name, op.phase, "all_reduce", payload_bytes=payload, **cut.axis(0))


def _leave(model: Model, cut: Cut, module: str, number: int, x: Tensor) -> Stated:
    y = made(module, "output", x.shape, x.dtype)
    if model.num_norms == 4:
        yield from norm(model, cut, module, f"post_norm{number}", y)
    if model.dropout_frac:
        y = yield from elementwise(module, "dropout", "dropout", y, cut.precision)
    return (yield from elementwise(module, f"residual{number}", "residual", (y, x), cut.precision))


def softmax(scores: Tensor, cut: Cut, model: Model) -> Stated:
    """Softmax, what comes before it, and dropout, of rows of scores that are spread over a row of ranks.

    The forward all-reduces maxima, then sums; the backward the products of probability and gradient.
    """
    prec = cut.precision
    kernels = [(name, name) for name in [*score_kernels(model), "softmax"]]
    if model.dropout_frac:
        kernels.append(("dropout_softmax", "dropout"))
    for name, kind in kernels:
        for op in elementwise(ATTENTION, name, kind, scores, prec):
            yield op
            scores = op.makes[0] if op.makes else scores
            if name == "softmax":
                yield collective(
                    ATTENTION, name, op.phase, "all_reduce", payload_bytes=prec.stat_bytes * scores.shape[0],
                    count=2.0 if op.phase == "forward" else 1.0, **cut.axis(0),
                )  # fmt: skip
    return scores


def of_heads(model: Model, cut: Cut, kv_heads: Num) -> tuple[Tensor, ...]:
    """Queries, keys and values of the heads that `cut` leaves a rank."""
    numbers = {"q": model.num_heads / cut.tp, "k": kv_heads, "v": kv_heads}
    return tuple(
        made(ATTENTION, name, (cut.tokens, number * model.head_dim), cut.precision.act_dtype)
        for name, number in numbers.items()
    )
