"""What a found plan rests on beside its price: the frameworks that run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import Estimate
from meshwise.launch.runs import runs
from meshwise.launch.settings import TRAINING
from meshwise.launch.write import launch


@dataclass(frozen=True, slots=True)
class Basis:
    """The frameworks that run a plan, by the settings that `launch` writes for it, and lose nothing of it."""

    runs_in: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What the document says of a plan beside its price."""
        return {"runs_in": list(self.runs_in)}


def basis(found: Estimate) -> Basis:
    """What the plan of an estimate rests on."""
    return Basis(tuple(name for name in TRAINING if _runs_it(name, found)))


def _runs_it(framework: str, found: Estimate) -> bool:
    if not runs(framework, found.model, found.mesh):
        return False
    try:
        return not launch(found.model, found.cluster, found.plan, found.workload, framework).not_expressed
    except MeshwiseError:
        return False
