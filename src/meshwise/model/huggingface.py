"""Hugging Face `config.json` files, read into `Model` without the transformers library.

A config names its family (`model_type`, or else the class in `architectures`) and says only what
varies inside the family: that Phi has a bias on its LM head, or Gemma 2 four norms per block, is
written in the family's code. So a family is an entry of `catalog/huggingface.toml`: how it spells its config
(field names, and what an omitted field means), which block it has, which *rules* apply, and what it does
differently. A rule is a short function here: how fields of `Model` follow from several of the config.
The sizes a model cannot be without have no defaults, except inside the config of a part of a model,
where the library omits what equals its own.

A model that reads more than text is its language model; its towers and what joins them are named in
`Model.left_out` with their parameters. The class in `architectures` says which head the model ends with.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.core.errors import ModelError
from meshwise.core.files import parse_file
from meshwise.model.architecture import (
    MLA,
    Layer,
    Model,
    MoE,
    Patches,
    Recurrence,
    check_count,
    checked_model,
)
from meshwise.model.weights import num_params

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


_POOLED = ("PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice")


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
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
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
    use_sliding_window: bool = True
    max_window_layers: int = 0
    full_attention_every: int | str | None = None
    layer_types: list[str] | None = None
    is_causal: bool = True
    use_bidirectional_attention: bool | str | None = False
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
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    # experts
    num_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_layers: list[int] | None = None
    mlp_layer_types: list[str] | None = None
    topk_method: str = ""
    n_group: int | None = None
    topk_group: int | None = None
    num_nextn_predict_layers: int = 0
    ffn_config: _FfnConfig | None = None
    # recurrences
    recurrence: str = ""
    hybrid_pattern: str = ""
    attn_layer_indices: list[int] | None = None
    attn_layer_period: int = 0
    attn_layer_offset: int = 0
    expert_layer_period: int = 0
    expert_layer_offset: int = 0
    state_heads: int = 1
    state_head_dim: int | str = 1
    state_groups: int = 1
    state_size: int = 0
    state_expand: int = 1
    time_step_rank: int | str = "auto"
    conv_kernel: int = 4
    conv_bias: bool = False
    state_bias: bool = False
    inner_norms: bool = False
    block_auto_adjust_ff_dim: bool = False
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float = 1.0
    # encoders
    word_embed_proj_dim: int | None = None
    expansion_ratio: int = 4
    type_vocab_size: int = 2
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    temporal_patch_size: int = 1
    num_channels: int = 3
    class_token: bool = False
    use_mask_token: bool = False
    patch_bias: bool = True
    vision_use_head: bool = True
    pools: tuple[str, ...] = ("", *_POOLED)
    is_decoder: bool = False
    num_labels: int | None = None
    id2label: dict[str, Any] | None = None


_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_NULL_MEANS_NONE = (
    "num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "num_experts",
    "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip


class _Joint(msgspec.Struct, forbid_unknown_fields=True):
    """Layers that join a tower to the language model: `norms` of a width, `linears` from a width to another.

    A width is a product such as `2*2*tower`, of numbers, of `tower` and `text` (the hidden sizes), and of
    fields of the tower's config; a list there stands for its length.
    """

    norms: list[str] = []
    linears: list[tuple[str, str]] = []
    vectors: list[str] = []
    bias: bool = True
    norm_bias: bool = True
    times: str = "1"


class _Whole(msgspec.Struct, forbid_unknown_fields=True):
    """A model that reads more than text: the keys and families of its language model and of its tower."""

    text: str = "text_config"
    family: str = ""
    tied: bool | None = None
    tower: str = "vision_config"
    tower_family: str = ""
    tower_defaults: dict[str, Any] = {}
    joints: list[_Joint] = []


class _Spelling(msgspec.Struct, forbid_unknown_fields=True):
    """How one family writes its config; the fields are explained in `catalog/huggingface.toml`."""

    like: str = ""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    optional: list[str] = []
    block: Literal["", "llama", "plain", "gpt"] = ""
    rules: list[str] = []
    fields: _Fields = {}
    taken: dict[str, str] = {}
    experts: _Fields = {}
    joints: list[_Joint] = []
    head: Literal["decoder", "encoder", "image", "none"] = "decoder"
    whole: _Whole | None = None


@cache
def _spellings() -> dict[str, _Spelling]:
    text = (resources.files("meshwise") / "catalog" / "huggingface.toml").read_text()
    spellings = msgspec.convert(tomllib.loads(text), dict[str, _Spelling])
    for own in spellings.values():  # a family stands below the one that it is like
        if own.like:
            for name in own.__struct_fields__:
                mine, others = getattr(own, name), getattr(spellings[own.like], name)
                if isinstance(mine, dict):
                    setattr(own, name, others | mine)
                elif mine in ("", [], None, "decoder"):
                    setattr(own, name, others)
    return spellings


# --- blocks ------------------------------------------------------------------------------------

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
    """What every model states: its sizes, its heads, its dropout."""
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return {
        "num_layers": c.num_hidden_layers,
        "hidden": c.hidden_size,
        "ffn_hidden": 4 * c.hidden_size if c.intermediate_size is None else c.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": c.head_dim,
        "vocab": c.vocab_size,
        "max_seq": c.max_position_embeddings,
        "tied_embedding": c.tie_word_embeddings,
        "causal": c.is_causal and c.use_bidirectional_attention is not True,
        "dropout_frac": c.dropout,
    }


def _llama(c: _Config, *, gated: bool = True) -> _Fields:
    """RMSNorm, gated MLP, rotary positions, no biases."""
    return _block(c) | {
        "activation": _activation(c.hidden_activation or c.hidden_act, gated=gated),
        "norm": "rmsnorm",
        "linear_bias": False,
        "qkv_bias": False,
        "out_bias": False,
        "positions": "rotary",
    }


def _gpt(c: _Config) -> _Fields:
    """LayerNorm, plain MLP, learned positions, biases on norms and on every linear layer of the block."""
    return _block(c) | {
        "activation": _activation(c.hidden_act, gated=False),
        "norm": "layernorm",
        "norm_bias": True,
        "linear_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "positions": "learned",
    }


_BLOCKS: dict[str, Callable[[_Config], _Fields]] = {
    "llama": _llama,
    "plain": lambda c: _llama(c, gated=False),
    "gpt": _gpt,
}


# --- which layers have experts, and a window ---------------------------------------------------


_Pattern = tuple[Any, ...]  # a value for each layer


def _window(c: _Config) -> _Fields:
    """The window of each layer, 0 for none: by their names, by a step, or from one layer on."""
    every, window, layers = c.full_attention_every or 0, c.sliding_window or 0, range(c.num_hidden_layers)
    if c.layer_types is not None:
        full, near = ("full_attention", "global"), ("sliding_attention", "chunked_attention", "local")
        if len(c.layer_types) != len(layers) or not {*full, *near} >= {*c.layer_types}:
            raise ModelError(
                f"layer_types must name each of the {len(layers)} layers {' or '.join(full + near)}"
            )
        return {"windows": tuple(window * (kind in near) for kind in c.layer_types)}
    if not isinstance(every, int):
        raise ModelError(f"sliding_window_pattern is {every!r}; give layer_types, a name for each layer")
    if not window or not c.use_sliding_window:
        return {}
    looks_back = (layer < c.max_window_layers or (every and (layer + 1) % every == 0) for layer in layers)
    return {"windows": tuple(window * (not all_of_it) for all_of_it in looks_back)}


def _moe_layers(c: _Config) -> _Pattern:
    """Which layers have experts: by their names or numbers, or from one on, every n-th."""
    layers, dense = range(c.num_hidden_layers), c.mlp_only_layers or ()
    if c.mlp_layer_types is not None:
        if len(c.mlp_layer_types) != len(layers) or not {"dense", "sparse"} >= {*c.mlp_layer_types}:
            raise ModelError(f"mlp_layer_types must name each of the {len(layers)} layers dense or sparse")
        return tuple(kind == "sparse" for kind in c.mlp_layer_types)
    if c.moe_layers is not None:
        return tuple(layer in c.moe_layers for layer in layers)
    for step in ("moe_layer_freq", "decoder_sparse_step"):
        check_count(getattr(c, step), step)
    if c.expert_layer_period:
        return tuple(layer % c.expert_layer_period == c.expert_layer_offset for layer in layers)
    return tuple(
        layer >= c.first_k_dense_replace
        and layer % c.moe_layer_freq == 0
        and (layer + 1) % c.decoder_sparse_step == 0
        and layer not in dense
        for layer in layers
    )


def _window_rule(windows: _Pattern) -> _Fields | None:
    """`sliding_window` and `full_attention_every` that say the same as `windows`, or None."""
    window = max(windows, default=0)
    every = windows.index(0) + 1 if window and 0 in windows else 0
    if any(here != (window if not every or (i + 1) % every else 0) for i, here in enumerate(windows)):
        return None
    return {"sliding_window": window, "full_attention_every": every} if window else {}


def moe_rule(has_experts: Sequence[bool]) -> _Fields | None:
    """`first_dense_layers` and `every` of an `MoE` that say the same as `has_experts`, or None."""
    number, having = len(has_experts), [layer for layer, here in enumerate(has_experts) if here]
    if not having:
        return {"first_dense_layers": number, "every": 1}
    every = having[1] - having[0] if len(having) > 1 else max(number - having[0], 1)
    first = having[0] + 1 - every
    if len(having) == 1 and first < 0:
        first, every = 0, having[0] + 1
    if first < 0 or having != list(range(having[0], number, every)):
        return None
    return {"first_dense_layers": first, "every": every}


def _with_layers(fields: _Fields) -> _Fields:
    """`windows`, `has_experts` and `mixers` of the rules as steps where there are some, else as `layers`."""
    number, mixers = fields["num_layers"], fields.pop("mixers", ())
    windows = fields.pop("windows", (0,) * number)
    has_experts = fields.pop("has_experts", (False,) * number)
    steps, moe_steps = _window_rule(windows), moe_rule(has_experts)
    if steps is None or moe_steps is None or mixers:
        with_mlp = "none" not in mixers and fields["ffn_hidden"] > 0
        kinds = zip(has_experts, windows, mixers or ("attention",) * number, strict=True)
        layers = tuple(Layer(*kind, mlp=with_mlp or kind[2] == "none") for kind in kinds)
        return fields | {"layers": layers, "ffn_hidden": fields["ffn_hidden"] or fields["hidden"]}
    if any(has_experts):
        fields["moe"] = replace(fields["moe"], **moe_steps)
    return fields | steps


# --- rules -------------------------------------------------------------------------------------


def _experts(c: _Config) -> _Fields:
    """Experts in place of the MLP, shared ones beside them."""
    if c.num_experts is None or (c.recurrence and not c.num_experts):
        return {}
    width = c.intermediate_size if c.moe_intermediate_size is None else c.moe_intermediate_size
    if width is None:
        raise ModelError("the width of the experts is missing; an MoE config needs it")
    if not c.num_experts_per_tok:
        raise ModelError("num_experts_per_tok is missing; an MoE config needs it")
    num_shared = c.n_shared_experts or int(c.shared_expert_intermediate_size > 0)
    shared_width = c.shared_expert_intermediate_size or width
    is_limited = c.topk_method != "greedy" and 0 < (c.topk_group or 0) < (c.n_group or 0)
    moe = MoE(
        num_experts=c.num_experts,
        top_k=c.num_experts_per_tok,
        ffn_hidden=width,
        num_shared_experts=num_shared,
        shared_ffn_hidden=num_shared * shared_width,
        balance_bias=c.topk_method == "noaux_tc",
        expert_groups=(c.n_group or 0) * is_limited,
        top_groups=(c.topk_group or 0) * is_limited,
    )
    return {"moe": moe, "has_experts": _moe_layers(c)}


_MIXERS = {
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M"), "recurrence"),
    **dict.fromkeys(("full_attention", "attention", "*"), "attention"),
    **dict.fromkeys(("mlp", "moe", "-", "E"), "none"),
}


def _hybrid(c: _Config) -> _Fields:
    """Layers of which some have a recurrence in place of attention, and some, in Nemotron-H, only an MLP."""
    number, kinds = c.num_hidden_layers, list(c.hybrid_pattern) or c.layer_types or []
    if not kinds:
        period, offset, indices = c.attn_layer_period, c.attn_layer_offset, c.attn_layer_indices or ()
        every = c.full_attention_every if isinstance(c.full_attention_every, int) else 0
        for layer in range(number):
            attends = layer in indices or (period and layer % period == offset)
            kinds.append("attention" if attends or (every and (layer + 1) % every == 0) else "mamba")
    if len(kinds) != number or not _MIXERS.keys() >= {*kinds}:
        raise ModelError(f"layer_types must name each of the {number} layers {' or '.join(_MIXERS)}")
    mixers = tuple(_MIXERS[kind] for kind in kinds)
    fields: _Fields = {"mixers": mixers, "recurrence": _recurrence(c) if "recurrence" in mixers else None}
    if "none" in mixers:
        fields["has_experts"] = tuple(kind in ("moe", "E") for kind in kinds)
    return fields


def _recurrence(c: _Config) -> Recurrence:
    heads, dim = c.state_heads, c.state_head_dim
    if c.recurrence in ("scan", "conv"):  # no heads: every channel has a state of its own
        heads, dim = c.state_expand * c.hidden_size, 1
    rank = -(-c.hidden_size // 16) if isinstance(c.time_step_rank, str) else c.time_step_rank
    return Recurrence(
        kind=c.recurrence,
        num_heads=heads,
        head_dim=c.state_expand * c.hidden_size // max(heads, 1) if isinstance(dim, str) else dim,
        num_groups=c.state_groups,
        state_dim=c.state_size,
        taps=c.conv_kernel,
        conv_bias=c.conv_bias,
        bias=c.state_bias,
        norm=c.recurrence in ("delta", "ssd"),
        dt_rank=rank if c.recurrence == "scan" else 0,
        inner_norms=c.inner_norms,
    )


def _only_recurrence(c: _Config) -> _Fields:
    """A model without attention and MLP: its heads are those of the recurrence."""
    own = _recurrence(c)
    heads = dict.fromkeys(("num_heads", "num_kv_heads"), own.num_heads)
    mixers = ("recurrence",) * c.num_hidden_layers
    return heads | {"head_dim": own.head_dim, "mixers": mixers, "recurrence": own, "ffn_hidden": 0}


def _lfm2(c: _Config) -> _Fields:
    """The MLP is two thirds as wide as the config says, rounded up."""
    if not c.block_auto_adjust_ff_dim:
        return {}
    check_count(c.block_multiple_of, "block_multiple_of")
    width = int(c.block_ffn_dim_multiplier * int(2 * (c.intermediate_size or 0) / 3))
    return {"ffn_hidden": -(-width // c.block_multiple_of) * c.block_multiple_of}


def _granite_hybrid(c: _Config) -> _Fields:
    """Where there are no experts, the shared one is the MLP."""
    return {} if c.num_experts else {"ffn_hidden": c.shared_expert_intermediate_size}


def _softcaps(c: _Config) -> _Fields:
    return {
        "attention_softcap": bool(c.attn_logit_softcapping),
        "logit_softcap": bool(c.final_logit_softcapping),
    }


def _mla(c: _Config) -> _Fields:
    mla = MLA(
        q_lora_rank=c.q_lora_rank or 0,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        index_heads=c.index_n_heads,
        index_head_dim=c.index_head_dim,
        index_top_k=c.index_topk,
    )
    return {
        "mla": mla,
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_kv_heads": c.num_attention_heads,
    }


def _stablelm(c: _Config) -> _Fields:
    return {"num_norms": 1 if c.parallel else 2}


def _dbrx(c: _Config) -> _Fields:
    ffn = c.ffn_config
    if ffn is None:
        raise ModelError("ffn_config is missing; a dbrx config needs it")
    kv_heads = c.attn_config.kv_n_heads
    return {
        "num_kv_heads": 1 if kv_heads is None else kv_heads,
        "ffn_hidden": ffn.ffn_hidden_size,
        "moe": MoE(num_experts=ffn.moe_num_experts, top_k=ffn.moe_top_k, ffn_hidden=ffn.ffn_hidden_size),
    }


def _gpt_bigcode(c: _Config) -> _Fields:
    return {"num_kv_heads": 1 if c.multi_query else c.num_attention_heads}


def _opt(c: _Config) -> _Fields:
    if c.word_embed_proj_dim not in (None, c.hidden_size):
        raise ModelError(
            f"word_embed_proj_dim is {c.word_embed_proj_dim}; only embeddings as wide as hidden_size "
            f"({c.hidden_size}) are expressed"
        )
    return {"final_norm": c.do_layer_norm_before and not c.remove_final_layer_norm}


def _falcon(c: _Config) -> _Fields:
    if c.new_decoder_architecture:
        kv_heads = c.num_key_value_heads
        num_norms = 2 if c.num_ln_in_parallel_attn is None else c.num_ln_in_parallel_attn
        parallel = True
    else:
        kv_heads = 1 if c.multi_query else c.num_attention_heads
        num_norms = 1 if c.parallel else 2
        parallel = c.parallel
    return {
        "positions": "alibi" if c.alibi else "rotary",
        "num_kv_heads": c.num_attention_heads if kv_heads is None else kv_heads,
        "parallel_block": parallel,
        "num_norms": num_norms,
    }


def _mpt(c: _Config) -> _Fields:
    has_bias = not c.no_bias
    return {
        "positions": "alibi" if c.attn_config.alibi else "learned",
        "ffn_hidden": c.expansion_ratio * c.hidden_size,
        "qk_norm": c.attn_config.qk_ln,
        "qk_norm_full": c.attn_config.qk_ln,
    } | dict.fromkeys(("norm_bias", "linear_bias", "qkv_bias", "out_bias"), has_bias)


def _patches(c: _Config) -> _Fields:
    """An encoder of images: a token for each square, and nothing that only text needs."""
    size, patch = c.image_size, c.patch_size
    side = patch if isinstance(patch, int) else patch[0]
    check_count(side, "patch_size")
    height, width = (each - each % side for each in ((size, size) if isinstance(size, int) else size))
    patches = Patches(
        height=height, width=width, patch=side, channels=c.num_channels * c.temporal_patch_size,
        class_token=c.class_token, mask_token=c.use_mask_token, bias=c.patch_bias,
    )  # fmt: skip
    return {"patches": patches, "max_seq": patches.num_tokens, "causal": False, "vocab": 0, "lm_head": False}


_RULES: dict[str, Callable[[_Config], _Fields]] = {
    "window": _window,
    "experts": _experts,
    "hybrid": _hybrid,
    "only_recurrence": _only_recurrence,
    "lfm2": _lfm2,
    "granite_hybrid": _granite_hybrid,
    "softcaps": _softcaps,
    "mla": _mla,
    "stablelm": _stablelm,
    "dbrx": _dbrx,
    "gpt_bigcode": _gpt_bigcode,
    "opt": _opt,
    "falcon": _falcon,
    "mpt": _mpt,
    "patches": _patches,
}


# --- heads -------------------------------------------------------------------------------------

_OF_TOKENS = ("TokenClassification", "QuestionAnswering")
_PREDICTS = ("CausalLM", "LMHeadModel", "ConditionalGeneration", "ImageTextToText")
_NUM_CLASSES = {"QuestionAnswering": 2, "NextSentencePrediction": 2, "PreTraining": 2, "MultipleChoice": 1}
_NO_LOGITS = {"lm_head": False, "head_bias": False, "logit_softcap": False, "mtp_layers": 0}


def _purpose(c: _Config) -> str:
    """What the class in `architectures` is for: CausalLM of `LlamaForCausalLM`, nothing of `LlamaModel`."""
    name = c.architectures[0] if c.architectures else ""
    found = re.search(r"For([A-Z].*)$|(LMHeadModel)$", name)
    return (found[1] or found[2]) if found else ""


def _classifier(c: _Config, purpose: str) -> _Fields:
    return {
        "num_classes": _NUM_CLASSES.get(purpose, _num_labels(c)),
        "classifies_tokens": purpose in _OF_TOKENS,
    }


def _decoder_head(c: _Config, purpose: str) -> _Fields:
    """The LM head, also where no class is named; a classifier, which has a bias only for tokens; or none."""
    if purpose in _PREDICTS or not c.architectures:
        return {}
    bias = {"classifier_bias": purpose in _OF_TOKENS}
    return _NO_LOGITS | (_classifier(c, purpose) | bias if purpose else {})


def _encoder_head(c: _Config, purpose: str) -> _Fields:
    """BERT and its like: words are predicted through one more layer, most classes through a pooler."""
    predicts = dict.fromkeys(("lm_head", "mlm_transform", "head_bias"), purpose in _WORDS)
    classifies = _classifier(c, purpose) if purpose in (*_POOLED, *_OF_TOKENS) else {}
    return predicts | {"pooler": purpose in c.pools} | classifies


def _image_head(c: _Config, purpose: str) -> _Fields:
    """A classifier, or the pooler of the bare model."""
    return _classifier(c, purpose) if purpose else {"pooler": True}


_WORDS = ("MaskedLM", "PreTraining", "LMHeadModel", "CausalLM")
_HEADS: dict[str, tuple[tuple[str, ...], Callable[[_Config, str], _Fields]]] = {
    "decoder": ((*_PREDICTS, "SequenceClassification", *_OF_TOKENS), _decoder_head),
    "encoder": ((*_WORDS, *_POOLED, *_OF_TOKENS), _encoder_head),
    "image": (("ImageClassification",), _image_head),
    "none": ((), lambda _c, _purpose: {}),
}
"""Which heads models of a kind have, by their purpose, and the fields of `Model` that say so."""


def _head(c: _Config, kind: str) -> _Fields:
    known, fields = _HEADS[kind]
    purpose = _purpose(c)
    if purpose not in ("", *known):
        raise ModelError(
            f"architectures names {c.architectures[0]}, a head that is not known for this family; known are "
            f"{', '.join(('none', *known))}"
        )
    return fields(c, purpose)


def _num_labels(c: _Config) -> int:
    if c.id2label is not None:
        return len(c.id2label)
    return 2 if c.num_labels is None else c.num_labels


# --- reading -----------------------------------------------------------------------------------

_OTHER_NAMES = {"refinedweb": "falcon", "refinedwebmodel": "falcon", "rw": "falcon", "kimi_k2": "deepseek_v3"}


def families() -> list[str]:
    """The `model_type`s that `read_config` knows."""
    return list(_spellings())


def read_config(path: str | Path, like: str = "") -> Model:
    """The model that a `config.json`, or the directory holding it, describes.

    `like`: a family that an unknown one is to be read as. Raises `ModelError` if the file cannot be read,
    lacks a field, or contradicts itself.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    raw = parse_file(path, "JSON", msgspec.json.decode, ModelError)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return model_from_config(raw, name=name, where=str(path), like=like)


