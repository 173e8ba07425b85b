"""Runs one command for every point of a grid and stores the results in one SQLite file.

A TOML file names a verb (`VERBS`), what is the same for all points, and the grid:

    verb = "estimate"
    arguments = ["gpt3-175b"]
    [options]
    cluster = "h100-80g-sxm:512"
    plan = "tp={tp},pp={pp}"            # {key} takes the value of the point
    batch = 512
    [grid]                              # every combination; a key that no {key} uses becomes --key
    tp = [1, 2, 4, 8]
    pp = [1, 2, 4, 8]
    [results]                           # columns: a path into the JSON document of the command
    step_s = "step_s"
    memory_bytes = "memory_bytes.total"

`[[grid]]`, written several times, is the union of several grids. A point is the command line that it
stands for, with the contents of the files that it names, and that is its key in the file: a finished point
is never run again, whatever becomes of the sweep or of the TOML file, unless such a file changes, and a
point is stored in one transaction, so that kill -9 loses only what was running. A failed point keeps its
error and stops nothing.

Points run in processes of this machine, or on a Ray cluster (`core.each`). One that dies takes only its point
with it.
"""

import fcntl
import hashlib
import importlib
import itertools
import json
import math
import re
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.core.each import Lost, each, last_line
from meshwise.core.errors import DataError
from meshwise.core.files import catalog_text, read_catalog, writing
from meshwise.core.refusals import refuse
from meshwise.core.toml import check_fields, converted, read_toml

ON_BY_DEFAULT = ("capped", "ledger", "run")
"""Options of the verbs that hold unless `--no-NAME` says otherwise."""
Scalar = str | int | float | bool
_Row = tuple[Literal["done", "failed"], float, str | None, str | None]
_NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
_UNKNOWN_OPTION = re.compile(r"no such option|has no option", re.IGNORECASE)


DEFAULT_RESULTS: dict[str, dict[str, str]] = read_catalog("sweeps.toml")
"""Columns where a file names none, by verb."""
VERBS = tuple(DEFAULT_RESULTS)
_PROGRAMS = ("dryrun", "run", "compare")
"""Verbs whose points run one at a time, each in a fresh process."""


class _SweepFile(msgspec.Struct, forbid_unknown_fields=True):
    """The TOML file as written."""

    verb: str
    grid: dict[str, list[Scalar]] | list[dict[str, list[Scalar]]]
    arguments: list[str] = []
    options: dict[str, Scalar] = {}
    results: dict[str, str] = {}
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One combination of the grid and the command line that it stands for.

    `key`: the command line, and the contents of the files that it names, as one text.
    """

    values: dict[str, Scalar]
    words: tuple[str, ...]
    key: str


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """What a point's command left: its document, or the sentence that it failed with."""

    document: Any
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class FinishedPoint:
    """A finished point with the columns that `[results]` asks for; None where the document has none."""

    values: dict[str, Scalar]
    status: str
    seconds: float
    results: dict[str, Any]
    error: str | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep as read from its file: all its points, in the order of the grid."""

    verb: str
    points: tuple[GridPoint, ...]
    results: dict[str, str]
    timeout_s: float | None


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file; DataError with one sentence for whatever is wrong in it."""
    stated, known = read_toml(path, most_bytes=2**20), msgspec.structs.fields(_SweepFile)
    needed = (field.name for field in known if field.required)
    check_fields(stated, [field.name for field in known], needed, f"{path} is not a sweep")
    file = converted(stated, _SweepFile, f"{path} is not a sweep", DataError)
    grids = file.grid if isinstance(file.grid, list) else [file.grid]
    empty = [key for grid in grids for key, values in grid.items() if not values]
    empty += ["anything"] * (not any(grids))
    refuse(
        "sweep", DataError, f"{path}: ", file=file, verbs=", ".join(VERBS), empty=", ".join(empty),
        most_s=threading.TIMEOUT_MAX, num_points=sum(math.prod(map(len, grid.values())) for grid in grids),
    )  # fmt: skip
    points: dict[str, GridPoint] = {}
    digest_of = cache(_digest)
    for grid in grids:
        for combination in itertools.product(*grid.values()):
            values = dict(zip(grid, combination, strict=True))
            words = _words(path, file, values)
            contents = {word: digest for word in words if (digest := digest_of(word))}
            key = json.dumps([*words, contents] if contents else words)
            points.setdefault(key, GridPoint(values, words, key))
    results = file.results or DEFAULT_RESULTS[file.verb]
    return Sweep(file.verb, tuple(points.values()), results, file.timeout_s)


