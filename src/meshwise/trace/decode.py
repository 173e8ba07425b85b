"""From the bytes of a trace file to typed events, piece by piece.

A file is never held whole: blocks are cut where one event ends and the next begins, and each piece is decoded
into typed structs. Damage stays local: in a piece that does not decode, every event is tried alone and
repaired where writers left quotes unescaped, bytes that are not UTF-8, `nan` and `inf` (JSON has neither).
What cannot be repaired, or has a field of another type than everybody else writes, is counted as lost.
"""

import functools
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshwise.core.refusals import told
from meshwise.trace.events import NAMES

_BLOCK_BYTES = 1 << 20
_PIECE_BYTES = 1 << 11
"""Of packed files: what is lost before a damage is less."""
_MOST_EVENT_BYTES = 1 << 23
_MOST_UNPACKED_BYTES, _MOST_RATIO = 1 << 30, 400
_EXACT_US = 2.0**43
_NUM_PROBED = 100
_PROBED_BYTES = 1 << 16
_EVENTS_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_ARRAY_START = re.compile(rb"\s*\[")
_DECIMAL_TS = re.compile(rb'"ts"\s*:\s*(?:"|\d+\.)')
_EVENT_OPEN = rb'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s|tts|tdur|cname)"\s*:'
_EVENT_START = re.compile(_EVENT_OPEN)
_EVENT_END = re.compile(rb"\}\s*,\s*\Z")
_EVENT_GAP = re.compile(rb"(?<=\})\s*,\s*(?=" + _EVENT_OPEN + rb")")
_ARRAY_END = re.compile(rb"\}\s*(,?\s*\])")
_STRING_VALUE = re.compile(rb'(:\s*")(.*?)("\s*(?:,\s*"[^"]*"\s*:|[}\]]))', re.DOTALL)
_LONE_QUOTE = re.compile(rb'(?<!\\)"')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
NOTHING = msgspec.Raw(b"")


def _arguments(table: str, kind: Any, missing: Any) -> list[Any]:
    return [(name, kind, msgspec.field(name=said, default=missing)) for name, said in NAMES[table].items()]


_INPUTS = _arguments("inputs", msgspec.Raw, NOTHING)
Args: Any = msgspec.defstruct("Args", [*_arguments("arguments", Any, None), *_INPUTS], gc=False)
"""The arguments that an analysis uses; `Any` where writers disagree about the type."""


class TraceEvent(msgspec.Struct, gc=False):
    """One event as everybody writes it; hand-made traces leave out that it is a complete one (`X`)."""

    ph: str = "X"
    cat: str | None = None
    name: str | float | None = ""
    ts: float | str | None = None
    dur: float | str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    args: Args | None = None


class ExactEvent(TraceEvent, gc=False):
    """The same, its times digit by digit."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode


@dataclass(slots=True)
class Notes:
    """What happened while one file was read."""

    exact: bool = False
    unreadable: str = ""
    truncated: bool = False
    num_lost: int = 0
    num_repaired: int = 0
    num_not_numbers: int = 0
    first_bad_byte: int | None = None
    others: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """All of it, for the reader of the result."""
        where = "" if self.first_bad_byte is None else f", the first near byte {self.first_bad_byte}"
        return told("trace file", notes=self, where=where) + self.others


def decoded_pieces(path: Path, notes: Notes, metadata: dict[str, Any]) -> Iterator[list[TraceEvent]]:
    """The events of a file by the thousand; fills `notes` and `metadata`."""
    blocks = _blocks(path, notes)
    buffer = b""
    start = None
    for block in blocks:
        buffer += block
        if start := _EVENTS_START.search(buffer) or _ARRAY_START.match(buffer):
            metadata |= _metadata(buffer[: start.start()].rstrip().rstrip(b",") + b"}")
            buffer = buffer[start.end() :]
            break
    if not start:
        if buffer.strip():
            notes.unreadable = notes.unreadable or "not a trace: no traceEvents in it"
        elif not notes.others:
            notes.unreadable = notes.unreadable or "the file is empty"
        return
    metadata.setdefault("traceEvents", True)
    offset, searched = start.end(), 0
    for block in blocks:
        buffer += block
        cut, searched = _last_gap(buffer, searched), len(buffer)
        if not cut and searched > _MOST_EVENT_BYTES:
            notes.others.append(f"no event ends in the {searched} bytes from {offset} on; the rest is left")
            return
        if cut:
            searched = 0
            yield _decode_piece(buffer[:cut], offset, notes)
            offset += cut + 1
            buffer = buffer[cut + 1 :].lstrip(b", \n\r\t")
    events, trailer = _last_events(buffer, notes)
    if events:
        yield _decode_piece(events, offset, notes)
    metadata |= _metadata(b"{" + trailer.lstrip(b", \r\n\t")) if trailer.strip(b"} \r\n\t") else {}


def _blocks(path: Path, notes: Notes) -> Iterator[bytes]:
    """The unpacked bytes of a file; stops with a note where a damaged one ends."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                yield from _unpacked(file, notes)
            else:
                yield from iter(functools.partial(file.read, _BLOCK_BYTES), b"")
    except OSError as error:
        notes.unreadable = f"cannot be read: {error.strerror}"


