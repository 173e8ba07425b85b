"""The rates that a machine was measured to reach, and the cluster file that holds them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.core.files import write_text
from meshwise.core.ledger import Collective
from meshwise.cost.collective import collective_s
from meshwise.machine.hardware import MEASURED, Chip, Cluster, Level, Link, ReduceScatter, cluster_text

_OF_CHIP = ("memory_bytes", "memory_bytes_per_s", "matrix_flop_per_s", "vector_flop_per_s", "op_host_s")
_ONE_SIZE, _MOST_ASSUMED_FRAC = 0.05, 0.1
"""Ratio of singular values below which calls have one size (a fifth apart or less); see `fit_link`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: `time_s` of one call, `rate` in `unit` (FLOP/s, or bytes/s of what it is about)."""

    what: str
    shape: str
    dtype: str
    time_s: float
    rate: float
    unit: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and the cluster whose rates follow from it."""

    cluster: Cluster
    samples: Sequence[Sample]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """What the cluster file holds, of the innermost links, and the samples."""
        on, link = self.cluster, self.cluster.levels[0]
        found = {name: getattr(on.chip, name) for name in _OF_CHIP} | {"num_ranks": on.num_chips}
        found |= {name: getattr(on, name) for name in ("name", "source", "checked")}
        found |= {f"link_{name}": getattr(link, name) for name in ("name", "bytes_per_s", "latency_s")}
        return found | {"samples": [asdict(one) for one in self.samples], "notes": [*self.notes]}

    def write(self, path: Path) -> None:
        """Write the cluster file, whole or not at all; DataError where that fails."""
        head = "# Measured by `meshwise calibrate`; read with --cluster FILE.\n"
        write_text(path, head + cluster_text(self.cluster, digits=5))


def measured_cluster(name: str, num_ranks: int, *levels: Level, source: str, **rates: Any) -> Cluster:
    """A machine of so many ranks by the rates of its chip and the links that join them, innermost first."""
    checked = date.today().isoformat()
    stated: dict[str, Any] = {"name": name, "source": source, "checked": checked, "levels": levels}
    # What the library of collectives does to reduce and scatter: gloo reduces all.
    reduces: ReduceScatter = "all_reduce" if levels[0].name.startswith("gloo") else "reduce_scatter"
    chip = Chip(vendor=MEASURED, generation=name, **rates, **stated)
    return Cluster(chip=chip, num_chips=num_ranks, reduce_scatter=reduces, **stated)


def fit_link(
    calls: Sequence[tuple[Collective, float, int, float]], weights: Sequence[float] = (), usual_s: float = 0.0
) -> tuple[float, float]:
    """Bandwidth [bytes/s] and latency [s] of one link that explain `calls` best.

    A call is its kind, payload bytes, ranks and seconds. Least squares of the relative error (each counts as
    its weight), with the formulas of `estimate`. Where the calls do not tell the latency (all have one size,
    or the best is negative) it is `usual_s`, a tenth of a call at most, and the bandwidth the best with it.
    """
    part = np.array([0.0, 1.0])  # time by bytes, time by latency
    each = [
        collective_s(kind, size * (1.0 - part), ranks, links=(Link(1.0, part, math.inf),)) / time_s
        for kind, size, ranks, time_s in calls
    ]
    rows, target = np.array(each), np.sqrt(weights or np.ones(len(calls)))
    table = rows * target[:, None]
    scale = np.linalg.norm(table, axis=0)
    table = table / scale
    (per_byte, latency), _, num_told, _ = np.linalg.lstsq(table, target, rcond=_ONE_SIZE)
    if num_told < 2 or per_byte <= 0 or latency < 0:
        latency = scale[1] * min(usual_s, _MOST_ASSUMED_FRAC / max(rows[:, 1]))
        per_byte = table[:, 0] @ (target - latency * table[:, 1])
    return float(scale[0] / per_byte), float(latency / scale[1])
