"""The step when things go worse than the estimate has it: slower rates, less overlap, experts out of balance.

A *robust* plan is one whose step stays short when all of these come together (`TOGETHER`):
- half of what hides behind compute does not;
- the busiest rank of experts gets as many tokens as without a loss that balances them
  (`Overheads.imbalance`, arXiv 2408.15664), where experts are spread;
- links give 20 % less;
- compute and memory are as slow as at the bad end of the estimate's interval.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshwise.estimate.intervals import interval_of
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.priced_model import PricedModel, priced_model
from meshwise.estimate.step import price_step
from meshwise.estimate.timing import Machine
from meshwise.machine.hardware import Cluster, Rates
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan

LINKS_FRAC, OVERLAP_FRAC = 0.8, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Adversity:
    """Factors of the rates of kernels (compute and memory) and of links, and of what hides behind compute."""

    kernels: float = 1.0
    links: float = 1.0
    overlap: float = 1.0
    experts_unbalanced: bool = False

    def priced(self, of: PricedModel) -> PricedModel:
        """The same plans then: on the slower machine, with the imbalance of their experts."""
        if self == Adversity():
            return of
        mesh = of.mesh
        if self.experts_unbalanced and of.model.moe is not None:
            busiest = of.machine.overheads.imbalance(mesh.ep)
            mesh = replace(mesh, imbalance=np.maximum(mesh.imbalance, busiest))
        return priced_model(of.model, mesh, adverse_machine(of.machine, self))

    def step_s(self, found: Estimate) -> float:
        """The step of an estimate then, its layers where they are."""
        return float(price_step(self.priced(found.step.of)).step_s)


@lru_cache(maxsize=256)
def adverse_machine(machine: Machine, adversity: Adversity) -> Machine:
    """The machine with the rates and the overlap that are left."""
    overheads, exposed_frac = machine.overheads, 1.0 - adversity.overlap
    return replace(
        machine,
        base=_slower(machine.base, adversity),
        by_dtype={dtype: _slower(rates, adversity) for dtype, rates in machine.by_dtype.items()},
        overheads=replace(
            overheads,
            joule_per_flop={of: joule / adversity.kernels for of, joule in overheads.joule_per_flop.items()},
            tp_exposed_frac=max(overheads.tp_exposed_frac, exposed_frac),
            interference_frac=max(overheads.interference_frac, exposed_frac),
        ),
    )


def _slower(rates: Rates, adversity: Adversity) -> Rates:
    links = [link._replace(bytes_per_s=adversity.links * link.bytes_per_s) for link in rates.links]
    return replace(
        rates,
        matrix_flop_per_s=adversity.kernels * rates.matrix_flop_per_s,
        vector_flop_per_s=adversity.kernels * rates.vector_flop_per_s,
        memory_bytes_per_s=adversity.kernels * rates.memory_bytes_per_s,
        links=tuple(links),
    )


def together(model: Model, cluster: Cluster, plan: Plan) -> Adversity:
    """All adversities of a training step at once."""
    slower = min(1.0 / interval_of("step_s", 1.0, model, cluster, plan).p90, 1.0)
    return Adversity(kernels=slower, links=LINKS_FRAC, overlap=OVERLAP_FRAC, experts_unbalanced=True)
