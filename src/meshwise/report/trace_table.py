"""What analyses of traces found, in one sentence and as tables; the rest where all of it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from meshwise.core.units import duration
from meshwise.report.table import Fields, Table, cell_text, difference_text, percent, records_table, short
from meshwise.trace.collectives import ranks_text
from meshwise.trace.critical_path import CriticalPath
from meshwise.trace.findings import Finding
from meshwise.trace.memory import MemoryPeak
from meshwise.trace.operators import AcrossRanks, KernelChange, OperatorTotal
from meshwise.trace.rates import Bandwidth, OpRate
from meshwise.trace.summary import Summary

NOTHING = "no rank, link or cause stands out"
_NUM_HOLDERS = 8
MANY_RANKS = 32
"""From more ranks on, those that stand out are shown and not all."""
Printed = str | Table


def sentence(text: str) -> str:
    """A text that begins like a sentence."""
    return text[:1].upper() + text[1:]


def headline(found: Sequence[Finding]) -> str:
    """The finding that costs most, in one sentence."""
    return sentence(found[0].text if found else NOTHING) + "."


def summary_parts(summary: Summary, *, limit: int = 15, everything: bool = False) -> Iterator[Printed]:
    """The answer in a sentence, who waits for whom, where the time went, and what else was found."""
    yield headline(summary.findings) + "\n"
    yield from summary_tables(summary, limit=limit, everything=everything)
    for one in summary.findings[1:]:
        yield sentence(one.text) + "."
    for problem in summary.problems:
        yield f"problem: {problem.text}"
    yield clocks_text(summary) if everything else "Steps, collectives and clocks: --all"


def summary_tables(summary: Summary, *, limit: int = 15, everything: bool = True) -> Iterator[Table]:
    """The tables of one job: who waits for whom, ranks, kernels, and of everything steps and collectives."""
    if summary.stragglers:
        yield _stragglers(summary, limit)
    if len(summary.ranks) <= MANY_RANKS:
        yield _ranks(summary, everything=everything)
    else:
        yield _outliers(summary, limit)
    yield _kernels(summary, limit)
    if everything and len({step.number for step in summary.steps}) > 1:
        yield _steps(summary, limit)
    if everything and summary.collectives:
        yield _collectives(summary, limit)


def clocks_text(summary: Summary) -> str:
    """How the ranks' clocks were made one, in a sentence."""
    alignment = summary.alignment
    differ = "" if alignment.residual_s is None else f", ends then differ by {duration(alignment.residual_s)}"
    drift = max(map(abs, alignment.drift.values()), default=0.0)
    drifts = f"; clocks drift by up to {1e6 * drift:.3g} ppm" if drift else ""
    return f"Clocks: {alignment.method} ({alignment.num_collectives} collectives{differ}){drifts}"


def _stragglers(summary: Summary, limit: int) -> Table:
    """Those that were awaited longest, in the order of ranks."""
    found = summary.stragglers
    shown = sorted(sorted(found, key=lambda row: -row.awaited_s)[:limit], key=lambda row: row.rank)
    title = "Who waits for whom" if len(shown) == len(found) else f"The {len(shown)} most awaited ranks"
    columns: Fields = {"rank": "rank", "came last": "num_last", "waited": "waited_s"}
    return records_table(title, shown, columns | {"others waited for it": "awaited_s"})


def _outliers(summary: Summary, limit: int) -> Table:
    """What of many ranks stands out, and the median rank."""
    found = summary.outliers
    columns: Fields = {
        "": lambda one: f"{one.kind} {one.name}",
        "ranks": lambda one: ranks_text(one.ranks) if len(one.ranks) > 1 else "",
        **{"time for": "part", "takes": "seconds", "median rank": "usual_s"},
        "more": lambda one: difference_text(one.excess_s),
    }
    shown = f"The {min(limit, len(found))} largest of {len(found)} differences" if found else "No differences"
    title = f"{shown} among {len(summary.ranks)} ranks"
    return records_table(title, found[:limit], columns, left=("", "ranks"))


