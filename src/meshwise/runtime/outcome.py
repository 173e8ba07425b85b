"""What a dry run or a run hands back for one rank: its steps, its ledger, its peak, and what it computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.program.tape import Step, Tape


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
    rows_in: ClassVar[str] = "ledger"

    @classmethod
    def from_tape(cls, tape: Tape, program: str, device: str, options: Any, result: Any = None) -> Outcome:
        """The outcome that `tape` has recorded of a program with `options`."""
        steps, num_steps = tuple(tape.steps), getattr(options, "steps", None)
        place = (program, tape.world_size, tape.rank, device)
        return cls(*place, tape.peak_booked_bytes, steps, tape.ledger(), result, num_steps)

    def to_json(self) -> dict[str, Any]:
        """The document that `dryrun --json` and `run --json` print."""
        ledger = self.ledger.to_json()
        timed = [row for row in ledger if row["time_s"] is not None]
        return {
            **{name: getattr(self, name) for name in ("program", "ranks", "rank", "device")},
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
