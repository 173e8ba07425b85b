"""Whether a plan's mesh fits its world, the model and the workload.

`rules` says, in the order in which a person is told, what makes a mesh invalid: of one plan the first is an
error (`resolve`), of a grid each is true where it is broken.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.units import Num
from meshwise.cost.schedule import NEEDS, SCHEDULES, valid
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import software_on
from meshwise.model.architecture import Model, in_sequence, layer_kinds, num_dense_layers
from meshwise.model.weights import block_weights
from meshwise.plan import plan as keys
from meshwise.plan.layouts import layout_rules, parts_beyond
from meshwise.plan.mesh import Mesh, mesh_of
from meshwise.plan.plan import KEYS, RECOMPUTE, WEIGHT_KEYS, Plan, Rule, number_of, refuse, rules_of
from meshwise.plan.workload import Workload

_IN_ROUNDS = tuple(map(SCHEDULES.index, ("interleaved", "zb-h1")))
_SELECTIVE = RECOMPUTE.index("selective")
_SPLIT = tuple(map(SCHEDULES.index, ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")))


def resolve(model: Model, plan: Plan, workload: Workload, cluster: Cluster, **free: Num) -> Mesh:
    """The mesh of one plan on all ranks of `cluster`.

    `free`: numbers that the plan may have others of, as axes of a grid: what one of them mends is no error,
    and what none mends is told of the degrees that leave the fewest data-parallel ranks.

    Raises:
        PlanError: The degrees do not divide the world, the model, or each other.
        WorkloadError: The batch does not divide into microbatches of the data-parallel ranks.
    """
    sizes = keys.numbers_of(plan)
    if plan.layout != "1d":
        refuse(layout_rules(model, plan, workload.seq), {"plan": plan})
    every = sizes | free
    sizes |= _fewest_replicas(cluster.num_chips, free)
    mesh = mesh_of(plan, workload, cluster.num_chips, sizes)
    if workload.num_at_once % int(mesh.dp * mesh.microbatch) and workload.kind == "sampling":
        raise WorkloadError(
            f"steps follow each other, and the {workload.num_at_once} sequences of one do not divide by "
            f"dp={int(mesh.dp)} x microbatch={workload.microbatch}; use cp, or a larger batch"
        )
    names = {item.name: getattr(mesh, item.name) for item in fields(mesh)}
    names |= {"cp": mesh.cp, "needs": NEEDS[int(mesh.schedule)], "model": model, "chip": cluster.chip}
    found = rules(model, mesh, sizes, cluster)
    if free:
        of_grid = rules(model, mesh_of(plan, workload, cluster.num_chips, every), every, cluster)
        found = (one for one, of_all in zip(found, of_grid, strict=True) if np.all(of_all.is_broken))
    refuse(found, names)
    return mesh


def _fewest_replicas(world: int, free: dict[str, Num]) -> dict[str, float]:
    """The largest tp x cp x pp of a grid that divides the world; empty where none does."""
    axes = [np.ravel(free[key]) for key in ("tp", "cp", "pp") if free]
    dividing = [degrees for degrees in itertools.product(*axes) if not world % math.prod(degrees)]
    return dict(zip(("tp", "cp", "pp"), max(dividing, key=math.prod, default=()), strict=False))


def rules(model: Model, mesh: Mesh, sizes: dict[str, Num], cluster: Cluster) -> Iterator[Rule]:
    """Every rule that the plans of `mesh` must keep, in the order in which a person is told.

    `sizes`: the numbers as the plan states them. Those of layouts of several dimensions: `layout_rules`.
    """
    yield from _kind_rules(model, mesh, sizes)
    yield from keys.number_rules(mesh.plan, sizes)
    plan, names = mesh.plan, {"mesh": mesh, "plan": mesh.plan, "model": model}
    if plan.layout == "1d":
        is_headless, tokens = not (model.vocab and model.lm_head), mesh.seq // mesh.cp
        yield from rules_of("blocks", **names, is_headless=is_headless, tokens=tokens)
    else:
        yield from rules_of("layout of a mesh", plan=plan, sizes=sizes)
    yield from keys.world_rules(mesh.world, sizes)
    of_batch = {"batch": mesh.batch, "microbatch": mesh.microbatch, "least": mesh.dp * mesh.microbatch}
    yield from rules_of("batch of a plan", WorkloadError, **of_batch)
    if model.moe is None:
        yield from rules_of("no experts", **names, sizes=sizes)
    else:
        of = {"ranks": mesh.tp * mesh.cp * mesh.dp, "copies": model.moe.copies + -model.moe.held % mesh.ep}
        yield from rules_of("experts", **names, **of, moe=model.moe, num_dense=num_dense_layers(model))
    lora = plan.lora_rank, plan.lora_targets
    of_kinds = (weight for kind in layer_kinds(model) for weight in block_weights(model, kind, *lora))
    yield from rules_of("adapters", **names, adapts=any(weight.is_adapter for weight in of_kinds))
    names |= {"splits": splits_backward(mesh), "selective": _SELECTIVE, "size": mesh.dp * sizes["cp"]}
    names["group"] = sizes["zero_group"] + (sizes["zero_group"] == 0) * 1.0
    yield from rules_of("offloading", **names, per_op="per_op" in plan.recompute_modules)
    if plan.done_by.parts == "torch":
        yield from _fsdp2_rules(model, mesh, sizes)
    elif plan.done_by.parts == "transformers":
        yield from _huggingface_rules(model, mesh)
    yield from _stage_rules(model, mesh)
    yield from rules_of("links of a chip", mesh=mesh, chip=cluster.chip)
    if not mesh.serves:
        own = software_on(cluster.chip)
        yield from rules_of("software of a chip", software=plan.software, own=own, chip=cluster.chip)


def _kind_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    unknown: tuple[str, ...] = WEIGHT_KEYS if mesh.trains else (*keys.TRAINING_KEYS, *WEIGHT_KEYS)
    if mesh.serves:
        known = keys.ENGINE_KEYS + (keys.PROMPT_KEYS if mesh.kind == "prefill" else ())
        unknown = tuple(key for key in KEYS if key not in known)
    for key in (key for key in unknown if (mesh.kind, key) != ("sampling", "weight_dtype")):
        default, value = keys.DEFAULTS[key], getattr(mesh.plan, key)
        is_stated = sizes[key] != number_of(key, default) if key in sizes else value != default
        shown = KEYS[key].show(value) if value != default else ""
        yield from rules_of("key without meaning", is_stated=is_stated, key=key, value=shown, mesh=mesh)
    if model.encoder is not None:
        yield from rules_of("encoder", model=model, mesh=mesh, plan=mesh.plan)
    if any(layer.shares for layer in model.layers):
        yield from rules_of("shared blocks", model=model, mesh=mesh)
    yield from _tower_rules(model, mesh)
    if model.diffusion is not None:
        yield from rules_of("diffusion", model=model, mesh=mesh, plan=mesh.plan)
    yield from rules_of("work of a model", WorkloadError, model=model, mesh=mesh)
    if mesh.serves and model.moe is not None:
        yield from rules_of("served experts", mesh=mesh, spread=mesh.ep * mesh.etp)
    yield from rules_of("learned positions", WorkloadError, model=model, mesh=mesh)


def _tower_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """What a plan says of encoders of images and sound needs some, and they their own sizes."""
    towers, plan = [tower for tower in model.towers if tower.num_tokens], mesh.plan
    if not towers:
        yield from rules_of("no towers", plan=plan)
        return
    yield from rules_of("tower tokens", WorkloadError, num_tokens=in_sequence(model), seq=mesh.seq)
    for tower in towers:
        yield from rules_of("tower", tower=tower, mesh=mesh, plan=plan)
        if plan.done_by.parts == "transformers":
            yield from _huggingface_rules(tower.encoder, mesh)
    yield from rules_of("towers", mesh=mesh, plan=plan)


def _huggingface_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """Blocks of which the library `transformers` keeps other tensors than `program.implementation` states."""
    for is_there, what in parts_beyond("transformers", model, plan=mesh.plan):
        yield from rules_of("part of huggingface", is_there=is_there, what=what)


def _fsdp2_rules(model: Model, mesh: Mesh, sizes: dict[str, Num]) -> Iterator[Rule]:
    """What PyTorch's own parts cannot do, or `meshwise train` does not do with them."""
    yield from rules_of("fsdp2 work", mesh=mesh)
    for key, built in keys.FSDP2_VALUES.items():
        yield from _only(mesh, sizes, key, built)
    plan, layers, num = mesh.plan, sizes["recompute_layers"], mesh.num_microbatches
    shortest = min(plan.stages) if plan.stages else model.num_layers // (mesh.pp * mesh.vpp)
    a_chunk = np.where(np.isfinite(layers), layers, 0.0) / mesh.vpp
    is_like = (a_chunk == np.floor(a_chunk)) & (a_chunk <= shortest) & (len(layer_kinds(model)) == 1)
    even = np.minimum(mesh.ep, model.moe.num_experts / model.moe.top_k) if model.moe else np.inf
    names = {"model": model, "mesh": mesh, "splits": splits_backward(mesh), "shortest": shortest}
    yield from rules_of(
        "fsdp2", **names, recomputes=mesh.recompute != RECOMPUTE.index("none"),
        is_uneven=np.isfinite(layers) & ~is_like, most=np.maximum(even, 1.0),
    )  # fmt: skip
    parts = mesh.tp * mesh.cp * (1.0 + (mesh.ring > 1))
    yield from rules_of("fsdp2 sequence", WorkloadError, seq=mesh.seq, parts=parts)
    yield from rules_of(
        "fsdp2 pipeline", **names, rounds=np.maximum(1, num // mesh.pp),
        in_rounds=np.isin(mesh.schedule, _IN_ROUNDS), is_1f1b=mesh.schedule == SCHEDULES.index("1f1b"),
    )  # fmt: skip


def _only(mesh: Mesh, sizes: dict[str, Num], key: str, built: tuple[Any, ...]) -> Iterator[Rule]:
    """That `key` has one of the values that are `built`."""
    value = getattr(mesh.plan, key)
    is_other: Any = value is not None and value not in built
    if key in sizes:
        is_other = np.all([sizes[key] != number_of(key, known) for known in built], axis=0)
    known = " or ".join(f"{key}={KEYS[key].show(known)}" for known in built)
    shown = "" if value is None else KEYS[key].show(value)
    return rules_of("fsdp2 value", is_other=is_other, key=key, value=shown, known=known)


def splits_backward(mesh: Mesh) -> Any:
    """Where a pipeline computes the gradients of inputs and of weights apart."""
    return (mesh.pp > 1) & np.isin(mesh.schedule, _SPLIT)


def _stage_rules(model: Model, mesh: Mesh) -> Iterator[Rule]:
    """The schedule and its chunks, of which the first and the last may hold an end of the model alone."""
    layers, stages, chunks = model.num_layers, mesh.plan.stages, mesh.pp * mesh.vpp
    is_even = stages is not None or mesh.serves or mesh.plan.done_by.deals_evenly
    fewer = 2.0 if is_even else 2.0 * np.ceil(layers / chunks)
    return rules_of(
        "stages", model=model, chunks=chunks, sum=sum(stages or ()), stages=stages,
        is_valid=valid(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp),
        is_uneven=mesh.is_interleaved & (-layers % chunks > fewer),
    )  # fmt: skip
