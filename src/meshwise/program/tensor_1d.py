"""One block under one-dimensional tensor parallelism (Megatron-LM, arXiv 1909.08053, 2205.05198).

The first matmul of each pair (qkv; fc1) is cut by columns, the second (out_proj; fc2) by rows, so
each pair needs one exchange. With sequence parallelism the activations between the pairs are cut
along the sequence: an all-gather enters each pair, a reduce-scatter leaves it, and the backward
mirrors them; the gathered input of a pair is not kept but gathered once more in the backward. Without
it, an all-reduce leaves each pair, and one of the gradient enters it in the backward.

Local shapes, with t = tp: qkv [tokens, h] x [h, (heads + 2 kv_heads) d / t]; out_proj
[tokens, heads d / t] x [., h]; fc1 [tokens, h] x [h, f / t] (twice f if gated); fc2 [tokens, f / t] x [., h].

In a *parallel block* both pairs read one input and their results are added, so that one exchange enters and
one leaves them together. Where each pair has a norm of its own (GPT-NeoX, Falcon 40B), the norms come behind
the exchange: every rank does them for all tokens, and once more in the backward where it has kept its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from msgspec import structs

from meshwise.core.numbers import added, larger, smaller
from meshwise.core.units import Num
from meshwise.cost.op import Cost, embedding, embedding_backward
from meshwise.model.architecture import MLA, LowRank, Model, Sparse
from meshwise.model.weights import WHOLE, Weight, Weights, query_rank
from meshwise.program import op as ops
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, collective, elementwise, exchanged, kernel, linear, made

ATTENTION, MLP = "attention", "mlp"
WIDENING = "_dequantize"
"""How the kernel that widens the weights of a matmul is called, behind the name of that."""


def shards(weight: Weight, cut: Cut) -> Num:
    """Over how many ranks a weight is cut: experts by ep and etp, others by tp."""
    ranks: Num = 1.0
    if weight.cut != WHOLE:
        ranks = cut.etp if weight.is_expert else cut.tp
    if weight.units:
        ranks = smaller(ranks, weight.units)
    return ranks * cut.ep if weight.is_expert else ranks


def attention(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, projections, core attention, output projection, dropout, residual.

    In a parallel block its result is not exchanged yet: `mlp` adds its own to it.
    """
    normed = (yield from _entry_norm(model, cut, ATTENTION, "norm1", x)) if model.num_norms else x
    mixed = yield from (_qkv if model.mla is None else _latent_qkv)(model, cut, normed)
    if model.low_rank and model.low_rank.out:
        mixed = yield from _through_latents(model.low_rank, cut, mixed)
    out = yield from row_linear(
        ATTENTION, "out_proj", "o", mixed, model.hidden, cut, bias=model.out_bias,
        leaves=not model.parallel_block,
    )  # fmt: skip
    return out if model.parallel_block else (yield from leave(model, cut, ATTENTION, 1, out, x))


def mlp(model: Model, cut: Cut, x: Tensor, attended: Tensor | None = None) -> Stated:
    """Norm, fc1, activation, fc2, dropout, residual; in a parallel block, the sum with what is `attended`."""
    normed = (yield from _entry_norm(model, cut, MLP, "norm2", x)) if model.num_norms > 1 else x
    out = yield from feed_forward(model, cut, MLP, model.ffn_hidden, normed, alone=attended is None)
    if attended is not None:
        out = yield from _add_attention(model, cut, (out, attended))
    return (yield from leave(model, cut, MLP, 2, out, x))


def shared_gradients(weights: Weights, cut: Cut) -> Iterator[Op]:
    """Once a step: gradients of weights that each rank has of its own tokens or heads, or copies of.

    Under sequence parallelism those of norms are of the rank's own tokens; ranks that hold copies of a
    key-value head have the gradients of different query heads.
    """
    own = ("part", "tokens") if cut.sequence_parallel else ("part",)
    trained = [weight for weight in weights if weight.trains and not weight.is_expert]
    partial = [weight for weight in trained if weight.cut == WHOLE and weight.gradient in own]
    for name, together in (("shared_gradients", partial), ("shared_keys", [w for w in trained if w.units])):
        if not together:
            continue
        copies = cut.tp / shards(together[0], cut)
        payload = added(weight.size / shards(weight, cut) for weight in together) * cut.precision.act_bytes
        yield collective("block", name, "step", "all_reduce", "tp", payload, copies, stride=cut.tp_stride)


