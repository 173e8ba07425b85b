"""Reading Kineto traces: any size, any age, and what is left of a broken one.

A trace file is a JSON object whose `traceEvents` array holds nearly all of it. It is never held whole:
blocks are cut where one event ends and the next begins, each piece is decoded into typed structs, and
only numpy columns stay. So memory is a few tens of bytes an event, a gzip file is read as it unpacks, and
damage stays local: in a piece that does not decode, every event is tried alone, repaired where old
writers left quotes unescaped or bytes that are not UTF-8, and counted as lost where that fails. What was
inferred, repaired or lost is said, as a `Problem` of the file.

Timestamps are microseconds with three decimals. Since 2024 they count from `baseTimeNanoseconds`, and
below 2**43 µs a float64 rounds to the right nanosecond; older files count from 1970, where it does not,
so there the digits themselves are read.
"""

from __future__ import annotations

import collections
import functools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.errors import DataError
from meshwise.trace.events import CommunicationArgs, Ints, Kind, Memory, Problem, Trace, kind_of

_BLOCK_BYTES = 1 << 23
_EXACT_US = 2.0**43
_NUM_PROBED = 100
_PROBED_BYTES = 1 << 16
_EVENTS_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_DECIMAL_TS = re.compile(rb'"ts"\s*:\s*(?:"|\d+\.)')
_EVENT_OPEN = rb'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s|tts|tdur|cname)"\s*:'
_EVENT_START = re.compile(_EVENT_OPEN)
_EVENT_END = re.compile(rb"\}\s*,\s*\Z")
_EVENT_GAP = re.compile(rb"(?<=\})\s*,\s*(?=" + _EVENT_OPEN + rb")")
_ARRAY_END = re.compile(rb"\}\s*\]")
_STRING_VALUE = re.compile(rb'(:\s*")(.*?)("\s*(?:,\s*"[^"]*"\s*:|[}\]]))', re.DOTALL)
_LONE_QUOTE = re.compile(rb'(?<!\\)"')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer)[-_. ]?(\d+)", re.IGNORECASE)


