"""What changed between two captures of a job: a step of the mean rank before and after.

It is divided by class of work, as in `explain`, and by kernel. Captures may hold other numbers of steps and
ranks: each side is the mean of its own. Where one of the two marks no steps, both count as a whole. What only
one side has stands with a zero on the other, so the changes of classes add up to that of the step.
"""

import itertools
from dataclasses import dataclass, replace

from meshwise.trace.columns import Traces
from meshwise.trace.explain import explain, measured_steps
from meshwise.trace.operators import kernel_totals, kernels_of
from meshwise.trace.summary import Summary

_Spent = dict[tuple[str, str], tuple[float, float]]
"""Seconds and number of runs by name and kind."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """A class of work or a kernel in a step of the mean rank; a class counts once."""

    name: str
    kind: str
    before_s: float
    after_s: float
    count_before: float
    count_after: float
    change_s: float


@dataclass(frozen=True, slots=True)
class StepDifference:
    """Seconds of a step before and after, and what changed in it, the largest change (up or down) first."""

    step_s: list[float]
    num_steps: list[int]
    """Of how many steps each side is the mean; none where whole captures are compared."""
    classes: list[StepChange]
    kernels: list[StepChange]


def difference(old: Summary, new: Summary) -> StepDifference:
    """What changed from one capture to another."""
    sides = [one if old.steps and new.steps else replace(one, steps=[]) for one in (old, new)]
    found, measured = [*map(explain, sides)], [*map(measured_steps, sides)]
    classes = ({(row.op, ""): (row.measured_s or 0.0, 1.0) for row in one.classes} for one in found)
    changes = _changes(*classes), _changes(*itertools.starmap(_kernels, measured))
    return StepDifference([one.measured_s for one in found], [num for _, num in measured], *changes)


def _kernels(traces: Traces, num_steps: int) -> _Spent:
    """The kernels in a step of the mean rank, in the whole capture for no steps."""
    totals = kernel_totals(itertools.chain.from_iterable(map(kernels_of, traces)))
    num = len(traces) * (num_steps or 1)
    return {(one.name, one.kind): (one.total_s / num, one.count / num) for one in totals}


def _changes(before: _Spent, after: _Spent) -> list[StepChange]:
    """What either side has."""
    rows = []
    for key in {**before, **after}:
        (before_s, num_before), (after_s, num_after) = (side.get(key, (0.0, 0.0)) for side in (before, after))
        rows.append(StepChange(*key, before_s, after_s, num_before, num_after, round(after_s - before_s, 12)))
    return sorted(rows, key=lambda row: (-abs(row.change_s), row.name))
