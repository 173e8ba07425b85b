"""A check of published cases as a table on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.published.nersc import TOLERANCE, CaseCheck
from meshwise.report.answer import Section
from meshwise.report.table import Table


def parts(checked: CaseCheck) -> Iterator[Section]:
    """The largest difference of each case and of the collectives, where it is, and the verdict."""
    collectives = (f"{checked.num_collectives} collectives", checked.collectives)
    rows = [(name, f"{worst.rel:.1e}", worst.where) for name, worst in (*checked.cases, collectives)]
    title, columns = "largest relative difference", ("case", "difference", "at")
    yield Table(title, columns, rows, left=("case", "at"), no_wrap=True)
    yield f"{'all agree' if checked.agrees else 'NOT all agree'} to {TOLERANCE:g}"
