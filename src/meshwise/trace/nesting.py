"""Which host event encloses which, which one launched a kernel, and sums over everything inside.

On one thread events nest: the parent of an event is the shortest one that encloses it. A kernel belongs to
the runtime call that launched it (same correlation id), and through it to every operator and section that
was open on that thread; where a trace lacks the call, the operator with the same external id stands in.
Gloo's transfers run on worker threads, which may begin them in another order than they were called in: the
k-th transfer of a kind was launched by the k-th `c10d::` call of that kind (the k-th of all where gloo names
its work otherwise than the calls). So a section's device time holds its communication, which the profiler's
own totals leave out.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace, collective_kind

HOST_KINDS = (Kind.CPU_OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.HOST_COMMUNICATION)


def parents(trace: Trace) -> Ints:
    """For every event the number of the host event that encloses it on its thread, -1 for none."""
    parent = np.full(len(trace), -1, dtype=np.int64)
    end = trace.end_ns.tolist()
    start = trace.start_ns.tolist()
    track = trace.track.tolist()
    open_events: dict[int, list[int]] = defaultdict(list)
    for i in trace.where(*HOST_KINDS).tolist():
        stack = open_events[track[i]]
        while stack and end[stack[-1]] <= start[i]:
            stack.pop()
        if stack:
            parent[i] = stack[-1]
        stack.append(i)
    return parent


def nearest(parent: Ints, chosen: NDArray[np.bool_]) -> Ints:
    """For every event itself or the nearest one around it (along `parent`) that is chosen; -1 for none."""
    here, none = np.arange(len(parent)), len(parent)
    chain = np.append(np.where(chosen | (parent < 0), here, parent), none)
    while ((further := chain[chain]) != chain).any():
        chain = further
    return np.where(np.append(chosen, False)[chain], chain, -1)[:none]


def enclosing(trace: Trace, parent: Ints, track: Ints, time_ns: Ints) -> Ints:
    """The innermost host event open on `track` at `time_ns`, for each such pair; -1 for none."""
    found = np.full(len(track), -1, dtype=np.int64)
    host = trace.where(*HOST_KINDS)
    for one in np.unique(track).tolist():
        events = host[trace.track[host] == one]
        asked = np.flatnonzero(track == one)
        if not len(events):
            continue
        at = np.searchsorted(trace.start_ns[events], time_ns[asked], side="right") - 1
        event = np.where(at >= 0, events[at], -1)
        closed = (event >= 0) & (trace.end_ns[event] <= time_ns[asked])
        while closed.any():
            event[closed] = parent[event[closed]]
            closed = (event >= 0) & (trace.end_ns[event] <= time_ns[asked])
        found[asked] = event
    return found


_known: WeakKeyDictionary[Trace, Ints] = WeakKeyDictionary()


def launchers(trace: Trace) -> Ints:
    """For every kernel and every gloo transfer the host event that launched it, -1 where unknown."""
    if trace not in _known:
        _known[trace] = _launchers(trace)
    return _known[trace]


def _launchers(trace: Trace) -> Ints:
    launcher = np.full(len(trace), -1, dtype=np.int64)
    kernels = trace.where(*DEVICE_KINDS)
    operators = trace.where(Kind.CPU_OP, Kind.ANNOTATION)
    _look_up(launcher, kernels, trace.external_id, operators)
    _look_up(launcher, kernels, trace.correlation, trace.where(Kind.RUNTIME))
    _link_in_order(trace, launcher)
    return launcher


def _link_in_order(trace: Trace, launcher: Ints) -> None:
    """Fill in for every gloo transfer the call that launched it."""
    moved = trace.where(Kind.HOST_COMMUNICATION).tolist()
    starts = trace.named(lambda name: name.startswith("c10d::"))
    calls = np.flatnonzero(starts & (trace.kind == Kind.CPU_OP)).tolist() if moved else []
    moved_kinds, called_kinds = ([collective_kind(trace.name(i)) for i in of] for of in (moved, calls))
    if len(moved) == len(calls) and Counter(moved_kinds) != Counter(called_kinds):
        launcher[moved] = calls
        return
    by_kind: dict[str, deque[int]] = defaultdict(deque)
    for kind, i in zip(called_kinds, calls, strict=True):
        by_kind[kind].append(i)
    for kind, i in zip(moved_kinds, moved, strict=True):
        launcher[i] = by_kind[kind].popleft() if by_kind[kind] else -1


def _look_up(launcher: Ints, events: Ints, ids: Ints, candidates: Ints) -> None:
    """Fill in for `events` the candidate with the same id; ids of 0 and less say nothing."""
    candidates = candidates[ids[candidates] > 0]
    if not len(candidates):
        return
    order = np.argsort(ids[candidates], kind="stable")
    sorted_ids = ids[candidates][order]
    place = np.minimum(np.searchsorted(sorted_ids, ids[events]), len(sorted_ids) - 1)
    hit = sorted_ids[place] == ids[events]
    launcher[events[hit]] = candidates[order[place[hit]]]


def added_at(place: Ints, values: NDArray[Any], size: int) -> NDArray[Any]:
    """The sums of `values` at each of `size` places; those of place -1 are left out."""
    sums = np.zeros(size, dtype=values.dtype)
    known = place >= 0
    np.add.at(sums, place[known], values[known])
    return sums


def inclusive(own: NDArray[np.int64], parent: Ints) -> NDArray[np.int64]:
    """Sums over each event and all that it encloses; an event stands after its parent."""
    total = own.copy()
    depth = np.zeros(len(parent), dtype=np.int64)
    for i in np.flatnonzero(parent >= 0).tolist():
        depth[i] = depth[parent[i]] + 1
    for level in range(int(depth.max(initial=0)), 0, -1):
        events = np.flatnonzero(depth == level)
        np.add.at(total, parent[events], total[events])
    return total