def feed_forward(
    model: Model, cut: Cut, module: str, ffn_hidden: Num, x: Tensor, *, alone: bool = True
) -> Stated:
    """fc1, activation, fc2: a pair of matmuls of inner width `ffn_hidden`, cut by tp.

    Not `alone`: beside the attention of a parallel block, which exchanges the input for both.
    """
    width = ffn_hidden / cut.tp
    parts = {"gate": width, "up": width} if model.gated else {"up": width}
    bias = model.linear_bias
    if alone:
        wide = yield from column_linear(module, "fc1", x, parts, cut, bias=bias)
    else:
        whole = x if _norms_of_all_tokens(model) else all_tokens(x, cut)
        stated = plain_linear(module, "fc1", whole, parts, cut, bias=bias, own=x)
        wide = yield from ops.changed(
            stated, lambda op: structs.replace(op, keeps=(x,)) if whole in op.keeps else op
        )
        yield from _input_again(model, cut)
    acted = yield from elementwise(module, model.activation, model.activation, wide, cut.precision)
    return (yield from row_linear(module, "fc2", "down", acted, model.hidden, cut, bias=bias, leaves=alone))


def norm(model: Model, cut: Cut, module: str, name: str, x: Tensor) -> Stated:
    """A norm of the residual stream; its weights are held by every tensor-parallel rank."""
    return (yield from elementwise(module, name, model.norm, x, cut.precision))


def leave(model: Model, cut: Cut, module: str, number: int, y: Tensor, x: Tensor) -> Stated:
    """What follows the exchange that leaves a pair: a norm in blocks of four, dropout, residual."""
    if model.num_norms == 4:
        y = yield from norm(model, cut, module, f"post_norm{number}", y)
    if model.layer_scale or model.diffusion:
        y = yield from elementwise(module, f"layer_scale{number}", "layer_scale", y, cut.precision)
    if model.dropout_frac:
        y = yield from elementwise(module, "dropout", "dropout", y, cut.precision)
    return (yield from elementwise(module, f"residual{number}", "residual", (y, x), cut.precision))


# --- parallel blocks ---------------------------------------------------------------------------


def _norms_of_all_tokens(model: Model) -> bool:
    """Whether the norms come behind the exchange that enters the block: each pair has one of its own."""
    return model.parallel_block and model.num_norms > 1


def _entry_norm(model: Model, cut: Cut, module: str, name: str, x: Tensor) -> Stated:
    """The norm before a pair: of the rank's own tokens, or, one of two in a parallel block, of all."""
    if not _norms_of_all_tokens(model):
        return (yield from norm(model, cut, module, name, x))
    is_first = module == ATTENTION
    if is_first and cut.sequence_parallel:
        yield on_tp(module, name, "forward", "all_gather", model.hidden, cut)
    normed = elementwise(module, name, model.norm, x, cut.precision, shape=(cut.tokens, float(model.hidden)))
    again = cut.sequence_parallel
    y = yield from ops.changed(normed, lambda op: structs.replace(op, remade=again and op.phase == "forward"))
    if is_first:
        yield on_tp(module, name, "backward", summing(cut), model.hidden, cut)
    return y


def _add_attention(model: Model, cut: Cut, both: tuple[Tensor, Tensor]) -> Stated:
    """The sum of both pairs' results, and the one exchange that leaves the block."""
    name, of_all = "add_attention", (cut.tokens, float(model.hidden))
    added = made(MLP, name, of_all, cut.precision.act_dtype)
    summed = kernel(MLP, name, "residual", *of_all, cut.precision, phase="forward")
    yield structs.replace(summed, reads=both, makes=(added,))
    if cut.sequence_parallel:
        yield on_tp(MLP, name, "backward", "all_gather", model.hidden, cut)
    return (yield from _summed(MLP, name, added, cut))


