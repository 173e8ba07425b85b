"""How long a fused (flash) attention kernel takes, forward, backward, and with one query per sequence.

The kernel gives each core a tile of queries of one head and walks over the keys. A causal mask skips
the tiles above the diagonal but computes the diagonal ones whole. Per query-key pair and head it does
2 (qk_dim + v_dim) FLOP forward (scores, weighted values) and 2 (3 qk_dim + 2 v_dim) backward (scores
again, and the gradients of probabilities, values, queries, keys). The exponentials run on slow units;
they weigh like `softmax_dim` more head dimensions. So with P pairs of one head, B H of them,

    compute = 2 B H P (qk_dim + v_dim + 2 softmax_dim) / rate  + tail x (the longest tile on one core)
    time    = launch + compute + (Q + K + V + O bytes) / memory bandwidth

The last term is not hidden: serving kernels also write the cache of keys and values, and a tile loads
its queries before it computes. Heads narrower than the side of a systolic array (`unit_dim`) take as long as
those that fill it. *Decode* has one query per sequence: the keys and values must be read,
that is all, unless many heads share them or the matrix unit is slow. Source of the counts: Dao,
FlashAttention-2, 2023.
"""

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.op import attended_pairs
from meshwise.machine.efficiency import AttentionEfficiency, DecodeEfficiency


def attention_s(
    *,
    batch: Num,
    heads: Num,
    kv_heads: Num,
    seq_q: Num,
    seq_k: Num,
    qk_dim: Num,
    v_dim: Num,
    causal: bool,
    backward: bool = False,
    flop_per_s: Num,
    memory_bytes_per_s: Num,
    num_cores: Num = 1.0,
    elem_bytes: Num = 2.0,
    efficiency: AttentionEfficiency,
) -> Num:
    """Time [s] of one fused attention over `batch` sequences: the forward, or the backward alone.

    `heads` query heads share `kv_heads` key-value heads; `flop_per_s` and `memory_bytes_per_s` are the
    chip's published peaks. With the ideal efficiency this is FLOP / peak of the unmasked pairs (the
    bytes of a fused kernel are far below). Everything broadcasts.
    """
    pairs = attended_pairs(seq_q, seq_k, causal=causal)
    if causal:  # half of a diagonal tile lies above the mask and is computed all the same
        pairs = pairs + 0.5 * seq_q * efficiency.tile
    softmax, unit = efficiency.softmax_dim, efficiency.unit_dim
    filled_qk, filled_v = np.ceil(qk_dim / unit) * unit, np.ceil(v_dim / unit) * unit
    forward_dims = filled_qk + filled_v + 2.0 * softmax
    backward_dims = 3.0 * filled_qk + 2.0 * filled_v + 5.0 * softmax
    dims = backward_dims / efficiency.backward_frac if backward else forward_dims
    rate_flop_per_s = flop_per_s * efficiency.peak_frac
    even_s = 2.0 * batch * heads * pairs * dims / rate_flop_per_s
    longest_s = 2.0 * efficiency.tile * seq_k * dims / (rate_flop_per_s / num_cores)
    tensors = batch * (heads * seq_q * (qk_dim + v_dim) + kv_heads * seq_k * (qk_dim + v_dim))
    passes = 2.0 if backward else 1.0  # the backward reads them all again and writes their gradients
    io_s = passes * elem_bytes * tensors / (memory_bytes_per_s * efficiency.memory_frac)
    return efficiency.launch_s + even_s + efficiency.tail * longest_s + io_s


def decode_attention_s(
    *,
    batch: Num,
    heads: Num,
    seq_k: Num,
    kv_bytes_per_token: Num,
    qk_dim: Num,
    v_dim: Num,
    flop_per_s: Num,
    memory_bytes_per_s: Num,
    efficiency: DecodeEfficiency,
) -> Num:
    """Time [s] of attention with one new query per sequence over `seq_k` cached tokens.

    `kv_bytes_per_token` are the bytes that one layer's cache holds per token: 2 kv_heads head_dim bytes of
    an element for grouped-query attention, (kv_rank + rope_dim) of them for latent attention (MLA), whose
    queries then have qk_dim = kv_rank + rope_dim and v_dim = kv_rank. Both run at
    the constants of their own kernel (`Efficiency.decode`, `Efficiency.latent_decode`).
    """
    tokens = batch * seq_k
    memory_s = tokens * kv_bytes_per_token / (memory_bytes_per_s * efficiency.memory_frac)
    compute_s = 2.0 * tokens * heads * (qk_dim + v_dim) / (flop_per_s * efficiency.peak_frac)
    return efficiency.launch_s + np.maximum(memory_s, compute_s)
