"""What a run is assumed to be: its laws and named choices, and the sizes they give it.

Tokens, depth and batch grow with the model by laws that one can replace. Every published law is a power law;
those that have a name are data, in `catalog/frontier.toml`.

Training compute C fixes the model: C = 6 N D, with D tokens, L layers and B tokens per batch from N by
three laws. A layer is two maps, width x 5 width and back (feed-forward and heads), so N = 10 L width^2.
The run takes D / B steps and has to end within its duration T, so a step may take T B / D.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.units import Num
from meshwise.cost.failures import FAILURE_NUMBERS
from meshwise.plan.fields import catalog_fields, read_field

# --- laws ----------------------------------------------------------------------------------------

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
        at = np.broadcast_to(np.asarray(params), value.shape)[bad]
        refuse("law", WorkloadError, of=self, values=value[bad].tolist(), at=at.tolist())
        return value


_CATALOG = read_catalog("frontier.toml")
"""The named laws and latencies."""


def law_names(kind: str) -> list[str]:
    """The names of the laws of one of `KINDS`; the first is the default."""
    return list(_CATALOG[kind])


def find_law(kind: str, text: str) -> Law:
    """The law of `kind` called `text`, a number, or the power law written `COEFFICIENT,EXPONENT`."""
    entries = _CATALOG[kind]
    if text in entries:
        return Law(name=text, **entries[text])
    try:
        coefficient, exponent = (float(part) for part in (text if "," in text else f"{text},0").split(","))
    except ValueError:
        raise WorkloadError(
            f"no {kind} law is called {text!r}; known: {', '.join(entries)}, NUMBER or COEFFICIENT,EXPONENT"
        ) from None
    return Law(name=text, coefficient=coefficient, exponent=exponent, source="the command line")


# --- choices -------------------------------------------------------------------------------------

MAPS = 2
"""Linear maps per layer."""
WIDENING = 5.0
"""Inner width over model width: 4 for the feed-forward part, 1 for the heads."""
MONTH_S = 30 * 86400.0

FIELDS = catalog_fields(_CATALOG["fields"], {})
"""What the choices and numbers of `Assumptions` may be."""
OPTIONS = {key: field.names for key, field in FIELDS.items() if field.names}
"""Named choices, the default first; their meanings are at `Assumptions`."""


def _law(kind: str) -> Law:
    return find_law(kind, law_names(kind)[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assumptions:
    """Everything about a run but its device: each entry is a choice that can be replaced.

    - `tokens` (of all parameters), `depth` and `batch` (of active parameters): the laws.
    - `schedule`: `1f1b`; `interleaved` searches the virtual stages; `zero-bubble` has no fill and drain.
    - `network`: `two-level`, or `flat`: every rank in one domain.
    - `all_reduce`: words through a port, see `layer`.
    - `hops`: an all-reduce over many domains takes two outer steps (`direct`, as the reduce-scatter
      and multicast of the source's layer), or 2 log2(domains) (`tree`, NCCL's).
    - `latency`: `on-stream`: each kernel and collective occupies its stream for its latency;
      `hidden`: latencies count in the fill and on the critical path only.
    - `capacity`: whether weights, optimizer and activations must fit in memory.
    - `sequential_maps`: kernels and collectives of a layer that wait for each other, per direction.
    - `num_experts`: experts of which a token passes one; all weights are in experts.
    """

    tokens: Law = field(default_factory=lambda: _law("tokens"))
    depth: Law = field(default_factory=lambda: _law("depth"))
    batch: Law = field(default_factory=lambda: _law("batch"))
    duration_s: float = 3 * MONTH_S
    elem_bytes: float = 2.0
    num_experts: float = 1.0
    sequential_maps: float = MAPS
    schedule: str = "1f1b"
    network: str = "two-level"
    all_reduce: str = "multicast"
    hops: str = "direct"
    latency: str = "on-stream"
    capacity: str = "checked"
    kernel_s: float = _CATALOG["latency"]["kernel_s"]
    base_s: float = _CATALOG["latency"]["base_s"]
    inner_step_s: float = _CATALOG["latency"]["inner_step_s"]
    outer_step_s: float = _CATALOG["latency"]["outer_step_s"]

    def __post_init__(self) -> None:
        for name in FIELDS:
            read_field(name, getattr(self, name), FIELDS, WorkloadError)


def assumptions(**settings: str | float) -> Assumptions:
    """`Assumptions` from plain values: a law by name or as `COEFFICIENT,EXPONENT`, numbers as text or not."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        known = [*KINDS, *FIELDS]
        names = ", ".join((*known, *FAILURE_NUMBERS))
        refuse("choice of a run", WorkloadError, key=key, known=known, names=names)
        is_law = key in KINDS
        values[key] = find_law(key, str(value)) if is_law else read_field(key, value, FIELDS, WorkloadError)
    return Assumptions(**values)


# --- sizes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """The model and batch of a run of `training_flop`; `step_s` is the time a step may take."""

    training_flop: Num
    params: Num
    total_params: Num
    tokens: Num
    layers: Num
    width: Num
    batch_tokens: Num
    step_s: Num


def sizes(run: Assumptions, training_flop: Num) -> Sizes:
    """What the laws of `run` make of `training_flop`; sizes are real numbers, not rounded."""
    training_flop = np.asarray(training_flop, dtype=np.float64)
    params = params_where(lambda n: 6 * n * run.tokens(n * run.num_experts), training_flop)
    tokens = run.tokens(params * run.num_experts)
    layers, batch = run.depth(params), run.batch(params)
    return Sizes(
        training_flop=training_flop,
        params=params,
        total_params=params * run.num_experts,
        tokens=tokens,
        layers=layers,
        width=np.sqrt(params / (MAPS * WIDENING * layers)),
        batch_tokens=batch,
        step_s=run.duration_s * batch / tokens,
    )


def params_where(growing: Callable[[Num], Num], target: Num) -> NDArray[np.float64]:
    """The parameters at which the function `growing` reaches `target`, by bisection of the exponent."""
    low = np.full(np.shape(target), 0.0)
    high = np.full(np.shape(target), 25.0)
    for _ in range(100):
        middle = (low + high) / 2
        above = growing(10**middle) > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return 10 ** ((low + high) / 2)
