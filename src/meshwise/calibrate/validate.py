"""Every row of files of measurements, with what meshwise predicts for it.

A row of a run gives up to two predictions: `step_s`, and `memory_bytes` where memory was measured; they
come from `meshwise.estimate.one_plan.estimate`, as for everybody. A row of an op or a collective gives one:
`gemm_s`, `attention_s`, `decode_s`, `memory_s`, `experts_s`, `dispatch_s`, `collective_s` or
`peer_all_reduce_s`; a row of watts gives `chip_watts` or `node_watts`. Rows that cannot be read or expressed
keep their place and their reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwise.calibrate import power as measured_power
from meshwise.calibrate.errors import Mend, Progress, is_held_out, summarize
from meshwise.calibrate.express import Expressed, express
from meshwise.calibrate.microdata import OPS_COLUMNS, read as read_ops
from meshwise.calibrate.ops import batches, links, predict_s
from meshwise.calibrate.runs import REQUIRED, Run, publication, published_runs, read_runs, unread_columns
from meshwise.calibrate.table import BadRow, header, lacking, lines
from meshwise.core.columns import grouped
from meshwise.core.errors import ClusterError, DataError, MeshwiseError
from meshwise.core.files import read_catalog
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.estimate.intervals import Interval
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.machine.efficiency import Efficiency, constants
from meshwise.machine.hardware import find_chip
from meshwise.machine.overheads import Overheads, Tables
from meshwise.plan.plan import Plan, plan_text
from meshwise.rl import measured as measured_rl
from meshwise.rl.framework import interval_of as rl_interval
from meshwise.rl.step import rl_step
from meshwise.serve import measured
from meshwise.serve.engine import interval_of
from meshwise.serve.load import LoadResult

Row = Mapping[str, str]
Cells = Callable[[Row, Any], Iterator[dict[str, Any]]]
"""What is measured of a row: fields of `Prediction`, beside what it was solved to (None: it could not be)."""

COMPETING = (
    *("source", "model", "layers", "hidden", "heads", "seq_len", "chip", "gpus", "global_batch", "dtype"),
)
"""What runs have in common that differ only in their plan."""

_OP_COLUMNS = set(OPS_COLUMNS[:2])
"""Columns that tell a file of ops and collectives from one of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One measured number and the one predicted for it, or the reason why there is none.

    `parts` are the seconds (or bytes) that `predicted` is made of; `fits` says whether the run's memory is
    predicted to be enough, `approximations` what of the row the plan says only nearly. `left_out` is what
    constants predict that were fitted without the row's source (`leave_one_source_out`), as its interval is.
    `regime` says what kind of run it is, by aspect; `group` names rows that compete: the same model, batch
    and number of GPUs.
    """

    id: str
    source: str
    chip: str
    quantity: str
    measured: float | None = None
    predicted: float | None = None
    reason: str = ""
    fits: bool | None = None
    approximations: tuple[str, ...] = ()
    interval: Interval | None = None
    left_out: float | None = None
    left_out_interval: Interval | None = None
    parts: dict[str, float] = field(default_factory=dict)
    regime: dict[str, str] = field(default_factory=dict)
    group: tuple[Any, ...] = ()

    @property
    def aspects(self) -> dict[str, str]:
        """What kind of row it is, by aspect."""
        return {"chip": self.chip or "unknown", "source": publication(self.source)} | self.regime

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

    @property
    def left_out_error_frac(self) -> float | None:
        """The error of the prediction by the other sources."""
        return None if self.left_out is None else self.left_out / (self.measured or 1.0) - 1.0

    @property
    def covered(self) -> bool | None:
        """Whether the measurement lies in the interval: that of the other sources, where there is one."""
        between = self.left_out_interval or self.interval
        if between is None or self.measured is None:
            return None
        return between.p10 <= self.measured <= between.p90

    def to_json(self) -> dict[str, Any]:
        """The row that `meshwise validate --json` prints."""
        keys = ("id", "source", "chip", "quantity", "measured", "predicted", "error_frac", "expressed")
        others = ("interval", "left_out", "left_out_error_frac", "reason", "fits", "approximations")
        own = {"interval": self.interval and self.interval.to_json(), "reason": self.reason or None}
        return {name: getattr(self, name) for name in keys + others} | own


@dataclass(frozen=True, slots=True, repr=False)
class Validation(Shown):
    """All predictions, in the order of the files, and warnings about what was not read of them.

    `board` and `mends`, where asked for: errors of earlier releases beside today's, and single constants that
    would mend the runs.
    """

    rows: list[Prediction]
    warnings: tuple[str, ...] = ()
    board: list[Progress] | None = None
    mends: list[Mend] | None = None

    def of(self, quantity: str) -> list[Prediction]:
        """The rows of one quantity."""
        return [row for row in self.rows if row.quantity == quantity]

    @property
    def quantities(self) -> list[str]:
        """The quantities, in order of appearance."""
        return list(dict.fromkeys(row.quantity for row in self.rows))

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise validate --json` prints."""
        summary = {
            quantity: asdict(summarize([row.error_frac for row in self.of(quantity)]))
            | {"coverage_frac": coverage_frac(self.of(quantity))}
            | {"coverage_by_source_frac": coverage_by_source_frac(self.of(quantity))}
            | {"left_out": asdict(summarize([row.left_out_error_frac for row in self.of(quantity)]))}
            for quantity in self.quantities
        }
        asked = {name: found for name in ASKED if (found := getattr(self, name)) is not None}
        others = {name: [*map(asdict, found)] for name, found in asked.items()}
        rows = [row.to_json() for row in self.rows]
        return {"rows": rows, "summary": summary, "warnings": self.warnings} | others


