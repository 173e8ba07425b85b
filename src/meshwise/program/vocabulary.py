"""The two ends of a model: embedding (or patches) before the blocks; norm, heads and loss after them.

The vocabulary is cut by tp, padded so that it divides (Megatron-LM pads to a multiple of 128 tp; a
catalog entry states its own width). Each rank looks up the tokens it holds and the partial rows are
summed; the head computes vocab/tp logits per token, and the loss exchanges three numbers per token.

Modules of multi-token prediction follow the head: each looks up the token after the next one, projects it
together with the hidden state, and runs a block and the model's head again (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import Cost, cross_entropy, cross_entropy_backward, embedding, embedding_backward
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import embedding_weights, frozen, head_weights, mtp_weights
from meshwise.program.block import block_ops
from meshwise.program.cut import Cut
from meshwise.program.encoder import ENCODER, encoder_ends, source_cut
from meshwise.program.held import hold
from meshwise.program.implementation import as_done_by
from meshwise.program.op import Op, Precision, backward_last, collective, elementwise, linear, precision
from meshwise.program.per_layer import look_up_per_layer
from meshwise.program.streams import begun, ended
from meshwise.program.tensor_1d import column_linear, norm, on_tp, shards, summing


def embed(model: Model, cut: Cut) -> list[Op]:
    """Embedding of tokens or patches, positions and what else is added, forward and backward.

    Under LoRA it is frozen: it has no backward and keeps nothing.
    """
    weights = embedding_weights(model)
    if not cut.lora_rank:
        ops = hold(_embed(model, cut), weights, cut, shards)
        return backward_last(as_done_by(model, cut, ops))
    forward = [op for op in _embed(model, cut) if op.phase == "forward"]
    ops = as_done_by(model, cut, hold(forward, frozen(weights), cut, shards))
    return [structs.replace(op, saved_bytes=0.0) for op in ops]


def head(model: Model, cut: Cut) -> list[Op]:
    """Final norm, the model's heads and the loss, and multi-token prediction, forward and backward."""
    weights = head_weights(model)
    ops = hold(_head(model, cut), frozen(weights) if cut.lora_rank else weights, cut, shards)
    ops = as_done_by(model, cut, ops)
    if cut.kind == "train":
        for _ in range(model.mtp_layers):
            ops += _predict_further(model, cut)
    return backward_last(ops)


# --- embedding ---------------------------------------------------------------------------------


