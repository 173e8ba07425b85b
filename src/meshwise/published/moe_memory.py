"""The memory of a mixture-of-experts evaluation: the most that the tensors of one rank hold at once.

Throughout a pass a rank holds its weights and positions, the running sums, the batch, and every layer's
output; on top comes what the current moment needs. `moments` states the moments that can be the largest,
each as the exact sum of the tensors that `programs.transformer_lm` then holds. Notation as in
`layout.expert_pass`; e is the bytes of an element, g those of one of the gate. Arrays broadcast.
"""

from __future__ import annotations

import numpy as np

from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.model.gpt_config import to_model
from meshwise.model.weights import num_params, params
from meshwise.program.expert_pass import Pass, is_copied

FIRST_POSITION = 2
"""Rows of the table of positions before that of the first token: fairseq's padding index, and one."""


def rank_params(of: Pass) -> Num:
    """Parameters that a rank holds: experts are cut by `ep`; words and matrices, experts' too, by `tp`.

    The biases that are added behind a cut product are held by the first rank of tp; others hold zeros.
    """
    config, model = of.config, to_model(of.config)
    parts, width, layers = params(model), config.decoder_embed_dim, config.num_moe_layers
    expert = parts.experts / max(config.moe_expert_count, 1)
    attention = 4 * width * width + 3 * width  # without the output's bias, which every rank holds
    elsewhere = layers * (config.moe_expert_count - of.local_experts) * expert
    blocks = config.decoder_layers * attention + config.num_dense_layers * (parts.dense_mlp - width)
    cut = blocks + layers * of.local_experts * (expert - width)
    biases = 0.0 if of.tp_rank == 0 else _zero_biases(of)
    words = (config.vocab_size - of.local_words) * width
    return num_params(model) - elsewhere - cut * (1 - 1 / of.tp) - words - biases


def _zero_biases(of: Pass) -> Num:
    experts = of.config.num_moe_layers * of.local_experts
    return (of.config.num_dense_layers + experts) * of.config.decoder_embed_dim


def weight_bytes(of: Pass) -> Num:
    """Bytes of the parameters on one rank."""
    return rank_params(of) * of.elem_bytes


def routing_bytes(of: Pass) -> Num:
    """The most that the gate's tensors [S, E, C] hold at once, in dense dispatch.

    An outer product a choice and their sum, or, the former gone, the sum and its casts: to the type of the
    tokens, and by way of a bool to the mask.
    """
    if of.config.use_tutel_moe or not of.config.num_moe_layers:
        return 0.0 * of.routing_size
    wide = DTYPE_BYTES[of.gate_dtype]
    summing = (2 * of.config.top_k - 1) * wide
    casting = wide + (of.elem_bytes if of.gate_dtype != of.dtype else 0.0) + 1.0 + of.elem_bytes
    factors = of.tokens * (of.config.moe_expert_count + of.capacity) * wide
    last_product = of.config.top_k * wide * of.routing_size + factors
    return np.maximum(of.routing_size * max(summing, casting), last_product)


def peak_bytes(of: Pass) -> Num:
    """The most that one rank's tensors hold during passes: what stays, and the largest moment."""
    largest: Num = 0.0
    for size in moments(of).values():
        largest = np.maximum(largest, size)
    return standing_bytes(of) + largest


def standing_bytes(of: Pass) -> Num:
    """What is alive throughout: the model, running sums in fp64, inputs and targets in int64."""
    sums = 8.0 * (2 + 4 * of.config.top_k)
    return model_bytes(of, of.config.tokens_per_sample) + sums + 2 * 8.0 * of.tokens


def model_bytes(of: Pass, max_positions: int) -> Num:
    """Weights, the table of positions, and zeros in the place of biases that another rank adds."""
    rows = max_positions + FIRST_POSITION
    constants = rows * of.config.decoder_embed_dim + (0.0 if of.tp_rank == 0 else _zero_biases(of))
    return weight_bytes(of) + constants * of.elem_bytes


def moments(of: Pass) -> dict[str, Num]:
    """Bytes beside those that stand, at each moment that may be the largest.

    In layer i (from 0), i + 1 layers' outputs are alive (the embedding is one), the attention mask, and which
    tokens are padding; in the MLP's half also the layer's sum so far and its norm.
    """
    return model_moments(of) | {"loss": after_last_layer(of) + _loss_bytes(of)}


def after_last_layer(of: Pass) -> Num:
    """What a pass leaves beside its logits: every layer's output, and the routing's numbers."""
    return _in_layer(of, of.config.decoder_layers) - of.tokens


def model_moments(of: Pass) -> dict[str, Num]:
    """The moments inside the model, up to its last layer."""
    config, own, tokens = of.config, of.elem_bytes, of.tokens
    state = tokens * config.decoder_embed_dim * own
    mask = of.length * of.keys * own if of.length > 1 else 0.0
    found = {"attention": _in_layer(of, config.decoder_layers - 1) + mask + state + _attention_bytes(of)}
    dense = [i for i in range(config.decoder_layers) if not config.is_moe_layer(i)]
    if dense:
        hidden = _hidden_bytes(of, tokens, config.decoder_ffn_embed_dim)
        found["dense_ffn"] = _in_layer(of, dense[-1]) + mask + 2 * state + hidden
    if config.num_moe_layers:
        last = config.num_moe_layers * config.moe_freq - 1
        before = _in_layer(of, last) + mask + 2 * state
        found["gate"] = before + _gate_bytes(of) + routing_bytes(of)
        kept = before + _layer_scalars(of) + _dispatch_bytes(of)
        found["experts"] = kept + _expert_bytes(of)
        found["exchange"] = kept + _exchange_bytes(of)
    return found


