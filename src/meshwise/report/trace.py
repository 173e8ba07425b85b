"""The traces of a job: in one sentence and as tables; as a page also ranks over time, memory and rates.

Below, the predicted step beside the measured one: a sentence, a bar for each class of work, ops that join.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from meshwise.core.units import duration, with_prefix
from meshwise.machine.hardware import Cluster
from meshwise.report import answer as plot
from meshwise.report.answer import Page, Section, Text
from meshwise.report.table import TABLES, WORDS, Table, bar, difference_text, records_table
from meshwise.trace.breakdown import PARTS
from meshwise.trace.collectives import ranks_text
from meshwise.trace.critical_path import CriticalPath, critical_path
from meshwise.trace.difference import StepChange, StepDifference
from meshwise.trace.explain import Explanation, OpDifference
from meshwise.trace.intervals import covered
from meshwise.trace.memory import MemoryPeak, memory_peaks, timeline
from meshwise.trace.operators import AcrossRanks, OperatorTotal, joint_sections
from meshwise.trace.rates import Bandwidth, OpRate, bandwidths, op_rates
from meshwise.trace.summary import Summary, all_sections

_lines = partial(records_table, no_wrap=True)
"""A table of long names, a line a row."""
NOTHING = "no rank, link or cause stands out"
_NUM_HOLDERS = 8
MANY_RANKS = 32
"""From more ranks on, those that stand out are shown and not all."""


def sentence(text: str) -> str:
    """A text that begins like a sentence."""
    return text[:1].upper() + text[1:]


def headline(summary: Summary) -> str:
    """The finding that costs most, in one sentence; where there is none, what may hide it."""
    texts = [NOTHING, *(one.text for one in summary.problems[:1])]
    return sentence(summary.findings[0].text if summary.findings else "; ".join(texts)) + "."


def parts(summary: Summary, *, limit: int = 15, everything: bool = False) -> Iterator[Section]:
    """The answer in a sentence, who waits for whom, where the time went, and what else was found."""
    yield headline(summary) + "\n"
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
        columns = TABLES["ranks"] | (TABLES["more of ranks"] if everything else {})
        yield _lines("Where the time of each rank went", summary.rank_rows(), columns)
    elif summary.outliers:
        yield _outliers(summary, limit)
    title = f"The {min(limit, len(summary.kernels))} longest kernels of {len(summary.kernels)}, all ranks"
    yield _lines(title, summary.kernels[:limit], TABLES["kernels"])
    if everything and len({step.number for step in summary.steps}) > 1:
        yield _steps(summary, limit)
    if everything and summary.collectives:
        yield _collectives(summary, limit)


def clocks_text(summary: Summary) -> str:
    """How the ranks' clocks were made one, in a sentence."""
    alignment = summary.alignment
    differ = "" if alignment.residual_s is None else f", ends then differ by {duration(alignment.residual_s)}"
    return f"Clocks: {alignment.method} ({alignment.num_collectives} collectives{differ})"


def _stragglers(summary: Summary, limit: int) -> Table:
    """Those that were awaited longest, all of them in the order of ranks."""
    found = summary.stragglers
    shown = sorted(found, key=lambda row: -row.awaited_s)[:limit] if len(found) > limit else found
    title = "Who waits for whom" if len(shown) == len(found) else f"The {len(shown)} most awaited ranks"
    return _lines(title, shown, TABLES["stragglers"])


def _outliers(summary: Summary, limit: int) -> Table:
    """What of many ranks stands out, and the median rank."""
    found = summary.outliers
    title = f"The {min(limit, len(found))} largest of {len(found)} differences of {len(summary.ranks)} ranks"
    return _lines(title, found[:limit], TABLES["outliers"], ranks_text=ranks_text)


def _steps(summary: Summary, limit: int) -> Table:
    """One row a step: the mean over the ranks."""
    numbers = sorted({step.number for step in summary.steps})
    rows = []
    for number in numbers[:limit]:
        same = [step for step in summary.steps if step.number == number]
        fields = [[getattr(one.breakdown, str(of)) for one in same] for of in TABLES["steps"].values()]
        kind = next((step.part for step in same if step.part != "whole"), "")
        rows.append((number, *(duration(sum(field) / len(same)) for field in fields), kind))
    title = f"The first {len(rows)} steps of {len(numbers)}, mean of the ranks"
    return Table(title, ("step", *TABLES["steps"], ""), rows, no_wrap=True)


