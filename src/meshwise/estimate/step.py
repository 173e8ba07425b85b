"""A whole step from its parts: blocks, stages, the pipeline, data parallelism, the optimizer.

    step = m t_max + unpaired + bubble + exposed p2p + exposed data-parallel exchange + optimizer + stragglers

m microbatches, t_max one of them on the slowest stage, which sets the pace. Where exchanges of experts hide
behind another microbatch, those pp that fill the pipeline forward and drain it backward have no partner
(1F1B, its chunks and DualPipe alike): what is hidden elsewhere is paid for them. All of it is arithmetic on
a `Mesh`, so one call prices one plan or a grid: what depends on few axes (a block on tp, cp and the
microbatch) is computed along those alone, and only the last sums run over the whole grid.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import chosen_cells, distinct_columns
from meshwise.core.units import Num
from meshwise.cost.collective import Runs
from meshwise.cost.schedule import SCHEDULES, bubble_s
from meshwise.cost.simulate import Timeline, simulate
from meshwise.estimate.fsdp2_memory import fsdp2_memory, gradient_bytes, least_memory
from meshwise.estimate.memory import (
    OPTIMIZER_BYTES,
    Memory,
    contents,
    grad_bytes,
    held_params,
    microbatch_bytes,
    recomputed,
    stage_memory,
    weight_bytes,
)
from meshwise.estimate.priced_part import Part, PhaseTimes, price_parts
from meshwise.estimate.timing import Machine, op_times
from meshwise.estimate.tower import tower_mesh, tower_stage
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, chunks, differ, layers_of_chunks, stages_of
from meshwise.program import fsdp2, muon
from meshwise.program.block import shared_gradients
from meshwise.program.cut import Cut
from meshwise.program.exchange import Exchange, Held, exchanges, shared_weights
from meshwise.program.implementation import IMPLEMENTATIONS
from meshwise.program.op import Op
from meshwise.program.parts import block_input_bytes, cut_of, parts
from meshwise.program.sharding import STAGES, at_stage, num_reductions

PHASES = ("forward_s", "backward_s", "weight_s")


@dataclass(frozen=True, slots=True, eq=False)
class StageTime(PhaseTimes):
    """One microbatch on one stage, recomputation included.

    `offload_forward_s`, `offload_backward_s`: waiting for kept activations to cross the host link, part of
    both.
    """

    offload_forward_s: Num = 0.0
    offload_backward_s: Num = 0.0

    def free_s(self, is_far: Num, idle_s: Num) -> tuple[Num, Num]:
        """For how long the links between nodes (those inside, where `is_far` is 0) are free, by direction.

        `idle_s`: how long the stage waits for a slower one, in the backward.
        """
        forward_s = self.near_forward_s + is_far * (self.far_forward_s - self.near_forward_s)
        backward_s = self.near_backward_s + is_far * (self.far_backward_s - self.near_backward_s)
        return (
            np.maximum(self.forward_s - forward_s, 0.0),
            np.maximum(self.backward_s + self.weight_s + idle_s - backward_s, 0.0),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StageCost:
    """One kind of stage: what it holds, its times per microbatch, what it does once a step, its memory.

    `exchanged` are the collectives of its replicas with the seconds that the links need for all of each;
    of their sum the step pays `comm_dp_s`, and its first microbatch waits `filling_s` for weights. On the
    slowest stage those of every microbatch make one `exposed_s` longer.
    `update`: what the optimizer gathers and multiplies, with the seconds of all of each, part of
    `optimizer_s`. `gradient_bytes`: what the optimizer reads; `kept_bytes`: the most that is kept for the
    backward at once. Of both the moment of `memory`, its peak, may hold less. `towers`: what it holds of each
    of `StepCost.towers`, which all of these numbers include but `held`.
    """

    stage: Stage
    held: tuple[Held, Held]
    time: StageTime
    memory: Memory
    exchanged: list[tuple[Exchange, Num]]
    comm_dp_s: Num
    exposed_s: Num
    filling_s: Num
    optimizer_s: Num
    update: list[tuple[Exchange | Op, Num]]
    gradient_bytes: Num
    kept_bytes: Num
    towers: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepCost:
    """A step of one plan, or of each plan of a grid; `mesh` has the `ends` that balance its stages.

    `work_s`: the microbatches on the slowest stage. With `unpaired_s`, `bubble_s`, `comm_pp_s`, `comm_dp_s`,
    `optimizer_s` and `straggler_s` they add up to `step_s`. `memory_bytes`: what the fullest stage needs.
    """

    mesh: Mesh
    step_s: Num
    work_s: Num
    unpaired_s: Num
    bubble_s: Num
    comm_pp_s: Num
    comm_dp_s: Num
    optimizer_s: Num
    straggler_s: Num
    hop_s: Num
    memory_bytes: Num
    stages: list[StageCost]
    parts: dict[str, Part]
    cut: Cut
    towers: list[TowerParts] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class TowerParts:
    """A tower beside the model: how often it runs, on its own mesh, and its parts, priced."""

    name: str
    encoder: Model
    mesh: Mesh
    cut: Cut
    parts: dict[str, Part]


# --- parts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PricedParts:
    """Every part of a model on one rank and one microbatch, priced once for each distinct cut.

    `kind`: the cut of each row of a grid; None where all rows have one.
    """

    of_cuts: dict[str, Part]
    kind: NDArray[np.intp] | None = None

    def of_rows(self, rows: Any) -> PricedParts:
        """The parts of some rows."""
        return self if self.kind is None else replace(self, kind=self.kind[rows])

    def spread(self) -> dict[str, Part]:
        """The parts of every row."""
        if self.kind is None:
            return self.of_cuts
        kind = self.kind
        return {
            name: part.mapped(lambda one: np.take(one, kind, axis=-1) if np.ndim(one) else one)
            for name, part in self.of_cuts.items()
        }

    def total(self, name: str, counts: Sequence[float]) -> Num:
        """The sum over so many of each part of one of their numbers, in every row."""
        each = [getattr(part, name) for part in self.of_cuts.values()]
        found = np.asarray(sum((count * number for count, number in zip(counts, each, strict=True)), 0.0))
        return found[self.kind] if self.kind is not None and found.ndim else found[()]


def priced_parts(model: Model, mesh: Mesh, machine: Machine) -> PricedParts:
    """The parts of a model in all rows of `mesh`; its keys of `estimate.grid.TAIL` play no part."""
    cut = cut_of(mesh)
    hide = tuple(axis for axis in ("tp", "ep") if getattr(mesh.plan, f"overlap_{axis}"))
    numbers = {field.name: getattr(cut, field.name) for field in fields(cut)}
    arrays = {name: value for name, value in numbers.items() if isinstance(value, np.ndarray)}
    if arrays:
        columns = np.stack(np.broadcast_arrays(*arrays.values()))
        flat = columns.reshape(len(arrays), -1)
        first, cells = distinct_columns(flat)
        table, places = _by_experts(cuts := dict(zip(arrays, flat[:, first], strict=True)))
        along = {name: values[table if name in OF_EXPERTS else table[:, :1]] for name, values in cuts.items()}
        found = _priced(model, replace(cut, **along), hide, machine, grad_bytes(mesh))
        of_cuts = partial(chosen_cells, cells=places, shape=table.shape)
        return PricedParts(
            {name: part.mapped(of_cuts) for name, part in found.items()}, cells.reshape(columns.shape[1:])
        )
    return PricedParts(_price_alike(model, cut, hide, machine, grad_bytes(mesh)))


OF_EXPERTS = ("ep", "etp", "ep_stride", "imbalance")
"""Numbers of a cut that experts alone depend on."""


def _by_experts(cuts: dict[str, NDArray[Any]]) -> tuple[NDArray[np.intp], tuple[NDArray[np.intp], ...]]:
    """A table of the numbers of cuts, those in a row alike but `OF_EXPERTS`; the place of each cut in it.

    So what is not of experts is computed once for each row. Short rows are filled up with their first cut.
    """
    alike = [np.zeros_like(values) if name in OF_EXPERTS else values for name, values in cuts.items()]
    first, kind = distinct_columns(np.stack(alike))
    order = np.argsort(kind, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(kind[order], kind[order])
    table = np.repeat(first[:, None], np.max(place) + 1, axis=1)
    table[kind, place] = np.arange(len(kind))
    return table, (kind, place)


def _priced(
    model: Model, cut: Cut, hide: tuple[str, ...], machine: Machine, sum_bytes: float
) -> dict[str, Part]:
    computed_bytes = cut.precision.act_bytes * _is_fsdp2(cut)
    return price_parts(parts(model, cut), machine, hide=hide, sum_bytes=sum_bytes, grad_bytes=computed_bytes)


_price_alike = lru_cache(maxsize=512)(_priced)
"""The parts of plans that cut a block alike, whatever their depth."""

# --- stages ------------------------------------------------------------------------------------


def stage_time(
    model: Model, stage: Stage, by_part: Sequence[Part], mesh: Mesh, cut: Cut, machine: Machine
) -> StageTime:
    """Add up the parts of a stage; only the blocks are recomputed, not embedding and head.

    Offloaded activations travel to the host while the forward computes, and back while the backward does;
    what the host link needs beyond that is waited for.
    """
    held = [(stage.share * count, part) for count, part in contents(stage, by_part)]
    if not mesh.trains:
        return StageTime(sum((count * part.forward_s for count, part in held), 0.0), 0.0, 0.0)
    times = {
        field.name: sum((count * getattr(part, field.name) for count, part in held), 0.0)
        for field in fields(PhaseTimes)
    }
    selective, full = recomputed(stage, mesh)
    for count, part in held[1:-1]:
        again = {"": selective * part.core_s + full * part.again_s}
        again |= {of: full * getattr(part, f"{of}forward_s") for of in ("near_", "far_")}
        for of, seconds in again.items():
            times[f"{of}backward_s"] = times[f"{of}backward_s"] + count * seconds
    if isinstance(mesh.offload_activations, float) and mesh.offload_activations == 0.0:
        return StageTime(**times)
    moved_bytes = mesh.offload_activations * microbatch_bytes(model, stage, by_part, mesh, cut)
    one_way_s = moved_bytes / machine.host_bytes_per_s
    out_s = np.maximum(one_way_s - times["forward_s"], 0.0)
    back_s = np.maximum(one_way_s - times["backward_s"] - times["weight_s"], 0.0)
    times |= {"forward_s": times["forward_s"] + out_s, "backward_s": times["backward_s"] + back_s}
    return StageTime(**times, offload_forward_s=out_s, offload_backward_s=back_s)


def _stage_cost(
    model: Model, stage: Stage, by_part: Sequence[Part], shared: Sequence[Op],
    mesh: Mesh, cut: Cut, machine: Machine, time: StageTime, idle_s: Num = 0.0, *, has_peak: bool = True,
) -> StageCost:  # fmt: skip
    """`idle_s`: how long a microbatch takes longer on the slowest stage.

    `has_peak`: whether FSDP2's memory is told at its peak, or as much of it as there is in any case.
    """
    held = held_params(model, stage, by_part, cut)
    units = fsdp2.units(model, stage, mesh) if _is_fsdp2(cut) else []
    exchanged = _exchanged(model, stage, held, units, shared, time, idle_s, mesh, cut, machine)
    memory, kept = _memory(model, stage, by_part, held, units, mesh, cut, machine, has_peak=has_peak)
    gradients = gradient_bytes(units, mesh, cut) if units else memory.gradients
    optimizer_s = (
        _optimizer_s(held, stage.share, memory, gradients, mesh, cut, machine) if mesh.trains else 0.0
    )
    update = _update(units, mesh, cut, machine) if mesh.plan.optimizer == "muon" else []
    optimizer_s = optimizer_s + sum((seconds for _, seconds in update), 0.0)
    return StageCost(
        stage=stage, held=held, time=time, memory=memory, **exchanged._asdict(), optimizer_s=optimizer_s,
        update=update, gradient_bytes=gradients, kept_bytes=kept,
    )  # fmt: skip


def _memory(
    model: Model, stage: Stage, by_part: Sequence[Part], held: tuple[Held, Held],
    units: Sequence[fsdp2.Unit], mesh: Mesh, cut: Cut, machine: Machine, *, has_peak: bool,
) -> tuple[Memory, Num]:  # fmt: skip
    """What a stage needs, and the most that it keeps for the backward; `has_peak`: as in `_stage_cost`."""
    if units:
        told = fsdp2_memory if has_peak else least_memory
        return told(model, stage, by_part, units, mesh, cut, machine.overheads)
    memory = stage_memory(model, stage, by_part, held, mesh, cut, machine.overheads)
    return memory, memory.activations


def _is_fsdp2(cut: Cut) -> bool:
    return IMPLEMENTATIONS[cut.implementation].shards_each_weight


class _Exchanged(NamedTuple):
    """What a stage's replicas exchange, and what is waited for it: see `StageCost`."""

    exchanged: list[tuple[Exchange, Num]]
    comm_dp_s: Num = 0.0
    exposed_s: Num = 0.0
    filling_s: Num = 0.0


