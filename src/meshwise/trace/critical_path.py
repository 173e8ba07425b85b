"""The critical path through all ranks: the chain of work and waiting that decides when the job ends.

It is walked back from the last end. A collective ends when its last rank has come and the transfer is done,
so from its end the path goes over the transfer to the start of the last rank's call. Any other work began
when what ended last before it on its rank was over; time between the two is idle (see `partition` for its
cause). The pieces follow each other without a gap, so they sum to the path from its first start to the last
end.

What would change the end is told by a replay. With S[c, r] and E[c, r] start and end of collective c on rank
r,

    S[c, r] = max(E[p, r] + W[c, r], E[q, r])      E[c, r] = max over the ranks of S[c, .] + x[c, r]

p is the collective whose end rank r's work before c goes back to (by the same rule), W the time since, q the
call of the same group that ended last before c began, and x the transfer. As measured, W and x give the
measured end exactly. With some of them changed, they give the end of a job that is late nowhere, or whose
transfers cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.breakdown import RankIntervals, work
from meshwise.trace.collectives import Collective
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.intervals import NO_SPANS, Spans, covered
from meshwise.trace.nesting import nearest
from meshwise.trace.straggler import median_of_others
from meshwise.trace.summary import Summary

Floats = NDArray[np.float64]
_Parts = Mapping[int, RankIntervals]
_SLACK_NS = 500
"""By how much work may seem to begin before what it waited for was over."""
_FASTER_FRAC = 0.1
_MOST_RANKS = 64
_LEAST_GAIN_FRAC = 1e-3


@dataclass(frozen=True, slots=True)
class PathPiece:
    """All of the path that is spent on one thing: a kind of work, or idle time by its cause."""

    kind: str
    name: str
    count: int
    seconds: float
    share_frac: float
    by_rank: dict[int, float]


@dataclass(frozen=True, slots=True)
class FasterJob:
    """How long the job would take if something were otherwise, all else as it was."""

    change: str
    span_s: float
    gain_s: float
    gain_frac: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The path of a job and what would shorten it, the longest and the largest first."""

    span_s: float
    pieces: list[PathPiece]
    what_if: list[FasterJob]


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """The work of one rank in the order of its start, times [ns] on the common clock."""

    start: Ints
    end: Ints
    label: Ints
    """Its place in `labels`; -1 for a span of operators on a rank without a device."""
    labels: tuple[tuple[str, str], ...]
    """Kind and name of events."""
    call: Ints
    """Number of the collective that several ranks recorded; -1 for other work."""
    before: Ints
    """What ended last before each began, -1 for nothing."""
    back: Ints
    """The call that this goes back to, -1 for none."""


def critical_path(summary: Summary) -> CriticalPath:
    """The critical path of a job and the gains of the changes that suggest themselves."""
    shared = [one for one in summary.collectives if one.num_ranks > 1]
    offsets = summary.alignment.offsets_ns
    number: dict[int, dict[int, int]] = defaultdict(dict)
    for i, one in enumerate(shared):
        for rank, event in one.events.items():
            number[rank][event] = i
    played = zip(summary.traces.ranks, summary.traces.each(_rank, offsets, number), strict=True)
    ranks = {rank: one for rank, one in played if len(one.start)}
    if not ranks:
        return CriticalPath(0.0, [], [])
    found: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    parts = {one.rank: one for one in summary.intervals()}
    for rank, kind, name, length in _walk(summary, ranks, parts, shared):
        found[kind, name][rank].append(length)
    total = sum(sum(lengths) for steps in found.values() for lengths in steps.values())
    pieces = []
    for key, steps in found.items():
        by_rank = {rank: sum(lengths) / 1e9 for rank, lengths in sorted(steps.items())}
        own, count = sum(map(sum, steps.values())), sum(map(len, steps.values()))
        pieces.append(PathPiece(*key, count, own / 1e9, own / total, by_rank))
    pieces.sort(key=lambda piece: (-piece.seconds, piece.name))
    return CriticalPath(total / 1e9, pieces, _what_if(summary, ranks, parts, shared))


