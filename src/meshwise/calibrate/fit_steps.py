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

import numpy as np

from meshwise.calibrate.catalog_text import catalog_text
from meshwise.calibrate.errors import is_held_out, summarize
from meshwise.calibrate.express import Expressed, express
from meshwise.calibrate.robust import Array, Linear, loss, minimise
from meshwise.calibrate.runs import Run, publication, read_runs
from meshwise.calibrate.validate import estimate_run, reported_bytes
from meshwise.core.errors import MeshwiseError
from meshwise.machine.overheads import SOFTWARE, Tables, tables

Box = tuple[float, float, float]
"""Where the search of a constant starts (a physical guess), and the least and most that make sense."""

M20, T23, T24, M24, M26 = (f"software.{name}" for name in SOFTWARE)

TIME_BOXES: dict[str, Box] = {
    "power.hopper.bf16": (1.05e-12, 0.7e-12, 1.4e-12),
    "power.hopper.fp8": (0.55e-12, 0.3e-12, 1.2e-12),
    "power.blackwell.bf16": (1.05e-12, 0.6e-12, 1.25e-12),
    "power.blackwell.fp8": (0.5e-12, 0.2e-12, 1.1e-12),
    "older_attention.ampere": (1.5, 1.0, 3.0),
    "older_attention.hopper": (1.9, 1.0, 4.0),
    f"{M20}.host_s": (6e-5, 5e-6, 2e-4),
    f"{M24}.moe_host_s": (4e-3, 1e-4, 1e-2),
    f"{M20}.kernel_passes": (1.2, 0.8, 4.0),
    f"{T23}.kernel_passes": (1.5, 0.8, 4.0),
    f"{T24}.kernel_passes": (1.2, 0.8, 4.0),
    f"{M24}.kernel_passes": (1.2, 0.8, 4.0),
    f"{T24}.cast_passes": (2.0, 0.8, 8.0),
    f"{M24}.cast_passes": (1.5, 0.8, 8.0),
    f"{M20}.accumulate_bytes": (6.0, 2.0, 20.0),
    f"{T23}.accumulate_bytes": (8.0, 2.0, 20.0),
    f"{T24}.accumulate_bytes": (8.0, 2.0, 20.0),
    f"{M24}.accumulate_bytes": (6.0, 2.0, 20.0),
    f"{T23}.attention_slowdown": (1.4, 1.0, 3.0),
    f"{T24}.attention_slowdown": (1.1, 1.0, 3.0),
    f"{M24}.interference_frac": (0.1, 0.01, 0.5),
    f"{M24}.tp_exposed_frac": (0.4, 0.05, 1.0),
    "network.roce": (0.8, 0.2, 1.0),
    "common.bucket_bytes": (1.6e8, 2.5e7, 1e9),
    "common.skew_s": (2e-5, 1e-6, 1e-4),
    "common.straggler_frac": (0.005, 0.0005, 0.02),
}
"""Constants fitted to step times; each is determined by the runs of two publications or more."""

MEMORY_BOXES: dict[str, Box] = {
    f"{T24}.fragment_frac": (0.05, 0.005, 0.3),
    f"{T24}.loss_bytes": (8.0, 2.0, 24.0),
}
"""The same for memory."""

