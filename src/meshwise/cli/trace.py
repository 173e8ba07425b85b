"""`meshwise trace`: read, align, merge and analyse PyTorch (Kineto) traces of all ranks of a job."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwise import api
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import DataError
from meshwise.core.options import takes

if TYPE_CHECKING:
    import meshwise.machine.hardware as machine
    from meshwise.report.table import Table
    from meshwise.trace.summary import Summary

Slices = Annotated[int, range(1, 2**31)]


@takes(api.explain)
def explain(*, html: Path | None = None, json: bool = False, **asked: Any) -> None:
    """Say why a job's step takes longer than predicted. Its traces stand beside the estimate."""
    found = api.explain(**asked)
    write_html(found, html)
    if json:
        print_json(found.to_json())
    else:
        from meshwise.report.trace_table import print_explanation

        print_explanation(found, console())


def summary(
    paths: list[Path], *, steps: str = "", html: Path | None = None, json: bool = False, limit: int = 15
) -> None:
    """Show the time of each rank by kind, and what stands out.

    Steps, kernels, clocks, collectives, stragglers and findings.
    """
    from meshwise.trace.summary import summarize_paths

    found = summarize_paths(paths, steps=steps)
    if json:  # what is wrong with each file too, where none is readable
        print_json(found.to_json())
    found.check_readable()
    write_html(found, html)
    if not json:
        from meshwise.report.trace_table import print_summary

        print_summary(found, console(), limit=limit)


def merge(
    paths: list[Path],
    *,
    output: Path,
    max_slices: Slices | None = None,
    json: bool = False,
) -> None:
    """Write one timeline of all ranks, for ui.perfetto.dev. All ranks are on one clock.

    Args:
        output: Where to write (.json or .json.gz).
        max_slices: Keep sections, communication and the longest others.
    """
    from meshwise.trace.merge import write_merged

    found = _summarized(paths)
    done = write_merged(found.traces, found.alignment, found.collectives, output, max_slices=max_slices)
    if json:
        document = {"file": str(output), "num_ranks": len(found.traces), "num_slices": done.num_slices}
        document |= {"num_cut_slices": done.num_cut, "num_left_out": done.num_left_out}
        print_json(document | {"alignment": found.to_json()["alignment"]})
    else:
        cut = f"; {done.num_cut} slices cut where the next one starts" if done.num_cut else ""
        left_out = f"; {done.num_left_out} short slices left out" if done.num_left_out else ""
        print(f"{output}: {len(found.traces)} ranks, clocks by {found.alignment.method}{cut}{left_out}")


def plot(paths: list[Path], *, output: Path = Path("ranks.png"), json: bool = False) -> None:
    """Draw all ranks in one picture. What each did when, and why the slow one is slow.

    Args:
        output: Where to draw (.png, .svg, .pdf).
    """
    from meshwise.report.pages import draw

    found = _summarized(paths)
    draw(found, output)
    if json:
        print_json({"file": str(output), "findings": found.to_json()["findings"]})
    else:
        from meshwise.report.trace_table import print_findings

        print_findings(found.findings, console())
        print(f"{output}: {len(found.traces)} ranks")


def sections(paths: list[Path], *, json: bool = False, limit: int = 40) -> None:
    """Show the named sections of all ranks.

    Time, compute, communication and waiting inside; spread and straggler.
    """
    from meshwise.trace.sections import joint_sections
    from meshwise.trace.summary import all_sections

    rows = all_sections(_summarized(paths))
    if json:
        print_json(
            {"sections": [asdict(r) for r in rows], "joint": [asdict(r) for r in joint_sections(rows)]}
        )
    else:
        from meshwise.report.trace_table import print_joint

        print_joint(joint_sections(rows), console(), title="Sections of all ranks", limit=limit)


def path(paths: list[Path], *, steps: str = "", json: bool = False, limit: int = 12) -> None:
    """Show the critical path through all ranks.

    Also how much shorter the job would be if one thing were faster.
    """
    from meshwise.report.trace_details import path_tables
    from meshwise.trace.critical_path import critical_path

    found = critical_path(_summarized(paths, steps))
    _show(json, asdict(found), path_tables(found, limit=limit))


def memory(paths: list[Path], *, json: bool = False, limit: int = 12) -> None:
    """Show the peak of memory of each rank, and what held it. The operator that reached it is named."""
    from meshwise.report.trace_details import memory_tables
    from meshwise.trace.memory import memory_peaks

    found = memory_peaks(_summarized(paths).traces)
    if not found:
        raise DataError(
            "no allocation is recorded; capture with profile_memory=True, as meshwise profile does"
        )
    _show(json, {"peaks": [asdict(one) for one in found]}, memory_tables(found, limit=limit))


def launches(paths: list[Path], *, steps: str = "", json: bool = False, limit: int = 24) -> None:
    """Show how long kernels wait from launch to start. Also how many are queued, on each stream."""
    from meshwise.report.trace_details import launch_tables
    from meshwise.trace.launches import stream_launches

    found = stream_launches(_summarized(paths, steps).traces)
    if not found:
        raise DataError("no launch of a kernel is recorded; launches are those of a GPU's runtime")
    _show(json, {"streams": [asdict(one) for one in found]}, launch_tables(found, limit=limit))


def rates(
    paths: list[Path], *, cluster: str | None = None, steps: str = "", json: bool = False, limit: int = 20
) -> None:
    """Show the rates of operators by shape, against the chip's.

    FLOP and bytes a second of operators of known work; the roof is that of --cluster's chip.
    """
    from meshwise.report.trace_details import rate_tables
    from meshwise.trace.op_rates import op_rates

    traces, where = _summarized(paths, steps).traces, _cluster(cluster)
    found = op_rates(traces, where.chip if where else None)
    if not found:
        raise DataError("no operator of known work has its shapes recorded; capture with record_shapes=True")
    derived = ("flop_per_s", "bytes_per_s", "roof_frac")
    rows = [asdict(one) | {name: getattr(one, name) for name in derived} for one in found]
    _show(json, {"operators": rows}, rate_tables(found, limit=limit))


