"""Pipeline stages: which layers each holds, and what one microbatch costs it.

A single plan has its real stages, equal ones counted once. A grid of plans has three kinds: the first
stage (with the embedding), the stages between, and the last (with head and loss); where pp = 1 the
first is also the last, and a V-shaped schedule puts the head on the first rank too. `ranks`
says how many stages are of a kind, zero where there is none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.units import Num
from meshwise.estimate.block_time import BlockTime, Parts
from meshwise.estimate.degrees import Degrees
from meshwise.model.architecture import Model, is_moe_layer, num_moe_layers
from meshwise.plan.plan import RECOMPUTE, SCHEDULES

V_SHAPED = ("zb-v", "dualpipe-v")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """What one pipeline stage holds: `index` along the pipeline, and how many `ranks` hold the like."""

    index: Num
    ranks: Num
    dense_layers: Num
    moe_layers: Num
    embeddings: Num
    heads: Num

    @property
    def layers(self) -> Num:
        """Blocks of this stage, of both kinds."""
        return self.dense_layers + self.moe_layers


def plan_chunks(model: Model, on: Degrees) -> list[Stage]:
    """The chunks of a single plan in the order of the model: pp x vpp of them, each as a `Stage`.

    PlanError where the layers do not divide, or where `stages` does not list them all.
    """
    plan, num_chunks = on.plan, int(on.pp * on.vpp)
    per_chunk = list(plan.stages) if plan.stages else _even(model, num_chunks)
    if sum(per_chunk) != model.num_layers:
        raise PlanError(
            f"stages add up to {sum(per_chunk)} layers but {model.name} has {model.num_layers}; "
            "list all its layers"
        )
    chunks, first = [], 0
    for i, layers in enumerate(per_chunk):
        mine = range(first, first + layers) if model.moe else ()
        moe = float(sum(is_moe_layer(model, layer) for layer in mine))
        ends = {"embeddings": float(i == 0), "heads": float(i == num_chunks - 1)}
        chunks.append(Stage(index=float(i), ranks=1.0, dense_layers=layers - moe, moe_layers=moe, **ends))
        first += layers
    return chunks


def plan_stages(model: Model, on: Degrees) -> list[Stage]:
    """The stages of a single plan, those that hold the same merged; PlanError as `plan_chunks`."""
    num_stages, v_shaped = int(on.pp), on.plan.schedule in V_SHAPED
    held: list[_Held] = [(0.0, 0.0, 0.0, 0.0)] * num_stages
    for i, chunk in enumerate(plan_chunks(model, on)):
        stage = _stage_of(i, num_stages, v_shaped)
        dense, moe, embeddings, heads = held[stage]
        held[stage] = (
            dense + chunk.dense_layers,
            moe + chunk.moe_layers,
            embeddings + chunk.embeddings,
            heads + chunk.heads,
        )
    if on.plan.schedule == "dualpipe":  # half of the microbatches run through the mirrored stage
        held = [_mean_of(one, other) for one, other in zip(held, reversed(held), strict=True)]
    return [
        Stage(
            index=float(held.index(row)),
            ranks=float(count),
            dense_layers=row[0],
            moe_layers=row[1],
            embeddings=row[2],
            heads=row[3],
        )
        for row, count in Counter(held).items()
    ]


_Held = tuple[Num, Num, Num, Num]


def _mean_of(one: _Held, other: _Held) -> _Held:
    dense, moe, embeddings, heads = (0.5 * (a + b) for a, b in zip(one, other, strict=True))
    return dense, moe, embeddings, heads


def _even(model: Model, chunks: int) -> list[int]:
    most, spare = divmod(model.num_layers, chunks)
    if not most:
        raise PlanError(
            f"{model.num_layers} layers of {model.name} cannot fill {chunks} pipeline stages (pp x vpp); "
            "use fewer"
        )
    if spare:
        uneven = "-".join(map(str, [most + 1] * spare + [most] * (chunks - spare)))
        raise PlanError(
            f"{model.num_layers} layers of {model.name} do not divide by {chunks} pipeline stages "
            f"(pp x vpp); change pp or vpp, or list uneven stages: stages={uneven}"
        )
    return [model.num_layers // chunks] * chunks


def _stage_of(chunk: int, num_stages: int, v_shaped: bool) -> int:
    """The rank that holds a chunk: round and round, or, V-shaped, down and back up."""
    if v_shaped and chunk >= num_stages:
        return 2 * num_stages - 1 - chunk
    return chunk % num_stages


def grid_stages(model: Model, on: Degrees) -> list[Stage]:
    """First, middle and last stages over a grid of plans; layers are spread evenly."""
    pp = np.asarray(on.pp, dtype=np.float64)
    layers = model.num_layers / pp
    total_moe = float(num_moe_layers(model))
    first_dense = float(model.moe.first_dense_layers) if model.moe else 0.0
    moe_frac = 1.0 / model.moe.every if model.moe else 0.0
    moe_first = np.maximum(layers - first_dense, 0.0) * moe_frac
    moe_other = (total_moe - moe_first) / np.maximum(pp - 1.0, 1.0)
    alone = pp == 1.0
    # V-shaped schedules bring the model's end back to the rank of its beginning.
    v_shaped = np.isin(np.asarray(on.schedule), [SCHEDULES.index(name) for name in V_SHAPED])
    # DualPipe runs half of the microbatches each way: the ends share embedding, head, and their layers.
    mirrored = (np.asarray(on.schedule) == SCHEDULES.index("dualpipe")) & ~alone
    share = np.where(mirrored, 0.5, 1.0)
    heads_first = np.where(alone | v_shaped, 1.0, np.where(mirrored, 0.5, 0.0))
    moe_last = np.where(mirrored, 0.5 * (moe_first + moe_other), moe_other)
    moe_first = np.where(mirrored, moe_last, moe_first)
    return [
        Stage(
            index=0.0,
            ranks=1.0,
            dense_layers=layers - moe_first,
            moe_layers=moe_first,
            embeddings=share,
            heads=heads_first,
        ),
        Stage(
            index=1.0,
            ranks=np.maximum(pp - 2.0, 0.0),
            dense_layers=layers - moe_other,
            moe_layers=moe_other,
            embeddings=0.0,
            heads=0.0,
        ),
        Stage(
            index=pp - 1.0,
            ranks=np.where(alone, 0.0, 1.0),
            dense_layers=layers - moe_last,
            moe_layers=moe_last,
            embeddings=1.0 - share,
            heads=1.0 - heads_first,
        ),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The parts a stage is made of: a dense block, a MoE block (None if there is none), and the ends."""

    dense: BlockTime
    moe: BlockTime | None
    embed: BlockTime
    head: BlockTime

    def of(self, stage: Stage) -> list[tuple[Num, BlockTime]]:
        """How many of each part a stage holds."""
        parts = [(stage.dense_layers, self.dense), (stage.embeddings, self.embed), (stage.heads, self.head)]
        return parts if self.moe is None else [*parts, (stage.moe_layers, self.moe)]


