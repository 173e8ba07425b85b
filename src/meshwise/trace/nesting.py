"""Which host event encloses which, which one launched a kernel, and sums over everything inside.

On one thread events nest: the parent of an event is the shortest one that encloses it. A kernel belongs to
the runtime call that launched it (same correlation id), and through it to every operator and section that
was open on that thread; where a trace lacks the call, the operator with the same external id stands in.
Gloo's transfers run on worker threads, which may begin them in another order than they were called in: the
k-th transfer of a kind was launched by the k-th `c10d::` call of that kind (the k-th of all where gloo names
its work otherwise than the calls). So a section's device time holds its communication, which the profiler's
own totals leave out.
"""

from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import COMPILES, DEVICE_KINDS, Ints, Kind, Trace, collective_kind, once_a_trace

HOST_KINDS = (Kind.CPU_OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.HOST_COMMUNICATION)


@once_a_trace
def parents(trace: Trace) -> Ints:
    """For every event the number of the host event that encloses it on its thread, -1 for none."""
    return nested_in(trace, trace.where(*HOST_KINDS))


def nested_in(trace: Trace, events: Ints) -> Ints:
    """For each of `events` (in the order of time) the innermost of them around it on its track; else -1.

    One that is over before half of an event is not around it (a dispatch mode's, at the start of a section).
    """
    events = events[np.argsort(trace.track[events], kind="stable")]
    start, end, track = trace.start_ns[events], trace.end_ns[events], trace.track[events]
    half = start + (end - start) // 2
    before = np.where(np.diff(track, prepend=-1) == 0, np.arange(len(events)) - 1, -1)
    while (over := (before >= 0) & (end[before] <= half)).any():  # all between `before` and each are over
        before[over] = before[before[over]]
    found = np.full(len(trace), -1, dtype=np.int64)
    found[events] = np.where(before >= 0, events[before], -1)
    return found


def nearest(parent: Ints, chosen: NDArray[np.bool_]) -> Ints:
    """For every event itself or the nearest one around it (along `parent`) that is chosen; -1 for none."""
    here, none = np.arange(len(parent)), len(parent)
    chain = np.append(np.where(chosen | (parent < 0), here, parent), none)
    while ((further := chain[chain]) != chain).any():
        chain = further
    return np.where(np.append(chosen, False)[chain], chain, -1)[:none]


@once_a_trace
def compiling(trace: Trace) -> NDArray[np.bool_]:
    """Which host events compile, or lie in one that does: none of their operators is of the job."""
    return nearest(parents(trace), trace.named(lambda name: name.endswith(COMPILES))) >= 0


def around(trace: Trace, events: Ints, chosen: NDArray[np.bool_]) -> Ints:
    """Each of `events` (-1: none) itself or the nearest one around it that is chosen; -1 for none."""
    return np.where(events >= 0, nearest(parents(trace), chosen)[events], -1)


def enclosing(trace: Trace, track: Ints, time_ns: Ints) -> Ints:
    """The innermost host event open on `track` at `time_ns`, for each such pair; -1 for none."""
    found, host = np.full(len(track), -1, dtype=np.int64), trace.where(*HOST_KINDS)
    for one in np.unique(track).tolist():
        events, asked = host[trace.track[host] == one], track == one
        last = np.searchsorted(trace.start_ns[events], time_ns[asked], side="right") - 1
        found[asked] = np.append(events, -1)[last]
    while (over := (found >= 0) & (trace.end_ns[found] <= time_ns)).any():
        found[over] = parents(trace)[found[over]]
    return found


@once_a_trace
def launchers(trace: Trace) -> Ints:
    """For every kernel and every gloo transfer the host event that launched it, -1 where unknown."""
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
    """Sums over each event and all that it encloses."""
    total, up = own.copy(), parent
    while (inside := up >= 0).any():
        total += added_at(up, own, len(own))
        up = np.where(inside, parent[up], -1)
    return total
