"""`calibrate`: what this machine really does, as a cluster file that `estimate` reads.

Each sample is the fastest of several repetitions: interference only ever adds time. The chip's matrix rate
by dtype is the best of its GEMM samples, its memory rate that of a copy (read plus write), its vector rate
that of a multiply-add inside the cache. Bandwidth and latency of the link are fitted to the collectives
(least squares of the relative error), with the same formulas that `estimate` uses.
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwise.cost.collective import Kind, collective_s
from meshwise.cost.op import matmul_flop
from meshwise.errors import PlanError
from meshwise.files import write_text
from meshwise.instruments.launch import Place, Ranks, check_world
from meshwise.programs.context import TORCH_DTYPES

CPU_DTYPES = ("fp32", "bf16", "fp64")
CUDA_DTYPES = ("bf16", "fp16", "fp32", "fp64")
COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all")


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
            'vendor = "measured"',
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


def calibrate(device: str = "cpu", *, ranks: int = 2, quick: bool = False) -> Calibration:
    """Measure `device` (cpu or cuda) of this machine, and collectives over `ranks` of it."""
    if device not in ("cpu", "cuda"):
        raise PlanError(f"--device {device} is unknown; use cpu or cuda")
    check_world(1 if ranks == 1 else ranks, device)
    on_cpu = device == "cpu"
    samples = [*gemm_samples(device, quick), *memory_samples(device, quick)]
    if not on_cpu:
        samples += gpu_samples()
    bandwidth, latency = float("nan"), float("nan")
    if ranks > 1:
        with Ranks(ranks, device_type=device) as pool:
            measured = pool.call(collective_samples, quick)[0]
        samples += measured
        bandwidth, latency = fit_link(measured, ranks)
    best = {
        name: max((s.rate for s in samples if s.what == name), default=0.0)
        for name in ("copy", "multiply-add")
    }
    dtypes = CPU_DTYPES if on_cpu else CUDA_DTYPES
    matrix = {
        dtype: max(s.rate for s in samples if s.what == "gemm" and s.dtype == dtype) for dtype in dtypes
    }
    name = _machine_name(device)
    return Calibration(
        name=name,
        num_ranks=ranks,
        memory_bytes=_memory_bytes(device),
        memory_bytes_per_s=best["copy"],
        matrix_flop_per_s=matrix,
        vector_flop_per_s={"fp32": best["multiply-add"]},
        link_name="gloo" if on_cpu else "nccl",
        link_bytes_per_s=bandwidth if ranks > 1 else best["copy"],
        link_latency_s=latency if ranks > 1 else 0.0,
        samples=tuple(samples),
        source=f"meshwise calibrate on {name}, torch {torch.__version__}",
        checked=time.strftime("%Y-%m-%d"),
    )


def gemm_samples(device: str, quick: bool) -> list[Sample]:
    """Square and long GEMMs in every dtype."""
    sides = (256, 512) if quick else (256, 512, 1024, 2048) if device == "cpu" else (512, 2048, 8192)
    shapes = [(side, side, side) for side in sides] + [
        (sides[-1], sides[-1], 128),
        (64, sides[-1], sides[-1]),
    ]
    samples = []
    for dtype in CPU_DTYPES if device == "cpu" else CUDA_DTYPES:
        for m, n, k in shapes:
            a, b = (
                torch.ones(*shape, dtype=TORCH_DTYPES[dtype], device=device) for shape in ((m, k), (k, n))
            )
            seconds = fastest_s(partial(torch.mm, a, b), device)
            rate = float(matmul_flop(m, n, k)) / seconds
            samples.append(Sample("gemm", f"{m}x{n}x{k}", dtype, seconds, rate, "FLOP/s"))
    return samples


def memory_samples(device: str, quick: bool) -> list[Sample]:
    """A copy beyond the caches, counted as bytes read plus written; a multiply-add inside them."""
    size = (64 if quick else 256) << 20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = fastest_s(lambda: target.copy_(source), device)
    copy = Sample("copy", str(size), "fp32", seconds, 2 * size / seconds, "B/s")
    num = (1 << 15) if device == "cpu" else (1 << 22)
    x, y, z = (torch.ones(num, device=device) for _ in range(3))
    seconds = fastest_s(lambda: z.addcmul_(x, y), device)
    return [copy, Sample("multiply-add", str(num), "fp32", seconds, 2 * num / seconds, "FLOP/s")]


def gpu_samples() -> list[Sample]:
    """Fused attention, a cast, and the floor of a kernel launch."""
    from meshwise.programs.functions import flash_attention

    samples = []
    for tokens in (2048, 8192):
        q = torch.ones(1, 16, tokens, 128, dtype=torch.bfloat16, device="cuda")
        seconds = fastest_s(partial(flash_attention, q, q, q, True), "cuda")
        flop = 2.0 * 16 * tokens * tokens * 128
        samples.append(
            Sample("attention", f"16x{tokens}x128 causal", "bf16", seconds, flop / seconds, "FLOP/s")
        )
    wide = torch.ones(1 << 26, device="cuda")
    seconds = fastest_s(lambda: wide.to(torch.bfloat16), "cuda")
    samples.append(Sample("cast", "fp32 to bf16", "bf16", seconds, 6 * (1 << 26) / seconds, "B/s"))
    one = torch.ones(1, device="cuda")
    seconds = fastest_s(lambda: one.add_(1), "cuda")
    return [*samples, Sample("launch", "1", "fp32", seconds, 1 / seconds, "1/s")]


def collective_samples(place: Place, quick: bool) -> list[Sample]:
    """Runs on every rank: each kind at several payloads; the time is that of the slowest rank."""
    sizes = (1 << 12, 1 << 20, 1 << 23) if quick else (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)
    samples = []
    for kind in COLLECTIVES:
        for size in sizes:
            seconds = collective_time_s(place, kind, size)
            samples.append(Sample(kind, str(size), "fp32", seconds, size / seconds, "B/s"))
    return samples


def collective_time_s(
    place: Place,
    kind: Kind,
    payload_bytes: int,
    *,
    repeats: int = 5,
    meet: Callable[[], Any] = dist.barrier,
) -> float:
    """Seconds of one collective over `payload_bytes`, the fastest repetition of the slowest rank.

    `meet` brings the ranks together before each repetition; the first one is not counted.
    """
    num = payload_bytes // 4 // place.world_size
    full = torch.ones(num * place.world_size, device=place.device)
    other = torch.empty_like(full)
    part = torch.ones(num, device=place.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_single(full, part),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, full),
    }
    times = []
    for _ in range(repeats + 1):
        meet()
        times.append(_elapsed_s(calls[kind], 1, place.device_type))
    slowest = torch.tensor(times[1:], device=place.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def fit_link(samples: list[Sample], ranks: int) -> tuple[float, float]:
    """(bytes/s, latency in seconds) of one link level that explain the collectives best."""
    one: dict[str, Any] = {"link_bytes_per_s": (1.0,), "link_ranks": (math.inf,)}
    kinds = {kind: kind for kind in COLLECTIVES}
    rows = []
    for sample in samples:
        kind, payload_bytes = kinds[sample.what], float(sample.shape)  # type: ignore[index]
        wire = collective_s(kind, payload_bytes, ranks, link_latency_s=(0.0,), **one)
        hops = collective_s(kind, 0.0, ranks, link_latency_s=(1.0,), **one)
        rows.append([float(wire) / sample.time_s, float(hops) / sample.time_s])
    (per_byte, latency), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    return 1.0 / max(per_byte, 1e-15), max(latency, 0.0)


def fastest_s(function: Callable[[], Any], device: str, *, repeats: int = 5) -> float:
    """Seconds of the fastest of several calls, after one to warm up; short ones are timed in batches."""
    function()
    calls = 1
    while True:
        seconds = [_elapsed_s(function, calls, device) for _ in range(repeats)]
        if min(seconds) * calls > 1e-3 or calls >= 1024:
            return min(seconds)
        calls *= 8


def _elapsed_s(function: Callable[[], Any], calls: int, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(calls):
        function()
    if device != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / calls


def _memory_bytes(device: str) -> float:
    if device == "cpu":
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float(torch.cuda.get_device_properties(0).total_memory)


def _machine_name(device: str) -> str:
    name = (
        f"{platform.machine()}-{os.cpu_count()}-cores" if device == "cpu" else torch.cuda.get_device_name(0)
    )
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