def _collectives(summary: Summary, limit: int) -> Table:
    longest = sorted(summary.collectives, key=lambda c: -(c.wire_s + max(c.wait_s.values())))[:limit]
    title = f"The {len(longest)} longest collectives of {len(summary.collectives)}"
    return _lines(title, longest, TABLES["collectives"])


def joint_table(rows: Sequence[AcrossRanks], title: str, *, limit: int) -> Table:
    """Mean, largest and whose that is over the ranks, of each name and quantity."""
    return _lines(title, rows[:limit], TABLES["across ranks"])


def profile_table(rows: Sequence[OperatorTotal], title: str, *, sort_by: str, limit: int) -> Table:
    """PyTorch's table of one rank, the largest CPU (or device) total first.

    It has fourteen columns at most: none of a device that did nothing, nor of memory where no allocation was
    recorded. Percentages are of the sum of all self times.
    """
    cpu_s = sum(row.self_cpu_s for row in rows)
    device_s = sum(row.self_device_s for row in rows if row.kind in ("compute", "communication", "memory"))
    title += f": self CPU {duration(cpu_s)}, self CUDA {duration(device_s)}"

    known = {"their devices": device_s, "their memory": any(row.cpu_bytes for row in rows)}
    known |= {"their memory on devices": any(row.device_bytes for row in rows), "their calls": True}
    columns = dict(TABLES["operators"])
    for name, is_known in known.items():
        columns |= TABLES[name] if is_known else {}
    ordered = sorted(rows, key=lambda row: -(row.cpu_s if sort_by == "cpu" else row.device_s))
    return _lines(title, ordered[:limit], columns, cpu_s_in_all=cpu_s or 1.0, device_s_in_all=device_s)


def change_parts(old: Summary, new: Summary, found: StepDifference, limit: int) -> Iterator[Section]:
    """Who is late now, and the time of the mean rank before and after, by class of work and by kernel."""
    yield f"After: {headline(new)}"
    what, (before_s, after_s) = "a step" if any(found.num_steps) else "the whole capture", found.step_s
    sides = zip((old, new), found.num_steps, strict=True)
    before, after = (f"ranks: {len(of.ranks)}, steps: {num or 'not marked in both'}" for of, num in sides)
    times = f"{duration(after_s)} ({after}), {duration(before_s)} before ({before})"
    yield f"{sentence(what)} takes the mean rank {times}.\n"
    classes = [*found.classes, StepChange("in all", "", before_s, after_s, 1, 1, after_s - before_s)]
    for title, rows in (("Time", classes), ("Kernels", found.kernels[:limit])):
        yield _lines(f"{title} of {what}, the mean rank", rows, TABLES[f"changes of {title.lower()}"])


def path_table(found: CriticalPath, *, limit: int) -> Table:
    """What the path consists of."""
    title = f"The critical path through all ranks: {duration(found.span_s)}"
    return _lines(title, found.pieces[:limit], TABLES["critical path"])


def memory_tables(found: Sequence[MemoryPeak], *, limit: int) -> list[Table]:
    """The peaks of all ranks, and what was held at the largest."""
    most = max(found, key=lambda one: one.peak_bytes)
    title = f"Held at the largest peak (rank {most.rank}, {most.device})"
    peaks = _lines("Memory at its peak", found[:limit], TABLES["memory peaks"])
    return [peaks, _lines(title, most.holders[:_NUM_HOLDERS], TABLES["memory holders"])]


def rate_tables(found: Sequence[OpRate], *, limit: int) -> list[Table]:
    """What operators reach."""
    return [_lines("Operators of known work", found[:limit], TABLES["rates"], prefix="aten::")]


def bandwidth_tables(found: Sequence[Bandwidth], *, limit: int) -> list[Table]:
    """What collectives reach."""
    return [_lines("Collectives on the wire", found[:limit], TABLES["bandwidths"])]


# --- as a page -----------------------------------------------------------------------------------

