"""Synthetic jobs of many ranks with a fault whose answer is known, as Kineto traces.

Every step of every rank: three matmuls and an attention kernel, an all-reduce among neighbours after each
half (pairs), and one over all ranks at the end. On GPUs the host launches each kernel just before it runs;
with `overlaps`, the pairs reduce on a stream of their own while the next half computes. On CPUs (gloo)
operators do the work, steps are twenty times as long, and only the reduction over all ranks exists. Noise
is 2 % on every kernel, 1 % between ranks, and once in ten steps a hiccup of up to 2 % of a step; ranks
leave a collective within 3 us (gloo: 2 % of a step).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kineto import all_reduce, host, kernel, write_trace

FAULTS = ("slow device", "slow host", "late rank", "uneven load", "pause", "slow link")
HALVES = ((("gemm_a", 300.0), ("gemm_b", 200.0)), (("flash", 300.0), ("gemm_c", 200.0)))
STEP_US = 1000.0
CPU_SCALE = 20.0


Event = Callable[[float, float], dict[str, Any]]
"""An event of a given start and duration [us]."""


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
    on_cpu: bool = False
    overlaps: bool = False
    names_calls: bool = True
    """Kernels of collectives say which it is, of whom and how large; RCCL's say nothing."""
    missing: tuple[int, ...] = ()
    """Ranks without a trace."""
    num_operators: int = 0
    """More operators a step, on a thread of their own: traces are then as long as real ones."""

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks to name."""
        pair = self.rank - self.rank % 2
        return {"none": (), "slow link": (pair, pair + 1)}.get(self.fault, (self.rank,))


@dataclass
class _Play:
    """The job as it is played: where each rank is on the true clock [us], and the events of its own."""

    job: Job
    random: np.random.Generator
    speed: np.ndarray
    clock: np.ndarray
    drift: np.ndarray
    now: np.ndarray
    first: dict[int, float] = field(default_factory=dict)
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return CPU_SCALE if self.job.on_cpu else 1.0

    def local(self, rank: int, time: float) -> float:
        """A true time on the clock of a rank."""
        return round(float(time * (1 + self.drift[rank]) + self.clock[rank]), 3)

    def add(self, rank: int, event: Event, begin: float, end: float) -> None:
        """An event of `rank` from `begin` to `end` on the true clock."""
        self.first[rank] = min(begin, self.first.get(rank, begin))
        start = self.local(rank, begin)
        self.events.setdefault(rank, []).append(event(start, round(self.local(rank, end) - start, 3)))

    def launch(self, rank: int, begin: float) -> int:
        """A launching call just before `begin`; its correlation id."""
        number = len(self.events.get(rank, [])) + 1
        call = partial(host, "cuda_runtime", "cudaLaunchKernel", correlation=number)
        self.add(rank, call, begin - 4, begin - 1)
        return number


def write_job(folder: Path, job: Job, slow_hosts: dict[int, float] | None = None) -> dict[int, int]:
    """Play the job and write one trace a rank; with `slow_hosts`, on hosts of 8, some slower by a factor.

    Returns:
        Of every rank, when its first event began on the clock of rank 0 [ns from the traces' base time].
    """
    random = np.random.default_rng(job.seed)
    speed = random.normal(1.0, 0.01, job.num_ranks)
    for node, factor in (slow_hosts or {}).items():
        speed[8 * node : 8 * node + 8] *= factor
    clock = random.normal(0.0, job.clock_s * 1e6, job.num_ranks)
    drift = random.normal(0.0, job.drift_ppm * 1e-6, job.num_ranks)
    play = _Play(job, random, speed, clock, drift, random.uniform(0.0, 100.0, job.num_ranks))
    for step in range(job.num_steps):
        began = play.now.copy()
        for half in range(2):
            for rank in range(job.num_ranks):
                _compute(play, rank, step, half)
            if (job.num_ranks > 2 or job.overlaps) and not job.on_cpu:
                for low in range(0, job.num_ranks - 1, 2):
                    _reduce(play, [low, low + 1], 60.0, 2 * step + half, 1000 + 1000 * half)
        _reduce(play, list(range(job.num_ranks)), 80.0, step, 5000)
        if job.has_marks:
            for rank in range(job.num_ranks):  # the first kernel is launched 4 us before it runs
                mark = partial(host, "user_annotation", f"ProfilerStep#{step + 2}")
                play.add(rank, mark, began[rank] - 5, play.now[rank] - 5)
    about: dict[str, Any] = {"host_name": "node"} if job.has_host else {}
    each_us, about_op = 900 / max(job.num_operators, 1), {"External id": 1, "Record function id": 0}
    operators = [
        host("cpu_op", f"aten::op_{k % 50}", STEP_US * step + each_us * k, 0.9 * each_us, 3, **about_op)
        for step in range(job.num_steps)
        for k in range(job.num_operators)
    ]
    about |= {"further": msgspec.json.encode(operators)[1:-1]} if operators else {}
    for rank, found in play.events.items():
        if rank not in job.missing:
            about |= {"host_name": f"host-{rank // 8}"} if slow_hosts else {}
            write_trace(folder / f"rank-{rank}.json", found, rank, job.num_ranks, **about)
    return {rank: round(1000 * play.local(0, time)) for rank, time in play.first.items()}


def _compute(play: _Play, rank: int, step: int, half: int) -> None:
    """The kernels of half a step of one rank."""
    job, random, now = play.job, play.random, play.now
    hit, extra = rank == job.rank, job.size * STEP_US * play.scale
    if hit and job.fault in ("late rank", "slow host"):
        now[rank] += extra / 2
    if hit and job.fault == "pause" and step == job.num_steps // 2 and half == 0:
        now[rank] += 2 * extra
    if random.uniform() < 0.05:
        now[rank] += random.uniform(0.0, 0.02) * STEP_US * play.scale
    for name, usual in HALVES[half]:
        length = usual * play.scale * play.speed[rank] * random.normal(1.0, 0.02)
        if hit and job.fault == "slow device":
            length *= 1 + job.size
        if hit and job.fault == "uneven load" and name == "flash":
            length += extra
        begin, now[rank] = now[rank], now[rank] + length
        if job.on_cpu:
            work = partial(host, "cpu_op", f"aten::{name}")
        else:
            work = partial(kernel, name, correlation=play.launch(rank, begin))
        play.add(rank, work, begin, now[rank])


def _reduce(play: _Play, ranks: list[int], wire: float, number: int, elements: int) -> None:
    """An all-reduce: nobody leaves before all are there."""
    job, random, now = play.job, play.random, play.now
    wire *= random.normal(1.0, 0.02) * play.scale
    if job.fault == "slow link" and len(ranks) < job.num_ranks and job.rank in ranks:
        wire += job.size * STEP_US / 2
    end = now[ranks].max() + wire
    is_hidden = job.overlaps and elements < 5000
    for rank in ranks:
        left = end + random.uniform(0.0, 0.02 * STEP_US * play.scale if job.on_cpu else 3.0)
        if job.on_cpu:
            play.add(rank, partial(host, "cpu_op", "c10d::allreduce_"), now[rank], now[rank] + 20)
            moved = partial(host, "user_annotation", "gloo:all_reduce", tid=2)
        else:
            about = {"Seq": number} if job.has_numbers else {}
            about["correlation"] = play.launch(rank, now[rank])
            moved = partial(all_reduce, elements=elements, ranks=ranks, **about)
            if not job.names_calls:
                stream = 20 + (elements < 5000)
                moved = partial(kernel, "ncclDevKernel_Generic(ncclDevComm*)", stream=stream, **about)
        play.add(rank, moved, now[rank], left)
        if not is_hidden:
            now[rank] = left
