"""What is wrong with a job, in words: who holds the others up and why, what link is slow, what is exposed.

Ranks that run in step spend the same span, so a rank that works longer waits less. The holder-up is the rank
whose own time (all but waiting) lies furthest above the median rank's; what it has more of names the cause:

    compute     the same kernels, each slower: its device is slow. More or other kernels: its share is larger
    idle        its host launches late (or pauses once)
    transfer    a link of its group is slow: the wire time of one kind of call, by group, at equal size
    memory      copies

All ranks together are judged by their mean: idle time that the host is the cause of, and communication that
no compute hides. Each finding states the seconds it is about and, as a share, how much of the span.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import duration, with_prefix
from meshwise.trace.breakdown import work_kind
from meshwise.trace.collectives import Collective
from meshwise.trace.events import Kind, Trace
from meshwise.trace.partition import PARTS, Partition

_MIN_FRAC = 0.02
"""A finding about single ranks or groups is worth at least this share of the span."""
_MIN_SPREADS = 6.0
"""How many median distances from the median make a rank an exception."""
_SLOW_LINK = 0.8
_HOST_BOUND_FRAC = 0.1
_EXPOSED_FRAC = 0.15
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time; `seconds` of the span, once (not summed over ranks)."""

    kind: str
    ranks: tuple[int, ...]
    group: str
    seconds: float
    span_frac: float
    text: str


def findings(
    traces: Sequence[Trace], partitions: Sequence[Partition], collectives: Sequence[Collective]
) -> list[Finding]:
    """All findings about one job: those about single ranks and links first, the costliest first."""
    span_s = max((sum(one.seconds.values()) for one in partitions), default=0.0)
    if not span_s:
        return []
    links = _slow_links(partitions, collectives, span_s)
    explained = {rank for link in links for rank in link.ranks}
    holders = [
        one
        for one in _holders_up(traces, partitions, span_s)
        if not (one.kind == "slow transfer" and explained.issuperset(one.ranks))
    ]
    single = sorted([*_joined(holders), *links], key=lambda finding: -finding.seconds)
    return [*single, *_host_bound(partitions), *_exposed(partitions)]


def _holders_up(traces: Sequence[Trace], partitions: Sequence[Partition], span_s: float) -> list[Finding]:
    """The ranks whose own time is an exception, each with what it has more of than the median rank."""
    if len(partitions) < 2 or not any(one.seconds["wait"] for one in partitions):
        return []
    seconds = {part: np.array([one.seconds[part] for one in partitions]) for part in PARTS if part != "wait"}
    own = np.sum(list(seconds.values()), axis=0)
    excess = own - np.median(own)
    spread = float(np.median(np.abs(excess)))
    found = []
    for i in np.flatnonzero(excess >= max(_MIN_FRAC * span_s, _MIN_SPREADS * spread)).tolist():
        more = {part: float(column[i] - np.median(column)) for part, column in seconds.items()}
        part = max(more, key=lambda key: more[key])
        if part == "compute":
            kind, why = _why_compute(traces, i)
        elif part == "idle":
            kind, why = _why_idle(partitions, i, more["idle"])
        elif part == "transfer":
            kind, why = "slow transfer", "its communication takes longer on the wire than the median rank's"
        else:
            kind, why = "copies", "it copies more than the median rank"
        cost = float(excess[i])
        found.append(Finding(kind, (partitions[i].rank,), "", cost, cost / span_s, why))
    return found


def _joined(holders: Sequence[Finding]) -> list[Finding]:
    """Ranks with the same cause as one finding, and what it costs in words."""
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for one in sorted(holders, key=lambda finding: -finding.seconds):
        by_kind[one.kind].append(one)
    found = []
    for kind, same in by_kind.items():
        worst, ranks = same[0], tuple(sorted(rank for one in same for rank in one.ranks))
        who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {_listed(ranks)} hold"
        most = "" if len(ranks) == 1 else f"; most of all rank {worst.ranks[0]}"
        cost = f"{duration(worst.seconds)} ({worst.span_frac:.1%} of the span)"
        text = f"{who} the others up by {cost}{most}: {worst.text}"
        found.append(Finding(kind, ranks, "", worst.seconds, worst.span_frac, text))
    return found


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} and {len(ranks) - 6} more"