PARTS_COLORS = dict(zip(PARTS, ("#3d7ab5", "#f0a13a", "#8e6bbf", "#d7503f", plot.IDLE_COLOR), strict=True))
_LATE = (-np.inf, -1e9, 0.02, 0.05, 0.1, 0.2, 0.5)
_LATE_COLORS: dict[str, str] = WORDS["lateness_colors"]
_MOST_LANES = 64
NUM_BINS = 1200
_NUM_FINDINGS = 3
MOST_ROWS = 30
MOST_POINTS = 2000
MOST_LINES = 16


def page(summary: Summary, cluster: Cluster | None = None) -> Page:
    """What the ranks of a job did, and why the slow one is slow; rates beside the peaks of `cluster`."""
    others = [one.text for one in summary.findings[1:]]
    sections: list[Section] = [Text("Findings", others)] if others else []
    sections += _over_time(summary) if summary.partitions else []
    if summary.has_all_ranks:
        sections.append(path_table(critical_path(summary), limit=MOST_ROWS))
    if joint := joint_sections(all_sections(summary)):
        sections.append(joint_table(joint, "Sections of all ranks", limit=MOST_ROWS))
    sections += _memory(summary)
    sections += _rates(summary, cluster)
    sections += summary_tables(summary, limit=MOST_ROWS)
    sections.append(Text("Notes", [clocks_text(summary), *(one.text for one in summary.problems)]))
    title, first = f"{len(summary.traces)} ranks", headline(summary)
    return Page(title, first, sections, bool(summary.traces))


def _over_time(summary: Summary) -> list[plot.Chart]:
    """All ranks over time; of many, how late each is in each step, and the worst over time."""
    if len(summary.partitions) <= MANY_RANKS:
        return [_ranks_over_time(summary)]
    return [*_late_in_steps(summary), _ranks_over_time(summary.of_ranks(summary.worst(MOST_LINES)))]


