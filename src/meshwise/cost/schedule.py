"""Pipeline schedules in closed form: the bubble, the activations in flight, the time of the phase.

A model is cut into `pp` stages, one per rank, and a batch into `m` microbatches that flow through
them. One microbatch costs a stage `f_s` (F, forward), `b_s` (B, gradient of its input) and `w_s`
(W, gradient of its weights); a schedule that does not split the backward runs B and W as one. A
rank that holds several *chunks* of the model (`v` of them) passes each microbatch `v` times, each
pass 1/v of the work. What a rank waits between its first and its last op is its *bubble*; the
schedule decides how much of it there is and how many microbatches' activations wait for their
backward meanwhile.

Every schedule is one row of a table of coefficients, and every function here is arithmetic on
those rows, so `schedule` may be an array: a grid of plans can hold all schedules along one axis.
Stages are equal here; uneven stages and stragglers are simulated (`meshwise.estimate.simulate`),
and for equal stages the two agree exactly.

Sources: GPipe arXiv 1811.06965; 1F1B (PipeDream-Flush) and interleaved 1F1B arXiv 2104.04473;
ZB-H1 and ZB-V arXiv 2401.10241; DualPipe arXiv 2412.19437 and, with DualPipe-V, the tables of
github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

import numpy as np

from meshwise.errors import PlanError
from meshwise.units import Num

SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
"""The schedules by name; a schedule's index is its place in this tuple."""

_GPIPE, _1F1B, _INTERLEAVED, _ZB_H1, _ZB_V, _DUALPIPE, _DUALPIPE_V = range(len(SCHEDULES))

# One bubble is (pp_coef * pp - 1) * (F, B, W) . coef, divided by v where chunks are smaller stages.
#                         gpipe 1f1b inter zb-h1 zb-v dual dual-v
_PP_COEF = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0])
_F_COEF = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5])
_B_COEF = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0])
_W_COEF = np.array([1.0, 1.0, 1.0, -1.0, 0.0, -1.0, -0.5])
_WEIGHT_COPIES = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0])


def schedule_index(name: str) -> int:
    """The index of a schedule. Raises PlanError for a name that is not in `SCHEDULES`."""
    try:
        return SCHEDULES.index(name)
    except ValueError:
        raise PlanError(f"unknown pipeline schedule {name!r}; use one of {', '.join(SCHEDULES)}") from None


def weight_copies(schedule: Num) -> Num:
    """How many stages' weights a rank holds: 2 for DualPipe, which runs the model in both directions."""
    return _WEIGHT_COPIES[np.asarray(schedule, dtype=np.intp)]


def bubble_s(schedule: Num, pp: Num, m: Num, v: Num, f_s: Num, b_s: Num, w_s: Num, p2p_s: Num = 0.0) -> Num:
    """Idle time [s] of the rank that idles most, between its first and last op; equal stages."""
    index = np.asarray(schedule, dtype=np.intp)
    num_waits = _PP_COEF[index] * pp - 1
    wait_s = _F_COEF[index] * f_s + _B_COEF[index] * b_s + _W_COEF[index] * w_s
    chunks = np.where(index == _INTERLEAVED, v, 1)
    return np.where(np.asarray(pp) > 1, num_waits * (wait_s / chunks + 2 * p2p_s), 0.0)


def pipeline_s(schedule: Num, pp: Num, m: Num, v: Num, f_s: Num, b_s: Num, w_s: Num, p2p_s: Num = 0.0) -> Num:
    """Time [s] of the pipeline phase: the work of `m` microbatches on the slowest stage and its bubble."""
    return m * (f_s + b_s + w_s) + bubble_s(schedule, pp, m, v, f_s, b_s, w_s, p2p_s)


def in_flight_microbatches(schedule: Num, pp: Num, m: Num, v: Num, stage: Num) -> Num:
    """Peak of the activations alive on rank `stage` (0-based), in microbatches of one full stage."""
    total = [m, m, m * v, m, 2 * m, m, 2 * m]
    warm = [
        m,
        pp - stage,
        2 * (pp - stage - 1) + (v - 1) * pp + 1,
        pp,
        2 * pp,
        pp + 1,
        2 * pp + 1,
    ]
    chunks = [1, 1, v, 1, 2, 1, 2]
    counts = [np.minimum(w, t) / c for w, t, c in zip(warm, total, chunks, strict=True)]
    index = np.asarray(schedule, dtype=np.intp)
    return np.select([index == i for i in range(len(SCHEDULES))], counts)


def valid(schedule: Num, pp: Num, m: Num, v: Num) -> Num:
    """Whether a schedule can run with these sizes: a boolean mask over a grid of plans."""
    index = np.asarray(schedule, dtype=np.intp)
    wants_v = np.select(
        [index == _INTERLEAVED, (index == _ZB_V) | (index == _DUALPIPE_V)], [np.maximum(v, 2), 2], 1
    )
    dual = (np.mod(pp, 2) == 0) & (np.mod(m, 2) == 0) & (np.asarray(m) >= 2 * np.asarray(pp))
    return (
        (np.asarray(pp) >= 1)
        & (np.asarray(m) >= 1)
        & (np.asarray(v) == wants_v)
        & np.where(index == _INTERLEAVED, np.mod(m, pp) == 0, True)
        & np.where(index == _DUALPIPE, dual, True)
        & np.where(index == _DUALPIPE_V, np.asarray(m) >= 2 * np.asarray(pp), True)
    )


def check(schedule: str, pp: int, m: int, v: int) -> None:
    """Raise PlanError with one sentence where `valid` says no."""
    schedule_index(schedule)
    if pp < 1 or m < 1:
        raise PlanError(
            f"a pipeline needs at least one stage and one microbatch, not pp={pp} and {m} microbatches"
        )
    if schedule == "interleaved" and v < 2:
        raise PlanError(f"schedule=interleaved needs vpp=2 or more, not vpp={v}; use vpp=2 or schedule=1f1b")
    if schedule in ("zb-v", "dualpipe-v") and v != 2:
        raise PlanError(f"schedule={schedule} holds two chunks per rank, not vpp={v}; use vpp=2")
    if schedule in ("gpipe", "1f1b", "zb-h1", "dualpipe") and v != 1:
        raise PlanError(f"schedule={schedule} holds one chunk per stage, not vpp={v}; use vpp=1")
    if schedule == "interleaved" and m % pp:
        raise PlanError(
            f"schedule=interleaved needs the {m} microbatches to divide by pp={pp}; change one of them"
        )
    if schedule == "dualpipe" and pp % 2:
        raise PlanError(f"schedule=dualpipe needs an even number of stages, not pp={pp}")
    if schedule == "dualpipe" and (m % 2 or m < 2 * pp):
        raise PlanError(f"schedule=dualpipe needs an even number of microbatches, at least {2 * pp}, not {m}")
    if schedule == "dualpipe-v" and m < 2 * pp:
        raise PlanError(f"schedule=dualpipe-v with pp={pp} needs at least {2 * pp} microbatches, not {m}")
