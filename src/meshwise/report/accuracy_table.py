"""Errors as tables, for the console and for a page: the summary, each group of rows, the worst rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwise.calibrate.errors import ErrorSummary, grouped, is_held_out, order_loss, summarize
from meshwise.calibrate.mend import Mend
from meshwise.calibrate.releases import Board, errors_by_release
from meshwise.calibrate.runs import publication
from meshwise.calibrate.validate import (
    Prediction,
    Validation,
    competing,
    coverage_by_source_frac,
    coverage_frac,
)
from meshwise.core.units import duration, with_prefix
from meshwise.report.table import Table, percent

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("rows", "expressed", "median", "mean", "p90", "max", "bias")
LEFT_OUT_COLUMNS = ("left-out median", "left-out mean", "in interval")


def _aspect(name: str) -> Callable[[Prediction], str]:
    return lambda row: row.regime.get(name, "")


GROUPS: dict[str, Callable[[Prediction], str]] = {
    "kind": _aspect("kind"),
    "scale": _aspect("scale"),
    "chip": lambda row: row.chip or "unknown",
    "framework": _aspect("framework"),
    "engine": _aspect("engine"),
    "model": _aspect("model"),
    "cache": _aspect("cache"),
    "source": lambda row: publication(row.source),
    "half": lambda row: ("held-out half" if is_held_out(row.id) else "fitted half") if row.group else "",
}
"""What rows are grouped by; rows without a name are in no group."""


def lead_table(rows: Sequence[Prediction]) -> Table:
    """Errors in sample and by the other sources, of all `rows` and by kind, scale, chip and framework."""
    groups = [("all", list(rows))]
    for name in ("kind", "scale", "chip", "framework"):
        found = grouped(rows, GROUPS[name])
        groups += sorted(found.items(), key=lambda item: _leading_number(item[0]))
    lines = [
        [
            label,
            str(len(members)),
            str(len({publication(row.source) for row in members})),
            *_sizes(summarize([row.error_frac for row in members])),
            *_left_out_cells(members),
        ]
        for label, members in groups
    ]
    return Table("", ("step time", "runs", "sources", "median", "mean", *LEFT_OUT_COLUMNS), lines)


def _sizes(summary: ErrorSummary) -> tuple[str, str]:
    return percent(summary.median_abs_frac), percent(summary.mean_abs_frac)


def _left_out_cells(rows: Sequence[Prediction]) -> tuple[str, ...]:
    """Median and mean error by the other sources, and the share of measurements in their interval."""
    covered = percent(coverage_frac(rows))
    return (*_sizes(summarize([row.left_out_error_frac for row in rows])), covered)


def error_table(name: str, groups: Iterable[tuple[str, Sequence[Prediction]]]) -> Table:
    """One line of errors for each of the named `groups`, with those by the other sources if there are any."""
    known = list(groups)
    left_out = any(row.left_out is not None for _, rows in known for row in rows)
    lines = [[label, *_cells(rows), *(_left_out_cells(rows) if left_out else ())] for label, rows in known]
    return Table("", (name, *COLUMNS, *(LEFT_OUT_COLUMNS if left_out else ())), lines)


def _cells(rows: Sequence[Prediction]) -> list[str]:
    summary = summarize([row.error_frac for row in rows])
    sizes = (summary.median_abs_frac, summary.mean_abs_frac, summary.p90_abs_frac, summary.max_abs_frac)
    counts = [str(summary.num_rows), str(summary.num_expressed)]
    return [*counts, *map(percent, sizes), percent(summary.mean_signed_frac, sign=True)]


def group_tables(rows: Sequence[Prediction]) -> Iterator[Table]:
    """The errors of `rows` by each of `GROUPS` that tells some of them apart."""
    for name, key in GROUPS.items():
        groups = {label: members for label, members in grouped(rows, key).items() if label}
        if len(groups) > 1 or (groups and name in ("source", "chip")):
            yield error_table(f"by {name}", sorted(groups.items(), key=lambda item: _leading_number(item[0])))


def _leading_number(label: str) -> int:
    """The number that a label begins with; 0, which keeps the order of the rows, if there is none."""
    digits = label.split(" ")[0].replace(",", "")
    return int(digits) if digits.isdecimal() else 0


def worst_table(rows: Sequence[Prediction], count: int) -> Table:
    """The `count` rows whose error is largest, with the largest parts of their prediction."""
    known = sorted((row for row in rows if row.expressed), key=lambda row: -abs(row.error_frac or 0.0))
    lines = [
        [
            row.id,
            percent(row.error_frac, sign=True),
            quantity_text(row.measured, row.quantity),
            quantity_text(row.predicted, row.quantity),
            _parts_text(row),
        ]
        for row in known[:count]
    ]
    header = ("worst rows", "error", "measured", "predicted", "parts of the prediction")
    return Table("", header, lines, left=header)


def reasons_table(rows: Sequence[Prediction]) -> Table:
    """Why rows are not expressed."""
    groups = grouped([row for row in rows if not row.expressed], lambda row: (row.source, row.reason))
    lines = [[reason, source, str(len(members))] for (source, reason), members in groups.items()]
    header = ("not expressed", "source", "rows")
    return Table("", header, lines, left=header)


def board_table(board: Board, rows: Sequence[Prediction]) -> Table:
    """Mean and median error of each release and of now, on the rows that all of them predicted."""
    groups: list[tuple[str, Callable[[Prediction], bool]]] = []
    for quantity in dict.fromkeys(row.quantity for row in rows):
        groups.append((quantity, lambda row, quantity=quantity: row.quantity == quantity))  # type: ignore[misc]
        for name in ("kind", "scale", "chip", "source") if quantity == "step_s" else ():
            key = GROUPS[name]
            groups += [
                (label, lambda row, key=key, label=label: row.quantity == "step_s" and key(row) == label)  # type: ignore[misc]
                for label in dict.fromkeys(key(row) for row in rows if row.quantity == "step_s")
            ]
    lines = []
    for label, keep in groups:
        found = errors_by_release(board, rows, keep)
        num = found["now"].num_expressed
        if num:
            lines.append([label, str(num), *(" / ".join(reversed(_sizes(each))) for each in found.values())])
    return Table("", ("mean / median", "rows", *board, "now"), lines)


def mend_table(mends: Sequence[Mend]) -> Table:
    """Constants that would mend the runs, each alone."""
    lines = [
        [
            mend.constant, f"{mend.value:.3g}", f"{mend.to:.3g}", str(mend.num_runs),
            percent(mend.mean_abs_frac), percent(mend.mended_mean_abs_frac),
        ]
        for mend in mends
    ]  # fmt: skip
    header = ("constant that would mend", "now", "to", "runs it moves", "mean error", "mended")
    return Table("", header, lines)


def order_text(rows: Sequence[Prediction]) -> str:
    """How much slower than the measured best the plans are that we rank first; "" where none compete."""
    losses = [
        order_loss([row.measured or 0.0 for row in group], [row.predicted or 0.0 for row in group])
        for group in competing(rows)
    ]
    if not losses:
        return ""
    mean, worst = percent(sum(losses) / len(losses)), percent(max(losses))
    return (
        f"Order: in {len(losses)} sets of runs with the same model, batch and GPUs, the plan ranked first is "
        f"{mean} slower than the measured best (mean; worst {worst})."
    )


def coverage_text(rows: Sequence[Prediction]) -> str:
    """How many measurements lie in their intervals, by rows and by sources; "" where there are none."""
    of_rows, of_sources = coverage_frac(rows), coverage_by_source_frac(rows)
    if of_rows is None or of_sources is None:
        return ""
    return (
        f"In their intervals: {percent(of_rows)} of the measurements, {percent(of_sources)} in the mean over "
        "sources (what to expect of a new one)."
    )


def quantity_text(value: float | None, quantity: str) -> str:
    """A value of a quantity for people."""
    unit = {"bytes": "B", "watts": "W"}.get(quantity.rpartition("_")[2])
    return with_prefix(value, unit) if unit else duration(value)


def _parts_text(row: Prediction) -> str:
    """The largest parts of a prediction: `compute 1.2 s, bubble 0.1 s`."""
    parts = [(name, value) for name, value in row.parts.items() if name != "total" and value]
    largest = sorted(parts, key=lambda item: -item[1])[:5]
    return ", ".join(f"{name} {quantity_text(value, row.quantity)}" for name, value in largest)


def print_validation(
    validation: Validation,
    console: Console,
    *,
    num_worst: int = 10,
    board: Board | None = None,
    mends: Sequence[Mend] = (),
) -> None:
    """Print all quantities, earlier releases, what would mend runs, and what could not be expressed."""
    for quantity in validation.quantities:
        rows = validation.of(quantity)
        print_table(error_table(quantity, [("all", rows)]), console)
        for shown in (*group_tables(rows), worst_table(rows, num_worst)):
            print_table(shown, console)
    if order := order_text(validation.of("step_s")):
        console.print(order)
    if board:
        print_table(board_table(board, validation.rows), console)
    print_table(mend_table(mends), console)
    print_table(reasons_table(validation.rows), console)


def print_table(shown: Table, console: Console) -> None:
    """Print a table, if it has rows."""
    if shown.rows:
        console.print(shown)