def model_from_config(raw: Any, *, name: str, where: str = "config", like: str = "") -> Model:
    """The model that a parsed config describes; `where` begins the messages of its errors."""
    if not isinstance(raw, dict):
        raise ModelError(f"{where} is not a JSON object; a config.json begins with {{")
    try:
        family = _family(raw, like)
        whole = _spellings()[family].whole
        fields = _fields(raw, family, nested=False) if whole is None else _fields_of_whole(raw, whole)
        return checked_model(Model(name=name, source=where, **fields), where)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(where) else f"{where}: {text}") from None


def _fields(raw: dict[str, Any], family: str, *, nested: bool) -> _Fields:
    """The fields of `Model` that the config of one family says."""
    spelling = _spellings()[family]
    c = _typed(raw, spelling, nested=nested)
    fields = _BLOCKS[spelling.block](c)
    for rule in spelling.rules:
        fields |= _RULES[rule](c)
    if fields.get("moe") is not None:
        fields["moe"] = replace(fields["moe"], **spelling.experts)
    taken = {name: getattr(c, common) for name, common in spelling.taken.items()}
    if fields["head_dim"] is None:
        fields["head_dim"], rest = divmod(c.hidden_size, c.num_attention_heads)
        if rest:
            raise ModelError(
                f"hidden_size {c.hidden_size} does not divide by {c.num_attention_heads} heads; give head_dim"
            )
    fields = _with_layers(fields | spelling.fields | taken | _head(c, spelling.head))
    return fields | {"left_out": _left_out("merger", spelling.joints, raw | {"tower": fields["hidden"]})}


