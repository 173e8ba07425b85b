"""Predicted against measured for every row, each with its source: the errors in the open."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwise.calibrate.errors import summarize
from meshwise.calibrate.validate import Prediction, Validation, coverage_frac
from meshwise.report.accuracy_table import quantity_text
from meshwise.report.html import COLORS, Chart, Link, Page, Section
from meshwise.report.table import Table, percent

_TITLES = {"step_s": "Step time", "memory_bytes": "Memory", "ttft_s": "First token", "tpot_s": "Token"}


def accuracy_page(validation: Validation) -> Page:
    """The error of every row, and of each quantity in short."""
    rows = [
        (
            quantity, len(of), sum(row.expressed for row in of), percent(found.median_abs_frac),
            percent(found.mean_abs_frac), percent(found.p90_abs_frac),
            percent(found.mean_signed_frac, sign=True), percent(coverage_frac(of)),
        )
        for quantity in validation.quantities
        for of in [validation.of(quantity)]
        for found in [summarize([row.error_frac for row in of])]
    ]  # fmt: skip
    columns = ("quantity", "rows", "expressed", "median", "mean", "p90", "bias", "in interval")
    sections: list[Section] = [Table("Errors", columns, rows)]
    sections += [_picture(quantity, validation.of(quantity)) for quantity in validation.quantities]
    num = f"{len(validation.rows):,} measured numbers"
    headline = f"{num}; the median error of {rows[0][0]} is {rows[0][3]}" if rows else num
    return Page("Predicted against measured", headline, sections, bool(rows))


def _picture(quantity: str, rows: Sequence[Prediction]) -> Chart:
    unit = "B" if quantity.endswith("bytes") else "s"
    known = [row for row in rows if row.error_frac is not None]
    chips = sorted({row.chip for row in known})
    data = [
        {
            "type": "scatter", "mode": "markers", "name": chip or "unknown chip",
            "x": [row.measured for row in known if row.chip == chip],
            "y": [row.predicted for row in known if row.chip == chip],
            "text": [f"{row.id} ({row.source}): {row.error_frac:+.1%}" for row in known if row.chip == chip],
            "hovertemplate": "%{text}<br>measured %{x:.3s}, predicted %{y:.3s}<extra></extra>",
            "marker": {"color": COLORS[i % len(COLORS)], "size": 6, "opacity": 0.7},
        }
        for i, chip in enumerate(chips)
    ]  # fmt: skip
    measured = [row.measured for row in known if row.measured is not None] or [1.0]
    ends = [min(measured), max(measured)]
    for name, factor, dash in (("equal", 1.0, "solid"), ("10 % more", 1.1, "dot"), ("10 % less", 0.9, "dot")):
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": name,
                "x": ends, "y": [factor * end for end in ends],
                "line": {"color": COLORS[7], "dash": dash, "width": 1}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    cells = [
        (
            row.id, _where(row.source), row.chip,
            quantity_text(row.measured, quantity), quantity_text(row.predicted, quantity),
            percent(row.error_frac, sign=True), row.reason,
        )
        for row in sorted(rows, key=lambda row: -abs(row.error_frac or 0.0))
    ]  # fmt: skip
    axis = {"type": "log", "tickformat": "~s", "dtick": "D2"}
    layout = {
        "xaxis": axis | {"title": {"text": f"measured [{unit}]"}},
        "yaxis": axis | {"title": {"text": f"predicted [{unit}]"}},
        "hovermode": "closest",
    }
    columns = ("run", "source", "chip", "measured", "predicted", "error", "reason")
    within = sum(abs(row.error_frac or 0.0) <= 0.1 for row in known)
    finding = (
        f"{within:,} of {len(known):,} predictions are within 10 %; {len(rows) - len(known):,} rows "
        "have no prediction, for the reason in the table."
    )
    table = Table("", columns, cells, left=("run", "source", "chip", "reason"))
    return Chart(_TITLES.get(quantity, quantity), data, layout, finding, table, 460)


def _where(source: str) -> Link:
    """A source with its address: the paper that it cites, or the repository that it begins with."""
    if paper := re.search(r"arXiv[ :](\d{4}\.\d{4,5})", source):
        return Link(source, f"https://arxiv.org/abs/{paper[1]}")
    repository = re.match(r"[\w.-]+/[\w.-]+(?= )", source)
    return Link(source, f"https://github.com/{repository[0]}" if repository else "")
