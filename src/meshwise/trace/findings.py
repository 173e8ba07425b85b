"""What is wrong with a job, in words: who holds the others up and why, what link is slow, what is exposed.

Who holds the others up follows from the waiting (see `straggler`). What such a rank has more of than the
median of the others names the cause:

    compute     the same kernels, each slower: its device is slow. More or other kernels: its share is larger
    idle        its host launches late (or pauses once)
    transfer    a link of its group is slow: the wire time of one kind of call, by group, at equal size
    memory      copies

A rank that was ready to run for as long as it was late, and had no core (`meshwise profile` notes it), is no
slow rank: the ranks share cores. All ranks together are judged by their mean: idle time that the host is the
cause of, and communication that no compute hides. Each finding states the seconds it is about and, as a
share, how much of the span.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.files import read_catalog
from meshwise.core.units import duration, with_prefix
from meshwise.trace.breakdown import PARTS, Breakdown, Partition, breakdown
from meshwise.trace.collectives import Collective, ranks_text, split_by_fastest, stragglers
from meshwise.trace.events import Trace
from meshwise.trace.operators import KernelTotal, kernels_of
from meshwise.trace.steps import Marks, RankStep, step_table
from meshwise.trace.straggler import LateRanks, holders_up
from meshwise.trace.transfers import Transfer, transfers

_TEXTS = read_catalog("findings.toml")
_CAUSES = _TEXTS["causes"]
_MIN_FRAC = 0.02
"""A finding about single ranks or groups is worth at least this share of the span."""
_SLOW_LINK, _SLOW_LINK_OF_TWO = 0.8, 0.67
_UNCERTAIN_LINK = "slow link or missing rank"
_HOST_BOUND_FRAC = 0.1
_EXPOSED_FRAC = 0.15
_MOSTLY = 0.5
_SHARED_CORES = 0.8
"""How much of the time in which only this rank had no core counts as lateness."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank: where it ran, the time of its work, kernels, steps and communications.

    Small beside its events, so thousands of ranks fit in memory.
    """

    rank: int
    path: str
    host: str
    world_size: int | None
    has_device: bool
    first_ns: int | None
    """The start of its first event on its own clock."""
    captured: dict[str, Any]
    """What meshwise's capture noted of the rank; empty where something else captured it."""
    breakdown: Breakdown
    kernels: list[KernelTotal]
    steps: list[RankStep]
    transfers: list[Transfer]


