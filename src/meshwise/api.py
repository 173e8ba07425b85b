"""The verbs of the library: each takes names or objects, and imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwise.estimate.single import Estimate
    from meshwise.machine.hardware import Cluster
    from meshwise.model.architecture import Model
    from meshwise.plan.plan import Plan


def estimate(
    model: str | Model,
    cluster: str | Cluster,
    plan: str | Plan = "",
    *,
    batch: int,
    seq: int,
    microbatch: int = 1,
    kind: str = "train",
) -> Estimate:
    """Price one training step (or one forward pass) of `model` on `cluster` under `plan`.

    Args:
        model: A `Model`, a preset (`"llama3-8b"`) or the path of a config.json.
        cluster: A `Cluster`, a preset, `"chip:count"`, or the path of a TOML file.
        plan: A `Plan`, its text (`"tp=8,pp=4"`), or the path of a TOML file.
        batch: Global batch in sequences.
        seq: Tokens of a sequence.
        microbatch: Sequences of a microbatch.
        kind: `train`, `evaluate`, `prefill` or `decode`.

    Raises:
        MeshwiseError: A name is unknown, or the plan does not divide model, batch or cluster. A plan that
            needs more memory than the chip has is an answer (`fits` is False), not an error.
    """
    from meshwise.estimate.single import estimate as price
    from meshwise.machine.hardware import find_cluster
    from meshwise.model.find import find_model
    from meshwise.plan.plan import parse_plan
    from meshwise.plan.workload import Workload

    return price(
        find_model(model) if isinstance(model, str) else model,
        find_cluster(cluster) if isinstance(cluster, str) else cluster,
        parse_plan(plan) if isinstance(plan, str) else plan,
        Workload(batch=batch, seq=seq, microbatch=microbatch, kind=kind),
    )