def _in_layer(of: Pass, layer: int) -> Num:
    """Outputs of the layers before, padding, and the scalars of the MoE layers before."""
    config = of.config
    states = (layer + 1) * of.tokens * config.decoder_embed_dim * of.elem_bytes
    moe_layers = layer // config.moe_freq if config.moe_freq else 0
    return states + of.tokens + moe_layers * _layer_scalars(of)


def _layer_scalars(of: Pass) -> float:
    """The gate loss and the routing metrics of one MoE layer."""
    return (2 + 4 * of.config.top_k) * DTYPE_BYTES[of.gate_dtype]


def _attention_bytes(of: Pass) -> Num:
    """The largest of: queries as they are and scaled, keys and values; what attention reads and its result,
    between scores before and after softmax, or with its heads joined, or with the block's output.

    With a cache, attention reads keys and values there.
    """
    whole, scores = of.tokens * of.config.decoder_embed_dim, of.heads * of.length * of.keys
    cut = whole // of.tp
    read = 1 if of.cached else 3
    joined = cut if of.length > 1 and of.config.decoder_attention_heads > of.tp else 0
    attending = (read + 1) * cut + scores + max(scores, joined, whole)
    return max(4 * cut, attending) * of.elem_bytes


def _loss_bytes(of: Pass) -> Num:
    """Logits, their log-softmax, and beside them the logits in fp32; if they are, then the targets' shares.

    Of a target, its log-probability with and without padding (fp32), and whether it is padding. Cut over tp:
    logits, what they are above the largest, its exponential, and two numbers a token.
    """
    size = float(of.tokens * of.local_words)
    if of.tp > 1:
        return size * (of.elem_bytes + 8.0) + 8.0 * of.tokens
    beside = 9.0 * of.tokens if of.dtype == "fp32" else 4.0 * size
    return size * (of.elem_bytes + 4.0) + beside


def _hidden_bytes(of: Pass, rows: Num, ffn: int) -> Num:
    """A feed-forward's hidden rows around GELU: as they are, and in fp32 before and after."""
    casts = 0.0 if of.dtype == "fp32" else 4.0
    return rows * (ffn // of.tp) * (of.elem_bytes + casts + 4.0)


def _gate_bytes(of: Pass) -> Num:
    """Logits [S, E], and per choice the expert and the slot (int64), whether it is kept, and its weight."""
    config, wide = of.config, DTYPE_BYTES[of.gate_dtype]
    choices = config.top_k * of.tokens * (8.0 + 8.0 + 1.0 + wide)
    return of.tokens * config.moe_expert_count * of.elem_bytes + choices + _layer_scalars(of)


def _dispatch_bytes(of: Pass) -> Num:
    """What dispatch keeps for the way back: weights and mask [S, E, C]; sparse, rows and weights a choice."""
    if of.config.use_tutel_moe:
        return of.config.top_k * of.tokens * (8.0 + of.elem_bytes)
    return 2.0 * of.routing_size * of.elem_bytes


def _expert_bytes(of: Pass) -> Num:
    """The slots, what the experts before made, and the last one's rows (copied if they lie apart)."""
    config = of.config
    one = of.ep * of.capacity * config.decoder_embed_dim * of.elem_bytes
    rows = of.ep * of.capacity
    made = of.local_experts - 1
    if of.grouped:
        one, rows, made = one * of.local_experts, rows * of.local_experts, 0.0
    slots = of.slots * config.decoder_embed_dim * of.elem_bytes
    copied = is_copied(of) * one
    return slots + _slack(of) + made * one + copied + _hidden_bytes(of, rows, config.expert_ffn_dim)


def _exchange_bytes(of: Pass) -> Num:
    """The slots as they came, as the experts made them, joined, and as they come back; or with the result.

    Sparse dispatch makes the result of each choice's rows as found and as weighed.
    """
    slots = of.slots * of.config.decoder_embed_dim * of.elem_bytes
    result = of.tokens * of.config.decoder_embed_dim * of.elem_bytes
    if of.config.use_tutel_moe:
        result = result * (5 if of.config.top_k == 2 else 2)
    exchanged = np.where(np.greater(of.ep, 1) & (not of.config.dummy_a2a), 4 * slots, 0.0)
    return np.maximum(exchanged, 3 * slots + result) + _slack(of)


def _slack(of: Pass) -> Num:
    """The row of slots that takes what is dropped, in sparse dispatch without an exchange."""
    row = of.config.decoder_embed_dim * of.elem_bytes if of.config.use_tutel_moe else 0.0
    return np.where(np.greater(of.ep, 1) & (not of.config.dummy_a2a), 0.0, row)
