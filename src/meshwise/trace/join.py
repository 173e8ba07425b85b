"""The parts of a capture as one trace.

A capture that gives way to the program's own profiler goes on in a second file of the same rank. The times of
the parts do not overlap; ids of launches may begin anew in each and are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from meshwise.trace.events import COLUMNS, Ints, MemoryEvents, Trace

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
    kinds = {label: kind for part in parts for label, kind in zip(part.labels, part.label_kind, strict=False)}
    numbers: tuple[dict[Any, int], ...] = ({}, {}, {})
    parts = [_renumbered(part, i, *numbers) for i, part in enumerate(parts)]
    labels, tracks, shapes = map(tuple, numbers)
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    calls = [call for part in parts for call in part.metadata.get("meshwise_collectives") or []]
    events: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS
    }
    memory = {
        one.name: np.concatenate([getattr(part.memory, one.name) for part in parts])
        for one in fields(MemoryEvents)
    }
    return replace(
        parts[0],
        **events,
        labels=labels,
        label_kind=np.array([kinds[label] for label in labels], dtype=np.int8),
        tracks=tracks,
        shapes=shapes,
        track_names={track: name for part in parts for track, name in part.track_names.items()},
        groups={name: ranks for part in parts for name, ranks in part.groups.items()},
        communications={
            start + event: args
            for start, part in zip(starts, parts, strict=False)
            for event, args in part.communications.items()
        },
        memory=MemoryEvents(**memory),
        metadata=parts[0].metadata | ({"meshwise_collectives": calls} if calls else {}),
    )


def _renumbered(
    part: Trace, place: int, labels: dict[Any, int], tracks: dict[Any, int], shapes: dict[Any, int]
) -> Trace:
    """The part by the numbers of the whole, which grow; its ids of launches are those of no other part."""
    label, track, shape = (
        np.array([*(numbers.setdefault(key, len(numbers)) for key in keys), -1])
        for keys, numbers in ((part.labels, labels), (part.tracks, tracks), (part.shapes, shapes))
    )

    def apart(ids: Ints) -> Ints:
        return np.where(ids > 0, ids + place * _IDS_EACH, ids)

    return replace(
        part,
        label=label[part.label],
        track=track[part.track],
        shape=shape[part.shape],
        correlation=apart(part.correlation),
        external_id=apart(part.external_id),
        track_names={int(track[one]): name for one, name in part.track_names.items()},
        memory=replace(part.memory, track=track[part.memory.track]),
    )
