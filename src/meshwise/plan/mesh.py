"""A plan resolved on a world of ranks: the sizes of every axis.

A `Mesh` holds one plan, or a grid of plans: then a size is an array whose axes are those of the grid, and a
size that does not vary along an axis has length one there. One plan is a grid of one whose sizes are plain
floats; the same arithmetic serves both. Choices that change which ops exist (sequence parallelism, the
layout, dtypes, ...) are the same for a whole grid and stay in `plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from meshwise.core.numbers import larger, smaller, where
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.plan.layouts import default_grid
from meshwise.plan.plan import CP_KINDS, NUMBERS, Plan, chunks_of_rank, is_paired
from meshwise.plan.workload import Workload

SERVING = ("prefill", "decode")
"""Kinds of work that a serving engine does."""
_ULYSSES, _ALL_GATHER, _TWO_LEVEL = map(CP_KINDS.index, ("ulysses", "all_gather", "two_level"))
_INTERLEAVED, _ONE_F_ONE_B = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The sizes of one plan, or of a grid of plans, over `world` ranks; see `Plan` for their meaning.

    `microbatch` in sequences, `num_microbatches` of one data-parallel rank. `cp_kind`, `schedule`,
    `dispatch` and `recompute` are places in `plan.KINDS`. `ulysses` x `ring` is the context-parallel degree.
    `grid` are the axes of a tensor layout of several dimensions. `recompute_layers` is infinite where all
    layers of a stage are recomputed. `overlap_dp` and `overlap_pp` are 0 or 1.

    `ends`: how many layers embedding and head stand for where the layers are dealt to the pipeline's chunks.

    One rank of a stage stands for all: the first, or number `ring_rank` of its ring, with number `shard` of
    the replicas' shards.
    """

    world: float
    batch: float
    seq: float
    microbatch: Num
    num_microbatches: Num
    tp: Num = 1.0
    cp_kind: Num = 0.0
    ulysses: Num = 1.0
    ring: Num = 1.0
    pp: Num = 1.0
    vpp: Num = 1.0
    schedule: Num = 1.0
    dp: Num = 1.0
    ep: Num = 1.0
    etp: Num = 1.0
    dispatch: Num = 0.0
    zero: Num = 1.0
    zero_group: Num = 1.0
    recompute: Num = 0.0
    recompute_layers: Num = np.inf
    imbalance: Num = 1.0
    offload_optimizer: Num = 0.0
    offload_activations: Num = 0.0
    overlap_dp: Num = 1.0
    overlap_pp: Num = 1.0
    grid: tuple[Num, ...] = ()
    ends: tuple[Num, Num] = (0.0, 0.0)
    ring_rank: Num = 0.0
    shard: Num = 0.0
    kind: str = "train"
    plan: Plan = field(default_factory=Plan)

    def mapped(self, of: Callable[[Num], Num]) -> Mesh:
        """The mesh with something done to each of its numbers."""
        changed: dict[str, Any] = {}
        for name in (one.name for one in fields(self) if one.name not in ("kind", "plan")):
            value = getattr(self, name)
            changed[name] = tuple(map(of, value)) if isinstance(value, tuple) else of(value)
        return replace(self, **changed)

    @property
    def cp(self) -> Num:
        """The context-parallel degree."""
        return self.ulysses * self.ring

    @property
    def gathers_keys(self) -> Any:
        """Where the ranks of a ring gather all keys and values instead of passing them round."""
        return self.cp_kind == _ALL_GATHER

    @property
    def replicas(self) -> Num:
        """Ranks that hold the same dense weights: data and context parallel ones."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> Num:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp / (self.etp * self.ep)

    @property
    def is_interleaved(self) -> Any:
        """Where the schedule is the interleaved one."""
        return self.schedule == _INTERLEAVED

    @property
    def is_paired(self) -> Any:
        """Where DualPipe pairs microbatches of experts (`plan.is_paired`)."""
        return is_paired(self.schedule, self.ep) & self.plan.done_by.pairs_microbatches

    @property
    def lone_frac(self) -> Num:
        """Share of the passes of microbatches, those of the bubble too, beside which no other runs.

        They are the pp that fill the pipeline and drain it (1F1B, its chunks and DualPipe alike).
        """
        return smaller(self.pp / (self.num_microbatches + (self.pp - 1.0) / self.vpp), 1.0)

    @property
    def serves(self) -> bool:
        """Whether a serving engine runs the pass."""
        return self.kind in SERVING

    @property
    def trains(self) -> bool:
        """Whether the step has a backward."""
        return self.kind == "train"

    def group_ranks(self, replicas: Num) -> Num:
        """How many of `replicas` ranks, those of experts say, lie in one of ZeRO's groups."""
        return replicas * self.zero_group / self.replicas

    def shard_ranks(self, replicas: Num) -> Num:
        """Over how many of `replicas` ranks ZeRO shards the states of the optimizer."""
        sharded = (self.zero >= 1) * 1.0
        return sharded * self.group_ranks(replicas) + (1.0 - sharded)

    def stride(self, axis: str) -> Num:
        """Distance in ranks between neighbours along a mesh axis, by the plan's placement."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        stride: Num = 1.0
        for inner in self.plan.placement:
            if inner == axis:
                break
            stride = stride * sizes[inner]
        return stride

    def apart(self, stages: Num) -> Num:
        """Distance in ranks of two stages so many places apart, half a pipeline at most: where links join all
        of a pipeline they join both."""
        return larger(smaller(stages, self.pp / 2.0), 1.0) * self.stride("pp")

    def replica_runs(self, first: Num) -> tuple[Num, tuple[Num, Num]]:
        """How ranks lie that are each `first` replicas after the last: their stride, then length and
        stride of the runs that they lie in, where another axis lies between cp and dp.
        """
        inner, outer = sorted(("cp", "dp"), key=self.plan.placement.index)
        size = getattr(self, inner)
        in_run = larger(size / first, 1.0)
        near, far = self.stride(inner), self.stride(outer)
        stride = where(first < size, near * first, far * larger(first / size, 1.0))
        return stride, (where(in_run > 1.0, in_run, np.inf), far)


def mesh_of(plan: Plan, workload: Workload, world: int, sizes: dict[str, Num]) -> Mesh:
    """The mesh of `plan` with the numbers `sizes` (one for each of `NUMBERS`, and a microbatch), unchecked.

    What a plan leaves out follows: dp is what the world leaves, etp is tp (1 where an engine spreads
    experts), ZeRO shards over all replicas. With ep=1 every rank has all experts, and none is busier.
    """
    tp, cp, pp, vpp, schedule = (sizes[key] for key in ("tp", "cp", "pp", "vpp", "schedule"))
    kind, microbatch = sizes["cp_kind"], sizes.get("microbatch", float(workload.microbatch))
    ulysses = 1.0 + (kind == _ULYSSES) * (cp - 1.0) + (kind == _TWO_LEVEL) * (sizes["ulysses"] - 1.0)
    ring = cp / ulysses
    grid: tuple[Num, ...] = tuple(map(float, plan.grid or default_grid(plan.layout, plan.tp)))
    dp = larger(world // (tp * cp * pp), 1.0)
    # 1F1B with several chunks a rank is interleaved.
    schedule = schedule + (_INTERLEAVED - _ONE_F_ONE_B) * ((schedule == _ONE_F_ONE_B) & (vpp > 1))
    group = sizes["zero_group"] + (sizes["zero_group"] == 0) * dp * cp
    etp_left_out = 1.0 + (sizes["ep"] == 1) * (tp - 1.0) if workload.kind in SERVING else tp
    if plan.layout == "2d-cp":  # columns x sequence: weights are cut by the columns alone
        tp, ring, group = grid[0], grid[1], group * grid[1]
    resolved = sizes | {
        "tp": tp,
        "vpp": chunks_of_rank(schedule, vpp),
        "schedule": schedule,
        "dp": dp,
        "etp": sizes["etp"] + (sizes["etp"] == 0) * etp_left_out,
        "zero_group": group,
        "imbalance": 1.0 + (sizes["ep"] > 1) * (sizes["imbalance"] - 1.0),
        "ulysses": ulysses,
    }
    return Mesh(
        world=float(world),
        batch=float(workload.num_sequences),
        seq=float(workload.seq),
        microbatch=microbatch,
        num_microbatches=larger(workload.num_sequences // (dp * microbatch), 1.0),
        ring=ring,
        grid=grid,
        kind=workload.kind,
        plan=plan,
        **{key: resolved[key] for key in NUMBERS if key != "cp"},
    )
