"""The steps of a job, as its traces mark them, and the choice of some of them.

PyTorch's profiler marks steps as `ProfilerStep#N` if the program calls its `step()`; N counts from the
start of the profiler and is the same on all ranks. Where no rank has such marks, a `record_function`
section stands in that every rank ran equally often, but no more often than PyTorch's `Optimizer.step`, if
that is recorded; and if there are several, that which took longest in total. None inside an operator does
(`## Call CompiledFxGraph ... ##`), which would begin a step within the work of another.

A step lasts from its mark to the next one, and on a device from the end of all work that was launched before
its mark. So steps follow each other without overlap, and whatever runs in one counts as its time. An event
belongs to the step in which it was launched: a kernel to that of its launching call, an operator to that in
which it begins; a copy or a gather that runs ahead of its step hides in the time of the one before. What was
launched before the first mark (or before the profiler began) is in no step, -1. The last step of a section
that stands in ends with the work of the trace.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwise.core.errors import DataError
from meshwise.core.refusals import refuse
from meshwise.trace.breakdown import Breakdown, split, work
from meshwise.trace.columns import Traces
from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.nesting import launchers, nearest, parents

PROFILER_STEP = "ProfilerStep"
_UPDATE = "Optimizer.step#"
_NUMBERED = re.compile(r"^(.*?)[#_ .:-]*(\d*)$")


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Where the steps of one rank begin, on its own clock, and their numbers; empty where none is marked.

    `bounds_ns`: where each step begins, and where the last one ends.
    """

    name: str
    number: Ints
    start_ns: Ints
    end_ns: Ints
    bounds_ns: Ints

    def step(self, time_ns: Ints) -> Ints:
        """The number of the step at each time, -1 before the first."""
        return np.append(self.number, -1)[np.searchsorted(self.start_ns, time_ns, side="right") - 1]


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank and its breakdown."""

    number: int
    part: str
    """`whole`; `warm-up`: a first step that took 1.2 times as long as the median of the others; `partial`: a
    last step with less than 0.95 of the median number of kernels (operators, on a rank without a device)."""
    num_work: int
    breakdown: Breakdown


def marks(traces: Traces) -> dict[int, Marks]:
    """The steps of every rank, all of them marked by the same name."""
    found = dict(zip(traces.ranks, traces.each(_sections), strict=True))
    names = set.intersection(*(set(one) for one in found.values())) if found else set()
    counts = {name: {len(one[name].number) for one in found.values()} for name in names}
    counts = {name: num for name, num in counts.items() if len(num) == 1 and min(num) > 1}
    updates = [max(num) for name, num in counts.items() if name.startswith(_UPDATE)]
    usable = {name for name, num in counts.items() if max(num) <= min(updates, default=max(num))}
    usable = names.intersection([PROFILER_STEP]) or usable
    if not usable:
        return dict.fromkeys(found, Marks("", *[np.zeros(0, dtype=np.int64)] * 4))
    spent = {n: sum((one[n].end_ns - one[n].start_ns).sum() for one in found.values()) for n in usable}
    best = max(sorted(usable), key=spent.__getitem__)
    return {rank: one[best] for rank, one in found.items()}


def _sections(trace: Trace) -> dict[str, Marks]:
    """The sections of one rank by name (a number at its end left out) whose runs do not overlap."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    outside = nearest(parents(trace), trace.kind == Kind.CPU_OP) < 0
    done_ns = trace.end_ns[trace.where(Kind.CPU_OP, *DEVICE_KINDS)].max(initial=0)
    for i in np.flatnonzero((trace.kind == Kind.ANNOTATION) & outside).tolist():
        parts = _NUMBERED.match(trace.name(i))
        name, number = parts.groups() if parts else (trace.name(i), "")
        by_name.setdefault(name, []).append((i, int(number or -1)))
    found = {}
    for name, runs in by_name.items():
        events, numbers = np.array(runs, dtype=np.int64).T
        start, end = trace.start_ns[events], trace.end_ns[events]
        if len(set(numbers.tolist())) < len(numbers) or (np.diff(numbers) < 0).any():
            numbers = np.arange(len(events))
        if (start[1:] >= end[:-1] - 1_000).all():  # times are rounded, of old traces to microseconds
            last_ns = end[-1:] if name == PROFILER_STEP else np.maximum(end[-1:], done_ns)
            found[name] = Marks(name, numbers, start, end, np.append(start, last_ns))
    return found


