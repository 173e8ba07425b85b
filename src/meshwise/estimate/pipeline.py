"""The pipeline of one plan, played out rank by rank: the timeline, with uneven stages and stragglers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.cost.simulate import Timeline, simulate
from meshwise.estimate.step import StepCost, times_of_chunks
from meshwise.estimate.timing import Machine
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import chunks, layers_of_chunks


def play(
    model: Model, mesh: Mesh, step: StepCost, machine: Machine, *, hop_s: float = 0.0,
    slowdown: Sequence[float] | float = 1.0,
) -> Timeline:  # fmt: skip
    """Play the pipeline of one plan; `slowdown` stretches the compute of a rank (or of each)."""
    parts, of = list(step.parts.values()), chunks(model, layers_of_chunks(model, mesh))
    times = times_of_chunks(model, of, mesh, parts, step.towers, step.cut, machine)
    phases = (
        np.array([float(getattr(time, phase)) for time in times])
        for phase in ("forward_s", "backward_s", "weight_s")
    )
    return simulate(
        mesh.plan.schedule,
        *phases,
        pp=int(mesh.pp),
        m=int(mesh.num_microbatches),
        v=int(mesh.vpp),
        p2p_s=hop_s,
        slowdown=slowdown,
    )