def _exchanged(
    model: Model, stage: Stage, held: tuple[Held, Held], units: Sequence[fsdp2.Unit], shared: Sequence[Op],
    time: StageTime, idle_s: Num, mesh: Mesh, cut: Cut, machine: Machine,
) -> _Exchanged:  # fmt: skip
    """The exchanges of a stage's replicas.

    The gradient of a block travels while the blocks below it compute, so at best one block's part of it
    sticks out, and likewise the gather of the first block's weights. It does not travel while other
    collectives hold the links that it needs. In a pipeline FSDP2 gathers once, and reduces when the last
    backward is through, so that hides nothing. `units`: those of FSDP2, if it is that; `shared`: as in
    `shared_weights`.
    """
    if not mesh.trains:
        return _Exchanged([])
    overheads = machine.overheads
    alone = (mesh.pp == 1) * 1.0 if units else 1.0
    rounds = 1.0 + (mesh.zero >= 3) * alone * (mesh.num_microbatches - 1.0)
    if units:
        reductions = fsdp2.reductions(stage, mesh)
        of_replicas = fsdp2.exchanges(units, stage, mesh, cut)
        of_one = fsdp2.shared_weights(model, units, stage, mesh, cut)
    else:
        reductions = num_reductions(at_stage(STAGES.sums, mesh.zero), mesh.num_microbatches)
        of_replicas = exchanges(
            held,
            stage,
            mesh,
            grad_bytes=grad_bytes(mesh),
            weight_bytes=weight_bytes(mesh),
            bucket_params=overheads.bucket_params(mesh.replicas),
            messages_per_block=overheads.messages_per_block,
        )
        of_one = shared_weights(model, shared, stage, mesh, cut, grad_bytes(mesh))
    found, own = (
        [(one, _exchange_s(one, machine)) for one in some if one.occurs] for some in (of_replicas, of_one)
    )
    own_s = sum((seconds for _, seconds in own), 0.0)
    grads_s = sum((s for one, s in found if one.op.endswith("gradients")), 0.0) / reductions
    gathers_s = sum((s for one, s in found if one.op.endswith("weights") and one.behind == "backward"), 0.0)
    gathers_s = gathers_s / rounds
    behind_forward = sum((s for one, s in found if one.behind == "forward"), 0.0) / rounds
    pieces = np.maximum(stage.layers_passed, 1.0)
    first_s = behind_forward / pieces
    is_far = machine.leaves_node(mesh.replicas, mesh.stride("cp"))
    forward_s, backward_s = (_window(mesh) * each_s for each_s in time.free_s(is_far, idle_s))

    beside_forward = behind_forward - first_s
    slowed_frac = overheads.interference_frac
    late_s = (1.0 - slowed_frac) * np.maximum(beside_forward - forward_s, 0.0) + slowed_frac * beside_forward

    def round_s(behind_backward: Num) -> Num:
        """What one microbatch waits for its exchanges, but for those of the first block and the last."""
        sticks_out_s = np.maximum(behind_backward - alone * backward_s, 0.0)
        return (1.0 - slowed_frac) * sticks_out_s + (slowed_frac * behind_backward + late_s)

    tail_s = grads_s / pieces
    overlapped_s = reductions * round_s(gathers_s + grads_s - tail_s) + (tail_s + first_s)
    if np.any(reductions != rounds):
        overlapped_s = overlapped_s + (rounds - reductions) * round_s(gathers_s)
    alone_s = rounds * (gathers_s + behind_forward) + reductions * grads_s
    # However they are hidden: links carry one exchange at a time.
    overlapped_s = np.maximum(overlapped_s, alone_s - rounds * (forward_s + backward_s) * alone)
    paid_s = mesh.overlap_dp * overlapped_s + (1.0 - mesh.overlap_dp) * alone_s
    filling_s = (1.0 - alone) * np.maximum(behind_forward - mesh.overlap_dp * forward_s, first_s)
    recurring_s = (rounds > 1) * rounds * (gathers_s + behind_forward)
    recurring_s = (recurring_s + (reductions > 1) * reductions * grads_s) / mesh.num_microbatches
    exposed_s = np.maximum(recurring_s - mesh.overlap_dp * sum(time.free_s(is_far, 0.0)), 0.0)
    return _Exchanged([*found, *own], paid_s + own_s, exposed_s, filling_s)


