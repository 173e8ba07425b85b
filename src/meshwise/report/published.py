"""The tables of a published model on a terminal, with its own columns and units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.published.convention import PublishedStep
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
