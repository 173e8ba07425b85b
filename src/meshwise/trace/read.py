"""Reading Kineto traces: any size, any age, and what is left of a broken one.

A trace file is a JSON object whose `traceEvents` array holds nearly all of it. Its events come by the piece
(see `decode`), and only numpy columns stay: memory is a few tens of bytes an event. What was inferred,
repaired or lost is said, as a `Problem` of the file.

Timestamps are microseconds with three decimals. Since 2024 they count from `baseTimeNanoseconds`, and
below 2**43 µs a float64 rounds to the right nanosecond; older files count from 1970, where it does not,
so there the digits themselves are read.
"""

import collections
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.each import Lost, each, is_on_cluster
from meshwise.core.errors import DataError
from meshwise.trace import events
from meshwise.trace.columns import RankTrace, Traces, columns_file, read_reasons, write_columns
from meshwise.trace.decode import NOTHING, Args, Notes, decoded_pieces
from meshwise.trace.events import CommunicationArgs, FileProblem, Ints, Kind, MemoryEvents, Trace

_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer)[-_. ]?(\d{1,9})(?!\d)", re.IGNORECASE)
_MAX_US = 2.0**52
_NO_TIME = np.iinfo(np.int64).min
_NO_ARGS: Any = Args()
_MOST_RANKS = 1 << 17  # collectives of the world list them
KEPT_BYTES = 1e8
"""From this size of all traces on, columns are kept and processes read."""
_Capture = tuple[Path, ...]
_Found = tuple[Trace | None, list[str]]
_Told = tuple[int | None, list[str]]
"""The rank of a capture (-1: not told; None: nothing is left of it), and what is wrong with its files."""
_FURTHER = re.compile(r"-again-(\d+)(?=\.json)")
_CALLS = "meshwise_collectives"
_CUT = Notes(truncated=True).sentences()[0]
_LEFT_OUT = "it is left out beside files that are whole; read it on its own"
_IDS_EACH = 1 << 40
"""More than there are launches in a part of a capture."""


def read_traces(paths: Iterable[str | Path]) -> tuple[Traces, list[FileProblem]]:
    """The traces of all ranks in `paths` (files, or folders searched throughout), sorted by rank.

    The parts of one capture are one trace; of other files of one rank, the first is taken. A file that cannot
    be read is a problem, not an error; a path that does not exist, or paths that hold no trace file at all,
    raise DataError. Of `KEPT_BYTES` and more, columns are kept (see `columns`) and one rank is in memory at a
    time, if polars is installed.
    """
    captures = captures_in(paths)
    sizes = ((path.stat().st_size, path.suffix) for one in captures for path in one)
    size_bytes = sum(size * (10 if suffix == ".gz" else 1) for size, suffix in sizes)
    if (size_bytes >= KEPT_BYTES or is_on_cluster()) and importlib.util.find_spec("polars"):
        return kept_traces(captures)
    traces, reasons = zip(*(read_trace(*files) for files in captures), strict=True)
    ranks = [None if trace is None else trace.rank for trace in traces]
    numbers, problems = _numbered(captures, list(zip(ranks, reasons, strict=True)))
    return Traces([RankTrace(rank, replace(traces[at], rank=rank)) for rank, at in numbers.items()]), problems


def kept_traces(captures: Sequence[_Capture]) -> tuple[Traces, list[FileProblem]]:
    """The same by columns; processes on all cores make those that are not kept yet."""
    files = [columns_file(capture) for capture in captures]
    found: dict[int, _Told] = {place: read_reasons(file) for place, file in enumerate(files) if file.exists()}
    missing = [place for place in range(len(files)) if place not in found]
    for i, answer in each(_keep, [(captures[place], files[place]) for place in missing]):
        if isinstance(answer, Lost):
            answer = None, [f"its reader: {answer.reason}; is there enough memory?"]
        found[missing[i]] = answer
    numbers, problems = _numbered(captures, [found[place] for place in range(len(files))])
    return Traces([RankTrace(rank, file=files[place]) for rank, place in numbers.items()]), problems


def _keep(asked: tuple[_Capture, Path]) -> _Told:
    """Keep the columns of one capture."""
    files, kept = asked
    trace, reasons = read_trace(*files)
    if trace is None:
        return None, reasons
    write_columns(trace, reasons, kept)
    return trace.rank, reasons


