"""Which communication of one rank is which of another.

All ranks of a process group call its collectives in one order, so the k-th call of a rank is the k-th of
every rank, if their traces begin and end with the same calls. In this order of trust:

1. Sequence numbers, where the trace has them.
2. Else each rank's list is shifted against the longest until marked steps, kinds and sizes agree; where no
   shift does that, kinds and sizes alone, for a profiler may have counted its steps otherwise. A shift is
   possible only if a clock offset exists under which no rank leaves a synchronising call before all have
   entered it:

       max over calls of (start_b - end_a) <= offset of b <= min over calls of (end_b - start_a)

   On one host the offset is zero and the shift with most calls that coincide is taken. On unknown clocks,
   lists of equal length are not shifted; others take the shift under which the ends keep a far steadier
   distance than under the next one, else the one that needs the smallest offset. Threads may begin calls in
   another order on each rank: if no shift fits, the k-th call of each step, kind and size is the same.
   A stream whose kernels do not say of whom they are may belong to several groups. There, ranks with as many
   calls are of one group only if these can all overlap and their ends keep a steady distance.
3. Where no shift fits, or leaves more than a tenth of the ends apart (on one host: of the calls), because a
   trace lacks calls or holds those of another group too, every pair of alike calls votes for the distance
   between its ends; the distance with most votes is the one between the clocks, and calls are the same whose
   ends then coincide.

A message is matched the same way: the k-th send from rank a to rank b in a group is the k-th receive of rank
b from rank a. Sequence numbers do not help there, for each rank counts its own. A buffered send (gloo's) may
end long before its receive begins, so those are counted off, and only if both sides recorded as many.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.trace.events import Ints
from meshwise.trace.transfers import SYNCHRONISING, Transfer, times

_EXTRA_SHIFT = 8
_GOOD_FIT = 0.9
"""Share of calls that coincide if two ranks share a clock."""
_SLACK_NS = 100_000
_DRIFT = 2e-4
"""By how much calls may miss each other, and by what share of the time between them: clocks drift."""
_FAR_STEADIER = 0.2
"""Median deviation of the ends under a shift, relative to the next best one, that settles unknown clocks."""
_MAX_VOTES = 5_000_000
_SAME_END_NS = 1_000_000
_MORE_TOGETHER = 1.2
"""By how many times more calls must end together by the vote than in order."""
_UNEVEN = ("all_to_all", "gather", "scatter")
"""Collectives whose size differs between ranks."""

Group = tuple[int, ...] | str
_Ends = tuple[int | None, int | None]


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


def match(transfers: Mapping[int, Sequence[Transfer]], *, one_host: bool = False) -> Iterator[Match]:
    """The communications of all ranks, matched; one of a single rank stands alone; by group and index."""
    calls: dict[tuple[Group, str, _Ends | None], dict[int, list[Transfer]]]
    calls = defaultdict(lambda: defaultdict(list))
    for rank in sorted(transfers):
        for one in transfers[rank]:
            ends = (one.source, one.destination) if one.is_message else None
            calls[one.group, one.group_name, ends][rank].append(one)
    num_names = Counter(group for group, _, ends in calls if ends is None)
    for (group, name, ends), members in calls.items():
        if ends is not None:
            pair = "->".join("?" if rank is None else str(rank) for rank in ends)
            yield from _matches(pair, "", members, _numbers(ends, members, one_host))
            continue
        apart = [members] if name or not isinstance(group, str) else _apart(members, one_host)
        for part in apart:
            among: tuple[Group, str] = (group, name if num_names[group] > 1 else "")
            if len(apart) > 1:
                among = tuple(part), str(group)
            yield from _matches(*among, part, _numbers(None, part, one_host))


def _apart(members: dict[int, list[Transfer]], one_host: bool) -> list[dict[int, list[Transfer]]]:
    """The ranks of a stream in sets whose calls can have met; two ranks are not told apart."""
    if len(members) < 3:
        return [members]
    apart: list[dict[int, list[Transfer]]] = []
    for rank, found in members.items():
        near = (part for part in apart if _can_meet(next(iter(part.values())), found, one_host))
        if (part := next(near, None)) is None:
            apart.append(part := {})
        part[rank] = found
    return apart


def _can_meet(a: Sequence[Transfer], b: Sequence[Transfer], one_host: bool) -> bool:
    """Whether the k-th call of one rank can be the k-th of the other; it may where one has more."""
    if len(a) != len(b):
        return True
    unshifted = next((one for one in _possible(a, b, by_step=False) if one.shift == 0), None)
    jumps = np.diff(times(b)[1] - times(a)[1])
    is_steady = not len(jumps) or np.median(np.abs(jumps)) <= _SLACK_NS
    return bool(unshifted and is_steady and (not one_host or abs(unshifted.offset_ns) <= _SLACK_NS))


def _matches(
    group: Group, name: str, members: Mapping[int, list[Transfer]], numbers: Mapping[int, Sequence[int]]
) -> list[Match]:
    """Calls of equal numbers as one, in the order of time (of their numbers where every call has one)."""
    slots: dict[tuple[int, str, int], dict[int, Transfer]] = defaultdict(dict)
    for rank, found in members.items():
        seen: Counter[tuple[int, str]] = Counter()  # coalesced calls share a sequence number
        for number, transfer in zip(numbers[rank], found, strict=True):
            key = number, "" if transfer.is_message else transfer.kind
            slots[*key, seen[key]][rank] = transfer
            seen[key] += 1
    if _is_counted(members):
        return [Match(group, name, number, by_rank) for (number, _, _), by_rank in sorted(slots.items())]
    in_time = sorted(slots.values(), key=lambda by_rank: min(t.end_ns for t in by_rank.values()))
    return [Match(group, name, index, by_rank) for index, by_rank in enumerate(in_time)]


def _is_counted(members: Mapping[int, list[Transfer]]) -> bool:
    """Whether every call has a sequence number of its group: of messages each rank counts its own."""
    return all(t.sequence is not None and not t.is_message for found in members.values() for t in found)


def _numbers(
    ends: _Ends | None, members: Mapping[int, list[Transfer]], one_host: bool
) -> Mapping[int, Sequence[int]]:
    """The calls of a group, or the messages between two `ends`, numbered; equal numbers are the same call.

    Messages whose other side is not known stand alone.
    """
    if _is_counted(members):
        return {rank: [t.sequence or 0 for t in found] for rank, found in members.items()}
    if ends is not None:
        buffered = any(t.is_buffered for found in members.values() for t in found)
        uneven = len({len(found) for found in members.values()}) > 1
        if None in ends or ends[0] == ends[1] or (buffered and uneven):
            alone = itertools.count()
            return {rank: [next(alone) for _ in found] for rank, found in members.items()}
        if buffered:
            return {rank: range(len(found)) for rank, found in members.items()}
    return _by_order(members, one_host)


def _offset_bounds(a: Sequence[Transfer], b: Sequence[Transfer]) -> tuple[int, int] | None:
    """Between what offsets of the clock of `b` each of these pairs of calls overlaps; None if there is none.

    Calls that a rank may leave before all have entered (a broadcast by its root) do not count.
    """
    strict = [i for i, call in enumerate(a) if call.is_message or call.kind in SYNCHRONISING]
    if not strict:
        return 0, 0
    (start_a, end_a), (start_b, end_b) = times([a[i] for i in strict]), times([b[i] for i in strict])
    low, high = int((start_b - end_a).max()), int((end_b - start_a).min())
    slack = _SLACK_NS + _DRIFT * int(end_a.max() - start_a.min())
    return (low, high) if low <= high + slack else None


def _by_order(members: Mapping[int, list[Transfer]], one_host: bool) -> dict[int, list[int]]:
    """Each rank's calls numbered: equal numbers are the same call, a call of one rank alone has its own."""
    longest = max(members.values(), key=len)
    alone = itertools.count(2 * len(longest) + 2 * _EXTRA_SHIFT)
    numbers = {}
    for rank, found in members.items():
        tries = itertools.product((np.arange(len(found)), _order_of(longest, found)), (True, False))
        shifts = (_shifted(longest, found, order, one_host, by_step=by_step) for order, by_step in tries)
        num, positions = next((one for one in shifts if one[1]), (0, []))
        if num < _GOOD_FIT * len(found):
            voted = _voted(longest, found)
            is_better = not positions or _MORE_TOGETHER * num < len(voted) - voted.count(None)
            positions = voted if is_better else positions
        numbers[rank] = [next(alone) if position is None else position for position in positions]
    return numbers