def _rank(trace: Trace, offset_ns: int, number: Mapping[int, int]) -> _Rank:
    """The work of one rank; `number` is that of the collective of each of its events."""
    done, spans = work(trace), NO_SPANS
    alone = np.flatnonzero(done.kind != Kind.OTHER)
    if not trace.has_device:
        alone, spans = np.flatnonzero(done.kind == Kind.COMMUNICATION), done.spans[Kind.COMPUTE]
    event = np.concatenate([alone, np.full(len(spans[0]), -1)])
    start = np.concatenate([trace.start_ns[alone], spans[0]]) - offset_ns
    end = np.maximum(np.concatenate([trace.end_ns[alone], spans[1]]) - offset_ns, start + 1)
    order = np.lexsort((end, start))
    event, start, end = event[order], start[order], end[order]
    before, loosely = (_ended_before(start + slack, end) for slack in (0, _SLACK_NS))
    before = np.where(loosely < np.arange(len(start)), loosely, before)
    calls, operators = np.flatnonzero(event >= 0), np.flatnonzero(event < 0)
    if len(operators):  # a call was made by the operators that run when it begins
        place = np.searchsorted(operators, calls) - 1
        runs = (place >= 0) & (end[operators[np.maximum(place, 0)]] > start[calls])
        before[calls[runs]] = operators[place[runs]]
    call = np.array([number.get(one, -1) for one in event.tolist()], dtype=np.int64)
    back = np.append(nearest(before, call >= 0), -1)[before]
    label, seen = np.full(len(event), -1), event[event >= 0]
    used, label[event >= 0] = np.unique((trace.label[seen], done.kind[seen]), axis=1, return_inverse=True)
    labels = tuple((Kind(kind).name.lower(), trace.labels[name][1]) for name, kind in used.T.tolist())
    return _Rank(start, end, label, labels, call, before, back)


def _ended_before(time: Ints, end: Ints) -> Ints:
    """What ended last at each time or before, -1 for nothing."""
    by_end = np.argsort(end, kind="stable")
    return np.append(by_end, -1)[np.searchsorted(end[by_end], time, side="right") - 1]


def _walk(
    summary: Summary, ranks: Mapping[int, _Rank], parts: _Parts, shared: Sequence[Collective]
) -> Iterator[tuple[int, str, str, int]]:
    """(rank, kind, name, ns) of every piece, the last first."""
    place = {(rank, call): at for rank, one in ranks.items() for at, call in enumerate(one.call.tolist())}
    rank = max(ranks, key=lambda r: int(ranks[r].end.max()))
    at = int(ranks[rank].end.argmax())
    now = int(ranks[rank].end[at])
    seen: set[tuple[int, int]] = set()  # calls in another order on each rank lead back to themselves
    while at >= 0 and (rank, at) not in seen:
        seen.add((rank, at))
        call, label = int(ranks[rank].call[at]), int(ranks[rank].label[at])
        kind, name = "compute", "operators"
        if call >= 0:
            kind, name, rank = "transfer", shared[call].name, shared[call].last_rank
            at = place[rank, call]
        elif label >= 0:
            kind, name = ranks[rank].labels[label]
        begin, before = min(now, int(ranks[rank].start[at])), int(ranks[rank].before[at])
        if now > begin:
            yield rank, kind, name, now - begin
        now, at = begin, before
        if at >= 0 and (left := int(ranks[rank].end[at])) < now:
            offset = summary.alignment.offsets_ns[rank]
            yield rank, "idle", parts[rank].why_idle(left + offset, now + offset), now - left
            now = left


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    """The calls of all ranks, one node each, as the replay needs them; times in seconds.

    Behind the nodes stand the ranks' beginnings, and last the end of nothing.
    """

    calls: list[Ints]
    """The nodes of each collective, in an order in which they can be played."""
    call: Ints
    rank: Ints
    parent: Ints
    previous: Ints
    window_ns: Spans
    """Between which times each node's own work W lies."""
    wire_s: Floats
    begin_s: Floats
    tail_parent: Ints
    tail_s: Floats

    @property
    def own_s(self) -> Floats:
        """W of each node."""
        return (self.window_ns[1] - self.window_ns[0]) / 1e9


