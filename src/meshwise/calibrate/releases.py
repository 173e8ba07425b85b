"""What earlier releases predicted for the same rows: progress and regressions, row by row.

A board is a CSV file with the columns `release quantity id predicted`, a line for each row that a release
could express. Rows are known by their id. Each release is compared with today on the rows that it predicted
itself, so that what an older one did not know hides no row.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from meshwise.calibrate.errors import Progress, summarize
from meshwise.calibrate.validate import ASPECTS, Prediction, by_aspect
from meshwise.core.columns import grouped
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


def progress(board: Board, rows: Sequence[Prediction]) -> Iterator[Progress]:
    """Each release beside today, on the rows of a quantity that it predicted, then on each kind of them."""
    for quantity, members in grouped(rows, lambda row: row.quantity).items():
        groups = [("all", members)]
        for name in ASPECTS:
            kinds = by_aspect(members, name)
            groups += kinds * (len(kinds) > 1)
        for (label, same), (release, found) in itertools.product(groups, board.items()):
            known = [row for row in same if (quantity, row.id) in found]
            before = [found[quantity, row.id] / (row.measured or 1.0) - 1.0 for row in known if row.expressed]
            if known:
                now = summarize([row.error_frac for row in known])
                yield Progress(quantity, label, release, summarize(before), now)