def rank_facts(trace: Trace, marked: Marks) -> RankFacts:
    """The facts of one rank, its steps as they are marked."""
    captured = trace.metadata.get("meshwise")
    return RankFacts(
        rank=trace.rank,
        path=str(trace.path),
        host=trace.host,
        world_size=trace.world_size,
        has_device=trace.has_device,
        first_ns=int(trace.start_ns[0]) if len(trace) else None,
        captured=captured if isinstance(captured, dict) else {},
        breakdown=breakdown(trace),
        kernels=kernels_of(trace),
        steps=step_table(trace, marked),
        transfers=transfers(trace, marked),
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time; `seconds` of the span, once (not summed over ranks)."""

    kind: str
    ranks: tuple[int, ...]
    group: str
    seconds: float
    span_frac: float
    text: str


@dataclass(frozen=True, slots=True)
class _TracedJob:
    """What findings are made from; `span_s` is that of the longest rank."""

    facts: Sequence[RankFacts]
    partitions: Sequence[Partition]
    collectives: Sequence[Collective]
    span_s: float

    def finding(
        self, kind: str, text: str, seconds: float, ranks: Iterable[int] = (), group: str = ""
    ) -> Finding:
        """A finding about `seconds` of the span; of all ranks, of their mean span."""
        found, every = tuple(ranks), len(self.partitions)
        span_s = self.mean_s(*PARTS) if len(found) == every > 1 else self.span_s
        return Finding(kind, found, group, seconds, seconds / span_s, text)

    def mean_s(self, *parts: str) -> float:
        """Seconds of `parts` in sum, the mean over the ranks."""
        return float(np.mean([sum(one.seconds[part] for part in parts) for one in self.partitions]))

    def more_s(self, part: str, i: int) -> float:
        """By how much rank number `i` spends more time on a part than the median of the others."""
        seconds = [one.seconds[part] for one in self.partitions]
        return seconds[i] - float(np.median(np.delete(seconds, i)))


def findings(
    facts: Sequence[RankFacts],
    partitions: Sequence[Partition],
    collectives: Sequence[Collective],
    first_step: int = -1,
) -> list[Finding]:
    """All findings about one job: those about single ranks and links first, the costliest first.

    `first_step` is that of the job, whatever steps were chosen; -1 where none is marked.
    """
    span_s = max((sum(one.seconds.values()) for one in partitions), default=0.0)
    if not span_s:
        return []
    job = _TracedJob(facts, partitions, split_by_fastest(collectives), span_s)
    late, undecided = holders_up(job.collectives, first_step)
    links = _slow_links(job)
    linked = {rank for link in links for rank in link.ranks}
    unseen = {rank for one in job.collectives if one.num_ranks < (one.group_size or 0) for rank in one.wait_s}
    holders = [_holder(job, one) for one in late if one.seconds >= _MIN_FRAC * span_s]

    def is_told(one: Finding) -> bool:
        """Whether a slow link or a rank without a trace is why."""
        of_link = one.kind == "slow transfer" and not (linked | unseen).isdisjoint(one.ranks)
        return of_link or (len(one.ranks) > 1 and linked.issuperset(one.ranks))

    holders = [one for one in holders if not is_told(one)]
    single = sorted([*holders, *links], key=lambda one: (one.kind == _UNCERTAIN_LINK, -one.seconds))
    return [*(single or _undecided(job, undecided)), *_host_bound(job), *_exposed(job, named=bool(single))]


def _undecided(job: _TracedJob, reason: str) -> list[Finding]:
    """That nobody is named although ranks wait: steps are too few, or messages do not tell their ends."""
    if reason and (waited_s := job.mean_s("wait")) >= _EXPOSED_FRAC * job.span_s:
        most = max(stragglers(job.collectives), key=lambda row: row.awaited_s)
        waited, awaited = duration(waited_s), duration(most.awaited_s)
        text = _TEXTS["few_steps"].format(waited=waited, most=most, awaited=awaited, reason=reason)
        return [job.finding("undecided", text, waited_s)]
    unnamed = any(one.name == "send_recv" and "->" not in one.group for one in job.collectives)
    exposed_s = job.mean_s("wait", "transfer")
    if len(job.partitions) < 2 or not unnamed or exposed_s < _EXPOSED_FRAC * job.span_s:
        return []
    text = _TEXTS["unnamed_ends"].format(exposed=duration(exposed_s))
    return [job.finding("undecided", text, exposed_s)]


def _holder(job: _TracedJob, late: LateRanks) -> Finding:
    """What the first (of several, the slowest) rank has more of than the others, in words."""
    index = {part.rank: i for i, part in enumerate(job.partitions)}

    def own_s(rank: int) -> float:
        return sum(s for part, s in job.partitions[index[rank]].seconds.items() if part != "wait")

    worst = max(late.ranks, key=own_s)
    if why := _shared_cores(job.facts, worst, late):
        return job.finding("shared cores", why, late.seconds)
    who = f"rank {worst} is" if len(late.ranks) == 1 else f"ranks {ranks_text(late.ranks)} are"
    seconds = min(late.seconds, job.span_s)
    if late.is_pause:
        frac, start = seconds / job.span_s, duration(late.start_s)
        kind, text = "pause", _TEXTS["pause"].format(who=who, late=duration(seconds), frac=frac, start=start)
    else:
        kind, why = _cause(job, index[worst])
        each, step = duration(min(late.each_s, late.step_s)), duration(late.step_s)
        text = _TEXTS["late"].format(who=who, late=late, each=each, step=step, why=why)
        text += f"; most of all rank {worst}" * (len(late.ranks) > 1)
    return job.finding(kind, text, seconds, late.ranks)


def _cause(job: _TracedJob, i: int) -> tuple[str, str]:
    """What rank number `i` spends more time on than the median of the other ranks."""
    more_s = {part: job.more_s(part, i) for part in PARTS if part != "wait"}
    part = max(more_s, key=lambda key: more_s[key])
    if part == "compute":
        return _why_compute(job.facts, i)
    one = job.partitions[i]
    if part == "idle" and (one.host_bound_s or 0.0) > _MOSTLY * one.seconds["idle"]:
        return "slow host", _CAUSES["slow_host"]
    kinds = {"idle": "idle", "transfer": "slow transfer", "memory": "copies"}
    return kinds[part], _CAUSES[part].format(more=duration(more_s[part]))


def _why_compute(facts: Sequence[RankFacts], i: int) -> tuple[str, str]:
    """Whether rank number `i` computes the same more slowly, or computes more."""
    totals = [{run.name: run for run in of.kernels if run.kind == "compute"} for of in facts]
    names = sorted({name for total in totals for name in total})
    counts, sums = (
        np.array([[float(getattr(total[n], of)) if n in total else 0.0 for n in names] for total in totals])
        for of in ("count", "total_s")
    )
    own, own_s, others, others_s = counts[i], sums[i], np.delete(counts, i, 0), np.delete(sums, i, 0)
    means_s = np.ma.masked_where(others == 0, others_s / np.maximum(others, 1))
    mean_s = np.ma.median(means_s, axis=0).filled(0.0)
    usual, is_more, is_new = np.median(others, axis=0), own > np.median(others, axis=0) * 1.01, mean_s == 0
    more_s = own_s[is_new].sum() + (mean_s * (own - usual))[is_more].sum()
    slower_s = (own_s - mean_s * own)[~is_more & ~is_new].sum()
    if more_s > slower_s:
        return "more work", _CAUSES["more_work"].format(more=duration(float(more_s)))
    usual_s = (mean_s * np.minimum(usual, own)).sum()
    ratio = 1 + slower_s / usual_s if usual_s else 1.0
    is_large = (own_s >= _MIN_FRAC * own_s.sum()) & ~is_new & (own > 0)
    ratios = own_s[is_large] / own[is_large] / mean_s[is_large]
    if len(ratios) > 1 and ratios.min() > 1 + 0.5 * (ratio - 1):
        return "slow device", _CAUSES["slow_device"].format(ratio=ratio)
    name = names[int((own_s - np.median(others_s, axis=0)).argmax())]
    name = name if len(name) <= 50 else f"{name[:49]}…"
    return "larger work", _CAUSES["larger_work"].format(name=name)


def _shared_cores(facts: Sequence[RankFacts], rank: int, late: LateRanks) -> str:
    """In a sentence, that want of a core explains why `rank` was late; empty where it does not.

    A pause, if it lacked cores for as long in all; lateness in every step, if it lacked them for longer than
    another rank, by most of that time.
    """
    noted = {one.rank: one.captured for one in facts if "num_cores" in one.captured}
    if rank not in noted or len(noted) < 2:
        return ""
    lacked_s = {one: float(found.get("core_wait_s") or 0.0) for one, found in noted.items()}
    own_s, others_s = lacked_s.pop(rank), min(lacked_s.values())
    if (own_s if late.is_pause else (own_s - others_s) / _SHARED_CORES) < late.seconds:
        return ""
    told: dict[str, Any] = {"rank": rank, "ranks": len(noted), "cores": noted[rank]["num_cores"]}
    told |= {"late": duration(late.seconds), "own": duration(own_s), "others": duration(others_s)}
    return str(_TEXTS["shared_cores"].format(**told))


def _slow_links(job: _TracedJob) -> list[Finding]:
    """Groups whose calls of one kind and size move fewer bytes a second than those of most alike groups.

    Alike are groups with the same strides between their ranks on as many hosts (nodes of 8, if none is told).

    A slow link costs what it adds to the time on the wire, and no more than what of that no compute hides.
    """
    host = _hosts(job.facts, {rank for one in job.collectives for rank in one.members})
    speeds: dict[tuple[object, ...], dict[str, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for one in job.collectives:
        if one.sent_bytes_per_s and one.bytes and one.group_size:
            alike = (*np.diff(one.members).tolist(), len({host[rank] for rank in one.members}))
            speeds[one.name, one.bytes, one.group_size, alike][one.group].append(one)
    found: dict[str, tuple[float, float, float, Collective]] = {}
    for groups in speeds.values():
        if len(groups) < 2:
            continue
        speed_of = {group: _speed(calls) for group, calls in groups.items()}
        usual = float(np.quantile(list(speed_of.values()), 0.5, method="higher"))
        least = _SLOW_LINK if len(groups) > 2 else _SLOW_LINK_OF_TWO
        for group, speed in speed_of.items():
            if speed < least * usual:
                lost = sum(one.wire_s for one in groups[group]) * (1 - speed / usual)
                lost += found[group][0] if group in found else 0.0
                found[group] = (lost, speed, usual, groups[group][0])
    exposed = {one.rank: one.seconds["transfer"] for one in job.partitions}
    findings = []
    for group, (lost, speed, usual, one) in found.items():
        cost = min(lost, max(exposed[rank] for rank in one.wait_s))
        unseen = sorted(set(one.members) - set(one.wait_s))
        missing = f"rank {ranks_text(unseen)} (without a trace) comes late, or " if unseen else ""
        told = {"speed": with_prefix(speed, "B/s"), "usual": with_prefix(usual, "B/s"), "missing": missing}
        text = _TEXTS["slow_link"].format(call=one, cost=duration(cost), frac=cost / job.span_s, **told)
        if cost >= _MIN_FRAC * job.span_s:
            kind = _UNCERTAIN_LINK if unseen else "slow link"
            findings.append(job.finding(kind, text, cost, sorted(one.wait_s), group))
    return findings


def _speed(calls: Sequence[Collective]) -> float:
    """Bytes a second that the median call sends."""
    return float(np.median([one.sent_bytes_per_s or 0.0 for one in calls]))


def _hosts(facts: Sequence[RankFacts], ranks: Iterable[int]) -> dict[int, str]:
    """The host of each of `ranks`; one without a trace is where the next lower one is."""
    if not any(one.host for one in facts):
        return {rank: str(rank // 8) for rank in ranks}
    traced = sorted((one.rank, one.host or str(one.rank // 8)) for one in facts)
    lower = {rank: bisect_right(traced, rank, key=lambda one: one[0]) for rank in ranks}
    return {rank: traced[max(at - 1, 0)][1] for rank, at in lower.items()}


def _host_bound(job: _TracedJob) -> list[Finding]:
    """Whether devices idle because hosts launch late, on average over the ranks."""
    bound = [one.host_bound_s for one in job.partitions if one.host_bound_s is not None]
    seconds, span_s = float(np.mean(bound)) if bound else 0.0, job.mean_s(*PARTS)
    if seconds < _HOST_BOUND_FRAC * span_s:
        return []
    text = _TEXTS["host_bound"].format(idle=duration(seconds), frac=seconds / span_s)
    return [job.finding("host bound", text, seconds, (one.rank for one in job.partitions))]


def _exposed(job: _TracedJob, *, named: bool) -> list[Finding]:
    """Communication that no compute hides, on average over the ranks: on the wire, and waiting.

    Where no rank is `named`, it says whom the others wait for longest.
    """
    wait, transfer, span_s = job.mean_s("wait"), job.mean_s("transfer"), job.mean_s(*PARTS)
    if wait + transfer < _EXPOSED_FRAC * span_s:
        return []
    frac = (wait + transfer) / span_s
    text = _TEXTS["exposed"].format(frac=frac, transfer=duration(transfer), wait=duration(wait))
    awaited = [row for row in stragglers(job.collectives) if row.awaited_s]
    if awaited and not named:
        most, num = max(awaited, key=lambda row: row.awaited_s), sum(row.num_last for row in awaited)
        text += f" (longest for rank {most.rank}, last in {most.num_last} of {num} calls)"
    return [job.finding("exposed communication", text, wait + transfer, (one.rank for one in job.partitions))]
