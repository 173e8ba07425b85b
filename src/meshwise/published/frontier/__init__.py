"""The limits that data movement sets to the largest training runs.

`device` has the rates of a chip, `layer` is one linear layer on one microbatch,
`laws` and `assumptions` say how model, data and batch grow with compute, `step` is one training step,
`run` the search over its parallelism, `failures` what interruptions cost. docs/frontier.md derives it.
"""

from __future__ import annotations

from meshwise.published.frontier.assumptions import Assumptions, assumptions, latency_wall_flop
from meshwise.published.frontier.device import Device, device_from_chip, find_device
from meshwise.published.frontier.failures import Failures
from meshwise.published.frontier.laws import Law, find_law, law_names, power_law
from meshwise.published.frontier.layer import (
    LayerTimes,
    LinearLayer,
    end_of_batch_s,
    layer_times,
    layer_what_ifs,
)
from meshwise.published.frontier.run import (
    Frontier,
    Limits,
    Point,
    best_runs,
    failure_sensitivity,
    frontier,
    power_and_cost,
    sensitivity,
)

__all__ = [
    "Assumptions",
    "Device",
    "Failures",
    "Frontier",
    "Law",
    "LayerTimes",
    "Limits",
    "LinearLayer",
    "Point",
    "assumptions",
    "best_runs",
    "device_from_chip",
    "end_of_batch_s",
    "failure_sensitivity",
    "find_device",
    "find_law",
    "frontier",
    "latency_wall_flop",
    "law_names",
    "layer_times",
    "layer_what_ifs",
    "power_and_cost",
    "power_law",
    "sensitivity",
]