_NOTHING = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False):
    """The arguments that an analysis uses; `Any` where writers disagree about the type."""

    stream: Any = None
    device: Any = None
    correlation: Any = None
    external: Any = msgspec.field(name="External id", default=None)
    external_old: Any = msgspec.field(name="external id", default=None)
    size: Any = msgspec.field(name="bytes", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_NOTHING)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group: Any = msgspec.field(name="Process Group Name", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    sequence: Any = msgspec.field(name="Seq", default=None)
    delta: Any = msgspec.field(name="Bytes", default=None)
    total: Any = msgspec.field(name="Total Allocated", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)
    label: Any = msgspec.field(name="name", default=None)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | float | None = ""
    ts: float | str | None = None
    dur: float | str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: _Args | None = None


class _ExactEvent(_Event, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_NO_ARGS = _Args()
_decode = msgspec.json.Decoder(list[_Event]).decode
_decode_exact = msgspec.json.Decoder(list[_ExactEvent]).decode
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError)


def read_traces(paths: Iterable[str | Path]) -> tuple[list[Trace], list[Problem]]:
    """The traces of all ranks in `paths` (files, or folders searched throughout), sorted by rank.

    A file that cannot be read is a problem, not an error; a path that does not exist, or paths that hold
    no trace file at all, raise DataError.
    """
    traces: list[Trace] = []
    problems: list[Problem] = []
    nameless: list[Trace] = []
    for path in trace_files(paths):
        trace, found = read_trace(path)
        problems += [Problem(str(path), reason) for reason in found]
        if trace is None:
            continue
        if trace.rank < 0:
            nameless.append(trace)
        elif any(trace.rank == other.rank for other in traces):
            reason = f"rank {trace.rank} is already read from another file; skipped, read it on its own"
            problems.append(Problem(str(path), reason))
        else:
            traces.append(trace)
    for trace in nameless:
        rank = _free_rank({other.rank for other in traces})
        problems.append(Problem(str(trace.path), f"neither file nor name tells the rank; taken as {rank}"))
        traces.append(replace(trace, rank=rank))
    return sorted(traces, key=lambda trace: trace.rank), problems


def trace_files(paths: Iterable[str | Path]) -> list[Path]:
    """The trace files among `paths`: files as they are, folders searched for `*.json` and `*.json.gz`."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.name.endswith((".json", ".json.gz")))
            if not found:
                raise DataError(
                    f"no trace in {path}: there is no *.json or *.json.gz file; name another folder"
                )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"no such trace: {path}; name a trace file or a folder of them")
    return list(dict.fromkeys(files))


def read_trace(path: Path) -> tuple[Trace | None, list[str]]:
    """The trace in one file (rank -1 if nothing tells it; None if nothing is left), and what is wrong."""
    notes = _Notes()
    columns = _Columns()
    metadata: dict[str, Any] = {}
    for events in decoded_pieces(path, notes, metadata, _decode_piece):
        columns.add(events)
    if not metadata and not len(columns):
        return None, notes.sentences() or ["not a trace: it holds no traceEvents"]
    trace = columns.trace(path, metadata, notes)
    if not len(trace) and not len(trace.memory.time_ns):
        return None, ["the trace holds no event", *notes.sentences()]
    return trace, notes.sentences()


@dataclass(slots=True)
class _Notes:
    """What happened while one file was read."""

    exact: bool = False
    unreadable: str = ""
    truncated: bool = False
    num_lost: int = 0
    num_repaired: int = 0
    first_bad_byte: int | None = None
    others: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        found = [self.unreadable] if self.unreadable else []
        if self.truncated:
            found.append("the file ends in the middle; what comes before is used")
        where = f", the first near byte {self.first_bad_byte}"
        if self.num_repaired:
            found.append(f"{self.num_repaired} events held bad UTF-8 or quotes and were repaired{where}")
        if self.num_lost:
            found.append(f"{self.num_lost} events could not be read and are left out{where}")
        return found + self.others


def decoded_pieces(
    path: Path, notes: _Notes, metadata: dict[str, Any], decode: Callable[[bytes, int, _Notes], list[Any]]
) -> Iterator[list[Any]]:
    """The events of a file by the thousand, as `decode` makes them; fills `notes` and `metadata`."""
    blocks = _blocks(path, notes)
    buffer = b""
    start = None
    for block in blocks:
        buffer += block
        if start := _EVENTS_START.search(buffer):
            metadata |= _metadata(buffer[: start.start()].rstrip().rstrip(b",") + b"}")
            buffer = buffer[start.end() :]
            break
        if buffer.lstrip()[:1] == b"[":
            start = re.match(rb"\s*\[", buffer)
            buffer = buffer.lstrip()[1:]
            break
    if not start:
        if not notes.unreadable:
            notes.unreadable = (
                "the file is empty" if not buffer.strip() else "not a trace: no traceEvents in it"
            )
        return
    metadata.setdefault("traceEvents", True)
    offset = start.end()
    for block in blocks:
        buffer += block
        cut = _last_gap(buffer)
        if cut:
            yield decode(buffer[:cut], offset, notes)
            offset += cut + 1
            buffer = buffer[cut + 1 :].lstrip(b", \n\r\t")
    events, trailer = _last_events(buffer, notes)
    if events:
        yield decode(events, offset, notes)
    metadata |= _metadata(b"{" + trailer.lstrip(b", \r\n\t")) if trailer.strip(b"} \r\n\t") else {}


def _blocks(path: Path, notes: _Notes) -> Iterator[bytes]:
    """The unpacked bytes of a file; stops with a note where a damaged one ends."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                yield from _unpacked(file)
            else:
                yield from iter(functools.partial(file.read, _BLOCK_BYTES), b"")
    except OSError as error:
        notes.unreadable = f"cannot be read: {error.strerror}"
    except zlib.error:
        notes.truncated = True
    except EOFError:
        notes.truncated = True


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    engine = zlib.decompressobj(wbits=31)
    for packed in iter(functools.partial(file.read, _BLOCK_BYTES // 8), b""):
        while packed:
            yield engine.decompress(packed, _BLOCK_BYTES)
            packed = engine.unconsumed_tail or engine.unused_data
            if engine.eof and packed:
                engine = zlib.decompressobj(wbits=31)
    if not engine.eof:
        raise EOFError


def _last_gap(buffer: bytes) -> int:
    """Where the last complete event of `buffer` ends: behind its `}`; 0 if no boundary is in sight."""
    position = buffer.rfind(b"{")
    while position > 0:
        if _EVENT_START.match(buffer, position):
            end = _EVENT_END.search(buffer, max(0, position - 64), position)
            if end:
                return end.start() + 1
        position = buffer.rfind(b"{", 0, position)
    return 0


def _last_events(buffer: bytes, notes: _Notes) -> tuple[bytes, bytes]:
    """The rest of the array split into its events and what follows the array's end."""
    if buffer.lstrip()[:1] in (b"]", b""):
        notes.truncated |= not buffer.strip()
        return b"", buffer.lstrip()[1:]
    last = _last_gap(buffer)
    for end in _ARRAY_END.finditer(buffer, last):
        text = buffer[last : end.start() + 1].lstrip(b", \r\n\t")
        try:
            msgspec.json.decode(b"[" + text + b"]")
        except _BROKEN:
            if not _repaired(text):
                continue
        return buffer[: end.start() + 1], buffer[end.end() :]
    notes.truncated = True
    return buffer[:last], b""


def _decode_piece(piece: bytes, offset: int, notes: _Notes) -> list[Any]:
    """Events of a piece of the array, exact to the nanosecond."""
    text = b"[" + piece + b"]"
    try:
        events = _decode_exact(text) if notes.exact else _decode(text)
        if not notes.exact and _needs_digits(events) and _DECIMAL_TS.search(piece, 0, _PROBED_BYTES):
            notes.exact = True
            return _decode_exact(text)
        return events
    except _BROKEN:
        return _rescued(piece, offset, notes, _ExactEvent if notes.exact else _Event)


def _needs_digits(events: list[Any]) -> bool:
    """Whether these times, if they have decimals, are beyond what a float64 can hold."""
    times = [e.ts for e in events[:_NUM_PROBED] if e.ts is not None]
    return any(isinstance(ts, str) or abs(ts) >= _EXACT_US for ts in times)


def _rescued(piece: bytes, offset: int, notes: _Notes, event_type: Any) -> list[Any]:
    """The events of a damaged piece, one by one."""
    events = []
    for text in _EVENT_GAP.split(piece):
        try:
            events.append(msgspec.json.decode(text, type=event_type))
            continue
        except _BROKEN:
            if notes.first_bad_byte is None:
                notes.first_bad_byte = offset + piece.find(text)
        repaired = _repaired(text)
        if repaired:
            notes.num_repaired += 1
            events.append(msgspec.json.decode(repaired, type=event_type))
        else:
            notes.num_lost += 1
    return events


def _repaired(text: bytes) -> bytes:
    """An event made readable: bad UTF-8 replaced, stray quotes and control characters escaped; or nothing."""
    text = text.decode("utf-8", "replace").encode()

    def escape(match: re.Match[bytes]) -> bytes:
        inner = _LONE_QUOTE.sub(rb"\"", match.group(2))
        return match.group(1) + _CONTROL.sub(b" ", inner) + match.group(3)

    for candidate in (text, _STRING_VALUE.sub(escape, text)):
        try:
            msgspec.json.decode(candidate, type=_Event)
        except _BROKEN:
            continue
        return candidate
    return b""


def _metadata(text: bytes) -> dict[str, Any]:
    """What a file says outside its events; of a damaged head at least rank and base time."""
    try:
        found = msgspec.json.decode(text.decode("utf-8", "replace"))
        return found if isinstance(found, dict) else {}
    except _BROKEN:
        fields: dict[str, Any] = {}
        if rank := re.search(rb'"rank"\s*:\s*(\d+)', text):
            fields["distributedInfo"] = {"rank": int(rank.group(1))}
        if base := re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d+)', text):
            fields["baseTimeNanoseconds"] = int(base.group(1))
        return fields


@dataclass(slots=True)
class _Columns:
    """Columns as they grow, piece by piece; every text is kept once."""

    labels: dict[tuple[Any, Any], int] = field(default_factory=dict)
    tracks: dict[tuple[Any, Any], int] = field(default_factory=dict)
    track_names: dict[tuple[Any, Any], str] = field(default_factory=dict)
    shapes: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    parts: list[tuple[Ints, ...]] = field(default_factory=list)
    memory: list[tuple[Ints, ...]] = field(default_factory=list)
    communications: dict[int, CommunicationArgs] = field(default_factory=dict)
    num_events: int = 0
    num_events_of_memory: int = 0
    num_unpaired: int = 0

    def __len__(self) -> int:
        return self.num_events + self.num_events_of_memory

    def add(self, events: list[Any]) -> None:
        by_phase: dict[str, list[Any]] = collections.defaultdict(list)
        for e in events:
            by_phase[e.ph].append(e)
        self.num_unpaired += len(by_phase["B"]) + len(by_phase["E"])
        self._add_memory([e for e in by_phase["i"] if e.name == "[memory]" and e.args and e.ts is not None])
        for e in by_phase["M"]:
            if e.name == "thread_name" and e.args:
                self.track_names[e.pid, e.tid] = str(e.args.label or "")
        spans = [e for e in by_phase["X"] if e.ts is not None and e.cat != "Trace"]
        if not spans:
            return
        labels, tracks = self.labels, self.tracks
        args = [e.args or _NO_ARGS for e in spans]
        for i, a in enumerate(args):
            if a.collective is not None or a.group is not None:
                self.communications[self.num_events + i] = _communication(a)
        self.parts.append(
            (
                _nanoseconds([e.ts for e in spans]),
                _nanoseconds([e.dur or 0 for e in spans]),
                _ints([labels.setdefault((e.cat, e.name), len(labels)) for e in spans]),
                _ints([tracks.setdefault((e.pid, e.tid), len(tracks)) for e in spans]),
                _whole([a.stream for a in args]),
                _whole([a.device for a in args]),
                _whole([a.correlation for a in args]),
                _whole([a.external if a.external is not None else a.external_old for a in args]),
                _whole([a.size for a in args]),
                _ints([-1 if a.dims is _NOTHING else self._shape(a) for a in args]),
            )
        )
        self.num_events += len(spans)

    def _shape(self, args: _Args) -> int:
        return self.shapes.setdefault((bytes(args.dims), bytes(args.types)), len(self.shapes))

    def _add_memory(self, events: list[Any]) -> None:
        if events:
            columns = (
                _nanoseconds([e.ts for e in events]),
                _ints([self.tracks.setdefault((e.pid, e.tid), len(self.tracks)) for e in events]),
                _whole([e.args.delta for e in events]),
                _whole([e.args.total for e in events]),
                _ints([e.args.device_type not in (0, None) for e in events]),
            )
            self.memory.append(columns)
            self.num_events_of_memory += len(events)

    def trace(self, path: Path, metadata: dict[str, Any], notes: _Notes) -> Trace:
        if self.num_unpaired:
            notes.others.append(
                f"{self.num_unpaired} begin/end events are left out; only complete ones are read"
            )
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)] or [_ints([])] * 10
        start, duration = columns[0], columns[1]
        if (duration < 0).any():
            notes.others.append(f"{(duration < 0).sum()} events end before they start; taken as empty")
            duration = np.maximum(duration, 0)
        base = _whole_number(metadata.get("baseTimeNanoseconds") or 0)
        order = np.lexsort((-duration, start))
        start, duration, label, track, stream, device, correlation, external, size, shape = (
            column[order] for column in (start + base, duration, *columns[2:])
        )
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        labels = tuple((category or "", str(name)) for category, name in self.labels)
        info: dict[str, Any] = {}
        for source in ("meshwise", "distributedInfo"):
            info |= found if isinstance(found := metadata.get(source), dict) else {}
        groups = _groups(info)
        return Trace(
            path=path,
            rank=_rank(path, info, notes),
            world_size=_size(info.get("world_size")),
            backend=str(info.get("backend") or ""),
            host=str(metadata.get("host_name") or ""),
            groups=groups,
            labels=labels,
            label_kind=np.array([kind_of(*label) for label in labels] or [Kind.OTHER], dtype=np.int8),
            tracks=tuple(self.tracks),
            track_names={i: self.track_names[t] for t, i in self.tracks.items() if t in self.track_names},
            start_ns=start,
            duration_ns=duration,
            label=label,
            track=track,
            stream=stream,
            device=device,
            correlation=correlation,
            external_id=external,
            size_bytes=size,
            shape=shape,
            shapes=tuple((dims.decode(), types.decode()) for dims, types in self.shapes),
            communications={int(place[i]): args for i, args in self.communications.items()},
            memory=_memory(self.memory, base),
            metadata={k: v for k, v in metadata.items() if k != "traceEvents"},
        )


