"""A pass of a serving engine on one rank: a batch of prompts, or one new token of each running sequence.

An instance is tp x dp ranks. The attention of b sequences is cut by tp; each dp rank has sequences of its
own, with their cache of keys and values. The experts of a layer lie on ep ranks, each cut by etp: on the tp
ranks of one dp rank, which all see the same tokens and only have to add up their results, or over the tp
ranks of several, who send each token to its experts and fetch the result (*exchange*). The weights, and most
ops, are those of the forward in training; what an engine does otherwise is stated here. There is no sequence
parallelism; residuals are added in the norm that follows; all-reduces read the memory of the peers where
engines let the links do so; one query a sequence attends to its cache; experts are grouped matmuls of a
library; logits are made for the last token of a sequence alone. Latent attention (MLA) is stated with its
up-projection, whose work is that of the absorbed form which decodes from the latents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.experts import active_experts
from meshwise.cost.op import Cost
from meshwise.model.architecture import Layer, Model, MoE, Sparse, across, num_dense_layers, of_layer
from meshwise.program.block import block, block_input
from meshwise.program.cut import Cut
from meshwise.program.encoder import CROSS, ENCODER, source_cut
from meshwise.program.moe import MODULE as MOE, moe_mlp
from meshwise.program.op import Op, Precision, collective
from meshwise.program.recurrence import state_bytes
from meshwise.program.vocabulary import embed, head

FUSED = ("residual", "dropout")


def serving_embed(model: Model, cut: Cut) -> list[Op]:
    """The embedding of all new tokens."""
    ops = list(_forward(cut, embed(model, _plain(cut))))
    return [_not_again(op) if cut.kind == "decode" and op.module == ENCODER else op for op in ops]


def _not_again(op: Op) -> Op:
    """An op on the source of a decoder, which a pass that decodes does not run: its weights are held."""
    return structs.replace(op, count=0.0)


def serving_head(model: Model, cut: Cut) -> list[Op]:
    """Norm and logits of each sequence's last token; of all that a decode pass checks."""
    seq = cut.seq if cut.kind == "decode" else 1.0
    ops = _forward(cut, head(model, replace(_plain(cut), seq=seq)))
    return [op for op in ops if op.name != "cross_entropy"]


def serving_block(model: Model, cut: Cut, layer: Layer) -> list[Op]:
    """One block of the kind `layer`."""
    cut = _plain(cut)
    ops = list(_block(model, cut, layer, list(_in_wide(model, cut, layer))))
    if cut.kind == "decode" and layer.side == "encoder":
        return [_not_again(op) for op in ops]
    if model.mla is not None and model.mla.q_lora_rank and layer.mixer == "attention":
        form = Precision() if "qkv" in cut.wide_modules else cut.precision
        ops = _side_by_side(ops, "q_down", "kv_down", form)
    return ops


def as_kept(ops: list[Op], cut: Cut) -> list[Op]:
    """`ops` with weights in the bits in which they are kept, where those are fewer than the matmuls'."""
    if cut.precision.weight_bytes == cut.precision.operand_bytes:
        return ops
    return [op if is_wide(op, cut) else _narrow(op, cut.precision) for op in ops]


def _in_wide(model: Model, cut: Cut, layer: Layer) -> Iterator[Op]:
    """The forward ops of a block, those of `wide_modules` in bf16, which needs no casts."""
    in_bf16 = block(model, replace(cut, precision=Precision()), layer) if cut.wide_modules else ()
    wide = {(op.module, op.name, op.kind): op for op in _forward(cut, in_bf16)}
    for op in _forward(cut, block(model, cut, layer)):
        own = wide.get((op.module, op.name, op.kind)) if is_wide(op, cut) else op
        if own and not (cut.fuses_casts and own.name.endswith("_cast")):
            yield own


def is_wide(op: Op, cut: Cut) -> bool:
    """Whether an op is of the modules that are kept in bf16."""
    of_attention = "out" if op.name.startswith("out_proj") else "qkv"
    places = {"attention": of_attention, "recurrence": "recurrence", "shared_expert": "shared"}
    return places.get(op.module) in cut.wide_modules


