"""The instances of a server that was asked for: one model and engine, on whatever cluster and plan."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from meshwise.core.errors import PlanError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import FORMATS, as_released
from meshwise.serve.engine import Engine
from meshwise.serve.experts import unevenly_routed
from meshwise.serve.screen import MAX_RANKS
from meshwise.serve.serving import Serving, max_sequences, serving, speculating

_DEGREES = frozenset({"tp", "cp", "pp", "dp", "ep", "etp"})


@dataclass(frozen=True, slots=True)
class StatedPlan:
    """A plan and which `keys` of it were stated; one that `is_whole`, an object, leaves no format open."""

    plan: Plan
    keys: Collection[str]
    is_whole: bool = False

    @property
    def has_layout(self) -> bool:
        """Whether it says how an instance is cut."""
        return bool(self.keys if self.is_whole else _DEGREES & {*self.keys})

    def on(self, cluster: Cluster, model: Model) -> Plan:
        """The plan of an instance: without a layout tp over all of it, without formats those released."""
        plan = self.plan if self.has_layout else replace(self.plan, tp=cluster.num_chips)
        return replace(plan, **as_released(model, FORMATS if self.is_whole else self.keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """What all instances have in common.

    Tokens of a prompt and an output, the engine and its own time between two passes [s], the share of the
    memory that they may use; experts that are liked unevenly, as a power law or as measured loads; guesses
    (`speculate`) by a draft model or by multi-token prediction.
    """

    model: Model
    prompt: int
    output: int
    engine: Engine
    engine_s: float = 0.0
    memory_frac: float = 0.9
    expert_skew: float = 0.0
    expert_loads: Path | None = None
    speculate: str = ""
    draft_model: Model | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether some experts are liked more than others, or copied for it."""
        copies = self.model.moe is not None and self.model.moe.copies > 0
        return bool(self.expert_skew) or copies or self.expert_loads is not None

    def cut(self, cluster: Cluster, plan: Plan, engine: Engine | None = None, **tokens: int) -> Serving:
        """An instance on all of `cluster` as `plan` cuts it, its experts liked evenly, without guesses."""
        return serving(
            self.model, cluster, plan, **{"prompt": self.prompt, "output": self.output, **tokens},
            engine=engine or self.engine, engine_s=self.engine_s, memory_frac=self.memory_frac,
        )  # fmt: skip

    def on(self, cluster: Cluster, stated: StatedPlan, engine: Engine | None = None) -> Serving:
        """An instance on all of `cluster`, as it was stated."""
        found = self.cut(cluster, stated.on(cluster, self.model), engine)
        if self.is_uneven:
            found = unevenly_routed(found, skew=self.expert_skew, loads=self.expert_loads)
        return speculating(found, self.speculate, self.draft_model) if self.speculate else found

    def default(self, cluster: Cluster, stated: StatedPlan) -> Serving:
        """The instance for who states no layout: tp over all of a node, else over 8 ranks, else what works.

        Of a model that has no room on 8 ranks the least that it needs, if the cluster has so many.
        """
        whole, ranks = cluster.num_chips, cluster.levels[0].ranks if cluster.levels else 1
        usual = [num for num in (8, 4, 2, 1) if num <= min(whole, ranks)]
        wide = [2**i for i in range(4, 20) if 2**i <= min(whole, MAX_RANKS)]
        found = None
        for num in dict.fromkeys([*([whole] if whole <= ranks else []), *usual, *wide]):
            name = cluster.name if num == whole else f"{cluster.chip.name}:{num}"
            try:
                of = self.on(replace(cluster, num_chips=num, name=name), stated)
            except PlanError:
                continue
            found = found or of
            if max_sequences(of):
                return of
        return found or self.on(cluster, stated)
