"""Files of a user: read in one place, so that what is wrong with one is a sentence; written whole or not at
all, first beside their place, then moved onto it.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from meshwise.core.errors import DataError, MeshwiseError

if TYPE_CHECKING:
    import msgspec

Content = TypeVar("Content")
Record = TypeVar("Record", bound="msgspec.Struct")


MOST_BYTES = {"CSV": 2**28, "JSON lines": 2**28, "JSON": 2**24}
"""Tables of requests and measurements are long, configurations are not; others have a MiB at most."""


def read_text(
    path: Path, kind: str, error: type[MeshwiseError] = DataError, most_bytes: int | None = None
) -> str:
    """The UTF-8 text of a `kind` file (TOML, JSON, ...); `error` if there is none, in one sentence."""
    most = most_bytes or MOST_BYTES.get(kind, 2**20)
    try:
        if not (path.is_file() or path.is_fifo()):  # a device has no end
            raise error(f"cannot read {str(path)!r}: no file is there; name a {kind} file")
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise error(f"cannot read {str(path)!r}: it has more than {most:,} bytes; name a {kind} file")
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as problem:
        raise error(f"cannot read {str(path)!r}: {problem.strerror}; name a {kind} file") from None
    except UnicodeDecodeError:
        raise error(f"cannot read {str(path)!r}: it is not text in UTF-8") from None


def parse_file(
    path: Path, kind: str, parse: Callable[[str], Content], error: type[MeshwiseError] = DataError
) -> Content:
    """What `parse` makes of the text of a `kind` file (TOML, JSON, ...).

    Raises:
        error: There is no such file, it is not text, or `parse` refuses it; one sentence.
    """
    return parse_text(read_text(path, kind, error), repr(str(path)), kind, parse, error)


def parse_text(
    text: str, name: str, kind: str, parse: Callable[[str], Content], error: type[MeshwiseError] = DataError
) -> Content:
    """What `parse` makes of the `text` of a `kind` file called `name`; `error` where it refuses it."""
    try:
        return parse(text)
    except (RecursionError, MemoryError):
        raise error(f"{name} is not valid {kind}: it is nested too deeply, or memory is short") from None
    except (ValueError, SyntaxError) as problem:
        reason = " ".join(str(problem).partition(" (<")[0].split())
        raise error(f"{name} is not valid {kind}: {reason}") from None


def read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line of a CSV file that is not blank; DataError where it is none."""
    reader = csv.reader(io.StringIO(read_text(path, "CSV"), newline=""))
    try:
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except csv.Error as problem:
        raise DataError(f"{str(path)!r} is not valid CSV: {problem}") from None


def read_rows(path: Path, kind: type[Record], *forms: Sequence[str]) -> Iterator[tuple[int, Record]]:
    """Number and record of each line of a CSV file; DataError for a cell that its field cannot be.

    Its columns are the fields of `kind`; or one of `forms`, which are the last of these by other names.
    """
    import msgspec

    rows, fields = read_csv(path), kind.__struct_fields__
    _, head = next(rows, (1, []))
    columns = next((form for form in forms or [fields] if {*form} <= {*head}), None)
    if columns is None:
        known = " or ".join(map(",".join, forms or [fields]))
        raise DataError(f"{path}, line 1: it must have the columns {known}")
    for number, cells in rows:
        row = dict(zip(head, map(str.strip, cells), strict=False))
        stated = {field: row.get(name, "") for field, name in zip(fields[::-1], columns[::-1], strict=False)}
        try:
            record = msgspec.convert(stated, kind, strict=False)
        except msgspec.ValidationError as error:
            reason, _, field = str(error).replace("`", "").lower().partition(" - at $.")
            raise DataError(f"{path}, line {number}: {field} is {stated[field]!r}; {reason}") from None
        yield number, record


def catalog_text(name: str) -> str:
    """The text of a file of the catalog that ships with the package."""
    return (resources.files("meshwise") / "catalog" / name).read_text(encoding="utf-8")


def read_catalog(name: str) -> dict[str, Any]:
    """The tables of a TOML file of the catalog."""
    return tomllib.loads(catalog_text(name))


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all; a place that cannot be written raises DataError."""
    write_bytes(path, text.encode())


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """`rows` (the head first) as CSV; None is an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def check_writable(path: Path, *endings: str) -> None:
    """DataError if a file at `path` cannot be made, before the work that fills it, or ends otherwise."""
    folder = path.parent
    if endings and not path.name.lower().endswith(endings):
        raise DataError(f"cannot write {path}: its name must end in {' or '.join(endings)}")
    if path.is_dir():
        raise DataError(f"cannot write {path}: it is a folder; name a file")
    if not folder.is_dir():
        raise DataError(f"cannot write {path}: there is no folder {folder}; make it, or name another place")
    if not os.access(folder, os.W_OK):
        raise DataError(f"cannot write {path}: {folder} is not writable; name another place")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while `path` is made or written is a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None


def make_folder(path: Path) -> None:
    """Make the folder `path` and those above it, where they are not there yet; else DataError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write all texts, by name, or none, into `folder`, which is made where it is missing; else DataError."""
    make_folder(folder)
    with ExitStack() as opened:
        for name, text in texts.items():
            out = opened.enter_context(whole_file(folder / name))
            out.write(text.encode())
            out.flush()
    return [folder / name for name in texts]


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` whole or not at all; a place that cannot be written raises DataError."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece that appears at `path` only when all is written; else DataError.

    A device, a pipe or /dev/stdout is written as it is: a file in its place would destroy it.
    """
    with writing(path):
        is_stream = not path.is_file() or str(path).startswith(("/dev/", "/proc/"))
        if path.exists() and is_stream:
            with path.open("wb") as file:
                yield file
        else:
            with _moved_to(Path(os.path.realpath(path))) as file:  # a link stays one
                yield file


@contextmanager
def _moved_to(path: Path) -> Iterator[BinaryIO]:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.umask(mask := os.umask(0))
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