STATED: dict[str, tuple[float, str]] = {
    "network.omnipath": (
        0.27,
        "bigscience experiments/bandwidth: 55 Gb/s all-reduce of 64 V100, so 108 of 400 Gb/s",
    ),
    "power.cdna3.bf16": (750 / 620e12, "SemiAnalysis 2024-12, MI300X training benchmark: 620 TFLOP/s bf16"),
    "power.cdna3.fp8": (750 / 990e12, "the same: 990 TFLOP/s fp8"),
    "common.unaligned_frac": (
        0.5,
        "NVIDIA Matrix Multiplication User's Guide: each halving of 16-byte alignment costs",
    ),
    "common.expert_spread": (0.19, "Wang et al. 2024 (2408.15664): busiest of 64 experts 0.72 over the mean"),
    f"{M20}.microbatch_s": (
        1e-3,
        "Megatron-LM v2.5 get_batch: copy, broadcast and 2048 x 2048 mask of a microbatch",
    ),
    f"{M20}.shard_copy_s": (6e-6, "one small copy through PyTorch's dispatcher"),
    f"{M20}.misaligned_slowdown": (
        10.0,
        "A100 data sheet: 19.5 TFLOP/s of fp32 units over 0.6 x 312 of tensor cores",
    ),
    f"{M20}.messages_per_block": (12.0, "DeepSpeed ZeRO-3 of 2021 gathers tensor by tensor"),
    **{f"{name}.messages_per_block": (1.0, "FSDP gathers block by block") for name in (T23, T24, M24)},
    f"{M20}.second_grad_bytes": (2.0, "fp16 gradients beside their fp32 sums"),
    f"{T23}.host_s": (3e-5, "an eager op of PyTorch with its backward; no run is bound by it"),
    f"{T24}.host_s": (1.5e-5, "the same, half the ops compiled away"),
    f"{M24}.host_s": (1.5e-5, "the same"),
    f"{M24}.expert_bias_passes": (
        16.0,
        "Megatron-LM megatron/core/transformer/moe/experts.py: 75 passes over what we count 4.7 times",
    ),
    f"{M26}.expert_bias_passes": (4.0, "a pass for the sum and one for its gradient, of both linears"),
    f"{M26}.host_s": (1e-6, "a node of a CUDA graph"),
    **{
        f"{name}.context_bytes": (2e9, "CUDA context 1.6 GB (bigscience tr11 prequel), NCCL")
        for name in (T23, T24, M24)
    },
    f"{M20}.context_bytes": (
        8.6e9,
        "CUDA context 1.6 GB (bigscience tr11 prequel), NCCL's buffers of 7 groups",
    ),
    f"{M20}.fragment_frac": (0.1, "no expandable segments before PyTorch 2.1"),
    f"{M20}.loss_bytes": (8.0, "fp32 logits and their gradient"),
    f"{M24}.loss_bytes": (2.6, "Transformer Engine's cross entropy writes the gradient over the bf16 logits"),
}
"""Constants that runs of fewer than two publications determine: a physical value, and where it is from."""

TIED: dict[str, tuple[str, float]] = {
    "power.blackwell.fp4": ("power.blackwell.fp8", 0.5),
    **{
        f"power.blackwell-ultra.{dtype}": (f"power.blackwell.{dtype}", 0.88)
        for dtype in ("bf16", "fp8", "fp4")
    },
    "older_attention.blackwell": ("older_attention.hopper", 1.0),
    f"{T23}.cast_passes": (f"{T24}.cast_passes", 1.0),
    f"{T23}.fragment_frac": (f"{T24}.fragment_frac", 1.0),
    f"{M24}.fragment_frac": (f"{T24}.fragment_frac", 1.0),
    f"{T23}.loss_bytes": (f"{T24}.loss_bytes", 1.0),
    **{
        f"{name}.{key}": (f"{M24}.{key}", 1.0)
        for name in (M20, T23, T24, M26)
        for key in ("interference_frac", "tp_exposed_frac")
    },
    **{
        f"{M26}.{key}": (f"{M24}.{key}", 1.0)
        for key in (
            "kernel_passes",
            "cast_passes",
            "accumulate_bytes",
            "messages_per_block",
            "context_bytes",
            "fragment_frac",
            "loss_bytes",
        )
    },
}
"""Constants that are another one times a factor: fp4 moves half the bits of fp8; Blackwell Ultra, of the
same process, runs Megatron-Bridge's fp8 recipes of Llama 3 1.24 times as fast as Blackwell, so its matmuls 1.33
times, on 7/6 of the power; a CUDA graph runs the same kernels."""

