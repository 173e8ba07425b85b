"""One block under three-dimensional tensor parallelism: a cube of q x q x q ranks.

A product C = A B of all p = q^3 ranks (Agarwal et al. 1995; for transformers arXiv 2105.14450). Rank
(i, j, l) - depth, row, column of the cube - multiplies the blocks A_il B_lj. It holds 1/q of each, so it

    all-gathers A_il [T/q, K/q] over j and B_lj [K/q, N/q] over i, multiplies,
    and reduce-scatters the sum C_ij over l,

every tensor T K / q^3 at rest: nothing is held twice but vectors. What it sends falls as p^(-2/3). The
backward gathers dC, B and A in the same way and scatters dA and dB. A product hands its result on with the
roles of j and l swapped, so the second product of a pair (out_proj after qkv, fc2 after fc1) swaps them
back. In the residual stream, rank (i, j, l) has the tokens (i, j), T/q^2 of them, in h/q of their width;
inside a pair the tokens (i, l).

Attention, *heads split*: heads/q heads of the tokens (i, l) become heads/q^2 heads of the tokens i by an
all-to-all over l (Ulysses), and keys and values are all-gathered over i. *Scores split* (`grid_scores`):
each rank has d/q of the width of every head. Q gathered over l is the tokens of a depth, K gathered over i
those of a column: the two cover all pairs, and Q K' and P V are products of the cube like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import matmul
from meshwise.model.architecture import Model
from meshwise.model.weights import COLUMNS, Weight, Weights
from meshwise.program import grid
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.grid import of_heads, softmax
from meshwise.program.op import Op, collective, kernel
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import ATTENTION
from meshwise.program.weights_of_ops import num_held

COL, ROW, DEPTH = 0, 1, 2
FIRST, SECOND = (ROW, DEPTH, COL), (COL, DEPTH, ROW)
"""Axes over which a product gathers A, gathers B, and scatters C: first and second of a pair."""


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: matrices over all, vectors like the columns they belong to."""
    if weight.is_matrix:
        return cut.grid[COL] * cut.grid[ROW] * cut.grid[DEPTH]
    return cut.grid[ROW] if weight.cut == COLUMNS else cut.grid[COL]


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: norms summed over the row axis, then norms and biases over the depth."""
    vectors = tuple(weight for weight in weights if not weight.is_matrix)
    norms = tuple(weight for weight in vectors if weight.gradient != "whole")
    for summed, axis in ((norms, ROW), (vectors, DEPTH)):
        payload = num_held(summed, cut, shards) * cut.precision.act_bytes
        yield collective(
            "block", "shared_gradients", "step", "all_reduce", payload_bytes=payload, **cut.axis(axis)
        )


# --- products ----------------------------------------------------------------------------------


def product(
    axes: tuple[int, int, int], module: str, name: str, m: Num, n: Num, k: Num, cut: Cut, *, batch: Num = 1.0,
    transposed: bool = False, keeps: tuple[Tensor, ...] = (), is_weight: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """`batch` products C = A B (or A B', `transposed`) of gathered blocks, forward and backward.

    m, n, k are of the blocks that the rank multiplies. Of the backward's exchanges, A's gather and dA's
    scatter run beside a product that does not need them.
    """
    prec = cut.precision
    a, b, c = (batch * size * prec.act_bytes for size in (m * k, k * n, m * n))
    over_a, over_b, over_c = (cut.axis(dim) for dim in axes)

    def exchange(phase: str, kind: str, payload_bytes: Num, axis: dict[str, Any], behind: str = "") -> Op:
        return collective(module, name, phase, kind, payload_bytes=payload_bytes, hides_behind=behind, **axis)

    def multiply(phase: str, m: Num, n: Num, k: Num, **fields: Any) -> Op:
        cost = matmul(m, n, k, elem_bytes=prec.operand_bytes, out_bytes=prec.act_bytes, batch=batch)
        common: dict[str, Any] = {"module": module, "name": name, "phase": phase, "kind": "matmul"}
        return Op(shape=(batch, m, n, k), cost=cost, dtype=prec.dtype, **common, **fields)

    yield exchange("forward", "all_gather", a, over_a)
    yield exchange("forward", "all_gather", b, over_b)
    yield multiply("forward", m, n, k, reads=keeps, keeps=keeps)
    yield exchange("forward", "reduce_scatter", c, over_c)
    yield exchange("backward", "all_gather", c, over_c)
    yield exchange("backward", "all_gather", b, over_b)
    yield exchange("backward", "all_gather", a, over_a, behind=name)
    yield multiply("backward", m, k, n)
    yield exchange("backward", "reduce_scatter", a, over_a, behind=name)
    dims = (n, k, m) if transposed else (k, n, m)
    yield multiply("backward", *dims, is_weight_grad=is_weight)
    yield exchange("backward", "reduce_scatter", b, over_b)


def _linear(
    axes: tuple[int, int, int], module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool,
    kept: bool = True,
) -> Iterator[Op]:  # fmt: skip
    """Y = X W + b; the bias is added in the product, by the first rank of the axis that scatters Y."""
    assert kept  # an all-to-all lies between the mixed values and what the output projection reads
    over_a, over_b, over_c = (cut.grid[dim] for dim in axes)
    m, n, k = cut.tokens / over_b, d_out / over_a, d_in / over_c
    own = made(module, f"{name}_input", (m / over_a, k), cut.precision.act_dtype)
    yield from product(axes, module, name, m, n, k, cut, keeps=(own,), is_weight=True)
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", m, n, cut.precision, phase="backward")


# --- core attention ----------------------------------------------------------------------------


def _heads_split(model: Model, cut: Cut) -> Iterator[Op]:
    """heads/q by projection, 1/q of those by all-to-all over the columns, keys gathered over the depth."""
    col, row, depth = cut.grid
    inner = replace(cut, tp=row, ulysses=col, ring=depth, gather_keys=True)
    axes = {"all_to_all": cut.axis(COL), "all_gather": cut.axis(DEPTH), "reduce_scatter": cut.axis(DEPTH)}
    heads = of_heads(model, inner, model.num_kv_heads / row)
    for op in core_attention(model, inner, heads, model.head_dim, model.head_dim, model.num_kv_heads / row):
        yield structs.replace(op, **axes[op.collective]) if op.kind == "collective" else op


def _scores_split(model: Model, cut: Cut) -> Iterator[Op]:
    """d/q of every head a rank; queries that share keys are rows of one product."""
    col, row, depth = cut.grid
    batch = cut.microbatch * model.num_kv_heads
    num_q = cut.seq / depth * model.num_heads / model.num_kv_heads
    num_k, dim = cut.seq / col, model.head_dim / row
    of_keys = batch * num_k / depth, dim
    sizes = {
        "q": (batch * num_q / col, dim),
        "k": of_keys,
        "v": of_keys,
        "scores": (batch * num_q / row, num_k),
    }
    q, k, v, scores = (made(ATTENTION, name, shape, cut.precision.act_dtype) for name, shape in sizes.items())

    yield from product(
        SECOND, ATTENTION, "logits", num_q, num_k, dim, cut, batch=batch, transposed=True,
        keeps=(q, k),
    )  # fmt: skip
    scores = yield from softmax(scores, cut, model)
    yield from product(
        FIRST, ATTENTION, "attend", num_q, dim, num_k, cut, batch=batch,
        keeps=(scores, v),
    )  # fmt: skip


PRODUCTS = grid.Products(
    partial(_linear, FIRST), partial(_linear, SECOND),
    lambda cut: (cut.tokens / (cut.grid[DEPTH] * cut.grid[COL]), cut.grid[ROW]),
    _heads_split, _scores_split, False,
)  # fmt: skip
attention, mlp = partial(grid.attention, by=PRODUCTS), partial(grid.mlp, by=PRODUCTS)
