"""SI inside, prefixes only when printing.

Everything in meshwise is bytes, seconds and FLOP, as float64 (FLOP counts overflow int64). A
quantity is a `Num`: a float, or an array of floats whose axes are the axes of a grid of plans.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Num: TypeAlias = float | NDArray[np.floating[Any]]
else:
    Num: TypeAlias = object

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8.0,
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp4": 0.5,
    "int4": 0.5,
}
"""Bytes of one element as it lies in memory (tf32 is stored as fp32)."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")


def with_prefix(value: float, unit: str, digits: int = 4) -> str:
    """`value` with an SI prefix and about `digits` significant digits: `3.15e14, "FLOP"` -> `315 TFLOP`."""
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    power = 0
    scaled = float(value)
    while abs(scaled) >= 999.95 and power < len(_PREFIXES) - 1:
        scaled /= 1000
        power += 1
    return f"{scaled:.{digits}g} {_PREFIXES[power]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """A time for people: `1.5e-5` -> `15 µs`, `0.25` -> `250 ms`, `90000` -> `25 h`."""
    if not math.isfinite(seconds):
        return str(seconds)
    for limit, scale, unit in (
        (1e-6, 1e-9, "ns"),
        (1e-3, 1e-6, "µs"),
        (1.0, 1e-3, "ms"),
        (1e3, 1.0, "s"),
        (48 * 3600.0, 3600.0, "h"),
    ):
        if abs(seconds) < limit:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 86400:.4g} days"