LIMITS = TIME_BOXES | MEMORY_BOXES
START = {name: start for name, (start, _, _) in LIMITS.items()}
Constants = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepFit:
    """Fitted constants, their mean absolute error on the fitting and on the judging half, the file's text,
    and what speaks against the constants, a sentence each."""

    constants: Constants
    fitted_mean_abs_frac: float
    held_out_mean_abs_frac: float
    toml: str
    problems: tuple[str, ...]


def every(fitted: Constants) -> Constants:
    """The fitted constants, those stated, and those tied to another."""
    known = {name: value for name, (value, _) in STATED.items()} | fitted
    for name, (other, factor) in TIED.items():
        known[name] = factor * known[other]
    return known


def as_tables(constants: Constants) -> Tables:
    """Dotted names as tables."""
    tables: dict[str, Any] = {}
    for name, value in every(constants).items():
        *path, last = name.split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return Tables(**tables)


def touches(name: str, expressed: Expressed) -> bool:
    """Whether the constant `name`, or one that is tied to it, bears on a run."""
    chip, software = expressed.cluster.chip, expressed.plans[0].software
    kin = {name} | {tied for tied, (other, _) in TIED.items() if other == name}
    kin |= {tied for tied, (other, _) in TIED.items() if other in kin}
    kinds = {tuple(each.split(".")[:2]) for each in kin}
    return not kinds.isdisjoint(
        {("power", chip.generation), ("older_attention", chip.generation), ("software", software)}
        | {("network", level.name) for level in expressed.cluster.levels}
    ) or name.startswith("common")


def fit_overheads(runs: Sequence[Expressed], *, checked: str, data: Sequence[str]) -> StepFit:
    """Fit all constants to half of `runs`."""
    constants = START
    problems: list[str] = []
    for quantity in (MEMORY, TIME):
        training = fitting_half(runs, quantity)
        constants = search(constants, training, quantity)
        problems += unfounded(constants, training, quantity)
    found = as_tables(constants)
    halves = [
        [
            math.exp(step_miss(each, found)) - 1.0
            for each in runs
            if each.run.step_s and is_held_out(each.run.id) is held
        ]
        for held in (False, True)
    ]
    fitted, judged = (summarize(half).mean_abs_frac or 0.0 for half in halves)
    text = to_toml(constants, fitted, judged, checked=checked, data=data)
    return StepFit(constants, fitted, judged, text, tuple(problems))


def fitting_half(runs: Sequence[Expressed], quantity: Quantity) -> list[Expressed]:
    """The runs that measured `quantity` and are not held out."""
    return [each for each in runs if getattr(each.run, quantity.name) and not is_held_out(each.run.id)]


def unfounded(constants: Constants, training: Sequence[Expressed], quantity: Quantity) -> list[str]:
    """Why fitted constants mean nothing, if they do: too few sources see them, or they ended at a limit.

    A source sees a constant if twice as much of it moves one of its predictions by 1 % or more.
    """
    slopes = linearize(constants, training, quantity).slopes
    found: list[str] = []
    for name, column in zip(quantity.names, slopes.T, strict=True):
        seen = np.abs(column) * math.log(2.0) >= 0.01
        sources = {publication(each.run.source) for each, sees in zip(training, seen, strict=True) if sees}
        if len(sources) < MIN_SOURCES:
            found.append(
                f"{name} is determined by {len(sources)} source{'s' * (len(sources) != 1)} only "
                f"({', '.join(sources) or 'none'}); state its physical value in STATED, or leave it out"
            )
        _, least, most = LIMITS[name]
        if not 1.001 * least < constants[name] < most / 1.001:
            found.append(f"{name} ends at its limit {constants[name]:.4g}; find what it stands in for")
    return found


