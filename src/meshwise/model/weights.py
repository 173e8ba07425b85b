"""The weights of a model, each named once: numbers of parameters, what a rank holds, and what trains.

A model is an embedding, blocks, and a head (and modules of multi-token prediction). Each of these parts
is a tuple of `Weight`s. A weight says its shape, which of its dims tensor parallelism cuts, and which op
brings it; nothing else in this package counts weights. `program.weights_of_ops` says what a rank of each
layout holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshwise.model.architecture import (
    Encoder,
    Layer,
    Model,
    PerLayer,
    Streams,
    layer_counts,
    num_moe_layers,
    of_layer,
)

COLUMNS, ROWS, WHOLE = "columns", "rows", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight of a part of a model.

    `module` and `op` name the op that brings it; `name` is the layer it belongs to. `shape` is [d_in, d_out]
    of a matrix, [width] of a vector, the number of experts in front where each has its own (`is_expert`).

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
        object.__setattr__(self, "is_matrix", len(self.shape) == (3 if self.is_expert else 2))


Weights = tuple[Weight, ...]


def num_weights(weights: Iterable[Weight]) -> int:
    """Parameters of `weights` together."""
    return sum(weight.size for weight in weights)


# --- blocks ------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def block_weights(model: Model, layer: Layer, lora_rank: int = 0) -> Weights:
    """The weights of one block; with `lora_rank`, frozen, and with the adapters that train beside them."""
    mixers = {
        "attention": (_attention,),
        "recurrence": (_first_norm, _recurrence),
        "beside": (_attention, _recurrence),
        "none": (),
    }[layer.mixer]
    own = of_layer(model, layer)
    feed_forward = (_moe(own) if layer.moe else _mlp(own)) if layer.mlp else ()
    if layer.side == "decoder":
        mixers = (*mixers, _cross_attention)
    weights = (*(weight for mixer in mixers for weight in mixer(own)), *feed_forward)
    if model.per_layer:
        weights = (*weights, *_per_layer(model, model.per_layer))
    if model.streams:
        weights = (*weights, *_streams(model, model.streams))
    return with_adapters(weights, lora_rank) if lora_rank else weights


def frozen(weights: Weights) -> Weights:
    """`weights`, none of which trains."""
    return tuple(replace(weight, trains=False) for weight in weights)


def with_adapters(weights: Weights, rank: int) -> Weights:
    """`weights` frozen, and beside each linear layer [d_in, d_out] adapters [d_in, rank], [rank, d_out].

    Linear layers are those that `target_modules="all-linear"` of PEFT finds in Llama: each projection of
    attention, MLP and shared experts by itself. Routers, and experts (one tensor for all there), have none.
    """
    return (*frozen(weights), *(adapter for weight in weights for adapter in _adapters(weight, rank)))


def has_adapters(weight: Weight) -> bool:
    """Whether LoRA puts adapters beside `weight`."""
    return weight.is_matrix and not weight.is_expert and weight.op != "router"


def _adapters(weight: Weight, rank: int) -> Iterator[Weight]:
    if not has_adapters(weight):
        return
    d_in, d_out = weight.shape
    # Beside a cut layer, the adapter that is not cut sees the rank's part of the other one.
    gradient = "part" if weight.cut else weight.gradient
    for side, shape, cut in (("a", (d_in, rank), ROWS), ("b", (rank, d_out), COLUMNS)):
        mine = cut if weight.cut == cut else WHOLE
        yield replace(
            weight,
            op=f"{weight.name}_lora_{side}",
            name=f"{weight.name}_lora_{side}",
            shape=shape,
            cut=mine,
            units=weight.units if mine else 0,
            gradient=gradient,
            is_adapter=True,
        )


def _linear(
    module: str, op: str, name: str, d_in: int, d_out: int, *, bias: bool, cut: str = WHOLE, units: int = 0,
    gradient: str = "whole", experts: int = 0,
) -> Iterator[Weight]:  # fmt: skip
    """A matrix, and its bias, which is cut if the columns are."""
    stack = (experts,) if experts else ()
    matrix = Weight(
        module=module, op=op, name=name, shape=(*stack, d_in, d_out), cut=cut, units=units, gradient=gradient,
        is_expert=experts > 0,
    )  # fmt: skip
    yield matrix
    if bias:
        yield replace(matrix, name=f"{name}_bias", shape=(*stack, d_out), cut=WHOLE if cut == ROWS else cut)


def _norm(
    model: Model, module: str, op: str, width: int, *, name: str = "", gradient: str = "tokens"
) -> Iterator[Weight]:
    """Weight and bias of a norm, as far as the model's norms have them."""
    name = name or op
    if model.norm_weight:
        yield Weight(module=module, op=op, name=name, shape=(width,), gradient=gradient)
    if model.norm_bias:
        yield Weight(module=module, op=op, name=f"{name}_bias", shape=(width,), gradient=gradient)


