"""Between which values a measurement will lie: the 10th and 90th percentile around a prediction.

8 of 10 measurements differ from the prediction by no more than a factor, up or down: a new source is off as
a whole, and on which side is not known before. The factors are those of runs whose source had no part in the
constants that predicted them (`meshwise.calibrate.leave_one_source_out`), in `catalog/intervals.toml`. Runs
are told apart by what moves the error: whose code it is (Megatron's, mostly tuned by those who wrote it, or
PyTorch's, as fast as whoever calls it wrote the rest), and of steps also experts, adapters, dense models in 8
bits or fewer, more than 1,000 GPUs. An estimate in several regimes has the widest of their factors, one in
none that is known the widest of all.

Few sources say little about the next one. Each source of a regime counts once, those of all others together
as one more; of K such, the log of the factor is as much wider as Student's distribution asks for:
t(0.9, K - 1) sqrt(1 + 1/K) / z(0.9), 1.3 of 5 and 1.1 of 16.

What was never measured is farther away, and what one source alone measured, whose runs may tell of themselves
as much as of their chip. `aspects` name what a run is like: its generation of chips, its chip, its type on
that generation, its software, its scale. For each aspect runs were also predicted as if nothing like them had
been measured: from constants fitted without them, and without the kernels of their chips. What has to come
upon the widths of their regimes for 8 of 10 of them to lie within is the distance d of the aspect, each chip
(generation, ...) counting once. Distances are independent, so the log of a factor is

    sqrt(w_regime^2 + sum over unmeasured aspects of d^2)

The widths of their regimes are here those that the other runs tell. Where runs are predicted no worse without
their like (d = 0), nothing measured tells how much wider the interval should be: it is that of measured runs,
and says so. What an aspect of a step measured may be new to memory, which fewer sources state. A kind of
network that was not measured counts by the share of the step that waits for it, and so do more ranks than
were measured: there, links are what is new. Servers and post-training, measured on few chips, take the
distances of chips and generations from training.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from meshwise.core.files import read_catalog
from meshwise.machine.hardware import Chip, Cluster, chips
from meshwise.machine.overheads import measured_as
from meshwise.model.architecture import Model
from meshwise.plan.plan import NARROW_DTYPES, Plan

LARGE = 1000
"""GPUs beyond which a run is in a regime of its own."""
UNMEASURED = "unmeasured "
"""How names of the catalog begin that say the excess of an aspect, not the spread of a regime."""


@dataclass(frozen=True, slots=True)
class Interval:
    """10th and 90th percentile of what a measurement of the prediction would be, and what that rests on."""

    p10: float
    p90: float
    reason: str

    def __iter__(self) -> Iterator[float]:
        """The two percentiles, so that `low, high = interval`."""
        return iter((self.p10, self.p90))

    def to_json(self) -> dict[str, float | str]:
        """The two percentiles, and what they rest on."""
        return {"p10": self.p10, "p90": self.p90, "reason": self.reason}


class Spread(msgspec.Struct, frozen=True):
    """10th and 90th percentile of measured over predicted, and how many runs of how many sources say so."""

    p10: float
    p90: float
    num_runs: int
    num_sources: int

    def around(self, value: float, what: str, source: str, far: Mapping[str, float]) -> Interval:
        """Between which values a measurement of the prediction `value` lies, 8 times of 10.

        `far`: what was not measured of it, each with its distance; that of other sources is nameless.
        """
        sources = f"{self.num_sources} {source}{'s' * (self.num_sources != 1)}"
        others = "; wider for what others measured" * ("" in far)
        reason = f"judging by {self.num_runs} {what} of {sources}, none by its own{others}{_told(far)}"
        low, high = (math.hypot(math.log(end), *far.values()) for end in (self.p10, self.p90))
        return Interval(p10=value * math.exp(-low), p90=value * math.exp(high), reason=reason)


class Spreads(msgspec.Struct, frozen=True):
    """The catalog: what was `measured`, by quantity and aspect; the spreads of each quantity by regime, and
    the excess of each aspect that is not measured (`unmeasured chip`)."""

    measured: Mapping[str, Mapping[str, Sequence[str]]]
    step_s: Mapping[str, Spread]
    memory_bytes: Mapping[str, Spread]


@cache
def spreads() -> Spreads:
    """The catalog."""
    return msgspec.convert(read_catalog("intervals.toml"), Spreads)


def regimes(quantity: str, model: Model, cluster: Cluster, plan: Plan) -> list[str]:
    """The regimes of a training step on chips that were measured, or those of its memory."""
    is_step, is_dense = quantity == "step_s", not (plan.lora_rank or model.moe)
    found = {
        f"under {plan.software.partition('-')[0]}": True,
        "adapters": is_step and plan.lora_rank,
        "mixture of experts": is_step and model.moe and not plan.lora_rank,
        "dense, 8 bits or fewer": is_step and is_dense and plan.dtype in NARROW_DTYPES,
        f"more than {LARGE:,} GPUs": is_step and cluster.num_chips > LARGE,
    }
    return [name for name, is_one in found.items() if is_one]


NETWORK = math.log(2.0)
"""Distance of a kind of network: training reaches 0.27 to 1 of the links of those measured
(`overheads.toml`), of which the 90th percentile is a factor of 2 from the mean."""
SCALES = (8, 128, 1_000, 4_000)
"""GPUs up to which runs are of one scale."""


def aspects(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """What a training step is like, by aspect: words that follow "fewer than two sources measured runs"."""
    chip = cluster.chip
    most = next((f"on up to {most:,} GPUs" for most in SCALES if cluster.num_chips <= most), "")
    return {
        "generation": f"on {chip.generation} chips",
        "chip": f"on {chip.name}",
        "dtype": f"in {plan.dtype} on {chip.generation} chips",
        "software": f"under {measured_as(plan.software)}",
        "scale": most or f"on more than {SCALES[-1]:,} GPUs",
    }


IMPLIED = {"generation": ("chip", "dtype")}
"""Aspects that are new where another is, which is then at least as far away."""


def unmeasured(quantity: str, cluster: Cluster, plan: Plan, among: Spreads | None = None) -> dict[str, str]:
    """The aspects of a step that no two sources had; a new generation is all new chips and types."""
    measured = (among or spreads()).measured[quantity]
    missing = {name: what for name, what in aspects(cluster, plan).items() if what not in measured[name]}
    implied = [name for one in missing for name in IMPLIED.get(one, ())]
    return {name: what for name, what in missing.items() if name not in implied}


def far_chip(chip: Chip, measured: Collection[str]) -> dict[str, float]:
    """What of `chip` was not among those `measured`, with its distance in steps of training."""
    alike = {chips()[name].generation for name in measured}
    name, what = (
        ("chip", chip.name) if chip.generation in alike else ("generation", f"{chip.generation} chips")
    )
    return {} if chip.name in measured else {f"on {what}": _distance(spreads().step_s, name)}


def _distance(table: Mapping[str, Spread], aspect: str) -> float:
    return max(math.log(table[UNMEASURED + name].p90) for name in (aspect, *IMPLIED.get(aspect, ())))


def _told(far: Mapping[str, float]) -> str:
    """What was not measured, as the end of a sentence."""
    found = ""
    for is_wider, how in ((True, "wider because"), (False, "that of measured runs, not wider, although")):
        if told := [what for what, distance in far.items() if what and (distance > 0.0) == is_wider]:
            found += f"; {how} fewer than two sources measured runs {', or '.join(told)}"
    return found


def interval_of(
    quantity: str, value: float, model: Model, cluster: Cluster, plan: Plan,
    *, is_training: bool = True, on_links_frac: float = 0.0, on_new_links: bool = False,
    among: Spreads | None = None,
) -> Interval:  # fmt: skip
    """The interval around `value`, a prediction of `quantity` (step_s or memory_bytes) of a step.

    `on_links_frac`: the share of it that waits for links; `on_new_links`: of a kind that was not measured.
    """
    table: Mapping[str, Spread] = getattr(among or spreads(), quantity)
    missing = [*unmeasured(quantity, cluster, plan, among).items()]
    missing += [] if is_training else [("generation", "of a pass alone")]
    known = {name: spread for name, spread in table.items() if not name.startswith(UNMEASURED)}
    used = {name: known[name] for name in regimes(quantity, model, cluster, plan) if name in known} or known
    of_links = {"scale": on_links_frac * NETWORK}
    far = {what: max(_distance(table, aspect), of_links.get(aspect, 0.0)) for aspect, what in missing}
    if on_new_links and on_links_frac:
        far[f"over {cluster.levels[-1].name}"] = on_links_frac * NETWORK
    width = max(math.log(spread.p90) for spread in used.values())
    factor = math.exp(math.hypot(width, *far.values()))
    runs = ", ".join(
        f"{spread.num_runs} runs of {spread.num_sources} sources ({name})" for name, spread in used.items()
    )
    reason = f"8 of 10 measurements fall inside, judging by {runs}, none by its own source"
    reason += _told(far)
    return Interval(p10=value / factor, p90=value * factor, reason=reason)
