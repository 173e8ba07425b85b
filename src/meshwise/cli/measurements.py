"""`meshwise validate` and `fit`: predictions held against measurements, and constants made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from meshwise import api
from meshwise.cli.output import on_nodes, print_json, print_parts, show
from meshwise.core.each import ray_for
from meshwise.core.errors import DataError
from meshwise.core.options import stated_in, takes
from meshwise.core.refusals import refuse

if TYPE_CHECKING:
    from meshwise.calibrate.errors import Mend, Progress
    from meshwise.calibrate.validate import Validation

OP_FILES = ("measured_ops.csv", "published_micro.csv")
SERVING_FILES = ("measured_serving.csv",)
RUN_FILES = ("published_runs_2.csv", "lora_runs.csv", "measured_iterations_a100.csv")
"""Measured runs beside the published ones, which ship with the package."""
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
    beside = _progress(validation, board, release)
    validation = replace(validation, board=beside, mends=_mends(files) if mend else None)
    show(validation, json=json, html=html, plot=plot, num_worst=worst)


def _progress(validation: Validation, board: Path | None, release: str) -> list[Progress] | None:
    """Earlier releases beside today, by the file that is named."""
    from meshwise.calibrate.releases import progress, read_board, with_release, write_board

    refuse("board", DataError, board=board, release=release)
    if board is None:
        return None
    known = read_board(board) if board.is_file() else {}
    if release:
        write_board(with_release(known, release, validation.rows), board)
    known.pop(release, None)
    return list(progress(known, validation.rows))


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
    refuse("folder of tables", DataError, data=data, tables=tables, names=", ".join(DATA_FILES))
    return [*runs, *others, *tables] if runs or others else [published_runs(), *tables]


# --- fit -----------------------------------------------------------------------------------------


def fit(
    *,
    data: Path,
    only: Literal["ops", "steps", "serving", "all"] = "all",
    write: bool = True,
    ray: str = "",
    json: bool = False,
) -> None:
    """Fit every constant again: of kernels, of steps, of servers.

    Args:
        data: Folder of the measurements (docs/data.md names its files).
        only: Kernels and collectives, whole steps, serving engines, or (all) the first two.
        write: Write the catalog; --no-write only reports.
    """
    refuse("fit", DataError, ray=ray, only=only)
    if ray:
        ray_for(ray)  # the fit of kernels, which comes first, takes minutes
    name: str = "ops" if only == "all" else only
    with on_nodes(ray if name == "steps" else "", "parts of the rows"):
        found = {name: _fit(name, data, write=write, quiet=json)}
    if only == "all":
        found |= _fit_steps_afresh(data, write=write, ray=ray, quiet=json)
    unfounded = any(each.get("problems") for each in found.values())
    if json:
        print_json(found | {"written": write and not unfounded})
    if unfounded:
        raise typer.Exit(1)


def _fit(name: str, data: Path, *, write: bool, quiet: bool) -> dict[str, Any]:
    """The document of one fit to the measurements in `data`, whose constants go into the catalog."""
    from meshwise.core.files import write_text
    from meshwise.report.pages import parts_of

    fitted, names = _FITS[name]
    missing = [file for file in names if not (data / file).is_file()]
    refuse("folder of a fit", DataError, data=data, missing=missing)
    found, texts = fitted([data / file for file in names])
    if not quiet:
        print_parts(parts_of(found))
    document: dict[str, Any] = found.to_json()
    if problems := document.get("problems"):
        typer.echo(f"not written: {'; '.join(problems)}", err=True)
    elif write:
        for file, text in texts:
            write_text(Path(__file__).parents[1] / "catalog" / file, text)
    return document


Fitted = tuple[Any, Iterable[tuple[str, str]]]
"""What a fit found, and the files of the catalog that it makes."""


def _fit_ops(paths: list[Path]) -> Fitted:
    from meshwise.calibrate.fit import fit_all

    found = fit_all(paths, checked=date.today().isoformat())
    return found, [("efficiency.toml", found.toml)]


def _fit_steps(paths: list[Path]) -> Fitted:
    from meshwise.calibrate.fit_steps import fit_overheads, priced_runs
    from meshwise.calibrate.leave_one_source_out import intervals_toml, misses_by_others
    from meshwise.calibrate.runs import published_runs, unseen_runs

    paths = [published_runs(), *paths]
    runs, unseen = priced_runs(paths), priced_runs([unseen_runs()])
    found = fit_overheads(runs, checked=date.today().isoformat(), data=[path.name for path in paths])

    def texts() -> Iterator[tuple[str, str]]:
        yield "overheads.toml", found.toml
        yield "intervals.toml", intervals_toml(misses_by_others(runs, found.constants, unseen).spreads())

    return found, texts()


def _fit_serving(paths: list[Path]) -> Fitted:
    from meshwise.calibrate.fit_serving import fit_serving, serving_toml

    found = fit_serving(*paths)
    return found, [("serving.toml", serving_toml(found))]


_FITS: dict[str, tuple[Callable[[list[Path]], Fitted], tuple[str, ...]]] = {
    "ops": (_fit_ops, OP_FILES),
    "steps": (_fit_steps, RUN_FILES),
    "serving": (_fit_serving, SERVING_FILES),
}
"""What fits constants, and the tables that it needs."""


def _fit_steps_afresh(data: Path, *, write: bool, ray: str, quiet: bool) -> dict[str, Any]:
    """Fit the steps in a process of its own, which reads the constants of ops just written."""
    import subprocess
    import sys

    import msgspec

    words = ["fit", "--only", "steps", "--data", str(data), "--write" if write else "--no-write"]
    words += ["--json"] * quiet + ["--ray", ray] * bool(ray)
    command = [sys.executable, "-m", "meshwise", *words]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE if quiet else None)
    if done.returncode and not done.stdout:
        raise typer.Exit(done.returncode)
    return {"steps": msgspec.json.decode(done.stdout)["steps"]} if quiet else {}
