"""Serving in closed form: time to the first token, time of each one after it, what fits, tokens a second.

A pass is the sum of its ops, one after the other, as a CUDA graph replays them (`program.serving` states
them, `estimate.timing` times them). Nothing overlaps. The engine's own time between passes is what the caller
says (0: none), and routing is even.

Memory of a rank: weights, the cache of all its sequences at full length, what the largest pass works on, and
the process's context. Arrays of sequences broadcast.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.estimate.timing import Machine, experts_library, machine, op_times
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import NONE, find_overheads
from meshwise.model.architecture import Layer, Model, layer_kind
from meshwise.plan.plan import DEFAULTS, Plan
from meshwise.program.cut import Cut
from meshwise.program.op import Op, precision
from meshwise.program.serving import (
    cache_bytes,
    serving_block,
    serving_embed,
    serving_head,
    working_bytes,
)

PREFILL_TOKENS = 8192
"""Tokens that engines take in one pass of prompts, or one prompt if that is longer (vLLM, SGLang)."""

PLAN_KEYS = ("tp", "dp", "ep", "etp", "dtype", "kv_dtype")
PARTS = ("attention", "projections", "mlp", "experts", "comm_tp", "comm_ep", "ends", "engine")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """What is served: prompts of `prompt` tokens, `output` tokens generated after each, on `cluster`.

    `plan` has its dp and etp filled in. `memory_frac`: share of the memory that the engine may take.
    `engine_s`: its own time between passes.
    """

    model: Model
    plan: Plan
    cluster: Cluster
    machine: Machine
    prompt: int
    output: int
    memory_frac: float = 0.9
    engine_s: float = 0.0

    @property
    def dp(self) -> int:
        """Groups of tp ranks, each with sequences of its own."""
        return self.cluster.num_chips // self.plan.tp

    def cut(self, kind: str, sequences: Num, *, past: Num = 0.0) -> Cut:
        """How a pass is cut: prompts, or a token of each of `sequences` on every dp rank behind `past`."""
        plan = self.plan
        return Cut(
            kind=kind,
            microbatch=sequences,
            seq=float(self.prompt if kind == "prefill" else 1),
            past=past,
            tp=float(plan.tp),
            ep=float(plan.ep),
            etp=float(plan.etp or 1),
            kv_bytes=DTYPE_BYTES[plan.kv_dtype],
            precision=precision(plan.dtype),
        )


def serving(
    model: Model, cluster: Cluster, plan: Plan, *, prompt: int, output: int, memory_frac: float = 0.9,
    engine_s: float = 0.0,
) -> Serving:  # fmt: skip
    """A checked `Serving`; PlanError or WorkloadError where something does not fit."""
    plan = _instance(model, plan, cluster.num_chips)
    if model.patches is not None or not model.causal:
        raise WorkloadError(f"{model.name} does not generate text; name a decoder")
    for name, tokens in (("prompt", prompt), ("output", output)):
        if tokens < 1:
            raise WorkloadError(f"{name}={tokens} must be a whole number of at least 1")
    if prompt + output > model.max_seq:
        raise WorkloadError(
            f"prompt {prompt} + output {output} tokens are more than the {model.max_seq} of {model.name}; "
            "ask for fewer"
        )
    if not 0 < memory_frac <= 1:
        raise WorkloadError(f"--memory-frac is {memory_frac}; it must be above 0 and at most 1")
    if not 0 <= engine_s < np.inf:
        raise WorkloadError(f"--engine-ms is {1e3 * engine_s:g}; it must be a number of zero or more")
    return Serving(
        model=model, plan=plan, cluster=cluster, machine=machine(cluster, plan.dtype, overheads=NONE),
        prompt=prompt, output=output, memory_frac=memory_frac, engine_s=engine_s,
    )  # fmt: skip


def _instance(model: Model, plan: Plan, world: int) -> Plan:
    """`plan` with its dp and etp; PlanError where it is no plan of an instance of `world` ranks."""
    for name, default in DEFAULTS.items():
        if name not in PLAN_KEYS and getattr(plan, name) != default:
            raise PlanError(f"serve has no {name}; it knows {', '.join(PLAN_KEYS)}")
    dp = plan.data_parallel(world)
    etp = plan.etp or (plan.tp if plan.ep == 1 and model.moe is not None else 1)
    plan = replace(plan, dp=dp, etp=etp)
    for what, size in (("heads", model.num_heads), ("ffn width", model.ffn_hidden)):
        if size % plan.tp:
            raise PlanError(f"tp={plan.tp} does not divide the {size} {what} of {model.name}; use a divisor")
    if model.num_kv_heads % plan.tp and plan.tp % model.num_kv_heads:
        raise PlanError(
            f"tp={plan.tp} neither divides nor is divided by the {model.num_kv_heads} key-value heads of "
            f"{model.name}; use a divisor or a multiple"
        )
    ranks = plan.ep * etp
    if model.moe is None:
        if ranks > 1:
            raise PlanError(f"{model.name} has no experts; leave ep and etp out")
        return plan
    for what, size, name, degree in (
        ("experts", model.moe.num_experts, "ep", plan.ep),
        ("expert width", model.moe.ffn_hidden, "etp", etp),
    ):
        if size % degree:
            raise PlanError(
                f"{name}={degree} does not divide the {size} {what} of {model.name}; use a divisor"
            )
    if ranks % plan.tp or world % ranks:
        raise PlanError(
            f"ep={plan.ep} x etp={etp} must be a multiple of tp={plan.tp} and divide the {world} ranks, so "
            "that experts are spread at least as wide as attention"
        )
    if ranks > plan.tp and etp > 1:
        raise PlanError(f"experts on several dp ranks are not cut too: use etp=1 with ep={ranks}")
    return plan


# --- passes ------------------------------------------------------------------------------------


def layers(model: Model) -> dict[Layer, int]:
    """How many layers of each kind the model has."""
    return Counter(layer_kind(model, layer) for layer in range(model.num_layers))


def pass_ops(model: Model, cut: Cut) -> list[Op]:
    """Every op of a pass, each with how often it occurs."""
    ops = [*serving_embed(model, cut), *serving_head(model, cut)]
    for layer, num_layers in layers(model).items():
        ops += [replace(op, count=op.count * num_layers) for op in serving_block(model, cut, layer)]
    return ops


@dataclass(frozen=True, slots=True, eq=False)
class PassTime:
    """Seconds of one pass by what they are spent on; `attention` is the core alone."""

    parts: dict[str, Num]

    @property
    def total_s(self) -> Num:
        """All of it."""
        return sum(self.parts.values())


def pass_time(serving: Serving, cut: Cut) -> PassTime:
    """The time of one pass: that of its ops, and the engine's own."""
    parts: dict[str, Num] = dict.fromkeys(PARTS, 0.0)
    parts["engine"] = serving.engine_s
    ops = pass_ops(serving.model, cut)
    for op, time in zip(ops, op_times(ops, serving.machine), strict=True):
        parts[_part(op)] += op.count * (time.busy_s + time.comm_s)
    return PassTime(parts)


