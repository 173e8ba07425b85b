"""Functions that tests run on every rank; in a module of their own, so that spawned ranks can import them."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwise.core.errors import PlanError
from meshwise.runtime.launch import RankPlace
from meshwise.runtime.programs.tensor_parallel import Options
from meshwise.runtime.start import Outcome, run_rank


def total_of_ranks(place: RankPlace, factor: int) -> int:
    total = torch.tensor([float(place.rank * factor)], device=place.device)
    dist.all_reduce(total)
    return int(total)


def fail_on(place: RankPlace, failing: int) -> None:
    if place.rank == failing:
        raise ValueError(f"broken on purpose on rank {failing}")
    dist.barrier()


def refuse_on(place: RankPlace, failing: int) -> None:
    if place.rank == failing:
        raise PlanError("these sizes do not divide")
    dist.barrier()


def die_on(place: RankPlace, failing: int) -> None:
    if place.rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(place: RankPlace, failing: int) -> None:
    if place.rank == failing:
        os._exit(7)
    dist.barrier()


def sleep_forever(place: RankPlace, folder: str) -> None:
    """Leave this rank's process id in `folder`, then never end."""
    Path(folder, str(place.rank)).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def run_script(place: RankPlace, words: list[str], port: int) -> None:
    """Be one rank of a script that makes its process group itself, at a store that listens on `port`."""
    dist.barrier()  # a rank that leaves while another still connects ends both
    dist.destroy_process_group()
    world = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.world_size}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in world.items()})
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def num_threads(place: RankPlace) -> int:
    """Threads of this rank's process."""
    return len(list(Path("/proc/self/task").iterdir()))


def many_sums(place: RankPlace, num: int) -> int:
    """`num` all-reduces, one after the other; how many ranks had the right sum."""
    for _ in range(num):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == place.world_size
    return num


NUM_GROUPS = {"1d": 1, "2d": 2, "2d-cp": 2, "2.5d": 5, "3d": 3}


def run_bare(place: RankPlace, name: str, options: Any) -> Outcome:
    """This rank's outcome of a program of which nothing is recorded."""
    return run_rank(place, name, options, quiet=True, recorded=False)


def run_on_first(place: RankPlace, ranks: int, options: Options, recorded: bool = True) -> Outcome | None:
    """This rank's outcome in a tensor-parallel world of the first `ranks`; None on the others.

    torch names a group by how many the process has made before, so the idle ranks make as many.
    """
    if place.rank >= ranks:
        for _ in range(NUM_GROUPS[options.layout]):
            dist.new_group([place.rank], use_local_synchronization=True)
        return None
    return run_rank(
        replace(place, world_size=ranks), "tensor-parallel", options, quiet=True, recorded=recorded
    )
