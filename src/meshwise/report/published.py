"""The tables of a published model on a terminal, with its own columns and units; a check of its cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.published.convention import PublishedStep
from meshwise.published.nersc import TOLERANCE, CaseCheck
from meshwise.report.answer import Section
from meshwise.report.table import Table


def parts(step: PublishedStep) -> Iterator[Section]:
    """The tables of a published model, the first column of each a name."""
    for excerpt in step.excerpts:
        rows = [[_cell(row[column]) for column in excerpt.columns] for row in excerpt.rows]
        yield Table(excerpt.title, excerpt.columns, rows)
        yield from excerpt.sentences


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6f}"


def case_parts(checked: CaseCheck) -> Iterator[Section]:
    """The largest difference of each case and of the collectives, where it is, and the verdict."""
    collectives = (f"{checked.num_collectives} collectives", checked.collectives)
    rows = [(name, f"{worst.rel:.1e}", worst.where) for name, worst in (*checked.cases, collectives)]
    title, columns = "largest relative difference", ("case", "difference", "at")
    yield Table(title, columns, rows, left=("case", "at"), no_wrap=True)
    yield f"{'all agree' if checked.agrees else 'NOT all agree'} to {TOLERANCE:g}"