def launched_ns(trace: Trace) -> Ints:
    """When each event was launched: the start of the call that launched it, else its own."""
    launcher = launchers(trace)
    return np.where(launcher >= 0, trace.start_ns[launcher], trace.start_ns)


def with_steps(traces: Traces, steps: str) -> Traces:
    """The traces with the work of some steps only: `3-7`, `5`, or `complete`."""
    changes = {rank: partial(chosen_steps, marked=own, steps=steps) for rank, own in marks(traces).items()}
    return traces.changed(changes)


def common_steps(marked: Mapping[int, Marks]) -> str:
    """The range of steps that every rank has, where some have others too; "" where that is none or one."""
    numbers = {frozenset(one.number.tolist()) for one in marked.values()}
    common = frozenset.intersection(*numbers) if numbers else ()
    return f"{min(common)}-{max(common)}" if len(numbers) > 1 and len(common) > 1 else ""


def chosen_steps(trace: Trace, marked: Marks, steps: str) -> Trace:
    """The trace with the work of some steps only.

    `complete` is what HolisticTraceAnalysis takes: kernels whose launching call begins before the last
    ProfilerStep, and all of them where there are fewer than two steps. Where the trace has the steps on the
    device's side too, the last of these begins later than on the host, and that is the one that counts.
    """
    if steps == "complete":
        events = trace.where(Kind.ANNOTATION, Kind.DEVICE_ANNOTATION)
        events = events[trace.named(lambda name: name.startswith(PROFILER_STEP))[events]]
        if len({trace.name(i) for i in events.tolist()}) < 2:
            return trace
        launcher = launchers(trace)
        is_launched = (launcher >= 0) & (trace.kind[launcher] == Kind.RUNTIME)
        is_early = launched_ns(trace) < trace.start_ns[events].max()
        return replace(trace, selected=is_early & (is_launched | ~np.isin(trace.kind, DEVICE_KINDS)))
    first, last = _range(steps)
    number = np.concatenate([[-1], marked.number, [-1]])
    is_chosen = (number >= first) & (number <= last)
    selected = is_chosen[np.searchsorted(marked.bounds_ns, launched_ns(trace), side="right")]
    if not selected.any():
        numbers = marked.number.tolist()
        about = {"steps": steps, "rank": trace.rank, "last": max(numbers, default=0)}
        refuse("steps", DataError, **about, numbers=numbers)
    edges, chosen = step_edges(trace, marked), np.flatnonzero(is_chosen)
    return replace(trace, selected=selected, window=(edges[chosen[:1] - 1], edges[chosen[-1:]]))


def step_edges(trace: Trace, marked: Marks) -> Ints:
    """When each step begins, and when the last one ends [ns].

    At its mark; on a device no sooner than all that was launched before has ended.
    """
    edges, kernels = marked.bounds_ns, trace.where(*DEVICE_KINDS)
    place = np.searchsorted(edges, launched_ns(trace)[kernels], side="right")
    ended = np.zeros(len(edges) + 1, dtype=np.int64)
    np.maximum.at(ended, place, trace.end_ns[kernels])
    return np.maximum(edges, np.maximum.accumulate(ended)[:-1])


def _range(steps: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise DataError(f"--steps {steps} is no range of steps; write 3-7, one number, or complete")
    return int(found[1]), int(found[2] or found[1])


def step_table(trace: Trace, marked: Marks) -> list[RankStep]:
    """The breakdown of every marked step of one rank in which work was launched."""
    number, is_work = marked.step(launched_ns(trace)), work(trace).kind != Kind.OTHER
    edges, rows = step_edges(trace, marked), []
    for place, step in enumerate(marked.number.tolist()):
        if num_work := int((is_work & (number == step)).sum()):
            window = edges[place : place + 1], edges[place + 1 : place + 2]
            rows.append(RankStep(step, "whole", num_work, split(trace, window)))
    if len(rows) > 2:
        first, *middle, last = rows
        if first.breakdown.span_s > 1.2 * np.median([row.breakdown.span_s for row in rows[1:]]):
            rows[0] = replace(first, part="warm-up")
        if last.num_work < 0.95 * np.median([row.num_work for row in middle]):
            rows[-1] = replace(last, part="partial")
    return rows
