"""What a fit reached, on the rows that it never saw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich.console import Console

from meshwise.calibrate.errors import grouped, summarize
from meshwise.calibrate.fit import FitReport
from meshwise.calibrate.fit_serving import Case, ServingFit
from meshwise.calibrate.fit_steps import StepFit
from meshwise.report.table import Table, percent


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
    console.print(Table("", header, rows, left=("constants", "chip")))
    if found.problems:
        first = found.problems[0].reason
        console.print(f"{len(found.problems)} rows could not be used; the first: {first}")


def print_step_fit(found: StepFit, console: Console) -> None:
    """Print the fitted overheads and their error on both halves of the rows."""
    rows = [[name, f"{value:.4g}"] for name, value in found.constants.items()]
    console.print(Table("", ("overheads of steps", "value"), rows))
    console.print(
        f"mean error {percent(found.fitted_mean_abs_frac)} on the rows that fitted, "
        f"{percent(found.held_out_mean_abs_frac)} on those held out"
    )


def print_serving_fit(found: ServingFit, console: Console) -> None:
    """Print the constants, and the errors of each model and each system left out of the fit."""
    rows = [[name, f"{getattr(found.constants, name):.4g}"] for name in found.constants.__struct_fields__]
    console.print(Table("", ("constants of engines", "value"), rows))
    by_aspect: dict[str, tuple[Callable[[Case], str], np.ndarray]] = {
        "all points": (lambda case: case.regime, found.misses),
        "left-out model": (lambda case: case.model, found.without_model),
        "left-out system": (lambda case: case.system, found.without_system),
    }
    for name, (key, misses) in by_aspect.items():
        errors = dict(zip(found.cases, np.expm1(misses), strict=True))
        groups = grouped(found.cases, lambda case, key=key: (case.quantity, key(case)))  # type: ignore[misc]
        roomy = [case for case in found.cases if case.regime != "full cache"]
        groups |= grouped(roomy, lambda case: (case.quantity, "(all but full caches)"))
        shown = []
        for (quantity, group), cases in [*groups.items()]:
            summary = summarize([float(errors[case]) for case in cases])
            shown.append(
                [quantity, group, str(len(cases)), percent(summary.mean_abs_frac),
                 percent(summary.median_abs_frac), percent(summary.mean_signed_frac, sign=True)]
            )  # fmt: skip
        header = ("quantity", name, "points", "mean", "median", "bias")
        console.print(Table("", header, sorted(shown), left=header[:2]))
