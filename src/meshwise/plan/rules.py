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
from meshwise.plan.layouts import check_layout
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
        check_layout(model, plan, workload.seq)
    mesh = mesh_of(plan, workload, cluster.num_chips, sizes, float(workload.microbatch))
    if workload.num_at_once % int(mesh.dp * mesh.microbatch) and workload.kind == "sampling":
        raise WorkloadError(
            f"steps follow each other, and the {workload.num_at_once} sequences of one do not divide by "
            f"dp={int(mesh.dp)} x microbatch={workload.microbatch}; use cp, or a larger batch"
        )
    for rule in rules(model, mesh, sizes, cluster):
        if rule.is_broken:
            names = {item.name: getattr(mesh, item.name) for item in fields(mesh)}
            names |= {"cp": mesh.cp, "needs": NEEDS[int(mesh.schedule)], "model": model, "chip": cluster.chip}
            raise rule.error(rule.sentence(names))
    return mesh


def rules(model: Model, mesh: Mesh, sizes: dict[str, Num], cluster: Cluster) -> Iterator[Rule]:
    """Every rule that the plans of `mesh` must keep, in the order in which a person is told.

    `sizes`: the numbers as the plan states them. Rules of layouts of several dimensions are `check_layout`'s.
    """
    yield from _kind_rules(model, mesh, sizes)
    yield from number_rules(mesh.plan, sizes)
    yield from _world_rules(mesh, sizes)
    if mesh.plan.layout == "1d":
        yield from _model_rules(model, mesh)
    else:
        yield Rule(
            (sizes["cp"] > 1) | (sizes["ulysses"] > 1),
            "layout={plan.layout} cuts the sequence itself; leave cp and ulysses out",
        )
    yield from _expert_rules(model, mesh, sizes)
    group, all_ranks = sizes["zero_group"] + (sizes["zero_group"] == 0) * 1.0, mesh.dp * sizes["cp"]
    yield from _divide(("zero_group={zero_group}", group, "ranks of dp x cp", all_ranks))
    yield from _offload_rules(mesh)
    if mesh.plan.implementation == "fsdp2":
        yield from _fsdp2_rules(model, mesh, sizes)
    elif mesh.plan.implementation == "huggingface":
        yield from _huggingface_rules(model, mesh)
    yield Rule(
        valid(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp) == 0,
        "{schedule} cannot run pp={pp}, vpp={vpp} and {num_microbatches} microbatches; it needs {needs}",
    )
    yield from _stage_rules(model, mesh)
    yield Rule(
        (mesh.offload_optimizer + mesh.offload_activations > 0) & (cluster.chip.host_bytes_per_s == 0),
        "{chip.name} has no host_bytes_per_s, which offloading needs; add it to a cluster file",
    )


