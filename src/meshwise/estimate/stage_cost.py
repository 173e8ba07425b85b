"""What one stage of a pipeline takes for a microbatch, exchanges with its replicas, updates, and holds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from meshwise.core.numbers import added, larger, smaller, where
from meshwise.core.units import Num
from meshwise.cost.collective import Runs
from meshwise.estimate.fsdp2_step import fsdp2_memory, gradient_bytes, least_memory
from meshwise.estimate.memory import Memory, held_params, microbatch_bytes, recomputed, stage_memory
from meshwise.estimate.priced_model import PricedModel
from meshwise.estimate.priced_part import PhaseTimes
from meshwise.estimate.timing import Machine
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage
from meshwise.program import exchange, fsdp2
from meshwise.program.block import shared_gradients
from meshwise.program.exchange import STAGES, Held, at_stage, exchanges, grad_bytes, weight_bytes
from meshwise.program.implementation import shards_each_weight
from meshwise.program.op import Op


@dataclass(frozen=True, slots=True, eq=False)
class StageTime(PhaseTimes):
    """One microbatch on one stage, recomputation included.

    `offload_forward_s`, `offload_backward_s`: waiting for kept activations to cross the host link, part of
    both.
    """

    offload_forward_s: Num = 0.0
    offload_backward_s: Num = 0.0

    def __add__(self, other: StageTime) -> StageTime:
        """Both, one after the other."""
        return StageTime(**{of.name: getattr(self, of.name) + getattr(other, of.name) for of in fields(self)})

    def free_s(self, is_far: Num, idle_s: Num) -> tuple[Num, Num]:
        """For how long the links between nodes (those inside, where `is_far` is 0) are free, by direction.

        `idle_s`: how long the stage waits for a slower one, in the backward.
        """
        forward_s = self.near_forward_s + is_far * (self.far_forward_s - self.near_forward_s)
        backward_s = self.near_backward_s + is_far * (self.far_backward_s - self.near_backward_s)
        return (
            larger(self.forward_s - forward_s, 0.0),
            larger(self.backward_s + self.weight_s + idle_s - backward_s, 0.0),
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
    exchanged: list[tuple[Op, Num]]
    comm_dp_s: Num
    exposed_s: Num
    filling_s: Num
    optimizer_s: Num
    gradient_bytes: Num
    kept_bytes: Num
    towers: tuple[Stage, ...] = ()


def stage_time(of: PricedModel, stage: Stage) -> StageTime:
    """Add up the parts of a stage; only the blocks are recomputed, not embedding and head.

    Offloaded activations travel to the host while the forward computes, and back while the backward does;
    what the host link needs beyond that is waited for.
    """
    mesh, held = of.mesh, [(stage.share * count, part) for count, part in of.contents(stage)]
    if not mesh.trains:
        return StageTime(added(count * part.forward_s for count, part in held), 0.0, 0.0)
    times = {
        field.name: added(count * getattr(part, field.name) for count, part in held)
        for field in fields(PhaseTimes)
    }
    selective, full = recomputed(stage, mesh)
    for count, part in held[1:-1]:
        again = {"": selective * part.core_s + full * part.again_s}
        again |= {links: full * getattr(part, f"{links}forward_s") for links in ("near_", "far_")}
        for links, seconds in again.items():
            times[f"{links}backward_s"] = times[f"{links}backward_s"] + count * seconds
    if isinstance(mesh.offload_activations, float) and mesh.offload_activations == 0.0:
        return StageTime(**times)
    one_way_s = mesh.offload_activations * microbatch_bytes(of, stage) / of.machine.host_bytes_per_s
    out_s = larger(one_way_s - times["forward_s"], 0.0)
    back_s = larger(one_way_s - times["backward_s"] - times["weight_s"], 0.0)
    times |= {"forward_s": times["forward_s"] + out_s, "backward_s": times["backward_s"] + back_s}
    return StageTime(**times, offload_forward_s=out_s, offload_backward_s=back_s)


def stage_cost(
    of: PricedModel, stage: Stage, time: StageTime, idle_s: Num = 0.0, *, has_peak: bool = True
) -> StageCost:
    """`idle_s`: how long a microbatch takes longer on the slowest stage.

    `has_peak`: whether FSDP2's memory is told at its peak, or as much of it as there is in any case.
    """
    held, units = held_params(of, stage), units_of(of, stage)
    exchanged, comm_dp_s, exposed_s, filling_s = _exchanged(of, stage, held, units, time, idle_s)
    memory, kept = needed_memory(of, stage, held, units, has_peak=has_peak and of.mesh.trains)
    gradients = gradient_bytes(units, of.mesh, of.cut) if units else memory.gradients
    optimizer_s = _optimizer_s(of, held, stage.share, memory, gradients) if of.mesh.trains else 0.0
    return StageCost(
        stage=stage, held=held, time=time, memory=memory, exchanged=exchanged, comm_dp_s=comm_dp_s,
        exposed_s=exposed_s, filling_s=filling_s, optimizer_s=optimizer_s, gradient_bytes=gradients,
        kept_bytes=kept,
    )  # fmt: skip


def units_of(of: PricedModel, stage: Stage) -> list[fsdp2.Unit]:
    """The units of weights of a rank of `stage`, where these are held one by one."""
    return fsdp2.units(of.model, stage, of.mesh) if shards_each_weight(of.cut) else []


def needed_memory(
    of: PricedModel, stage: Stage, held: tuple[Held, Held], units: Sequence[fsdp2.Unit], *, has_peak: bool
) -> tuple[Memory, Num]:
    """What a stage needs, and the most that it keeps for the backward; `has_peak`: as in `stage_cost`."""
    if units:
        return (fsdp2_memory if has_peak else least_memory)(of, stage, units)
    memory = stage_memory(of, stage, held)
    return memory, memory.activations


def _exchanged(
    of: PricedModel, stage: Stage, held: tuple[Held, Held], units: Sequence[fsdp2.Unit], time: StageTime,
    idle_s: Num,
) -> tuple[list[tuple[Op, Num]], Num, Num, Num]:  # fmt: skip
    """The exchanges of a stage's replicas, then what is paid, exposed and filled (as in `StageCost`).

    The gradient of a block travels while the blocks below it compute, so at best one block's part of it
    sticks out, and likewise the gather of the first block's weights. It does not travel while other
    collectives hold the links that it needs. In a pipeline FSDP2 gathers once, and reduces when the last
    backward is through, so that hides nothing. `units`: those of FSDP2, if it is that.
    """
    model, mesh, cut, machine = of.model, of.mesh, of.cut, of.machine
    if mesh.serves:
        return [], 0.0, 0.0, 0.0
    overheads = machine.overheads
    alone = (mesh.pp == 1) * 1.0 if units else 1.0
    rounds = 1.0 + (mesh.zero >= 3) * alone * (mesh.num_microbatches - 1.0)
    if units:
        reductions = fsdp2.reductions(stage, mesh)
        of_replicas = fsdp2.exchanges(units, stage, mesh, cut)
        of_one = fsdp2.shared_weights(model, units, stage, mesh, cut)
    else:
        reductions = exchange.num_reductions(at_stage(STAGES.sums, mesh.zero), mesh.num_microbatches)
        buckets, of_block = overheads.bucket_params(mesh.replicas), overheads.messages_per_block
        of_replicas = exchanges(held, stage, mesh, bucket_params=buckets, messages_per_block=of_block)
        of_one = exchange.shared_weights(model, shared_gradients(model, cut), stage, mesh, cut)
    found, own = (
        [(one, _exchange_s(one, machine)) for one in some if exchange.occurs(one)]
        for some in (of_replicas, of_one)
    )
    own_s = added(seconds for _, seconds in own)
    summed_s = added(s for one, s in found if one.collective == "all_reduce") * overheads.sums_exposed
    grads_s = (added(s for one, s in found if one.name.endswith("gradients")) - summed_s) / reductions
    gathers_s = added(s for one, s in found if one.name.endswith("weights") and one.phase == "backward")
    gathers_s = gathers_s / rounds
    behind_forward = added(s for one, s in found if one.phase == "forward") / rounds
    pieces = larger(stage.layers_passed, 1.0)
    first_s = behind_forward / pieces
    is_far = machine.leaves_node(mesh.replicas, mesh.stride("cp"))
    forward_s, backward_s = (_window(mesh) * each_s for each_s in time.free_s(is_far, idle_s))

    beside_forward = behind_forward - first_s
    slowed_frac = overheads.interference_frac
    late_s = (1.0 - slowed_frac) * larger(beside_forward - forward_s, 0.0) + slowed_frac * beside_forward

    def round_s(behind_backward: Num) -> Num:
        """What one microbatch waits for its exchanges, but for those of the first block and the last."""
        sticks_out_s = larger(behind_backward - alone * backward_s, 0.0)
        return (1.0 - slowed_frac) * sticks_out_s + (slowed_frac * behind_backward + late_s)

    tail_s = grads_s / pieces
    overlapped_s = reductions * round_s(gathers_s + grads_s - tail_s) + (tail_s + first_s)
    overlapped_s = overlapped_s + (rounds - reductions) * round_s(gathers_s)
    alone_s = rounds * (gathers_s + behind_forward) + reductions * grads_s
    # However they are hidden: links carry one exchange at a time.
    hiding_s = rounds * forward_s + larger(rounds, reductions) * backward_s
    overlapped_s = larger(overlapped_s, alone_s - hiding_s * alone)
    paid_s = mesh.overlap_dp * overlapped_s + (1.0 - mesh.overlap_dp) * alone_s
    filling_s = (1.0 - alone) * larger(behind_forward - mesh.overlap_dp * forward_s, first_s)
    recurring_s = (rounds > 1) * rounds * (gathers_s + behind_forward)
    recurring_s = (recurring_s + (reductions > 1) * reductions * grads_s) / mesh.num_microbatches
    exposed_s = larger(recurring_s - mesh.overlap_dp * added(time.free_s(is_far, 0.0)), 0.0)
    return [*found, *own], paid_s + summed_s + own_s, exposed_s, filling_s


def _window(mesh: Mesh) -> Num:
    """Microbatches that hide what is exchanged once a step.

    One, but for interleaved stages: the gradients of a chunk are complete while the last pp microbatches
    still pass the other v - 1 chunks of the rank, and likewise for weights and the first microbatches.
    """
    others = smaller(mesh.num_microbatches, mesh.pp) * (mesh.vpp - 1.0) / mesh.vpp
    return where(mesh.zero < 2, larger(others, 1.0), 1.0)


def _exchange_s(one: Op, machine: Machine) -> Num:
    """Time of the links for all `count` collectives of an exchange."""
    sizes = one.payload_bytes, one.group_size, one.stride
    seconds = machine.collective_s(one.collective, *sizes, runs=Runs(*one.runs))
    if copy_s := machine.overheads.shard_copy_s:
        seconds = seconds + copy_s * one.shards_copied * (one.group_size > 1)
    return one.count * (seconds + one.host_bytes / machine.host_bytes_per_s)


def _optimizer_s(of: PricedModel, held: tuple[Held, Held], share: Num, memory: Memory, gradients: Num) -> Num:
    """The optimizer's pass over its states: each read and written once, gradients read twice (norm, update).

    Muon multiplies matrices too, in bf16, which ZeRO deals to the ranks as whole (Megatron-LM's layer-wise
    distributed optimizer). Offloaded states are updated on the host: gradients go there and weights come back
    over the host link, in the backward those of one layer while the others' come. FSDP2 keeps all of it
    there, and the host is taken to read and write it as fast.
    """
    mesh, machine = of.mesh, of.machine
    rate = machine.base.memory_bytes_per_s * machine.efficiency.memory.memory_frac
    if shards_each_weight(of.cut):
        on_chip = 2.0 * memory.optimizer + 2.0 * (1.0 - mesh.offload_optimizer) * gradients + memory.weights
        return on_chip / rate + mesh.offload_optimizer * 2.0 * gradients / machine.host_bytes_per_s
    ways = mesh.shard_ranks(mesh.replicas), mesh.shard_ranks(mesh.expert_replicas)
    spread = where(mesh.zero >= 1, share, 1.0)
    params = spread * added(map(operator.truediv, (one.trained for one in held), ways))
    others = (1.0 - mesh.offload_optimizer) * params * (2 * grad_bytes(mesh) + weight_bytes(mesh))
    on_chip = (2 * memory.optimizer + others) / rate
    if mesh.plan.optimizer == "muon":
        flop = spread * added(map(operator.truediv, (one.newton_schulz_flop for one in held), ways))
        peak = machine.by_dtype.get("bf16", machine.base).matrix_flop_per_s
        matmuls_s = flop / (peak * machine.efficiency.gemm("bf16").peak_frac)
        on_chip = on_chip + larger(matmuls_s, machine.sustained_s(flop, "bf16"))
    both_ways = np.maximum if mesh.plan.optimizer_in_bwd else operator.add
    # the others went with their reduction
    grads = (mesh.offload_optimizer - exchange.sums_on_host(mesh)) * grad_bytes(mesh)
    moved = both_ways(grads, mesh.offload_optimizer * weight_bytes(mesh))
    return on_chip + params * moved / machine.host_bytes_per_s
