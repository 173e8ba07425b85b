"""What happened inside each named section: its compute, its communication, and the waiting in it.

A section is a `record_function` name. Its work is what was launched while it was open on the launching
thread, so the communication of a section is in it, split as in `collectives`: transfer, and waiting for
the last rank. Sections nest; the outer one holds the inner one's numbers too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.trace.breakdown import work_kind
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.nesting import added_at, inclusive, launchers, parents
from meshwise.trace.operators import OperatorTotal, self_time

_HAS_WAITING = ("communication", "wait")


@dataclass(frozen=True, slots=True)
class Section:
    """All runs of one section on one rank, in seconds; communication = transfer + waiting (where known)."""

    name: str
    rank: int
    count: int
    cpu_s: float
    compute_s: float
    communication_s: float
    wait_s: float
    memory_s: float


@dataclass(frozen=True, slots=True)
class AcrossRanks:
    """One quantity over all ranks: imbalance is max / mean, the straggler the rank with the most.

    Of communication and waiting, it is the rank with the least: the one that the others waited for.
    """

    name: str
    quantity: str
    num_ranks: int
    min_s: float
    mean_s: float
    max_s: float
    imbalance: float
    straggler: int


def sections(trace: Trace, wait_ns: Mapping[int, int] | None = None) -> list[Section]:
    """The sections of one rank, longest first; `wait_ns` is the waiting inside an event, by its number."""
    parent, launcher, kind = parents(trace), launchers(trace), work_kind(trace)
    waits = np.zeros(len(trace), dtype=np.int64)
    for event, wait in (wait_ns or {}).items():
        waits[event] = wait
    columns = [
        _inside(trace, parent, launcher, kind == Kind.COMPUTE),
        _inside(trace, parent, launcher, kind == Kind.COMMUNICATION),
        inclusive(added_at(launcher, waits, len(trace)), parent),
        _inside(trace, parent, launcher, kind == Kind.MEMORY),
    ]
    events = trace.where(Kind.ANNOTATION)
    columns = [trace.duration_ns, *columns]
    rows = []
    for label in np.unique(trace.label[events]).tolist():
        runs = events[trace.label[events] == label]
        sums = [int(column[runs].sum()) / 1e9 for column in columns]
        rows.append(Section(trace.labels[label][1], trace.rank, len(runs), *sums))
    return sorted(rows, key=lambda row: (-row.cpu_s, row.name))


def _inside(trace: Trace, parent: Ints, launcher: Ints, chosen: np.ndarray) -> Ints:
    """For every host event the time [ns] of the `chosen` work launched inside it.

    Kernels and transfers count where they were launched; operators of a CPU trace count their self time.
    """
    own = np.zeros(len(trace), dtype=np.int64)
    operators = chosen & (launcher < 0)
    own[operators] = self_time(trace, parent)[operators]
    launched = np.where(chosen & (launcher >= 0), trace.duration_ns, 0)
    return inclusive(own + added_at(launcher, launched, len(trace)), parent)


def joint(values: Mapping[tuple[str, str], Mapping[int, float]]) -> list[AcrossRanks]:
    """One row per (name, quantity) of `values`, which holds seconds by rank; ranks without it count as 0."""
    ranks = sorted({rank for by_rank in values.values() for rank in by_rank})
    rows = []
    for (name, quantity), by_rank in values.items():
        seconds = np.array([by_rank.get(rank, 0.0) for rank in ranks])
        mean = float(seconds.mean())
        rows.append(
            AcrossRanks(
                name=name,
                quantity=quantity,
                num_ranks=len(by_rank),
                min_s=float(seconds.min()),
                mean_s=mean,
                max_s=float(seconds.max()),
                imbalance=float(seconds.max()) / mean if mean else 1.0,
                straggler=ranks[int((-seconds if quantity in _HAS_WAITING else seconds).argmax())],
            )
        )
    return rows


def joint_sections(found: Sequence[Section]) -> list[AcrossRanks]:
    """The joint table of the sections of all ranks: CPU time, compute, communication and waiting of each."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for row in found:
        for quantity in ("cpu_s", "compute_s", "communication_s", "wait_s"):
            values.setdefault((row.name, quantity.removesuffix("_s")), {})[row.rank] = getattr(row, quantity)
    return [row for row in joint(values) if row.max_s > 0]


def joint_operators(
    rows: Mapping[int, Sequence[OperatorTotal]], *, sort_by: str = "cpu"
) -> list[AcrossRanks]:
    """The joint table of the operators of all ranks: their CPU (or device) time, the largest mean first."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for rank, found in rows.items():
        for row in found:
            seconds = row.cpu_s if sort_by == "cpu" else row.device_s
            values.setdefault((row.name, sort_by), {})[rank] = seconds
    return sorted(joint(values), key=lambda row: -row.mean_s)
