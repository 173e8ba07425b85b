"""Serving in closed form: time to the first token, time of each one after it, what fits, tokens a second.

A pass is the sum of its kernels, one after the other, as a CUDA graph replays them: the ordinary ones by the
model of `estimate.timing`; attention of one query a sequence, experts, their exchange, and the all-reduce
inside a node by the models of the kernels that serving engines run, with constants fitted to published
measurements of each (`cost.attention_kernel`, `cost.experts`, `cost.dispatch`, `cost.collective`). Nothing
overlaps. The engine's own time between passes is what the caller says (0: none), and routing is even.

Memory of a rank: weights, the cache of all its sequences at full length, what the largest pass works on, and
the process's context. Arrays of sequences broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.units import Num
from meshwise.cost.attention_kernel import decode_attention_s
from meshwise.cost.collective import peer_all_reduce_s
from meshwise.cost.dispatch import copies_by_expert, copies_by_rank, dispatch_s, low_latency_cores
from meshwise.cost.experts import experts_s
from meshwise.estimate.timing import Machine, machine, op_times
from meshwise.machine.efficiency import ExpertsEfficiency
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import NONE, find_overheads
from meshwise.model.architecture import num_dense_layers, num_moe_layers
from meshwise.program.op import Op, precision
from meshwise.program.serving import (
    Instance,
    attends,
    cache_bytes_per_token,
    cached_tokens,
    check_instance,
    end_params,
    ends_ops,
    experts_of,
    layer_ops,
    layer_params,
)

PREFILL_TOKENS = 8192
"""Tokens that engines take in one pass of prompts, or one prompt if that is longer (vLLM, SGLang)."""

DISPATCH_CORES = 24.0
"""Cores that DeepEP's normal kernels run on; its low-latency ones take as many as serve the experts."""

DISPATCH_NODES = 4.0
"""Nodes that a token is routed to at most (DeepSeek-V3, arXiv 2412.19437)."""

_LIBRARIES = {
    "bf16": ("bf16-triton", "bf16-trtllm"),
    "fp16": ("bf16-triton", "bf16-trtllm"),
    "fp8": ("fp8_block-triton", "fp8_block-trtllm"),
    "fp4": ("fp4-trtllm",),
}
PARTS = ("attention", "projections", "mlp", "experts", "comm_tp", "comm_ep", "ends", "engine")


@dataclass(frozen=True, slots=True, eq=False)
class PassTime:
    """Seconds of one pass by what they are spent on; `attention` is the core alone."""

    parts: dict[str, Num]

    @property
    def total_s(self) -> Num:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """What is served: prompts of `prompt` tokens, `output` tokens generated after each, on `cluster`.

    `memory_frac`: share of the memory that the engine may take. `engine_s`: its own time between passes.
    """

    instance: Instance
    cluster: Cluster
    machine: Machine
    prompt: int
    output: int
    memory_frac: float = 0.9
    engine_s: float = 0.0


def serving(
    instance: Instance, cluster: Cluster, *, prompt: int, output: int, memory_frac: float = 0.9,
    engine_s: float = 0.0,
) -> Serving:  # fmt: skip
    """A checked `Serving`; PlanError or WorkloadError where something does not fit."""
    check_instance(instance)
    model = instance.model
    if model.patches is not None or not model.causal:
        raise WorkloadError(f"{model.name} does not generate text; name a decoder")
    if prompt + output > model.max_seq:
        raise WorkloadError(
            f"prompt {prompt} + output {output} tokens are more than the {model.max_seq} of {model.name}; "
            "ask for fewer"
        )
    if not 0 < memory_frac <= 1:
        raise WorkloadError(f"--memory-frac is {memory_frac}; it must be above 0 and at most 1")
    if not 0 <= engine_s < np.inf:
        raise WorkloadError(f"--engine-ms is {1e3 * engine_s:g}; it must be a number of zero or more")
    on = machine(cluster, instance.dtype, overheads=NONE)
    return Serving(
        instance=instance, cluster=cluster, machine=on, prompt=prompt, output=output,
        memory_frac=memory_frac, engine_s=engine_s,
    )  # fmt: skip


# --- memory ------------------------------------------------------------------------------------


