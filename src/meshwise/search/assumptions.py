"""Which assumption would change the choice, and which choice is best if the worst of them holds.

The interval of an estimate says by how much measured steps exceed predicted ones at its bad end. Each rate of
the machine in turn is taken to be so much lower, and memory so much fuller, and the search is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.machine.hardware import Cluster
from meshwise.search.best_plans import Found
from meshwise.search.machines import changed

RATES = ("compute", "memory_rate", "inner", "outer", "memory")


@dataclass(frozen=True, slots=True)
class Assumption:
    """What `factor` times the rate `name` would choose: `best`, while today's choice would take `kept_s`."""

    name: str
    factor: float
    best: Found | None
    kept_s: float

    @property
    def loss_frac(self) -> float:
        """How much longer today's choice would take than the best one then."""
        return self.kept_s / self.best.step_s - 1.0 if self.best else 0.0

    def to_json(self) -> dict[str, Any]:
        """The assumption, the best plan under it, and what today's choice would lose."""
        best = self.best.to_json() if self.best else None
        return {"name": self.name, "factor": self.factor, "best": best, "kept_s": _finite(self.kept_s)} | {
            "loss_frac": _finite(self.loss_frac)
        }


@dataclass(frozen=True, slots=True)
class Weighed:
    """All assumptions, and of the plans that are best somewhere the one whose worst time is least."""

    assumptions: tuple[Assumption, ...]
    safest: Found
    worst_s: float

    def to_json(self) -> dict[str, Any]:
        """The document's `assumptions` and `safest`."""
        return {
            "assumptions": [one.to_json() for one in self.assumptions],
            "safest": self.safest.to_json() | {"worst_s": _finite(self.worst_s)},
        }


def weigh(
    chosen: Sequence[Estimate], capacity_bytes: float, fastest: Callable[[Cluster], Found | None]
) -> Weighed:
    """Search again with each rate at its bad end; `chosen`: the best plans, fastest first.

    `capacity_bytes`: what a plan may need. `fastest`: the fastest plan that fits a cluster.
    """
    best = chosen[0]
    slower = best.step_s / best.step_s_interval.p90
    fuller = best.memory_bytes["total"] / best.memory_bytes_interval.p90
    factors = {name: min(fuller if name == "memory" else slower, 1.0) for name in RATES}
    machines = {name: changed(best.cluster, {name: factor}) for name, factor in factors.items()}
    found = {name: fastest(machine) for name, machine in machines.items()}
    plans = [
        Found(one.plan, {"microbatch": one.workload.microbatch}, one.step_s, one.memory_bytes["total"])
        for one in chosen
    ]
    plans += [one for one in found.values() if one is not None]

    def worst_s(plan: Found) -> float:
        return max(_step_s(plan, best, machines[name], capacity_bytes) for name in RATES)

    safest = min(plans, key=worst_s)
    kept_s = {name: _step_s(plans[0], best, machine, capacity_bytes) for name, machine in machines.items()}
    assumptions = tuple(Assumption(name, factors[name], found[name], kept_s[name]) for name in RATES)
    return Weighed(assumptions, safest, worst_s(safest))


def _step_s(plan: Found, best: Estimate, cluster: Cluster, capacity_bytes: float) -> float:
    """Step time of a plan on a changed cluster; infinite where it does not fit or is none."""
    try:
        here = estimate(best.model, cluster, plan.plan, replace(best.workload, microbatch=plan.microbatch))
    except MeshwiseError:
        return float("inf")
    share = cluster.chip.memory_bytes / best.cluster.chip.memory_bytes
    return here.step_s if here.memory_bytes["total"] <= share * capacity_bytes else float("inf")


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
