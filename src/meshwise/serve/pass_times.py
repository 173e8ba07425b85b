"""Passes as an engine runs them: their kernels, a table of decode passes, all that it may form, interpolated.

Kernels are those of `serving.price_pass`. An engine replays CUDA graphs of some batches: others are padded up
to the next of these, or launched kernel by kernel, which takes the host a time for each layer of models with
latent attention or recurrences. Passes with prompts are launched unless a graph of so many tokens was
captured (vLLM's piecewise graphs: up to 512). SGLang on 16 H100, in July 2025, had the first token of
DeepSeek-R1 after 180 ms for 128 tokens, 190 for 2,048 and 200 for 4,096 (tenstorrent/tt-inference-server
issue 356); with graphs of prompts that of Kimi-K2, as deep, came after 95 (sgl-project/sglang pull request
13466). Where an engine checks guesses and cannot plan ahead, what the host does for each sequence shows.

A pass gives each of `sequences` one token behind `context` cached ones and works on `chunks` of prompts
(first and last token of each). Its time is the sum of
- everything but the core of attention, by the tokens of the pass,
- attention of the decoding sequences, by their number and mean context,
- attention of each chunk: A(end) - A(start), with A(n) that of a whole prompt of n tokens.
All of it is of one group (a dp rank, or one of the batches in its pipeline); groups of an engine run in step,
and requests are spread evenly, so that a pass takes as long as that of the busiest group.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.routing import summary
from meshwise.model.architecture import layer_kind
from meshwise.program.op import Op
from meshwise.program.serving import serving_block
from meshwise.serve import serving as est
from meshwise.serve.engine import Engine, fitted
from meshwise.serve.serving import Serving

POINTS = 256
"""Points of a table along the tokens of a prompt."""

TILE, MOST_POINTS = 32, 512
"""Points along the tokens of a pass are multiples of a tile of matmuls, where times jump; at most so many."""

CHUNK_KERNELS = 10.0
"""Of a recurrence in chunks: split, gates, norms, sums, solve, products, states, result
(chunk_gated_delta_rule_fwd of flash-linear-attention, as SGLang 0.5.10 runs it)."""

CONTEXTS = 8
"""Points along the mean context, in which attention of one query is all but linear."""


# --- kernels -------------------------------------------------------------------------------------

_TRITON = {"bf16": "bf16-triton", "fp8": "fp8_block-triton"}
"""Constants of the experts that Triton runs, by what they compute in."""


def attending(serving: Serving, engine: Engine) -> Serving:
    """`serving` with the cache that its attention reads as fast as its own."""
    mesh, chip = serving.mesh, serving.cluster.chip
    if not engine.widens_hopper_cache or chip.generation != "hopper" or serving.model.mla is not None:
        return serving
    return replace(serving, mesh=replace(mesh, plan=replace(mesh.plan, kv_dtype="bf16")))


def run_by(serving: Serving, engine: Engine) -> Serving:
    """`serving` with the tiles of the engine's experts, how it sums, and with what it fuses."""
    plan, generation, tile = serving.mesh.plan, serving.cluster.chip.generation, 1
    if plan.dtype == "fp8":
        beyond = engine.shared_expert_tile if np.all(est.shares_experts(serving)) else 1
        tile = engine.expert_tile if generation == "hopper" else beyond
    in_triton = engine.triton_experts and serving.model.mla is None and generation.startswith("blackwell")
    is_whole = not plan.expert_dtype and plan.weight_dtype in (None, "fp8_block")
    library = _TRITON.get(plan.dtype, "") if in_triton and is_whole else ""
    fuses = engine.fuses_casts and plan.weight_dtype != "fp8_block"
    sums = {"gathers_by_sums": engine.gathers_by_sums, "codes_sums": engine.codes_sums}
    experts = {"expert_tile": float(tile), "expert_library": library}
    return replace(serving, run_by=experts | {"fuses_casts": fuses} | sums)


def launches_s(serving: Serving) -> Num:
    """Seconds of the host to launch a pass kernel by kernel: models with latent attention or recurrences."""
    model, cut = serving.model, serving.prefill(1.0)
    layers = [layer_kind(model, layer) for layer in range(model.num_layers)]
    has_many = model.mla is not None or any(kind.mixer in ("recurrence", "beside") for kind in layers)
    kernels = {kind: sum(map(_kernels, serving_block(model, cut, kind))) for kind in set(layers) if has_many}
    return fitted().constants.launched_op_s * sum(kernels.get(kind, 0.0) for kind in layers)