def _ranks(summary: Summary, *, everything: bool) -> Table:
    parts = {one.rank: one for one in summary.partitions}
    columns: Fields = {
        **{"rank": "rank", "span": "span_s", "compute": "compute_s", "comm.": "communication_s"},
        **{"exposed": "exposed_communication_s", "idle": "idle_s"},
        "by host": lambda one: duration(parts[one.rank].host_bound_s),
        "busy": lambda one: percent(one.busy_s / one.span_s if one.span_s else None),
    }
    if everything:
        columns |= {"memory": "memory_s", "overlap": "overlap_frac"}
    return records_table("Where the time of each rank went", summary.ranks, columns)


def _steps(summary: Summary, limit: int) -> Table:
    """One row a step: the mean over the ranks."""
    numbers = sorted({step.number for step in summary.steps})
    fields = {"span": "span_s", "compute": "compute_s", "communication": "communication_s"}
    fields |= {"exposed": "exposed_communication_s", "idle": "idle_s"}
    rows = []
    for number in numbers[:limit]:
        same = [step for step in summary.steps if step.number == number]
        means = (sum(getattr(one.breakdown, field) for one in same) / len(same) for field in fields.values())
        kind = next((step.part for step in same if step.part != "whole"), "")
        rows.append((number, *map(duration, means), kind))
    title = f"The first {len(rows)} steps of {len(numbers)}, mean of the ranks"
    return Table(title, ("step", *fields, ""), rows, no_wrap=True)


def _kernels(summary: Summary, limit: int) -> Table:
    columns: Fields = {
        **{"name": "name", "kind": "kind", "count": "count", "total": "total_s", "share": "share_frac"},
        "mean": "mean_s",
    }
    title = f"The {min(limit, len(summary.kernels))} longest kernels of {len(summary.kernels)}, all ranks"
    return records_table(title, summary.kernels[:limit], columns)


def _collectives(summary: Summary, limit: int) -> Table:
    longest = sorted(summary.collectives, key=lambda c: -(c.wire_s + max(c.wait_s.values())))[:limit]
    columns: Fields = {
        "collective": lambda one: f"{one.name} {one.index}",
        **{"group": "group", "bytes": "bytes", "wire": "wire_s", "bytes/s sent": "sent_bytes_per_s"},
        "longest wait": lambda one: duration(max(one.wait_s.values())),
        "last rank": lambda one: one.last_rank if one.num_ranks > 1 else "(one rank seen)",
    }
    title = f"The {len(longest)} longest collectives of {len(summary.collectives)}"
    return records_table(title, longest, columns, left=("collective", "group"))


def joint_table(rows: Sequence[AcrossRanks], title: str, *, limit: int) -> Table:
    """Mean, largest and whose that is over the ranks, of each name and quantity."""
    columns: Fields = {
        **{"name": "name", "quantity": "quantity", "mean": "mean_s", "max": "max_s"},
        **{"max/mean": lambda row: f"{row.imbalance:.2f}", "straggler": "straggler"},
    }
    return records_table(title, rows[:limit], columns, left=("name", "quantity"))


def profile_table(rows: Sequence[OperatorTotal], title: str, *, sort_by: str, limit: int) -> Table:
    """PyTorch's table of one rank, the largest CPU (or device) total first.

    It has fourteen columns at most: none of a device that did nothing, nor of memory where no allocation was
    recorded. Percentages are of the sum of all self times.
    """
    cpu_s = sum(row.self_cpu_s for row in rows)
    device_s = sum(row.self_device_s for row in rows if row.kind in ("compute", "communication", "memory"))
    title += f": self CPU {duration(cpu_s)}, self CUDA {duration(device_s)}"

    def share(field: str, whole_s: float) -> Callable[[OperatorTotal], str]:
        return lambda row: percent(getattr(row, field) / whole_s if whole_s else 0.0)

    def each(field: str) -> Callable[[OperatorTotal], str]:
        return lambda row: duration(getattr(row, field) / row.count)

    columns: Fields = {"Name": "name", "Self CPU %": share("self_cpu_s", cpu_s), "Self CPU": "self_cpu_s"}
    columns |= {"CPU total %": share("cpu_s", cpu_s), "CPU total": "cpu_s", "CPU time avg": each("cpu_s")}
    if device_s:
        columns |= {"Self CUDA": "self_device_s", "Self CUDA %": share("self_device_s", device_s)}
        columns |= {"CUDA total": "device_s", "CUDA time avg": each("device_s")}
    if any(row.cpu_bytes for row in rows):
        columns |= {"CPU Mem": "cpu_bytes", "Self CPU Mem": "self_cpu_bytes"}
    if any(row.device_bytes for row in rows):
        columns |= {"CUDA Mem": "device_bytes", "Self CUDA Mem": "self_device_bytes"}
    columns["# of Calls"] = "count"
    ordered = sorted(rows, key=lambda row: -(row.cpu_s if sort_by == "cpu" else row.device_s))
    return records_table(title, ordered[:limit], columns)


