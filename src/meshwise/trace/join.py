"""The parts of a capture as one trace.

A capture that gives way to the program's own profiler goes on in a second file of the same rank. The times of
the parts do not overlap; ids of launches may begin anew in each and are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.trace.events import Ints, Memory, Trace

_IDS_EACH = 1 << 40


def is_continued(a: Trace, b: Trace) -> bool:
    """Whether two traces of a rank are parts of one capture: of one process, one after the other."""
    processes = [(trace.host, part.get("pid")) for trace, part in ((a, _about(a)), (b, _about(b)))]
    if processes[0] != processes[1] or processes[0][1] is None or not len(a) or not len(b):
        return False
    first, second = (a, b) if a.start_ns[0] <= b.start_ns[0] else (b, a)
    return bool(first.end_ns.max() <= second.start_ns[0])


def _about(trace: Trace) -> dict[str, Any]:
    found = trace.metadata.get("meshwise")
    return found if isinstance(found, dict) else {}


def joined(parts: Sequence[Trace]) -> Trace:
    """One trace of traces that follow each other (see `is_continued`); path and metadata are of the first."""
    parts = sorted(parts, key=lambda part: int(part.start_ns[0]))
    labels: dict[tuple[str, str], int] = {}
    tracks: dict[tuple[Any, Any], int] = {}
    shapes: dict[tuple[str, str, str], int] = {}
    maps = [
        [_numbered(part.labels, labels), _numbered(part.tracks, tracks), _numbered(part.shapes, shapes)]
        for part in parts
    ]
    starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    kinds = {label: kind for part in parts for label, kind in zip(part.labels, part.label_kind, strict=False)}

    def column(name: str) -> Ints:
        return np.concatenate([getattr(part, name) for part in parts])

    def mapped(name: str, which: int) -> Ints:
        values = [_looked_up(getattr(part, name), maps[i][which]) for i, part in enumerate(parts)]
        return np.concatenate(values)

    def apart(name: str) -> Ints:
        values = [getattr(part, name) for part in parts]
        return np.concatenate([np.where(v > 0, v + i * _IDS_EACH, v) for i, v in enumerate(values)])

    calls = [call for part in parts for call in part.metadata.get("meshwise_collectives") or []]
    return replace(
        parts[0],
        labels=tuple(labels),
        label_kind=np.array([kinds[label] for label in labels], dtype=np.int8),
        tracks=tuple(tracks),
        track_names={
            int(maps[i][1][track]): name
            for i, part in enumerate(parts)
            for track, name in part.track_names.items()
        },
        groups={name: ranks for part in parts for name, ranks in part.groups.items()},
        start_ns=column("start_ns"),
        duration_ns=column("duration_ns"),
        stream=column("stream"),
        device=column("device"),
        size_bytes=column("size_bytes"),
        label=mapped("label", 0),
        track=mapped("track", 1),
        shape=mapped("shape", 2),
        correlation=apart("correlation"),
        external_id=apart("external_id"),
        shapes=tuple(shapes),
        communications={
            starts[i] + event: args
            for i, part in enumerate(parts)
            for event, args in part.communications.items()
        },
        memory=Memory(
            track=np.concatenate([_looked_up(part.memory.track, maps[i][1]) for i, part in enumerate(parts)]),
            **{
                name: np.concatenate([getattr(part.memory, name) for part in parts])
                for name in ("time_ns", "delta_bytes", "total_bytes", "reserved_bytes", "address", "device")
            },
        ),
        metadata=parts[0].metadata | ({"meshwise_collectives": calls} if calls else {}),
    )


def _numbered(keys: Sequence[Any], numbers: dict[Any, int]) -> Ints:
    """The number of each key in `numbers`, which grows."""
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _looked_up(values: Ints, numbers: Ints) -> Ints:
    """`numbers` at each of `values`; what is negative stays."""
    return np.where(values >= 0, numbers[values], values) if len(numbers) else values
