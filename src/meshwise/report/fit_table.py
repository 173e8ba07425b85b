"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from rich.console import Console

from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_steps import StepFit
from meshwise.report.table import percent, table


def print_op_fit(found: FitReport, console: Console) -> None:
    """Print the error of every set of constants on its held-out rows (of 10 µs or 1 MiB and more)."""
    header = ("constants", "chip", "rows", "held out", "median", "mean", "p90", "bias")
    rows = [
        [
            *(score.name, score.chip, str(score.rows), str(score.held_out_rows)),
            *map(percent, (score.median_abs_frac, score.mean_abs_frac, score.p90_abs_frac)),
            percent(score.bias_frac, sign=True),
        ]
        for score in found.scores
    ]
    console.print(table("", header, rows, left=("constants", "chip")))
    if found.problems:
        first = found.problems[0].reason
        console.print(f"{len(found.problems)} rows could not be used; the first: {first}")


def print_step_fit(found: StepFit, console: Console) -> None:
    """Print the fitted overheads and their error on both halves of the rows."""
    rows = [[name, f"{value:.4g}"] for name, value in found.constants.items()]
    console.print(table("", ("overheads of steps", "value"), rows))
    console.print(
        f"mean error {percent(found.fitted_mean_abs_frac)} on the rows that fitted, "
        f"{percent(found.held_out_mean_abs_frac)} on those held out"
    )