def _input_again(model: Model, cut: Cut) -> Iterator[Op]:
    """In the backward of a parallel block: its input is gathered again, and norms of all tokens redone."""
    if not cut.sequence_parallel:
        return
    yield on_tp(MLP, "fc1_input", "backward", "all_gather", model.hidden, cut)
    if _norms_of_all_tokens(model):
        for name in ("norm1_again", "norm2_again"):
            again = kernel(MLP, name, model.norm, cut.tokens, model.hidden, cut.precision, phase="forward")
            yield structs.replace(again, phase="backward")


# --- projections of attention ------------------------------------------------------------------


def _qkv(model: Model, cut: Cut, x: Tensor) -> Stated:
    dim, prec = model.head_dim, cut.precision
    heads = model.num_heads / cut.tp
    kv_heads = larger(model.num_kv_heads / cut.tp, 1.0)  # fewer than tp: each rank holds a copy of one
    v_dim = model.value_dim
    wide: dict[str, Num] = {"gate": heads * model.gate_dim} if model.attention_gate else {}
    if not model.low_rank:
        wide["q"] = heads * dim
    names = {"": ("k", "v"), "values": ("k",), "same": ("k",), "shared": ()}[model.keys]
    parts = wide | {name: kv_heads * (dim if name == "k" else v_dim) for name in names}
    if model.parallel_block:
        found = yield from _qkv_of_parallel_block(model, parts, cut, x)
    else:
        found = yield from column_linear(ATTENTION, "qkv", x, parts, cut, bias=model.qkv_bias)
    of = dict(zip(parts, found, strict=True))
    if model.low_rank:
        of["q"] = yield from _query_of_latent(model, cut, x, heads * dim)
    for name, width in (("k", dim), ("v", v_dim)):  # of another layer, or values that are the keys
        is_key = model.keys in ("values", "same") and name == "v"
        other = made(ATTENTION, name, (cut.tokens, kv_heads * width), prec.act_dtype)
        of.setdefault(name, of["k"] if is_key else other)
    turned = ("q",) if model.keys == "shared" else ("q", "k")
    if model.qk_norm_full:
        for op in on_heads(model.norm, "qk_norm", of, ("q", "k"), cut):
            yield op  # each rank has some columns of a row, whose statistics are of all (queries, and keys)
            payload = 2.0 * cut.tokens * prec.stat_bytes
            yield collective(
                ATTENTION, "qk_norm", op.phase, "all_reduce", "tp", payload, cut.tp, stride=cut.tp_stride
            )
    elif model.qk_norm:
        yield from on_heads(model.norm, "qk_norm", of, turned, cut, float(dim))
    if model.positions == "rotary":
        yield from on_heads("rotary", "rotary", of, turned, cut)
    if model.keys == "same":
        of["v"] = of["k"]
    yield from _indexer(model, cut, x)
    mixed = yield from core_attention(model, cut, (of["q"], of["k"], of["v"]), dim, v_dim, kv_heads)
    return (yield from _gated(of["gate"], mixed, cut)) if model.attention_gate else mixed


def _gated(gate: Tensor, mixed: Tensor, cut: Cut) -> Stated:
    shape = mixed.shape[0], mixed.shape[-1]
    both = gate, mixed
    return (yield from elementwise(ATTENTION, "attention_gate", "swiglu", both, cut.precision, shape=shape))


def _query_of_latent(model: Model, cut: Cut, x: Tensor, width: Num) -> Stated:
    """Queries through a normalised latent, which each rank makes of its own tokens."""
    (latent,) = yield from plain_linear(
        ATTENTION, "q_down", x, {"q_latent": float(query_rank(model))}, cut,
        bias=model.qkv_bias and model.mla is not None, adapts="q_down",
    )  # fmt: skip
    latent = yield from elementwise(ATTENTION, "q_norm", model.norm, latent, cut.precision)
    (q,) = yield from column_linear(ATTENTION, "q_up", latent, {"q_up": width}, cut)
    return q


