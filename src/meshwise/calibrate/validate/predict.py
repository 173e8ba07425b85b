"""Every row of the files, with what meshwise predicts for it.

A row of a run gives up to two predictions: `step_s`, and `memory_bytes` where memory was measured. A row
of an op or a collective gives one: `gemm_s`, `attention_s`, `decode_s`, `memory_s`, `experts_s`,
`dispatch_s`, `collective_s` or `peer_all_reduce_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwise.calibrate.validate.errors import grouped, summarize
from meshwise.calibrate.validate.express import chip_of, express, memory_kind_of
from meshwise.calibrate.validate.rows import BadRow, Run, columns, read_runs
from meshwise.core.errors import ClusterError, MeshwiseError
from meshwise.estimate.single import Estimate, estimate
from meshwise.machine.overheads import Tables, find_overheads

COMPETING = ("source", "model", "layers", "hidden", "heads", "seq", "gpu", "gpus", "global_batch", "dtype")
"""What runs have in common that differ only in their plan."""

OP_COLUMNS = ("hardware", "op")
"""Columns that tell a file of ops and collectives from one of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One measured number and the one predicted for it, or the reason why there is none.

    `parts` are the seconds (or bytes) that `predicted` is made of. `group` names rows that compete:
    the same model, batch and number of GPUs.
    """

    id: str
    source: str
    chip: str
    quantity: str
    measured: float | None = None
    predicted: float | None = None
    reason: str = ""
    where: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    group: tuple[Any, ...] = ()

    @property
    def expressed(self) -> bool:
        """Whether there is a prediction."""
        return self.predicted is not None

    @property
    def error_frac(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """All predictions, in the order of the files."""

    rows: list[Prediction]

    def of(self, quantity: str) -> list[Prediction]:
        """The rows of one quantity."""
        return [row for row in self.rows if row.quantity == quantity]

    @property
    def quantities(self) -> list[str]:
        """The quantities, in order of appearance."""
        return list(dict.fromkeys(row.quantity for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise validate --json` prints."""
        names = ("id", "source", "chip", "quantity", "measured", "predicted", "error_frac", "expressed")
        rows = [
            {name: getattr(row, name) for name in names} | {"reason": row.reason or None} for row in self.rows
        ]
        summary = {
            quantity: asdict(summarize([row.error_frac for row in self.of(quantity)]))
            for quantity in self.quantities
        }
        return {"rows": rows, "summary": summary}


def validate(paths: Iterable[Path]) -> Validation:
    """Predict every row of `paths`; DataError for a file that cannot be read as a table of measurements."""
    rows: list[Prediction] = []
    for path in paths:
        if set(OP_COLUMNS) <= set(columns(path)):
            rows += predict_ops(path)
        else:
            runs, bad = read_runs(path)
            rows += [prediction for run in runs for prediction in predict_run(run)]
            rows += map(_unread, bad)
    return Validation(rows)


def _unread(row: BadRow) -> Prediction:
    return Prediction(
        id=row.id, source=row.source, chip="", quantity="step_s", reason=row.reason, where=row.where
    )


# --- runs --------------------------------------------------------------------------------------


def predict_run(run: Run) -> list[Prediction]:
    """The predictions of one run: its step time, and its memory where that was measured."""
    measured = {"step_s": run.step_s, "memory_bytes": run.memory_bytes}
    try:
        chip = chip_of(run.gpu, run.year).name
    except ClusterError as error:
        return [
            _said(run, name, value, "", reason=f"{run.where}, column gpu: {error}")
            for name, value in measured.items()
            if value is not None
        ]
    try:
        found = estimate_run(run)
    except MeshwiseError as error:
        return [
            _said(run, name, value, chip, reason=str(error))
            for name, value in measured.items()
            if value is not None
        ]
    predicted = {"step_s": found.step_s, "memory_bytes": reported_bytes(run, found)}
    parts = {"step_s": found.time_s, "memory_bytes": found.memory_bytes}
    return [
        _said(run, name, value, chip, predicted=predicted[name], parts=parts[name])
        for name, value in measured.items()
        if value is not None
    ]


def estimate_run(run: Run, among: Tables | None = None) -> Estimate:
    """The estimate of a run; `among` are the overheads to use, if not those of the catalog.

    Of the plans that the row leaves open, the first whose memory fits; selective recomputation of today's
    software (norms, activation functions) is taken to fit where half the activations do.
    """
    said = express(run)
    overheads = find_overheads(said.cluster.chip, said.software, among=among)
    if said.launches_block:
        overheads = replace(overheads, launches_block=True)
    imbalance = overheads.expert_imbalance if run.experts and "force-balanced" not in run.notes else 1.0
    for plan in said.plans:
        plan = replace(plan, imbalance=imbalance)
        found = estimate(said.model, said.cluster, plan, said.workload, overheads=overheads)
        spared = 0.5 * found.memory_bytes["activations"] if plan.recompute == "selective" else 0.0
        if found.memory_bytes["total"] - spared <= said.cluster.chip.memory_bytes:
            break
    return found


def reported_bytes(run: Run, found: Estimate) -> float:
    """The memory that a row of this kind reports (`express.memory_kind_of`), of the estimate `found`."""
    memory = found.memory_bytes
    not_reported = {
        "allocated": memory["overhead"],
        "reserved": found.machine.overheads.context_bytes,
        "device": 0.0,
    }
    return memory["total"] - not_reported[memory_kind_of(run.notes)]


def _said(
    run: Run, quantity: str, measured: float, chip: str, *, predicted: float | None = None,
    reason: str = "", parts: dict[str, float] | None = None,
) -> Prediction:  # fmt: skip
    return Prediction(
        id=run.id,
        source=run.source,
        chip=chip,
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        reason=reason,
        where=run.where,
        parts=parts or {},
        group=tuple(getattr(run, name) for name in COMPETING),
    )


# --- ops and collectives -----------------------------------------------------------------------


def predict_ops(path: Path) -> list[Prediction]:
    """The predictions of a file of op and collective latencies."""
    from meshwise.calibrate import microdata
    from meshwise.calibrate.fit import batches, links, predict_s
    from meshwise.machine import efficiency
    from meshwise.machine.hardware import find_chip

    found = microdata.read(path)
    rows: list[Prediction] = []
    for batch in batches(found.rows):
        chip = find_chip(batch.first.chip)
        predicted = predict_s(batch, chip, efficiency.constants(chip, links(batch, chip)))
        for row, seconds in zip(batch.rows, predicted.tolist(), strict=True):
            rows.append(
                Prediction(
                    id=row.where,
                    source=row.source,
                    chip=row.chip,
                    quantity=f"{row.op}_s",
                    measured=row.seconds,
                    predicted=seconds,
                    where=row.where,
                )
            )
    rows += [
        Prediction(id=problem.where, source=path.stem, chip="", quantity="op_s", reason=problem.reason,
                   where=problem.where)
        for problem in found.problems
    ]  # fmt: skip
    return rows


def competing(rows: Sequence[Prediction]) -> list[list[Prediction]]:
    """Groups of expressed runs of one model, batch and number of GPUs, with at least two plans each."""
    expressed = [row for row in rows if row.expressed and row.group]
    return [group for group in grouped(expressed, lambda row: row.group).values() if len(group) > 1]
