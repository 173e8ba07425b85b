"""From a published row to what the estimate takes: model, cluster, plan, workload.

Rows speak many dialects; the words are read the same way whoever wrote them. What a row leaves open is
filled by what its kind of software did in its year (`Software`), never by its source:

- until 2022 training ran in fp16 with its gradients in fp16, unfused attention, dropout, an all-reduce
  after the last backward, and no ZeRO unless stated; from 2023 on attention is fused, the exchange of
  gradients overlaps, and the optimizer is sharded;
- a row that does not state its recomputation uses none if that fits the memory of its chip, else what
  was usual: everything until 2022, later only what costs little time;
- the vocabulary is as wide as the row says; what tp does not divide is cut off, not padded (vTrain's model
  has `vocab_size // world_size` rows a rank, of 50257);
- on Omni-Path every launch waited for its kernel: NCCL hung without CUDA_LAUNCH_BLOCKING=1
  (bigscience, train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the large model");
- matmuls with one scale per row ("rowwise") ran no faster than bf16, as the tables that name them show;
- layers that do not divide by the stages are placed as Megatron-LM and DeepSpeed do, which count the
  embedding and the head as one layer each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache

from meshwise.calibrate.validate.rows import Run
from meshwise.core.errors import ClusterError, PlanError
from meshwise.machine.hardware import Chip, Cluster, Level, find_chip
from meshwise.model.architecture import Model, MoE, checked_model
from meshwise.model.find import models
from meshwise.model.weights import num_params
from meshwise.plan.plan import RECOMPUTE, Plan
from meshwise.plan.workload import Workload

NETWORK_LATENCY_S = {"roce": 5.6e-6, "slingshot": 5.8e-6, "omnipath": 4e-6, "infiniband": 4e-6}
"""Hop latency of the networks that a row may name; sources in catalog/chips.toml."""


PREDECESSORS = {"a100-80g-sxm": ("a100-40g-sxm", 2021)}
"""What a chip's name meant before the year from which it was delivered (NVIDIA, 16 November 2020)."""


GRAPHED = (2026, 6)
"""The release of Megatron-Bridge whose recipes first put whole iterations in a CUDA graph (v0.5.0)."""


@dataclass(frozen=True, slots=True)
class Expressed:
    """A run in meshwise's words. `plans` differ only in what the row leaves open, lightest first."""

    model: Model
    cluster: Cluster
    plans: tuple[Plan, ...]
    workload: Workload
    software: str
    launches_block: bool


@cache
def express(run: Run) -> Expressed:
    """`run` in meshwise's words; a MeshwiseError is the reason why it cannot be said."""
    if run.tp * run.pp * run.dp * (run.cp or 1) != run.gpus:
        raise PlanError(
            f"tp={run.tp} x pp={run.pp} x dp={run.dp} x cp={run.cp or 1} are not the row's {run.gpus} GPUs"
        )
    model = model_of(run)
    return Expressed(
        model=model,
        cluster=cluster_of(run),
        plans=plans_of(run, model),
        workload=Workload(batch=run.global_batch, seq=run.seq, microbatch=run.micro_batch),
        software=software_of(run),
        launches_block="omnipath" in run.interconnect.lower(),
    )


def software_of(run: Run) -> str:
    """The generation of software (`meshwise.machine.overheads`) that was usual in the row's year.

    FSDP is PyTorch's own, unless the row follows a vendor's recipe.
    """
    if run.year < MODERN:
        return "2020"
    if run.year < 2024:
        return "2023"
    if "fsdp" in run.zero.lower() and "recipe" not in run.notes:
        return "2024-torch"
    return "2026" if released(run) >= GRAPHED else "2024"


def released(run: Run) -> tuple[int, int]:
    """Year and month of the software: those of `release 26.04`, else the first of the row's year."""
    found = re.search(r"release (\d\d)\.(\d\d)", run.source)
    return (2000 + int(found[1]), int(found[2])) if found else (run.year, 1)


def memory_kind_of(notes: str) -> str:
    """Which memory a row reports: PyTorch's `allocated` tensors or `reserved` cache, or the `device`'s.

    A row that mentions reserved memory as another figure means the allocated one; torchtitan and its like
    report what PyTorch reserved; other rows what the driver shows.
    """
    words = notes.lower()
    if "reserved memory also" in words:
        return "allocated"
    return "reserved" if re.search(r"reserved|max over ranks|torchtitan", words) else "device"


# --- hardware ----------------------------------------------------------------------------------


def chip_of(text: str, year: int = 9999) -> Chip:
    """The chip that a row means by `H100 96GB HBM2e (500W, 2.4TB/s)` or `A100-SXM4-80GB`.

    A row older than the chip means its predecessor of the same name.
    """
    chip = _chip(text)
    predecessor, first_year = PREDECESSORS.get(chip.name, ("", 0))
    return find_chip(predecessor) if year < first_year else chip


