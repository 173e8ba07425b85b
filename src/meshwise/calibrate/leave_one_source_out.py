"""Each source of runs predicted from constants that were fitted without it.

The misses of the fitting half are linearised once at the fitted constants (`robust.LinearMisses`); leaving a
group of runs out is then a small regression, and its runs are priced anew with what came of it. From these
misses follow the intervals of `meshwise.estimate.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshwise.calibrate.errors import grouped, quantile
from meshwise.calibrate.express import Expressed
from meshwise.calibrate.fit_steps import (
    MEMORY,
    TIME,
    Quantity,
    as_tables,
    catalog_constants,
    fitting_half,
    linearize,
    moved,
    priced_runs,
    times,
    weights_of,
)
from meshwise.calibrate.robust import LinearMisses
from meshwise.calibrate.runs import publication
from meshwise.calibrate.step_constants import Constants
from meshwise.calibrate.table import header
from meshwise.calibrate.validate import Prediction, Validation
from meshwise.core.toml import catalog_toml
from meshwise.estimate.intervals import UNMEASURED, Spread, Spreads, interval_around, regimes

QUANTITIES = {each.name: each for each in (TIME, MEMORY)}
Misses = dict[str, float]
"""Log of predicted over measured, by the id of a run."""


@dataclass(frozen=True, slots=True)
class MissesByOthers:
    """Misses of every run with its source left out and with its generation of chips left out, by quantity."""

    runs: Sequence[Expressed]
    by_source: Mapping[str, Misses]
    by_generation: Mapping[str, Misses]

    def spreads(self, without: str = "") -> Spreads:
        """How far measured and predicted differ by regime, over the sources other than `without`."""
        runs = [each for each in self.runs if publication(each.run.source) != without]
        return Spreads(
            measured=sorted({measured_as(each) for each in runs}),
            **{quantity: self._spreads(quantity, runs) for quantity in QUANTITIES},
        )

    def _spreads(self, quantity: str, runs: Sequence[Expressed]) -> dict[str, Spread]:
        known = [each for each in runs if each.run.id in self.by_source[quantity]]
        names = dict.fromkeys(name for each in known for name in regimes_of(each))
        found = {
            name: spread([each for each in known if name in regimes_of(each)], self.by_source[quantity])
            for name in names
        }
        return found | {UNMEASURED: spread(known, self.by_generation[quantity])}


def misses_by_others(runs: Sequence[Expressed], constants: Constants) -> MissesByOthers:
    """Predict every run from `constants` moved to where the fitting half without its source has them."""
    found: dict[str, tuple[Misses, Misses]] = {}
    for name, quantity in QUANTITIES.items():
        measured = [each for each in runs if getattr(each.run, name)]
        training = fitting_half(runs, quantity)
        linear = linearize(constants, training, quantity)

        known = (measured, training, linear, constants, quantity)
        found[name] = _misses(_source, *known), _misses(_generation, *known)
    by_source, by_generation = ({name: found[name][i] for name in QUANTITIES} for i in (0, 1))
    return MissesByOthers(runs, by_source, by_generation)


def _source(expressed: Expressed) -> str:
    return publication(expressed.run.source)


def _generation(expressed: Expressed) -> str:
    return expressed.cluster.chip.generation


def _misses(
    key: Callable[[Expressed], str],
    measured: Sequence[Expressed],
    training: Sequence[Expressed],
    linear: LinearMisses,
    constants: Constants,
    quantity: Quantity,
) -> Misses:
    """Misses of all `measured` runs, each group of the same `key` without its own runs in `training`."""
    found: Misses = {}
    for group, members in grouped(measured, key).items():
        others = np.array([key(each) != group for each in training])
        step = moved(constants, linear.where(others), quantity, reach=2.0)
        tables = as_tables(times(constants, quantity, step))
        found |= {each.run.id: quantity.miss(each, tables) for each in members}
    return found


def predicted_by_others(validation: Validation, paths: Iterable[Path]) -> Validation:
    """`validation` with each run predicted by the other sources, and the interval that goes with it."""
    tables = [path for path in paths if "global_batch" in header(path)]
    found = misses_by_others(priced_runs(tables), catalog_constants())
    runs = {each.run.id: each for each in found.runs}
    sources = dict.fromkeys(publication(each.run.source) for each in found.runs)
    known = {source: found.spreads(without=source) for source in sources}

    def with_left_out(row: Prediction) -> Prediction:
        miss = found.by_source.get(row.quantity, {}).get(row.id)
        if miss is None or row.measured is None:
            return row
        each, value = runs[row.id], row.measured * math.exp(miss)
        others = known[publication(row.source)]
        seen = measured_as(each) in others.measured
        between = interval_around(
            row.quantity, value, regimes_of(each), "" if seen else measured_as(each), others
        )
        return replace(row, left_out=value, left_out_interval=between)

    return Validation([with_left_out(row) for row in validation.rows], validation.warnings)


def regimes_of(expressed: Expressed) -> list[str]:
    """The regimes of a run."""
    plan = expressed.plans[0]
    return regimes(
        has_experts=expressed.model.moe is not None, dtype=plan.dtype, num_chips=expressed.cluster.num_chips
    )


def measured_as(expressed: Expressed) -> str:
    """Generation of chips and dtype."""
    return f"{expressed.cluster.chip.generation}.{expressed.plans[0].dtype}"


def spread(runs: Sequence[Expressed], misses: Misses) -> Spread:
    """By what factor 8 of 10 measurements differ from the prediction at most, either way.

    On which side a new source lies is not known before. Runs count as they do in the fit.
    """
    sizes = np.abs([misses[each.run.id] for each in runs])
    factor = math.exp(quantile(sizes, weights_of(runs), 0.8))
    num_sources = len({publication(each.run.source) for each in runs})
    return Spread(1.0 / factor, factor, len(runs), num_sources)


_HEAD = """\
# Written by `meshwise fit`; do not edit. Between which factors of the prediction 8 of 10 measurements lie,
# for `meshwise.estimate.intervals`: each run is predicted from constants fitted without its source, under
# `unmeasured` without its generation of chips.
"""


def intervals_toml(found: Spreads) -> str:
    """The catalog of intervals as text."""
    sections: dict[str, dict[str, object]] = {}
    for quantity in QUANTITIES:
        for name, each in getattr(found, quantity).items():
            sections[f'{quantity}."{name}"'] = {
                key: getattr(each, key) for key in ("p10", "p90", "num_runs", "num_sources")
            }
    measured = ", ".join(f'"{name}"' for name in found.measured)
    return catalog_toml(f"{_HEAD}\nmeasured = [{measured}]\n", sections)