def _window(mesh: Mesh) -> Num:
    """Microbatches that hide what is exchanged once a step.

    One, but for interleaved stages: the gradients of a chunk are complete while the last pp microbatches
    still pass the other v - 1 chunks of the rank, and likewise for weights and the first microbatches.
    """
    others = np.minimum(mesh.num_microbatches, mesh.pp) * (mesh.vpp - 1.0) / mesh.vpp
    return np.where(mesh.zero < 2, np.maximum(others, 1.0), 1.0)[()]


def _exchange_s(one: Exchange, machine: Machine) -> Num:
    """Time of the links for all `count` collectives of an exchange."""
    sizes = one.payload_bytes, one.group_size, one.stride
    seconds = machine.collective_s(one.collective, *sizes, runs=Runs(*one.runs))
    if copy_s := machine.overheads.shard_copy_s:
        seconds = seconds + copy_s * one.shards_copied * (one.group_size > 1)
    return one.count * seconds


def _update(
    units: Sequence[fsdp2.Unit], mesh: Mesh, cut: Cut, machine: Machine
) -> list[tuple[Exchange | Op, Num]]:
    """What Muon gathers and multiplies where FSDP2 has cut the matrices, and its seconds."""
    gathers = [one for one in muon.gathers(units, mesh, cut) if one.occurs]
    products = list(muon.products(units, cut))
    times = zip(products, op_times(products, machine), strict=True)
    found: list[tuple[Exchange | Op, Num]] = [(one, _exchange_s(one, machine)) for one in gathers]
    return found + [(op, op.count * once_s) for op, once_s in times]


