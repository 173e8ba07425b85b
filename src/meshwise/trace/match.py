"""Which communication of one rank is which of another.

All ranks of a process group call its collectives in one order, so the k-th call of a rank is the k-th of
every rank. Where the trace counts the calls (a sequence number), that is the match. Where it does not,
profilers of different ranks may have started some calls apart: each rank's list is shifted against the
longest until kinds and sizes agree, and among the shifts that agree equally, until the ends keep the
steadiest distance (that of the true match jitters by the network, that of a false one by whole steps).
Where no shift fits, because a trace lacks calls or holds those of another group too, every pair of alike
calls votes for the distance between its ends; the distance with most votes is the one between the clocks,
and calls are the same whose ends then coincide.

A message is matched the same way: the k-th send from rank a to rank b in a group is the k-th receive of rank
b from rank a. Sequence numbers do not help there, for each rank counts its own. A buffered send (gloo's) may
end long before its receive begins, so those are counted off, and only if both sides recorded as many.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.trace.events import Ints
from meshwise.trace.transfers import Transfer, times

_EXTRA_SHIFT = 8
_GOOD_FIT = 0.9
_MAX_VOTES = 5_000_000
_SAME_END_NS = 1_000_000
_UNEVEN = ("all_to_all", "gather", "scatter")
"""Collectives whose size differs between ranks."""

Group = tuple[int, ...] | str


@dataclass(frozen=True, slots=True)
class Match:
    """One communication of several ranks, by rank: number `index` of its group (of its pair, a message)."""

    group: Group
    group_name: str
    """Not empty where another group has the same ranks."""
    index: int
    by_rank: dict[int, Transfer]

    @property
    def first(self) -> Transfer:
        """The transfer of the lowest rank."""
        return self.by_rank[min(self.by_rank)]

    @property
    def kind(self) -> str:
        """The collective; `send_recv` for a message of which both sides are known."""
        return "send_recv" if self.is_message and len(self.by_rank) > 1 else self.first.kind

    @property
    def is_message(self) -> bool:
        """Whether this is a send and its receive (or one of them alone)."""
        return self.first.is_message


def match(transfers: Mapping[int, Sequence[Transfer]]) -> list[Match]:
    """The communications of all ranks, matched; one of a single rank stands alone; by group and index."""
    groups: dict[tuple[Group, str], dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[tuple[Group, str, int | None, int | None], dict[int, list[Transfer]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank in sorted(transfers):
        for one in transfers[rank]:
            if one.is_message:
                pairs[one.group, one.group_name, one.source, one.destination][rank].append(one)
            else:
                groups[one.group, one.group_name][rank].append(one)
    names: dict[Group, set[str]] = defaultdict(set)
    for group, name in groups:
        names[group].add(name)
    matches: list[Match] = []
    for (group, name), members in groups.items():
        matches += _collectives(group, name if len(names[group]) > 1 else "", members)
    for (_, _, source, destination), members in pairs.items():
        matches += _messages(source, destination, members)
    return matches


def _collectives(group: Group, name: str, members: Mapping[int, list[Transfer]]) -> list[Match]:
    counted = all(t.sequence is not None for found in members.values() for t in found)
    numbers = _by_sequence(members) if counted else _by_order(members)
    slots: dict[tuple[int, str, int], dict[int, Transfer]] = defaultdict(dict)
    for rank, found in members.items():
        seen: dict[tuple[int, str], int] = defaultdict(int)  # coalesced calls share a sequence number
        for number, transfer in zip(numbers[rank], found, strict=True):
            slots[number, transfer.kind, seen[number, transfer.kind]][rank] = transfer
            seen[number, transfer.kind] += 1
    if counted:
        return [Match(group, name, number, by_rank) for (number, _, _), by_rank in sorted(slots.items())]
    in_time = sorted(slots.values(), key=lambda by_rank: min(t.end_ns for t in by_rank.values()))
    return [Match(group, name, index, by_rank) for index, by_rank in enumerate(in_time)]


def _messages(
    source: int | None, destination: int | None, members: Mapping[int, list[Transfer]]
) -> list[Match]:
    """The messages of one rank to another; those whose other side is not known stand alone."""
    known = source is not None and destination is not None and source != destination
    group = f"{'?' if source is None else source}->{'?' if destination is None else destination}"
    buffered = any(t.is_buffered for found in members.values() for t in found)
    if not known or (buffered and len({len(found) for found in members.values()}) > 1):
        return [
            Match(group, "", index, {rank: transfer})
            for rank, found in members.items()
            for index, transfer in enumerate(found)
        ]
    numbers = {rank: list(range(len(found))) for rank, found in members.items()}
    slots: dict[int, dict[int, Transfer]] = defaultdict(dict)
    for rank, order in (numbers if buffered else _by_order(members)).items():
        for number, transfer in zip(order, members[rank], strict=True):
            slots[number][rank] = transfer
    in_time = sorted(slots.values(), key=lambda by_rank: min(t.end_ns for t in by_rank.values()))
    return [Match(group, "", index, by_rank) for index, by_rank in enumerate(in_time)]


def _by_sequence(members: Mapping[int, list[Transfer]]) -> dict[int, list[int]]:
    return {rank: [t.sequence or 0 for t in found] for rank, found in members.items()}


def _by_order(members: Mapping[int, list[Transfer]]) -> dict[int, list[int]]:
    """Each rank's calls numbered: equal numbers are the same call, a call of one rank alone has its own."""
    longest = max(members.values(), key=len)
    alone = itertools.count(2 * len(longest) + 2 * _EXTRA_SHIFT)
    numbers = {}
    for rank, found in members.items():
        positions = _shifted(longest, found) or _voted(longest, found)
        numbers[rank] = [next(alone) if position is None else position for position in positions]
    return numbers


