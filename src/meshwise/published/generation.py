"""What generating text costs a rank, in closed form: memory, FLOP, exchanges, and time.

The memory is that of the largest moment (see `estimate.moe_memory`): the model, the cache and the state of
the search stand throughout; on top comes what a pass, the choice of a token, or the new order of the cache
needs. Exact where the moments stated here are the largest, as they are but for models of a few dozen numbers
a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num
from meshwise.estimate.timing import machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.program.expert_pass import Pass, Row, forward_rows
from meshwise.program.generation import Generation, merged, pass_rows
from meshwise.published.moe_memory import after_last_layer, model_bytes, model_moments


def peak_bytes(of: Generation) -> float:
    """The most that one rank's tensors hold."""
    largest = max(float(np.max(size)) for size in moments(of).values())
    return float(standing_bytes(of)) + largest


def standing_bytes(of: Generation) -> Num:
    """What is alive throughout: the model, the cache, and the state of the search.

    Of that, a row's tokens are int64, its log-probability fp32; of a prompt, its length and whether it is
    done; beams keep as many that ended, with two numbers each, and how many those are.
    """
    prompts, rows, columns = of.num_prompts, of.sequences, of.columns
    state = prompts * 9.0 + rows * (8.0 * columns + 4.0)
    if of.search == "sampling":
        state += 4.0 * prompts * of.max_tokens
    if of.search == "beam":
        state += rows * (8.0 * columns + 8.0) + 8.0 * prompts
    return model_bytes(of.passes[0], columns) + of.cache_bytes + state


def moments(of: Generation) -> dict[str, Num]:
    """Bytes beside those that stand, at each moment that may be the largest, over all passes."""
    found: dict[str, Num] = {}
    for number, one in enumerate(of.passes):
        origin = 8.0 * of.sequences if of.search == "beam" and number else 0.0  # of the beams before
        now = {name: origin + size for name, size in model_moments(one).items()}
        now["head"] = origin + _head_bytes(one)
        now["logprobs"] = origin + _logprobs_bytes(one)
        now["choice"] = origin + _choice_bytes(of, one)
        for name, size in now.items():
            found[name] = np.maximum(found.get(name, 0.0), size)
    if of.search == "beam" and of.cached:
        found["reorder"] = 8.0 * of.sequences + of.store_bytes
    return found


def _head_bytes(one: Pass) -> Num:
    """The logits of the last token, while every layer's output is still there."""
    width = 0 if one.config.no_decoder_final_norm else one.config.decoder_embed_dim
    last = one.batch * (width + one.local_words) * one.elem_bytes
    mask = one.length * one.keys * one.elem_bytes if one.length > 1 else 0.0
    return after_last_layer(one) + one.tokens + mask + last


def _logprobs_bytes(one: Pass) -> float:
    """Logits, their log-softmax and what lies between; over tp the rows of all ranks, and joined."""
    size, rows = float(one.batch * one.local_words), one.batch
    if one.tp == 1:
        return size * (one.elem_bytes + 4.0 + (0.0 if one.dtype == "fp32" else 4.0))
    gathering = one.elem_bytes + 8.0 + 4.0 * one.tp
    joining = one.elem_bytes + 4.0 + 8.0 * one.tp if rows > 1 else 0.0
    return size * max(gathering, joining) + 4.0 * rows


def _choice_bytes(of: Generation, one: Pass) -> float:
    """Log-probabilities of all words, and what a search makes of them (see `programs.search`).

    Sampling: probabilities in order and their places, three sums along them, and which words stay in. Beams:
    all totals, the best 2 K with their tokens so far, and those joined to the ones that ended.
    """
    prompts, vocab = of.num_prompts, of.config.vocab_size
    rows = 4.0 * of.sequences * one.local_words * one.tp
    if of.search == "sampling":
        return rows + prompts * (29.0 * vocab + 25.0)
    if of.search == "greedy":
        return rows + 29.0 * prompts
    live, words = of.num_live, min(2 * of.num_live, of.num_live * vocab)
    totals = 4.0 * of.sequences * vocab
    candidates = prompts * words * (8.0 * of.columns + 33.0)
    joined = prompts * ((live + words) * (8.0 * of.columns + 8.0) + live * (8.0 * of.columns + 8.0))
    return rows + totals + candidates + joined + 17.0 * prompts


# --- work and time -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What some passes cost one rank: calls by op, FLOP, all-to-alls, and seconds on each cluster."""

    passes: int
    tokens: int
    calls: dict[str, float]
    flop: float
    exchanges: float
    exchange_bytes: float
    launches: float
    seconds: dict[str, float]


def work(rows: list[Row], passes: int, tokens: int, clusters: dict[str, Cluster], dtype: str) -> Work:
    """The work of `rows`, which say what `passes` passes do with `tokens` tokens."""
    calls: dict[str, float] = {}
    for row in rows:
        if row.op.kind == "matmul" or row.op.name == "gelu":
            calls[row.op.name] = calls.get(row.op.name, 0.0) + float(row.op.count)
    exchanges = [row.op for row in rows if row.op.collective == "all_to_all"]
    return Work(
        passes=passes,
        tokens=tokens,
        calls=calls,
        flop=float(sum(row.op.count * row.op.cost.flop for row in rows)),
        exchanges=float(sum(op.count for op in exchanges)),
        exchange_bytes=float(sum(op.count * op.payload_bytes for op in exchanges)),
        launches=float(sum(row.op.count for row in rows)),
        seconds={name: _seconds(rows, cluster, dtype) for name, cluster in clusters.items()},
    )


def side_by_side(evaluated: Pass, of: Generation, clusters: dict[str, Cluster]) -> dict[str, Work]:
    """One pass of eval_lm, and of generate its first pass, those after it, and all.

    Their tokens are those that are scored, and those that are decided on; a text counts once, whatever beams
    compete for it.
    """
    first = merged(pass_rows(of, of.passes[0]))
    rest = merged(row for one in of.passes[1:] for row in pass_rows(of, one))
    num, prompts, dtype = of.num_passes, of.num_prompts, of.dtype
    return {
        "eval_lm": work(forward_rows(evaluated), 1, evaluated.tokens, clusters, dtype),
        "generate_prefill": work(first, 1, prompts, clusters, dtype),
        "generate_decode": work(rest, num - 1, prompts * (num - 1), clusters, dtype),
        "generate": work(merged([*first, *rest]), num, prompts * num, clusters, dtype),
    }


def _seconds(rows: list[Row], cluster: Cluster, dtype: str) -> float:
    ops = [row.op for row in rows]
    times = op_times(ops, machine(cluster, dtype))
    if not ops:
        return 0.0
    return float(sum(op.count * (time.busy_s + time.comm_s) for op, time in zip(ops, times, strict=True)))
