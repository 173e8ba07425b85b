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
stands for, and that is its key in the file: a finished point is never run again, whatever becomes of the
sweep or of the TOML file, and a point is stored in one transaction, so that kill -9 loses only what was
running. A failed point keeps its error and stops nothing.

Points run in worker processes on this machine, or through Ray on many. A worker that dies takes only its
point with it.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import json
import math
import os
import re
import signal
import sqlite3
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from meshwise.core.errors import DataError, MissingExtraError
from meshwise.core.toml import read_toml

Scalar = str | int | float | bool
Engine = Literal["local", "ray"]
MAX_POINTS = 10**6
_LONG_FORMAT = re.compile(r"[{}]|[0-9]{3}")
_WORKER = [sys.executable, "-m", "meshwise.cli.worker"]
_SCHEMA = """
CREATE TABLE IF NOT EXISTS points (
    id INTEGER PRIMARY KEY,
    command TEXT NOT NULL UNIQUE,
    point TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    finished_at TEXT NOT NULL,
    seconds REAL NOT NULL,
    document TEXT,
    error TEXT
)
"""
_Row = tuple[Literal["done", "failed"], float, str | None, str | None]
_NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")
_UNKNOWN_OPTION = re.compile(r"no such option|has no option", re.IGNORECASE)


def _columns(text: str) -> dict[str, str]:
    """Columns, each with its path into a document where it is not called as its key is."""
    return {name: path or name for name, _, path in (word.partition("=") for word in text.split())}


DEFAULT_RESULTS = {
    "estimate": _columns("step_s mfu tokens_per_s memory_bytes=memory_bytes.total fits"),
    "search": _columns(
        "step_s=best.0.step_s mfu=best.0.mfu memory_bytes=best.0.memory_bytes.total plan=best.0.plan_text "
        "plans_feasible"
    ),
    "serve": _columns(
        "first_token_s max_sequences ttft_p50_s=ttft_s.p50 tpot_p50_s=tpot_s.p50 output_tokens_per_s_per_gpu"
    ),
    "collective": _columns("time_s=0.time_s bus_bytes_per_s=0.bus_bytes_per_s algorithm=0.algorithm"),
    "frontier layer": _columns("fwd_bwd_s binds"),
    "frontier run": _columns("plateau limit_80pct_flop wall_flop"),
    "dryrun": _columns("peak_bytes"),
    "run": _columns("time_s communication_s peak_bytes"),
    "compare": _columns("agree"),
}
"""Columns where a file names none: paths into the documents of docs/reference/json.md."""
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
    """One combination of the grid and the command line that it stands for."""

    values: dict[str, Scalar]
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        """The command line as one text."""
        return json.dumps(self.words)


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
    try:
        file = msgspec.convert(read_toml(path, most_bytes=2**20), _SweepFile)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is not a sweep: {error}") from None
    if file.verb not in VERBS:
        raise DataError(f"{path}: verb {file.verb!r} cannot be swept; use {', '.join(VERBS)}")
    if file.timeout_s is not None and not 0 < file.timeout_s <= threading.TIMEOUT_MAX:
        raise DataError(
            f"{path}: timeout_s is {file.timeout_s:g}; give seconds above 0 and up to "
            f"{threading.TIMEOUT_MAX:g}, or leave it out"
        )
    grids = file.grid if isinstance(file.grid, list) else [file.grid]
    empty = [key for grid in grids for key, values in grid.items() if not values]
    if empty or not any(grids):
        raise DataError(f"{path}: the grid has no values for {', '.join(empty) or 'anything'}; list some")
    points: dict[str, GridPoint] = {}
    if sum(math.prod(map(len, grid.values())) for grid in grids) > MAX_POINTS:
        raise DataError(f"{path}: the grid has more than {MAX_POINTS:,} points; split it")
    for grid in grids:
        for combination in itertools.product(*grid.values()):
            values = dict(zip(grid, combination, strict=True))
            point = GridPoint(values, _words(path, file, values))
            points.setdefault(point.key, point)
    results = file.results or DEFAULT_RESULTS[file.verb]
    return Sweep(file.verb, tuple(points.values()), results, file.timeout_s)


