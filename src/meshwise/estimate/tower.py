"""A tower beside a language model: the mesh that it runs on, what stages hold of it and pay for it.

An encoder of images or sound is a model of its own, priced like any other: its blocks, what they keep,
weights, gradients and optimizer states follow from its ops. It lies where the embedding of the language model
lies, on the first stage of the pipeline, and does its part of a microbatch before the blocks there. It is cut
by tp like these, or (`tower_dp`) each of these ranks has all of it and encodes whole inputs of its own; ranks
of cp always do. A frozen tower has only a forward, for which ZeRO shards and gathers its weights too.
A pass that decodes keeps the weights of towers and runs none. What joins a tower to the language model
belongs to the embedding of that and trains with it.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.estimate.memory import Memory, serving_memory
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.stage_cost import StageCost, StageTime, stage_cost, stage_time
from meshwise.model.architecture import Model, Tower, layer_counts, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, PLAN_LISTS, RECOMPUTE
from meshwise.plan.stages import Stage

FRONT = Stage(index=0.0, num_stages=1.0, embeddings=1.0, heads=0.0, layers=())
"""The stage of the embedding, where towers lie too."""


def is_frozen(mesh: Mesh) -> bool:
    """Whether the towers do not train, as under LoRA."""
    return mesh.plan.tower == "frozen" or mesh.plan.lora_rank > 0


def tower_mesh(tower: Tower, mesh: Mesh) -> Mesh:
    """The mesh of a tower: its inputs are the sequences; the busiest rank sets the pace."""
    plan, trains = mesh.plan, mesh.trains and not is_frozen(mesh)
    shared: Num = mesh.tp if plan.tower_dp else 1.0
    copies, tp = mesh.cp * shared, mesh.tp / shared
    recompute = plan.tower_recompute
    return replace(
        mesh,
        plan=replace(plan, **_PLAIN),
        seq=float(num_positions(tower.encoder)),
        microbatch=np.ceil(mesh.microbatch * tower.num_inputs / copies),
        kind="prefill" if mesh.serves else "train" if trains else "evaluate",
        zero_group=mesh.zero_group * shared,
        recompute=float(RECOMPUTE.index(recompute)) if recompute else mesh.recompute,
        recompute_layers=np.inf,
        tp=tp,
        etp=tp,
        dp=mesh.dp * copies,
        cp_kind=0.0,
        ulysses=1.0,
        ring=1.0,
        ep=1.0,
        dispatch=0.0,
    )


_PLAIN: dict[str, Any] = {key: DEFAULTS[key] for key in PLAN_LISTS["not_of_towers"]}
"""Keys of the plan of a language model that do not reach its towers."""


def num_positions(encoder: Model) -> int:
    """Tokens of one input of a tower."""
    if encoder.frames is not None:
        return encoder.frames.number
    assert encoder.patches is not None
    return encoder.patches.num_tokens


def tower_stage(encoder: Model, stage: Stage) -> Stage:
    """What a stage holds of a tower: all of it where the embedding is."""
    counts = layer_counts(encoder)
    layers = tuple(counts[kind] * stage.embeddings for kind in layer_kinds(encoder))
    return replace(stage, layers=layers, heads=stage.embeddings)


def towers_of(of: PricedModel) -> list[PricedModel]:
    """The towers whose tokens the model reads, each on a mesh of its own."""
    return [
        priced_model(tower.encoder, tower_mesh(tower, of.mesh), of.machine, tower.name)
        for tower in of.model.towers
        if tower.num_tokens
    ]


def tower_time(tower: PricedModel, stage: Stage) -> StageTime:
    """One microbatch of a tower on a stage of the language model."""
    return stage_time(tower, tower_stage(tower.model, stage))


def with_weights(own: StageCost, tower: PricedModel) -> StageCost:
    """A stage and the weights of a tower that does not run."""
    held = serving_memory(tower, tower_stage(tower.model, own.stage)).weights
    return replace(own, memory=replace(own.memory, weights=own.memory.weights + held))


ADDED = "comm_dp_s", "exposed_s", "filling_s", "optimizer_s", "gradient_bytes", "kept_bytes"


def with_tower(own: StageCost, tower: PricedModel) -> StageCost:
    """A stage and the tower on it: all adds up but workspace, which one uses after the other."""
    stage = tower_stage(tower.model, own.stage)
    cost = stage_cost(tower, stage, stage_time(tower, stage))
    is_there = own.stage.embeddings > 0
    memory = {
        name: getattr(own.memory, name) + is_there * getattr(cost.memory, name)
        for name in ("weights", "gradients", "optimizer", "activations", "cache")
    }
    context = tower.machine.overheads.context_bytes
    return replace(
        own,
        time=own.time + cost.time,
        memory=Memory(
            **memory,
            buffers=np.maximum(own.memory.buffers, is_there * cost.memory.buffers),
            overhead=own.memory.overhead + is_there * (cost.memory.overhead - context),
        ),
        exchanged=[*own.exchanged, *((one, is_there * seconds) for one, seconds in cost.exchanged)],
        towers=(*own.towers, stage),
        **{name: getattr(own, name) + is_there * getattr(cost, name) for name in ADDED},
    )
