"""How a training run grows with its model: tokens, depth and batch, each a law one can replace.

Every published law is a power law; those that have a name are data, in `catalog/frontier.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.units import Num

KINDS = ("tokens", "depth", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Tokens, layers or tokens per batch: coefficient x (parameters / at) ** exponent."""

    name: str
    coefficient: float
    exponent: float
    at: float = 1.0
    source: str = ""

    def __call__(self, params: Num) -> Num:
        """The law at `params`; raises `WorkloadError` unless every value is finite and above zero."""
        with np.errstate(all="ignore"):
            value = self.coefficient * (np.asarray(params) / self.at) ** self.exponent
        bad = ~(np.isfinite(value) & (value > 0))
        if bad.any():
            at = np.broadcast_to(np.asarray(params), value.shape)[bad].flat[0]
            raise WorkloadError(
                f"law {self.name!r} returns {value[bad].flat[0]} at {at:.3g} parameters; "
                "a law must return finite numbers above zero"
            )
        return value


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
        return Law(name=text, **entries[text])
    try:
        coefficient, exponent = (float(part) for part in text.split(","))
    except ValueError:
        raise WorkloadError(
            f"no {kind} law is called {text!r}; known: {', '.join(entries)}; or write COEFFICIENT,EXPONENT"
        ) from None
    return Law(name=text, coefficient=coefficient, exponent=exponent, source="the command line")
