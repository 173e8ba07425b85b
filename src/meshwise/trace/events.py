"""What a trace holds once it is read: the events of one rank as columns.

An event is an interval [start, start + duration) on a track. A track is a CPU thread or a device stream.
Times are integers, nanoseconds since the epoch of the rank's own clock, so that nothing is rounded: the
file's microseconds carry three decimals, and a float64 of today's date has no room for them.

Every event has a kind. Three kinds are work of the device: `COMMUNICATION` (kernels of NCCL, RCCL, HCCL,
and those that engines and PyTorch's symmetric memory have of their own), `MEMORY` (Memcpy and Memset) and
`COMPUTE` (all other kernels). On a rank without a device the work is done by `CPU_OP` events, and
communication is what gloo's worker threads record (`HOST_COMMUNICATION`).
"""

import enum
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.files import read_catalog

Ints = NDArray[np.int64]
Result = TypeVar("Result")
Patterns = dict[str, re.Pattern[str]]
NAMES = read_catalog("trace_names.toml")
"""How traces name what they show."""
_KINDS = {category: kind for kind, categories in NAMES["categories"].items() for category in categories}


class Kind(enum.IntEnum):
    """What an event is, decided by its category and name alone."""

    OTHER = 0
    COMPUTE = 1
    COMMUNICATION = 2
    MEMORY = 3
    CPU_OP = 4
    ANNOTATION = 5
    RUNTIME = 6
    HOST_COMMUNICATION = 7
    DEVICE_ANNOTATION = 8


STARTS_TRANSFER = ("c10d::", "_c10d_functional", "c10d_functional", "record_param_comms")
"""How operators that only start or await a transfer are named."""
COMPILES = "(dynamo_timed)"
"""How the names of operators end that compile others (torch.compile)."""
POINT_TO_POINT_CALLS = ("c10d::send", "c10d::recv_")
"""Operators whose third argument is the other rank."""
DEVICE_KINDS = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.MEMORY)


def patterns(table: Mapping[str, list[str]]) -> Patterns:
    """What is of each name of a table: all that has one of its words, in letters of either case."""
    return {name: re.compile("|".join(words), re.IGNORECASE) for name, words in table.items()}


def named_by(among: Patterns, text: str) -> str:
    """The first name among these whose words are in `text`; empty for none."""
    return next((name for name, pattern in among.items() if pattern.search(text)), "")


_CLASSES = patterns(NAMES["classes"])


def class_of_kernel(name: str) -> str:
    """The class of work that the name of a kernel tells; empty for none."""
    return named_by(_CLASSES, name)


_NAMED = {kind: patterns(table) for kind, table in NAMES["named"].items()}


def kind_of(category: str, name: str) -> Kind:
    """The kind of an event from its Kineto category (any spelling since 2020) and its name."""
    kind = _KINDS.get(category.lower(), "other")
    return Kind[(named_by(_NAMED.get(kind, {}), name) or kind).upper()]


def collective_kind(name: str) -> str:
    """The collective that a kernel or call performs, by its name; `unknown` where the name hides it."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for part, kind in NAMES["collectives"].items() if part in plain), "unknown")


def is_shape(sizes: list[Any]) -> bool:
    """Whether a tensor can have these sizes: PyTorch counts its elements in 64 bits."""
    return all(type(size) is int and 0 <= size < 2**63 for size in sizes) and math.prod(sizes) < 2**63


def inputs(text: bytes | str) -> list[Any]:
    """What a trace lists of an operator's inputs (JSON); empty where it is no list that can be read."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class CommunicationArgs:
    """What the trace itself says of one communication; None where it says nothing.

    The ranks of its `group` are in `Trace.groups`; a group without a name is called by them.
    """

    collective: str | None = None
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    group: str | None = None
    group_size: int | None = None
    sequence: int | None = None
    source: int | None = None
    """Of a message between two ranks: who sends, who receives."""
    destination: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MemoryEvents:
    """Allocations (positive) and frees (negative bytes), in the order of time."""

    time_ns: Ints
    track: Ints
    delta_bytes: Ints
    total_bytes: Ints
    reserved_bytes: Ints
    address: Ints
    device: Ints
    """-1 for the host."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Trace:
    """The events of one rank, sorted by start (an enclosing event before the enclosed)."""

    path: Path
    rank: int
    world_size: int | None
    backend: str
    host: str
    groups: dict[str, tuple[int, ...]]
    labels: tuple[tuple[str, str], ...]
    """(category, name) of each label."""
    label_kind: NDArray[np.int8]
    tracks: tuple[tuple[Any, Any], ...]
    """(pid, tid) of each track as the file names them."""
    track_names: dict[int, str]
    start_ns: Ints
    duration_ns: Ints
    label: Ints
    track: Ints
    stream: Ints
    device: Ints
    correlation: Ints
    external_id: Ints
    size_bytes: Ints
    shape: Ints
    shapes: tuple[tuple[str, str, str], ...]
    """(input dims, types, of attention also values) as JSON text; `shape` points here, -1 for none."""
    communications: dict[int, CommunicationArgs]
    memory: MemoryEvents
    metadata: dict[str, Any] = field(default_factory=dict)
    selected: NDArray[np.bool_] | None = None
    """The events whose work counts (see `steps`); None for all."""
    window: tuple[Ints, Ints] | None = None
    """When chosen steps begin and end: whatever runs then counts as their time; None for when work runs."""

    @property
    def kind(self) -> NDArray[np.int8]:
        """The kind of every event."""
        return self.label_kind[self.label]

    @property
    def end_ns(self) -> Ints:
        """The end of every event."""
        return self.start_ns + self.duration_ns

    @property
    def has_device(self) -> bool:
        """Whether any device stream was recorded."""
        return bool(np.isin(self.label_kind, DEVICE_KINDS).any())

    @property
    def device_properties(self) -> dict[str, Any]:
        """What the trace says of its first device; empty where it does not."""
        found = self.metadata.get("deviceProperties")
        return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}

    def name(self, event: int) -> str:
        """The name of event number `event`."""
        return self.labels[self.label[event]][1]

    def tensors(self, shape: int) -> list[tuple[list[int], str]]:
        """Dims and dtype of the plain tensors among the inputs; `shape` is from the column of that name."""
        if shape < 0:
            return []
        dims, types = map(inputs, self.shapes[shape][:2])
        tensors = ((dim, str(dtype)) for dim, dtype in zip(dims, types, strict=False))
        return [(dim, dtype) for dim, dtype in tensors if isinstance(dim, list) and is_shape(dim)]

    def __len__(self) -> int:
        return len(self.start_ns)

    def named(self, is_meant: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a name that is meant."""
        return np.array([is_meant(name) for _, name in self.labels] or [False])[self.label]

    def where(self, *kinds: Kind) -> Ints:
        """The numbers of the events of these kinds, in the order of time."""
        return np.flatnonzero(np.isin(self.label_kind, kinds)[self.label])


def once_a_trace(function: Callable[[Trace], Result]) -> Callable[[Trace], Result]:
    """`function`, called once for each trace; what it returns is kept as long as the trace."""
    known: WeakKeyDictionary[Trace, Result] = WeakKeyDictionary()

    @wraps(function)
    def kept(trace: Trace) -> Result:
        if trace not in known:
            known[trace] = function(trace)
        return known[trace]

    return kept


COLUMNS = tuple(column.name for column in fields(Trace) if column.type == Ints)
"""The columns of `Trace` that have a number for each event."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something about one file that the reader of a result must know."""

    file: str
    reason: str

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.file}: {self.reason}" if self.file else self.reason
