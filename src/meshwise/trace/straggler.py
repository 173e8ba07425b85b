"""Which rank holds the others up, from the waiting that it causes; no clock is needed.

In every step, rank r waits W[r] inside its collectives: what they take beyond the call of the last rank,
once where several are in flight together. The rank that the others wait for is the one that waits least,
and its margin is what a step would gain if it came with the second to last:

    m[r] = min over the other ranks of W - W[r]

Chance alone makes some rank last in each step, so a rank is named only if one of these rules holds. k is the
number of steps in which r waits least, S that of all steps, n that of ranks; the relief is the sum of
positive m.

    persistent  n x P(at least k of S at probability 1/n) <= 0.01, r has 80 % of all relief, which is >= 5 %
                of the span, and the median of m is >= 5 % of a step
    always      all m >= 8 % and median m >= 12 % of a step; 20 and 30 % if S < 6, 40 and 60 % if S < 4. One
                step in nine may be otherwise (something else happened in it), with 80 % of all relief too
    pause       one m is >= 2 % of the span, and >= 8 times as large as the next one of any rank (4 times
                where that one is < 5 % of a step), the median of W[r] over the steps taken off
    several     (8 ranks or more) W[r] below the median rank's in 80 % of the steps, typically by 5 %
                of a step and by 6 standard deviations of the ranks

The first step of a job starts it and is left out. Ranks that share no collective, even through others, are
judged apart; messages count as collectives, so that no stage of a pipeline looks late because it ends last.
Where nothing marks the steps (see `steps`), they are the periods of the sequence of calls, or, where streams
mix these, what lies between two calls of the rarest kind. One to eight of them are taken as a step, so that a
rank which is late every second step is found too.

Measured on synthetic jobs: tests/jobs.py.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.collectives import Collective, alone_waits, ranks_text
from meshwise.trace.events import Ints
from meshwise.trace.match import linked
from meshwise.trace.transfers import SYNCHRONISING

MIN_STEPS = 3
"""Fewer whole steps do not tell a slow rank from chance."""
_RARE_STEPS = 4
_CHANCE = 0.01
_RELIEF_FRAC = 0.8
_STEP_FRAC = 0.05
_ALWAYS = ((6, 0.08, 0.12), (4, 0.2, 0.3), (0, 0.4, 0.6))
"""From how many steps on, smallest margin, median margin."""
_OTHERWISE = 9
"""Of how many steps one may be otherwise."""
_SPAN_FRAC = 0.02
_PAUSE_RATIO, _PAUSE_RATIO_STEADY = 8.0, 4.0
_SEVERAL_RANKS, _SEVERAL_SPREADS, _OFTEN = 8, 6 * 1.48, 0.8
_PERIODS_PER_STEP = (1, 2, 3, 4, 6, 8)
_SAME_FRAC = 0.85


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Ranks that the others wait for, and what the job would gain without."""

    ranks: tuple[int, ...]
    seconds: float
    num_late: int
    """In how many of `num_steps` they came last; once is a pause."""
    num_steps: int
    each_s: float
    """By how much they are late in a step, on average, and how long a step takes."""
    step_s: float
    start_s: float
    """When the step of a pause began, on the common clock."""

    @property
    def is_pause(self) -> bool:
        """Whether this happened once, not step after step."""
        return self.num_late == 1


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Seconds that each rank waits in each step [S, n], and how long a step and the whole take."""

    ranks: tuple[int, ...]
    wait_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    step_s: float
    span_s: float
    num_all_steps: int
    """With the first one."""


def holders_up(found: Sequence[Collective], first_step: int = -1) -> tuple[list[LateRanks], str]:
    """The ranks that hold the others up, and why none could be named, if waiting is too short to tell.

    `first_step`: the number of the job's first step, which starts it; chosen steps may begin later.
    """
    stragglers: list[LateRanks] = []
    reason = ""
    kinds = (*SYNCHRONISING, "broadcast", "unknown")
    shared = [c for c in found if (c.num_ranks > 1 or any(c.wait_s.values())) and c.name in kinds]
    shared.sort(key=_end_s)  # every rank leaves them in this order
    for met in linked(one.wait_s for one in shared if len(one.wait_s) > 1):  # directly or through others
        ranks, calls = tuple(sorted(met)), [one for one in shared if met.issuperset(one.wait_s)]
        starts = min(one.step for one in calls) <= first_step
        views = [view for view in _views(ranks, calls, starts) if len(view.wait_s) >= MIN_STEPS]
        named = next((one for view in views if (one := _persistent(view) or _pause(view))), None)
        late = named or (_several(views[0]) if views else None)
        stragglers += [late] if late else []
        if not views:
            reason = f"fewer than {MIN_STEPS + starts} steps of ranks {ranks_text(ranks)} were recorded"
    return stragglers, reason


def _views(ranks: tuple[int, ...], calls: Sequence[Collective], starts: bool) -> Iterator[_Waiting]:
    """The waiting by one, two, ... steps as marked, else periods of the calls."""
    marks, step = np.unique([one.step for one in calls], return_inverse=True)
    num_steps, waits = len(marks), np.array(list(alone_waits(calls)))
    if is_marked := num_steps >= MIN_STEPS + starts:
        yield _waiting(ranks, calls, waits, step, starts)
    else:
        position, total = _positions(calls)
        num_steps = _num_periods([(c.name, c.bytes, c.group) for c in calls if ranks[0] in c.wait_s])
    for each in _PERIODS_PER_STEP[is_marked:]:
        if num_steps // each > _RARE_STEPS:
            period = step // each if is_marked else position * (num_steps // each) // total
            yield _waiting(ranks, calls, waits, period, starts)


def _positions(calls: Sequence[Collective]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The place of each call among those of its lowest rank, and how many these are."""
    count: dict[int, int] = defaultdict(int)
    lowest = [min(one.wait_s) for one in calls]
    place = []
    for call, rank in zip(calls, lowest, strict=True):
        place.append(count[rank])
        for member in call.wait_s:
            count[member] += 1
    return np.array(place), np.array([count[rank] for rank in lowest])