def _block_norm(model: Model, module: str, number: int) -> Iterator[Weight]:
    """The norm before attention (`number` 1) or MLP (2), and that behind it, as far as the block has them."""
    # Two norms of a parallel block see all tokens, of which each rank has the gradient of its own part.
    gradient = "part" if model.parallel_block and model.num_norms > 1 else "tokens"
    if number <= model.num_norms:
        yield from _norm(model, module, f"norm{number}", model.hidden, gradient=gradient)
    if model.num_norms == 4:
        yield from _norm(model, module, f"post_norm{number}", model.hidden)
    if model.layer_scale:
        name = f"layer_scale{number}"
        yield Weight(module=module, op=name, name=name, shape=(model.hidden,), gradient=gradient)


def _attention(model: Model) -> Iterator[Weight]:
    yield from _block_norm(model, "attention", 1)
    yield from _grouped_qkv(model) if model.mla is None else _latent_qkv(model)
    own = model.distances
    if own and not own.shared:
        for name in ("distance_k", "distance_q")[: own.num_scores]:
            width = model.num_heads * model.head_dim
            bias = model.key_bias or name != "distance_k"
            yield from _linear("attention", name, name, model.hidden, width, bias=bias, cut=COLUMNS)
    if model.sinks:
        yield Weight(module="attention", op="core", name="sinks", shape=(model.num_heads,), cut=COLUMNS)
    v_dim = model.head_dim if model.mla is None else model.mla.v_head_dim
    yield from _linear(
        "attention", "out_proj", "o", model.num_heads * v_dim, model.hidden, bias=model.out_bias, cut=ROWS
    )


def _grouped_qkv(model: Model) -> Iterator[Weight]:
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for name, width, heads in (
        *((("gate", query, 0),) if model.attention_gate else ()),
        ("q", query, 0),
        *((("k", key, model.num_kv_heads),) if model.keys != "shared" else ()),
        *((("v", key, model.num_kv_heads),) if not model.keys else ()),
    ):
        yield from _linear(
            "attention", "qkv", name, model.hidden, width, cut=COLUMNS, units=heads,
            bias=model.qkv_bias and (model.key_bias or name != "k"),
        )  # fmt: skip
    if model.qk_norm_full:  # a weight for every element of the projection, no bias
        for name, width, heads in (("q_norm", query, 0), ("k_norm", key, model.num_kv_heads)):
            yield Weight(
                module="attention", op="qk_norm", name=name, shape=(width,), cut=COLUMNS, units=heads
            )
    elif model.qk_norm and model.qk_norm_weight:
        for name in ("q_norm", "k_norm")[: 1 if model.keys == "shared" else 2]:
            yield from _norm(model, "attention", "qk_norm", model.head_dim, name=name, gradient="part")


