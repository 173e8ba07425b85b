"""What is wrong with a job, in words: who holds the others up and why, what link is slow, what is exposed.

Who holds the others up follows from the waiting (see `straggler`). What such a rank has more of than the
median of the others names the cause:

    compute     the same kernels, each slower: its device is slow. More kernels, or on inputs of other sizes:
                its share is larger
    idle        its host launches late (or pauses once)
    transfer    a link of its group is slow: the wire time of one kind of call, by group, at equal size
    memory      copies

A rank that was ready to run for as long as it was late, and had no core (`meshwise profile` notes it), is no
slow rank: the ranks share cores. All ranks together are judged by their mean: idle time that the host is the
cause of, and communication that no compute hides. Each finding states the seconds it is about and, as a
share, how much of the span.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import by_key
from meshwise.core.files import read_catalog
from meshwise.core.ledger import shape_text
from meshwise.core.units import duration, with_prefix
from meshwise.trace.breakdown import COMPILER, PARTS, Breakdown, Partition, breakdown, work
from meshwise.trace.collectives import Collective, ranks_named, ranks_text, stragglers
from meshwise.trace.events import Kind, Trace, class_of_kernel, inputs, is_shape
from meshwise.trace.operators import KernelTotal, kernels_of
from meshwise.trace.steps import PROFILER_STEP, Marks, RankStep, step_table
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
_UNDECIDED_FRAC = 0.05
_MOSTLY, _MOSTLY_INSIDE = 0.5, 0.8
_KINDS = {"idle": "idle", "transfer": "slow transfer", "memory": "copies"}
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
    first_ns: int | None
    """The start of its first event on its own clock."""
    captured: dict[str, Any]
    """What meshwise's capture noted of the rank; empty where something else captured it."""
    breakdown: Breakdown
    copied_bytes: int
    kernels: list[tuple[str, KernelTotal]]
    """With the sizes of their inputs as recorded; empty where they are not."""
    steps: list[RankStep]
    transfers: list[Transfer]


def rank_facts(trace: Trace, marked: Marks) -> RankFacts:
    """The facts of one rank, its steps as they are marked."""
    captured = trace.metadata.get("meshwise")
    copied_bytes = trace.size_bytes[work(trace).kind == Kind.MEMORY].clip(0).sum()
    return RankFacts(
        rank=trace.rank, path=str(trace.path), host=trace.host, world_size=trace.world_size,
        first_ns=int(trace.start_ns[0]) if len(trace) else None, breakdown=breakdown(trace),
        captured=captured if isinstance(captured, dict) else {}, copied_bytes=int(copied_bytes),
        kernels=list(kernels_of(trace)), steps=step_table(trace, marked), transfers=transfers(trace, marked),
    )  # fmt: skip


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

    def finding(self, kind: str, text: str, cost: float, of: Iterable[int] = (), group: str = "") -> Finding:
        """A finding about `cost` seconds of the span; of all ranks, of their mean span."""
        ranks, every = tuple(of), len(self.partitions)
        span_s = self.mean_s(*PARTS) if len(ranks) == every > 1 else self.span_s
        return Finding(kind, ranks, group, cost, cost / span_s, text)

    def mean_s(self, *parts: str) -> float:
        """Seconds of `parts` in sum, the mean over the ranks."""
        return float(np.mean([sum(one.seconds[part] for part in parts) for one in self.partitions]))

    @property
    def has_stages(self) -> bool:
        """Whether ranks send each other messages, as the stages of a pipeline do."""
        return any(one.name == "send_recv" for one in self.collectives)

    def cost_text(self, seconds: float) -> str:
        """What a cause costs; among stages at most, as their waiting by plan absorbs a part of it."""
        return "up to " * self.has_stages + duration(seconds)

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
    job = _TracedJob(facts, partitions, collectives, span_s)
    late, undecided = holders_up(collectives, first_step)
    links = list(_slow_links(job))
    linked = {rank for link in links for rank in link.ranks}
    unseen = {rank for one in job.collectives if one.num_ranks < (one.group_size or 0) for rank in one.wait_s}
    late = [one for one in late if len(one.ranks) == 1 or not linked.issuperset(one.ranks)]
    holders = [_holder(job, one) for one in late if one.seconds >= _MIN_FRAC * span_s]
    holders = [of for of in holders if of.kind != "slow transfer" or (linked | unseen).isdisjoint(of.ranks)]
    single = sorted([*holders, *links], key=lambda one: (one.kind == _UNCERTAIN_LINK, -one.seconds))
    is_told = bool(single or undecided)
    return [*(single or _undecided(job, undecided)), *_idle(job), *_exposed(job, named=is_told)]


