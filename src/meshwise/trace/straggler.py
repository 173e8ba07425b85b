"""Which rank holds the others up, from the waiting that it causes; no clock is needed.

In every step rank r waits W[r] inside its collectives: what they take beyond the call of the last rank, once
where several are in flight together. Of that, X[r] runs beside nothing else that the rank does. T[r] is such
exposed time of transfers: a rank that is early hides less of them than one that works longer, min T. So what
r is late by, what it loses in a step because others are late, and what the step would gain if r came with the
second to last, are

    m[r] = min over the other ranks of W - W[r]
    L[r] = min(W[r], X[r] + T[r] - min T)
    g[r] = min over the other ranks of L - L[r]

W counts what compute hides too: where collectives overlap compute, m tells a late rank from chance best, and
overstates by far what it costs. X alone is too low: transfers that the late rank hides, the others do not.
Without the bound W, a rank that hides more of a transfer would look late where the links decide.

Chance alone makes some rank last in each step, so a rank is named only if one of these rules holds. k is the
number of steps in which r waits least, S that of all steps, n that of ranks; the relief is the sum of
positive m.

    persistent  n x P(at least k of S at probability 1/n) <= 0.01, r has 80 % of all relief, which is >= 5 %
                of the span, and the median of m is >= 5 % of a step; where it is less, k counts only the
                steps whose m is >= 5 % of a step
    always      all m >= 8 % and median m >= 12 % of a step; 20 and 30 % if S < 6, 40 and 60 % if S < 4. One
                step in nine may be otherwise (something else happened in it), with 80 % of all relief too
    pause       one g is >= 2 % of the span, and >= 8 times as large as the next one of any rank (4 times
                where that one is < 5 % of a step), the median of L[r] over the steps taken off
    several     (8 ranks or more) of the steps in which L of any rank is 2 % of a step below the median
                rank's (three or more), L[r] is so in 80 %, typically by 2 % of a step, 6 standard deviations
                of the ranks and a quarter of what it is on the latest rank

If more than one holds, the costliest counts. A rank is late in the steps that would gain 2 % of a step, or
half of the mean, if that is less.

The first step of a job starts it and is left out. Ranks that share no collective, even through others, are
judged apart; messages count as collectives, so that no stage of a pipeline looks late because it ends last.
Where nothing marks the steps (see `steps`), rounds of calls stand in: the periods of their sequence, or,
where streams mix these, what lies between two calls of the rarest kind. One to eight steps or rounds are
taken together, so that a rank which is late every second step is found too.

Measured on synthetic jobs: tests/jobs.py.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.collectives import Collective, ranks_text
from meshwise.trace.events import Ints
from meshwise.trace.match import linked
from meshwise.trace.transfers import SYNCHRONISING

Calls = Sequence[Collective]
Floats = NDArray[np.float64]

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
_SEVERAL_RANKS, _SEVERAL_SPREADS, _OFTEN, _OF_LATEST_FRAC = 8, 6 * 1.48, 0.8, 0.25
_PERIODS_PER_STEP = (1, 2, 3, 4, 6, 8)
_SAME_FRAC = 0.85


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Ranks that the others wait for, and what the job would gain without."""

    ranks: tuple[int, ...]
    seconds: float
    steps: tuple[int, ...]
    """The numbers of the steps in which they are late; empty where rounds of calls stand in for them."""
    num_late: int
    """In how many of `num_steps` they are late; once is a pause."""
    num_steps: int
    each_s: float
    """By how much they are late in these, on average, and how long these take."""
    step_s: float
    start_s: float
    """When the first of these began, on the common clock."""


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """What each rank waits and loses in each step [S, n] because others are late, and how long steps take."""

    ranks: tuple[int, ...]
    waited_s: Floats
    lost_s: Floats
    number: Ints
    """Of each step, where they are marked."""
    start_s: Floats
    duration_s: Floats
    step_s: float
    span_s: float
    num_all_steps: int
    """With the first one."""


