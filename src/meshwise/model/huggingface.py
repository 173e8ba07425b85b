"""Hugging Face `config.json` files, read into `Model` without the transformers library.

A config names its family (`model_type`, or else the class in `architectures`) and says only what
varies inside the family: that Phi has a bias on its LM head, or Gemma 2 four norms per block, is
written in the family's code. So a family is an entry of `catalog/huggingface.toml`: how it spells its config
(field names, and what an omitted field means), which of two blocks it has, and what it does differently from
that block. Where a field of `Model` follows from several of the config, a short function here says how.
The sizes a model cannot be without have no defaults, except inside a
`text_config`, where the library omits what equals its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.core.errors import ModelError
from meshwise.core.files import parse_file
from meshwise.model.architecture import MLA, Model, MoE, Patches, check_count, checked_model

_Fields = dict[str, Any]  # fields of Model


class _AttnConfig(msgspec.Struct):
    """The nested `attn_config` of MPT and DBRX."""

    kv_n_heads: int | None = None
    alibi: bool = True
    qk_ln: bool = False


class _FfnConfig(msgspec.Struct):
    """The nested `ffn_config` of DBRX."""

    ffn_hidden_size: int
    moe_num_experts: int
    moe_top_k: int


class _Config(msgspec.Struct):
    """The fields that decide an architecture, under their most common names."""

    architectures: list[str] = []
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    tie_word_embeddings: bool = False
    dropout: float = 0.0
    # biases
    attention_bias: bool = False
    mlp_bias: bool = False
    bias: bool = False
    no_bias: bool = True
    # norms and the shape of the block
    qk_layernorm: bool = False
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    norm_affine: bool = True
    parallel: bool = False
    num_ln_in_parallel_attn: int | None = None
    # attention
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    is_causal: bool = True
    use_bidirectional_attention: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    alibi: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    attn_config: _AttnConfig = msgspec.field(default_factory=_AttnConfig)
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    # experts
    num_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
    topk_method: str = ""
    num_nextn_predict_layers: int = 0
    ffn_config: _FfnConfig | None = None
    # encoders
    word_embed_proj_dim: int | None = None
    expansion_ratio: int = 4
    type_vocab_size: int = 2
    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3
    is_decoder: bool = False
    num_labels: int | None = None
    id2label: dict[str, Any] | None = None


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_NULL_MEANS_NONE = (
    "num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "num_experts",
    "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip


class _Spelling(msgspec.Struct, forbid_unknown_fields=True):
    """How one family writes its config; the fields are explained in `catalog/huggingface.toml`."""

    like: str = ""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    nested: dict[str, int] = {}
    optional: list[str] = []
    block: Literal["", "llama", "gpt"] = ""
    fields: _Fields = {}
    taken: dict[str, str] = {}


@cache
def _spellings() -> dict[str, _Spelling]:
    text = (resources.files("meshwise") / "catalog" / "huggingface.toml").read_text()
    spellings = msgspec.convert(tomllib.loads(text), dict[str, _Spelling])
    for own in spellings.values():  # a family stands below the one that it is like
        if own.like:
            other = spellings[own.like]
            own.names = other.names | own.names
            own.defaults = other.defaults | own.defaults
            own.nested = other.nested | own.nested
            own.optional = own.optional or other.optional
            own.block = own.block or other.block
            own.fields = other.fields | own.fields
            own.taken = other.taken | own.taken
    return spellings


# --- parts -------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}


def _activation(name: str, *, gated: bool) -> str:
    plain = _ACTIVATIONS.get(name)
    if plain is None or (gated and plain not in _GATED):
        raise ModelError(f"hidden_act is {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _GATED[plain] if gated else plain


def _block(c: _Config) -> _Fields:
    """What every decoder states: its sizes, its heads, its dropout."""
    if c.head_dim is None and c.hidden_size % c.num_attention_heads:
        raise ModelError(
            f"hidden_size {c.hidden_size} does not divide by {c.num_attention_heads} heads; give head_dim"
        )
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return {
        "num_layers": c.num_hidden_layers,
        "hidden": c.hidden_size,
        "ffn_hidden": 4 * c.hidden_size if c.intermediate_size is None else c.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": c.hidden_size // heads if c.head_dim is None else c.head_dim,
        "vocab": c.vocab_size,
        "max_seq": c.max_position_embeddings,
        "tied_embedding": c.tie_word_embeddings,
        "causal": c.is_causal and not c.use_bidirectional_attention,
        "dropout_frac": c.dropout,
    }


def _llama(c: _Config) -> _Fields:
    """RMSNorm, gated MLP, rotary positions, no biases."""
    return _block(c) | {
        "activation": _activation(c.hidden_act, gated=True),
        "norm": "rmsnorm",
        "linear_bias": False,
        "qkv_bias": False,
        "out_bias": False,
        "positions": "rotary",
    }


def _gpt(c: _Config, *, bias: bool = True, positions: str = "learned") -> _Fields:
    """LayerNorm with bias, plain MLP; `bias` on every linear layer of the block."""
    return _block(c) | {
        "activation": _activation(c.hidden_act, gated=False),
        "norm": "layernorm",
        "norm_bias": True,
        "linear_bias": bias,
        "qkv_bias": bias,
        "out_bias": bias,
        "positions": positions,
    }


def _window(c: _Config, *, full_attention_every: int = 0) -> _Fields:
    """A sliding window in all layers, or all but each `full_attention_every`-th; `layer_types` decides."""
    every = full_attention_every
    if c.layer_types is not None:
        full = [kind == "full_attention" for kind in c.layer_types]
        every = full.index(True) + 1 if any(full) else 0
        known = {"full_attention", "sliding_attention"}
        regular = all(is_full == bool(every and (i + 1) % every == 0) for i, is_full in enumerate(full))
        if len(full) != c.num_hidden_layers or not known.issuperset(c.layer_types) or not regular:
            raise ModelError(
                "layer_types must name full_attention or sliding_attention per layer, full at a fixed step"
            )
    if not c.sliding_window or every == 1:
        return {}
    return {"sliding_window": c.sliding_window, "full_attention_every": every}


def _qwen_window(c: _Config) -> _Fields:
    """Qwen's window is off unless asked for, and then leaves out the first `max_window_layers`."""
    if not c.use_sliding_window or c.max_window_layers >= c.num_hidden_layers:
        return {}
    if c.max_window_layers > 0 and c.layer_types is None:
        raise ModelError(
            f"use_sliding_window from layer {c.max_window_layers} (max_window_layers) on is not expressed; "
            "give all layers the window, or none"
        )
    return _window(c)


