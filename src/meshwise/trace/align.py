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

from meshwise.trace.events import Trace
from meshwise.trace.match import Match, linked
from meshwise.trace.transfers import SYNCHRONISING

_MAX_COLLECTIVES = 4000
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
    column = {rank: i for i, rank in enumerate(ranks)}
    origin = min(t.end_ns for m in shared for t in m.by_rank.values())
    end = np.full((len(shared), len(ranks)), np.nan)
    for row, one in enumerate(shared):
        for rank, transfer in one.by_rank.items():
            end[row, column[rank]] = transfer.end_ns - origin
    offset = _offsets(end)
    residual = _residual(end - offset)
    one_clock = one_host and _coincide(shared) and not (kernels and _is_steady(end, offset))
    if one_clock:
        offset, residual = np.zeros_like(offset), _residual(end)
    elif not kernels:
        offset = np.where(np.abs(offset) > residual, offset, 0.0)
    return Alignment(
        method="one host, one clock" if one_clock else "ends of collectives",
        offsets_ns={rank: round(offset[i]) for rank, i in column.items()},
        residual_s=residual / 1e9,
        num_collectives=len(shared),
        drift={} if one_clock else _drift(ranks, end, residual),
    )


def undrifted(trace: Trace, drift: float) -> Trace:
    """The trace as a clock without `drift` would have recorded it; its first event stays where it is."""

    def right(time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return time_ns - np.rint((time_ns - origin) * (drift / (1 + drift))).astype(np.int64)

    origin = trace.start_ns[0] if len(trace) else 0
    start = right(trace.start_ns)
    memory = replace(trace.memory, time_ns=right(trace.memory.time_ns))
    return replace(trace, start_ns=start, duration_ns=right(trace.end_ns) - start, memory=memory)


def _drift(ranks: Sequence[int], end: NDArray[np.float64], residual_ns: float) -> dict[int, float]:
    """The drift of each rank relative to the first from the ends of calls; empty where it explains little."""
    span_ns = float(np.nanmax(end) - np.nanmin(end))
    present, group = np.unique(~np.isnan(end), axis=0, return_inverse=True)
    distances = [np.empty((0, len(ranks)))]
    for number in range(len(present)):
        rows = end[group.ravel() == number]
        rows = rows[np.argsort(np.nanmean(rows, axis=1))]
        if len(rows) >= _MIN_DRIFT_CALLS:
            distances.append(rows[len(rows) // 2 :] - rows[: len(rows) - len(rows) // 2])
    distance = np.concatenate(distances)
    distance = distance[np.nanmin(distance, axis=1, initial=np.inf) > 0]
    if not len(distance):
        return {}
    drift = _offsets(distance / np.nanmean(distance, axis=1, keepdims=True) * span_ns) / span_ns
    steady = end / (1 + drift)
    if np.abs(drift).max() > _MAX_DRIFT or 2 * _residual(steady - _offsets(steady)) >= residual_ns:
        return {}
    return dict(zip(ranks, drift.tolist(), strict=True))


def _coincide(matches: Sequence[Match]) -> bool:
    """Whether the calls overlap in time on the ranks' own clocks."""
    times = [one.by_rank.values() for one in matches]
    overlap = [max(t.start_ns for t in calls) <= min(t.end_ns for t in calls) for calls in times]
    return float(np.mean(overlap)) >= _COINCIDE_FRAC


def _is_steady(end: NDArray[np.float64], offset: NDArray[np.float64]) -> bool:
    """Whether the ends show a steady offset."""
    error = end - offset - np.nanmedian(end - offset, axis=1, keepdims=True)
    deviation = np.maximum(np.nanmedian(np.abs(error), axis=0), _FLOOR_NS)
    return bool(((deviation < _STEADY_NS) & (np.abs(offset) > 10 * deviation)).any())


def _thinned(matches: Sequence[Match]) -> list[Match]:
    return list(matches[:: 1 + len(matches) // _MAX_COLLECTIVES])


def _residual(aligned: NDArray[np.float64]) -> float:
    """Median over rows of the distance between the first and the last end."""
    return float(np.median(np.nanmax(aligned, axis=1) - np.nanmin(aligned, axis=1)))


def _offsets(end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Offsets [ns] of the columns of `end` [collective, rank] (NaN: not in the group).

    Of ranks that are linked by groups, the first has offset 0.

    Every round solves the normal equations with the true ends eliminated; the weights 1/|error| of the
    round before turn squares into absolute values. The first guess is the median against the mean end.
    """
    present = ~np.isnan(end)
    end = np.where(present, end, 0.0)
    weight = present.astype(np.float64)
    offset = np.zeros(end.shape[1])
    for _ in range(_NUM_ROUNDS):
        total = weight.sum(axis=1)
        share = weight / total[:, None]
        laplacian = np.diag(weight.sum(axis=0)) - weight.T @ share
        mean = (share * end).sum(axis=1)
        right = (weight * (end - mean[:, None])).sum(axis=0)
        previous, offset = offset, np.linalg.lstsq(laplacian, right, rcond=1e-12)[0]
        if np.abs(offset - previous).max() < 0.5:
            break
        true_end = (share * (end - offset)).sum(axis=1)
        error = end - offset - true_end[:, None]
        weight = present / np.maximum(np.abs(error), _FLOOR_NS)
    for ranks in linked(np.flatnonzero(row).tolist() for row in np.unique(present, axis=0)):
        offset[list(ranks)] -= offset[min(ranks)]
    return offset
