"""The conventions: published models that meshwise reproduces to the digit, each by the name of its rules.

A convention is registered in one place, `_HOMES`, by its name and the module that states it as `CONVENTION`.
What is outside this folder asks `find_convention` and knows no published model by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from meshwise.core.errors import WorkloadError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.published.scope import Scope

_HOMES = {"nersc-2024-02": "nersc.notebook", "nersc-2024-10": "nersc.paper_plan"}
CONVENTIONS = tuple(_HOMES)
"""The names of all conventions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A table of an answer as a terminal shows it: some of its columns, and sentences below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    sentences: Sequence[str]


class PublishedStep(Protocol):
    """The answer of a published model for one plan."""

    def to_csv(self) -> str:
        """All tables, with the columns and units of the convention."""

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise estimate --json` prints under the convention."""

    def excerpts(self) -> Iterator[Excerpt]:
        """What `meshwise estimate` prints on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A published model: what it answers, in which columns and units, what it knows, and how it prices.

    `default_batch` is the batch in sequences of a question that names none (None: as in `estimate`).
    """

    name: str
    answers: str
    columns: tuple[str, ...]
    units: str
    rules: Scope
    price: Callable[[Model, Cluster, Plan, Workload], PublishedStep]
    default_batch: int | None = None


def find_convention(name: str) -> Convention:
    """The convention called `name`; WorkloadError where there is none."""
    if name not in _HOMES:
        raise WorkloadError(f"convention={name} must be one of {', '.join(CONVENTIONS)}")
    found: Convention = import_module(f"meshwise.published.{_HOMES[name]}").CONVENTION
    return found
