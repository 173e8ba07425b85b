"""`calibrate`: what this machine really does, as a cluster file that `estimate` reads.

The chip's matrix rate by dtype is the best of its GEMM samples, its memory rate that of a copy (read plus
write). Its vector rate on a CPU is that of a multiply-add inside the cache; on a GPU that of its fp32 GEMMs,
which run on the ordinary units (on AMD's matrix units: there it is a bound). Bandwidth and latency of the
link are fitted to the collectives (least squares of the relative error), with the same formulas that
`estimate` uses. As these rates are what kernels reach, `estimate` takes no efficiency off them.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from typing import cast

import torch

from meshwise.calibrate.cluster_file import Calibration, Sample
from meshwise.calibrate.cluster_file import fit_link as fit_calls
from meshwise.core.errors import PlanError
from meshwise.core.ledger import Collective
from meshwise.runtime.launch import Ranks, check_world
from meshwise.runtime.measure import COLLECTIVES, collective_samples, op_samples


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
    """(bytes/s, latency in seconds) of one link level that explain the collectives best."""
    return fit_calls([(cast(Collective, one.what), float(one.shape), ranks, one.time_s) for one in samples])


def _memory_bytes(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.get_device_properties(0).total_memory)


def _machine_name(device: str) -> str:
    name = (
        f"{platform.machine()}-{os.cpu_count()}-cores" if device == "cpu" else torch.cuda.get_device_name(0)
    )
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
