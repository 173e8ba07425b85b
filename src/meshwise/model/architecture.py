"""Models: the shape of a transformer, and how many parameters that shape holds.

A `Model` is an architecture, not its weights: `num_layers` blocks of width `hidden`, each an
attention with `num_heads` query heads of width `head_dim` (and `num_kv_heads` key and value heads:
as many in MHA, fewer in GQA, one in MQA; or compressed, in MLA) and an MLP of width `ffn_hidden`,
which in the MoE layers is replaced by experts. Biases, norms and embeddings are named one by one, so
that the parameters are counted to the last one.

Models come from the catalog (`catalog/models.toml`, each entry with its source and the date it was
checked), from a Hugging Face `config.json`, or from arguments.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import ModelError

_GATED = ("swiglu", "geglu", "reglu")
_ACTIVATIONS = (*_GATED, "gelu", "silu", "relu", "relu2")
_NORMS = ("layernorm", "rmsnorm")
_POSITIONS = ("learned", "rotary", "sinusoidal", "alibi", "none")
_MAX_COUNT = 10**9  # far beyond any model, and far below where float64 stops counting


@dataclass(frozen=True, slots=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values share one latent.

    Each token keeps `kv_lora_rank + qk_rope_head_dim` numbers; a query head is `qk_nope_head_dim +
    qk_rope_head_dim` wide, a value head `v_head_dim`. `q_lora_rank` 0: queries are not compressed.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Experts in place of the MLP: each token visits `top_k` of `num_experts`, and all shared ones.

    Layer `i` (from 0) is MoE if `i >= first_dense_layers` and `i - first_dense_layers + 1` divides by
    `every`. `ffn_hidden` is the width of one expert, `shared_ffn_hidden` of all shared experts
    together. An expert takes at most `capacity_factor * top_k * tokens / num_experts` tokens; 0 is
    dropless. `shared_gate`: a sigmoid gate (one output) scales the shared experts. `router_bias`: one
    bias per expert, whether of the linear layer (gpt-oss) or for balance (DeepSeek-V3).
    """

    num_experts: int
    top_k: int
    ffn_hidden: int
    num_shared_experts: int = 0
    shared_ffn_hidden: int = 0
    first_dense_layers: int = 0
    every: int = 1
    capacity_factor: float = 0.0
    shared_gate: bool = False
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """The input of a ViT: images of `height` x `width` cut into squares of `patch`, one token each.

    `class_token`: one learned token in front. `out_channels`: the head predicts that many channels of
    every pixel (0: no pixel head).
    """

    height: int
    width: int
    patch: int
    channels: int
    out_channels: int = 0
    class_token: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of one image, the class token included."""
        return (self.height // self.patch) * (self.width // self.patch) + self.class_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One transformer architecture.

    Biases: `qkv_bias` on the query, key and value projections, `out_bias` on the attention's output
    projection, `linear_bias` on the MLP and the experts, `head_bias` on the LM head. Norms:
    `num_norms` of width `hidden` per block, wherever they stand (2; 1 where one feeds attention and
    MLP both; 4 in Gemma 2); `norm_weight` is False where a norm learns nothing (OLMo).
    `qk_norm` normalises each query and key head with the same weights, or, with `qk_norm_full`, has
    weights (no bias) for the whole projection.
    `parallel_block`: attention and MLP read the same input and are added together (GPT-J).
    `sinks`: one learned softmax logit per head (gpt-oss). `sliding_window`: tokens that attention
    looks back on (0: all); each `full_attention_every`-th layer looks back on all (0: none does).
    Learned positions have `max_seq + extra_position_rows` rows. `token_types`, `mlm_transform` (dense
    layer and norm before the tied LM head), `pooler` and `num_classes` (a classifier on one token) are
    parts of encoders; `lm_head` is False for a model that ends with its last norm.
    """

    name: str
    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_seq: int
    activation: str
    norm: str
    linear_bias: bool
    qkv_bias: bool
    out_bias: bool
    positions: str
    tied_embedding: bool
    causal: bool = True
    norm_bias: bool = False
    norm_weight: bool = True
    num_norms: int = 2
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False
    parallel_block: bool = False
    sinks: bool = False
    sliding_window: int = 0
    full_attention_every: int = 0
    extra_position_rows: int = 0
    token_types: int = 0
    lm_head: bool = True
    head_bias: bool = False
    mlm_transform: bool = False
    pooler: bool = False
    num_classes: int = 0
    dropout_frac: float = 0.0
    mla: MLA | None = None
    moe: MoE | None = None
    patches: Patches | None = None
    source: str = ""
    checked: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (SwiGLU and its like), so has three matrices."""
        return self.activation in _GATED


@dataclass(frozen=True, slots=True, order=True)
class Layer:
    """What makes one block of a model differ from its others: experts or not, and its attention's window.

    `window`: tokens that its attention looks back on (0: all of them).
    """

    moe: bool = False
    window: int = 0


def layer_kind(model: Model, layer: int) -> Layer:
    """The kind of block `layer` (from 0)."""
    every = model.full_attention_every
    looks_back_on_all = every > 0 and (layer + 1) % every == 0
    return Layer(is_moe_layer(model, layer), 0 if looks_back_on_all else model.sliding_window)


def layer_kinds(model: Model) -> tuple[Layer, ...]:
    """The distinct kinds of a model's blocks, in the order in which they first appear."""
    return tuple(dict.fromkeys(layer_kind(model, layer) for layer in range(model.num_layers)))


