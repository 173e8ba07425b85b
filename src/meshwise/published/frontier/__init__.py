"""The limits that data movement sets to the largest training runs.

`device` has the rates of a chip, `layer` is one linear layer on one microbatch,
`assumptions` says how model, data and batch grow with compute, `step` is one training step,
`run` the search over its parallelism, `failures` what interruptions cost. docs/frontier.md derives it.
"""

from meshwise.published.frontier.assumptions import OPTIONS
from meshwise.published.frontier.device import Device, find_device
from meshwise.published.frontier.layer import LinearLayer, layer_document
from meshwise.published.frontier.run import RESOURCES, Frontier, Limits, Point, frontier, settings_of

__all__ = [
    "OPTIONS",
    "RESOURCES",
    "Device",
    "Frontier",
    "Limits",
    "LinearLayer",
    "Point",
    "find_device",
    "frontier",
    "layer_document",
    "settings_of",
]