def _world_rules(mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    tp, cp, pp, dp = (sizes[axis] for axis in ("tp", "cp", "pp", "dp"))
    stated = {"tp": tp, "cp": cp, "stated": dp}
    yield Rule(
        mesh.world % (tp * cp * pp) != 0,
        "{world} ranks do not divide by tp={tp} x cp={cp} x pp={pp}; use a multiple of {least}",
        values=stated | {"least": tp * cp * pp},
    )
    yield Rule(
        (dp != 0) & (dp != mesh.dp),
        "dp={stated} contradicts {world} ranks / (tp={tp} x cp={cp} x pp={pp}) = {dp}; leave dp out",
        values=stated,
    )
    yield Rule(
        mesh.batch % mesh.microbatch != 0,
        "batch {batch} does not divide by microbatch {microbatch}; use a divisor of {batch}",
        WorkloadError,
    )
    yield Rule(
        mesh.batch % (mesh.dp * mesh.microbatch) != 0,
        "batch {batch} does not divide by dp={dp} x microbatch={microbatch}; use a multiple of {least}",
        WorkloadError,
        {"least": mesh.dp * mesh.microbatch},
    )


def _kind_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    unknown: tuple[str, ...] = WEIGHT_KEYS if mesh.trains else (*TRAINING_KEYS, *WEIGHT_KEYS)
    if mesh.serves:
        known = ENGINE_KEYS + (PROMPT_KEYS if mesh.kind == "prefill" else ())
        unknown = tuple(key for key in KEYS if key not in known)
    for key in unknown:
        default, value = DEFAULTS[key], getattr(mesh.plan, key)
        yield Rule(
            sizes[key] != number_of(key, default) if key in sizes else value != default,
            "{key}={value} means nothing to kind={kind}; leave it out",
            values={"key": key, "value": KEYS[key].show(value) if value != default else ""},
        )
    if model.encoder is not None:
        yield from _encoder_rules(mesh)
    if any(layer.shares for layer in model.layers):
        yield Rule(
            mesh.pp > 1, "blocks of {model.name} share weights, which a pipeline would divide; leave pp out"
        )
    yield from _tower_rules(model, mesh)
    yield from _diffusion_rules(model, mesh)
    yield Rule(
        mesh.serves & (not model.vocab or not model.causal),
        "{model.name} does not generate text; name a decoder for kind={kind}",
        WorkloadError,
    )
    if mesh.serves and model.moe is not None:
        spread = mesh.ep * mesh.etp
        yield Rule(
            spread % mesh.tp != 0,
            "ep={ep} x etp={etp} must be a multiple of tp={tp}: experts are spread as wide as attention",
        )
        yield Rule(
            (spread > mesh.tp) & (mesh.etp > 1) & (mesh.ep > 1),
            "experts on several dp ranks are spread or cut, not both: use ep=1, or etp=1 with ep={spread}",
            values={"spread": spread},
        )
    yield Rule(
        (model.positions == "learned") & (mesh.seq > model.max_seq),
        "seq={seq} exceeds the {model.max_seq} learned positions of {model.name}",
        WorkloadError,
    )


def _encoder_rules(mesh: Mesh) -> Iterator[Rule]:
    """The decoder reads what the encoder gives in every block: where that lies is stated for whole models."""
    for what, stated in (
        ("a pipeline", mesh.pp > 1),
        ("context parallelism", mesh.cp > 1),
        (f"implementation={mesh.plan.implementation}", mesh.plan.implementation == "huggingface"),
    ):
        yield Rule(
            stated,
            f"{{model.name}} is an encoder and a decoder, which are not priced under {what}; leave it out",
        )


def _diffusion_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """A sampling is of a diffusion transformer, whose sequence has one length."""
    own, plan = model.diffusion, mesh.plan
    yield Rule(
        (mesh.kind == "sampling") & (own is None),
        "kind=sampling is of diffusion transformers, and {model.name} is none; use kind=decode",
        WorkloadError,
    )
    if own is None:
        return
    yield Rule(
        mesh.seq != model.max_seq,
        "an image of {model.name} has {model.max_seq} tokens, not {seq}; state frames and image_size instead",
        WorkloadError,
    )
    for what, stated in (
        (f"layout={plan.layout}", plan.layout != "1d"),
        (f"implementation={plan.implementation}", plan.implementation != "megatron"),
    ):
        yield Rule(stated, f"diffusion transformers are not priced under {what}; leave it out")


def _tower_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """What a plan says of encoders of images and sound needs some, and they their own sizes."""
    towers, plan = [tower for tower in model.towers if tower.num_tokens], mesh.plan
    for key in ("tower", "tower_dp", "tower_recompute"):
        yield Rule(
            not towers and getattr(plan, key) != DEFAULTS[key],
            f"{key}={{value}} is of encoders of images and sound; state images or audio_s, or leave it out",
            values={"value": getattr(plan, key)},
        )
    if not towers:
        return
    num_tokens = in_sequence(model)
    yield Rule(
        num_tokens > mesh.seq,
        "images and sound are {num_tokens} tokens, more than the {seq} of a sequence; state a longer seq",
        WorkloadError,
        {"num_tokens": num_tokens},
    )
    for tower in towers:
        heads = tower.encoder.num_heads
        yield Rule(
            (heads % mesh.tp != 0) & (not plan.tower_dp),
            "tp={tp} does not divide the {heads} heads of the {name} tower; use a divisor, or tower_dp=1",
            values={"heads": heads, "name": tower.name},
        )
        if plan.implementation == "huggingface":
            yield from _huggingface_rules(tower.encoder, mesh)
    for what, stated in (
        (f"layout={plan.layout}", plan.layout != "1d"),
        ("a pipeline of implementation=fsdp2", (plan.implementation == "fsdp2") & (mesh.pp > 1)),
        ("offload_activations", mesh.offload_activations > 0),
    ):
        yield Rule(stated, f"encoders of images and sound are not priced under {what}; leave it out")


def _divide(*rows: tuple[str, Num, str, Num]) -> Iterator[Rule]:
    """A rule for each divisor (what states it, its number) and for what it must divide (name and size)."""
    for stated, divisor, what, size in rows:
        sentence = f"{stated} does not divide the {{size}} {what}; use a divisor"
        yield Rule(size % divisor != 0, sentence, values={"size": size})


def _model_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    tp, kv_heads, chunks, plan = mesh.tp, model.num_kv_heads, mesh.plan.loss_chunks, mesh.plan
    yield from _divide(
        ("tp={tp}", tp, "heads of {model.name}", model.num_heads),
        ("tp={tp}", tp, "numbers of a token in {model.name}", model.hidden),
        ("tp={tp}", tp, "inside the MLP of {model.name}", model.ffn_hidden if model.vocab else 0),
    )
    kv_rule = "tp={tp} is no divisor or multiple of the {model.num_kv_heads} key-value heads of {model.name}"
    yield Rule((kv_heads % tp != 0) & (tp % kv_heads != 0), kv_rule)
    for key, is_stated in (("loss_chunks", chunks > 1), ("loss_fusion", plan.loss_fusion is not None)):
        yield Rule(
            is_stated and not (model.vocab and model.lm_head),
            f"{key}={{plan.{key}}} needs a language-model head, which {{model.name}} lacks; leave it out",
        )
    yield from _divide(
        ("ulysses={ulysses}", mesh.ulysses, "ranks of cp", mesh.cp),
        ("tp={tp} x ulysses={ulysses}", tp * mesh.ulysses, "heads of {model.name}", model.num_heads),
        ("cp={cp}", mesh.cp, "tokens of the sequence", mesh.seq),
        ("loss_chunks={plan.loss_chunks}", chunks, "tokens of a sequence on each rank", mesh.seq // mesh.cp),
    )
    yield Rule(
        (plan.attention == "unfused") & (mesh.ring > 1),  # Megatron-LM and PyTorch refuse it
        "attention=unfused reads all keys at once; use attention=flash, or cp_kind=ulysses with cp={cp}",
    )


def _expert_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    ep, etp, moe = mesh.ep, mesh.etp, model.moe
    if moe is None:
        stated: dict[str, Any] = {
            "ep": ep > 1,
            "etp": sizes["etp"] > 0,
            "imbalance": sizes["imbalance"] > 1,
            "dispatch": sizes["dispatch"] > 0,
            "dispatch_dtype": mesh.plan.dispatch_dtype != DEFAULTS["dispatch_dtype"],
            "overlap_ep": mesh.plan.overlap_ep,
            "expert_dtype": mesh.plan.expert_dtype is not None,
        }
        for key, is_stated in stated.items():
            yield Rule(is_stated, f"{key} is stated but {{model.name}} has no experts; leave {key} out")
        return
    yield Rule(
        mesh.trains & (mesh.plan.sp is False) & (mesh.tp > 1),
        "ranks route tokens of their own: {model.name} with tp={tp} needs sequence parallelism; leave sp out",
    )
    ranks = "ranks of a pipeline stage (tp={tp} x cp={cp} x dp={dp})"
    held = "experts of {model.name}" + ", copies among them" * (moe.copies > 0)
    yield from _divide(
        ("ep={ep}", ep, held, moe.held),
        ("etp={etp}", etp, "inside each expert of {model.name}", moe.ffn_hidden),
        ("ep={ep} x etp={etp}", etp * ep, ranks, mesh.tp * mesh.cp * mesh.dp),
    )


def _huggingface_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Blocks of which the library `transformers` keeps other tensors than `program.implementation` states."""
    is_flash, activation = mesh.plan.attention == "flash", model.activation
    of_layernorm = model.norm == "layernorm" and model.norm_weight
    for what, is_there in (
        ("parallel blocks", model.parallel_block),
        ("scores of distances", model.distances is not None),
        ("per-layer embeddings", model.per_layer is not None),
        ("several residual streams", model.streams is not None),
        ("small layers beside the large ones", any(layer.sides for layer in model.layers)),
        ("compressed queries and results", model.low_rank is not None),
        ("shared keys", any(layer.keys for layer in model.layers)),
        (f"blocks of {model.num_norms} norms", model.num_norms != 2),
        ("norms over all queries and all keys", model.qk_norm_full),
        (f"the activation {activation}", activation not in ("swiglu", "gelu", "relu")),
        ("GELU beside learned positions", activation == "gelu" and model.positions == "learned"),
        ("SwiGLU behind LayerNorm under fused attention", of_layernorm and model.gated and is_flash),
        (f"layout={mesh.plan.layout}", mesh.plan.layout != "1d"),
    ):
        yield Rule(
            is_there,
            f"implementation=huggingface: what transformers keeps of {what} is not known; use another",
        )


def _fsdp2_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    """What PyTorch's own parts cannot do, or `meshwise train` does not do with them."""
    yield Rule(not mesh.trains, "implementation=fsdp2 trains; leave it out for kind={kind}")
    for key, built in FSDP2_VALUES.items():
        yield _only(mesh, sizes, key, built)
    yield from _fsdp2_recomputation(model, mesh, sizes)
    yield from _fsdp2_sizes(model, mesh)
    yield from _fsdp2_pipeline(model, mesh)


def _only(mesh: Mesh, sizes: dict[str, Num], key: str, built: tuple[Any, ...]) -> Rule:
    """That `key` has one of the values that are `built`."""
    value = getattr(mesh.plan, key)
    broken: Any = value is not None and value not in built
    if key in sizes:
        broken = np.all([sizes[key] != number_of(key, known) for known in built], axis=0)
    known = " or ".join(f"{key}={KEYS[key].show(known)}" for known in built)
    return Rule(
        broken,
        "implementation=fsdp2 is not built for {key}={value}; {hint}",
        values={
            "key": key,
            "value": "" if value is None else KEYS[key].show(value),
            "hint": f"use {known}",
        },
    )


def _fsdp2_recomputation(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    """Rules of what the backward computes again, and of the other choices that this meets."""
    plan = mesh.plan
    recomputes = mesh.recompute != RECOMPUTE.index("none")
    yield Rule(
        recomputes & splits_backward(mesh),
        "implementation=fsdp2 does not recompute where schedule={schedule} halves a backward",
    )
    yield Rule(
        recomputes & (mesh.offload_activations > 0),
        "implementation=fsdp2: leave one of offload_activations and recompute out",
    )
    layers = sizes["recompute_layers"]
    shortest = min(plan.stages) if plan.stages else model.num_layers // (mesh.pp * mesh.vpp)
    a_chunk = np.where(np.isfinite(layers), layers, 0.0) / mesh.vpp
    is_like = (a_chunk == np.floor(a_chunk)) & (a_chunk <= shortest) & (len(layer_kinds(model)) == 1)
    yield Rule(
        np.isfinite(layers) & ~is_like,
        "implementation=fsdp2 recomputes the first layers of each chunk, all alike: recompute_layers must be "
        "a multiple of vpp={vpp}, at most {shortest} for each chunk, not {recompute_layers}",
        values={"shortest": shortest},
    )


def _fsdp2_sizes(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Rules of what is cut, without copies or padding, and into what."""
    experts, parts = mesh.expert_replicas, mesh.tp * mesh.cp * (1.0 + (mesh.ring > 1))
    most = np.minimum(mesh.ep, model.moe.num_experts / model.moe.top_k) if model.moe else np.inf
    yield Rule(
        mesh.imbalance > np.maximum(most, 1.0),
        "imbalance={plan.imbalance!s} is more than the {most!s} that ep={ep} and the experts allow; use less",
        values={"most": most},
    )
    groups = mesh.shard_ranks(experts) if model.moe else 1.0
    yield from _divide(
        ("zero_group={zero_group}", groups, "ranks that hold the same experts", experts),
        ("implementation=fsdp2 does not copy: tp={tp}", mesh.tp, "key-value heads", model.num_kv_heads),
        ("implementation=fsdp2 does not pad: tp={tp}", mesh.tp, "tokens of the vocabulary", model.vocab),
    )
    yield Rule((mesh.vpp > 1) & (mesh.pp == 1), "vpp={vpp} needs a pipeline; use pp=2 or more, or no vpp")
    yield Rule(
        mesh.seq % parts != 0,
        "seq={seq} does not divide by {parts}, tp x cp (two for each rank of a ring) of implementation=fsdp2",
        WorkloadError,
        {"parts": parts},
    )


def _fsdp2_pipeline(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Rules of torch.distributed.pipelining."""
    rounds, is_piped = np.maximum(1, mesh.num_microbatches // mesh.pp), mesh.pp > 1
    yield Rule(
        is_piped & (mesh.zero == 2),
        "implementation=fsdp2 under pp={pp} reduces gradients once a step: use zero=1, zero=3 or pp=1",
    )
    yield Rule(
        is_piped & np.isin(mesh.schedule, _IN_ROUNDS) & (mesh.num_microbatches % rounds != 0),
        "{schedule} has {rounds} rounds of pp={pp}, which do not divide {num_microbatches} microbatches",
        values={"rounds": rounds},
    )
    yield Rule(
        (model.mtp_layers > 1) & splits_backward(mesh),
        "implementation=fsdp2 cannot halve a backward where multi-token prediction shares a table; use 1f1b",
    )
    yield Rule(
        is_piped & (mesh.schedule == SCHEDULES.index("1f1b")) & (mesh.num_microbatches < mesh.pp),
        "implementation=fsdp2 under 1f1b needs at least pp={pp} microbatches, not {num_microbatches}",
    )


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
    is_part = (share > 0) & (share < 1) & (plan.optimizer == "adam-8bit")
    of_muon = "optimizer=muon needs whole matrices on the device; leave offload_optimizer out"
    yield Rule((plan.optimizer == "muon") & (share > 0), of_muon)
    yield Rule(
        is_part, "optimizer=adam-8bit keeps scales of many states together; use offload_optimizer=1 or 0"
    )
    yield Rule(
        plan.optimizer_in_bwd & (mesh.num_microbatches > 1),
        "optimizer_in_bwd=1 sums no gradients: a step has one microbatch, not {num_microbatches}",
    )
    yield Rule(
        per_op & (plan.lora_rank > 0),
        "recompute_modules=per_op counts matmuls of weights that train; leave lora_rank={plan.lora_rank} out",
    )
    of_ops = "recompute_modules=per_op keeps results of ops on the device; leave offload_activations out"
    yield Rule(is_away & per_op, of_ops)
    of_blocks = "schedule={schedule} goes with recompute=full or none beside offload_activations"
    yield Rule(is_away & splits_backward(mesh) & selective, of_blocks)


def _stage_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    layers, stages, num_chunks = model.num_layers, mesh.plan.stages, mesh.pp * mesh.vpp
    yield Rule(
        num_chunks > layers + 2,  # the first and the last may hold an end of the model alone
        "{model.num_layers} layers of {model.name} cannot fill {chunks} pipeline stages (pp x vpp)",
        values={"chunks": num_chunks},
    )
    if not stages:
        is_even = stages is not None or mesh.serves or mesh.plan.implementation == "fsdp2"
        fewer = 2.0 if is_even else 2.0 * np.ceil(layers / num_chunks)
        yield Rule(
            mesh.is_interleaved & (-layers % num_chunks > fewer),
            "{model.num_layers} layers of {model.name} do not divide by {chunks} chunks (pp x vpp), of which "
            "an interleaved schedule may shorten the first and the last; change pp or vpp, or list stages",
            values={"chunks": num_chunks},
        )
    else:
        yield Rule(
            sum(stages) != layers,
            f"stages add up to {sum(stages)} layers but {{model.name}} has {layers}; list all its layers",
        )
