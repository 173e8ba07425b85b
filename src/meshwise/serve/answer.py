"""The answer of `serve`: what fits, the first token, decode passes by number of sequences, and the load."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog, write_files
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse, told
from meshwise.core.units import MOST_STATED, positive
from meshwise.estimate.intervals import interval_of
from meshwise.machine.hardware import Cluster, find_chip
from meshwise.plan.fields import catalog_fields, read_words
from meshwise.plan.plan import Plan
from meshwise.plan.workload import as_released
from meshwise.serve import serving as est
from meshwise.serve.engine import Engine, parse_engine
from meshwise.serve.instances import Instances
from meshwise.serve.load import Fleet, LoadResult, cost, energy, has_room, pools_of, under_load
from meshwise.serve.pass_times import first_token_s, launches_s, rows, sequences_within
from meshwise.serve.requests import SEED, Requests
from meshwise.serve.router import ROUND_ROBIN
from meshwise.serve.screen import formats_of
from meshwise.serve.serving import Serving
from meshwise.serve.simulate import NO_LIMITS, Autoscaling, LatencyLimits, Served, simulate
from meshwise.serve.size import Sizing, Wanted, size
from meshwise.serve.stationary import RequestStream


@dataclass(frozen=True, slots=True)
class Deployment:
    """Files by name; `commands` that apply them, then load the fleet; `not_expressed`, one sentence each."""

    target: str
    files: dict[str, str]
    commands: tuple[str, ...]
    not_expressed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The key `deployment` of the document of `meshwise serve --json`."""
        return msgspec.to_builtins(self)

    def write(self, folder: Path) -> list[Path]:
        """Write all files, or none, into `folder`, which is made where it is missing; else DataError."""
        return write_files(folder, self.files)


