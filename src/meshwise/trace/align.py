"""One clock for all ranks, from the ends of their collectives.

No rank leaves an all-reduce (all-gather, reduce-scatter, all-to-all, barrier) before all have entered, and
all leave it within microseconds. So with end e[c, r] of collective c on rank r's clock, true end t[c] and
clock offset o[r] (what rank r's clock reads too much),

    e[c, r] = t[c] + o[r] + noise,      o of the lowest rank = 0.

Least absolute deviations over all c and r at once (iteratively reweighted least squares): groups chain, so
ranks that never meet in one group are aligned through those that both meet. Where collectives leave ranks
unlinked (the stages of a pipeline), messages link them: a send and its receive end together too, though less
exactly. Ranks without anything in common keep their own clock.

Traces that name one host share its clock, so their offsets are 0 if the calls then coincide; where a rank
would leave a call before another enters it, they are estimated all the same. (Threads of a CPU leave gloo's
calls one after the other, so on several hosts an offset counts there only if it is larger than the ends are
apart.)

`residual_s` is what remains: the median over collectives of how far apart the aligned ends still are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import by_key
from meshwise.trace.events import Ints
from meshwise.trace.match import Match, linked
from meshwise.trace.transfers import SYNCHRONISING

Floats = NDArray[np.float64]
_MAX_COLLECTIVES, _MAX_ENDS = 4000, 500_000
"""How many calls, and in sum over their ranks how many ends, tell the offsets well enough."""
_MAX_ITERATIONS, _SOLVED_NS = 2000, 1e-3
_NUM_ROUNDS = 30
_FLOOR_NS = 100.0
_COINCIDE_FRAC = 0.9


@dataclass(frozen=True, slots=True)
class Alignment:
    """How far each rank's clock is ahead of the common one, in ns and s, and how well that is known."""

    method: str
    offsets_ns: dict[int, int]
    residual_s: float | None
    num_collectives: int

    @property
    def offsets_s(self) -> dict[int, float]:
        """Seconds to subtract from a rank's own times."""
        return {rank: offset / 1e9 for rank, offset in self.offsets_ns.items()}