def priced_runs(paths: Iterable[Path]) -> list[Expressed]:
    """The runs of `paths` that can be priced."""
    return [each for path in paths for run in read_runs(path)[0] if (each := _priced(run))]


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


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is fitted: its column, the names of its constants, and the log of predicted over measured."""

    name: str
    names: tuple[str, ...]
    miss: Callable[[Expressed, Tables], float]


TIME = Quantity("step_s", tuple(TIME_BOXES), step_miss)
MEMORY = Quantity("memory_bytes", tuple(MEMORY_BOXES), memory_miss)
REACH = (2.0, 1.4, 1.15)
"""The most that a constant moves in each round of the search."""

MIN_SOURCES = 2


def search(constants: Constants, training: Sequence[Expressed], quantity: Quantity) -> Constants:
    """`constants` with those of `quantity` moved to where its misses over `training` are least."""
    weights = weights_of(training)
    best = dict(constants)

    def total(at: Constants) -> float:
        tables = as_tables(at)
        miss = np.array([quantity.miss(each, tables) for each in training])
        return loss(miss, weights, _bent(at, quantity.names))

    least = total(best)
    for reach in REACH:
        linear = linearize(best, training, quantity)
        step = moved(best, linear, quantity, reach)
        for shrink in (1.0, 0.5, 0.25):
            trial = best | {
                name: best[name] * math.exp(shrink * by)
                for name, by in zip(quantity.names, step, strict=True)
            }
            if (new := total(trial)) < least:
                best, least = trial, new
                break
    return best


def weights_of(rows: Sequence[Expressed]) -> Array:
    """What each row counts."""
    counts = Counter(publication(each.run.source) for each in rows)
    return np.array([counts[publication(each.run.source)] ** -0.5 for each in rows])


def linearize(at: Constants, rows: Sequence[Expressed], quantity: Quantity) -> Linear:
    """The misses of `rows` near the constants `at`."""
    here = as_tables(at)
    miss = np.array([quantity.miss(each, here) for each in rows])
    slopes = np.zeros((len(rows), len(quantity.names)))
    for column, name in enumerate(quantity.names):
        factor = 1.05 if at[name] * 1.05 <= LIMITS[name][2] else 1 / 1.05
        near = as_tables(at | {name: at[name] * factor})
        for line, each in enumerate(rows):
            if touches(name, each):
                slopes[line, column] = (quantity.miss(each, near) - miss[line]) / math.log(factor)
    return Linear(miss, slopes, weights_of(rows))


def moved(at: Constants, linear: Linear, quantity: Quantity, reach: float = math.inf) -> Array:
    """The logs by which the constants of `quantity` move from `at`, each within its limits and `reach`."""
    least = np.array([math.log(max(LIMITS[name][1] / at[name], 1 / reach)) for name in quantity.names])
    most = np.array([math.log(min(LIMITS[name][2] / at[name], reach)) for name in quantity.names])
    return minimise(linear, _bent(at, quantity.names), least, most)


def catalog_constants() -> Constants:
    """The fitted constants that the catalog holds."""
    found = tables()
    return {name: _within(found, name) for name in LIMITS}


def _within(found: Tables, name: str) -> float:
    kind, *keys = name.split(".")
    section = getattr(found, kind)
    for key in keys:
        section = section[key]
    return float(section)


def _bent(constants: Constants, names: Iterable[str]) -> Array:
    return np.array([math.log(constants[name] / LIMITS[name][0]) for name in names])


_HEAD = """\
# Written by `meshwise fit`; do not edit. What real steps pay beyond their kernels, described in
# `meshwise.machine.overheads`, fitted to published runs as `meshwise.calibrate.fit_steps` says. `fit`: mean
# of |predicted / measured - 1| over the half of the rows that fitted, and over the half that only judges.
"""


def to_toml(constants: Constants, fitted: float, judged: float, *, checked: str, data: Sequence[str]) -> str:
    """The catalog as text."""
    about = {"data": data, "checked": checked, "fit": {"fitted": fitted, "held_out": judged}}
    sections: dict[str, dict[str, Any]] = {"about": about}
    for name, value in sorted(every(constants).items(), key=lambda item: item[0].rpartition(".")[0]):
        table, _, field = name.rpartition(".")
        sections.setdefault(table, {})[field] = value
    return catalog_text(_HEAD, sections)
