"""The one-page answer about a set of traces: what `meshwise trace summary` prints.

Of many ranks it names those that differ from the rest, and what they have in common: a node, a rail, a stage.
For each quantity (compute, transfer, copies, waiting, idle) a rank is compared with the median rank. What a
group of ranks has in common is told once: a group stands out where its median lies farther from that of the
groups than `_SPREADS` (six standard deviations of the groups' medians, by their median deviation) and
`_SPAN_FRAC` of the span, and nearly all its ranks lie on that side. A rank stands out by what is left then.

    node     the ranks of one host (blocks of 8, where traces name no host)
    rail     the ranks that have the same place on their hosts: one network card or switch serves them
    stage    the ranks at the same place among ranks that send each other messages: a stage of the pipeline
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import by_key
from meshwise.core.errors import DataError
from meshwise.core.files import write_bytes
from meshwise.core.notebook import Shown
from meshwise.trace.align import Alignment, align
from meshwise.trace.breakdown import PARTS, Breakdown, Partition, RankIntervals, intervals, with_calls
from meshwise.trace.collectives import Collective, RankWaiting, collectives, ranks_named, stragglers
from meshwise.trace.columns import Traces
from meshwise.trace.events import FileProblem
from meshwise.trace.findings import Finding, RankFacts, findings, rank_facts
from meshwise.trace.match import linked, match
from meshwise.trace.operators import KernelTotal, Section, kernel_totals, sections
from meshwise.trace.read import read_traces
from meshwise.trace.steps import RankStep, common_steps, marks, with_steps

_SPREADS, _SPAN_FRAC, _MOSTLY = 6 * 1.4826, 0.02, 0.8
_LEAST_GROUPS = 3
_RANKS_PER_NODE = 8
Groups = dict[str, dict[str, list[int]]]
"""Ranks by the kind of group, and its name."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A rank or a group that spends more or less time on something than the others."""

    kind: str
    """rank, node, rail or stage."""
    name: str
    ranks: tuple[int, ...]
    part: str
    seconds: float
    """Of the rank, the median of a group; and of all ranks."""
    usual_s: float

    @property
    def excess_s(self) -> float:
        """By how much it is more."""
        return self.seconds - self.usual_s


