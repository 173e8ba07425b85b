"""Attention over a ring of ranks as torch's context parallelism does it.

Every rank holds the s = S / cp tokens of an early and a late part of the sequence. Round 0 is causal
attention of its own; in round i it sees the keys of the rank i before it: of a rank in front of it only the
early half concerns it (all its queries, s/2 keys), of a rank behind it only its own late half is concerned
(s/2 queries, all s keys). So every round but the first is s^2 / 2 pairs, on every rank.

Keys and values come round in one buffer: a hop at a time (an all-to-all in which each rank sends all of it to
the next; cp - 1 hops) or in one all-gather. In the backward they come round once more, and their gradients
after them, in fp32 (fp64 for fp64): cp hops. The layout's ring states cp - 1 hops of keys, values and
gradients in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward
from meshwise.program.train_collective import collective_row
from meshwise.program.training import Training


def ring_rows(t: Training, phase: str) -> Iterator[dict[str, Any]]:
    """The rounds of one attention, and what travels between them."""
    is_backward = phase == "backward"
    m, seq = t.model, t.seq
    heads, kv_heads, dim = m.num_heads // t.tp, m.num_kv_heads // t.tp, m.head_dim
    work = flash_attention_backward if is_backward else flash_attention
    for number in range(t.cp):
        if number == 0:
            seq_q, seq_k = seq, seq
        elif number <= t.ring_rank:
            seq_q, seq_k = seq, seq // 2
        else:
            seq_q, seq_k = seq // 2, seq
        sizes = (heads, kv_heads, seq_q, seq_k, dim, dim)
        pairs = attended_pairs(seq_q, seq_k, causal=number == 0)
        cost = work(pairs, *sizes, batch=t.batch, elem_bytes=t.elem_bytes)
        shape = (t.batch, *sizes)
        yield {"op": "attention", "phase": phase, "shape": shape, "dtype": t.dtype, "flop": float(cost.flop)}
    buffer = 2 * t.batch * kv_heads * seq * dim
    if t.cp_kind == "all_gather":
        yield collective_row("all_gather", phase, (t.cp * buffer,), "cp", t.cp, t.elem_bytes, t.dtype)
    else:
        hop = collective_row("all_to_all", phase, (buffer,), "cp", t.cp, t.elem_bytes, t.dtype)
        yield from [hop] * (t.cp - 1)
    if is_backward:
        hop = collective_row("all_to_all", phase, (buffer,), "cp", t.cp, t.state_bytes, t.state_dtype)
        yield from [hop] * t.cp
