"""Which assumption would change the choice, and which choice is best if the worst of them holds.

Each adversity of `estimate.adverse` comes alone, and memory is as full as at the bad end of the interval of
the estimate; the search is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwise.estimate.adverse import Adversity, together
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.search.best_plans import Found


@dataclass(frozen=True, slots=True)
class Assumption:
    """What `name` worse would choose: `best`, while today's choice would take `kept_s`, `today_s` as it is.

    `factor` is what is left of a rate or of the overlap; 1 for experts out of balance.
    """

    name: str
    factor: float
    today_s: float
    best: Found | None
    kept_s: float

    @property
    def loss_frac(self) -> float:
        """How much longer today's choice would take than the best one then."""
        return self.kept_s / self.best.step_s - 1.0 if self.best else 0.0

    @property
    def longer_frac(self) -> float:
        """How much longer today's choice takes then."""
        return self.kept_s / self.today_s - 1.0

    def to_json(self) -> dict[str, Any]:
        """The assumption, the best plan under it, and what today's choice would lose."""
        best = self.best.to_json() if self.best else None
        return {"name": self.name, "factor": self.factor, "best": best, "kept_s": _finite(self.kept_s)} | {
            "loss_frac": _finite(self.loss_frac),
            "longer_frac": _finite(self.longer_frac),
        }


@dataclass(frozen=True, slots=True)
class Weighed:
    """All assumptions, and of the plans that are best somewhere the one whose worst time is least."""

    assumptions: tuple[Assumption, ...]
    safest: Found
    worst_s: float

    @property
    def hurts_most(self) -> Assumption:
        """The assumption under which today's choice takes longest."""
        return max(self.assumptions, key=lambda one: one.kept_s)

    def to_json(self) -> dict[str, Any]:
        """The document's `assumptions`, `hurts_most` and `safest`."""
        return {
            "hurts_most": self.hurts_most.name,
            "assumptions": [one.to_json() for one in self.assumptions],
            "safest": self.safest.to_json() | {"worst_s": _finite(self.worst_s)},
        }


def weigh(
    chosen: Sequence[Estimate], capacity_bytes: float, fastest: Callable[[Adversity], Found | None]
) -> Weighed:
    """Search again under each adversity; `chosen`: the best plans, fastest first.

    `capacity_bytes`: what a plan may need. `fastest`: the fastest plan that fits under an adversity.
    """
    best = chosen[0]
    fuller = min(best.memory_bytes["total"] / best.memory_bytes_interval.p90, 1.0)
    each = asdict(together(best.model, best.cluster, best.plan)) | {"memory": fuller}
    alone = {name: Adversity(**{name: value}) for name, value in each.items() if value is not False}
    if best.model.moe is None:
        del alone["experts_unbalanced"]
    found = {name: fastest(adversity) for name, adversity in alone.items()}
    plans = [
        Found(one.plan, {"microbatch": one.workload.microbatch}, one.step_s, one.memory_bytes["total"])
        for one in chosen
    ]
    plans += [one for one in found.values() if one is not None]

    def step_s(plan: Found, adversity: Adversity) -> float:
        work = replace(best.workload, microbatch=plan.microbatch)
        here = estimate(best.model, best.cluster, plan.plan, work)
        fits = here.memory_bytes["total"] <= adversity.memory * capacity_bytes
        return adversity.step_s(here) if fits else float("inf")

    worst_s, safest = min(
        ((max(step_s(plan, one) for one in alone.values()), plan) for plan in plans), key=lambda pair: pair[0]
    )
    assumptions = tuple(
        Assumption(name, float(each[name]), best.step_s, found[name], step_s(plans[0], one))
        for name, one in alone.items()
    )
    return Weighed(assumptions, safest, worst_s)


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
