"""The conventions: published models that meshwise reproduces to the digit, each by the name of its rules.

A convention is registered in one place, `_HOMES`, by its name and the module that states it as `CONVENTION`.
What is outside this folder asks `find_convention` and knows no published model by itself.

A published model reproduces its source to the digit, so it cannot price a choice that the source does not
have. Its `Scope` lists the fields of plan, model and workload that it knows; a field that is not listed must
have its default. A refusal is one sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.files import csv_text
from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.refusals import broken, refuse
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import CORE_ATTENTION, DEFAULTS, Plan
from meshwise.plan.workload import Workload

Values = Sequence[Any]
ANY = "any value"
"""Every value of a field is priced (or lies outside the blocks, which are all that is priced)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The fields that a published model knows: `ANY` value, or those listed (of a plan also the default)."""

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
        known: dict[str, Values] = {key: (it, *self.plan.get(key, ())) for key, it in DEFAULTS.items()}
        known["recompute_modules"] = ((), CORE_ATTENTION)  # implied by `recompute`, which speaks for itself
        self._check_fields(plan, known)

    def check_links(self, cluster: Cluster) -> None:
        """Raise PlanError for links that are not domains of switches inside one another."""
        for level in cluster.levels:
            if level.torus or level.rails:
                raise self.refusal(f"the {'torus' if level.torus else 'rails'} of {cluster.name}")

    def check_divides(self, model: Model, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Raise PlanError unless each of `sizes`, by name (size, parts), divides into its parts."""
        for name, (size, parts) in sizes.items():
            refuse("divides", PlanError, name=name, size=size, parts=parts, model=model)

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
            if ANY not in values and value not in values:
                allowed = " or ".join(f"{item.name}={one}" for one in values if one is not None)
                only = f", only {allowed}" if allowed else ""
                shown = item.name if is_dataclass(value) else f"{item.name}={_text(value)}"
                raise self.refusal(f"{shown}{of}{only}")


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PublishedStep(Shown):
    """The answer of a published model for one plan.

    `tables` by their names, and all `rows`, have the `columns` and units of the convention; `results` is what
    a document has of them. `flop` [FLOP] is what one of `ranks` does in `step_s` [s]; `comm_s` are the parts
    of that besides compute.
    """

    convention: str
    model: Model
    cluster: Cluster
    workload: Workload
    plan: Mapping[str, Any]
    ranks: float
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    results: Mapping[str, Any]
    excerpts: Sequence[Excerpt]
    step_s: float
    flop: float
    memory_bytes: Mapping[str, float]
    comm_s: Mapping[str, float]
    ledger: Ledger
    notes: Sequence[str]
    rows_in: ClassVar[str] = "ledger"

    def to_csv(self) -> str:
        """All rows in the order of the columns; absent cells are empty, several values joined by `+`."""
        cells = ([row.get(column) for column in self.columns] for row in self.rows)
        joined = (["+".join(map(str, x)) if isinstance(x, list) else x for x in row] for row in cells)
        return csv_text([self.columns, *joined])

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise estimate --json` prints under the convention."""
        chip, tokens_per_s = self.cluster.chip, self.workload.num_tokens / self.step_s
        mfu = self.flop / (chip.matrix_peak("fp16") * self.step_s)
        total_bytes = sum(self.memory_bytes.values())
        return {
            "model": {"name": self.model.name},
            "cluster": {"name": self.cluster.name, "chip": chip.name},
            "plan": self.plan,
            "workload": {"batch": self.workload.batch, "seq": self.workload.seq},
            "convention": self.convention,
            **self.results,
            "step_s": self.step_s,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / self.ranks,
            "flop_per_step": self.flop * self.ranks,
            "mfu": mfu,
            "hfu": mfu,
            "memory_bytes": {**self.memory_bytes, "buffers": 0.0, "total": total_bytes},
            "fits": total_bytes <= chip.memory_bytes,
            "time_s": {"compute": self.step_s - sum(self.comm_s.values()), **self.comm_s},
            "ledger": self.ledger.to_json(),
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A published model: how it prices, and the batch in sequences of a question that names none (None: as
    in `estimate`)."""

    price: Callable[[Model, Cluster, Plan, Workload], PublishedStep]
    default_batch: int | None = None


def find_convention(name: str) -> Convention:
    """The convention called `name`; WorkloadError where there is none."""
    if name not in _HOMES:
        raise WorkloadError(f"convention={name} must be one of {', '.join(CONVENTIONS)}")
    found: Convention = import_module(f"meshwise.published.{_HOMES[name]}").CONVENTION
    return found