def _numbered(
    captures: Sequence[_Capture], found: Sequence[_Told]
) -> tuple[dict[int, int], list[FileProblem]]:
    """The place of the capture of each rank, in the order of ranks, and all problems, of what is `found`."""
    places: dict[int, int] = {}
    nameless: list[int] = []
    problems: list[FileProblem] = []
    is_whole = [rank is not None and _CUT not in reasons for rank, reasons in found]
    for place, (files, (rank, reasons)) in enumerate(zip(captures, found, strict=True)):
        problems += [FileProblem(str(files[0]), reason) for reason in reasons]
        if any(is_whole) and _CUT in reasons:
            problems.append(FileProblem(str(files[0]), _LEFT_OUT))
        elif rank == -1:
            nameless.append(place)
        elif rank is not None and places.setdefault(rank, place) != place:
            reason = f"rank {rank} is already read from another file; skipped, read it on its own"
            problems.append(FileProblem(str(files[0]), reason))
    for place in nameless:
        rank = next(rank for rank in itertools.count() if rank not in places)
        reason = f"neither file nor name tells the rank; taken as {rank}"
        problems.append(FileProblem(str(captures[place][0]), reason))
        places[rank] = place
    return dict(sorted(places.items())), problems


def captures_in(paths: Iterable[str | Path]) -> list[_Capture]:
    """The files of each capture in order; one that gave way to another profiler went on in further ones."""
    parts: dict[Path, list[tuple[int, Path]]] = collections.defaultdict(list)
    for path in dict.fromkeys(trace_files(paths)):
        further = _FURTHER.search(path.name)
        whole = path.with_name(_FURTHER.sub("", path.name))
        parts[whole].append((int(further[1]) if further else 0, path))
    return [tuple(path for _, path in sorted(found)) for found in parts.values()]


def trace_files(paths: Iterable[str | Path]) -> Iterator[Path]:
    """The trace files among `paths`: files as they are, folders searched for `*.json` and `*.json.gz`."""
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.name.endswith((".json", ".json.gz")))
            if not found:
                reason = "there is no *.json or *.json.gz file; name another folder"
                raise DataError(f"no trace in {path}: {reason}")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise DataError(f"no such trace: {path}; name a trace file or a folder of them")


def read_trace(path: Path, *further: Path) -> _Found:
    """The trace in one file and its further parts, and what is wrong.

    The rank is -1 if nothing tells it; there is no trace if nothing is left.
    """
    columns, notes = _Columns(), Notes()
    metadata: dict[str, Any] = {}
    groups: dict[str, tuple[int, ...]] = {}
    reasons = [f"{len(further)} further parts; not recorded: own profilers, swaps of tensors"] * bool(further)
    for part in (path, *further):
        own, about = Notes(), dict[str, Any]()
        for piece in decoded_pieces(part, own, about):
            columns.add(piece, own)
        columns.end_part(about)
        groups |= _groups(_said(about))
        calls = [*(metadata.get(_CALLS) or []), *(about.get(_CALLS) or [])]
        metadata = about | metadata | ({_CALLS: calls} if calls else {})
        reasons += own.sentences()
    if not metadata and not columns.parts and not columns.memory:
        return None, reasons or ["not a trace: it holds no traceEvents"]
    trace = columns.trace(path, metadata, groups, notes)
    if all(trace.labels[i][0] == "Trace" for i in trace.label) and not len(trace.memory.time_ns):
        return None, ["the trace holds no event (did the program end while its schedule waited?)", *reasons]
    return trace, reasons + notes.sentences()


