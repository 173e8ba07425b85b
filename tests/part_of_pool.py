"""Runs a tensor-parallel program on the first ranks of a pool; a module of its own, for spawned ranks."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from meshwise.runtime.launch import RankPlace
from meshwise.runtime.outcome import Outcome
from meshwise.runtime.programs.tensor_parallel import Options
from meshwise.runtime.run import run_rank

NUM_GROUPS = {"1d": 1, "2d": 2, "2d-cp": 2, "2.5d": 5, "3d": 3}


def run_on_first(place: RankPlace, ranks: int, options: Options) -> Outcome | None:
    """This rank's outcome in a world of the first `ranks` ranks; None on the others.

    torch names a group by how many the process has made before, so the idle ranks make as many.
    """
    if place.rank >= ranks:
        for _ in range(NUM_GROUPS[options.layout]):
            dist.new_group([place.rank], use_local_synchronization=True)
        return None
    return run_rank(replace(place, world_size=ranks), "tensor-parallel", options, quiet=True)
