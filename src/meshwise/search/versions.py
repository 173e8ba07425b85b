"""The same plan under several versions of the training software: what an upgrade gains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.estimate.one_plan import Estimate
from meshwise.plan.plan import plan_text
from meshwise.search.best_plans import Found


@dataclass(frozen=True, slots=True)
class Version:
    """A version: the same `plan` under it, and the `best` plan that a search finds there, if one fits."""

    software: str
    plan: Estimate
    best: Found | None
    before_s: float

    @property
    def gain_frac(self) -> float:
        """How much shorter than under the first version a step of the same plan is."""
        return 1.0 - self.plan.step_s / self.before_s

    def to_json(self) -> dict[str, Any]:
        """The version, its steps, and what it gains."""
        return {
            "software": self.software,
            "plan_text": plan_text(self.plan.plan),
            "step_s": self.plan.step_s,
            "gain_frac": self.gain_frac,
            "memory_bytes": self.plan.memory_bytes["total"],
            "fits": self.plan.fits,
            "best": self.best and self.best.to_json(),
        }


def versions(
    names: Sequence[str], first: Estimate, fastest: Callable[[str], Found | None]
) -> tuple[Version, ...]:
    """The plan `first` under each of `names`; `fastest`: the fastest plan of a search under one of them."""
    found: list[Version] = []
    for name in names:
        run = first.changed(software=name)
        found.append(Version(name, run, fastest(name), found[0].plan.step_s if found else run.step_s))
    return tuple(found)
