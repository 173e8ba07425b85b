"""What some families add to a block, to the embedding or to the head; every rank does it for its own tokens.

*Sides* (`model.Side`) are small layers beside the large ones: gates, compressors of keys, further norms. Each
is one matmul, one norm, one convolution of single channels, or one look-up; a convolution over channels is
the matmul it equals. What they read is kept by the layers that they stand beside, and what they give only
where that is stated. They, and hyper-connections, multiply in 16 bits where large layers do in fewer: neither
recipes nor released checkpoints narrow them.

*Per-layer embeddings* (Gemma 3n and 4): what a block adds at its end, what comes before the first. The table
is cut by tp like that of the tokens. Source: `transformers` 5.23, gemma4/modeling_gemma4.py.

*Several residual streams* around each block, one of which it computes (AltUp, arXiv 2301.13310; Gemma 3n).
The router of the streams reads the hidden state twice, before the block and behind it, with the same weights.
Source: `transformers` 5.23, gemma3n/modeling_gemma3n.py.

*Hyper-connections*: several residual streams, mixed around attention and around the MLP. One layer reads all
n streams of a token, normalised, and says by (2 + n) n numbers how they are added up to what attention or MLP
reads, what each takes of its result, and how they are mixed with each other (a matrix made doubly stochastic
by a few normalisations of n x n numbers, which are not priced). Source of the kernels: mHC, arXiv 2512.24880,
section 4.3 (the layer's matmul divides by the norm, one kernel mixes the streams and adds the result); of the
numbers DeepSeek-V4 in `transformers` 5.23. In Qwen4-Exp (5.24) the streams are normalised, and each of their
numbers is added up with a share of its own, which two thin layers make.

*Disentangled attention* (DeBERTa, arXiv 2006.03654, section 3.1): besides keys of tokens, queries meet keys
made of a table of distances, and keys meet queries made of it. The table is projected in every block. Each
query has a score with all rows of the table; the one of its distance to each key is gathered and added to its
score with that key. The library `transformers` writes all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from msgspec import structs

from meshwise.model.architecture import Distances, Model, PerLayer, Side, Streams
from meshwise.program import op as ops
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, elementwise, kernel, linear, made, precision, product
from meshwise.program.tensor_1d import ATTENTION, look_up, norm, plain_linear

PER_LAYER, STREAMS = "per_layer", "streams"


def _in_16_bits(cut: Cut) -> Cut:
    return replace(cut, precision=precision("bf16")) if cut.precision.casts else cut


def side_ops(model: Model, cut: Cut, sides: Iterable[Side]) -> Iterator[Op]:
    """The ops of `sides`, forward and backward, but for numbers that another op uses."""
    cut = _in_16_bits(cut)
    for side in sides:
        if side.op:
            continue
        if side.rows:
            yield from look_up(side.module, side.name, float(side.times * side.d_out), cut)
            continue
        rows = cut.split_tokens * side.times / side.every
        shape = rows, float(side.d_in or side.d_out)
        x = made(side.module, f"{side.name}_input", shape, cut.precision.act_dtype)
        ops: Iterator[Op] = (
            plain_linear(side.module, side.name, x, {side.name: float(side.d_out)}, cut, bias=side.bias)
            if side.d_in
            else elementwise(side.module, side.name, "conv" if side.taps else model.norm, x, cut.precision)
        )
        for op in ops:
            yield structs.replace(op, keeps=op.makes if side.kept and op.phase == "forward" else ())


def per_layer(model: Model, own: PerLayer, cut: Cut, x: Tensor) -> Stated:
    """Gate, product with the block's vector, projection, norm, residual."""
    prec = cut.precision
    (gate,) = yield from plain_linear(PER_LAYER, "gate", x, {"gate": float(own.width)}, cut)
    vector = made(PER_LAYER, "vector", gate.shape, gate.dtype)
    y = yield from elementwise(PER_LAYER, "gate_act", "swiglu", (gate, vector), prec)
    (y,) = yield from plain_linear(PER_LAYER, "up", y, {"up": float(model.hidden)}, cut)
    y = yield from norm(model, cut, PER_LAYER, "norm", y)
    return (yield from elementwise(PER_LAYER, "residual", "residual", (y, x), prec))


def look_up_per_layer(model: Model, own: PerLayer, cut: Cut, x: Tensor) -> Stated:
    """The second table, and the projection of the first embedding that is added to it."""
    module, prec, rows = "embedding", cut.precision, cut.split_tokens
    width = float(model.num_layers * own.width)
    found = look_up(module, "layer_tokens", width, cut)  # by numbers that the first one keeps
    yield from ops.changed(found, lambda op: structs.replace(op, reads=(), makes=(), keeps=()))
    (y,) = yield from plain_linear(module, "layer_proj", x, {"layer_proj": width}, cut)
    shape = rows * model.num_layers, float(own.width)
    yield from elementwise(module, "layer_norm", model.norm, y, prec, shape=shape)
    return (yield from elementwise(module, "layer_add", "residual", y, prec))


