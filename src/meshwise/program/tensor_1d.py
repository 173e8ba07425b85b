"""One block under one-dimensional tensor parallelism (Megatron-LM, arXiv 1909.08053, 2205.05198).

The first matmul of each pair (qkv; fc1) is cut by columns, the second (out_proj; fc2) by rows, so
each pair needs one exchange. With sequence parallelism the activations between the pairs are cut
along the sequence: an all-gather enters each pair, a reduce-scatter leaves it, and the backward
mirrors them; the kept input of a pair is the shard, so the backward gathers it once more. Without
it, an all-reduce leaves each pair, and one of the gradient enters it in the backward.

Local shapes, with t = tp: qkv [tokens, h] x [h, (heads + 2 kv_heads) d / t]; out_proj
[tokens, heads d / t] x [., h]; fc1 [tokens, h] x [h, f / t] (twice f if gated); fc2 [tokens, f / t] x [., h].

In a *parallel block* both pairs read one input and their results are added, so that one exchange enters and
one leaves them together. Where each pair has a norm of its own (GPT-NeoX, Falcon 40B), the norms come behind
the exchange: every rank does them for all tokens, and once more in the backward where it has kept its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import Cost
from meshwise.model.architecture import MLA, Model
from meshwise.model.weights import WHOLE, Weight, Weights
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, collective, elementwise, kernel, linear

ATTENTION, MLP = "attention", "mlp"


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: experts by ep and etp, others by tp."""
    ranks: Num = 1.0
    if weight.cut != WHOLE:
        ranks = cut.etp if weight.is_expert else cut.tp
    if weight.units:
        ranks = np.minimum(ranks, weight.units)
    return ranks * cut.ep if weight.is_expert else ranks