def weight_bytes(of: Serving) -> float:
    """Bytes of the weights on one rank: matrices of the layers in `dtype`, embedding and head in bf16."""
    model, instance = of.instance.model, of.instance
    layers = num_dense_layers(model) * layer_params(instance, moe=False)
    if num_moe_layers(model):
        layers += num_moe_layers(model) * layer_params(instance, moe=True)
    form = precision(instance.dtype)
    return layers * form.operand_bytes + end_params(instance) * form.act_bytes


def cache_bytes(of: Serving) -> float:
    """Bytes of the cache of one sequence at full length, on one rank of those that hold it."""
    whole = float(cached_tokens(of.instance.model, of.prompt + of.output))
    return whole * cache_bytes_per_token(of.instance)


def working_bytes(of: Serving) -> float:
    """What the largest pass of prompts works on: four tensors of the residual stream, and the widest pair.

    The widest are the hidden rows of the feed-forward or of a token's experts, in and out of the activation.
    """
    model, instance = of.instance.model, of.instance
    tokens = max(PREFILL_TOKENS, of.prompt)
    widths = [model.ffn_hidden / instance.tp] if num_dense_layers(model) else []
    if model.moe is not None:
        rows = model.moe.top_k * instance.tp / instance.expert_ranks
        widths.append(rows * (model.moe.ffn_hidden / instance.etp + model.hidden))
    return tokens * (4.0 * model.hidden + 3.0 * max(widths)) * precision(instance.dtype).act_bytes


def memory_bytes(of: Serving, sequences: Num) -> dict[str, Num]:
    """Bytes of one rank with `sequences` at full length on each dp rank, by what they hold."""
    context = find_overheads(of.cluster.chip).context_bytes
    cache = np.asarray(sequences, dtype=np.float64) * cache_bytes(of)
    return {
        "weights": weight_bytes(of),
        "cache": cache,
        "working": working_bytes(of) + context,
    }


