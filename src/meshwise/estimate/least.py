"""A step time that no plan of a grid stays below, from its priced parts alone.

The slowest stage takes no less than the mean of all, and recomputation, exchanges of replicas, messages
between stages and the optimizer only add to

    m t_mean + unpaired + bubble(F, B, W of the mean stage)

so a search need not price a plan whose least time is longer than what it has found.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.schedule import bubble_s
from meshwise.estimate.step import PricedParts
from meshwise.estimate.timing import Machine
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh


def least_step_s(model: Model, mesh: Mesh, parts: PricedParts, machine: Machine) -> Num:
    """The least time [s] of a training step of the plans of `mesh`, whatever they recompute and shard."""
    layers = Counter(layer_kind(model, layer) for layer in range(model.num_layers))
    counts = (1.0, *(float(layers[kind]) for kind in layer_kinds(model)), 1.0)
    f_s, b_s, w_s, unpaired_s = (
        parts.total(f"{name}_s", counts) / mesh.pp for name in ("forward", "backward", "weight", "unpaired")
    )
    mean_s = f_s + b_s + w_s
    step_s = mesh.num_microbatches * mean_s + np.minimum(mesh.pp, mesh.num_microbatches) * unpaired_s
    if not mesh.plan.stages:  # of any shape: played
        step_s = step_s + bubble_s(mesh.schedule, mesh.pp, mesh.num_microbatches, mesh.vpp, f_s, b_s, w_s)
    return step_s * (1.0 + machine.overheads.straggler_frac * np.log2(mesh.world))
