"""The plans that a search found, as a table."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from meshwise.core.units import duration, with_prefix
from meshwise.plan.plan import plan_text
from meshwise.search.search import Result

_COLUMNS = ("tp", "cp", "ep", "pp", "vpp", "dp", "zero")


def print_search(result: Result, console: Console) -> None:
    """Print how many plans there were, and the fastest that fit."""
    rate = with_prefix(result.plans_considered / result.elapsed_s, "")
    console.print(
        f"{result.plans_considered:,} plans priced in {duration(result.elapsed_s)} ({rate} a second), "
        f"{result.plans_feasible:,} fit"
    )
    if not result.best:
        console.print(_why_none(result))
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("step", "MFU", "memory", *_COLUMNS, "microbatch", "schedule", "recompute"):
        table.add_column(name, justify="right")
    for found in result.best:
        plan = found.plan
        degrees = {name: getattr(plan, name) for name in _COLUMNS} | {"dp": int(found.mesh.dp)}
        table.add_row(
            duration(found.step_s),
            f"{found.mfu:.1%}",
            with_prefix(found.memory_bytes["total"], "B"),
            *(str(degrees[name]) for name in _COLUMNS),
            str(found.workload.microbatch),
            plan.schedule,
            plan.recompute,
        )
    console.print(table)


def _why_none(result: Result) -> str:
    miss = result.nearest_miss
    if miss is None:
        return f"no plan: {result.reason}"
    short = with_prefix(miss.memory_bytes - result.capacity_bytes, "B")
    return (
        f"none fits: the nearest plan is {short} short of {with_prefix(result.capacity_bytes, 'B')}: "
        f"{plan_text(miss.plan)}, microbatch {miss.microbatch}; use more or larger chips, a shorter "
        "sequence, or offloading"
    )
