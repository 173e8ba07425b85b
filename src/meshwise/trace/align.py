"""One clock for all ranks, from the ends of their collectives.

No rank leaves an all-reduce (all-gather, reduce-scatter, all-to-all, barrier) before all have entered, and
all leave it within microseconds. So with end e[c, r] of collective c on rank r's clock, true end t[c] and
clock offset o[r] (what rank r's clock reads too much),

    e[c, r] = t[c] + o[r] + noise,      o of the lowest rank = 0.

Least absolute deviations over all c and r at once (iteratively reweighted least squares): groups chain, so
ranks that never meet in one group are aligned through those that both meet. Where collectives leave ranks
unlinked (the stages of a pipeline), messages link them: a send and its receive end together too, though less
exactly. Ranks without anything in common keep their own clock.

Traces that name one host share its clock, so their offsets are 0 if the calls then coincide. They are
estimated all the same where that cannot be (a rank would leave a call before another enters it), or where
the ends of kernels keep a distance so steady (20 us) and so much larger than its deviation (10 times) that
the clocks must differ. (Threads of a CPU leave gloo's calls one after the other, so there that says nothing,
and on several hosts an offset counts only if it is larger than the ends are apart.)

`residual_s` is what remains: the median over collectives of how far apart the aligned ends still are.

Clocks drift. Between two calls of one group the clock of rank r advances by 1 + d[r] times the true time, so
the ratios of these distances over calls half a trace apart obey the same equation, with d for o. Drifts are
believed if the ends then lie half as far apart; the times of the traces are divided by 1 + d (`undrifted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.trace.events import Ints, Trace, grouped
from meshwise.trace.match import Match, linked
from meshwise.trace.transfers import SYNCHRONISING

Floats = NDArray[np.float64]
_MAX_COLLECTIVES, _MAX_ENDS = 4000, 500_000
"""How many calls, and in sum over their ranks how many ends, tell the offsets well enough."""
_MAX_ITERATIONS, _SOLVED_NS = 2000, 1e-3
_NUM_ROUNDS = 30
_FLOOR_NS = 100.0
_STEADY_NS = 20_000.0
_COINCIDE_FRAC = 0.9
_MIN_DRIFT_CALLS = 8
_MAX_DRIFT = 500e-6


@dataclass(frozen=True, slots=True)
class Alignment:
    """How far each rank's clock is ahead of the common one, in ns and s, and how well that is known."""

    method: str
    offsets_ns: dict[int, int]
    residual_s: float | None
    num_collectives: int
    drift: dict[int, float] = field(default_factory=dict)
    """By what share each rank's clock runs faster than the first one's; empty where no drift shows."""

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
    blocks = _blocks(shared, ranks)
    ends = _joined(blocks, len(ranks))
    offset = _offsets(ends)
    residual = _residual(ends, offset)
    one_clock = one_host and _coincide(shared) and not (kernels and _is_steady(ends, offset))
    if one_clock:
        offset = np.zeros_like(offset)
        residual = _residual(ends, offset)
    elif not kernels:
        offset = np.where(np.abs(offset) > residual, offset, 0.0)
    return Alignment(
        method="one host, one clock" if one_clock else "ends of collectives",
        offsets_ns={rank: round(one) for rank, one in zip(ranks, offset.tolist(), strict=True)},
        residual_s=residual / 1e9,
        num_collectives=len(shared),
        drift={} if one_clock else _drift(ranks, blocks, ends, residual),
    )


