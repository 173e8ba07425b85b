"""A summary of traces as tables: ranks, kernels, clocks, collectives, stragglers, problems."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from meshwise.trace.collectives import Collective
from meshwise.trace.diff import KernelChange
from meshwise.trace.sections import Joint
from meshwise.trace.summary import Summary
from meshwise.units import duration, with_prefix

_NAME_WIDTH = 60


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def print_summary(summary: Summary, console: Console, *, limit: int = 15) -> None:
    """Print the tables of one job."""
    table = _table(
        "Where the time of each rank went",
        *("rank", "span", "compute", "communication", "exposed", "memory", "idle", "overlap"),
    )
    for rank in summary.ranks:
        overlap = "" if rank.overlap_frac is None else f"{100 * rank.overlap_frac:.1f} %"
        times = [rank.span_s, rank.compute_s, rank.communication_s, rank.exposed_communication_s]
        times += [rank.memory_s, rank.idle_s]
        table.add_row(f"{rank.rank} ({rank.device})", *map(duration, times), overlap)
    console.print(table)
    table = _table(f"The {limit} longest kernels of {len(summary.kernels)}, all ranks", "name", "kind")
    for column in ("count", "total", "mean"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in summary.kernels[:limit]:
        cells = (str(kernel.count), duration(kernel.total_s), duration(kernel.mean_s))
        table.add_row(_short(kernel.name), kernel.kind, *cells)
    console.print(table)
    alignment = summary.alignment
    residual = (
        "" if alignment.residual_s is None else f", ends then differ by {duration(alignment.residual_s)}"
    )
    console.print(f"Clocks: {alignment.method} ({alignment.num_collectives} collectives{residual})")
    if summary.collectives:
        _print_collectives(summary.collectives, console, limit)
    if summary.stragglers:
        table = _table("Who waits for whom", "rank", "came last", "waited", "others waited for it")
        for row in summary.stragglers:
            table.add_row(str(row.rank), str(row.num_last), duration(row.waited_s), duration(row.awaited_s))
        console.print(table)
    for problem in summary.problems:
        console.print(f"problem: {problem.file + ': ' if problem.file else ''}{problem.reason}", markup=False)


def _print_collectives(found: Sequence[Collective], console: Console, limit: int) -> None:
    longest = sorted(found, key=lambda c: -(c.wire_s + max(c.wait_s.values())))[:limit]
    table = _table(
        f"The {len(longest)} longest collectives of {len(found)}",
        *("collective", "group", "bytes", "wire", "bytes/s sent", "longest wait", "last rank"),
    )
    for one in longest:
        size = "" if one.bytes is None else with_prefix(one.bytes, "B")
        speed = "" if one.sent_bytes_per_s is None else with_prefix(one.sent_bytes_per_s, "B/s")
        last = str(one.last_rank) if one.num_ranks > 1 else "(one rank seen)"
        cells = (one.group, size, duration(one.wire_s), speed, duration(max(one.wait_s.values())), last)
        table.add_row(f"{one.name} {one.index}", *cells)
    console.print(table)


def print_joint(rows: Sequence[Joint], console: Console, *, title: str, limit: int = 40) -> None:
    """Print one table of all ranks: spread, imbalance and straggler of each row."""
    table = _table(title, "section", "quantity", "min", "mean", "max", "imbalance", "straggler")
    for row in rows[:limit]:
        cells = (duration(row.min_s), duration(row.mean_s), duration(row.max_s))
        table.add_row(_short(row.name), row.quantity, *cells, f"{row.imbalance:.3f}", str(row.straggler))
    console.print(table)


def print_changes(rows: Sequence[KernelChange], console: Console, *, limit: int = 30) -> None:
    """Print what changed between two sets of traces."""
    table = _table("Kernels, before and after", "name", "count", "total before", "total after", "change")
    for row in rows[:limit]:
        sign = "+" if row.change_s >= 0 else "-"
        cells = (
            duration(row.total_before_s),
            duration(row.total_after_s),
            sign + duration(abs(row.change_s)),
        )
        table.add_row(_short(row.name), f"{row.count_before} -> {row.count_after}", *cells)
    before, after = sum(r.total_before_s for r in rows), sum(r.total_after_s for r in rows)
    table.add_row("all", "", duration(before), duration(after), f"{after - before:+.6g} s")
    console.print(table)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"
