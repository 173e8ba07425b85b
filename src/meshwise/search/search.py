"""The best plan for a model on a cluster, proven best by pricing all of them.

The space is every combination of tp, cp, ep, pp, microbatch, schedule with its virtual stages,
recomputation and ZeRO stage that divides what it cuts (`choices`). It is priced as one grid; plans
that do not fit the memory are feasible to nobody and drop out. No heuristic prunes it, so the first of
`best` is the fastest plan of the space under this cost model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.estimate.grid import Choices, plan_grid
from meshwise.estimate.single import Estimate, estimate
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import find_overheads
from meshwise.model.architecture import Model
from meshwise.plan.plan import RECOMPUTE, SCHEDULES, Plan, plan_text
from meshwise.plan.workload import Workload

MAX_TP = 64
MAX_CP = 16
MAX_PP = 128
MIN_CONTEXT_TOKENS = 1024
"""A rank's share of a sequence below which context parallelism is not tried."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a search looked at and found; `best` are the fastest plans that fit, fastest first."""

    plans_considered: int
    plans_feasible: int
    elapsed_s: float
    best: tuple[Estimate, ...]

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise search --json` prints."""
        return {
            "plans_considered": self.plans_considered,
            "plans_feasible": self.plans_feasible,
            "elapsed_s": self.elapsed_s,
            "plans_per_s": self.plans_considered / self.elapsed_s,
            "best": [
                {
                    "plan": found.to_json(ledger=False)["plan"],
                    "plan_text": plan_text(found.plan),
                    "microbatch": found.workload.microbatch,
                    "step_s": found.step_s,
                    "mfu": found.mfu,
                    "tokens_per_s": found.tokens_per_s,
                    "memory_bytes": found.memory_bytes,
                }
                for found in self.best
            ],
        }


def choices(model: Model, world: int, batch: int, seq: int, schedules: Sequence[str]) -> Choices:
    """Every value of each axis that can divide what it cuts."""
    layers = model.num_layers
    pp = [x for x in _divisors(world) if x <= MAX_PP and layers % x == 0]
    virtual = sorted({v for stages in pp for v in _divisors(layers // stages) if 1 < v <= 16})
    pairs = [(name, 1) for name in schedules if name in ("gpipe", "1f1b", "zb-h1", "dualpipe")]
    pairs += [(name, 2) for name in schedules if name in ("zb-v", "dualpipe-v")]
    pairs += [("interleaved", v) for v in virtual if "interleaved" in schedules]
    experts = model.moe.num_experts if model.moe else 1
    return Choices(
        tp=[x for x in _divisors(world) if x <= MAX_TP and model.num_heads % x == 0],
        cp=[x for x in _divisors(world) if x <= MAX_CP and seq % x == 0 and seq // x >= MIN_CONTEXT_TOKENS]
        or [1],
        ep=[x for x in _divisors(experts) if world % x == 0],
        microbatch=[x for x in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if batch % x == 0],
        pp=pp,
        schedules=pairs,
        recompute=RECOMPUTE,
        zero=(0, 1, 2, 3),
    )


def _divisors(number: int) -> list[int]:
    small = [x for x in range(1, int(number**0.5) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    top: int = 5,
    base: Plan | None = None,
    schedules: Sequence[str] = SCHEDULES[1:],
) -> Result:
    """Price every plan of the space and return the `top` fastest that fit.

    `base` sets what is not searched (dtype, optimizer, kind of context parallelism, ...). The result has no
    `best` where nothing fits. PlanError for an unknown schedule.
    """
    unknown = [name for name in schedules if name not in SCHEDULES]
    if unknown:
        raise PlanError(f"schedule {unknown[0]!r} is unknown; choose among {', '.join(SCHEDULES)}")
    started = time.perf_counter()
    base = base or Plan()
    space = choices(model, cluster.num_chips, batch, seq, schedules)
    grid = plan_grid(model, cluster.num_chips, batch, seq, space, base)
    pays = find_overheads(cluster.chip, base.software)
    cost = grid.price(model, machine(cluster, base.dtype, overheads=pays))
    # Without a pipeline every schedule is the same plan; it counts once, as 1f1b.
    distinct = (grid.degrees.pp > 1) | (grid.degrees.schedule == SCHEDULES.index("1f1b"))
    plans = grid.valid & distinct
    feasible = plans & (cost.memory.total <= cluster.chip.memory_bytes)
    step_s = np.where(np.broadcast_to(feasible, space.shape), cost.step_s, np.inf).ravel()
    num_feasible = int(np.isfinite(step_s).sum())
    num_best = min(top, num_feasible)
    fastest = np.argpartition(step_s, num_best - 1)[:num_best] if num_best else np.array([], dtype=int)
    best = []
    for cell in fastest[np.argsort(step_s[fastest], kind="stable")]:
        plan, microbatch = grid.plan(tuple(int(i) for i in np.unravel_index(cell, space.shape)))
        best.append(estimate(model, cluster, plan, Workload(batch=batch, seq=seq, microbatch=microbatch)))
    considered = int(np.broadcast_to(plans, space.shape).sum())
    return Result(considered, num_feasible, time.perf_counter() - started, tuple(best))
