"""How Hugging Face configs are written: the fields that decide an architecture, as each family spells them.

`catalog/huggingface.toml` has an entry for each family, a `Spelling`; a config is read into a `Config`, the
same for all families.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import msgspec

from meshwise.core.files import read_catalog
from meshwise.model.architecture import InputSizing

Fields = dict[str, Any]  # fields of Model


class AttnConfig(msgspec.Struct):
    """The nested `attn_config` of MPT and DBRX."""

    kv_n_heads: int | None = None
    alibi: bool = True
    qk_ln: bool = False


class FfnConfig(msgspec.Struct):
    """The nested `ffn_config` of DBRX."""

    ffn_hidden_size: int
    moe_num_experts: int
    moe_top_k: int


class LinearAttention(msgspec.Struct):
    """The nested `linear_attn_config` of Kimi-Linear; its layers are numbered from 1."""

    head_dim: int
    num_heads: int
    short_conv_kernel_size: int
    full_attn_layers: list[int]
    use_full_rank_gate: bool = False


class LayerSizes(msgspec.Struct):
    """What one layer has otherwise, in the nested `per_layer_config` of Gemma 4."""

    head_dim: int = 0
    num_key_value_heads: int = 0


POOLED = ("PreTraining", "NextSentencePrediction", "SequenceClassification", "MultipleChoice")


class Config(msgspec.Struct):
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
    post_norm: bool = False
    norm_type: str = ""
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
    attention_gate: bool = False
    use_mla: bool = True
    new_decoder_architecture: bool = False
    attn_config: AttnConfig = msgspec.field(default_factory=AttnConfig)
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    no_rope_layers: list[int] | None = None
    kv_source_layers: list[int] | None = None
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    index_kpool: int = 1
    indexer_types: list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 3
    compress_ratios: list[int] | None = None
    compress_rates: dict[str, int] = {}
    num_hash_layers: int = 3
    o_lora_rank: int = 0
    o_groups: int = 1
    hc_mult: int = 1
    hc_between: bool = True
    sparse_attention_config: dict[str, Any] = {}
    index_block_size: int = 128
    index_topk_blocks: int = 16
    attention_other_setting: dict[str, Any] = {}
    num_sliding_attention_heads: int | None = None
    swa_num_key_value_heads: int | None = None
    hybrid_layer_pattern: list[int] | None = None
    block_configs: list[dict[str, Any]] | None = None
    mla_use_output_gate: bool = False
    attn_res_block_size: int = 0
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, LayerSizes] = {}
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144
    enable_moe_block: bool = False
    altup_num_inputs: int = 4
    laurel_rank: int = 64
    ffn_widths: int | list[int] = 0
    # experts
    num_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    expert_widths: tuple[int, int] = (0, 0)
    shared_expert_intermediate_size: int = 0
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int | list[int] = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_layers: list[int] | str | None = None
    mlp_layer_types: list[str] | None = None
    moe_latent_size: int | None = None
    latent_moe_use_norm: bool = False
    zero_expert_num: int | None = None
    topk_method: str = ""
    moe_router_enable_expert_bias: bool = False
    n_group: int | None = None
    topk_group: int | None = None
    num_nextn_predict_layers: int = 0
    ffn_config: FfnConfig | None = None
    # recurrences
    recurrence: str = ""
    hybrid_pattern: str = ""
    attn_layer_indices: list[int] | None = None
    attn_layer_period: int = 0
    attn_layer_offset: int = 0
    expert_layer_period: int = 0
    expert_layer_offset: int = 0
    num_mem_blocks: int = 1
    adapter_rank: int = 128
    use_shared_attention_adapter: bool = False
    use_mem_rope: bool = False
    position_embedding_type: str | None = None
    state_heads: int = 1
    state_head_dim: int | str = 1
    state_groups: int = 1
    state_inner: int | None = None
    state_norm: bool = True
    gate_rank: int = 0
    wide_gate: bool = False
    wide_decay: bool = False
    cross_attention_layers: list[int] | None = None
    num_global_layers: int = 0
    attn_type_list: list[int] | None = None
    block_types: tuple[str, ...] = ("recurrent", "recurrent", "attention")
    lru_width: int | None = None
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    hidden_ratio: float = 4.0
    add_out_norm: bool = True
    layer_group_size: int = 6
    num_attention_heads_per_layer: list[int] | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    linear_attn_config: LinearAttention | None = None
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
    # encoders before a decoder
    num_decoder_layers: int | None = None
    decoder_attention_heads: int | None = None
    decoder_ffn_dim: int | None = None
    max_source_positions: int = 0
    num_mel_bins: int = 0
    frames_per_token: int = 2
    n_window: int = 100
    n_window_infer: int = 400
    feed_forward_proj: str = "relu"
    relative_attention_num_buckets: int = 32
    # encoders
    embedding_size: int | None = None
    conv_kernel_size: int = 0
    relative_attention: bool = False
    position_biased_input: bool = True
    max_relative_positions: int = -1
    position_buckets: int = -1
    norm_rel_ebd: str = "none"
    share_att_key: bool = False
    pos_att_type: list[str] | str | None = None
    word_embed_proj_dim: int | None = None
    expansion_ratio: int = 4
    type_vocab_size: int = 2
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    temporal_patch_size: int = 1
    num_channels: int = 3
    class_token: bool = False
    use_mask_token: bool = False
    projection_size: int | None = None
    num_patches: int | None = None
    patches_a_side: int = 1
    patch_bias: bool = True
    attention_width: int = 0
    mlp_ratio: float = 8960 / 1536
    vision_use_head: bool = True
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    pools: tuple[str, ...] = ("", *POOLED)
    is_decoder: bool = False
    num_labels: int | None = None
    token_classification_bias: bool = True
    id2label: dict[str, Any] | None = None


ONE_FOR_ALL = (
    "num_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
    "first_k_dense_replace",
)  # fmt: skip
"""Numbers that a file may give layer by layer, where all layers have the same."""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
NULL_MEANS_NONE = (
    "num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "num_experts",
    "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip


NAMES: dict[str, dict[str, str]] = read_catalog("huggingface_names.toml")
"""Words that mean the same: of families, formats of weights, activation functions, and kinds of layers."""


class Joint(msgspec.Struct, forbid_unknown_fields=True):
    """Layers beside a transformer: `norms` of a width, `linears` from a width to another.

    A width is a product such as `2*2*tower`, one by another such as `hidden_size/heads`, or one less another:
    of numbers, of `tower` and `text` (the hidden sizes), and of fields of the tower's config. A list there
    stands for its length (`sizes.0` for its first value), a name for the number of that name.
    """

    norms: list[str] = []
    linears: list[tuple[str, str]] = []
    vectors: list[str] = []
    bias: bool = True
    norm_bias: bool = True
    times: str = "1"


class SideLayer(msgspec.Struct, forbid_unknown_fields=True):
    """A small layer beside the large ones (`architecture.Side`); its widths are products, as of a `Joint`.

    `linear`: from a width to another; `vector`: so many learned numbers. `on`: kinds of layers that have it
    (`layer_types`, or attention, recurrence, moe, dense; none named: all; of the ends: none). `when`: a
    field without whose value no layer has it. `kept`: what it gives is kept for the backward.
    """

    module: str
    name: str
    linear: tuple[str, str] | None = None
    vector: str = ""
    op: str = ""
    on: list[str] = []
    when: str = ""
    bias: bool = False
    times: str = "1"
    every: str = "1"
    shared: bool = False
    kept: bool = False


class TowerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What stands beside a model and is left out: its key, its family, and the layers that join it.

    `optional`: a config without the key has no such tower; else it has the family's own sizes. `merge`: so
    many of its tokens become one of the text, a number or a product. `always`: it is of that family, whatever
    it calls itself. `sizing`: how an image is cut (`model.inputs`); without it the tower is counted alone.
    `crossed`: as of `architecture.Tower`.
    """

    family: str
    always: bool = False
    key: str = "vision_config"
    optional: bool = False
    defaults: dict[str, Any] = {}
    joints: list[Joint] = []
    merge: int | str = 1
    sizing: InputSizing | None = None
    crossed: bool = False


class WholeConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A model of several parts: key and family of the part that is priced, and its towers.

    `alone`: a class of the whole that is that part alone. `families`: of that part, by the file's `version`.
    """

    text: str = "text_config"
    family: str = ""
    families: dict[str, str] = {}
    tied: bool | None = None
    alone: str = ""
    towers: list[TowerConfig] = []


class Spelling(msgspec.Struct, forbid_unknown_fields=True):
    """How one family writes its config; the fields are explained in `catalog/huggingface.toml`."""

    like: str = ""
    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    optional: list[str] = []
    block: Literal["", "llama", "plain", "gpt", "none"] = ""
    rules: list[str] = []
    fields: Fields = {}
    taken: dict[str, str] = {}
    experts: Fields = {}
    sides: list[SideLayer] = []
    joints: list[Joint] = []
    sizing: InputSizing | None = None
    head: Literal["decoder", "encoder", "seq2seq", "image", "always", "none"] = "decoder"
    whole: WholeConfig | None = None


@cache
def spellings() -> dict[str, Spelling]:
    spellings = msgspec.convert(read_catalog("huggingface.toml"), dict[str, Spelling])
    everywhere = spellings.pop("*").names
    for own in spellings.values():  # a family stands below the one that it is like
        if own.like:
            for name in own.__struct_fields__:
                mine, others = getattr(own, name), getattr(spellings[own.like], name)
                if isinstance(mine, dict):
                    setattr(own, name, others | mine)
                elif mine in ("", [], None, "decoder"):
                    setattr(own, name, others)
        own.names = everywhere | own.names
    return spellings
