"""Layouts of one rollout engine: degrees that divide the model and hold its longest sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwise.core.errors import MeshwiseError, PlanError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.rollouts import Rollouts
from meshwise.serve.load import cache_tokens
from meshwise.serve.serving import serving

MAX_TP = 64
"""Largest engine that is tried."""


def engines(
    model: Model, cluster: Cluster, rollouts: Rollouts, memory_frac: float, dtype: str = "bf16"
) -> Iterator[Plan]:
    """Plans of one engine, fewest GPUs first, on which the longest sample has room at `memory_frac`."""
    tp = 1
    while tp <= min(cluster.num_chips, MAX_TP):
        plan, one = Plan(tp=tp, dtype=dtype), replace(cluster, num_chips=tp)
        try:
            found = serving(
                model, one, plan, prompt=rollouts.prompt, output=rollouts.longest - rollouts.prompt,
                memory_frac=memory_frac,
            )  # fmt: skip
        except MeshwiseError:  # heads or experts do not divide
            found = None
        if found is not None and cache_tokens(found) >= rollouts.longest:
            yield plan
        tp *= 2


def smallest_engine(
    model: Model, cluster: Cluster, rollouts: Rollouts, memory_frac: float, dtype: str = "bf16"
) -> Plan:
    """The first of `engines`; PlanError where none has room."""
    found = next(engines(model, cluster, rollouts, memory_frac, dtype), None)
    if found is None:
        raise PlanError(
            f"no engine of {cluster.num_chips} GPUs or fewer holds {model.name} and a sample of "
            f"{rollouts.longest} tokens at memory_frac={memory_frac:g}; use more GPUs or a larger share"
        )
    return found
