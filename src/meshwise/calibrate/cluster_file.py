"""The rates that a machine was measured to reach, and the cluster file that holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.core.files import write_text
from meshwise.core.ledger import Collective
from meshwise.cost.collective import collective_s
from meshwise.machine.hardware import MEASURED, Chip, Cluster, Level, Link, ReduceScatter, cluster_text

_OF_CHIP = ("memory_bytes", "memory_bytes_per_s", "matrix_flop_per_s", "vector_flop_per_s", "op_host_s")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: `time_s` of one call, `rate` in `unit` (FLOP/s, or bytes/s of what it is about)."""

    what: str
    shape: str
    dtype: str
    time_s: float
    rate: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and the rates that follow from it."""

    name: str
    num_ranks: int
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_flop_per_s: dict[str, float]
    vector_flop_per_s: dict[str, float]
    link_name: str
    link_bytes_per_s: float
    link_latency_s: float
    samples: tuple[Sample, ...]
    source: str
    checked: str
    link_ranks: int = 0
    """Ranks that the link joins, where `outer` goes on; 0 for all."""
    outer: Level | None = None
    """The link beyond it."""
    op_host_s: float = 0.0
    """What the host of a rank without a device adds to each matrix op."""

    @property
    def cluster(self) -> Cluster:
        """The machine as a cluster."""
        ranks = self.link_ranks or math.inf
        speed: dict[str, Any] = {"bytes_per_s": self.link_bytes_per_s, "latency_s": self.link_latency_s}
        link = Level(name=self.link_name, ranks=ranks, **speed)
        stated: dict[str, Any] = {"levels": (link, *filter(None, [self.outer]))}
        stated |= {name: getattr(self, name) for name in ("name", "source", "checked")}
        rates = {name: getattr(self, name) for name in _OF_CHIP}
        chip = Chip(vendor=MEASURED, generation=self.name, **rates, **stated)
        # What the library of collectives does to reduce and scatter: gloo reduces all.
        reduces: ReduceScatter = "all_reduce" if self.link_name.startswith("gloo") else "reduce_scatter"
        return Cluster(chip=chip, num_chips=self.num_ranks, reduce_scatter=reduces, **stated)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the cluster file, whole or not at all; DataError where that fails."""
        head = "# Measured by `meshwise calibrate`; read with --cluster FILE.\n"
        write_text(path, head + cluster_text(self.cluster, digits=5))


def fit_link(
    calls: Sequence[tuple[Collective, float, int, float]], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Bandwidth [bytes/s] and latency [s] of one link that explain `calls` best.

    A call is its kind, payload bytes, ranks and seconds. Least squares of the relative error (each counts as
    its weight), with the formulas of `estimate`. Where the best latency would be negative it is 0, and the
    bandwidth the best without.
    """
    rows = [
        [
            float(collective_s(kind, num_bytes, ranks, links=(Link(1.0, latency, math.inf),))) / time_s
            for num_bytes, latency in ((size, 0.0), (0.0, 1.0))
        ]
        for kind, size, ranks, time_s in calls
    ]
    target = np.sqrt(np.ones(len(rows)) if weights is None else np.array(weights))
    table = np.array(rows) * target[:, None]
    (per_byte, latency), *_ = np.linalg.lstsq(table, target, rcond=None)
    if per_byte <= 0 or latency < 0:
        (per_byte,), *_ = np.linalg.lstsq(table[:, :1], target, rcond=None)
        latency = 0.0
    return 1.0 / float(per_byte), float(latency)