def _unpacked(file: BinaryIO, notes: Notes) -> Iterator[bytes]:
    """The content of a gzip file of one or several members, up to its end or its first damage."""
    block, unpacked, packed = bytearray(), 0, gzip.GzipFile(fileobj=file)
    most = max(_MOST_UNPACKED_BYTES, _MOST_RATIO * os.fstat(file.fileno()).st_size)
    try:
        while unpacked <= most and (piece := packed.read1(_PIECE_BYTES)):
            block += piece
            if len(block) >= _BLOCK_BYTES:
                unpacked += len(block)
                yield bytes(block)
                block.clear()
    except EOFError:
        notes.truncated = True
    except (zlib.error, gzip.BadGzipFile):
        notes.others.append("the gzip data is damaged; only what comes before the damage is used")
    if unpacked > most:
        notes.others.append(f"it unpacks to more than {_MOST_RATIO} times its size; the rest is left")
    yield bytes(block)


def _last_gap(buffer: bytes, searched: int = 0) -> int:
    """Where the last complete event of `buffer` ends: behind its `}`; 0 if no boundary is in sight.

    What was `searched` before holds none.
    """
    position, least = buffer.rfind(b"{"), max(0, searched - 64)
    while position > least:
        if _EVENT_START.match(buffer, position):
            end = _EVENT_END.search(buffer, max(0, position - 64), position)
            if end:
                return end.start() + 1
        position = buffer.rfind(b"{", 0, position)
    return 0


def _last_events(buffer: bytes, notes: Notes) -> tuple[bytes, bytes]:
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
            if _rescue(text, TraceEvent) is None:
                continue
        return buffer[: end.start() + 1], buffer[end.end() :]
    notes.truncated = True
    return buffer[:last], b""


def _decode_piece(piece: bytes, offset: int, notes: Notes) -> list[Any]:
    """Events of a piece of the array, exact to the nanosecond."""
    try:
        return _decoded(piece, notes)
    except _BROKEN:
        cured, count = _NOT_A_NUMBER.subn(b"null", piece)
        notes.num_not_numbers += count
        with suppress(*_BROKEN):
            if count:
                return _decoded(cured, notes)
        return list(_rescued(cured, offset, notes))


def _decoded(piece: bytes, notes: Notes) -> list[Any]:
    text = b"[" + piece + b"]"
    events = _decode_exact(text) if notes.exact else _decode(text)
    if not notes.exact and _needs_digits(events) and _DECIMAL_TS.search(piece, 0, _PROBED_BYTES):
        notes.exact = True
        return _decode_exact(text)
    return events


def _needs_digits(events: list[Any]) -> bool:
    """Whether these times, if they have decimals, are beyond what a float64 can hold."""
    times = [e.ts for e in events[:_NUM_PROBED] if e.ts is not None]
    return any(isinstance(ts, str) or abs(ts) >= _EXACT_US for ts in times)


def _rescued(piece: bytes, offset: int, notes: Notes) -> Iterator[Any]:
    """The events of a damaged piece, one by one."""
    event_type = ExactEvent if notes.exact else TraceEvent
    for text in _alone(piece):
        try:
            yield msgspec.json.decode(text, type=event_type)
            continue
        except _BROKEN:
            if notes.first_bad_byte is None:
                notes.first_bad_byte = offset + max(0, piece.find(text))
        saved = _rescue(text, event_type)
        notes.num_lost += saved is None
        notes.num_repaired += saved is not None
        if saved is not None:
            yield saved


def _alone(piece: bytes) -> Iterator[bytes]:
    """The texts of the events of a piece, apart."""
    for text in _EVENT_GAP.split(piece):
        try:
            yield from map(bytes, msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw]))
        except _BROKEN:
            yield text


def _rescue(text: bytes, event_type: Any) -> Any:
    """A damaged event, its UTF-8, quotes and control characters repaired; None if in vain."""
    text = _NOT_A_NUMBER.sub(b"null", text.decode("utf-8", "replace").encode())

    def escape(match: re.Match[bytes]) -> bytes:
        return match.group(1) + _CONTROL.sub(b" ", _LONE_QUOTE.sub(rb"\"", match.group(2))) + match.group(3)

    for candidate in (text, _STRING_VALUE.sub(escape, text)):
        with suppress(*_BROKEN):
            return msgspec.json.decode(candidate, type=event_type)
    return None


def _metadata(text: bytes) -> dict[str, Any]:
    """What a file says outside its events; of a damaged head at least rank and base time."""
    try:
        found = msgspec.json.decode(text.decode("utf-8", "replace"))
        return found if isinstance(found, dict) else {}
    except _BROKEN:
        fields: dict[str, Any] = {}
        if rank := re.search(rb'"rank"\s*:\s*(\d{1,18})', text):
            fields["distributedInfo"] = {"rank": int(rank.group(1))}
        if base := re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})', text):
            fields["baseTimeNanoseconds"] = int(base.group(1))
        return fields