def holders_up(found: Sequence[Collective], first_step: int = -1) -> tuple[list[LateRanks], str]:
    """The ranks that hold the others up, and why none could be named, if waiting is too short to tell.

    `first_step`: the number of the job's first step, which starts it; chosen steps may begin later.
    """
    stragglers, reason = list[LateRanks](), ""
    kinds = (*SYNCHRONISING, "broadcast", "unknown")
    shared = [c for c in found if (c.num_ranks > 1 or any(c.wait_s.values())) and c.name in kinds]
    shared.sort(key=_end_s)  # every rank leaves them in this order
    for met in linked(one.wait_s for one in shared if len(one.wait_s) > 1):  # directly or through others
        ranks, calls = tuple(sorted(met)), [one for one in shared if met.issuperset(one.wait_s)]
        starts = min(one.step for one in calls) <= first_step
        views = [view for view in _views(ranks, calls, starts) if len(view.lost_s) >= MIN_STEPS]
        named = [*map(_persistent, views), *map(_several, views[:1]), *map(_pause, views[:1])]
        late = [_late(views[0], one) for one in named if one.any()]
        stragglers += sorted(late, key=lambda one: one.seconds)[-1:]
        if not views:
            reason = f"these are fewer than {MIN_STEPS + starts} steps of ranks {ranks_text(ranks)}"
    return stragglers, reason


def _views(ranks: tuple[int, ...], calls: Calls, starts: bool) -> Iterator[_Steps]:
    """The steps one by one, as marked, else periods of the calls; then two, three, ... together."""
    marks, step = np.unique([one.step for one in calls], return_inverse=True)
    waits = np.array([(i, r, *alone) for i, one in enumerate(calls) for r, alone in one.alone_s.items()])
    num_steps = len(marks)
    if is_marked := bool(marks[-1] >= 0):
        yield _steps(ranks, calls, waits, step, starts)
    else:
        position, total = _positions(calls)
        num_steps = _num_periods([(c.name, c.bytes, c.group) for c in calls if ranks[0] in c.wait_s])
    for each in _PERIODS_PER_STEP[is_marked:]:
        if num_steps // each > _RARE_STEPS:
            period = step // each if is_marked else position * (num_steps // each) // total
            yield _steps(ranks, calls, waits, period, starts)


def _positions(calls: Calls) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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


def _steps(ranks: tuple[int, ...], calls: Calls, waits: Floats, step: Ints, starts: bool) -> _Steps:
    """What each rank waits and loses in each step, but for the first where that `starts` the job."""
    num_steps = int(step.max()) + 1
    start, sums = np.full(num_steps, np.inf), np.zeros((3, num_steps, len(ranks)))
    np.minimum.at(start, step, [call.start_s for call in calls])
    place = step[waits[:, 0].astype(np.int64)], np.searchsorted(ranks, waits[:, 1])
    for of, seconds in zip(sums, waits.T[2:], strict=True):
        np.add.at(of, place, seconds)
    wait, exposed, transfer = sums
    lost = np.minimum(wait, exposed + transfer - transfer.min(axis=1, keepdims=True))
    duration = np.diff(np.append(start, max(map(_end_s, calls))))
    marks = np.unique([call.step for call in calls])
    num_all_steps = num_steps - (num_steps > (marks >= 0).sum() > 1)
    of_steps = (wait[starts:], lost[starts:], marks[starts:], start[starts:], duration[starts:])
    return _Steps(ranks, *of_steps, float(np.median(duration)), float(duration.sum()), num_all_steps)


def _end_s(call: Collective) -> float:
    return call.start_s + call.wire_s + max(call.wait_s.values())


def _margins(seconds: Floats) -> Floats:
    """By how much each rank has less than any other, in each step; negative where another has less."""
    least, second = np.split(np.partition(seconds, 1, axis=1)[:, :2], 2, axis=1)
    return np.where(seconds == least, second, least) - seconds


