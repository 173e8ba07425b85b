"""Serving in closed form: time to the first token, time of each one after it, what fits, tokens a second.

A pass is priced as `estimate` prices it: the sum of its ops, one after the other, as a CUDA graph replays
them. Nothing overlaps. The engine's own time between passes is what the caller says (0: none), and routing
is even.

A pipeline has a batch of its own in each stage, so that all work; a *group* is one batch of one dp rank. A
pass takes what all batches take at the slowest stage: pp x (its time + that of a message to the next).
A prompt that is alone takes the sum of the stages, and a message from each to the next.

Memory of a rank: weights, the cache of all sequences of its dp rank at full length (one pool of blocks for
all its batches, as in vLLM), what the largest pass works on, and the process's context. With fewer sequences
than stages some have no batch, and a pass takes as long. Arrays of sequences broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse, told
from meshwise.core.units import WEIGHT_BITS, Num, duration
from meshwise.cost.routing import Shares
from meshwise.estimate.memory import Memory, serving_memory
from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.priced_part import price_parts
from meshwise.estimate.step import message_s
from meshwise.estimate.timing import Machine, experts_library, machine_for
from meshwise.machine.efficiency import inherited_notes
from meshwise.machine.hardware import Cluster, MeasuredCollective
from meshwise.model.architecture import Model, Side, layer_kind
from meshwise.model.weights import num_active_params, num_params
from meshwise.plan.fields import catalog_fields, read_words
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import PLAN_LISTS, Plan, plan_keys
from meshwise.plan.rules import resolve
from meshwise.plan.stages import Stage, stages_of
from meshwise.plan.workload import Workload, quantized_note
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.parts import cut_of, parts
from meshwise.program.serving import is_exchanged, is_sent
from meshwise.serve.encoding import Encoding, encoding
from meshwise.serve.engine import ENGINES, Engine, fitted

PREFILL_TOKENS = 8192
"""Tokens that engines take in one pass of prompts on most chips (vLLM, SGLang)."""

MANY_TOKENS = 32768.0
"""Tokens of a pass that give every expert work enough to hide that its weights are read."""

PLAN_KEYS = PLAN_LISTS["served"]
PARTS = (
    *("draft", "attention", "projections", "recurrence", "mlp", "experts"),
    *("comm_tp", "comm_cp", "comm_ep", "comm_pp", "ends", "engine"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """What is served: prompts of `prompt` tokens, `output` tokens generated after each, on `cluster`.

    `memory_frac`: share of the memory that the engine may take. `engine_s`: its own time between passes.
    `expert_shares`: the chance of each expert that a token chooses it (None: all the same; `serve.experts`).
    `speculation`: how tokens are guessed. `run_by`: what the engine sets of a pass (`pass_times.run_by`).
    `has_tables`: whether it holds an embedding and a head, or reads those of the model that it guesses for.
    `encoding`: images or sound of each prompt, whose tokens `prompt` counts.
    `pass_tokens`: tokens of prompts that a pass takes; `cuts_prompts`: of a longer prompt too, not the whole.
    """

    model: Model
    cluster: Cluster
    machine: Machine
    mesh: Mesh
    prompt: int
    output: int
    memory_frac: float = 0.9
    engine_s: float = 0.0
    expert_shares: Shares | None = None
    speculation: Speculation | None = None
    has_tables: bool = True
    run_by: Mapping[str, Any] = field(default_factory=dict)
    encoding: Encoding | None = None
    pass_tokens: float = PREFILL_TOKENS
    cuts_prompts: bool = True

    @property
    def prompts_together(self) -> float:
        """Prompts, and what an encoder reads for them, that go into one pass; at least one."""
        source = self.model.encoder.seq if self.model.encoder else 0
        return max(self.pass_tokens / (self.prompt + source), 1.0)

    @property
    def largest_prefill(self) -> Cut:
        """The pass of the most tokens of prompts."""
        if self.cuts_prompts and self.model.encoder is None and self.prompt > self.pass_tokens:
            return self.prefill(1.0, self.pass_tokens)
        return self.prefill(self.prompts_together)

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that the engine may take."""
        return self.memory_frac * self.cluster.chip.memory_bytes

    @property
    def num_chips(self) -> int:
        """How many GPUs the instance has."""
        return self.cluster.num_chips

    @property
    def dp(self) -> int:
        """Groups of tp ranks, each with sequences of its own."""
        return int(self.mesh.dp)

    @property
    def groups(self) -> int:
        """Batches under way: one in each stage of each dp rank."""
        return self.dp * int(self.mesh.pp)

    @property
    def engines(self) -> int:
        """Engines whose passes wait for no other: of each dp rank, unless several share their experts."""
        return 1 if self.model.moe and is_exchanged(self.decode(1.0, 1.0)) else self.dp

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the instance, with what follows from it."""
        stated = {name: getattr(self.mesh.plan, name) for name in PLAN_KEYS}
        return stated | {name: int(getattr(self.mesh, name)) for name in ("dp", "etp")}

    def prefill(self, prompts: Num, tokens: Num | None = None) -> Cut:
        """A pass of `prompts` prompts, of `tokens` each or as served, in every group."""
        cut = cut_of(replace(self.mesh, kind="prefill", microbatch=prompts))
        return replace(cut, seq=float(self.prompt) if tokens is None else tokens, **self.run_by)

    def decode(self, sequences: Num, past: Num) -> Cut:
        """A pass of a token of each of `sequences` sequences in every group, behind `past` cached ones.

        Ranks that share prompts (cp) share their caches too; such an instance does not decode.
        """
        cut = cut_of(replace(self.mesh, kind="decode", microbatch=sequences / self.mesh.cp))
        return replace(cut, past=past, ulysses=1.0, ring=1.0, **self.run_by)


def serving(
    model: Model, cluster: Cluster, plan: Plan, *, prompt: int, output: int, memory_frac: float = 0.9,
    engine_s: float = 0.0, engine: Engine | None = None,
) -> Serving:  # fmt: skip
    """A checked `Serving`; PlanError or WorkloadError where something does not fit."""
    refuse("lengths", WorkloadError, prompt=prompt, output=output)
    if model.encoder is not None and not model.encoder.seq:  # a prompt is what it reads; it then writes
        model, prompt = replace(model, encoder=replace(model.encoder, seq=prompt)), 1
    plan = _on_units_of(plan, cluster)
    mesh, machine = resolve_serving(model, plan, cluster, prompt), machine_for(cluster, plan, "decode")
    names = {"prompt": prompt, "output": output, "memory_frac": memory_frac, "engine_ms": 1e3 * engine_s}
    refuse("serving", WorkloadError, model=model, **names)
    crossed = tuple(replace(tower, projectors=()) for tower in model.towers if tower.crossed)
    found = Serving(
        model=replace(model, towers=crossed), cluster=cluster, mesh=mesh, prompt=prompt, output=output,
        memory_frac=memory_frac, machine=machine, engine_s=engine_s, encoding=encoding(model, mesh, machine),
    )  # fmt: skip
    runs = (engine or ENGINES["vllm"]).on(cluster.chip, found.dp // found.engines)
    return replace(found, pass_tokens=runs.max_tokens, cuts_prompts=runs.chunks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speculation:
    """Each pass checks `drafts` tokens that `draft` guessed, each right with the chance `acceptance`.

    Guesses behind a wrong one are lost, so a pass gives (1 - a^(k+1)) / (1 - a) tokens on average
    (Leviathan, Kalman, Matias, arXiv 2211.17192).
    """

    drafts: int
    acceptance: float
    draft: Serving

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens of a sequence that a pass gives, its own one included."""
        return float(sum(self.acceptance**i for i in range(self.drafts + 1)))


