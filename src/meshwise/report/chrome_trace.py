"""A simulated pipeline as a trace for ui.perfetto.dev or chrome://tracing.

The Trace Event format: one process per rank with one track, a complete event (`ph: X`, microseconds)
per action, and metadata events (`M`) that name processes and tracks. Times are rounded to whole
nanoseconds before they are written, so that adjacent events never overlap. The two
actions of a DualPipe pair have the same extent and show as one inside the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwise.core.files import write_bytes
from meshwise.cost.simulate import KINDS, Timeline

_CATEGORIES = dict(zip(KINDS, ("forward", "backward", "backward_input", "backward_weight"), strict=True))


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of a timeline: names first, then every rank's actions in the order of their start."""
    names: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        names += [
            metadata("process_name", rank, {"name": f"rank {rank}"}),
            metadata("process_sort_index", rank, {"sort_index": rank}),
            metadata("thread_name", rank, {"name": f"pipeline {timeline.schedule}"}),
        ]
    times_s = timeline.start_s, timeline.end_s
    starts_ns, ends_ns = (np.rint(1e9 * t).astype(np.int64).tolist() for t in times_s)
    columns = (timeline.rank, timeline.kind, timeline.microbatch, timeline.stage, timeline.chunk)
    actions: list[dict[str, Any]] = []
    for rank, kind, microbatch, stage, chunk, start, end in zip(
        *(column.tolist() for column in columns), starts_ns, ends_ns, strict=True
    ):
        args = {"microbatch": microbatch, "stage": stage, "chunk": chunk}
        name = KINDS[kind]
        actions.append(complete(f"{name}{microbatch}", _CATEGORIES[name], rank, start, end, args))
    return names + actions


def write_events(events: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write events as one trace file, whole or not at all. Raises DataError if it cannot be written."""
    write_bytes(Path(path), msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def metadata(name: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    """A metadata event about the process of `rank`."""
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}


def complete(
    name: str, category: str, rank: int, start_ns: int, end_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event on the track of `rank`; times in whole nanoseconds, written as microseconds."""
    event = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": 0}
    return event | {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": args}