def groupings(hosts: Mapping[int, str], found: Sequence[Collective]) -> Groups:
    """The ranks of every node, rail and stage, by its name."""
    if not any(hosts.values()):  # blocks of 8 where no trace names one
        hosts = {rank: str(rank // _RANKS_PER_NODE) for rank in hosts}
    nodes = by_key((host, rank) for rank, host in sorted(hosts.items()))
    rails = by_key((str(place), rank) for of in nodes.values() for place, rank in enumerate(of))
    pipelines = linked({one.members for one in found if one.name == "send_recv"})
    stages = by_key((str(place), rank) for of in pipelines for place, rank in enumerate(sorted(of)))
    return {"node": nodes, "rail": rails, "stage": stages}


def outliers(
    partitions: Sequence[Partition], hosts: Mapping[int, str], found: Sequence[Collective]
) -> list[Outlier]:
    """What stands out, the largest difference first; nothing where no rank could be read."""
    if not partitions:
        return []
    span_s = max(sum(one.seconds.values()) for one in partitions)
    place = {one.rank: i for i, one in enumerate(partitions)}
    groups = groupings(hosts, found)
    rows = (row for part in PARTS for row in _of_part(part, partitions, place, groups, span_s))
    return sorted(rows, key=lambda row: -abs(row.excess_s))


def _of_part(
    part: str, partitions: Sequence[Partition], place: Mapping[int, int], groups: Groups, span_s: float
) -> Iterator[Outlier]:
    seconds = np.array([one.seconds[part] for one in partitions])
    usual_s = float(np.median(seconds))
    left = seconds - usual_s
    for kind, members in groups.items():
        shared = {name: [place[rank] for rank in ranks if rank in place] for name, ranks in members.items()}
        shared = {name: at for name, at in shared.items() if len(at) > 1}
        if len(shared) < _LEAST_GROUPS:
            continue
        medians = np.array([np.median(left[at]) for at in shared.values()])
        for (name, at), is_far, median in zip(shared.items(), _far(medians, span_s), medians, strict=True):
            if is_far and (left[at] * np.sign(median) > abs(median) / 2).mean() >= _MOSTLY:
                ranks = tuple(rank for rank in members[name] if rank in place)
                yield Outlier(kind, name, ranks, part, float(np.median(seconds[at])), usual_s)
                left[at] -= median
    for rank, own_s, is_far in zip(place, seconds.tolist(), _far(left, span_s), strict=True):
        if is_far:
            yield Outlier("rank", str(rank), (rank,), part, own_s, usual_s)


def _far(values: NDArray[np.float64], span_s: float) -> NDArray[np.bool_]:
    """Which values lie far from their median, by their own spread and by the span."""
    apart = np.abs(values - np.median(values))
    return np.asarray(apart > max(_SPREADS * float(np.median(apart)), _SPAN_FRAC * span_s))


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Shown):
    """Ranks, kernels, clocks and collectives of one job, and what was wrong with its files."""

    traces: Traces
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
    origin_ns: int
    """The beginning of the job on the common clock."""
    hosts: dict[int, str]
    """Of each rank; empty text where its trace does not tell."""
    rows_in: ClassVar[str] = "ranks"

    @property
    def has_all_ranks(self) -> bool:
        """Whether no ranks were chosen, so that causes can be followed from rank to rank."""
        return len(self.ranks) == len(self.hosts)

    @property
    def outliers(self) -> list[Outlier]:
        """Ranks and groups of ranks that differ from the rest."""
        return outliers(self.partitions, self.hosts, self.collectives)

    def worst(self, num: int) -> list[int]:
        """The ranks that findings name, then those that others waited for longest; in the order of ranks."""
        few = [one.ranks for one in self.findings if len(one.ranks) < len(self.ranks)]
        awaited = [row.rank for row in sorted(self.stragglers, key=lambda row: -row.awaited_s)]
        others = [one.rank for one in self.ranks]
        return sorted(list(dict.fromkeys(itertools.chain(*few, awaited, others)))[:num])

    def of_ranks(self, ranks: Sequence[int]) -> Summary:
        """The same of some ranks alone: their traces and their part of each collective."""
        chosen = set(ranks)
        if unknown := chosen - {one.rank for one in self.ranks}:
            reason = "the ranks are those that summary lists"
            raise DataError(f"there is no trace of rank {min(unknown)}; {reason}")

        def within(values: dict[int, Any]) -> dict[int, Any]:
            return {rank: value for rank, value in values.items() if rank in chosen}

        calls = (
            replace(c, enter_s=within(c.enter_s), wait_s=within(c.wait_s), events=within(c.events))
            for c in self.collectives
        )
        return replace(
            self,
            traces=self.traces.chosen(chosen),
            ranks=[one for one in self.ranks if one.rank in chosen],
            partitions=[one for one in self.partitions if one.rank in chosen],
            collectives=[one for one in calls if one.wait_s],
            steps=[one for one in self.steps if one.breakdown.rank in chosen],
        )

    def intervals(self) -> Iterator[RankIntervals]:
        """When each rank did what, one after the other."""
        waits = waits_ns(self.collectives)
        return (intervals(trace, waits[trace.rank]) for trace in self.traces)

    def check_readable(self) -> None:
        """DataError if none of the files is a readable trace."""
        if not self.traces:
            reasons = "; ".join(one.text for one in self.problems[:3])
            raise DataError(f"no readable trace among the files: {reasons}; name PyTorch profiler traces")

    def rank_rows(self) -> list[dict[str, Any]]:
        """Where the time of each rank went, as JSON values."""
        rows: list[dict[str, Any]] = msgspec.to_builtins(self.ranks)
        for row, parts in zip(rows, self.partitions, strict=True):
            row["busy_frac"] = row["busy_s"] / row["span_s"] if row["span_s"] else None
            row |= {f"exposed_{part}_s": parts.seconds[part] for part in ("transfer", "wait")}
            row["host_bound_s"] = parts.host_bound_s
        return rows

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        names = ("findings", "ranks", "kernels", "stragglers", "steps", "outliers", "problems")
        document = {name: msgspec.to_builtins(getattr(self, name)) for name in names}
        document["ranks"] = self.rank_rows()
        calls: list[dict[str, Any]] = msgspec.to_builtins(self.collectives, str_keys=True)
        for call in calls:
            del call["events"], call["enter_s"], call["members"], call["alone_s"]
            call["step"] = None if call["step"] < 0 else call["step"]
        clocks = ("method", "residual_s", "offsets_s", "num_collectives")
        known = {name: getattr(self.alignment, name) for name in clocks}
        alignment = msgspec.to_builtins(known, str_keys=True)
        return document | {"alignment": alignment, "collectives": calls}


def summarize_paths(paths: Iterable[str | Path], *, steps: str = "") -> Summary:
    """The summary of the traces in `paths` (files or folders), of all their work or of some `steps`.

    `steps` is a range (`3-7`), one number, or `complete` (see `steps.with_steps`).
    """
    traces, problems = read_traces(paths)
    if traces.are_kept and not steps:
        return summarize_kept(traces, problems)
    summary = summarize(with_steps(traces, steps) if steps and traces else traces)
    return replace(summary, problems=problems + summary.problems)


_KEPT = {name: kind for name, kind in get_type_hints(Summary).items() if name not in ("traces", "rows_in")}
_Kept = msgspec.defstruct("_Kept", list(_KEPT.items()))
"""A summary as it is kept beside the columns: without the traces."""


def summarize_kept(traces: Traces, problems: list[FileProblem]) -> Summary:
    """The summary of traces whose columns are kept. It is kept too, until a trace or meshwise changes."""
    program = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("*/*.[pt]*[yl]")))
    file = traces.file_beside(program, ".summary") if traces else None
    if file is not None and file.exists():
        kept = msgspec.msgpack.decode(file.read_bytes(), type=_Kept)
        summary = Summary(traces, **{name: getattr(kept, name) for name in _KEPT})
    else:
        summary = summarize(traces)
        if file is not None and summary.traces is traces:
            write_bytes(file, msgspec.msgpack.encode({name: getattr(summary, name) for name in _KEPT}))
    return replace(summary, problems=problems + summary.problems)


