"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_steps import StepFit


def print_op_fit(found: FitReport, console: Console) -> None:
    """Print the error of every set of constants on its held-out rows, and what could not be read."""
    table = Table(title="held-out rows of 10 µs or 1 MiB and more", box=box.SIMPLE, pad_edge=False)
    for name in ("constants", "chip", "rows", "held out", "median", "mean", "p90", "bias"):
        table.add_column(name, justify="left" if name in ("constants", "chip") else "right")
    for score in found.scores:
        shares = (score.median_abs_frac, score.mean_abs_frac, score.p90_abs_frac)
        cells = [f"{share:.1%}" for share in shares] + [f"{score.bias_frac:+.1%}"]
        table.add_row(score.name, score.chip, str(score.rows), str(score.held_out_rows), *cells)
    console.print(table)
    if found.problems:
        first = found.problems[0]
        console.print(f"{len(found.problems)} cells could not be used; the first: {first}")


def print_step_fit(found: StepFit, console: Console) -> None:
    """Print the fitted overheads and their error on both halves of the rows."""
    table = Table(title="overheads of steps", box=box.SIMPLE, pad_edge=False)
    table.add_column("constant")
    table.add_column("value", justify="right")
    for name, value in found.constants.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    console.print(
        f"mean error {found.fitted_mean_abs_frac:.1%} on the rows that fitted, "
        f"{found.held_out_mean_abs_frac:.1%} on those held out"
    )