ASKED = ("board", "mends")
"""What a `Validation` has only where it was asked for."""


ASPECTS = ("kind", "scale", "chip", "framework", "engine", "model", "cache", "half", "source")
"""What rows are grouped by."""


def by_aspect(rows: Sequence[Prediction], name: str) -> list[tuple[str, list[Prediction]]]:
    """The groups of `rows` by an aspect, in order of the number that begins their name; nameless ones not."""
    groups = grouped(rows, lambda row: row.aspects.get(name, ""))
    found = [(label, members) for label, members in groups.items() if label]
    return sorted(found, key=lambda group: _leading_number(group[0]))


def _leading_number(label: str) -> int:
    """The number that a label begins with; 0, which keeps the order of the rows, if there is none."""
    digits = label.split(" ")[0].replace(",", "")
    return int(digits) if digits.isdecimal() else 0


def coverage_frac(rows: Iterable[Prediction]) -> float | None:
    """Share of the measurements that lie in their interval."""
    covered = [row.covered for row in rows if row.covered is not None]
    return sum(covered) / len(covered) if covered else None


def coverage_by_source_frac(rows: Iterable[Prediction]) -> float | None:
    """The same, as the mean over the sources: what to expect of a new one, however many rows it has."""
    groups = grouped(rows, lambda row: publication(row.source)).values()
    shares = [share for group in groups if (share := coverage_frac(group)) is not None]
    return sum(shares) / len(shares) if shares else None


def validate(paths: Iterable[Path] = ()) -> Validation:
    """Predict every row of `paths`, or of the published runs; DataError for a file that is no such table."""
    rows: list[Prediction] = []
    warnings: list[str] = []
    for path in tuple(paths) or (published_runs(),):
        found, unread = _of_file(path)
        refuse("table of measurements", DataError, found=found, path=path)
        rows += found
        if unread:
            warnings.append(f"{path}, line 1: no such column, so not read: {', '.join(unread)}")
    counts = Counter((row.quantity, row.id) for row in rows)
    if twice := sorted({name for (_, name), num in counts.items() if num > 1}):
        names = ", ".join(twice[:3]) + ", ..." * (len(twice) > 3)
        warnings.append(f"rows share an id, by which a board and the halves of a fit know them: {names}")
    return Validation(rows, tuple(warnings))


def _of_file(path: Path) -> tuple[list[Prediction], list[str]]:
    """The predictions of a file, whose header says what kind of table it is, and columns not read."""
    names = header(path)
    if set(names) >= _OP_COLUMNS:
        return predict_ops(path), []
    if table := next((rest for columns, rest in _TABLES.items() if {*columns} <= {*names}), None):
        refuse("columns of steps", DataError, f"{path}, line 1: ", unknown=measured_rl.unknown_columns(names))
        return [*_each_row(path, *table)], measured.unread_columns(names)
    if max(len({*columns} & {*names}) for columns in _TABLES) > len({*REQUIRED} & {*names}):
        raise lacking(path, names, _TABLES)
    runs, bad = read_runs(path)
    return [one for run in runs for one in predict_run(run)] + [*map(_unread, bad)], unread_columns(names)


def _unread(row: BadRow, quantity: str = "step_s") -> Prediction:
    return Prediction(id=row.id, source=row.source, chip="", quantity=quantity, reason=row.reason)


