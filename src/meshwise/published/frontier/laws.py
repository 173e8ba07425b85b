"""How a training run grows with its model: tokens, depth and batch, each a law one can replace.

A `Law` is a name, a function of the number of parameters, and a source. Almost every published law
is a power law, value = coefficient x (parameters / at) ** exponent; those are data, in
`catalog/frontier.toml`. Any other function of an array can be a law too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.units import Num

KINDS = ("tokens", "depth", "batch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """`function` maps a number of parameters (array) to tokens, layers or tokens per batch (array)."""

    name: str
    function: Callable[[Num], Num]
    source: str = ""

    def __call__(self, params: Num) -> Num:
        """The law at `params`; raises `WorkloadError` unless every value is finite and above zero."""
        with np.errstate(all="ignore"):
            value = np.asarray(self.function(params), dtype=np.float64)
        bad = ~(np.isfinite(value) & (value > 0))
        if bad.any():
            at = np.broadcast_to(np.asarray(params), value.shape)[bad].flat[0]
            raise WorkloadError(
                f"law {self.name!r} returns {value[bad].flat[0]} at {at:.3g} parameters; "
                "a law must return finite numbers above zero"
            )
        return value


def power_law(
    coefficient: float, exponent: float, *, at: float = 1.0, name: str = "", source: str = ""
) -> Law:
    """The law coefficient x (parameters / at) ** exponent."""
    return Law(
        name=name or f"{coefficient:g},{exponent:g}",
        function=lambda params: coefficient * (params / at) ** exponent,
        source=source,
    )


@cache
def catalog() -> dict[str, Any]:
    """The named laws and latencies, as written in `catalog/frontier.toml`."""
    return read_catalog("frontier.toml")


def law_names(kind: str) -> list[str]:
    """The names of the laws of one of `KINDS`; the first is the default."""
    return list(catalog()[kind])


def find_law(kind: str, text: str) -> Law:
    """The law of `kind` called `text`, or the power law written `COEFFICIENT,EXPONENT`."""
    entries = catalog()[kind]
    if text in entries:
        entry = entries[text]
        return power_law(
            entry["coefficient"],
            entry["exponent"],
            at=entry.get("at", 1.0),
            name=text,
            source=entry["source"],
        )
    try:
        coefficient, exponent = (float(part) for part in text.split(","))
    except ValueError:
        raise WorkloadError(
            f"no {kind} law is called {text!r}; known: {', '.join(entries)}; or write COEFFICIENT,EXPONENT"
        ) from None
    return power_law(coefficient, exponent, name=text, source="the command line")
