"""Tables of measurements as CSV files: their lines, and what is wrong with one of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshwise.core.errors import DataError
from meshwise.core.files import read_csv

Item = TypeVar("Item")


class BadCell(Exception):
    """What is wrong with a line, or with its cell in `column`."""

    def __init__(self, reason: str, column: str = "") -> None:
        super().__init__(f", column {column}: {reason}" if column else f": {reason}")


class Unmodelled(BadCell):
    """The row is sound, but no formula of ours prices it."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is no measurement of ours, and why; `is_sound`: it is merely not modelled."""

    id: str
    source: str
    reason: str
    is_sound: bool
    op: str = ""


def header(path: Path) -> list[str]:
    """The names of the columns of a CSV file; DataError for a name that stands there twice."""
    names = next((cells for _, cells in read_csv(path)), [])
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}, line 1: the column {twice[0]} stands there twice; keep one")
    return names


def lacking(path: Path, names: Sequence[str], kinds: Iterable[Sequence[str]]) -> DataError:
    """What a header lacks that is none of `kinds` of columns, of the kind that it shares most with."""
    nearest = max(kinds, key=lambda columns: len({*columns} & {*names}))
    missing = ", ".join(name for name in nearest if name not in names)
    return DataError(f"{path}, line 1: the header lacks {missing}; expected {', '.join(nearest)}")


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


def read_each(
    path: Path, convert: Callable[[dict[str, str], str, int], Item]
) -> tuple[list[Item], list[BadRow]]:
    """What `convert` makes of the cells, the place and the number of each line; and the bad lines."""
    found, bad = list[Item](), list[BadRow]()
    for number, cells, problem in lines(path):
        where = f"{path.name}:{number}"
        try:
            if problem is not None:
                raise problem
            found.append(convert(cells, where, number))
        except BadCell as error:
            is_sound = isinstance(error, Unmodelled)
            reason = str(error).removeprefix(": ") if is_sound else f"{path}, line {number}{error}"
            source = cells.get("source") or path.stem
            bad.append(BadRow(cells.get("id") or where, source, reason, is_sound, cells.get("op", "")))
    return found, bad
