"""Predicted against measured as a page: a waterfall from the one step to the other, class by class."""

from __future__ import annotations

from meshwise.core.units import duration
from meshwise.report.chart import LESS_COLOR, MORE_COLOR, SUM_COLOR, Bars, Chart, ChartAxis
from meshwise.report.explain_table import op_table, step_table
from meshwise.report.html import Page, Section, Text
from meshwise.report.table import Table
from meshwise.report.trace_table import difference_text, sentence
from meshwise.trace.explain import Explanation


def explain_page(explanation: Explanation) -> Page:
    """Where the measured step differs from the predicted one."""
    first, *others = explanation.findings
    sections: list[Section] = [Text("Findings", others)] if others else []
    table, predicted = step_table(explanation), explanation.predicted_s
    sections.append(table if predicted is None else _waterfall(explanation, predicted, table))
    if ops := op_table(explanation, limit=len(explanation.rows)):
        sections.append(ops)
    return Page("Predicted against measured", sentence(first), sections)


def _waterfall(explanation: Explanation, predicted: float, table: Table) -> Chart:
    changes = [row.more_s for row in explanation.classes]
    starts = [predicted + sum(changes[:i]) for i in range(len(changes))]
    bars = Bars(
        ["predicted", *(row.op for row in explanation.classes), "measured"],
        [predicted, *changes, explanation.measured_s],
        [SUM_COLOR, *(MORE_COLOR if change > 0 else LESS_COLOR for change in changes), SUM_COLOR],
        [0.0, *starts, 0.0],
        texts=[duration(predicted), *map(difference_text, changes), duration(explanation.measured_s)],
    )
    finding = "Red classes take longer than predicted, green ones less; together they are the difference."
    title, height = "From the predicted step to the measured one", 60 + 26 * len(bars.names)
    return Chart(title, [bars], ChartAxis(unit="s"), finding=finding, table=table, height=height)
