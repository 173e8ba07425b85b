"""The two ends of a model: embedding (or patches) before the blocks; norm, head and loss after them.

The vocabulary is cut by tp, padded so that it divides (Megatron-LM pads to a multiple of 128 tp; a
catalog entry states its own width). Each rank looks up the tokens it holds and the partial rows are
summed; the head computes vocab/tp logits per token, and the loss exchanges three numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwise.core.units import Num
from meshwise.cost.op import cross_entropy, cross_entropy_backward, embedding, embedding_backward
from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.program.op import Op, backward_last, collective, elementwise, linear
from meshwise.program.tensor_1d import norm


def embed(model: Model, cut: Cut) -> list[Op]:
    """Token (or patch) embedding, positions and their dropout, forward and backward."""
    return backward_last(list(_embed(model, cut)))


def head(model: Model, cut: Cut) -> list[Op]:
    """Final norm, LM head (or pixel head) and loss, forward and backward."""
    return backward_last(list(_head(model, cut)))


def _embed(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec = "embedding", cut.precision
    if model.patches is not None:
        patch = model.patches.channels * float(model.patches.patch**2)
        yield from linear(
            module, "patch_proj", cut.split_tokens, patch, float(model.hidden), prec, bias=True,
        )  # fmt: skip
    else:
        yield from _look_up(model, cut)
    if model.positions == "learned":
        yield from elementwise(
            module, "positions", "residual", cut.split_tokens, model.hidden, prec,
            num_params=float((model.max_seq + model.extra_position_rows) * model.hidden),
        )  # fmt: skip
    if model.dropout_frac:
        yield from elementwise(module, "dropout", "dropout", cut.split_tokens, model.hidden, prec)


def _look_up(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec, hidden = "embedding", cut.precision, float(model.hidden)
    common: dict[str, Any] = {
        "module": module,
        "name": "tokens",
        "kind": "kernel",
        "shape": (cut.tokens, hidden),
    }
    yield Op(
        phase="forward",
        cost=embedding(cut.tokens, hidden, elem_bytes=prec.act_bytes),
        saved_bytes=8.0 * cut.tokens,
        num_params=model.vocab * hidden / cut.tp,
        **common,
    )
    payload = cut.tokens * hidden * prec.act_bytes
    on_tp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": payload,
        "group_size": cut.tp,
        "stride": cut.tp_stride,
    }
    kind = "reduce_scatter" if cut.sequence_parallel else "all_reduce"
    yield collective(module, "tokens", "forward", kind, **on_tp)
    if cut.sequence_parallel:
        yield collective(module, "tokens", "backward", "all_gather", **on_tp)
    backward = embedding_backward(cut.tokens, hidden, elem_bytes=prec.act_bytes)
    yield Op(phase="backward", cost=backward, is_weight_grad=True, **common)


def _head(model: Model, cut: Cut) -> Iterator[Op]:
    module, prec, hidden = "head", cut.precision, float(model.hidden)
    if model.final_norm:
        yield from norm(model, cut, module, "final_norm")
    if model.patches is not None:
        width = model.patches.out_channels * float(model.patches.patch**2)
        if width:
            yield from linear(module, "pixel_head", cut.split_tokens, hidden, width, prec, bias=True)
        return
    if not model.vocab or not model.lm_head:
        return
    vocab = model.vocab / cut.tp
    payload = cut.tokens * hidden * prec.act_bytes
    on_tp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": payload,
        "group_size": cut.tp,
        "stride": cut.tp_stride,
    }
    if cut.sequence_parallel:
        yield collective(module, "logits", "forward", "all_gather", **on_tp)
        yield collective(module, "logits", "backward", "all_gather", hides_behind="logits", **on_tp)
    for op in linear(module, "logits", cut.tokens, hidden, vocab, prec, saved_rows=cut.split_tokens):
        yield replace(op, num_params=0.0) if model.tied_embedding else op
    kind = "reduce_scatter" if cut.sequence_parallel else "all_reduce"
    yield collective(module, "logits", "backward", kind, hides_behind="logits", **on_tp)
    yield from _loss(cut, vocab)


def _loss(cut: Cut, vocab: Num) -> Iterator[Op]:
    module, act_bytes = "head", cut.precision.act_bytes
    common: dict[str, Any] = {
        "module": module,
        "name": "cross_entropy",
        "kind": "kernel",
        "shape": (cut.tokens, vocab),
    }
    forward = cross_entropy(cut.tokens, vocab, elem_bytes=act_bytes)
    yield Op(phase="forward", cost=forward, saved_bytes=4.0 * cut.tokens * vocab, **common)
    yield collective(
        module, "cross_entropy", "forward", "all_reduce", "tp", 4.0 * cut.tokens, cut.tp,
        stride=cut.tp_stride, count=3.0,
    )  # fmt: skip
    yield Op(phase="backward", cost=cross_entropy_backward(cut.tokens, vocab, elem_bytes=act_bytes), **common)
