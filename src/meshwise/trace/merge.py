"""One Perfetto timeline of all ranks on one clock.

Every rank is one process; its lanes are its CPU threads, its device streams, and one lane per process group
(more where its calls are under way together) on which each collective is split in two: waiting for the last
rank, then the transfer. Clock offsets are
subtracted, times count from the first event of all. Slices of a lane nest, as viewers demand: one that would
outlast the slice around it (or the next one's start) is cut there, and how many were is told. Arrows lead
from each launching call to its kernel, and from the last rank's entry to the ranks that waited for it.
Counters show allocated memory. A bound on the number of slices keeps sections,
communication and the longest of all others.
"""

import gzip
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.files import check_writable, whole_file
from meshwise.trace.collectives import Collective
from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.memory import timeline
from meshwise.trace.nesting import launchers
from meshwise.trace.summary import Summary

_BATCH = 50_000
_FIRST_GROUP_LANE = 100_000
_MOST_POINTS = 20_000
_ALWAYS = (Kind.COMMUNICATION, Kind.HOST_COMMUNICATION, Kind.ANNOTATION)


def write_merged(summary: Summary, path: Path, *, max_slices: int | None = None) -> Counter[str]:
    """Write the timeline to `path` (gzip if it ends in .gz), whole or not at all.

    Returns how many `slices` were written, how many of them were `cut` where the next one starts, and how
    many were `left out`.

    Args:
        summary: Of the ranks that are shown.
        path: Where to.
        max_slices: Of all ranks, without the lanes of collectives; None for no bound.
    """
    check_writable(path, ".json", ".json.gz")
    done = Counter[str]()
    lengths, least_ns = np.concatenate([trace.duration_ns for trace in summary.traces]), 0
    if max_slices is not None and len(lengths) > max_slices:
        least_ns = int(np.partition(lengths, -max_slices)[-max_slices]) + 1
    events = itertools.chain(_of_ranks(summary, least_ns, done), _collective_lanes(summary.collectives))
    with whole_file(path) as file, ExitStack() as opened:
        out: Any = file
        if path.name.endswith(".gz"):
            out = opened.enter_context(gzip.GzipFile(fileobj=file, mode="wb", mtime=0, compresslevel=4))
        between = b'{"displayTimeUnit":"ms","traceEvents":[\n'
        while batch := list(itertools.islice(events, _BATCH)):
            out.write(between + b",\n".join(map(msgspec.json.encode, batch)))
            between = b",\n"
        out.write(b"\n]}\n")
    return done


def _of_ranks(summary: Summary, least_ns: int, done: Counter[str]) -> Iterator[dict[str, Any]]:
    """The events of every rank, one rank in memory at a time; what was `done` is counted."""
    for trace in summary.traces:
        shift = summary.origin_ns + summary.alignment.offsets_ns[trace.rank]
        lane, names = _lanes(trace)
        kept = np.flatnonzero(np.isin(trace.kind, _ALWAYS) | (trace.duration_ns >= least_ns))
        duration = np.full(len(trace), -1)
        duration[kept], cut = nested(trace.start_ns[kept], trace.duration_ns[kept], lane[kept])
        arrows = _arrows(trace, lane, shift, done["arrows"], duration >= 0)
        done.update({"slices": len(kept), "cut": cut, "left out": len(trace) - len(kept)})
        done["arrows"] += len(arrows) // 2
        yield from _names(trace, names)
        yield from _slices(trace, kept, lane, duration, shift)
        yield from arrows
        yield from _counters(trace, shift)


def nested(start: Ints, duration: Ints, lane: Ints) -> tuple[Ints, int]:
    """Durations cut so that slices nest in each lane, and how many were; sorted by start, longer first."""
    fitted = duration.copy()
    begin, end = start.tolist(), (start + duration).tolist()
    num_cut = 0
    stacks: dict[int, list[int]] = defaultdict(list)
    for i, one in enumerate(lane.tolist()):
        stack = stacks[one]
        while stack and end[stack[-1]] <= begin[i]:
            stack.pop()
        if stack and end[i] > end[stack[-1]]:
            end[i] = end[stack[-1]]
            fitted[i] = end[i] - begin[i]
            num_cut += 1
        stack.append(i)
    return fitted, num_cut


