"""Every collective split into waiting for the last rank and transfer.

A rank that enters a collective early sits in it until the last one arrives, and the profiler books all of
that as communication. The last rank waits for nobody, so the shortest duration is the transfer itself:

    wire    = min over ranks of duration
    wait[r] = duration[r] - wire
    last    = the rank with the shortest duration: the straggler

This needs no clock. Clocks check it: the last rank must enter before any rank has left. Collectives for
which that fails by more than the alignment's error are not the same call and are told as a problem. With a
trace of one rank alone nothing can be split: wire is then the whole duration, and `num_ranks` says 1.

A send and its receive are split the same way where both sides work until the message is over (NCCL). Gloo's
sends are buffered and end at once; there the clocks must tell:

    wait[receiver] = start of the send - start of the receive, if positive
    wire           = duration of the receive - wait[receiver]
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from meshwise.core.columns import by_key
from meshwise.core.ledger import Collective as Kind
from meshwise.cost.collective import sent_bytes
from meshwise.trace.align import Alignment
from meshwise.trace.match import Match
from meshwise.trace.transfers import SYNCHRONISING, times

_SLACK_S = 1e-4
_FASTEST_FRAC = 0.1
_CLOSED_FORM = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of all ranks that recorded it; times in seconds, start on the common clock."""

    name: str
    group: str
    group_size: int | None
    index: int
    members: tuple[int, ...]
    """The ranks of the group, with or without a trace; those that have one where it is not known."""
    bytes: float | None
    """The full tensor; of an all-to-all with uneven splits what the rank that sends most sends."""
    bytes_by_rank: dict[int, float] | None
    """Where they differ."""
    dtype: str
    num_ranks: int
    start_s: float
    enter_s: dict[int, float]
    """When each rank entered, on the common clock."""
    wire_s: float
    wait_s: dict[int, float]
    last_rank: int
    sent_bytes_per_s: float | None
    step: int
    """Number of the step, where steps are marked, else -1."""
    events: dict[int, int]
    """Number of the event in each rank's trace."""
    alone_s: dict[int, list[float]] = field(default_factory=dict)
    """Where known, the seconds of each rank as of `breakdown.with_calls`."""

    @property
    def together_s(self) -> float:
        """From the entry of the last rank to the exit of the last; gloo's ranks leave one after the other."""
        left_s = max(enter + self.wire_s + self.wait_s[rank] for rank, enter in self.enter_s.items())
        most_s = self.wire_s + max(self.wait_s.values())
        return min(max(left_s - max(self.enter_s.values()), self.wire_s), most_s)


@dataclass(frozen=True, slots=True)
class RankWaiting:
    """How one rank meets the others: how often it came last, how long it waited, how long they for it."""

    rank: int
    num_last: int
    waited_s: float
    awaited_s: float


def collectives(matches: Sequence[Match], alignment: Alignment, zero_ns: int) -> tuple[list[Collective], int]:
    """The collectives in the order of time (start counted from `zero_ns`), and how many did not fit."""
    tolerance = 1e9 * (_SLACK_S + 5 * (alignment.residual_s or 0.0))
    found = [_collective(m, alignment, zero_ns) for m in matches if _overlaps(m, alignment, tolerance)]
    found = split_by_fastest(found) if len(alignment.offsets_ns) > 1 else found
    return sorted(found, key=lambda c: (c.start_s, c.group, c.index)), len(matches) - len(found)


def stragglers(found: Sequence[Collective]) -> list[RankWaiting]:
    """One row per rank over the collectives that several ranks recorded, of waiting that nothing hides.

    As long as the last rank waits itself, all wait for one that has no trace.
    """
    shared = [one for one in found if one.num_ranks > 1]
    num_last = Counter(one.last_rank for one in shared)
    waited_s, awaited_s = defaultdict[int, float](float), defaultdict[int, float](float)
    for one in shared:
        for rank, (_, seconds, _) in one.alone_s.items():
            waited_s[rank] += seconds
            awaited_s[one.last_rank] += max(seconds - one.alone_s[one.last_rank][1], 0.0)
    return [RankWaiting(rank, num_last[rank], waited_s[rank], awaited_s[rank]) for rank in sorted(waited_s)]


