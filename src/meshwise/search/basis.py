"""What a found plan rests on beside its price: who runs it, what it leans on, its step when things go worse.

Two plans are *as fast as the interval tells* where their steps differ by no more than the terms in which they
differ may be wrong: by a share `p90 - 1` of each, where p90 is the bad end of the interval of a step of 1.
Terms that both have in common are wrong in both. Less than `NOTABLE` of a step tells no two plans apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.files import read_catalog
from meshwise.core.units import duration
from meshwise.estimate.adverse import together
from meshwise.estimate.one_plan import Estimate
from meshwise.launch.runs import runs
from meshwise.launch.settings import training_on
from meshwise.launch.write import launch
from meshwise.plan.plan import DEFAULTS, Plan
from meshwise.program.implementation import loss_fusion

NOTABLE = 0.005
"""Share of a step from which on a difference, or communication that hides, is worth a word."""

KINDS: dict[str, str] = read_catalog("words.toml")["efficiencies"]
"""What has an efficiency, in a word."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The frameworks whose settings (`launch`) say a plan whole, and its step under all adversities."""

    runs_in: tuple[str, ...]
    robust_s: float
    leans_on: str

    def to_json(self) -> dict[str, Any]:
        """What the document says of a plan beside its price."""
        return {"runs_in": list(self.runs_in), "robust_s": self.robust_s, "leans_on": self.leans_on}


def basis(found: Estimate) -> Basis:
    """What the plan of an estimate rests on."""
    adversity = together(found.model, found.cluster, found.plan)
    names = tuple(name for name in training_on(found.cluster.chip) if _runs_it(name, found))
    return Basis(names, adversity.step_s(found), "; ".join(_supports(found)))


def hidden_text(found: Estimate, least_frac: float) -> str:
    """Communication that hides behind compute, where it takes so much of the step or more."""
    hidden = {name: s for name, s in found.hidden_s.items() if s >= least_frac * found.step_s}
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in hidden.items())


def _supports(found: Estimate) -> Iterator[str]:
    """What must hold for the price of a plan to hold."""
    if hidden := hidden_text(found, NOTABLE):
        yield f"{hidden} hidden behind compute"
    if found.model.moe is not None and found.mesh.ep > 1 and found.mesh.imbalance == 1.0:
        yield "balanced experts"
    if (fused := loss_fusion(found.plan)) != "none":
        yield f"a fused loss ({fused})"
    yield f"{found.plan.implementation} on {found.plan.software}"
    interval = found.step_s_interval
    if found.inherited:  # of all chips, which they are is in the notes of `estimate`
        low, high = (end / found.step_s - 1.0 for end in (interval.p10, interval.p90))
        others = (
            f"{', '.join(KINDS[name.partition('.')[0]] for name in names)}: "
            f"{origin.partition(' (')[0] if origin.startswith('all ') else origin}"
            for origin, names in found.inherited.items()
        )
        chip = found.cluster.chip.name
        yield f"{chip} with efficiencies of others ({'; '.join(others)}), step {low:+.0%} to {high:+.0%}"


def simplest(
    found: Sequence[Estimate], runnable: Estimate | None, step_s: Callable[[Estimate], float]
) -> Estimate:
    """Of the plans as fast as the first the one with fewest axes, then with fewest keys stated.

    Of equals `runnable`; `step_s` is the step by which plans are ranked.
    """
    as_fast_as_first = (one for one in found if as_fast(one, found[0], step_s(one) - step_s(found[0])))
    return min(as_fast_as_first, key=lambda one: (complexity(one.plan), one is not runnable, step_s(one)))


def as_fast(one: Estimate, best: Estimate, longer_s: float) -> bool:
    """Whether a plan is as fast as the best, as far as the interval tells (see the top of this file)."""
    differs_s = sum(abs(one.time_s[name] - best.time_s[name]) for name in best.time_s)
    may_be_wrong_s = (best.step_s_interval.p90 / best.step_s - 1.0) * differs_s
    return longer_s <= max(may_be_wrong_s, NOTABLE * best.step_s)


def complexity(plan: Plan) -> tuple[int, int]:
    """The axes of a plan, and its keys that are stated."""
    axes = sum(size > 1 for size in (plan.tp, plan.cp, plan.pp, plan.ep))
    return axes, sum(getattr(plan, key) != value for key, value in DEFAULTS.items())


def _runs_it(framework: str, found: Estimate) -> bool:
    if not runs((framework,), found.model, found.mesh):
        return False
    try:
        return not launch(found.model, found.cluster, found.plan, found.workload, framework).not_expressed
    except MeshwiseError:
        return False
