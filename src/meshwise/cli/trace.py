"""`meshwise trace` and `explain`: what the PyTorch (Kineto) traces of all ranks of a job show.

A verb of `trace` is a function of the summary of the traces. It returns its JSON document and what people
read, tables and sentences; `_of_traces` makes it a command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from meshwise import api
from meshwise.cli.output import on_nodes, print_answer, print_json, show, write_rows
from meshwise.cli.programs import is_command
from meshwise.core.errors import DataError
from meshwise.core.options import stated_in, takes
from meshwise.core.refusals import refuse

if TYPE_CHECKING:
    import meshwise.machine.hardware as machine
    from meshwise.report.table import Table
    from meshwise.trace.summary import Summary

    Found = tuple[dict[str, Any], Iterable[Table | str]]

Count = Annotated[int, range(1, 2**31)]


@takes(api.explain, optional=("traces",), without=("command",))
def explain(
    *,
    rl_log: Path | None = None,
    source: Path | None = None,
    ray: str = "",
    html: Path | None = None,
    json: bool = False,
    limit: Count = 15,
    all: bool = False,
    **asked: Any,
) -> None:
    """Say why a job's step takes longer than predicted. Its traces stand beside the estimate.

    Without a model, behind the traces and `--`, the program that ran (`python train.py ...`): then the
    prediction is its dry run.

    Args:
        rl_log: Instead of traces, the step log of a post-training job of verl or NeMo-RL.
        source: The recipe or script of that job.
    """
    if rl_log is not None or source is not None:
        _explain_rl(rl_log, source, asked, json=json)
        return
    words = [*map(str, asked.pop("traces") or ())]
    are_traces = [Path(word).is_dir() or ".json" in word or not is_command(word) for word in words]
    begin = [*are_traces, False].index(False)
    refuse("explained traces", DataError, traces=words[:begin])
    with on_nodes(ray, "ranks"):
        found = api.explain(words[:begin], command=words[begin:], **asked)
    show(found, json=json, html=html, limit=limit, everything=all)


def _explain_rl(rl_log: Path | None, source: Path | None, asked: dict[str, Any], *, json: bool) -> None:
    """Print the step log of a post-training job beside the prediction."""
    others = [name for name in stated_in(asked, api.explain) if name not in ("model", "cluster")]
    refuse("step log", DataError, rl_log=rl_log, others=others, first=[*others, "it"][0])
    assert rl_log is not None
    show(api.explain_rl(rl_log, asked["model"], asked["cluster"], source), json=json)


def summary(
    paths: list[Path],
    *,
    steps: str = "",
    ray: str = "",
    html: Path | None = None,
    json: bool = False,
    limit: Count = 15,
    all: bool = False,
) -> None:
    """Say which rank is late and why, and where the time went.

    Who waits for whom; with --all also steps, collectives and clocks.
    """
    from meshwise.trace.summary import summarize_paths

    with on_nodes(ray, "ranks"):
        found = summarize_paths(paths, steps=steps)
    if json and not found.traces:
        print_json(found.to_json())  # what is wrong with each file
    found.check_readable()
    show(found, json=json, html=html, limit=limit, everything=all)


def merge(found: Summary, *, out: Path, max_slices: Count | None = None) -> Found:
    """Write one timeline of all ranks, for ui.perfetto.dev. All ranks are on one clock.

    Args:
        out: Where to write (.json or .json.gz).
        max_slices: Keep sections, communication and the longest others.
    """
    from meshwise.trace.merge import write_merged

    done = write_merged(found, out, max_slices=max_slices)
    document = {"file": str(out), "num_ranks": len(found.traces), "num_slices": done["slices"]}
    document |= {"num_cut_slices": done["cut"], "num_left_out": done["left out"]}
    cut = f"; {done['cut']} slices cut where the next one starts" if done["cut"] else ""
    left_out = f"; {done['left out']} short slices left out" if done["left out"] else ""
    text = f"{out}: {len(found.traces)} ranks, clocks: {found.alignment.method}{cut}{left_out}"
    return document | {"alignment": found.to_json()["alignment"]}, [text]


def plot(found: Summary, *, out: Path = Path("ranks.png")) -> Found:
    """Draw all ranks in one picture. What each did when, and why the slow one is slow.

    Args:
        out: Where to draw (.png, .svg, .pdf).
    """
    from meshwise.report.pages import draw
    from meshwise.report.trace import headline

    draw(found, out)
    document = {"file": str(out), "findings": found.to_json()["findings"]}
    return document, [headline(found), f"{out}: {len(found.traces)} ranks"]


def report(found: Summary, *, out: Path = Path("report.html"), cluster: str | None = None) -> Found:
    """Write all of it as one HTML file. Findings, pictures, critical path, memory, rates, tables.

    Args:
        out: Where to write (.html).
    """
    from meshwise.report.html import write_page
    from meshwise.report.trace import page

    write_page(page(found, _cluster(cluster)), out)
    return {"file": str(out), "num_ranks": len(found.traces)}, [f"{out}: {len(found.traces)} ranks"]


def sections(found: Summary, *, limit: Count = 15) -> Found:
    """Show the named sections of all ranks.

    Time, compute, communication and waiting inside; spread and straggler.
    """
    from meshwise.report.trace import joint_table
    from meshwise.trace.operators import joint_sections
    from meshwise.trace.summary import all_sections

    rows = all_sections(found)
    joint = joint_sections(rows)
    document = {"sections": list(map(asdict, rows)), "joint": list(map(asdict, joint))}
    return document, [joint_table(joint, "Sections of all ranks", limit=limit)]


def path(found: Summary, *, limit: Count = 15) -> Found:
    """Show the critical path through all ranks. What decides when the job ends, longest first."""
    from meshwise.report.trace import path_table
    from meshwise.trace.critical_path import critical_path

    refuse("critical path", DataError, found=found)
    critical = critical_path(found)
    return asdict(critical), [path_table(critical, limit=limit)]


def memory(found: Summary, *, limit: Count = 15) -> Found:
    """Show the peak of memory of each rank, and what held it. The operator that reached it is named."""
    from meshwise.report.trace import memory_tables
    from meshwise.trace.memory import memory_peaks

    missing = "no allocation is recorded; capture with profile_memory=True, as meshwise profile does"
    peaks = _some(memory_peaks(found.traces), missing)
    return {"peaks": list(map(asdict, peaks))}, memory_tables(peaks, limit=limit)


def rates(found: Summary, *, cluster: str | None = None, limit: Count = 15) -> Found:
    """Show the rates of operators by shape, against the chip's.

    FLOP and bytes a second of operators of known work; the roof is that of --cluster's chip.
    """
    from meshwise.report.trace import rate_tables
    from meshwise.trace.rates import op_rates

    where = _cluster(cluster)
    missing = "no operator of known work has its shapes recorded; capture with record_shapes=True"
    rows = _some(op_rates(found.traces, where.chip if where else None), missing)
    derived = ("flop_per_s", "bytes_per_s", "roof_frac")
    document = [asdict(one) | {name: getattr(one, name) for name in derived} for one in rows]
    return {"operators": document}, rate_tables(rows, limit=limit)


def bandwidth(found: Summary, *, cluster: str | None = None, limit: Count = 15) -> Found:
    """Show the bandwidth of collectives by group and size.

    Algorithm and bus bandwidth, against the links of --cluster.
    """
    from meshwise.report.trace import bandwidth_tables
    from meshwise.trace.rates import bandwidths

    missing = "no collective of known size was recorded by two ranks; give the traces of all ranks"
    rows = _some(bandwidths(found.collectives, _cluster(cluster)), missing)
    return {"collectives": list(map(asdict, rows))}, bandwidth_tables(rows, limit=limit)


def table(found: Summary, *, sort: Literal["cpu", "cuda"] = "cpu", limit: Count = 15) -> Found:
    """Show the profiler's table of each rank, and of all.

    Args:
        sort: cpu or cuda.
    """
    from meshwise.report.trace import joint_table, profile_table
    from meshwise.trace.operators import joint_operators, operator_totals

    rows = {trace.rank: operator_totals(trace) for trace in found.traces}
    joint = joint_operators(rows, sort_by=sort)
    title = f"{sort.upper()} time total"
    tables = [profile_table(of, f"{title} (rank {i})", sort_by=sort, limit=limit) for i, of in rows.items()]
    if len(rows) > 1:
        tables.append(joint_table(joint, f"{title} (all {len(rows)} ranks)", limit=limit))
    document = {str(one): list(map(asdict, own)) for one, own in rows.items()}
    return {"ranks": document, "joint": list(map(asdict, joint))}, tables


def diff(paths: list[Path], *, ray: str = "", json: bool = False, limit: Count = 15) -> None:
    """Show what changed between two jobs or two traces. A step of the mean rank, kernels, and who is late.

    Args:
        paths: Two trace files or folders, the earlier one first.
    """
    from meshwise.report.trace import change_parts
    from meshwise.trace.difference import difference

    refuse("difference of traces", DataError, num=len(paths))
    with on_nodes(ray, "ranks"):
        old, new = (_summarized([path]) for path in paths)
        found = difference(old, new)
    rows = {"before": old.rank_rows(), "after": new.rank_rows(), "findings": [*map(asdict, new.findings)]}
    print_answer(asdict(found) | rows, change_parts(old, new, found, limit), json=json)


def ledger(
    paths: list[Path], *, steps: str = "", ray: str = "", csv: Path | None = None, json: bool = False
) -> None:
    """List operators, kernels and collectives as ledger rows. Their origin is `profile`."""
    from meshwise.trace.rows import profile_ledger

    with on_nodes(ray, "ranks"):
        found = profile_ledger(_summarized(paths, steps))
    if csv is not None:
        found.to_csv(csv)
    if json:
        print_json({"ledger": found.to_json()})
    elif csv is None:
        sys.stdout.write(found.to_csv())


def query(
    words: list[str], *, ray: str = "", csv: Path | None = None, json: bool = False, limit: Count = 30
) -> None:
    """Select rows of all ranks by SQL.

    Tables: events, collectives (a row for each rank of each call), steps, kernels, ranks.

    Args:
        words: Trace files or folders of them, and last the query.
    """
    from meshwise.report.table import Table, cell_text
    from meshwise.trace.rows import query as rows_of

    verb = re.sub(r"/\*.*?\*/|--[^\n]*", " ", words[-1], flags=re.DOTALL).split()[:1]
    refuse("query of traces", DataError, num=len(words), verb="".join(verb).upper())
    with on_nodes(ray, "ranks"):
        found = rows_of(words[:-1], words[-1])
    write_rows(csv, [found.columns, *found.iter_rows()])
    if json or csv is None:
        shown = [[*map(cell_text, found.columns, row)] for row in found.head(limit).iter_rows()]
        table = Table(f"{len(shown)} of {len(found)} rows", found.columns, shown)
        document = {"columns": found.columns, "rows": [list(row) for row in found.iter_rows()]}
        print_answer(document, [table], json=json)


def _of_traces(work: Callable[..., Found]) -> Callable[..., None]:
    """The command that prints what `work` makes of the summary of traces."""

    def verb(
        paths: list[Path],
        *,
        steps: str = "",
        ranks: str = "",
        ray: str = "",
        json: bool = False,
        **asked: Any,
    ) -> None:
        with on_nodes(ray, "ranks"):
            found = _summarized(paths, steps)
            document, parts = work(found.of_ranks(_chosen(found, ranks)) if ranks else found, **asked)
            parts = list(parts)
        print_answer(document, parts, json=json)

    verb.__name__, verb.__doc__ = work.__name__, work.__doc__
    return takes(work, without=("found",))(verb)


def _summarized(paths: list[Path], steps: str = "") -> Summary:
    """The summary of `paths`, with its problems on stderr; DataError if nothing is readable."""
    from meshwise.trace.summary import summarize_paths

    found = summarize_paths(paths, steps=steps)
    found.check_readable()
    for problem in found.problems:
        print(f"meshwise: {problem.text}", file=sys.stderr)
    return found


def _chosen(found: Summary, text: str) -> list[int]:
    """The ranks that `--ranks` names: 0-7,12, or worst:8."""
    if worst := re.fullmatch(r"worst:([1-9]\d{0,5})", text):
        return found.worst(int(worst[1]))
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        raise DataError(f"--ranks {text}: write 0-7,12, or worst:8 for those that others wait for longest")
    ends = [[*map(int, word.split("-"))] for word in text.split(",")]
    return [rank for first, *last in ends for rank in range(first, max(last, default=first) + 1)]


def _some(rows: Sequence[Any], missing: str) -> Sequence[Any]:
    """The rows; DataError where there is none, which says what is missing."""
    if not rows:
        raise DataError(missing)
    return rows


def _cluster(text: str | None) -> machine.Cluster | None:
    from meshwise.machine.hardware import find_cluster

    return None if text is None else find_cluster(text)


_OF_TRACES: tuple[Callable[..., Found], ...]
_OF_TRACES = (merge, plot, sections, path, memory, rates, bandwidth, report, table)
COMMANDS = (summary, *map(_of_traces, _OF_TRACES), diff, ledger, query)
