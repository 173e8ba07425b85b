"""Arithmetic on sets of half-open intervals [start, end), as two integer arrays.

A set is *merged* when its intervals are sorted and do not touch: then its length is the sum of the
lengths, and two merged sets are combined by counting, at every boundary, which of them are open.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import Ints

Spans = tuple[Ints, Ints]
NO_SPANS: Spans = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def merged(start: Ints, end: Ints) -> Spans:
    """The union of the intervals as a merged set; empty intervals vanish."""
    keep = end > start
    order = np.argsort(start[keep], kind="stable")
    start, end = start[keep][order], np.maximum.accumulate(end[keep][order])
    is_apart = start[1:] > end[:-1]
    first, last = (np.append(*ends)[: len(start)] for ends in ((True, is_apart), (is_apart, True)))
    return start[first], end[last]


def joined(*sets: Spans) -> Spans:
    """The union of merged sets."""
    return merged(np.concatenate([one[0] for one in sets]), np.concatenate([one[1] for one in sets]))


def length(spans: Spans) -> int:
    """Total length of a merged set."""
    return int((spans[1] - spans[0]).sum())


def intersection(a: Spans, b: Spans) -> Spans:
    """Where two merged sets overlap, merged."""
    return _overlaid(a, b, 3)


def clipped(spans: Spans, window: Spans) -> Spans:
    """What of a merged set lies in a window: one interval, or none."""
    if not len(window[0]):
        return NO_SPANS
    (begin,), (end,) = window
    inside = slice(np.searchsorted(spans[1], begin, "right"), np.searchsorted(spans[0], end))
    return np.maximum(spans[0][inside], begin), np.minimum(spans[1][inside], end)


def difference(a: Spans, b: Spans) -> Spans:
    """What of `a` lies outside `b`, merged."""
    return _overlaid(a, b, 1)


def _overlaid(a: Spans, b: Spans, depth: int) -> Spans:
    """Where two merged sets lie over each other to a `depth`: `a` counts 1, `b` counts 2."""
    time = np.concatenate([*a, *b])
    step = np.repeat(np.array([1, -1, 2, -2]), np.repeat([len(a[0]), len(b[0])], 2))
    order = np.argsort(time, kind="stable")
    time, here = time[order], np.flatnonzero(np.cumsum(step[order])[:-1] == depth)
    return merged(time[here], time[here + 1])


def covered(spans: Spans, time: NDArray[Any]) -> NDArray[np.float64]:
    """How much of a merged set lies before each time."""
    if not len(spans[0]):
        return np.zeros(len(time))
    before = np.concatenate([[0], np.cumsum(spans[1] - spans[0])])
    points = np.stack(spans, axis=1).ravel()
    origin = points[0]  # nanoseconds since 1970 are beyond a float64
    return np.interp(time - origin, points - origin, np.repeat(before, 2)[1:-1])


def shares(start: Ints, end: Ints, spans: Spans) -> NDArray[np.float64]:
    """How much of a merged set lies in each interval and in none that starts earlier."""
    order = np.argsort(start, kind="stable")
    until = np.maximum.accumulate(end[order])
    begin = np.maximum(start[order], np.append(start[order[:1]], until[:-1]))
    return (covered(spans, until) - covered(spans, begin))[np.argsort(order)]
