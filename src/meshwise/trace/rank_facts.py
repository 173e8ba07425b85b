"""What a summary needs to know of one rank: small beside its events, so thousands of ranks fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.trace.breakdown import Breakdown, breakdown
from meshwise.trace.events import Trace
from meshwise.trace.kernels import KernelRuns, kernel_runs
from meshwise.trace.steps import Marks, RankStep, step_table
from meshwise.trace.transfers import Transfer, transfers


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank: where it ran, the time of its work, kernels, steps and communications."""

    rank: int
    path: str
    host: str
    world_size: int | None
    has_device: bool
    first_ns: int | None
    """The start of its first event on its own clock."""
    captured: dict[str, Any]
    """What meshwise's capture noted of the rank; empty where something else captured it."""
    breakdown: Breakdown
    kernels: list[KernelRuns]
    steps: list[RankStep]
    transfers: list[Transfer]


def rank_facts(trace: Trace, marked: Marks) -> RankFacts:
    """The facts of one rank, its steps as they are marked."""
    captured = trace.metadata.get("meshwise")
    return RankFacts(
        rank=trace.rank,
        path=str(trace.path),
        host=trace.host,
        world_size=trace.world_size,
        has_device=trace.has_device,
        first_ns=int(trace.start_ns[0]) if len(trace) else None,
        captured=captured if isinstance(captured, dict) else {},
        breakdown=breakdown(trace),
        kernels=kernel_runs(trace),
        steps=step_table(trace, marked),
        transfers=transfers(trace, marked),
    )
