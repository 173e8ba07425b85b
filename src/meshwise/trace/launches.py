"""Launches of each device stream: how long kernels take from launch to start, and how many are queued.

The queue of a stream grows by one when the host begins to launch a kernel, copy or fill, and shrinks by one
when that starts (HolisticTraceAnalysis counts the same way). A queue that is empty most of the time means
that the host does not keep up. The delay is the time from the beginning of the launching call to the start on
the device; work that waits long for others' streams counts as queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.breakdown import work_kind
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.nesting import launchers


@dataclass(frozen=True, slots=True)
class StreamLaunches:
    """The launches of one stream; delays in seconds, the mean queue over time."""

    rank: int
    stream: int
    count: int
    median_delay_s: float
    p90_delay_s: float
    max_delay_s: float
    mean_queue: float
    max_queue: int
    empty_frac: float
    """Share of the time from the first launch to the last start in which nothing is queued."""


def stream_launches(traces: Sequence[Trace]) -> list[StreamLaunches]:
    """One row a stream with launches, by rank and stream; none for a rank without a device."""
    return [
        _row(trace.rank, stream, *launched)
        for trace in traces
        for stream, launched in launches_by_stream(trace).items()
    ]


def launches_by_stream(trace: Trace) -> dict[int, tuple[Ints, Ints]]:
    """By stream, when its work was launched and when it started [ns], in the order of start."""
    launcher = launchers(trace)
    events = np.flatnonzero((work_kind(trace) != Kind.OTHER) & (launcher >= 0) & trace.has_device)
    streams = {
        stream: events[trace.stream[events] == stream] for stream in np.unique(trace.stream[events]).tolist()
    }
    return {stream: (trace.start_ns[launcher[own]], trace.start_ns[own]) for stream, own in streams.items()}


def queue(launched: Ints, started: Ints) -> tuple[Ints, NDArray[np.int64]]:
    """When the length of a queue changes [ns], and its length from then on."""
    time = np.concatenate([launched, started])
    change = np.repeat([1, -1], [len(launched), len(started)])
    order = np.lexsort((-change, time))
    return time[order], np.cumsum(change[order])


def _row(rank: int, stream: int, launched: Ints, started: Ints) -> StreamLaunches:
    delay = np.maximum(started - launched, 0) / 1e9
    time, length = queue(launched, started)
    lasts = np.diff(time).astype(np.float64)
    whole = float(lasts.sum()) or 1.0
    return StreamLaunches(
        rank=rank,
        stream=stream,
        count=len(delay),
        median_delay_s=float(np.median(delay)),
        p90_delay_s=float(np.quantile(delay, 0.9)),
        max_delay_s=float(delay.max()),
        mean_queue=float((length[:-1] * lasts).sum()) / whole,
        max_queue=int(length.max()),
        empty_frac=float(lasts[length[:-1] <= 0].sum()) / whole,
    )
