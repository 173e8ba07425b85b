"""Towers on the stage of the embedding: their parts, priced, and what they add to what that stage costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from meshwise.estimate.memory import Memory
from meshwise.estimate.priced_cuts import priced_parts
from meshwise.estimate.priced_part import Part
from meshwise.estimate.stage_cost import StageCost, StageTime, stage_cost, stage_time
from meshwise.estimate.timing import Machine
from meshwise.estimate.tower import tower_mesh, tower_stage
from meshwise.model.architecture import Model, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage
from meshwise.program.block import shared_gradients
from meshwise.program.cut import Cut
from meshwise.program.parts import cut_of


@dataclass(frozen=True, slots=True, eq=False)
class TowerParts:
    """A tower beside the model: how often it runs, on its own mesh, and its parts, priced."""

    name: str
    encoder: Model
    mesh: Mesh
    cut: Cut
    parts: dict[str, Part]


def tower_parts(model: Model, mesh: Mesh, machine: Machine) -> Iterator[TowerParts]:
    """The towers whose tokens the model reads; a pass that decodes has none of their work."""
    for tower in model.towers:
        if tower.num_tokens and mesh.kind != "decode":
            own = tower_mesh(tower, mesh)
            priced = priced_parts(tower.encoder, own, machine).spread()
            yield TowerParts(tower.name, tower.encoder, own, cut_of(own), priced)


def tower_time(tower: TowerParts, stage: Stage, machine: Machine) -> StageTime:
    """One microbatch of a tower on a stage of the language model."""
    of_stage, by_part = tower_stage(tower.encoder, stage), list(tower.parts.values())
    return stage_time(tower.encoder, of_stage, by_part, tower.mesh, tower.cut, machine)


ADDED = "comm_dp_s", "exposed_s", "filling_s", "optimizer_s", "gradient_bytes", "kept_bytes"


def with_tower(own: StageCost, tower: TowerParts, machine: Machine) -> StageCost:
    """A stage and the tower on it: all adds up but workspace, which one uses after the other."""
    encoder, mesh, cut = tower.encoder, tower.mesh, tower.cut
    shared = shared_gradients(encoder, cut, layer_kinds(encoder)[0]) if mesh.trains else []
    stage, by_part = tower_stage(encoder, own.stage), list(tower.parts.values())
    time = tower_time(tower, own.stage, machine)
    cost = stage_cost(encoder, stage, by_part, shared, mesh, cut, machine, time)
    is_there = own.stage.embeddings > 0
    memory = {
        name: getattr(own.memory, name) + is_there * getattr(cost.memory, name)
        for name in ("weights", "gradients", "optimizer", "activations", "cache")
    }
    context = machine.overheads.context_bytes
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