def _persistent(view: _Steps) -> NDArray[np.bool_]:
    """The one rank, if any, that is last more often than chance has it, and by much."""
    margin = _margins(view.waited_s)
    relief = np.maximum(margin, 0).sum(axis=0)
    i = int(relief.argmax())
    steps, ranks = margin.shape
    median, much_s = float(np.median(margin[:, i])), _STEP_FRAC * view.step_s
    num_last = int((margin[:, i] > (0 if median >= much_s else much_s)).sum())
    is_rare = steps >= MIN_STEPS and ranks * _tail(num_last, steps, 1 / ranks) <= _CHANCE
    has_most = relief[i] >= max(_RELIEF_FRAC * relief.sum(), _STEP_FRAC * view.span_s)
    least_frac, median_frac = next(limits for from_steps, *limits in _ALWAYS if steps >= from_steps)
    least = float(np.sort(margin[:, i])[steps // _OTHERWISE])
    is_clear = least >= least_frac * view.step_s and median >= median_frac * view.step_s
    return np.asarray((np.arange(ranks) == i) & has_most & (is_clear or is_rare))


def _late(view: _Steps, chosen: NDArray[np.bool_]) -> LateRanks:
    """What the job would gain if the ranks `chosen` [n], of some steps [S, n], came with the last other one.

    In the first step those that are late in most are taken to be as late as in the next one, at most as in
    the median step.
    """
    in_step, is_late = (np.atleast_2d(chosen).any(axis=axis) for axis in (1, 0))
    others, own = view.lost_s[:, ~is_late].min(axis=1), view.lost_s[:, is_late].min(axis=1)
    gain_s = np.maximum(others - own, 0) * in_step
    slow = gain_s >= min(_SPAN_FRAC * view.step_s, gain_s.mean() / 2)
    num_late, num_steps = int(slow.sum()), len(slow)
    in_first_s = min(gain_s[0], np.median(gain_s)) * (slow.mean() >= _OFTEN)
    whole_s = float(gain_s.sum() + in_first_s * (view.num_all_steps - num_steps))
    each_s, step_s = float(gain_s[slow].mean()), float(np.median(view.duration_s[slow]))
    steps = tuple(view.number[slow].tolist() if len(view.number) == num_steps else ())
    ranks, start_s = tuple(np.array(view.ranks)[is_late].tolist()), float(view.start_s[slow][0])
    return LateRanks(ranks, whole_s, steps, num_late, num_steps, each_s, step_s, start_s)


def _tail(count: int, num: int, chance: float) -> float:
    """Probability of `count` or more hits in `num` independent trials, which may be thousands."""
    hits = range(count, num + 1)
    ways = (math.lgamma(num + 1) - math.lgamma(hit + 1) - math.lgamma(num - hit + 1) for hit in hits)
    odds = (hit * math.log(chance) + (num - hit) * math.log1p(-chance) for hit in hits)
    return math.fsum(math.exp(sum(both)) for both in zip(ways, odds, strict=True))


def _pause(view: _Steps) -> NDArray[np.bool_]:
    """The one rank, if any, that was late once, far more than any rank else, beyond its usual lateness."""
    margin = _margins(view.lost_s - np.median(view.lost_s, axis=0))
    next_largest, largest = np.partition(margin, -2, axis=None)[-2:].tolist()
    ratio = _PAUSE_RATIO_STEADY if next_largest < _STEP_FRAC * view.step_s else _PAUSE_RATIO
    is_far = len(margin) >= _RARE_STEPS and largest >= max(_SPAN_FRAC * view.span_s, ratio * next_largest)
    return np.asarray((margin == largest) & is_far)


def _several(view: _Steps) -> NDArray[np.bool_]:
    """The ranks, if any, that lose less than the median rank in most steps in which any does by much."""
    less = np.median(view.lost_s, axis=1, keepdims=True) - view.lost_s
    less = less[less.max(axis=1) >= _SPAN_FRAC * view.step_s]
    if len(less) < MIN_STEPS:
        return np.zeros(view.lost_s.shape[1], dtype=bool)
    typical = np.median(less, axis=0)
    spread = float(np.median(np.abs(typical - np.median(typical))))
    least_s = max(_SPAN_FRAC * view.step_s, _SEVERAL_SPREADS * spread, _OF_LATEST_FRAC * typical.max())
    slow = ((less > 0).mean(axis=0) >= _OFTEN) & (typical >= least_s)
    return np.asarray(slow & (len(slow) >= _SEVERAL_RANKS) & ~slow.all())
