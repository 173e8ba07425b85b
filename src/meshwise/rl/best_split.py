"""The best way to share GPUs between rollout and training, where a job leaves it open; the answer of `rl`.

What is stated stays. Of what is open, modes, splits in eighths of the cluster and engines of 1 to 64 GPUs are
tried; of the fastest training plan of each family (`search`) that the framework's settings say, that with
which the trainer takes least. A first look prices each candidate from one drain D of an idle pool, the
trainer's time T and the sync S: D + T + S in turn, max(T + S, D) at the same time, or, where answers go on
after a sync and several batches are under way, max(T + S, (D + T + S) / 2). Those near the best of each mode
are then priced as any step; so is the best on each smaller part of the cluster, which says what fewer GPUs
cost in time.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from meshwise.core.columns import grouped
from meshwise.core.each import HEARS
from meshwise.core.errors import MeshwiseError, PlanError, WorkloadError
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.plan.plan import DEFAULTS, Plan
from meshwise.rl.engines import SIZES, Drain, drain, engine_layouts
from meshwise.rl.framework import OVERLAPPED
from meshwise.rl.job import OpenJob, RlJob
from meshwise.rl.passes import TrainerTimes, num_bins, pass_bytes, trainer_times
from meshwise.rl.rollouts import Tokens
from meshwise.rl.settings import TRAINED_KEYS
from meshwise.rl.step import RlStep, rl_step, switch_s, sync_s
from meshwise.search.search import MEMORY_FRAC, OFFLOADED, search
from meshwise.search.space import USUAL

SPLITS = range(1, 8)
"""Eighths of the cluster that rollout may have."""

SPACE = {"microbatch": (1,), "zero": (1,)}
"""Training plans that are searched: one packed bin at a time, Megatron-LM's distributed optimizer."""

FAMILIES = 32
"""Training plans at most with which the trainer is priced: full bins alone, as `search` has them, mislead."""

NEAR = 1.2
"""Candidates are priced as a step whose first look takes up to so many times the least of all.

Of each mode, and of a looser bound on staleness than is asked, at least the first.
"""

LOOKED_SAMPLES, LOOKED_UPDATES = 2048, 4
"""Of larger batches a first look simulates the fullest engines alone, with about so many samples; of more
updates it prices the first."""

_NONE_RUNS = "plans of Megatron-LM whose dp divides {} samples an update are tried: {}; state train_plan"

PARTS_OF_CLUSTER = (2, 4)
"""The cluster is also looked at as if it had so many times fewer GPUs."""

_SPARES_FRAC = 0.99
"""A larger share of memory for engines is named where a step takes less than this share of the time."""

LOOSER_BOUNDS = (2, 4)
"""Bounds on staleness that are shown beside the best where none is stated."""


