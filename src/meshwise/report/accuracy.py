"""`docs/accuracy.md`: how wrong the model is, generated from the measurements by `meshwise validate`.

Rows are split in halves by a hash of their id: constants are fitted on one, the other only judges, and
both are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.calibrate.releases import Board
from meshwise.calibrate.validate import Validation
from meshwise.core.files import make_folder, write_text
from meshwise.report import validation as shown
from meshwise.report.chart_picture import draw_picture
from meshwise.report.html import static
from meshwise.report.table import Table

FIGURE = "accuracy_{}.png"
NUM_WORST = 10
OF_RUNS = ("step_s", "memory_bytes")


def write_accuracy(validation: Validation, folder: Path, board: Board | None = None) -> None:
    """Write `accuracy.md` and `figures/accuracy_*.png` into `folder`; `board`: of earlier releases."""
    make_folder(folder / "figures")
    lead = [replace(row, predicted=row.left_out) for row in validation.of("step_s") if row.left_out]
    runs = [row for row in validation.rows if row.quantity in OF_RUNS]
    ops = [row for row in validation.rows if row.quantity in shown.TITLES and row.quantity not in OF_RUNS]
    figures: list[str] = []
    for name, what, rows in (
        ("left_out", "step times predicted by the other sources", lead),
        ("runs", "predicted against measured", runs),
        ("ops", "predicted against measured", ops),
    ):
        if any(row.expressed for row in rows):
            draw_picture(shown.picture(Validation(rows)), folder / "figures" / FIGURE.format(name))
            figures.append(f"![{what}](figures/{FIGURE.format(name)})")
    write_text(folder / "accuracy.md", accuracy_markdown(validation, figures, board or {}))


def accuracy_markdown(validation: Validation, figures: Sequence[str] = (), board: Board | None = None) -> str:
    """The page as text, its words from `static/accuracy.md`: step times in a table and a figure, then all."""
    by_quantity = [(shown.TITLES.get(name, name), validation.of(name)) for name in validation.quantities]
    blocks: list[Table | str] = [shown.lead_table(validation.of("step_s")), *figures[:1]]
    if board:
        blocks += ["## Every release, on the same rows", shown.board_table(board, validation.rows)]
    blocks += ["## Every quantity", shown.error_table("all rows", by_quantity), *figures[1:]]
    for label, rows in by_quantity:
        blocks += [f"## {label}", *shown.group_tables(rows), shown.worst_table(rows, NUM_WORST)]
        blocks += filter(None, (shown.coverage_text(rows), shown.order_text(rows)))
    blocks += ["## Rows that are not expressed", shown.reasons_table(validation.rows)]
    return static("accuracy.md").replace("<!-- tables -->", "\n\n".join(map(_markdown, blocks)) + "\n")


def _markdown(block: Table | str) -> str:
    if isinstance(block, str) or not block.rows:
        return block if isinstance(block, str) else "None."
    rows = [block.columns, ["---"] * len(block.columns), *block.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
