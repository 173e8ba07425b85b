"""Decode passes as an engine runs them, and their table.

The kernels are those of `serving.decode_pass`. An engine replays CUDA graphs of some batches: others are
padded up to the next of these, or launched kernel by kernel. Where it checks guesses and cannot plan ahead
meanwhile, what the host does for each sequence shows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.routing import summary
from meshwise.serve.engine import Engine
from meshwise.serve.fitted import fitted
from meshwise.serve.serving import (
    PricedPass,
    Serving,
    decode_pass,
    launches_s,
    max_sequences,
    memory_bytes,
    prompt_s,
    token_pass,
)


def attending(serving: Serving, engine: Engine) -> Serving:
    """`serving` with the cache that its attention reads as fast as its own."""
    mesh, chip = serving.mesh, serving.cluster.chip
    if not engine.widens_hopper_cache or chip.generation != "hopper" or serving.model.mla is not None:
        return serving
    return replace(serving, mesh=replace(mesh, plan=replace(mesh.plan, kv_dtype="bf16")))


def run_by(serving: Serving, engine: Engine) -> Serving:
    """`serving` with the tiles of the engine's experts."""
    if serving.mesh.plan.dtype != "fp8" or serving.cluster.chip.generation != "hopper":
        return serving
    return replace(serving, expert_tile=float(engine.expert_tile))


def host_s(serving: Serving, engine: Engine) -> float:
    """Seconds of the host that show for each sequence of a group, for each token that guessing gives it."""
    guess = serving.speculation
    if guess is None or engine.plans_while_guessing:
        return 0.0
    return fitted().constants.guess_host_s / guess.tokens_per_pass


def graphed_pass(serving: Serving, engine: Engine, sequences: Num, past: Num) -> PricedPass:
    """The kernels of a pass of `sequences` in each group: in a graph of so many or more, or without."""
    counts = np.asarray(sequences, dtype=np.float64)
    padded = np.array([_padded(count, engine) for count in counts.ravel().tolist()]).reshape(counts.shape)
    is_launched = ~np.isin(padded, engine.graph_sizes or padded)
    priced = decode_pass(run_by(serving, engine), padded, past)
    busy_s = priced.total_s - priced.time_s["attention"]
    waits_s = np.maximum(is_launched * launches_s(serving.model) - busy_s, 0.0)
    return PricedPass(priced.time_s | {"engine": priced.time_s["engine"] + waits_s}, priced.memory)


def engine_pass(serving: Serving, engine: Engine, sequences: Num, past: Num) -> PricedPass:
    """A whole pass: attention reads the caches of the sequences themselves, whatever the graph pads."""
    graphed = graphed_pass(serving, engine, sequences, past)
    time_s = dict(graphed.time_s)
    time_s["attention"] = decode_pass(attending(serving, engine), sequences, past).time_s["attention"]
    time_s["engine"] = time_s["engine"] + np.multiply(sequences, host_s(serving, engine))
    return PricedPass(time_s, graphed.memory)


def _padded(count: float, engine: Engine) -> float:
    """The captured batch size that runs `count` sequences; `count` itself where there is none."""
    sizes = engine.graph_sizes if engine.pads_batches else ()
    place = bisect_left(sizes, count)
    return max(sizes[place] if place < len(sizes) else count, 1)


# --- the table ---------------------------------------------------------------------------------


def mean_pass(serving: Serving, sequences: Num, engine: Engine | None) -> PricedPass:
    """The mean pass of decoding, caches half through the output; without an engine its kernels alone."""
    if engine is None:
        return token_pass(serving, sequences)
    return engine_pass(serving, engine, sequences, serving.prompt + serving.output / 2.0)


def sequences_within(serving: Serving, token_s: float, engine: Engine | None = None) -> int:
    """The most sequences of the instance that fit and get a token each `token_s`; 0 if none does."""
    counts = np.arange(1.0, max_sequences(serving) + 1.0)
    if not counts.size:
        return 0
    quick = counts[np.asarray(mean_pass(serving, counts, engine).total_s) <= token_s]
    return int(quick[-1]) * serving.groups if quick.size else 0


def rows(serving: Serving, sequences: Sequence[int], engine: Engine | None = None) -> list[dict[str, Any]]:
    """What each number of running sequences of the whole instance gives; they divide by its groups.

    `tokens_per_s` counts generated tokens while only decoding; `with_prefill_per_s` the same where the
    instance takes the prompts too, one batch after the other.
    """
    num_chips, room = serving.num_chips, serving.memory_frac * serving.cluster.chip.memory_bytes
    each = np.array(sequences, dtype=np.float64) / serving.groups
    time, memory = mean_pass(serving, each, engine).time_s, memory_bytes(serving, each)
    prompt = prompt_s(serving)

    def of(number: int, parts: dict[str, Num]) -> dict[str, float]:
        return {name: float(np.broadcast_to(part, each.shape)[number]) for name, part in parts.items()}

    moe, found = serving.model.moe, []
    checked = 1 + (serving.speculation.drafts if serving.speculation else 0)
    for i, count in enumerate(sequences):
        time_s, used = of(i, time), of(i, memory)
        token_s, total = sum(time_s.values()), sum(used.values())
        tokens_per_s = count / token_s
        routed = count * checked // int(serving.mesh.pp)
        experts = moe and summary(moe, routed, serving.expert_shares)
        with_prefill_per_s = count * serving.output / (each[i] * prompt + serving.output * token_s)
        found.append(
            {
                "sequences": count,
                "token_s": token_s,
                "tokens_per_s_per_sequence": 1.0 / token_s,
                "tokens_per_s": tokens_per_s,
                "tokens_per_s_per_gpu": tokens_per_s / num_chips,
                "with_prefill_per_s": float(with_prefill_per_s),
                "with_prefill_per_s_per_gpu": float(with_prefill_per_s / num_chips),
                "memory_bytes": used | {"total": total},
                "time_s": time_s,
                "distinct_experts": experts and experts["distinct_experts"],
                "experts": experts,
                "fits": total <= room,
            }
        )
    return found
