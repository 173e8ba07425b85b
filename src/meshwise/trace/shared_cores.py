"""Ranks that share the cores of a host: one that is late for want of a core is no slow rank.

`meshwise profile` notes how long the threads of each rank were ready to run and had no core. That may explain
why a rank holds the others up: a pause, if it lacked cores for as long in all; lateness in every step, if it
lacked them for longer than another rank, by most of that time.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.units import duration
from meshwise.trace.events import Trace
from meshwise.trace.straggler import LateRanks

_MOSTLY = 0.8


def shared_cores(traces: Sequence[Trace], rank: int, late: LateRanks) -> str:
    """In a sentence, that want of a core explains why `rank` was late; empty where it does not."""
    lacked_s = {trace.rank: _noted(trace, "core_wait_s") for trace in traces}
    own_s = lacked_s.pop(rank)
    explained_s = own_s if late.is_pause else (own_s - min(lacked_s.values())) / _MOSTLY
    if explained_s < late.seconds:
        return ""
    host, cores = next((one.host, _noted(one, "num_cores")) for one in traces if one.rank == rank)
    num_ranks = sum(one.host == host for one in traces)
    others = f"(other ranks for {duration(min(lacked_s.values()))} or more)"
    return (
        f"rank {rank} was late by {duration(late.seconds)}, but ready to run without a core for "
        f"{duration(own_s)} {others}: {num_ranks} ranks and "
        f"whatever else runs share {cores:.0f} cores, so no rank is named; give each rank cores of its own"
    )


def _noted(trace: Trace, key: str) -> float:
    about = trace.metadata.get("meshwise")
    value = about.get(key) if isinstance(about, dict) else None
    return float(value) if isinstance(value, int | float) else 0.0