def change_table(rows: Sequence[KernelChange], *, limit: int) -> Table:
    """What changed between two sets of traces; the last row is the sum over all kernels."""
    columns = ("name", "count", "total before", "total after", "change")
    before, after = sum(row.total_before_s for row in rows), sum(row.total_after_s for row in rows)
    shown = [
        (short(one.name), f"{one.count_before} -> {one.count_after}", one.total_before_s, one.total_after_s)
        for one in rows[:limit]
    ]
    cells = [
        (name, count, duration(old), duration(new), difference_text(new - old))
        for name, count, old, new in (*shown, ("all", "", before, after))
    ]
    return Table("Kernels, before and after", columns, cells, no_wrap=True)


def path_tables(found: CriticalPath, *, limit: int) -> list[Table]:
    """What the path consists of, and what would shorten it."""
    columns: Fields = {
        **{"on the path": "kind", "what": "name", "count": "count", "time": "seconds", "share": "share_frac"},
        "most on rank": lambda one: max(one.by_rank, key=lambda rank: one.by_rank[rank]),
    }
    title = f"The critical path through all ranks: {duration(found.span_s)}"
    shown = [records_table(title, found.pieces[:limit], columns, left=("on the path", "what"))]
    changes: Fields = {"change": "change", "then takes": "span_s", "gain": "gain_s", "of all": "gain_frac"}
    return shown + [records_table("What if", found.what_if[:limit], changes)] * bool(found.what_if)


def memory_tables(found: Sequence[MemoryPeak], *, limit: int) -> list[Table]:
    """The peaks of all ranks, and what was held at the largest."""
    columns: Fields = {
        **{"rank": "rank", "of": "device", "peak": "peak_bytes", "reserved then": "reserved_bytes"},
        **{"from before": "held_before_bytes", "after": "time_s", "in": "operator"},
    }
    most = max(found, key=lambda one: one.peak_bytes)
    title = f"Held at the largest peak (rank {most.rank}, {most.device})"
    holders: Fields = {"allocated by": "name", "tensors": "count", "bytes": "bytes"}
    peaks = records_table("Memory at its peak", found[:limit], columns, left=("rank", "of", "in"))
    return [peaks, records_table(title, most.holders[:_NUM_HOLDERS], holders)]


def rate_tables(found: Sequence[OpRate], *, limit: int) -> list[Table]:
    """What operators reach."""
    columns: Fields = {
        "operator": lambda one: short(one.op.removeprefix("aten::"), 24),
        "shape": lambda one: short(one.shape, 32),
        **{"dtype": "dtype", "calls": "count", "median": "median_s"},
        "FLOP/s": lambda one: cell_text("flop_per_s", one.flop_per_s) if one.flop else "",
        **{"bytes/s": "bytes_per_s", "of the roof": "roof_frac"},
    }
    return [records_table("Operators of known work", found[:limit], columns, left=tuple(columns)[:3])]


def bandwidth_tables(found: Sequence[Bandwidth], *, limit: int) -> list[Table]:
    """What collectives reach."""
    columns: Fields = {
        **{"collective": "name", "group": "group", "bytes": "bytes", "calls": "count", "wire": "wire_s"},
        **{"algorithm": "algorithm_bytes_per_s", "bus": "bus_bytes_per_s"},
        **{"link": "link", "of it": "link_frac", "predicted": "predicted_s"},
    }
    return [records_table("Collectives on the wire", found[:limit], columns, left=("collective", "group"))]
