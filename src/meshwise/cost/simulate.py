"""A pipeline schedule played out in time: every rank, every microbatch, uneven stages, stragglers.

A schedule is nothing but an *order of actions* on each rank: the forward (F) of a microbatch, its
whole backward (B), or the two halves of it, the gradient of the input (I) and of the weights (W).
When an action starts follows from two rules: a rank does one thing at a time, in its order, and an
action waits for its data. F needs the activations of the stage before, B or I the gradient from the
stage after (the last stage: its own F), W its own I. So each rank goes through its list until some
data is not there yet, is parked, and goes on when the data comes; every action is visited once. If
all ranks are parked before the lists end, the order deadlocks.

Microbatches pass a given kind of action on a given chunk in the order 0, 1, 2, ..., so an order is
written as kinds and chunks alone and the microbatch is the count so far. Stages are numbered along
the model; a rank with several chunks has several stages. DualPipe sends half of the microbatches
through the ranks in each direction, with chunk 1 of a rank being its stage in the reverse direction,
and runs a forward of one direction together with a backward of the other: a *pair*.

For equal stages the results equal the closed forms of `meshwise.cost.schedule` exactly, whose
sources are also the sources of the orders.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwise.core.errors import PlanError
from meshwise.core.refusals import refuse
from meshwise.cost.schedule import NEEDS, SCHEDULES, valid

KINDS: tuple[str, ...] = ("F", "B", "I", "W")
"""Forward, whole backward, input half of the backward, weight half of the backward."""

_F, _B, _I, _W = range(4)
_PAIRED = 4  # added to a forward that runs together with the backward behind it
_CHUNK = 8  # one action of an order is kind [+ _PAIRED] + _CHUNK * chunk
_SLOT = np.array([0, 1, 1, 2])  # B and I both make the gradient that the stage before waits for

Order = list[int]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What every rank did when: columns, one row per action, rank after rank, each in its order.

    `chunk` counts within the rank, `stage` along the model. `paired` marks a forward that runs
    together with the backward in the next row, over the same time. `chunk_frac` is the share of a rank's
    layers that one chunk holds.
    """

    schedule: str
    num_ranks: int
    chunk_frac: float
    rank: Ints
    kind: Ints
    stage: Ints
    chunk: Ints
    microbatch: Ints
    paired: NDArray[np.bool_]
    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """From the first start on any rank to the last end on any rank [s]."""
        return float(self.end_s.max())

    @property
    def busy_s(self) -> Floats:
        """Time a rank computes [s], by rank; a pair counts once."""
        work_s = np.where(self.paired, 0.0, self.end_s - self.start_s)
        return np.asarray(np.bincount(self.rank, work_s, self.num_ranks), dtype=np.float64)

    @property
    def idle_s(self) -> Floats:
        """Time a rank does not compute while the phase lasts [s], by rank."""
        return self.makespan_s - self.busy_s

    @property
    def peak_in_flight(self) -> Floats:
        """Most microbatches alive at once, in activations of one full stage, by rank.

        Alive from the start of F to the end of B, or of W where the backward is split.
        """
        born = self.kind == _F
        gone = (self.kind == _B) | (self.kind == _W)
        alive = np.cumsum(born.astype(np.int64) - gone) + gone
        return np.array([alive[self.rank == r].max() for r in range(self.num_ranks)]) * self.chunk_frac


def rank_order(schedule: str, rank: int, pp: int, m: int, v: int = 1) -> tuple[Ints, Ints]:
    """What a rank does in a step: kinds (indices into `KINDS`) and chunks, in its order."""
    code = np.array(_ORDERS[schedule](rank, pp, m, v))
    return code % _PAIRED, code // _CHUNK


