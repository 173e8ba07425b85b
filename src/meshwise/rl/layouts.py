"""Layouts of one rollout engine: degrees that divide the model and hold its longest sample.

Experts may lie on all GPUs of an engine and attention on groups of few (`ep` with a smaller `tp`), each with
the caches of its own samples: tensor parallelism holds those of latent attention, and of few key heads, again
on every rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from meshwise.core.errors import MeshwiseError, PlanError
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.rollouts import Rollouts
from meshwise.serve.load import cache_tokens
from meshwise.serve.serving import serving

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""GPUs of an engine that are tried."""

GROUPS = 2
"""How many sizes of groups for attention are tried beside the whole engine, the smallest that fits first."""


def engines(
    model: Model, cluster: Cluster, rollouts: Rollouts, memory_frac: float, dtype: str = "bf16"
) -> Iterator[list[Plan]]:
    """Plans of one engine by its GPUs, fewest first, on which the longest sample has room at `memory_frac`.

    The first of each cuts all by `tp`.
    """

    def has_room(plan: Plan, gpus: int) -> bool:
        try:
            found = serving(
                model, replace(cluster, num_chips=gpus), plan, prompt=rollouts.prompt,
                output=rollouts.longest - rollouts.prompt, memory_frac=memory_frac,
            )  # fmt: skip
        except MeshwiseError:  # heads or experts do not divide
            return False
        return cache_tokens(found) >= rollouts.longest * found.groups

    for gpus in (size for size in SIZES if size <= cluster.num_chips):
        whole = Plan(tp=gpus, dtype=dtype)
        in_groups = (replace(whole, tp=tp, ep=gpus) for tp in SIZES if tp < gpus and model.moe is not None)
        fit = [whole] * has_room(whole, gpus)
        fit += islice((plan for plan in in_groups if has_room(plan, gpus)), GROUPS)
        if fit:
            yield fit


def smallest_engine(
    model: Model, cluster: Cluster, rollouts: Rollouts, memory_frac: float, dtype: str = "bf16"
) -> Plan:
    """The first of `engines`; PlanError where none has room."""
    found = next(engines(model, cluster, rollouts, memory_frac, dtype), [])
    names = {"model": model, "num": cluster.num_chips, "longest": rollouts.longest, "frac": memory_frac}
    refuse("smallest engine", PlanError, found=found, **names)
    return found[0]
