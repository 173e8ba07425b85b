"""Whether a plan's mesh fits its world, the model and the workload.

`rules` says, in the order in which a person is told, what makes a mesh invalid: of one plan the first is an
error (`resolve`), of a grid each is true where it is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.units import Num
from meshwise.cost.schedule import NEEDS, SCHEDULES, valid
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model, in_sequence, layer_kinds
from meshwise.plan.layouts import layout_rules, parts_beyond
from meshwise.plan.mesh import Mesh, mesh_of
from meshwise.plan.plan import (
    DEFAULTS,
    ENGINE_KEYS,
    FSDP2_VALUES,
    KEYS,
    PROMPT_KEYS,
    RECOMPUTE,
    TRAINING_KEYS,
    WEIGHT_KEYS,
    Plan,
    Rule,
    number_of,
    number_rules,
    numbers_of,
    refuse,
    rule,
    world_rules,
)
from meshwise.plan.workload import Workload

_IN_ROUNDS = tuple(map(SCHEDULES.index, ("interleaved", "zb-h1")))
_SPLIT = tuple(map(SCHEDULES.index, ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")))


def resolve(model: Model, plan: Plan, workload: Workload, cluster: Cluster) -> Mesh:
    """The mesh of one plan on all ranks of `cluster`.

    Raises:
        PlanError: The degrees do not divide the world, the model, or each other.
        WorkloadError: The batch does not divide into microbatches of the data-parallel ranks.
    """
    sizes = numbers_of(plan)
    if plan.layout != "1d":
        refuse(layout_rules(model, plan, workload.seq), {"plan": plan})
    mesh = mesh_of(plan, workload, cluster.num_chips, sizes)
    if workload.num_at_once % int(mesh.dp * mesh.microbatch) and workload.kind == "sampling":
        raise WorkloadError(
            f"steps follow each other, and the {workload.num_at_once} sequences of one do not divide by "
            f"dp={int(mesh.dp)} x microbatch={workload.microbatch}; use cp, or a larger batch"
        )
    names = {item.name: getattr(mesh, item.name) for item in fields(mesh)}
    names |= {"cp": mesh.cp, "needs": NEEDS[int(mesh.schedule)], "model": model, "chip": cluster.chip}
    refuse(rules(model, mesh, sizes, cluster), names)
    return mesh


def rules(model: Model, mesh: Mesh, sizes: dict[str, Num], cluster: Cluster) -> Iterator[Rule]:
    """Every rule that the plans of `mesh` must keep, in the order in which a person is told.

    `sizes`: the numbers as the plan states them. Those of layouts of several dimensions: `layout_rules`.
    """
    yield from _kind_rules(model, mesh, sizes)
    yield from number_rules(mesh.plan, sizes)
    yield from world_rules(mesh.world, sizes)
    least = mesh.dp * mesh.microbatch
    yield rule("batch", mesh.batch % mesh.microbatch != 0)
    yield rule("batch_of_dp", mesh.batch % least != 0, least=least)
    if mesh.plan.layout == "1d":
        yield from _model_rules(model, mesh)
    else:
        yield rule("layout_of_sequence", (sizes["cp"] > 1) | (sizes["ulysses"] > 1))
        yield rule("attention_of_paper", mesh.plan.attention == "grid")
    yield from _expert_rules(model, mesh, sizes)
    group, all_ranks = sizes["zero_group"] + (sizes["zero_group"] == 0) * 1.0, mesh.dp * sizes["cp"]
    yield _divides("zero_group", group, all_ranks)
    yield from _offload_rules(mesh)
    if mesh.plan.done_by.parts == "torch":
        yield from _fsdp2_rules(model, mesh, sizes)
    elif mesh.plan.done_by.parts == "transformers":
        yield from _huggingface_rules(model, mesh)
    yield rule("schedule", valid(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp) == 0)
    yield from _stage_rules(model, mesh)
    is_offloaded = mesh.offload_optimizer + mesh.offload_activations > 0
    yield rule("no_host_link", is_offloaded & (cluster.chip.host_bytes_per_s == 0))


def _kind_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    unknown: tuple[str, ...] = WEIGHT_KEYS if mesh.trains else (*TRAINING_KEYS, *WEIGHT_KEYS)
    if mesh.serves:
        known = ENGINE_KEYS + (PROMPT_KEYS if mesh.kind == "prefill" else ())
        unknown = tuple(key for key in KEYS if key not in known)
    for key in unknown:
        default, value = DEFAULTS[key], getattr(mesh.plan, key)
        is_stated = sizes[key] != number_of(key, default) if key in sizes else value != default
        shown = KEYS[key].show(value) if value != default else ""
        yield rule("no_meaning", is_stated, key=key, value=shown)
    shares = any(layer.shares for layer in model.layers)
    yield from _encoder_rules(model, mesh)
    yield rule("shared_blocks", shares & (mesh.pp > 1))
    yield from _tower_rules(model, mesh)
    yield from _diffusion_rules(model, mesh)
    yield rule("generates", mesh.serves & (not model.vocab or not model.causal))
    if mesh.serves and model.moe is not None:
        spread = mesh.ep * mesh.etp
        yield rule("spread_experts", spread % mesh.tp != 0)
        is_both = (spread > mesh.tp) & (mesh.etp > 1) & (mesh.ep > 1)
        yield rule("spread_or_cut", is_both, spread=spread)
    yield rule("positions", (model.positions == "learned") & (mesh.seq > model.max_seq))


def _encoder_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """The decoder reads what the encoder gives in every block: where that lies is stated for whole models."""
    for choice, is_stated in (
        ("a pipeline", mesh.pp > 1),
        ("context parallelism", mesh.cp > 1),
        (f"implementation={mesh.plan.implementation}", not mesh.plan.done_by.runs_encoders),
    ):
        yield rule("encoder", (model.encoder is not None) & is_stated, choice=choice)


def _diffusion_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """A sampling is of a diffusion transformer, whose sequence has one length."""
    plan = mesh.plan
    yield rule("sampling", (mesh.kind == "sampling") & (model.diffusion is None))
    if model.diffusion is None:
        return
    yield rule("image_tokens", mesh.seq != model.max_seq)
    yield rule("diffusion", plan.layout != "1d", choice=f"layout={plan.layout}")
    yield rule("diffusion", not plan.done_by.runs_diffusion, choice=f"implementation={plan.implementation}")


def _tower_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """What a plan says of encoders of images and sound needs some, and they their own sizes."""
    towers, plan = [tower for tower in model.towers if tower.num_tokens], mesh.plan
    for key in ("tower", "tower_dp", "tower_recompute"):
        value = getattr(plan, key)
        yield rule("no_tower", not towers and value != DEFAULTS[key], key=key, value=value)
    if not towers:
        return
    num_tokens = in_sequence(model)
    yield rule("tower_tokens", num_tokens > mesh.seq, num_tokens=num_tokens)
    for tower in towers:
        heads = tower.encoder.num_heads
        is_cut = (heads % mesh.tp != 0) & (not plan.tower_dp)
        yield rule("tower_heads", is_cut, heads=heads, tower=tower.name)
        if plan.done_by.parts == "transformers":
            yield from _huggingface_rules(tower.encoder, mesh)
    is_cut = (mesh.pp > 1) & (not plan.done_by.pipelines_towers)
    for choice, is_stated in (
        (f"layout={plan.layout}", plan.layout != "1d"),
        (f"a pipeline of implementation={plan.implementation}", is_cut),
        ("offload_activations", mesh.offload_activations > 0),
    ):
        yield rule("tower", is_stated, choice=choice)


def _divides(name: str, divisor: Num, size: Num) -> Rule:
    """The rule `name`: a divisor that a plan states must divide the size of something."""
    return rule(name, size % divisor != 0, size=size)


def _model_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    tp, kv_heads, plan = mesh.tp, model.num_kv_heads, mesh.plan
    yield _divides("tp_heads", tp, model.num_heads)
    yield _divides("tp_hidden", tp, model.hidden)
    yield _divides("tp_ffn", tp, model.ffn_hidden if model.vocab else 0)
    yield rule("kv_heads", (kv_heads % tp != 0) & (tp % kv_heads != 0))
    for key in ("loss_chunks", "loss_fusion"):
        value, has_head = getattr(plan, key), bool(model.vocab and model.lm_head)
        yield rule("no_lm_head", value != DEFAULTS[key] and not has_head, key=key, value=value)
    yield _divides("ulysses_cp", mesh.ulysses, mesh.cp)
    yield _divides("ulysses_heads", tp * mesh.ulysses, model.num_heads)
    yield _divides("cp", mesh.cp, mesh.seq)
    yield _divides("loss_chunks", plan.loss_chunks, mesh.seq // mesh.cp)
    yield rule("unfused_ring", (plan.attention == "unfused") & (mesh.ring > 1))  # as in Megatron-LM, PyTorch


def _expert_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    ep, etp, moe, plan = mesh.ep, mesh.etp, model.moe, mesh.plan
    if moe is None:
        stated: dict[str, Any] = {
            "ep": ep > 1,
            "etp": sizes["etp"] > 0,
            "imbalance": sizes["imbalance"] > 1,
            "dispatch": sizes["dispatch"] > 0,
            "dispatch_dtype": plan.dispatch_dtype != DEFAULTS["dispatch_dtype"],
            "overlap_ep": plan.overlap_ep,
            "expert_dtype": plan.expert_dtype is not None,
        }
        yield from (rule("no_experts", is_stated, key=key) for key, is_stated in stated.items())
        return
    yield rule("routed_tokens", mesh.trains & (plan.sp is False) & (mesh.tp > 1))
    yield _divides("ep_copies" if moe.copies else "ep", ep, moe.held)
    yield _divides("etp", etp, moe.ffn_hidden)
    yield _divides("etp_ranks", etp * ep, mesh.tp * mesh.cp * mesh.dp)


def _huggingface_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Blocks of which the library `transformers` keeps other tensors than `program.implementation` states."""
    for is_there, what in parts_beyond("transformers", model, plan=mesh.plan):
        yield rule("huggingface", is_there, what=what)


