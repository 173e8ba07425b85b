"""Core attention: scores, softmax, mix, with heads cut by tp and the sequence by context parallelism.

Each rank holds heads/tp heads of seq/cp tokens. *Ulysses* exchanges them by all-to-all for
heads/(tp u) heads of u times the tokens, and back (arXiv 2309.14509). *Ring* passes keys and values
round a ring of r ranks, one block a step, while the scores of the block before are computed
(arXiv 2310.01889); the causal mask is balanced by giving each rank an early and a late part, so that all r
rounds have the same FLOP. Each round is a kernel of its own whose result is merged into those before
(Transformer Engine's ring, torch's): r kernels on seq/cp queries and keys, and r merges.
*All-gather* fetches all keys and values first (Llama 3, arXiv 2407.21783). u x r = cp; two-level
context parallelism uses Ulysses inside and the ring outside (USP, arXiv 2405.07719).

The attention is fused (flash), or as separate ops that write the scores: logits, softmax, dropout,
attend. `CORE` names the ops that selective recomputation runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.numbers import added, anywhere, larger
from meshwise.core.units import Num
from meshwise.cost.op import KERNELS, Cost, attended_pairs, flash_attention, flash_attention_backward
from meshwise.model.architecture import Model, Sparse
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, collective, elementwise, exchanged, kernel, made, product

MODULE = "attention"
SIDE_BY_SIDE = ("qkv", "fc1", "expert_fc1")
"""Matmuls that do several layers at once, each of which has a matrix of its own."""
CORE = ("flash", "logits", "softcap", "alibi", "softmax", "softmax_steps", "dropout_softmax", "attend")


def core_attention(
    model: Model, cut: Cut, heads: Heads, qk_dim: Num, v_dim: Num, kv_heads: Num, seq_k: Num | None = None
) -> Stated:
    """From projected queries, keys and values to the mixed values, with the exchanges of context parallelism.

    `kv_heads` are the key and value heads of one tensor-parallel rank (at least one); `seq_k` the tokens that
    have keys, where they are others than those that ask.
    """
    seq_k = cut.seq if seq_k is None else seq_k
    num_heads = model.num_heads / cut.tp
    act_bytes = cut.precision.act_bytes
    # Ulysses needs at least one key head for each of its ranks; fewer are repeated before the exchange.
    kv_sent = larger(kv_heads, cut.ulysses)
    kv_local = kv_sent / cut.ulysses
    q_bytes = cut.tokens * num_heads * qk_dim * act_bytes
    kv_bytes = cut.tokens * kv_sent * (qk_dim + v_dim) * act_bytes
    out_bytes = cut.tokens * num_heads * v_dim * act_bytes

    rows, keys = cut.microbatch * (cut.seq / cut.ring), kv_local * (seq_k / cut.seq)
    widths = num_heads / cut.ulysses * qk_dim, keys * qk_dim, keys * v_dim
    sized = zip(heads, widths, strict=True)
    dealt = tuple(exchanged(one, f"{one.name}.dealt", (rows, width), cut.ulysses) for one, width in sized)
    yield from _exchange("ulysses_qkv", cut, q_bytes + kv_bytes, heads, dealt)
    yield from _keys_and_values(cut, cut.tokens * cut.ulysses * kv_local * (qk_dim + v_dim) * act_bytes)
    attend = _flash if cut.flash else _unfused
    mixed = yield from attend(model, cut, dealt, num_heads / cut.ulysses, kv_local, qk_dim, v_dim, seq_k)
    back = exchanged(mixed, f"{MODULE}.mixed", (cut.tokens, num_heads * v_dim), cut.ulysses)
    yield from _exchange("ulysses_out", cut, out_bytes, (mixed,), (back,))
    return back


Heads = tuple[Tensor, ...]
"""Queries, keys and values."""


def _exchange(name: str, cut: Cut, payload_bytes: Num, reads: Heads, makes: Heads) -> Iterator[Op]:
    for phase in ("forward", "backward"):
        tensors: dict[str, Any] = {"reads": reads, "makes": makes} if phase == "forward" else {}
        yield collective(
            MODULE, name, phase, "all_to_all", "cp", payload_bytes, cut.ulysses, stride=cut.cp_stride,
            **tensors,
        )  # fmt: skip


def _keys_and_values(cut: Cut, local_bytes: Num) -> Iterator[Op]:
    """Fetch the keys and values of the other ring ranks; backward also returns their gradients."""
    stride = cut.cp_stride * cut.ulysses
    if cut.flash:  # separate ops gather what each of them reads
        yield from _gathered("keys_values", cut, local_bytes)
    if np.all(cut.gather_keys):
        return
    for phase, times in (("forward", 1.0), ("backward", 2.0)):
        yield collective(
            MODULE, "keys_values", phase, "send", "cp", times * local_bytes, cut.ring,
            stride=stride, hides_behind="flash", count=(1.0 - cut.gather_keys) * (cut.ring - 1.0),
        )  # fmt: skip


def _gathered(name: str, cut: Cut, local_bytes: Num) -> Iterator[Op]:
    """All-gather what the ring ranks hold for op `name`, where they do; only the own part is kept."""
    if not anywhere(cut.gather_keys):
        return
    kinds = (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
    for phase, kind in kinds:
        yield collective(
            MODULE, name, phase, kind, "cp", local_bytes * cut.ring, cut.ring,
            stride=cut.cp_stride * cut.ulysses, count=1.0 * cut.gather_keys,
        )  # fmt: skip


def score_kernels(model: Model) -> list[str]:
    """What is done to each score before the softmax; fused attention does it on the way."""
    return ["softcap"] * model.attention_softcap + ["alibi"] * (model.positions in ("alibi", "relative"))


def _pairs(model: Model, seq_q: Num, seq_k: Num) -> Num:
    """Query-key pairs: of a window of tokens, of those that an indexer chose, and of compressed keys."""
    sparse = model.sparse or Sparse()
    chosen = sparse.top_k if sparse.ratio == 1 else 0
    pairs = attended_pairs(seq_q, seq_k, causal=model.causal, window=model.sliding_window or chosen)
    if sparse.ratio == 1:
        return pairs
    reach = sparse.top_k * sparse.ratio
    return pairs + attended_pairs(seq_q, seq_k, causal=model.causal, window=reach) / sparse.ratio


def _flash(
    model: Model, cut: Cut, dealt: Heads, heads: Num, kv_heads: Num, qk_dim: Num, v_dim: Num, seq_k: Num
) -> Stated:
    """Fused attention keeps what it reads, what it makes, and a statistic of each query and head."""
    seq_q = cut.seq / cut.ring
    rounds = 1.0 + (1.0 - cut.gather_keys) * (cut.ring - 1.0)
    pairs = _pairs(model, cut.seq, seq_k) / cut.ring
    kernels = [KERNELS[name] for name in score_kernels(model)]
    score_flop = cut.microbatch * heads * pairs * added(one.flop for one in kernels)
    backward_flop = score_flop + cut.microbatch * heads * pairs * added(one.backward_flop for one in kernels)
    prec = cut.precision
    arguments = (pairs / rounds, heads, kv_heads, seq_q, seq_k / rounds, qk_dim, v_dim)
    shape = (cut.microbatch, *arguments[1:])
    rows = cut.microbatch * seq_q
    mixed = made(MODULE, "flash", (rows, heads * v_dim), prec.act_dtype)
    results = mixed, made(MODULE, "flash_statistics", (rows, heads), prec.stat_dtype)
    tensors: dict[str, Any] = {"reads": dealt, "makes": results, "keeps": (*dealt, *results)}
    for phase, work, beside_flop in (
        ("forward", flash_attention, score_flop),
        ("backward", flash_attention_backward, backward_flop),
    ):
        cost = work(*arguments, batch=cut.microbatch, elem_bytes=prec.act_bytes) + Cost(beside_flop / rounds)
        yield Op(
            module=MODULE, name="flash", phase=phase, kind="attention", shape=shape, cost=cost,
            causal=model.causal, dtype=prec.act_dtype, count=rounds, **tensors if phase == "forward" else {},
        )  # fmt: skip
        if anywhere(rounds > 1.0):
            merge = kernel(MODULE, "merge_rounds", "residual", rows, heads * v_dim, prec, phase=phase)
            yield structs.replace(merge, count=rounds * (rounds > 1.0))
    return mixed


def _unfused(
    model: Model, cut: Cut, dealt: Heads, heads: Num, kv_heads: Num, qk_dim: Num, v_dim: Num, seq_k: Num
) -> Stated:
    """Scores written to memory: all of them, the masked half too.

    Where the kernel of the softmax takes no such number of matrices, more steps do it, in fp32.
    """
    prec = cut.precision
    seq_q, batch = cut.seq / cut.ring, cut.microbatch * heads
    own_keys = cut.microbatch * kv_heads * seq_k / cut.ring
    q, k, v = dealt
    yield from _gathered("logits", cut, prec.act_bytes * own_keys * qk_dim)
    scores = yield from _batched("logits", batch, seq_q, seq_k, qk_dim, cut, (q, k))
    for name in (*score_kernels(model), "softmax"):
        scores = yield from elementwise(MODULE, name, name, scores, prec, shape=(batch * seq_q, seq_k))
    in_steps = 1.0 * (batch % IMPLEMENTATIONS[cut.implementation].softmax_matrices > 0.0)
    if anywhere(in_steps):
        shape = (in_steps * batch * seq_q, seq_k)
        for op in elementwise(MODULE, "softmax_steps", "softmax_steps", scores, prec, shape=shape):
            yield structs.replace(op, count=in_steps, launches=KERNELS["softmax_steps"].launches)
    if model.dropout_frac:
        scores = yield from elementwise(MODULE, "dropout_softmax", "dropout", scores, prec)
    yield from _gathered("attend", cut, prec.act_bytes * own_keys * v_dim)
    return (yield from _batched("attend", batch, seq_q, v_dim, seq_k, cut, (scores, v)))


def _batched(name: str, batch: Num, m: Num, n: Num, k: Num, cut: Cut, reads: tuple[Tensor, ...]) -> Stated:
    """A batched product of two activations, both kept."""
    y = made(MODULE, name, (batch, m, n), cut.precision.act_dtype)
    yield from product(MODULE, name, (batch, m, n, k), cut.precision, reads=reads, makes=(y,), keeps=reads)
    return y