def _words(path: Path, file: _SweepFile, values: Mapping[str, Scalar]) -> tuple[str, ...]:
    """The command line of one point: placeholders filled in, the other grid values as options."""
    used: set[str] = set()

    def filled(text: str) -> str:
        try:
            fields = [field for field in string.Formatter().parse(text) if field[1] is not None]
            names = {str(name) for _, name, _, _ in fields}
            if any(_LONG_FORMAT.search(spec or "") for _, _, spec, _ in fields):
                raise ValueError("a format is too wide or holds braces")
            unknown = names - values.keys()
            if unknown:
                raise DataError(f"{path}: {text!r} uses {{{min(unknown)}}}, which is not a key of the grid")
            used.update(names)
            return text.format_map(values)
        except ValueError as error:
            raise DataError(f"{path}: {text!r} cannot be filled in: {error}; write {{key}}") from None

    words = [*file.verb.split(), *(filled(argument) for argument in file.arguments)]
    options = {key: filled(value) if isinstance(value, str) else value for key, value in file.options.items()}
    options |= {key: value for key, value in values.items() if key not in used}
    for key in options.keys() & {"model", "program"}:
        text = f"{{{key}}}" if key in values else str(options[key])
        raise DataError(f"{path}: {key} is no option of {file.verb}; write arguments = [{text!r}]")
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, str(value)]
    return (*words, "--json")


class Store:
    """The results of a sweep in one SQLite file; one sweep at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as opened:
            try:
                lock = opened.enter_context(path.open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"another sweep is writing to {path}; wait for it, name another file"
                ) from None
            except OSError as error:
                raise DataError(f"cannot write {path}: {error.strerror}; name a writable place") from None
            with self._told():
                self._database = opened.enter_context(closing(sqlite3.connect(path)))
                tables = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master")}
                if tables and "points" not in tables:
                    raise ValueError(f"it holds {', '.join(map(str, tables))}")
                self._database.execute(_SCHEMA)
            self._opened = opened.pop_all()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What can go wrong with the file in one sentence: no room, or it is damaged or another's."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            if getattr(error, "sqlite_errorname", "").startswith(_NO_ROOM):
                raise DataError(f"cannot write {self.path}: {reason}; make room and start again") from None
            raise DataError(
                f"{self.path} is not a results file of a sweep ({reason}); name another"
            ) from None

    def __enter__(self) -> Store:
        return self

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
        try:
            with self._database:
                self._database.execute(query, row)
        except sqlite3.OperationalError as error:
            raise DataError(f"cannot write {self.path}: {error}; make room and start again") from None

    def finished(self, *, with_failed: bool = True) -> set[str]:
        """The keys of the points that need not run again."""
        status = ("done", "failed") if with_failed else ("done", "done")
        with self._told():
            rows = self._database.execute("SELECT command FROM points WHERE status IN (?, ?)", status)
            return {key for (key,) in rows}

    def rows(self, sweep: Sweep) -> list[FinishedPoint]:
        """The finished points of a sweep in the order of its grid."""
        query = "SELECT command, status, seconds, document, error FROM points"
        rows = []
        with self._told():
            found = {key: rest for key, *rest in self._database.execute(query)}
            for point in sweep.points:
                if point.key in found:
                    status, seconds, text, error = msgspec.convert(found[point.key], _Row)
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


def run_sweep(
    sweep: Sweep,
    store: Store,
    *,
    jobs: int = 0,
    engine: Engine = "local",
    address: str | None = None,
    retry: bool = False,
    on_answer: Callable[[GridPoint, CommandAnswer], None] = lambda point, answer: None,
) -> None:
    """Run what is not finished yet and store each answer as it comes.

    `jobs` points at a time (0: one a core for estimates, one for real runs); `retry` runs failed points
    again; `address` is that of a Ray cluster. Points are handed out in the order of the grid. DataError if
    the verb has no such option, for then the file is wrong and not the point.
    """
    if engine == "local" and address is not None:
        raise DataError(f"--address {address} is that of a Ray cluster; add --engine ray, or leave it out")
    if address is not None and jobs:
        raise DataError(f"--jobs {jobs} is for workers of this machine; leave it out with --address")
    finished = store.finished(with_failed=not retry)
    todo = [point for point in sweep.points if point.key not in finished]
    if not todo:
        return
    jobs = jobs or (os.cpu_count() or 1 if sweep.verb not in _PROGRAMS else 1)
    answers = _through_ray(sweep, todo, jobs, address) if engine == "ray" else _locally(sweep, todo, jobs)
    for point, answer in answers:
        if answer.error and _UNKNOWN_OPTION.search(answer.error):
            raise DataError(
                f"an option of the sweep is unknown to its verb: {answer.error}; correct the file"
            )
        store.add(point, answer)
        on_answer(point, answer)


def _locally(sweep: Sweep, todo: Sequence[GridPoint], jobs: int) -> Iterator[tuple[GridPoint, CommandAnswer]]:
    """Answers as they come from `jobs` threads, each with a worker process of its own."""
    workers: list[CommandWorker] = []
    of_thread = threading.local()

    def start() -> None:
        of_thread.worker = CommandWorker()
        workers.append(of_thread.worker)

    def answered(point: GridPoint) -> tuple[GridPoint, CommandAnswer]:
        return point, answer_of(of_thread.worker, sweep, point.words)

    threads = ThreadPoolExecutor(min(jobs, len(todo)), initializer=start)
    try:
        for done in as_completed([threads.submit(answered, point) for point in todo]):
            yield done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()
        threads.shutdown()
        for worker in workers:
            worker.close()


def answer_of(worker: CommandWorker, sweep: Sweep, words: Sequence[str]) -> CommandAnswer:
    """Run one command in a worker; real and dry runs get a fresh one each time."""
    begin = time.monotonic()
    try:
        code, out, err = worker.call(words, sweep.timeout_s)
    except _WorkerError as error:
        return CommandAnswer(None, str(error), time.monotonic() - begin)
    finally:
        if sweep.verb in _PROGRAMS:
            worker.end()
    seconds = time.monotonic() - begin
    try:
        document = json.loads(out)
    except ValueError:
        return CommandAnswer(None, _last_line(err) or f"exit code {code}, no JSON document", seconds)
    return CommandAnswer(document, None, seconds)


class _WorkerError(Exception):
    """The worker gave no answer; the message says why."""


@dataclass(slots=True)
class CommandWorker:
    """A process that runs command lines of meshwise one after the other; started when first needed."""

    _process: subprocess.Popen[str] | None = None
    _errors: IO[str] = field(default_factory=partial(tempfile.TemporaryFile, "w+", errors="replace"))

    def close(self) -> None:
        """End the worker for good."""
        self.end()
        self._errors.close()

    def call(self, words: Sequence[str], timeout_s: float | None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `meshwise WORDS`; _WorkerError if it dies or is too slow."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.end()

        clock = threading.Timer(timeout_s or threading.TIMEOUT_MAX, expire)
        clock.daemon = True
        if timeout_s:
            clock.start()
        try:
            process.stdin.write(json.dumps(list(words)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            clock.cancel()
        if line:
            code, out, err = json.loads(line)
            return code, out, err
        if late.is_set():
            raise _WorkerError(f"it took longer than timeout_s = {timeout_s:g} s")
        raise _WorkerError(self._cause_of_death(process))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(
                _WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _cause_of_death(self, process: subprocess.Popen[str]) -> str:
        code = process.wait()
        self.end()
        self._errors.seek(0)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how}: {_last_line(self._errors.read())}".removesuffix(": ")

    def end(self) -> None:
        """End the worker and every process that it started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("meshwise: ").removeprefix("Error: ") if lines else ""