def _undecided(job: _TracedJob, reason: str) -> list[Finding]:
    """That nobody is named although ranks wait: steps are too few, or messages do not tell their ends."""
    if reason and (waited_s := job.mean_s("wait")) >= _UNDECIDED_FRAC * job.span_s:
        rows = stragglers(job.collectives)
        most = max(rows, key=lambda row: row.awaited_s)
        frac = most.awaited_s / (sum(row.waited_s for row in rows) or 1.0)
        told = {"waited": duration(waited_s), "frac": frac, "reason": reason}
        text = _TEXTS["few_steps"].format(most=most, **told)
        return [job.finding("undecided", text, waited_s)]
    unnamed = any(one.name == "send_recv" and "->" not in one.group for one in job.collectives)
    exposed_s = job.mean_s("wait", "transfer")
    if len(job.partitions) < 2 or not unnamed or exposed_s < _EXPOSED_FRAC * job.span_s:
        return []
    text = _TEXTS["unnamed_ends"].format(exposed=duration(exposed_s))
    return [job.finding("undecided", text, exposed_s)]


def _holder(job: _TracedJob, late: LateRanks) -> Finding:
    """That these ranks are late, by how much, and why."""
    parts = {one.rank: one.seconds for one in job.partitions}
    slowest = sorted(late.ranks, key=lambda rank: parts[rank]["wait"] - sum(parts[rank].values()))
    if why := _shared_cores(job.facts, slowest[0], late):
        return job.finding("shared cores", why, late.seconds)
    kind, why = _causes(job, slowest)
    cost_s = min(late.seconds, job.span_s)
    told = {"who": f"rank {slowest[0]} is" if len(slowest) == 1 else f"ranks {ranks_text(late.ranks)} are"}
    told |= {"cost": job.cost_text(cost_s), "each": job.cost_text(min(late.each_s, late.step_s))}
    told |= {"start": duration(late.start_s), "step": duration(late.step_s), "why": why}
    told["at"] = f"step {late.steps[0]}, which" if late.steps else "the round that"
    told["unit"], several = ("step", "steps") if late.steps else ("round", _TEXTS["rounds"])
    told["which"] = f" ({ranks_text(late.steps)})" if late.steps and late.num_late < late.num_steps else ""
    if late.num_late == 1:
        is_why = job.more_s("idle", [*parts].index(slowest[0])) >= _MOSTLY * cost_s
        kind, told["why"] = "pause", f", {why}" if is_why else ""
    text = _TEXTS["pause" if kind == "pause" else "late"].format(
        late=late, units=several, frac=cost_s / job.span_s, **told
    )
    return job.finding(kind, text, cost_s, late.ranks)


def _causes(job: _TracedJob, ranks: Sequence[int]) -> tuple[str, str]:
    """The kinds of causes of late ranks, the slowest first, and what each has more of, in words."""
    place = {one.rank: i for i, one in enumerate(job.partitions)}
    found = by_key((kind, (rank, why)) for rank in ranks for kind, why in [_cause(job, place[rank])])
    if len(found) == 1:
        (kind, [(_, why), *_]), *_ = found.items()
        return kind, why + f"; most of all rank {ranks[0]}" * (len(ranks) > 1)
    of = (f"{ranks_named(sorted(rank for rank, _ in same))} {same[0][1]}" for same in found.values())
    return ", ".join(found), "; ".join(of)


def _cause(job: _TracedJob, i: int) -> tuple[str, str]:
    """What rank number `i` spends more time on than the median of the other ranks."""
    one = job.partitions[i]
    more_s = {part: job.more_s(part, i) for part in PARTS if part != "wait" and one.seconds[part]}
    part = max(more_s, key=lambda key: more_s[key])
    if part == "compute":
        return _why_compute(job.facts, i)
    is_host = part == "idle" and (one.host_bound_s or 0.0) > _MOSTLY * one.seconds["idle"]
    copied = np.array([(of.breakdown.memory_s, of.copied_bytes) for of in job.facts])
    longer, more = copied[i] / np.maximum(np.median(np.delete(copied, i, 0), axis=0), 1e-12)
    is_slow_copy = part == "memory" and 0 < more**2 < longer
    kind = "slow host" if is_host else "slow copies" if is_slow_copy else _KINDS[part]
    others = [of.idle_in_s for of in job.partitions if of is not one]
    beyond_s = {name: s - np.median([of.get(name, 0) for of in others]) for name, s in one.idle_in_s.items()}
    where = _inside(beyond_s, more_s[part]) or _CAUSES["usual"].get(kind, "")
    return kind, _CAUSES[kind].format(more=duration(more_s[part]), where=where, longer=longer, copied=more)


