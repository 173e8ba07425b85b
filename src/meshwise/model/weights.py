"""The weights of a model, each named once: numbers of parameters, what a rank holds, and what trains.

A model is an embedding, blocks, and a head (and modules of multi-token prediction). Each of these parts
is a tuple of `Weight`s. A weight says its shape, which of its dims tensor parallelism cuts, and which op
brings it; nothing else in this package counts weights. `program.weights_of_ops` says what a rank of each
layout holds.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from meshwise.model import architecture as arch
from meshwise.model.architecture import Layer, Model, Side

COLUMNS, ROWS, WHOLE = "columns", "rows", ""
IMAGE = "image_"
"""What the names of experts begin with that no token of text visits."""
TIME_WIDTH = 256
"""Sines and cosines that a diffusion transformer's time, or guidance, is written in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight of a part of a model.

    `module` and `op` name the op that brings it; `name` is the layer it belongs to. `shape` is [d_in, d_out]
    of a matrix, [width] of a vector, the number of experts in front where each has its own (`is_expert`), and
    that of groups of heads where each has a matrix of its own.

    `cut` is the dim that tensor parallelism cuts: the last (`columns`), that before it (`rows`), or none. At
    most `units` ranks have different parts (0: any number): with fewer key-value heads than ranks, several
    hold the same head.

    `gradient`: a rank's gradient of a weight that is not cut is `whole`, or of the rank's own `tokens` where
    sequence parallelism cuts them, or always of its own `part` (heads, or tokens that it routes); the last
    two are summed over the ranks. `trains` is False for what no gradient moves. `size` is its number of
    parameters; `is_matrix` tells a matrix (or one of each expert) from a vector.
    """

    module: str
    op: str
    name: str
    shape: tuple[int, ...]
    cut: str = WHOLE
    units: int = 0
    gradient: str = "whole"
    is_expert: bool = False
    is_adapter: bool = False
    trains: bool = True
    size: int = field(init=False)
    is_matrix: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))
        object.__setattr__(self, "is_matrix", len(self.shape) > (2 if self.is_expert else 1))


Weights = tuple[Weight, ...]


def num_weights(weights: Iterable[Weight]) -> int:
    """How many parameters `weights` have together."""
    return sum(weight.size for weight in weights)


# --- blocks ------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def block_weights(
    model: Model, layer: Layer, lora_rank: int = 0, lora_targets: tuple[str, ...] = ()
) -> Weights:
    """The weights of one block; with `lora_rank`, frozen, and with the adapters that train beside them."""
    mixers = {
        "attention": (_attention,),
        "recurrence": (partial(_block_norm, module="recurrence", number=1), _recurrence),
        "beside": (_attention, _recurrence),
        "cross": (_cross_attention,),
        "none": (),
    }[layer.mixer]
    own = arch.of_layer(model, layer)
    feed_forward = (_moe(own) if layer.moe else _mlp(own)) if layer.mlp else ()
    if layer.side == "decoder" or (model.diffusion and model.diffusion.text == "cross"):
        mixers = (*mixers, _cross_attention)
    if model.diffusion:
        mixers = (*mixers, partial(_modulation, width=modulated(layer)))
    if layer.side in ("double", "last"):
        mixers, feed_forward = (partial(_two_streams, is_last=layer.side == "last"),), ()
    weights = (*(weight for mixer in mixers for weight in mixer(own)), *feed_forward)
    if model.per_layer:
        weights = (*weights, *_per_layer(model, model.per_layer))
    if model.streams:
        weights = (*weights, *_streams(model, model.streams))
    weights = (*weights, *side_weights(layer.sides))
    if layer.shares:
        weights = tuple(side_weights(side for side in layer.sides if not side.shared))
    return with_adapters(weights, lora_rank, lora_targets) if lora_rank else weights


def frozen(weights: Weights) -> Weights:
    """`weights`, none of which trains."""
    return tuple(replace(weight, trains=False) for weight in weights)


def with_adapters(weights: Weights, rank: int, targets: tuple[str, ...] = ()) -> Weights:
    """`weights` frozen, and beside each linear layer [d_in, d_out] adapters [d_in, rank], [rank, d_out].

    Linear layers are those that `target_modules="all-linear"` of PEFT finds in Llama: each projection of
    attention, MLP and shared experts by itself; where `targets` are named, those alone. Routers, and experts
    (one tensor for all there), have none.
    """
    adapted = [weight for weight in weights if not targets or weight.name in targets]
    return (*frozen(weights), *(adapter for weight in adapted for adapter in _adapters(weight, rank)))


def has_adapters(weight: Weight) -> bool:
    """Whether LoRA puts adapters beside `weight`."""
    return len(weight.shape) == 2 and not weight.is_expert and weight.op != "router"


def _adapters(weight: Weight, rank: int) -> Iterator[Weight]:
    if not has_adapters(weight):
        return
    d_in, d_out = weight.shape
    # Beside a cut layer, the adapter that is not cut sees the rank's part of the other one.
    adapter = replace(weight, gradient="part" if weight.cut else weight.gradient, is_adapter=True)
    for side, shape, cut in (("a", (d_in, rank), ROWS), ("b", (rank, d_out), COLUMNS)):
        name, is_cut = f"{weight.name}_lora_{side}", weight.cut == cut
        whole = replace(adapter, op=name, name=name, shape=shape, cut=WHOLE, units=0)
        yield replace(whole, cut=cut, units=weight.units) if is_cut else whole


def _learned(module: str, name: str, *shape: int, op: str = "", **how: Any) -> Weight:
    """A vector or a table; `op` is called as the weight unless stated."""
    return Weight(module=module, op=op or name, name=name, shape=shape, **how)


def _linear(
    module: str, name: str, d_in: int, d_out: int, *, bias: bool = False, experts: int = 0, **how: Any
) -> Iterator[Weight]:
    """A matrix, of each expert if there are some, and its bias, which is cut if the columns are."""
    stack = (experts,) if experts else ()
    matrix = _learned(module, name, *stack, d_in, d_out, is_expert=experts > 0, **how)
    yield matrix
    if bias:
        cut = WHOLE if matrix.cut == ROWS else matrix.cut
        yield replace(matrix, name=f"{name}_bias", shape=(*stack, d_out), cut=cut)


def _norm(
    model: Model, module: str, name: str, width: int, *, op: str = "", gradient: str = "tokens"
) -> Iterator[Weight]:
    """Weight and bias of a norm, as far as the model's norms have them."""
    if model.norm_weight:
        yield _learned(module, name, width, op=op, gradient=gradient)
    if model.norm_bias:
        yield _learned(module, f"{name}_bias", width, op=op or name, gradient=gradient)


