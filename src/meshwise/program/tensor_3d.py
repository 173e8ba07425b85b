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

Attention: heads/q heads of the tokens (i, l) become heads/q^2 heads of the tokens i by an all-to-all over l
(Ulysses), and keys and values are all-gathered over i.
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
from meshwise.program.grid import of_heads
from meshwise.program.op import Op, collective, kernel
from meshwise.program.tensor import made
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


def _linear(
    axes: tuple[int, int, int], module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool,
    kept: bool = True,
) -> Iterator[Op]:  # fmt: skip
    """Y = X W + b of gathered blocks, forward and backward.

    The bias is added in the product, by the first rank of the axis that scatters Y. Of the backward's
    exchanges, X's gather and dX's scatter run beside a product that does not need them.
    """
    assert kept  # an all-to-all lies between the mixed values and what the output projection reads
    prec = cut.precision
    over_a, over_b, over_c = (cut.grid[dim] for dim in axes)
    m, n, k = cut.tokens / over_b, d_out / over_a, d_in / over_c
    sizes = [size * prec.act_bytes for size in (m * k, k * n, m * n)]
    a, b, c = ({"payload_bytes": size, **cut.axis(dim)} for size, dim in zip(sizes, axes, strict=True))
    own = (made(module, f"{name}_input", (m / over_a, k), prec.act_dtype),)

    def exchange(phase: str, kind: str, of: dict[str, Any], behind: str = "") -> Op:
        return collective(module, name, phase, kind, hides_behind=behind, **of)

    def multiply(phase: str, m: Num, n: Num, k: Num, **fields: Any) -> Op:
        cost = matmul(m, n, k, elem_bytes=prec.operand_bytes, out_bytes=prec.act_bytes)
        common: dict[str, Any] = {"module": module, "name": name, "phase": phase, "kind": "matmul"}
        return Op(shape=(1.0, m, n, k), cost=cost, dtype=prec.dtype, **common, **fields)

    yield exchange("forward", "all_gather", a)
    yield exchange("forward", "all_gather", b)
    yield multiply("forward", m, n, k, reads=own, keeps=own)
    yield exchange("forward", "reduce_scatter", c)
    yield exchange("backward", "all_gather", c)
    yield exchange("backward", "all_gather", b)
    yield exchange("backward", "all_gather", a, behind=name)
    yield multiply("backward", m, k, n)
    yield exchange("backward", "reduce_scatter", a, behind=name)
    yield multiply("backward", k, n, m, is_weight_grad=True)
    yield exchange("backward", "reduce_scatter", b)
    if bias:
        yield kernel(module, f"{name}_bias", "add_bias", m, n, prec, phase="backward")


# --- core attention ----------------------------------------------------------------------------


def _attend(model: Model, cut: Cut) -> Iterator[Op]:
    """heads/q by projection, 1/q of those by all-to-all over the columns, keys gathered over the depth."""
    col, row, depth = cut.grid
    inner = replace(cut, tp=row, ulysses=col, ring=depth, gather_keys=True)
    axes = {"all_to_all": cut.axis(COL), "all_gather": cut.axis(DEPTH), "reduce_scatter": cut.axis(DEPTH)}
    heads = of_heads(model, inner, model.num_kv_heads / row)
    for op in core_attention(model, inner, heads, model.head_dim, model.head_dim, model.num_kv_heads / row):
        yield structs.replace(op, **axes[op.collective]) if op.kind == "collective" else op


PRODUCTS = grid.Products(
    partial(_linear, FIRST), partial(_linear, SECOND),
    lambda cut: (cut.tokens / (cut.grid[DEPTH] * cut.grid[COL]), cut.grid[ROW]),
    _attend, keeps_mixed=False,
)  # fmt: skip
attention, mlp = partial(grid.attention, by=PRODUCTS), partial(grid.mlp, by=PRODUCTS)
