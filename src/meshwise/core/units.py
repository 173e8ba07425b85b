"""SI inside, prefixes only when printing.

Everything in meshwise is bytes, seconds and FLOP, as float64 (FLOP counts overflow int64). A
quantity is a `Num`: a float, or an array of floats whose axes are the axes of a grid of plans.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwise.core.errors import MeshwiseError, WorkloadError
from meshwise.core.files import read_catalog

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Num: TypeAlias = float | NDArray[np.floating[Any]]
else:
    Num: TypeAlias = object

_DTYPES = read_catalog("dtypes.toml")
DTYPE_BYTES: dict[str, float] = _DTYPES["element_bytes"]
"""Bytes of one element as it lies in memory (tf32 is stored as fp32)."""
WEIGHT_BITS: dict[str, float] = _DTYPES["weight_bits"]
"""Bits of a weight in the formats that engines keep weights in, scales included."""

MOST_STATED = 1e30
"""The largest number that a price, a power or a budget may be, so that no product of them is infinite."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q")
_HOURS, _DAYS = (48 * 3600.0, 3600.0), (86400.0, "days")
_TIMES = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "µs"), (1.0, 1e-3, "ms"), (1e3, 1.0, "s"), (*_HOURS, "h"))
_LONG_TIMES = ((90.0, 1.0, "seconds"), (5400.0, 60.0, "minutes"), (*_HOURS, "hours"))
"""Below how many seconds a time is said in which unit, and the seconds of the unit; else in days."""

_NUMBER = re.compile(r"(?i)([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)\s*(?:([kMGTPE])(i?)B?)?")


def values_by_key(text: str, what: str, error: type[MeshwiseError] = WorkloadError) -> dict[str, str]:
    """The value of each key of `key=value,key=value`, "" where it has none; `error` for a key given twice."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in found:
            raise error(f"{what} {text!r} gives {key} twice; give it once")
        found[key] = value
    return found


def quantity(text: str, what: str) -> float:
    """The number that a person writes as `15T`, `1e12`, `64MiB` or `2 GB`; WorkloadError names `what`.

    A bare B is a billion of tokens; else it is refused: it is a byte to some.
    """
    text = re.sub("(?i)(?<=[0-9.])b$", "G", text.strip()) if what.endswith("tokens") else text.strip()
    written = _NUMBER.fullmatch(text.replace(",", "").replace("_", ""))
    if written is None or not 0 < (value := float(written[1])) < math.inf:
        raise WorkloadError(f"{what} {text} must be a number above zero, as 64e6, 15T or 64MiB")
    base = 1024.0 if written[3] else 1000.0
    return value * base ** "kmgtpe".find(written[2].lower()) * base if written[2] else value


def whole(text: str) -> int | None:
    """The count that `text` spells in plain digits, at most 15; None where it does not."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def positive(text: str) -> float | None:
    """The number above zero that `text` spells; None where it does not."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def to_number(value: str | float, what: str) -> float:
    """The number that `value` is or spells; WorkloadError where it is none."""
    try:
        return float(value)
    except ValueError:
        raise WorkloadError(f"{what}={value} must be a number") from None


def with_prefix(value: float | None, unit: str, digits: int = 4) -> str:
    """`value` with an SI prefix and about `digits` significant digits: `3.15e14, "FLOP"` -> `315 TFLOP`.

    None is the empty text.
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    power, scaled = 0, float(value)
    while abs(scaled) >= 999.95 and power < len(_PREFIXES) - 1:
        scaled /= 1000
        power += 1
    return f"{scaled:.{digits}g} {_PREFIXES[power]}{unit}".rstrip()


def mass(kilograms: float) -> str:
    """A mass for people: `2.17` -> `2.17 kg`, `11_390_000` -> `11,390.0 t`."""
    return with_prefix(1000 * kilograms, "g") if kilograms < 1000 else f"{kilograms / 1000:,.1f} t"


def parameters(number: float, digits: int = 4) -> str:
    """A number of parameters as the field writes it: `8.03e9` -> `8.03B`."""
    return with_prefix(number, "", digits).replace(" ", "").replace("G", "B")


def of_capacity(size_bytes: float, capacity_bytes: float | None, fits: bool | None) -> str:
    """A size beside the memory, where that is known, which is to hold it: `12 GB of 24 GB: fits`."""
    verdict = "fits" if fits else "DOES NOT FIT"
    held = "" if capacity_bytes is None else f" of {with_prefix(capacity_bytes, 'B')}: {verdict}"
    return with_prefix(size_bytes, "B") + held


def duration(seconds: float | None, like_s: float | None = None) -> str:
    """A time for people: `1.5e-5` -> `15 µs`, `0.25` -> `250 ms`, `90000` -> `25 h`; None is empty.

    `like_s`: the time whose unit is taken, for times beside it.
    """
    if seconds is None:
        return ""
    if not math.isfinite(seconds):
        return str(seconds)
    size = abs(seconds if like_s is None else like_s)
    scale, unit = next(((scale, unit) for limit, scale, unit in _TIMES if size < limit), _DAYS)
    return f"{seconds / scale:.4g} {unit}"


def long_duration(seconds: float | None) -> str:
    """How long a run takes, for people: `40 minutes`, `1.2 hours`, `199 days`; None is empty."""
    if seconds is None:
        return ""
    scale, unit = next(((scale, unit) for limit, scale, unit in _LONG_TIMES if seconds < limit), _DAYS)
    days = seconds / 86400
    return f"{days:,.0f} days" if days >= 100 else f"{seconds / scale:.3g} {unit}"


def dollars(amount: float | None) -> str:
    """A sum for people, cents where they count: `$0.68`, `$611,195`, `$21.92 billion`; None is empty."""
    if amount is None:
        return ""
    if amount >= 1e9:
        return f"${amount / 1e9:,.2f} billion"
    style = ".2g" if 0 < amount < 0.01 else ",.2f" if amount < 1000 else ",.0f"
    return f"${amount:{style}}"


def require_positive(value: Num, what: str, *, finite: bool = True) -> None:
    """Raise WorkloadError unless every `value` is above zero, and finite if it must be."""
    import numpy as np

    array = np.asarray(value)
    if not np.all((array > 0) & (np.isfinite(array) | (not finite))):
        raise WorkloadError(f"{what} is {value}; it must be a {'finite ' * finite}number above zero")