def _through_latents(own: LowRank, cut: Cut, mixed: Tensor) -> Stated:
    """The heads of each group, projected to a latent of its own; the rank has the groups of its heads."""
    groups = own.groups / cut.tp
    rows, width = mixed.shape
    dealt = Tensor(mixed.name, (groups, rows, width / groups), mixed.dtype, mixed)
    partial = made(ATTENTION, "o_down", (groups, rows, float(own.out)), cut.precision.act_dtype)
    frozen = cut.lora_rank > 0
    yield from ops.linears(ATTENTION, "o_down", dealt, (partial,), cut.precision, grouped=True, frozen=frozen)
    return Tensor(partial.name, (rows, groups * own.out), partial.dtype, partial)


def on_heads(
    kind: str, name: str, of: dict[str, Tensor], which: tuple[str, ...], cut: Cut, dim: Num = 0.0, *,
    module: str = ATTENTION,
) -> Iterator[Op]:  # fmt: skip
    """One kernel on queries and keys, whose place its results take; on rows of `dim` numbers (0: whole)."""
    reads = tuple(of[one] for one in which)
    width = sum(one.shape[-1] for one in reads)
    shape = (cut.tokens * (width / dim), dim) if dim else (cut.tokens, width)
    results = tuple(made(module, f"{one}_{name}", of[one].shape, of[one].dtype) for one in which)
    for op in elementwise(module, name, kind, reads, cut.precision, shape=shape):
        yield structs.replace(op, makes=(*results, *op.makes[1:])) if op.makes else op
    of.update(zip(which, results, strict=True))


def _qkv_of_parallel_block(model: Model, parts: Mapping[str, Num], cut: Cut, x: Tensor) -> StatedParts:
    """qkv, whose exchanges serve fc1 too, unless they are those of the norms behind them."""
    behind_exchange = _norms_of_all_tokens(model)
    if cut.sequence_parallel and not behind_exchange:
        gather = on_tp(ATTENTION, "qkv", "forward", "all_gather", model.hidden, cut, reads=x)
        yield gather
        x = gather.makes[0]
    found = yield from plain_linear(ATTENTION, "qkv", x, parts, cut, bias=model.qkv_bias)
    if not behind_exchange:
        yield on_tp(ATTENTION, "qkv", "backward", summing(cut), model.hidden, cut, hides_behind="qkv")
    return found


def _latent_qkv(model: Model, cut: Cut, x: Tensor) -> Stated:
    """MLA: hidden -> latent on the rank's own tokens; the latent, not the hidden state, is gathered.

    Queries, and keys and values, come of a latent each; of the keys a part is one for all heads.
    """
    mla, prec = model.mla, cut.precision
    assert mla is not None
    heads, rope = model.num_heads / cut.tp, float(mla.qk_rope_head_dim)
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.q_lora_rank:
        q = yield from _query_of_latent(model, cut, x, heads * qk_dim)
    else:
        (q,) = yield from column_linear(ATTENTION, "q", x, {"q": heads * qk_dim}, cut)
    if model.keys == "shared":
        rows = cut.split_tokens
        latent = made(ATTENTION, "kv_latent", (rows, float(mla.kv_lora_rank)), prec.act_dtype)
        key = made(ATTENTION, "key", (rows, rope), prec.act_dtype)
    else:
        widths = {"kv_latent": float(mla.kv_lora_rank), "key": rope}
        latent, key = yield from plain_linear(
            ATTENTION, "kv_down", x, widths, cut, bias=model.qkv_bias, adapts="kv_down"
        )
        latent = yield from elementwise(ATTENTION, "kv_norm", model.norm, latent, prec)
    pair = {"k": heads * mla.qk_nope_head_dim, "v": heads * mla.v_head_dim}
    k, v = yield from column_linear(ATTENTION, "kv_up", latent, pair, cut, adapts="kv_up")
    k_whole = made(ATTENTION, "k_rotary", (cut.tokens, heads * qk_dim), prec.act_dtype)
    if model.positions == "rotary" and mla.qk_rope_head_dim:
        key = yield from _shared_key(mla, cut, key)
        turned = made(ATTENTION, "q_rotary", q.shape, prec.act_dtype), k_whole
        shape = cut.tokens, (heads + 1.0) * rope
        for op in elementwise(ATTENTION, "rotary", "rotary", (q, k, key), prec, shape=shape):
            yield structs.replace(op, makes=turned) if op.makes else op
        q = turned[0]
    yield from _indexer(model, cut, x)
    # A served prompt reads what was chosen for it as latents that all heads share (absorbed up-projections).
    absorbs = cut.kind == "prefill" and model.sparse is not None and (cut.seq + cut.past > model.sparse.top_k)
    own = mla.qk_nope_head_dim, mla.v_head_dim
    read_qk, read_v = (dim + 1.0 * absorbs * (mla.kv_lora_rank - dim) for dim in own)
    mixed = yield from core_attention(model, cut, (q, k_whole, v), read_qk + rope, read_v, heads)
    if cut.kind == "prefill":
        mixed = structs.replace(mixed, shape=(mixed.shape[0], heads * mla.v_head_dim))
    if not model.attention_gate:
        return mixed
    (gate,) = yield from column_linear(ATTENTION, "gate", x, {"gate": heads * model.gate_dim}, cut)
    return (yield from _gated(gate, mixed, cut))


