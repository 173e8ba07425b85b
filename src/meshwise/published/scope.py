"""What a published model prices, and the refusal of everything else that a user states.

A published model reproduces its source to the digit, so it cannot price a choice that the source does not
have. Its `Scope` lists the fields of plan, model and workload that it knows; a field that is not
listed must have its default. A refusal is one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from meshwise.core.errors import PlanError
from meshwise.core.refusals import broken
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import CORE_ATTENTION, DEFAULTS, Plan
from meshwise.plan.workload import Workload

Values = tuple[Any, ...]
ANY: Values = ("any value",)
"""Every value of the field is priced (or lies outside the blocks, which are all that is priced)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The fields that a published model knows: `ANY` value of them, or the values listed."""

    convention: str
    plan: Mapping[str, Values]
    workload: Mapping[str, Values]
    model: Mapping[str, Values]

    def check(self, model: Model, plan: Plan, workload: Workload) -> None:
        """Raise PlanError for the first field whose value the published model does not know."""
        self._check_fields(model, self.model, f" of {model.name}")
        if model.num_kv_heads != model.num_heads or model.num_heads * model.head_dim != model.hidden:
            only = "only heads with keys of their own that fill the width"
            raise self.refusal(f"the heads of {model.name}, {only}")
        self._check_fields(workload, self.workload)
        known: dict[str, Values] = {key: (value,) for key, value in DEFAULTS.items()}
        known["recompute_modules"] = ((), CORE_ATTENTION)  # implied by `recompute`, which speaks for itself
        self._check_fields(plan, known | dict(self.plan))

    def check_links(self, cluster: Cluster) -> None:
        """Raise PlanError for links that are not domains of switches inside one another."""
        for level in cluster.levels:
            if level.torus or level.rails:
                raise self.refusal(f"the {'torus' if level.torus else 'rails'} of {cluster.name}")

    def check_divides(self, model: Model, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Raise PlanError unless each of `sizes`, by name (size, parts), divides into its parts."""
        for name, (size, parts) in sizes.items():
            if size % parts:
                raise PlanError(
                    f"{parts} parts do not divide the {size} {name} of {model.name}; use a divisor"
                )

    def check_rules(self, **names: Any) -> None:
        """Raise PlanError for what the convention's own table of refusals holds of `names`."""
        for is_unknown, choice in broken(self.convention, names):
            if is_unknown:
                raise self.refusal(choice.format(**names))

    def refusal(self, choice: str) -> PlanError:
        """The error that says what this published model does not know."""
        return PlanError(f"convention {self.convention} does not price {choice}; use convention default")

    def _check_fields(self, record: Any, known: Mapping[str, Values], of: str = "") -> None:
        for item in fields(record):
            value, values = getattr(record, item.name), known.get(item.name, (item.default,))
            if values is not ANY and value not in values:
                allowed = " or ".join(f"{item.name}={one}" for one in values if one is not None)
                only = f", only {allowed}" if allowed else ""
                shown = item.name if is_dataclass(value) else f"{item.name}={_text(value)}"
                raise self.refusal(f"{shown}{of}{only}")


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
