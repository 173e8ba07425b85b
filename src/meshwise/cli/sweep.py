"""`meshwise sweep FILE.toml`: a grid of estimates, dry runs or runs, resumed where it was stopped."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from meshwise.cli.output import on_nodes, print_answer, write_rows
from meshwise.core.errors import DataError
from meshwise.core.refusals import refuse


def sweep(
    file: Path,
    *,
    out: Path | None = None,
    jobs: int = 0,
    retry: bool = False,
    ray: str = "",
    csv: Path | None = None,
    plot: Path | None = None,
    json: bool = False,
) -> None:
    """Run the points of a grid that are not finished yet. Then write table, CSV and figure of all.

    Args:
        file: A TOML file: verb, options, grid, results.
        out: The SQLite file [FILE.sqlite].
        jobs: Points at a time [a core each; runs one by one].
        retry: Run failed points again.
        csv: Where the table goes [FILE.csv].
        plot: Where the figure goes [FILE.png].
    """
    from meshwise.sweep.sweep import Store, csv_rows, read_sweep, run_sweep

    wanted = read_sweep(file)
    database = out or file.with_suffix(".sqlite")
    table, picture = csv or database.with_suffix(".csv"), plot or database.with_suffix(".png")
    files = len({file, database, table, picture})
    refuse("jobs of a sweep", DataError, ray=ray, jobs=jobs, files=files, database=database)
    with Store(database) as store:
        try:
            with on_nodes(ray, "points"):
                run_sweep(wanted, store, jobs=jobs, retry=retry)
        except KeyboardInterrupt:
            kept = f"{len(store.rows(wanted))} of {len(wanted.points)} points are kept in {database}"
            print(f"meshwise: stopped; {kept}; run the same command to continue", file=sys.stderr)
            raise
        rows = store.rows(wanted)
    write_rows(table, csv_rows(wanted, rows))
    from meshwise.report.answer import Text
    from meshwise.report.sweep_report import draw_sweep, parts

    figure = draw_sweep(wanted, rows, picture)
    num_failed = sum(row.status == "failed" for row in rows)
    document: dict[str, Any] = {"database": str(database), "csv": str(table)}
    document |= {"figure": figure and str(figure), "num_points": len(wanted.points)}
    document |= {"num_done": len(rows) - num_failed, "num_failed": num_failed}
    document["points"] = list(map(asdict, rows))
    counts = f"{len(rows) - num_failed} done, {num_failed} failed"
    end = f"{counts}; {database}, {table}, {figure or 'no figure'}"
    print_answer(document, [*parts(wanted, rows), Text("", [end], verbatim=True)], json=json)
    if num_failed:
        raise typer.Exit(1)
