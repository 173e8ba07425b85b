"""The answer of `rl`: a step as stated, or the best way to share the GPUs; what a step and a run cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.framework import RlFramework
from meshwise.rl.job import ALGORITHMS, job
from meshwise.rl.rollouts import Rollouts
from meshwise.rl.step import RlStep, rl_step


@dataclass(frozen=True)
class RlAnswer:
    """`step` is what was asked for. `usd_per_gpu_hour` and `num_steps` are of a run."""

    step: RlStep
    num_steps: int | None = None
    usd_per_gpu_hour: float | None = None

    @property
    def is_no(self) -> bool:
        """Whether nothing fits."""
        return not self.step.fits

    @property
    def cost(self) -> dict[str, float]:
        """Dollars of a step, and days and dollars of a run, as far as they were asked for."""
        step_s, found = self.step.step_s, dict[str, float]()
        if step_s is None:
            return found
        hours = self.step.job.cluster.num_chips * step_s / 3600.0
        if self.usd_per_gpu_hour is not None:
            found["usd_per_step"] = hours * self.usd_per_gpu_hour
        if self.num_steps is not None:
            found["run_days"] = self.num_steps * step_s / 86400.0
            if self.usd_per_gpu_hour is not None:
                found["run_usd"] = self.num_steps * found["usd_per_step"]
        return found

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise rl --json` prints."""
        return self.step.to_json() | self.cost


def answer(
    model: Model,
    cluster: Cluster,
    rollouts: Rollouts,
    framework: RlFramework,
    *,
    mode: str,
    algorithm: str,
    scorers: Mapping[str, Model],
    reference: bool,
    old_logprobs: bool | None,
    train_plan: Plan | None,
    rollout_plan: Plan | None,
    updates: int,
    num_steps: int | None = None,
    usd_per_gpu_hour: float | None = None,
    **stated: Any,
) -> RlAnswer:
    """The answer for what is stated; WorkloadError for what contradicts itself."""
    if algorithm not in ALGORITHMS:
        raise WorkloadError(f"algorithm={algorithm!r} must be one of {', '.join(ALGORITHMS)}")
    for name, number in (("train_steps", num_steps), ("price", usd_per_gpu_hour)):
        if number is not None and not 0 < number < 1e15:
            raise WorkloadError(f"{name}={number:g} must be above zero")
    if not mode or train_plan is None or rollout_plan is None:
        raise WorkloadError("mode, train_plan and rollout_plan are needed")
    critic = model if algorithm == "ppo" else None
    judges = (
        ({"reference": model} if reference else {}) | dict(scorers) | ({"critic": model} if critic else {})
    )
    asked = job(
        model, cluster, rollouts, framework, mode=mode, train_plan=train_plan, rollout_plan=rollout_plan,
        scorers=tuple(judges.items()), critic=critic, updates=updates,
        scores_policy=updates > 1 or mode != "colocated" if old_logprobs is None else old_logprobs, **stated,
    )  # fmt: skip
    return RlAnswer(rl_step(asked), num_steps, usd_per_gpu_hour)
