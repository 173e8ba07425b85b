"""A grid of plans: every choice an axis, every plan a cell, all priced by one call.

The axes, in order: tp, cp, ep, microbatch, pp, schedule (with its virtual stages), recompute, ZeRO
stage. An array has length one along the axes that its values do not depend on: a block's time spans
(tp, cp, ep, microbatch), the bubble adds (pp, schedule), and only the last sums span the whole grid.
Data parallelism is what the world leaves. `valid` says which cells are plans at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwise.core.units import Num
from meshwise.cost.schedule import valid as valid_schedule
from meshwise.estimate.degrees import Degrees
from meshwise.estimate.stage import grid_stages
from meshwise.estimate.step import StepCost, step_cost
from meshwise.estimate.timing import Machine
from meshwise.model.architecture import Model
from meshwise.plan.plan import RECOMPUTE, SCHEDULES, Plan

AXES = ("tp", "cp", "ep", "microbatch", "pp", "schedule", "recompute", "zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values along each axis; `schedules` are (name, vpp) pairs, `recompute` names, `zero` stages."""

    tp: Sequence[int] = (1,)
    cp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    microbatch: Sequence[int] = (1,)
    pp: Sequence[int] = (1,)
    schedules: Sequence[tuple[str, int]] = (("1f1b", 1),)
    recompute: Sequence[str] = ("none",)
    zero: Sequence[int] = (1,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(len(values) for values in self._values())

    def _values(self) -> tuple[Sequence, ...]:
        return (
            *(self.tp, self.cp, self.ep, self.microbatch, self.pp),
            *(self.schedules, self.recompute, self.zero),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The numbers of every plan of a grid, and which cells are plans."""

    choices: Choices
    degrees: Degrees
    valid: NDArray[np.bool_]

    def plan(self, index: tuple[int, ...]) -> tuple[Plan, int]:
        """The plan of one cell, and its microbatch."""
        c = self.choices
        tp, cp, ep, microbatch, pp, schedule, recompute, zero = index
        name, vpp = c.schedules[schedule]
        plan = replace(
            self.degrees.plan,
            tp=c.tp[tp],
            cp=c.cp[cp],
            ep=c.ep[ep],
            pp=c.pp[pp],
            schedule=name,
            vpp=vpp,
            recompute=c.recompute[recompute],
            zero=c.zero[zero],
            etp=1 if c.ep[ep] > 1 else None,
        )
        return plan, c.microbatch[microbatch]

    def price(self, model: Model, machine: Machine) -> StepCost:
        """The cost of every cell; cells that are no plans hold numbers without meaning."""
        stages = grid_stages(model, self.degrees)
        return step_cost(model, self.degrees, machine, stages)


def plan_grid(model: Model, world: int, batch: int, seq: int, choices: Choices, base: Plan) -> Grid:
    """All combinations of `choices` on `world` ranks; what `choices` leaves open is as in `base`.

    Experts are not cut by tensor parallelism where ep > 1 (etp = 1). Stages hold equal numbers of
    layers. A cell is valid if every degree divides what it cuts and the schedule can run.
    """
    tp, cp, ep, micro, pp = (
        _axis(getattr(choices, name), name) for name in ("tp", "cp", "ep", "microbatch", "pp")
    )
    schedule = _axis([SCHEDULES.index(name) for name, _ in choices.schedules], "schedule")
    vpp = _axis([vpp for _, vpp in choices.schedules], "schedule")
    per_pipeline = tp * cp * pp
    dp = np.maximum(np.floor(world / per_pipeline), 1.0)
    rounds = np.maximum(np.floor(batch / (dp * micro)), 1.0)
    ulysses = cp if base.cp_kind == "ulysses" else 1.0
    on = Degrees(
        world=float(world),
        microbatch=micro,
        num_microbatches=rounds,
        seq=float(seq),
        tp=tp,
        ulysses=ulysses,
        ring=cp / ulysses,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=ep,
        etp=np.where(ep > 1, 1.0, tp),
        zero=_axis(choices.zero, "zero"),
        zero_group=dp * cp,
        recompute=_axis([RECOMPUTE.index(name) for name in choices.recompute], "recompute"),
        schedule=schedule,
        imbalance=base.imbalance,
        plan=base,
    )
    valid = (
        (per_pipeline * dp == world)
        & (rounds * dp * micro == batch)
        & _divides(model, on)
        & valid_schedule(schedule, pp, rounds, vpp)
    )
    return Grid(choices, on, np.asarray(valid))


def _axis(values: Sequence[float], name: str) -> NDArray[np.float64]:
    shape = [1] * len(AXES)
    shape[AXES.index(name)] = len(values)
    return np.array(values, dtype=np.float64).reshape(shape)


def _divides(model: Model, on: Degrees) -> Num:
    """Whether tp and Ulysses divide heads and widths, pp x vpp the layers, cp the tokens, ep the experts."""
    kv = float(model.num_kv_heads)
    experts = float(model.moe.num_experts) if model.moe else 1.0
    return (
        (np.mod(model.num_heads, on.tp * on.ulysses) == 0)
        & ((np.mod(kv, on.tp) == 0) | (np.mod(on.tp, kv) == 0))
        & (np.mod(model.hidden, on.tp) == 0)
        & (np.mod(model.ffn_hidden, on.tp) == 0)
        & (np.mod(model.num_layers, on.pp * on.vpp) == 0)
        & (np.mod(on.seq, on.cp) == 0)
        & (np.mod(experts, on.ep) == 0)
        & (np.mod(on.tp * on.cp * on.dp, on.etp * on.ep) == 0)
    )
