"""The critical path through all ranks: the chain of work and waiting that decides when the job ends.

It is walked back from the last end. A collective ends when its last rank has come and the transfer is done,
so from its end the path goes over the transfer to the start of the last rank's call. Any other work began
when what ended last before it on its rank was over; time between the two is idle (see `partition` for its
cause). The pieces follow each other without a gap, so they sum to the path from its first start to the last
end.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.columns import by_key
from meshwise.trace.breakdown import RankIntervals, intervals, work
from meshwise.trace.collectives import Collective
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.intervals import NO_SPANS
from meshwise.trace.summary import Summary, waits_ns

_SLACK_NS = 500
"""By how much work may seem to begin before what it waited for was over."""


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
class CriticalPath:
    """The path of a job, what takes longest first."""

    span_s: float
    pieces: list[PathPiece]


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
    parts: RankIntervals
    """Why it was idle, on its own clock."""


def critical_path(summary: Summary) -> CriticalPath:
    """The critical path of a job."""
    shared = [one for one in summary.collectives if one.num_ranks > 1]
    offsets = summary.alignment.offsets_ns
    number: dict[int, dict[int, int]] = defaultdict(dict)
    for i, one in enumerate(shared):
        for rank, event in one.events.items():
            number[rank][event] = i
    found = summary.traces.each(_rank, offsets, number, waits_ns(summary.collectives))
    played = zip(summary.traces.ranks, found, strict=True)
    ranks = {rank: one for rank, one in played if len(one.start)}
    if not ranks:
        return CriticalPath(0.0, [])
    walked = _walk(summary, ranks, shared)
    spent = by_key(((kind, name), (rank, length)) for rank, kind, name, length in walked)
    total = sum(length for steps in spent.values() for _, length in steps)
    pieces = []
    for key, steps in spent.items():
        by_rank = {rank: sum(lengths) / 1e9 for rank, lengths in sorted(by_key(steps).items())}
        own = sum(length for _, length in steps)
        pieces.append(PathPiece(*key, len(steps), own / 1e9, own / total, by_rank))
    pieces.sort(key=lambda piece: (-piece.seconds, piece.name))
    return CriticalPath(total / 1e9, pieces)


def _rank(trace: Trace, offset_ns: int, number: Mapping[int, int], wait_ns: Mapping[int, int]) -> _Rank:
    """The work of one rank; of its events `number` is that of the collective, `wait_ns` the waiting."""
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
    label, seen = np.full(len(event), -1), event[event >= 0]
    used, label[event >= 0] = np.unique((trace.label[seen], done.kind[seen]), axis=1, return_inverse=True)
    labels = tuple((Kind(kind).name.lower(), trace.labels[name][1]) for name, kind in used.T.tolist())
    return _Rank(start, end, label, labels, call, before, intervals(trace, wait_ns))


def _ended_before(time: Ints, end: Ints) -> Ints:
    """What ended last at each time or before, -1 for nothing."""
    by_end = np.argsort(end, kind="stable")
    return np.append(by_end, -1)[np.searchsorted(end[by_end], time, side="right") - 1]


def _walk(
    summary: Summary, ranks: Mapping[int, _Rank], shared: Sequence[Collective]
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
            yield rank, "idle", ranks[rank].parts.why_idle(left + offset, now + offset), now - left
            now = left
