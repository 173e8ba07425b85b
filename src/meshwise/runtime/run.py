"""`run`: the real program on real ranks, recorded while it runs, or bare."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from meshwise.program.tape import Tape
from meshwise.runtime.launch import RankPlace
from meshwise.runtime.outcome import Outcome
from meshwise.runtime.profile import capture
from meshwise.runtime.programs import find_program
from meshwise.runtime.programs.context import Context
from meshwise.runtime.recorder import OpRecorder


def run_rank(
    place: RankPlace, name: str, options: Any, root: int = 0, quiet: bool = False, folder: str | None = None,
    recorded: bool = True,
) -> Outcome:  # fmt: skip
    """Run program `name` on this rank of an initialised world; what `launch` calls on every rank.

    With a `folder`, the rank's profile is written there, and ops are not timed one by one. Not `recorded`:
    nothing is counted, and the program runs at the speed it has without us.
    """
    on_cpu = place.device_type == "cpu"
    tape = Tape("run", place.rank, place.world_size, measure=None if on_cpu else _cuda_bytes)
    recorder = OpRecorder(tape, device_type=place.device_type, is_timed=on_cpu and folder is None)
    context = Context(place.rank, place.world_size, place.device, recorder, root=root, quiet=quiet)
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    profile = nullcontext() if folder is None else capture(folder, place.rank, place.world_size)
    with profile, recorder if recorded else nullcontext():
        result = find_program(name).main(options, context)
    device = "cpu" if on_cpu else torch.cuda.get_device_name(place.device)
    return Outcome.from_tape(tape, name, device, options, result)


def _cuda_bytes() -> tuple[float, float]:
    """What PyTorch's allocator has booked, now and at most."""
    return float(torch.cuda.memory_allocated()), float(torch.cuda.max_memory_allocated())