def summarize(traces: Traces) -> Summary:
    """The summary of the traces of one job, one a rank: of the steps that all have, where some have more."""
    marked = marks(traces)
    if common := common_steps(marked):
        traces = with_steps(traces, common)
        marked = marks(traces)
    facts = traces.each(rank_facts, marked)
    hosts = {one.host for one in facts}
    one_host = len(hosts) == 1 and "" not in hosts
    matches = list(match({one.rank: one.transfers for one in facts}, one_host=one_host))
    kernels = all(one.breakdown.device == "gpu" for one in facts)
    alignment = align([one.rank for one in facts], matches, one_host=one_host, kernels=kernels)
    offsets = alignment.offsets_ns
    origin = min((one.first_ns - offsets[one.rank] for one in facts if one.first_ns is not None), default=0)
    found, num_unfit = collectives(matches, alignment, origin)
    steps = [*itertools.chain(*(one.steps for one in facts))]
    first_step = min((int(one.number[0]) for one in marked.values() if len(one.number)), default=-1)
    if first_step > 0 and {one.part for one in steps if one.number == first_step} == {"whole"}:
        first_step = -1  # it goes on with a job that has started
    measured = dict(zip(traces.ranks, traces.each(with_calls, waits_ns(found)), strict=True))
    partitions = [parts for parts, _ in measured.values()]
    calls = [replace(c, alone_s={r: measured[r][1][event] for r, event in c.events.items()}) for c in found]
    return Summary(
        traces=traces,
        ranks=[one.breakdown for one in facts],
        partitions=partitions,
        kernels=kernel_totals(itertools.chain(*(one.kernels for one in facts))),
        alignment=alignment,
        collectives=found,
        stragglers=stragglers(calls),
        findings=findings(facts, partitions, calls, first_step),
        problems=list(_of_the_job(facts, found, num_unfit, common)),
        steps=sorted(steps, key=lambda one: (one.number, one.breakdown.rank)),
        origin_ns=origin,
        hosts={one.rank: one.host for one in facts},
    )


def _of_the_job(
    facts: Sequence[RankFacts], found: Sequence[Collective], num_unfit: int, common: str
) -> Iterator[FileProblem]:
    """Ranks without a trace, where no more are missing than there are; what does not look like one job."""
    if common:
        yield FileProblem("", f"ranks recorded different steps; {common}, which all have, are what is shown")
    if num_unfit:
        reason = f"{num_unfit} collectives do not overlap in time across ranks; taken as unmatched, left out"
        yield FileProblem("", reason)
    sizes = Counter(one.world_size for one in facts if one.world_size)
    here = {one.rank for one in facts}
    usual = sizes.most_common(1)[0][0] if sizes else 0
    world = max(usual, max(here, default=-1) + 1)
    missing = sorted(set(range(world)) - here) if world <= 2 * len(here) else []
    if missing:
        shown = f"{ranks_named(missing)} of {world}"
        yield FileProblem("", f"there is no trace of {shown}; what was done there is not known")
    for one in facts:
        if len(sizes) > 1 and one.world_size not in (None, usual):
            yield FileProblem(one.path, f"rank {one.rank} is of {one.world_size} ranks, others not")
    alone = sum(one.num_ranks < len(here.intersection(one.members)) for one in found)
    if 10 * alone > len(found):
        yield FileProblem("", f"{alone} of {len(found)} collectives were not found on all their ranks")
    met = {rank for one in found for rank in one.wait_s}
    for one in facts if met else ():
        if one.rank not in met:
            yield FileProblem(one.path, f"rank {one.rank} has no collective, others have; is it of this job?")


def waits_ns(found: Sequence[Collective]) -> dict[int, dict[int, int]]:
    """Of each rank the waiting inside each communication, by the number of its event."""
    waits: dict[int, dict[int, int]] = defaultdict(dict)
    for one in found:
        for rank, event in one.events.items():
            waits[rank][event] = round(one.wait_s[rank] * 1e9)
    return waits


def all_sections(summary: Summary) -> list[Section]:
    """The sections of every rank, their communication split into transfer and waiting."""
    found = summary.traces.each(sections, waits_ns(summary.collectives))
    return [row for rows in found for row in rows]