def _kernels(op: Op) -> Num:
    """How many kernels an op is."""
    if op.kind == "collective":
        return (op.group_size > 1.0) * 1.0
    return CHUNK_KERNELS if op.name == "chunk" else 1.0


def prompt_launches_s(serving: Serving, engine: Engine, tokens: float) -> float:
    """Seconds of the host to launch a pass with prompts, of so many tokens; 0 where a graph is replayed."""
    is_replayed = engine.graphs_prompts or tokens <= engine.prompt_graph_tokens
    return 0.0 if is_replayed else engine.launch_frac * float(np.max(launches_s(run_by(serving, engine))))


def first_token_s(serving: Serving, engine: Engine | None) -> float:
    """Time to the first token of a prompt on an idle instance; without an engine its kernels alone."""
    if engine is None:
        return est.first_token_kernels_s(serving)
    return max(float(est.prompt_alone_s(serving)), prompt_launches_s(serving, engine, serving.prompt))


def host_s(serving: Serving, engine: Engine) -> float:
    """Seconds of the host that show for each sequence of a group, for each token that guessing gives it."""
    guess = serving.speculation
    if guess is None or engine.plans_while_guessing:
        return 0.0
    return fitted().constants.guess_host_s / guess.tokens_per_pass


def graphed_pass(serving: Serving, engine: Engine, sequences: Num, past: Num) -> est.PricedPass:
    """The kernels of a pass of `sequences` in each group: in a graph of so many or more, or without."""
    counts = np.asarray(sequences, dtype=np.float64)
    padded = np.array([_padded(count, engine) for count in counts.ravel().tolist()]).reshape(counts.shape)
    is_launched = ~np.isin(padded, engine.captured or padded)
    of = run_by(serving, engine)
    priced = est.decode_pass(of, padded, past)
    busy_s = priced.total_s - priced.time_s["attention"]
    waits_s = np.maximum(is_launched * engine.launch_frac * launches_s(of) - busy_s, 0.0)
    return est.PricedPass(priced.time_s | {"engine": priced.time_s["engine"] + waits_s}, priced.memory)


def engine_pass(serving: Serving, engine: Engine, sequences: Num, past: Num) -> est.PricedPass:
    """A whole pass: attention reads the caches of the sequences themselves, whatever the graph pads."""
    graphed = graphed_pass(serving, engine, sequences, past)
    time_s = dict(graphed.time_s)
    time_s["attention"] = est.decode_pass(attending(serving, engine), sequences, past).time_s["attention"]
    time_s["engine"] = time_s["engine"] + np.multiply(sequences, host_s(serving, engine))
    return est.PricedPass(time_s, graphed.memory)


def _padded(count: float, engine: Engine) -> float:
    """The captured batch size that runs `count` sequences; `count` itself where there is none."""
    sizes = engine.captured if engine.pads_batches else ()
    place = bisect_left(sizes, count)
    return max(sizes[place] if place < len(sizes) else count, 1)


# --- the table of decode passes ------------------------------------------------------------------


def mean_pass(serving: Serving, sequences: Num, engine: Engine | None) -> est.PricedPass:
    """The mean pass of decoding, caches half through the output; without an engine its kernels alone."""
    if engine is None:
        return est.token_pass(serving, sequences)
    return engine_pass(serving, engine, sequences, serving.prompt + serving.output / 2.0)


def sequences_within(serving: Serving, token_s: float, engine: Engine | None = None) -> int:
    """The most sequences of the instance that fit and get a token each `token_s`; 0 if none does."""
    counts = np.arange(1.0, est.max_sequences(serving) + 1.0)  # of a dp rank
    if not counts.size:
        return 0
    each = np.ceil(counts / serving.mesh.pp)
    quick = counts[np.asarray(mean_pass(serving, each, engine).total_s) <= token_s]
    return int(quick[-1]) * serving.dp if quick.size else 0


