"""Fits the overheads of real steps (`meshwise.machine.overheads`) to published runs.

Which constants of `catalog/overheads.toml` are fitted, stated or tied to another, and why, says
`catalog/step_constants.toml`. Half of the rows fit, half only judge, by a hash of their id
(`errors.is_held_out`). The fitted constants minimise the misses log(predicted / measured) as `robust` says. A
row counts 1 / sqrt(rows of the same source), so that a table of 500 rows does not drown one of 7. Each round
takes the misses as linear in the logs of the constants and moves these no further than `REACH`. The same data
give the same file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.calibrate.errors import is_held_out, summarize
from meshwise.calibrate.express import Expressed, express
from meshwise.calibrate.robust import Array, LinearMisses, minimise
from meshwise.calibrate.runs import Run, publication, read_runs
from meshwise.calibrate.table import header
from meshwise.calibrate.validate import estimate_run, reported_bytes
from meshwise.core.each import all_of
from meshwise.core.errors import MeshwiseError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import told
from meshwise.core.toml import catalog_toml, flat, nested
from meshwise.machine.efficiency import Efficiency
from meshwise.machine.overheads import Tables, tables

Constants = dict[str, float]

_CATALOG = read_catalog("step_constants.toml")
TIME_BOXES, MEMORY_BOXES = _CATALOG["time"], _CATALOG["memory"]
LIMITS: dict[str, tuple[float, float, float]] = TIME_BOXES | MEMORY_BOXES
"""Where the search of each fitted constant starts, and the least and most that make sense."""
START: Constants = {name: start for name, (start, _, _) in LIMITS.items()}
STATED = {name: (entry["value"], entry["source"]) for name, entry in _CATALOG["stated"].items()}
TIED: dict[str, tuple[str, float]] = {name: (of["to"], of["factor"]) for name, of in _CATALOG["tied"].items()}


def every(fitted: Constants) -> Constants:
    """The fitted constants, those stated, and those tied to another."""
    known = {name: value for name, (value, _) in STATED.items()} | fitted
    for name, (other, factor) in TIED.items():
        known[name] = factor * known[other]
    return known


def limits() -> dict[str, tuple[float, float]]:
    """The least and most that make sense of each constant; the value itself where the catalog states none."""
    known = {name: box[1:] for name, box in LIMITS.items()}
    known |= {name: of["limits"] for name, of in _CATALOG["stated"].items() if "limits" in of}
    least, most = (every({name: of[end] for name, of in known.items()}) for end in (0, 1))
    return {name: (least[name], most[name]) for name in least}


@dataclass(frozen=True, slots=True)
class StepFit:
    """Fitted constants, their mean absolute error on the fitting and on the judging half, the file's text,
    and what speaks against the constants, a sentence each."""

    constants: Constants
    fitted_mean_abs_frac: float
    held_out_mean_abs_frac: float
    toml: str
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `meshwise fit --json` prints of whole steps."""
        names = ("constants", "fitted_mean_abs_frac", "held_out_mean_abs_frac", "problems")
        return {name: getattr(self, name) for name in names}


def as_tables(constants: Constants, changed: Constants | None = None) -> Tables:
    """Dotted names as tables: the fitted `constants`, what follows from them, and then `changed` ones."""
    return Tables(**nested(every(constants) | (changed or {})))


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
    timed = [each for each in runs if each.run.step_s]
    errors = [(each.run.id, math.exp(step_miss(each, found)) - 1.0) for each in timed]
    halves = [[error for row, error in errors if is_held_out(row) is held] for held in (False, True)]
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
        known = {"sources": ", ".join(sources) or "none", "num": len(sources), "s": "s" * (len(sources) != 1)}
        value, (_, least, most) = constants[name], LIMITS[name]
        found += told("constant of steps", name=name, value=value, least=least, most=most, **known)
    return found


def priced_runs(paths: Iterable[Path]) -> list[Expressed]:
    """The training runs among the tables of `paths` that can be priced."""
    tables = [path for path in paths if "global_batch" in header(path)]
    return [each for path in tables for run in read_runs(path)[0] if (each := _priced(run))]


def _priced(run: Run) -> Expressed | None:
    try:
        expressed = express(run)
        estimate_run(expressed)
    except MeshwiseError:
        return None
    return expressed


