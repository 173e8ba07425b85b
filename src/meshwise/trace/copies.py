"""Copies and fills of device memory by kind: how many, how large, how fast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.trace.breakdown import work_kind
from meshwise.trace.events import Kind, Trace

_DIRECTION = re.compile(r"(memcpy|memset)\w*\s*(\w+to\w+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CopyTotal:
    """All copies of one kind (`Memcpy HtoD`, `Memset`); bytes are None where the trace does not tell them."""

    kind: str
    count: int
    total_s: float
    bytes: float | None
    min_bytes: float | None
    median_bytes: float | None
    max_bytes: float | None
    bytes_per_s: float | None


def copy_kind(name: str) -> str:
    """`Memcpy DtoH (Device -> Pinned)` -> `Memcpy DtoH`; another name stays as it is."""
    found = _DIRECTION.match(name)
    return " ".join(filter(None, found.groups())) if found else name


def copy_totals(traces: Sequence[Trace]) -> list[CopyTotal]:
    """Copies of all `traces` by kind, the longest total first."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for trace in traces:
        for label in np.flatnonzero(trace.label_kind == Kind.MEMORY).tolist():
            events = np.flatnonzero((trace.label == label) & (work_kind(trace) == Kind.MEMORY))
            if len(events):
                values = (trace.duration_ns[events], trace.size_bytes[events])
                parts.setdefault(copy_kind(trace.labels[label][1]), []).append(values)
    totals = [
        _total(kind, *(np.concatenate(column) for column in zip(*found, strict=True)))
        for kind, found in parts.items()
    ]
    return sorted(totals, key=lambda row: (-row.total_s, row.kind))


def _total(kind: str, duration_ns: np.ndarray, size_bytes: np.ndarray) -> CopyTotal:
    total_s, told = float(duration_ns.sum()) / 1e9, size_bytes >= 0
    sizes = size_bytes[told].astype(np.float64)
    if not len(sizes):
        return CopyTotal(kind, len(duration_ns), total_s, *[None] * 5)
    seconds = float(duration_ns[told].sum()) / 1e9
    return CopyTotal(
        kind=kind,
        count=len(duration_ns),
        total_s=total_s,
        bytes=float(sizes.sum()),
        min_bytes=float(sizes.min()),
        median_bytes=float(np.median(sizes)),
        max_bytes=float(sizes.max()),
        bytes_per_s=float(sizes.sum()) / seconds if seconds else None,
    )