def attention(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, projections, core attention, output projection, dropout, residual."""
    yield from _entry_norm(model, cut, ATTENTION, "norm1")
    if model.mla is None:
        yield from _qkv(model, cut)
    else:
        yield from _latent_qkv(model, cut)
    v_dim = model.mla.v_head_dim if model.mla else model.head_dim
    width = model.num_heads * v_dim / cut.tp
    if model.attention_gate:
        yield from elementwise(ATTENTION, "attention_gate", "swiglu", cut.tokens, width, cut.precision)
    yield from row_linear(
        ATTENTION, "out_proj", "o", width, model.hidden, cut, bias=model.out_bias, kept=_keeps_mixed(cut),
        leaves=not model.parallel_block,
    )  # fmt: skip
    if not model.parallel_block:
        yield from leave(model, cut, ATTENTION, 1)


def _keeps_mixed(cut: Cut) -> Num:
    """1 where the output projection keeps what it reads: no fused attention does, or an exchange made it."""
    return (cut.ulysses > 1.0) * 1.0 if cut.flash else 1.0


def mlp(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, fc1, activation, fc2, dropout, residual; in a parallel block, the sum with the attention."""
    if model.num_norms > 1:
        yield from _entry_norm(model, cut, MLP, "norm2")
    yield from feed_forward(model, cut, MLP, model.ffn_hidden, alone=not model.parallel_block)
    if model.parallel_block:
        yield from _add_attention(model, cut)
    yield from leave(model, cut, MLP, 2)


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: gradients of weights that each rank has of its own tokens or heads, or copies of.

    Under sequence parallelism those of norms are of the rank's own tokens; ranks that hold copies of a
    key-value head have the gradients of different query heads.
    """
    own = ("part", "tokens") if cut.sequence_parallel else ("part",)
    trained = [weight for weight in weights if weight.trains and not weight.is_expert]
    partial = [weight for weight in trained if weight.cut == WHOLE and weight.gradient in own]
    copied = [weight for weight in trained if weight.units]
    for together in (partial, copied):
        if not together:
            continue
        copies = cut.tp / shards(together[0], cut)
        payload = sum(weight.size / shards(weight, cut) for weight in together) * cut.precision.act_bytes
        yield collective(
            "block", "shared_gradients", "step", "all_reduce", "tp", payload, copies, stride=cut.tp_stride
        )


def feed_forward(model: Model, cut: Cut, module: str, ffn_hidden: Num, *, alone: bool = True) -> Iterator[Op]:
    """fc1, activation, fc2: a pair of matmuls of inner width `ffn_hidden`, cut by tp.

    Not `alone`: beside the attention of a parallel block, which exchanges (and keeps) the input for both.
    """
    width = ffn_hidden / cut.tp
    parts = {"gate": width, "up": width} if model.gated else {"up": width}
    bias = model.linear_bias
    if alone:
        yield from column_linear(module, "fc1", model.hidden, parts, cut, bias=bias)
    else:
        kept = None if model.num_norms > 1 and not cut.sequence_parallel else 0.0
        yield from plain_linear(
            module, "fc1", cut.tokens, model.hidden, parts, cut, bias=bias, saved_rows=kept
        )
        yield from _input_again(model, cut)
    yield from elementwise(module, model.activation, model.activation, cut.tokens, width, cut.precision)
    yield from row_linear(module, "fc2", "down", width, model.hidden, cut, bias=bias, leaves=alone)


def norm(model: Model, cut: Cut, module: str, name: str) -> Iterator[Op]:
    """A norm of the residual stream; its weights are held by every tensor-parallel rank."""
    yield from elementwise(module, name, model.norm, cut.split_tokens, model.hidden, cut.precision)


def leave(model: Model, cut: Cut, module: str, number: int) -> Iterator[Op]:
    """What follows the exchange that leaves a pair: a norm in blocks of four, dropout, residual."""
    if model.num_norms == 4:
        yield from norm(model, cut, module, f"post_norm{number}")
    if model.layer_scale:
        name = f"layer_scale{number}"
        yield from elementwise(module, name, "layer_scale", cut.split_tokens, model.hidden, cut.precision)
    if model.dropout_frac:
        yield from elementwise(module, "dropout", "dropout", cut.split_tokens, model.hidden, cut.precision)
    yield from elementwise(
        module, f"residual{number}", "residual", cut.split_tokens, model.hidden, cut.precision
    )


# --- parallel blocks ---------------------------------------------------------------------------


def _norms_of_all_tokens(model: Model) -> bool:
    """Whether the norms come behind the exchange that enters the block: each pair has one of its own."""
    return model.parallel_block and model.num_norms > 1


def _entry_norm(model: Model, cut: Cut, module: str, name: str) -> Iterator[Op]:
    """The norm before a pair: of the rank's own tokens, or, one of two in a parallel block, of all."""
    if not _norms_of_all_tokens(model):
        yield from norm(model, cut, module, name)
        return
    is_first = module == ATTENTION
    if is_first and cut.sequence_parallel:
        yield on_tp(module, name, "forward", "all_gather", model.hidden, cut)
    forward, backward = elementwise(module, name, model.norm, cut.tokens, model.hidden, cut.precision)
    # Both norms see the same input, of which one copy is kept: the rank's own tokens.
    shared_rows = cut.tokens - (cut.split_tokens if is_first else 0.0)
    shared_bytes = shared_rows * model.hidden * cut.precision.act_bytes
    yield structs.replace(forward, saved_bytes=forward.saved_bytes - shared_bytes)
    yield backward
    if is_first:
        yield on_tp(module, name, "backward", summing(cut), model.hidden, cut)


def _add_attention(model: Model, cut: Cut) -> Iterator[Op]:
    """The sum of both pairs' results, and the one exchange that leaves the block."""
    name = "add_attention"
    yield kernel(MLP, name, "residual", cut.tokens, model.hidden, cut.precision, phase="forward")
    yield on_tp(MLP, name, "forward", summing(cut), model.hidden, cut)
    if cut.sequence_parallel:
        yield on_tp(MLP, name, "backward", "all_gather", model.hidden, cut)


def _input_again(model: Model, cut: Cut) -> Iterator[Op]:
    """In the backward of a parallel block: its input is gathered again, and norms of all tokens redone."""
    if not cut.sequence_parallel:
        return
    yield on_tp(MLP, "fc1_input", "backward", "all_gather", model.hidden, cut)
    if _norms_of_all_tokens(model):
        for name in ("norm1_again", "norm2_again"):
            again = kernel(MLP, name, model.norm, cut.tokens, model.hidden, cut.precision, phase="forward")
            yield structs.replace(again, phase="backward", saved_bytes=0.0)


# --- projections of attention ------------------------------------------------------------------


def _qkv(model: Model, cut: Cut) -> Iterator[Op]:
    dim, prec = model.head_dim, cut.precision
    heads = model.num_heads / cut.tp
    kv_heads = np.maximum(model.num_kv_heads / cut.tp, 1.0)  # fewer than tp: each rank holds a copy of one
    gate = {"gate": heads * dim} if model.attention_gate else {}
    names = {"": ("k", "v"), "values": ("k",), "shared": ()}[model.keys]
    parts = gate | {"q": heads * dim} | dict.fromkeys(names, kv_heads * dim)
    if model.parallel_block:
        yield from _qkv_of_parallel_block(model, parts, cut)
    else:
        yield from column_linear(ATTENTION, "qkv", model.hidden, parts, cut, bias=model.qkv_bias)
    if model.qk_norm_full:
        width = (heads + kv_heads) * dim
        for op in elementwise(ATTENTION, "qk_norm", model.norm, cut.tokens, width, prec):
            yield op  # each rank has some columns of a row, whose statistics are of all (queries, and keys)
            payload = 2.0 * cut.tokens * prec.stat_bytes
            yield collective(
                ATTENTION, "qk_norm", op.phase, "all_reduce", "tp", payload, cut.tp, stride=cut.tp_stride
            )
    elif model.qk_norm:
        normed = heads + kv_heads * (model.keys != "shared")
        yield from elementwise(ATTENTION, "qk_norm", model.norm, cut.tokens * normed, dim, prec)
    if model.positions == "rotary":
        turned = heads + kv_heads * (model.keys != "shared")
        yield from elementwise(ATTENTION, "rotary", "rotary", cut.tokens, turned * dim, prec)
    yield from core_attention(model, cut, dim, dim, kv_heads)


def _qkv_of_parallel_block(model: Model, parts: Mapping[str, Num], cut: Cut) -> Iterator[Op]:
    """qkv, whose exchanges serve fc1 too, unless they are those of the norms behind them."""
    behind_exchange = _norms_of_all_tokens(model)
    if cut.sequence_parallel and not behind_exchange:
        yield on_tp(ATTENTION, "qkv", "forward", "all_gather", model.hidden, cut)
    kept = cut.tokens if behind_exchange and not cut.sequence_parallel else cut.split_tokens
    yield from plain_linear(
        ATTENTION, "qkv", cut.tokens, model.hidden, parts, cut, bias=model.qkv_bias,
        saved_rows=0.0 if behind_exchange and cut.sequence_parallel else kept,
    )  # fmt: skip
    if not behind_exchange:
        yield on_tp(ATTENTION, "qkv", "backward", summing(cut), model.hidden, cut, hides_behind="qkv")


def _latent_qkv(model: Model, cut: Cut) -> Iterator[Op]:
    """MLA: hidden -> latent on the rank's own tokens; the latent, not the hidden state, is gathered."""
    mla, prec = model.mla, cut.precision
    assert mla is not None
    heads = model.num_heads / cut.tp
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim

    def down(name: str, rank: int, kept: Num | None = None) -> Iterator[Op]:
        return plain_linear(
            ATTENTION, name, cut.split_tokens, model.hidden, {name: rank}, cut, bias=model.qkv_bias,
            saved_rows=kept,
        )  # fmt: skip

    if mla.q_lora_rank:
        yield from down("q_down", mla.q_lora_rank)
        yield from elementwise(ATTENTION, "q_norm", model.norm, cut.split_tokens, mla.q_lora_rank, prec)
        yield from column_linear(ATTENTION, "q_up", mla.q_lora_rank, {"q_up": heads * qk_dim}, cut)
    else:
        yield from column_linear(ATTENTION, "q", model.hidden, {"q": heads * qk_dim}, cut)
    kept = None if prec.casts else 0.0  # queries read the same input, of which a cast makes a copy each
    yield from down("kv_down", mla.kv_lora_rank + mla.qk_rope_head_dim, kept)
    yield from elementwise(ATTENTION, "kv_norm", model.norm, cut.split_tokens, mla.kv_lora_rank, prec)
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from column_linear(ATTENTION, "kv_up", mla.kv_lora_rank, {"kv_up": expanded}, cut)
    if model.positions == "rotary":
        yield from _shared_key(mla, cut)
        turned = (heads + 1.0) * mla.qk_rope_head_dim
        yield from elementwise(ATTENTION, "rotary", "rotary", cut.tokens, turned, prec)
    if mla.index_heads:
        yield from _indexer(model, mla, cut)
    yield from core_attention(model, cut, qk_dim, mla.v_head_dim, heads)


def _shared_key(mla: MLA, cut: Cut) -> Iterator[Op]:
    """What comes of the one key that all heads share, turned by positions, to each rank and back."""
    payload = cut.tokens * mla.qk_rope_head_dim * cut.precision.act_bytes
    ways = (("forward", "all_gather"),) * cut.sequence_parallel + (("backward", summing(cut)),)
    for phase, kind in ways:
        yield collective(
            ATTENTION, "shared_key", phase, kind, "tp", payload, cut.tp, stride=cut.tp_stride
        )  # fmt: skip


def _indexer(model: Model, mla: MLA, cut: Cut) -> Iterator[Op]:
    """Scores of all tokens before each query, from small heads on every rank, and the choice of the best."""
    heads, dim, prec = float(mla.index_heads), float(mla.index_head_dim), cut.precision
    rows, seq = cut.tokens, cut.seq / cut.ring
    for name, d_in, d_out in (
        ("index_q", mla.q_lora_rank, heads * dim),
        ("index_k", model.hidden, dim),
        ("index_weights", model.hidden, heads),
    ):
        yield from plain_linear(ATTENTION, name, rows, d_in, {name: d_out}, cut, saved_rows=0.0)
    yield from elementwise(ATTENTION, "index_norm", "layernorm", rows, dim, prec)
    keys = (0.5 if model.causal and cut.kind != "decode" else 1.0) * (cut.seq + cut.past)
    batch = cut.microbatch * heads
    scores = Op(
        module=ATTENTION, name="index_scores", phase="forward", kind="matmul", shape=(batch, seq, keys, dim),
        cost=Cost(
            2.0 * batch * seq * keys * dim,
            prec.act_bytes * cut.microbatch * dim * (heads * seq + keys),
            4.0 * cut.microbatch * seq * keys,
        ),
        saved_bytes=prec.act_bytes * cut.microbatch * dim * (heads * seq + keys),
        dtype="bf16" if prec.casts else prec.dtype,
    )  # fmt: skip
    yield scores
    twice = (2.0 * batch, seq, keys, dim)
    yield structs.replace(scores, phase="backward", shape=twice, cost=scores.cost * 2.0, saved_bytes=0.0)
    queries = cut.microbatch * seq
    yield Op(
        module=ATTENTION, name="index_top_k", phase="forward", kind="kernel", shape=(queries, keys),
        cost=Cost(0.0, 4.0 * queries * keys, 4.0 * queries * mla.index_top_k),
    )  # fmt: skip


# --- linear layers -----------------------------------------------------------------------------


def column_linear(
    module: str, name: str, d_in: Num, parts: Mapping[str, Num], cut: Cut, *, bias: bool = False,
    frozen: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """A linear layer cut by columns, with the exchange that enters its pair; `parts` as in `plain_linear`."""
    if cut.sequence_parallel:
        yield on_tp(module, name, "forward", "all_gather", d_in, cut)
        if not frozen:
            yield on_tp(module, name, "backward", "all_gather", d_in, cut, hides_behind=name)
    yield from plain_linear(
        module, name, cut.tokens, d_in, parts, cut, bias=bias, saved_rows=cut.split_tokens, frozen=frozen
    )
    yield on_tp(module, name, "backward", summing(cut), d_in, cut, hides_behind=name)


def row_linear(
    module: str, name: str, part: str, d_in: Num, d_out: Num, cut: Cut, *, bias: bool = False,
    kept: Num = 1.0, leaves: bool = True,
) -> Iterator[Op]:  # fmt: skip
    """A linear layer cut by rows (`d_in` is local), with the exchange that leaves its pair.

    `kept` 0: its input is already kept by the op before it (fused attention keeps its output). `leaves`
    False: the result is not exchanged yet.
    """
    if leaves and cut.sequence_parallel:
        yield on_tp(module, name, "backward", "all_gather", d_out, cut)
    # With an fp8 matmul the kept input is a narrow copy of its own, whatever came before.
    saved_rows = cut.tokens * (1.0 if cut.precision.casts else kept)
    yield from plain_linear(
        module, name, cut.tokens, d_in, {part: d_out}, cut, bias=bias, saved_rows=saved_rows
    )
    if leaves:
        yield on_tp(module, name, "forward", summing(cut), d_out, cut)


def plain_linear(
    module: str, name: str, rows: Num, d_in: Num, parts: Mapping[str, Num], cut: Cut, *, bias: bool = False,
    saved_rows: Num | None = None, frozen: bool = False,
) -> Iterator[Op]:  # fmt: skip
    """A linear layer without exchanges; `parts` are the layers that it does in one matmul, by their d_out.

    Under LoRA it is frozen, and beside each of its parts two thin adapters train, whose result is added.
    """
    d_out = sum(parts.values())
    has_adapters = cut.lora_rank > 0 and not frozen
    if has_adapters:
        yield from dequantized(module, name, d_in * d_out, cut)
    yield from linear(
        module, name, rows, d_in, d_out, cut.precision, bias=bias, saved_rows=saved_rows,
        frozen=frozen or has_adapters,
    )  # fmt: skip
    if not has_adapters:
        return
    rank, kept = float(cut.lora_rank), saved_rows
    for part, width in parts.items():
        yield from linear(module, f"{part}_lora_a", rows, d_in, rank, cut.precision, saved_rows=kept)
        yield from linear(module, f"{part}_lora_b", rows, rank, width, cut.precision)
        yield from elementwise(module, f"{part}_lora_add", "residual", rows, width, cut.precision)
        kept = 0.0  # the parts read the same input


def dequantized(module: str, name: str, num_params: Num, cut: Cut) -> Iterator[Op]:
    """Frozen weights of few bits are widened before each use, both ways (QLoRA, arXiv 2305.14314)."""
    prec, frozen_bytes = cut.precision, cut.frozen_bytes
    if frozen_bytes is None or frozen_bytes >= prec.operand_bytes:
        return
    cost = Cost(num_params, frozen_bytes * num_params, prec.operand_bytes * num_params)
    name = f"{name}_dequantize"
    both = Op(module=module, name=name, phase="forward", kind="kernel", shape=(num_params,), cost=cost)
    yield from (both, structs.replace(both, phase="backward"))


def summing(cut: Cut) -> str:
    """The collective that adds up what the ranks have of a sum: each then needs its own tokens, or all."""
    return "reduce_scatter" if cut.sequence_parallel else "all_reduce"


def on_tp(
    module: str, name: str, phase: str, kind: str, width: Num, cut: Cut, *, hides_behind: str = ""
) -> Op:
    """A collective of all tokens' rows of `width` over the tensor-parallel ranks.

    Behind a matmul's backward, its input is gathered again while the gradient of the input is computed, and
    that gradient is summed while the weight's is (Megatron-LM, tensor_parallel/layers.py). What matmuls read
    is gathered in their type, fp8 or fp4 (Transformer Engine and torchao cast first); sums are not.
    """
    gradient = ("input" if kind == "all_gather" else "weight") if hides_behind else ""
    is_read = kind == "all_gather" and not name.startswith("norm")
    elem_bytes = cut.precision.operand_bytes if is_read else cut.precision.act_bytes
    return collective(
        module, name, phase, kind, "tp", cut.tokens * width * elem_bytes, cut.tp,
        stride=cut.tp_stride, hides_behind=hides_behind, behind_gradient=gradient,
    )  # fmt: skip