def predicted(model: Model, own: Streams, cut: Cut, x: Tensor) -> Stated:
    """Each stream from all of them, before the block."""
    number = float(own.number)
    rows, hidden, rank, prec = cut.split_tokens, float(model.hidden), float(own.laurel_rank), cut.precision
    normed = yield from norm(model, cut, STREAMS, "router_norm", x)
    (gates,) = yield from plain_linear(STREAMS, "modalities", normed, {"modalities": number}, cut)
    (mixing,) = yield from plain_linear(STREAMS, "predict", gates, {"predict": number * number}, cut)
    streams = made(STREAMS, "streams", (rows * number, hidden), prec.act_dtype)
    mixed = made(STREAMS, "mix", (rows * number, hidden), prec.act_dtype)
    tensors: dict[str, Any] = {"reads": (streams, mixing), "makes": (mixed,), "keeps": (streams,)}
    yield from product(STREAMS, "mix", (rows, hidden, number, number), prec, **tensors)
    yield from elementwise(STREAMS, "mix_add", "residual", (mixed, streams), prec)
    (thin,) = yield from plain_linear(STREAMS, "laurel_left", x, {"laurel_left": rank}, cut)
    (y,) = yield from plain_linear(STREAMS, "laurel_right", thin, {"laurel_right": hidden}, cut)
    y = yield from norm(model, cut, STREAMS, "laurel_norm", y)
    for name in ("laurel_residual", "laurel_add"):
        y = yield from elementwise(STREAMS, name, "residual", (y, x), prec)
    return x


def corrected(model: Model, own: Streams, cut: Cut, x: Tensor) -> Stated:
    """Each stream by the difference between its prediction and what the block made, behind the block."""
    number, rows, hidden, prec = float(own.number), cut.split_tokens, float(model.hidden), cut.precision
    normed = yield from norm(model, cut, STREAMS, "router_norm_again", x)
    gates = yield from linear(STREAMS, "modalities_again", normed, number, prec, frozen=cut.lora_rank > 0)
    yield from plain_linear(STREAMS, "correct", gates, {"correct": number}, cut)
    yield from elementwise(STREAMS, "innovation", "residual", x, prec)
    streams = made(STREAMS, "innovations", (rows * number, hidden), prec.act_dtype)
    y = yield from elementwise(STREAMS, "correction", "scale_by_gate", streams, prec)
    yield from elementwise(STREAMS, "correction_add", "residual", y, prec)
    first = made(STREAMS, "first_stream", (rows, hidden), prec.act_dtype)
    return (yield from elementwise(STREAMS, "output_scale", "layer_scale", first, prec))


def ended(model: Model, own: Streams, cut: Cut, x: Tensor) -> Stated:
    """The other streams, projected, scaled to the length of the first, and averaged with it."""
    y = yield from projected_streams(model, own, cut, "head", x)
    return (yield from elementwise("head", "stream_mean", "residual", y, cut.precision))


def projected_streams(model: Model, own: Streams, cut: Cut, module: str, x: Tensor) -> Stated:
    """The other streams, projected from the embedding (or back) and scaled to its length."""
    others = made(module, "streams", (own.number - 1.0, *x.shape), x.dtype)
    y = yield from linear(module, "stream_proj", others, x.shape[-1], cut.precision, frozen=cut.lora_rank > 0)
    return (yield from elementwise(module, "stream_length", model.norm, y, cut.precision))


def hyper_connections(model: Model, own: Streams, cut: Cut, x: Tensor) -> Stated:
    """What both halves of a block do with the streams: read them, add them up, mix them, add the result."""
    cut = _in_16_bits(cut)
    rows, hidden, prec = cut.split_tokens, float(model.hidden), cut.precision
    width = own.number * hidden
    for half in ("attention", "mlp"):
        streams, mixed = (
            made(STREAMS, f"{half}_{name}", (rows, width), prec.act_dtype) for name in ("streams", "mixed")
        )
        entering, leaving = (
            made(STREAMS, f"{half}_{name}", (rows, hidden), prec.act_dtype) for name in ("input", "result")
        )
        gathered: tuple[Tensor, ...] = (streams,)
        name = f"{half}_mixes"
        if own.gate_rank:
            normed = yield from norm(model, cut, STREAMS, f"{half}_norm", streams)
            down, up = {f"{half}_down": float(own.gate_rank)}, {f"{half}_up": width}
            (thin,) = yield from plain_linear(STREAMS, f"{half}_down", normed, down, cut)
            gathered = normed, *(yield from plain_linear(STREAMS, f"{half}_up", thin, up, cut))
        mixes = {name: float(own.mixes)}
        yield from plain_linear(STREAMS, name, gathered[0], mixes, cut, bias=not own.gate_rank)
        gather = "gated_gather" if own.gate_rank else "gather"
        for kind, reads, keeps, makes in (
            (gather, gathered, gathered, entering), ("mix", (streams, leaving), (streams,), mixed),
        ):  # fmt: skip
            of = STREAMS, f"{half}_{kind}", f"stream_{kind}", rows, width, prec
            yield kernel(*of, phase="forward", reads=reads, makes=(makes,), keeps=keeps)
            yield kernel(*of, phase="backward")
    return x


def distance_scores(model: Model, own: Distances, cut: Cut, x: Tensor) -> Stated:
    """Projections of the table, its scores with queries and keys, and what is gathered of them."""
    prec, dim = cut.precision, float(model.head_dim)
    heads, seq = model.num_heads / cut.tp, cut.seq / (cut.ulysses * cut.ring)
    for name in ("distance_k", "distance_q")[: own.num_scores]:
        bias = not own.shared and (model.key_bias or name != "distance_k")
        table = made(ATTENTION, f"{name}_table", (float(own.rows), float(model.hidden)), prec.act_dtype)
        yield from plain_linear(ATTENTION, name, table, {name: heads * dim}, cut, bias=bias)
    batch = cut.microbatch * heads * own.num_scores
    yield from product(ATTENTION, "distance_scores", (batch, seq, float(own.rows), dim), prec)
    scores = made(ATTENTION, "distance_scores", (batch * seq, cut.seq), prec.act_dtype)
    yield from elementwise(ATTENTION, "distance_gather", "residual", scores, prec)
    return x
