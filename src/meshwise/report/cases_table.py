"""A check of published cases as a table on a terminal."""

from __future__ import annotations

from rich.console import Console

from meshwise.published.nersc import TOLERANCE, CaseCheck
from meshwise.report.table import Table


def print_cases(checked: CaseCheck, console: Console) -> None:
    """Print the largest difference of each case and of the collectives, where it is, and the verdict."""
    collectives = (f"{checked.num_collectives} collectives", checked.collectives)
    rows = [(name, f"{worst.rel:.1e}", worst.where) for name, worst in (*checked.cases, collectives)]
    title, columns = "largest relative difference", ("case", "difference", "at")
    console.print(Table(title, columns, rows, left=("case", "at"), no_wrap=True))
    console.print(f"{'all agree' if checked.agrees else 'NOT all agree'} to {TOLERANCE:g}")