def _cross_attention(model: Model) -> Iterator[Weight]:
    """Queries of the decoder; keys and values of what the encoder gives."""
    module, query, key = (
        "cross_attention",
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    heads, bias = model.num_kv_heads, model.qkv_bias
    yield from _norm(model, module, "norm", model.hidden)
    yield from _linear(module, "q", "q", model.hidden, query, bias=bias, cut=COLUMNS)
    for name, has_bias in (("k", bias and model.key_bias), ("v", bias)):
        yield from _linear(module, "kv", name, model.hidden, key, bias=has_bias, cut=COLUMNS, units=heads)
    yield from _linear(module, "out_proj", "o", query, model.hidden, bias=model.out_bias, cut=ROWS)


def _latent_qkv(model: Model) -> Iterator[Weight]:
    mla, heads = model.mla, model.num_heads
    assert mla is not None
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)

    def down(name: str, rank: int) -> Iterator[Weight]:
        return _linear("attention", name, name, model.hidden, rank, bias=model.qkv_bias, gradient="tokens")

    if mla.q_lora_rank:
        yield from down("q_down", mla.q_lora_rank)
        yield from _norm(model, "attention", "q_norm", mla.q_lora_rank)
        yield from _linear("attention", "q_up", "q_up", mla.q_lora_rank, query, bias=False, cut=COLUMNS)
    else:
        yield from _linear("attention", "q", "q", model.hidden, query, bias=False, cut=COLUMNS)
    yield from down("kv_down", mla.kv_lora_rank + mla.qk_rope_head_dim)
    yield from _norm(model, "attention", "kv_norm", mla.kv_lora_rank)
    expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear("attention", "kv_up", "kv_up", mla.kv_lora_rank, expanded, bias=False, cut=COLUMNS)
    if mla.index_heads:  # every rank scores all of its tokens
        for name, d_in, d_out in (
            ("index_q", mla.q_lora_rank, mla.index_heads * mla.index_head_dim),
            ("index_k", model.hidden, mla.index_head_dim),
            ("index_weights", model.hidden, mla.index_heads),
        ):
            yield from _linear("attention", name, name, d_in, d_out, bias=False)
        for name in ("index_norm", "index_norm_bias"):
            yield Weight(module="attention", op="index_norm", name=name, shape=(mla.index_head_dim,))


def _first_norm(model: Model) -> Iterator[Weight]:
    return _block_norm(model, "recurrence", 1)


def _recurrence(model: Model) -> Iterator[Weight]:
    module, own, hidden = "recurrence", model.recurrence, model.hidden
    assert own is not None

    def vector(op: str, name: str, width: int, units: int = 0, cut: str = COLUMNS) -> Weight:
        gradient = "whole" if cut else "part"
        return Weight(
            module=module, op=op, name=name, shape=(width,), cut=cut, units=units, gradient=gradient
        )

    for name, (width, units) in own.projected.items():
        yield from _linear(module, "in_proj", name, hidden, width, bias=own.bias, cut=COLUMNS, units=units)
    for name in ("a", "z") if own.gate_rank else ():
        yield from _linear(
            module, "gate_down", f"{name}_down", hidden, own.gate_rank, bias=False, gradient="part"
        )
        yield from _linear(
            module, f"{name}_up", f"{name}_up", own.gate_rank, own.inner, bias=False, cut=COLUMNS
        )
    yield vector("conv", "conv", own.taps * own.convolved)
    if own.conv_bias:
        yield vector("conv", "conv_bias", own.convolved)
    if own.kind == "scan":
        steps = own.dt_rank + 2 * own.state_dim
        yield from _linear(module, "x_proj", "x_proj", own.inner, steps, bias=False, cut=ROWS)
        if own.inner_norms:
            yield vector("x_norm", "x_norm", steps, cut=WHOLE)
        yield from _linear(module, "dt_proj", "dt_proj", own.dt_rank, own.inner, bias=True, cut=COLUMNS)
        yield vector("scan", "a", own.inner * own.state_dim)
        yield vector("scan", "d", own.inner)
    elif own.kind != "conv":
        for name in ("dt_bias", "a", "d") if own.kind == "ssd" else ("dt_bias", "a"):
            is_per_channel = own.gate_rank and name == "dt_bias"
            yield vector("chunk", name, own.inner if is_per_channel else own.num_heads)
    if own.norm:
        width = own.inner if own.kind == "ssd" else own.head_dim
        yield vector("gate_norm", "gate_norm", width, cut=COLUMNS if own.kind == "ssd" else WHOLE)
    yield from _linear(module, "out_proj", "out", own.inner, hidden, bias=own.bias, cut=ROWS)


def _mlp(model: Model) -> Iterator[Weight]:
    yield from _block_norm(model, "mlp", 2)
    yield from _feed_forward(model, "mlp", model.ffn_hidden)


def _feed_forward(
    model: Model, module: str, ffn_hidden: int, *, prefix: str = "", experts: int = 0
) -> Iterator[Weight]:
    for name in ("gate", "up") if model.gated else ("up",):
        yield from _linear(
            module, f"{prefix}fc1", f"{prefix}{name}", model.hidden, ffn_hidden, bias=model.linear_bias,
            cut=COLUMNS, experts=experts,
        )  # fmt: skip
    yield from _linear(
        module, f"{prefix}fc2", f"{prefix}down", ffn_hidden, model.hidden, bias=model.linear_bias, cut=ROWS,
        experts=experts,
    )  # fmt: skip


