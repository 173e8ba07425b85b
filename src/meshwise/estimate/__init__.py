"""A step from its parts. `meshwise.estimate(model, cluster, plan, workload)` prices one plan.

| module | what it says |
| --- | --- |
| `single` | one plan, as a person reads it: totals, shares, stages, the ledger |
| `grid` | a million plans as arrays |
| `timing`, `block_time` | how long ops take on a machine, and a block of them |
| `stage`, `step`, `memory` | a pipeline stage, the whole step, and its memory |
| `simulate`, `pipeline` | a schedule played out in time, and that of a plan |
| `request` | the words of a command made an answer |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwise import callable_module

if TYPE_CHECKING:
    from meshwise.estimate.single import Estimate as Estimate
    from meshwise.estimate.single import estimate as estimate


def __getattr__(name: str) -> Any:
    if name in ("Estimate", "estimate"):
        from meshwise.estimate import single

        return getattr(single, name)
    raise AttributeError(f"meshwise.estimate has no {name!r}")


callable_module(__name__)
