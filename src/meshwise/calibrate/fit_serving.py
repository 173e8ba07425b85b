"""Fits the constants of serving engines (`serve.engine`) to measured points, each model left out in turn.

The logs of predicted over measured latencies are linear in the logs of the constants nearby: every point is
simulated once at the constants of the catalog and once with each of them larger. `robust.minimise` then finds
the constants of all models, and those without each model, or without each system, by which that is judged.
Points whose requests wait for room in the cache only judge, as do those of gap analyses and those
without a date, of which no script says how the engine was started. A point counts 1 / sqrt(points of its
model).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwise.calibrate.errors import quantiles, summarize
from meshwise.calibrate.robust import Array, LinearMisses, minimise
from meshwise.calibrate.table import header, lines
from meshwise.core.columns import grouped
from meshwise.core.errors import DataError, MeshwiseError
from meshwise.core.refusals import refuse
from meshwise.core.toml import catalog_toml
from meshwise.estimate.intervals import Spread
from meshwise.model.find import find_model
from meshwise.serve import inferencex, measured
from meshwise.serve.engine import Constants, fitted
from meshwise.serve.load import LoadResult, has_room, pools_of
from meshwise.serve.pass_times import PassTimes
from meshwise.serve.simulate import Pools, simulate

NUDGE = 0.15
"""By which the log of a constant is moved to see its slope."""

PULL = 0.002
"""How strongly a constant is held to where it is (`robust`): little, as it has been fitted before."""

REACH = math.log(2.0)
"""The furthest that a fit moves the log of a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A measured latency: what it is of, its log of predicted over measured, and how constants move that."""

    model: str
    system: str
    quantity: str
    regime: str
    judges_only: bool
    miss: float
    slopes: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ServingFit:
    """The constants, the cases, and their misses with their model, or their system, left out of the fit."""

    constants: Constants
    cases: Sequence[Case]
    misses: Array
    without_model: Array
    without_system: Array

    def to_json(self) -> dict[str, Any]:
        """What `meshwise fit --json` prints of serving engines."""
        misses = {"fitted": self.misses, "left_out_model": self.without_model}
        misses["left_out_system"] = self.without_system
        errors = {name: asdict(summarize(np.expm1(of).tolist())) for name, of in misses.items()}
        return {"constants": msgspec.structs.asdict(self.constants), "errors": errors}

    @property
    def spreads(self) -> dict[str, dict[str, Spread]]:
        """Percentiles of measured over predicted with the model left out, by quantity and regime."""
        found: dict[str, dict[str, Spread]] = {}
        alike = grouped(range(len(self.cases)), lambda i: (self.cases[i].quantity, self.cases[i].regime))
        for (quantity, regime), rows in alike.items():
            models = [self.cases[i].model for i in rows]
            low, high = quantiles(np.exp(-self.without_model[rows]), models, 0.1, 0.9)
            spread = Spread(min(low, 1.0), max(high, 1.0), len(rows), len(set(models)))
            found.setdefault(quantity, {})[regime] = spread
        return found


def fit_serving(path: Path) -> ServingFit:
    """Fit the constants to the points of `path`; DataError where none can fit them."""
    missing = [name for name in measured.COLUMNS if name not in header(path)]
    refuse("table of points", DataError, path=path, missing=", ".join(missing))
    start = fitted().constants
    names = list(msgspec.structs.asdict(start))
    cases = [case for _, row, bad in lines(path) if not bad for case in _cases(row, names)]
    num = Counter(case.model for case in cases)
    is_fitted = np.array([not case.judges_only for case in cases])
    refuse("points of a fit", DataError, path=path, has_points=is_fitted.any())
    linear = LinearMisses(
        np.array([case.miss for case in cases]),
        np.array([case.slopes for case in cases]),
        np.array([num[case.model] ** -0.5 for case in cases]),
        sources=np.zeros((len(cases), 0)),  # all points are of one benchmark
    )

    def step(without: str = "", aspect: str = "model") -> Array:
        kept = is_fitted & np.array([getattr(case, aspect) != without for case in cases])
        reach = np.full(len(names), REACH)
        return minimise(linear.where(kept), np.zeros(len(names)), -reach, reach, pull=PULL)

    def left_out(aspect: str) -> Array:
        keys = [getattr(case, aspect) for case in cases]
        steps = {key: step(key, aspect) for key in set(keys)}
        moved = [row @ steps[key] for row, key in zip(linear.slopes, keys, strict=True)]
        return linear.miss + np.array(moved)

    best = step()
    values = [getattr(start, name) * math.exp(by) for name, by in zip(names, best, strict=True)]
    constants = Constants(**dict(zip(names, values, strict=True)))
    misses = linear.miss + linear.slopes @ best
    return ServingFit(constants, cases, misses, left_out("model"), left_out("system"))


def _cases(row: Mapping[str, str], names: Sequence[str]) -> Iterator[Case]:
    """The latencies of a row, simulated with every constant as it is, then with each of them larger."""
    try:
        of = measured.point(row)
        if not has_room(of.fleet):
            return
        pools = pools_of(of.fleet, of.requests, of.engine)
    except MeshwiseError:
        return

    def load(pools: Pools) -> LoadResult:
        return LoadResult(of.fleet, of.requests, of.engine, simulate(of.requests, pools))

    def nudge(name: str) -> Mapping[str, float]:
        moves = getattr(pools.worker.times, _IN_PASSES.get(name, name), 1.0) > 0.0
        return measured.predicted(row, load(pools.with_times(partial(_larger, name)))) if moves else first

    base = load(pools)
    is_scripted = inferencex.client(row)["started"] == "by scripts" and bool(row.get("measured"))
    only = base.regime == "full cache" or not is_scripted
    seen = measured.measured(row, base)
    first = measured.predicted(row, base)
    nudged = [nudge(name) for name in names]
    for quantity, value in seen.items():
        if value:
            slopes = tuple(math.log(each[quantity] / first[quantity]) / NUDGE for each in nudged)
            miss = math.log(first[quantity] / value)
            yield Case(
                find_model(row["model"]).name, row["system"], quantity, base.regime,
                only or quantity == measured.RATE, miss, slopes,
            )  # fmt: skip


_IN_PASSES = {"launched_op_s": "prompt_host_s"}
"""Constants by another name in `PassTimes`."""


def _larger(name: str, times: PassTimes) -> PassTimes:
    """`times` with one constant of it, or of its engine, moved by `NUDGE`."""
    name, by = _IN_PASSES.get(name, name), math.exp(NUDGE)
    if hasattr(times, name):
        return replace(times, **{name: by * getattr(times, name)})
    engine: Any = {name: by * getattr(times.engine, name)}
    return replace(times, engine=replace(times.engine, **engine))


def serving_toml(found: ServingFit) -> str:
    """The catalog file as text."""
    chips = sorted({measured.chip_name({"system": case.system}) for case in found.cases})
    sections: dict[str, dict[str, Any]] = {"measured": {"chips": chips}}
    sections |= {"constants": msgspec.structs.asdict(found.constants)}
    for quantity, by_regime in found.spreads.items():
        for regime, spread in by_regime.items():
            sections[f'spreads.{quantity}."{regime}"'] = msgspec.structs.asdict(spread)
    return catalog_toml("serving.toml", sections)
