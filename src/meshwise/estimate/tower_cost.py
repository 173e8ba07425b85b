"""Towers on the stage of the embedding: their parts, priced, and what they add to what that stage costs."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from meshwise.estimate.memory import Memory
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.stage_cost import StageCost, StageTime, stage_cost, stage_time
from meshwise.estimate.tower import tower_mesh, tower_stage
from meshwise.model.architecture import layer_kinds
from meshwise.plan.stages import Stage
from meshwise.program.block import shared_gradients


def towers_of(of: PricedModel) -> list[PricedModel]:
    """The towers whose tokens the model reads, each on a mesh of its own; a pass that decodes has none of
    their work."""
    return [
        priced_model(tower.encoder, tower_mesh(tower, of.mesh), of.machine, tower.name)
        for tower in of.model.towers
        if tower.num_tokens and of.mesh.kind != "decode"
    ]


def tower_time(tower: PricedModel, stage: Stage) -> StageTime:
    """One microbatch of a tower on a stage of the language model."""
    return stage_time(tower, tower_stage(tower.model, stage))


ADDED = "comm_dp_s", "exposed_s", "filling_s", "optimizer_s", "gradient_bytes", "kept_bytes"


def with_tower(own: StageCost, tower: PricedModel) -> StageCost:
    """A stage and the tower on it: all adds up but workspace, which one uses after the other."""
    encoder, stage = tower.model, tower_stage(tower.model, own.stage)
    shared = shared_gradients(encoder, tower.cut, layer_kinds(encoder)[0]) if tower.mesh.trains else []
    cost = stage_cost(tower, stage, shared, stage_time(tower, stage))
    is_there = own.stage.embeddings > 0
    memory = {
        name: getattr(own.memory, name) + is_there * getattr(cost.memory, name)
        for name in ("weights", "gradients", "optimizer", "activations", "cache")
    }
    context = tower.machine.overheads.context_bytes
    return replace(
        own,
        time=added_times(own.time, cost.time),
        memory=Memory(
            **memory,
            buffers=np.maximum(own.memory.buffers, is_there * cost.memory.buffers),
            overhead=own.memory.overhead + is_there * (cost.memory.overhead - context),
        ),
        exchanged=[*own.exchanged, *((one, is_there * seconds) for one, seconds in cost.exchanged)],
        towers=(*own.towers, stage),
        **{name: getattr(own, name) + is_there * getattr(cost, name) for name in ADDED},
    )


def added_times(one: StageTime, other: StageTime) -> StageTime:
    """Two parts of a stage, one after the other."""
    names = [each.name for each in fields(StageTime)]
    return StageTime(**{name: getattr(one, name) + getattr(other, name) for name in names})
