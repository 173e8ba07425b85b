"""The columns of a large capture, kept beside its traces, and traces that are loaded from them one at a time.

A trace is decoded once. Its events are kept as a Parquet file in the folder `.meshwise` beside it, which is
a tenth of its size and loads ten times as fast; what is not a column (groups, arguments of communications) is
JSON in the file's metadata. The name of the file is a digest of the trace: its name, size and time, and what
it holds at its beginning, middle and end. So a second look reads columns alone, a capture that was stopped
half-way goes on, and a trace that has changed is read again. A file is written whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec
import numpy as np

from meshwise.core.each import all_of
from meshwise.core.extras import import_extra
from meshwise.core.files import make_folder, whole_file
from meshwise.trace.events import COLUMNS, Kind, MemoryEvents, Trace, kind_of

if TYPE_CHECKING:
    import polars

Result = TypeVar("Result")
FOLDER = ".meshwise"
_VERSION = b"2"
_SAMPLE_BYTES = 1 << 16
_FEW_RANKS = 16
"""Up to as many are analysed sooner than processes have started."""
_ABOUT, _REASONS = "meshwise.trace", "meshwise.reasons"
_MEMORY = tuple(field.name for field in fields(MemoryEvents))


_BUILT = (*COLUMNS, "label_kind", "memory", "selected", "window")
_TOLD = {name: kind for name, kind in get_type_hints(Trace).items() if name not in _BUILT}
"""What of a trace is no column."""
_About = msgspec.defstruct("_About", list(_TOLD.items()))


def columns_file(files: Sequence[Path]) -> Path:
    """Where the columns of a capture are kept: beside it, or in the user's cache if that is not writable."""
    digest = blake2b(_VERSION, digest_size=12)
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            for place in (0, stat.st_size // 2, max(stat.st_size - _SAMPLE_BYTES, 0)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return _folder(files[0].resolve().parent) / f"{digest.hexdigest()}.parquet"


@lru_cache
def _folder(of: Path) -> Path:
    if os.access(of, os.W_OK):
        return of / FOLDER
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise" / "columns"


def write_columns(trace: Trace, reasons: Sequence[str], path: Path) -> None:
    """Keep a trace, and what is wrong with its file, at `path`; events also by name, for queries."""
    pl = import_extra("polars", "frames")
    about = _About(**{name: getattr(trace, name) for name in _TOLD})
    frame = pl.DataFrame({name: getattr(trace, name) for name in COLUMNS})
    kinds = [Kind(kind).name.lower() for kind in trace.label_kind.tolist()]
    threads = [trace.track_names.get(i, str(tid)) for i, (_, tid) in enumerate(trace.tracks)]
    for name, place, values in (
        ("name", trace.label, [name for _, name in trace.labels]),
        ("category", trace.label, [category for category, _ in trace.labels]),
        ("kind", trace.label, kinds),
        ("thread", trace.track, threads),
        ("dims", trace.shape, [dims for dims, _, _ in trace.shapes]),
    ):
        text = pl.Series(name, [*values, None], dtype=pl.String)
        frame = frame.with_columns(text.gather(np.where(place < 0, len(values), place)).alias(name))
    make_folder(path.parent)
    if len(trace.memory.time_ns):
        with whole_file(path.with_suffix(".memory")) as file:
            pl.DataFrame({name: getattr(trace.memory, name) for name in _MEMORY}).write_parquet(file)
    metadata = {_ABOUT: _text(about), _REASONS: _text(list(reasons))}
    with whole_file(path) as file:
        frame.write_parquet(file, compression_level=1, metadata=metadata)


def _text(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def read_reasons(path: Path) -> tuple[int, list[str]]:
    """The rank of a kept trace, and what was wrong with its file."""
    metadata = import_extra("polars", "frames").read_parquet_metadata(path)
    return msgspec.json.decode(metadata[_ABOUT])["rank"], msgspec.json.decode(metadata[_REASONS])


def read_columns(path: Path) -> Trace:
    """The trace that is kept at `path`."""
    pl = import_extra("polars", "frames")
    text = pl.read_parquet_metadata(path)[_ABOUT]
    about: Any = msgspec.json.decode(text, type=_About, dec_hook=lambda kind, value: kind(value))
    kinds = [kind_of(*label) for label in about.labels] or [Kind.OTHER]
    memory = path.with_suffix(".memory")
    none = dict.fromkeys(_MEMORY, np.zeros(0, np.int64))
    held = _arrays(pl.read_parquet(memory)) if memory.exists() else none
    told = {name: getattr(about, name) for name in _TOLD}
    columns = _arrays(pl.read_parquet(path, columns=list(COLUMNS)))
    label_kind = np.array(kinds, dtype=np.int8)
    return Trace(label_kind=label_kind, memory=MemoryEvents(**held), **told, **columns)


def _arrays(frame: polars.DataFrame) -> dict[str, Any]:
    return {name: frame[name].to_numpy() for name in frame.columns}


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank: in memory, or in a file of columns that are loaded when they are needed."""

    rank: int
    trace: Trace | None = None
    file: Path = Path()
    change: Callable[[Trace], Trace] | None = None
    """What is changed of a trace when it is loaded."""

    def load(self) -> Trace:
        """The trace with its events."""
        if self.trace is not None:
            return self.trace
        trace = replace(read_columns(self.file), rank=self.rank)
        return self.change(trace) if self.change else trace

    def changed(self, change: Callable[[Trace], Trace]) -> RankTrace:
        """The trace as `change` makes it."""
        if self.trace is not None:
            return replace(self, trace=change(self.trace))
        return replace(self, change=change)


class Traces(Sequence[Trace]):
    """The traces of a job by rank. Of those whose columns are kept, one at a time is in memory."""

    def __init__(self, of_rank: Sequence[RankTrace]) -> None:
        self.of_rank = tuple(of_rank)
        self.are_kept = bool(of_rank) and of_rank[0].trace is None
        self._load = lru_cache(maxsize=1)(lambda place: self.of_rank[place].load())

    def __len__(self) -> int:
        return len(self.of_rank)

    def __getitem__(self, place: int) -> Trace:  # type: ignore[override]
        return self._load(range(len(self))[place])

    def __iter__(self) -> Iterator[Trace]:
        return (one.load() for one in self.of_rank)

    @property
    def ranks(self) -> list[int]:
        """The rank of each trace; none is loaded for it."""
        return [one.rank for one in self.of_rank]

    def chosen(self, ranks: Collection[int]) -> Traces:
        """The traces of some ranks."""
        return Traces([one for one in self.of_rank if one.rank in ranks])

    def changed(self, changes: Mapping[int, Callable[[Trace], Trace]]) -> Traces:
        """The traces, each as its rank's function changes it."""
        return Traces([one.changed(changes[one.rank]) for one in self.of_rank])

    def each(self, function: Callable[..., Result], *about: Mapping[int, Any]) -> list[Result]:
        """What `function` makes of each trace and what each of `about` holds for its rank.

        Traces that are kept are loaded where it runs: in processes of this machine or on a cluster.
        """
        items = [(function, one, *(of[one.rank] for of in about)) for one in self.of_rank]
        if not self.are_kept:
            return [_of_rank(item) for item in items]
        return all_of(_of_rank, items, jobs=0 if len(items) > _FEW_RANKS else 1)

    def file_beside(self, about: bytes, suffix: str) -> Path:
        """Where what was made of all these traces is kept; its name is a digest of them and of `about`."""
        names = "".join(f"{one.rank}:{one.file.name}," for one in self.of_rank)
        digest = blake2b(about + names.encode(), digest_size=12).hexdigest()
        return self.of_rank[0].file.with_name(digest + suffix)


def _of_rank(asked: tuple[Any, ...]) -> Any:
    function, one, *about = asked
    return function(one.load(), *about)