def _per_layer(model: Model, own: PerLayer) -> Iterator[Weight]:
    for name, d_in, d_out in (("gate", model.hidden, own.width), ("up", own.width, model.hidden)):
        yield from _linear("per_layer", name, name, d_in, d_out, bias=False, gradient="tokens")
    yield from _norm(model, "per_layer", "norm", model.hidden)


def _streams(model: Model, own: Streams) -> Iterator[Weight]:
    module, hidden, number = "streams", model.hidden, own.number
    for name, d_in, d_out in (
        ("modalities", hidden, number),
        ("predict", number, number * number),
        ("correct", number, number),
        ("laurel_left", hidden, own.laurel_rank),
        ("laurel_right", own.laurel_rank, hidden),
    ):
        yield from _linear(module, name, name, d_in, d_out, bias=False, gradient="tokens")
    for name in ("router_norm", "laurel_norm"):
        yield from _norm(model, module, name, hidden)
    yield Weight(module=module, op="output_scale", name="output_scale", shape=(hidden,), gradient="tokens")


def _moe(model: Model) -> Iterator[Weight]:
    moe = model.moe
    assert moe is not None
    yield from _block_norm(model, "moe", 2)
    yield from _linear(
        "moe", "router", "router", model.hidden, moe.num_experts, bias=moe.router_bias, gradient="part"
    )
    if moe.balance_bias:
        yield Weight(
            module="moe", op="balance_bias", name="balance_bias", shape=(moe.num_experts,), trains=False
        )
    yield from _feed_forward(model, "moe", moe.ffn_hidden, prefix="expert_", experts=moe.num_experts)
    if moe.shared_ffn_hidden:
        yield from _feed_forward(model, "shared_expert", moe.shared_ffn_hidden)
    if moe.own_norms:
        for module, name in (("moe", "expert_norm"), ("moe", "sum_norm"), ("shared_expert", "sum_norm")):
            yield from _norm(model, module, name, model.hidden)
        for name, width in (("router_scale", model.hidden), ("expert_scale", moe.num_experts)):
            yield Weight(module="moe", op=name, name=name, shape=(width,), gradient="part")
    if moe.shared_gate:
        yield from _linear(
            "shared_expert", "gate", "shared_gate", model.hidden, 1, bias=False, gradient="tokens"
        )


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
    return (
        *norms,
        *_linear("mtp", "projection", "projection", 2 * model.hidden, model.hidden, bias=False, cut=COLUMNS),
    )


def _embedding(model: Model) -> Iterator[Weight]:
    hidden, patches = model.hidden, model.patches

    def rows(op: str, number: int, cut: str = WHOLE) -> Iterator[Weight]:
        gradient = "whole" if cut else "tokens"
        if number:
            yield Weight(
                module="embedding", op=op, name=op, shape=(number, hidden), cut=cut, gradient=gradient
            )

    yield from rows("tokens", model.vocab, ROWS)
    if patches is not None:
        pixels = patches.channels * patches.patch**2
        yield from _linear(
            "embedding", "patch_proj", "patch_proj", pixels, hidden, bias=patches.bias, gradient="tokens"
        )
        yield from rows("class_token", int(patches.class_token))
        if patches.mask_token:
            yield Weight(module="embedding", op="patch_proj", name="mask_token", shape=(hidden,))
    yield from rows("token_types", model.token_types)
    if model.positions == "learned":
        yield from rows("positions", model.max_seq + model.extra_position_rows)
    if model.per_layer:
        width = model.num_layers * model.per_layer.width
        shape = (model.per_layer.rows, width)
        yield Weight(module="embedding", op="layer_tokens", name="layer_tokens", shape=shape, cut=ROWS)
        yield from _linear(
            "embedding", "layer_proj", "layer_proj", hidden, width, bias=False, gradient="tokens"
        )
        yield from _norm(model, "embedding", "layer_norm", model.per_layer.width)
    if model.streams:
        width = (model.streams.number - 1) * hidden
        yield from _linear(
            "embedding", "stream_proj", "stream_proj", hidden, width, bias=False, gradient="tokens"
        )
    if model.distances:
        yield from rows("distances", model.distances.rows)
        if model.distances.norm:
            yield from _norm(model, "embedding", "distances", hidden, name="distance_norm")
    if model.relative_buckets:  # each side has a table
        shape = (model.relative_buckets * (2 if model.encoder else 1), model.num_heads)
        yield Weight(module="embedding", op="relative_bias", name="relative_bias", shape=shape, cut=COLUMNS)
    if model.embedding_norm:
        yield from _norm(model, "embedding", "norm", hidden)
    if model.encoder:
        yield from _encoder_ends(model, model.encoder)


