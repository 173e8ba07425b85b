"""What is wrong with a job, in words: who holds the others up and why, what link is slow, what is exposed.

Who holds the others up follows from the waiting (see `straggler`). What such a rank has more of than the
median of the others names the cause:

    compute     the same kernels, each slower: its device is slow. More or other kernels: its share is larger
    idle        its host launches late (or pauses once)
    transfer    a link of its group is slow: the wire time of one kind of call, by group, at equal size
    memory      copies

All ranks together are judged by their mean: idle time that the host is the cause of, and communication that
no compute hides. Each finding states the seconds it is about and, as a share, how much of the span.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import duration, with_prefix
from meshwise.trace.collectives import Collective, split_by_fastest
from meshwise.trace.events import Trace
from meshwise.trace.kernels import kernel_totals
from meshwise.trace.partition import PARTS, Partition
from meshwise.trace.shared_cores import shared_cores
from meshwise.trace.straggler import LateRanks, holders_up

_MIN_FRAC = 0.02
"""A finding about single ranks or groups is worth at least this share of the span."""
_SLOW_LINK, _SLOW_LINK_OF_TWO = 0.8, 0.67
_UNCERTAIN_LINK = "slow link or missing rank"
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
    traces: Sequence[Trace],
    partitions: Sequence[Partition],
    collectives: Sequence[Collective],
    first_step: int = -1,
) -> list[Finding]:
    """All findings about one job: those about single ranks and links first, the costliest first.

    `first_step` is that of the job, whatever steps were chosen; -1 where none is marked.
    """
    span_s = max((sum(one.seconds.values()) for one in partitions), default=0.0)
    if not span_s:
        return []
    collectives = split_by_fastest(collectives)
    stragglers, undecided = holders_up(collectives, first_step)
    links = _slow_links(traces, partitions, collectives, span_s)
    linked = {rank for link in links for rank in link.ranks}
    holders = [
        _holder(traces, partitions, one, span_s) for one in stragglers if one.seconds >= _MIN_FRAC * span_s
    ]
    unseen = {rank for one in collectives if one.num_ranks < (one.group_size or 0) for rank in one.wait_s}
    late = [one for one in holders if one.kind != "slow transfer" or not (linked | unseen) & set(one.ranks)]
    late = [one for one in late if len(one.ranks) < 2 or not linked.issuperset(one.ranks)]
    single = sorted([*late, *links], key=lambda one: (one.kind == _UNCERTAIN_LINK, -one.seconds))
    waited_s = float(np.mean([one.seconds["wait"] for one in partitions]))
    if undecided and waited_s >= _EXPOSED_FRAC * span_s and not single:
        text = (
            f"ranks wait {duration(waited_s)} on average, but {undecided}: too few to tell a slow rank from "
            "chance; record more steps"
        )
        single = [Finding("undecided", (), "", waited_s, waited_s / span_s, text)]
    single = single or _unnamed_messages(partitions, collectives, span_s)
    return [*single, *_host_bound(partitions), *_exposed(partitions)]


def _unnamed_messages(
    partitions: Sequence[Partition], collectives: Sequence[Collective], span_s: float
) -> list[Finding]:
    """That nobody can be named where ranks exchange messages of which the traces do not tell the ends."""
    unnamed = (one for one in collectives if one.name == "send_recv" and "->" not in one.group)
    if len(partitions) < 2 or not any(unnamed):
        return []
    exposed_s = float(np.mean([one.seconds["wait"] + one.seconds["transfer"] for one in partitions]))
    if exposed_s < _EXPOSED_FRAC * span_s:
        return []
    text = (
        f"ranks spend {duration(exposed_s)} on average in messages whose sender and receiver the traces do "
        "not name: whether one rank is late cannot be told; record with PyTorch 2.4 or later"
    )
    return [Finding("undecided", (), "", exposed_s, exposed_s / span_s, text)]


def _holder(
    traces: Sequence[Trace], partitions: Sequence[Partition], one: LateRanks, span_s: float
) -> Finding:
    """What the first (of several, the slowest) rank has more of than the others, in words."""
    index = {part.rank: i for i, part in enumerate(partitions)}
    own = [
        sum(s for part, s in partitions[index[rank]].seconds.items() if part != "wait") for rank in one.ranks
    ]
    worst = one.ranks[int(np.argmax(own))]
    if why := shared_cores(traces, worst, one):
        return Finding("shared cores", (), "", one.seconds, one.seconds / span_s, why)
    kind, why = _cause(traces, partitions, index[worst], one)
    who = f"rank {worst} holds" if len(one.ranks) == 1 else f"ranks {_listed(one.ranks)} hold"
    most = "" if len(one.ranks) == 1 else f"; most of all rank {worst}"
    seconds = min(one.seconds, span_s)
    cost = f"{duration(seconds)} ({seconds / span_s:.1%} of the span)"
    text = f"{who} the others up by {cost}{most}: {why}"
    return Finding(kind, one.ranks, "", seconds, seconds / span_s, text)


def _cause(
    traces: Sequence[Trace], partitions: Sequence[Partition], i: int, one: LateRanks
) -> tuple[str, str]:
    """What rank number `i` spends more time on than the median of the other ranks."""
    if one.is_pause:
        when = f"{duration(one.start_s)} after the job's beginning"
        return "pause", f"it was late once, in the step that began {when}, by {duration(one.seconds)}"
    more = {
        part: partitions[i].seconds[part] - _others([other.seconds[part] for other in partitions], i)
        for part in PARTS
        if part != "wait"
    }
    part = max(more, key=lambda key: more[key])
    if part == "compute":
        return _why_compute(traces, i)
    if part == "idle":
        return _why_idle(partitions, i)
    if part == "transfer":
        return "slow transfer", "its communication takes longer on the wire than the median rank's"
    return "copies", "it copies more than the median rank"


def _others(values: Sequence[float] | np.ndarray, i: int) -> float:
    """The median without that of rank number `i`."""
    return float(np.median(np.delete(values, i)))


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown} and {len(ranks) - 6} more"


def _why_compute(traces: Sequence[Trace], i: int) -> tuple[str, str]:
    """Whether rank number `i` computes the same more slowly, or computes more."""
    totals = [{one.name: one for one in kernel_totals([t]) if one.kind == "compute"} for t in traces]
    names = sorted({name for total in totals for name in total})
    counts, sums = (
        np.array([[getattr(total[n], of) if n in total else 0.0 for n in names] for total in totals])
        for of in ("count", "total_s")
    )
    own, own_s, others, others_s = counts[i], sums[i], np.delete(counts, i, 0), np.delete(sums, i, 0)
    means_s = np.ma.masked_where(others == 0, others_s / np.maximum(others, 1))
    mean_s = np.ma.median(means_s, axis=0).filled(0.0)
    usual, is_more, is_new = np.median(others, axis=0), own > np.median(others, axis=0) * 1.01, mean_s == 0
    more_s = own_s[is_new].sum() + (mean_s * (own - usual))[is_more].sum()
    slower_s = (own_s - mean_s * own)[~is_more & ~is_new].sum()
    if more_s > slower_s:
        why = f"it runs {duration(float(more_s))} more kernels than the median rank: its share is larger"
        return "more work", why
    usual_s = (mean_s * np.minimum(usual, own)).sum()
    ratio = 1 + slower_s / usual_s if usual_s else 1.0
    is_large = (own_s >= _MIN_FRAC * own_s.sum()) & ~is_new & (own > 0)
    ratios = own_s[is_large] / own[is_large] / mean_s[is_large]
    if len(ratios) > 1 and ratios.min() > 1 + 0.5 * (ratio - 1):
        why = (
            f"all its compute kernels take {ratio:.2f} times as long as on the median rank, as many as there"
        )
        return "slow device", f"{why}: its device is slow (clocks, power, temperature, a neighbour)"
    name = names[int((own_s - np.median(others_s, axis=0)).argmax())]
    return (
        "larger work",
        f"its {_shortened(name)} takes longer than on the median rank, its other kernels do not",
    )


def _why_idle(partitions: Sequence[Partition], i: int) -> tuple[str, str]:
    """Whether the host of rank number `i` is the cause of its idle time."""
    one = partitions[i]
    if one.host_bound_s is not None and one.host_bound_s > _MOSTLY * one.seconds["idle"]:
        return (
            "slow host",
            "its device idles because its host launches late (a busy CPU, data loading, Python)",
        )
    longer_s = one.seconds["idle"] - _others([other.seconds["idle"] for other in partitions], i)
    return (
        "idle",
        f"it is idle {duration(longer_s)} longer than the median rank (input, locks, a busy machine)",
    )


def _slow_links(
    traces: Sequence[Trace],
    partitions: Sequence[Partition],
    collectives: Sequence[Collective],
    span_s: float,
) -> list[Finding]:
    """Groups whose calls of one kind and size move fewer bytes a second than those of most alike groups.

    Alike are groups with the same strides between their ranks on as many hosts (nodes of 8, if none is told).

    A slow link costs what it adds to the time on the wire, and no more than what of that no compute hides.
    """
    host = _hosts(traces, {rank for one in collectives for rank in one.members})
    speeds: dict[tuple[object, ...], dict[str, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for one in collectives:
        if one.sent_bytes_per_s and one.bytes and one.group_size:
            alike = (*np.diff(one.members).tolist(), len({host[rank] for rank in one.members}))
            speeds[one.name, one.bytes, one.group_size, alike][one.group].append(one)
    found: dict[str, tuple[float, float, float, Collective]] = {}
    for groups in speeds.values():
        if len(groups) < 2:
            continue
        usual_by_group = {
            group: float(np.median([one.sent_bytes_per_s or 0.0 for one in calls]))
            for group, calls in groups.items()
        }
        usual = float(np.quantile(list(usual_by_group.values()), 0.5, method="higher"))
        least = _SLOW_LINK if len(groups) > 2 else _SLOW_LINK_OF_TWO
        for group, speed in usual_by_group.items():
            if speed < least * usual:
                lost = sum(one.wire_s for one in groups[group]) * (1 - speed / usual)
                lost += found[group][0] if group in found else 0.0
                found[group] = (lost, speed, usual, groups[group][0])
    exposed = {one.rank: one.seconds["transfer"] for one in partitions}
    findings = []
    for group, (lost, speed, usual, one) in found.items():
        cost = min(lost, max(exposed[rank] for rank in one.wait_s))
        unseen = sorted(set(one.members) - set(one.wait_s))
        why = f"rank {_listed(unseen)} (without a trace) comes late, or " if unseen else ""
        text = (
            f"{one.name} of group {group} moves {with_prefix(speed, 'B/s')} where other groups of "
            f"{one.group_size} move {with_prefix(usual, 'B/s')} with calls of the same size: {why}a slow "
            f"link among these ranks costs {duration(cost)} ({cost / span_s:.1%} of the span)"
        )
        if cost >= _MIN_FRAC * span_s:
            kind = _UNCERTAIN_LINK if unseen else "slow link"
            ranks = tuple(sorted(one.wait_s))
            findings.append(Finding(kind, ranks, group, cost, cost / span_s, text))
    return findings


def _hosts(traces: Sequence[Trace], ranks: Iterable[int]) -> dict[int, str]:
    """The host of each of `ranks`; one without a trace is where the next lower one is."""
    if not any(trace.host for trace in traces):
        return {rank: str(rank // 8) for rank in ranks}
    traced = sorted((trace.rank, trace.host or str(trace.rank // 8)) for trace in traces)
    lower = {rank: bisect_right(traced, rank, key=lambda one: one[0]) for rank in ranks}
    return {rank: traced[max(at - 1, 0)][1] for rank, at in lower.items()}


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
