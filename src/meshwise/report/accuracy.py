"""`docs/accuracy.md`: how wrong the model is, generated from the measurements by `meshwise validate`.

Rows are split in halves by a hash of their id: constants are fitted on one, the other only judges, and
both are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.calibrate.releases import Board
from meshwise.calibrate.validate import Validation
from meshwise.core.files import make_folder, write_text
from meshwise.report.accuracy_page import TITLES, accuracy_picture
from meshwise.report.accuracy_table import (
    Table,
    board_table,
    coverage_text,
    error_table,
    group_tables,
    lead_table,
    order_text,
    reasons_table,
    worst_table,
)
from meshwise.report.chart_picture import draw_picture
from meshwise.report.html import static

FIGURE = "accuracy_{}.png"
NUM_WORST = 10
OF_RUNS = ("step_s", "memory_bytes")


def write_accuracy(validation: Validation, folder: Path, board: Board | None = None) -> None:
    """Write `accuracy.md` and `figures/accuracy_*.png` into `folder`; `board`: of earlier releases."""
    make_folder(folder / "figures")
    lead = [replace(row, predicted=row.left_out) for row in validation.of("step_s") if row.left_out]
    runs = [row for row in validation.rows if row.quantity in OF_RUNS]
    ops = [row for row in validation.rows if row.quantity in TITLES and row.quantity not in OF_RUNS]
    figures: list[str] = []
    for name, what, rows in (
        ("left_out", "step times predicted by the other sources", lead),
        ("runs", "predicted against measured", runs),
        ("ops", "predicted against measured", ops),
    ):
        if any(row.expressed for row in rows):
            draw_picture(accuracy_picture(Validation(rows)), folder / "figures" / FIGURE.format(name))
            figures.append(f"![{what}](figures/{FIGURE.format(name)})")
    write_text(folder / "accuracy.md", accuracy_markdown(validation, figures, board or {}))


def accuracy_markdown(validation: Validation, figures: Sequence[str] = (), board: Board | None = None) -> str:
    """The page as text, its words from `static/accuracy.md`: step times in a table and a figure, then all."""
    by_quantity = [(TITLES.get(name, name), validation.of(name)) for name in validation.quantities]
    lines = [*_markdown(lead_table(validation.of("step_s"))), *figures[:1], ""]
    if board:
        lines += ["## Every release, on the same rows", "", *_markdown(board_table(board, validation.rows))]
    lines += ["## Every quantity", "", *_markdown(error_table("all rows", by_quantity)), *figures[1:], ""]
    for label, rows in by_quantity:
        lines += [f"## {label}", ""]
        for table in (*group_tables(rows), worst_table(rows, NUM_WORST)):
            lines += _markdown(table)
        lines += [line for text in (coverage_text(rows), order_text(rows)) if text for line in (text, "")]
    lines += ["## Rows that are not expressed", "", *(_markdown(reasons_table(validation.rows)))]
    return static("accuracy.md").replace("<!-- tables -->", "\n".join(lines))


def _markdown(table: Table) -> Iterator[str]:
    def line(values: Sequence[object]) -> str:
        return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"

    if not table.rows:
        yield from ("None.", "")
        return
    yield line(table.columns)
    yield "|" + "|".join(" --- " for _ in table.columns) + "|"
    yield from map(line, table.rows)
    yield ""
