"""Answers as plain values, ready for JSON: numbers that do not exist are None, never NaN or infinite."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.published.frontier.assumptions import LATENCIES, NUMBERS, OPTIONS
from meshwise.published.frontier.device import Device
from meshwise.published.frontier.laws import KINDS
from meshwise.published.frontier.layer import (
    LinearLayer,
    end_of_batch_s,
    layer_times,
    layer_what_ifs,
    share_domain,
)
from meshwise.published.frontier.run import Frontier, Limits, Point, power_and_cost


def layer_document(device: Device, layer: LinearLayer, batch: float) -> dict[str, Any]:
    """One layer on one microbatch: on a flat network, what-ifs, and on the device's two levels if any."""
    for name, value in {"batch": batch, **asdict(layer)}.items():
        least, most = (1 / 8, 1e3) if name == "elem_bytes" else (1, 1e15)
        if not least <= value <= most:
            raise WorkloadError(f"layer: {name} is {value:g}; it must be from {least:g} to {most:g}")
    flat = device.flat()
    times = layer_times(flat, layer, batch)
    document: dict[str, Any] = {
        "device": _device(device),
        "fwd_bwd_s": float(times.fwd_bwd_s),
        "flop_s": float(times.flop_s),
        "memory_s": float(times.memory_s),
        "network_s": float(times.network_s),
        "binds": str(times.binds),
        "end_of_batch_s": float(end_of_batch_s(flat, layer)),
        "what_ifs": {
            name: _finite(float(value)) for name, value in layer_what_ifs(flat, layer, batch).items()
        },
    }
    if not math.isinf(device.domain_ranks):
        inner_in, inner_out = share_domain(device, layer.d_in, layer.d_out, layer.tp_in, layer.tp_out)
        two = layer_times(device, layer, batch, inner_in=inner_in, inner_out=inner_out)
        document["two_level"] = {
            "fwd_bwd_s": float(two.fwd_bwd_s),
            "inner_s": float(two.inner_s),
            "outer_s": float(two.outer_s),
            "inner_in": float(inner_in),
            "inner_out": float(inner_out),
            "binds": str(two.binds),
        }
    return document


def run_document(
    found: Frontier, *, watts: float | None = None, price_per_device_hour: float | None = None
) -> dict[str, Any]:
    """A frontier without failures, and under `with_failures` the same with them."""
    watts = found.device.power_watts or None if watts is None else watts
    price = 0.0 if price_per_device_hour is None else price_per_device_hour
    failures, laws = found.failures, {kind: getattr(found.run, kind) for kind in KINDS}
    return {
        "device": _device(found.device),
        "assumptions": {
            **{kind: {"name": law.name, "source": law.source} for kind, law in laws.items()},
            **{name: getattr(found.run, name) for name in (*OPTIONS, *NUMBERS, *LATENCIES)},
        },
        "failures": {
            "device_hours_between_interruptions": failures.device_s_between_interruptions / 3600,
            "storage_bytes_per_s": failures.storage_bytes_per_s,
            "restart_s": failures.restart_s,
            "source": failures.source,
        },
        "power_and_cost": {"watts_per_device": watts, "price_per_device_hour": price},
        **_limits(found.ideal, watts, price),
        "with_failures": _limits(found.with_failures, watts, price),
    }


def _limits(found: Limits, watts: float | None, price: float) -> dict[str, Any]:
    def shown(point: Point | None) -> dict[str, Any] | None:
        return None if point is None else asdict(point) | power_and_cost(point, watts, price)

    return {
        "plateau": found.plateau,
        "limit_80pct_flop": found.limit_80pct_flop,
        "wall_flop": found.wall_flop,
        "limit": shown(found.limit),
        "wall": shown(found.wall),
        "curve": [shown(point) for point in found.curve],
    }


def _device(device: Device) -> dict[str, Any]:
    values = asdict(device)
    return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
