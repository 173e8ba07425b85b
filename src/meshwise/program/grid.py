"""One block on a grid of ranks, where each has its own part of the tokens and of the width of an activation.

Between the pairs of matmuls a rank has 1 / (rows x depth) of the tokens in h / columns of their width; inside
a pair it may have others. A norm sees a part of a token's width and all-reduces its sums over the row.

*Two dimensions*: SUMMA on a grid of c columns x r rows. Every matrix is cut both ways. A rank holds the
activations of T/r tokens in h/c of their width, and of a weight [K, N] the block [K/r, N/c]. Three products
of such blocks, each an outer loop over panels, serve each other's gradients (van de Geijn and Watts 1997; as
in Optimus, arXiv 2104.05343):

    ab   C = A B    broadcast panels of A's columns in the row, of B's rows in the column; add up C
    abt  C = A B'   broadcast panels of B's rows in the column; reduce panels of C's columns in the row
    atb  C = A' B   broadcast panels of A's columns in the row; reduce panels of C's rows in the column

Y = X W is ab forward, dX = dY W' is abt, dW = X' dY is atb. There are `panels` x lcm(c, r) panels, so that
one rank owns each in either cut; the first is waited for, the others travel while panels multiply. A rank
keeps its own blocks alone.

Attention: each rank has heads/c heads of its row's tokens, and all-gathers keys and values over the column.

*2.5 dimensions* (Tesseract, arXiv 2105.14500): each of d depths is such a grid with 1/d of the row's tokens,
so a rank holds T/(r d) of them. The weights are the same in every depth, so their gradients are all-reduced
over the depth in the backward, and keys and values are gathered over it. More depth means fewer panels of
activations on the wire, and more copies of the weights.

*Three dimensions*: a cube of q x q x q ranks (Agarwal et al. 1995; for transformers arXiv 2105.14450). In a
product C = A B rank (i, j, l) - depth, row, column of the cube - multiplies the blocks A_il B_lj. It holds
1/q of each, so it

    all-gathers A_il [T/q, K/q] over j and B_lj [K/q, N/q] over i, multiplies,
    and reduce-scatters the sum C_ij over l,

every tensor T K / q^3 at rest: nothing is held twice but vectors. What it sends falls as p^(-2/3) for p = q^3
ranks. The backward gathers dC, B and A in the same way and scatters dA and dB. A product hands its result on
with the roles of j and l swapped, so the second product of a pair (out_proj after qkv, fc2 after fc1) swaps
them back. In the residual stream, rank (i, j, l) has the tokens (i, j), T/q^2 of them, in h/q of their width;
inside a pair the tokens (i, l). Heads/q heads of the tokens (i, l) become heads/q^2 heads of the tokens i by
an all-to-all over l (Ulysses), and keys and values are all-gathered over i.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import KERNELS, Cost, matmul
from meshwise.model.architecture import Model
from meshwise.model.weights import COLUMNS, Weight, Weights
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Precision, Stated, Tensor, collective, elementwise, kernel, made
from meshwise.program.tensor_1d import ATTENTION, MLP
from meshwise.program.weights_of_ops import num_held

COL, ROW, DEPTH = 0, 1, 2
FIRST, SECOND = (ROW, DEPTH, COL), (COL, DEPTH, ROW)
"""Axes over which a product of a cube gathers A, gathers B, and scatters C: first and second of a pair."""


def is_cube(cut: Cut) -> bool:
    """Whether the layout has three dimensions."""
    return cut.layout == "3d"


def tokens(cut: Cut) -> Num:
    """Tokens of one rank between the pairs."""
    return cut.tokens / math.prod(cut.grid[1:])


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: matrices over a grid or a whole cube, vectors as their columns."""
    if weight.is_matrix:
        return math.prod(cut.grid if is_cube(cut) else cut.grid[:2])
    return cut.grid[ROW if is_cube(cut) and weight.cut == COLUMNS else COL]


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: norms and biases, held by every rank of a column, sum what their tokens contribute.

    In a cube norms are summed over the row axis, then norms and biases over the depth.
    """
    vectors = tuple(weight for weight in weights if not weight.is_matrix)
    sums = [(vectors, _column(cut))]
    if is_cube(cut):
        norms = tuple(weight for weight in vectors if weight.gradient != "whole")
        sums = [(norms, cut.axis(ROW)), (vectors, cut.axis(DEPTH))]
    for summed, axis in sums:
        payload = num_held(summed, cut, shards) * cut.precision.act_bytes
        yield collective("block", "shared_gradients", "step", "all_reduce", payload_bytes=payload, **axis)


def _column(cut: Cut) -> dict[str, Any]:
    """The ranks that hold the same columns: all rows, of all depths."""
    axis = cut.axis(ROW)
    if len(cut.grid) < 3:
        return axis
    return axis | {"axis": "tp_seq", "group_size": cut.grid[ROW] * cut.grid[DEPTH]}


# --- block -------------------------------------------------------------------------------------


def attention(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, projections, core attention, output projection, dropout, residual."""
    width = (model.num_heads + 2.0 * model.num_kv_heads) * model.head_dim
    yield from norm(model, cut, ATTENTION, "norm1", x)
    yield from _linear(ATTENTION, "qkv", model.hidden, width, cut, bias=model.qkv_bias)
    if model.positions == "rotary":
        rows, ranks = _inside(cut)
        turned = (model.num_heads + model.num_kv_heads) * model.head_dim / ranks
        projected = made(ATTENTION, "qkv", (rows, turned), cut.precision.act_dtype)
        yield from elementwise(ATTENTION, "rotary", "rotary", projected, cut.precision)
    yield from _heads_split(model, cut)
    d_in = float(model.num_heads * model.head_dim)
    kept = is_cube(cut) or not cut.flash  # else fused attention keeps it
    yield from _linear(ATTENTION, "out_proj", d_in, model.hidden, cut, SECOND, bias=model.out_bias, kept=kept)
    return (yield from _leave(model, cut, ATTENTION, 1, x))