def _side_by_side(ops: list[Op], first: str, second: str, form: Precision) -> list[Op]:
    """`ops` with two matmuls of the same input as one: engines keep such weights in one matrix."""
    one, other = (next(op for op in ops if op.name == name) for name in (first, second))
    batch, rows, width, depth = one.shape
    saved = Cost(read_bytes=-batch * rows * depth * form.operand_bytes)
    shape = batch, rows, width + other.shape[2], depth
    both = _with_weights(structs.replace(one, shape=shape, cost=one.cost + other.cost + saved), [one, other])
    return [both if op is one else op for op in ops if op.name not in (other.name, f"{other.name}_cast")]


def _narrow(op: Op, form: Precision) -> Op:
    """`op` with its weights in fewer bits, computed in the type of the pass (weight-only)."""
    multiplies_weights = op.kind == "matmul" and any(held.weight.is_matrix for held in op.weights)
    if not multiplies_weights or op.name == "router":  # which is in 16 bits in every published checkpoint
        return op
    batch, _, n, k = op.shape
    spared = batch * n * k * (form.operand_bytes - form.weight_bytes)
    cost = structs.replace(op.cost, read_bytes=op.cost.read_bytes - spared)
    return structs.replace(op, cost=cost, right_bytes=form.weight_bytes)


def _plain(cut: Cut) -> Cut:
    return replace(cut, sequence_parallel=False, flash=True)


def _forward(cut: Cut, ops: Iterable[Op]) -> Iterator[Op]:
    """The forward ops that an engine runs by themselves."""
    by_peers = "peer-coded" if cut.codes_sums else "peer"
    for op in ops:
        if op.phase == "forward" and not op.name.startswith(FUSED):
            yield structs.replace(op, library=by_peers) if op.collective == "all_reduce" else op


def _block(model: Model, cut: Cut, layer: Layer, ops: list[Op]) -> Iterator[Op]:
    for op in ops:
        if op.kind == "attention" and op.module == CROSS and cut.kind == "decode":
            yield _cross_decode(model, cut, op)
        elif op.module == CROSS and op.name == "kv" and cut.kind == "decode":
            yield _not_again(op)
        elif op.kind == "attention" and cut.kind == "decode" and layer.side != "encoder":
            yield _decode_attention(of_layer(model, layer), cut, layer, op)
        elif op.module == MOE and op.name == "router":
            yield from _experts(model, cut, [op for op in ops if op.module == MOE])
        elif op.module == MOE and "norm" not in op.name and "latent" not in op.name:
            continue  # stated by `_experts`
        elif op.module == "shared_expert" and op.kind == "collective":
            continue  # added up with the routed experts
        else:
            yield op


# --- the cache ---------------------------------------------------------------------------------