def _why_compute(traces: Sequence[Trace], i: int) -> tuple[str, str]:
    """Whether rank number `i` computes the same more slowly, or computes more."""
    totals = [_compute_totals(trace) for trace in traces]
    names = {name for total in totals for name in total}
    slower = more = usual = 0.0
    for name in names:
        counts = np.array([total.get(name, (0, 0.0))[0] for total in totals], dtype=np.float64)
        sums = np.array([total.get(name, (0, 0.0))[1] for total in totals])
        means = sums[counts > 0] / counts[counts > 0]
        mean, count = float(np.median(means)), float(np.median(counts))
        usual += mean * min(count, counts[i])
        slower += sums[i] - mean * counts[i] if counts[i] <= count * 1.01 else 0.0
        more += mean * (counts[i] - count) if counts[i] > count * 1.01 else 0.0
    ratios = _ratios(totals, i)
    even = len(ratios) > 1 and ratios.min() > 1 + 0.5 * (np.median(ratios) - 1)
    if more > slower:
        return "more work", f"it runs {duration(more)} more kernels than the median rank: its share is larger"
    ratio = 1 + slower / usual if usual else 1.0
    if even:
        why = (
            f"all its compute kernels take {ratio:.2f} times as long as on the median rank, as many as there"
        )
        return "slow device", f"{why}: its device is slow (clocks, power, temperature, a neighbour)"
    name = max(names, key=lambda name: totals[i].get(name, (0, 0.0))[1] - _median_total(totals, name))
    return (
        "larger work",
        f"its {_shortened(name)} takes longer than on the median rank, its other kernels do not",
    )


def _compute_totals(trace: Trace) -> dict[str, tuple[int, float]]:
    """Count and seconds of each compute kernel of one rank, by name."""
    events = np.flatnonzero(work_kind(trace) == Kind.COMPUTE)
    labels = trace.label[events]
    counts = np.bincount(labels, minlength=len(trace.labels))
    sums = np.bincount(labels, weights=trace.duration_ns[events] / 1e9, minlength=len(trace.labels))
    return {trace.labels[i][1]: (int(counts[i]), float(sums[i])) for i in np.flatnonzero(counts).tolist()}


def _median_total(totals: Sequence[Mapping[str, tuple[int, float]]], name: str) -> float:
    return float(np.median([total.get(name, (0, 0.0))[1] for total in totals]))


def _ratios(totals: Sequence[Mapping[str, tuple[int, float]]], i: int) -> np.ndarray:
    """Time a call on rank number `i` over that on the median rank, for the kernels that make up the time."""
    whole = sum(seconds for _, seconds in totals[i].values())
    ratios = []
    for name, (count, seconds) in totals[i].items():
        means = [total[name][1] / total[name][0] for total in totals if name in total]
        if seconds >= _MIN_FRAC * whole and len(means) > 1 and np.median(means) > 0:
            ratios.append(seconds / count / float(np.median(means)))
    return np.array(ratios)


def _why_idle(partitions: Sequence[Partition], i: int, excess_s: float) -> tuple[str, str]:
    """Whether rank number `i` idles in one pause or many gaps, and whether its host is the cause."""
    one = partitions[i]
    usual_s = float(np.median([other.longest_idle_s for other in partitions]))
    if one.longest_idle_s - usual_s > _MOSTLY * excess_s:
        start, end = one.spans["idle"]
        at = int(np.argmax(end - start))
        first = min(int(spans[0][0]) for spans in one.spans.values() if len(spans[0]))
        when = duration((int(start[at]) - first) / 1e9)
        return "pause", f"it paused once, for {duration(one.longest_idle_s)}, {when} after its beginning"
    if one.host_bound_s is not None and one.host_bound_s > _MOSTLY * one.seconds["idle"]:
        return (
            "slow host",
            "its device idles because its host launches late (a busy CPU, data loading, Python)",
        )
    return "idle", "it works on nothing for longer than the median rank (input, locks, a busy machine)"