def _optimizer_s(
    held: tuple[Held, Held],
    share: Num,
    memory: Memory,
    gradients: Num,
    mesh: Mesh,
    cut: Cut,
    machine: Machine,
) -> Num:
    """The optimizer's pass over its states: each read and written once, gradients read twice (norm, update).

    Offloaded states are updated on the host: gradients go there and weights come back over the host link,
    in the backward those of one layer while the others' come.
    """
    rate = machine.base.memory_bytes_per_s * machine.efficiency.memory.memory_frac
    if _is_fsdp2(cut):
        on_host = mesh.offload_optimizer * 2.0 * gradients / machine.host_bytes_per_s  # weights come back
        return (2.0 * memory.optimizer + 2.0 * gradients + memory.weights) / rate + on_host
    dense, experts = held
    params = dense.trained / mesh.shard_ranks(mesh.replicas)
    params = params + experts.trained / mesh.shard_ranks(mesh.expert_replicas)
    params = params * np.where(mesh.zero >= 1, share, 1.0)
    per_param = 2 * OPTIMIZER_BYTES[mesh.plan.optimizer] + 2 * grad_bytes(mesh) + weight_bytes(mesh)
    on_chip = (1.0 - mesh.offload_optimizer) * per_param / rate
    both_ways = max if mesh.plan.optimizer_in_bwd else operator.add
    on_host = both_ways(grad_bytes(mesh), weight_bytes(mesh)) / machine.host_bytes_per_s
    return params * (on_chip + mesh.offload_optimizer * on_host)


