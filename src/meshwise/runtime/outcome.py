"""What a dry run or a run hands back for one rank: its steps, its ledger, its peak, and what it computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.ledger import Ledger
from meshwise.program.tape import Step, Tape
from meshwise.runtime.capture_cost import CaptureCost


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One rank of a program, dry-run or run; `result` is what the program itself returned."""

    program: str
    ranks: int
    rank: int
    device: str
    peak_bytes: float
    steps: tuple[Step, ...]
    ledger: Ledger
    result: Any = None
    capture: CaptureCost | None = None
    """What its profile cost, of a run with `--profile`."""

    @classmethod
    def from_tape(
        cls, tape: Tape, program: str, device: str, result: Any = None, capture: CaptureCost | None = None
    ) -> Outcome:
        """The outcome that `tape` has recorded."""
        return cls(
            program=program,
            ranks=tape.world_size,
            rank=tape.rank,
            device=device,
            peak_bytes=tape.peak_booked_bytes,
            steps=tuple(tape.steps),
            ledger=tape.ledger(),
            result=result,
            capture=capture,
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `dryrun --json` and `run --json` print."""
        return {
            "program": self.program,
            "ranks": self.ranks,
            "rank": self.rank,
            "device": self.device,
            "peak_bytes": self.peak_bytes or None,  # nobody looked
            "steps": [step.to_json() for step in self.steps],
            "ledger": self.ledger.to_json(),
            "result": self.result,
        } | ({} if self.capture is None else {"capture": self.capture.to_json()})
