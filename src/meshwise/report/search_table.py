"""The plans that a search found, as tables."""

from __future__ import annotations

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.estimate.single import Estimate
from meshwise.plan.plan import plan_text
from meshwise.report.table import table
from meshwise.search.search import Change, Result

WORK = ("compute", "memory")
"""Parts of a step that are work of the kernels themselves."""


def print_search(result: Result, console: Console) -> None:
    """Print how many plans there were, the fastest that fit, and how a plan differs that was asked for."""
    rate = with_prefix(result.plans_considered / result.elapsed_s, "")
    console.print(
        f"{result.plans_considered:,} plans priced in {duration(result.elapsed_s)} ({rate} a second), "
        f"{result.plans_feasible:,} fit in {with_prefix(result.capacity_bytes, 'B')}"
    )
    if not result.best:
        console.print(_why_none(result))
    else:
        columns = ("step", "MFU", "memory", "largest cost", "variants", "microbatch", "plan")
        rows = (
            (
                duration(found.step_s),
                f"{found.mfu:.1%}",
                with_prefix(found.memory_bytes["total"], "B"),
                _largest_cost(found),
                f"{num_variants:,}",
                found.workload.microbatch,
                plan_text(found.plan),
            )
            for found, num_variants in zip(result.best, result.num_variants, strict=True)
        )
        console.print(table("", columns, rows, left=("plan",)))
    if result.beside is not None and result.best:
        console.print(_term_by_term(result.best[0], result.beside))


def _largest_cost(found: Estimate) -> str:
    """What the step spends most on beside the work of its kernels."""
    name, seconds = max(
        ((name, seconds) for name, seconds in found.time_s.items() if name not in WORK),
        key=lambda part: part[1],
    )
    return f"{name} {seconds / found.step_s:.0%}"


def _term_by_term(best: Estimate, beside: Estimate) -> object:
    terms = [
        (name, duration(best.time_s[name]), duration(beside.time_s[name]))
        for name in best.time_s
        if max(best.time_s[name], beside.time_s[name]) > 1e-3 * best.step_s
    ]
    total = ("step", duration(best.step_s), duration(beside.step_s))
    memory = ("memory needed", *(with_prefix(one.memory_bytes["total"], "B") for one in (best, beside)))
    columns = ("term", "best", plan_text(beside.plan) or "default plan")
    return table("the best plan beside the one asked for", columns, [*terms, total, memory])


def _why_none(result: Result) -> str:
    miss = result.nearest_miss
    if miss is None:
        return f"no plan: {result.reason}"
    short = with_prefix(miss.memory_bytes - result.capacity_bytes, "B")
    lines = [
        f"none fits: the nearest plan is {short} short of {with_prefix(result.capacity_bytes, 'B')}: "
        f"{plan_text(miss.plan)}, microbatch {miss.microbatch}"
    ]
    lines += map(change_text, result.changes)
    return "\n".join(lines if result.changes else [*lines, "use larger chips, or a shorter sequence"])


def change_text(change: Change) -> str:
    """What would fit, and after which change."""
    what = f"with another {change.key}" if change.key else f"on {change.num_chips:,} chips"
    return (
        f"fits {what}: {plan_text(change.found.plan) or 'the default plan'}, microbatch "
        f"{change.found.microbatch} ({with_prefix(change.found.memory_bytes, 'B')}, "
        f"{duration(change.found.step_s)} a step)"
    )
