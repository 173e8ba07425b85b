"""What a rank of one of our programs did, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwise.core.units import with_prefix
from meshwise.report.answer import Section, Text

if TYPE_CHECKING:
    from meshwise.runtime.outcome import Outcome


def parts(outcome: Outcome, *, says_result: bool = False) -> Iterator[Section]:
    """What a rank returned (unless the program `says_result`), and its peak."""
    if outcome.result is not None and not says_result:
        yield Text("Result", [f"result: {outcome.result}"], verbatim=True)
    peak = with_prefix(outcome.peak_bytes, "B") if outcome.peak_bytes else "not recorded"
    steps = "" if not outcome.num_steps else f" of {outcome.num_steps} step{'s' * (outcome.num_steps > 1)}"
    yield f"rank {outcome.rank} of {outcome.ranks} on {outcome.device}: peak memory{steps} {peak}"
    if outcome.capture is not None:
        yield f"overhead of the capture: {outcome.capture}"