def _order_of(reference: Sequence[Transfer], found: Sequence[Transfer]) -> Ints:
    """`found` in the order in which `reference` has calls of the same step, kind and size, if it has all."""
    sign_a, sign_b = _signatures(reference, found)
    a, b = np.argsort(sign_a, kind="stable"), np.argsort(sign_b, kind="stable")
    return b[np.argsort(a)] if np.array_equal(sign_a[a], sign_b[b]) else np.arange(len(found))


def _signatures(*lists: Sequence[Transfer], by_step: bool = True) -> list[Ints]:
    """Step, kind and size of every call as one number, the same for calls of two ranks that may be one."""
    known: dict[tuple[int, str, float | None], int] = {}

    def number(call: Transfer) -> int:
        kind = "message" if call.is_message else call.kind
        size = None if kind in _UNEVEN else call.payload_bytes
        return known.setdefault((call.step * by_step, kind, size), len(known))

    return [np.array([number(call) for call in calls], dtype=np.int64) for calls in lists]


@dataclass(frozen=True, slots=True)
class _Shift:
    """One way to lay the calls of a rank against those of another."""

    shift: int
    coincide_frac: float
    """Share of the calls that overlap on one clock."""
    num_together: int
    """How many end as far apart as most of them do."""
    offset_ns: int
    """The smallest offset under which all calls that met overlap."""
    spread_ns: float
    """Median deviation of the distances between the ends."""
    end_ns: float
    """Median distance between the ends, on one clock."""