def align(
    ranks: Sequence[int], matches: Sequence[Match], *, one_host: bool = False, kernels: bool = True
) -> Alignment:
    """The clock offsets of `ranks` from their matched collectives.

    `one_host`: all ran on one machine; `kernels`: the collectives are kernels of a device.
    """
    if len(ranks) == 1:
        return Alignment("one rank", {ranks[0]: 0}, 0.0, 0)
    met = [m for m in matches if len(m.by_rank) > 1]
    shared = _thinned([m for m in met if not m.is_message and m.kind in SYNCHRONISING])
    if not any(one.issuperset(ranks) for one in linked(m.by_rank for m in shared)):
        shared += _thinned([m for m in met if m.is_message and not m.first.is_buffered])
    if not shared:
        return Alignment("the ranks' own clocks", dict.fromkeys(ranks, 0), None, 0)
    ends = _ends(shared, ranks)
    one_clock = one_host and _coincide(shared)
    offset = np.zeros(len(ranks)) if one_clock else _offsets(ends)
    residual = _residual(ends, offset)
    if not kernels:
        offset = np.where(np.abs(offset) > residual, offset, 0.0)
    return Alignment(
        method="one host, one clock" if one_clock else "ends of collectives",
        offsets_ns={rank: round(one) for rank, one in zip(ranks, offset.tolist(), strict=True)},
        residual_s=residual / 1e9,
        num_collectives=len(shared),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """When ranks left calls [ns]: one entry for each rank of each call, those of a call one after another."""

    call: Ints
    rank: Ints
    time: Floats
    num_ranks: int

    def over_calls(self, values: Floats) -> Floats:
        """The sum of `values` over the ranks of each call."""
        return np.asarray(np.bincount(self.call, values), dtype=np.float64)

    def over_ranks(self, values: Floats) -> Floats:
        """The sum of `values` over the calls of each rank."""
        return np.asarray(np.bincount(self.rank, values, self.num_ranks), dtype=np.float64)


def _ends(shared: Sequence[Match], ranks: Sequence[int]) -> _Ends:
    """When the ranks left these calls, counted from the first of these times."""
    column = {rank: i for i, rank in enumerate(ranks)}
    found = [(i, column[rank], t.end_ns) for i, one in enumerate(shared) for rank, t in one.by_rank.items()]
    call, rank, end_ns = np.array(found).T
    return _Ends(call, rank, (end_ns - end_ns.min()).astype(np.float64), len(ranks))


def _coincide(matches: Sequence[Match]) -> bool:
    """Whether the calls overlap in time on the ranks' own clocks."""
    times = [one.by_rank.values() for one in matches]
    overlap = [max(t.start_ns for t in calls) <= min(t.end_ns for t in calls) for calls in times]
    return float(np.mean(overlap)) >= _COINCIDE_FRAC


def _thinned(matches: Sequence[Match]) -> list[Match]:
    """Some calls of every group, as many as the offsets need."""
    num_ends = sum(len(one.by_rank) for one in matches)
    every = 1 + max(len(matches) // _MAX_COLLECTIVES, num_ends // _MAX_ENDS)
    if every == 1:
        return list(matches)
    groups = by_key(((one.group, one.group_name), one) for one in matches)
    return [one for found in groups.values() for one in found[::every]]


def _residual(ends: _Ends, offset: Floats) -> float:
    """Median over calls of the distance between the first and the last end."""
    aligned, first = ends.time - offset[ends.rank], np.flatnonzero(np.diff(ends.call, prepend=-1))
    return float(np.median(np.maximum.reduceat(aligned, first) - np.minimum.reduceat(aligned, first)))


def _offsets(ends: _Ends) -> Floats:
    """Offsets [ns] of the ranks. Of those that are linked by groups, the first has offset 0.

    Every round solves the normal equations with the true ends eliminated; the weights 1/|error| of the
    round before turn squares into absolute values. Clocks are first set by their first ends, since one that
    is decades off would leave no digits for the others.
    """
    first = np.full(ends.num_ranks, np.inf)
    np.minimum.at(first, ends.rank, ends.time)
    first[np.isinf(first)] = 0.0
    ends = replace(ends, time=ends.time - first[ends.rank])
    weight, offset = np.ones_like(ends.time), np.zeros(ends.num_ranks)
    for _ in range(_NUM_ROUNDS):
        total = ends.over_calls(weight)
        error = ends.time - (ends.over_calls(weight * ends.time) / total)[ends.call]
        previous, offset = offset, _solved(ends, weight, total, ends.over_ranks(weight * error), offset)
        if np.abs(offset - previous).max() < 0.5:
            break
        aligned = ends.time - offset[ends.rank]
        error = aligned - (ends.over_calls(weight * aligned) / total)[ends.call]
        weight = 1 / np.maximum(np.abs(error), _FLOOR_NS)
    offset += first
    for linked_ranks in linked(map(tuple, np.split(ends.rank, np.flatnonzero(np.diff(ends.call)) + 1))):
        offset[list(linked_ranks)] -= offset[min(linked_ranks)]
    return offset


def _solved(ends: _Ends, weight: Floats, total: Floats, right: Floats, guess: Floats) -> Floats:
    """The offsets o with D o - W' (W o / total) = right, by conjugate gradients preconditioned with D.

    W holds the weights [call, rank] and D their sums over the calls. An iteration costs as much as there are
    ends, where a factorisation would cost the cube of the number of ranks.
    """
    diagonal = np.maximum(ends.over_ranks(weight), np.finfo(float).tiny)

    def applied(x: Floats) -> Floats:
        mean = ends.over_calls(weight * x[ends.rank]) / total
        return diagonal * x - ends.over_ranks(weight * mean[ends.call])

    x = guess
    residue = right - applied(x)
    step = direction = residue / diagonal
    size = float(residue @ step)
    for _ in range(_MAX_ITERATIONS):
        if np.abs(step).max() < _SOLVED_NS:
            break
        along = applied(direction)
        length = size / float(direction @ along)
        x, residue = x + length * direction, residue - length * along
        step = residue / diagonal
        size, before = float(residue @ step), size
        direction = step + size / before * direction
    return x
