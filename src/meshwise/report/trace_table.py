"""A summary of traces as tables: ranks, kernels, clocks, collectives, stragglers, problems."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from meshwise.core.units import duration
from meshwise.report.table import Fields, Table, percent, records_table, short
from meshwise.trace.collectives import Collective, RankWaiting
from meshwise.trace.copies import CopyTotal
from meshwise.trace.diff import KernelChange
from meshwise.trace.explain import Explanation, OpDifference
from meshwise.trace.findings import Finding
from meshwise.trace.kernels import KernelTotal
from meshwise.trace.sections import AcrossRanks
from meshwise.trace.steps import RankStep
from meshwise.trace.summary import Summary


def print_findings(found: Sequence[Finding], console: Console) -> None:
    """Print what is wrong with the job, one sentence each."""
    for number, one in enumerate(found, start=1):
        console.print(f"{number}. {one.text}")
    if not found:
        console.print("No rank, link or cause stands out.")


def print_summary(summary: Summary, console: Console, *, limit: int = 15) -> None:
    """Print the tables of one job."""
    for one in summary_tables(summary, limit=limit):
        console.print(one)
    console.print(clocks_text(summary))
    console.print("Findings", style="italic")
    print_findings(summary.findings, console)
    for problem in summary.problems:
        console.print(f"problem: {problem.text}")


def summary_tables(summary: Summary, *, limit: int = 15) -> list[Table]:
    """The tables of one job: ranks, steps, kernels, copies, collectives, who waits for whom."""
    found = [
        _ranks(summary),
        _steps(summary.steps, limit) if len({step.number for step in summary.steps}) > 1 else None,
        _kernels(summary.kernels, limit),
        _copies(summary.copies) if summary.copies else None,
        _collectives(summary.collectives, limit) if summary.collectives else None,
        _stragglers(summary.stragglers, limit) if summary.stragglers else None,
    ]
    return [one for one in found if one is not None]


def clocks_text(summary: Summary) -> str:
    """How the ranks' clocks were made one, in a sentence."""
    alignment = summary.alignment
    differ = "" if alignment.residual_s is None else f", ends then differ by {duration(alignment.residual_s)}"
    drift = max(map(abs, alignment.drift.values()), default=0.0)
    drifts = f"; clocks drift by up to {1e6 * drift:.3g} ppm" if drift else ""
    return f"Clocks: {alignment.method} ({alignment.num_collectives} collectives{differ}){drifts}"


def _ranks(summary: Summary) -> Table:
    columns = ("rank", "span", "compute", "comm.", "exposed", "memory", "idle", "by host", "busy")
    rows = []
    for rank, parts in zip(summary.ranks, summary.partitions, strict=True):
        times = [rank.span_s, rank.compute_s, rank.communication_s, rank.exposed_communication_s]
        times += [rank.memory_s, rank.idle_s]
        busy_frac = rank.busy_s / rank.span_s if rank.span_s else None
        cells = (*map(duration, times), duration(parts.host_bound_s), percent(busy_frac))
        rows.append((rank.rank, *cells, percent(rank.overlap_frac)))
    title = "Where the time of each rank went"
    return Table(title, (*columns, "overlap"), rows, no_wrap=True)


def _steps(steps: Sequence[RankStep], limit: int) -> Table:
    """One row a step: the mean over the ranks."""
    numbers = sorted({step.number for step in steps})
    rows = []
    for number in numbers[:limit]:
        same = [step for step in steps if step.number == number]
        parts = [one.breakdown for one in same]
        sums = [
            [part.span_s for part in parts],
            [part.compute_s for part in parts],
            [part.communication_s for part in parts],
            [part.exposed_communication_s for part in parts],
            [part.idle_s for part in parts],
        ]
        kind = next((step.part for step in same if step.part != "whole"), "")
        rows.append((number, *(duration(sum(values) / len(same)) for values in sums), kind))
    columns = ("step", "span", "compute", "communication", "exposed", "idle", "")
    title = f"The first {len(rows)} steps of {len(numbers)}, mean of the ranks"
    return Table(title, columns, rows, no_wrap=True)


def _kernels(kernels: Sequence[KernelTotal], limit: int) -> Table:
    columns: Fields = {
        **{"name": "name", "kind": "kind", "count": "count", "total": "total_s", "share": "share_frac"},
        "mean": "mean_s",
    }
    title = f"The {min(limit, len(kernels))} longest kernels of {len(kernels)}, all ranks"
    return records_table(title, kernels[:limit], columns)