def undrifted(trace: Trace, drift: float) -> Trace:
    """The trace as a clock without `drift` would have recorded it; its first event stays where it is."""

    def right(time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return time_ns - np.rint((time_ns - origin) * (drift / (1 + drift))).astype(np.int64)

    origin = trace.start_ns[0] if len(trace) else 0
    start = right(trace.start_ns)
    memory = replace(trace.memory, time_ns=right(trace.memory.time_ns))
    return replace(trace, start_ns=start, duration_ns=right(trace.end_ns) - start, memory=memory)


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


_Blocks = list[tuple[Ints, Floats]]
"""Places of the ranks of a group, and when they left each of its calls: [call, rank]."""


def _blocks(shared: Sequence[Match], ranks: Sequence[int]) -> _Blocks:
    column = {rank: i for i, rank in enumerate(ranks)}
    origin = min(t.end_ns for m in shared for t in m.by_rank.values())
    by_rank = (sorted(one.by_rank.items()) for one in shared)
    ends = grouped((tuple(r for r, _ in of), [t.end_ns - origin for _, t in of]) for of in by_rank)
    return [(np.array([column[r] for r in of]), np.array(found, float)) for of, found in ends.items()]


def _joined(blocks: _Blocks, num_ranks: int) -> _Ends:
    sizes = np.repeat([len(ranks) for ranks, _ in blocks], [len(end) for _, end in blocks])
    rank = np.concatenate([np.tile(ranks, len(end)) for ranks, end in blocks])
    time = np.concatenate([end.ravel() for _, end in blocks])
    return _Ends(np.repeat(np.arange(len(sizes)), sizes), rank, time, num_ranks)


def _drift(ranks: Sequence[int], blocks: _Blocks, ends: _Ends, residual_ns: float) -> dict[int, float]:
    """The drift of each rank relative to the first from the ends of calls; empty where it explains little."""
    span_ns = float(ends.time.max() - ends.time.min())
    distances = []
    for columns, end in blocks:
        rows = end[np.argsort(end.mean(axis=1))]
        distance = rows[len(rows) // 2 :] - rows[: len(rows) - len(rows) // 2]
        distance = distance[distance.min(axis=1) > 0]
        if len(rows) >= _MIN_DRIFT_CALLS and len(distance):
            distances.append((columns, distance / distance.mean(axis=1, keepdims=True) * span_ns))
    if not distances:
        return {}
    drift = _offsets(_joined(distances, len(ranks))) / span_ns
    steady = replace(ends, time=ends.time / (1 + drift[ends.rank]))
    if np.abs(drift).max() > _MAX_DRIFT or 2 * _residual(steady, _offsets(steady)) >= residual_ns:
        return {}
    return dict(zip(ranks, drift.tolist(), strict=True))


def _coincide(matches: Sequence[Match]) -> bool:
    """Whether the calls overlap in time on the ranks' own clocks."""
    times = [one.by_rank.values() for one in matches]
    overlap = [max(t.start_ns for t in calls) <= min(t.end_ns for t in calls) for calls in times]
    return float(np.mean(overlap)) >= _COINCIDE_FRAC


def _is_steady(ends: _Ends, offset: Floats) -> bool:
    """Whether the ends show a steady offset."""
    aligned = ends.time - offset[ends.rank]
    error = np.abs(aligned - _medians(ends.call, aligned)[ends.call])
    deviation = np.maximum(_medians(ends.rank, error), _FLOOR_NS)
    return bool(((deviation < _STEADY_NS) & (np.abs(offset[np.unique(ends.rank)]) > 10 * deviation)).any())


def _medians(group: Ints, values: Floats) -> Floats:
    """The median of `values` in each group, in the order of the groups' numbers."""
    order = np.lexsort((values, group))
    _, first, count = np.unique(group[order], return_index=True, return_counts=True)
    middle = order[np.stack([first + (count - 1) // 2, first + count // 2])]
    return np.asarray(values[middle].mean(axis=0))


def _thinned(matches: Sequence[Match]) -> list[Match]:
    """Some calls of every group, as many as the offsets need."""
    num_ends = sum(len(one.by_rank) for one in matches)
    every = 1 + max(len(matches) // _MAX_COLLECTIVES, num_ends // _MAX_ENDS)
    if every == 1:
        return list(matches)
    groups = grouped(((one.group, one.group_name), one) for one in matches)
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
