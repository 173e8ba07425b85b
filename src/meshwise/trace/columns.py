"""The columns of a large capture, kept beside its traces, and traces that are loaded from them one at a time.

A trace is decoded once. Its events are kept as a Parquet file in the folder `.meshwise` beside it, which is
a tenth of its size and loads ten times as fast; what is not a column (groups, arguments of communications) is
JSON in the file's metadata. The name of the file is a digest of the trace: its name, size and time, and what
it holds at its beginning, middle and end. So a second look reads columns alone, a capture that was stopped
half-way goes on, and a trace that has changed is read again. A file is written whole or not at all.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec
import numpy as np

from meshwise.core.each import all_of
from meshwise.core.errors import MissingExtraError
from meshwise.core.files import make_folder, whole_file
from meshwise.trace.events import COLUMNS, CommunicationArgs, Kind, MemoryEvents, Trace, kind_of

if TYPE_CHECKING:
    import polars

Result = TypeVar("Result")
FOLDER = ".meshwise"
_VERSION = b"1"
_SAMPLE_BYTES = 1 << 16
_FEW_RANKS = 16
"""Up to as many are analysed sooner than processes have started."""
_ABOUT, _REASONS = "meshwise.trace", "meshwise.reasons"
_MEMORY = tuple(field.name for field in fields(MemoryEvents))


class _About(msgspec.Struct):
    """What of a trace is no column; ranks that communications name are places in a list of them."""

    path: str
    rank: int
    world_size: int | None
    backend: str
    host: str
    groups: dict[str, tuple[int, ...]]
    labels: list[tuple[str, str]]
    tracks: list[tuple[Any, Any]]
    track_names: dict[int, str]
    shapes: list[tuple[str, str, str]]
    communications: dict[int, CommunicationArgs]
    ranks: list[tuple[int, ...] | None]
    metadata: dict[str, Any]


def polars_module() -> Any:
    """Polars, which writes and reads Parquet."""
    try:
        return importlib.import_module("polars")
    except ImportError:
        raise MissingExtraError('polars is not installed; run: pip install "meshwise[frames]"') from None


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
    pl = polars_module()
    ranks: dict[tuple[int, ...] | None, int] = {}
    communications = {
        event: replace(args, ranks=(ranks.setdefault(args.ranks, len(ranks)),))
        for event, args in trace.communications.items()
    }
    about = _About(
        **{name: getattr(trace, name) for name in _About.__struct_fields__ if hasattr(trace, name)}
        | {"path": str(trace.path), "communications": communications, "ranks": list(ranks)}
    )
    frame = pl.DataFrame({name: getattr(trace, name) for name in COLUMNS})
    kinds = [Kind(kind).name.lower() for kind in trace.label_kind.tolist()]
    texts = {
        "name": ([name for _, name in trace.labels], "label"),
        "category": ([category for category, _ in trace.labels], "label"),
        "kind": (kinds, "label"),
        "thread": ([trace.track_names.get(i, str(tid)) for i, (_, tid) in enumerate(trace.tracks)], "track"),
        "dims": ([dims for dims, _, _ in trace.shapes], "shape"),
    }
    for name, (values, by) in texts.items():
        place = pl.Series(np.where(getattr(trace, by) < 0, len(values), getattr(trace, by)))
        frame = frame.with_columns(
            pl.Series(name, [*values, None], dtype=pl.String).gather(place).alias(name)
        )
    make_folder(path.parent)
    if len(trace.memory.time_ns):
        with whole_file(path.with_suffix(".memory")) as file:
            pl.DataFrame({name: getattr(trace.memory, name) for name in _MEMORY}).write_parquet(file)
    metadata = {_ABOUT: _text(about), _REASONS: _text(list(reasons))}
    with whole_file(path) as file:
        frame.write_parquet(file, compression_level=1, metadata=metadata)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def read_reasons(path: Path) -> tuple[int, list[str]]:
    """The rank of a kept trace, and what was wrong with its file."""
    metadata = polars_module().read_parquet_metadata(path)
    return msgspec.json.decode(metadata[_ABOUT])["rank"], msgspec.json.decode(metadata[_REASONS])


def read_columns(path: Path) -> Trace:
    """The trace that is kept at `path`."""
    pl = polars_module()
    about = msgspec.json.decode(pl.read_parquet_metadata(path)[_ABOUT], type=_About)
    communications = {
        event: replace(args, ranks=about.ranks[args.ranks[0]]) if args.ranks else args
        for event, args in about.communications.items()
    }
    kinds = [kind_of(*label) for label in about.labels] or [Kind.OTHER]
    memory = path.with_suffix(".memory")
    held = (
        _arrays(pl.read_parquet(memory)) if memory.exists() else dict.fromkeys(_MEMORY, np.zeros(0, np.int64))
    )
    told = {
        name: getattr(about, name) for name in ("rank", "world_size", "backend", "host", "groups", "metadata")
    }
    return Trace(
        path=Path(about.path),
        labels=tuple(about.labels),
        label_kind=np.array(kinds, dtype=np.int8),
        tracks=tuple(about.tracks),
        track_names=about.track_names,
        shapes=tuple(about.shapes),
        communications=communications,
        memory=MemoryEvents(**held),
        **told,
        **_arrays(pl.read_parquet(path, columns=list(COLUMNS))),
    )


def _arrays(frame: polars.DataFrame) -> dict[str, Any]:
    return {name: frame[name].to_numpy() for name in frame.columns}


@dataclass(frozen=True, slots=True)
class KeptTrace:
    """A trace whose columns are kept in a file: its rank, and what is changed of it when it is loaded."""

    file: Path
    rank: int
    changes: tuple[Callable[[Trace], Trace], ...] = ()

    def load(self) -> Trace:
        """The trace with its events."""
        trace = replace(read_columns(self.file), rank=self.rank)
        for change in self.changes:
            trace = change(trace)
        return trace


class KeptTraces(Sequence[Trace]):
    """The traces of a capture, of which one at a time is in memory."""

    def __init__(self, kept: Sequence[KeptTrace]) -> None:
        self.kept = tuple(kept)
        self._load = lru_cache(maxsize=1)(lambda place: self.kept[place].load())

    def file_beside(self, about: bytes, suffix: str) -> Path:
        """Where what was made of all these traces is kept; its name is a digest of them and of `about`."""
        names = "".join(f"{one.rank}:{one.file.name}," for one in self.kept)
        digest = blake2b(about + names.encode(), digest_size=12).hexdigest()
        return self.kept[0].file.with_name(digest + suffix)

    def __len__(self) -> int:
        return len(self.kept)

    @overload
    def __getitem__(self, place: int) -> Trace: ...

    @overload
    def __getitem__(self, place: slice) -> KeptTraces: ...

    def __getitem__(self, place: int | slice) -> Trace | KeptTraces:
        if isinstance(place, slice):
            return KeptTraces(self.kept[place])
        return self._load(range(len(self))[place])

    def __iter__(self) -> Iterator[Trace]:
        return (one.load() for one in self.kept)


def ranks_of(traces: Sequence[Trace]) -> list[int]:
    """The rank of each trace; none is loaded for it."""
    kept = traces.kept if isinstance(traces, KeptTraces) else traces
    return [one.rank for one in kept]


def chosen_of(traces: Sequence[Trace], places: Sequence[int]) -> Sequence[Trace]:
    """The traces at some places."""
    if isinstance(traces, KeptTraces):
        return KeptTraces([traces.kept[place] for place in places])
    return [traces[place] for place in places]


def changed(traces: Sequence[Trace], changes: Mapping[int, Callable[[Trace], Trace]]) -> Sequence[Trace]:
    """The traces, each as its rank's function changes it."""
    if isinstance(traces, KeptTraces):
        return KeptTraces([replace(one, changes=(*one.changes, changes[one.rank])) for one in traces.kept])
    return [changes[one.rank](one) for one in traces]


def of_ranks(
    function: Callable[..., Result], traces: Sequence[Trace], *about: Mapping[int, Any]
) -> list[Result]:
    """What `function` makes of each trace and what each of `about` holds for its rank.

    Traces that are kept are loaded where the function runs: in processes of this machine or on a cluster.
    """
    if not isinstance(traces, KeptTraces):
        return [function(one, *(of[one.rank] for of in about)) for one in traces]
    items = [(function, one, *(of[one.rank] for of in about)) for one in traces.kept]
    return all_of(_of_kept, items, jobs=0 if len(items) > _FEW_RANKS else 1)


def _of_kept(asked: tuple[Any, ...]) -> Any:
    function, kept, *about = asked
    return function(kept.load(), *about)