def _slow_links(
    partitions: Sequence[Partition], collectives: Sequence[Collective], span_s: float
) -> list[Finding]:
    """Groups whose calls of one kind and size move fewer bytes a second than those of most other groups.

    A slow link costs what it adds to the time on the wire, and no more than what of that no compute hides.
    """
    speeds: dict[tuple[str, float, int], dict[str, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for one in collectives:
        if one.sent_bytes_per_s and one.bytes and one.group_size and one.num_ranks > 1:
            speeds[one.name, one.bytes, one.group_size][one.group].append(one)
    found: dict[str, tuple[float, float, float, Collective]] = {}
    for groups in speeds.values():
        if len(groups) < 3:
            continue
        usual_by_group = {
            group: float(np.median([one.sent_bytes_per_s or 0.0 for one in calls]))
            for group, calls in groups.items()
        }
        usual = float(np.median(list(usual_by_group.values())))
        for group, speed in usual_by_group.items():
            if speed < _SLOW_LINK * usual:
                lost = sum(one.wire_s for one in groups[group]) * (1 - speed / usual)
                lost += found[group][0] if group in found else 0.0
                found[group] = (lost, speed, usual, groups[group][0])
    exposed = {one.rank: one.seconds["transfer"] for one in partitions}
    findings = []
    for group, (lost, speed, usual, one) in found.items():
        cost = min(lost, max(exposed[rank] for rank in one.wait_s))
        text = (
            f"{one.name} of group {group} moves {with_prefix(speed, 'B/s')} where other groups of "
            f"{one.group_size} move {with_prefix(usual, 'B/s')} with calls of the same size: a slow link "
            f"among these ranks costs {duration(cost)} ({cost / span_s:.1%} of the span)"
        )
        if cost >= _MIN_FRAC * span_s:
            ranks = tuple(sorted(one.wait_s))
            findings.append(Finding("slow link", ranks, group, cost, cost / span_s, text))
    return findings


def _host_bound(partitions: Sequence[Partition]) -> list[Finding]:
    """Whether devices idle because hosts launch late, on average over the ranks."""
    bound = [one.host_bound_s for one in partitions if one.host_bound_s is not None]
    spans = [sum(one.seconds.values()) for one in partitions]
    if not bound or np.mean(bound) < _HOST_BOUND_FRAC * np.mean(spans):
        return []
    seconds, share = float(np.mean(bound)), float(np.mean(bound) / np.mean(spans))
    text = (
        f"devices idle {duration(seconds)} ({share:.1%} of the span) before kernels that their hosts had not "
        "launched yet: fuse or compile operators, use CUDA graphs, remove synchronisations, feed data sooner"
    )
    return [Finding("host bound", tuple(one.rank for one in partitions), "", seconds, share, text)]


def _exposed(partitions: Sequence[Partition]) -> list[Finding]:
    """Communication that no compute hides, on average over the ranks: on the wire, and waiting."""
    span_s = float(np.mean([sum(one.seconds.values()) for one in partitions]))
    wait, transfer = (
        float(np.mean([one.seconds[part] for one in partitions])) for part in ("wait", "transfer")
    )
    if wait + transfer < _EXPOSED_FRAC * span_s:
        return []
    share = (wait + transfer) / span_s
    text = (
        f"communication that no compute hides takes {share:.1%} of the span: {duration(transfer)} on the "
        f"wire, {duration(wait)} waiting for late ranks"
    )
    return [
        Finding("exposed communication", tuple(p.rank for p in partitions), "", wait + transfer, share, text)
    ]


def _shortened(name: str, width: int = 50) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
