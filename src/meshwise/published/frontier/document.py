"""Answers as plain values, ready for JSON: numbers that do not exist are None, never NaN or infinite."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from meshwise.core.errors import WorkloadError
from meshwise.published.frontier.device import Device, finite_or_none
from meshwise.published.frontier.layer import (
    LinearLayer,
    end_of_batch_s,
    layer_times,
    layer_what_ifs,
    share_domain,
)


def layer_document(device: Device, layer: LinearLayer, batch: float) -> dict[str, Any]:
    """One layer on one microbatch: on a flat network, what-ifs, and on the device's two levels if any."""
    for name, value in {"batch": batch, **asdict(layer)}.items():
        least, most = (1 / 8, 1e3) if name == "elem_bytes" else (1, 1e15)
        if not least <= value <= most:
            raise WorkloadError(f"layer: {name} is {value:g}; it must be from {least:g} to {most:g}")
    flat = device.flat()
    times = layer_times(flat, layer, batch)
    document: dict[str, Any] = {
        "device": device.to_json(),
        "fwd_bwd_s": float(times.fwd_bwd_s),
        "flop_s": float(times.flop_s),
        "memory_s": float(times.memory_s),
        "network_s": float(times.network_s),
        "binds": str(times.binds),
        "end_of_batch_s": float(end_of_batch_s(flat, layer)),
        "what_ifs": {
            name: finite_or_none(float(value)) for name, value in layer_what_ifs(flat, layer, batch).items()
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