@dataclass
class _Looks:
    """First looks, kept: training plans by GPUs, drains by engines, the trainer's seconds by plan."""

    asked: OpenJob
    plans: dict[int, list[Plan]] = field(default_factory=dict)
    drains: dict[tuple[Any, ...], Drain | None] = field(default_factory=dict)
    trainers_s: dict[tuple[Any, ...], float] = field(default_factory=dict)
    refused: PlanError | None = None

    def train_plans(self, gpus: int) -> list[Plan]:
        """Plans of Megatron-LM that fit `gpus` GPUs, bins full, the fastest of each family first.

        Where none fits, the one that needs least memory.
        """
        asked = self.asked
        if asked.train_plan is not None:
            return [asked.train_plan]
        if gpus not in self.plans:
            shared = replace(asked, mode="colocated", rollout_gpus=None, staleness=None, partial=None)
            alone = replace(asked.cluster, num_chips=1)  # of a job, whose bins do not depend on its plan
            probe = replace(shared, cluster=alone, train_plan=Plan(), rollout_plan=Plan()).job()
            bins = num_bins(tuple(self.lengths.tolist()), probe.pack_length) / asked.updates
            how: dict[str, Any] = {"batch": math.ceil(bins / gpus) * gpus, "seq": probe.pack_length}
            untold = {*USUAL, *OFFLOADED[-1]} - {*TRAINED_KEYS[asked.framework.name], *SPACE}
            how |= {"stated": {key: (DEFAULTS[key],) for key in untold} | SPACE, "with_changes": False}
            cluster, plans = replace(asked.cluster, num_chips=gpus), list[Plan]()
            layers, samples = asked.model.num_layers, probe.update_samples
            how["unwanted"] = lambda mesh: [layers % (mesh.pp * mesh.vpp) != 0, samples % mesh.dp != 0]
            try:
                found = search(asked.model, cluster, to="megatron-lm", top=FAMILIES, **how)
                plans = [one.plan for one in (*found.best, found.nearest_miss) if one]
                refuse("training plans of rl", PlanError, plans=plans, found=found)
            except PlanError as error:  # a model or a chip that Megatron-LM does not have
                if gpus >= max(self.plans, default=0):
                    self.refused = PlanError(_NONE_RUNS.format(samples, str(error).partition(";")[0]))
            self.plans[gpus] = plans
        return self.plans[gpus]

    @cached_property
    def lengths(self) -> Tokens:
        """Tokens of the samples of a step, drawn once."""
        rollouts = self.asked.rollouts
        return rollouts.sequences(rollouts.draw(rollouts.prompts, np.random.default_rng(0)))

    def trains_s(self, job: RlJob) -> float:
        """What the trainer takes, and the switch; infinite where an open plan needs too much memory."""
        key = job.train_gpus, job.train_plan, job.is_split
        if key not in self.trainers_s:
            held = pass_bytes(job)
            seconds = trainer_times(job, self.lengths, LOOKED_UPDATES).seconds + switch_s(job, held)
            most_bytes = MEMORY_FRAC * job.cluster.chip.memory_bytes
            fits = all(sum(each.values()) <= most_bytes for each in held.values())
            self.trainers_s[key] = seconds if fits or self.asked.train_plan else math.inf
        return self.trainers_s[key]

    def about_s(self, job: RlJob) -> float:
        """About what a step takes; infinite where engines have no room."""
        pool_key = job.rollout_gpus, job.rollout_plan, job.memory_frac
        if pool_key not in self.drains:
            pool = job.pool()
            share = LOOKED_SAMPLES / (job.rollouts.num_groups * job.rollouts.samples)
            self.drains[pool_key] = (
                drain(pool, job.rollouts, np.random.default_rng(0), share) if pool.worker else None
            )
        drained = self.drains[pool_key]
        if drained is None:
            return math.inf
        others_s = self.trains_s(job) + sync_s(job) + job.framework.step_s
        if job.mode not in OVERLAPPED:
            return drained.seconds + others_s
        hides_tail = job.partial and job.staleness > 1
        return max(others_s, (drained.seconds + others_s) / 2.0 if hides_tail else drained.seconds)


def _modes(asked: OpenJob) -> list[tuple[str, int | None]]:
    """Modes with their bounds on staleness."""
    if asked.mode:
        return [(asked.mode, asked.staleness)]
    bounds = LOOSER_BOUNDS if asked.staleness is None else (asked.staleness,)
    looser = (("async", bound) for bound in bounds if bound > 1)
    shared = [("colocated", None)] if asked.rollout_gpus is None else []
    return [*shared, ("split", None), ("one_step_off", None), *looser]


def _splits(asked: OpenJob, mode: str) -> list[int | None]:
    """GPUs of rollout worth a look; whole nodes where the cluster has several."""
    gpus = asked.cluster.num_chips
    refuse("rollout GPUs of rl", PlanError, asked=asked, mode=mode, gpus=gpus)
    if mode == "colocated" or asked.rollout_gpus is not None:
        return [asked.rollout_gpus if mode != "colocated" else None]
    node = min(asked.cluster.chips_per_host, gpus)
    unit = node if gpus > node else 1  # of several nodes both frameworks give a pool whole ones
    found = {round(gpus * eighths / 8 / unit) * unit for eighths in SPLITS}
    return [count for count in sorted(found) if 0 < count < gpus]


