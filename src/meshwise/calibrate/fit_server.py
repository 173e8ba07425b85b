"""Constants of a server of one's own, fitted to what its load generator measured.

Of `serve.engine.FITTED` those are sought that minimise

    sum |log(predicted / measured)| / NOISE + sum (step / typical difference)^2

over the mean time to first token and per token of all records, by `robust.minimise` round after round, with
slopes from simulating every record with each constant larger. The second sum holds a constant where it was
unless records say otherwise, so that one record is enough to start with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.calibrate.robust import Array, LinearMisses, minimise
from meshwise.calibrate.server_records import ServerRecord
from meshwise.core.errors import WorkloadError
from meshwise.core.toml import toml_text
from meshwise.serve.engine import FITTED, Engine
from meshwise.serve.load import Fleet, has_room, pools_of
from meshwise.serve.pass_times import PassTimes
from meshwise.serve.simulate import simulate

LATENCIES = ("ttft_s", "tpot_s")

NOISE = 0.05
"""Deviation of the log of a measured mean: a benchmark that is run again differs by so much."""

NUDGE = 0.2
"""Of its typical difference between servers, what a constant is moved by to see its slope."""

REACH = (4.0, 2.0, 1.0, 0.5)
"""Of such differences, how far a constant moves at most in each round."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerFit:
    """`engine` with the constants found, `before` as it was; latencies [s] of each record, three ways."""

    before: Engine
    engine: Engine
    records: Sequence[ServerRecord]
    measured: Array
    predicted_before: Array
    predicted: Array

    def to_json(self) -> dict[str, Any]:
        """The document of `meshwise calibrate --serving --json`."""
        seen = ~np.isnan(self.measured)
        of = {"measured": self.measured, "before": self.predicted_before, "after": self.predicted}
        rows = [
            {"record": record.where}
            | {
                name: {when: float(seconds[line, i]) for when, seconds in of.items()}
                for i, name in enumerate(LATENCIES)
                if seen[line, i]
            }
            for line, record in enumerate(self.records)
        ]
        errors = {
            when: {
                name: float(np.nanmean(np.abs(of[when][:, i] / self.measured[:, i] - 1.0)))
                for i, name in enumerate(LATENCIES)
                if seen[:, i].any()
            }
            for when in ("before", "after")
        }
        engines = {"before": self.before, "after": self.engine}
        constants = {
            name: {when: getattr(engine, name) for when, engine in engines.items()} for name in FITTED
        }
        document = {"engine": f"{self.engine.name} {self.engine.version}", "constants": constants}
        return document | {"rows": rows, "mean_abs_frac": errors}

    @property
    def toml(self) -> str:
        """The file that `serve --engine` takes."""
        fitted_to = f"{len(self.records)} records of a server of one's own"
        head = {"engine": self.engine.name, "version": self.engine.version, "fitted_to": fitted_to}
        constants = {name: getattr(self.engine, name) for name in FITTED}
        return toml_text([("", head), ("[constants]", constants)], 4)


def fit_server(
    records: Sequence[ServerRecord], fleet: Callable[[int, int], Fleet], engine: Engine
) -> ServerFit:
    """Fit the constants of `engine` to `records`; `fleet` is what serves prompts and outputs of such tokens.

    WorkloadError where it has no room for a sequence.
    """
    requests = [record.requests for record in records]
    fleets = [fleet(*each.mean_tokens) for each in requests]
    if not fleets or not all(map(has_room, fleets)):
        raise WorkloadError("no sequence has room beside the weights; check model, cluster and plan")
    pools = [pools_of(of, each, engine) for of, each in zip(fleets, requests, strict=True)]
    measured = np.array([(record.ttft_s, record.tpot_s or math.nan) for record in records])

    def predict(step: Array) -> Array:
        def moved(times: PassTimes) -> PassTimes:
            return replace(times, engine=_moved(times.engine, step))

        served = [*map(simulate, requests, (of.with_times(moved) for of in pools))]
        tpot_s = [one.tpot_s.mean() if one.tpot_s.size else math.nan for one in served]
        return np.column_stack([[one.ttft_s.mean() for one in served], tpot_s])

    def misses(predicted: Array) -> Array:
        found: Array = np.log(predicted / measured).ravel()
        return found[~np.isnan(measured.ravel())]

    step = np.zeros(len(FITTED))
    before = predicted = predict(step)
    for reach in REACH:
        miss = misses(predicted)
        slopes = [(misses(predict(step + NUDGE * one)) - miss) / NUDGE for one in np.eye(len(FITTED))]
        ones = np.ones(len(miss))
        linear = LinearMisses(miss, np.column_stack(slopes), ones, sources=np.zeros((len(miss), 0)))
        least, most = np.maximum(-4.0 - step, -reach), np.minimum(4.0 - step, reach)
        step = step + minimise(linear, step, least, most, pull=NOISE / len(miss), cap=math.inf)
        predicted = predict(step)
    return ServerFit(engine, _moved(engine, step), records, measured, before, predicted)


def _moved(engine: Engine, step: Array) -> Engine:
    """`engine` with its constants moved, in their typical differences."""
    moved = {name: float(by) * usual for (name, usual), by in zip(FITTED.items(), step, strict=True)}
    pass_s = max(engine.pass_s + moved.pop("pass_s"), 0.0)
    scaled: dict[str, Any] = {name: getattr(engine, name) * math.exp(by) for name, by in moved.items()}
    return replace(engine, pass_s=pass_s, **scaled)