def _network(ranks: Sequence[_Rank], shared: Sequence[Collective]) -> _Network | None:
    """The calls of all ranks as a network; None where no order fits them."""
    num = [int((one.call >= 0).sum()) for one in ranks]
    total = sum(num)
    columns: list[list[Ints]] = []
    tails = []
    for i, (one, first) in enumerate(zip(ranks, np.cumsum([0, *num]).tolist(), strict=False)):
        at = np.flatnonzero(one.call >= 0)
        node = np.full(len(one.call) + 1, total + i)
        node[at] = np.arange(first, first + len(at))
        ends = np.append(one.end, one.start[0])
        previous = np.full(len(at), total + len(ranks))
        start, end = one.start[at], one.end[at]
        group = np.array([shared[call].group for call in one.call[at].tolist()])
        for name in np.unique(group):
            same = np.flatnonzero(group == name)
            ended = _ended_before(start[same], end[same])
            previous[same[ended >= 0]] = first + same[ended[ended >= 0]]
        back, last = one.back[at], int(one.end.argmax())
        columns.append([one.call[at], np.full(len(at), i), node[back], previous, ends[back], start, end])
        up = last if one.call[last] >= 0 else int(one.back[last])
        tails.append((int(node[up]), int(one.end[last] - ends[up])))
    call, rank, parent, previous, since, start, end = (np.concatenate(c) for c in zip(*columns, strict=True))
    order = _order(call, (parent, previous))
    if order is None:
        return None
    entered = np.full(len(shared), np.iinfo(np.int64).min)
    np.maximum.at(entered, call, start)
    by_call = np.argsort(call, kind="stable")
    parts = np.split(by_call, np.flatnonzero(np.diff(call[by_call])) + 1) if total else []
    nodes = {int(call[part[0]]): part for part in parts}
    begin = np.array([one.start[0] for one in ranks])
    return _Network(
        calls=[nodes[number] for number in order],
        call=call,
        rank=rank,
        parent=parent,
        previous=previous,
        window_ns=(since, start),
        wire_s=(end - entered[call]) / 1e9,
        begin_s=(begin - begin.min()) / 1e9,
        tail_parent=np.array([node for node, _ in tails]),
        tail_s=np.array([length for _, length in tails]) / 1e9,
    )


def _order(call: Ints, before: Iterable[Ints]) -> list[int] | None:
    """The calls, each behind those of the nodes `before` its own; None where none is the first."""
    needs: dict[int, set[int]] = {number: set() for number in np.unique(call).tolist()}
    for nodes in before:
        for number, node in zip(call.tolist(), nodes.tolist(), strict=True):
            if node < len(call):
                needs[number].add(int(call[node]))
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError:
        return None


def _replay(network: _Network, own_s: Floats, wire_s: Floats) -> Floats:
    """The end of the job [s] for each row of `own_s` and `wire_s` [scenario, node]."""
    num, total = own_s.shape
    end = np.full((num, total + len(network.begin_s) + 1), -np.inf)
    end[:, total:-1] = network.begin_s
    for nodes in network.calls:
        start = np.maximum(end[:, network.parent[nodes]] + own_s[:, nodes], end[:, network.previous[nodes]])
        end[:, nodes] = start.max(axis=1, keepdims=True) + wire_s[:, nodes]
    return (end[:, network.tail_parent] + network.tail_s).max(axis=1)


def _what_if(
    summary: Summary, ranks: Mapping[int, _Rank], parts: _Parts, shared: Sequence[Collective]
) -> list[FasterJob]:
    """What would shorten the job, the largest gain first; nothing where the calls cannot be put in order."""
    names = list(ranks)
    network = _network([ranks[rank] for rank in names], shared)
    if network is None:
        return []
    own, wire = network.own_s, network.wire_s
    others, mean = (_over_ranks(network, of) for of in (median_of_others, np.mean))
    scenarios = [("", own, wire), ("no rank later than the mean of the ranks", mean, wire)]
    awaited = {one.rank: one.awaited_s for one in summary.stragglers}
    for rank in sorted(awaited, key=lambda r: -awaited[r])[:_MOST_RANKS]:
        late = (network.rank == names.index(rank)) & (own > others)
        scenarios.append((f"rank {rank} no later than the median rank", np.where(late, others, own), wire))
    scenarios.append(("transfers that take no time", own, np.minimum(wire, 0.0)))
    changes = {
        "no idle time that hosts are the cause of": [parts[r].idle("host") for r in names],
        f"compute {_FASTER_FRAC:.0%} faster": [parts[r].spans["compute"] for r in names],
    }
    offsets = [summary.alignment.offsets_ns[rank] for rank in names]
    for (change, spans), frac in zip(changes.items(), (1.0, _FASTER_FRAC), strict=True):
        inside = np.zeros(len(own))
        for i, (found, offset) in enumerate(zip(spans, offsets, strict=True)):
            mine = network.rank == i
            since, until = (covered(found, time[mine] + offset) for time in network.window_ns)
            inside[mine] = (until - since) / 1e9
        scenarios.append((change, own - frac * inside, wire))
    ends = _replay(network, *(np.stack(column) for column in list(zip(*scenarios, strict=True))[1:]))
    was, *spans = ends.tolist()
    changed = zip(scenarios[1:], spans, strict=True)
    gains = [FasterJob(change, span, was - span, 1 - span / was) for (change, *_), span in changed]
    return sorted((one for one in gains if one.gain_frac > _LEAST_GAIN_FRAC), key=lambda one: -one.gain_s)


def _over_ranks(network: _Network, of: Callable[[Floats], Any]) -> Floats:
    """A statistic of the own work over the ranks of each call, at each of its nodes."""
    values = network.own_s
    for nodes in network.calls:
        values[nodes] = of(values[nodes])
    return values
