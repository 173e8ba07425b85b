"""The pipeline of one plan, played out rank by rank: uneven stages, stragglers, and the timeline.

The closed forms of `cost.schedule` suppose stages alike. Here every chunk has its own layers (the
first its embedding, the last its head), every rank its own speed, and `estimate.simulate` plays the
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.cost.simulate import Timeline, simulate
from meshwise.estimate.degrees import Degrees
from meshwise.estimate.stage import Blocks, plan_chunks, stage_time
from meshwise.model.architecture import Model


def play(
    model: Model, on: Degrees, blocks: Blocks, *, hop_s: float = 0.0, slowdown: Sequence[float] | float = 1.0
) -> Timeline:
    """Play the pipeline of one plan; `slowdown` stretches the compute of a rank (or of each)."""
    times = [stage_time(chunk, blocks, on) for chunk in plan_chunks(model, on)]
    phases = (
        np.array([float(getattr(time, phase).total_s) for time in times])
        for phase in ("forward", "backward", "weight")
    )
    return simulate(
        on.plan.schedule,
        *phases,
        pp=int(on.pp),
        m=int(on.num_microbatches),
        v=int(on.vpp),
        p2p_s=hop_s,
        slowdown=slowdown,
    )