def split_by_fastest(found: Sequence[Collective]) -> list[Collective]:
    """The calls, those of groups of which ranks have no trace split by the fastest tenth of alike calls.

    Where all that have a trace wait for one that has none, their waiting looks like time on the wire.
    """
    alike = by_key(((one.name, one.group, one.bytes), one.wire_s) for one in found)
    fastest = {key: float(np.quantile(wires, _FASTEST_FRAC)) for key, wires in alike.items()}

    def split(one: Collective) -> Collective:
        wire_s = fastest[one.name, one.group, one.bytes]
        if one.num_ranks >= (one.group_size or 0) or not 0 < wire_s < one.wire_s:
            return one
        wait = {rank: wait + one.wire_s - wire_s for rank, wait in one.wait_s.items()}
        speed = one.sent_bytes_per_s and one.sent_bytes_per_s * one.wire_s / wire_s
        return replace(one, wire_s=wire_s, wait_s=wait, sent_bytes_per_s=speed)

    return [split(one) for one in found]


def _overlaps(one: Match, alignment: Alignment, tolerance_ns: float) -> bool:
    """Whether the calls can have met: all enter before one leaves; what is received was sent before."""
    if not one.is_message and one.kind not in SYNCHRONISING:
        return True
    offsets = alignment.offsets_ns
    starts = [t.start_ns - offsets[rank] for rank, t in one.by_rank.items() if t.kind != "recv"]
    ends = [t.end_ns - offsets[rank] for rank, t in one.by_rank.items() if t.kind != "send"]
    return max(starts, default=0) <= min(ends, default=np.inf) + tolerance_ns


def _collective(one: Match, alignment: Alignment, origin_ns: int) -> Collective:
    ranks = sorted(one.by_rank)
    began, ended = times([one.by_rank[rank] for rank in ranks])
    duration, start = ended - began, began - [alignment.offsets_ns[rank] for rank in ranks]
    last = ranks[int(np.lexsort((-start, duration))[0])]
    wire, wait = int(duration.min()), duration - duration.min()
    if len(ranks) > 1 and any(t.is_buffered for t in one.by_rank.values()):
        last = ranks[int(start.argmax())]
        is_receiver = np.array([one.by_rank[rank].kind == "recv" for rank in ranks])
        late = np.where(is_receiver, start.max() - start, 0)
        wire = int((duration - np.minimum(late, duration))[is_receiver][0])
        wait = np.where(is_receiver, duration - wire, np.maximum(duration - wire, 0))
    sizes = {rank: t.payload_bytes for rank, t in sorted(one.by_rank.items()) if t.payload_bytes is not None}
    group_size = next((t.group_size for t in one.by_rank.values() if t.group_size), None)
    payload = max(sizes.values(), default=None)
    text = one.group if isinstance(one.group, str) else ranks_text(one.group)
    return Collective(
        name=one.kind, group=f"{text} ({one.group_name})" if one.group_name else text,
        group_size=2 if one.is_message else group_size, index=one.index,
        members=tuple(ranks) if isinstance(one.group, str) else one.group,
        bytes=payload, bytes_by_rank=sizes if len(set(sizes.values())) > 1 else None,
        dtype=one.first.dtype, num_ranks=len(ranks), start_s=(int(start.min()) - origin_ns) / 1e9,
        enter_s={rank: int(t - origin_ns) / 1e9 for rank, t in zip(ranks, start, strict=True)},
        wire_s=wire / 1e9, wait_s={rank: int(w) / 1e9 for rank, w in zip(ranks, wait, strict=True)},
        last_rank=last, sent_bytes_per_s=_speed(one.kind, payload, group_size, wire),
        step=one.first.step, events={rank: one.by_rank[rank].event for rank in ranks},
    )  # fmt: skip


def _speed(kind: str, payload: float | None, group_size: int | None, wire_ns: int) -> float | None:
    """Bytes that leave a rank over the time on the wire; None where the trace does not tell enough."""
    if not payload or not wire_ns:
        return None
    if kind == "send_recv":
        return payload / (wire_ns / 1e9)
    if kind not in _CLOSED_FORM or not group_size:
        return None
    return float(sent_bytes(cast(Kind, kind), payload, float(group_size))) / (wire_ns / 1e9)


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3,8` where some follow each other, `0,2,4` where none do, `0,2,4,...,62` for many."""
    runs = np.split(np.array(ranks, dtype=np.int64), np.flatnonzero(np.diff(ranks) != 1) + 1)
    shown = [f"{of[0]}-{of[-1]}" if len(of) > 2 else ",".join(map(str, of)) for of in runs]
    return ",".join([*shown[:3], "...", shown[-1]] if len(shown) > 8 else shown)


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3`."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
