"""Pipeline schedules in closed form: the bubble, the activations in flight, the time of the phase.

A model is cut into `pp` stages, one per rank, and a batch into `m` microbatches that flow through
them. One microbatch costs a stage `f_s` (F, forward), `b_s` (B, gradient of its input) and `w_s`
(W, gradient of its weights); a schedule that does not split the backward runs B and W as one. A
rank that holds `v` chunks of the model passes each microbatch `v` times, 1/v of the work each time.
The *bubble* is what the phase takes beyond the work of one rank, `m (F + B + W)`.

The phase is as long as the longest chain of actions that wait for each other. When all stages are
equal a schedule has only a handful of candidates for that chain, each of them linear in the times
and in the number of ranks to fill, so a bubble is the maximum of a few plain sums. These are the
bubbles of the *orders* that `meshwise.cost.simulate` plays, and the two agree exactly. The
papers print the one candidate that wins when F = B = W (docs/pipeline.md).

`p2p_s` is the time of one hop between neighbours, running beside the computation: it delays whoever
waits for the data. 1F1B and DualPipe wait for it in every round, the others while they fill and drain.

Everything broadcasts, `schedule` included: a grid of plans can hold all schedules along one axis.

Sources: GPipe arXiv 1811.06965; 1F1B (PipeDream-Flush) and interleaved 1F1B arXiv 2104.04473;
ZB-H1 and ZB-V arXiv 2401.10241; DualPipe arXiv 2412.19437 and, with DualPipe-V, the tables of
github.com/deepseek-ai/DualPipe.
"""

from collections.abc import Callable
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from meshwise.core.files import read_catalog
from meshwise.core.numbers import SINGLE, larger, smaller, where
from meshwise.core.units import Num

_NEEDS: dict[str, str] = read_catalog("schedules.toml")["needs"]
SCHEDULES, NEEDS = tuple(_NEEDS), tuple(_NEEDS.values())
"""The schedules by name (a schedule's index is its place in this tuple), and what each needs in words."""


def weight_copies(schedule: Num) -> Num:
    """How many stages' weights a rank holds: 2 for DualPipe, which runs the model in both directions."""
    return 1.0 + (np.asarray(schedule) == SCHEDULES.index("dualpipe"))


def bubble_s(
    schedule: Num, pp: Num, m: Num, v: Num, f_s: Num, b_s: Num, w_s: Num, p2p_s: Num = 0.0, lead_s: Num = 0.0
) -> Num:
    """Time [s] of the phase beyond the work of the slowest rank, `m (f_s + b_s + w_s + lead_s)`.

    `schedule`: index into `SCHEDULES`. `f_s`, `b_s`, `w_s`: one microbatch on one whole stage (all
    chunks of a rank), the mean of all stages; DualPipe's stage is 1/pp of the model as everywhere. `p2p_s`:
    one hop. `lead_s`: by how much a microbatch takes longer on the slowest stage.
    Exact for equal stages where `valid` holds and `p2p_s` is at most a fifth of the shortest action of a
    chunk; ZB-H1 with fewer than `pp` microbatches (2 pp if hops take time): an upper bound.
    """
    sizes = (pp, m, v, f_s, b_s, w_s, p2p_s, lead_s)
    return where(np.asarray(pp) > 1, _choose(schedule, _BUBBLES, sizes), 0.0)


def in_flight_microbatches(schedule: Num, pp: Num, m: Num, v: Num, stage: Num) -> Num:
    """Peak number of microbatches alive on rank `stage` (0-based), in activations of one full stage.

    A microbatch lives from its forward to the end of its backward, or of its W if that is split off
    (an upper bound then: B already frees what only B needs). ZB-H1 delays the W of later stages
    until all hold `pp`, as the first does in 1F1B; ZB-V holds 2 pp half-stages, DualPipe pp + 1
    stages over both directions, DualPipe-V 2 pp + 1 half-stages. Sources as above; the interleaved
    count is the warm-up of Megatron-LM and the one forward that follows it.
    """
    return _choose(schedule, _IN_FLIGHT, (pp, m, v, stage))


def valid(schedule: Num, pp: Num, m: Num, v: Num) -> NDArray[np.bool_]:
    """Whether a schedule can run with these sizes: a boolean mask over a grid of plans (`NEEDS`)."""
    sizes_are_positive = (np.asarray(pp) >= 1) & (np.asarray(m) >= 1)
    return np.logical_and(sizes_are_positive, _choose(schedule, _VALID, (pp, m, v)))


def _choose(schedule: Num, forms: tuple[Callable[..., Num], ...], args: tuple[Num, ...]) -> Num:
    """`forms[schedule](*args)`; over an array of schedules, each form is computed once and spread."""
    if isinstance(schedule, SINGLE):
        return forms[int(schedule)](*args)
    index = schedule.astype(np.intp)
    first, *others = np.flatnonzero(np.bincount(index.ravel()))
    chosen = forms[first](*args)
    for i in others:
        chosen = where(index == i, forms[i](*args), chosen)
    return chosen


def _longest(*chains_s: Num) -> Num:
    return reduce(larger, chains_s)


# A slowest stage that takes `lead` longer than the mean hides that much of a chain through the others:
# once, or as often as the chain lacks an action of the m. Hops are waited for in any case.


def _gpipe_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    return larger((pp - 1) * (f + b + w) - lead, 0.0) + 2 * (pp - 1) * hop


