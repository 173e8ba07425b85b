"""What a pipeline rank has alive, and which weights it gathers, in the order of its forwards and backwards.

A rank that holds several chunks of the model has different microbatches of each in flight at once. `moments`
lists every combination that occurs, so that the most that is kept at once is exact for chunks of any sizes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.cost.schedule import SCHEDULES, weight_copies
from meshwise.cost.simulate import KINDS, rank_order

ACTIVE_CHUNKS = 3
"""So many chunks of a rank torch's looped schedules keep gathered at once."""

_F, _B, _I, _W = range(len(KINDS))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Combinations that occur on a rank, one a row, one column for each of its chunks.

    `alive`: microbatches between their forward and the end of their backward; `turned`: those of them that
    have the gradient of their input, but not yet that of their weights. `summed`: 1 once a backward of the
    chunk is through, `done` once all are. The others are 1 for the chunk at work: `entering` runs forward,
    `turning` a whole backward, `leaving` that of the input, `waited` that of the weights. A moment is left
    out where another one differs only in having more alive, or summed.

    `ends`: for each chunk the first four at its last backward.
    """

    alive: NDArray[np.float64]
    turned: NDArray[np.float64]
    summed: NDArray[np.float64]
    done: NDArray[np.float64]
    entering: NDArray[np.float64]
    turning: NDArray[np.float64]
    leaving: NDArray[np.float64]
    waited: NDArray[np.float64]
    ends: tuple[tuple[NDArray[np.float64], ...], ...]


STEADY = 3
"""Periods of a schedule's order, of as many microbatches as it has ranks, in which all moments have come."""


def moments(schedule: int, pp: int, vpp: int, num_microbatches: int, rank: int) -> Moments:
    """All moments of a step of pipeline rank `rank`; `schedule` is an index into `SCHEDULES`.

    With more microbatches those of `STEADY` periods come again, but under GPipe, which keeps all alive.
    """
    period = pp * int(weight_copies(schedule))
    if SCHEDULES[schedule] != "gpipe" and num_microbatches > STEADY * period:
        num_microbatches = STEADY * period + num_microbatches % period
    return all_moments(schedule, pp, vpp, num_microbatches, rank)


@lru_cache(maxsize=1024)
def all_moments(schedule: int, pp: int, vpp: int, num_microbatches: int, rank: int) -> Moments:
    """`moments` from the order of the whole step."""
    kinds, chunks = _order(schedule, pp, vpp, num_microbatches, rank)
    of_chunk = np.equal.outer(chunks, np.unique(chunks)).T

    def so_far(*which: int) -> NDArray[Any]:
        """How many actions of the kinds `which` each chunk has seen before each action, [chunk, action]."""
        seen = of_chunk & np.isin(kinds, which)
        return np.cumsum(seen, axis=1) - seen

    at_work = [of_chunk & (kinds == kind) for kind in (_F, _B, _I, _W)]
    alive = so_far(_F) + at_work[0] - so_far(_B, _W)
    backwards = so_far(_B, _W)
    all_of_them = (of_chunk & np.isin(kinds, (_B, _W))).sum(axis=1, keepdims=True)
    columns = [alive, so_far(_I) - so_far(_W), backwards > 0, backwards == all_of_them, *at_work]
    actions = np.concatenate(columns).T.astype(np.float64)
    last = [int(np.flatnonzero(mine & np.isin(kinds, (_B, _W)))[-1]) for mine in of_chunk]
    ends = tuple(tuple(np.split(actions[place], len(columns))[:4]) for place in last)
    grows = np.isin(np.arange(actions.shape[1]) // len(of_chunk), (0, 2))  # alive, summed
    rows = np.split(_fullest(np.unique(actions, axis=0), grows), len(columns), axis=1)
    return Moments(*rows, ends=ends)  # type: ignore[arg-type, misc]


def _fullest(rows: NDArray[np.float64], grows: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Of rows that differ only in the columns that `grow` memory, those that no other one exceeds in all."""
    _, group = np.unique(rows[:, ~grows], axis=0, return_inverse=True)
    found = []
    for mine in range(group.max() + 1):
        left = rows[group.ravel() == mine]
        left = left[np.argsort(-left[:, grows].sum(axis=1), kind="stable")]
        while len(left):
            found.append(left[0])
            left = left[(left[:, grows] > left[0, grows]).any(axis=1)]
    return np.array(found)


@lru_cache(maxsize=1024)
def gathers(schedule: int, pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[int, ...]:
    """How often in a step each chunk of a pipeline rank is gathered.

    A looped schedule keeps the next `ACTIVE_CHUNKS` chunks gathered that it will come to, and lets go of
    others: `_add_unshard_reshard` of torch.distributed.pipelining.
    """
    if vpp <= ACTIVE_CHUNKS:
        return (1,) * int(vpp * weight_copies(schedule))
    counts, coming = [0] * vpp, list[int]()  # from the last action back: what is to come, the next first
    for chunk in reversed(_order(schedule, pp, vpp, num_microbatches, rank)[1].tolist()):
        if chunk in coming:
            coming.remove(chunk)
        elif len(coming) == ACTIVE_CHUNKS:
            counts[coming.pop()] += 1
        coming.insert(0, chunk)
    return tuple(count + (chunk in coming) for chunk, count in enumerate(counts))


def _order(schedule: int, pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[Any, Any]:
    return rank_order(SCHEDULES[schedule] if pp > 1 else "1f1b", rank, pp, num_microbatches, vpp)
