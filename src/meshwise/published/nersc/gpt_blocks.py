"""The models that both published models of NERSC know: GPT and ViT blocks."""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.published.scope import ANY, Values

GPT_BLOCKS: Mapping[str, Values] = {
    **dict.fromkeys(("name", "source", "checked", "aliases", "left_out", "quantized"), ANY),
    **dict.fromkeys(("num_layers", "hidden", "ffn_hidden", "num_heads", "num_kv_heads", "head_dim"), ANY),
    # Embeddings and heads, which the published models leave out.
    **dict.fromkeys(("vocab", "max_seq", "extra_position_rows", "tied_embedding", "token_types"), ANY),
    **dict.fromkeys(("embedding_norm", "final_norm", "patches", "lm_head", "head_bias"), ANY),
    **dict.fromkeys(("mlm_transform", "pooler", "attention_pool", "num_classes", "classifier_bias"), ANY),
    **dict.fromkeys(("classifies_tokens",), ANY),
    # One form of a block: scores are full squares, dropout is always there, qkv has no bias.
    **dict.fromkeys(("causal", "dropout_frac", "qkv_bias"), ANY),
    **{"activation": ("gelu",), "norm": ("layernorm",), "norm_bias": (True,)},
    **{"linear_bias": (True,), "out_bias": (True,), "positions": ("learned", "sinusoidal", "none")},
}
