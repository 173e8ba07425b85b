"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from rich.console import Console

from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_steps import StepFit
from meshwise.report.table import percent, table


def print_op_fit(found: FitReport, console: Console) -> None:
    """Print the error of every set of constants on its held-out rows, and what could not be read."""
    columns = ("constants", "chip", "rows", "held out", "median", "mean", "p90", "bias")
    rows = [
        (
            *(score.name, score.chip, score.rows, score.held_out_rows, percent(score.median_abs_frac)),
            *(percent(score.mean_abs_frac), percent(score.p90_abs_frac), percent(score.bias_frac, sign=True)),
        )
        for score in found.scores
    ]
    console.print(table("held-out rows of 10 µs or 1 MiB and more", columns, rows, left=columns[:2]))
    if found.problems:
        first = found.problems[0]
        console.print(f"{len(found.problems)} cells could not be used; the first: {first}")


def print_step_fit(found: StepFit, console: Console) -> None:
    """Print the fitted overheads and their error on both halves of the rows."""
    rows = [(name, f"{value:.4g}") for name, value in found.constants.items()]
    console.print(table("overheads of steps", ("constant", "value"), rows))
    console.print(
        f"mean error {found.fitted_mean_abs_frac:.1%} on the rows that fitted, "
        f"{found.held_out_mean_abs_frac:.1%} on those held out"
    )
