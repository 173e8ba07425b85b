"""From the words of a command to an answer: what is asked, checked once, and priced.

A *convention* is a named set of counting and timing rules: `default` (ours, with fitted efficiencies),
`ideal` (ours, at the peaks of the data sheet), and published models that we reproduce to the digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.files import write_text
from meshwise.core.ledger import PHASES, Ledger
from meshwise.estimate.single import Estimate, estimate, op_rows
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Layer, Model, num_moe_layers
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.program.block import block
from meshwise.published.nersc_2024_02 import Notebook, notebook
from meshwise.published.nersc_2024_10_plan import Paper, paper

CONVENTIONS = ("default", "ideal", "nersc-2024-02", "nersc-2024-10")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A run of `tokens` tokens, what a GPU-hour costs, and what a GPU draws (None: the chip's power)."""

    tokens: float | None = None
    price_per_gpu_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `meshwise estimate` was asked, as text and numbers."""

    model: str
    cluster: str
    plan: str = ""
    batch: int | None = None
    seq: int | None = None
    microbatch: int = 1
    kind: str = "train"
    convention: str = "default"
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True, slots=True)
class Answer:
    """An estimate under `default` or `ideal`, with the run that a token budget makes of it."""

    estimate: Estimate
    budget: Budget

    def run(self) -> dict[str, float]:
        """Seconds, GPU-hours, cost and energy of the token budget; empty without one."""
        if self.budget.tokens is None:
            return {}
        priced = self.estimate
        seconds = self.budget.tokens / priced.tokens_per_s
        gpu_hours = seconds * priced.cluster.num_chips / 3600
        watts = priced.cluster.chip.power_watts if self.budget.watts is None else self.budget.watts
        run = {
            "tokens": self.budget.tokens,
            "run_s": seconds,
            "days": seconds / 86400,
            "gpu_hours": gpu_hours,
        }
        if self.budget.price_per_gpu_hour is not None:
            run["cost"] = gpu_hours * self.budget.price_per_gpu_hour
        if watts:
            run["energy_joules"] = seconds * priced.cluster.num_chips * watts
        return run

    def layer(self) -> Ledger:
        """The ops of one layer (and, where there are such, one MoE layer), one microbatch, on one rank."""
        model, cut = self.estimate.model, self.estimate.degrees.cut()
        moe = num_moe_layers(model)
        kinds = [("layer", False)] * (moe < model.num_layers) + [("moe_layer", True)] * (moe > 0)
        return Ledger.from_rows(
            row | {"origin": "estimate"}
            for name, is_moe in kinds
            for row in op_rows(block(model, cut, Layer(moe=is_moe)), self.estimate.machine, prefix=name)
        )

    def layer_totals(self) -> dict[str, dict[str, float]]:
        """Sums over the ops of one layer by phase, and the share of its time that waits for links."""
        return {phase: phase_totals(rows) for phase in PHASES if len(rows := self.layer().where(phase=phase))}

    def write_csv(self, path: Path, *, per_layer: bool) -> None:
        """Write the ledger of the step (or of one layer) to `path`."""
        (self.layer() if per_layer else self.estimate.ledger).to_csv(path)

    def to_json(self, *, per_layer: bool) -> dict[str, Any]:
        """The document that `--json` prints."""
        document = self.estimate.to_json(ledger=not per_layer)
        if per_layer:
            document |= {"ledger": self.layer().to_json(), "layer": self.layer_totals()}
        return document | ({"run": self.run()} if self.budget.tokens is not None else {})


def phase_totals(rows: Ledger) -> dict[str, float]:
    """FLOP, bytes, kept bytes and seconds of `rows`; `comm_frac` is the share of exposed communication."""
    totals = {
        name: rows.total(name)
        for name in ("flop", "read_bytes", "write_bytes", "saved_bytes", "payload_bytes", "time_s")
    }
    waiting_s = rows.total("exposed_s")
    return totals | {"comm_frac": waiting_s / totals["time_s"] if totals["time_s"] else 0.0}


@dataclass(frozen=True, slots=True)
class NotebookAnswer:
    """An answer under a convention that reproduces a published notebook, or the paper that grew out of it."""

    estimate: Notebook | Paper

    def write_csv(self, path: Path, *, per_layer: bool) -> None:
        """Write the published tables, with their columns and units."""
        write_text(path, self.estimate.to_csv())

    def to_json(self, *, per_layer: bool) -> dict[str, Any]:
        """The document that `--json` prints."""
        return self.estimate.to_json()


def respond(request: Request) -> Answer | NotebookAnswer:
    """Check a request and price it; a MeshwiseError says what is wrong with it."""
    if request.convention not in CONVENTIONS:
        raise PlanError(
            f"convention {request.convention!r} is unknown; choose one of {', '.join(CONVENTIONS)}"
        )
    _check_budget(request.budget)
    model, cluster, plan = find_model(request.model), find_cluster(request.cluster), parse_plan(request.plan)
    seq = request.seq if request.seq is not None else default_seq(model)
    if request.convention.startswith("nersc") and request.budget != Budget():
        raise PlanError(
            f"convention {request.convention} does not price a whole run; leave out --tokens, --price and "
            "--watts, or use convention default"
        )
    if request.convention == "nersc-2024-02":
        load = Workload(
            batch=1 if request.batch is None else request.batch,
            seq=seq,
            microbatch=request.microbatch,
            kind=request.kind,
        )
        return NotebookAnswer(notebook(model, cluster, plan, load))
    batch = request.batch
    if batch is None:
        batch = plan.data_parallel(cluster.num_chips) * request.microbatch * plan.pp
    load = Workload(batch=batch, seq=seq, microbatch=request.microbatch, kind=request.kind)
    if request.convention == "nersc-2024-10":
        return NotebookAnswer(paper(model, cluster, plan, load))
    ideal = request.convention == "ideal"
    return Answer(estimate(model, cluster, plan, load, ideal=ideal), request.budget)


def default_seq(model: Model) -> int:
    """The sequence that is meant where none is given: what the model allows, 4096 tokens at most."""
    if model.patches is not None:
        return int(model.patches.num_tokens)
    return min(model.max_seq, 4096)


def _check_budget(budget: Budget) -> None:
    for name, value in (
        ("tokens", budget.tokens),
        ("price", budget.price_per_gpu_hour),
        ("watts", budget.watts),
    ):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"--{name} is {value}; it must be a number above zero")
