"""The tables of a published model on a terminal, with its own columns and units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshwise.published.nersc_2024_02 import TABLES, TOTALLED, Notebook
from meshwise.published.nersc_2024_10_plan import Paper
from meshwise.report.table import Table


def print_published(answer: Notebook | Paper, console: Console) -> None:
    """Print the tables of a published model."""
    (_print_paper if isinstance(answer, Paper) else _print_notebook)(answer, console)  # type: ignore[arg-type]


def _print_paper(paper: Paper, console: Console) -> None:
    columns = ("name", "flops_fwd", "activation_buffer", "weights_mem", "t_fwd_comm", "t_fwd", "t_bwd")
    title = "one layer, one microbatch (TFLOP, GB, s)"
    console.print(_published_table(title, columns, paper.rows()))
    for name, value in paper.iteration.totals.items():
        console.print(f"{name:<26}{value:>16.6f}")
    console.print("fits" if paper.iteration.fits else "DOES NOT FIT")
    for note in paper.notes():
        console.print(f"note: {note}")


def _print_notebook(notebook: Notebook, console: Console) -> None:
    columns = ("layer", "flops_fwd", "weights_mem", "t_fwd", "t_comm_fwd", "t_total_fwd", "t_total_bwd")
    for name in TABLES:
        console.print(_published_table(f"{name} (TFLOP, GB, ms)", columns, notebook.tables[name]))
        totals = notebook.totals(name)
        for column in TOTALLED:
            console.print(f"{column:<20}{totals[column]:>12.6f}")
        console.print(f"time spend in comms = {notebook.comm_frac(name)}\n")


def _published_table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Table:
    """The `columns` of `rows`, the first of which is a name."""
    return Table(title, columns, [[_published_cell(row[column]) for column in columns] for row in rows])


def _published_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6f}"