def simulate(
    schedule: str,
    f_s: ArrayLike,
    b_s: ArrayLike,
    w_s: ArrayLike,
    *,
    pp: int,
    m: int,
    v: int = 1,
    p2p_s: float = 0.0,
    slowdown: ArrayLike = 1.0,
) -> Timeline:
    """Play a schedule over `pp` ranks and `m` microbatches.

    `f_s`, `b_s`, `w_s`: forward, input gradient and weight gradient [s] of one microbatch on one
    stage, scalars or one value per stage in the order of the model (`pp * v` stages; DualPipe: `pp`).
    `p2p_s`: one hop [s] to another rank, which delays the receiver. `slowdown`: factor on a rank's
    computation, a scalar or one per rank.
    Raises PlanError if the schedule cannot run with these sizes, or arrays do not fit them.
    """
    index = SCHEDULES.index(schedule)
    if min(pp, m, v) < 1 or not valid(index, pp, m, v):
        raise PlanError(f"{schedule} cannot run pp={pp}, vpp={v}, {m} microbatches; it needs {NEEDS[index]}")
    stage_of = _placement(schedule, pp, v)
    orders = [np.array(_ORDERS[schedule](rank, pp, m, v)) for rank in range(pp)]
    code = np.concatenate(orders)
    rank = np.repeat(np.arange(pp), [len(order) for order in orders])
    kind, paired, chunk = code % _PAIRED, code % _CHUNK >= _PAIRED, code // _CHUNK
    stage = stage_of[rank, chunk]
    place = rank * stage_of.shape[1] + chunk
    microbatch = _count_so_far(3 * place + _SLOT[kind])

    source, is_far = _data_flow(schedule, stage_of, rank, kind, place, microbatch, paired)
    hop_s = np.where(is_far, _per("link", p2p_s, 1), 0.0)

    forward_s, input_s, weight_s = (_per("stage", t, stage_of.max() + 1)[stage] for t in (f_s, b_s, w_s))
    of_kinds = [forward_s, input_s + weight_s, input_s]
    compute_s = np.select([kind == _F, kind == _B, kind == _I], of_kinds, weight_s)
    compute_s *= _per("rank", slowdown, pp)[rank]
    first = np.flatnonzero(paired)
    compute_s[first + 1] += compute_s[first]
    compute_s[first] = 0.0

    start_s = _play(np.cumsum([len(order) for order in orders]), source, hop_s, compute_s)
    end_s = start_s + compute_s
    start_s[first], end_s[first] = start_s[first + 1], end_s[first + 1]
    chunk_frac = 1.0 if schedule == "dualpipe" else 1.0 / v
    return Timeline(schedule, pp, chunk_frac, rank, kind, stage, chunk, microbatch, paired, start_s, end_s)


def _play(stops: Ints, source: Ints, hop_s: Floats, hold_s: Floats) -> Floats:
    """Start of every action [s]. Rank r has the rows up to `stops[r]`; `source` is the row a row waits
    for (-1: none), `hop_s` how long its data travels, `hold_s` how long it occupies its rank."""
    sources, hops, holds = source.tolist(), hop_s.tolist(), hold_s.tolist()
    starts = [0.0] * len(sources)
    ends = [-1.0] * len(sources)
    parked: dict[int, list[int]] = {}
    limits: list[int] = stops.tolist()
    rows = [0, *limits[:-1]]
    clocks = [0.0] * len(limits)
    ready = list(range(len(limits)))
    while ready:
        rank = ready.pop()
        now = clocks[rank]
        for row in range(rows[rank], limits[rank]):
            waits_for = sources[row]
            if waits_for >= 0:
                data = ends[waits_for]
                if data < 0:
                    parked.setdefault(waits_for, []).append(rank)
                    rows[rank] = row
                    break
                data += hops[row]
                if data > now:
                    now = data
            starts[row] = now
            now += holds[row]
            ends[row] = now
            if row in parked:
                ready.extend(parked.pop(row))
        clocks[rank] = now
    if parked:
        stuck = ", ".join(str(rank) for rank in sorted(r for ranks in parked.values() for r in ranks))
        raise PlanError(f"the pipeline order deadlocks: ranks {stuck} wait for data that nobody can make")
    return np.array(starts)


