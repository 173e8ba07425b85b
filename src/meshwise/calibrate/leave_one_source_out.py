"""Each source of runs predicted from constants that were fitted without it.

The misses of the fitting half are linearised once at the fitted constants (`robust.LinearMisses`); leaving a
group of runs out is then a small regression, and its runs are priced anew with what came of it. From these
misses, and from those with all runs of a chip (a generation, a type, a software, a scale) left out, follow
the intervals of `meshwise.estimate.intervals`. The mechanisms, too, were found on the runs that are fitted,
so a new source misses by more than they tell: the steps of `catalog/unseen_runs.csv`, to which nothing is
fitted, count as well.
"""

import math
from collections import defaultdict
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
from meshwise.calibrate.runs import publication, unseen_runs
from meshwise.calibrate.validate import Prediction, Validation
from meshwise.core.columns import grouped
from meshwise.core.errors import DataError
from meshwise.core.refusals import refuse
from meshwise.core.toml import catalog_toml
from meshwise.estimate import intervals
from meshwise.estimate.intervals import Spread, Spreads
from meshwise.machine.efficiency import Efficiency, constants as efficiency_of, without
from meshwise.machine.hardware import Chip, Level, chips
from meshwise.machine.overheads import Tables

QUANTITIES = {each.name: each for each in (fit_steps.TIME, fit_steps.MEMORY)}
Misses = dict[str, float]
"""Log of predicted over measured, by the id of a run."""

FEW = (2.402, 1.472, 1.278, 1.196, 1.152, 1.124, 1.104, 1.090, 1.079, 1.071)
"""90th percentile of Student's distribution of 1, 2, ... degrees of freedom over that of the normal one."""


@dataclass(frozen=True, slots=True)
class MissesByOthers:
    """Misses of every run with its source left out, and with all that are alike in an aspect left out, by
    quantity (and aspect). `unseen` are in no table of a fit, `fitted` may be."""

    fitted: Sequence[Expressed]
    unseen: Sequence[Expressed]
    by_source: Mapping[str, Misses]
    by_aspect: Mapping[str, Mapping[str, Misses]]

    def spreads(self, without: str = "") -> Spreads:
        """How far measured and predicted differ by regime, over the sources other than `without`.

        Unseen runs count in the regimes of their steps if nothing of them is new; of memory most are of one
        page, with documents of lengths that it does not say, and none counts.
        """
        fitted, unseen = (
            [each for each in those if publication(each.run.source) != without]
            for those in (self.fitted, self.unseen)
        )
        known = {name: self._that_measured(name, fitted) for name in QUANTITIES}
        seen = {
            name: {aspect: measured(those, aspect) for aspect in self.by_aspect[name]}
            for name, those in known.items()
        }
        steps, memory = known.values()
        judged, among = self._that_measured("step_s", unseen), Spreads(seen, {}, {})
        near = [
            each for each in judged if not intervals.unmeasured("step_s", each.cluster, each.plans[0], among)
        ]
        of_steps = self._spreads("step_s", steps + near, steps + judged)
        return Spreads(seen, of_steps, self._spreads("memory_bytes", memory, memory))

    def _that_measured(self, quantity: str, runs: Sequence[Expressed]) -> list[Expressed]:
        return [each for each in runs if each.run.id in self.by_source[quantity]]

    def _spreads(
        self, quantity: str, near: Sequence[Expressed], runs: Sequence[Expressed]
    ) -> dict[str, Spread]:
        """By regime, from runs that are `near`; by aspect, how far all `runs` are from these."""
        misses = self.by_source[quantity]
        names = dict.fromkeys(name for each in near for name in regimes_of(each, quantity))
        return {name: spread(near, misses, quantity, name) for name in names} | {
            f"{intervals.UNMEASURED}{aspect}": excess(runs, without, near, misses, quantity, aspect)
            for aspect, without in self.by_aspect[quantity].items()
        }


def misses_by_others(
    fitted: Sequence[Expressed], constants: Constants, unseen: Sequence[Expressed] = ()
) -> MissesByOthers:
    """Predict every run from `constants` moved to where the half of `fitted` that trains, without its like,
    has them."""
    runs = [*fitted, *unseen]
    by_source: dict[str, Misses] = {}
    by_aspect: dict[str, dict[str, Misses]] = {}
    for name, quantity in QUANTITIES.items():
        training = fit_steps.fitting_half(fitted, quantity)
        known = (runs, training, fit_steps.linearize(constants, training, quantity), constants, quantity)
        by_source[name] = _misses(*known)
        by_aspect[name] = {aspect: _misses(*known, aspect) for aspect in aspects_of(runs[0])}
    return MissesByOthers(fitted, unseen, by_source, by_aspect)