@dataclass(frozen=True, slots=True, eq=False)
class StageTime:
    """One microbatch on one stage: forward, backward (of the input; with recomputation), weight gradient."""

    stage: Stage
    forward: Parts
    backward: Parts
    weight: Parts

    @property
    def total(self) -> Parts:
        """All three."""
        return self.forward + self.backward + self.weight


@lru_cache(maxsize=4)  # the same for every stage
def recomputed(on: Degrees) -> tuple[Num, Num]:
    """Shares of the layers whose core attention, and whose whole forward, the backward runs again."""
    policy = np.asarray(on.recompute)
    selective = np.where(policy == RECOMPUTE.index("selective"), 1.0, 0.0)
    full = np.where(policy == RECOMPUTE.index("full"), 1.0, 0.0) * on.recompute_frac
    return selective, full


def stage_time(stage: Stage, blocks: Blocks, on: Degrees) -> StageTime:
    """Add up the parts of a stage; only the blocks are recomputed, not embedding and head."""
    selective, full = recomputed(on)
    forward, backward, weight = Parts(), Parts(), Parts()
    for count, part in blocks.of(stage):
        forward = forward + part.forward * count
        backward = backward + part.backward * count
        weight = weight + part.weight * count
        if part is blocks.dense or part is blocks.moe:
            backward = backward + part.core * (count * selective) + part.forward * (count * full)
    return StageTime(stage, forward, backward, weight)
