"""The tables of a published model on a terminal, with its own columns and units."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from meshwise.published.convention import PublishedStep
from meshwise.report.table import Table


def print_published(step: PublishedStep, console: Console) -> None:
    """Print the tables of a published model, the first column of each a name."""
    for excerpt in step.excerpts:
        rows = [[_cell(row[column]) for column in excerpt.columns] for row in excerpt.rows]
        console.print(Table(excerpt.title, excerpt.columns, rows))
        for sentence in excerpt.sentences:
            console.print(sentence)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6f}"