def bandwidth(
    paths: list[Path], *, cluster: str | None = None, steps: str = "", json: bool = False, limit: int = 20
) -> None:
    """Show the bandwidth of collectives by group and size.

    Algorithm and bus bandwidth, against the links of --cluster.
    """
    from meshwise.report.trace_details import bandwidth_tables
    from meshwise.trace.bandwidths import bandwidths

    found = bandwidths(_summarized(paths, steps).collectives, _cluster(cluster))
    if not found:
        raise DataError("no collective of known size was recorded by two ranks; give the traces of all ranks")
    _show(json, {"collectives": [asdict(one) for one in found]}, bandwidth_tables(found, limit=limit))


def report(
    paths: list[Path],
    *,
    output: Path = Path("report.html"),
    cluster: str | None = None,
    steps: str = "",
    json: bool = False,
) -> None:
    """Write all of it as one HTML file. Findings, pictures, critical path, what-if, memory, rates, tables.

    Args:
        output: Where to write (.html).
    """
    from meshwise.report.html import write_page
    from meshwise.report.trace_page import trace_page

    found = _summarized(paths, steps)
    write_page(trace_page(found, _cluster(cluster)), output)
    if json:
        print_json({"file": str(output), "num_ranks": len(found.traces)})
    else:
        print(f"{output}: {len(found.traces)} ranks")


def table(
    paths: list[Path],
    *,
    sort: str = "cpu",
    rank: int | None = None,
    json: bool = False,
    limit: int = 25,
) -> None:
    """Show the profiler's table of each rank, and of all. It has fourteen columns.

    Args:
        sort: cpu or cuda.
        rank: Only this rank [all, and their joint table].
    """
    from meshwise.report.profile_table import joint_lines, joint_operators, profile_lines
    from meshwise.trace.operators import operator_totals

    if sort not in ("cpu", "cuda"):
        raise DataError(f"--sort {sort} is unknown; use cpu or cuda")
    by: Literal["cpu", "cuda"] = "cpu" if sort == "cpu" else "cuda"
    traces = _summarized(paths).traces
    chosen = [trace for trace in traces if rank in (None, trace.rank)]
    if not chosen:
        raise DataError(f"no trace of rank {rank}; there are {', '.join(str(t.rank) for t in traces)}")
    rows = {trace.rank: operator_totals(trace) for trace in chosen}
    if json:
        ranks = {str(r): [asdict(row) for row in found] for r, found in rows.items()}
        print_json({"ranks": ranks, "joint": [asdict(row) for row in joint_operators(rows, sort_by=by)]})
        return
    for one, found in rows.items():
        print(f"{sort.upper()} time total (rank {one})\n")
        print("\n".join(profile_lines(found, sort_by=by, limit=limit)) + "\n")
    if len(rows) > 1:
        print(f"{sort.upper()} time total (all {len(rows)} ranks)\n")
        print("\n".join(joint_lines(joint_operators(rows, sort_by=by), limit=limit)))


def diff(paths: list[Path], *, json: bool = False, limit: int = 30) -> None:
    """Show what changed between two jobs or two traces. Kernels and rank times.

    Args:
        paths: Two trace files or folders, the earlier one first.
    """
    if len(paths) != 2:
        raise DataError(f"a difference is of two traces or folders of them, not of {len(paths)}; name two")
    before, after = paths
    from meshwise.trace.breakdown import breakdown
    from meshwise.trace.diff import kernel_changes

    old, new = _summarized([before]).traces, _summarized([after]).traces
    rows = kernel_changes(old, new)
    if json:
        print_json(
            {
                "kernels": [asdict(row) | {"change_s": row.change_s} for row in rows],
                "before": [asdict(breakdown(trace)) for trace in old],
                "after": [asdict(breakdown(trace)) for trace in new],
            }
        )
    else:
        from meshwise.report.trace_table import print_changes

        print_changes(rows, console(), limit=limit)


def ledger(paths: list[Path], *, csv: Path | None = None, json: bool = False) -> None:
    """List operators, kernels and collectives as ledger rows. Their origin is `profile`."""
    from meshwise.trace.rows import profile_ledger

    found = profile_ledger(_summarized(paths))
    if csv is not None:
        found.to_csv(csv)
    if json:
        print_json({"ledger": found.to_json()})
    elif csv is None:
        sys.stdout.write(found.to_csv())


def _show(json: bool, document: dict[str, Any], tables: list[Table]) -> None:
    """Print one JSON document or the tables."""
    if json:
        print_json(document)
    else:
        screen = console()
        for one in tables:
            screen.print(one)


def _cluster(text: str | None) -> machine.Cluster | None:
    from meshwise.machine.hardware import find_cluster

    return None if text is None else find_cluster(text)


def _summarized(paths: list[Path], steps: str = "") -> Summary:
    """The summary of `paths`, with its problems on stderr; DataError if nothing is readable."""
    from meshwise.trace.summary import summarize_paths

    found = summarize_paths(paths, steps=steps)
    found.check_readable()
    for problem in found.problems:
        print(f"meshwise: {problem.text}", file=sys.stderr)
    return found


COMMANDS = (
    summary, merge, plot, sections, path, memory, launches, rates, bandwidth, report, table, diff, ledger,
)  # fmt: skip