def with_prompts_s(
    token_s: Num, prompt_s: Num, alone_s: Num, per_pass: Num, groups: Num, launched_s: float, *, mixes: bool
) -> Num:
    """Mean seconds from one token of a sequence to the next where its engine takes prompts too.

    Of `per_pass` prompts in the mean pass a pass has some with the chance f = 1 - exp(-per_pass), as they
    come at random; then per_pass / f. Each takes `prompt_s` of one of `groups`; where there are fewer than
    groups, those without wait for one that has its own alone (`alone_s`). A pass takes as long as the host
    needs to launch it (`launched_s`) at least, where the engine `mixes` together with the tokens of others.
    """
    some = -np.expm1(-np.asarray(per_pass, dtype=np.float64))
    each = per_pass / some / groups
    prompts_s = each * prompt_s + np.maximum(1.0 - each, 0.0) * alone_s
    return token_s + some * np.maximum(launched_s - token_s * mixes, prompts_s)


def rows(serving: Serving, sequences: Sequence[int], engine: Engine | None = None) -> list[dict[str, Any]]:
    """What each number of running sequences of the whole instance gives; they divide by its dp ranks.

    `tokens_per_s` counts generated tokens while only decoding; `with_prefill_per_s` the same where the
    instance takes the prompts too (`with_prompts_s`).
    """
    num_chips, room = serving.num_chips, serving.usable_bytes
    counts = np.array(sequences, dtype=np.float64)
    each = np.ceil(counts / serving.groups)
    time = mean_pass(serving, each, engine).time_s
    memory, per_pass = (
        est.memory_bytes(serving, counts / serving.dp),
        counts / serving.engines / serving.output,
    )
    launched_s = prompt_launches_s(serving, engine, serving.prompt) if engine else 0.0
    spent_s = with_prompts_s(
        sum(time.values()), est.prompt_s(serving), est.prompt_alone_s(serving), per_pass,
        serving.groups / serving.engines, launched_s, mixes=engine is None or engine.mixes,
    )  # fmt: skip

    def of(number: int, parts: dict[str, Num]) -> dict[str, float]:
        return {name: float(np.broadcast_to(part, each.shape)[number]) for name, part in parts.items()}

    moe, found = serving.model.moe, list[dict[str, Any]]()
    checked = 1 + (serving.speculation.drafts if serving.speculation else 0)
    for i, count in enumerate(sequences):
        time_s, used = of(i, time), of(i, memory)
        token_s, total = sum(time_s.values()), sum(used.values())
        tokens_per_s = count / token_s
        routed = int(each[i]) * serving.dp * checked
        experts = moe and summary(moe, routed, serving.expert_shares)
        with_prefill_per_s = count / np.broadcast_to(spent_s, each.shape)[i]
        rates = {"tokens_per_s": tokens_per_s, "with_prefill_per_s": float(with_prefill_per_s)}
        row: dict[str, Any] = {"sequences": count, "token_s": token_s, **rates}
        row |= {f"{name}_per_gpu": rate / num_chips for name, rate in rates.items()}
        row["tokens_per_s_per_sequence"] = 1.0 / token_s
        row |= {"memory_bytes": used | {"total": total}, "time_s": time_s, "fits": total <= room}
        row |= {"experts": experts, "distinct_experts": experts and experts["distinct_experts"]}
        found.append(row)
    return found


