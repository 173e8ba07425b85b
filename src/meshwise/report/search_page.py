"""A search as a page: the space as a picture, the Pareto front of time and memory, the best of families."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from meshwise.core.units import duration, with_prefix
from meshwise.plan.plan import plan_text
from meshwise.report.chart import (
    COLORS,
    FRONT_COLOR,
    INK,
    Bound,
    Chart,
    ChartAxis,
    Mark,
    Names,
    Picture,
    Series,
)
from meshwise.report.html import Page, PageLink, Text
from meshwise.report.search_table import (
    answer_lines,
    how_many,
    of_versions,
    plans_table,
    why_none,
    why_slower,
)
from meshwise.report.table import Table
from meshwise.search.cloud import Sampled, cloud
from meshwise.search.search import Result


def search_page(
    result: Result, *, color: str = "tp", job: Mapping[str, str] | None = None, most: int = 2000
) -> Page:
    """What a search found; its picture has at most `most` plans of the space, colored by the key `color`.

    `job`: the state of the page in the browser, so that plans lead to it.
    """
    if not result.best:
        return Page("Search", why_none(result), [], ok=False)
    best = result.best[0]
    opened = dict(job or {}) | {"a.plan": plan_text(best.plan), "a.microbatch": str(best.workload.microbatch)}

    def link(text: str, microbatch: int) -> PageLink:
        return PageLink(text or "data parallel", "#explore?" + urlencode(_state(opened, text, microbatch)))

    title = f"{best.model.name} on {best.cluster.num_chips} x {best.cluster.chip.name}"
    headline = (
        f"{plan_text(best.plan) or 'data parallel'}, microbatch {best.workload.microbatch} is the fastest "
        f"of {result.plans_considered:,} plans: {duration(best.step_s)} a step, MFU {best.mfu:.1%}"
    )
    front = [
        (link(plan_text(found.plan), found.microbatch), found.microbatch, duration(found.step_s),
         with_prefix(found.memory_bytes, "B"))
        for found in result.pareto
    ]  # fmt: skip
    sample = cloud(best.model, best.cluster, best.workload, result.stated, result.to, most=most)
    space = _space(result, sample, color, link)
    against = [why_slower(found)] if (found := result.reasons) else []
    against += [of_versions(result.versions)] if result.versions else []
    return Page(
        title,
        headline,
        [
            Text("", list(answer_lines(result))),
            replace(plans_table(result, link), title="Fastest plan of each family"),
            space,
            *against,
            Table("Pareto front: less memory costs time", ("plan", "microbatch", "step", "memory"), front),
            Text("", how_many(result)),
        ],
    )


def _space(
    result: Result, sample: Sequence[Sampled], color: str, link: Callable[[str, int], PageLink]
) -> Chart:
    """Step time against memory: a sample of the space, colored by the key `color`, and the Pareto front."""
    by_value: dict[Any, list[Sampled]] = {}
    for one in sample:
        by_value.setdefault(one.values.get(color), []).append(one)
    values = sorted(by_value, key=lambda value: (isinstance(value, str), value is None, value))
    marks: list[Mark] = []
    for value, shade in zip(values, itertools.cycle(COLORS), strict=False):
        points = [
            (one.step_s, one.memory_bytes, one.plan_text, one.values["microbatch"]) for one in by_value[value]
        ]
        marks.append(_plans(f"{color}={value}", points, link, color=shade, line="", opacity=0.55))
    front = [(one.step_s, one.memory_bytes, plan_text(one.plan), one.microbatch) for one in result.pareto]
    marks.append(_plans("Pareto front", front, link, color=FRONT_COLOR))
    for (name, point), shade in zip(_marked(result), (INK, COLORS[3], COLORS[0]), strict=False):
        marks.append(_plans(name, [point], link, color=shade, **MARKED))
    named = front[:: max(len(front) // 8, 1)]
    texts = [f"{text or 'default plan'}, microbatch {microbatch}" for _, _, text, microbatch in named]
    marks += [
        Names([one[0] for one in named], [one[1] for one in named], texts, [INK] * len(named)),
        Bound(result.capacity_bytes, "y", line="dot"),
    ]
    finding = (
        f"{len(sample):,} plans drawn from {result.plans_considered:,}; those below the dotted line fit "
        f"({with_prefix(result.capacity_bytes, 'B')})."
    )
    axes = ChartAxis("step", "s", log=True), ChartAxis("memory of the fullest rank", "B", log=True)
    return Chart("The space: step time against memory", marks, *axes, finding, height=460)


MARKED: dict[str, Any] = {"line": "", "symbol": "circle-open", "size": 13}
"""How plans look that stand out."""


def _marked(result: Result) -> Iterator[tuple[str, tuple[float, float, str, int]]]:
    """The fastest plan, the fastest that a framework runs where it is another, and the one asked for."""
    runnable = result.runnable and result.runnable[0]
    named = {"fastest": result.best[0], "fastest that a framework runs": runnable, "asked for": result.beside}
    seen: list[tuple[str, int]] = []
    for name, found in named.items():
        if found is not None and (at := (plan_text(found.plan), found.workload.microbatch)) not in seen:
            seen.append(at)
            yield name, (found.step_s, found.memory_bytes["total"], *at)


def _plans(
    name: str, points: list[tuple[float, float, str, int]], link: Callable[[str, int], PageLink], **look: Any
) -> Series:
    look = {"size": 6} | look
    return Series(
        [point[0] for point in points], [point[1] for point in points], name,
        texts=[f"{text}, microbatch {microbatch}" for _, _, text, microbatch in points],
        links=[link(text, microbatch).href for _, _, text, microbatch in points], **look,
    )  # fmt: skip


def search_picture(result: Result) -> Picture:
    """The Pareto front of a search, each plan with its name."""
    front = _space(result, [], "", lambda text, _: PageLink(text, ""))
    finding = f"Less memory costs time; plans below the line fit ({with_prefix(result.capacity_bytes, 'B')})."
    return Picture([[replace(front, title="Pareto front of step time and memory", finding=finding)]])


def _state(job: Mapping[str, str], plan: str, microbatch: int) -> dict[str, str]:
    return {**job, "plan": plan, "microbatch": str(microbatch)}
