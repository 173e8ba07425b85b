"""A search as a page: the space as a picture, the Pareto front of time and memory, the best of families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from meshwise.core.units import duration, with_prefix
from meshwise.plan.plan import plan_text
from meshwise.report.html import COLORS, LIMIT_COLOR, Chart, Link, Page, Section, Text
from meshwise.report.search_table import change_text
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
        return Page("Search", _nothing(result), [], ok=False)
    best = result.best[0]
    opened = dict(job or {}) | {"a.plan": plan_text(best.plan), "a.microbatch": str(best.workload.microbatch)}

    def link(text: str, microbatch: int) -> Link:
        return Link(text or "data parallel", "#explore?" + urlencode(_state(opened, text, microbatch)))

    title = f"{best.model.name} on {best.cluster.num_chips} x {best.cluster.chip.name}"
    headline = (
        f"{plan_text(best.plan) or 'data parallel'}, microbatch {best.workload.microbatch} is the fastest "
        f"of {result.plans_considered:,} plans: {duration(best.step_s)} a step, MFU {best.mfu:.1%}"
    )
    families = [
        (
            link(plan_text(found.plan), found.workload.microbatch), found.workload.microbatch,
            duration(found.step_s), f"{found.step_s / best.step_s - 1:+.1%}", f"{found.mfu:.1%}",
            with_prefix(found.memory_bytes["total"], "B"), f"{num:,}",
        )
        for found, num in zip(result.best, result.num_variants, strict=True)
    ]  # fmt: skip
    columns = ("plan", "microbatch", "step", "slower", "MFU", "memory", "variants")
    front = [
        (link(plan_text(found.plan), found.microbatch), found.microbatch, duration(found.step_s),
         with_prefix(found.memory_bytes, "B"))
        for found in result.pareto
    ]  # fmt: skip
    sample = cloud(best.model, best.cluster, best.workload, result.stated, most=most)
    picture = _picture(result, sample, color, link)
    return Page(
        title,
        headline,
        [
            Table("Fastest plan of each family", columns, families),
            picture,
            Table("Pareto front: less memory costs time", ("plan", "microbatch", "step", "memory"), front),
            Text("", [f"{result.plans_feasible:,} plans fit; priced in {result.elapsed_s:.2f} s"]),
        ],
    )


def _nothing(result: Result) -> str:
    miss = result.nearest_miss
    if miss is None:
        return result.reason or "there is no plan"
    short = with_prefix(miss.memory_bytes - result.capacity_bytes, "B")
    nearest = f"no plan fits: {plan_text(miss.plan)} comes nearest and is {short} short"
    return "; ".join([nearest, *map(change_text, result.changes)])


def _picture(result: Result, sample: Sequence[Sampled], color: str, link: Any) -> Section:
    by_value: dict[Any, list[Sampled]] = {}
    for one in sample:
        by_value.setdefault(one.values.get(color), []).append(one)
    values = sorted(by_value, key=lambda value: (isinstance(value, str), value is None, value))
    data = [
        _marks(
            f"{color}={value}", [(one.step_s, one.memory_bytes, one.plan_text, one.values["microbatch"])
                                 for one in by_value[value]],
            link, marker={"color": COLORS[i % len(COLORS)], "size": 6, "opacity": 0.55},
        )
        for i, value in enumerate(values)
    ]  # fmt: skip
    front = [(one.step_s, one.memory_bytes, plan_text(one.plan), one.microbatch) for one in result.pareto]
    look = {"line": {"color": LIMIT_COLOR, "width": 2}, "marker": {"color": LIMIT_COLOR, "size": 8}}
    data.append(_marks("Pareto front", front, link, mode="lines+markers", **look))
    capacity = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": result.capacity_bytes}
    capacity |= {"y1": result.capacity_bytes, "line": {"color": LIMIT_COLOR, "dash": "dot"}}
    marks = {"tickformat": "~s", "dtick": "D2"}
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "title": {"text": "step [s]"}, **marks},
        "yaxis": {"type": "log", "title": {"text": "memory of the fullest rank [B]"}, **marks},
        "shapes": [capacity],
        "hovermode": "closest",
    }
    finding = (
        f"{len(sample):,} plans drawn from {result.plans_considered:,}; those below the dotted line fit "
        f"({with_prefix(result.capacity_bytes, 'B')})."
    )
    return Chart("The space: step time against memory", data, layout, finding, height=460)


def _marks(name: str, points: list[tuple[float, float, str, int]], link: Any, **look: Any) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [point[0] for point in points], "y": [point[1] for point in points],
        "text": [f"{point[2]}, microbatch {point[3]}" for point in points],
        "customdata": [link(point[2], point[3]).href for point in points],
        "hovertemplate": "%{text}<br>%{x:.3s}s, %{y:.3s}B<extra>%{fullData.name}</extra>",
    } | look  # fmt: skip


def _state(job: Mapping[str, str], plan: str, microbatch: int) -> dict[str, str]:
    return {**job, "plan": plan, "microbatch": str(microbatch)}
