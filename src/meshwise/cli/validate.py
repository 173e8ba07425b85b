"""`meshwise validate`: predicted against measured, row by row, and how wrong that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise.cli.options import HtmlOption, JsonOption
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import DataError

DATA_FILES = ("measured_iterations_a100.csv", "measured_ops.csv", "published_micro.csv")
"""Tables of measurements that do not ship with the package."""


def validate(
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="CSV of measured runs or ops; repeat for several [the published runs]."),
    ] = None,
    serving: Annotated[
        list[Path] | None, typer.Option(help="CSV of measured serving points; repeat for several.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of more tables: iterations, ops, collectives.")
    ] = None,
    cases: Annotated[
        Path | None, typer.Option("--cases", help="JSON of a published model's cases: compare every number.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured (png, svg, pdf).")
    ] = None,
    write_docs: Annotated[
        Path | None, typer.Option("--write-docs", help="Write accuracy.md and its figures to this folder.")
    ] = None,
    leave_one_source_out: Annotated[
        bool,
        typer.Option("--leave-one-source-out", help="Also predict each source from the others (a minute)."),
    ] = False,
    html: HtmlOption = None,
    worst: Annotated[int, typer.Option(help="How many of the worst rows to print.")] = 8,
    json: JsonOption = False,
) -> None:
    """Compare predictions with measurements.

    Shows the error per source, chip and kind, and the worst rows.
    """
    if cases is not None:
        others = {
            "--runs": runs,
            "--serving": serving,
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

    files = _files(runs, serving, data)
    validation = predict(files)
    if leave_one_source_out:
        from meshwise.calibrate.left_out import add_left_out

        validation = add_left_out(validation, files)
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


def _files(runs: list[Path] | None, serving: list[Path] | None, data: Path | None) -> list[Path]:
    """The files that the options name; without any, the runs that ship with the package."""
    from meshwise.calibrate.runs import published_runs

    tables = [data / name for name in DATA_FILES if (data / name).is_file()] if data else []
    if data and not tables:
        raise DataError(f"{data} has none of {', '.join(DATA_FILES)}; name the folder of these tables")
    return [*(runs or ([] if serving else [published_runs()])), *(serving or ()), *tables]


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
