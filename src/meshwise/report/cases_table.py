"""A check of published cases as a table on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwise.published.cases import TOLERANCE, CaseCheck


def print_cases(checked: CaseCheck, console: Console) -> None:
    """Print the largest difference of each case and of the collectives, where it is, and the verdict."""
    table = Table(title="largest relative difference", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("case", "difference", "at"):
        table.add_column(name, justify="right" if name == "difference" else "left", no_wrap=True)
    collectives = (f"{checked.num_collectives} collectives", checked.collectives)
    for name, worst in (*checked.cases, collectives):
        table.add_row(escape(name), f"{worst.rel:.1e}", escape(worst.where))
    console.print(table)
    verdict = "all agree" if checked.agrees else "NOT all agree"
    console.print(f"{verdict} to {TOLERANCE:g}")
