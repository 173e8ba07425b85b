"""The answer of `rl`: a step as stated, or the best way to share the GPUs; what a step and a run cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.core.notebook import Shown
from meshwise.rl.best_split import BestSplit, Hear, best_split, unheard
from meshwise.rl.job import OpenJob
from meshwise.rl.step import RlStep, rl_step


@dataclass(frozen=True, repr=False)
class RlAnswer(Shown):
    """`step` is what was asked for, or the best of `split`; `usd_per_gpu_hour`, `num_steps` are of a run."""

    step: RlStep
    split: BestSplit | None = None
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
        return self.step.to_json() | self.cost | (self.split.to_json() if self.split else {})

    def records(self) -> list[dict[str, Any]]:
        """The candidates, or the one step that was asked for."""
        return self.split.to_json()["best"] if self.split else [self.step.to_json()]


def answer(
    asked: OpenJob, num_steps: int | None, usd_per_gpu_hour: float | None, on_candidate: Hear = unheard
) -> RlAnswer:
    """The answer; `on_candidate` hears how far the search for the best split is, and may end it by raising.

    Raises:
        WorkloadError: A number makes no sense.
        PlanError: No layout fits, or a stated one does not divide.
    """
    for name, number in (("train_steps", num_steps), ("price", usd_per_gpu_hour)):
        if number is not None and not 0 < number < 1e15:
            raise WorkloadError(f"{name}={number:g} must be above zero")
    if asked.is_open:
        split = best_split(asked, on_candidate)
        return RlAnswer(split.best[0], split, num_steps, usd_per_gpu_hour)
    return RlAnswer(rl_step(asked.job()), None, num_steps, usd_per_gpu_hour)