def _experts(c: _Config, width: int | None, **pattern: Any) -> MoE:
    """Experts of `width` without a shared one, in the layers of `pattern`."""
    if c.num_experts is None or width is None:
        raise ModelError("the number or the width of the experts is missing; an MoE config needs both")
    return MoE(num_experts=c.num_experts, top_k=c.num_experts_per_tok, ffn_hidden=width, **pattern)


def _qwen_pattern(c: _Config) -> dict[str, int]:
    """Every `decoder_sparse_step`-th layer has experts, but not the `mlp_only_layers`."""
    num_dense = len(c.mlp_only_layers)
    if num_dense == 0:
        return {"every": c.decoder_sparse_step}
    if c.decoder_sparse_step != 1 or sorted(c.mlp_only_layers) != list(range(num_dense)):
        raise ModelError("mlp_only_layers must be the first layers, with decoder_sparse_step 1")
    return {"first_dense_layers": num_dense}


def _deepseek_pattern(c: _Config) -> dict[str, int]:
    """From `first_k_dense_replace` on, the layers whose number divides by `moe_layer_freq`."""
    every, first = c.moe_layer_freq, c.first_k_dense_replace
    check_count(every, "moe_layer_freq")
    first_moe_layer = -(-first // every) * every
    if first_moe_layer < every - 1:
        raise ModelError(f"moe_layer_freq {every} with experts in layer 0 is not expressed; use 1")
    return {"first_dense_layers": first_moe_layer - every + 1, "every": every}


# --- families ----------------------------------------------------------------------------------


def _llama_with_window(c: _Config) -> _Fields:
    return _llama(c) | _window(c)


def _llama_with_experts(c: _Config) -> _Fields:
    return _llama(c) | {"moe": _experts(c, c.intermediate_size)}


def _mixtral(c: _Config) -> _Fields:
    return _llama_with_experts(c) | _window(c)


def _qwen(c: _Config) -> _Fields:
    return _llama(c) | _qwen_window(c)


def _qwen2_moe(c: _Config) -> _Fields:
    shared = c.shared_expert_intermediate_size
    moe = _experts(
        c,
        c.moe_intermediate_size,
        num_shared_experts=int(shared > 0),
        shared_ffn_hidden=shared,
        shared_gate=True,
        **_qwen_pattern(c),
    )
    return _qwen(c) | {"moe": moe}


def _qwen3_moe(c: _Config) -> _Fields:
    return _qwen(c) | {"moe": _experts(c, c.moe_intermediate_size, **_qwen_pattern(c))}


def _gemma(c: _Config) -> _Fields:
    activation = _activation(c.hidden_activation or c.hidden_act, gated=True)
    return _llama(c) | {"activation": activation}


def _gemma2(c: _Config, *, full_attention_every: int = 2) -> _Fields:
    return (
        _gemma(c)
        | _window(c, full_attention_every=full_attention_every)
        | {
            "attention_softcap": bool(c.attn_logit_softcapping),
            "logit_softcap": bool(c.final_logit_softcapping),
        }
    )


def _deepseek(c: _Config) -> _Fields:
    mla = MLA(
        q_lora_rank=c.q_lora_rank or 0,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
    )
    fields = _llama(c) | {
        "mla": mla,
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_kv_heads": c.num_attention_heads,
        "mtp_layers": c.num_nextn_predict_layers,
    }
    if c.num_experts is None:
        return fields
    num_shared = c.n_shared_experts or 0
    moe = _experts(
        c,
        c.moe_intermediate_size,
        num_shared_experts=num_shared,
        shared_ffn_hidden=num_shared * c.moe_intermediate_size,
        balance_bias=c.topk_method == "noaux_tc",
        **_deepseek_pattern(c),
    )
    return fields | {"moe": moe}


def _gpt_oss(c: _Config) -> _Fields:
    return (
        _llama(c)
        | _window(c, full_attention_every=2)
        | {"moe": _experts(c, c.intermediate_size, router_bias=True)}
    )


def _stablelm(c: _Config) -> _Fields:
    return _llama(c) | {"num_norms": 1 if c.parallel else 2}


def _dbrx(c: _Config) -> _Fields:
    ffn = c.ffn_config
    if ffn is None:
        raise ModelError("ffn_config is missing; a dbrx config needs it")
    kv_heads = c.attn_config.kv_n_heads
    return _llama(c) | {
        "norm": "layernorm",
        "num_kv_heads": 1 if kv_heads is None else kv_heads,
        "ffn_hidden": ffn.ffn_hidden_size,
        "moe": MoE(num_experts=ffn.moe_num_experts, top_k=ffn.moe_top_k, ffn_hidden=ffn.ffn_hidden_size),
    }


def _gpt_bigcode(c: _Config) -> _Fields:
    return _gpt(c) | {"num_kv_heads": 1 if c.multi_query else c.num_attention_heads}


def _opt(c: _Config) -> _Fields:
    if c.word_embed_proj_dim not in (None, c.hidden_size):
        raise ModelError(
            f"word_embed_proj_dim is {c.word_embed_proj_dim}; only embeddings as wide as hidden_size "
            f"({c.hidden_size}) are expressed"
        )
    final_norm = c.do_layer_norm_before and not c.remove_final_layer_norm
    return _gpt(c, bias=c.bias) | {"final_norm": final_norm}


def _falcon(c: _Config) -> _Fields:
    if c.new_decoder_architecture:
        kv_heads = c.num_key_value_heads
        num_norms = 2 if c.num_ln_in_parallel_attn is None else c.num_ln_in_parallel_attn
        parallel = True
    else:
        kv_heads = 1 if c.multi_query else c.num_attention_heads
        num_norms = 1 if c.parallel else 2
        parallel = c.parallel
    return _gpt(c, bias=c.bias, positions="alibi" if c.alibi else "rotary") | {
        "num_kv_heads": c.num_attention_heads if kv_heads is None else kv_heads,
        "parallel_block": parallel,
        "num_norms": num_norms,
    }


def _mpt(c: _Config) -> _Fields:
    positions = "alibi" if c.attn_config.alibi else "learned"
    return _gpt(c, bias=not c.no_bias, positions=positions) | {
        "ffn_hidden": c.expansion_ratio * c.hidden_size,
        "norm_bias": not c.no_bias,
        "qk_norm": c.attn_config.qk_ln,
        "qk_norm_full": c.attn_config.qk_ln,
    }


def _starcoder2(c: _Config) -> _Fields:
    return _gpt(c, bias=c.bias, positions="rotary") | _window(c)


def _bert(c: _Config) -> _Fields:
    head = c.architectures[0].partition("For")[2] if c.architectures else ""
    labels = {"": 0, "MaskedLM": 0, "PreTraining": 2, "NextSentencePrediction": 2}
    predicts_words = head in ("MaskedLM", "PreTraining")
    return _gpt(c) | {
        "lm_head": predicts_words,
        "mlm_transform": predicts_words,
        "head_bias": predicts_words,
        "pooler": head in ("", "PreTraining", "NextSentencePrediction", "SequenceClassification"),
        "num_classes": labels.get(head, _num_labels(c)),
    }


def _vit(c: _Config) -> _Fields:
    height, width = (c.image_size, c.image_size) if isinstance(c.image_size, int) else c.image_size
    check_count(c.patch_size, "patch_size")
    patches = Patches(
        height=height, width=width, patch=c.patch_size, channels=c.num_channels, class_token=True
    )
    classifies = bool(c.architectures) and c.architectures[0].endswith("ForImageClassification")
    return _gpt(c) | {
        "patches": patches,
        "max_seq": patches.num_tokens,
        "pooler": not classifies,
        "num_classes": _num_labels(c) if classifies else 0,
    }


def _num_labels(c: _Config) -> int:
    if c.id2label is not None:
        return len(c.id2label)
    return 2 if c.num_labels is None else c.num_labels


_BLOCKS: dict[str, Callable[[_Config], _Fields]] = {"llama": _llama, "gpt": _gpt}
_OWN_RULES: dict[str, Callable[[_Config], _Fields]] = {
    "mistral": _llama_with_window,
    "phi3": _llama_with_window,
    "mixtral": _mixtral,
    "olmoe": _llama_with_experts,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": lambda c: _gemma2(c, full_attention_every=c.sliding_window_pattern),
    "stablelm": _stablelm,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_bigcode": _gpt_bigcode,
    "opt": _opt,
    "falcon": _falcon,
    "mpt": _mpt,
    "dbrx": _dbrx,
    "starcoder2": _starcoder2,
    "bert": _bert,
    "vit": _vit,
}
"""The families for which the catalog does not say it all."""
_OTHER_NAMES = {
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
    "rw": "falcon",
    "gemma3": "gemma3_text",
    "kimi_k2": "deepseek_v3",
}


def families() -> list[str]:
    """The `model_type`s that `read_config` knows."""
    return list(_spellings())


# --- reading -----------------------------------------------------------------------------------


def read_config(path: str | Path) -> Model:
    """The model that a `config.json`, or the directory holding it, describes.

    Raises `ModelError` if it cannot be read, lacks a field, or contradicts itself. A `text_config` inside
    (of a model that reads more than text) is the model.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    raw = parse_file(path, "JSON", msgspec.json.decode, ModelError)
    return model_from_config(
        raw, name=path.resolve().parent.name if path.stem == "config" else path.stem, where=str(path)
    )


def model_from_config(raw: Any, *, name: str, where: str = "config") -> Model:
    """The model that a parsed config describes; `where` begins the messages of its errors."""
    nested = isinstance(raw, dict) and isinstance(raw.get("text_config"), dict)
    if nested:
        raw = raw["text_config"]
    if not isinstance(raw, dict):
        raise ModelError(f"{where} is not a JSON object; a config.json begins with {{")
    try:
        family = _family(raw)
        spelling = _spellings()[family]
        config = _typed(raw, spelling, nested=nested)
        rules = _OWN_RULES.get(family) or _BLOCKS[spelling.block]
        taken = {name: getattr(config, common) for name, common in spelling.taken.items()}
        return checked_model(Model(name=name, source=where, **rules(config) | spelling.fields | taken), where)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(where) else f"{where}: {text}") from None


def _family(raw: dict[str, Any]) -> str:
    """By `model_type`, else by the class in `architectures` (`Qwen2MoeForCausalLM` is `qwen2_moe`)."""
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if isinstance(kind, str) and kind:
        key = kind.lower()
    elif isinstance(classes, list) and classes and isinstance(classes[0], str):
        kind = classes[0]
        squeezed = re.sub(r"(For[A-Z].*|LMHeadModel|Model)$", "", kind).lower()
        key = next((family for family in _spellings() if family.replace("_", "") == squeezed), squeezed)
    else:
        raise ModelError("model_type is missing; it names the family of the model, for example llama")
    key = _OTHER_NAMES.get(key, key)
    if key not in _spellings():
        raise ModelError(f"model_type {kind!r} is not known; known are {', '.join(_spellings())}")
    return key


def _typed(raw: dict[str, Any], spelling: _Spelling, *, nested: bool) -> _Config:
    """The config under common names, with the family's defaults, types checked and sizes above zero."""
    given = {key: value for key, value in raw.items() if value is not None or key in _NULL_MEANS_NONE}
    own_names = {common: own for own, common in spelling.names.items() if own in given}
    renamed = {common: given[own] for common, own in own_names.items()}
    merged = spelling.defaults | (spelling.nested if nested else {}) | given | renamed
    needed = [name for name in _NEEDED if name not in spelling.optional]
    for common in needed:
        if common not in merged:
            own = next((own for own, other in spelling.names.items() if other == common), common)
            raise ModelError(f"{own} is missing; the model cannot be sized without it")
    try:
        config = msgspec.convert(merged, _Config)
    except msgspec.ValidationError as error:
        text = str(error)
        for common, own in own_names.items():
            text = text.replace(f"`$.{common}`", f"`$.{own}`")
        raise ModelError(text) from None
    for common in needed:
        check_count(getattr(config, common), own_names.get(common, common))
    return config