# --- towers ------------------------------------------------------------------------------------


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


def _with_tower(own: StageCost, tower: TowerParts, machine: Machine) -> StageCost:
    """A stage and the tower on it: all adds up but workspace, which one uses after the other."""
    encoder, mesh, cut = tower.encoder, tower.mesh, tower.cut
    shared = shared_gradients(encoder, cut, layer_kinds(encoder)[0]) if mesh.trains else []
    stage, by_part = tower_stage(encoder, own.stage), list(tower.parts.values())
    time = tower_time(tower, own.stage, machine)
    cost = _stage_cost(encoder, stage, by_part, shared, mesh, cut, machine, time)
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
        comm_dp_s=own.comm_dp_s + is_there * cost.comm_dp_s,
        exposed_s=own.exposed_s + is_there * cost.exposed_s,
        filling_s=own.filling_s + is_there * cost.filling_s,
        optimizer_s=own.optimizer_s + cost.optimizer_s,
        update=[*own.update, *cost.update],
        gradient_bytes=own.gradient_bytes + cost.gradient_bytes,
        kept_bytes=own.kept_bytes + cost.kept_bytes,
        towers=(*own.towers, stage),
    )


def added_times(one: StageTime, other: StageTime) -> StageTime:
    """Two parts of a stage, one after the other."""
    names = [each.name for each in fields(StageTime)]
    return StageTime(**{name: getattr(one, name) + getattr(other, name) for name in names})


