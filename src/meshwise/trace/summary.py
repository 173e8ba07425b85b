"""The one-page answer about a set of traces: what `meshwise trace summary` prints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from meshwise.core.errors import DataError
from meshwise.core.notebook import Shown
from meshwise.trace.align import Alignment, align, undrifted
from meshwise.trace.breakdown import Breakdown, breakdown
from meshwise.trace.collectives import Collective, RankWaiting, collectives, stragglers
from meshwise.trace.events import FileProblem, Trace
from meshwise.trace.findings import Finding, findings
from meshwise.trace.kernels import KernelTotal, kernel_totals
from meshwise.trace.match import Match, match
from meshwise.trace.partition import Partition, partition
from meshwise.trace.read import read_traces
from meshwise.trace.sections import Section, sections
from meshwise.trace.steps import Marks, RankStep, marks, step_table, with_steps
from meshwise.trace.transfers import transfers


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Shown):
    """Ranks, kernels, clocks and collectives of one job, and what was wrong with its files."""

    traces: Sequence[Trace]
    ranks: list[Breakdown]
    partitions: list[Partition]
    kernels: list[KernelTotal]
    alignment: Alignment
    collectives: list[Collective]
    stragglers: list[RankWaiting]
    findings: list[Finding]
    problems: list[FileProblem]
    steps: list[RankStep]
    """The marked steps of all ranks, by number."""
    rows_in: ClassVar[str] = "ranks"

    def check_readable(self) -> None:
        """DataError if none of the files is a readable trace."""
        if not self.traces:
            reasons = "; ".join(one.text for one in self.problems[:3])
            raise DataError(f"no readable trace among the files: {reasons}; name PyTorch profiler traces")

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return {
            "findings": msgspec.to_builtins(self.findings),
            "ranks": [
                msgspec.to_builtins(rank)
                | {
                    "busy_frac": rank.busy_s / rank.span_s if rank.span_s else None,
                    "exposed_transfer_s": parts.seconds["transfer"],
                    "exposed_wait_s": parts.seconds["wait"],
                    "host_bound_s": parts.host_bound_s,
                }
                for rank, parts in zip(self.ranks, self.partitions, strict=True)
            ],
            "kernels": msgspec.to_builtins(self.kernels),
            "alignment": {
                "method": self.alignment.method,
                "residual_s": self.alignment.residual_s,
                "offsets_s": {str(rank): offset for rank, offset in self.alignment.offsets_s.items()},
                "num_collectives": self.alignment.num_collectives,
                "drift_ppm": {str(rank): 1e6 * drift for rank, drift in self.alignment.drift.items()},
            },
            "collectives": [_collective_json(one) for one in self.collectives],
            "stragglers": msgspec.to_builtins(self.stragglers),
            "steps": msgspec.to_builtins(self.steps),
            "problems": msgspec.to_builtins(self.problems),
        }


def _collective_json(one: Collective) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(one, str_keys=True)
    del row["events"], row["enter_s"], row["members"]
    return row | {"step": None if one.step < 0 else one.step}


def summarize_paths(paths: Iterable[str | Path], *, steps: str = "") -> Summary:
    """The summary of the traces in `paths` (files or folders), of all their work or of some `steps`.

    `steps` is a range (`3-7`), one number, or `complete` (see `steps.with_steps`).
    """
    traces, problems = read_traces(paths)
    summary = summarize(with_steps(traces, steps) if steps and traces else traces)
    return replace(summary, problems=problems + summary.problems)


def summarize(traces: Sequence[Trace]) -> Summary:
    """The summary of the traces of one job, one trace a rank."""
    if not traces:
        return Summary([], [], [], [], Alignment("no rank", {}, None, 0), [], [], [], [], [])
    marked = marks(traces)
    hosts = {trace.host for trace in traces}
    one_host = len(hosts) == 1 and "" not in hosts
    matches, alignment = _aligned(traces, marked, one_host)
    if drift := alignment.drift:
        traces = [undrifted(trace, drift[trace.rank]) for trace in traces]
        marked = marks(traces)
        matches, alignment = _aligned(traces, marked, one_host)
        alignment = replace(alignment, drift=drift)
    origin = min((int(t.start_ns[0]) - alignment.offsets_ns[t.rank] for t in traces if len(t)), default=0)
    found, num_unfit = collectives(matches, alignment, origin)
    problems = []
    if num_unfit:
        reason = f"{num_unfit} collectives do not overlap in time across ranks; taken as unmatched, left out"
        problems.append(FileProblem("", reason))
    problems += _of_the_job(traces, found)
    first_step = min((int(one.number[0]) for one in marked.values() if len(one.number)), default=-1)
    waits = waits_ns(found)
    partitions = [partition(trace, waits[trace.rank]) for trace in traces]
    return Summary(
        traces=traces,
        ranks=[breakdown(trace) for trace in traces],
        partitions=partitions,
        kernels=kernel_totals(traces),
        alignment=alignment,
        collectives=found,
        stragglers=stragglers(found),
        findings=findings(traces, partitions, found, first_step),
        problems=problems,
        steps=sorted(
            (step for trace in traces for step in step_table(trace, marked[trace.rank])),
            key=lambda step: (step.number, step.breakdown.rank),
        ),
    )


def _aligned(
    traces: Sequence[Trace], marked: Mapping[int, Marks], one_host: bool
) -> tuple[list[Match], Alignment]:
    """The communications of all ranks, matched, and the ranks' clocks."""
    matches = match({trace.rank: transfers(trace, marked[trace.rank]) for trace in traces}, one_host=one_host)
    kernels = all(trace.has_device for trace in traces)
    return matches, align([t.rank for t in traces], matches, one_host=one_host, kernels=kernels)


def _of_the_job(traces: Sequence[Trace], found: Sequence[Collective]) -> Iterator[FileProblem]:
    """Ranks without a trace, where fewer are missing than there are; what does not look like one job."""
    sizes = Counter(trace.world_size for trace in traces if trace.world_size)
    here = {trace.rank for trace in traces}
    world = max(sizes.most_common(1)[0][0] if sizes else 0, max(here) + 1)
    missing = sorted(set(range(world)) - here) if world < 2 * len(here) else []
    if missing:
        shown = ", ".join(map(str, missing[:6])) + (", ..." if len(missing) > 6 else "")
        yield FileProblem("", f"there is no trace of rank {shown} of {world}; what it did is not known")
    for trace in traces:
        if len(sizes) > 1 and trace.world_size not in (None, sizes.most_common(1)[0][0]):
            yield FileProblem(
                str(trace.path), f"rank {trace.rank} is of {trace.world_size} ranks, others not"
            )
    met = {rank for one in found for rank in one.wait_s}
    for trace in traces if met else ():
        if trace.rank not in met:
            yield FileProblem(
                str(trace.path), f"rank {trace.rank} has no collective, others have; is it of this job?"
            )


def waits_ns(found: Sequence[Collective]) -> dict[int, dict[int, int]]:
    """Of each rank the waiting inside each communication, by the number of its event."""
    waits: dict[int, dict[int, int]] = defaultdict(dict)
    for one in found:
        for rank, event in one.events.items():
            waits[rank][event] = round(one.wait_s[rank] * 1e9)
    return waits


def all_sections(summary: Summary) -> list[Section]:
    """The sections of every rank, their communication split into transfer and waiting."""
    waits = waits_ns(summary.collectives)
    return [row for trace in summary.traces for row in sections(trace, waits[trace.rank])]