def _num_periods(keys: Sequence[object]) -> int:
    """How often the sequence repeats itself.

    What all keys occur a multiple of; where that says nothing, from the sequence, else of the rarest key.
    """
    counts = Counter(keys)
    if (most := math.gcd(*counts.values())) > _RARE_STEPS:
        return most
    known = {key: number for number, key in enumerate(counts)}
    numbers = np.array([known[key] for key in keys])
    for period in range(1, len(keys) // MIN_STEPS + 1):
        if (numbers[period:] == numbers[:-period]).mean() >= _SAME_FRAC:
            return len(keys) // period
    return min((num for num in counts.values() if num > _RARE_STEPS), default=1)


def _waiting(
    ranks: tuple[int, ...], calls: Sequence[Collective], waits: NDArray[np.float64], step: Ints, starts: bool
) -> _Waiting:
    """The `waits` of each rank in each step, but for the first where that `starts` the job."""
    num_steps = int(step.max()) + 1
    wait, start = np.zeros((num_steps, len(ranks))), np.full(num_steps, np.inf)
    np.minimum.at(start, step, [call.start_s for call in calls])
    at, rank, seconds = waits.T
    np.add.at(wait, (step[at.astype(np.int64)], np.searchsorted(ranks, rank)), seconds)
    end_s = max(map(_end_s, calls))
    step_s = float(np.median(np.diff(np.append(start, end_s))))
    num_all_steps = num_steps - (num_steps > len({call.step for call in calls} - {-1}) > 1)
    return _Waiting(ranks, wait[starts:], start[starts:], step_s, end_s - float(start.min()), num_all_steps)


def _end_s(call: Collective) -> float:
    return call.start_s + call.wire_s + max(call.wait_s.values())


def _margins(wait: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much each rank waits less than any other, in each step; negative where another waits less."""
    least, second = np.partition(wait, 1, axis=1)[:, :2].T
    others = np.where(wait == least[:, None], second[:, None], least[:, None])
    return others - wait


def _persistent(view: _Waiting) -> LateRanks | None:
    """One rank that is last more often than chance has it, and by much."""
    margin = _margins(view.wait_s)
    relief = np.maximum(margin, 0).sum(axis=0)
    i = int(relief.argmax())
    steps, ranks = margin.shape
    num_last, median = int((margin[:, i] > 0).sum()), float(np.median(margin[:, i]))
    is_rare = steps >= _RARE_STEPS and ranks * _tail(num_last, steps, 1 / ranks) <= _CHANCE
    is_rare &= median >= _STEP_FRAC * view.step_s
    has_most = relief[i] >= max(_RELIEF_FRAC * relief.sum(), _STEP_FRAC * view.span_s)
    least_frac, median_frac = next(limits for from_steps, *limits in _ALWAYS if steps >= from_steps)
    least = float(np.sort(margin[:, i])[steps // _OTHERWISE])
    is_clear = least >= least_frac * view.step_s and median >= median_frac * view.step_s
    if not (has_most and (is_clear or is_rare)):
        return None
    return _late((view.ranks[i],), float(relief[i]), num_last, view)


def _late(ranks: tuple[int, ...], seconds: float, num_late: int, view: _Waiting) -> LateRanks:
    """Ranks that are late by `seconds` in the steps of a view, and as much in those that it leaves out."""
    num_steps = len(view.wait_s)
    each_s, start_s = seconds / num_steps, float(view.start_s[0])
    whole_s = each_s * view.num_all_steps
    return LateRanks(ranks, whole_s, num_late, num_steps, each_s, view.step_s, start_s)


def _tail(count: int, num: int, chance: float) -> float:
    """Probability of `count` or more hits in `num` independent trials, which may be thousands."""

    def probability(hits: int) -> float:
        ways = math.lgamma(num + 1) - math.lgamma(hits + 1) - math.lgamma(num - hits + 1)
        return math.exp(ways + hits * math.log(chance) + (num - hits) * math.log1p(-chance))

    return math.fsum(probability(hits) for hits in range(count, num + 1))


def _pause(view: _Waiting) -> LateRanks | None:
    """One rank that was late once, far more than any rank ever else, beyond what it usually is."""
    margin = _margins(view.wait_s - np.median(view.wait_s, axis=0))
    place = np.unravel_index(int(margin.argmax()), margin.shape)
    largest, next_largest = float(margin[place]), float(np.partition(margin, -2, axis=None)[-2])
    is_steady = next_largest < _STEP_FRAC * view.step_s
    ratio = _PAUSE_RATIO_STEADY if is_steady else _PAUSE_RATIO
    if len(margin) < _RARE_STEPS or largest < max(_SPAN_FRAC * view.span_s, ratio * next_largest):
        return None
    start_s, ranks = float(view.start_s[int(place[0])]), (view.ranks[int(place[1])],)
    return LateRanks(ranks, largest, 1, len(margin), largest, view.step_s, start_s)


def _several(view: _Waiting) -> LateRanks | None:
    """Ranks that wait less than the median rank, step after step."""
    num_ranks = len(view.ranks)
    if num_ranks < _SEVERAL_RANKS:
        return None
    less = np.median(view.wait_s, axis=1, keepdims=True) - view.wait_s
    typical = np.median(less, axis=0)
    spread = float(np.median(np.abs(typical - np.median(typical))))
    least_s = max(_STEP_FRAC * view.step_s, _SEVERAL_SPREADS * spread)
    slow = ((less > 0).mean(axis=0) >= _OFTEN) & (typical >= least_s)
    if not slow.any() or slow.all():
        return None
    gain = np.maximum(view.wait_s[:, ~slow].min(axis=1) - view.wait_s[:, slow].min(axis=1), 0).sum()
    ranks, num_late = tuple(np.array(view.ranks)[slow].tolist()), int((less[:, slow] > 0).any(axis=1).sum())
    late = _late(ranks, float(gain), num_late, view)
    return late if late.seconds >= _SPAN_FRAC * view.span_s else None
