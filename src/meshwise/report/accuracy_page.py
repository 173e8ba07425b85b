"""Predicted against measured for every row, each with its source: the errors in the open."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from meshwise.calibrate.errors import grouped
from meshwise.calibrate.validate import Prediction, Validation
from meshwise.core.errors import DataError
from meshwise.report.accuracy_table import error_table, quantity_text
from meshwise.report.chart import COLORS, LINES, SUM_COLOR, Chart, ChartAxis, Picture, Series
from meshwise.report.html import Page, PageLink, Section
from meshwise.report.table import Table, percent

TITLES = {
    **{"step_s": "Step time", "memory_bytes": "Memory per GPU", "ttft_s": "First token", "tpot_s": "Token"},
    **{
        "gemm_s": "Matmul",
        "attention_s": "Attention",
        "decode_s": "Decode attention",
        "experts_s": "Experts",
    },
    **{"collective_s": "Collective", "dispatch_s": "Dispatch and combine"},
    **{"chip_watts": "Power of a chip", "node_watts": "Power of a node"},
}
"""What a quantity is called."""


def accuracy_page(validation: Validation) -> Page:
    """The error of every row, and of each quantity in short."""
    errors = error_table("quantity", [(name, validation.of(name)) for name in validation.quantities])
    rows = errors.rows
    sections: list[Section] = [replace(errors, title="Errors")]
    sections += [_quantity_chart(quantity, validation.of(quantity)) for quantity in validation.quantities]
    num = f"{len(validation.rows):,} measured numbers"
    headline = f"{num}; the median error of {rows[0][0]} is {rows[0][3]}" if rows else num
    return Page("Predicted against measured", headline, sections, bool(rows))


def _quantity_chart(quantity: str, rows: Sequence[Prediction]) -> Chart:
    """Every row of a quantity, one color per chip; between the dotted lines the model is right to 10 %."""
    known = [row for row in rows if row.error_frac is not None]
    values = [value for row in known for value in (row.measured, row.predicted) if value] or [1.0]
    ends = [min(values) / 1.2, 1.2 * max(values)]
    marks = [
        Series(ends, [factor * end for end in ends], name, SUM_COLOR, line)
        for name, factor, line in (
            ("equal", 1.0, LINES[0]),
            ("10 % more", 1.1, LINES[2]),
            ("10 % less", 0.9, LINES[2]),
        )
    ]
    by_chip = grouped(known, lambda row: row.chip)
    for (chip, members), color in zip(sorted(by_chip.items()), itertools.cycle(COLORS), strict=False):
        marks.append(
            Series(
                [row.measured or 0.0 for row in members], [row.predicted or 0.0 for row in members],
                f"{chip or 'unknown chip'} ({len(members)})", color, "", size=6, opacity=0.7,
                texts=[f"{row.id} ({row.source}): {row.error_frac:+.1%}" for row in members],
            )
        )  # fmt: skip
    cells = [
        (
            row.id, _where(row.source), row.chip,
            quantity_text(row.measured, quantity), quantity_text(row.predicted, quantity),
            percent(row.error_frac, sign=True), row.reason,
        )
        for row in sorted(rows, key=lambda row: -abs(row.error_frac or 0.0))
    ]  # fmt: skip
    columns = ("run", "source", "chip", "measured", "predicted", "error", "reason")
    within = sum(abs(row.error_frac or 0.0) <= 0.1 for row in known)
    finding = (
        f"{within:,} of {len(known):,} predictions are within 10 %; {len(rows) - len(known):,} rows "
        "have no prediction, for the reason in the table."
    )
    table = Table("", columns, cells, left=("run", "source", "chip", "reason"))
    unit = "B" if quantity.endswith("bytes") else "s"
    measured = ChartAxis("measured", unit, log=True, low=ends[0], high=ends[1])
    axes = measured, replace(measured, title="predicted")
    return Chart(TITLES.get(quantity, quantity), marks, *axes, finding, table, 460)


def accuracy_picture(validation: Validation) -> Picture:
    """A chart for each quantity that has predictions, two in a row; DataError where there is none."""
    charts = [
        _quantity_chart(quantity, validation.of(quantity))
        for quantity in validation.quantities
        if any(row.expressed for row in validation.of(quantity))
    ]
    if not charts:
        raise DataError("no row was expressed, so there is nothing to draw")
    return Picture([charts[i : i + 2] for i in range(0, len(charts), 2)])


def _where(source: str) -> PageLink:
    """A source with its address: the paper that it cites, or the repository that it begins with."""
    if paper := re.search(r"arXiv[ :](\d{4}\.\d{4,5})", source):
        return PageLink(source, f"https://arxiv.org/abs/{paper[1]}")
    repository = re.match(r"[\w.-]+/[\w.-]+(?= )", source)
    return PageLink(source, f"https://github.com/{repository[0]}" if repository else "")
