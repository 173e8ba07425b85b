"""A whole step from its parts: blocks, stages, the pipeline, data parallelism, the optimizer.

    step = m t_max + bubble + exposed p2p + exposed data-parallel exchange + optimizer + stragglers

m microbatches, t_max one of them on the slowest stage, which sets the pace. Where exchanges of experts hide
behind another microbatch, some have no partner (`Mesh.lone_frac`): t is the mean. All of it is arithmetic on
a `Mesh`, so one call prices one plan or a grid: what depends on few axes (a block on tp, cp and the
microbatch) is computed along those alone, and only the last sums run over the whole grid.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns
from meshwise.core.numbers import added, larger, smaller, where
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES, bubble_s
from meshwise.cost.simulate import Timeline, simulate
from meshwise.estimate.fsdp2_step import fsdp2_memory
from meshwise.estimate.memory import Memory, held_params
from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.stage_cost import StageCost, StageTime, needed_memory, stage_cost, stage_time, units_of
from meshwise.estimate.tower import tower_time, towers_of, with_tower, with_weights
from meshwise.model.architecture import layer_counts
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, chunks, differ, has_fixed_ends, layers_of_chunks, stages_of
from meshwise.program.implementation import shards_each_weight
from meshwise.program.parts import block_input_bytes

PHASES = ("forward_s", "backward_s", "weight_s")


@dataclass(frozen=True, slots=True, eq=False)
class StepCost:
    """A step of one plan, or of each plan of a grid; the mesh of `of` has the `ends` that balance its stages.

    `work_s`: the microbatches on the slowest stage. With `bubble_s`, `comm_pp_s`, `comm_dp_s`,
    `optimizer_s` and `straggler_s` they add up to `step_s`. `memory_bytes`: what the fullest stage needs.
    """

    of: PricedModel
    step_s: Num
    work_s: Num
    bubble_s: Num
    comm_pp_s: Num
    comm_dp_s: Num
    optimizer_s: Num
    straggler_s: Num
    hop_s: Num
    memory_bytes: Num
    stages: list[StageCost]
    towers: list[PricedModel]


class Wants(Protocol):
    """Which plans of a mesh are worth a closer look, by the least that their step takes and that they need.

    `few`: it is asked again of the others when these are priced, so it need not name all at once.
    """

    def __call__(
        self, mesh: Mesh, step_s: Num, least_bytes: Num, *, few: bool = False
    ) -> NDArray[np.bool_]: ...


def price_step(
    of: PricedModel, stages: Sequence[Stage] | None = None, wants: Wants | None = None
) -> StepCost:
    """The cost of one step of the plans of a mesh, divided into stages by its `ends`.

    `stages` None: those that the plans make. `wants`: the plans for which FSDP2's `memory_bytes` are told,
    infinite for all others; None: all.
    """
    model, mesh = of.model, of.mesh
    decodes, held_towers = mesh.kind == "decode", towers_of(of)
    towers = [] if decodes else held_towers
    has_peak = wants is None or not shards_each_weight(of.cut) or bool(towers)
    stages = stages or stages_of(model, mesh)
    times = [stage_time(of, stage) for stage in stages]
    totals_s = [
        time.total_s + added(tower_time(tower, stage).total_s for tower in towers)
        for stage, time in zip(stages, times, strict=True)
    ]
    slowest_s = _largest(totals_s, stages)
    costs = [
        stage_cost(of, stage, time, slowest_s - total_s, has_peak=has_peak)
        for stage, time, total_s in zip(stages, times, totals_s, strict=True)
    ]
    costs = [reduce(with_weights if decodes else with_tower, held_towers, cost) for cost in costs]
    work_s = slowest_s * mesh.num_microbatches
    hop_s = message_s(of)
    bubble, comm_pp = _pipeline_waits(of, towers, costs, hop_s, slowest_s)
    comm_dp = _largest([cost.comm_dp_s for cost in costs], stages)
    optimizer = _largest([cost.optimizer_s for cost in costs], stages)
    alone_s = work_s + bubble + comm_pp + comm_dp + optimizer
    straggler = alone_s * (of.machine.overheads.straggler_frac * np.log2(mesh.world))
    memory_bytes = _largest([cost.memory.total for cost in costs], stages)
    if wants is not None and not has_peak:
        wanted = wants(mesh, alone_s + straggler, memory_bytes)
        for stage in stages:
            peak, _ = fsdp2_memory(of, stage, units_of(of, stage), wanted)
            memory_bytes = larger(memory_bytes, (stage.num_stages > 0) * peak.total)
            wanted = wanted & wants(mesh, alone_s + straggler, memory_bytes)
        memory_bytes = where(wanted, memory_bytes, np.inf)
    return StepCost(
        of=of,
        step_s=alone_s + straggler,
        work_s=work_s,
        bubble_s=bubble,
        comm_pp_s=comm_pp,
        comm_dp_s=comm_dp,
        optimizer_s=optimizer,
        straggler_s=straggler,
        hop_s=hop_s,
        memory_bytes=memory_bytes,
        stages=costs,
        towers=towers,
    )


def _pipeline_waits(
    of: PricedModel, towers: Sequence[PricedModel], costs: Sequence[StageCost], hop_s: Num, slowest_s: Num
) -> tuple[Num, Num]:
    """The bubble, and what messages of `hop_s` [s] add to the step.

    The pipe fills and drains at the mean pace of the stages and runs at that of the slowest.
    """
    mesh = of.mesh
    bubble, comm_pp = waits_s(mesh, mean_phases_s(mesh, costs), hop_s, lead_s(mesh, costs, slowest_s))
    if mesh.plan.stages and mesh.trains and np.any(is_own := differ(of.model, mesh)):  # of any shape: played
        times = times_of_chunks(of, chunks(of.model, mesh.plan.stages), towers)
        played_s = [_played_s(mesh, times, hop_s=hop) for hop in (0.0, hop_s)]
        own_s = larger(played_s[0] - slowest_s * mesh.num_microbatches, 0.0)
        bubble = where(is_own, own_s * (mesh.pp > 1), bubble)
        comm_pp = where(is_own, (played_s[1] - played_s[0] + _held_s(mesh, hop_s)) * (mesh.pp > 1), comm_pp)
    # Without chunks a stage gathers its weights when the first microbatch arrives, one after the other.
    filling_s = added(cost.filling_s * cost.stage.num_stages for cost in costs) / mesh.pp
    return bubble + (mesh.schedule <= SCHEDULES.index("1f1b")) * (mesh.pp - 1.0) * filling_s, comm_pp


def mean_phases_s(mesh: Mesh, costs: Sequence[StageCost]) -> list[Num]:
    """Forward, backward and gradient of the weights of one microbatch, the mean of all stages."""
    return _means_s(mesh, [cost.stage for cost in costs], [cost.time for cost in costs], PHASES)


def _means_s(
    mesh: Mesh, stages: Sequence[Stage], times: Sequence[StageTime], names: Sequence[str]
) -> list[Num]:
    """The mean of all stages of each named time."""
    each = list(zip(times, stages, strict=True))
    return [added(getattr(time, name) * stage.num_stages for time, stage in each) / mesh.pp for name in names]


def lead_s(mesh: Mesh, costs: Sequence[StageCost], slowest_s: Num) -> Num:
    """What a microbatch takes longer on the slowest stage than in the mean: its ops, or its exchanges."""
    paces_s = [cost.time.total_s + cost.exposed_s for cost in costs]
    mean_s = added(map(operator.mul, paces_s, [cost.stage.num_stages for cost in costs])) / mesh.pp
    return reduce(larger, paces_s, slowest_s) - mean_s


def waits_s(mesh: Mesh, mean_s: Sequence[Num], hop_s: Num, lead_s: Num) -> tuple[Num, Num]:
    """The bubble, and what messages add, of stages that take `mean_s` by phase and at most `lead_s` more."""
    f_s, b_s, w_s = mean_s
    sizes = mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, f_s, b_s, w_s
    bubble, with_hops_s = (bubble_s(*sizes, each_hop_s, lead_s) for each_hop_s in (0.0, hop_s))
    return bubble, (with_hops_s - bubble + _held_s(mesh, hop_s)) * (1.0 if mesh.trains else 0.5)


def _held_s(mesh: Mesh, hop_s: Num) -> Num:
    """For how long a rank that sends nothing beside its compute sends."""
    return 2.0 * hop_s * mesh.num_microbatches * mesh.vpp * (1.0 - mesh.overlap_pp)


def times_of_chunks(of: PricedModel, held: Sequence[Stage], towers: Sequence[PricedModel]) -> list[StageTime]:
    """One microbatch of each of the chunks `held` of a pipeline, its towers included."""
    return [
        sum((tower_time(tower, chunk) for tower in towers), start=stage_time(of, chunk)) for chunk in held
    ]


def _played_s(mesh: Mesh, times: Sequence[StageTime], *, hop_s: Num) -> Num:
    """Time of the pipeline of chunks that take `times`, played once for each that differs."""
    phases = [[getattr(time, name) for time in times] for name in PHASES]
    pipeline = (mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp)
    numbers = np.broadcast_arrays(*pipeline, hop_s, *(value for phase in phases for value in phase))
    cells = np.stack([np.asarray(value, dtype=np.float64) for value in numbers])
    first, kind = distinct_columns(flat := cells.reshape(len(numbers), -1))
    found = []
    for schedule, pp, m, v, hop, *seconds in flat[:, first].T:
        by_phase = np.array(seconds).reshape(3, -1)
        played = simulate(
            SCHEDULES[int(schedule)], *by_phase, pp=int(pp), m=int(m), v=int(v), p2p_s=float(hop)
        )
        found.append(played.makespan_s)
    return np.array(found)[kind].reshape(cells.shape[1:])[()]


def message_s(of: PricedModel) -> Num:
    """Time of one message to the next stage; 0 without a pipeline."""
    pp = of.mesh.pp
    return of.machine.collective_s("send", hop_bytes(of), pp, of.mesh.stride("pp")) * (pp > 1)


def hop_bytes(of: PricedModel) -> Num:
    """A message to the next stage: a block's input, sent by the tp ranks in pieces, but for FSDP2's."""
    in_one_piece = of.cut.sequence_parallel or shards_each_weight(of.cut)
    return block_input_bytes(of.model, of.cut) / (1.0 if in_one_piece else of.cut.tp)


def _largest(values: Sequence[Num], stages: Sequence[Stage]) -> Num:
    """The largest of the `values` of stages, of those that exist."""
    return reduce(larger, map(operator.mul, values, [(stage.num_stages > 0) * 1.0 for stage in stages]))


def play(step: StepCost, *, num_microbatches: int | None = None, hop_s: float = 0.0) -> Timeline:
    """Play the pipeline of one plan (or some microbatches of it)."""
    model, mesh = step.of.model, step.of.mesh
    times = times_of_chunks(step.of, chunks(model, layers_of_chunks(model, mesh)), step.towers)
    phases = (np.array([float(getattr(time, phase)) for time in times]) for phase in PHASES)
    sizes = {"pp": int(mesh.pp), "m": num_microbatches or int(mesh.num_microbatches), "v": int(mesh.vpp)}
    return simulate(mesh.plan.schedule, *phases, **sizes, p2p_s=hop_s)


def least_step_s(of: PricedModel) -> Num:
    """The least time [s] of a training step of the plans of a mesh, whatever they recompute and shard.

    The slowest stage takes no less than the mean of all, and recomputation, exchanges of replicas, messages
    between stages and the optimizer only add to

        m t_mean + bubble(F, B, W of the mean stage)

    so a search need not price a plan whose least time is longer than what it has found.
    """
    counts = (1.0, *map(float, layer_counts(of.model).values()), 1.0)
    return _of_mean_s(of, [of.total(name, counts) / of.mesh.pp for name in PHASES])


def least_of_ops(of: PricedModel) -> tuple[Num, Num]:
    """The least time [s] and memory [bytes] of a training step of the plans of a mesh, as they recompute.

    The time as in `least_step_s`, the memory as in `least_needed`, towers left out. Where stages are given
    the fullest needs no less than the first, and the slowest is known.
    """
    stages = stages_of(of.model, of.mesh)
    times = times_of_chunks(of, stages, towers_of(of))
    mean_s = _means_s(of.mesh, stages, times, PHASES)
    is_fixed = has_fixed_ends(of.mesh)
    slowest_s = _largest([time.total_s for time in times], stages) if is_fixed else 0.0
    memories = [
        (stage, needed_memory(of, stage, held_params(of, stage), units_of(of, stage), has_peak=False)[0])
        for stage in (stages[:1] if is_fixed else stages)
    ]
    return _of_mean_s(of, mean_s, slowest_s), least_needed(of.mesh, memories)


def least_needed(mesh: Mesh, memories: Sequence[tuple[Stage, Memory]]) -> Num:
    """What the fullest stage needs at least with any ends: as the emptiest does, and the mean of the states.

    However layers are placed, all stages together hold the same weights, gradients and optimizer's states.
    """
    emptiest = reduce(smaller, (where(stage.num_stages > 0, of.total, np.inf) for stage, of in memories))
    states = (stage.num_stages * (of.weights + of.gradients + of.optimizer) for stage, of in memories)
    return larger(emptiest, added(states) / mesh.pp)


def _of_mean_s(of: PricedModel, mean_s: Sequence[Num], slowest_s: Num = 0.0) -> Num:
    """A step of stages that take the mean: forward, backward, gradient of the weights.

    It is no shorter than all microbatches on a stage that takes `slowest_s`.
    """
    mesh = of.mesh
    step_s = mesh.num_microbatches * added(mean_s)
    if not mesh.plan.stages:  # of any shape: played
        step_s = step_s + bubble_s(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, *mean_s)
    step_s = larger(step_s, mesh.num_microbatches * slowest_s)
    return step_s * (1.0 + of.machine.overheads.straggler_frac * np.log2(mesh.world))
