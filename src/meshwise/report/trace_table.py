"""A summary of traces as tables: ranks, kernels, clocks, collectives, stragglers, problems."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from meshwise.core.units import duration, with_prefix
from meshwise.trace.collectives import Collective, Straggler
from meshwise.trace.copies import CopyTotal
from meshwise.trace.diff import KernelChange
from meshwise.trace.findings import Finding
from meshwise.trace.kernels import KernelTotal
from meshwise.trace.sections import Joint
from meshwise.trace.summary import Summary

_NAME_WIDTH = 60


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def print_findings(found: Sequence[Finding], console: Console) -> None:
    """Print what is wrong with the job, one sentence each."""
    for number, one in enumerate(found, start=1):
        console.print(f"{number}. {one.text}", markup=False, highlight=False)
    if not found:
        console.print("No rank, link or cause stands out.")


def print_summary(summary: Summary, console: Console, *, limit: int = 15) -> None:
    """Print the tables of one job."""
    _print_ranks(summary, console)
    _print_kernels(summary.kernels, console, limit)
    if summary.copies:
        _print_copies(summary.copies, console)
    alignment = summary.alignment
    residual = (
        "" if alignment.residual_s is None else f", ends then differ by {duration(alignment.residual_s)}"
    )
    console.print(f"Clocks: {alignment.method} ({alignment.num_collectives} collectives{residual})")
    if summary.collectives:
        _print_collectives(summary.collectives, console, limit)
    if summary.stragglers:
        _print_stragglers(summary.stragglers, console, limit)
    console.print("Findings", style="italic")
    print_findings(summary.findings, console)
    for problem in summary.problems:
        console.print(f"problem: {problem.file + ': ' if problem.file else ''}{problem.reason}", markup=False)


def _print_ranks(summary: Summary, console: Console) -> None:
    columns = ("rank", "span", "compute", "communication", "exposed", "memory", "idle", "host-bound")
    table = _table("Where the time of each rank went", *columns, "busy", "overlap")
    for rank, parts in zip(summary.ranks, summary.partitions, strict=True):
        times = [rank.span_s, rank.compute_s, rank.communication_s, rank.exposed_communication_s]
        times += [rank.memory_s, rank.idle_s]
        host = "" if parts.host_bound_s is None else duration(parts.host_bound_s)
        busy = f"{100 * rank.busy_s / rank.span_s:.1f} %" if rank.span_s else ""
        overlap = "" if rank.overlap_frac is None else f"{100 * rank.overlap_frac:.1f} %"
        table.add_row(f"{rank.rank} ({rank.device})", *map(duration, times), host, busy, overlap)
    console.print(table)


def _print_kernels(kernels: Sequence[KernelTotal], console: Console, limit: int) -> None:
    table = _table(
        f"The {min(limit, len(kernels))} longest kernels of {len(kernels)}, all ranks", "name", "kind"
    )
    for column in ("count", "total", "share", "mean"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in kernels[:limit]:
        share = f"{100 * kernel.share_frac:.1f} %"
        cells = (str(kernel.count), duration(kernel.total_s), share, duration(kernel.mean_s))
        table.add_row(_short(kernel.name), kernel.kind, *cells)
    console.print(table)


def _print_copies(copies: Sequence[CopyTotal], console: Console) -> None:
    table = _table(
        "Copies", "kind", "count", "total", "bytes", "smallest", "median", "largest", "bytes a second"
    )
    for copy in copies:
        sizes = (copy.bytes, copy.min_bytes, copy.median_bytes, copy.max_bytes)
        cells = ["" if size is None else with_prefix(size, "B") for size in sizes]
        speed = "" if copy.bytes_per_s is None else with_prefix(copy.bytes_per_s, "B/s")
        table.add_row(copy.kind, str(copy.count), duration(copy.total_s), *cells, speed)
    console.print(table)


def _print_stragglers(found: Sequence[Straggler], console: Console, limit: int) -> None:
    """Those that were awaited longest, in the order of ranks."""
    shown = sorted(sorted(found, key=lambda row: -row.awaited_s)[:limit], key=lambda row: row.rank)
    title = "Who waits for whom" if len(shown) == len(found) else f"The {len(shown)} most awaited ranks"
    table = _table(title, "rank", "came last", "waited", "others waited for it")
    for row in shown:
        table.add_row(str(row.rank), str(row.num_last), duration(row.waited_s), duration(row.awaited_s))
    console.print(table)


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
