"""Which one constant of `catalog/overheads.toml` would mend the predictions of measured runs, and how far.

Each constant that bears on a run is moved alone, up to a factor of two either way and within the limits of
`catalog/step_constants.toml` (one without limits stays); the misses log(predicted / measured) are taken as
linear in its log, and the runs are priced again where their mean size is least. What mends few runs says
little: more than one constant can make up for the same cause; and one that ends at its limit stands in for
something else.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshwise.calibrate.errors import Mend
from meshwise.calibrate.express import Expressed
from meshwise.calibrate.fit_steps import as_tables, catalog_constants, every, limits, step_miss, touches

STEP, MOST, LEAST_GAIN_FRAC = 1.1, 2.0, 0.1
"""By how much a constant is moved to see what it does, how far it may go, and what is worth telling."""


def mends(runs: Sequence[Expressed]) -> list[Mend]:
    """The constants that would lower the mean error of the step times of `runs` by a tenth, best first."""
    timed = [each for each in runs if each.run.step_s]
    constants = every(catalog_constants())
    misses = np.array([step_miss(each, as_tables(constants)) for each in timed])
    found = [mend for name, value in constants.items() for mend in _mend(name, value, timed, misses)]
    return sorted(found, key=lambda mend: mend.mended_mean_abs_frac)


def _mend(name: str, value: float, runs: Sequence[Expressed], misses: np.ndarray) -> Iterator[Mend]:
    touched = np.array([touches(name, each) for each in runs])
    least, most = limits()[name]
    if not touched.any() or least == most:
        return

    def at(factor: float) -> np.ndarray:
        tables = as_tables(catalog_constants(), {name: value * factor})
        known = zip(runs, touched, misses, strict=True)
        return np.array([step_miss(each, tables) if moves else miss for each, moves, miss in known])

    slopes = (at(STEP) - misses) / math.log(STEP)
    ends = [math.log(min(max(end / value, 1.0 / MOST), MOST)) for end in (least, most)]
    logs = np.linspace(ends[0], ends[1], 57)
    best = logs[np.abs(misses[:, None] + slopes[:, None] * logs).mean(axis=0).argmin()]
    before, after = (float(np.abs(np.expm1(each)).mean()) for each in (misses, at(math.exp(best))))
    if after < (1.0 - LEAST_GAIN_FRAC) * before:
        num_runs, to = int(np.count_nonzero(slopes)), value * math.exp(best)
        yield Mend(name, value, to, before, after, num_runs, is_at_limit=best in ends)
