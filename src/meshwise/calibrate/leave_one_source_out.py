"""Each source of runs predicted from constants that were fitted without it.

The misses of the fitting half are linearised once at the fitted constants (`robust.LinearMisses`); leaving a
group of runs out is then a small regression, and its runs are priced anew with what came of it. From these
misses, and from those with all runs of a chip (a generation, a type, a software, a scale) left out, follow
the intervals of `meshwise.estimate.intervals`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from meshwise.calibrate import fit_steps
from meshwise.calibrate.errors import quantiles
from meshwise.calibrate.express import Expressed
from meshwise.calibrate.fit_steps import Constants
from meshwise.calibrate.robust import LinearMisses
from meshwise.calibrate.runs import publication
from meshwise.calibrate.validate import Prediction, Validation
from meshwise.core.columns import grouped
from meshwise.core.errors import DataError
from meshwise.core.refusals import refuse
from meshwise.core.toml import catalog_toml
from meshwise.estimate import intervals
from meshwise.estimate.intervals import Spread, Spreads
from meshwise.machine.efficiency import Efficiency, without
from meshwise.machine.efficiency import constants as efficiency_of
from meshwise.machine.hardware import Chip, Level, chips
from meshwise.machine.overheads import Tables

QUANTITIES = {each.name: each for each in (fit_steps.TIME, fit_steps.MEMORY)}
Misses = dict[str, float]
"""Log of predicted over measured, by the id of a run."""


@dataclass(frozen=True, slots=True)
class MissesByOthers:
    """Misses of every run with its source left out, and with all that are alike in an aspect left out, by
    quantity (and aspect)."""

    runs: Sequence[Expressed]
    by_source: Mapping[str, Misses]
    by_aspect: Mapping[str, Mapping[str, Misses]]

    def spreads(self, without: str = "") -> Spreads:
        """How far measured and predicted differ by regime, over the sources other than `without`."""
        runs = [each for each in self.runs if publication(each.run.source) != without]
        seen = [aspects_of(each) for each in runs]
        return Spreads(
            measured={aspect: sorted({each[aspect] for each in seen}) for aspect in (seen or [{}])[0]},
            **{quantity: self._spreads(quantity, runs) for quantity in QUANTITIES},
        )

    def _spreads(self, quantity: str, runs: Sequence[Expressed]) -> dict[str, Spread]:
        known = [each for each in runs if each.run.id in self.by_source[quantity]]
        names = dict.fromkeys(name for each in known for name in regimes_of(each))
        found = {
            name: spread([each for each in known if name in regimes_of(each)], self.by_source[quantity])
            for name in names
        }
        widths = {name: math.log(each.p90) for name, each in found.items()}
        near = [max(widths[name] for name in regimes_of(each)) for each in known]
        beyond = {
            f"unmeasured {aspect}": excess(known, misses, near, aspect)
            for aspect, misses in self.by_aspect[quantity].items()
        }
        return found | beyond


def misses_by_others(runs: Sequence[Expressed], constants: Constants) -> MissesByOthers:
    """Predict every run from `constants` moved to where the fitting half without its like has them."""
    by_source: dict[str, Misses] = {}
    by_aspect: dict[str, dict[str, Misses]] = {}
    for name, quantity in QUANTITIES.items():
        linear = fit_steps.linearize(constants, fit_steps.fitting_half(runs, quantity), quantity)
        known = (runs, linear, constants, quantity)
        by_source[name] = _misses(*known)
        by_aspect[name] = {aspect: _misses(*known, aspect) for aspect in aspects_of(runs[0])}
    return MissesByOthers(runs, by_source, by_aspect)


def _misses(
    runs: Sequence[Expressed], linear: LinearMisses, constants: Constants, quantity: fit_steps.Quantity,
    aspect: str = "",
) -> Misses:  # fmt: skip
    """Misses of all runs that measured a quantity, each without those of its source in the fitting half.

    In place of its source: of all that are like it in `aspect`. Nor do the kernels of their chips help, where
    these are what they have in common.
    """

    def key(each: Expressed) -> str:
        return aspects_of(each)[aspect] if aspect else publication(each.run.source)

    measured = [each for each in runs if getattr(each.run, quantity.name)]
    training = fit_steps.fitting_half(runs, quantity)
    found: Misses = {}
    for group, members in grouped(measured, key).items():
        others = np.array([key(each) != group for each in training])
        step = fit_steps.moved(constants, linear.where(others), quantity, reach=2.0)
        tables = fit_steps.as_tables(fit_steps.times(constants, quantity, step))
        if aspect == "generation":
            tables = _without_power(tables, members[0].cluster.chip.generation)
        for each in members:
            kernels = None
            if aspect in ("generation", "chip", "dtype"):
                dtype = each.plans[0].dtype if aspect == "dtype" else ""
                kernels = _kernels_without(each.cluster.chip, each.cluster.levels, aspect, dtype)
            found[each.run.id] = quantity.miss(each, tables, kernels)
    return found


def _without_power(tables: Tables, generation: str) -> Tables:
    others = {
        name: {chip: value for chip, value in getattr(tables, name).items() if chip != generation}
        for name in ("power", "older_attention")
    }
    return replace(tables, **others)


@cache
def _kernels_without(chip: Chip, levels: tuple[Level, ...], aspect: str, dtype: str) -> Efficiency:
    """The kernels of `chip` by those of chips that are not like it in an aspect; links between nodes stay."""

    def keep(key: str, name: str) -> bool:
        if key == "outer.link" or (aspect == "dtype" and f".{dtype}" not in key):
            return True
        return name != chip.name and (aspect == "chip" or chips()[name].generation != chip.generation)

    return efficiency_of(chip, levels, tables=without(keep, chip.generation))


def predicted_by_others(validation: Validation, paths: Iterable[Path]) -> Validation:
    """`validation` with each run predicted by the other sources, and the interval that goes with it.

    DataError unless two sources at least measured steps, and two memory.
    """
    priced = fit_steps.priced_runs(paths)
    if not priced and any(row.left_out for row in validation.rows):  # of tables that have them already
        return validation
    for name in QUANTITIES:
        sources = {publication(each.run.source) for each in priced if getattr(each.run, name)}
        refuse("leave one source out", DataError, name=name, sources=sources)
    found = misses_by_others(priced, fit_steps.catalog_constants())
    runs = {each.run.id: each for each in found.runs}
    of_source = dict.fromkeys(publication(each.run.source) for each in found.runs)
    known = {source: found.spreads(without=source) for source in of_source}

    def with_left_out(row: Prediction) -> Prediction:
        miss = found.by_source.get(row.quantity, {}).get(row.id)
        if miss is None or row.measured is None:
            return row
        each, value = runs[row.id], row.measured * math.exp(miss)
        others = known[publication(row.source)]
        missing = intervals.unmeasured(aspects_of(each), others)
        between = intervals.interval_around(row.quantity, value, regimes_of(each), missing, others)
        return replace(row, left_out=value, left_out_interval=between)

    return Validation([with_left_out(row) for row in validation.rows], validation.warnings)


def regimes_of(expressed: Expressed) -> list[str]:
    """The regimes of a run."""
    plan, num_chips = expressed.plans[0], expressed.cluster.num_chips
    has_experts, adapts = expressed.model.moe is not None, plan.lora_rank > 0
    return intervals.regimes(has_experts=has_experts, adapts=adapts, dtype=plan.dtype, num_chips=num_chips)


def aspects_of(expressed: Expressed) -> dict[str, str]:
    """What a run is like, by aspect."""
    plan, on = expressed.plans[0], expressed.cluster
    return intervals.aspects(on.chip, dtype=plan.dtype, software=plan.software, num_chips=on.num_chips)


def spread(runs: Sequence[Expressed], misses: Misses) -> Spread:
    """By what factor 8 of 10 measurements differ from the prediction at most, either way; each source counts
    once, as a new one does."""
    sources = [publication(each.run.source) for each in runs]
    return _spread([misses[each.run.id] ** 2 for each in runs], sources)


def excess(runs: Sequence[Expressed], misses: Misses, near: Sequence[float], aspect: str) -> Spread:
    """The factor that has to come upon those of their regimes, whose logs are `near`, for 8 of 10
    measurements to lie within where all runs alike in `aspect` are left out; each group counts once."""
    groups = [aspects_of(each)[aspect] for each in runs]
    beyond = [misses[each.run.id] ** 2 - width**2 for each, width in zip(runs, near, strict=True)]
    return _spread(beyond, groups)


def _spread(squares: Sequence[float], groups: Sequence[str]) -> Spread:
    (square,) = quantiles(np.array(squares), groups, 0.8)
    width = math.sqrt(max(square, 0.0))
    return Spread(math.exp(-width), math.exp(width), len(squares), len(set(groups)))


def intervals_toml(found: Spreads) -> str:
    """The catalog of intervals as text."""
    sections: dict[str, dict[str, object]] = {"measured": dict(found.measured)}
    for quantity in QUANTITIES:
        for name, each in getattr(found, quantity).items():
            sections[f'{quantity}."{name}"'] = msgspec.structs.asdict(each)
    return catalog_toml("intervals.toml", sections)