# --- the step ----------------------------------------------------------------------------------


class Wants(Protocol):
    """Which plans of a mesh are worth a closer look, by the least that their step takes and that they need.

    `in_turn`: it is asked again of the others when these are priced, so it need not name all at once.
    """

    def __call__(
        self, mesh: Mesh, step_s: Num, least_bytes: Num, *, in_turn: bool = False
    ) -> NDArray[np.bool_]: ...


def price_step(
    model: Model, mesh: Mesh, machine: Machine, stages: Sequence[Stage] | None = None,
    parts: PricedParts | None = None, wants: Wants | None = None,
) -> StepCost:  # fmt: skip
    """The cost of one step of the plans of `mesh`, divided into stages by its `ends`.

    `stages` None: those that the plans make. `parts`: those of `mesh` where they are priced already. `wants`:
    the plans for which FSDP2's `memory_bytes` are told, infinite for all others; None: all.
    """
    cut, by_name = cut_of(mesh), (parts or priced_parts(model, mesh, machine)).spread()
    by_part = list(by_name.values())
    shared = shared_gradients(model, cut) if mesh.trains else []
    towers = list(tower_parts(model, mesh, machine))
    has_peak = wants is None or not _is_fsdp2(cut) or bool(towers)
    stages = stages or stages_of(model, mesh)
    exists = [(stage.num_stages > 0) * 1.0 for stage in stages]
    times = [stage_time(model, stage, by_part, mesh, cut, machine) for stage in stages]
    totals_s = list(map(partial(_with_towers_s, towers=towers, machine=machine), stages, times))
    slowest_s = _largest(totals_s, exists)
    costs = [
        _stage_cost(
            model, stage, by_part, shared, mesh, cut, machine, time, slowest_s - total_s, has_peak=has_peak
        )
        for stage, time, total_s in zip(stages, times, totals_s, strict=True)
    ]
    costs = [reduce(partial(_with_tower, machine=machine), towers, cost) for cost in costs]
    work_s = slowest_s * mesh.num_microbatches
    hop_s = message_s(model, mesh, cut, machine)
    bubble, comm_pp = _pipeline_waits(model, mesh, by_part, towers, costs, cut, machine, hop_s, slowest_s)
    comm_dp = _largest([cost.comm_dp_s for cost in costs], exists)
    optimizer = _largest([cost.optimizer_s for cost in costs], exists)
    lone_s = _largest([cost.time.unpaired_s for cost in costs], exists)
    unpaired_s = lone_s * np.minimum(mesh.pp, mesh.num_microbatches)
    alone_s = work_s + unpaired_s + bubble + comm_pp + comm_dp + optimizer
    straggler = alone_s * (machine.overheads.straggler_frac * np.log2(mesh.world))
    memory_bytes = _largest([cost.memory.total for cost in costs], exists)
    if wants is not None and not has_peak:
        wanted = wants(mesh, alone_s + straggler, memory_bytes)
        peaks = []
        for stage in (cost.stage for cost in costs):
            units = fsdp2.units(model, stage, mesh)
            peak, _ = fsdp2_memory(model, stage, by_part, units, mesh, cut, machine.overheads, wanted)
            peaks.append(peak.total)
        memory_bytes = np.where(wanted, _largest(peaks, exists), np.inf)
    return StepCost(
        mesh=mesh,
        step_s=alone_s + straggler,
        work_s=work_s,
        unpaired_s=unpaired_s,
        bubble_s=bubble,
        comm_pp_s=comm_pp,
        comm_dp_s=comm_dp,
        optimizer_s=optimizer,
        straggler_s=straggler,
        hop_s=hop_s,
        memory_bytes=memory_bytes,
        stages=costs,
        parts=by_name,
        cut=cut,
        towers=towers,
    )


