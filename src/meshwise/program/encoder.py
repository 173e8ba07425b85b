"""An encoder before the decoder: its ends, and the attention of the decoder to what it gives.

The encoder reads a *source*, as long as the decoder's *target* or of a length of its own (Whisper: 1500
tokens for 30 s of sound). Its blocks are those of the model without a causal mask. In each block of the
decoder, behind the attention among its own tokens, queries of the target attend to keys and values of the
source (arXiv 1706.03762, section 3.2.3; T5, arXiv 1910.10683; Whisper, arXiv 2212.04356).
"""

from dataclasses import replace

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.model.architecture import Encoder, Model, across
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Stated, Tensor, changed, elementwise, linear, made
from meshwise.program.tensor_1d import column_linear, leave, norm, on_heads, row_linear

CROSS, ENCODER = "cross_attention", "encoder"


def source_cut(model: Model, cut: Cut) -> Cut:
    """`cut` with the tokens of the source; ranks of cp have all of the text of a diffusion transformer.

    Text alone has no images: the layers that would attend to them are stated as attending to one token.
    """
    if model.diffusion is not None:
        return replace(cut, seq=float(model.diffusion.text_tokens), ulysses=1.0, ring=1.0)
    if any(tower.crossed for tower in model.towers):
        return replace(cut, seq=float(max(across(model), 1)), ulysses=1.0, ring=1.0)
    if model.encoder is None:
        return cut
    return replace(cut, seq=float(model.encoder.seq) or (cut.past if cut.kind == "decode" else cut.seq))


def cross_attention(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, queries of the target, keys and values of the source, attention, output projection, residual.

    What the encoder gives is kept once, at its end, for all blocks; where no norm ends it, by each. Every
    rank of cp has all of the source, and attends to it with queries of its own tokens.
    """
    source, dim = source_cut(model, cut), model.head_dim
    heads, kv_heads = model.num_heads / cut.tp, np.maximum(model.num_kv_heads / cut.tp, 1.0)
    normed = yield from norm(model, cut, CROSS, "norm", x)
    (q,) = yield from column_linear(CROSS, "q", normed, {"q": heads * dim}, cut, bias=model.qkv_bias)
    given = made(CROSS, "source", (source.split_tokens, float(model.hidden)), x.dtype)
    parts = {"k": kv_heads * dim, "v": kv_heads * dim}
    stated = column_linear(CROSS, "kv", given, parts, source, bias=model.qkv_bias)
    k, v = yield from changed(stated, lambda op: structs.replace(op, keeps=()) if model.final_norm else op)
    if model.qk_norm_full:
        of = {"q": q, "k": k}
        yield from on_heads("rmsnorm", "qk_norm", of, ("q",), cut, module=CROSS)
        yield from on_heads("rmsnorm", "key_norm", of, ("k",), source, module=CROSS)
        q, k = of.values()
    unmasked = replace(model, causal=False, positions="none", sliding_window=0, relative_buckets=0)
    local = replace(cut, seq=cut.seq / (cut.ulysses * cut.ring), ulysses=1.0, ring=1.0)
    attended = core_attention(unmasked, local, (q, k, v), dim, dim, kv_heads, source.seq)
    mixed = yield from changed(attended, lambda op: structs.replace(op, module=CROSS))
    out = yield from row_linear(CROSS, "out_proj", "o", mixed, model.hidden, cut, bias=model.out_bias)
    return (yield from leave(replace(model, diffusion=None), cut, CROSS, 1, out, x))


def convolutions(model: Model, cut: Cut, module: str, rows: Num, channels: int) -> Stated:
    """`rows` tokens from twice as many frames of `channels`: two convolutions over three frames each."""
    x = made(module, "frames", (2.0 * rows, float(channels)), cut.precision.act_dtype)
    for name, frames, width in (("conv1", 2.0, channels), ("conv2", 1.0, model.hidden)):
        taps = made(module, f"{name}_taps", (frames * rows, 3.0 * width), cut.precision.act_dtype)
        x = yield from linear(module, name, taps, float(model.hidden), cut.precision, bias=True)
        x = yield from elementwise(module, f"{name}_act", model.activation, x, cut.precision)
    return x


def encoder_ends(model: Model, encoder: Encoder, cut: Cut, x: Tensor) -> Stated:
    """What comes before the first block of the encoder and behind its last one, its tokens' look-up apart."""
    source, prec = source_cut(model, cut), cut.precision
    if encoder.channels:
        x = yield from convolutions(model, cut, ENCODER, source.split_tokens, encoder.channels)
    if model.positions == "learned":
        x = yield from elementwise(ENCODER, "positions", "residual", x, prec)
    if model.embedding_norm:
        x = yield from norm(model, source, ENCODER, "norm", x)
    if model.dropout_frac:
        x = yield from elementwise(ENCODER, "dropout", "dropout", x, prec)
    if model.final_norm:
        last = made(ENCODER, "last", x.shape, x.dtype)  # of the blocks
        for op in norm(model, source, ENCODER, "final_norm", last):
            yield structs.replace(op, keeps=(*op.keeps, op.makes[0])) if op.makes else op
    return x