@cache
def _chip(text: str) -> Chip:
    words = re.sub(r"\(.*?\)", " ", text.lower())
    family = re.search(r"[a-z]+\d+[a-z]?", words)
    if family is None:
        raise ClusterError(f"{text!r} names no chip; write one of the catalog, as h100-80g-sxm")
    memory = re.search(r"(\d+)\s*gb?\b", words)
    form = "pcie" if "pcie" in words else "sxm"
    size = f"-{memory[1]}g" if memory else ""
    for name in (words.strip(), f"{family[0]}{size}-{form}", f"{family[0]}{size}", f"{family[0]}-{form}"):
        try:
            return find_chip(name)
        except ClusterError:
            continue
    return find_chip(family[0])


def cluster_of(run: Run) -> Cluster:
    """The run's chips, nodes and network; what the row does not say is usual for the chip."""
    chip = chip_of(run.gpu, run.year)
    levels = _levels(chip, run.gpus_per_node, run.interconnect.lower())
    return Cluster(name=run.gpu, chip=chip, num_chips=run.gpus, levels=levels)


@cache
def _levels(chip: Chip, gpus_per_node: int | None, network: str) -> tuple[Level, ...]:
    inner, *_, outer = chip.levels
    per_node = float(gpus_per_node or inner.ranks)
    rate = re.search(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*gb(?:/s|ps)", network)
    if rate is None and per_node == inner.ranks:
        return chip.levels
    if rate is not None:
        total_bytes_per_s = int(rate[1] or 1) * float(rate[2]) * 1e9 / 8
        sharing = 1.0 if "per gpu" in network else per_node
        kind = next((word for word in NETWORK_LATENCY_S if word in network), "infiniband")
        latency_s = NETWORK_LATENCY_S[kind]
        outer = Level(name=kind, bytes_per_s=total_bytes_per_s / sharing, latency_s=latency_s)
    return replace(inner, ranks=per_node), outer


# --- model -------------------------------------------------------------------------------------


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)| truncated.*", "", text.lower()))


@cache
def _by_letters() -> dict[str, Model]:
    return {_letters(name): model for model in models().values() for name in (model.name, *model.aliases)}


def model_of(run: Run) -> Model:
    """The catalog's model of that name with the row's numbers, or one made of the row's numbers alone."""
    known = _by_letters().get(_letters(run.model))
    if known is None or (known.hidden, known.num_heads) != (run.hidden, run.heads):
        return checked_model(_plain_model(run), run.model)
    model = replace(
        known,
        num_layers=run.layers,
        ffn_hidden=run.ffn_hidden,
        num_kv_heads=run.kv_heads,
        vocab=_vocab(run),
        max_seq=run.seq,
        moe=_experts(known, run),
    )
    return checked_model(model, run.model)


def _experts(model: Model, run: Run) -> MoE | None:
    moe = model.moe
    if moe is None or not run.experts:
        return moe
    first = 1 if "first layer dense" in run.notes else moe.first_dense_layers
    return replace(
        moe,
        num_experts=run.experts,
        top_k=run.topk or moe.top_k,
        ffn_hidden=run.expert_ffn or moe.ffn_hidden,
        first_dense_layers=first,
    )


def _vocab(run: Run) -> int:
    """The vocabulary as wide as the row says, without what tp does not divide (see the top of this file)."""
    return run.vocab - run.vocab % run.tp


def _plain_model(run: Run) -> Model:
    """A GPT or Llama-like model: gated if that explains its parameters (or, unstated, its width) better."""
    moe = None
    if run.experts:
        moe = MoE(num_experts=run.experts, top_k=run.topk or 1, ffn_hidden=run.expert_ffn or run.ffn_hidden)

    def candidate(gated: bool) -> Model:
        return Model(
            name=run.model,
            num_layers=run.layers,
            hidden=run.hidden,
            ffn_hidden=run.ffn_hidden,
            num_heads=run.heads,
            num_kv_heads=run.kv_heads,
            head_dim=run.hidden // run.heads,
            vocab=_vocab(run),
            max_seq=run.seq,
            activation="swiglu" if gated else "gelu",
            norm="rmsnorm" if gated else "layernorm",
            norm_bias=not gated,
            linear_bias=not gated,
            qkv_bias=not gated,
            out_bias=not gated,
            positions="rotary" if gated else "learned",
            tied_embedding=not gated,
            dropout_frac=0.1 if run.year < MODERN and not gated else 0.0,
            moe=moe,
        )

    both = candidate(True), candidate(False)
    if run.params_b is None or moe is not None:
        return both[run.ffn_hidden >= 4 * run.hidden]
    stated = run.params_b * 1e9
    return min(both, key=lambda model: abs(math.log(num_params(model) / stated)))


# --- plan --------------------------------------------------------------------------------------