def _memory(parts: list[tuple[Ints, ...]], base_ns: int) -> Memory:
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [_ints([])] * 5
    order = np.argsort(columns[0], kind="stable")
    time, track, delta, total, on_device = (column[order] for column in columns)
    return Memory(time + base_ns, track, delta, total, on_device.astype(bool))


def _communication(args: _Args) -> CommunicationArgs:
    ranks = args.ranks
    if isinstance(ranks, str):
        ranks = [int(x) for x in re.findall(r"\d+", ranks)] if "..." not in ranks else None
    return CommunicationArgs(
        collective=None if args.collective is None else str(args.collective),
        in_elements=_size(args.in_elements),
        out_elements=_size(args.out_elements),
        dtype=None if args.dtype is None else str(args.dtype),
        group=None if args.group is None else str(args.group),
        group_size=_size(args.group_size),
        ranks=tuple(ranks) if isinstance(ranks, list) and ranks else None,
        sequence=_size(args.sequence),
    )


def _rank(path: Path, info: dict[str, Any], notes: _Notes) -> int:
    rank = _size(info.get("rank"))
    if rank is not None:
        return rank
    for part in (path.name, path.parent.name):
        if found := _RANK_IN_NAME.search(part):
            notes.others.append(
                f"the file does not tell its rank; taken as {int(found.group(1))} from its name"
            )
            return int(found.group(1))
    return -1


def _groups(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = {}
    for group in info.get("pg_config") or []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks:
            groups[str(group.get("pg_name"))] = tuple(int(rank) for rank in ranks)
    captured = info.get("groups")
    if isinstance(captured, dict):
        groups |= {name: tuple(ranks) for name, ranks in captured.items()}
    return groups


def _free_rank(taken: set[int]) -> int:
    rank = 0
    while rank in taken:
        rank += 1
    return rank


def _nanoseconds(values: list[Any]) -> Ints:
    """Microseconds as integer nanoseconds; Decimal and text are taken digit by digit."""
    array = np.array(values)
    if array.dtype.kind in "fi":
        whole = np.floor(array)
        return whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000.0).astype(np.int64)
    return _ints([round(Decimal(value) * 1000) for value in values])


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _whole(values: list[Any]) -> NDArray[np.int64]:
    """Numbers of any writer as int64; -1 for none, ids beyond int64 wrapped, addresses in hex text read."""
    try:
        return np.array([-1 if value is None else value for value in values], dtype=np.int64)
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