GUESSES = catalog_fields(read_catalog("serve_settings.toml")["speculate"], {})


def speculating(serving: Serving, text: str, draft: Model | None = None) -> Serving:
    """`serving` with `drafts=3,accept=0.8`: drafts by the model `draft`, or by multi-token prediction.

    Multi-token prediction reads the model's own embedding and head, which engines hold once (vLLM).
    """
    stated = read_words(text, GUESSES, WorkloadError, "speculate")
    if "accept" not in stated:
        raise WorkloadError(f"speculate: {text!r} says no chance that a guess is right: drafts=3,accept=0.8")
    plan, model = replace(serving.mesh.plan, tower_dp=False), serving.model
    if plan.pp > 1:
        raise PlanError(f"guessing tokens in a pipeline (pp={plan.pp}) is not priced; use tp and dp")
    is_module, draft = draft is None, draft or _further_token(model)
    plan = plan if is_module else without_experts(plan)
    mesh = resolve_serving(draft, plan, serving.cluster, serving.prompt)
    guesses = replace(serving, model=draft, mesh=mesh, has_tables=not is_module)
    found = Speculation(drafts=stated.get("drafts", 1), acceptance=stated["accept"], draft=guesses)
    return replace(serving, speculation=found)


def _further_token(model: Model) -> Model:
    """A module of multi-token prediction: a block like the last, behind the joined embedding and stream.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """
    last, hidden = layer_kind(model, model.num_layers - 1), model.hidden
    widths = {"embedding_norm": 0, "hidden_norm": 0, "projection": 2 * hidden, "final_norm": 0}
    joins = (Side(module="attention", name=name, d_in=d_in, d_out=hidden) for name, d_in in widths.items())
    sides = *last.sides, *joins
    return replace(model, name=f"{model.name}-mtp", num_layers=1, layers=(replace(last, sides=sides),))