class _Numbered(dict[Any, int]):
    """Keys in the order in which they were first asked for, each with its number."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


@dataclass(slots=True)
class _Columns:
    """Columns as they grow, piece by piece; every text is kept once."""

    labels: _Numbered = field(default_factory=_Numbered)
    tracks: _Numbered = field(default_factory=_Numbered)
    track_names: dict[tuple[Any, Any], str] = field(default_factory=dict)
    shapes: _Numbered = field(default_factory=_Numbered)
    parts: list[tuple[Ints, ...]] = field(default_factory=list)
    memory: list[tuple[Ints, ...]] = field(default_factory=list)
    communications: dict[int, CommunicationArgs] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_events: int = 0
    num_unpaired: int = 0
    num_parts: int = 0
    ended: tuple[int, int] = (0, 0)
    """How many of `parts` and of `memory` are of files that were read to their end."""

    def add(self, piece: list[Any], notes: Notes) -> None:
        """Take in a piece; complete events without a usable time are counted as lost."""
        by_phase: dict[str, list[Any]] = collections.defaultdict(list)
        for e in piece:
            by_phase[e.ph].append(e)
        self.num_unpaired += len(by_phase["B"]) + len(by_phase["E"])
        self._add_memory([e for e in by_phase["i"] if e.name == "[memory]" and e.args and e.ts is not None])
        for e in by_phase["M"]:
            if e.name == "thread_name" and e.args:
                self.track_names[e.pid, e.tid] = str(e.args.label or "")
        spans = [e for e in by_phase["X"] if e.cat != "Trace"]
        start, duration = _nanoseconds([e.ts for e in spans]), _nanoseconds([e.dur or 0 for e in spans])
        timed = (start != _NO_TIME) & (duration != _NO_TIME)
        if not timed.all():
            notes.num_lost += int((~timed).sum())
            spans = [e for e, is_timed in zip(spans, timed.tolist(), strict=True) if is_timed]
        if spans:
            self._add_spans(spans, start[timed], duration[timed])

    def _add_spans(self, spans: list[Any], start: Ints, duration: Ints) -> None:
        labels, tracks = self.labels, self.tracks
        args = [e.args or _NO_ARGS for e in spans]
        for i, (e, a) in enumerate(zip(spans, args, strict=True)):
            if a.collective is not None or a.group is not None:
                self.communications[self.num_events + i] = found = _communication(a)
                if found.group and (ranks := _ranks(a.ranks)):
                    self.groups[found.group] = ranks
            elif e.name in events.POINT_TO_POINT_CALLS:
                peer = _peer(a.concrete)
                self.communications[self.num_events + i] = CommunicationArgs(source=peer, destination=peer)
        self.parts.append(
            (
                *(start, duration),
                _ints([labels[e.cat, e.name] for e in spans]),
                _ints([tracks[e.pid, e.tid] for e in spans]),
                *(_whole([getattr(a, name) for a in args]) for name in ("stream", "device", "correlation")),
                _whole([a.external if a.external is not None else a.external_old for a in args]),
                _whole([a.size for a in args]),
                _ints([self._shape(e.name, a) for e, a in zip(spans, args, strict=True)]),
            )
        )
        self.num_events += len(spans)

    def _shape(self, name: Any, args: Any) -> int:
        if args.dims is NOTHING:
            return -1
        values = bytes(args.concrete) if "attention" in str(name) else b""
        return self.shapes[bytes(args.dims), bytes(args.types), values]

    def end_part(self, metadata: dict[str, Any]) -> None:
        """Count the times read since the last part from 1970; its ids of launches are those of no other."""
        base = _whole_number(metadata.get("baseTimeNanoseconds") or 0)
        base = base if 0 <= base < _MAX_US * 1000 else 0
        for columns in self.parts[self.ended[0] :]:
            start, *_, correlation, external, _, _ = columns
            start += base
            for ids in (correlation, external):
                ids[ids > 0] += self.num_parts * _IDS_EACH
        for columns in self.memory[self.ended[1] :]:
            columns[0][:] += base
        self.ended = len(self.parts), len(self.memory)
        self.num_parts += 1

    def _add_memory(self, piece: list[Any]) -> None:
        if not piece:
            return
        time = _nanoseconds([e.ts for e in piece])
        numbers = ("delta", "total", "reserved", "address")
        columns = (
            time,
            _ints([self.tracks[e.pid, e.tid] for e in piece]),
            *(_whole([getattr(e.args, name) for e in piece]) for name in numbers),
            _whole([-1 if e.args.device_type in (0, None) else _size(e.args.device_id) or 0 for e in piece]),
        )
        self.memory.append(tuple(column[time != _NO_TIME] for column in columns))

    def trace(
        self, path: Path, metadata: dict[str, Any], groups: dict[str, tuple[int, ...]], notes: Notes
    ) -> Trace:
        if self.num_unpaired:
            notes.others.append(f"{self.num_unpaired} begin/end events are left out; complete ones are read")
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        names = events.COLUMNS
        found = dict(zip(names, columns or [_ints([])] * len(names), strict=True))
        duration = found["duration_ns"]
        if (duration < 0).any():
            notes.others.append(f"{(duration < 0).sum()} events end before they start; taken as empty")
            found["duration_ns"] = duration = np.maximum(duration, 0)
        order = np.lexsort((-duration, found["start_ns"]))
        in_order: dict[str, Any] = {name: column[order] for name, column in found.items()}
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        labels = tuple((category or "", str(name)) for category, name in self.labels)
        info = _said(metadata)
        return Trace(
            path=path,
            rank=_rank(path, info, notes),
            world_size=_world_size(info, notes),
            backend=str(info.get("backend") or ""),
            host=str(metadata.get("host_name") or ""),
            groups=groups | self.groups,
            labels=labels,
            label_kind=np.array([events.kind_of(*label) for label in labels] or [Kind.OTHER], dtype=np.int8),
            tracks=tuple(self.tracks),
            track_names={i: self.track_names[t] for t, i in self.tracks.items() if t in self.track_names},
            **in_order,
            shapes=tuple((_text(dims), _text(types), _text(values)) for dims, types, values in self.shapes),
            communications={int(place[i]): args for i, args in self.communications.items()},
            memory=_memory(self.memory),
            metadata={k: v for k, v in metadata.items() if k != "traceEvents"},
        )


def _memory(parts: list[tuple[Ints, ...]]) -> MemoryEvents:
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [_ints([])] * 7
    time, *others = (column[np.argsort(columns[0], kind="stable")] for column in columns)
    return MemoryEvents(time, *others)


def _communication(args: Any) -> CommunicationArgs:
    texts = {"collective": args.collective, "dtype": args.dtype, "group": args.group or args.ranks}
    told: dict[str, Any] = {name: None if text is None else str(text) for name, text in texts.items()}
    for name in ("in_elements", "out_elements", "group_size", "sequence", "source", "destination"):
        told[name] = _size(getattr(args, name))
    return CommunicationArgs(**told)


def _peer(concrete: msgspec.Raw) -> int | None:
    """The other rank of a send or receive, from the operator's concrete inputs."""
    values = events.inputs(bytes(concrete))
    return _size(values[2]) if len(values) > 2 else None