def _pipeline_waits(
    model: Model, mesh: Mesh, by_part: Sequence[Part], towers: Sequence[TowerParts],
    costs: Sequence[StageCost], cut: Cut, machine: Machine, hop_s: Num, slowest_s: Num,
) -> tuple[Num, Num]:  # fmt: skip
    """The bubble, and what messages of `hop_s` [s] add to the step.

    The pipe fills and drains at the mean pace of the stages and runs at that of the slowest.
    """
    bubble, comm_pp = waits_s(mesh, mean_phases_s(mesh, costs), hop_s, lead_s(mesh, costs, slowest_s))
    if mesh.plan.stages and mesh.trains and np.any(is_own := differ(model, mesh)):  # of any shape: played
        times = times_of_chunks(model, chunks(model, mesh.plan.stages), mesh, by_part, towers, cut, machine)
        played_s = [_played_s(mesh, times, hop_s=hop) for hop in (0.0, hop_s)]
        own_s = np.maximum(played_s[0] - slowest_s * mesh.num_microbatches, 0.0)
        bubble = np.where(is_own, own_s * (mesh.pp > 1), bubble)[()]
        held_s = _held_s(mesh, hop_s)
        comm_pp = np.where(is_own, (played_s[1] - played_s[0] + held_s) * (mesh.pp > 1), comm_pp)[()]
    # Without chunks a stage gathers its weights when the first microbatch arrives, one after the other.
    filling_s = sum(cost.filling_s * cost.stage.num_stages for cost in costs) / mesh.pp
    return bubble + (mesh.schedule <= SCHEDULES.index("1f1b")) * (mesh.pp - 1.0) * filling_s, comm_pp


def mean_phases_s(mesh: Mesh, costs: Sequence[StageCost]) -> list[Num]:
    """Forward, backward and gradient of the weights of one microbatch, the mean of all stages."""
    return _means_s(mesh, [cost.stage for cost in costs], [cost.time for cost in costs], PHASES)


def _means_s(
    mesh: Mesh, stages: Sequence[Stage], times: Sequence[StageTime], names: Sequence[str]
) -> list[Num]:
    """The mean of all stages of each named time."""
    each = list(zip(times, stages, strict=True))
    return [sum(getattr(time, name) * stage.num_stages for time, stage in each) / mesh.pp for name in names]


def lead_s(mesh: Mesh, costs: Sequence[StageCost], slowest_s: Num) -> Num:
    """What a microbatch takes longer on the slowest stage than in the mean: its ops, or its exchanges."""
    paces_s = [cost.time.total_s + cost.exposed_s for cost in costs]
    mean_s = sum(map(operator.mul, paces_s, [cost.stage.num_stages for cost in costs])) / mesh.pp
    return reduce(np.maximum, paces_s, slowest_s) - mean_s


def waits_s(mesh: Mesh, mean_s: Sequence[Num], hop_s: Num, lead_s: Num) -> tuple[Num, Num]:
    """The bubble, and what messages add, of stages that take `mean_s` by phase and at most `lead_s` more."""
    f_s, b_s, w_s = mean_s
    sizes = mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, f_s, b_s, w_s
    bubble, with_hops_s = (bubble_s(*sizes, each_hop_s, lead_s) for each_hop_s in (0.0, hop_s))
    return bubble, (with_hops_s - bubble + _held_s(mesh, hop_s)) * (1.0 if mesh.trains else 0.5)


def _held_s(mesh: Mesh, hop_s: Num) -> Num:
    """For how long a rank that sends nothing beside its compute sends."""
    return 2.0 * hop_s * mesh.num_microbatches * mesh.vpp * (1.0 - mesh.overlap_pp)