def _shifted(
    reference: Sequence[Transfer], found: Sequence[Transfer], order: Ints, one_host: bool, *, by_step: bool
) -> tuple[float, list[int | None]]:
    """How many calls of `found` meet under the best shift, and their positions in `reference`.

    `order`: that in which `found` is shifted. There are no positions if no shift is possible.
    """
    shifts = list(_possible(reference, [found[i] for i in order], by_step=by_step))
    if not shifts:
        return 0, []
    steadiest, *others = sorted(shifts, key=lambda one: one.spread_ns)
    if one_host and max(one.coincide_frac for one in shifts) >= _GOOD_FIT:
        best = min(shifts, key=lambda one: (-one.coincide_frac, one.end_ns, abs(one.shift)))
    elif len(reference) == len(found) and any(one.shift == 0 for one in shifts):
        best = next(one for one in shifts if one.shift == 0)
    elif not others or steadiest.spread_ns < _FAR_STEADIER * others[0].spread_ns:
        best = steadiest
    else:
        best = min(shifts, key=lambda one: (abs(one.offset_ns), abs(one.shift)))
    num_met = max(best.num_together, one_host * best.coincide_frac * len(found))
    return num_met, [best.shift + place for place in np.argsort(order).tolist()]


def _possible(reference: Sequence[Transfer], found: Sequence[Transfer], *, by_step: bool) -> Iterator[_Shift]:
    """The shifts under which steps, kinds and sizes agree and some clock offset lets all calls overlap."""
    sign_a, sign_b = _signatures(reference, found, by_step=by_step)
    near = range(-_EXTRA_SHIFT, len(reference) - len(found) + _EXTRA_SHIFT + 1)
    later, earlier = np.flatnonzero(sign_a == sign_b[0])[:1], np.flatnonzero(sign_b == sign_a[0])[:1]
    for shift in sorted({*near, *later.tolist(), *(-earlier).tolist()}):
        a = slice(max(0, shift), min(len(sign_a), shift + len(sign_b)))
        b = slice(max(0, -shift), max(0, -shift) + a.stop - a.start)
        if (a.stop - a.start) * 2 < len(found) or (sign_a[a] != sign_b[b]).any():
            continue
        bounds = _offset_bounds(reference[a], found[b])
        if bounds is None:
            continue
        (start_a, end_a), (start_b, end_b) = times(reference[a]), times(found[b])
        apart = end_b - end_a
        spread = np.abs(apart - np.median(apart))
        yield _Shift(
            shift=shift,
            coincide_frac=float(((start_b <= end_a) & (start_a <= end_b)).mean()),
            num_together=int((spread <= _SAME_END_NS).sum()),
            offset_ns=min(max(0, bounds[0]), bounds[1]),
            spread_ns=float(np.median(spread)),
            end_ns=abs(float(np.median(apart))),
        )


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


def linked(groups: Iterable[Iterable[int]]) -> list[set[int]]:
    """The members of `groups` in the fewest sets that cut no group, by their lowest member."""
    set_of: dict[int, set[int]] = {}
    for members in {frozenset(group) for group in groups}:
        near = {id(one): one for member in members if (one := set_of.get(member))}
        whole = max(near.values(), key=len, default=set[int]())
        for other in (members, *near.values()):
            if other is not whole:
                whole |= other
                set_of |= dict.fromkeys(other, whole)
    return sorted({id(one): one for one in set_of.values()}.values(), key=min)