def cached_numbers(model: Model, cut: Cut) -> Num:
    """Numbers that one layer keeps of one key on a rank: key and value of its heads, or the latent."""
    if model.mla is not None:
        return float(model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    width = model.head_dim + (0 if model.keys == "same" else model.value_dim)
    return np.maximum(model.num_kv_heads / cut.tp, 1.0) * width


def cache_bytes(model: Model, cut: Cut, layer: Layer) -> Num:
    """Bytes of one layer's cache on a rank, at the end of the pass.

    It keeps a key of each token, or of those in a window, and one of each `ratio` tokens, if compressed.
    """
    own = model.recurrence if layer.mixer in ("recurrence", "beside") else None
    state = state_bytes(own, cut) if own else 0.0
    past = cut.past + cut.seq
    if layer.side == "decoder" or (layer.mixer == "cross" and across(model)):
        state = source_bytes(model, cut)
    one = of_layer(model, layer)
    if not one.causal or layer.mixer not in ("attention", "beside") or layer.keys == "shared":
        return cut.microbatch * state
    sparse = one.sparse or Sparse()
    keys = np.minimum(past, layer.window or np.inf) + past / sparse.ratio * (sparse.ratio > 1)
    numbers = keys * cached_numbers(one, cut)
    scored = sparse.head_dim * past / sparse.tokens_per_score
    return cut.microbatch * (state + (numbers + scored) * cut.kv_bytes)


def source_bytes(model: Model, cut: Cut) -> Num:
    """Bytes of the keys and values of a sequence's source that a layer of the decoder keeps on a rank."""
    return source_cut(model, cut).seq * cached_numbers(model, cut) * cut.kv_bytes


def _cross_decode(model: Model, cut: Cut, op: Op) -> Op:
    """Attention of new queries to the source, whose keys and values are kept."""
    batch, heads, _, seq_q, seq_k, qk_dim, v_dim = op.shape
    flop = 2.0 * batch * heads * seq_q * seq_k * (qk_dim + v_dim)
    cost = Cost(flop, batch * source_bytes(model, cut), 0.0)
    return structs.replace(op, kind="decode_attention", cost=cost)


def _decode_attention(model: Model, cut: Cut, layer: Layer, op: Op) -> Op:
    """Attention of new queries over their cache, which is read once; latents (MLA) as they are."""
    batch, heads, kv_heads, seq_q, _, qk_dim, v_dim = op.shape
    if model.mla is not None:
        kv_heads, v_dim = 1.0, float(model.mla.kv_lora_rank)
        qk_dim = v_dim + model.mla.qk_rope_head_dim
    sparse = model.sparse or Sparse()
    seq_k = np.minimum(cut.past, layer.window or np.inf)
    if sparse.ratio > 1:
        seq_k = seq_k + np.minimum(cut.past / sparse.ratio, sparse.top_k or np.inf)
    elif sparse.top_k:
        seq_k = np.minimum(seq_k, sparse.top_k)
    read, written = (batch * seq * cached_numbers(model, cut) * cut.kv_bytes for seq in (seq_k, seq_q))
    return structs.replace(
        op,
        kind="decode_attention",
        library="mla" if model.mla is not None else "",
        shape=(batch, heads, kv_heads, seq_q, seq_k, qk_dim, v_dim),
        cost=Cost(2.0 * batch * heads * seq_q * seq_k * (qk_dim + v_dim), read, written),
    )


# --- experts -----------------------------------------------------------------------------------


def is_exchanged(cut: Cut) -> Any:
    """1 where tokens travel to their experts, which lie on the ranks of several dp ranks; else 0."""
    return (cut.ep * cut.etp > cut.tp) * 1.0


def _experts(model: Model, cut: Cut, stated: list[Op]) -> Iterator[Op]:
    """Router, exchange and experts of a layer whose ops in training are `stated`.

    The router runs on every rank. Without an exchange the results are summed over the tp ranks; with one,
    each of these sends a part of the tokens, and they are gathered in the end.
    """
    moe, form = model.moe, cut.precision
    assert moe is not None
    hidden = moe.width(model.hidden)
    alone = replace(cut, tp=1.0)
    for op in _forward(cut, moe_mlp(model, alone, block_input(model, alone))):
        if op.name.startswith("router"):
            names = (op.name, "balance_bias") if op.kind == "kernel" else (op.name,)  # one kernel routes
            yield _with_weights(op, [one for one in stated if one.name in names])
    yield from _exchange(model, moe, cut, "dispatch", form.operand_bytes)
    yield _grouped(model, moe, cut, [op for op in stated if op.is_expert])
    yield from _exchange(model, moe, cut, "combine", form.act_bytes)
    exchanged, payload = is_exchanged(cut), cut.tokens * hidden * form.act_bytes
    for kind, library, used in (("all_gather", "", exchanged), ("all_reduce", "peer", 1.0 - exchanged)):
        gathered = collective(
            MOE, "combine", "forward", kind, "tp", payload, 1.0 + used * (cut.tp - 1.0), stride=cut.tp_stride
        )
        yield structs.replace(gathered, library=library)


def _grouped(model: Model, moe: MoE, cut: Cut, stated: list[Op]) -> Op:
    """The experts on the busiest rank, in place of the `stated` ops of training.

    Without an exchange a rank sees all tokens of its tp group; with one, all that are gathered, or those that
    are sent as they need one of its experts.
    """
    exchanged, form = is_exchanged(cut), cut.precision
    needed = np.where(is_sent(moe, cut), active_experts(cut.ep, moe.computed) / cut.ep, 1.0)
    tokens = cut.tokens * np.where(exchanged, cut.ep * cut.etp / cut.tp, 1.0) * needed * cut.imbalance
    top_k = moe.computed / cut.ep / needed
    tokens = tokens + (cut.expert_tile - 1.0) * moe.held / cut.ep / top_k
    experts, hidden, width = moe.held / cut.ep, moe.width(model.hidden), moe.ffn_hidden / cut.etp
    pairs, weights = tokens * top_k, (3.0 if model.gated else 2.0) * hidden * width
    read = active_experts(experts, pairs) * weights * form.expert_bytes + tokens * hidden * form.act_bytes
    op = Op(
        module=MOE,
        name="expert_ffn",
        phase="forward",
        kind="experts",
        shape=(tokens, top_k, experts, hidden, width, float(moe.computed)),
        cost=Cost(2.0 * pairs * weights, read, tokens * hidden * form.act_bytes),
        dtype=form.dtype,
        library="deepgemm" if cut.expert_tile > 1.0 else cut.expert_library,
        right_bytes=form.expert_bytes if form.expert_bytes != form.operand_bytes else 0.0,
    )
    return _with_weights(op, stated)


def _with_weights(op: Op, stated: list[Op]) -> Op:
    """`op` with the weights of the ops `stated`."""
    weights = tuple(held for one in stated for held in one.weights)
    return structs.replace(op, num_params=sum(one.num_params for one in stated), weights=weights)


def is_sent(moe: MoE, cut: Cut) -> Any:
    """1 where an exchange is an all-to-all: DeepEP's, or as more ranks have experts than a token chooses.

    Else 0. The latter is TensorRT-LLM's rule (`moe_ep_size > experts_per_token`); over fewer ranks, or where
    they cut experts, each gets the tokens of all.
    """
    return is_exchanged(cut) * ((cut.ep > moe.computed) | (cut.dispatch_per_rank & (cut.ep > 1)))


def _exchange(model: Model, moe: MoE, cut: Cut, way: str, elem_bytes: float) -> Iterator[Op]:
    """One way of the exchange: to or from all ranks, or between a token and its experts.

    DeepEP's low-latency kernels do the latter in decoding, its normal ones for prompts. Where prompts are
    gathered by sums, each rank adds its tokens to a buffer with room for all.
    """
    tokens, hidden = cut.tokens / cut.tp, moe.width(model.hidden)
    sent = is_sent(moe, cut)
    gathered = is_exchanged(cut) - sent
    among = 1.0 + gathered * (cut.ep * cut.etp - 1.0)
    kind = "all_gather" if way == "dispatch" else "reduce_scatter"
    if cut.gathers_by_sums and cut.kind == "prefill":
        kind, elem_bytes = "all_reduce", cut.precision.act_bytes
    yield collective(
        MOE, way, "forward", kind, "ep", tokens * among * hidden * elem_bytes, among,
        stride=cut.ep_stride / cut.etp,
    )  # fmt: skip
    tokens = tokens * cut.imbalance
    op = collective(
        MOE, way, "forward", "all_to_all", "ep", tokens * moe.computed * hidden * elem_bytes,
        1.0 + sent * (cut.ep - 1.0), stride=cut.ep_stride,
        choices=moe.computed, shape=(tokens, float(moe.num_experts), hidden),
    )  # fmt: skip
    yield structs.replace(op, library="deepep-ll" if cut.kind == "decode" else "deepep-normal")


# --- memory ------------------------------------------------------------------------------------


EXPERT_TOKENS = 65536.0
"""Tokens whose experts an engine computes at a time (CHUNK_SIZE of the fused_moe of vLLM and SGLang)."""


def working_bytes(model: Model, cut: Cut) -> Num:
    """What a pass works on: four tensors of the residual stream, and the widest pair.

    The widest are the hidden rows of the feed-forward, in and out of the activation, or of EXPERT_TOKENS
    tokens' experts at most.
    """
    width: Num = model.ffn_hidden / cut.tp if num_dense_layers(model) else 0.0
    if model.moe is not None:
        rows = model.moe.top_k * cut.tp / (cut.ep * cut.etp)
        width = np.maximum(width, rows * (model.moe.ffn_hidden / cut.etp + model.hidden))
    tokens = cut.tokens
    if model.encoder and cut.kind != "decode":
        tokens = np.maximum(tokens, source_cut(model, cut).tokens)
    at_once = np.minimum(tokens, EXPERT_TOKENS) if model.moe else tokens
    return (4.0 * model.hidden * tokens + 3.0 * width * at_once) * cut.precision.act_bytes
