"""`meshwise validate`: predicted against measured, row by row, and how wrong that is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwise import api
from meshwise.cli.fit import OP_FILES, RUN_FILES
from meshwise.cli.output import show
from meshwise.core.errors import DataError
from meshwise.core.options import stated_in, takes

if TYPE_CHECKING:
    from meshwise.calibrate.mend import Mend
    from meshwise.calibrate.releases import Board
    from meshwise.calibrate.validate import Validation

DATA_FILES = (*RUN_FILES, *OP_FILES)
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
    board: Path | None = None,
    release: str = "",
    mend: bool = False,
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
        board: CSV of what earlier releases predicted for the same rows, shown old against new.
        release: Keep today's predictions on the board under this name.
        mend: Which one constant would mend the step times of the runs, and by how much.
        write_docs: Write accuracy.md and its figures to this folder, with the board that lies there.
        leave_one_source_out: Also predict each source from the others (two minutes).
        worst: How many of the worst rows to print.
    """
    asked = dict(locals())
    if cases is not None:
        if others := {*stated_in(asked, validate)} - {"cases", "json"}:
            unused = min(others).replace("_", "-")
            raise DataError(f"--cases compares its own file only; leave --{unused} out")
        from meshwise.published.nersc import check_cases

        checked = check_cases(cases)
        show(checked, json=json, ok=checked.agrees)
        return
    from meshwise.calibrate.validate import validate as predict

    files = _files(runs or [], [*(serving or ()), *(rl or ()), *(power or ())], data)
    validation = predict(files)
    if leave_one_source_out:
        from meshwise.calibrate.leave_one_source_out import predicted_by_others

        validation = predicted_by_others(validation, files)
    for warning in validation.warnings:
        typer.echo(warning, err=True)
    releases = _releases(validation, board, release, write_docs)
    if write_docs is not None:
        from meshwise.report.accuracy import write_accuracy

        write_accuracy(validation, write_docs, releases)
    mends = _mends(files) if mend else []
    document = validation.to_json() | ({"mends": [asdict(each) for each in mends]} if mend else {})
    show(validation, document, json=json, html=html, plot=plot, num_worst=worst, board=releases, mends=mends)


def _releases(validation: Validation, board: Path | None, release: str, docs: Path | None) -> Board:
    """What earlier releases predicted, by the file that is named or lies in the folder of the docs."""
    from meshwise.calibrate.releases import read_board, with_release, write_board

    path = board or (docs / "board.csv" if docs else None)
    if path is None and release:
        raise DataError(f"--release {release} is the name of predictions on a board; add --board FILE")
    if board is not None and not board.is_file() and not release:
        raise DataError(f"{board}: no such file; name a board, or begin one with --release NAME")
    if path is None:
        return {}
    known = read_board(path) if path.is_file() else {}
    if release:
        write_board(with_release(known, release, validation.rows), path)
    return {name: found for name, found in known.items() if name != release}


def _mends(files: list[Path]) -> list[Mend]:
    """The constants that would mend the runs of `files`."""
    from meshwise.calibrate.fit_steps import priced_runs
    from meshwise.calibrate.mend import mends

    if not (runs := priced_runs(files)):
        raise DataError("--mend is for training runs; name them by --runs, or leave it out")
    return mends(runs)


def _files(runs: list[Path], others: list[Path], data: Path | None) -> list[Path]:
    """The files that the options name; without any, the runs that ship with the package."""
    from meshwise.calibrate.runs import published_runs

    tables = [data / name for name in DATA_FILES if (data / name).is_file()] if data else []
    if data and not tables:
        raise DataError(f"{data} has none of {', '.join(DATA_FILES)}; name the folder of these tables")
    return [*runs, *others, *tables] if runs or others else [published_runs(), *tables]