def _fields_of_whole(raw: dict[str, Any], whole: _Whole) -> _Fields:
    """The language model, with the class and the tied embedding of the whole; its tower is left out."""
    text = _part(raw, whole.text) or raw | {"model_type": whole.family}
    tied = raw.get("tie_word_embeddings", whole.tied)
    above = {"architectures": raw.get("architectures")} | (
        {} if tied is None else {"tie_word_embeddings": tied}
    )
    labels = {key: raw[key] for key in ("id2label", "num_labels") if key in raw}
    fields = _fields(text | above | labels, _family({"model_type": whole.family} | text), nested=True)
    if not whole.tower:
        return fields
    tower = whole.tower_defaults | _part(raw, whole.tower)
    try:
        family = _family({"model_type": whole.tower_family} | tower)
        found = Model(name=family, **_fields(tower | {"architectures": None}, family, nested=True))
        num_tower = num_params(checked_model(found, family))
    except ModelError as error:
        raise ModelError(
            f"{whole.tower}: {error}; to price the language model alone, save {whole.text} as a config.json"
        ) from None
    sizes = raw | tower | {"tower": found.hidden, "text": fields["hidden"]}
    name = whole.tower.partition("_")[0] + " tower"
    return fields | {
        "left_out": ((name, num_tower), *found.left_out, *_left_out("projector", whole.joints, sizes))
    }


