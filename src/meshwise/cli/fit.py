"""`meshwise fit`: every fitted constant of the catalog again, from the data."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, Literal

import typer

from meshwise.cli.output import on_nodes, print_json, print_parts
from meshwise.core.each import ray_for
from meshwise.core.errors import DataError

OP_FILES = ("measured_ops.csv", "published_micro.csv")
SERVING_FILES = ("measured_serving.csv",)
RUN_FILES = ("published_runs_2.csv", "lora_runs.csv", "measured_iterations_a100.csv")
"""Measured runs beside the published ones, which ship with the package."""


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
    found: dict[str, Any] = {}
    if ray and only in ("ops", "serving"):
        raise DataError("--ray is for the rows of steps; leave it out with --only ops or serving")
    if ray:
        ray_for(ray)  # the fit of kernels, which comes first, takes minutes
    if only == "serving":
        found["serving"] = _fit_serving(*_files(data, SERVING_FILES), write=write, quiet=json)
    if only in ("ops", "all"):
        found["ops"] = _fit_ops(_files(data, OP_FILES), write=write, quiet=json)
    if only == "all":
        found |= _fit_steps_afresh(data, write=write, ray=ray, quiet=json)
    if only == "steps":
        with on_nodes(ray, "parts of the rows"):
            found["steps"] = _fit_steps(_files(data, RUN_FILES), write=write, quiet=json)
    unfounded = any(each.get("problems") for each in found.values())
    if json:
        print_json(found | {"written": write and not unfounded})
    if unfounded:
        raise typer.Exit(1)


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} has no {missing[0]}; name the folder of the measurements with --data")
    return [folder / name for name in names]


def _catalog(name: str) -> Path:
    return Path(__file__).parents[1] / "catalog" / name


def _fit_ops(paths: list[Path], *, write: bool, quiet: bool) -> dict[str, Any]:
    from meshwise.calibrate.fit import fit_all
    from meshwise.report.fit import op_fit

    place = _catalog("efficiency.toml") if write else None
    found = fit_all(paths, checked=date.today().isoformat(), write_to=place)
    if not quiet:
        print_parts(op_fit(found))
    if found.unbounded:
        typer.echo(f"not written: {'; '.join(found.unbounded)}", err=True)
    return found.to_json()


def _fit_steps(paths: list[Path], *, write: bool, quiet: bool) -> dict[str, Any]:
    from meshwise.calibrate.fit_steps import fit_overheads, priced_runs
    from meshwise.calibrate.leave_one_source_out import intervals_toml, misses_by_others
    from meshwise.calibrate.runs import published_runs
    from meshwise.core.files import write_text
    from meshwise.report.fit import step_fit

    paths = [published_runs(), *paths]
    runs = priced_runs(paths)
    found = fit_overheads(runs, checked=date.today().isoformat(), data=[path.name for path in paths])
    if not quiet:
        print_parts(step_fit(found))
    if found.problems:
        typer.echo(f"not written: {'; '.join(found.problems)}", err=True)
    elif write:
        write_text(_catalog("overheads.toml"), found.toml)
        spreads = misses_by_others(runs, found.constants).spreads()
        write_text(_catalog("intervals.toml"), intervals_toml(spreads))
    return found.to_json()


def _fit_serving(path: Path, *, write: bool, quiet: bool) -> dict[str, Any]:
    from meshwise.calibrate.fit_serving import fit_serving, serving_toml
    from meshwise.core.files import write_text
    from meshwise.report.fit import serving_fit

    found = fit_serving(path)
    if not quiet:
        print_parts(serving_fit(found))
    if write:
        write_text(_catalog("serving.toml"), serving_toml(found))
    return found.to_json()


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