def _embed(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec, hidden = "embedding", cut.precision, float(model.hidden)
    patches, rows = model.patches, cut.split_tokens
    if patches is not None:
        pixels = patches.channels * float(patches.patch**2)
        yield from linear(module, "patch_proj", rows, pixels, hidden, prec, bias=patches.bias)
        if patches.class_token:
            yield from elementwise(module, "class_token", "copy", cut.microbatch, hidden, prec)
    if model.vocab:
        yield from _look_up(model, cut, module)
    if model.token_types:
        yield from elementwise(module, "token_types", "residual", rows, hidden, prec)
    if model.per_layer:
        yield from look_up_per_layer(model, cut)
    if model.streams:
        yield from begun(model, cut)
    if model.distances:
        yield from elementwise(module, "distances", model.norm, float(model.distances.rows), hidden, prec)
    if model.relative_buckets:
        yield from elementwise(
            module, "relative_bias", "copy", model.num_heads / cut.tp * cut.seq, cut.seq, prec
        )
    if model.positions in ("learned", "sinusoidal"):
        yield from elementwise(module, "positions", "residual", rows, hidden, prec)
    if model.embedding_norm:
        yield from norm(model, cut, module, "norm")
    if model.dropout_frac:
        yield from elementwise(module, "dropout", "dropout", rows, hidden, prec)
    if model.encoder:
        if not model.encoder.channels:
            yield from _look_up(model, source_cut(model, cut), ENCODER)
        yield from encoder_ends(model, cut)


def _look_up(model: Model, cut: Cut, module: str) -> Iterator[Op]:
    hidden, elem_bytes = float(model.hidden), cut.precision.act_bytes
    both = Op(module=module, name="tokens", phase="forward", kind="kernel", shape=(cut.tokens, hidden))
    yield structs.replace(
        both, cost=embedding(cut.tokens, hidden, elem_bytes=elem_bytes), saved_bytes=8.0 * cut.tokens
    )
    yield on_tp(module, "tokens", "forward", summing(cut), hidden, cut)
    if cut.sequence_parallel:
        yield on_tp(module, "tokens", "backward", "all_gather", hidden, cut)
    cost = embedding_backward(cut.tokens, hidden, elem_bytes=elem_bytes)
    yield structs.replace(both, phase="backward", cost=cost, is_weight_grad=True)


# --- head --------------------------------------------------------------------------------------


def _head(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec, hidden = "head", cut.precision, float(model.hidden)
    is_frozen = cut.lora_rank > 0
    if model.streams:
        yield from ended(model, cut)
    if model.final_norm:
        yield from norm(model, cut, module, "final_norm")
    if model.patches is not None and model.patches.out_channels:
        width = model.patches.out_channels * float(model.patches.patch**2)
        yield from linear(
            module,
            "pixel_head",
            cut.split_tokens,
            hidden,
            width,
            prec,
            bias=model.head_bias,
            frozen=is_frozen,
        )
    if model.attention_pool:
        yield from _attention_pool(model, cut)
    if model.pooler:
        yield from linear(module, "pooler", cut.microbatch, hidden, hidden, prec, bias=True, frozen=is_frozen)
        yield from elementwise(module, "pooler_tanh", "tanh", cut.microbatch, hidden, prec)
    if model.num_classes:
        rows, classes = (
            cut.split_tokens if model.classifies_tokens else cut.microbatch,
            float(model.num_classes),
        )
        yield from linear(
            module, "classifier", rows, hidden, classes, prec, bias=model.classifier_bias, frozen=is_frozen
        )
    if model.vocab and model.lm_head:
        yield from _predict(model, cut, "")


def _attention_pool(model: Model, cut: Cut) -> Iterator[Op]:
    """One learned query a sequence attends to all tokens of a rank, then a norm, and an MLP added to it.

    Its scores and softmax (heads x tokens) are left out: they are hidden / head_dim times less than the keys.
    """
    module, batch, hidden, ffn = "head", cut.microbatch, float(model.hidden), float(model.ffn_hidden)

    def layer(name: str, rows: Num, d_in: float, d_out: float) -> Iterator[Op]:
        is_frozen = cut.lora_rank > 0
        return linear(module, name, rows, d_in, d_out, cut.precision, bias=True, frozen=is_frozen)

    yield from layer("pool_kv", cut.split_tokens, hidden, 2.0 * hidden)
    yield from layer("pool_q", batch, hidden, hidden)
    yield from layer("pool_out", batch, hidden, hidden)
    yield from elementwise(module, "pool_norm", model.norm, batch, hidden, cut.precision)
    yield from layer("pool_fc1", batch, hidden, ffn)
    yield from elementwise(module, "pool_act", model.activation, batch, ffn, cut.precision)
    yield from layer("pool_fc2", batch, ffn, hidden)


def _predict(model: Model, cut: Cut, prefix: str) -> Iterator[Op]:
    """Logits of every token, and their loss; the head has its own type where other matmuls are narrow."""
    if cut.precision.casts:
        cut = replace(cut, precision=precision(cut.head_dtype))
    if model.mlm_transform:
        module, prec, rows, hidden = "head", cut.precision, cut.split_tokens, float(model.hidden)
        is_frozen = cut.lora_rank > 0
        yield from linear(
            module, "transform", rows, hidden, hidden, prec, bias=model.norm_bias, frozen=is_frozen
        )
        yield from elementwise(module, "transform_act", model.activation, rows, hidden, prec)
        yield from norm(model, cut, module, "transform_norm")
    yield from _in_chunks(model, cut, prefix) if cut.loss_chunks > 1 else _logits(model, cut, prefix)


def _logits(model: Model, cut: Cut, prefix: str) -> Iterator[Op]:
    vocab, name, prec = model.vocab / cut.tp, f"{prefix}logits", cut.precision
    yield from column_linear(
        "head", name, float(model.hidden), {name: vocab}, cut, bias=model.head_bias, frozen=cut.lora_rank > 0
    )
    if model.logit_softcap:
        yield from elementwise("head", f"{prefix}logit_softcap", "softcap", cut.tokens, vocab, prec)
    yield from _loss(cut, vocab, f"{prefix}cross_entropy", prec)


def _in_chunks(model: Model, cut: Cut, prefix: str) -> Iterator[Op]:
    """Logits and loss of a chunk of tokens at a time, its backward at once: no input is gathered again.

    Kept are the gradients of the hidden states and of the matrix, to which all chunks but the first are
    added; the backward multiplies them by the gradient of the loss. Source: torchtitan 0.3.0,
    ChunkedLossWrapper; Liger, arXiv 2410.10989.
    """
    number, name = float(cut.loss_chunks), f"{prefix}logits"
    for op in _logits(model, replace(cut, microbatch=cut.microbatch / number), prefix):
        if op.kind != "collective" or op.name != name:
            yield structs.replace(op, count=number * op.count, saved_bytes=0.0)
        elif op.phase == "forward" or op.collective != "all_gather":
            yield structs.replace(op, payload_bytes=number * op.payload_bytes)
    elem_bytes, hidden = cut.precision.act_bytes, float(model.hidden)
    rows, trained = cut.tokens * hidden, model.vocab / cut.tp * hidden * (cut.lora_rank == 0)
    added, kept = (number - 1.0) * trained, elem_bytes * (rows + trained)
    both = Op(
        module="head", name=f"{name}_gradients", phase="forward", kind="kernel", shape=(cut.tokens, hidden)
    )
    cost = Cost(added, 2.0 * elem_bytes * added, elem_bytes * added)
    yield structs.replace(both, cost=cost, saved_bytes=kept)
    yield structs.replace(both, phase="backward", cost=Cost(rows + trained, kept, kept))


def _loss(cut: Cut, vocab: Num, name: str, prec: Precision) -> Iterator[Op]:
    tokens = cut.tokens
    both = Op(module="head", name=name, phase="forward", kind="kernel", shape=(tokens, vocab))
    forward = cross_entropy(tokens, vocab, elem_bytes=prec.act_bytes)
    yield structs.replace(both, cost=forward, saved_bytes=4.0 * tokens * vocab)
    yield collective(
        "head", name, "forward", "all_reduce", "tp", 4.0 * tokens, cut.tp, stride=cut.tp_stride, count=3.0
    )
    backward = cross_entropy_backward(tokens, vocab, elem_bytes=prec.act_bytes)
    yield structs.replace(both, phase="backward", cost=backward)


# --- multi-token prediction ----------------------------------------------------------------------


def _predict_further(model: Model, cut: Cut) -> list[Op]:
    """One module: next token's embedding and hidden state, normalised, projected, a block, the head."""
    weights = mtp_weights(model)
    ops = [
        *as_done_by(model, cut, list(_join(model, cut))),
        *block_ops(model, cut, layer_kind(model, model.num_layers - 1)),
        *as_done_by(model, cut, [*norm(model, cut, "mtp", "final_norm"), *_predict(model, cut, "mtp_")]),
    ]
    return hold(ops, frozen(weights) if cut.lora_rank else weights, cut, shards)


def _join(model: Model, cut: Cut) -> Iterator[Op]:
    module, hidden = "mtp", float(model.hidden)
    look_up = _look_up(model, cut, module)
    yield from (op for op in look_up if not (cut.lora_rank and op.phase == "backward"))
    for name in ("embedding_norm", "hidden_norm"):
        yield from norm(model, cut, module, name)
    yield from elementwise(module, "concatenate", "copy", cut.split_tokens, 2.0 * hidden, cut.precision)
    local = {"projection": hidden / cut.tp}
    yield from column_linear(module, "projection", 2.0 * hidden, local, cut, frozen=cut.lora_rank > 0)
    yield on_tp(module, "projection_rows", "forward", "all_gather", hidden, cut)
    if cut.sequence_parallel:
        yield on_tp(module, "projection_rows", "backward", "all_gather", hidden, cut)
