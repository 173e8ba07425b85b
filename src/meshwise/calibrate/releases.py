"""What earlier releases predicted for the same rows: progress and regressions, row by row.

A board is a CSV file with the columns `release quantity id predicted`, a line for each row that a release
could express. Rows are known by their id, so releases are compared on the rows that all of them predicted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meshwise.calibrate.errors import ErrorSummary, summarize
from meshwise.calibrate.validate import Prediction
from meshwise.core.files import csv_text, read_rows, write_text

Board = dict[str, dict[tuple[str, str], float]]
"""What each release predicted, by quantity and id of a row; the oldest release first."""


class _Cell(msgspec.Struct):
    release: str
    quantity: str
    id: str
    predicted: float


def read_board(path: Path) -> Board:
    """The board of a file; DataError where it is none."""
    board: Board = {}
    for _, row in read_rows(path, _Cell):
        board.setdefault(row.release, {})[row.quantity, row.id] = row.predicted
    return board


def with_release(board: Board, name: str, rows: Sequence[Prediction]) -> Board:
    """`board` with what is predicted now as the release `name`."""
    today = {(row.quantity, row.id): row.predicted for row in rows if row.predicted is not None}
    return {each: found for each, found in board.items() if each != name} | {name: today}


def write_board(board: Board, path: Path) -> None:
    """Write a board, four digits of each prediction."""
    cells = [(name, *row, f"{value:.4g}") for name, found in board.items() for row, value in found.items()]
    write_text(path, csv_text([_Cell.__struct_fields__, *cells]))


def errors_by_release(board: Board, rows: Sequence[Prediction]) -> Mapping[str, ErrorSummary]:
    """Errors of each release, and of `now`, on those of the `rows` that all of them predicted."""
    rows = [row for row in rows if row.expressed]
    known = [row for row in rows if all((row.quantity, row.id) in found for found in board.values())]
    return {
        release: summarize([found[row.quantity, row.id] / (row.measured or 1.0) - 1.0 for row in known])
        for release, found in board.items()
    } | {"now": summarize([row.error_frac for row in known])}
