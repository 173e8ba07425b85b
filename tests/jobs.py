"""Synthetic jobs of many ranks with a fault whose answer is known, as Kineto traces.

Every step of every rank: three matmuls and an attention kernel launched by the host, an all-reduce among
neighbours after each half (pairs), and one over all ranks at the end. Noise is 2 % on every kernel and 1 %
between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kineto import all_reduce, host, kernel, write_trace

FAULTS = ("slow device", "slow host", "late rank", "uneven load", "pause", "slow link")
KERNELS = (("gemm_a", 300.0), ("gemm_b", 200.0), ("flash", 300.0), ("gemm_c", 200.0))
STEP_US = 1000.0


@dataclass(frozen=True)
class Job:
    """What is injected: `size` in steps (a pause: twice that, once), on `rank` (a slow link: its pair)."""

    num_ranks: int
    num_steps: int
    fault: str = "none"
    rank: int = 0
    size: float = 0.3
    seed: int = 0
    has_marks: bool = False
    has_numbers: bool = False
    has_host: bool = False
    clock_s: float = 0.0
    drift_ppm: float = 0.0


def write_job(folder: Path, job: Job) -> None:
    """Play the job and write one trace a rank."""
    random = np.random.default_rng(job.seed)
    speed = random.normal(1.0, 0.01, job.num_ranks)
    clock = random.normal(0.0, job.clock_s * 1e6, job.num_ranks)
    drift = random.normal(0.0, job.drift_ppm * 1e-6, job.num_ranks)
    now = random.uniform(0.0, 100.0, job.num_ranks)
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(job.num_ranks)}

    def local(rank: int, time: float) -> float:
        return round(time * (1 + drift[rank]) + clock[rank], 3)

    def reduce(ranks: list[int], wire: float, step: int, elements: int) -> None:
        is_slow = job.fault == "slow link" and len(ranks) == 2 and job.rank in ranks
        wire *= random.normal(1.0, 0.02)
        end = now[ranks].max() + wire + (job.size * STEP_US / 2 if is_slow else 0.0)
        for rank in ranks:
            start = local(rank, now[rank])
            number = {"Seq": step * 2 + (elements == 2000)} if job.has_numbers else {}
            number["correlation"] = len(events[rank]) + 1
            events[rank] += [
                host("cuda_runtime", "cudaLaunchKernel", start, 3, correlation=number["correlation"]),
                all_reduce(start, round(local(rank, end) - start, 3), elements, ranks, **number),
            ]
            now[rank] = end

    for step in range(job.num_steps):
        began = now.copy()
        for half in (KERNELS[:2], KERNELS[2:]):
            for rank in range(job.num_ranks):
                _compute(job, rank, step, half, speed[rank], now, random, events[rank], local)
            if job.num_ranks > 2:
                for first in range(0, job.num_ranks, 2):
                    reduce([first, first + 1], 60.0, step, 1000 if half[0] is KERNELS[0] else 2000)
        reduce(list(range(job.num_ranks)), 80.0, step, 5000)
        if job.has_marks:
            for rank in range(job.num_ranks):
                start = local(rank, began[rank] - 5)  # the first kernel is launched 4 us before it runs
                length = local(rank, now[rank] - 5) - start
                events[rank].insert(0, host("user_annotation", f"ProfilerStep#{step + 2}", start, length))
    about = {"host_name": "node"} if job.has_host else {}
    for rank, found in events.items():
        write_trace(folder / f"rank-{rank}.json", found, rank, **about)


def _compute(job, rank, step, kernels, speed, now, random, events, local) -> None:  # type: ignore[no-untyped-def]
    """The kernels of half a step of one rank, each launched just before it runs."""
    hit, extra = rank == job.rank, job.size * STEP_US
    if hit and job.fault in ("late rank", "slow host"):
        now[rank] += extra / 2
    if hit and job.fault == "pause" and step == job.num_steps // 2 and kernels[0] is KERNELS[0]:
        now[rank] += 2 * extra
    for name, length in kernels:
        length *= speed * random.normal(1.0, 0.02)
        if hit and job.fault == "slow device":
            length *= 1 + job.size
        if hit and job.fault == "uneven load" and name == "flash":
            length += extra
        number = len(events) + 1
        events += [
            host("cuda_runtime", "cudaLaunchKernel", local(rank, now[rank] - 4), 3, correlation=number),
            kernel(name, local(rank, now[rank]), round(length, 3), correlation=number),
        ]
        now[rank] += length
