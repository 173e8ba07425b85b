"""Which one constant of `catalog/overheads.toml` would mend the predictions of measured runs, and how far.

Each constant that bears on a run is moved alone, up to a factor of two either way; the misses
log(predicted / measured) are taken as linear in its log, and the runs are priced again where their mean size
is least. What mends few runs says little: more than one constant can make up for the same cause.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.calibrate.express import Expressed
from meshwise.calibrate.fit_steps import as_tables, catalog_constants, every, step_miss, touches

STEP, MOST, LEAST_GAIN_FRAC = 1.1, 2.0, 0.1
"""By how much a constant is moved to see what it does, how far it may go, and what is worth telling."""


@dataclass(frozen=True, slots=True)
class Mend:
    """A constant, its `value`, the one that mends (`to`), and the mean error of the runs with each."""

    constant: str
    value: float
    to: float
    mean_abs_frac: float
    mended_mean_abs_frac: float
    num_runs: int


def mends(runs: Sequence[Expressed]) -> list[Mend]:
    """The constants that would lower the mean error of the step times of `runs` by a tenth, best first."""
    timed = [each for each in runs if each.run.step_s]
    constants = every(catalog_constants())
    misses = np.array([step_miss(each, as_tables(constants)) for each in timed])
    found = [mend for name, value in constants.items() if value for mend in _mend(name, value, timed, misses)]
    return sorted(found, key=lambda mend: mend.mended_mean_abs_frac)


def _mend(name: str, value: float, runs: Sequence[Expressed], misses: np.ndarray) -> Iterator[Mend]:
    touched = np.array([touches(name, each) for each in runs])
    if not touched.any():
        return

    def at(factor: float) -> np.ndarray:
        tables = as_tables(catalog_constants(), {name: value * factor})
        known = zip(runs, touched, misses, strict=True)
        return np.array([step_miss(each, tables) if moves else miss for each, moves, miss in known])

    slopes = (at(STEP) - misses) / math.log(STEP)
    logs = np.linspace(-math.log(MOST), math.log(MOST), 57)
    best = logs[np.abs(misses[:, None] + slopes[:, None] * logs).mean(axis=0).argmin()]
    if not slopes.any() or best == 0.0:
        return
    before, after = (float(np.abs(np.expm1(each)).mean()) for each in (misses, at(math.exp(best))))
    if after <= (1.0 - LEAST_GAIN_FRAC) * before:
        yield Mend(name, value, value * math.exp(best), before, after, int(np.count_nonzero(slopes)))