def _signatures(*lists: Sequence[Transfer]) -> list[Ints]:
    """Kind and size of every call as one number, the same for the calls of two ranks that may be one."""
    known: dict[tuple[str, float | None], int] = {}

    def number(call: Transfer) -> int:
        kind = "message" if call.is_message else call.kind
        return known.setdefault((kind, None if kind in _UNEVEN else call.payload_bytes), len(known))

    return [np.array([number(call) for call in calls], dtype=np.int64) for calls in lists]


def _shifted(reference: Sequence[Transfer], found: Sequence[Transfer]) -> list[int | None]:
    """Positions in `reference` of the calls of `found` under the best shift; empty if none fits well."""
    if found is reference:
        return list(range(len(found)))
    sign_a, sign_b = _signatures(reference, found)
    (start_a, end_a), (start_b, end_b) = times(reference), times(found)
    best, best_score = 0, (1.0, 0.0, 0.0)
    for shift in range(-_EXTRA_SHIFT, len(reference) - len(found) + _EXTRA_SHIFT + 1):
        a = slice(max(0, shift), min(len(sign_a), shift + len(sign_b)))
        b = slice(max(0, -shift), max(0, -shift) + a.stop - a.start)
        if (a.stop - a.start) * 2 < len(found):
            continue
        apart = end_b[b] - end_a[a]
        clock = np.median(apart)
        off = np.abs(apart - clock)
        meets = (start_b[b] - clock <= end_a[a]) & (start_a[a] <= end_b[b] - clock)
        if (sign_a[a] != sign_b[b]).any() or meets.mean() < _GOOD_FIT:
            continue
        score = (-float((off <= _SAME_END_NS).mean()), float(np.median(off)), float(abs(shift)))
        if score < best_score:
            best, best_score = shift, score
    return list(range(best, best + len(found))) if best_score[0] <= 0.0 else []


def _voted(reference: Sequence[Transfer], found: Sequence[Transfer]) -> list[int | None]:
    """Positions in `reference` of the calls that end when theirs do (None: nowhere)."""
    sign_a, sign_b = _signatures(reference, found)
    end_a, end_b = times(reference)[1], times(found)[1]
    reach = min(len(reference), max(1, _MAX_VOTES // len(found)))
    b = np.repeat(np.arange(len(found)), 2 * reach + 1)
    a = b + np.tile(np.arange(-reach, reach + 1), len(found))
    inside = (a >= 0) & (a < len(reference))
    b, a = b[inside], a[inside]
    alike = sign_b[b] == sign_a[a]
    b, a = b[alike], a[alike]
    if not len(a):
        return [None] * len(found)
    votes = np.sort(end_b[b] - end_a[a])
    count = np.searchsorted(votes, votes + _SAME_END_NS, side="right") - np.arange(len(votes))
    most = int(count.argmax())
    clock = np.median(votes[most : most + int(count[most])])
    distance = np.abs(end_b[b] - end_a[a] - clock)
    positions: list[int | None] = [None] * len(found)
    taken: set[int] = set()
    for pair in np.argsort(distance, kind="stable").tolist():
        i, j = int(b[pair]), int(a[pair])
        if distance[pair] <= _SAME_END_NS and positions[i] is None and j not in taken:
            positions[i] = j
            taken.add(j)
    return positions