def _misses(
    runs: Sequence[Expressed], training: Sequence[Expressed], linear: LinearMisses, constants: Constants,
    quantity: fit_steps.Quantity, aspect: str = "",
) -> Misses:  # fmt: skip
    """Misses of all runs that measured a quantity, each without those of its source in the half that trains.

    In place of its source: of all that are like it in `aspect`. Nor do the kernels of their chips help, where
    these are what they have in common.
    """

    def key(each: Expressed) -> str:
        return aspects_of(each)[aspect] if aspect else publication(each.run.source)

    measured = [each for each in runs if getattr(each.run, quantity.name)]
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
    found = misses_by_others(priced, fit_steps.catalog_constants(), fit_steps.priced_runs([unseen_runs()]))
    runs = {each.run.id: each for each in (*found.unseen, *found.fitted)}
    sources = {publication(each.run.source) for each in runs.values()}
    known = {name: found.spreads(without=name) for name in sources}

    def with_left_out(row: Prediction) -> Prediction:
        miss = found.by_source.get(row.quantity, {}).get(row.id)
        if miss is None or row.measured is None:
            return row
        each, value = runs[row.id], row.measured * math.exp(miss)
        between = intervals.interval_of(
            row.quantity, value, each.model, each.cluster, each.plans[0], among=known[publication(row.source)]
        )
        return replace(row, left_out=value, left_out_interval=between)

    return Validation([with_left_out(row) for row in validation.rows], validation.warnings)


def regimes_of(expressed: Expressed, quantity: str) -> list[str]:
    """The regimes of a run."""
    return intervals.regimes(quantity, expressed.model, expressed.cluster, expressed.plans[0])


def aspects_of(expressed: Expressed) -> dict[str, str]:
    """What a run is like, by aspect."""
    return intervals.aspects(expressed.cluster, expressed.plans[0])


def measured(runs: Sequence[Expressed], aspect: str) -> list[str]:
    """What several sources measured of an aspect: what one alone did may be its own, not that of its chip."""
    sources = defaultdict(set)
    for each in runs:
        sources[aspects_of(each)[aspect]].add(publication(each.run.source))
    return sorted(what for what, those in sources.items() if len(those) > 1)


def spread(runs: Sequence[Expressed], misses: Misses, quantity: str, regime: str) -> Spread:
    """By what factor 8 of 10 measurements of a new source differ from the prediction at most, either way."""
    own = [publication(each.run.source) for each in runs if regime in regimes_of(each, quantity)]
    num = len(set(own)) + (len(own) < len(runs))
    few = FEW[min(max(num - 2, 0), len(FEW) - 1)] * math.sqrt(1.0 + 1.0 / num)
    return _spread(few * width(runs, misses, quantity, regime), own)


def width(runs: Sequence[Expressed], misses: Misses, quantity: str, regime: str) -> float:
    """Within what of a log 8 of 10 misses of a regime lie; runs of all others count as one source more."""
    sources = [regime in regimes_of(each, quantity) and publication(each.run.source) for each in runs]
    return quantiles(np.array([abs(misses[each.run.id]) for each in runs]), sources, 0.8)[0] if runs else 0.0


def excess(
    runs: Sequence[Expressed], without: Misses, near: Sequence[Expressed], misses: Misses, quantity: str,
    aspect: str,
) -> Spread:  # fmt: skip
    """The factor that has to come upon what others that are `near` tell of their regimes for 8 of 10 `runs`
    to lie within where all alike in `aspect` are left out (`without`); each group counts once."""
    beyond, groups = [], []
    keyed = grouped(runs, lambda each: (aspects_of(each)[aspect], *regimes_of(each, quantity)))
    for (group, *names), alike in keyed.items():
        others = [each for each in near if aspects_of(each)[aspect] != group]
        usual = max(width(others, misses, quantity, name) for name in names)
        beyond += [without[each.run.id] ** 2 - usual**2 for each in alike]
        groups += [group] * len(alike)
    return _spread(math.sqrt(max(*quantiles(np.array(beyond), groups, 0.8), 0.0)), groups)


def _spread(width: float, groups: Sequence[str]) -> Spread:
    return Spread(math.exp(-width), math.exp(width), len(groups), len(set(groups)))


def intervals_toml(found: Spreads) -> str:
    """The catalog of intervals as text."""
    sections = {f"measured.{quantity}": dict(each) for quantity, each in found.measured.items()}
    for quantity in QUANTITIES:
        for name, each in getattr(found, quantity).items():
            sections[f'{quantity}."{name}"'] = msgspec.structs.asdict(each)
    return catalog_toml("intervals.toml", sections)