def mlp(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, fc1, activation, fc2, dropout, residual."""
    if model.num_norms > 1:
        yield from norm(model, cut, MLP, "norm2", x)
    ffn, (rows, ranks) = float(model.ffn_hidden), _inside(cut)
    fc1 = 2.0 * ffn if model.gated else ffn
    yield from _linear(MLP, "fc1", model.hidden, fc1, cut, bias=model.linear_bias)
    names = ("gate", "up") if model.gated else ("up",)
    wide = [made(MLP, name, (rows, ffn / ranks), cut.precision.act_dtype) for name in names]
    yield from elementwise(MLP, model.activation, model.activation, wide, cut.precision)
    yield from _linear(MLP, "fc2", ffn, model.hidden, cut, SECOND, bias=model.linear_bias)
    return (yield from _leave(model, cut, MLP, 2, x))


def _inside(cut: Cut) -> tuple[Num, Num]:
    """Tokens of a rank inside a pair, and over how many ranks their width is cut."""
    if is_cube(cut):
        return cut.tokens / (cut.grid[DEPTH] * cut.grid[COL]), cut.grid[ROW]
    return tokens(cut), cut.grid[COL]


def norm(model: Model, cut: Cut, module: str, name: str, x: Tensor) -> Iterator[Op]:
    """A norm whose rows are spread over the ranks of a row: sums of a token are all-reduced, both ways."""
    payload = KERNELS[model.norm].statistics_bytes(tokens(cut), cut.precision.act_bytes)
    for op in elementwise(module, name, model.norm, x, cut.precision):
        yield op
        yield collective(module, name, op.phase, "all_reduce", payload_bytes=payload, **cut.axis(COL))


def _leave(model: Model, cut: Cut, module: str, number: int, x: Tensor) -> Stated:
    y = made(module, "output", x.shape, x.dtype)
    if model.num_norms == 4:
        yield from norm(model, cut, module, f"post_norm{number}", y)
    if model.dropout_frac:
        y = yield from elementwise(module, "dropout", "dropout", y, cut.precision)
    return (yield from elementwise(module, f"residual{number}", "residual", (y, x), cut.precision))


# --- products ----------------------------------------------------------------------------------


def _linear(
    module: str, name: str, d_in: Num, d_out: Num, cut: Cut, axes: tuple[int, int, int] = FIRST, *,
    bias: bool, kept: bool = True,
) -> Iterator[Op]:  # fmt: skip
    """Y = X W + b of whole widths, both ways; `kept` False: the op before keeps X already."""
    if is_cube(cut):
        return _linear_in_cube(axes, module, name, d_in, d_out, cut, bias=bias)
    return _linear_by_panels(module, name, d_in, d_out, cut, bias=bias, kept=kept)


def _multiplied(
    module: str, name: str, phase: str, m: Num, n: Num, k: Num, prec: Precision, **fields: Any
) -> Op:
    """A product of two blocks that a rank has."""
    return Op(
        module=module, name=name, phase=phase, kind="matmul", shape=(1.0, m, n, k), dtype=prec.dtype,
        cost=matmul(m, n, k, elem_bytes=prec.operand_bytes, out_bytes=prec.act_bytes), **fields,
    )  # fmt: skip


def summa(
    form: str, module: str, name: str, phase: str, m: Num, n: Num, k: Num, cut: Cut, *,
    keeps: tuple[Tensor, ...] = (), is_weight_grad: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """A product C = A B, A B' or A' B of blocks, panel by panel.

    m, n, k are what the rank multiplies in total: of the dim that the panels run along, all of it.
    """
    sizes = (np.asarray(size).astype(np.int64) for size in cut.grid[:2])
    panels, prec = cut.panels * np.lcm(*sizes).astype(np.float64), cut.precision
    m, n, k = {"ab": (m, n, k / panels), "abt": (m, n / panels, k), "atb": (m / panels, n, k)}[form]
    row, column = cut.axis(COL), cut.axis(ROW)
    a, b, c = m * k, k * n, m * n
    moves: dict[str, list[tuple[str, Num, dict[str, Any]]]] = {
        "ab": [("broadcast", a, row), ("broadcast", b, column)],
        "abt": [("broadcast", b, column), ("reduce", c, row)],
        "atb": [("broadcast", a, row), ("reduce", c, column)],
    }
    for kind, size, axis in moves[form]:
        sent: dict[str, Any] = {"payload_bytes": size * prec.act_bytes, **axis}
        yield collective(module, name, phase, kind, **sent)
        yield collective(module, name, phase, kind, hides_behind=name, count=panels - 1.0, **sent)
    first = _multiplied(
        module, name, phase, m, n, k, prec, reads=keeps, keeps=keeps, is_weight_grad=is_weight_grad
    )
    yield first
    added = Cost(0.0, c * prec.act_bytes) if form == "ab" else Cost()  # C is read again and added to
    yield structs.replace(first, cost=first.cost + added, count=panels - 1.0, reads=(), keeps=())


def _linear_by_panels(
    module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool, kept: bool
) -> Iterator[Op]:
    """X [tokens, d_in] and W [d_in, d_out] are cut both ways.

    The bias is added with the first panel. Depths share W, so they sum its gradient behind the last panel.
    """
    rows, columns, local_in = tokens(cut), d_out / cut.grid[COL], d_in / cut.grid[COL]
    own = (made(module, f"{name}_input", (rows, local_in), cut.precision.act_dtype),) * kept
    yield from summa("ab", module, name, "forward", rows, columns, d_in, cut, keeps=own)
    yield from summa("abt", module, name, "backward", rows, d_in, columns, cut)
    yield from summa("atb", module, name, "backward", d_in, columns, rows, cut, is_weight_grad=True)
    if len(cut.grid) > 2:
        payload = d_in / cut.grid[ROW] * columns * cut.precision.act_bytes
        yield collective(module, name, "backward", "all_reduce", payload_bytes=payload, **cut.axis(DEPTH))
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", rows, columns, cut.precision, phase="backward")


def _linear_in_cube(
    axes: tuple[int, int, int], module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool
) -> Iterator[Op]:
    """Blocks are gathered. The bias is added in the product, by the first rank of the axis that scatters Y.

    Of the backward's exchanges, X's gather and dX's scatter run beside a product that does not need them.
    """
    prec = cut.precision
    over_a, over_b, over_c = (cut.grid[dim] for dim in axes)
    m, n, k = cut.tokens / over_b, d_out / over_a, d_in / over_c
    sizes = [size * prec.act_bytes for size in (m * k, k * n, m * n)]
    a, b, c = ({"payload_bytes": size, **cut.axis(dim)} for size, dim in zip(sizes, axes, strict=True))
    own = (made(module, f"{name}_input", (m / over_a, k), prec.act_dtype),)

    def exchange(phase: str, kind: str, of: dict[str, Any], behind: str = "") -> Op:
        return collective(module, name, phase, kind, hides_behind=behind, **of)

    yield exchange("forward", "all_gather", a)
    yield exchange("forward", "all_gather", b)
    yield _multiplied(module, name, "forward", m, n, k, prec, reads=own, keeps=own)
    yield exchange("forward", "reduce_scatter", c)
    yield exchange("backward", "all_gather", c)
    yield exchange("backward", "all_gather", b)
    yield exchange("backward", "all_gather", a, behind=name)
    yield _multiplied(module, name, "backward", m, k, n, prec)
    yield exchange("backward", "reduce_scatter", a, behind=name)
    yield _multiplied(module, name, "backward", k, n, m, prec, is_weight_grad=True)
    yield exchange("backward", "reduce_scatter", b)
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", m, n, prec, phase="backward")


# --- core attention ----------------------------------------------------------------------------


def _heads_split(model: Model, cut: Cut) -> Iterator[Op]:
    """Some heads a rank: context parallelism over the column, by all-gather of keys and values.

    In a cube heads/q by projection, 1/q of those by all-to-all over the columns; keys come over the depth.
    """
    ulysses: Num = 1.0
    heads, ring = cut.grid[COL], _column(cut)
    if is_cube(cut):
        heads, ulysses, ring = cut.grid[ROW], cut.grid[COL], cut.axis(DEPTH)
    axes = {"all_gather": ring, "reduce_scatter": ring}
    axes |= {"all_to_all": cut.axis(COL)} if is_cube(cut) else {}
    inner = replace(cut, tp=heads, ulysses=ulysses, ring=ring["group_size"], gather_keys=True)
    dim, kv_heads = model.head_dim, model.num_kv_heads / heads
    projected = tuple(
        made(ATTENTION, name, (inner.tokens, number * dim), cut.precision.act_dtype)
        for name, number in {"q": model.num_heads / heads, "k": kv_heads, "v": kv_heads}.items()
    )
    for op in core_attention(model, inner, projected, dim, dim, kv_heads):
        if op.kind != "collective":
            yield op
        elif op.collective in axes:
            yield structs.replace(op, **axes[op.collective])