MODERN = 2023
"""The year from which a row is taken to run today's kind of software (see the top of this file)."""


def plans_of(run: Run, model: Model) -> tuple[Plan, ...]:
    """The plan of the row, once for each recomputation that the row leaves possible."""
    notes, modern = run.notes.lower(), run.year >= MODERN
    zero, group = zero_of(run.zero, modern=modern)
    dtype = dtype_of(run.dtype)
    vpp = run.virtual_pp or 1
    if run.pp == 1:
        vpp = 1
    plan = Plan(
        tp=run.tp,
        sp=(modern or "sequence parallelism" in notes) and run.tp > 1
        if run.sequence_parallel is None
        else run.sequence_parallel,
        cp=run.cp or 1,
        cp_kind="ulysses" if "a2a" in notes else "ring",
        pp=run.pp,
        vpp=vpp,
        schedule="interleaved" if vpp > 1 else "1f1b",
        stages=_stages(model.num_layers, run.pp * vpp),
        ep=run.ep or 1,
        dispatch="per_rank" if "recipe" in notes else "per_expert",
        etp=1 if model.moe is not None else None,
        zero=zero,
        zero_group=group,
        dtype=dtype,
        grad_dtype=grad_dtype_of(dtype, run),
        attention="flash" if (modern if run.flash_attention is None else run.flash_attention) else "unfused",
        overlap_dp=modern and not re.search(r"no overlap|overlap features off", notes),
        overlap_tp=bool(re.search(r"async ?tp|per (the public )?recipe", notes)),
    )
    stated = recompute_of(run.recompute)
    if stated == "selective" and software_of(run) == "2024-torch":
        # Selective by op: every other matmul runs again, but no attention; 3/8 of the forward.
        redone = max(3 * model.num_layers // run.pp // 8, 1)
        return (replace(plan, recompute="full", recompute_layers=redone),)
    silent = ("none", "selective") if modern else ("none", "full")
    return tuple(replace(plan, recompute=policy) for policy in ([stated] if stated else silent))


def _stages(layers: int, chunks: int) -> tuple[int, ...] | None:
    """Uneven stages where `layers` do not divide: the embedding and the head count as a layer each."""
    if layers % chunks == 0:
        return None
    if layers + 2 < chunks:
        raise PlanError(f"{layers} layers cannot fill {chunks} pipeline stages (pp x vpp)")
    most = -(-(layers + 2) // chunks)
    counts = [most] * chunks
    counts[0] -= 1
    spare = sum(counts) - layers  # what the last stages have less
    for i in range(spare):
        counts[chunks - 1 - i % max(chunks - 1, 1)] -= 1
    return tuple(counts)


def zero_of(text: str, *, modern: bool) -> tuple[int, int | None]:
    """ZeRO stage, and the ranks that share states if not all, of `1 (group 8)`, `FSDP 64`, `ZeRO-2`."""
    words = text.lower()
    if not words:
        return int(modern), None
    group = re.search(r"(?:group|fsdp)\s*(\d+)", words)
    stage = re.search(r"zero-?\s*(\d)|^(\d)\b", words)
    if stage:
        return int(stage[1] or stage[2]), int(group[1]) if group else None
    if "fsdp" in words:
        return 3, int(group[1]) if group else None
    raise PlanError(f"zero_stage_or_fsdp {text!r} is none of 0, 1, 2, 3, FSDP, FSDP SHARD_GRAD_OP (ZeRO-2)")


def dtype_of(text: str) -> str:
    """The dtype of the matmuls that `mixed fp16`, `amp_bf16`, `float8 rowwise` or `fp8-mx` means."""
    words = text.lower()
    for dtype, pattern in (
        ("bf16", r"rowwise"),
        ("fp4", r"fp4|float4"),
        ("fp8", r"fp8|float8"),
        ("bf16", r"bf16|bfloat16"),
        ("fp16", r"fp16|float16|half"),
        ("fp32", r"fp32|float32"),
    ):
        if re.search(pattern, words):
            return dtype
    raise PlanError(f"dtype {text!r} is unknown; write bf16, fp16, fp8, fp4 or fp32")


def grad_dtype_of(dtype: str, run: Run) -> str:
    """The type in which gradients are summed: 16 bits until 2023 unless stated, then fp32."""
    words = f"{run.notes} {run.zero}".lower()
    if "mode pure" in words:
        return "bf16"
    if dtype == "fp16":
        return "fp16"
    stated = re.search(r"fp32 grad|bf16 optimizer|fsdp", words)
    return "fp32" if stated or run.year >= 2024 else "bf16"


def recompute_of(text: str) -> str:
    """The recompute policy, or "" where the row does not say."""
    words = text.lower()
    if not words:
        return ""
    for policy in RECOMPUTE:
        if policy in words:
            return policy
    raise PlanError(f"recompute {text!r} is none of {', '.join(RECOMPUTE)}")