# --- runs --------------------------------------------------------------------------------------


def predict_run(run: Run) -> list[Prediction]:
    """The predictions of one run: its step time, and its memory where that was measured."""
    chip = ""
    known: dict[str, tuple[Any, Any, Any]] = dict.fromkeys(("step_s", "memory_bytes"), (None, None, {}))
    shared: dict[str, Any] = {"regime": regime_of(run), "group": tuple(getattr(run, x) for x in COMPETING)}
    try:
        chip = find_chip(run.chip).name
        expressed = express(run)
        found = estimate_run(expressed)
        bytes_ = reported_bytes(expressed, found)
        known = {
            "step_s": (found.step_s, found.step_s_interval, found.time_s),
            "memory_bytes": (bytes_, found.interval("memory_bytes", bytes_), found.memory_bytes),
        }
        taken = _taken(expressed.plans[0], found.plan)
        shared |= {"fits": could_run(expressed, found), "approximations": expressed.approximations + taken}
    except MeshwiseError as error:
        column = ", column chip" if isinstance(error, ClusterError) and not chip else ""
        shared["reason"] = f"{run.where}{column}: {error}"
    return [
        Prediction(
            id=run.id, source=run.source, chip=chip, quantity=quantity, measured=measured,
            predicted=value, interval=between, parts=parts, **shared,
        )
        for quantity, (value, between, parts) in known.items()
        if (measured := getattr(run, quantity)) is not None
    ]  # fmt: skip


def regime_of(run: Run) -> dict[str, str]:
    """The kind of a run, by aspect."""
    is_fitted = Path(run.where.rpartition(", ")[0]).name in read_catalog("overheads.toml")["about"]["data"]
    half = "held-out half" if is_held_out(run.id) else "fitted half"
    sizes = ((8, "1 to 8 GPUs"), (128, "9 to 128 GPUs"), (1000, "129 to 1,000 GPUs"))
    return {
        "kind": "adapters" if run.lora_rank else "mixture of experts" if run.experts else "dense",
        "scale": next((name for most, name in sizes if run.gpus <= most), "1,001 GPUs and more"),
        "framework": run.framework or "unknown",
        "half": half * is_fitted,
    }


def estimate_run(
    expressed: Expressed, among: Tables | None = None, efficiency: Efficiency | None = None
) -> Estimate:
    """The estimate of a run; `among` are the overheads to use, and `efficiency`, if not those of the catalog.

    Of the plans that the row leaves open, the first whose memory fits.
    """
    overheads = expressed.overheads(among)
    imbalance = expressed.imbalance(overheads)
    for plan in expressed.plans:
        plan = replace(plan, imbalance=imbalance)
        found = estimate(
            expressed.model, expressed.cluster, plan, expressed.workload, overheads=overheads,
            efficiency=efficiency,
        )  # fmt: skip
        if could_run(expressed, found, overheads):
            break
    return found


UNFIT = "as its row says it needs more memory than there is; priced with "
"""How the approximation begins of a run that took what its row leaves open (`tried` in frameworks.toml)."""


def _taken(stated: Plan, plan: Plan) -> tuple[str, ...]:
    """What `plan` has that the plan of a row has not, in a sentence."""
    known, words = (plan_text(replace(one, imbalance=1.0)).split(",") for one in (stated, plan))
    taken = [word for word in words if word not in known]
    return (UNFIT + ",".join(taken),) if taken else ()


def could_run(expressed: Expressed, found: Estimate, overheads: Overheads | None = None) -> bool:
    """Whether a run that ran may be the estimate `found`: its tensors, and what the process takes, fit.

    A plan is told to fit with room for what the allocator leaves in pieces (`fragment_frac`). PyTorch gives
    that back before it fails (c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks), so a run may have
    had less of it.
    """
    pieces = found.memory_bytes["overhead"] - (overheads or expressed.overheads()).context_bytes
    return found.memory_bytes["total"] - pieces <= expressed.cluster.chip.memory_bytes


def reported_bytes(expressed: Expressed, found: Estimate, among: Tables | None = None) -> float:
    """The memory that the run reports, of the estimate `found`.

    PyTorch's `allocated` tensors, those and its cache (`reserved`), or all of the `device`'s. The cache is no
    larger than the room that they leave.
    """
    context, memory = expressed.overheads(among).context_bytes, found.memory_bytes
    tensors, kind = memory["total"] - memory["overhead"], expressed.run.memory_kind or "device"
    room = expressed.cluster.chip.memory_bytes - context - tensors
    pieces = min(memory["overhead"] - context, max(room, 0.0))
    return tensors + pieces * (kind != "allocated") + context * (kind == "device")