def _block_norm(model: Model, module: str, number: int) -> Iterator[Weight]:
    """The norm before attention (`number` 1) or MLP (2), and that behind it, as far as the block has them."""
    # Two norms of a parallel block see all tokens, of which each rank has the gradient of its own part.
    gradient = "part" if model.parallel_block and model.num_norms > 1 else "tokens"
    if number <= model.num_norms:
        yield from _norm(model, module, f"norm{number}", model.hidden, gradient=gradient)
    if model.num_norms == 4:
        yield from _norm(model, module, f"post_norm{number}", model.hidden)
    if model.layer_scale:
        yield _learned(module, f"layer_scale{number}", model.hidden, gradient=gradient)


def _attention(model: Model) -> Iterator[Weight]:
    module, hidden, own = "attention", model.hidden, model.distances
    query = model.num_heads * model.head_dim
    yield from _block_norm(model, module, 1)
    yield from _latent_qkv(model, model.mla) if model.mla else _grouped_qkv(model)
    if own and not own.shared:
        for name in ("distance_k", "distance_q")[: own.num_scores]:
            bias = model.key_bias or name != "distance_k"
            yield from _linear(module, name, hidden, query, bias=bias, cut=COLUMNS)
    if model.sinks:
        yield _learned(module, "sinks", model.num_heads, op="core", cut=COLUMNS)
    width = model.num_heads * model.value_dim
    if model.low_rank and model.low_rank.out:
        groups, rank = model.low_rank.groups, model.low_rank.out
        yield _learned(module, "o_down", groups, width // groups, rank, cut=COLUMNS)
        width = groups * rank
    if model.attention_gate and model.mla:
        yield from _linear(module, "gate", hidden, model.num_heads * model.gate_dim, cut=COLUMNS)
    yield from _linear(module, "o", width, hidden, op="out_proj", bias=model.out_bias, cut=ROWS)
    if model.sparse and model.sparse.heads:
        yield from _indexer(model, model.sparse)


def query_rank(model: Model) -> int:
    """Width of the latent that queries come through (0: they come straight from the input)."""
    return model.mla.q_lora_rank if model.mla else model.low_rank.query if model.low_rank else 0


def _indexer(model: Model, own: arch.Sparse) -> Iterator[Weight]:
    """Small heads that score keys, on every rank, which scores all of its tokens."""
    module, hidden = "attention", model.hidden
    yield from _linear(module, "index_q", query_rank(model) or hidden, own.heads * own.head_dim)
    if own.ratio == 1:
        yield from _linear(module, "index_k", hidden, own.head_dim)
        for name in ("index_norm", "index_norm_bias"):
            yield _learned(module, name, own.head_dim, op="index_norm")
    if own.weighted:
        yield from _linear(module, "index_weights", hidden, own.heads)


def _grouped_qkv(model: Model) -> Iterator[Weight]:
    module, hidden, kv_heads = "attention", model.hidden, model.num_kv_heads
    query, key = model.num_heads * model.head_dim, kv_heads * model.head_dim
    if model.low_rank:
        rank = model.low_rank.query
        yield from _linear(module, "q_down", hidden, rank, gradient="tokens")
        yield from _norm(model, module, "q_norm", rank)
        yield from _linear(module, "q_up", rank, query, cut=COLUMNS)
    for name, width, heads, is_there in (
        ("gate", model.num_heads * model.gate_dim, 0, model.attention_gate),
        ("q", query, 0, not model.low_rank),
        ("k", key, kv_heads, model.keys != "shared"),
        ("v", kv_heads * model.value_dim, kv_heads, not model.keys),
    ):
        bias = model.qkv_bias and (model.key_bias or name != "k")
        if is_there:
            yield from _linear(module, name, hidden, width, op="qkv", bias=bias, cut=COLUMNS, units=heads)
    if model.qk_norm_full:  # a weight for every element of the projection, no bias
        for name, width, heads in (("q_norm", query, 0), ("k_norm", key, kv_heads)):
            yield _learned(module, name, width, op="qk_norm", cut=COLUMNS, units=heads)
    elif model.qk_norm and model.qk_norm_weight:
        for name in ("q_norm", "k_norm")[: 1 if model.keys == "shared" else 2]:
            if model.diffusion:  # whose other norms learn nothing
                yield _learned(module, name, model.head_dim, op="qk_norm", gradient="part")
            else:
                yield from _norm(model, module, name, model.head_dim, op="qk_norm", gradient="part")


def _cross_attention(model: Model) -> Iterator[Weight]:
    """Queries of the decoder; keys and values of what the encoder gives."""
    module, hidden, heads = "cross_attention", model.hidden, model.num_kv_heads
    query, key, bias = model.num_heads * model.head_dim, heads * model.head_dim, model.qkv_bias
    # Of a diffusion transformer, only the norms learn that the condition does not scale.
    norms = replace(model, norm_weight=True, norm_bias=True) if model.diffusion else model
    yield from _norm(norms, module, "norm", hidden)
    for name, width in (("q_norm", query), ("k_norm", key)) if model.qk_norm_full else ():
        yield _learned(module, name, width, op="qk_norm", cut=COLUMNS)
    yield from _linear(module, "q", hidden, query, bias=bias, cut=COLUMNS)
    for name, has_bias in (("k", bias and model.key_bias), ("v", bias)):
        yield from _linear(module, name, hidden, key, op="kv", bias=has_bias, cut=COLUMNS, units=heads)
    yield from _linear(module, "o", query, hidden, op="out_proj", bias=model.out_bias, cut=ROWS)


def modulated(layer: Layer) -> int:
    """Vectors that the condition gives a block: scale, shift and gate of attention, and of MLP."""
    return 3 if layer.side == "single" else 6


def _modulation(model: Model, width: int, module: str = "modulation") -> Iterator[Weight]:
    assert model.diffusion is not None
    if model.diffusion.modulation == "block":
        yield from _linear(module, "modulation", model.hidden, width * model.hidden, bias=True)
    else:
        yield _learned(module, "modulation", width * model.hidden)


def _two_streams(model: Model, *, is_last: bool) -> Iterator[Weight]:
    """Patches and text, each with weights of its own; the text of the last block ends with its keys."""
    hidden, query = model.hidden, model.num_heads * model.head_dim
    for stream in ("image", "text"):
        ends = is_last and stream == "text"
        yield from _modulation(model, 2 if ends else 6, stream)
        for name in ("q", "k", "v"):
            yield from _linear(stream, name, hidden, query, op="qkv", bias=model.qkv_bias, cut=COLUMNS)
        for name in ("q_norm", "k_norm") if model.qk_norm else ():
            yield _learned(stream, name, model.head_dim, op="qk_norm", gradient="part")
        if not ends:
            yield from _linear(stream, "o", query, hidden, op="out_proj", bias=model.out_bias, cut=ROWS)
            yield from _feed_forward(model, stream, model.ffn_hidden)


def _latent_qkv(model: Model, mla: arch.MLA) -> Iterator[Weight]:
    module, hidden, heads = "attention", model.hidden, model.num_heads
    query = heads * mla.head_dim

    def down(name: str, rank: int) -> Iterator[Weight]:
        return _linear(module, name, hidden, rank, bias=model.qkv_bias, gradient="tokens")

    if mla.q_lora_rank:
        yield from down("q_down", mla.q_lora_rank)
        yield from _norm(model, module, "q_norm", mla.q_lora_rank)
        yield from _linear(module, "q_up", mla.q_lora_rank, query, cut=COLUMNS)
    else:
        yield from _linear(module, "q", hidden, query, cut=COLUMNS)
    if model.keys != "shared":
        yield from down("kv_down", mla.kv_lora_rank + mla.qk_rope_head_dim)
        yield from _norm(model, module, "kv_norm", mla.kv_lora_rank)
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear(module, "kv_up", mla.kv_lora_rank, expanded, cut=COLUMNS)


def _recurrence(model: Model) -> Iterator[Weight]:
    module, own, hidden = "recurrence", model.recurrence, model.hidden
    assert own is not None
    inner = own.inner
    for name, (width, units) in own.projected.items():
        yield from _linear(module, name, hidden, width, op="in_proj", bias=own.bias, cut=COLUMNS, units=units)
    for name in own.narrow_gates:
        yield from _linear(module, f"{name}_down", hidden, own.gate_rank, op="gate_down", gradient="part")
        yield from _linear(module, f"{name}_up", own.gate_rank, inner, cut=COLUMNS)
    if own.taps:
        yield _learned(module, "conv", own.taps * own.convolved, cut=COLUMNS)
    if own.conv_bias:
        yield _learned(module, "conv_bias", own.convolved, op="conv", cut=COLUMNS)
    if own.kind == "scan":
        steps = own.dt_rank + 2 * own.state_dim
        yield from _linear(module, "x_proj", inner, steps, cut=ROWS)
        if own.inner_norms:
            yield _learned(module, "x_norm", steps, gradient="part")
        yield from _linear(module, "dt_proj", own.dt_rank, inner, bias=True, cut=COLUMNS)
        yield _learned(module, "a", inner * own.state_dim, op="scan", cut=COLUMNS)
        yield _learned(module, "d", inner, op="scan", cut=COLUMNS)
    elif own.kind == "lru":  # each head has gates of its own
        for name in ("input_gate", "decay_gate"):
            yield _learned(module, name, own.num_heads, own.head_dim, own.head_dim, cut=COLUMNS)
            yield _learned(module, f"{name}_bias", inner, op=name, cut=COLUMNS)
        yield _learned(module, "decay", inner, op="scan", cut=COLUMNS)
    elif own.kind in ("delta", "ssd"):
        for name in ("dt_bias", "a", "d") if own.kind == "ssd" else ("dt_bias", "a"):
            is_per_channel = (own.gate_rank or own.wide_decay) and name == "dt_bias"
            width = inner if is_per_channel else own.num_heads
            yield _learned(module, name, width, op="chunk", cut=COLUMNS)
    if own.norm and own.kind in ("ssd", "linear", "wkv"):
        yield _learned(module, "gate_norm", inner * (2 if own.kind == "wkv" else 1), cut=COLUMNS)
    elif own.norm:
        yield _learned(module, "gate_norm", own.head_dim, gradient="part")
    yield from _linear(module, "out", inner, hidden, op="out_proj", bias=own.bias, cut=ROWS)


def _mlp(model: Model) -> Iterator[Weight]:
    yield from _block_norm(model, "mlp", 2)
    yield from _feed_forward(model, "mlp", model.ffn_hidden)


def _feed_forward(
    model: Model, module: str, width: int, *, prefix: str = "", experts: int = 0, hidden: int = 0
) -> Iterator[Weight]:
    hidden = hidden or model.hidden
    linear = partial(_linear, module, bias=model.linear_bias, experts=experts)
    for name in ("gate", "up") if model.gated else ("up",):
        yield from linear(f"{prefix}{name}", hidden, width, op=f"{prefix}fc1", cut=COLUMNS)
    yield from linear(f"{prefix}down", width, hidden, op=f"{prefix}fc2", cut=ROWS)


def _per_layer(model: Model, own: arch.PerLayer) -> Iterator[Weight]:
    yield from _linear("per_layer", "gate", model.hidden, own.width, gradient="tokens")
    yield from _linear("per_layer", "up", own.width, model.hidden, gradient="tokens")
    yield from _norm(model, "per_layer", "norm", model.hidden)


def side_weights(sides: Iterable[Side]) -> Iterator[Weight]:
    """The weights of small layers."""
    for side in sides:
        module, name, d_out = side.module, side.name, side.d_out
        if side.d_in:
            yield from _linear(module, name, side.d_in, d_out, bias=side.bias, gradient="tokens")
        elif side.rows:
            yield _learned(module, name, side.rows, d_out, cut=ROWS)
        else:
            yield _learned(module, name, max(side.taps, 1) * d_out, op=side.op, gradient="tokens")


def _streams(model: Model, own: arch.Streams) -> Iterator[Weight]:
    module, hidden, number = "streams", model.hidden, own.number
    if not own.laurel_rank:  # numbers that scale what each of the three kinds of them is made of
        for name in ("attention", "mlp"):
            width, is_plain = number * hidden, not own.gate_rank
            yield from _linear(module, f"{name}_mixes", width, own.mixes, bias=is_plain, gradient="tokens")
            if is_plain:
                scales = 2 + own.between
                yield _learned(module, f"{name}_scale", scales, op=f"{name}_mixes", gradient="tokens")
                continue
            yield from _norm(model, module, f"{name}_norm", width)
            yield from _linear(module, f"{name}_down", width, own.gate_rank, gradient="tokens")
            yield from _linear(module, f"{name}_up", own.gate_rank, width, gradient="tokens")
        return
    for name, d_in, d_out in (
        ("modalities", hidden, number),
        ("predict", number, number * number),
        ("correct", number, number),
        ("laurel_left", hidden, own.laurel_rank),
        ("laurel_right", own.laurel_rank, hidden),
    ):
        yield from _linear(module, name, d_in, d_out, gradient="tokens")
    for name in ("router_norm", "laurel_norm"):
        yield from _norm(model, module, name, hidden)
    yield _learned(module, "output_scale", hidden, gradient="tokens")


def _moe(model: Model) -> Iterator[Weight]:
    module, moe, hidden = "moe", model.moe, model.hidden
    assert moe is not None
    yield from _block_norm(model, module, 2)
    choices = moe.num_experts + moe.zero_experts
    yield from _linear(module, "router", hidden, choices, bias=moe.router_bias, gradient="part")
    if moe.balance_bias:
        yield _learned(module, "balance_bias", choices, trains=False)
    experts = partial(_feed_forward, model, module, prefix="expert_")
    yield from experts(moe.ffn_hidden, experts=moe.held, hidden=moe.latent)
    if moe.image_ffn_hidden:
        for weight in experts(moe.image_ffn_hidden, experts=moe.num_experts):
            yield replace(weight, name=f"{IMAGE}{weight.name}")
    if moe.latent:
        for name, d_in, d_out in (("latent_down", hidden, moe.latent), ("latent_up", moe.latent, hidden)):
            yield from _linear(module, name, d_in, d_out, bias=model.linear_bias, gradient="part")
    if moe.latent_norm:
        yield from _norm(model, module, "latent_norm", moe.latent, gradient="part")
    if moe.shared_ffn_hidden:
        yield from _feed_forward(model, "shared_expert", moe.shared_ffn_hidden)
    if moe.own_norms:
        yield from _norm(model, module, "expert_norm", hidden)
        yield from _norm(model, module, "sum_norm", hidden)
        yield from _norm(model, "shared_expert", "sum_norm", hidden)
        yield _learned(module, "router_scale", hidden, gradient="part")
        yield _learned(module, "expert_scale", moe.num_experts, gradient="part")
    if moe.shared_gate:
        yield from _linear("shared_expert", "shared_gate", hidden, 1, op="gate", gradient="tokens")


# --- the ends ----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def embedding_weights(model: Model) -> Weights:
    """The weights before the first block: tokens or patches, positions, and what is added to them."""
    return tuple(_embedding(model))


@lru_cache(maxsize=256)
def head_weights(model: Model) -> Weights:
    """The weights behind the last block; the table of a tied embedding is the embedding's."""
    return tuple(_head(model))


@lru_cache(maxsize=256)
def mtp_weights(model: Model) -> Weights:
    """One module of multi-token prediction, its block apart: two norms, their projection, and a last norm.

    Embedding and head are the model's own. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """
    names = ("embedding_norm", "hidden_norm", "final_norm")
    norms = [weight for name in names for weight in _norm(model, "mtp", name, model.hidden)]
    return (*norms, *_linear("mtp", "projection", 2 * model.hidden, model.hidden, cut=COLUMNS))


def _embedding(model: Model) -> Iterator[Weight]:
    module, hidden, patches = "embedding", model.hidden, model.patches

    def rows(name: str, number: int) -> Iterator[Weight]:
        if number:
            yield _learned(module, name, number, hidden, gradient="tokens")

    if model.vocab:
        yield _learned(module, "tokens", model.vocab, hidden, cut=ROWS)
    if patches is not None:
        pixels = patches.channels * patches.patch**2
        yield from _linear(module, "patch_proj", pixels, hidden, bias=patches.bias, gradient="tokens")
        yield from rows("class_token", int(patches.class_token))
        if patches.mask_token:
            yield _learned(module, "mask_token", hidden, op="patch_proj")
    yield from rows("token_types", model.token_types)
    if model.positions == "learned":
        yield from rows("positions", model.max_seq + model.extra_position_rows)
    if model.per_layer:
        width = model.num_layers * model.per_layer.width
        yield _learned(module, "layer_tokens", model.per_layer.rows, width, cut=ROWS)
        yield from _linear(module, "layer_proj", hidden, width, gradient="tokens")
        yield from _norm(model, module, "layer_norm", model.per_layer.width)
    if model.streams and model.streams.laurel_rank:
        width = (model.streams.number - 1) * hidden
        yield from _linear(module, "stream_proj", hidden, width, gradient="tokens")
    yield from side_weights(side for side in model.sides if side.module == module)
    if model.distances:
        yield from rows("distances", model.distances.rows)
        if model.distances.norm:
            yield from _norm(model, module, "distance_norm", hidden, op="distances")
    if model.relative_buckets:  # each side has a table
        number = model.relative_buckets * (2 if model.encoder else 1)
        yield _learned(module, "relative_bias", number, model.num_heads, cut=COLUMNS)
    if model.embedding_norm:
        yield from _norm(model, module, "norm", hidden)
    if model.encoder:
        yield from _encoder_ends(model, model.encoder)
    if model.diffusion is not None:
        yield from _condition(model, model.diffusion)
    if model.frames is not None and model.frames.channels:
        yield from _convolutions(module, hidden, model.frames.channels)
    yield from projector_weights(model)


def embedded(own: arch.Diffusion) -> Iterator[tuple[str, int]]:
    """What is brought to a diffusion transformer's width by two layers each: its name, and its width."""
    yield "time", TIME_WIDTH
    if own.pooled_width:
        yield "pooled", own.pooled_width
    if own.guidance:
        yield "guidance", TIME_WIDTH
    if own.refiner_layers:
        yield from (("refiner_time", TIME_WIDTH), ("refiner_text", own.text_width))


def _condition(model: Model, own: arch.Diffusion) -> Iterator[Weight]:
    """Time, text and what else conditions a diffusion transformer, each brought to the model's width."""
    module, hidden = "embedding", model.hidden
    for name, width in embedded(own):
        for i, d_in in enumerate((width, hidden), 1):
            yield from _linear(module, f"{name}_fc{i}", d_in, hidden, bias=True)
    if own.num_classes:  # and one for none of them
        yield _learned(module, "classes", own.num_classes + 1, hidden)
    for i in range(own.text_layers if own.text else 0):
        d_in = hidden if i else own.text_width
        yield from _linear(module, f"text_fc{i}", d_in, hidden, bias=True, gradient="tokens")
    if own.modulation == "shared":
        yield from _linear(module, "modulation", hidden, 6 * hidden, bias=True)
    for i in range(own.refiner_layers):
        for name, d_in, d_out in refiner_layers(hidden):
            yield from _linear(module, f"refiner{i}_{name}", d_in, d_out, bias=True, gradient="tokens")
        for name in ("norm1", "norm2"):
            yield _learned(module, f"refiner{i}_{name}", 2 * hidden, gradient="tokens")


def refiner_layers(hidden: int) -> tuple[tuple[str, int, int], ...]:
    """The linear layers of a block that refines the tokens of a text: name, d_in and d_out of each."""
    four = 4 * hidden
    return (
        ("qkv", hidden, 3 * hidden), ("o", hidden, hidden), ("up", hidden, four), ("down", four, hidden),
        ("modulation", hidden, 2 * hidden),
    )  # fmt: skip


def projectors(model: Model) -> Iterator[tuple[str, arch.Projector, int]]:
    """What joins the towers that a model reads to it: how its names begin, itself, tokens of a sequence."""
    for tower in model.towers:
        if tower.num_tokens:
            for i, one in enumerate(tower.projectors, 1):
                yield f"{tower.name}_{i}", one, tower.num_tokens


def projector_weights(model: Model) -> Weights:
    """The weights of what joins a model's towers to it."""
    return tuple(weight for name, own, _ in projectors(model) for weight in _projector(name, own))


def _projector(name: str, own: arch.Projector) -> Iterator[Weight]:
    module, num_others = "embedding", own.num_others
    if num_others:
        yield _learned(module, f"{name}_table", num_others, gradient="tokens")
    for i, width in enumerate(own.norms):
        yield _learned(module, f"{name}_norm{i}", own.norm_params * width, gradient="tokens")
    for i, (d_in, d_out) in enumerate(own.linears):
        yield from _linear(module, f"{name}_fc{i}", d_in, d_out, bias=own.bias, gradient="tokens")


def num_projected(own: arch.Projector) -> int:
    """How many parameters a projector has."""
    return num_weights(_projector("", own))


def _convolutions(module: str, hidden: int, channels: int) -> Iterator[Weight]:
    """Two convolutions over three frames each."""
    yield from _linear(module, "conv1", 3 * channels, hidden, bias=True, gradient="tokens")
    yield from _linear(module, "conv2", 3 * hidden, hidden, bias=True, gradient="tokens")


def _encoder_ends(model: Model, encoder: arch.Encoder) -> Iterator[Weight]:
    """What an encoder has besides its blocks; it looks up tokens in the table of the decoder."""
    module, hidden, channels = "encoder", model.hidden, encoder.channels
    if channels:
        yield from _convolutions(module, hidden, channels)
    if model.positions == "learned":
        number = encoder.seq or model.max_seq + model.extra_position_rows
        # Positions of sound are sines, kept as weights.
        yield _learned(module, "positions", number, hidden, gradient="tokens", trains=not channels)
    if model.embedding_norm:
        yield from _norm(model, module, "norm", hidden)
    if model.final_norm:
        yield from _norm(model, module, "final_norm", hidden)


def _head(model: Model) -> Iterator[Weight]:
    module, hidden, patches = "head", model.hidden, model.patches
    if model.streams and model.streams.laurel_rank:
        width = (model.streams.number - 1) * hidden
        yield from _linear(module, "stream_proj", width, hidden, gradient="tokens")
    yield from side_weights(side for side in model.sides if side.module == module)
    if model.final_norm:
        yield from _norm(model, module, "final_norm", hidden)
    if model.mlm_transform:
        yield from _linear(module, "transform", hidden, hidden, bias=model.norm_bias, gradient="tokens")
        yield from _norm(model, module, "transform_norm", hidden)
    if model.lm_head and model.vocab:
        logits = _linear(module, "logits", hidden, model.vocab, bias=model.head_bias, cut=COLUMNS)
        yield from (weight for weight in logits if not (model.tied_embedding and weight.is_matrix))
    if model.diffusion is not None:
        yield from _modulation(model, 2, module)
    if patches is not None and patches.out_channels:
        width = patches.out_channels * patches.patch**2
        yield from _linear(module, "pixel_head", hidden, width, bias=model.head_bias, gradient="tokens")
    if model.attention_pool:
        yield from _attention_pool(model)
    if model.pooler:
        yield from _linear(module, "pooler", hidden, hidden, bias=True)
    if model.num_classes:
        gradient, bias = "tokens" if model.classifies_tokens else "whole", model.classifier_bias
        yield from _linear(module, "classifier", hidden, model.num_classes, bias=bias, gradient=gradient)


def _attention_pool(model: Model) -> Iterator[Weight]:
    module, hidden = "head", model.hidden
    yield _learned(module, "pool_query", hidden, op="pool_q")
    for name, width in (("pool_q", hidden), ("pool_kv", 2 * hidden), ("pool_out", hidden)):
        yield from _linear(module, name, hidden, width, bias=True, gradient="tokens")
    yield from _norm(model, module, "pool_norm", hidden)
    yield from _linear(module, "pool_fc1", hidden, model.ffn_hidden, bias=True)
    yield from _linear(module, "pool_fc2", model.ffn_hidden, hidden, bias=True)


# --- counts ------------------------------------------------------------------------------------


def num_block_params(model: Model, rank: int = 0, targets: tuple[str, ...] = ()) -> int:
    """Parameters of the blocks of `model`, with the adapters of `with_adapters` where there is a rank."""
    kinds = arch.layer_counts(model).items()
    return sum(number * num_weights(block_weights(model, layer, rank, targets)) for layer, number in kinds)


def num_params(model: Model) -> int:
    """All parameters of `model`, as makers count them: without modules of multi-token prediction.

    Of its towers, those whose tokens it reads.
    """
    towers = sum(num_params(tower.encoder) for tower in model.towers if tower.num_tokens)
    return num_weights((*embedding_weights(model), *head_weights(model))) + num_block_params(model) + towers


def num_active_params(model: Model) -> int:
    """Parameters that one token meets: of the experts, `top_k` and the shared ones; embedding included.

    Of tables beside that of the tokens, the vectors that it looks up.
    """
    unread = table_params(model) - sum(side.times * side.d_out for side in model.sides if side.rows)
    moe = model.moe
    if moe is None:
        return num_params(model) - unread
    experts = [weight for weight in block_weights(model, Layer(moe=True)) if weight.is_expert]
    of_images = num_weights(weight for weight in experts if weight.name.startswith(IMAGE))
    one_expert = (num_weights(experts) - of_images) // moe.held
    unused = of_images + round(moe.held - moe.computed) * one_expert
    return num_params(model) - unread - arch.num_moe_layers(model) * unused


def table_params(model: Model) -> int:
    """Parameters of tables beside that of the tokens (n-grams)."""
    return sum(side.rows * side.d_out for side in model.sides)
