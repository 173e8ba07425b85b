"""The predicted step beside the measured one: a sentence, a bar for each class of work, the ops that join."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from meshwise.core.units import duration
from meshwise.report.table import Table
from meshwise.report.trace_table import Printed, difference_text, sentence
from meshwise.trace.explain import Explanation, OpDifference

_BAR = 20
"""Characters of the longest bar."""


def print_explanation(
    found: Explanation, console: Console, *, limit: int = 15, everything: bool = False
) -> None:
    """Print what `explanation_parts` says."""
    for part in explanation_parts(found, limit=limit, everything=everything):
        console.print(part)


def explanation_parts(found: Explanation, *, limit: int = 15, everything: bool = False) -> Iterator[Printed]:
    """What is wrong in a sentence, then measured = predicted + differences, the largest first."""
    above = len(found.mismatches) + 1
    yield " ".join(sentence(text) + "." for text in found.findings[:above]) + "\n"
    yield step_table(found)
    if ops := op_table(found, limit=len(found.rows) if everything else limit):
        yield ops
    yield from (sentence(text) + "." for text in found.findings[above:])


def step_table(found: Explanation) -> Table:
    """From the predicted step to the measured one, class by class."""
    title, name = "Time of a step", "class"
    if found.predicted_s is None:
        rows = [(row.op, duration(row.measured_s)) for row in found.classes]
        return Table(title, (name, "measured"), [*rows, ("step", duration(found.measured_s))], no_wrap=True)
    most_s = max((abs(row.more_s) for row in found.classes), default=0.0) or 1.0
    bars = ["█" * round(_BAR * abs(row.more_s) / most_s) for row in found.classes]
    classes = [
        (row.op, *_times(row), bar and ("+" if row.more_s > 0 else "-") + bar)
        for row, bar in zip(found.classes, bars, strict=True)
    ]
    columns = (name, "predicted", "measured", "difference", "longer or shorter")
    first = ("predicted step", duration(found.predicted_s), "", "", "")
    last = ("measured step", "", duration(found.measured_s), "", "")
    return Table(title, columns, [first, *classes, last], left=(name, columns[-1]), no_wrap=True)


def op_table(found: Explanation, *, limit: int) -> Table | None:
    """The ops of the estimate that join; None where none does."""
    rows = [(row.module, row.op, row.phase, *_times(row)) for row in found.rows if row.module]
    places = ("module", "op", "phase")
    columns = (*places, "predicted", "measured", "difference")
    return Table("Its ops that join", columns, rows[:limit], left=places, no_wrap=True) if rows else None


def _times(row: OpDifference) -> tuple[str, str, str]:
    return duration(row.predicted_s), duration(row.measured_s), difference_text(row.more_s)
