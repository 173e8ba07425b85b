"""A plan and a workload as numbers: what the estimate computes with, for one plan or a grid of them.

In `Degrees` every number may be an array; the axes of the arrays are the axes of the grid, and a
number that does not vary along an axis has length one there. Choices that change which ops exist
(sequence parallelism, the kind of context parallelism, the dtype, the optimizer) are switches, one
value for the whole grid. The recompute policy and the schedule only select among numbers, so they
are arrays of indices into `plan.RECOMPUTE` and `plan.SCHEDULES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.units import Num
from meshwise.plan.plan import RECOMPUTE, SCHEDULES, Plan
from meshwise.plan.workload import Workload
from meshwise.program.cut import Cut
from meshwise.program.grid import default_grid
from meshwise.program.op import precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Degrees:
    """The numbers of one plan, or of a grid of plans, over `world` ranks; see `Plan` for their meaning.

    `tp`..`etp`, `microbatch`, `num_microbatches` (of one data-parallel rank), `zero` (stage 0-3),
    `zero_group` (ranks that share states), `recompute` and `schedule` (indices), `recompute_frac` (share of
    the layers that full recomputation covers), and the two offloaded shares may be arrays.
    """

    world: Num
    microbatch: Num
    num_microbatches: Num
    seq: Num
    tp: Num = 1.0
    ulysses: Num = 1.0
    ring: Num = 1.0
    pp: Num = 1.0
    vpp: Num = 1.0
    dp: Num = 1.0
    ep: Num = 1.0
    etp: Num = 1.0
    zero: Num = 1.0
    zero_group: Num = 1.0
    recompute: Num = 0.0
    recompute_frac: Num = 1.0
    schedule: Num = 1.0
    imbalance: Num = 1.0
    offload_optimizer: Num = 0.0
    offload_activations: Num = 0.0
    grid: tuple[Num, ...] = ()
    plan: Plan = field(default_factory=Plan)

    @property
    def cp(self) -> Num:
        """The context-parallel degree: Ulysses x ring."""
        return self.ulysses * self.ring

    @property
    def replicas(self) -> Num:
        """Ranks that hold the same dense weights: data and context parallel ones."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> Num:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp / (self.etp * self.ep)

    def stride(self, axis: str) -> Num:
        """Distance in ranks between neighbours along a mesh axis, by the plan's placement."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        stride: Num = 1.0
        for inner in self.plan.placement:
            if inner == axis:
                break
            stride = stride * sizes[inner]
        return stride

    def cut(self) -> Cut:
        """How these plans cut one block."""
        return _cut(self)


@lru_cache(maxsize=4)  # every part of an estimate asks for it
def _cut(on: Degrees) -> Cut:
    plan = on.plan
    on_grid = plan.layout not in ("1d", "2d-cp")  # each rank has its own part of the activations
    return Cut(
        microbatch=on.microbatch,
        seq=on.seq,
        tp=on.tp,
        ulysses=on.ulysses,
        ring=on.ring,
        ep=on.ep,
        etp=on.etp,
        tp_stride=on.stride("tp"),
        cp_stride=on.stride("cp"),
        ep_stride=on.etp * on.stride("tp"),
        imbalance=on.imbalance,
        dispatch_per_rank=plan.dispatch == "per_rank",
        sequence_parallel=plan.sequence_parallel or plan.sp is None or on_grid,
        gather_keys=plan.cp_kind == "all_gather",
        layout=plan.layout,
        grid=on.grid,
        panels=float(plan.panels),
        grid_scores=plan.attention == "grid",
        flash=plan.attention == "flash",
        lora_rank=plan.lora_rank,
        precision=precision(plan.dtype),
    )


def degrees(plan: Plan, workload: Workload, world: int) -> Degrees:
    """The numbers of one plan on `world` ranks; PlanError or WorkloadError where they do not divide."""
    dp = plan.data_parallel(world)
    ulysses = {"ulysses": plan.cp, "two_level": plan.ulysses}.get(plan.cp_kind, 1)
    if plan.cp % ulysses:
        raise PlanError(f"ulysses={ulysses} does not divide cp={plan.cp}; use a divisor of it")
    etp = plan.etp or plan.tp
    if (plan.tp * plan.cp * dp) % (etp * plan.ep):
        raise PlanError(
            f"ep={plan.ep} x etp={etp} does not divide the {plan.tp * plan.cp * dp} ranks of a pipeline "
            f"stage (tp={plan.tp} x cp={plan.cp} x dp={dp}); use degrees that do"
        )
    group = plan.zero_group or dp * plan.cp
    if (dp * plan.cp) % group:
        raise PlanError(
            f"zero_group={group} does not divide dp={dp} x cp={plan.cp}; use a divisor of {dp * plan.cp}"
        )
    grid = tuple(map(float, plan.grid or default_grid(plan.layout, plan.tp)))
    tp, ring = float(plan.tp), float(plan.cp // ulysses)
    if plan.layout == "2d-cp":  # columns x sequence: weights are cut by the columns alone
        tp, ring, group = grid[0], grid[1], group * int(grid[1])
    return Degrees(
        world=float(world),
        microbatch=float(workload.microbatch),
        num_microbatches=float(workload.num_microbatches(dp)),
        seq=float(workload.seq),
        tp=tp,
        ulysses=float(ulysses),
        ring=ring,
        pp=float(plan.pp),
        vpp=float(plan.vpp),
        dp=float(dp),
        ep=float(plan.ep),
        etp=float(etp),
        zero=float(plan.zero),
        zero_group=float(group),
        recompute=float(RECOMPUTE.index(plan.recompute)),
        schedule=float(SCHEDULES.index(plan.schedule)),
        imbalance=plan.imbalance,
        offload_optimizer=plan.offload_optimizer,
        offload_activations=plan.offload_activations,
        grid=grid,
        plan=plan,
    )


@lru_cache(maxsize=32)  # the same for every stage
def shard_ranks(on: Degrees, from_stage: int, *, experts: bool = False) -> Num:
    """Over how many ranks ZeRO cuts what it shards from stage `from_stage` on (1 below that stage)."""
    replicas = on.expert_replicas if experts else on.replicas
    return np.where(np.asarray(on.zero) >= from_stage, np.minimum(on.zero_group, replicas), 1.0)