def _inside(idle_s: Mapping[str, float], seconds: float) -> str:
    """The sections in which most of `seconds` of idle time lies, steps first, then the outermost."""
    least_s = _MOSTLY_INSIDE * seconds
    most = sorted((not of.startswith(PROFILER_STEP), -s, of) for of, s in idle_s.items() if s >= least_s)
    return f", most of that in {', '.join(name for *_, name in most)}" if most else ""


def _why_compute(facts: Sequence[RankFacts], i: int) -> tuple[str, str]:
    """Whether rank number `i` computes more, on other inputs, or the same more slowly.

    Each name of a kernel is one of these, by how often it runs and on inputs of what sizes; what most of the
    time goes to that the median of the other ranks does not take is the cause.
    """
    runs = [[(dims, one) for dims, one in of.kernels if one.kind == "compute"] for of in facts]
    totals = [{(one.name, dims): (one.count, one.total_s) for dims, one in of} for of in runs]
    keys = sorted(set().union(*totals))
    names, of_name = np.unique([name for name, _ in keys], return_inverse=True)
    table = np.array([[total.get(key, (0, 0.0)) for key in keys] for total in totals]).transpose(0, 2, 1)
    sums = table @ np.eye(len(names))[of_name]
    (own, own_s), (usual, usual_s) = table[i], np.median(np.delete(table, i, 0), axis=0)
    (num, sum_s), (usual_num, usual_sum_s) = sums[i], np.median(np.delete(sums, i, 0), axis=0)
    is_more, more_s = num > 1.01 * usual_num, sum_s - usual_sum_s
    is_sized = all(any(dims for dims, _ in of) for of in runs)
    is_other = is_sized & ~is_more & (np.bincount(of_name, own > 1.01 * usual) > 0)
    is_other &= np.bincount(of_name, usual) > _MOSTLY * usual_num  # the others agree on their sizes
    most = max((is_more, is_other, ~is_more & ~is_other), key=lambda chosen: float(more_s[chosen].sum()))
    at = int(np.where(most, more_s, -np.inf).argmax())
    told = {"name": names[at], "more": duration(float(more_s[most].sum()))}
    if most is is_more:
        return "more work", _CAUSES["more work"].format(**told)
    if most is is_other:
        sizes = _other_sizes([dims for _, dims in keys], np.where(of_name == at, own_s - usual_s, 0.0))
        return "larger work", _CAUSES["other inputs"].format(sizes=sizes, **told)
    told["unknown"] = _CAUSES["unknown inputs"] * (not is_sized)
    is_large = most & (sum_s >= _MIN_FRAC * sum_s.sum()) & (usual_sum_s > 0)
    is_matmul = is_large & np.array([class_of_kernel(name) == "matmul" for name in names])
    for what, of in (("all kernels", is_large), ("matmuls", is_matmul)):  # a low clock leaves memory as it is
        ratios = sum_s[of] * usual_num[of] / num[of] / usual_sum_s[of]
        ratio = sum_s[of].sum() / (usual_sum_s[of].sum() or np.inf)
        is_most = more_s[of].sum() >= _MOSTLY * more_s[most].sum()
        if is_most and len(ratios) > 1 and ratios.min() > 1 + 0.5 * (ratio - 1):
            return "slow device", _CAUSES["slow device"].format(what=what, ratio=ratio, **told)
    return "larger work", _CAUSES["larger work"].format(**told)


def _other_sizes(dims: Sequence[str], more_s: NDArray[np.float64]) -> list[str]:
    """The sizes on which a rank spends most beyond the others, and which of theirs resemble these most."""
    own = dims[int(more_s.argmax())]
    theirs = [dims[at] for at in np.flatnonzero(more_s < 0).tolist()] or [own]
    like = max(theirs, key=lambda one: sum(map(str.__eq__, one.split(","), own.split(","))))
    return [", ".join(map(shape_text, filter(is_shape, filter(None, inputs(of))))) for of in (own, like)]


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
    if (own_s if late.num_late == 1 else (own_s - others_s) / _SHARED_CORES) < late.seconds:
        return ""
    told: dict[str, Any] = {"rank": rank, "ranks": len(noted), "cores": noted[rank]["num_cores"]}
    told |= {"late": duration(late.seconds), "own": duration(own_s), "others": duration(others_s)}
    return str(_TEXTS["shared_cores"].format(**told))


