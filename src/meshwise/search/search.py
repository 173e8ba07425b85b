"""The best plan for a model on a cluster, proven best by pricing all of them.

A key that the caller states has the stated values only, all others those of `search.space`. Every
combination that divides what it cuts is priced by the same path as one plan (`estimate.grid`), and nothing is
pruned: the first of `best` is the fastest plan of the space that fits. Plans that are the same in other words
count once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.notebook import Shown
from meshwise.estimate.grid import price_grid
from meshwise.estimate.single import Estimate, estimate
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan, plan_text
from meshwise.plan.workload import Workload
from meshwise.search.kept import Found, Kept, fastest_first
from meshwise.search.space import free_values, offloaded_values

MEMORY_FRAC = 0.92
"""Share of the memory that a plan may need; the rest is for what the estimate does not know."""

MAX_FRONT = 30
"""Plans of the Pareto front that are kept for the answer."""

MAX_GROWTH = 64
"""How many times more chips are tried where nothing fits."""

Stated = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Result(Shown):
    """What a search looked at and found.

    `capacity_bytes`: what a plan may need. `best`: the fastest plan of each family that fits, fastest first;
    `num_variants`: how many plans of its family fit. `pareto`: plans that fit and that no other beats in both
    step time and memory, fastest first. Where nothing fits, `nearest_miss` needs least memory, and on
    `needs_chips` chips a plan fits (0: on none of the numbers tried). Where there is no plan, `reason` says
    why. `beside` is a plan that the caller wants to see beside the best. `stated`: the values that keys were
    given.
    """

    plans_considered: int
    plans_feasible: int
    elapsed_s: float
    capacity_bytes: float
    best: tuple[Estimate, ...]
    num_variants: tuple[int, ...]
    pareto: tuple[Found, ...]
    nearest_miss: Found | None
    needs_chips: int = 0
    reason: str = ""
    beside: Estimate | None = None
    stated: Stated = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise search --json` prints."""
        miss = self.nearest_miss
        return {
            "plans_considered": self.plans_considered,
            "plans_feasible": self.plans_feasible,
            "elapsed_s": self.elapsed_s,
            "plans_per_s": self.plans_considered / self.elapsed_s,
            "capacity_bytes": self.capacity_bytes,
            "best": [_best_json(found, num) for found, num in zip(self.best, self.num_variants, strict=True)],
            "pareto": [found.to_json() for found in self.pareto],
            "nearest_miss": miss
            and miss.to_json()
            | {
                "short_bytes": miss.memory_bytes - self.capacity_bytes,
                "needs_chips": self.needs_chips or None,
            },
            "reason": self.reason or None,
            "beside": self.beside and _best_json(self.beside, 1) | {"fits": self.beside.fits},
        }


def _best_json(found: Estimate, num_variants: int) -> dict[str, Any]:
    return {
        "plan": found.to_json(ledger=False)["plan"],
        "plan_text": plan_text(found.plan),
        "microbatch": found.workload.microbatch,
        "step_s": found.step_s,
        "mfu": found.mfu,
        "tokens_per_s": found.tokens_per_s,
        "memory_bytes": found.memory_bytes,
        "time_s": found.time_s,
        "num_variants": num_variants,
    }


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    stated: Stated | None = None,
    top: int = 5,
    memory_frac: float = MEMORY_FRAC,
) -> Result:
    """Price every plan of the space; keep the fastest of each of the `top` families that fit the memory.

    Where none fits, offloading is tried too (a plan that does without is the simpler one).
    `stated`: the values that keys of the plan (and `microbatch`) may have, in place of all of them.
    `memory_frac`: share of a chip's memory that a plan may need. The result has no `best` where nothing fits.
    PlanError where a stated key is unknown.
    """
    started, stated = time.perf_counter(), stated or {}
    workload = Workload(batch=batch, seq=seq)
    kept = _price(model, cluster, workload, stated, memory_frac)
    if kept.considered and not kept.feasible:
        kept = _price(model, cluster, workload, offloaded_values(cluster) | dict(stated), memory_frac)
    best = fastest_first(kept.fastest.values())[:top]
    families = {id(found): family for family, found in kept.fastest.items()}
    no_fit = kept.considered > 0 and not best
    return Result(
        plans_considered=kept.considered,
        plans_feasible=kept.feasible,
        elapsed_s=time.perf_counter() - started,
        capacity_bytes=kept.capacity_bytes,
        best=tuple(
            estimate(model, cluster, found.plan, replace(workload, microbatch=found.microbatch))
            for found in best
        ),
        num_variants=tuple(kept.num_variants[families[id(found)]] for found in best),
        pareto=tuple(kept.front[:MAX_FRONT]),
        nearest_miss=kept.miss if no_fit else None,
        needs_chips=_needs_chips(model, cluster, workload, stated, memory_frac) if no_fit else 0,
        reason="" if kept.considered else _reason(model, cluster, workload, stated),
        stated=stated,
    )


def _price(model: Model, cluster: Cluster, workload: Workload, stated: Stated, memory_frac: float) -> Kept:
    kept = Kept(memory_frac * cluster.chip.memory_bytes)
    space = free_values(model, cluster, workload) | dict(stated)
    if "recompute_layers" not in stated and "full" not in space["recompute"]:
        del space["recompute_layers"]
    for cells in price_grid(model, cluster, workload, space, Plan(), distinct=True):
        kept.add(cells)
    return kept


def _needs_chips(
    model: Model, cluster: Cluster, workload: Workload, stated: Stated, memory_frac: float
) -> int:
    """The smallest doubling of the chips on which a plan fits; 0 if none of those tried is enough."""
    num_chips = 2 * cluster.num_chips
    while num_chips <= MAX_GROWTH * cluster.num_chips:
        if _price(model, replace(cluster, num_chips=num_chips), workload, stated, memory_frac).feasible:
            return num_chips
        num_chips *= 2
    return 0


def _reason(model: Model, cluster: Cluster, workload: Workload, stated: Stated) -> str:
    """Why no combination is a plan: what the first stated one breaks by itself, if it does."""
    first = {key: values[0] for key, values in stated.items() if key != "microbatch"}
    microbatch = stated.get("microbatch", (1,))[0]
    try:
        estimate(model, cluster, Plan(**first), replace(workload, microbatch=microbatch))
    except MeshwiseError as error:
        return str(error)
    return f"no combination of degrees divides {cluster.num_chips} ranks and a batch of {workload.batch}"
