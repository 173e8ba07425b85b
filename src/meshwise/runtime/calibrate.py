"""`calibrate`: what this machine really does, as a cluster file that `estimate` reads.

The chip's matrix rate by dtype is the best of its GEMM samples, its memory rate that of a copy (read plus
write). Its vector rate on a CPU is that of a multiply-add inside the cache; on a GPU that of its fp32 GEMMs,
which run on the ordinary units (on AMD's matrix units: there it is a bound). Bandwidth and latency of the
link are fitted to the collectives (least squares of the relative error), with the same formulas that
`estimate` uses. As these rates are what kernels reach, `estimate` takes no efficiency off them.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwise.core.errors import PlanError
from meshwise.core.files import write_text
from meshwise.cost.collective import collective_s
from meshwise.machine.hardware import MEASURED
from meshwise.runtime.launch import Ranks, check_world
from meshwise.runtime.measure import COLLECTIVES, Sample, collective_samples, op_samples


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

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    def to_toml(self) -> str:
        """The cluster file."""
        rates = {"matrix": self.matrix_flop_per_s, "vector": self.vector_flop_per_s}
        tables = [
            f"{name}_flop_per_s = {{ {', '.join(f'{dtype} = {rate:.4e}' for dtype, rate in table.items())} }}"
            for name, table in rates.items()
        ]
        lines = [
            "# Measured by `meshwise calibrate`; read with --cluster FILE.",
            f"num_chips = {self.num_ranks}",
            f'source = "{self.source}"',
            f"checked = {self.checked}",
            "",
            "[[levels]]",
            f'name = "{self.link_name}"',
            f"bytes_per_s = {self.link_bytes_per_s:.4e}",
            f"latency_s = {self.link_latency_s:.3e}",
            "",
            "[chip]",
            f'vendor = "{MEASURED}"',
            f'generation = "{self.name}"',
            f"memory_bytes = {self.memory_bytes:.4e}",
            f"memory_bytes_per_s = {self.memory_bytes_per_s:.4e}",
            *tables,
            f'source = "{self.source}"',
            f"checked = {self.checked}",
            "",
            "[[chip.levels]]",
            f'name = "{self.link_name}"',
            f"bytes_per_s = {self.link_bytes_per_s:.4e}",
            f"latency_s = {self.link_latency_s:.3e}",
        ]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the cluster file, whole or not at all; DataError where that fails."""
        write_text(path, self.to_toml())


def calibrate(device: str = "cpu", *, ranks: int = 0, quick: bool = False) -> Calibration:
    """Measure `device` (cpu or cuda) of this machine, and collectives over `ranks` of it.

    0 ranks: two on a CPU, all GPUs. PlanError or MissingExtraError for what this machine has not.
    """
    if device not in ("cpu", "cuda"):
        raise PlanError(f"--device {device} is unknown; use cpu or cuda")
    ranks = ranks or (2 if device == "cpu" else max(1, torch.cuda.device_count()))
    check_world(ranks, device)
    try:
        samples = op_samples(device, quick)
    except torch.OutOfMemoryError:
        raise PlanError(
            "the GPU's free memory does not hold the operands; free some, or use --quick"
        ) from None
    if device == "cuda":
        torch.cuda.empty_cache()  # the first rank measures on the same GPU
    if ranks > 1:
        with Ranks(ranks, device_type=device) as pool:
            samples += pool.call(collective_samples, quick)[0]
    return from_samples(samples, device, ranks)


def from_samples(samples: Sequence[Sample], device: str, ranks: int) -> Calibration:
    """The rates that follow from what was measured on this machine."""
    matrix: dict[str, float] = {}
    for sample in samples:
        if sample.what == "gemm":
            matrix[sample.dtype] = max(sample.rate, matrix.get(sample.dtype, 0.0))
    best = {sample.what: sample.rate for sample in samples if sample.what in ("copy", "multiply-add")}
    between = [sample for sample in samples if sample.what in COLLECTIVES]
    bandwidth, latency = fit_link(between, ranks) if between else (best["copy"], 0.0)
    name = _machine_name(device)
    return Calibration(
        name=name,
        num_ranks=ranks,
        memory_bytes=_memory_bytes(device),
        memory_bytes_per_s=best["copy"],
        matrix_flop_per_s=matrix,
        vector_flop_per_s={"fp32": best.get("multiply-add", matrix["fp32"])},
        link_name="gloo" if device == "cpu" else "nccl",
        link_bytes_per_s=bandwidth,
        link_latency_s=latency,
        samples=tuple(samples),
        source=f"meshwise calibrate on {name}, torch {torch.__version__}",
        checked=time.strftime("%Y-%m-%d"),
    )


def fit_link(samples: Sequence[Sample], ranks: int) -> tuple[float, float]:
    """(bytes/s, latency in seconds) of one link level that explain the collectives best.

    Where the best latency would be negative it is 0, and the bandwidth the best without one.
    """
    one: dict[str, Any] = {"link_bytes_per_s": (1.0,), "link_ranks": (math.inf,)}
    kinds = {kind: kind for kind in COLLECTIVES}
    rows = []
    for sample in samples:
        kind, payload_bytes = kinds[sample.what], float(sample.shape)  # type: ignore[index]
        wire = collective_s(kind, payload_bytes, ranks, link_latency_s=(0.0,), **one)
        hops = collective_s(kind, 0.0, ranks, link_latency_s=(1.0,), **one)
        rows.append([float(wire) / sample.time_s, float(hops) / sample.time_s])
    table, target = np.array(rows), np.ones(len(rows))
    (per_byte, latency), *_ = np.linalg.lstsq(table, target, rcond=None)
    if per_byte <= 0 or latency < 0:
        (per_byte,), *_ = np.linalg.lstsq(table[:, :1], target, rcond=None)
        latency = 0.0
    return 1.0 / float(per_byte), float(latency)


def _memory_bytes(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.get_device_properties(0).total_memory)


def _machine_name(device: str) -> str:
    name = (
        f"{platform.machine()}-{os.cpu_count()}-cores" if device == "cpu" else torch.cuda.get_device_name(0)
    )
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