def times_of_chunks(
    model: Model, of: Sequence[Stage], mesh: Mesh, by_part: Sequence[Part], towers: Sequence[TowerParts],
    cut: Cut, machine: Machine,
) -> list[StageTime]:  # fmt: skip
    """One microbatch of each chunk of a pipeline, its towers included."""
    return [
        reduce(
            added_times,
            (tower_time(tower, chunk, machine) for tower in towers),
            stage_time(model, chunk, by_part, mesh, cut, machine),
        )
        for chunk in of
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


def message_s(model: Model, mesh: Mesh, cut: Cut, machine: Machine) -> Num:
    """Time of one message to the next stage; 0 without a pipeline."""
    return machine.collective_s("send", hop_bytes(model, cut), mesh.pp, mesh.stride("pp")) * (mesh.pp > 1)


def hop_bytes(model: Model, cut: Cut) -> Num:
    """A message to the next stage: a block's input, sent by the tp ranks in pieces, but for FSDP2's."""
    in_one_piece = cut.sequence_parallel or _is_fsdp2(cut)
    return block_input_bytes(model, cut) / (1.0 if in_one_piece else cut.tp)


def _with_towers_s(stage: Stage, time: StageTime, towers: Sequence[TowerParts], machine: Machine) -> Num:
    """One microbatch of a stage and its towers."""
    return time.total_s + sum((tower_time(tower, stage, machine).total_s for tower in towers), 0.0)


def _largest(values: Sequence[Num], exists: Sequence[Num]) -> Num:
    """The largest of `values`, of those that exist."""
    return reduce(np.maximum, map(operator.mul, values, exists))


def play(
    model: Model, mesh: Mesh, step: StepCost, machine: Machine, *, hop_s: float = 0.0,
    slowdown: Sequence[float] | float = 1.0,
) -> Timeline:  # fmt: skip
    """Play the pipeline of one plan; `slowdown` stretches the compute of a rank (or of each)."""
    parts, of = list(step.parts.values()), chunks(model, layers_of_chunks(model, mesh))
    times = times_of_chunks(model, of, mesh, parts, step.towers, step.cut, machine)
    phases = (np.array([float(getattr(time, phase)) for time in times]) for phase in PHASES)
    return simulate(
        mesh.plan.schedule,
        *phases,
        pp=int(mesh.pp),
        m=int(mesh.num_microbatches),
        v=int(mesh.vpp),
        p2p_s=hop_s,
        slowdown=slowdown,
    )


def least_step_s(model: Model, mesh: Mesh, parts: PricedParts, machine: Machine) -> Num:
    """The least time [s] of a training step of the plans of `mesh`, whatever they recompute and shard.

    The slowest stage takes no less than the mean of all, and recomputation, exchanges of replicas, messages
    between stages and the optimizer only add to

        m t_mean + unpaired + bubble(F, B, W of the mean stage)

    so a search need not price a plan whose least time is longer than what it has found.
    """
    layers = Counter(layer_kind(model, layer) for layer in range(model.num_layers))
    counts = (1.0, *(float(layers[kind]) for kind in layer_kinds(model)), 1.0)
    names = ("forward_s", "backward_s", "weight_s", "unpaired_s")
    return _of_mean_s(mesh, [parts.total(name, counts) / mesh.pp for name in names], machine)


def least_of_ops(model: Model, mesh: Mesh, parts: PricedParts, machine: Machine) -> tuple[Num, Num]:
    """The least time [s] and memory [bytes] of a training step of the plans of `mesh`, as they recompute.

    The time as in `least_step_s`; the fullest stage needs no less than the emptiest, towers left out.
    """
    cut, by_part = cut_of(mesh), list(parts.spread().values())
    towers, stages = list(tower_parts(model, mesh, machine)), stages_of(model, mesh)
    times = times_of_chunks(model, stages, mesh, by_part, towers, cut, machine)
    mean_s = _means_s(mesh, stages, times, (*PHASES, "unpaired_s"))
    needed: Num = np.inf
    for stage in stages:
        held = held_params(model, stage, by_part, cut)
        units = fsdp2.units(model, stage, mesh) if _is_fsdp2(cut) else []
        memory, _ = _memory(model, stage, by_part, held, units, mesh, cut, machine, has_peak=False)
        needed = np.minimum(needed, np.where(stage.num_stages > 0, memory.total, np.inf))
    return _of_mean_s(mesh, mean_s, machine), needed


def _of_mean_s(mesh: Mesh, mean_s: Sequence[Num], machine: Machine) -> Num:
    """A step of stages that all take the mean: forward, backward, gradient of the weights, and unpaired."""
    *phases_s, unpaired_s = mean_s
    step_s = mesh.num_microbatches * sum(phases_s) + np.minimum(mesh.pp, mesh.num_microbatches) * unpaired_s
    if not mesh.plan.stages:  # of any shape: played
        step_s = step_s + bubble_s(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, *phases_s)
    return step_s * (1.0 + machine.overheads.straggler_frac * np.log2(mesh.world))
