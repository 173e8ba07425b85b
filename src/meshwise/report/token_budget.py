"""What training on a number of tokens takes, at the pace of an estimate: days, GPU-hours, cost, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwise.core.errors import WorkloadError
from meshwise.estimate.single import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """A run of `tokens` tokens, the price of a GPU-hour, and the power of a GPU (None: the chip's).

    Making one raises WorkloadError for a number that is not above zero, and for a price or a power without
    tokens.
    """

    tokens: float | None = None
    price_per_gpu_hour: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        stated = {"--tokens": self.tokens, "--price": self.price_per_gpu_hour, "--watts": self.watts}
        for option, value in stated.items():
            if value is None:
                continue
            if not (math.isfinite(value) and value > 0):
                raise WorkloadError(f"{option} {value} must be a number above zero")
            if self.tokens is None:
                raise WorkloadError(
                    f"{option} {value:g} is for a run of some length; add --tokens, or leave it out"
                )

    def run(self, estimate: Estimate) -> dict[str, float]:
        """Seconds, days, GPU-hours, cost and joules of the run; empty without tokens."""
        if self.tokens is None:
            return {}
        if not estimate.trains:
            kind = estimate.workload.kind
            raise WorkloadError(f"--tokens is the length of a training run; leave it out with --kind {kind}")
        num_chips = estimate.cluster.num_chips
        seconds = self.tokens / estimate.tokens_per_s
        gpu_hours = seconds * num_chips / 3600
        run = {"tokens": self.tokens, "run_s": seconds, "days": seconds / 86400, "gpu_hours": gpu_hours}
        if self.price_per_gpu_hour is not None:
            run["cost"] = gpu_hours * self.price_per_gpu_hour
        watts = estimate.cluster.chip.power_watts if self.watts is None else self.watts
        if watts:
            run["energy_joules"] = seconds * num_chips * watts
        return run
