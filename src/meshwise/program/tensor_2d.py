"""One block under two-dimensional tensor parallelism: SUMMA on a grid of c columns x r rows.

Every matrix is cut both ways. A rank holds the activations of T/r tokens in h/c of their width, and of a
weight [K, N] the block [K/r, N/c]. Three products of such blocks, each an outer loop over panels, serve
each other's gradients (SUMMA: van de Geijn and Watts 1997; as in Optimus, arXiv 2104.05343):

    ab   C = A B    broadcast panels of A's columns in the row, of B's rows in the column; add up C
    abt  C = A B'   broadcast panels of B's rows in the column; reduce panels of C's columns in the row
    atb  C = A' B   broadcast panels of A's columns in the row; reduce panels of C's rows in the column

Y = X W is ab forward, dX = dY W' is abt, dW = X' dY is atb. There are `panels` x lcm(c, r) panels, so that
one rank owns each in either cut; the first is waited for, the others travel while panels multiply. Norms
see h/c of a token's width and all-reduce its sums over the row. A rank keeps its own blocks alone.

Attention, *heads split*: each rank has heads/c heads of its row's tokens, and all-gathers keys and values
over the column. *Scores split* (`grid_scores`; in two dimensions): each rank has d/c of the width of every
head; the scores are an abt product [T/r, s/c], softmax all-reduces maxima and sums over the row, the mix is
an ab product.

In 2.5 dimensions (Tesseract, arXiv 2105.14500) each of d depths is such a grid with 1/d of the row's tokens:
a rank holds T/(r d) of them. The weights are the same in every depth, so their gradients are all-reduced over
the depth in the backward, and keys and values are gathered over it. More depth means fewer panels of
activations on the wire, and more copies of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import Cost, matmul
from meshwise.model.architecture import Model
from meshwise.model.weights import Weight, Weights
from meshwise.program import grid
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.grid import of_heads, softmax, tokens
from meshwise.program.op import Op, collective, kernel
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import ATTENTION
from meshwise.program.weights_of_ops import num_held


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: matrices both ways, vectors over the columns."""
    return cut.grid[0] * cut.grid[1] if weight.is_matrix else cut.grid[0]


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: norms and biases, held by every rank of a column, sum what their tokens contribute."""
    vectors = tuple(weight for weight in weights if not weight.is_matrix)
    payload = num_held(vectors, cut, shards) * cut.precision.act_bytes
    yield collective("block", "shared_gradients", "step", "all_reduce", payload_bytes=payload, **_column(cut))


def num_panels(cut: Cut) -> Num:
    """Panels of one product."""
    columns, rows = (np.asarray(size).astype(np.int64) for size in cut.grid[:2])
    return cut.panels * np.lcm(columns, rows).astype(np.float64)


def _column(cut: Cut) -> dict[str, Any]:
    """The ranks that hold the same columns: all rows, of all depths."""
    axis = cut.axis(1)
    if len(cut.grid) < 3:
        return axis
    return axis | {"axis": "tp_seq", "group_size": cut.grid[1] * cut.grid[2]}


# --- products ----------------------------------------------------------------------------------


def summa(
    form: str, module: str, name: str, phase: str, m: Num, n: Num, k: Num, cut: Cut, *, batch: Num = 1.0,
    keeps: tuple[Tensor, ...] = (), is_weight_grad: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """`batch` products C = A B, A B' or A' B of blocks, panel by panel.

    m, n, k are what the rank multiplies in total: of the dim that the panels run along, all of it.
    """
    panels, prec = num_panels(cut), cut.precision
    m, n, k = {"ab": (m, n, k / panels), "abt": (m, n / panels, k), "atb": (m / panels, n, k)}[form]
    row, column = cut.axis(0), cut.axis(1)
    a, b, c = m * k, k * n, m * n
    moves: dict[str, list[tuple[str, Num, dict[str, Any]]]] = {
        "ab": [("broadcast", a, row), ("broadcast", b, column)],
        "abt": [("broadcast", b, column), ("reduce", c, row)],
        "atb": [("broadcast", a, row), ("reduce", c, column)],
    }
    for kind, size, axis in moves[form]:
        sent: dict[str, Any] = {"payload_bytes": batch * size * prec.act_bytes, **axis}
        yield collective(module, name, phase, kind, **sent)
        yield collective(module, name, phase, kind, hides_behind=name, count=panels - 1.0, **sent)
    cost = matmul(m, n, k, elem_bytes=prec.operand_bytes, out_bytes=prec.act_bytes, batch=batch)
    common: dict[str, Any] = {
        "module": module,
        "name": name,
        "phase": phase,
        "kind": "matmul",
        "shape": (batch, m, n, k),
        "dtype": prec.dtype,
        "is_weight_grad": is_weight_grad,
    }
    yield Op(cost=cost, reads=keeps, keeps=keeps, **common)
    added = Cost(0.0, batch * c * prec.act_bytes) if form == "ab" else Cost()  # C is read again and added to
    yield Op(cost=cost + added, count=panels - 1.0, **common)


def linear(
    module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool = False, kept: bool = True
) -> Iterator[Op]:
    """Y = X W + b with X [tokens, d_in] and W [d_in, d_out] cut both ways, forward and backward.

    The bias is added with the first panel. `kept` False: the op before keeps X already. Depths share W, so
    they sum its gradient behind the last panel.
    """
    rows, columns, local_in = tokens(cut), d_out / cut.grid[0], d_in / cut.grid[0]
    own = (made(module, f"{name}_input", (rows, local_in), cut.precision.act_dtype),) * kept
    yield from summa("ab", module, name, "forward", rows, columns, d_in, cut, keeps=own)
    yield from summa("abt", module, name, "backward", rows, d_in, columns, cut)
    yield from summa("atb", module, name, "backward", d_in, columns, rows, cut, is_weight_grad=True)
    if len(cut.grid) > 2:
        payload = d_in / cut.grid[1] * columns * cut.precision.act_bytes
        yield collective(module, name, "backward", "all_reduce", payload_bytes=payload, **cut.axis(2))
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", rows, columns, cut.precision, phase="backward")


# --- core attention ----------------------------------------------------------------------------


def _attend(model: Model, cut: Cut) -> Iterator[Op]:
    return (_scores_split if cut.grid_scores else _heads_split)(model, cut)


def _heads_split(model: Model, cut: Cut) -> Iterator[Op]:
    """heads/c heads a rank: context parallelism over the column, by all-gather of keys and values."""
    column = _column(cut)
    inner = replace(cut, tp=cut.grid[0], ring=column["group_size"], ulysses=1.0, gather_keys=True)
    kv_heads = model.num_kv_heads / cut.grid[0]
    heads = of_heads(model, inner, kv_heads)
    for op in core_attention(model, inner, heads, model.head_dim, model.head_dim, kv_heads):
        if op.kind != "collective":
            yield op
        elif op.collective != "all_to_all":
            yield structs.replace(op, **column)


def _scores_split(model: Model, cut: Cut) -> Iterator[Op]:
    """d/c of every head a rank; queries that share keys are rows of one product."""
    columns = cut.grid[0]
    batch = cut.microbatch * model.num_kv_heads
    num_q = tokens(cut) / cut.microbatch * model.num_heads / model.num_kv_heads
    dim, width = model.head_dim / columns, cut.seq / columns
    num_k = tokens(cut) / cut.microbatch
    sizes = {
        "q": (batch * num_q, dim),
        "k": (batch * num_k, dim),
        "v": (batch * num_k, dim),
        "scores": (batch * num_q, width),
    }
    q, k, v, scores = (made(ATTENTION, name, shape, cut.precision.act_dtype) for name, shape in sizes.items())
    size: dict[str, Any] = {"cut": cut, "batch": batch}

    yield from summa("abt", ATTENTION, "logits", "forward", num_q, cut.seq, dim, keeps=(q, k), **size)
    yield from summa("ab", ATTENTION, "logits", "backward", num_q, dim, cut.seq, **size)
    yield from summa("atb", ATTENTION, "logits", "backward", cut.seq, dim, num_q, **size)
    scores = yield from softmax(scores, cut, model)
    yield from summa(
        "ab", ATTENTION, "attend", "forward", num_q, dim, cut.seq,
        keeps=(scores, v), **size,
    )  # fmt: skip
    yield from summa("abt", ATTENTION, "attend", "backward", num_q, cut.seq, dim, **size)
    yield from summa("atb", ATTENTION, "attend", "backward", cut.seq, dim, num_q, **size)


PRODUCTS = grid.Products(linear, linear, lambda cut: (tokens(cut), cut.grid[0]), _attend, keeps_mixed=True)
attention, mlp = partial(grid.attention, by=PRODUCTS), partial(grid.mlp, by=PRODUCTS)
