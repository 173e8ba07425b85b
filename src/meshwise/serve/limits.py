"""Limits of latency, and the share of the requests that must keep them all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.serve.simulate import Served


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """At most `ttft_s` to the first token, `tpot_s` for each after it, for `percentile` % of the requests."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    percentile: float = 90.0

    def __post_init__(self) -> None:
        names = {"tpot_ms": 1e3 * self.tpot_s, "ttft_ms": 1e3 * self.ttft_s}
        refuse("limits", WorkloadError, of=self, **names)

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return min(self.ttft_s, self.tpot_s) < math.inf

    def kept(self, served: Served) -> NDArray[np.bool_]:
        """Whether each request keeps all limits."""
        return (served.ttft_s <= self.ttft_s) & (served.token_s <= self.tpot_s)

    def hold(self, served: Served) -> bool:
        """Whether enough requests keep all limits."""
        return float(self.kept(served).mean()) >= self.percentile / 100.0

    def taken_frac(self, served: Served) -> float:
        """How much of the nearest limit is taken by as many requests as must keep it."""
        taken = (
            np.percentile(seconds, self.percentile) / limit_s
            for seconds, limit_s in ((served.ttft_s, self.ttft_s), (served.token_s, self.tpot_s))
        )
        return float(max(taken))


NO_LIMITS = LatencyLimits()


def limits_of(ttft_s: float | None, tpot_s: float | None, percentile: float = 90.0) -> LatencyLimits:
    """Limits as a user states them, None where there is none; WorkloadError for a limit of nothing."""
    first_s, token_s = (math.inf if limit_s is None else limit_s for limit_s in (ttft_s, tpot_s))
    return LatencyLimits(first_s, token_s, percentile)