def without_experts(plan: Plan) -> Plan:
    """`plan` for a model that has none, beside one that has."""
    return replace(plan, ep=1, etp=None, expert_dtype=None, imbalance=1.0, overlap_ep=False)


def resolve_serving(model: Model, plan: Plan, cluster: Cluster, prompt: int) -> Mesh:
    """The mesh of an instance: all of `cluster`, a sequence in each group."""
    batch = plan.data_parallel(cluster.num_chips) * plan.pp
    kind = "prefill" if plan.cp > 1 else "decode"
    return resolve(model, plan, Workload(batch=batch, seq=prompt, kind=kind, microbatch=1), cluster)


def _on_units_of(plan: Plan, cluster: Cluster) -> Plan:
    """`plan`, where the chip has no units for fp8 or fp4: weights of that width, computed in bf16."""
    narrow = {"fp8": "fp8", "fp4": "nvfp4"}
    if plan.dtype not in narrow or plan.dtype in cluster.chip.matrix_flop_per_s:
        return plan
    return replace(plan, dtype="bf16", weight_dtype=plan.weight_dtype or narrow[plan.dtype])


# --- passes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PricedPass:
    """One pass, priced: its seconds by what they are spent on (`attention` is the core alone), its memory."""

    time_s: dict[str, Num]
    memory: Memory

    @property
    def total_s(self) -> Num:
        """Seconds of the whole pass."""
        return sum(self.time_s.values())


def price_pass(serving: Serving, cut: Cut, *, is_alone: bool = False) -> PricedPass:
    """Price one pass: its ops, and the engine's own time.

    In a pipeline all stages have a batch, and each waits for the slowest, unless a batch `is_alone` there.
    With `overlap_ep` a pass is two of half the batch: while one computes, the other's tokens travel. Of the
    exchange only what is longer than the rest shows (DeepSeek-V3, arXiv 2412.19437, section 3.4).
    """
    whole = _price_pass(serving, cut, is_alone)
    if not serving.mesh.plan.overlap_ep:
        return whole
    half = _price_pass(serving, replace(cut, microbatch=cut.microbatch / 2.0), is_alone)
    rest_s = half.total_s - half.time_s["comm_ep"] - serving.engine_s
    shown_s = np.maximum(half.time_s["comm_ep"] - rest_s, 0.0)
    doubled = {name: 2.0 * spent_s for name, spent_s in (half.time_s | {"comm_ep": shown_s}).items()}
    return PricedPass(doubled | {"engine": serving.engine_s}, whole.memory)


