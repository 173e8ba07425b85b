"""Which kernels take the time, by name, over all ranks or one, and what changed between two sets of traces.

On a rank without a device, operators stand for kernels, each without the operators that it calls. A kernel
that only one set has stands with a zero on the other side, so changes add up to that of the totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.trace.breakdown import work
from meshwise.trace.events import Kind, Trace, grouped
from meshwise.trace.operators import self_time


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All runs of the kernel of one name."""

    name: str
    kind: str
    count: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    share_frac: float
    """Of the sum over all kernels."""


@dataclass(frozen=True, slots=True)
class KernelRuns:
    """All runs of the kernel of one name on one rank."""

    name: str
    kind: str
    count: int
    total_ns: int
    min_ns: int
    max_ns: int


def kernel_runs(trace: Trace) -> list[KernelRuns]:
    """The kernels of one rank by name and kind."""
    kind, spent = work(trace).kind, trace.duration_ns
    if not trace.has_device:
        spent = np.where(kind == Kind.COMPUTE, self_time(trace), spent)
    done = np.flatnonzero(kind != Kind.OTHER)
    order = done[np.argsort(trace.label[done], kind="stable")]
    labels, first = np.unique(trace.label[order], return_index=True)
    found = []
    for label, runs in zip(labels, np.split(order, first[1:]), strict=False):
        name, of = trace.labels[label][1], Kind(kind[runs[0]]).name.lower()
        lengths = spent[runs]
        ends = int(lengths.min()), int(lengths.max())
        found.append(KernelRuns(name, of, len(runs), int(lengths.sum()), *ends))
    return found


def kernel_totals(runs: Iterable[KernelRuns]) -> list[KernelTotal]:
    """Kernels by name over all ranks whose `runs` are given, the longest total first."""
    alike = grouped(((one.name, one.kind), one) for one in runs)
    whole_s = sum(one.total_ns for same in alike.values() for one in same) / 1e9
    totals = [_total(*key, same, whole_s) for key, same in alike.items()]
    return sorted(totals, key=lambda kernel: (-kernel.total_s, kernel.name))


def _total(name: str, kind: str, runs: Sequence[KernelRuns], whole_s: float) -> KernelTotal:
    total_s, count = sum(one.total_ns for one in runs) / 1e9, sum(one.count for one in runs)
    ends_s = min(one.min_ns for one in runs) / 1e9, max(one.max_ns for one in runs) / 1e9
    share_frac = total_s / whole_s if whole_s else 0.0
    return KernelTotal(name, kind, count, total_s, total_s / count, *ends_s, share_frac)


@dataclass(frozen=True, slots=True)
class KernelChange:
    """One kernel before and after; totals over all ranks."""

    name: str
    kind: str
    count_before: int
    count_after: int
    total_before_s: float
    total_after_s: float

    @property
    def change_s(self) -> float:
        """Seconds after minus seconds before."""
        return self.total_after_s - self.total_before_s


def kernel_changes(before: Sequence[KernelTotal], after: Sequence[KernelTotal]) -> list[KernelChange]:
    """Every kernel of either side, the largest change (up or down) first."""
    old, new = ({(k.name, k.kind): k for k in side} for side in (before, after))
    rows = []
    for key in old.keys() | new.keys():
        sides = [(side[key].count, side[key].total_s) if key in side else (0, 0.0) for side in (old, new)]
        counts, totals_s = zip(*sides, strict=True)
        rows.append(KernelChange(*key, *counts, *totals_s))
    return sorted(rows, key=lambda row: (-abs(row.change_s), row.name))
