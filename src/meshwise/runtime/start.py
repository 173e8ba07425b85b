"""Starts a program on real ranks, after all that can be checked before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshwise.core.errors import PlanError
from meshwise.core.units import with_prefix
from meshwise.program.tape import Tape
from meshwise.runtime.launch import RankPlace, launch, outside_place
from meshwise.runtime.outcome import Outcome
from meshwise.runtime.programs import Program


def start(
    program: Program, options: Any, *, ranks: int, device: str, root: int, port: int, folder: str | None,
    recorded: bool, quiet: bool,
) -> Outcome | None:  # fmt: skip
    """Run `program` on `ranks` ranks (0: as torchrun or srun say, or 1); the outcome of rank `root`.

    None on the other ranks of a world that torchrun or srun started.
    """
    if device not in ("cpu", "cuda"):
        raise PlanError(f"--device {device} is unknown; use cpu or cuda (dryrun takes chips of the catalog)")
    outside = outside_place(os.environ)
    ranks = ranks or (outside.world_size if outside else 1)
    program.check(options, ranks)
    if not 0 <= root < ranks:
        raise PlanError(f"--root {root} is not a rank of {ranks}; name one from 0 to {ranks - 1}")
    if outside is None and device == "cpu":
        check_memory(program, options, ranks)
    arguments = (program.name, options, root, quiet, folder, recorded)
    outcomes = launch(_run_rank, ranks, *arguments, device_type=device, port=port)
    return None if outcomes is None else outcomes[root]


def _run_rank(place: RankPlace, *arguments: Any) -> Outcome:
    """What every rank does; the process that starts ranks needs nothing of what they import."""
    from meshwise.runtime.run import run_rank

    return run_rank(place, *arguments)


def check_memory(program: Program, options: Any, ranks: int) -> None:
    """PlanError before a run that this machine's memory cannot hold."""
    available_bytes = _available_bytes()
    if available_bytes is None:
        return
    tape = Tape("estimate", 0, ranks)
    program.estimate(options, tape)
    if ranks * tape.peak_bytes > available_bytes:
        need, have = (with_prefix(size, "B") for size in (ranks * tape.peak_bytes, available_bytes))
        text = f"{program.name} on {ranks} ranks needs {need}, this machine has {have} free"
        raise PlanError(f"{text}; use dryrun, or smaller sizes")


def _available_bytes() -> float | None:
    """Memory that new processes can take, what the system caches included; None where Linux does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