# --- all passes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at 0, `step`, 2 `step`, ...; a line between them and beyond the last."""

    values: Sequence[float]
    step: float

    def __call__(self, x: float) -> float:
        """The value at `x` >= 0."""
        place = x / self.step
        i = min(int(place), len(self.values) - 2)
        low = self.values[i]
        return low + (place - i) * (self.values[i + 1] - low)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The tables. `decode_rest` and `decode_attention` by number of sequences of a group, from 0 on.

    `prompt_experts` is what `prompt_rest` leaves out, of the tokens of all groups where these share them
    (`shares_experts`), `sorted_token_s` what a token adds to it in a large pass; slowdowns are those of
    `serve.engine.Constants` and of the `engine`.
    `prompt_host_s`: time of the host to launch a pass with more prompt tokens than the engine has graphs of,
    during which the chip may wait; `guess_host_s`: what it adds to a pass without prompts for each sequence.
    `encoding_token_s`: what a token of a prompt stands for of encoding its inputs.
    """

    engine: Engine
    decode_rest: Sequence[float]
    decode_attention: Sequence[Curve]
    prompt_rest: Curve
    prompt_attention: Curve
    prompt_experts: Curve = Curve((0.0, 0.0), 1.0)
    sorted_token_s: float = 0.0
    groups: int = 1
    shares_experts: bool = False
    prompt_host_s: float = 0.0
    guess_host_s: float = 0.0
    expert_slowdown: float = 1.0
    encoding_token_s: float = 0.0

    def decode_s(self, sequences: int, context: float) -> float:
        """Seconds of a pass without prompts."""
        each = -(-sequences // self.groups)
        kernels_s = self.decode_rest[each] + self.decode_attention[each](context)
        return self.engine.decode_slowdown * kernels_s + each * self.guess_host_s + self.engine.pass_s

    def mixed_s(self, spans: Sequence[tuple[int, int]], sequences: int, context: float, even: float) -> float:
        """Seconds of a pass with the tokens from start to end of some prompts.

        `even`: tokens that there would be if all dp ranks had as many as the busiest of them.
        """
        tokens, largest = sum(end - start for start, end in spans), max(end - start for start, end in spans)
        attention_s = sum(self.prompt_attention(end) - self.prompt_attention(start) for start, end in spans)
        each = -(-sequences // self.groups)
        busiest = max(even / self.groups, largest)  # of all groups
        prompt_s = self.prompt_rest(busiest + each) + attention_s * busiest / tokens
        routed = tokens / self.groups if self.shares_experts else busiest
        experts_s = self.prompt_experts(routed + each)
        experts_s += (self.expert_slowdown - 1.0) * self.sorted_token_s * (routed + each)
        device_s = self.engine.prompt_slowdown * prompt_s + experts_s + self.decode_attention[each](context)
        if busiest + each > self.engine.prompt_graph_tokens:
            device_s = max(device_s, self.prompt_host_s)
        return device_s + busiest * self.encoding_token_s + self.engine.pass_s


def tabulate(serving: Serving, engine: Engine, longest: int, most_sequences: int) -> PassTimes:
    """The tables of `serving` for requests of at most `longest` tokens, `most_sequences` in a group.

    Nothing is sorted beside the kernels where dp ranks only take prompts: so say their measured points.
    """
    shares = bool(est.shares_experts(serving))
    counts = np.arange(most_sequences + 1.0)
    context_step = max(longest / CONTEXTS, 1.0)
    contexts = np.maximum(np.arange(CONTEXTS + 1) * context_step, 1.0)
    rest = np.broadcast_to(_rest(graphed_pass(serving, engine, counts, 1.0)), counts.shape)
    decode = est.decode_pass(attending(serving, engine), np.maximum(counts, 1.0), contexts[:, None])
    attention = np.broadcast_to(decode.time_s["attention"], (contexts.size, counts.size)) * (counts > 0)

    most_tokens = max(engine.max_tokens + most_sequences, longest)
    token_step = float(TILE * math.ceil(most_tokens / TILE / MOST_POINTS))
    tokens = np.maximum(np.arange(0.0, most_tokens + token_step, token_step), 1.0)
    prompted = run_by(serving, engine)
    prompts = est.price_pass(prompted, prompted.prefill(tokens / serving.prompt))
    experts = prompts.time_s["experts"]
    length_step = longest / POINTS
    prompt = np.maximum(np.arange(POINTS + 1) * length_step, 1.0)
    together = np.maximum(est.PREFILL_TOKENS / prompt, 1.0)
    alone = est.price_pass(serving, serving.prefill(together, prompt))
    prompt_attention = np.broadcast_to(alone.time_s["attention"] / together, prompt.shape).copy()
    prompt_attention[0] = 0.0
    return PassTimes(
        decode_rest=rest.tolist(),
        decode_attention=[Curve(column, context_step) for column in attention.T.tolist()],
        prompt_rest=Curve(np.broadcast_to(_rest(prompts) - experts, tokens.shape).tolist(), token_step),
        prompt_experts=Curve(np.broadcast_to(experts, tokens.shape).tolist(), token_step),
        sorted_token_s=0.0 if engine.only_prompts and shares else float(est.sorted_token_s(prompted)),
        prompt_attention=Curve(prompt_attention.tolist(), length_step),
        groups=serving.groups, shares_experts=shares, expert_slowdown=fitted().constants.expert_slowdown,
        guess_host_s=host_s(serving, engine), prompt_host_s=prompt_launches_s(serving, engine, math.inf),
        engine=engine, encoding_token_s=est.encoding_token_s(serving),
    )  # fmt: skip


def _rest(priced: est.PricedPass) -> Num:
    return priced.total_s - priced.time_s["attention"]
