"""How a choice depends on what was assumed: the search made again without it.

Which assumption would change the choice, and what the choice loses where it does not hold: each adversity of
`estimate.adverse` comes alone, and memory is as full as at the bad end of the interval of the estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.estimate.adverse import Adversity, together
from meshwise.estimate.one_plan import Estimate
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
        figures = {name: getattr(self, name) for name in ("kept_s", "loss_frac", "longer_frac")}
        return {"name": self.name, "factor": self.factor, "best": self.best and self.best.to_json()} | {
            name: value if value < float("inf") else None for name, value in figures.items()
        }


def hurts_most(weighed: Sequence[Assumption]) -> Assumption:
    """The assumption under which today's choice takes longest."""
    return max(weighed, key=lambda one: one.kept_s)


def weigh(
    best: Estimate, capacity_bytes: float, fastest: Callable[[Adversity], Found | None]
) -> tuple[Assumption, ...]:
    """Search again under each adversity; `best`: today's choice.

    `capacity_bytes`: what a plan may need. `fastest`: the fastest plan that fits under an adversity.
    """
    memory = best.memory_bytes["total"]
    fuller = min(memory / best.memory_bytes_interval.p90, 1.0)
    each = asdict(together(best.model, best.cluster, best.plan))
    each |= {"memory": fuller, "experts_unbalanced": best.model.moe is not None}
    alone = {name: Adversity(**{name: value}) for name, value in each.items() if value is not False}

    def kept_s(one: Adversity) -> float:
        return one.step_s(best) if memory <= one.memory * capacity_bytes else float("inf")

    return tuple(
        Assumption(name, float(each[name]), best.step_s, fastest(one), kept_s(one))
        for name, one in alone.items()
    )
