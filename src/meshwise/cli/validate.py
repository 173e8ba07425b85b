"""`meshwise validate`: predicted against measured, row by row, and how wrong that is."""

from __future__ import annotations

from pathlib import Path

import typer

from meshwise import api
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import DataError
from meshwise.core.options import takes

DATA_FILES = (
    *("published_runs_2.csv", "lora_runs.csv", "measured_iterations_a100.csv"),
    *("measured_ops.csv", "published_micro.csv"),
)
"""Tables of measurements that do not ship with the package."""


@takes(api.validate)
def validate(
    *,
    runs: list[Path] | None = None,
    serving: list[Path] | None = None,
    rl: list[Path] | None = None,
    power: list[Path] | None = None,
    data: Path | None = None,
    cases: Path | None = None,
    plot: Path | None = None,
    write_docs: Path | None = None,
    leave_one_source_out: bool = False,
    html: Path | None = None,
    worst: int = 8,
    json: bool = False,
) -> None:
    """Compare predictions with measurements.

    Shows the error per source, chip and kind, and the worst rows.

    Args:
        serving: CSV of measured serving points; repeat for several.
        rl: CSV of measured steps of post-training; repeat for several.
        power: CSV of measured watts of chips and nodes; repeat for several.
        data: Folder of more tables: iterations, ops, collectives.
        cases: JSON of a published model's cases: compare every number.
        plot: Draw predicted against measured (png, svg, pdf).
        write_docs: Write accuracy.md and its figures to this folder.
        leave_one_source_out: Also predict each source from the others (two minutes).
        worst: How many of the worst rows to print.
    """
    if cases is not None:
        others = {
            "--runs": runs,
            "--serving": serving,
            "--rl": rl,
            "--power": power,
            "--data": data,
            "--leave-one-source-out": leave_one_source_out,
            "--plot": plot,
            "--write-docs": write_docs,
            "--html": html,
        }
        if unused := [option for option, value in others.items() if value]:
            raise DataError(f"--cases compares its own file only; leave {unused[0]} out")
        _validate_cases(cases, json=json)
        return
    from meshwise.calibrate.validate import validate as predict

    files = _files(runs, [*(serving or ()), *(rl or ()), *(power or ())], data)
    validation = predict(files)
    if leave_one_source_out:
        from meshwise.calibrate.leave_one_source_out import predicted_by_others

        validation = predicted_by_others(validation, files)
    for warning in validation.warnings:
        typer.echo(warning, err=True)
    if plot is not None:
        from meshwise.report.pages import draw

        draw(validation, plot)
    if write_docs is not None:
        from meshwise.report.accuracy import write_accuracy

        write_accuracy(validation, write_docs)
    write_html(validation, html)
    if json:
        print_json(validation.to_json())
    else:
        from meshwise.report.accuracy_table import print_validation

        print_validation(validation, console(), num_worst=worst)


def _files(runs: list[Path] | None, others: list[Path], data: Path | None) -> list[Path]:
    """The files that the options name; without any, the runs that ship with the package."""
    from meshwise.calibrate.runs import published_runs

    tables = [data / name for name in DATA_FILES if (data / name).is_file()] if data else []
    if data and not tables:
        raise DataError(f"{data} has none of {', '.join(DATA_FILES)}; name the folder of these tables")
    return [*(runs or ([] if others else [published_runs()])), *others, *tables]


def _validate_cases(path: Path, *, json: bool) -> None:
    """Print how far a published model's cases are from ours; exit code 1 where one differs."""
    from meshwise.published.nersc import check_cases
    from meshwise.report.cases_table import print_cases

    checked = check_cases(path)
    if json:
        print_json(checked.to_json())
    else:
        print_cases(checked, console())
    if not checked.agrees:
        raise typer.Exit(1)