def _data_flow(
    schedule: str,
    stage_of: Ints,
    rank: Ints,
    kind: Ints,
    place: Ints,
    microbatch: Ints,
    paired: NDArray[np.bool_],
) -> tuple[Ints, NDArray[np.bool_]]:
    """For every action: the row whose data it waits for (-1: none), and whether another rank makes that data.

    A place is one chunk on one rank.
    """
    before, after = _neighbours(stage_of, two_ways=schedule == "dualpipe")
    forward, backward = kind == _F, (kind == _B) | (kind == _I)
    comes_from = np.select([forward, backward], [before[place], after[place]], -1)

    num_microbatches = microbatch.max() + 1
    row_of = np.empty(3 * num_microbatches * stage_of.size, dtype=np.int64)
    slot = _SLOT[kind]
    row_of[(3 * place + slot) * num_microbatches + microbatch] = np.arange(len(kind))
    done_with = np.arange(len(kind)) + paired  # a paired forward is done when its backward is
    own_input = ~forward & (comes_from < 0)
    from_place = np.where(own_input, place, comes_from)
    from_slot = np.where(own_input, slot - 1, slot)
    made_in = row_of[(3 * from_place + from_slot) * num_microbatches + microbatch]
    source = np.where(from_place >= 0, done_with[made_in], -1)
    return source, (comes_from >= 0) & (comes_from // stage_of.shape[1] != rank)


def _neighbours(stage_of: Ints, *, two_ways: bool) -> tuple[Ints, Ints]:
    """The places before and after each place along the model, -1 at its ends."""
    before, after = np.full(stage_of.size, -1), np.full(stage_of.size, -1)
    places = np.arange(stage_of.size).reshape(stage_of.shape)
    ways = zip(places.T, stage_of.T, strict=True)
    for way, stages in ways if two_ways else [(places.ravel(), stage_of.ravel())]:
        along = way[np.argsort(stages)]
        before[along[1:]], after[along[:-1]] = along[:-1], along[1:]
    return before, after


def _per(what: str, values: ArrayLike, count: int) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    refuse("numbers of a pipeline", PlanError, what=what, of=array, count=count)
    return np.broadcast_to(array, (count,))


def _count_so_far(key: Ints) -> Ints:
    """How often the same key came before, for every position."""
    by_key = np.argsort(key, kind="stable")
    sorted_key = key[by_key]
    counts = np.empty_like(key)
    counts[by_key] = np.arange(len(key)) - np.searchsorted(sorted_key, sorted_key)
    return counts


def _placement(schedule: str, pp: int, v: int) -> Ints:
    """The stage of every chunk of every rank, shape [pp, chunks]."""
    rank = np.arange(pp)[:, None]
    if schedule in ("zb-v", "dualpipe-v"):
        return np.hstack([rank, 2 * pp - 1 - rank])
    return np.hstack([rank, pp - 1 - rank]) if schedule == "dualpipe" else rank + pp * np.arange(v)


def _gpipe(rank: int, pp: int, m: int, v: int) -> Order:
    return [_F] * m + [_B] * m if pp > 1 else [_F, _B] * m  # without a pipeline gradients just accumulate


def _1f1b(rank: int, pp: int, m: int, v: int) -> Order:
    warm = min(m, pp - rank - 1)
    return [_F] * warm + [_F, _B] * (m - warm) + [_B] * warm


def _interleaved(rank: int, pp: int, m: int, v: int) -> Order:
    """Groups of pp microbatches go through all chunks of a rank before the next group starts."""
    forward = [_F + _CHUNK * c for c in range(v) for _ in range(pp)] * (m // pp)
    backward = [_B + _CHUNK * c for c in reversed(range(v)) for _ in range(pp)] * (m // pp)
    warm = min(m * v, 2 * (pp - rank - 1) + (v - 1) * pp)
    steady = [action for pair in zip(forward[warm:], backward, strict=False) for action in pair]
    return forward[:warm] + steady + backward[m * v - warm :]


def _zb_h1(rank: int, pp: int, m: int, v: int) -> Order:
    """1F1B with the first W delayed by `rank` rounds, so that W's are left to fill the drain."""
    warm, delayed = min(m, pp - rank - 1), min(rank, m)
    rounds = ([_F] * (i < m - warm) + [_I] + [_W] * (i >= delayed) for i in range(m))
    return [_F] * warm + [action for actions in rounds for action in actions] + [_W] * delayed


def _zb_v(rank: int, pp: int, m: int, v: int) -> Order:
    f1, i1, w1 = (kind + _CHUNK for kind in (_F, _I, _W))
    drain = pp - rank
    return (
        [_F] * (2 * drain - 1)
        + [f1, _F] * rank
        + [f1, i1, w1] * drain
        + [_F, _I, _W, f1, i1, w1] * (m - (2 * drain - 1) - rank)
        + [_I, _W, f1, i1, w1] * (drain - 1)
        + [_I, i1] * rank
        + [_I, _W] * drain
        + [w1] * rank
        + [_W] * rank
    )


def _dualpipe(rank: int, pp: int, m: int, v: int) -> Order:
    near, far = (0, 1) if rank < pp // 2 else (1, 0)
    return _dualpipe_half(min(rank, pp - 1 - rank), pp // 2, m // 2, near, far)


def _dualpipe_v(rank: int, pp: int, m: int, v: int) -> Order:
    return _dualpipe_half(rank, pp, m, 0, 1)


def _dualpipe_half(rank: int, half: int, m: int, near: int, far: int) -> Order:
    """The eight steps of DualPipe for a rank of the first half: chunk `near` starts at this end of the
    ranks, chunk `far` comes back from the middle; `m` microbatches in each of them."""
    f, b, i, w = (kind + _CHUNK * near for kind in (_F, _B, _I, _W))
    f_far, b_far, i_far, w_far = (kind + _CHUNK * far for kind in (_F, _B, _I, _W))
    inner = half - rank - 1
    main = [f + _PAIRED, b_far, f_far + _PAIRED, b] * (m - 2 * half + rank + 1)
    if inner == 0:
        main[0] = f  # the two middle ranks start unpaired, which is sooner
    last = [(b_far, b)[k % 2] for k in range(rank + 1)] + [
        (i_far, i)[k % 2] for k in range(rank + 1, 2 * rank + 2)
    ]
    weights = [(w_far, w)[k % 2] for k in range(rank + 1, 2 * rank + 2)] + [w] * inner
    return (
        [f] * (2 * inner)
        + [f, f_far] * (rank + 1)
        + [i_far, w_far, f_far] * inner
        + main
        + [b_far, f_far + _PAIRED, b] * inner
        + last
        + [action for k in range(inner) for action in (weights[k], i)]
        + weights[inner:]
    )


_ORDERS: dict[str, Callable[[int, int, int, int], Order]] = dict(
    zip(SCHEDULES, (_gpipe, _1f1b, _interleaved, _zb_h1, _zb_v, _dualpipe, _dualpipe_v), strict=True)
)
