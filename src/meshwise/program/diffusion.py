"""Diffusion transformers: the condition that modulates every block, and blocks of two streams.

A sequence is the patches of one latent image or video (DiT, arXiv 2212.09748). Attention and MLP are those of
any transformer without a mask. Around them, scale and shift are part of the kernel of the norm, and a gate
scales what is added to the stream; the condition, one vector a sequence, gives all three. Text is read by
cross-attention (`program.encoder`), or its tokens stand behind the patches: in blocks of two streams each has
weights of its own and both attend together (arXiv 2403.03206), in single ones (Flux) all weights are shared.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwise.core.units import Num
from meshwise.model.architecture import Diffusion, Layer, Model
from meshwise.model.weights import embedded, modulated, refiner_layers
from meshwise.program import tensor_1d
from meshwise.program.context import core_attention
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, elementwise, linear, made
from meshwise.program.tensor_1d import ATTENTION, column_linear, leave, norm, on_heads, row_linear

EMBEDDING = "embedding"


def modulation(model: Model, of: Diffusion, cut: Cut, module: str, vectors: int) -> Iterator[Op]:
    """What the condition gives a block, or the head: `vectors` of the model's width for each sequence."""
    prec, width = cut.precision, float(vectors * model.hidden)
    given = made(module, "condition", (cut.microbatch, float(model.hidden)), prec.act_dtype)
    if of.modulation == "shared":
        yield from elementwise(module, "modulation", "residual", given, prec, shape=(cut.microbatch, width))
        return
    acted = yield from elementwise(module, "modulation_act", "silu", given, prec)
    yield from tensor_1d.plain_linear(module, "modulation", acted, {"modulation": width}, cut)


def two_streams(model: Model, diffusion: Diffusion, cut: Cut, layer: Layer, x: Tensor) -> Stated:
    """A block in which patches and text have their own weights, and attend to all tokens of both."""
    dim, heads = model.head_dim, model.num_heads / cut.tp
    num_text = float(diffusion.text_tokens)
    cuts = {"image": replace(cut, seq=cut.seq - num_text), "text": replace(cut, seq=num_text)}
    streams: dict[str, Tensor] = {}
    projected = []
    for stream, own in cuts.items():
        ends = layer.side == "last" and stream == "text"
        yield from modulation(model, diffusion, own, stream, 2 if ends else modulated(layer))
        streams[stream] = Tensor(x.name, (own.split_tokens, float(model.hidden)), x.dtype, x)
        normed = yield from norm(model, own, stream, "norm1", streams[stream])
        parts = dict.fromkeys(("q", "k", "v"), heads * dim)
        found = yield from column_linear(stream, "qkv", normed, parts, own, bias=model.qkv_bias)
        of = dict(zip(parts, found, strict=True))
        if model.qk_norm:
            yield from on_heads("rmsnorm", "qk_norm", of, ("q", "k"), own, float(dim), module=stream)
        projected.append(tuple(of.values()))
    of, shape = {}, (cut.tokens, heads * dim)
    for name, both in zip("qkv", zip(*projected, strict=True), strict=True):
        of[name] = yield from elementwise(ATTENTION, f"{name}_join", "copy", both, cut.precision, shape=shape)
    if model.positions == "rotary":
        yield from on_heads("rotary", "rotary", of, ("q", "k"), cut)
    mixed = yield from core_attention(model, cut, tuple(of.values()), dim, dim, heads)
    for stream, own in cuts.items():
        if layer.side == "last" and stream == "text":
            continue
        mine = Tensor(mixed.name, (own.tokens, mixed.shape[-1]), mixed.dtype, mixed)
        out = yield from row_linear(stream, "out_proj", "o", mine, model.hidden, own, bias=model.out_bias)
        y = yield from leave(model, own, stream, 1, out, streams[stream])
        normed = yield from norm(model, own, stream, "norm2", y)
        out = yield from tensor_1d.feed_forward(model, own, stream, model.ffn_hidden, normed)
        x = yield from leave(model, own, stream, 2, out, y)
    return x


def condition(model: Model, cut: Cut, own: Diffusion) -> Iterator[Op]:
    """What is done once for all blocks: the condition of each sequence, and its text in the model's width."""
    prec, hidden = cut.precision, float(model.hidden)
    of_text = cut.microbatch * own.text_tokens / (cut.tp if cut.sequence_parallel else 1.0)

    def layer(name: str, x: Tensor, d_out: Num) -> Stated:
        return linear(EMBEDDING, name, x, d_out, prec, bias=True)

    def given(name: str, rows: Num, width: float) -> Tensor:
        return made(EMBEDDING, name, (rows, width), prec.act_dtype)

    for name, width in embedded(own):
        rows = of_text if name == "refiner_text" else cut.microbatch
        x = yield from layer(f"{name}_fc1", given(name, rows, float(width)), hidden)
        x = yield from elementwise(EMBEDDING, f"{name}_act", "silu", x, prec)
        yield from layer(f"{name}_fc2", x, hidden)
    if own.num_classes:
        yield from elementwise(EMBEDDING, "classes", "copy", given("class", cut.microbatch, hidden), prec)
    x = given("text", of_text, float(own.text_width))
    for i in range(own.text_layers if own.text else 0):
        if i:
            x = yield from elementwise(EMBEDDING, "text_act", "gelu", x, prec)
        x = yield from layer(f"text_fc{i}", x, hidden)
    if own.modulation == "shared":
        yield from layer("modulation", given("condition", cut.microbatch, hidden), 6.0 * hidden)
    for i in range(own.refiner_layers):
        for name, d_in, d_out in refiner_layers(model.hidden):
            rows = cut.microbatch if name == "modulation" else of_text
            read = given(f"refiner{i}_{name}_input", rows, float(d_in))
            yield from layer(f"refiner{i}_{name}", read, float(d_out))
        for name in ("norm1", "norm2"):
            yield from elementwise(EMBEDDING, f"refiner{i}_{name}", "layernorm", x, prec)
