"""When to start and stop replicas: as many as the requests of the last interval need.

A replica is to take `requests_per_s`. Every `every_s` the autoscaler counts what arrived since the last time
and what still waits, and asks for enough replicas to serve that in one interval. A new replica takes
requests `start_s` later (its node, image, weights and graphs). Fewer are kept only when no interval of the
last `hold_s` asked for more (Kubernetes' stabilization window, 300 s); one that stops takes no more requests
and ends with the last that it has. Replicas are paid for from when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """From `least` to `most` replicas, each for `requests_per_s`."""

    requests_per_s: float
    least: int = 1
    most: int = 64
    every_s: float = 30.0
    start_s: float = 180.0
    hold_s: float = 300.0

    def to_json(self, lives_s: Sequence[tuple[float, float]], span_s: float) -> dict[str, Any]:
        """The rule, and how many replicas there were."""
        times = sorted({start for start, _ in lives_s})
        return {
            **asdict(self),
            "mean_replicas": sum(stop - start for start, stop in lives_s) / span_s,
            "most_replicas": max(sum(start <= at < stop for start, stop in lives_s) for at in times),
            "num_started": len(lives_s),
        }


class Autoscaler:
    """What `scaling` asks for over time."""

    def __init__(self, scaling: Autoscaling) -> None:
        self.scaling, self.num_before = scaling, 0
        self.asked: list[tuple[float, int]] = []

    def wanted(self, second: float, num_sent: int, num_waiting: int) -> int:
        """Replicas for the requests that were sent up to now and not before, and those that wait."""
        scaling = self.scaling
        rate = (num_sent - self.num_before + num_waiting) / scaling.every_s
        self.num_before = num_sent
        self.asked = [one for one in self.asked if one[0] > second - scaling.hold_s]
        self.asked.append((second, math.ceil(rate / scaling.requests_per_s)))
        return min(max(max(num for _, num in self.asked), scaling.least), scaling.most)