def _rank(path: Path, info: dict[str, Any], notes: Notes) -> int:
    rank = _size(info.get("rank"))
    if rank is not None:
        return rank
    for part in (path.name, path.parent.name):
        if found := _RANK_IN_NAME.search(part):
            rank = int(found.group(1))
            notes.others.append(f"the file does not tell its rank; taken as {rank} from its name")
            return rank
    return -1


def _world_size(info: dict[str, Any], notes: Notes) -> int | None:
    size = _size(info.get("world_size"))
    if size is None or size <= _MOST_RANKS:
        return size
    notes.others.append(f"world_size is {size}, more than {_MOST_RANKS} ranks; taken as unknown")
    return None


def _said(metadata: dict[str, Any]) -> dict[str, Any]:
    """What PyTorch or meshwise's capture say of the job."""
    found = (metadata.get(source) for source in ("meshwise", "distributedInfo"))
    return {key: value for one in found if isinstance(one, dict) for key, value in one.items()}


def _groups(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group by its name; from PyTorch's list or meshwise's own table."""
    configured, captured = info.get("pg_config"), info.get("groups")
    listed = [one for one in configured if isinstance(one, dict)] if isinstance(configured, list) else []
    pairs = [(one.get("pg_name"), one.get("ranks")) for one in listed]
    pairs += captured.items() if isinstance(captured, dict) else []
    return {str(name): ranks for name, value in pairs if (ranks := _ranks(value))}


def _ranks(value: Any) -> tuple[int, ...] | None:
    """The ranks of a group as a list or its text; None where the text is cut short or no list of ranks."""
    if isinstance(value, str):
        return _listed_ranks(value)
    ranks = [_size(rank) for rank in value] if isinstance(value, list) else []
    known = tuple(rank for rank in ranks if rank is not None)
    return known if known and len(known) == len(ranks) else None


@cache
def _listed_ranks(text: str) -> tuple[int, ...] | None:
    """The ranks in a text, which every call of a group repeats."""
    return tuple(map(int, re.findall(r"\d+", text))) or None if "..." not in text else None


def _nanoseconds(values: list[Any]) -> Ints:
    """Microseconds as integer nanoseconds, Decimal and text digit by digit; _NO_TIME for no time."""
    array = np.array(values)
    if array.dtype.kind in "fi":
        usable = np.abs(array) < _MAX_US
        array = np.where(usable, array, 0)
        whole = np.floor(array)
        exact = whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000.0).astype(np.int64)
        return np.where(usable, exact, _NO_TIME)
    return _ints([_exact_nanoseconds(value) for value in values])


def _exact_nanoseconds(value: Any) -> int:
    try:
        exact = Decimal(value)
        return round(exact * 1000) if abs(exact) < _MAX_US else _NO_TIME
    except (TypeError, ValueError, InvalidOperation):
        return _NO_TIME


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _whole(values: list[Any]) -> NDArray[np.int64]:
    """Numbers of any writer as int64; -1 for none, ids beyond int64 wrapped, addresses in hex text read."""
    try:
        return _ints([-1 if value is None else value for value in values])
    except (OverflowError, ValueError, TypeError):
        return _ints([_whole_number(value) for value in values])


def _whole_number(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return -1
    if not isinstance(value, int | float) or value != value:
        return -1
    return (int(value) + 2**63) % 2**64 - 2**63


def _size(value: Any) -> int | None:
    number = -1 if value is None else _whole_number(value)
    return number if number >= 0 else None
