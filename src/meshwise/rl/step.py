"""A step of post-training, phase by phase.

A synchronous step is the sum of its phases: generation (an idle pool drains a batch), scoring, update, sync
of the weights; where one pool does both, the switch: optimizer states go to the host while engines work, and
come back; and waiting for data, rewards and logs. Lengths are drawn anew several times, and a figure is the
mean of the draws.

In asynchronous modes the pools work at the same time (`rl.asynchronous`): generation is then what the trainer
waits for samples, so that phases still sum to the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwise.estimate.intervals import Interval
from meshwise.model.weights import num_params
from meshwise.plan.plan import plan_text
from meshwise.rl.asynchronous import Steady, steady
from meshwise.rl.engines import Drain, RolloutPool, drain
from meshwise.rl.framework import interval_of
from meshwise.rl.job import RlJob
from meshwise.rl.passes import PERSISTENT, TrainerTimes, trainer_bytes, trainer_times
from meshwise.serve.serving import memory_bytes, room_bytes

DRAWS = 4
"""How often lengths are drawn."""

STEADY_DRAWS = 2
"""The same of asynchronous modes, in which a draw has the lengths of several steps."""

PHASES = ("generation", "scoring", "train", "sync", "switch", "wait")

SYNC_BYTES = 2.0
"""Of a parameter on its way to an engine (bf16)."""


@dataclass(frozen=True)
class RlStep:
    """What a step of `job` takes; made by `rl_step`.

    `trainer_bytes`: memory of a training GPU in its fullest phase, by what it holds. Without `drains` not one
    sample has room beside the weights of an engine. `steadies` are of asynchronous modes.
    """

    job: RlJob
    pool: RolloutPool
    trainer_bytes: dict[str, float]
    trainer: tuple[TrainerTimes, ...]
    drains: tuple[Drain, ...]
    steadies: tuple[Steady, ...]

    # --- time --------------------------------------------------------------------------------------

    @property
    def generation_s(self) -> float:
        """Seconds of an idle pool from a batch to its last answer."""
        return _mean([one.seconds for one in self.drains])

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of a step by phase; their sum is `step_s`."""
        is_steady = bool(self.steadies)
        return {
            "generation": _mean([one.wait_s for one in self.steadies]) if is_steady else self.generation_s,
            "scoring": _mean([sum(one.scoring_s.values()) for one in self.trainer]),
            "train": _mean([one.train_s for one in self.trainer]),
            "sync": sync_s(self.job) + _mean([one.drain_s for one in self.steadies]) * is_steady,
            "switch": switch_s(self.job, self.trainer_bytes),
            "wait": self.job.framework.step_s,
        }

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where engines have no room for a sample."""
        return sum(self.phases_s.values()) if self.drains else None

    @property
    def step_s_interval(self) -> Interval | None:
        """10th and 90th percentile of what a measured step would take."""
        return None if self.step_s is None else interval_of("step_s", self.step_s, self.job.mode)

    @property
    def draws_frac(self) -> float | None:
        """Deviation of a step's time over its mean from one draw of the lengths to the next."""
        each = [one.wait_s for one in self.steadies] or [one.seconds for one in self.drains]
        return float(np.std(each, ddof=1)) / self.step_s if self.step_s else None

    @property
    def idle_frac(self) -> dict[str, float | None]:
        """Share of a step in which the GPUs of each pool do not work for it."""
        if self.step_s is None:
            return {"rollout": None, "train": None}
        of_drains = [one.busy_frac * one.seconds for one in self.drains]
        own_s = _mean([one.busy_s for one in self.steadies] or of_drains)
        trains_s = self.phases_s["scoring"] + self.phases_s["train"]
        busy_s = (own_s, trains_s) if self.job.is_split else (own_s + trains_s,) * 2
        return {"rollout": 1.0 - busy_s[0] / self.step_s, "train": 1.0 - busy_s[1] / self.step_s}

    @property
    def tokens(self) -> float:
        """Tokens of a step, prompts included."""
        rollouts = self.job.rollouts
        return rollouts.num_samples * (rollouts.prompt + rollouts.output)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of each pool."""
        return {"rollout": self.job.rollout_gpus, "train": self.job.train_gpus}

    @property
    def staleness(self) -> float:
        """Mean number of versions from the weights of a group's first token to its update."""
        return _mean([one.staleness for one in self.steadies]) if self.steadies else 0.0

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def engine_bytes(self) -> dict[str, float]:
        """Memory of a rollout GPU: weights, what passes work on, cache, what the trainer leaves there."""
        serving = self.pool.serving
        memory = memory_bytes(serving, 1.0)
        cache = max(room_bytes(serving, memory), 0.0)
        stays = {*PERSISTENT} - {*self.job.framework.offloads} if not self.job.is_split else ()
        left = sum(self.trainer_bytes[name] for name in stays)
        found = {name: float(memory[name]) for name in ("weights", "working")}
        return found | {"cache": cache, "trainer": left}

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes of a GPU in the fullest phase of each pool."""
        held = {"rollout": sum(self.engine_bytes.values()), "train": sum(self.trainer_bytes.values())}
        return held if self.job.is_split else dict.fromkeys(held, max(held.values()))

    @property
    def problems(self) -> list[str]:
        """What does not fit, in sentences."""
        chip, found = self.job.cluster.chip, []
        engine, trainer = sum(self.engine_bytes.values()), sum(self.trainer_bytes.values())
        if not self.drains:
            found.append(
                f"the rollout plan does not fit: at memory_frac={self.job.memory_frac:g} one sample of "
                f"{self.job.rollouts.longest} tokens has no room beside "
                f"{self.engine_bytes['weights'] / 1e9:.1f} GB of weights; use more tp or a larger share"
            )
        if engine > chip.memory_bytes:
            found.append(
                f"the rollout plan does not fit beside the trainer: engines take {engine / 1e9:.1f} GB with "
                f"what the trainer leaves there, of {chip.memory_bytes / 1e9:.1f}; lower memory_frac"
            )
        if trainer > chip.memory_bytes:
            largest = max(self.trainer_bytes, key=self.trainer_bytes.__getitem__)
            found.append(
                f"the training plan does not fit: a GPU needs {trainer / 1e9:.1f} GB of "
                f"{chip.memory_bytes / 1e9:.1f}; the largest part is {largest}"
            )
        return found

    @property
    def fits(self) -> bool:
        """Whether both pools fit."""
        return not self.problems

    # --- document ----------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What a reader should know."""
        of, found = self.job, list(self.problems)
        known = of.rollouts.lengths
        lengths = f"of {len(known)} in a file" if known else f"sigma {of.rollouts.sigma:g}"
        differs = f"one differs by {100 * (self.draws_frac or 0):.1f} %"
        found.append(f"lengths: {lengths}, mean of {DRAWS} draws; {differs}")
        if preempted := _mean([one.num_preemptions for one in self.drains]):
            found.append(f"the engines' cache is full: {preempted:.0f} samples a step are computed again")
        framework = of.framework
        found.append(f"constants of {framework.name} {framework.version}: {framework.source}")
        if (interval := self.step_s_interval) is not None:
            found.append(f"interval: {interval.reason}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise rl --json` prints."""
        of, step_s, each = self.job, self.step_s, self.trainer
        tokens_per_s = None if step_s is None else self.tokens / step_s / of.cluster.num_chips
        interval = self.step_s_interval
        return {
            "model": of.model.name,
            "cluster": of.cluster.to_json(),
            "framework": f"{of.framework.name} {of.framework.version}",
            "mode": of.mode,
            "train_plan": plan_text(of.train_plan),
            "rollout_plan": plan_text(of.rollout_plan),
            "gpus": self.gpus,
            "engines": self.pool.num,
            "memory_frac": of.memory_frac,
            "step_s": step_s,
            "step_s_interval": interval and interval.to_json(),
            "phases_s": self.phases_s if self.drains else None,
            "scoring_s": {name: _mean([one.scoring_s[name] for one in each]) for name in each[0].scoring_s},
            "generation_s": self.generation_s if self.drains else None,
            "tail_s": _mean([one.tail_s for one in self.drains]) if self.drains else None,
            "half_of_samples_s": _mean([one.half_s for one in self.drains]) if self.drains else None,
            "packed_fill_frac": _mean([one.fill_frac for one in self.trainer]),
            "tokens_per_step": self.tokens,
            "tokens_per_s_per_gpu": tokens_per_s,
            "idle_frac": self.idle_frac,
            "staleness": self.staleness,
            "memory_bytes": self.memory_bytes,
            "engine_bytes": self.engine_bytes,
            "trainer_bytes": self.trainer_bytes,
            "cache_tokens": self.pool.worker.cache_tokens if self.pool.worker else 0,
            "fits": self.fits,
            "notes": self.notes,
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def sync_s(job: RlJob) -> float:
    """Seconds until engines have the new weights."""
    return job.transport.seconds(SYNC_BYTES * num_params(job.model), job.cluster)


def switch_s(job: RlJob, trainer_bytes: dict[str, float]) -> float:
    """Seconds to copy the optimizer states to the host and back; 0 where pools are apart."""
    if job.is_split or "optimizer" not in job.framework.offloads:
        return 0.0
    return 2.0 * job.framework.offload_s_per_byte * trainer_bytes["optimizer"]


def rl_step(job: RlJob) -> RlStep:
    """Price a step."""
    pool, held = job.pool(), trainer_bytes(job)
    rollouts, draws = job.rollouts, [np.random.default_rng(seed) for seed in range(DRAWS)]
    answers = [rollouts.draw(rollouts.prompts, rng) for rng in draws]
    trainer = tuple(trainer_times(job, rollouts.sequences(each)) for each in answers)
    if pool.worker is None:
        return RlStep(job, pool, held, trainer, (), ())
    drains = tuple(drain(pool, rollouts, np.random.default_rng(seed)) for seed in range(DRAWS))
    steadies: tuple[Steady, ...] = ()
    if job.staleness:
        pause_s, rest_s = sync_s(job), job.framework.step_s
        steadies = tuple(
            steady(
                pool, rollouts, np.random.default_rng(seed), trains_s=times.seconds + rest_s,
                sync_s=pause_s, staleness=job.staleness, in_flight=job.in_flight,
            )
            for seed, times in enumerate(trainer[:STEADY_DRAWS])
        )  # fmt: skip
    return RlStep(job, pool, held, trainer, drains, steadies)