def _digest(word: str) -> str:
    """The digest of the file that a word names, or of a folder's config.json; empty of any other word."""
    try:
        path = Path(word) / "config.json" if Path(word).is_dir() else Path(word)
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def _words(path: Path, file: _SweepFile, values: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The command line of one point: placeholders filled in, the other grid values as options."""
    used: set[str] = set()

    def filled(text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if (key := found[1]) not in values:
                raise DataError(f"{path}: {text!r} cannot be filled in: {found[0]} is no key of the grid")
            used.add(key)
            return str(values[key])

        return re.sub(r"\{(.*?)\}|[{}]", value, text)

    words = [*file.verb.split(), *(filled(argument) for argument in file.arguments)]
    options = {key: filled(value) if isinstance(value, str) else value for key, value in file.options.items()}
    options |= {key: value for key, value in values.items() if key not in used}
    for key in options.keys() & {"model", "program"}:
        text = f"{{{key}}}" if key in values else str(options[key])
        raise DataError(f"{path}: {key} is no option of {file.verb}; write arguments = [{text!r}]")
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            off = [f"--no-{flag[2:]}"] if key.replace("-", "_") in ON_BY_DEFAULT else []
            words += [flag] if value else off
        else:
            words += [flag, str(value)]
    return (*words, "--json")


class Store(AbstractContextManager["Store"]):
    """The results of a sweep in one SQLite file; one sweep at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            with writing(path):
                try:
                    fcntl.flock(opened.enter_context(path.open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise DataError(f"another sweep is writing to {path}; name another file") from None
            with self._told():
                self._database = opened.enter_context(closing(sqlite3.connect(path)))
                tables = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master")}
                if tables and "points" not in tables:
                    raise ValueError(f"it holds {', '.join(map(str, tables))}")
                self._database.execute(catalog_text("sweep.sql"))
            self._opened = opened.pop_all()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What can go wrong with the file in one sentence: no room, or it is damaged or another's."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            if getattr(error, "sqlite_errorname", "").startswith(_NO_ROOM):
                raise DataError(f"cannot write {self.path}: {why}; make room and start again") from None
            raise DataError(f"{self.path} is not a results file of a sweep ({why}); name another") from None

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, point: GridPoint, answer: CommandAnswer) -> None:
        """Keep the answer of a point; once this returns, nothing that happens to the process loses it."""
        row = {
            "command": point.key,
            "point": json.dumps(point.values),
            "status": "failed" if answer.error else "done",
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": answer.seconds,
            "document": None if answer.error else json.dumps(answer.document),
            "error": answer.error,
        }
        query = f"INSERT OR REPLACE INTO points ({', '.join(row)}) VALUES (:{', :'.join(row)})"
        with self._told(), self._database:
            self._database.execute(query, row)

    def finished(self, *, with_failed: bool = True) -> set[str]:
        """The keys of the points that need not run again."""
        with self._told():
            rows = self._database.execute("SELECT command, status FROM points").fetchall()
        return {key for key, status in rows if with_failed or status == "done"}

    def rows(self, sweep: Sweep) -> list[FinishedPoint]:
        """The finished points of a sweep in the order of its grid."""
        query = "SELECT command, status, seconds, document, error FROM points"
        rows = []
        with self._told():
            found = {key: rest for key, *rest in self._database.execute(query)}
            for point in sweep.points:
                if row := found.get(point.key):
                    status, seconds, text, error = msgspec.convert(row, _Row)
                    document = json.loads(text) if text else None
                    results = {name: look_up(document, path) for name, path in sweep.results.items()}
                    rows.append(FinishedPoint(point.values, status, seconds, results, error))
        return rows


def look_up(document: Any, path: str) -> Any:
    """What `memory_bytes.total` or `steps.0.flop` names in a JSON document; None where it is not."""
    for part in path.split("."):
        try:
            document = document[int(part) if isinstance(document, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return document


def run_sweep(sweep: Sweep, store: Store, *, jobs: int = 0, retry: bool = False) -> None:
    """Run what is not finished yet and store each answer as it comes, here or on a cluster (`on_ray`).

    `jobs` points at a time (0: one a core for estimates, one for real runs); `retry` runs failed points
    again. Points are handed out in the order of the grid. DataError if the verb has no such option, for then
    the file is wrong and not the point.
    """
    finished = store.finished(with_failed=not retry)
    todo = [point for point in sweep.points if point.key not in finished]
    is_program = sweep.verb in _PROGRAMS
    how: dict[str, Any] = {"apart": True, "fresh": is_program, "timeout_s": sweep.timeout_s}
    words = [point.words for point in todo]
    with closing(each(answer_of, words, jobs=jobs or int(is_program), **how)) as answers:
        for place, found in answers:
            answer = CommandAnswer(None, found.reason, found.seconds) if isinstance(found, Lost) else found
            if answer.error and _UNKNOWN_OPTION.search(answer.error):
                raise DataError(f"an option of the sweep is unknown: {answer.error}; correct the file")
            store.add(todo[place], answer)


def answer_of(words: Sequence[str]) -> CommandAnswer:
    """Run one command line."""
    begin = time.monotonic()
    code, out, err = importlib.import_module("meshwise.cli").run(list(words))
    seconds = time.monotonic() - begin
    try:
        return CommandAnswer(json.loads(out), None, seconds)
    except ValueError:
        return CommandAnswer(None, last_line(err) or f"exit code {code}, no JSON document", seconds)


def csv_rows(sweep: Sweep, rows: Sequence[FinishedPoint]) -> Iterator[list[Any]]:
    """The finished points as a table: grid values, results, status, seconds, error; the head first."""
    keys = list(dict.fromkeys(key for point in sweep.points for key in point.values))
    yield [*keys, *sweep.results, "status", "seconds", "error"]
    for row in rows:
        cells = [row.values.get(key, "") for key in keys] + [row.results[name] for name in sweep.results]
        yield ["" if cell is None else cell for cell in cells] + [row.status, row.seconds, row.error or ""]