def _fsdp2_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    """What PyTorch's own parts cannot do, or `meshwise train` does not do with them."""
    yield rule("fsdp2_kind", not mesh.trains)
    for key, built in FSDP2_VALUES.items():
        yield _only(mesh, sizes, key, built)
    yield from _fsdp2_recomputation(model, mesh, sizes)
    yield from _fsdp2_sizes(model, mesh)
    yield from _fsdp2_pipeline(model, mesh)


def _only(mesh: Mesh, sizes: dict[str, Num], key: str, built: tuple[Any, ...]) -> Rule:
    """That `key` has one of the values that are `built`."""
    value = getattr(mesh.plan, key)
    is_other: Any = value is not None and value not in built
    if key in sizes:
        is_other = np.all([sizes[key] != number_of(key, known) for known in built], axis=0)
    known = " or ".join(f"{key}={KEYS[key].show(known)}" for known in built)
    shown = "" if value is None else KEYS[key].show(value)
    return rule("fsdp2_value", is_other, key=key, value=shown, known=known)


def _fsdp2_recomputation(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    """Rules of what the backward computes again, and of the other choices that this meets."""
    plan, layers = mesh.plan, sizes["recompute_layers"]
    recomputes, is_stated = mesh.recompute != RECOMPUTE.index("none"), np.isfinite(layers)
    yield rule("fsdp2_recompute_split", recomputes & splits_backward(mesh))
    yield rule("fsdp2_recompute_offload", recomputes & (mesh.offload_activations > 0))
    shortest = min(plan.stages) if plan.stages else model.num_layers // (mesh.pp * mesh.vpp)
    a_chunk = np.where(is_stated, layers, 0.0) / mesh.vpp
    is_like = (a_chunk == np.floor(a_chunk)) & (a_chunk <= shortest) & (len(layer_kinds(model)) == 1)
    yield rule("fsdp2_recompute_layers", is_stated & ~is_like, shortest=shortest)


def _fsdp2_sizes(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Rules of what is cut, without copies or padding, and into what."""
    experts, parts = mesh.expert_replicas, mesh.tp * mesh.cp * (1.0 + (mesh.ring > 1))
    most = np.minimum(mesh.ep, model.moe.num_experts / model.moe.top_k) if model.moe else np.inf
    yield rule("fsdp2_imbalance", mesh.imbalance > np.maximum(most, 1.0), most=most)
    groups = mesh.shard_ranks(experts) if model.moe else 1.0
    yield _divides("fsdp2_zero_group", groups, experts)
    yield _divides("fsdp2_kv_heads", mesh.tp, model.num_kv_heads)
    yield _divides("fsdp2_vocab", mesh.tp, model.vocab)
    yield rule("fsdp2_vpp", (mesh.vpp > 1) & (mesh.pp == 1))
    yield rule("fsdp2_seq", mesh.seq % parts != 0, parts=parts)


def _fsdp2_pipeline(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Rules of torch.distributed.pipelining."""
    num, is_piped = mesh.num_microbatches, mesh.pp > 1
    rounds, is_1f1b = np.maximum(1, num // mesh.pp), mesh.schedule == SCHEDULES.index("1f1b")
    is_uneven = np.isin(mesh.schedule, _IN_ROUNDS) & (num % rounds != 0)
    yield rule("fsdp2_zero2", is_piped & (mesh.zero == 2))
    yield rule("fsdp2_rounds", is_piped & is_uneven, rounds=rounds)
    yield rule("fsdp2_mtp", (model.mtp_layers > 1) & splits_backward(mesh))
    yield rule("fsdp2_1f1b", is_piped & is_1f1b & (num < mesh.pp))


def splits_backward(mesh: Mesh) -> Any:
    """Where a pipeline computes the gradients of inputs and of weights apart."""
    return (mesh.pp > 1) & np.isin(mesh.schedule, _SPLIT)


def _offload_rules(mesh: Mesh) -> Iterator[Rule]:
    """What nobody's software does beside host memory.

    Muon's states: Megatron-LM and DeepSpeed lack it (their issues 4691 and 8463). Shares: DeepSpeed's and
    Megatron-LM's are of Adam in whole numbers. `per_op`, and schedules that split the backward, are
    torchtitan's, which keeps no activations there.
    """
    plan, share, per_op = mesh.plan, mesh.offload_optimizer, "per_op" in mesh.plan.recompute_modules
    is_away, selective = mesh.offload_activations > 0, mesh.recompute == RECOMPUTE.index("selective")
    yield rule("muon", (plan.optimizer == "muon") & (share > 0))
    yield rule("adam_8bit", (share > 0) & (share < 1) & (plan.optimizer == "adam-8bit"))
    yield rule("optimizer_in_bwd", plan.optimizer_in_bwd & (mesh.num_microbatches > 1))
    yield rule("per_op_lora", per_op & (plan.lora_rank > 0))
    yield rule("per_op_offload", is_away & per_op)
    yield rule("offload_split", is_away & splits_backward(mesh) & selective)


def _stage_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    layers, stages, num_chunks = model.num_layers, mesh.plan.stages, mesh.pp * mesh.vpp
    # the first and the last may hold an end of the model alone
    yield rule("too_many_stages", num_chunks > layers + 2, chunks=num_chunks)
    if stages:
        yield rule("stages_sum", sum(stages) != layers, sum=sum(stages))
        return
    is_even = stages is not None or mesh.serves or mesh.plan.done_by.deals_evenly
    fewer = 2.0 if is_even else 2.0 * np.ceil(layers / num_chunks)
    is_uneven = mesh.is_interleaved & (-layers % num_chunks > fewer)
    yield rule("short_chunks", is_uneven, chunks=num_chunks)