def _shared_key(mla: MLA, cut: Cut, key: Tensor) -> Stated:
    """What comes of the one key that all heads share, turned by positions, to each rank and back."""
    shape = cut.tokens, key.shape[-1]
    whole = exchanged(key, f"{ATTENTION}.shared_key", shape, cut.tp) if cut.sequence_parallel else key
    payload = cut.tokens * mla.qk_rope_head_dim * cut.precision.act_bytes
    ways = (("forward", "all_gather"),) * cut.sequence_parallel + (("backward", summing(cut)),)
    for phase, kind in ways:
        tensors: dict[str, Any] = {"reads": (key,), "makes": (whole,)} if phase == "forward" else {}
        yield collective(
            ATTENTION, "shared_key", phase, kind, "tp", payload, cut.tp, stride=cut.tp_stride, **tensors
        )  # fmt: skip
    return whole


def _indexer(model: Model, cut: Cut, x: Tensor) -> Iterator[Op]:
    """Scores of all keys before each query, from small heads on every rank, and the choice of the best.

    Their inputs are those of other layers, which keep them.
    """
    own, prec = model.sparse or Sparse(), cut.precision
    if not own.heads:
        return
    heads, dim, hidden = float(own.heads), float(own.head_dim), float(model.hidden)
    seq = cut.seq / cut.ring
    for name, d_in, d_out, is_there in (
        ("index_q", query_rank(model) or hidden, heads * dim, True),
        ("index_k", hidden, dim, own.ratio == 1),
        ("index_weights", hidden, heads, own.weighted),
    ):
        read = Tensor(f"{ATTENTION}.{name}_input", (cut.tokens, d_in), x.dtype)
        for op in plain_linear(ATTENTION, name, read, {name: d_out}, cut) if is_there else ():
            yield structs.replace(op, keeps=())
    if own.ratio == 1:
        key = made(ATTENTION, "index_key", (cut.tokens, dim), prec.act_dtype)
        yield from elementwise(ATTENTION, "index_norm", "layernorm", key, prec)
    seen_frac = 0.5 if model.causal and cut.kind != "decode" else 1.0
    keys = seen_frac * (cut.seq + cut.past) / own.tokens_per_score
    batch, rows = cut.microbatch, heads * seq  # all heads of a sequence read the same keys
    read = made(ATTENTION, "index_scores_input", (cut.microbatch * dim, heads * seq + keys), prec.act_dtype)
    scores = Op(
        module=ATTENTION, name="index_scores", phase="forward", kind="matmul", shape=(batch, rows, keys, dim),
        cost=Cost(2.0 * batch * rows * keys * dim, read.bytes, 4.0 * cut.microbatch * seq * keys),
        reads=(read,), keeps=(read,), dtype=prec.act_dtype,
    )  # fmt: skip
    yield from ops.both_ways(scores, (2.0 * batch, rows, keys, dim))
    queries = cut.microbatch * seq
    yield Op(
        module=ATTENTION, name="index_top_k", phase="forward", kind="kernel", shape=(queries, keys),
        cost=Cost(0.0, 4.0 * queries * keys, 4.0 * queries * own.top_k),
    )  # fmt: skip


