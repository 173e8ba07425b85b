"""The two ends of a model: embedding (or patches) before the blocks; norm, heads and loss after them.

The vocabulary is cut by tp, padded so that it divides (Megatron-LM pads to a multiple of 128 tp; a
catalog entry states its own width). Each rank looks up the tokens it holds and the partial rows are
summed; the head computes vocab/tp logits per token, and the loss exchanges three numbers per token.

Modules of multi-token prediction follow the head: each looks up the token after the next one, projects it
together with the hidden state, and runs a block and the model's head again (arXiv 2412.19437, section 2.2).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.cost.op import Cost
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import embedding_weights, frozen, head_weights, mtp_weights, projectors
from meshwise.program import op as ops
from meshwise.program.additions import ended, look_up_per_layer, projected_streams, side_ops
from meshwise.program.block import block_ops
from meshwise.program.cut import Cut
from meshwise.program.diffusion import condition, modulation
from meshwise.program.encoder import ENCODER, convolutions, encoder_ends, source_cut
from meshwise.program.implementation import as_done_by
from meshwise.program.loss import Loss, loss_ops
from meshwise.program.op import Op, Tensor, backward_last, collected, collective, elementwise, linear, made
from meshwise.program.tensor_1d import column_linear, look_up, norm, on_tp, shards
from meshwise.program.weights_of_ops import hold


def embed(model: Model, cut: Cut) -> list[Op]:
    """Embedding of tokens or patches, positions and what else is added, forward and backward.

    Under LoRA it is frozen: it has no backward and keeps nothing.
    """
    weights = embedding_weights(model)
    if not cut.lora_rank:
        return backward_last(as_done_by(model, cut, hold(_embed(model, cut), weights, cut, shards)))
    forward = [structs.replace(op, keeps=()) for op in _embed(model, cut) if op.phase == "forward"]
    return as_done_by(model, cut, hold(forward, frozen(weights), cut, shards))


def head(model: Model, cut: Cut) -> list[Op]:
    """Final norm, the model's heads and the loss, and multi-token prediction, forward and backward.

    On a grid too the ranks have whole rows of some tokens, and some columns of the head.
    """
    weights = head_weights(model)
    hidden = Tensor("block.input", (cut.split_tokens, float(model.hidden)), cut.precision.act_dtype)
    ops = hold(_head(model, cut, hidden), frozen(weights) if cut.lora_rank else weights, cut, shards)
    ops = as_done_by(model, cut, ops)
    if cut.kind == "train":
        for _ in range(model.mtp_layers):
            ops += _predict_next(model, cut, hidden)
    return backward_last(ops)


# --- embedding ---------------------------------------------------------------------------------


def _embed(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec, hidden = "embedding", cut.precision, float(model.hidden)
    patches, rows = model.patches, cut.split_tokens
    if model.diffusion is not None:
        yield from condition(model, cut, model.diffusion)
        rows = rows * (1.0 - model.diffusion.joint_tokens / cut.seq)
    x = made(module, "sum", (rows, hidden), prec.act_dtype)
    if patches is not None:
        pixels = made(module, "pixels", (rows, patches.channels * float(patches.patch**2)), prec.act_dtype)
        x = yield from linear(module, "patch_proj", pixels, hidden, prec, bias=patches.bias)
        if patches.class_token:
            yield from elementwise(module, "class_token", "copy", x, prec, shape=(cut.microbatch, hidden))
    if model.frames is not None and model.frames.channels:
        x = yield from convolutions(model, cut, module, rows, model.frames.channels)
    if model.vocab:
        x = yield from look_up(module, "tokens", float(model.hidden), cut)
    yield from projected(model, cut)
    if model.token_types:
        x = yield from elementwise(module, "token_types", "residual", x, prec)
    if model.per_layer:
        yield from look_up_per_layer(model, model.per_layer, cut, x)
    if model.streams and model.streams.laurel_rank:
        yield from projected_streams(model, model.streams, cut, module, x)
    yield from side_ops(model, cut, (side for side in model.sides if side.module == module))
    if model.distances:
        table = made(module, "distances", (float(model.distances.rows), hidden), prec.act_dtype)
        yield from elementwise(module, "distances", model.norm, table, prec)
    if model.relative_buckets:
        shape = model.num_heads / cut.tp * cut.seq, cut.seq
        yield from elementwise(module, "relative_bias", "copy", x, prec, shape=shape)
    if model.positions in ("learned", "sinusoidal"):
        x = yield from elementwise(module, "positions", "residual", x, prec)
    if model.embedding_norm:
        x = yield from norm(model, cut, module, "norm", x)
    if model.dropout_frac:
        x = yield from elementwise(module, "dropout", "dropout", x, prec)
    if model.encoder:
        source = made(ENCODER, "input", (source_cut(model, cut).split_tokens, hidden), prec.act_dtype)
        if not model.encoder.channels:
            source = yield from look_up(ENCODER, "tokens", hidden, source_cut(model, cut))
        yield from encoder_ends(model, model.encoder, cut, source)


def projected(model: Model, cut: Cut) -> Iterator[Op]:
    """What the towers give, made tokens of the sequence; a pass that decodes only holds the weights."""
    for op in _projected(model, cut):
        yield structs.replace(op, count=0.0) if cut.kind == "decode" else op


def _projected(model: Model, cut: Cut) -> Iterator[Op]:
    """Each rank does those of its own tokens."""
    prec = cut.precision
    for name, own, num_tokens in projectors(model):
        rows = cut.split_tokens * (num_tokens / cut.seq)
        if own.num_others:
            table = made("embedding", f"{name}_learned", (1.0, float(own.num_others)), prec.act_dtype)
            yield from elementwise("embedding", f"{name}_table", "copy", table, prec)
        widths = [d_in for d_in, _ in own.linears]
        x = made("embedding", f"{name}_tokens", (rows, float(widths[0] if widths else 0)), prec.act_dtype)
        for i, _ in enumerate(own.norms):
            x = yield from elementwise("embedding", f"{name}_norm{i}", model.norm, x, prec)
        for i, (_, d_out) in enumerate(own.linears):
            if i:
                x = yield from elementwise("embedding", f"{name}_act{i}", "gelu", x, prec)
            x = yield from linear("embedding", f"{name}_fc{i}", x, float(d_out), prec, bias=own.bias)


# --- head --------------------------------------------------------------------------------------


def _head(model: Model, cut: Cut, x: Tensor) -> Iterator[Op]:
    module, prec, hidden = "head", cut.precision, float(model.hidden)
    is_frozen = cut.lora_rank > 0
    if model.streams and model.streams.laurel_rank:
        yield from ended(model, model.streams, cut, x)
    yield from side_ops(model, cut, (side for side in model.sides if side.module == module))
    if model.final_norm:
        x = yield from norm(model, cut, module, "final_norm", x)
    if model.diffusion is not None:
        yield from modulation(model, model.diffusion, cut, module, 2)
        rows = cut.split_tokens * (1.0 - model.diffusion.joint_tokens / cut.seq)
        x = Tensor(x.name, (rows, hidden), x.dtype, x)
    if model.patches is not None and model.patches.out_channels:
        width = model.patches.out_channels * float(model.patches.patch**2)
        yield from linear(module, "pixel_head", x, width, prec, bias=model.head_bias, frozen=is_frozen)
    if model.attention_pool:
        yield from _attention_pool(model, cut, x)
    pooled = made(module, "pooled", (cut.microbatch, hidden), prec.act_dtype)
    if model.pooler:
        pooled = yield from linear(module, "pooler", pooled, hidden, prec, bias=True, frozen=is_frozen)
        pooled = yield from elementwise(module, "pooler_tanh", "tanh", pooled, prec)
    if model.num_classes:
        read = x if model.classifies_tokens else pooled
        yield from linear(
            module, "classifier", read, float(model.num_classes), prec, bias=model.classifier_bias,
            frozen=is_frozen,
        )  # fmt: skip
    if model.vocab and model.lm_head:
        yield from _predict(model, cut, "", x)


def _attention_pool(model: Model, cut: Cut, x: Tensor) -> Iterator[Op]:
    """One learned query a sequence attends to all tokens of a rank, then a norm, and an MLP added to it.

    Its scores and softmax (heads x tokens) are left out: they are hidden / head_dim times less than the keys.
    """
    module, batch, hidden, ffn = "head", cut.microbatch, float(model.hidden), float(model.ffn_hidden)

    def layer(name: str, x: Tensor, d_out: float) -> ops.Stated:
        return linear(module, name, x, d_out, cut.precision, bias=True, frozen=cut.lora_rank > 0)

    yield from layer("pool_kv", x, 2.0 * hidden)
    query = made(module, "pool_query", (batch, hidden), cut.precision.act_dtype)
    query = yield from layer("pool_q", query, hidden)
    pooled = yield from layer("pool_out", query, hidden)
    normed = yield from elementwise(module, "pool_norm", model.norm, pooled, cut.precision)
    wide = yield from layer("pool_fc1", normed, ffn)
    wide = yield from elementwise(module, "pool_act", model.activation, wide, cut.precision)
    yield from layer("pool_fc2", wide, hidden)


def _predict(model: Model, cut: Cut, prefix: str, x: Tensor) -> Iterator[Op]:
    """Logits of every token, and their loss; the head has its own type where other matmuls are narrow."""
    if cut.precision.casts:
        cut = replace(cut, precision=ops.precision(cut.head_dtype))
    if model.mlm_transform:
        prec, how = cut.precision, {"bias": model.norm_bias, "frozen": cut.lora_rank > 0}
        x = yield from linear("head", "transform", x, float(model.hidden), prec, **how)
        x = yield from elementwise("head", "transform_act", model.plain_activation, x, prec)
        x = yield from norm(model, cut, "head", "transform_norm", x)
    yield from _in_chunks(model, cut, prefix, x) if cut.loss_chunks > 1 else _logits(model, cut, prefix, x)


def _logits(model: Model, cut: Cut, prefix: str, x: Tensor) -> Iterator[Op]:
    vocab, name, prec = model.vocab / cut.tp, f"{prefix}logits", cut.precision
    how: dict[str, Any] = {"bias": model.head_bias, "frozen": cut.lora_rank > 0}
    (logits,) = yield from column_linear("head", name, x, {name: vocab}, cut, **how)
    if model.logit_softcap:
        logits = yield from elementwise("head", f"{prefix}logit_softcap", "softcap", logits, prec)
    yield from _loss(cut, logits, f"{prefix}cross_entropy")


def _in_chunks(model: Model, cut: Cut, prefix: str, x: Tensor) -> Iterator[Op]:
    """Logits and loss of a chunk of tokens at a time, its backward at once: no input is gathered again.

    Kept are the gradients of the hidden states and of the matrix, to which all chunks but the first are
    added; the backward multiplies them by the gradient of the loss. Source: torchtitan 0.3.0,
    ChunkedLossWrapper; Liger, arXiv 2410.10989.
    """
    number, name = float(cut.loss_chunks), f"{prefix}logits"
    a_chunk = replace(cut, microbatch=cut.microbatch / number)
    of_chunk = Tensor(x.name, (x.shape[0] / number, x.shape[1]), x.dtype, x)
    for op in _logits(model, a_chunk, prefix, of_chunk):
        if op.kind != "collective" or op.name != name:
            yield structs.replace(op, count=number * op.count, keeps=())
        elif op.phase == "forward" or op.collective != "all_gather":
            yield structs.replace(op, payload_bytes=number * op.payload_bytes)
    elem_bytes, hidden = cut.precision.act_bytes, float(model.hidden)
    states, matrix = (cut.tokens, hidden), (0.0 if cut.lora_rank else model.vocab / cut.tp, hidden)
    gradients = tuple(
        made("head", f"{name}_gradient_of_{what}", shape, cut.precision.act_dtype)
        for what, shape in (("hidden", states), ("matrix", matrix))
    )
    rows, trained = cut.tokens * hidden, matrix[0] * hidden
    added, kept = (number - 1.0) * trained, elem_bytes * (rows + trained)
    both = Op(module="head", name=f"{name}_gradients", phase="forward", kind="kernel", shape=states)
    cost = Cost(added, 2.0 * elem_bytes * added, elem_bytes * added)
    yield structs.replace(both, cost=cost, makes=gradients, keeps=gradients)
    yield structs.replace(both, phase="backward", cost=Cost(rows + trained, kept, kept))


def _loss(cut: Cut, logits: Tensor, name: str) -> Iterator[Op]:
    tokens, vocab = logits.shape
    forms: list[tuple[Loss, Any]] = [(cut.loss, True)]
    if cut.loss.split is not None:
        forms = [(cut.loss, cut.tp == 1.0), (cut.loss.split, cut.tp > 1.0)]
    for loss, here in forms:
        in_cells = Tensor(logits.name, (tokens * here, vocab), logits.dtype, logits)
        of = in_cells if np.ndim(here) else logits
        for op in loss_ops(loss, of, name, cut.precision, cut.microbatch) if np.any(here) else ():
            yield structs.replace(op, count=op.count * here)
    yield collective(
        "head", name, "forward", "all_reduce", "tp", 4.0 * tokens, cut.tp, stride=cut.tp_stride, count=3.0
    )


# --- multi-token prediction ----------------------------------------------------------------------


def _predict_next(model: Model, cut: Cut, x: Tensor) -> list[Op]:
    """One module: next token's embedding and hidden state, normalised, projected, a block, the head."""
    weights = mtp_weights(model)
    joined: list[Op] = []
    x = collected(_join(model, cut, x), joined)
    block, x = block_ops(model, cut, layer_kind(model, model.num_layers - 1), x)
    last: list[Op] = []
    x = collected(norm(model, cut, "mtp", "final_norm", x), last)
    last += _predict(model, cut, "mtp_", x)
    ops = [*as_done_by(model, cut, joined), *block, *as_done_by(model, cut, last)]
    return hold(ops, frozen(weights) if cut.lora_rank else weights, cut, shards)


def _join(model: Model, cut: Cut, x: Tensor) -> ops.Stated:
    module, hidden = "mtp", float(model.hidden)
    found: list[Op] = []
    token = collected(look_up(module, "tokens", float(model.hidden), cut), found)
    yield from (op for op in found if not (cut.lora_rank and op.phase == "backward"))
    token = yield from norm(model, cut, module, "embedding_norm", token)
    both = token, (yield from norm(model, cut, module, "hidden_norm", x))
    wide = cut.split_tokens, 2.0 * hidden
    joined = yield from elementwise(module, "concatenate", "copy", both, cut.precision, shape=wide)
    local = {"projection": hidden / cut.tp}
    (part,) = yield from column_linear(module, "projection", joined, local, cut, frozen=cut.lora_rank > 0)
    yield on_tp(module, "projection_rows", "forward", "all_gather", hidden, cut)
    if cut.sequence_parallel:
        yield on_tp(module, "projection_rows", "backward", "all_gather", hidden, cut)
    return made(module, "projected", x.shape, part.dtype)
