"""The predicted step beside the measured one: a sentence, a bar for each class of work, the ops that join."""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.core.units import duration
from meshwise.report.answer import LESS_COLOR, MORE_COLOR, SUM_COLOR, Bars, Chart, ChartAxis, Page, Section
from meshwise.report.table import Table, bar, difference_text
from meshwise.report.trace import sentence
from meshwise.trace.explain import Explanation, OpDifference

_BAR = 20
"""Characters of the longest bar."""


def parts(found: Explanation, *, limit: int = 15, everything: bool = False) -> Iterator[Section]:
    """What is wrong in a sentence, then measured = predicted + differences, the largest first."""
    above = len(found.mismatches) + 1
    yield " ".join(sentence(text) + "." for text in found.findings[:above]) + "\n"
    yield _classes(found)
    rows = [(row.module, row.op, row.phase, *_times(row)) for row in found.rows if row.module]
    if rows:
        places = ("module", "op", "phase")
        columns = (*places, "predicted", "measured", "difference")
        shown = rows if everything else rows[:limit]
        yield Table("Its ops that join", columns, shown, left=places, no_wrap=True)
    yield from (sentence(text) + "." for text in found.findings[above:])


def page(found: Explanation) -> Page:
    """Where the measured step differs from the predicted one, all of it."""
    headline, *sections = parts(found, everything=True)
    return Page("Predicted against measured", str(headline).strip(), sections)


def _classes(found: Explanation) -> Table | Chart:
    """From the predicted step to the measured one, class by class; without a prediction what was measured."""
    title, name = "Time of a step", "class"
    if found.predicted_s is None:
        rows = [(row.op, duration(row.measured_s)) for row in found.classes]
        return Table(title, (name, "measured"), [*rows, ("step", duration(found.measured_s))], no_wrap=True)
    changes = [row.more_s for row in found.classes]
    most_s = max(map(abs, changes), default=0.0) or 1.0
    drawn = [f"{change:+.0f}"[0] + bar(abs(change) / most_s, _BAR) if change else "" for change in changes]
    classes = [(row.op, *_times(row), line) for row, line in zip(found.classes, drawn, strict=True)]
    columns = (name, "predicted", "measured", "difference", "longer or shorter")
    first = ("predicted step", duration(found.predicted_s), "", "", "")
    last = ("measured step", "", duration(found.measured_s), "", "")
    table = Table(title, columns, [first, *classes, last], left=(name, columns[-1]), no_wrap=True)
    bars = Bars(
        ["predicted", *(row.op for row in found.classes), "measured"],
        [found.predicted_s, *changes, found.measured_s],
        [SUM_COLOR, *(MORE_COLOR if change > 0 else LESS_COLOR for change in changes), SUM_COLOR],
        [0.0, *(found.predicted_s + sum(changes[:i]) for i in range(len(changes))), 0.0],
        texts=[duration(found.predicted_s), *map(difference_text, changes), duration(found.measured_s)],
    )
    finding = "Red classes take longer than predicted, green ones less; together they are the difference."
    title, height = "From the predicted step to the measured one", 60 + 26 * len(bars.names)
    return Chart(title, [bars], ChartAxis("time of a step", "s"), finding=finding, table=table, height=height)


def _times(row: OpDifference) -> tuple[str, str, str]:
    return duration(row.predicted_s), duration(row.measured_s), difference_text(row.more_s)