def _encoder_ends(model: Model, encoder: Encoder) -> Iterator[Weight]:
    """What an encoder has besides its blocks; it looks up tokens in the table of the decoder."""
    module, hidden = "encoder", model.hidden
    if encoder.channels:
        for name, width in (("conv1", encoder.channels), ("conv2", hidden)):
            yield from _linear(module, name, name, 3 * width, hidden, bias=True, gradient="tokens")
    if model.positions == "learned":
        shape = (encoder.seq or model.max_seq + model.extra_position_rows, hidden)
        # Positions of sound are sines, kept as weights.
        yield Weight(
            module=module, op="positions", name="positions", shape=shape, gradient="tokens",
            trains=not encoder.channels,
        )  # fmt: skip
    if model.embedding_norm:
        yield from _norm(model, module, "norm", hidden)
    if model.final_norm:
        yield from _norm(model, module, "final_norm", hidden)


def _head(model: Model) -> Iterator[Weight]:
    hidden, patches = model.hidden, model.patches
    if model.streams:
        width = (model.streams.number - 1) * hidden
        yield from _linear("head", "stream_proj", "stream_proj", width, hidden, bias=False, gradient="tokens")
    if model.final_norm:
        yield from _norm(model, "head", "final_norm", hidden)
    if model.mlm_transform:
        yield from _linear(
            "head", "transform", "transform", hidden, hidden, bias=model.norm_bias, gradient="tokens"
        )
        yield from _norm(model, "head", "transform_norm", hidden)
    if model.lm_head and model.vocab:
        logits = _linear("head", "logits", "logits", hidden, model.vocab, bias=model.head_bias, cut=COLUMNS)
        yield from (weight for weight in logits if not (model.tied_embedding and weight.is_matrix))
    if patches is not None and patches.out_channels:
        width = patches.out_channels * patches.patch**2
        yield from _linear(
            "head", "pixel_head", "pixel_head", hidden, width, bias=model.head_bias, gradient="tokens"
        )
    if model.attention_pool:
        yield from _attention_pool(model)
    if model.pooler:
        yield from _linear("head", "pooler", "pooler", hidden, hidden, bias=True)
    if model.num_classes:
        gradient = "tokens" if model.classifies_tokens else "whole"
        yield from _linear(
            "head", "classifier", "classifier", hidden, model.num_classes, bias=model.classifier_bias,
            gradient=gradient,
        )  # fmt: skip


def _attention_pool(model: Model) -> Iterator[Weight]:
    module, hidden = "head", model.hidden
    yield Weight(module=module, op="pool_q", name="pool_query", shape=(hidden,))
    for name, width in (("pool_q", hidden), ("pool_kv", 2 * hidden), ("pool_out", hidden)):
        yield from _linear(module, name, name, hidden, width, bias=True, gradient="tokens")
    yield from _norm(model, module, "pool_norm", hidden)
    yield from _linear(module, "pool_fc1", "pool_fc1", hidden, model.ffn_hidden, bias=True)
    yield from _linear(module, "pool_fc2", "pool_fc2", model.ffn_hidden, hidden, bias=True)


# --- counts ------------------------------------------------------------------------------------


def num_params(model: Model) -> int:
    """All parameters of `model`, as makers count them: without modules of multi-token prediction."""
    kinds = layer_counts(model).items()
    blocks = (number * num_weights(block_weights(model, layer)) for layer, number in kinds)
    return num_weights(embedding_weights(model)) + num_weights(head_weights(model)) + sum(blocks)


def num_active_params(model: Model) -> int:
    """Parameters that one token meets: of the experts, `top_k` and the shared ones; embedding included."""
    moe = model.moe
    if moe is None:
        return num_params(model)
    experts = block_weights(model, Layer(moe=True))
    one_expert = num_weights(weight for weight in experts if weight.is_expert) // moe.num_experts
    return num_params(model) - num_moe_layers(model) * (moe.num_experts - moe.top_k) * one_expert