def _late_in_steps(summary: Summary) -> list[plot.Chart]:
    """A map of ranks against steps: by how much of a step each works longer than the median rank.

    Work is the span of a step but for exposed communication. A row of several ranks shows the latest.
    """
    ranks = [one.rank for one in summary.partitions]
    numbers = sorted({step.number for step in summary.steps})
    if len(numbers) < 2:
        return []
    row, column = ({one: i for i, one in enumerate(of)} for of in (ranks, numbers))
    work, span = np.full((2, len(ranks), len(numbers)), np.nan)
    for step in summary.steps:
        at, done = (row[step.breakdown.rank], column[step.number]), step.breakdown
        work[at], span[at] = done.span_s - done.exposed_communication_s, done.span_s
    usual = np.nanmedian(work, axis=0)
    late_frac = np.nan_to_num((work - usual) / np.nanmedian(span), nan=-np.inf)
    each = -(-len(ranks) // _MOST_LANES)
    first = np.arange(0, len(ranks), each)
    shown = np.digitize(np.maximum.reduceat(late_frac, first), _LATE) - 1
    names = _rank_names(summary, [ranks[i : i + each] for i in first.tolist()])
    most = np.unravel_index(int(late_frac.argmax()), late_frac.shape)
    longest = f"rank {ranks[most[0]]} works {late_frac[most]:.0%} of a step longer in step {numbers[most[1]]}"
    finding = f"Work beyond that of the median rank in the same step, as a share of a step; {longest}."
    lanes = plot.Lanes(shown, np.array(numbers, dtype=float), names, _LATE_COLORS)
    axis, height = plot.ChartAxis("step"), min(160 + 12 * len(names), 900)
    return [plot.Chart("Ranks against steps", [lanes], axis, finding=finding, height=height)]


def _ranks_over_time(summary: Summary) -> plot.Chart:
    """What fills most of each moment of each rank; the ranks that a finding names are marked."""
    done = [(one.spans, summary.alignment.offsets_ns[one.rank]) for one in summary.intervals()]
    parts = [(span, offset) for spans, offset in done for span in spans.values() if len(span[0])]
    bounds = [(starts[0] - offset, ends[-1] - offset) for (starts, ends), offset in parts]
    begin, end = min((b[0] for b in bounds), default=0), max((b[1] for b in bounds), default=1)
    edges = begin + np.linspace(0, end - begin, NUM_BINS + 1).astype(np.int64)
    grid = []
    for spans, offset in done:
        filled = np.array([np.diff(covered(spans[part], edges + offset)) for part in PARTS])
        grid.append(np.where(filled.sum(axis=0) > 0, filled.argmax(axis=0), -1))
    times = ((edges[1:] + edges[:-1]) / 2 - begin) / 1e9
    idle = {one.rank: one.seconds["idle"] for one in summary.partitions}
    most = max(idle, key=lambda rank: idle[rank])
    lanes = plot.Lanes(np.array(grid), times, _rank_names(summary), PARTS_COLORS)
    finding = f"Each moment shows what fills most of it; rank {most} is idle longest, {duration(idle[most])}."
    height = min(120 + 20 * len(lanes.names), 900)
    axis, title = plot.ChartAxis("on the common clock", "s"), "Ranks over time"
    return plot.Chart(title, [lanes], axis, finding=finding, height=height)


def _rank_names(summary: Summary, blocks: Sequence[Sequence[int]] = ()) -> list[str]:
    """The names of the ranks (or of blocks of them), with an arrow before those that a finding names."""
    ranks = [(one.rank,) for one in summary.partitions]
    named = {rank for one in summary.findings if len(one.ranks) < len(ranks) for rank in one.ranks}
    texts = ((of, f"rank {of[0]}" + f"-{of[-1]}" * (len(of) > 1)) for of in blocks or ranks)
    return ["▸ " * (not named.isdisjoint(of)) + text for of, text in texts]


def picture(summary: Summary) -> plot.Picture:
    """All ranks over time, and beside them how long each did what in sum, under the first findings.

    Of many ranks, how late each is in each step, and the worst over time.
    """
    lines = [one.text for one in summary.findings[:_NUM_FINDINGS]] or [NOTHING]
    title = "\n".join(map(sentence, lines))
    if len(summary.partitions) > MANY_RANKS:
        return plot.Picture([[chart] for chart in _over_time(summary)], title)
    lanes, parts = _ranks_over_time(summary), [one.seconds for one in summary.partitions]
    names, starts, bars = _rank_names(summary), np.zeros(len(parts)), []
    for part, color in PARTS_COLORS.items():
        seconds = np.array([of[part] for of in parts])
        bars.append(plot.Bars(names, seconds, [color] * len(parts), starts.copy()))
        starts += seconds
    sums = plot.Chart("In sum", bars, plot.ChartAxis("time", "s"), height=lanes.height)
    return plot.Picture([[lanes, sums]], title, (3.5, 1.0))


def _memory(summary: Summary) -> list[Section]:
    """The peaks, and the allocated bytes of each rank over time: of the device that holds most."""
    peaks = memory_peaks(summary.traces)
    if not peaks:
        return []
    most = max(peaks, key=lambda one: one.peak_bytes)
    offsets = summary.alignment.offsets_ns
    device = -1 if most.device == "host" else int(most.device.split()[1])
    lines = {trace.rank: timeline(trace, device) for trace in itertools.islice(summary.traces, MOST_LINES)}
    origin = min(int(time[0]) - offsets[rank] for rank, (time, _) in lines.items() if len(time))
    marks = [
        plot.Series(
            (time - offsets[rank] - origin)[:: 1 + len(time) // MOST_POINTS] / 1e9,
            total[:: 1 + len(time) // MOST_POINTS], f"rank {rank}", color, steps=True,
        )
        for (rank, (time, total)), color in zip(lines.items(), itertools.cycle(plot.COLORS), strict=False)
    ]  # fmt: skip
    peak = with_prefix(most.peak_bytes, "B")
    text = f"The largest peak, {peak}, is on rank {most.rank} in {most.operator}."
    axes = plot.ChartAxis("time", "s"), plot.ChartAxis("allocated", "B")
    return [plot.Chart("Memory over time", marks, *axes, text), *memory_tables(peaks, limit=MOST_ROWS)]


def _rates(summary: Summary, cluster: Cluster | None) -> list[Section]:
    """What operators and collectives reach, and the operators under the roof of the chip, if it is known."""
    sections: list[Section] = []
    chip = cluster.chip if cluster else None
    rates = op_rates(summary.traces, chip)
    points = [one for one in rates if one.flop]
    if points and chip:
        intensity = [one.flop / one.bytes for one in points]
        area = np.sqrt([one.total_s for one in points])
        operators = plot.Series(
            intensity, [one.flop_per_s for one in points], "operators", line="",
            size=6 + 20 * area / area.max(), texts=[f"{one.op} {one.shape} {one.dtype}" for one in points],
        )  # fmt: skip
        peaks = {
            f"{chip.name}, {dtype}": peak
            for dtype in dict.fromkeys(one.dtype for one in points)
            if (peak := chip.matrix_flop_per_s.get(dtype) or chip.vector_flop_per_s.get(dtype))
        }
        ends = min(intensity) / 2, max(intensity) * 2
        title, rate = "Matmuls and attention under the roofline", chip.memory_bytes_per_s
        text = "The larger a point, the longer all calls of the operator took."
        sections.append(replace(plot.roofline(title, [operators], peaks, rate, ends), finding=text))
    if rates:
        sections += rate_tables(rates, limit=MOST_ROWS)
    if wires := bandwidths(summary.collectives, cluster):
        sections += bandwidth_tables(wires, limit=MOST_ROWS)
    return sections


# --- the predicted step beside the measured one ---------------------------------------------------

_WIDEST = 20
"""Characters of the longest bar."""


def explain_parts(found: Explanation, *, limit: int = 15, everything: bool = False) -> Iterator[Section]:
    """What is wrong in a sentence, then measured = predicted + differences, the largest first."""
    above = len(found.mismatches) + 1
    *problems, first = (sentence(text) + "." for text in found.findings[:above])
    yield from (*problems, first + "\n")
    yield _by_class(found)
    if rows := [row for row in found.rows if row.module]:
        yield _lines("Its ops that join", rows if everything else rows[:limit], TABLES["joined ops"])
    yield from (sentence(text) + "." for text in found.findings[above:])


def explain_page(found: Explanation) -> Page:
    """Where the measured step differs from the predicted one, all of it."""
    headline, *sections = explain_parts(found, everything=True)
    return Page("Predicted against measured", str(headline).strip(), sections)


def _by_class(found: Explanation) -> Table | plot.Chart:
    """From the predicted step to the measured one, class by class; without a prediction what was measured."""
    title, name = "Time of a step", "class"
    if found.predicted_s is None:
        rows = [(row.op, duration(row.measured_s)) for row in found.classes]
        return Table(title, (name, "measured"), [*rows, ("step", duration(found.measured_s))], no_wrap=True)
    changes = [row.more_s for row in found.classes]
    most_s = max(map(abs, changes), default=0.0) or 1.0
    drawn = [f"{change:+.0f}"[0] + bar(abs(change) / most_s, _WIDEST) if change else "" for change in changes]
    classes = [(row.op, *_times(row), line) for row, line in zip(found.classes, drawn, strict=True)]
    columns = (name, "predicted", "measured", "difference", "longer or shorter")
    first = ("predicted step", duration(found.predicted_s), "", "", "")
    last = ("measured step", "", duration(found.measured_s), "", "")
    table = Table(title, columns, [first, *classes, last], left=(name, columns[-1]), no_wrap=True)
    colors = plot.LESS_COLOR, plot.MORE_COLOR
    bars = plot.Bars(
        ["predicted", *(row.op for row in found.classes), "measured"],
        [found.predicted_s, *changes, found.measured_s],
        [plot.SUM_COLOR, *(colors[change > 0] for change in changes), plot.SUM_COLOR],
        [0.0, *(found.predicted_s + sum(changes[:i]) for i in range(len(changes))), 0.0],
        texts=[duration(found.predicted_s), *map(difference_text, changes), duration(found.measured_s)],
    )
    finding = "Red classes take longer than predicted, green ones less; together they are the difference."
    title, height = "From the predicted step to the measured one", 60 + 26 * len(bars.names)
    axis = plot.ChartAxis("time of a step", "s")
    return plot.Chart(title, [bars], axis, finding=finding, table=table, height=height)


def _times(row: OpDifference) -> tuple[str, str, str]:
    return duration(row.predicted_s), duration(row.measured_s), difference_text(row.more_s)
