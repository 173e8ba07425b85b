"""How many requests a second one replica takes: until its queue grows, or until its limits break.

Measured on the simulated replica with the load's own requests. What drains from a full queue is the rate at
which it is saturated; the rate within limits is found by bisection, requests arriving at random (Poisson).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.plan.fields import catalog_fields, read_words
from meshwise.serve.engine import Engine
from meshwise.serve.load import Fleet, has_room, pools_of
from meshwise.serve.requests import SEED, Requests
from meshwise.serve.simulate import Autoscaling, LatencyLimits, Served, simulate
from meshwise.serve.stationary import RequestStream

SAMPLE = 1500
"""Requests of each simulation."""
STEPS = 9
"""Halvings of the interval of rates: to 0.2 % of the rate of saturation."""

_STATED = read_catalog("serve_settings.toml")
RULES, SETTINGS = (catalog_fields(_STATED[name], {}) for name in ("autoscale_rules", "autoscale"))
_NAMES = {"min": "least", "max": "most"}


def parse_autoscale(text: str) -> tuple[float | None, dict[str, Any]]:
    """`sla`, or `utilization=0.7`, with settings: `sla,min=2,max=16,start_s=180,every_s=30,hold_s=300`.

    The share of saturation (None: of the limits), and the settings of `Autoscaling`.
    """
    found = read_words(text, RULES | SETTINGS, WorkloadError, "autoscale")
    rules = [found.pop(name) for name in RULES if name in found]
    if len(rules) != 1:
        raise WorkloadError(f"autoscale {text} must be sla or utilization=SHARE, as in utilization=0.7,min=2")
    return rules[0] or None, {_NAMES.get(key, key): value for key, value in found.items()}


def autoscaled(
    fleet: Fleet, load: Requests | RequestStream, engine: Engine, text: str, limits: LatencyLimits
) -> Fleet:
    """`fleet` with the autoscaler that `text` describes; WorkloadError for what it cannot scale."""
    utilization, settings = parse_autoscale(text)
    share = Autoscaling(utilization or 1.0, **settings)
    refuse("autoscale", WorkloadError, fleet=fleet, share=utilization, limits=limits, of=share)
    rate = requests_per_s(fleet, load, engine, None if utilization else limits)
    scaling = replace(share, requests_per_s=share.requests_per_s * rate)
    return replace(fleet, workers=max(fleet.workers, scaling.least), scaling=scaling)


def requests_per_s(
    fleet: Fleet, load: Requests | RequestStream, engine: Engine, limits: LatencyLimits | None = None
) -> float:
    """Requests a second that one worker of `fleet` takes: within `limits`, or (None) saturated."""
    sample = _sample(load)
    one = replace(fleet, workers=1, prefill=None, scaling=None)
    if not has_room(one):
        raise WorkloadError("no sequence has room beside the weights of a replica; use more GPUs for each")
    pools = pools_of(one, sample, engine)
    gaps = np.cumsum(np.random.default_rng(SEED).exponential(1.0, len(sample.prompt)))

    def at(rate: float) -> Served:
        arrival = tuple((gaps / rate).tolist()) if rate else (0.0,) * len(sample.prompt)
        return simulate(replace(sample, arrival_s=arrival), pools)

    most = len(sample.prompt) / at(0.0).span_s
    if limits is None:
        return most
    low, high = 0.0, most
    for _ in range(STEPS):
        rate = (low + high) / 2.0
        low, high = (rate, high) if limits.hold(at(rate)) else (low, rate)
    if not low:
        raise WorkloadError("one replica keeps the limits at no rate; allow longer, or use more GPUs")
    return low


def _sample(load: Requests | RequestStream) -> Requests:
    """Requests of a load by themselves: their lengths, and the blocks that they share."""
    drawn = load if isinstance(load, Requests) else load.draw(SAMPLE)
    some = {name: getattr(drawn, name)[:SAMPLE] for name in ("prompt", "output", "blocks")}
    return replace(drawn, **some, arrival_s=(), concurrency=0, after=(), think_s=())
