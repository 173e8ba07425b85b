"""Errors as tables: per quantity the summary, each source and chip, and the worst rows with their parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwise.calibrate.errors import ErrorSummary, grouped, order_loss, summarize
from meshwise.calibrate.validate import Prediction, Validation, competing
from meshwise.core.units import duration, with_prefix
from meshwise.report.table import percent, table

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("rows", "expressed", "median", "mean", "p90", "max", "bias")

MAX_REASONS = 20


def publication(row: Prediction) -> str:
    """The source of a row without the version, section or table within it."""
    return re.split(r" @| section| \(|, release| Tables?\b", row.source)[0]


GROUPS: tuple[tuple[str, Callable[[Prediction], str]], ...] = (
    ("source", publication),
    ("chip", lambda row: row.chip or "unknown"),
)


def cells(summary: ErrorSummary) -> list[str]:
    """A summary as text, in the order of `COLUMNS`."""
    fracs = (summary.median_abs_frac, summary.mean_abs_frac, summary.p90_abs_frac, summary.max_abs_frac)
    bias = percent(summary.mean_signed_frac, sign=True)
    return [str(summary.num_rows), str(summary.num_expressed), *map(percent, fracs), bias]


def group_rows(
    rows: Sequence[Prediction], key: Callable[[Prediction], str]
) -> Iterator[tuple[str, ErrorSummary]]:
    """Name and summary of each group of `rows`."""
    for name, members in grouped(rows, key).items():
        yield str(name), summarize([row.error_frac for row in members])


def worst_rows(rows: Sequence[Prediction], count: int) -> list[Prediction]:
    """The `count` rows whose error is largest."""
    known = [row for row in rows if row.error_frac is not None]
    return sorted(known, key=lambda row: -abs(row.error_frac or 0.0))[:count]


def quantity_text(value: float | None, quantity: str) -> str:
    """A value of a quantity for people."""
    if value is None:
        return ""
    return with_prefix(value, "B") if quantity.endswith("bytes") else duration(value)


def parts_text(row: Prediction) -> str:
    """The largest parts of a prediction: `compute 1.2 s, bubble 0.1 s`."""
    parts = [(name, value) for name, value in row.parts.items() if name != "total" and value]
    largest = sorted(parts, key=lambda item: -item[1])[:5]
    return ", ".join(f"{name} {quantity_text(value, row.quantity)}" for name, value in largest)


def order_losses(rows: Sequence[Prediction]) -> list[float]:
    """Per group of competing runs, how much slower than the best the run is that we rank first."""
    return [
        order_loss([row.measured or 0.0 for row in group], [row.predicted or 0.0 for row in group])
        for group in competing(rows)
    ]


def print_validation(validation: Validation, console: Console, *, num_worst: int) -> None:
    """Print all quantities, then what could not be expressed."""
    for quantity in validation.quantities:
        rows = validation.of(quantity)
        lines = [["all", *cells(summarize([row.error_frac for row in rows]))]]
        for _, key in GROUPS:
            lines += [[label[-60:], *cells(summary)] for label, summary in group_rows(rows, key)]
        console.print(table(quantity, ("", *COLUMNS), lines))
        for row in worst_rows(rows, num_worst):
            console.print(
                f"  {percent(row.error_frac, sign=True):>9}  {row.id}: measured "
                f"{quantity_text(row.measured, quantity)}, predicted {quantity_text(row.predicted, quantity)}"
                + (f" = {parts_text(row)}" if row.parts else ""),
                soft_wrap=True,
            )
    if losses := order_losses(validation.of("step_s")):
        mean = sum(losses) / len(losses)
        console.print(
            f"order: over {len(losses)} sets of competing plans the one ranked first is {percent(mean)} "
            f"slower than the fastest (mean; worst {percent(max(losses))})"
        )
    _print_reasons([row for row in validation.rows if not row.expressed], console)


def _print_reasons(rows: Sequence[Prediction], console: Console) -> None:
    by_reason = grouped(rows, lambda row: row.reason)
    for reason, members in list(by_reason.items())[:MAX_REASONS]:
        console.print(f"not expressed, {len(members)} rows: {reason}", soft_wrap=True)
    if len(by_reason) > MAX_REASONS:
        console.print(f"not expressed for {len(by_reason) - MAX_REASONS} other reasons: see --json")