def candidates(asked: OpenJob, looks: _Looks) -> Iterator[RlJob]:
    """All jobs that what is stated leaves."""
    for mode, bound in _modes(asked):
        frac = replace(asked, mode=mode).usual_memory_frac
        partial = asked.partial if mode in OVERLAPPED or asked.mode else None
        chosen: dict[str, Any] = {"mode": mode, "staleness": bound, "memory_frac": frac, "partial": partial}
        pools = _splits(asked, mode)
        most = max((gpus or asked.cluster.num_chips for gpus in pools), default=1)
        found = engine_layouts(asked.model, replace(asked.cluster, num_chips=most), asked.rollouts, frac)
        layouts = [asked.rollout_plan] if asked.rollout_plan else [*found]
        layouts = layouts or [Plan(tp=size) for size in reversed(SIZES) if size <= most]
        for gpus in pools:
            for layout in layouts:
                chosen |= {"rollout_gpus": gpus, "rollout_plan": layout}
                jobs = list[tuple[float, RlJob]]()
                for plan in looks.train_plans(asked.cluster.num_chips - (gpus or 0)):
                    try:
                        job = replace(asked, train_plan=plan, **chosen).job()
                        jobs.append((looks.trains_s(job), job))
                    except PlanError as error:  # degrees do not divide the pool
                        looks.refused = looks.refused or error
                if jobs:
                    yield min(jobs, key=itemgetter(0))[1]


