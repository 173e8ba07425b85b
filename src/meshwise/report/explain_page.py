"""Predicted against measured as a page: a waterfall from the one step to the other, class by class."""

from __future__ import annotations

from meshwise.core.units import duration
from meshwise.report.html import COLORS, Chart, Page, Section, Text
from meshwise.report.table import Table
from meshwise.trace.explain import Explanation, OpDifference


def explain_page(explanation: Explanation) -> Page:
    """Where the measured step differs from the predicted one."""
    measured, predicted = explanation.measured_s, explanation.predicted_s
    columns = ("predicted", "measured", "difference")
    classes = [(row.op, *_cells(row)) for row in explanation.classes]
    table = Table("", ("class", *columns), classes)
    ops = [(row.module, row.op, row.phase, *_cells(row)) for row in explanation.rows]
    headline = f"a step takes {duration(measured)}"
    sections: list[Section] = [Text("Findings", explanation.findings)] if explanation.findings else []
    if predicted is not None:
        headline += f", {measured / predicted - 1:+.0%} of the predicted {duration(predicted)}"
        sections.append(_waterfall(explanation, predicted, table))
    return Page(
        "Predicted against measured",
        headline,
        [*sections, Table("Rows", ("module", "op", "phase", *columns), ops)],
    )


def _waterfall(explanation: Explanation, predicted: float, table: Table) -> Chart:
    steps = [(row.op, row.more_s) for row in explanation.classes]
    ends = [predicted]
    for _, change in steps:
        ends.append(ends[-1] + change)
    changes = [change for _, change in steps]
    colors = [COLORS[7], *(COLORS[4] if change > 0 else COLORS[3] for change in changes), COLORS[7]]
    names = [
        f"predicted  {duration(predicted)}",
        *(f"{name}  {_more(change)}" for name, change in steps),
        f"measured  {duration(explanation.measured_s)}",
    ]
    bar = {
        "type": "bar", "orientation": "h", "y": names, "x": [predicted, *changes, explanation.measured_s],
        "base": [0.0, *ends[:-1], 0.0], "marker": {"color": colors}, "hovertemplate": "%{y}<extra></extra>",
    }  # fmt: skip
    layout = {"xaxis": {"tickformat": "~s", "ticksuffix": "s"}, "yaxis": {"autorange": "reversed"}}
    finding = "Red classes take longer than predicted, green ones less; together they are the difference."
    height = 60 + 26 * len(names)
    return Chart("From the predicted step to the measured one", [bar], layout, finding, table, height)


def _cells(row: OpDifference) -> tuple[str, str, str]:
    return duration(row.predicted_s), duration(row.measured_s), _more(row.more_s)


def _more(change: float) -> str:
    return ("+" if change >= 0 else "-") + duration(abs(change))