def decode_pass(serving: Serving, sequences: Num, past: Num) -> PricedPass:
    """What a token of each of `sequences` sequences in every group takes, behind `past` cached ones.

    With speculation the guesses and the pass that checks them, divided by the tokens that they give.
    """
    cut, guess = serving.decode(sequences, past), serving.speculation
    if guess is None:
        return price_pass(serving, cut)
    checked = price_pass(serving, replace(cut, seq=guess.drafts + 1.0))
    draft = price_pass(guess.draft, guess.draft.decode(sequences, past)).total_s
    spent = checked.time_s | {"draft": guess.drafts * draft}
    return PricedPass({name: time / guess.tokens_per_pass for name, time in spent.items()}, checked.memory)


def _price_pass(serving: Serving, cut: Cut, is_alone: bool) -> PricedPass:
    model, mesh, runs_on = serving.model, serving.mesh, serving.machine
    priced = PricedModel(model, mesh, runs_on, cut, price_parts(parts(model, cut), runs_on))
    passes = [(stage.num_stages, _price_stage(serving, stage, priced)) for stage in stages_of(model, mesh)]
    slowest = reduce(_larger, (one for _, one in passes))
    if len(passes) == 1:
        return slowest
    passes = passes if is_alone else [(mesh.pp, slowest)]
    time_s = {name: sum(num * one.time_s[name] for num, one in passes) for name in PARTS}
    once_s = time_s["engine"] - (mesh.pp - 1.0) * serving.engine_s  # the engine plans a pass for all stages
    time_s |= {"comm_pp": (mesh.pp - is_alone) * message_s(priced), "engine": once_s}
    return PricedPass(time_s, slowest.memory)


def _price_stage(serving: Serving, stage: Stage, priced: PricedModel) -> PricedPass:
    """What one batch takes in one stage."""
    time_s: dict[str, Num] = dict.fromkeys(PARTS, 0.0)
    time_s["engine"] = serving.engine_s
    for count, part in priced.contents(stage):
        for row in part.rows:
            if not row.is_wait or serving.machine.op_host_s:
                name = "engine" if row.is_wait else _spent_on(row.op)
                time_s[name] = time_s[name] + count * row.spent_s
    held = stage if serving.has_tables else replace(stage, embeddings=0.0, heads=0.0)
    return PricedPass(time_s, serving_memory(priced, held))


def _larger(one: PricedPass, other: PricedPass) -> PricedPass:
    """The time of the slower of two stages, and the memory of that which holds more."""

    def chosen(is_other: Any, mine: Mapping[str, Num], others: Mapping[str, Num]) -> dict[str, Num]:
        return {name: np.where(is_other, others[name], mine[name]) for name in mine}

    time_s = chosen(other.total_s > one.total_s, one.time_s, other.time_s)
    memory = chosen(other.memory.total > one.memory.total, asdict(one.memory), asdict(other.memory))
    return PricedPass(time_s, Memory(**memory))


def _spent_on(op: Op) -> str:
    if op.module in ("embedding", "head"):
        return "ends"
    if op.axis == "cp":
        return "comm_cp"
    if op.kind == "collective":  # after an exchange, the tp ranks gather what each of them got back
        return "comm_ep" if op.axis == "ep" or op.collective == "all_gather" else "comm_tp"
    by_kind = {"experts": "experts", "attention": "attention", "decode_attention": "attention"}
    by_module = {"recurrence": "recurrence", "attention": "projections"}
    return by_kind.get(op.kind) or by_module.get(op.module, "mlp")


# --- memory ------------------------------------------------------------------------------------


def memory_bytes(serving: Serving, sequences: Num) -> dict[str, Num]:
    """Bytes of one rank with `sequences` at full length on each dp rank, by what they hold."""
    working = price_pass(serving, serving.largest_prefill).memory
    each = sequences / serving.mesh.pp
    full = price_pass(serving, serving.decode(each, serving.prompt + serving.output - 1.0)).memory
    if serving.speculation is not None:
        draft = memory_bytes(serving.speculation.draft, sequences)
        full = replace(full, weights=full.weights + draft["weights"], cache=full.cache + draft["cache"])
    of = serving.encoding
    return {
        "weights": full.weights + (of.weight_bytes if of else 0.0),
        "cache": full.cache,
        "working": np.maximum(working.buffers, of.working_bytes if of else 0.0) + working.overhead,
    }