def step_miss(expressed: Expressed, tables: Tables, efficiency: Efficiency | None = None) -> float:
    """Log of the predicted over the measured step time."""
    return math.log(estimate_run(expressed, tables, efficiency).step_s / (expressed.run.step_s or 1.0))


def memory_miss(expressed: Expressed, tables: Tables, efficiency: Efficiency | None = None) -> float:
    """Log of the predicted over the measured memory."""
    found = reported_bytes(expressed, estimate_run(expressed, tables, efficiency), tables)
    return math.log(found / (expressed.run.memory_bytes or 1.0))


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is fitted: its column, the names of its constants, and the log of predicted over measured."""

    name: str
    names: tuple[str, ...]
    miss: Callable[..., float]


TIME = Quantity("step_s", tuple(TIME_BOXES), step_miss)
MEMORY = Quantity("memory_bytes", tuple(MEMORY_BOXES), memory_miss)
REACH = (2.0, 1.4, 1.15)
"""The most that a constant moves in each round of the search."""

_ROWS_EACH = 64
"""Rows that are priced together, in one process or on one node."""


def search(constants: Constants, training: Sequence[Expressed], quantity: Quantity) -> Constants:
    """`constants` with those of `quantity` moved to where its misses over `training` are least."""
    for reach in REACH:
        linear = linearize(constants, training, quantity)
        constants = times(constants, quantity, moved(constants, linear, quantity, reach))
    return constants


def linearize(at: Constants, rows: Sequence[Expressed], quantity: Quantity) -> LinearMisses:
    """The misses of `rows` near the constants `at`."""
    parts = [rows[i : i + _ROWS_EACH] for i in range(0, max(len(rows), 1), _ROWS_EACH)]
    found = all_of(partial(_near, at=at, quantity=quantity), parts)
    miss, slopes = (np.concatenate(of) for of in zip(*found, strict=True))
    sources = [publication(each.run.source) for each in rows]
    counts = Counter(sources)
    weights = np.array([counts[source] ** -0.5 for source in sources])
    return LinearMisses(miss, slopes, weights, (np.array(sources)[:, None] == np.unique(sources)) * 1.0)


def _near(rows: Sequence[Expressed], at: Constants, quantity: Quantity) -> tuple[Array, Array]:
    """The misses of some rows, and how they change with each constant."""
    here = as_tables(at)
    miss = np.array([quantity.miss(each, here) for each in rows])
    slopes = np.zeros((len(rows), len(quantity.names)))
    for column, name in enumerate(quantity.names):
        factor = 1.05 if at[name] * 1.05 <= LIMITS[name][2] else 1 / 1.05
        near = as_tables(at | {name: at[name] * factor})
        for line, each in enumerate(rows):
            if touches(name, each):
                slopes[line, column] = (quantity.miss(each, near) - miss[line]) / math.log(factor)
    return miss, slopes


def moved(at: Constants, linear: LinearMisses, quantity: Quantity, reach: float = math.inf) -> Array:
    """The logs by which the constants of `quantity` move from `at`, each within its limits and `reach`."""
    now = np.array([at[name] for name in quantity.names])
    start, least, most = np.array([LIMITS[name] for name in quantity.names]).T / now
    return minimise(linear, -np.log(start), np.log(least.clip(1 / reach)), np.log(most.clip(max=reach)))


def catalog_constants() -> Constants:
    """The fitted constants that the catalog holds."""
    known = flat(asdict(tables()))
    return {name: float(known[name]) for name in LIMITS}


def times(constants: Constants, quantity: Quantity, by: Array) -> Constants:
    """`constants` with those of `quantity` multiplied, `by` logs."""
    factors = zip(quantity.names, np.exp(by).tolist(), strict=True)
    return constants | {name: constants[name] * factor for name, factor in factors}


def to_toml(constants: Constants, fitted: float, judged: float, *, checked: str, data: Sequence[str]) -> str:
    """The catalog as text."""
    about = {"data": data, "checked": checked, "fit": {"fitted": fitted, "held_out": judged}}
    sections: dict[str, dict[str, Any]] = {"about": about}
    for name, value in sorted(every(constants).items(), key=lambda item: item[0].rpartition(".")[0]):
        table, _, field = name.rpartition(".")
        sections.setdefault(table, {})[field] = value
    return catalog_toml("overheads.toml", sections)