# --- linear layers -----------------------------------------------------------------------------

StatedParts = Generator[Op, None, tuple[Tensor, ...]]
"""Ops, and the tensors that the layers in one matmul make."""


def all_tokens(x: Tensor, cut: Cut) -> Tensor:
    """The tensor that the tensor-parallel ranks gather of `x`, their own tokens of it."""
    return (
        exchanged(x, f"{x.name}.gathered", (cut.tokens, x.shape[-1]), cut.tp) if cut.sequence_parallel else x
    )


def column_linear(
    module: str, name: str, x: Tensor, parts: Mapping[str, Num], cut: Cut, *, bias: bool = False,
    frozen: bool = False, adapts: str = "",
) -> StatedParts:  # fmt: skip
    """A linear layer cut by columns, with the exchange that enters its pair; `parts` as in `plain_linear`."""
    d_in, own = x.shape[-1], x
    if cut.sequence_parallel:
        gather = on_tp(module, name, "forward", "all_gather", d_in, cut, reads=x)
        yield gather
        if not frozen:
            yield on_tp(module, name, "backward", "all_gather", d_in, cut, hides_behind=name)
        x = gather.makes[0]
    found = yield from plain_linear(
        module, name, x, parts, cut, bias=bias, frozen=frozen, adapts=adapts, own=own
    )
    yield on_tp(module, name, "backward", summing(cut), d_in, cut, hides_behind=name)
    return found


def row_linear(
    module: str, name: str, part: str, x: Tensor, d_out: Num, cut: Cut, *, bias: bool = False,
    leaves: bool = True,
) -> Stated:  # fmt: skip
    """A linear layer cut by rows (its input is local), with the exchange that leaves its pair.

    `leaves` False: the result is not exchanged yet.
    """
    if leaves and cut.sequence_parallel:
        yield on_tp(module, name, "backward", "all_gather", d_out, cut)
    (y,) = yield from plain_linear(module, name, x, {part: d_out}, cut, bias=bias)
    return (yield from _summed(module, name, y, cut)) if leaves else y


def _summed(module: str, name: str, y: Tensor, cut: Cut) -> Stated:
    """What the ranks have of a sum, added up: each then has its own tokens, or all."""
    done = on_tp(module, name, "forward", summing(cut), y.shape[-1], cut, reads=y)
    yield done
    return done.makes[0]


def plain_linear(
    module: str, name: str, x: Tensor, parts: Mapping[str, Num], cut: Cut, *, bias: bool = False,
    frozen: bool = False, adapts: str = "", own: Tensor | None = None,
) -> StatedParts:  # fmt: skip
    """A linear layer without exchanges; `parts` are the layers that it does in one matmul, by their d_out.

    Under LoRA it is frozen, and beside each of its parts that is a target two thin adapters train (in the
    activations' type), whose result is added; one pair for all where it is one layer that `adapts` by that
    name. With `lora_dropout` they read one copy of the input, of which numbers are dropped.
    """
    (*rows, _), prec, d_out = x.shape, cut.precision, sum(parts.values())
    results = tuple(made(module, part, (*rows, width), prec.act_dtype) for part, width in parts.items())
    is_adapted = cut.lora_rank > 0 and not frozen
    pairs = zip(parts.items() if not adapts else [(adapts, d_out)], results, strict=False)
    adapted = [pair for pair in pairs if not cut.lora_targets or pair[0][0] in cut.lora_targets] * is_adapted
    if is_adapted:
        yield from dequantized(module, name, x.shape[-1] * d_out, cut)
    yield from ops.linears(module, name, x, results, prec, bias=bias, frozen=frozen or is_adapted, own=own)
    of_adapters = ops.precision("bf16") if prec.casts else prec
    if adapted and cut.lora_dropout:
        x = yield from elementwise(module, f"{name}_lora_dropout", "dropout", x, of_adapters)
    for (part, width), whole in adapted:
        thin = yield from linear(module, f"{part}_lora_a", x, float(cut.lora_rank), of_adapters)
        wide = yield from linear(module, f"{part}_lora_b", thin, width, of_adapters)
        shape = ops.flat(x)[0], width
        yield from elementwise(module, f"{part}_lora_add", "residual", (whole, wide), prec, shape=shape)
    return results