def memory_of_one(serving: Serving) -> dict[str, float]:
    """`memory_bytes` with one sequence a dp rank on the fullest stage, their `total` and what is `usable`."""
    memory = {name: float(value) for name, value in memory_bytes(serving, 1.0).items()}
    return {**memory, "total": sum(memory.values()), "usable": serving.usable_bytes}


def remedies(serving: Serving) -> Iterator[tuple[str, float]]:
    """What alone makes room for a sequence, and the bytes of a GPU that are then taken; each is priced.

    Of more tp, which takes as many more GPUs, the least that does.
    """
    plan, num = serving.mesh.plan, serving.num_chips
    ones = [plan_keys(keys) for keys in told("formats that make room", chip=serving.cluster.chip)] + [{}]
    ones += [{"tp": by * plan.tp, "ep": by * plan.ep if plan.ep > 1 else 1} for by in (2, 4, 8)]
    for keys in ones:
        by = keys.get("tp", plan.tp) // plan.tp
        cluster = replace(serving.cluster, num_chips=by * num)
        with suppress(PlanError):
            mesh = resolve_serving(serving.model, replace(plan, **keys), cluster, serving.prompt)
            frac = serving.memory_frac if keys else 1.0
            of = replace(serving, mesh=mesh, cluster=cluster, memory_frac=frac)
            if (memory := memory_of_one(of))["total"] <= memory["usable"]:
                words = ",".join(f"{key}={value}" for key, value in keys.items() if value != 1)
                yield (words or "memory_frac=1") + (f" on {by * num} GPUs" if by > 1 else ""), memory["total"]
                if by > 1:
                    return


def room_bytes(serving: Serving, memory: Mapping[str, Num]) -> float:
    """Bytes that weights and the largest pass leave a rank's cache, of `memory_bytes`; below 0: no fit."""
    return float(serving.usable_bytes - memory["weights"] - memory["working"])


