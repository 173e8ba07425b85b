"""A device as the frontier model sees it: one rate each for arithmetic, memory and the network.

Two conventions differ from the rest of meshwise, because the model's source has them. Arithmetic is
rated at 8 bits and slows down in proportion to the width of a word. And a network port is rated by
what it sends *and* receives, added up: 900e9 bytes/s for the NVLink of an H100, which the catalog
lists as 450e9 per direction. `device_from_chip` is the one place where the two meet.

A network has up to two levels: `inner` joins the ranks of a domain (an NVLink node or rack), `outer`
joins domains. A flat network is one infinite domain, with both levels at the same rate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from meshwise.core.errors import ClusterError
from meshwise.core.refusals import refuse
from meshwise.core.units import Num, require_positive
from meshwise.machine.hardware import Chip, Level, chips, find_chip, find_cluster

BASE_UTILIZATION = 0.8
"""Share of the peaks of arithmetic and memory that throttling leaves: the source notebook's default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """What a device does per second. Rates may be arrays, to cost many devices in one call.

    `inner_bytes_per_s` and `outer_bytes_per_s` are sent plus received bytes of one rank.
    `utilization` derates arithmetic and memory, but not the network.

    Raises `ClusterError` if a rate is missing, not above zero, or not a number.
    """

    name: str
    flop_per_s_8bit: Num
    memory_bytes_per_s: Num
    inner_bytes_per_s: Num
    outer_bytes_per_s: Num
    domain_ranks: float = math.inf
    memory_bytes: float = math.inf
    power_watts: float = 0.0
    utilization: Num = BASE_UTILIZATION

    def __post_init__(self) -> None:
        for what in ("flop_per_s_8bit", "memory_bytes_per_s", "memory_bytes", "domain_ranks"):
            require_positive(getattr(self, what), f"device {self.name}: {what}", finite=False)
        for what in ("inner_bytes_per_s", "outer_bytes_per_s"):
            require_positive(getattr(self, what), f"device {self.name} has no network: {what}", finite=False)
        least, most = np.min(self.utilization), np.max(self.utilization)
        refuse("frontier device", ClusterError, of=self, least=least, most=most)

    def flat(self) -> Device:
        """The same device with every rank of the cluster in one domain."""
        return replace(self, domain_ranks=math.inf, outer_bytes_per_s=self.inner_bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """Its fields; what is infinite is None."""
        return {key: finite_or_none(x) if isinstance(x, float) else x for key, x in asdict(self).items()}


def finite_or_none(value: float) -> float | None:
    """`value`, or None where it is infinite or no number."""
    return value if math.isfinite(value) else None


def device_from_chip(
    chip: Chip, levels: tuple[Level, ...] | None = None, *, utilization: Num = BASE_UTILIZATION
) -> Device:
    """The device that `chip` is, with its usual links or with `levels`.

    The 8-bit rate is twice the dense 16-bit one, so that a chip without 8-bit units is rated on what
    it has. The domain is a node, and the first network joins nodes; one level alone is a flat network.
    Bandwidth per direction doubles, because a port here is rated by sent plus received bytes.
    """
    levels = chip.levels if levels is None else levels
    refuse("levels of a device", ClusterError, levels=levels, chip=chip)
    outer = ([level for level in levels[1:] if not level.box_link] or levels[-1:])[0]
    inner = levels[max(levels.index(outer) - 1, 0)]
    names = ("name", "memory_bytes_per_s", "memory_bytes", "power_watts")
    rates: dict[str, Any] = {name: getattr(chip, name) for name in names}
    rates |= {"inner_bytes_per_s": 2 * inner.bytes_per_s, "outer_bytes_per_s": 2 * outer.bytes_per_s}
    peak = 2 * chip.matrix_peak(chip.training_dtype)
    return Device(flop_per_s_8bit=peak, domain_ranks=inner.ranks, utilization=utilization, **rates)


def find_device(text: str, *, utilization: Num = BASE_UTILIZATION) -> Device:
    """The device that `text` names: a chip of the catalog, a cluster preset, or a cluster's TOML file."""
    if text.lower() in {name for key, chip in chips().items() for name in (key, *chip.aliases)}:
        return device_from_chip(find_chip(text), utilization=utilization)
    cluster = find_cluster(text)
    return replace(device_from_chip(cluster.chip, cluster.levels, utilization=utilization), name=cluster.name)