def is_moe_layer(model: Model, layer: int) -> bool:
    """Whether block `layer` (from 0) has experts."""
    moe = model.moe
    if moe is None or layer < moe.first_dense_layers:
        return False
    return (layer - moe.first_dense_layers + 1) % moe.every == 0


def num_moe_layers(model: Model) -> int:
    """Blocks with experts."""
    if model.moe is None:
        return 0
    return max(0, model.num_layers - model.moe.first_dense_layers) // model.moe.every


def num_dense_layers(model: Model) -> int:
    """Blocks with an ordinary MLP."""
    return model.num_layers - num_moe_layers(model)


# --- parameters --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Numbers of parameters by part, exact.

    `attention` (with its q, k and latent norms and sinks) and `norms_per_layer` are of one layer,
    `dense_mlp` of one dense layer; `router` (with the gate of the shared experts), `experts` (all of
    them) and `shared_expert` of one MoE layer. `embedding` holds tokens, token types, patches, class
    token and embedding norm; `head` the untied LM head and whatever else follows the last block.
    """

    embedding: int
    positions: int
    attention: int
    dense_mlp: int
    router: int
    experts: int
    shared_expert: int
    norms_per_layer: int
    final_norm: int
    head: int


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + bias * outputs


def _norm(model: Model, width: int) -> int:
    return width * (model.norm_weight + model.norm_bias)


def _attention(model: Model) -> int:
    hidden, heads, mla = model.hidden, model.num_heads, model.mla
    sinks = model.sinks * heads
    if mla is not None:
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank:
            rank = mla.q_lora_rank
            queries = _linear(hidden, rank, model.qkv_bias) + _norm(model, rank) + rank * query
        else:
            queries = hidden * query
        latent = _linear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, model.qkv_bias)
        expand = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        out = _linear(heads * mla.v_head_dim, hidden, model.out_bias)
        return queries + latent + _norm(model, mla.kv_lora_rank) + expand + out + sinks
    query, key = heads * model.head_dim, model.num_kv_heads * model.head_dim
    qk_norm = 0
    if model.qk_norm:
        qk_norm = query + key if model.qk_norm_full else 2 * _norm(model, model.head_dim)
    qkv = _linear(hidden, query + 2 * key, model.qkv_bias)
    return qkv + qk_norm + _linear(query, hidden, model.out_bias) + sinks


def _mlp(model: Model, width: int) -> int:
    up = _linear(model.hidden, (1 + model.gated) * width, model.linear_bias)
    return up + _linear(width, model.hidden, model.linear_bias)


def _embedding(model: Model) -> int:
    total = model.hidden * (model.vocab + model.token_types)
    if model.patches is not None:
        pixels = model.patches.channels * model.patches.patch**2
        total += _linear(pixels, model.hidden, bias=True) + model.patches.class_token * model.hidden
    return total + model.embedding_norm * _norm(model, model.hidden)


def _head(model: Model) -> int:
    hidden = model.hidden
    total = model.pooler * _linear(hidden, hidden, bias=True)
    total += _linear(hidden, model.num_classes, bias=True)
    if model.patches is not None:
        total += _linear(hidden, model.patches.out_channels * model.patches.patch**2, model.head_bias)
    if model.lm_head and model.vocab:
        total += model.mlm_transform * (_linear(hidden, hidden, bias=True) + _norm(model, hidden))
        total += (not model.tied_embedding) * hidden * model.vocab + model.head_bias * model.vocab
    return total


def params(model: Model) -> Params:
    """The parameters of `model`, part by part."""
    moe = model.moe
    return Params(
        embedding=_embedding(model),
        positions=model.hidden * (model.max_seq + model.extra_position_rows)
        if model.positions == "learned"
        else 0,
        attention=_attention(model),
        dense_mlp=_mlp(model, model.ffn_hidden),
        router=_linear(model.hidden, moe.num_experts, moe.router_bias) + moe.shared_gate * model.hidden
        if moe
        else 0,
        experts=moe.num_experts * _mlp(model, moe.ffn_hidden) if moe else 0,
        shared_expert=_mlp(model, moe.shared_ffn_hidden) if moe and moe.shared_ffn_hidden else 0,
        norms_per_layer=model.num_norms * _norm(model, model.hidden),
        final_norm=model.final_norm * _norm(model, model.hidden),
        head=_head(model),
    )


def _total(model: Model, parts: Params) -> int:
    return (
        parts.embedding
        + parts.positions
        + model.num_layers * (parts.attention + parts.norms_per_layer)
        + num_dense_layers(model) * parts.dense_mlp
        + num_moe_layers(model) * (parts.router + parts.experts + parts.shared_expert)
        + parts.final_norm
        + parts.head
    )


def num_params(model: Model) -> int:
    """All parameters of `model`."""
    return _total(model, params(model))


def num_active_params(model: Model) -> int:
    """Parameters that one token meets: of the experts, `top_k` and the shared ones; embedding included."""
    parts, moe = params(model), model.moe
    if moe is not None:
        parts = replace(parts, experts=moe.top_k * (parts.experts // moe.num_experts))
    return _total(model, parts)


# --- checking ----------------------------------------------------------------------------------


def check_count(value: int, what: str, *, zero: bool = False) -> None:
    """Raises `ModelError` unless `value` is a count above zero (or zero, if allowed) of a sensible size."""
    if not (0 if zero else 1) <= value <= _MAX_COUNT:
        raise ModelError(f"{what} is {_shown(value)}; it must be from {0 if zero else 1} to {_MAX_COUNT}")


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "too large"


def _one_of(value: str, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise ModelError(f"{what} is {value!r}; known are {', '.join(known)}")


_MAY_BE_ZERO = {
    "vocab",
    "num_norms",
    "sliding_window",
    "full_attention_every",
    "extra_position_rows",
    "token_types",
    "num_classes",
    "q_lora_rank",
    "num_shared_experts",
    "shared_ffn_hidden",
    "first_dense_layers",
    "out_channels",
}


def _check_counts(part: Model | MLA | MoE | Patches, where: str) -> None:
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            check_count(value, f"{where}: {field.name}", zero=field.name in _MAY_BE_ZERO)


def _check_moe(model: Model, moe: MoE, where: str) -> None:
    if moe.top_k > moe.num_experts:
        raise ModelError(
            f"{where}: top_k is {moe.top_k} of {moe.num_experts} experts; a token cannot visit more than all"
        )
    if moe.first_dense_layers > model.num_layers:
        raise ModelError(
            f"{where}: first_dense_layers is {moe.first_dense_layers}, but the model has {model.num_layers}"
        )
    if bool(moe.num_shared_experts) != bool(moe.shared_ffn_hidden):
        raise ModelError(
            f"{where}: {moe.num_shared_experts} shared experts of width {moe.shared_ffn_hidden} contradict "
            "each other; give both numbers or neither"
        )
    if not (math.isfinite(moe.capacity_factor) and moe.capacity_factor >= 0):
        raise ModelError(f"{where}: capacity_factor is {moe.capacity_factor}; it must be zero or more")


def checked_model(model: Model, where: str) -> Model:
    """`model`, if its numbers make sense together; else a `ModelError` that begins with `where`."""
    _check_counts(model, where)
    _one_of(model.activation, _ACTIVATIONS, f"{where}: activation")
    _one_of(model.norm, _NORMS, f"{where}: norm")
    _one_of(model.positions, _POSITIONS, f"{where}: positions")
    if model.num_heads % model.num_kv_heads:
        raise ModelError(
            f"{where}: {model.num_heads} query heads do not divide by {model.num_kv_heads} key-value heads"
        )
    if not 0 <= model.dropout_frac < 1:
        raise ModelError(f"{where}: dropout is {model.dropout_frac}; it must be at least 0 and below 1")
    if model.mla is not None:
        _check_counts(model.mla, where)
    if model.moe is not None:
        _check_counts(model.moe, where)
        _check_moe(model, model.moe, where)
    if (model.vocab == 0) == (model.patches is None):
        raise ModelError(f"{where}: a model reads tokens or patches; give either a vocabulary or patches")
    if model.patches is not None:
        _check_patches(model, model.patches, where)
    return model


def _check_patches(model: Model, patches: Patches, where: str) -> None:
    _check_counts(patches, where)
    if patches.height % patches.patch or patches.width % patches.patch:
        raise ModelError(
            f"{where}: an image of {patches.height} x {patches.width} does not divide into patches of "
            f"{patches.patch}"
        )
    if patches.num_tokens != model.max_seq:
        raise ModelError(
            f"{where}: max_seq is {model.max_seq}, but the image has {patches.num_tokens} tokens"
        )


# --- reading -----------------------------------------------------------------------------------


@cache
def models() -> dict[str, Model]:
    """All models of the catalog by name."""
    text = (resources.files("meshwise") / "catalog" / "models.toml").read_text()
    raw = tomllib.loads(text)
    families = raw["families"]
    return {
        name: _model_from_entry(name, families[entry.pop("family")] | entry, "models.toml")
        for name, entry in raw["models"].items()
    }


def _model_from_entry(name: str, entry: dict[str, Any], where: str) -> Model:
    """A model from the fields of `Model`; heads are `hidden / num_heads` wide and MHA if not stated."""
    at = f"{where}, model {name!r}"
    entry = {
        "name": name,
        "num_kv_heads": entry.get("num_heads"),
        "head_dim": entry.get("hidden", 0) // entry.get("num_heads", 1),
    } | entry
    if "checked" in entry:
        entry["checked"] = str(entry["checked"])
    try:
        model = msgspec.convert(entry, Model)
    except msgspec.ValidationError as error:
        raise ModelError(f"{at}: {error}") from None
    return checked_model(model, at)


def model_names() -> list[str]:
    """The names of the model presets."""
    return list(models())


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than a path can be
        return False


def find_model(text: str) -> Model:
    """The model that `text` names: a preset or its alias, a `config.json`, or a directory holding one."""
    wanted = text.lower()
    for model in models().values():
        if wanted == model.name or wanted in model.aliases:
            return model
    if text.endswith(".json") or "/" in text or _exists(text):
        from meshwise.model.huggingface import read_config

        return read_config(text)
    raise ModelError(
        f"no model is called {text!r}; give the path of a config.json or one of {', '.join(models())}"
    )
