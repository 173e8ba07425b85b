"""Experts that are not equally liked: a power law of their loads, or loads that were measured.

The busiest rank sets the pace of all: experts lie in the order of their numbers, at random for their loads.
With redundant slots, which hold copies of those that have the most load a copy, they are placed so that loads
are as even as they can be (DeepSeek's EPLB).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwise.core.errors import DataError, PlanError, WorkloadError
from meshwise.core.files import read_text
from meshwise.core.refusals import refuse
from meshwise.cost.routing import Shares, busiest_rank, inclusion
from meshwise.model.architecture import MoE
from meshwise.serve.serving import Serving


def unevenly_routed(serving: Serving, *, skew: float = 0.0, loads: Path | None = None) -> Serving:
    """`serving` where expert r is liked as r^-skew, or as `loads` says."""
    moe = serving.model.moe
    if moe is None:
        raise PlanError(f"loads of experts are stated but {serving.model.name} has none; leave them out")
    refuse("expert loads", WorkloadError, skew=skew, loads=loads)
    shares = inclusion(moe.num_experts, moe.top_k, skew) if loads is None else read_loads(loads, moe)
    busiest = busiest_rank(shares, int(serving.mesh.ep), moe.copies)
    plan = replace(serving.mesh.plan, imbalance=busiest)
    return replace(serving, expert_shares=shares, mesh=replace(serving.mesh, imbalance=busiest, plan=plan))


def read_loads(path: Path, moe: MoE) -> Shares:
    """Chance [experts] that a token chooses each, from a file of the tokens that each expert was sent."""
    try:
        loads = np.array(read_text(path, "text").replace(",", " ").split(), dtype=np.float64)
    except ValueError:
        raise DataError(f"{path} must hold numbers alone: the tokens that each expert was sent") from None
    refuse("measured expert loads", DataError, path=path, loads=loads, moe=moe)
    shares: Shares = moe.top_k * loads / loads.sum()
    return shares