def max_sequences(serving: Serving) -> int:
    """Sequences at full length for which every dp rank has room; 0 if not even the weights fit."""
    memory = memory_bytes(serving, 1.0)
    return max(int(room_bytes(serving, memory) // float(memory["cache"])), 0)


# --- answers -----------------------------------------------------------------------------------


def prompts_s(serving: Serving, cut: Cut, routed: Cut | None = None) -> Num:
    """Seconds of a pass of prompts: its kernels and what they wait for.

    `routed`: the pass of which experts have the tokens, where `cut` is alone (None: `cut`, and it is not).
    """
    overheads, whole_tokens = fitted().constants, cut.microbatch * cut.seq
    priced = price_pass(serving, cut, is_alone=routed is not None)
    experts_s = priced.time_s["experts"]
    kernels_s = overheads.prompt_slowdown * (priced.total_s - experts_s)
    if routed is not None:
        experts_s, cut = price_pass(serving, routed, is_alone=True).time_s["experts"], routed
    num_tokens = cut.microbatch * cut.seq
    waits_s = (overheads.expert_slowdown - 1.0) * sorted_token_s(serving) * num_tokens
    return kernels_s + experts_s + waits_s + encoding_token_s(serving) * whole_tokens


def encoding_token_s(serving: Serving) -> float:
    """Seconds that a token of a prompt stands for of encoding the images and sound of the prompt."""
    return serving.encoding.request_s / serving.prompt if serving.encoding else 0.0


def sorted_token_s(serving: Serving) -> Num:
    """Seconds that the choices of a token add to experts' kernels that take longer than reading weights.

    0 where tokens are sent to their experts: the exchange sorts them.
    """
    moe = serving.model.moe
    if moe is None:
        return 0.0
    twice = replace(serving, model=replace(serving.model, moe=replace(moe, top_k=2 * moe.top_k)))
    once_s, twice_s = (
        price_pass(of, of.prefill(MANY_TOKENS / of.prompt)).time_s["experts"] for of in (serving, twice)
    )
    return np.where(is_sent(moe, serving.decode(1.0, 1.0)), 0.0, twice_s - once_s) / MANY_TOKENS


def shares_experts(serving: Serving) -> Num:
    """1 where the tokens of all groups meet in the same experts, else 0."""
    return is_exchanged(serving.decode(1.0, 1.0)) * (serving.mesh.pp == 1)


def prompt_alone_s(serving: Serving, tokens: Num | None = None) -> Num:
    """Seconds of a pass of one prompt, of `tokens` or as served, in one group, while the others have none."""
    share = np.where(shares_experts(serving), 1.0 / serving.mesh.dp, 1.0)
    return prompts_s(serving, serving.prefill(1.0, tokens), serving.prefill(share, tokens))


def first_token_kernels_s(serving: Serving) -> float:
    """Seconds of the kernels of one prompt, as `estimate` prices a prefill; its inputs encoded before."""
    encoding_s = serving.encoding.request_s if serving.encoding else 0.0
    return float(price_pass(serving, serving.prefill(1.0), is_alone=True).total_s) + encoding_s


def prompt_s(serving: Serving) -> float:
    """Time that a group spends on each prompt, where several go into one pass."""
    together = float(int(serving.prompts_together))
    return float(prompts_s(serving, serving.prefill(together))) / together


def token_pass(serving: Serving, sequences: Num) -> PricedPass:
    """The mean pass of decoding: caches half through the output."""
    return decode_pass(serving, sequences, serving.prompt + serving.output / 2.0)


def batches(serving: Serving) -> list[int]:
    """Sequences of the instance worth a row: powers of two a dp rank, and the most that fit."""
    most = max_sequences(serving)
    counts = [2**i for i in range(20) if 2**i < most] + ([most] if most else [])
    return [count * serving.dp for count in counts]


def notes(serving: Serving) -> list[str]:
    """What a reader should know: which constants come from another chip, and what is left out."""
    efficiency, plan = serving.machine.efficiency, serving.mesh.plan
    dtype, is_latent = plan.dtype, serving.model.mla is not None
    matmul = efficiency.gemm_name(dtype, in_blocks=plan.weight_dtype == "fp8_block")
    used = {f"decode.{'mla' if is_latent else 'flash'}", f"gemm.{matmul}", "attention.flash", "memory.kernel"}
    base, measured = serving.machine.base, {known.kind for known in serving.cluster.collectives}
    adds_by_peers = 1 < plan.tp <= min(base.links[0].peer_ranks, base.node_ranks)
    if serving.num_chips > 1:
        used |= {"inner.link", "pcie.link", *["peer.all_reduce"] * adds_by_peers}
    if serving.model.moe is not None:
        used.add(f"experts.{experts_library(efficiency, dtype)}")
    of, model = serving.encoding, serving.model
    found = [*inherited_notes(serving.cluster.chip, efficiency.inherited(used)), *_measured_notes(serving)]
    found += quantized_note(model, plan)
    return found + told(
        "serving notes", plan=plan, guess=serving.speculation, of=of, moe=model.moe, model=model,
        num_params=num_params(model), num_active=num_active_params(model),
        prompt=serving.prompt, encoded=duration(of.request_s) if of else "",
        by_kernel=adds_by_peers and measured, weight_bits=WEIGHT_BITS.get(plan.weight_dtype or ""),
        expert_bits=WEIGHT_BITS.get(plan.expert_dtype or ""),
    )  # fmt: skip


def _measured_notes(serving: Serving) -> Iterator[str]:
    """Which collectives were measured, and which of them change the time of no pass."""
    known = serving.cluster.collectives

    def passes_s(*tables: MeasuredCollective) -> list[float]:
        of = replace(serving, machine=replace(serving.machine, collectives=tables))
        tokens = token_pass(of, np.array([1.0, max(max_sequences(serving) // int(serving.mesh.pp), 1)]))
        passes = price_pass(of, of.largest_prefill), tokens
        return [float(seconds) for one in passes for seconds in np.ravel(one.total_s)]

    for one in known:
        is_taken = passes_s(*(other for other in known if other is not one)) != passes_s(*known)
        yield f"{one}{'' if is_taken else '; no pass of this instance takes it'}"