def _lanes(trace: Trace) -> tuple[Ints, dict[int, tuple[str, int]]]:
    """The lane of every event, and of every lane its name and place: threads first, then streams."""
    kind = trace.kind
    part = np.where(np.isin(kind, DEVICE_KINDS), 1, np.where(kind == Kind.DEVICE_ANNOTATION, 2, 0))
    lane = trace.track * 3 + part
    names = {}
    for one in np.unique(lane).tolist():
        pid, tid = trace.tracks[one // 3]
        thread = trace.track_names.get(one // 3) or f"thread {tid}"
        text = (thread, f"stream {tid} (device {pid})", f"stream {tid} (device {pid}) sections")[one % 3]
        names[one] = (text, (one % 3 > 0) * 1000 + one)
    return lane, names


def _names(trace: Trace, lanes: dict[int, tuple[str, int]]) -> Iterator[dict[str, Any]]:
    pid = trace.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for lane, (name, place) in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": lane, "args": {"sort_index": place}}


def _slices(trace: Trace, kept: Ints, lane: Ints, duration: Ints, shift_ns: int) -> Iterator[dict[str, Any]]:
    times = ((trace.start_ns[kept] - shift_ns) / 1000.0, duration[kept] / 1000.0)
    columns = (kept, *times, trace.label[kept], lane[kept], trace.correlation[kept], trace.shape[kept])
    for i, ts, dur, label, one, correlation, shape in zip(*(c.tolist() for c in columns), strict=True):
        category, name = trace.labels[label]
        args: dict[str, Any] = {}
        if correlation > 0:
            args["correlation"] = correlation
        if shape >= 0:
            args["Input Dims"] = msgspec.Raw(trace.shapes[shape][0].encode())
        if i in trace.communications:
            args |= {k: v for k, v in msgspec.to_builtins(trace.communications[i]).items() if v is not None}
        track = {"ph": "X", "cat": category, "name": name, "pid": trace.rank, "tid": one}
        yield track | {"ts": ts, "dur": dur, "args": args}


def _counters(trace: Trace, shift_ns: int) -> Iterator[dict[str, Any]]:
    """Allocated bytes of each device."""
    for device in np.unique(trace.memory.device).tolist():
        time, value = timeline(trace, device)
        every = 1 + len(time) // _MOST_POINTS
        of = {"ph": "C", "name": "memory of " + ("the host" if device < 0 else f"device {device}")}
        points = zip(((time - shift_ns) / 1000.0)[::every].tolist(), value[::every].tolist(), strict=True)
        yield from (of | {"pid": trace.rank, "ts": ts, "args": {"value": one}} for ts, one in points)


def _arrows(
    trace: Trace, lane: Ints, shift_ns: int, first_id: int, kept: NDArray[np.bool_]
) -> list[dict[str, Any]]:
    launcher = launchers(trace)
    kernels = np.flatnonzero((launcher >= 0) & kept & kept[launcher] & np.isin(trace.kind, DEVICE_KINDS))
    arrows = []
    for number, kernel in enumerate(kernels.tolist(), start=first_id):
        for phase, event in (("s", int(launcher[kernel])), ("f", kernel)):
            common = {"ph": phase, "cat": "launch", "name": "launch", "id": number, "pid": trace.rank}
            place = {"tid": int(lane[event]), "ts": float(trace.start_ns[event] - shift_ns) / 1000.0}
            arrows.append(common | place | ({"bp": "e"} if phase == "f" else {}))
    return arrows


def _collective_lanes(found: Sequence[Collective]) -> Iterator[dict[str, Any]]:
    """Two slices a rank for every collective that several ranks recorded: waiting and transfer.

    Calls of one group that are under way together on a rank lie in lanes of their own.
    """
    groups = dict.fromkeys(c.group for c in found)
    lanes = {(group, 0): i for i, group in enumerate(groups, _FIRST_GROUP_LANE)}
    taken_until: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, one in enumerate(found):
        if one.num_ranks < 2:
            continue
        wire_ns, place, begun = round(one.wire_s * 1e9), {}, {}
        for rank, wait_s in one.wait_s.items():
            enter_ns, wait_ns = round(one.enter_s[rank] * 1e9), round(wait_s * 1e9)
            ends = taken_until[rank, one.group]
            k = next((k for k, end in enumerate(ends) if end <= enter_ns), len(ends))
            begun[rank] = (enter_ns + wait_ns) / 1000.0
            tid = lanes.setdefault((one.group, k), _FIRST_GROUP_LANE + len(lanes))
            place[rank] = lane = {"pid": rank, "tid": tid}
            if k == len(ends):
                text = f"collectives of {one.group}" + (f" ({k + 1})" if k else "")
                yield {"ph": "M", "name": "thread_name", **lane, "args": {"name": text}}
            ends[k : k + 1] = [enter_ns + wait_ns + wire_ns]
            args = {"index": one.index, "bytes": one.bytes, "last_rank": one.last_rank}
            waiting = (f"wait for rank {one.last_rank}", enter_ns / 1000.0, wait_ns / 1000.0)
            for name, ts, dur in (waiting, (one.name, begun[rank], wire_ns / 1000.0)):
                if dur > 0:
                    times = {"ts": ts, "dur": dur, "args": args}
                    yield {"ph": "X", "cat": "collective", "name": name, **lane, **times}
        for rank, wait in one.wait_s.items():
            if wait > 0 and one.wire_s > 0 and rank != one.last_rank and one.last_rank in place:
                arrow = {"cat": "wait", "name": f"last of {one.name}", "id": f"{number}.{rank}"}
                yield arrow | place[one.last_rank] | {"ph": "s", "ts": begun[one.last_rank]}
                yield arrow | place[rank] | {"ph": "f", "bp": "e", "ts": begun[rank]}
