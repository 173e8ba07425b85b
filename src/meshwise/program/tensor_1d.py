"""One block under one-dimensional tensor parallelism (Megatron-LM, arXiv 1909.08053, 2205.05198).

The first matmul of each pair (qkv; fc1) is cut by columns, the second (out_proj; fc2) by rows, so
each pair needs one exchange. With sequence parallelism the activations between the pairs are cut
along the sequence: an all-gather enters each pair, a reduce-scatter leaves it, and the backward
mirrors them; the kept input of a pair is the shard, so the backward gathers it once more. Without
it, an all-reduce leaves each pair, and one of the gradient enters it in the backward.

Local shapes, with t = tp: qkv [tokens, h] x [h, (heads + 2 kv_heads) d / t]; out_proj
[tokens, heads d / t] x [., h]; fc1 [tokens, h] x [h, f / t] (twice f if gated); fc2 [tokens, f / t] x [., h].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.model.architecture import Model
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, collective, elementwise, linear

ATTENTION, MLP = "attention", "mlp"


def attention(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, projections, core attention, output projection, dropout, residual."""
    yield from norm(model, cut, ATTENTION, "norm1")
    if model.mla is None:
        yield from _qkv(model, cut)
    else:
        yield from _latent_qkv(model, cut)
    v_dim = model.mla.v_head_dim if model.mla else model.head_dim
    width = model.num_heads * v_dim / cut.tp
    yield from row_linear(
        ATTENTION, "out_proj", width, model.hidden, cut, bias=model.out_bias, kept=not cut.flash
    )
    yield from _leave(model, cut, ATTENTION, "residual1")


def mlp(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, fc1, activation, fc2, dropout, residual."""
    if model.num_norms > 1:
        yield from norm(model, cut, MLP, "norm2")
    yield from feed_forward(model, cut, MLP, model.ffn_hidden)
    yield from _leave(model, cut, MLP, "residual2")


def shared_gradients(model: Model, cut: Cut) -> Iterator[Op]:
    """Once a step, under sequence parallelism: each rank has its own tokens' part of the norms' gradients."""
    if cut.sequence_parallel:
        payload = norm_params(model) * cut.precision.act_bytes
        yield collective(
            "block", "shared_gradients", "step", "all_reduce", "tp", payload, cut.tp, stride=cut.tp_stride
        )


def norm_params(model: Model) -> float:
    """Weights of the block's two norms."""
    return 2.0 * model.hidden * (2.0 if model.norm == "layernorm" else 1.0)


def bias_params(model: Model) -> tuple[float, float]:
    """Biases of the linear layers that come first in their pair (qkv, fc1), and of the second ones."""
    qkv = (model.num_heads + 2.0 * model.num_kv_heads) * model.head_dim
    fc1 = model.ffn_hidden * (2.0 if model.gated else 1.0)
    first = model.qkv_bias * qkv + model.linear_bias * fc1
    return first, float(model.hidden) * (model.out_bias + model.linear_bias)


def matrix_params(model: Model) -> float:
    """Weights of the block's four matrices."""
    heads = model.num_heads * model.head_dim
    qkv = heads + 2.0 * model.num_kv_heads * model.head_dim
    fc1 = model.ffn_hidden * (2.0 if model.gated else 1.0)
    return float(model.hidden) * (qkv + heads + fc1 + model.ffn_hidden)


def feed_forward(model: Model, cut: Cut, module: str, ffn_hidden: Num) -> Iterator[Op]:
    """fc1, activation, fc2: a pair of matmuls of inner width `ffn_hidden`, cut by tp."""
    width = ffn_hidden / cut.tp
    fc1_width = 2.0 * width if model.gated else width
    bias = model.linear_bias
    yield from column_linear(module, "fc1", model.hidden, fc1_width, cut, bias=bias)
    yield from elementwise(module, model.activation, model.activation, cut.tokens, width, cut.precision)
    yield from row_linear(module, "fc2", width, model.hidden, cut, bias=bias)


def norm(model: Model, cut: Cut, module: str, name: str) -> Iterator[Op]:
    """A norm of the residual stream; its weights are held by every tensor-parallel rank."""
    weights = model.hidden * (2.0 if model.norm == "layernorm" else 1.0)
    yield from elementwise(
        module, name, model.norm, cut.split_tokens, model.hidden, cut.precision, num_params=weights
    )


def _leave(model: Model, cut: Cut, module: str, name: str) -> Iterator[Op]:
    if model.dropout_frac:
        yield from elementwise(module, "dropout", "dropout", cut.split_tokens, model.hidden, cut.precision)
    yield from elementwise(module, name, "residual", cut.split_tokens, model.hidden, cut.precision)


def _qkv(model: Model, cut: Cut) -> Iterator[Op]:
    dim, prec = model.head_dim, cut.precision
    heads = model.num_heads / cut.tp
    kv_heads = np.maximum(model.num_kv_heads / cut.tp, 1.0)  # fewer than tp: each rank holds a copy of one
    yield from column_linear(
        ATTENTION, "qkv", model.hidden, (heads + 2.0 * kv_heads) * dim, cut, bias=model.qkv_bias
    )
    if model.qk_norm:
        yield from elementwise(
            ATTENTION, "qk_norm", model.norm, cut.tokens * (heads + kv_heads), dim, prec, num_params=2.0 * dim
        )
    if model.positions == "rotary":
        yield from elementwise(ATTENTION, "rotary", "rotary", cut.tokens, (heads + kv_heads) * dim, prec)
    yield from core_attention(model, cut, dim, dim, kv_heads)


def _latent_qkv(model: Model, cut: Cut) -> Iterator[Op]:
    """MLA: hidden -> latent on the rank's own tokens; the latent, not the hidden state, is gathered."""
    mla, prec = model.mla, cut.precision
    assert mla is not None
    heads = model.num_heads / cut.tp
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    if mla.q_lora_rank:
        yield from _plain(ATTENTION, "q_down", cut.split_tokens, model.hidden, mla.q_lora_rank, cut)
        yield from elementwise(
            ATTENTION, "q_norm", "rmsnorm", cut.split_tokens, mla.q_lora_rank, prec,
            num_params=float(mla.q_lora_rank),
        )  # fmt: skip
        yield from column_linear(ATTENTION, "q_up", mla.q_lora_rank, heads * qk_dim, cut)
    else:
        yield from column_linear(ATTENTION, "q", model.hidden, heads * qk_dim, cut)
    yield from _plain(ATTENTION, "kv_down", cut.split_tokens, model.hidden, latent, cut)
    yield from elementwise(
        ATTENTION, "kv_norm", "rmsnorm", cut.split_tokens, mla.kv_lora_rank, prec,
        num_params=float(mla.kv_lora_rank),
    )  # fmt: skip
    yield from column_linear(
        ATTENTION, "kv_up", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), cut
    )
    yield from elementwise(
        ATTENTION, "rotary", "rotary", cut.tokens, (heads + 1.0) * mla.qk_rope_head_dim, prec
    )
    yield from core_attention(model, cut, qk_dim, mla.v_head_dim, heads)