def max_sequences(of: Serving) -> int:
    """Sequences at full length for which every dp rank has room; 0 if not even the weights fit."""
    memory = memory_bytes(of, 0.0)
    room = of.memory_frac * of.cluster.chip.memory_bytes - float(memory["weights"] + memory["working"])
    return max(int(room // cache_bytes(of)), 0)


# --- time --------------------------------------------------------------------------------------


def pass_time(of: Serving, sequences: Num, tokens: int, past: Num) -> PassTime:
    """One pass of `tokens` new tokens of each of `sequences` on every dp rank, behind `past` cached ones."""
    model, instance = of.instance.model, of.instance
    parts: dict[str, Num] = dict.fromkeys(PARTS, 0.0)
    dense, moe = num_dense_layers(model), num_moe_layers(model)
    for count, is_moe in ((dense, False), (moe, True)):
        if not count:
            continue
        ops = layer_ops(instance, sequences, tokens, moe=is_moe)
        for op, seconds in zip(ops, _ops_s(of, ops), strict=True):
            parts[_part(op)] += count * seconds
        if is_moe:
            parts["experts"] += count * _experts_s(of, sequences, tokens)
            exchange = "comm_ep" if instance.exchanges else "comm_tp"
            parts[exchange] += count * _joined_s(of, sequences, tokens)
    if tokens == 1:
        parts["attention"] += _decode_s(of, sequences, past)
    parts["ends"] += sum(_ops_s(of, ends_ops(instance, sequences, tokens)))
    parts["engine"] += of.engine_s
    return PassTime(parts)


def _part(op: Op) -> str:
    if op.kind == "collective":
        return "comm_tp"
    if op.kind == "attention":
        return "attention"
    return "projections" if op.module == "attention" else "mlp"


def _ops_s(of: Serving, ops: list[Op]) -> list[Num]:
    """Seconds of each op; an all-reduce inside a node by reading the peers' memory."""
    times = op_times(ops, of.machine)
    return [
        _all_reduce_s(of, op.payload_bytes, op.group_size)
        if op.collective == "all_reduce"
        else op.count * (time.busy_s + time.comm_s)
        for op, time in zip(ops, times, strict=True)
    ]


def _all_reduce_s(of: Serving, payload_bytes: Num, ranks: Num) -> Num:
    if float(np.max(ranks)) == 1:
        return 0.0
    on = of.machine
    library_s = on.collective_s("all_reduce", payload_bytes, ranks, 1.0)
    if float(np.max(ranks)) > on.base.link_ranks[0]:
        return library_s
    return peer_all_reduce_s(
        payload_bytes,
        ranks,
        link_bytes_per_s=on.base.link_bytes_per_s[0],
        memory_bytes_per_s=on.base.memory_bytes_per_s,
        library_s=library_s,
        efficiency=on.efficiency.peer,
    )


def _decode_s(of: Serving, sequences: Num, past: Num) -> Num:
    """Attention of all layers over what they keep of `past` tokens."""
    on, kernel, model = of.machine, attends(of.instance), of.instance.model
    constants = on.efficiency.latent_decode if kernel.is_latent else on.efficiency.decode
    mean = cached_tokens(model, past) / model.num_layers  # windows make some layers shorter
    return model.num_layers * decode_attention_s(
        batch=sequences,
        heads=kernel.heads,
        seq_k=mean,
        kv_bytes_per_token=cache_bytes_per_token(of.instance),
        qk_dim=kernel.qk_dim,
        v_dim=kernel.v_dim,
        flop_per_s=on.by_dtype.get("bf16", on.base).matrix_flop_per_s,
        memory_bytes_per_s=on.base.memory_bytes_per_s,
        efficiency=constants,
    )


def _experts_s(of: Serving, sequences: Num, tokens: int) -> Num:
    on, instance = of.machine, of.instance
    moe = instance.model.moe
    assert moe is not None
    work, form = experts_of(instance, sequences, tokens), precision(instance.dtype)
    return experts_s(
        work.tokens,
        topk=work.top_k,
        experts=work.experts,
        hidden=float(instance.model.hidden),
        inter=moe.ffn_hidden / instance.etp,
        flop_per_s=on.base.matrix_flop_per_s,
        memory_bytes_per_s=on.base.memory_bytes_per_s,
        num_cores=on.num_cores,
        elem_bytes=form.operand_bytes,
        act_bytes=form.act_bytes,
        gemm=on.efficiency.gemm(instance.dtype),
        memory=on.efficiency.memory,
        efficiency=on.efficiency.experts.get(_library(of), ExpertsEfficiency()),
    )


def _library(of: Serving) -> str:
    """The library of the grouped matmuls: the first that was measured on this chip, or else anywhere."""
    known = of.machine.efficiency
    names = [name for name in _LIBRARIES.get(of.instance.dtype, ()) if name in known.experts]
    here = [name for name in names if f"experts.{name}" not in known.inherited_from]
    return next(iter(here or names), "")


def _joined_s(of: Serving, sequences: Num, tokens: int) -> Num:
    """Until all tp ranks have the experts' results: a sum, or the exchange there and back, and a gather."""
    instance, on, hidden = of.instance, of.machine, of.instance.model.hidden
    form = precision(instance.dtype)
    whole = np.asarray(sequences, dtype=np.float64) * tokens
    if not instance.exchanges:
        return _all_reduce_s(of, whole * hidden * form.act_bytes, float(instance.tp))
    way_there = _dispatch_s(of, whole / instance.tp, "dispatch", hidden * form.operand_bytes, tokens)
    way_back = _dispatch_s(of, whole / instance.tp, "combine", hidden * form.act_bytes, tokens)
    gathered = on.collective_s("all_gather", whole * hidden * form.act_bytes, float(instance.tp), 1.0)
    return way_there + way_back + gathered


def _dispatch_s(of: Serving, tokens: Num, way: str, token_bytes: float, new_tokens: int) -> Num:
    """One way of the exchange: DeepEP's low-latency kernels in decoding, its normal ones for prompts."""
    instance, on = of.instance, of.machine
    moe = instance.model.moe
    assert moe is not None
    ranks, links = float(instance.ep), on.base.link_bytes_per_s
    per_node = min(ranks, float(on.base.link_ranks[0]))
    decoding = new_tokens == 1
    constants = on.efficiency.dispatches.get(f"deepep-{'ll' if decoding else 'normal'}-{way}")
    if constants is None:  # a machine that no such library was measured on
        payload = tokens * moe.top_k * token_bytes
        return on.collective_s("all_to_all", payload, ranks, 1.0)
    top_k, experts = float(moe.top_k), float(moe.num_experts)
    copies = (
        copies_by_expert(top_k, ranks, per_node)
        if decoding
        else copies_by_rank(top_k, ranks, per_node, most_nodes=DISPATCH_NODES)
    )
    return dispatch_s(
        tokens,
        copies,
        token_bytes=token_bytes,
        ranks=ranks,
        ranks_per_node=per_node,
        experts=experts,
        num_cores=low_latency_cores(experts, on.num_cores) if decoding else DISPATCH_CORES,
        inner_bytes_per_s=links[0],
        outer_bytes_per_s=links[-1],
        efficiency=constants,
    )


# --- answers -----------------------------------------------------------------------------------


def first_token_s(of: Serving) -> float:
    """Time to the first token of a prompt that finds the instance idle."""
    return float(pass_time(of, 1.0, of.prompt, 0.0).total_s)


def prompt_s(of: Serving) -> float:
    """Time that a dp rank spends on each prompt, where several go into one pass."""
    together = max(PREFILL_TOKENS // of.prompt, 1)
    return float(pass_time(of, float(together), of.prompt, 0.0).total_s) / together


def token_time(of: Serving, sequences: Num) -> PassTime:
    """The mean pass of decoding: caches half through the output."""
    return pass_time(of, np.asarray(sequences, dtype=np.float64), 1, of.prompt + of.output / 2.0)


def batches(of: Serving) -> list[int]:
    """Sequences of the instance worth a row: powers of two a dp rank, and the most that fit."""
    most = max_sequences(of)
    counts = [2**i for i in range(20) if 2**i < most] + ([most] if most else [])
    return [count * of.instance.dp for count in counts]


def sequences_within(of: Serving, token_s: float) -> int:
    """The most sequences of the instance that fit and get a token each `token_s`; 0 if none does."""
    most = max_sequences(of)
    if not most:
        return 0
    counts = np.arange(1, most + 1, dtype=np.float64)
    quick = np.broadcast_to(np.asarray(token_time(of, counts).total_s), counts.shape) <= token_s
    return int(counts[quick][-1]) * of.instance.dp if quick.any() else 0


def rows(of: Serving, sequences: list[int]) -> list[dict[str, Any]]:
    """What each number of running sequences of the whole instance gives; they divide by dp.

    `tokens_per_s` counts generated tokens while only decoding; `with_prefill_per_s` the same where the
    instance takes the prompts too, one batch after the other.
    """
    instance = of.instance
    each = np.array([count / instance.dp for count in sequences])
    if not len(each):
        return []
    time = token_time(of, each)
    total_s = np.broadcast_to(np.asarray(time.total_s, dtype=np.float64), each.shape)
    prompts_s, memory = prompt_s(of), memory_bytes(of, each)
    found = []
    for i, count in enumerate(sequences):
        step_s = float(total_s[i])
        in_all_s = each[i] * prompts_s + of.output * step_s
        used = {name: float(np.broadcast_to(size, each.shape)[i]) for name, size in memory.items()}
        found.append(
            {
                "sequences": count,
                "token_s": step_s,
                "tokens_per_s_per_sequence": 1.0 / step_s,
                "tokens_per_s": count / step_s,
                "tokens_per_s_per_gpu": count / step_s / instance.world,
                "with_prefill_per_s": float(count * of.output / in_all_s),
                "with_prefill_per_s_per_gpu": float(count * of.output / in_all_s / instance.world),
                "memory_bytes": used | {"total": sum(used.values())},
                "time_s": {
                    name: float(np.broadcast_to(np.asarray(part, dtype=np.float64), each.shape)[i])
                    for name, part in time.parts.items()
                },
                "fits": bool(sum(used.values()) <= of.memory_frac * of.cluster.chip.memory_bytes),
            }
        )
    return found


def notes(of: Serving) -> list[str]:
    """What a reader should know: which constants come from another chip, and what is left out."""
    inherited = of.machine.efficiency.inherited_from
    used = {"decode.mla" if of.instance.model.mla else "decode.flash", f"gemm.{of.instance.dtype}"}
    if of.instance.model.moe is not None:
        used.add(f"experts.{_library(of)}")
    said = [
        f"{of.cluster.chip.name}: {name} inherited from {inherited[name]}"
        for name in sorted(used & set(inherited))
    ]
    return [
        *said,
        "even routing, kernels one after the other, no queue; the engine takes --engine-ms between passes",
    ]