def _slow_links(job: _TracedJob) -> Iterator[Finding]:
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
        sent = {group: [one.sent_bytes_per_s or 0.0 for one in calls] for group, calls in groups.items()}
        speed_of = {group: float(np.median(of)) for group, of in sent.items()}
        usual = float(np.quantile(list(speed_of.values()), 0.5, method="higher"))
        least = _SLOW_LINK if len(groups) > 2 else _SLOW_LINK_OF_TWO
        for group, speed in speed_of.items():
            if speed < least * usual:
                exposed = [max(alone[2] for alone in one.alone_s.values()) for one in groups[group]]
                saved = [one.wire_s * (1 - speed / usual) for one in groups[group]]
                lost = sum(map(min, exposed, saved))
                lost += found[group][0] if group in found else 0.0
                found[group] = (lost, speed, usual, groups[group][0])
    for group, (cost, speed, usual, one) in found.items():
        unseen = sorted(set(one.members) - set(one.wait_s))
        missing = _TEXTS["unseen late"].format(ranks=ranks_named(unseen)) if unseen else ""
        told = {"speed": with_prefix(speed, "B/s"), "usual": with_prefix(usual, "B/s"), "missing": missing}
        text = _TEXTS["slow_link"].format(call=one, cost=job.cost_text(cost), frac=cost / job.span_s, **told)
        if cost >= _MIN_FRAC * job.span_s:
            kind = _UNCERTAIN_LINK if unseen else "slow link"
            yield job.finding(kind, text, cost, sorted(one.wait_s), group)


def _hosts(facts: Sequence[RankFacts], ranks: Iterable[int]) -> dict[int, str]:
    """The host of each of `ranks`; one without a trace is where the next lower one is."""
    if not any(one.host for one in facts):
        return {rank: str(rank // 8) for rank in ranks}
    traced = sorted((one.rank, one.host or str(one.rank // 8)) for one in facts)
    return {rank: traced[max(bisect_right(traced, rank, key=lambda one: one[0]) - 1, 0)][1] for rank in ranks}


def _idle(job: _TracedJob) -> Iterator[Finding]:
    """Whether the job idles as its programs are compiled, or as hosts launch late, on average."""
    num, span_s = len(job.partitions), job.mean_s(*PARTS)
    idle_in_s = sum((Counter(one.idle_in_s) for one in job.partitions), Counter[str]())
    bound = [one.host_bound_s for one in job.partitions if one.host_bound_s is not None]
    late_s = float(np.mean(bound)) if bound else 0.0
    why = _inside(idle_in_s, late_s * num) or _TEXTS["host bound advice"]
    for kind, cost_s, more in (("compiling", idle_in_s[COMPILER] / num, ""), ("host bound", late_s, why)):
        if cost_s >= _HOST_BOUND_FRAC * span_s:
            text = _TEXTS[kind].format(idle=duration(cost_s), frac=cost_s / span_s) + more
            yield job.finding(kind, text, cost_s, (one.rank for one in job.partitions))


def _exposed(job: _TracedJob, *, named: bool) -> list[Finding]:
    """Communication that no compute hides, on average over the ranks: on the wire, and waiting.

    Where no rank is `named`, or stages wait by plan, it says for whom the others wait.
    """
    wait, transfer, span_s = job.mean_s("wait"), job.mean_s("transfer"), job.mean_s(*PARTS)
    if wait + transfer < _EXPOSED_FRAC * span_s:
        return []
    traced, members = {one.rank for one in job.facts}, (one.members for one in job.collectives)
    unseen, rows, whom = sorted(set().union(*members) - traced), stragglers(job.collectives), ""
    is_whole = not unseen and len(traced) > 1
    if (job.has_stages or not named) and is_whole and wait >= _MIN_FRAC * span_s:
        most = max(rows, key=lambda row: row.awaited_s)
        frac = most.awaited_s / sum(row.waited_s for row in rows)
        turn = "awaited by plan" if job.has_stages else "awaited in turn"
        whom = _TEXTS["awaited" if frac >= _MOSTLY else turn].format(most=most, frac=frac)
    late_s = wait if is_whole else sum(row.awaited_s for row in rows) / len(traced)
    others = ranks_named(unseen) if unseen else "other ranks"
    told = {"wire": duration(wait + transfer - late_s), "wait": duration(late_s), "ranks": others}
    kind = "exposed" if is_whole else "exposed of some ranks" if late_s else "exposed of one rank"
    text = _TEXTS[kind].format(frac=(wait + transfer) / span_s, **told) + whom
    return [job.finding("exposed communication", text, wait + transfer, (one.rank for one in job.partitions))]
