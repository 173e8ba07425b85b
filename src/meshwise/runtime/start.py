"""Starts a program on real ranks, after all that can be checked before; there it is recorded, or bare.

A dry run or a run hands back for one rank its steps, its ledger, its peak, and what it computed.
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from meshwise.core.errors import PlanError
from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.core.units import with_prefix
from meshwise.program.tape import VERDICT, Step, Tape
from meshwise.runtime.launch import RankPlace, launch, outside_place
from meshwise.runtime.programs import Program, find_program


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outcome(Shown):
    """One rank of a program, dry-run or run; `result` is what the program itself returned."""

    program: str
    ranks: int
    rank: int
    device: str
    peak_bytes: float
    steps: tuple[Step, ...]
    ledger: Ledger
    result: Any = None
    num_steps: int | None = None
    """How many steps the program took, of a program that trains: its peak is that of all of them."""
    memory_bytes: float | None = None
    """Of the chip of a dry run, as what follows (`VERDICT`)."""
    reserved_bytes: float | None = None
    fits: bool | None = None
    out_of_memory: dict[str, Any] = field(default_factory=dict)
    rows_in: ClassVar[str] = "ledger"

    @classmethod
    def from_tape(cls, tape: Tape, program: str, device: str, options: Any, result: Any = None) -> Outcome:
        """The outcome that `tape` has recorded of a program with `options`."""
        steps, num_steps = tuple(tape.steps), getattr(options, "steps", None)
        place = (program, tape.world_size, tape.rank, device)
        return cls(*place, tape.peak_booked_bytes, steps, tape.ledger(), result, num_steps, **tape.verdict())

    def to_json(self) -> dict[str, Any]:
        """The document that `dryrun --json` and `run --json` print."""
        ledger = self.ledger.to_json()
        timed = [row for row in ledger if row["time_s"] is not None]
        return {
            **{name: getattr(self, name) for name in ("program", "ranks", "rank", "device", *VERDICT)},
            "peak_bytes": self.peak_bytes or None,  # nobody looked
            "time_s": _seconds(timed),
            "communication_s": _seconds([row for row in timed if row["collective"]]),  # waiting included
            "steps": [step.to_json() for step in self.steps],
            "ledger": ledger,
            "result": self.result,
            **({} if self.num_steps is None else {"num_steps": self.num_steps}),
        }


def _seconds(rows: list[dict[str, Any]]) -> float | None:
    """Seconds of the ops of `rows` together; None where none was timed."""
    return sum(row["count"] * row["time_s"] for row in rows) if rows else None


def start(
    program: Program, options: Any, *, ranks: int, device: str, root: int, port: int, folder: str | None,
    recorded: bool, quiet: bool,
) -> Outcome | None:  # fmt: skip
    """Run `program` on `ranks` ranks (0: as torchrun or srun say, or 1); the outcome of rank `root`.

    None on the other ranks of a world that torchrun or srun started.
    """
    outside = outside_place(os.environ)
    ranks = ranks or (outside.world_size if outside else 1)
    program.check(options, ranks)
    refuse("run", PlanError, device=device, root=root, ranks=ranks, last=ranks - 1)
    if outside is None and device == "cpu":
        check_memory(program, options, ranks)
    arguments = (program.name, options, root, quiet, folder, recorded)
    outcomes = launch(run_rank, ranks, *arguments, device_type=device, port=port)
    return None if outcomes is None else outcomes[root]


def run_rank(
    place: RankPlace, name: str, options: Any, root: int = 0, quiet: bool = False, folder: str | None = None,
    recorded: bool = True,
) -> Outcome:  # fmt: skip
    """Run program `name` on this rank of an initialised world; what `launch` calls on every rank.

    With a `folder`, the rank's profile is written there, and ops are not timed one by one. Not `recorded`:
    nothing is counted, and the program runs at the speed it has without us. What it imports, the process that
    starts ranks does not need.
    """
    from meshwise.runtime.profile import capture
    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.recorder import OpRecorder

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


def check_memory(program: Program, options: Any, ranks: int) -> None:
    """PlanError before a run that this machine's memory cannot hold."""
    path = Path("/proc/meminfo")  # where Linux says what new processes can take, its caches included
    lines = path.read_text().splitlines() if path.exists() else []
    free = next((line for line in lines if line.startswith("MemAvailable:")), "")
    available_bytes = 1024.0 * int(free.split()[1]) if free else math.inf
    tape = Tape("estimate", 0, ranks)
    program.estimate(options, tape)
    if ranks * tape.peak_bytes > available_bytes:
        need, have = (with_prefix(size, "B") for size in (ranks * tape.peak_bytes, available_bytes))
        text = f"{program.name} on {ranks} ranks needs {need}, this machine has {have} free"
        raise PlanError(f"{text}; use dryrun, or smaller sizes")