def column_linear(
    module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool = False
) -> Iterator[Op]:
    """A linear layer cut by columns (`d_out` is local), with the exchange that enters its pair."""
    payload = cut.tokens * d_in * cut.precision.act_bytes
    on_tp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": payload,
        "group_size": cut.tp,
        "stride": cut.tp_stride,
    }
    if cut.sequence_parallel:
        yield collective(module, name, "forward", "all_gather", **on_tp)
        if not cut.lora_rank:
            yield collective(module, name, "backward", "all_gather", hides_behind=name, **on_tp)
    yield from _plain(module, name, cut.tokens, d_in, d_out, cut, bias=bias, saved_rows=cut.split_tokens)
    kind = "reduce_scatter" if cut.sequence_parallel else "all_reduce"
    yield collective(module, name, "backward", kind, hides_behind=name, **on_tp)


def row_linear(
    module: str, name: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool = False, kept: bool = True
) -> Iterator[Op]:
    """A linear layer cut by rows (`d_in` is local), with the exchange that leaves its pair.

    `kept` False: its input is already kept by the op before it (fused attention keeps its output).
    """
    payload = cut.tokens * d_out * cut.precision.act_bytes
    on_tp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": payload,
        "group_size": cut.tp,
        "stride": cut.tp_stride,
    }
    if cut.sequence_parallel:
        yield collective(module, name, "backward", "all_gather", **on_tp)
    # With an fp8 matmul the kept input is a narrow copy of its own, whatever came before.
    saved_rows = None if kept or cut.precision.casts else 0.0
    yield from _plain(module, name, cut.tokens, d_in, d_out, cut, bias=bias, saved_rows=saved_rows)
    kind = "reduce_scatter" if cut.sequence_parallel else "all_reduce"
    yield collective(module, name, "forward", kind, **on_tp)


def _plain(
    module: str, name: str, rows: Num, d_in: Num, d_out: Num, cut: Cut, *, bias: bool = False,
    saved_rows: Num | None = None,
) -> Iterator[Op]:  # fmt: skip
    """A linear layer without exchanges; under LoRA it is frozen and two thin adapters train beside it."""
    frozen = cut.lora_rank > 0
    yield from linear(
        module, name, rows, d_in, d_out, cut.precision, bias=bias, saved_rows=saved_rows, frozen=frozen
    )
    if frozen:
        rank = float(cut.lora_rank)
        yield from linear(module, f"{name}_lora_a", rows, d_in, rank, cut.precision, saved_rows=saved_rows)
        yield from linear(module, f"{name}_lora_b", rows, rank, d_out, cut.precision)