@dataclass(frozen=True, eq=False, repr=False)
class ServingAnswer(Shown):
    """Figures of `serving` for numbers of sequences, a latency target per token [s]; under load.

    With `sizing`, `serving` is the layout that was chosen; without `has_layout` it only says what was to be
    served, and `to_json` has None for what a layout would give. `usd_per_gpu_hour` by chip ("" is any).
    `num_instances`: how many of them the stated cluster holds, where no layout was stated. `has_details`:
    whether passes and trade-offs are shown beside the answer.
    """

    serving: Serving
    sequences: tuple[int, ...]
    token_s: float | None = None
    load: LoadResult | None = None
    sizing: Sizing | None = None
    usd_per_gpu_hour: Mapping[str, float] | None = None
    pue: float | None = None
    carbon: float | None = None
    deployment: Deployment | None = None
    num_instances: int = 1
    has_details: bool = True
    rows_in: ClassVar[str] = "passes"

    @property
    def has_layout(self) -> bool:
        """Whether a layout was stated, or found by sizing."""
        return self.sizing is None or self.sizing.chosen is not None

    @property
    def is_no(self) -> bool:
        """Whether nothing fits, nothing holds the limits, or the queue grows without end."""
        if self.load is not None:
            misses = self.load.queue_grows or not self.load.limits.hold(self.load.served)
        else:
            misses = not self.has_layout or self.sequences_within_limit == 0
        return not self.max_sequences or misses

    @property
    def cost(self) -> dict[str, float]:
        """Dollars an hour and a million tokens; empty without a load and prices."""
        return cost(self.load, self.usd_per_gpu_hour) if self.load and self.usd_per_gpu_hour else {}

    @property
    def energy(self) -> dict[str, Any]:
        """Watts, and what output tokens take in the building; empty without a load."""
        return energy(self.load, self.pue or 1.0, self.carbon) if self.load else {}

    @property
    def max_sequences(self) -> int:
        """Sequences of the whole instance for which there is memory."""
        return est.max_sequences(self.serving) * self.serving.dp

    @property
    def first_token_s(self) -> float:
        """Time to the first token of a prompt on an idle instance: kernels, with a load the host too.

        Of a pool of prompts, and until its cache has been handed over, where there is one.
        """
        handed_over_s = self.load.fleet.transfer_token_s * self.serving.prompt if self.load else 0.0
        return handed_over_s + first_token_s(self._of_prompts, self._engine)

    @property
    def sequences_within_limit(self) -> int | None:
        """The most sequences that fit and meet the latency target; None without a target."""
        if self.token_s is None:
            return None
        return sequences_within(self.serving, self.token_s, self._engine)

    @cached_property
    def passes(self) -> list[dict[str, Any]]:
        """Time, rates and memory of a decode pass, as the engine of the load runs it, by sequences."""
        return rows(self.serving, self.sequences, self._engine)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """A row for each layout considered, or for each request of the load, by column."""
        if self.sizing is None:
            return self.load.columns if self.load else {}
        rows = [choice.to_json() for choice in self.sizing.choices]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    @property
    def _graph_notes(self) -> list[str]:
        """That passes run beyond the captured batches, where that takes longer."""
        if (engine := self._engine) is None or self.load is None:
            return []
        running = self.load.simulated.peak_sequences / self.load.fleet.workers
        each = 16 * math.ceil(max(running, *self.sequences, 0) / self.serving.groups / 16)  # their usual step
        is_launched, largest = bool(np.any(launches_s(self.serving))), max(engine.captured, default=0)
        return told("graph notes", engine=engine, largest=largest, each=each, is_launched=is_launched)

    @property
    def _of_prompts(self) -> Serving:
        return (self.load and self.load.fleet.prefill) or self.serving

    @property
    def _interval_note(self) -> str:
        of = self.serving.model, self.serving.cluster, self.serving.mesh.plan
        found = interval_of("step_s", 1.0, *of, is_training=False)
        judging = found.reason.partition(", ")[2]
        return f"interval: 8 of 10 passes take {found.p10:.2f} to {found.p90:.2f} times as long, {judging}"

    @property
    def _engine(self) -> Engine | None:
        return self.load.engine.on(self.serving.cluster.chip) if self.load else None

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise serve --json` prints."""
        of, first, load, memory = self.serving, self._of_prompts, self.load, est.memory_of_one(self.serving)
        figures = ("num_instances", "max_sequences", "first_token_s", "sequences_within_limit", "passes")
        document: dict[str, Any] = {"model": of.model.name, "cluster": of.cluster.to_json()}
        document |= {name: getattr(of, name) for name in ("plan", "prompt", "output")}
        document |= {name: getattr(self, name) for name in figures}
        document |= {
            "weight_bytes": memory["weights"],
            "cache_bytes_per_sequence": memory["cache"],
            "memory_bytes": memory,
            "first_token_kernels_s": est.first_token_kernels_s(first),
            "prompt_tokens_per_s_per_gpu": of.prompt / est.prompt_s(first) * first.groups / first.num_chips,
            "encoding": of.encoding and {"request_s": of.encoding.request_s},
            "notes": [*est.notes(of), *self._graph_notes, *(load.notes if load else [self._interval_note])],
        }
        if not self.has_layout:
            document |= dict.fromkeys(document.keys() - {"model", "prompt", "output", "passes", "notes"})
        document |= load.to_json() | self.cost | self.energy if load else {}
        for name in ("sizing", "deployment"):
            if (part := getattr(self, name)) is not None:
                document[name] = part.to_json()
        return document


def answer(
    fleet: Fleet, sequences: Sequence[int] = (), limits: LatencyLimits = NO_LIMITS, *,
    requests: Requests | RequestStream | None = None, engine: str = "", autoscale: str = "",
    usd_per_gpu_hour: Mapping[str, float] | None = None,
) -> ServingAnswer:  # fmt: skip
    """What `fleet` gives, alone and, with `requests`, under their load."""
    serving = fleet.serving
    load = None
    if requests is None:
        names = {"engine": engine, "price": usd_per_gpu_hour, "autoscale": autoscale, "usual": ROUND_ROBIN}
        refuse("without a load", WorkloadError, fleet=fleet, limits=limits, **names)
    else:
        runs = parse_engine(engine or "vllm")
        if autoscale:
            fleet = autoscaled(fleet, requests, runs, autoscale, limits)
        load = under_load(fleet, requests, runs, limits)
    shown, usd = _counts(serving, sequences), usd_per_gpu_hour
    return ServingAnswer(serving, shown, limits.token_s, load, usd_per_gpu_hour=usd)


def _counts(serving: Serving, sequences: Sequence[int]) -> tuple[int, ...]:
    """Numbers of running sequences to show; by default powers of two of sequences, up to what fits."""
    for count in sequences:
        refuse("sequences", WorkloadError, count=count, of=serving)
    return tuple(sequences) or tuple(est.batches(serving))


def fewest(
    instances: Instances, clusters: Sequence[Cluster], stated: Mapping[str, Sequence[Any]], wanted: Wanted,
    sequences: Sequence[int] = (), *, has_details: bool = False,
) -> ServingAnswer:  # fmt: skip
    """What holds what is `wanted` on the fewest GPUs, or came nearest; where there is neither, no layout.

    `stated`: the values that keys of its plan may have; formats are those released where none is stated.
    """
    released = as_released(instances.model, stated)
    formats = {**stated, **{key: (value,) for key, value in released.items()}}
    sizing = size(instances.cut, clusters, formats, wanted)
    choice, usd = sizing.chosen, wanted.usd_per_gpu_hour
    if choice:
        serving, load, shown = choice.fleet.serving, choice.load, _counts(choice.fleet.serving, sequences)
    else:
        kept = {key: values[0] for key, values in formats_of(formats).items()}
        serving, load, shown = instances.cut(replace(clusters[0], num_chips=1), Plan(**kept)), None, ()
    return ServingAnswer(
        serving, shown, wanted.limits.token_s, load, sizing, usd,
        has_details=has_details or bool(sequences) or load is None,
    )  # fmt: skip


def parse_prices(text: str) -> dict[str, float]:
    """Dollars a GPU and hour: `2.5`, or by chip: `h100-80g-sxm=2.5,b200-sxm=4`."""
    found: dict[str, float] = {}
    for word in text.split(","):
        chip, _, price = word.rpartition("=")
        name, usd = find_chip(chip).name if chip else "", positive(price)
        if name in found:
            raise WorkloadError(f"price: {text!r} states two of {name or 'every chip'}; state one of each")
        if usd is None or usd > MOST_STATED:
            raise WorkloadError(f"price: {word!r} is no price; write 2.5, or h100-80g-sxm=2.5,b200-sxm=4")
        found[name] = usd
    return found


# --- autoscaling: how many requests a second one replica takes --------------------------------------
#
# Until its queue grows, or until its limits break: measured on the simulated replica with the load's own
# requests. What drains from a full queue is the rate at which it is saturated; the rate within limits is
# found by bisection, requests arriving at random (Poisson).

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