@dataclass(frozen=True, repr=False)
class RlAnswer(Shown):
    """`step` is what was asked for, or the best; `usd_per_gpu_hour`, `num_steps` are of a run.

    Of an open layout `best`: steps of the best candidates, the best first, those with a looser bound on
    staleness last. `on_fewer`: the best on parts of the cluster. `about_s`: rollout GPUs and seconds at first
    look of the best mode with its engine: how flat it is there. `larger_share`: the best with more memory for
    engines. `finds_plans`: whether training plans were open.
    """

    step: RlStep
    best: tuple[RlStep, ...] = ()
    on_fewer: tuple[RlStep, ...] = ()
    about_s: tuple[tuple[int, float], ...] = ()
    larger_share: RlStep | None = None
    finds_plans: bool = False
    num_steps: int | None = None
    usd_per_gpu_hour: float | None = None

    @property
    def staler(self) -> RlStep | None:
        """What a looser bound on staleness makes faster than the best by more than a twentieth."""
        fits = [step for step in self.best if step.fits and step.step_s]
        found = min(fits, key=lambda step: step.step_s or math.inf, default=None)
        return found if found and (found.step_s or 0.0) < 0.95 * (fits[0].step_s or 0.0) else None

    @property
    def front(self) -> list[RlStep]:
        """Steps that no other is as good as in time, GPUs and staleness, fastest first."""
        fits = [step for step in (*self.best, *self.on_fewer) if step.fits]
        ordered = sorted(fits, key=lambda step: (step.step_s or math.inf, *_price(step)))
        return [
            step
            for i, step in enumerate(ordered)
            if not any(all(np.less_equal(_price(faster), _price(step))) for faster in ordered[:i])
        ]

    @property
    def is_no(self) -> bool:
        """Whether nothing fits."""
        return not self.step.fits

    @property
    def cost(self) -> dict[str, float]:
        """Dollars of a step, and days and dollars of a run, as far as they were asked for."""
        step_s, num, usd = self.step.step_s, self.num_steps, self.usd_per_gpu_hour
        if step_s is None:
            return {}
        step_usd = usd and self.step.job.cluster.num_chips * step_s / 3600.0 * usd
        of_run = {"run_days": num and num * step_s / 86400.0, "run_usd": num and step_usd and num * step_usd}
        return {name: value for name, value in ({"usd_per_step": step_usd} | of_run).items() if value}

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise rl --json` prints; of an open layout with all that was found."""
        found, larger = self.step.to_json() | self.cost, self.larger_share
        if not self.best:
            return found
        return found | {
            "best": [step.to_json() for step in self.best],
            "pareto": [
                {"mode": step.job.mode, "staleness": step.job.staleness, "gpus": step.gpus}
                | {"num_gpus": step.job.cluster.num_chips, "step_s": step.step_s}
                for step in self.front
            ],
            "splits": [{"rollout_gpus": gpus, "about_s": about_s} for gpus, about_s in self.about_s],
            "larger_share": larger and {"memory_frac": larger.job.memory_frac, "step_s": larger.step_s},
        }

    def records(self) -> list[dict[str, Any]]:
        """The candidates, or the one step that was asked for."""
        return [step.to_json() for step in self.best or [self.step]]


def _price(step: RlStep) -> tuple[int, int]:
    """What a step takes beside its time: GPUs, and a bound on staleness."""
    return step.job.cluster.num_chips, step.job.staleness


def _looked(asked: OpenJob) -> list[tuple[float, RlJob]]:
    """Candidates that fit with their seconds at first look, the fastest first, or all, the smallest first.

    Raises:
        PlanError: No plan divides.
    """
    looks, found = _Looks(asked), list[tuple[float, RlJob]]()
    for job in candidates(asked, looks):
        try:
            found.append((looks.about_s(job), job))
        except PlanError as error:
            looks.refused = looks.refused or error
        HEARS.get()(f"{len(found)} candidates looked at on {asked.cluster.num_chips} GPUs")
    if looks.refused and not found:
        raise looks.refused
    fits = [each for each in found if each[0] < math.inf]
    return sorted(fits, key=itemgetter(0)) or sorted(found, key=lambda each: _bytes(each[1]))


def _bytes(job: RlJob) -> float:
    """Memory of the fullest GPU."""
    return max(RlStep(job, job.pool(), pass_bytes(job), TrainerTimes({}, 0.0, 0.0)).memory_bytes.values())


def _on_fewer(asked: OpenJob, bound: int) -> Iterator[RlStep]:
    """The best step on each part of the cluster, whole nodes of it, as far as anything fits there."""
    whole = asked.cluster.num_chips
    for part in PARTS_OF_CLUSTER:
        num, node = whole // part, min(asked.cluster.chips_per_host, whole)
        if whole % part or (num > node and num % node) or num < 1 or asked.rollout_gpus is not None:
            continue
        looked = list[tuple[float, RlJob]]()
        with suppress(PlanError):  # a stated plan does not divide so few
            looked = _looked(replace(asked, cluster=replace(asked.cluster, num_chips=num)))
        about_s, job = next((each for each in looked if each[1].staleness <= bound), (math.inf, None))
        if job is not None and about_s < math.inf:
            yield rl_step(job)


def best_split(asked: OpenJob) -> RlAnswer:
    """The best candidates, or those that come nearest to fitting; PlanError where no plan divides."""
    looked = _looked(asked)
    refuse("split of rl", PlanError, looked=looked, asked=asked)
    bound = asked.staleness or (1 if not asked.mode else max(job.staleness for _, job in looked))
    steps = list[RlStep]()
    near_s = NEAR * min((about_s for about_s, job in looked if job.staleness <= bound), default=0.0)
    for (_, bounded), each in grouped(looked, lambda one: (one[1].mode, one[1].staleness)).items():
        most_s = near_s if bounded <= bound else 0.0
        for job in (job for i, (about_s, job) in enumerate(each) if not i or about_s <= most_s < math.inf):
            HEARS.get()(f"{len(looked)} candidates looked at, {len(steps)} priced")
            steps.append(rl_step(job))
    best = sorted(
        steps, key=lambda of: (not of.fits and _bytes(of.job), of.job.staleness > bound, of.step_s or 0.0)
    )
    top = best[0].job
    splits = [
        (job.rollout_gpus, about_s)
        for about_s, job in looked
        if (job.mode, job.staleness, job.rollout_plan) == (top.mode, top.staleness, top.rollout_plan)
        and about_s < math.inf
    ]
    fewer = tuple(_on_fewer(asked, bound))
    larger, is_open = _larger_share(asked, best[0]), asked.train_plan is None
    return RlAnswer(best[0], tuple(best), fewer, tuple(sorted(splits)), larger, is_open)


def _larger_share(asked: OpenJob, top: RlStep) -> RlStep | None:
    """The best job with a tenth of the memory more for engines, where none is stated and that spares time."""
    frac = round(top.job.memory_frac + 0.1, 3)
    if asked.memory_frac is not None or frac > 0.9:
        return None
    try:
        found = rl_step(replace(top.job, memory_frac=frac))
    except MeshwiseError:
        return None
    return found if found.fits and (found.step_s or 0.0) < _SPARES_FRAC * (top.step_s or 0.0) else None


def answer(asked: OpenJob, num_steps: int | None, usd_per_gpu_hour: float | None) -> RlAnswer:
    """The answer; `HEARS` is told how far the search for the best split is, and may end it by raising.

    Raises:
        WorkloadError: A number makes no sense.
        PlanError: No layout fits, or a stated one does not divide.
    """
    for name, number in (("train_steps", num_steps), ("price", usd_per_gpu_hour)):
        if number is not None and not 0 < number < 1e15:
            raise WorkloadError(f"{name}={number:g} must be above zero")
    found = best_split(asked) if asked.is_open else RlAnswer(rl_step(asked.job()))
    return replace(found, num_steps=num_steps, usd_per_gpu_hour=usd_per_gpu_hour)