def competing(rows: Sequence[Prediction]) -> list[list[Prediction]]:
    """Groups of expressed runs of one model, batch and number of GPUs, with at least two plans each."""
    expressed = [row for row in rows if row.expressed and row.group]
    return [group for group in grouped(expressed, lambda row: row.group).values() if len(group) > 1]


# --- ops and collectives -----------------------------------------------------------------------


def predict_ops(path: Path) -> list[Prediction]:
    """The predictions of a file of op and collective latencies."""
    found, bad = read_ops(path)
    rows: list[Prediction] = []
    for batch in batches(found):
        chip = find_chip(batch.first.chip)
        predicted = predict_s(batch, chip, constants(chip, links(batch, chip)))
        rows += [
            Prediction(
                id=row.where, source=row.source, chip=row.chip, quantity=f"{row.op}_s",
                measured=row.seconds, predicted=seconds,
            )
            for row, seconds in zip(batch.rows, predicted.tolist(), strict=True)
        ]  # fmt: skip
    return rows + [_unread(one, "op_s") for one in bad]


# --- tables of servers, watts and post-training: what a row gives, and what is measured of that ----------


def _each_row(path: Path, solve: Callable[[Row], Any], cells: Cells) -> Iterator[Prediction]:
    """The `cells` of each row of a file beside what `solve` makes of it, or the reason why it cannot."""
    for number, row, bad in lines(path):
        solved, reason = None, f"{path}, line {number}{bad}" if bad else ""
        try:
            solved = None if bad else solve(row)
        except MeshwiseError as error:
            reason = f"{path}, line {number}: {error}"
        for values in cells(row, solved):
            row_id, source = row.get("id", str(number)), row.get("source", path.stem)
            yield Prediction(id=row_id, source=source, reason=reason, **values)


def _latencies(row: Row, load: LoadResult | None) -> Iterator[dict[str, Any]]:
    """Of a serving point: latencies, and tokens a second."""
    predicted = measured.predicted(row, load) if load else {}
    regime, chip = measured.regime_of(row, load), measured.chip_name(row)
    for quantity, seen in measured.measured(row, load).items():
        value, between = predicted.get(quantity), None
        if load and value:
            of = load.regime, measured.chip_of(row), row.get("source", "")
            between = interval_of(quantity, value, *of)
        values = {"measured": seen, "predicted": value, "interval": between}
        yield values | {"quantity": quantity, "chip": chip, "regime": regime}


def _watts(row: Row, found: dict[str, float] | None) -> Iterator[dict[str, Any]]:
    for quantity, seen in (measured_power.measured(row) or {"chip_watts": None}).items():
        value = (found or {}).get(quantity)
        yield {"quantity": quantity, "chip": row["chip"], "measured": seen, "predicted": value}


def _rl_steps(row: Row) -> tuple[dict[str, float], dict[str, float]]:
    """The step and its phases, also with the constants of another version of the framework."""
    framework = measured_rl.framework_of(row)
    others = measured_rl.framework_of(row, without=framework.version)
    found, other = (measured_rl.predicted(rl_step(measured_rl.job_of(row, of))) for of in (framework, others))
    return found, other


def _phases(row: Row, solved: tuple[dict[str, float], ...] | None) -> Iterator[dict[str, Any]]:
    regime = {"kind": row.get("mode_kind", ""), "framework": row.get("software", "")}
    at: Any = solved and (row["mode_kind"], find_chip(row["chip"]))
    for quantity, seen in measured_rl.measured(row).items():
        value, other = (found.get(quantity) for found in solved or ({}, {}))
        near, far = (rl_interval(one, *at) if one else None for one in (value, other))
        yield {
            **{"quantity": quantity, "chip": row.get("chip", ""), "measured": seen, "predicted": value},
            **{"interval": near, "left_out": other, "left_out_interval": far, "regime": regime},
        }


_TABLES: dict[tuple[str, ...], tuple[Callable[[Row], Any], Cells]] = {
    measured.COLUMNS: (measured.simulated, _latencies),
    measured_rl.COLUMNS: (_rl_steps, _phases),
    measured_power.COLUMNS: (measured_power.predicted, _watts),
}
"""Tables besides those of runs and ops, by the columns that each has."""
