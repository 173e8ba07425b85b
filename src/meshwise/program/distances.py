"""Disentangled attention (DeBERTa, arXiv 2006.03654, section 3.1): scores of content and of distance.

Besides keys of tokens, queries meet keys made of a table of distances, and keys meet queries made of it. The
table is projected in every block. Each query has a score with all rows of the table; the one of its distance
to each key is gathered and added to its score with that key. The library `transformers` writes all of them.
"""

from __future__ import annotations

from meshwise.cost.op import matmul
from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, elementwise
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import ATTENTION, plain_linear


def distance_scores(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Projections of the table, its scores with queries and keys, and what is gathered of them."""
    own, prec, dim = model.distances, cut.precision, float(model.head_dim)
    assert own is not None
    heads, seq = model.num_heads / cut.tp, cut.seq / (cut.ulysses * cut.ring)
    for name in ("distance_k", "distance_q")[: own.num_scores]:
        bias = not own.shared and (model.key_bias or name != "distance_k")
        table = made(ATTENTION, f"{name}_table", (float(own.rows), float(model.hidden)), prec.act_dtype)
        yield from plain_linear(ATTENTION, name, table, {name: heads * dim}, cut, bias=bias)
    batch = cut.microbatch * heads * own.num_scores
    for phase, shape in (
        ("forward", (batch, seq, float(own.rows), dim)),
        ("backward", (batch, seq, dim, float(own.rows))),
        ("backward", (batch, float(own.rows), dim, seq)),
    ):
        yield Op(
            module=ATTENTION, name="distance_scores", phase=phase, kind="matmul", shape=shape,
            cost=matmul(*shape[1:], elem_bytes=prec.act_bytes, batch=batch),
            dtype="bf16" if prec.casts else prec.dtype,
        )  # fmt: skip
    scores = made(ATTENTION, "distance_scores", (batch * seq, cut.seq), prec.act_dtype)
    yield from elementwise(ATTENTION, "distance_gather", "residual", scores, prec)
    return x
