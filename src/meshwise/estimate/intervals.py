"""Between which values a measurement will lie: the 10th and 90th percentile around a prediction.

8 of 10 measurements differ from the prediction by no more than a factor, up or down: a new source is off as
a whole, and on which side is not known before. The factors are those of runs whose source had no part in the
constants that predicted them (`meshwise.calibrate.leave_one_source_out`), in `catalog/intervals.toml`. Runs
are told apart by what moves the error: experts or none, matmuls of 16 bits or fewer, more than 1,000 GPUs.
Where nothing like the plan was measured, the factors are those of runs whose generation of chips was left out
as a whole. An estimate in several regimes has the lowest p10 and the highest p90 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from meshwise.core.files import read_catalog
from meshwise.plan.plan import NARROW_DTYPES

LARGE = 1000
"""GPUs beyond which a run is in a regime of its own."""


class Spread(msgspec.Struct, frozen=True):
    """10th and 90th percentile of measured over predicted, and how many runs of how many sources say so."""

    p10: float
    p90: float
    num_runs: int
    num_sources: int


class Spreads(msgspec.Struct, frozen=True):
    """The catalog: what was `measured` (`hopper.fp8`), and the spreads by regime of each quantity."""

    measured: Sequence[str]
    step_s: Mapping[str, Spread]
    memory_bytes: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Interval:
    """10th and 90th percentile of what a measurement of the prediction would be, and what that rests on."""

    p10: float
    p90: float
    reason: str

    def to_json(self) -> dict[str, float]:
        """The two percentiles."""
        return {"p10": self.p10, "p90": self.p90}


@cache
def spreads() -> Spreads:
    """The catalog."""
    return msgspec.convert(read_catalog("intervals.toml"), Spreads)


def regimes(*, has_experts: bool, dtype: str, num_chips: int) -> list[str]:
    """The regimes of a training step on chips that were measured."""
    kind = "mixture of experts" if has_experts else "dense"
    narrow = "" if has_experts or dtype not in NARROW_DTYPES else ", 8 bits or fewer"
    return [kind + narrow, *([f"more than {LARGE:,} GPUs"] if num_chips > LARGE else [])]


UNMEASURED = "unmeasured"


def interval_around(
    quantity: str, value: float, found: Sequence[str], unmeasured: str = "", among: Spreads | None = None
) -> Interval:
    """The interval around the prediction `value` in the regimes `found`; `unmeasured`: what never was."""
    table: Mapping[str, Spread] = getattr(among or spreads(), quantity)
    names = [name for name in (*found, *([UNMEASURED] if unmeasured else [])) if name in table] or [
        UNMEASURED
    ]
    used = [table[name] for name in names]
    runs = ", ".join(
        f"{spread.num_runs} runs of {spread.num_sources} sources ({name})"
        for name, spread in zip(names, used, strict=True)
        if name != UNMEASURED
    )
    reason = f"8 of 10 measurements fall between p10 and p90, judging by {runs}, none by its own source"
    return Interval(
        p10=value * min(spread.p10 for spread in used),
        p90=value * max(spread.p90 for spread in used),
        reason=reason + (f"; wider because {unmeasured} was never measured" if unmeasured else ""),
    )
