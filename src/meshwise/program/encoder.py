"""An encoder before the decoder: its ends, and the attention of the decoder to what it gives.

The encoder reads a *source*, as long as the decoder's *target* or of a length of its own (Whisper: 1500
tokens for 30 s of sound). Its blocks are those of the model without a causal mask. In each block of the
decoder, behind the attention among its own tokens, queries of the target attend to keys and values of the
source (arXiv 1706.03762, section 3.2.3; T5, arXiv 1910.10683; Whisper, arXiv 2212.04356).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from msgspec import structs

from meshwise.model.architecture import Model
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, elementwise, linear
from meshwise.program.tensor_1d import column_linear, leave, norm, row_linear

CROSS, ENCODER = "cross_attention", "encoder"


def source_cut(model: Model, cut: Cut) -> Cut:
    """`cut` with the tokens of the source."""
    return replace(cut, seq=float(model.encoder.seq)) if model.encoder and model.encoder.seq else cut


def cross_attention(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, queries of the target, keys and values of the source, attention, output projection, residual.

    What the encoder gives is kept once, at its end, for all blocks; where no norm ends it, by each.
    """
    source, dim = source_cut(model, cut), model.head_dim
    heads, kv_heads = model.num_heads / cut.tp, np.maximum(model.num_kv_heads / cut.tp, 1.0)
    yield from norm(model, cut, CROSS, "norm")
    yield from column_linear(CROSS, "q", model.hidden, {"q": heads * dim}, cut, bias=model.qkv_bias)
    keys = column_linear(
        CROSS, "kv", model.hidden, {"k": kv_heads * dim, "v": kv_heads * dim}, source, bias=model.qkv_bias
    )
    yield from (structs.replace(op, saved_bytes=0.0) if model.final_norm else op for op in keys)
    unmasked = replace(model, causal=False, positions="none", sliding_window=0, relative_buckets=0)
    attended = core_attention(unmasked, cut, dim, dim, kv_heads, source.seq)
    yield from (structs.replace(op, module=CROSS) for op in attended)
    yield from row_linear(
        CROSS,
        "out_proj",
        "o",
        heads * dim,
        model.hidden,
        cut,
        bias=model.out_bias,
        kept=0.0 if cut.flash else 1.0,
    )
    yield from leave(model, cut, CROSS, 1)


def encoder_ends(model: Model, cut: Cut) -> Iterator[Op]:
    """What comes before the first block of the encoder and behind its last one, its tokens' look-up apart."""
    source, prec, hidden = source_cut(model, cut), cut.precision, float(model.hidden)
    rows, encoder = source.split_tokens, model.encoder
    assert encoder is not None
    if encoder.channels:
        for name, frames, width in (("conv1", 2.0, encoder.channels), ("conv2", 1.0, model.hidden)):
            yield from linear(ENCODER, name, frames * rows, 3.0 * width, hidden, prec, bias=True)
            yield from elementwise(ENCODER, f"{name}_act", model.activation, frames * rows, hidden, prec)
    if model.positions == "learned":
        yield from elementwise(ENCODER, "positions", "residual", rows, hidden, prec)
    if model.embedding_norm:
        yield from norm(model, source, ENCODER, "norm")
    if model.dropout_frac:
        yield from elementwise(ENCODER, "dropout", "dropout", rows, hidden, prec)
    if model.final_norm:
        output_bytes = rows * hidden * prec.act_bytes
        for op in norm(model, source, ENCODER, "final_norm"):
            kept = output_bytes if op.phase == "forward" else 0.0
            yield structs.replace(op, saved_bytes=op.saved_bytes + kept)