def _part(op: Op) -> str:
    if op.module in ("embedding", "head"):
        return "ends"
    if op.kind == "collective":  # after an exchange, the tp ranks gather what each of them got back
        return "comm_ep" if op.axis == "ep" or op.collective == "all_gather" else "comm_tp"
    if op.kind == "experts":
        return "experts"
    if op.kind in ("attention", "decode_attention"):
        return "attention"
    return "projections" if op.module == "attention" else "mlp"


# --- memory ------------------------------------------------------------------------------------


def weight_bytes(serving: Serving) -> float:
    """Bytes of the weights on one rank: layers in the plan's dtype, embedding and head in bf16."""
    form = precision(serving.plan.dtype)
    return sum(
        float(op.count * op.num_params) * (form.act_bytes if _part(op) == "ends" else form.operand_bytes)
        for op in pass_ops(serving.model, serving.cut("decode", 1.0, past=1.0))
    )


def sequence_bytes(serving: Serving) -> float:
    """Bytes of the cache of one sequence at full length, on one rank of those that hold it."""
    last = serving.cut("decode", 1.0, past=serving.prompt + serving.output - 1.0)
    return sum(
        num_layers * float(cache_bytes(serving.model, last, layer))
        for layer, num_layers in layers(serving.model).items()
    )


