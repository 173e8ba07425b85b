"""Of many ranks, those that differ from the rest, and what they have in common: a node, a rail, a stage.

For each quantity (compute, transfer, copies, waiting, idle) a rank is compared with the median rank. What a
group of ranks has in common is told once: a group stands out where its median lies farther from that of the
groups than `_SPREADS` (six standard deviations of the groups' medians, by their median deviation) and
`_SPAN_FRAC` of the span, and nearly all its ranks lie on that side. A rank stands out by what is left then.

    node     the ranks of one host (blocks of 8, where traces name no host)
    rail     the ranks that have the same place on their hosts: one network card or switch serves them
    stage    the ranks at the same place among ranks that send each other messages: a stage of the pipeline
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.breakdown import PARTS, Partition
from meshwise.trace.collectives import Collective
from meshwise.trace.events import grouped
from meshwise.trace.match import linked

_SPREADS, _SPAN_FRAC, _MOSTLY = 6 * 1.4826, 0.02, 0.8
_LEAST_GROUPS = 3
_RANKS_PER_NODE = 8
Groups = dict[str, dict[str, list[int]]]
"""Ranks by the kind of group, and its name."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A rank or a group that spends more or less time on something than the others."""

    kind: str
    """rank, node, rail or stage."""
    name: str
    ranks: tuple[int, ...]
    part: str
    seconds: float
    """Of the rank, the median of a group; and of all ranks."""
    usual_s: float

    @property
    def excess_s(self) -> float:
        """By how much it is more."""
        return self.seconds - self.usual_s


def groupings(hosts: Mapping[int, str], found: Sequence[Collective]) -> Groups:
    """The ranks of every node, rail and stage, by its name."""
    if not any(hosts.values()):  # blocks of 8 where no trace names one
        hosts = {rank: str(rank // _RANKS_PER_NODE) for rank in hosts}
    nodes = grouped((host, rank) for rank, host in sorted(hosts.items()))
    rails = grouped((str(place), rank) for of in nodes.values() for place, rank in enumerate(of))
    pipelines = linked({one.members for one in found if one.name == "send_recv"})
    stages = grouped((str(place), rank) for of in pipelines for place, rank in enumerate(sorted(of)))
    return {"node": nodes, "rail": rails, "stage": stages}


def outliers(
    partitions: Sequence[Partition], hosts: Mapping[int, str], found: Sequence[Collective]
) -> list[Outlier]:
    """What stands out, the largest difference first; nothing where no rank could be read."""
    if not partitions:
        return []
    span_s = max(sum(one.seconds.values()) for one in partitions)
    place = {one.rank: i for i, one in enumerate(partitions)}
    groups = groupings(hosts, found)
    rows = list[Outlier]()
    for part in PARTS:
        seconds = np.array([one.seconds[part] for one in partitions])
        rows += _of_part(part, seconds, place, groups, span_s)
    return sorted(rows, key=lambda row: -abs(row.excess_s))


def _of_part(
    part: str, seconds: NDArray[np.float64], place: Mapping[int, int], groups: Groups, span_s: float
) -> Iterator[Outlier]:
    usual_s = float(np.median(seconds))
    left = seconds - usual_s
    for kind, members in groups.items():
        shared = {name: [place[rank] for rank in ranks if rank in place] for name, ranks in members.items()}
        shared = {name: at for name, at in shared.items() if len(at) > 1}
        if len(shared) < _LEAST_GROUPS:
            continue
        medians = np.array([np.median(left[at]) for at in shared.values()])
        for (name, at), is_far, median in zip(shared.items(), _far(medians, span_s), medians, strict=True):
            if is_far and (left[at] * np.sign(median) > abs(median) / 2).mean() >= _MOSTLY:
                ranks = tuple(rank for rank in members[name] if rank in place)
                yield Outlier(kind, name, ranks, part, float(np.median(seconds[at])), usual_s)
                left[at] -= median
    for rank, own_s, is_far in zip(place, seconds.tolist(), _far(left, span_s), strict=True):
        if is_far:
            yield Outlier("rank", str(rank), (rank,), part, own_s, usual_s)


def _far(values: NDArray[np.float64], span_s: float) -> NDArray[np.bool_]:
    """Which values lie far from their median, by their own spread and by the span."""
    apart = np.abs(values - np.median(values))
    return np.asarray(apart > max(_SPREADS * float(np.median(apart)), _SPAN_FRAC * span_s))