def look_up(module: str, name: str, width: Num, cut: Cut) -> Stated:
    """Rows of a table that is cut by tp, for all tokens of its ranks, summed over them: both ways."""
    elem_bytes = cut.precision.act_bytes
    both = Op(module=module, name=name, phase="forward", kind="kernel", shape=(cut.tokens, width))
    numbers = made(module, f"{name}_numbers", (cut.tokens,), "int64")
    found = made(module, name, (cut.tokens, width), cut.precision.act_dtype)
    yield structs.replace(
        both, cost=embedding(cut.tokens, width, elem_bytes=elem_bytes), reads=(numbers,), makes=(found,),
        keeps=(numbers,),
    )  # fmt: skip
    done = on_tp(module, name, "forward", summing(cut), width, cut, reads=found)
    yield done
    if cut.sequence_parallel:
        yield on_tp(module, name, "backward", "all_gather", width, cut)
    cost = embedding_backward(cut.tokens, width, elem_bytes=elem_bytes)
    yield structs.replace(both, phase="backward", cost=cost, is_weight_grad=True)
    return done.makes[0]


def dequantized(module: str, name: str, num_params: Num, cut: Cut) -> Iterator[Op]:
    """Frozen weights of few bits are widened before each use, both ways (QLoRA, arXiv 2305.14314)."""
    prec, frozen_bytes = cut.precision, cut.frozen_bytes
    if frozen_bytes is None or frozen_bytes >= prec.operand_bytes:
        return
    cost = Cost(num_params, frozen_bytes * num_params, prec.operand_bytes * num_params)
    name += WIDENING
    both = Op(module=module, name=name, phase="forward", kind="kernel", shape=(num_params,), cost=cost)
    yield from (both, structs.replace(both, phase="backward"))


def summing(cut: Cut) -> str:
    """The collective that adds up what the ranks have of a sum: each then needs its own tokens, or all."""
    return "reduce_scatter" if cut.sequence_parallel else "all_reduce"


def on_tp(
    module: str, name: str, phase: str, kind: str, width: Num, cut: Cut, *, hides_behind: str = "",
    reads: Tensor | None = None,
) -> Op:  # fmt: skip
    """A collective of all tokens' rows of `width` over the tensor-parallel ranks; a forward one `reads` them.

    Behind a matmul's backward, its input is gathered again while the gradient of the input is computed, and
    that gradient is summed while the weight's is (Megatron-LM, tensor_parallel/layers.py). What matmuls read
    is gathered in their type, fp8 or fp4 (Transformer Engine and torchao cast first); sums are not.
    """
    gradient = ("input" if kind == "all_gather" else "weight") if hides_behind else ""
    is_read = kind == "all_gather" and not name.startswith("norm")
    elem_bytes = cut.precision.operand_bytes if is_read else cut.precision.act_bytes
    op = collective(
        module, name, phase, kind, "tp", cut.tokens * width * elem_bytes, cut.tp,
        stride=cut.tp_stride, hides_behind=hides_behind, behind_gradient=gradient,
    )  # fmt: skip
    if reads is None:
        return op
    if kind == "all_gather":
        return structs.replace(op, reads=(reads,), makes=(all_tokens(reads, cut),), remade=True)
    y = reads
    if kind == "reduce_scatter":
        y = exchanged(reads, f"{module}.{name}.summed", (cut.split_tokens, width), cut.tp)
    return structs.replace(op, reads=(reads,), makes=(y,))