def _through_ray(
    sweep: Sweep, todo: Sequence[GridPoint], jobs: int, address: str | None
) -> Iterator[tuple[GridPoint, CommandAnswer]]:
    """Answers as they come from a Ray cluster; without `address`, from `jobs` local workers of Ray."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise MissingExtraError('Ray is not installed; run: pip install "meshwise[ray]"') from None
    workers = None if address else jobs
    ray.init(
        address=address, num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        task = ray.remote(max_retries=0)(_ray_point)
        pending = {task.remote(sweep, point.words): point for point in todo}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                point = pending.pop(reference)
                try:
                    yield point, ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield point, CommandAnswer(None, f"Ray: {_last_line(str(error))}", 0.0)
    finally:
        ray.shutdown()


def _ray_point(sweep: Sweep, words: Sequence[str]) -> CommandAnswer:
    return answer_of(_ray_worker(), sweep, words)


@cache
def _ray_worker() -> CommandWorker:
    """The process that runs the points of this Ray worker; it ends with it."""
    return CommandWorker()


def csv_rows(sweep: Sweep, rows: Sequence[FinishedPoint]) -> Iterator[list[Any]]:
    """The finished points as a table: grid values, results, status, seconds, error; the head first."""
    keys = list(dict.fromkeys(key for point in sweep.points for key in point.values))
    yield [*keys, *sweep.results, "status", "seconds", "error"]
    for row in rows:
        cells = [row.values.get(key, "") for key in keys] + [row.results[name] for name in sweep.results]
        yield ["" if cell is None else cell for cell in cells] + [row.status, row.seconds, row.error or ""]