def _1f1b_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    """A rank can have no more than pp microbatches out: the chain goes down and up again and again."""
    rounds = m + pp - 1
    return larger((pp - 1) * (f + b + w) - lead, 0.0) + 2 * hop * (rounds - np.ceil(rounds / pp))


def _interleaved_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    return larger((pp - 1) * (f + b + w) / v - lead, 0.0) + 2 * hop * (pp * v - 1)


def _zb_h1_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    """Delayed W's fill the drain; the shortest of F, B and W limits how much of it they fill."""
    q, filled = pp - 1, smaller(m, pp) - 1
    return _longest(
        2 * q * hop,
        q * (f + b) - filled * f + 2 * q * hop - lead,
        q * (f + b) - filled * b + 3 * q * hop - lead,
        q * (f + b) - filled * w + 4 * q * hop - larger(filled, 1) * lead,
    )


def _zb_v_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    """With F = B = W all chains but the last rank's wait for its first microbatch, q F/2, vanish."""
    q = pp - 1
    f, b, w = f / 2, b / 2, w / 2
    leads, half_leads = q * lead, larger(q / 2, 1) * lead
    return _longest(
        (3 * q - 2) * hop,
        q * b + (5 * q - 2) * hop - lead,
        b + (q - 1) * w + 3 * q * hop - lead,
        f + (q - 1) * w + (3 * q - 2) * hop - lead,
        (q - 1) * f + b + (5 * q - 2) * hop - lead,
        (2 * q - 1) * f - (q - 1) * b + (3 * q - 2) * hop - half_leads,
        2 * q * f - q * b - w + 3 * q * hop - half_leads,
        2 * q * f - (2 * q + 1) * w + 4 * q * hop - (q + 0.5) * lead,
        2 * q * b - 2 * q * w + (6 * q - 2) * hop - leads,
        (2 * q - 1) * f + b - 2 * q * w + (4 * q - 2) * hop - leads,
        (q - 1) * f + (q + 1) * b - 2 * q * w + (6 * q - 2) * hop - leads,
    )


def _dualpipe_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    """The pairs pass a hop in every round, like 1F1B; the chains differ in how they fill and drain."""
    q = pp / 2 - 1
    leads = larger(q, 1) * lead
    return hop * (m - np.ceil((m - 2) / pp)) + _longest(
        2 * q * hop,
        2 * q * f + 2 * q * hop - lead,
        2 * q * f + q * b - q * w + 3 * q * hop - leads,
        (q - 1) * f + q * b + 3 * q * hop - lead,
        (q - 1) * f + 2 * q * b - q * w + 4 * q * hop - leads,
    )


def _dualpipe_v_s(pp: Num, m: Num, v: Num, f: Num, b: Num, w: Num, hop: Num, lead: Num) -> Num:
    """DualPipe over 2 pp half-stages, folded, so that turning round in the middle takes no hop."""
    q = pp - 1
    f, b, w = f / 2, b / 2, w / 2
    leads = larger(q / 2, 1) * lead
    rounds_s = 2 * hop * (m - np.ceil((m - 1) / pp) - 1)
    one_less_s = 2 * hop * (m - np.ceil((m - 2) / pp) - 2)
    return _longest(
        rounds_s + q * hop,
        rounds_s + 2 * q * f + q * hop - lead,
        rounds_s + 2 * q * f + q * b - q * w + 2 * q * hop - leads,
        rounds_s + (q - 1) * f + q * b + 3 * q * hop - lead,
        rounds_s + (q - 1) * f + 2 * q * b - q * w + 4 * q * hop - leads,
        one_less_s + q * f + (q - 1) * b + 3 * q * hop - lead,
        one_less_s + q * f + (2 * q - 1) * b - q * w + 4 * q * hop - leads,
    )


_BUBBLES = (_gpipe_s, _1f1b_s, _interleaved_s, _zb_h1_s, _zb_v_s, _dualpipe_s, _dualpipe_v_s)

_IN_FLIGHT: tuple[Callable[..., Num], ...] = (
    lambda pp, m, v, stage: where(np.greater(pp, 1), m, 1.0) + 0.0 * stage,
    lambda pp, m, v, stage: smaller(m, pp - stage),
    lambda pp, m, v, stage: smaller(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1) / v,
    lambda pp, m, v, stage: smaller(m, pp) + 0.0 * stage,
    lambda pp, m, v, stage: pp + 0.0 * stage,
    lambda pp, m, v, stage: pp + 1.0 + 0.0 * stage,
    lambda pp, m, v, stage: pp + 0.5 + 0.0 * stage,
)

_VALID: tuple[Callable[..., Num], ...] = (
    lambda pp, m, v: np.equal(v, 1),
    lambda pp, m, v: np.equal(v, 1),
    lambda pp, m, v: np.greater(v, 1) & np.greater(pp, 1) & (np.mod(m, pp) == 0),
    lambda pp, m, v: np.equal(v, 1),
    lambda pp, m, v: np.equal(v, 2) & np.greater(pp, 1) & np.greater_equal(m, 2 * pp - 1),
    lambda pp, m, v: (
        np.equal(v, 1) & (np.mod(pp, 2) == 0) & (np.mod(m, 2) == 0) & np.greater_equal(m, 2 * pp)
    ),
    lambda pp, m, v: np.equal(v, 2) & np.greater(pp, 1) & np.greater_equal(m, 2 * pp),
)
