"""A step of post-training, phase by phase.

A synchronous step is the sum of its phases: generation (an idle pool drains a batch), scoring, update, sync
of the weights; where one pool does both, the switch: optimizer states go to the host while engines work, and
come back; and waiting for data, rewards and logs. Lengths are drawn anew several times, and a figure is the
mean of the draws.

In asynchronous modes the pools work at the same time (`rl.asynchronous`): generation is then what the trainer
waits for samples, so that phases still sum to the step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from meshwise.core.refusals import told
from meshwise.estimate.intervals import Interval
from meshwise.model.weights import num_block_params, num_params
from meshwise.plan.plan import plan_text
from meshwise.rl.asynchronous import Steady, steady
from meshwise.rl.engines import Drain, RolloutPool, drain
from meshwise.rl.framework import find_transport, interval_of
from meshwise.rl.job import RlJob
from meshwise.rl.passes import TrainerTimes, pass_bytes, trainer_times
from meshwise.serve.serving import memory_bytes, room_bytes

DRAWS = 4
"""How often lengths are drawn."""

STEADY_DRAWS = 2
"""The same of asynchronous modes, in which a draw has the lengths of several steps."""

PHASES = ("generation", "scoring", "train", "sync", "switch", "wait")

WORKLOAD = ("algorithm", "updates", "partial", "pack_length", "score_tokens", "transport")
"""What a step is given beside its rollouts, its layout and its models."""

SYNC_BYTES = 2.0
"""Of a parameter on its way to an engine (bf16)."""


@dataclass(frozen=True)
class RlStep:
    """What a step of `job` takes; made by `rl_step`.

    `pass_bytes`: memory of a training GPU in each pass, by what it holds. `trainer`, `drain` and `steady` are
    means over draws of lengths; `draws_s`: what generation took, or was waited for, in each. Without `drain`
    not one sample has room beside the weights of an engine; `steady` is of asynchronous modes.
    """

    job: RlJob
    pool: RolloutPool
    pass_bytes: dict[str, dict[str, float]]
    trainer: TrainerTimes
    drain: Drain | None = None
    steady: Steady | None = None
    draws_s: tuple[float, ...] = ()

    # --- time --------------------------------------------------------------------------------------

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of a step by phase; their sum is `step_s`."""
        steady, generation_s = self.steady, self.drain.seconds if self.drain else 0.0
        return {
            "generation": steady.wait_s if steady else generation_s,
            "scoring": sum(self.trainer.scoring_s.values()),
            "train": self.trainer.train_s,
            "sync": sync_s(self.job),
            "switch": switch_s(self.job, self.pass_bytes),
            "wait": self.job.framework.step_s,
        }

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where engines have no room for a sample."""
        return sum(self.phases_s.values()) if self.drain else None

    @property
    def step_s_interval(self) -> Interval | None:
        """10th and 90th percentile of what a measured step would take."""
        return None if self.step_s is None else interval_of(self.step_s, self.job.mode, self.job.cluster.chip)

    @property
    def draws_frac(self) -> float | None:
        """Deviation of a step's time over its mean from one draw of the lengths to the next."""
        return float(np.std(self.draws_s, ddof=1)) / self.step_s if self.step_s else None

    @property
    def idle_frac(self) -> dict[str, float | None]:
        """Share of a step in which the GPUs of each pool do not work for it."""
        works = self.steady or self.drain
        if self.step_s is None or works is None:
            return {"rollout": None, "train": None}
        own_s = works.busy_s
        trains_s = self.phases_s["scoring"] + self.phases_s["train"]
        busy_s = (own_s, trains_s) if self.job.is_split else (own_s + trains_s,) * 2
        return {"rollout": 1.0 - busy_s[0] / self.step_s, "train": 1.0 - busy_s[1] / self.step_s}

    @property
    def tokens(self) -> float:
        """Tokens of a step, with prompts and what tools return."""
        rollouts = self.job.rollouts
        return rollouts.num_samples * (rollouts.longest - rollouts.max_output + rollouts.output)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of each pool."""
        return {"rollout": self.job.rollout_gpus, "train": self.job.train_gpus}

    @property
    def staleness(self) -> float:
        """Mean number of versions from the weights of a group's first token to its update."""
        return self.steady.staleness if self.steady else 0.0

    # --- memory ------------------------------------------------------------------------------------

    @property
    def trainer_bytes(self) -> dict[str, float]:
        """Memory of a training GPU in its fullest pass, by what it holds."""
        return max(self.pass_bytes.values(), key=lambda held: sum(held.values()))

    @cached_property
    def engine_bytes(self) -> dict[str, float]:
        """Memory of a rollout GPU: weights, what passes work on, cache."""
        serving = self.pool.serving
        memory = memory_bytes(serving, 1.0)
        cache = max(room_bytes(serving, memory), 0.0)
        return {name: float(memory[name]) for name in ("weights", "working")} | {"cache": cache}

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes of a GPU in the fullest phase of each pool."""
        held = {"rollout": sum(self.engine_bytes.values()), "train": sum(self.trainer_bytes.values())}
        return held if self.job.is_split else dict.fromkeys(held, max(held.values()))

    @property
    def problems(self) -> list[str]:
        """What does not fit, in sentences."""
        return told(
            "rl memory", job=self.job, drain=self.drain, weights_gb=self.engine_bytes["weights"] / 1e9,
            engine_gb=sum(self.engine_bytes.values()) / 1e9, chip_gb=self.job.cluster.chip.memory_bytes / 1e9,
            at_work=next(name for name, held in self.pass_bytes.items() if held is self.trainer_bytes),
            trainer_gb=sum(self.trainer_bytes.values()) / 1e9,
            largest=max(self.trainer_bytes, key=self.trainer_bytes.__getitem__),
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether both pools fit."""
        return not self.problems

    # --- document ----------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What a reader should know."""
        num, differs = len(self.job.rollouts.lengths), 100.0 * (self.draws_frac or 0.0)
        names = {"drain": self.drain, "interval": self.step_s_interval, "draws": DRAWS, "num": num}
        return [*self.problems, *told("rl notes", of=self.job, differs=differs, **names)]

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise rl --json` prints."""
        of, step_s, interval = self.job, self.step_s, self.step_s_interval
        tokens_per_s = None if step_s is None else self.tokens / step_s / of.cluster.num_chips
        figures = ("gpus", "step_s", "idle_frac", "staleness", "fits", "notes")
        memory = ("memory_bytes", "engine_bytes", "trainer_bytes")
        drained = {"generation_s": "seconds", "tail_s": "tail_s", "half_of_samples_s": "half_s"}
        return {
            "model": of.model.name,
            "cluster": of.cluster.to_json(),
            "framework": f"{of.framework.name} {of.framework.version}",
            "mode": of.mode,
            "workload": {name: one for name, one in asdict(of.rollouts).items() if name != "lengths"}
            | {name: getattr(of, name) for name in WORKLOAD}
            | {"engine": of.engine or of.framework.engine, "scored_by": [*of.scorers]},
            "train_plan": plan_text(of.train_plan),
            "rollout_plan": plan_text(of.rollout_plan),
            "engines": self.pool.num,
            "memory_frac": of.memory_frac,
            **{name: getattr(self, name) for name in (*figures, *memory)},
            "step_s_interval": interval and interval.to_json(),
            "phases_s": self.phases_s if self.drain else None,
            "scoring_s": self.trainer.scoring_s,
            **{name: self.drain and getattr(self.drain, field) for name, field in drained.items()},
            "packed_fill_frac": self.trainer.fill_frac,
            "tokens_per_step": self.tokens,
            "tokens_per_s_per_gpu": tokens_per_s,
            "cache_tokens": self.pool.worker.cache_tokens if self.pool.worker else 0,
        }


def _mean(several: Sequence[Any]) -> Any:
    """The mean of numbers, or of records and dicts of them, field by field."""
    first, *_ = several
    if isinstance(first, dict):
        return {key: _mean([one[key] for one in several]) for key in first}
    if not isinstance(first, TrainerTimes | Drain | Steady):
        return fmean(several)
    return replace(
        first, **{of.name: _mean([getattr(one, of.name) for one in several]) for of in fields(first)}
    )


def sync_s(job: RlJob) -> float:
    """Seconds until engines have the new weights; of adapters alone, where engines keep their base."""
    plan, num = job.train_plan, num_params(job.model)
    if plan.lora_rank > 0 and job.framework.syncs_adapters and not job.is_split:
        num = num_block_params(job.model, plan.lora_rank, plan.lora_targets) - num_block_params(job.model)
    return find_transport(job.transport).seconds(SYNC_BYTES * num, job.cluster)


def switch_s(job: RlJob, pass_bytes: dict[str, dict[str, float]]) -> float:
    """Seconds to copy the optimizer states to the host and back; 0 where pools are apart."""
    return 0.0 if job.is_split else 2.0 * job.framework.offload_s_per_byte * pass_bytes["update"]["optimizer"]


def rl_step(job: RlJob) -> RlStep:
    """Price a step."""
    pool, held = job.pool(), pass_bytes(job)
    rollouts, draws = job.rollouts, [np.random.default_rng(seed) for seed in range(DRAWS)]
    answers = [rollouts.draw(rollouts.prompts, rng) for rng in draws]
    times = [trainer_times(job, rollouts.sequences(each)) for each in answers]
    if pool.worker is None:
        return RlStep(job, pool, held, _mean(times))
    drains = [drain(pool, rollouts, np.random.default_rng(seed)) for seed in range(DRAWS)]
    step = RlStep(job, pool, held, _mean(times), _mean(drains), draws_s=tuple(one.seconds for one in drains))
    if not job.staleness:
        return step
    steadies = [
        steady(
            pool, rollouts, np.random.default_rng(seed), trains_s=each.seconds + job.framework.step_s,
            sync_s=sync_s(job), staleness=job.staleness, in_flight=job.partial,
        )
        for seed, each in enumerate(times[:STEADY_DRAWS])
    ]  # fmt: skip
    return replace(step, steady=_mean(steadies), draws_s=tuple(one.wait_s for one in steadies))