def _copies(copies: Sequence[CopyTotal]) -> Table:
    columns: Fields = {
        **{"kind": "kind", "count": "count", "total": "total_s"},
        **{"bytes": "bytes", "smallest": "min_bytes"},
        **{"median": "median_bytes", "largest": "max_bytes", "bytes a second": "bytes_per_s"},
    }
    return records_table("Copies", copies, columns)


def _stragglers(found: Sequence[RankWaiting], limit: int) -> Table:
    """Those that were awaited longest, in the order of ranks."""
    shown = sorted(sorted(found, key=lambda row: -row.awaited_s)[:limit], key=lambda row: row.rank)
    title = "Who waits for whom" if len(shown) == len(found) else f"The {len(shown)} most awaited ranks"
    columns: Fields = {
        **{"rank": "rank", "came last": "num_last", "waited": "waited_s", "others waited for it": "awaited_s"}
    }
    return records_table(title, shown, columns)


def _collectives(found: Sequence[Collective], limit: int) -> Table:
    longest = sorted(found, key=lambda c: -(c.wire_s + max(c.wait_s.values())))[:limit]
    columns: Fields = {
        "collective": lambda one: f"{one.name} {one.index}",
        **{"group": "group", "bytes": "bytes", "wire": "wire_s"},
        **{
            "bytes/s sent": "sent_bytes_per_s",
            "longest wait": lambda one: duration(max(one.wait_s.values())),
        },
        "last rank": lambda one: one.last_rank if one.num_ranks > 1 else "(one rank seen)",
    }
    return records_table(f"The {len(longest)} longest collectives of {len(found)}", longest, columns)


def print_joint(rows: Sequence[AcrossRanks], console: Console, *, title: str, limit: int = 40) -> None:
    """Print one table of all ranks: spread, imbalance and straggler of each row."""
    columns: Fields = {
        **{"section": "name", "quantity": "quantity", "min": "min_s", "mean": "mean_s", "max": "max_s"},
        **{"imbalance": lambda row: f"{row.imbalance:.3f}", "straggler": "straggler"},
    }
    console.print(records_table(title, rows[:limit], columns))


def explanation_tables(found: Explanation, *, limit: int) -> list[Table]:
    """The predicted step beside the measured one by class, and its ops that join."""
    columns = ("predicted", "measured", "difference")
    classes = [(row.op, *_both(row)) for row in found.classes]
    ops = [(row.module, row.op, row.phase, *_both(row)) for row in found.rows if row.module]
    step = ("step", duration(found.predicted_s), duration(found.measured_s), "")
    tables = [Table("Time of a step", ("class", *columns), [*classes, step], no_wrap=True)]
    places = ("module", "op", "phase")
    joined = Table("Its ops that join", (*places, *columns), ops[:limit], left=places, no_wrap=True)
    return tables + [joined] * bool(ops)


def _both(row: OpDifference) -> tuple[str, str, str]:
    return duration(row.predicted_s), duration(row.measured_s), difference_text(row.more_s)


def difference_text(seconds: float) -> str:
    """A difference of times, with its sign."""
    return ("+" if seconds >= 0 else "-") + duration(abs(seconds))


def print_explanation(found: Explanation, console: Console, *, limit: int = 15) -> None:
    """Print the predicted step beside the measured one, and the differences in words."""
    for table in explanation_tables(found, limit=limit):
        console.print(table)
    for number, text in enumerate(found.findings, start=1):
        console.print(f"{number}. {text}", markup=False, highlight=False)


def print_changes(rows: Sequence[KernelChange], console: Console, *, limit: int = 30) -> None:
    """Print what changed between two sets of traces."""
    columns = ("name", "count", "total before", "total after", "change")
    before, after = sum(row.total_before_s for row in rows), sum(row.total_after_s for row in rows)
    cells = [
        (
            *(short(row.name), f"{row.count_before} -> {row.count_after}", duration(row.total_before_s)),
            *(duration(row.total_after_s), difference_text(row.change_s)),
        )
        for row in rows[:limit]
    ]
    cells.append(("all", "", duration(before), duration(after), f"{after - before:+.6g} s"))
    console.print(Table("Kernels, before and after", columns, cells, no_wrap=True))
