"""Tables of measurements as CSV files: their lines, and what is wrong with one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwise.core.errors import DataError
from meshwise.core.files import read_csv


class BadCell(Exception):
    """What is wrong with a line, or with its cell in `column`."""

    def __init__(self, reason: str, column: str = "") -> None:
        super().__init__(f", column {column}: {reason}" if column else f": {reason}")


def header(path: Path) -> list[str]:
    """The names of the columns of a CSV file; DataError for a name that stands there twice."""
    names = next((cells for _, cells in read_csv(path)), [])
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}, line 1: the column {twice[0]} stands there twice; keep one")
    return names


def lines(path: Path) -> Iterator[tuple[int, dict[str, str], BadCell | None]]:
    """Number and cells (by column) of each line of a CSV file, and what is wrong with their number, if it is.

    Raises:
        DataError: The file cannot be read, or is no CSV file.
    """
    rows = read_csv(path)
    _, names = next(rows, (1, []))
    for number, cells in rows:
        bad = None if len(cells) == len(names) else BadCell(f"the line does not have {len(names)} cells")
        yield number, {name: text.strip() for name, text in zip(names, cells, strict=False)}, bad
