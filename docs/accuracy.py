"""Writes docs/accuracy.md and its figures: `python docs/accuracy.py DATA` (docs/data.md lists its tables).

Each source is also predicted from the others, which takes two minutes. Rows are split in halves by a hash of
their id: constants are fitted on one, the other only judges, and both are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.calibrate.leave_one_source_out import predicted_by_others
from meshwise.calibrate.releases import progress, read_board
from meshwise.calibrate.runs import publication, published_runs, unseen_runs
from meshwise.calibrate.validate import (
    Prediction,
    Validation,
    by_aspect,
    coverage_by_source_frac,
    coverage_frac,
    validate,
)
from meshwise.cli.measurements import DATA_FILES
from meshwise.core.columns import grouped
from meshwise.report import validation as report
from meshwise.report.chart_picture import draw_picture
from meshwise.report.table import Table, percent

DOCS = Path(__file__).parent
NUM_WORST = 10
OF_RUNS = ("step_s", "memory_bytes")
LEADING = ("step time", "rows", "median", "mean", *report.LEFT_OUT_COLUMNS)
"""Columns of the first table."""


def write_accuracy(validation: Validation, unseen: Sequence[Prediction], folder: Path) -> None:
    """Write `accuracy.md` and `figures/accuracy_*.png` into `folder`; no constant was fitted to `unseen`."""
    (folder / "figures").mkdir(exist_ok=True)
    lead = [replace(row, predicted=row.left_out) for row in validation.of("step_s") if row.left_out]
    runs = [row for row in validation.rows if row.quantity in OF_RUNS]
    ops = [row for row in validation.rows if row.quantity in report.TITLES and row.quantity not in OF_RUNS]
    figures: list[str] = []
    for name, what, rows in (
        ("left_out", "step times predicted by the other sources", lead),
        ("runs", "predicted against measured", runs),
        ("ops", "predicted against measured", ops),
    ):
        if any(row.expressed for row in rows):
            figure = f"figures/accuracy_{name}.png"
            draw_picture(report.picture(Validation(rows)), folder / figure)
            figures.append(f"![{what}]({figure})")
    (folder / "accuracy.md").write_text(page(validation, unseen, figures), encoding="utf-8")


def page(validation: Validation, unseen: Sequence[Prediction], figures: Sequence[str]) -> str:
    """The page as text, its words from `accuracy.in`: step times in a table and a figure, then all."""
    by_quantity = [(report.TITLES.get(name, name), validation.of(name)) for name in validation.quantities]
    blocks: list[Table | str] = [lead_table(validation.of("step_s")), *figures[:1]]
    if validation.board is not None:
        blocks += ["## Every release, beside today on the rows that it predicted"]
        blocks += report.asked_parts(validation)
    blocks += ["## Every quantity", report.error_table("all rows", by_quantity)]
    blocks += [report.fits_text(validation.rows), *figures[1:]]
    for label, rows in by_quantity:
        blocks += [f"## {label}", *report.group_tables(rows), report.worst_table(rows, NUM_WORST)]
        blocks += filter(None, (coverage_text(rows), report.order_text(rows)))
    blocks += ["## Rows that are not expressed", report.reasons_table(validation.rows)]
    words = (DOCS / "accuracy.in").read_text(encoding="utf-8")
    for place, of_place in (("tables", blocks), ("unseen", unseen_tables(unseen))):
        words = words.replace(f"<!-- {place} -->", "\n\n".join(map(markdown, of_place)) + "\n")
    return words


def lead_table(rows: Sequence[Prediction]) -> Table:
    """Errors in sample and by the other sources, of all `rows` and by kind, scale, chip and framework."""
    groups = [("all", list(rows))]
    for name in ("kind", "scale", "chip", "framework"):
        groups += by_aspect(rows, name)
    errors = report.error_table("step time", groups)
    shown = [errors.columns.index(name) for name in LEADING if name in errors.columns]
    num_sources = [len({publication(row.source) for row in members}) for _, members in groups]
    lines = [
        [*(row[i] for i in shown[:2]), num, *(row[i] for i in shown[2:])]
        for row, num in zip(errors.rows, num_sources, strict=True)
    ]
    names = [errors.columns[i].replace("rows", "runs") for i in shown]
    return Table("", (*names[:2], "sources", *names[2:]), lines)


def unseen_tables(rows: Sequence[Prediction]) -> Iterator[Table | str]:
    """Steps and memory by publication, all of them last, and how many lie in their intervals."""
    for name in OF_RUNS:
        of_one = [row for row in rows if row.quantity == name]
        groups = grouped(of_one, lambda row: publication(row.source))
        yield report.error_table(report.TITLES[name], [*groups.items(), ("all", of_one)])
        yield coverage_text(of_one)


def coverage_text(rows: Sequence[Prediction]) -> str:
    """How many measurements lie in their intervals, by rows and by sources; "" where there are none."""
    of_rows, of_sources = coverage_frac(rows), coverage_by_source_frac(rows)
    if of_rows is None or of_sources is None:
        return ""
    return (
        f"In their intervals: {percent(of_rows)} of the measurements, {percent(of_sources)} in the mean over "
        "sources (what to expect of a new one)."
    )


def markdown(block: Table | str) -> str:
    """A table, or a sentence as it is."""
    if isinstance(block, str) or not block.rows:
        return block if isinstance(block, str) else "None."
    rows = [block.columns, ["---"] * len(block.columns), *block.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    tables = [Path(sys.argv[1]) / name for name in DATA_FILES]
    files = [published_runs(), *(path for path in tables if path.is_file())]
    fitted, unseen = validate(files).rows, validate([unseen_runs()]).rows
    found = predicted_by_others(Validation([*fitted, *unseen]), files)
    of_fit = Validation(found.rows[: len(fitted)])
    board = list(progress(read_board(DOCS / "board.csv"), of_fit.rows))
    write_accuracy(replace(of_fit, board=board), found.rows[len(fitted) :], DOCS)
