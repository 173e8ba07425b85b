"""Fits the overheads of real steps (`meshwise.machine.overheads`) to published runs.

Half of the rows fit, half only judge, by a hash of their id (`errors.is_held_out`). A constant
belongs to a generation of chips, a generation of software, or to all rows; none to a row or a source. The
constants minimise

    sum of w min(|log(predicted / measured)|, 0.4) / sum of w  +  pull x sum of log(constant / start)^2

with w = 1 / sqrt(rows of the same source), so that a table of 500 rows does not drown one of 7. The cap
keeps a few odd rows from deciding, the pull keeps what the rows do not determine at its start, which is
the physical guess of `START`. The search walks along one constant after the other with shrinking steps;
it prices only the rows that the constant touches. The same data give the same file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.calibrate.catalog_text import catalog_text
from meshwise.calibrate.errors import is_held_out, summarize
from meshwise.calibrate.express import Expressed, express
from meshwise.calibrate.runs import Run, read_runs
from meshwise.calibrate.validate import estimate_run, reported_bytes
from meshwise.core.errors import MeshwiseError
from meshwise.core.files import write_text
from meshwise.machine.overheads import SOFTWARE, Tables

CAP = 0.4
PULL = 0.002
STEPS = (1.3, 1.12, 1.05, 1.02)

Box = tuple[float, float, float]
"""Where the search of a constant starts, and the least and most that make sense."""

# Power may not hold an A100 far below the 271 TFLOP/s that large matmuls sustain on it
# (stas00/ml-engineering, compute/accelerator/README.md, MAMF table).
_CHIPS: dict[str, Box] = {
    "power.ampere.bf16": (1.5e-12, 1.2e-12, 1.53e-12),
    "power.hopper.bf16": (1.05e-12, 0.7e-12, 1.2e-12),
    "power.hopper.fp8": (0.55e-12, 0.3e-12, 1.2e-12),
    "power.blackwell.bf16": (1.05e-12, 0.6e-12, 1.25e-12),
    "power.blackwell.fp8": (0.5e-12, 0.2e-12, 1.1e-12),
    "power.blackwell.fp4": (0.28e-12, 0.1e-12, 0.9e-12),
    "power.blackwell-ultra.bf16": (0.92e-12, 0.5e-12, 1.6e-12),
    "power.blackwell-ultra.fp8": (0.46e-12, 0.2e-12, 1.0e-12),
    "power.blackwell-ultra.fp4": (0.25e-12, 0.1e-12, 0.8e-12),
    "power.cdna3.bf16": (1.4e-12, 0.7e-12, 3e-12),
    "power.cdna3.fp8": (0.75e-12, 0.3e-12, 2e-12),
    "older_attention.ampere": (1.5, 1.0, 3.0),
    "older_attention.hopper": (1.9, 1.0, 3.0),
    "older_attention.blackwell": (2.0, 1.0, 4.0),
}

# By software: least and most, and the start of each generation that has the constant. All are one where the
# software says what it does: DeepSpeed's ZeRO-3 gathers each of a block's tensors by itself, FSDP a block.
_Starts = dict[str, float]
_SOFTWARE: dict[str, tuple[float, float, _Starts]] = {
    "host_s": (
        5e-6,
        2e-4,
        {"2020": 6e-5, "2023": 3e-5, "2024-torch": 1.5e-5, "2024": 1.5e-5, "2026": 1.5e-5},
    ),
    "moe_host_s": (1e-4, 1e-2, {"2024": 4e-3, "2026": 2e-3}),
    "microbatch_s": (1e-4, 5e-3, {"2020": 1e-3}),
    "interference_frac": (0.01, 0.5, dict.fromkeys(SOFTWARE, 0.1)),
    "tp_exposed_frac": (0.05, 1.0, {"2020": 0.2, "2023": 0.2, "2024-torch": 0.5, "2024": 0.5, "2026": 0.5}),
    "messages_per_block": (
        1.0,
        12.0,
        {"2020": 12.0, "2023": 1.0, "2024-torch": 1.0, "2024": 1.0, "2026": 1.0},
    ),
    "shard_copy_s": (2e-6, 2e-5, {"2020": 8e-6}),
    "kernel_passes": (1.0, 4.0, {"2020": 1.2, "2023": 1.5, "2024-torch": 1.2, "2024": 1.2, "2026": 1.2}),
    "expert_bias_passes": (1.0, 30.0, {"2024": 16.0, "2026": 4.0}),
    "cast_passes": (1.0, 8.0, {"2023": 2.0, "2024-torch": 2.0, "2024": 1.5, "2026": 1.5}),
    "accumulate_bytes": (2.0, 20.0, {"2020": 6.0, "2023": 8.0, "2024-torch": 8.0, "2024": 6.0, "2026": 6.0}),
    "misaligned_slowdown": (1.0, 40.0, {"2020": 6.0}),
    "attention_slowdown": (1.0, 3.0, {"2023": 1.4, "2024-torch": 1.1}),
}
_STATED = ("messages_per_block", "second_grad_bytes")
"""Constants that the software states: they do not move."""

_MEMORY: dict[str, tuple[float, float, _Starts]] = {
    "context_bytes": (1e9, 10e9, dict.fromkeys(SOFTWARE, 2e9) | {"2020": 4e9}),
    "fragment_frac": (0.01, 0.3, dict.fromkeys(SOFTWARE, 0.05) | {"2020": 0.1}),
    "loss_bytes": (2.0, 20.0, dict.fromkeys(SOFTWARE, 8.0) | {"2024": 4.0, "2026": 4.0}),
    "second_grad_bytes": (2.0, 2.0, {"2020": 2.0}),
}
"""The same for memory; no row determines those of 2023, nor what 2024 books beyond its tensors."""

_ALL: dict[str, Box] = {
    "network.omnipath": (0.7, 0.1, 1.0),
    "network.roce": (0.8, 0.2, 1.0),
    "common.unaligned_frac": (0.5, 0.1, 2.0),
    "common.bucket_bytes": (1.6e8, 2.5e7, 1e9),
    "common.skew_s": (2e-5, 1e-6, 1e-4),
    "common.expert_imbalance": (1.1, 1.0, 1.5),
    "common.straggler_frac": (0.005, 0.0005, 0.02),
}


def _by_software(table: dict[str, tuple[float, float, _Starts]]) -> dict[str, Box]:
    return {
        f"software.{software}.{name}": (start, start, start) if name in _STATED else (start, least, most)
        for software in SOFTWARE
        for name, (least, most, starts) in table.items()
        if (start := starts.get(software)) is not None
    }


START = _CHIPS | _by_software(_SOFTWARE) | _ALL
MEMORY_START = _by_software(_MEMORY)
LIMITS = START | MEMORY_START
Constants = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepFit:
    """Fitted constants, their mean absolute error on the fitting and on the judging half, and the file."""

    constants: Constants
    fitted_mean_abs_frac: float
    held_out_mean_abs_frac: float
    toml: str


def as_tables(constants: Constants) -> Tables:
    """Dotted names as tables."""
    tables: dict[str, Any] = {}
    for name, value in constants.items():
        *path, last = name.split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return Tables(**tables)


def touches(name: str, expressed: Expressed) -> bool:
    """Whether the constant `name` bears on a run."""
    kind, key = name.split(".")[:2]
    chip, software = expressed.cluster.chip, expressed.plans[0].software
    if kind == "power":
        return chip.generation == key
    if kind == "older_attention":
        return software in ("2023", "2024-torch") and chip.generation == key
    if kind == "network":
        return any(level.name.startswith(key) for level in expressed.cluster.levels)
    if kind == "common":
        return _TOUCHED.get(key, lambda _: True)(expressed)
    return software == key


_TOUCHED: dict[str, Callable[[Expressed], bool]] = {
    "unaligned_frac": lambda expressed: (expressed.model.vocab // expressed.run.tp) % 8 > 0,
    "bucket_bytes": lambda expressed: expressed.run.dp > 1,
    "expert_imbalance": lambda expressed: expressed.model.moe is not None,
}
"""The runs that a common constant bears on, where not on all."""


def fit_overheads(paths: Sequence[Path], *, checked: str, write_to: Path | None = None) -> StepFit:
    """Fit all constants to the runs of `paths`; write the catalog to `write_to` if given."""
    runs = [each for path in paths for run in read_runs(path)[0] if run.step_s and (each := _priced(run))]
    training = [each for each in runs if not is_held_out(each.run.id)]
    constants = {name: start for name, (start, _, _) in LIMITS.items()}
    constants = search(
        constants, MEMORY_START, [each for each in training if each.run.memory_bytes], memory_miss
    )
    constants = search(constants, START, training, step_miss)
    found = as_tables(constants)
    halves = [
        [math.exp(step_miss(each, found)) - 1.0 for each in runs if is_held_out(each.run.id) is held]
        for held in (False, True)
    ]
    fitted, judged = (summarize(half).mean_abs_frac or 0.0 for half in halves)
    text = to_toml(constants, fitted, judged, checked=checked, data=[path.name for path in paths])
    if write_to is not None:
        write_text(write_to, text)
    return StepFit(constants, fitted, judged, text)


def _priced(run: Run) -> Expressed | None:
    try:
        expressed = express(run)
        estimate_run(expressed)
    except MeshwiseError:
        return None
    return expressed


def step_miss(expressed: Expressed, tables: Tables) -> float:
    """Log of the predicted over the measured step time."""
    return math.log(estimate_run(expressed, tables).step_s / (expressed.run.step_s or 1.0))


def memory_miss(expressed: Expressed, tables: Tables) -> float:
    """Log of the predicted over the measured memory."""
    found = reported_bytes(expressed, estimate_run(expressed, tables), tables)
    return math.log(found / (expressed.run.memory_bytes or 1.0))


def search(
    constants: Constants, names: Iterable[str], training: Sequence[Expressed], miss: Callable[..., float]
) -> Constants:
    """`constants` with those of `names` moved, one after the other, to where `miss` is least."""

    def losses(rows: Sequence[Expressed], at: Constants) -> dict[str, float]:
        tables = as_tables(at)
        return {each.run.id: min(abs(miss(each, tables)), CAP) for each in rows}

    best = dict(constants)
    counts = Counter(each.run.source for each in training)
    weight = {each.run.id: counts[each.run.source] ** -0.5 for each in training}
    total = sum(weight.values())
    loss = losses(training, best)
    for step in STEPS:
        for name in names:
            rows = [each for each in training if touches(name, each)]
            for factor in (step, 1.0 / step):
                while (trial := _moved(best, name, factor)) != best:
                    new = losses(rows, trial)
                    gain = sum(weight[i] * (loss[i] - value) for i, value in new.items()) / total
                    if gain + PULL * (_bent(best, name) - _bent(trial, name)) <= 1e-7:
                        break
                    best, loss = trial, loss | new
    return best


def _moved(constants: Constants, name: str, factor: float) -> Constants:
    """`constants` with `name` times `factor`, within its limits."""
    _, least, most = LIMITS[name]
    return constants | {name: min(max(constants[name] * factor, least), most)}


def _bent(constants: Constants, name: str) -> float:
    return math.log(constants[name] / LIMITS[name][0]) ** 2


_HEAD = """\
# Written by `meshwise fit`; do not edit. What real steps pay beyond their kernels, described in
# `meshwise.machine.overheads`, fitted to published runs as `meshwise.calibrate.fit_steps` says. `fit`: mean
# of |predicted / measured - 1| over the half of the rows that fitted, and over the half that only judges.
"""


def to_toml(constants: Constants, fitted: float, judged: float, *, checked: str, data: Sequence[str]) -> str:
    """The catalog as text."""
    about = {"data": data, "checked": checked, "fit": {"fitted": fitted, "held_out": judged}}
    sections: dict[str, dict[str, Any]] = {"about": about}
    for name, value in sorted(constants.items(), key=lambda item: item[0].rpartition(".")[0]):
        table, _, field = name.rpartition(".")
        sections.setdefault(table, {})[field] = value
    return catalog_text(_HEAD, sections)