def _part(raw: dict[str, Any], key: str) -> dict[str, Any]:
    part = raw.get(key)
    if part is not None and not isinstance(part, dict):
        raise ModelError(f"{key} is not a JSON object; it must hold the config of a part of the model")
    return part or {}


def _left_out(name: str, joints: list[_Joint], sizes: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    number = sum(_num_params(joint, sizes) for joint in joints)
    return ((name, number),) if number else ()


def _num_params(joint: _Joint, sizes: dict[str, Any]) -> int:
    def size(text: str) -> int:
        product = 1
        for factor in text.split("*"):
            value = int(factor) if factor.isdecimal() else sizes.get(factor)
            value = len(value) if isinstance(value, list) else value
            if not isinstance(value, int):
                raise ModelError(
                    f"{factor} is {value!r}; the layers behind the tower cannot be sized without it"
                )
            product *= value
        return product

    norms = sum(size(norm) for norm in joint.norms) * (1 + joint.norm_bias)
    linears = sum((size(d_in) + joint.bias) * size(d_out) for d_in, d_out in joint.linears)
    return size(joint.times) * (norms + linears + sum(map(size, joint.vectors)))


def _family(raw: dict[str, Any], like: str = "") -> str:
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
    if key in _spellings():
        return key
    if like in _spellings():
        return like
    if like:
        raise ModelError(f"like={like} is not a known family; known are {', '.join(_spellings())}")
    raise ModelError(
        f"model_type {kind!r} is not known; if it is a close relative of a known one, write that behind the "
        f"path, as in config.json,like=llama; known are {', '.join(_spellings())}"
    )


def _typed(raw: dict[str, Any], spelling: _Spelling, *, nested: bool) -> _Config:
    """The config under common names, with the family's defaults, types checked and sizes above zero."""
    given = {key: value for key, value in raw.items() if value is not None or key in _NULL_MEANS_NONE}
    own_names = {common: own for own, common in spelling.names.items() if own in given}
    renamed = {common: given[own] for common, own in own_names.items()}
    merged = spelling.defaults | (spelling.nested if nested else {}) | given | renamed
    if "num_hidden_layers" not in merged and isinstance(merged.get("layer_types"), list):
        merged["num_hidden_layers"] = len(merged["layer_types"])
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