def memory_bytes(serving: Serving, sequences: Num) -> dict[str, Num]:
    """Bytes of one rank with `sequences` at full length on each dp rank, by what they hold."""
    largest = serving.cut("prefill", max(PREFILL_TOKENS / serving.prompt, 1.0))
    context = find_overheads(serving.cluster.chip).context_bytes
    return {
        "weights": weight_bytes(serving),
        "cache": np.asarray(sequences, dtype=np.float64) * sequence_bytes(serving),
        "working": working_bytes(serving.model, largest) + context,
    }


def max_sequences(serving: Serving) -> int:
    """Sequences at full length for which every dp rank has room; 0 if not even the weights fit."""
    memory = memory_bytes(serving, 0.0)
    room = serving.memory_frac * serving.cluster.chip.memory_bytes
    return max(int((room - float(memory["weights"] + memory["working"])) // sequence_bytes(serving)), 0)


# --- answers -----------------------------------------------------------------------------------


def first_token_s(serving: Serving) -> float:
    """Time to the first token of a prompt that finds the instance idle."""
    return float(pass_time(serving, serving.cut("prefill", 1.0)).total_s)


def prompt_s(serving: Serving) -> float:
    """Time that a dp rank spends on each prompt, where several go into one pass."""
    together = max(PREFILL_TOKENS // serving.prompt, 1)
    return float(pass_time(serving, serving.cut("prefill", float(together))).total_s) / together


def token_time(serving: Serving, sequences: Num) -> PassTime:
    """The mean pass of decoding: caches half through the output."""
    past = serving.prompt + serving.output / 2.0
    return pass_time(serving, serving.cut("decode", np.asarray(sequences, dtype=np.float64), past=past))


def batches(serving: Serving) -> list[int]:
    """Sequences of the instance worth a row: powers of two a dp rank, and the most that fit."""
    most = max_sequences(serving)
    counts = [2**i for i in range(20) if 2**i < most] + ([most] if most else [])
    return [count * serving.dp for count in counts]


def sequences_within(serving: Serving, token_s: float) -> int:
    """The most sequences of the instance that fit and get a token each `token_s`; 0 if none does."""
    counts = np.arange(1.0, max_sequences(serving) + 1.0)
    if not counts.size:
        return 0
    quick = counts[np.asarray(token_time(serving, counts).total_s) <= token_s]
    return int(quick[-1]) * serving.dp if quick.size else 0


def rows(serving: Serving, sequences: list[int]) -> list[dict[str, Any]]:
    """What each number of running sequences of the whole instance gives; they divide by dp.

    `tokens_per_s` counts generated tokens while only decoding; `with_prefill_per_s` the same where the
    instance takes the prompts too, one batch after the other.
    """
    num_chips, room = serving.cluster.num_chips, serving.memory_frac * serving.cluster.chip.memory_bytes
    each = np.array(sequences, dtype=np.float64) / serving.dp
    time, memory, prompt = token_time(serving, each).parts, memory_bytes(serving, each), prompt_s(serving)

    def of(number: int, parts: dict[str, Num]) -> dict[str, float]:
        return {name: float(np.broadcast_to(part, each.shape)[number]) for name, part in parts.items()}

    found = []
    for i, count in enumerate(sequences):
        time_s, used = of(i, time), of(i, memory)
        token_s, total = sum(time_s.values()), sum(used.values())
        tokens_per_s = count / token_s
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
                "fits": total <= room,
            }
        )
    return found


def notes(serving: Serving) -> list[str]:
    """What a reader should know: which constants come from another chip, and what is left out."""
    efficiency, dtype = serving.machine.efficiency, serving.plan.dtype
    used = {"decode.mla" if serving.model.mla else "decode.flash", f"gemm.{dtype}"}
    if serving.model.moe is not None:
        used.add(f"experts.{experts_library(efficiency, dtype)}")
    chip, inherited = serving.cluster.chip.name, efficiency.inherited_from
    return [
        *(f"{chip}: {name} inherited from {inherited[name]}" for name in sorted(used & set(inherited))),
        "even routing, kernels one after the other, no queue; the engine takes --engine-ms between passes",
    ]
