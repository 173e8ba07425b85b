"""What changed between two sets of traces: kernels and rank times, before and after.

Kernels are joined by name. A kernel that only one side has stands with a zero on the other, so the
differences add up to the difference of the totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.trace.kernels import KernelTotal


@dataclass(frozen=True, slots=True)
class KernelChange:
    """One kernel before and after; totals over all ranks."""

    name: str
    kind: str
    count_before: int
    count_after: int
    total_before_s: float
    total_after_s: float

    @property
    def change_s(self) -> float:
        """Seconds after minus seconds before."""
        return self.total_after_s - self.total_before_s


def kernel_changes(before: Sequence[KernelTotal], after: Sequence[KernelTotal]) -> list[KernelChange]:
    """Every kernel of either side, the largest change (up or down) first."""
    old, new = ({(k.name, k.kind): k for k in side} for side in (before, after))
    rows = [
        KernelChange(
            name=key[0],
            kind=key[1],
            count_before=old[key].count if key in old else 0,
            count_after=new[key].count if key in new else 0,
            total_before_s=old[key].total_s if key in old else 0.0,
            total_after_s=new[key].total_s if key in new else 0.0,
        )
        for key in old.keys() | new.keys()
    ]
    return sorted(rows, key=lambda row: (-abs(row.change_s), row.name))
